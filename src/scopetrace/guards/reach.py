"""The functions that a forward may run, and the variables that these name.

Data flow:
    callable, classes of modules, hooks -> the code of functions -> names in it -> globals, closures, classes
    -> more functions, until there are none; not those of torch and of Python's library
    what the variables hold -> `Contents`, so that it can be compared and put back after the forward

This finds more functions than run. It says what is copied before the forward; what a call is checked for comes from the
functions that ran (`guards.variables`).
"""

from __future__ import annotations

import collections
import dis
import functools
import operator
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from scopetrace.containers.contents import MEMO, Place, content_of, is_library, is_users_class
from scopetrace.containers.structure import weak_cache


class Names(NamedTuple):
    """What the code of a function, and of the functions inside it, names."""

    all: frozenset[str]
    """Its globals and attributes, and texts that may be names of attributes for `getattr`."""
    globals: frozenset[str]
    """The globals that it reads."""
    bound: frozenset[str]
    """The globals that it binds or deletes."""
    dotted: frozenset[tuple[str, str]]
    """The attributes that it reads of globals: `("config", "SCALE")`."""
    compares_objects: bool
    """Whether it asks for identity: `x is y`, but not `x is None`."""
    compares_bools: bool
    """Whether it has `x is True` or `x is False`."""


@weak_cache
def names_of(code: types.CodeType) -> Names:
    """The names in a function's code: as `dis.get_instructions` says, which would take as long as a small trace."""
    reads, binds, dotted, compares, is_bool = set[str](), set[str](), set[tuple[str, str]](), set[bool](), False
    raw, extended, before, last = code.co_code, 0, 0, ""
    for i in range(0, len(raw), 2):
        op, operand = raw[i], raw[i + 1] | extended
        extended = operand << 8 if op == dis.EXTENDED_ARG else 0
        if op in (0, dis.EXTENDED_ARG):  # 0: room for the interpreter
            continue
        if op == _LOAD_GLOBAL:
            reads.add(code.co_names[operand >> 1])  # the lowest bit is a flag
        elif op in _LOAD_ATTRIBUTE and last.isidentifier():
            dotted.add((last, code.co_names[operand >> _ATTRIBUTE_FLAG]))
        elif op in _BIND_GLOBAL:
            binds.add(code.co_names[operand])
        elif op == _IS:
            compares.update([False] if before not in _CONSTANTS else [True] if is_bool else ())
        elif op == _LOAD_CONST:
            is_bool = type(code.co_consts[operand]) is bool
        last = code.co_names[operand >> 1] if op == _LOAD_GLOBAL else ""
        before = op
    texts = [c for c in code.co_consts if type(c) is str] if _ASKING.intersection(code.co_names) else []
    if _MATCH_CLASS in raw[::2]:  # `case Settings(size=n)`
        texts += [c for names in code.co_consts if type(names) is tuple for c in names if type(c) is str]
    names = {*code.co_names, *(part for text in texts for part in text.split(".") if part.isidentifier())}
    inner = [names_of(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return Names(
        frozenset(names).union(*(n.all for n in inner)),
        frozenset(filter(str.isidentifier, reads)).union(*(n.globals for n in inner)),  # pytest adds `@pytest_ar`
        frozenset(binds).union(*(n.bound for n in inner)),
        frozenset(dotted).union(*(n.dotted for n in inner)),
        False in compares or "id" in reads or any(n.compares_objects for n in inner),
        True in compares or any(n.compares_bools for n in inner),
    )


_ASKING = frozenset({"getattr", "hasattr", "setattr", "attrgetter", "methodcaller", "__getattribute__"})
_MATCH_CLASS = dis.opmap["MATCH_CLASS"]
_IS, _LOAD_GLOBAL, _LOAD_CONST = dis.opmap["IS_OP"], dis.opmap["LOAD_GLOBAL"], dis.opmap["LOAD_CONST"]
_CONSTANTS = frozenset(code for name, code in dis.opmap.items() if "CONST" in name or "SMALL_INT" in name)
_LOAD_ATTRIBUTE = frozenset(dis.opmap[name] for name in ("LOAD_ATTR", "LOAD_METHOD") if name in dis.opmap)
_ATTRIBUTE_FLAG = 1 if sys.version_info >= (3, 12) else 0
_BIND_GLOBAL = (dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"])
Visit = Callable[..., None]


class Reach:
    """Follows names from functions and classes.

    `visit` gets each object that a variable holds: its name, the object, None, and the place that holds it.
    """

    def __init__(self, visit: Visit) -> None:
        self._visit = visit
        self.functions: dict[types.CodeType, types.FunctionType] = {}
        """By code, the functions that may run."""
        self.variables: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        """The globals that they name: the table and the name."""
        self.cells: dict[int, tuple[str, types.CellType]] = {}
        """By id, the variables of enclosing functions, with their names."""
        self.classes: dict[type, None] = {}
        """The users' classes whose attributes they may write to."""
        self.names: set[str] = set()
        """What they name."""
        self._unnamed: dict[str, list[tuple[Any, int]]] = {}
        """By name, the methods of the classes that no function has named so far."""
        self._pending: dict[int, list[types.FunctionType]] = collections.defaultdict(list)
        """The functions that are to be followed, by how far from the forward they are named."""

    def follow(self) -> int | None:
        """Follow the functions that are nearest to the forward. How far what they name is from it; None for no more."""
        depth = min(self._pending, default=_NEVER)
        if depth == _NEVER:
            return None
        for function in self._pending.pop(depth):
            self._follow(function, depth + 1)
        return depth + 1

    def function_of(self, code: types.CodeType) -> types.FunctionType | None:
        """The function that has run some code, as far as it is known; a method may have a computed name."""
        unnamed = (unwrapped(function) for function, _ in self._unnamed.get(code.co_name, ()))
        return self.functions.get(code) or next((f for f in unnamed if getattr(f, "__code__", None) is code), None)

    def add_held(self, x: Any, depth: int) -> None:
        """A function or class that a container holds."""
        self.add(x, _never_if_far(depth))

    def add(self, x: Any, depth: int = 0) -> None:
        """A function, method, partial or class that is named; nothing is done for other objects."""
        while isinstance(x, functools.partial):
            self._visit("partial", (*x.args, *x.keywords.values()))
            x = x.func
        x = getattr(x, "__func__", x) if isinstance(x, (types.MethodType, staticmethod, classmethod)) else x
        if isinstance(x, MEMO):
            self._visit("a memo", x)
        if isinstance(x, property):
            for accessor in (x.fget, x.fset):
                self.add(accessor, depth)
        elif isinstance(x, type):
            self.add_class(x, depth)
        elif isinstance(x, operator.attrgetter):  # code that names attributes in C
            self._name(names_by(x))
        elif isinstance(inner := unwrapped(x), types.FunctionType):
            self._add_function(inner, depth)
        elif inner is not x:  # a module under torch.compile
            self._visit(getattr(x, "__name__", type(x).__name__), inner)

    def add_class(self, kind: type, depth: int = 0) -> None:
        """The methods of a class that some function names, and special ones, as operators."""
        depth = _never_if_far(depth)
        for base in kind.__mro__:
            if base in self.classes or not is_users_class(base):
                continue
            self.classes[base] = None
            for name, member in vars(base).items():
                functions, is_special = functions_of(member), name[:2] == "__"
                for function in functions:
                    if is_special or name in self.names or name == "forward":
                        self.add(function, depth)
                    else:
                        self._unnamed.setdefault(name, []).append((function, depth))
                if not (functions or is_special or callable(member) or hasattr(type(member), "__get__")):
                    self._visit(f"{base.__name__}.{name}", member, None, Place(base, name))

    def _name(self, names: set[str] | frozenset[str]) -> None:
        new = names - self.names
        self.names |= new
        for name in new & self._unnamed.keys():
            for function, depth in self._unnamed.pop(name, ()):
                self.add(function, depth)

    def _add_function(self, function: types.FunctionType, depth: int) -> None:
        if function.__code__ not in self.functions and not is_library(home_of(function)):
            self.functions[function.__code__] = function
            self._pending[depth].append(function)

    def _follow(self, function: types.FunctionType, depth: int) -> None:
        code, table = function.__code__, function.__globals__
        names = names_of(code)
        self._name(names.all)
        for name in names.bound | (names.globals & table.keys()):
            if (id(table), name) not in self.variables:
                self.variables[id(table), name] = table, name
                if name in table:
                    self._look_at(name, table[name], depth, Place(table, name))
        for name, attribute in names.dotted:
            module = table.get(name)
            if isinstance(module, types.ModuleType) and not is_library(module.__name__):
                namespace = vars(module)
                if attribute in namespace and (id(namespace), attribute) not in self.variables:
                    self.variables[id(namespace), attribute] = namespace, attribute
                    value, place = namespace[attribute], Place(namespace, attribute)
                    self._look_at(f"{module.__name__}.{attribute}", value, depth, place)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            if id(cell) not in self.cells:
                self.cells[id(cell)] = name, cell
                self._look_at(name, content_of(cell), depth, Place(cell, "cell_contents"))
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._look_at(f"a default argument of {function.__name__}", default, depth)

    def _look_at(self, name: str, value: Any, depth: int, place: Place | None = None) -> None:
        """Follow what a variable holds."""
        if isinstance(value, (types.FunctionType, MEMO, functools.partial, types.MethodType, type)):
            self.add(value, depth)
        elif not isinstance(value, types.ModuleType):
            self._visit(name, value, None, place)


_DEPTH = 2
"""How far from the forward methods of classes, and functions in containers, are followed. Functions that are named
themselves are followed at any distance."""
_NEVER = sys.maxsize
"""The distance of functions that are known, and not followed."""


def _never_if_far(depth: int) -> int:
    return depth if depth <= _DEPTH else _NEVER


def names_by(getter: operator.attrgetter[Any]) -> set[str]:
    """The attributes that one asks for."""
    return {name for path in getter.__reduce__()[1] for name in path.split(".")}


def unwrapped(function: Any) -> Any:
    """The function of users behind a wrapper of a library, as of `contextlib.contextmanager` and `functools.cache`."""
    while hasattr(function, "__wrapped__") and (isinstance(function, MEMO) or is_library(home_of(function))):
        function = function.__wrapped__
    return function


def home_of(x: Any) -> str:
    """The Python module that `x` is, or whose code a function runs: `functools.wraps` gives it the name of another."""
    return x.__name__ if isinstance(x, types.ModuleType) else str(getattr(x, "__globals__", {}).get("__name__", ""))


def functions_of(member: Any) -> Sequence[Any]:
    """The functions, and those under `functools.cache`, that an entry of a class stands for."""
    if type(member) is types.FunctionType:
        return (member,)
    member = getattr(member, "__func__", member)
    accessors = (member.fget, member.fset) if isinstance(member, property) else (getattr(member, "func", member),)
    return [f for f in accessors if isinstance(f, (types.FunctionType, MEMO))]
