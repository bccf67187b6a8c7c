"""The functions that code leads to by names, and the variables that these name.

Data flow:
    functions, classes, objects -> the code of functions -> names in it -> globals, closures, classes
    -> more functions, until there are none; not those of torch and of Python's library
    what the variables hold -> `visit`, which says what functions, classes and objects are in it
    before a forward: from the callable, by all names -> what is copied, to be compared and put back after it
    after it: from the functions that ran, some steps far -> what a call is checked for
"""

from __future__ import annotations

import collections
import dis
import functools
import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple

from scopetrace.containers.contents import MEMO, Place, is_library, is_users_class
from scopetrace.containers.structure import weak_cache


class Names(NamedTuple):
    """What the code of a function, and of the functions inside it, names."""

    all: frozenset[str]
    """Its globals and attributes, and texts that may be names of attributes for `getattr`."""
    globals: tuple[str, ...]
    """The globals that it reads."""
    bound: tuple[str, ...]
    """The globals that it binds or deletes."""
    dotted: tuple[tuple[str, str], ...]
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
        # pytest adds `@pytest_ar`
        tuple(sorted(set(filter(str.isidentifier, reads)).union(*(n.globals for n in inner)))),
        tuple(sorted(binds.union(*(n.bound for n in inner)))),
        tuple(sorted(dotted.union(*(n.dotted for n in inner)))),
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


DEPTH = 2
"""How far from the first functions methods of classes, and functions in containers, are followed. Functions that are
named themselves are followed at any distance."""
_CLASS_OF = frozenset({"type", "__class__"})
"""What gives the class of an object, of which code may make another one."""
_NEVER = sys.maxsize
"""The distance of functions that are known, and not followed."""


class Reach:
    """Follows names from functions and classes.

    `visit` gets each object that a variable holds: its name, the object, None, and the place that holds it.
    """

    def __init__(self, visit: Callable[..., None], names: Iterable[str] = (), depth: int = _NEVER) -> None:
        """`names` are those of methods that may run, whatever code names.

        `depth` is how far from the first functions those are that may name methods.
        """
        self._visit, self._depth = visit, depth
        self.functions: dict[int, types.FunctionType] = {}
        """By id, all that are known."""
        self.followed: dict[int, types.FunctionType] = {}
        """By id, those that may run."""
        self.variables: dict[tuple[int, Any], tuple[str, Place, types.FunctionType]] = {}
        """By place, the globals, attributes of Python modules and functions, and variables around functions that they
        name: as in source, `config.SCALE`, where it is, and the first function that names it."""
        self.classes: dict[type, bool] = {}
        """The classes that they may use; whether code names one, and may make one, rather than to have one."""
        self.names = {*names}
        """What they name."""
        self.by_getters: set[str] = set()
        """Those of the names that are in an `operator.attrgetter`."""
        self.bases: dict[type, bool] = {}
        """As `classes`, with those that they inherit from."""
        self._unnamed: dict[str, list[tuple[Any, int]]] = {}
        """By name, the methods of the classes that no function has named so far."""
        self._makes_any = False
        """Whether code asks an object for its class, and may make another one, as by `type(x)()`."""
        self._pending: dict[int, list[types.FunctionType]] = collections.defaultdict(list)
        """The functions that are to be followed, by how far from the first ones they are named."""

    def follow(self, held: Callable[[], Sequence[Any]], depth: int = 0) -> None:
        """Follow all functions, the nearest first.

        `held` gives what `visit` has come by since it was asked before: functions, classes and objects in containers;
        at first those that are at `depth`.
        """
        while True:
            while items := held():
                for x in items:
                    self.add(x, _never_if_far(depth))
            if not self._pending:
                return
            depth = min(self._pending)
            for function in self._pending.pop(depth):
                self.look_into(function, depth + 1)
            depth += 1

    def by_code(self) -> dict[int, types.FunctionType]:
        """By id of code that is known, a function that has it; a method may have a computed name."""
        unnamed = [unwrapped(function) for methods in self._unnamed.values() for function, _ in methods]
        known = (*unnamed, *reversed(self.functions.values()))
        return {id(f.__code__): f for f in known if isinstance(f, types.FunctionType)}

    def add(self, x: Any, depth: int = 0, name: str = "") -> None:
        """A function, method, partial or class that is named; of another object, its class."""
        kind = type(x)  # isinstance may call a `__getattr__` of users
        if issubclass(kind, functools.partial):
            arguments = itertools.chain(_parameters_of(x.func), map("args[{}]".format, itertools.count()))
            for parameter, value in (*zip(arguments, x.args, strict=False), *x.keywords.items(), ("func", x.func)):
                self._visit(parameter, value)
            self.add(x.func, depth, "func")
        elif issubclass(kind, types.MethodType):
            self._visit(f"{name or getattr(x.__func__, '__name__', 'method')}.__self__", x.__self__)
            self.add(x.__func__, depth)
        elif issubclass(kind, type):
            self.add_class(x, depth)
        elif kind is operator.attrgetter:  # code that names attributes in C
            names = {name for path in x.__reduce__()[1] for name in path.split(".")}
            self.by_getters |= names
            self._name(names, depth)
        elif kind not in (types.FunctionType, MEMO):
            self.add_class(kind, depth, is_named=False)
        else:
            if kind is MEMO:
                self._visit("a memo", x)
            if isinstance(inner := unwrapped(x), types.FunctionType):
                self._add_function(inner, depth)
            elif inner is not x:  # a module under torch.compile, a partial under `functools.cache`
                self._visit(getattr(x, "__name__", name), inner)

    def add_class(self, kind: type, depth: int = 0, *, is_named: bool = True) -> None:
        """The methods of a class that some function names, and special ones, as operators.

        Those of all attributes, as `__init__`, where code names the class.
        """
        depth, is_named = _never_if_far(depth), is_named or self._makes_any
        if self.classes.get(kind, -1) >= is_named or (depth == _NEVER and not is_named):
            return
        self.classes[kind] = is_named
        for base in kind.__mro__:
            if self.bases.get(base, -1) >= is_named or not is_users_class(base):
                continue
            self.bases[base] = is_named
            for name, member in vars(base).items():
                functions, is_special = functions_of(member), name[:2] == "__" and name not in _AT_DEFINITION
                for function in functions:
                    if is_named if name in OF_ALL_ATTRIBUTES else is_special or name in self.names:
                        self.add(function, depth)
                    else:
                        self._unnamed.setdefault(name, []).append((function, depth))
                if not (functions or name[:2] == "__" or hasattr(type(member), "__get__")):
                    self._visit(f"{base.__name__}.{name}", member, None, Place(base, name))

    def _name(self, names: Set[str], depth: int) -> None:
        if depth > self._depth:
            return
        new = names - self.names
        self.names |= new
        if self._depth == _NEVER and depth <= DEPTH and not _CLASS_OF.isdisjoint(new):
            self._makes_any = True
            for kind in [*self.classes]:
                self.add_class(kind, depth)
        for name in (new - OF_ALL_ATTRIBUTES) & self._unnamed.keys():
            for function, of_class in self._unnamed.pop(name, ()):
                self.add(function, max(of_class, depth))

    def _add_function(self, function: types.FunctionType, depth: int) -> None:
        if id(function) in self.followed or is_library(home_of(function)):
            return
        self.functions[id(function)] = function
        if depth != _NEVER:
            self.followed[id(function)] = function
            self._pending[depth].append(function)

    def look_into(self, function: types.FunctionType, depth: int) -> None:
        """Look at the globals that a function names, attributes of Python modules and functions, and its variables."""
        code, table = function.__code__, function.__globals__
        names = names_of(code)
        self._name(names.all, depth)
        present = [name for name in names.globals if name in table]
        variables = [(name, Place(table, name)) for name in (*names.bound, *present)]
        for name, attribute in names.dotted:
            owner = table.get(name)
            if isinstance(owner, (types.ModuleType, types.FunctionType)) and not is_library(home_of(owner)):
                variables += [(f"{name}.{attribute}", Place(vars(owner), attribute))] * (attribute in vars(owner))
        cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
        variables += [(name, Place(cell, "cell_contents")) for name, cell in cells]
        for name, place in variables:
            if place.id not in self.variables:
                self.variables[place.id] = name, place, function
                self._look_at(name, place.current(), depth, place)
        defaults = zip(reversed(_parameters_of(function)), reversed(function.__defaults__ or ()), strict=False)
        for name, default in (*defaults, *(function.__kwdefaults__ or {}).items()):
            self._look_at(name, default, depth)

    def _look_at(self, name: str, value: Any, depth: int, place: Place | None = None) -> None:
        if isinstance(value, (types.FunctionType, MEMO, functools.partial, types.MethodType, type)):
            self.add(value, depth, name)
        elif not isinstance(value, types.ModuleType):
            self._visit(name, value, None, place)


OF_ALL_ATTRIBUTES = frozenset({"__init__", "__repr__", "__str__", "__eq__", "__hash__", "__reduce__", "__getstate__"})
"""Methods that name all attributes of an object, and seldom run on one that was there."""
_AT_DEFINITION = frozenset({"__init_subclass__", "__set_name__", "__class_getitem__"})
"""Methods that run where a class is defined or named in an annotation, and in no forward."""


def _never_if_far(depth: int) -> int:
    return depth if depth <= DEPTH else _NEVER


def _parameters_of(function: Any) -> tuple[str, ...]:
    """The names of positional parameters; none of a method, or of what is not written in Python."""
    is_function = isinstance(function, types.FunctionType)
    return function.__code__.co_varnames[: function.__code__.co_argcount] if is_function else ()


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
