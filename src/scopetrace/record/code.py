"""What the code of a forward says before it runs: the functions that it may run, and where they read and write a name.

Data flow:
    the traced callable, its modules' classes and hooks -> their code -> names in it
    a name, looked up in globals, closures, classes -> more functions, until there are none
    what names lead to that is no function -> objects, tables and cells that the forward may write to
    callable, calls and ops of the tape, values that were read -> the functions that ran, or may have
    the names in their code -> globals, variables of enclosing functions, attributes of classes -> a Read each
    the functions themselves -> where a class has them, and their default arguments -> a Read each

`Reach` follows names, not calls: it finds more functions than run. A method of a class of no installed library may also
be found by a computed name, as in `getattr(self, f"run_{kind}")()`: all of that class are followed then.
Functions of torch and of the standard library are not followed.
"""

from __future__ import annotations

import abc
import dis
import enum
import functools
import itertools
import operator
import re
import sys
import types
import weakref
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import torch

from scopetrace._compat.graph_module import LazyGraphModule
from scopetrace._compat.questions import hooks_of_all_modules
from scopetrace._compat.sources import NOT_THE_MODEL, PACKAGES, is_of_python
from scopetrace.ir.reads import MISSING, NO_CALL, InClosure, InSlot, InTable, OfFunctions, Read, content_of, snapshot
from scopetrace.ir.tape import Tape, recorded

_OPERATORS = frozenset(
    {
        *("forward", "__call__", "__enter__", "__exit__", "__getattr__", "__get__", "__set__"),
        *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__next__", "__len__"),
    }
)
"""Methods that run without being named, and forward."""

_MORE_OPERATORS = re.findall(
    r"\w+",
    "missing bool int float index hash eq ne lt le gt ge neg pos abs invert add radd iadd sub rsub isub mul rmul imul "
    "truediv rtruediv itruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul and rand or ror xor rxor",
)
_OF_OBJECTS = _OPERATORS | {f"__{name}__" for name in _MORE_OPERATORS}
"""Those of classes of no installed library, where arithmetic may read anything too."""

_OF_NAMED_CLASSES = _OF_OBJECTS - {"forward"} | {"__new__", "__init__", "__post_init__"}
"""Those of a class that a function names, since it may make objects of it."""

_OF_AUTOGRAD = frozenset({"forward", "backward", "setup_context"})
"""Those that `apply` runs of a `torch.autograd.Function`."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The tables of a module that have its hooks."""

_LIBRARIES = frozenset(sys.stdlib_module_names) - {"types"} | {"torch", "torchgen", "sympy", "numpy", "scopetrace"}


@functools.cache
def is_users(filename: str) -> bool:
    """Whether a file is neither torch's nor the standard library's."""
    return not filename.startswith(NOT_THE_MODEL) and not is_of_python(filename)


def is_users_class(kind: Any) -> bool:
    """Whether a class was made neither by torch nor by the standard library."""
    return str(kind.__module__).partition(".")[0] not in _LIBRARIES


ATOMS = frozenset(
    {bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, range, type(...)}
)
"""The classes of values that have no content and run no code."""

TOLD_BY_TEXT = frozenset({float, complex, range})
"""Those of them of which equal values may differ, but not in their text: 0.0 and -0.0, range(0) and range(1, 1)."""


def methods_of(cls: type) -> frozenset[str]:
    """`forward`, and the methods that users gave a class of modules."""
    users = [vars(base) for base in cls.__mro__ if is_users_class(base)]
    return frozenset(k for own in users for k, x in own.items() if type(x) is types.FunctionType) | {"forward"}


class Names(NamedTuple):
    """What the code of a function, and of the functions inside it, names."""

    asked: frozenset[str]
    """The attributes that it may ask for by `getattr` or `hasattr`."""
    all: frozenset[str]
    """Its globals and attributes."""
    globals: frozenset[str]
    """The globals that it reads; `id` also for `x is y`."""
    bound_globals: frozenset[str]
    """The globals that it binds or deletes."""
    bound_attributes: frozenset[str]
    """The attributes that it binds or deletes."""


_names: dict[int, tuple[Names, weakref.ref[types.CodeType]]] = {}  # a cache by id; an entry goes with its code


def names_of(code: types.CodeType) -> Names:
    """The names in a function's code."""
    known = _names.get(id(code))
    if known is None:
        key = id(code)
        known = _names[key] = _read_names(code), weakref.ref(code, lambda _: _names.pop(key, None))
    return known[0]


def _read_names(code: types.CodeType) -> Names:
    """As `dis.get_instructions` says, which would take as long as the trace of a small model."""
    reads, binds, attributes = set[str](), set[str](), set[str]()
    raw, extended, before, is_bool = code.co_code, 0, 0, False
    for i in range(0, len(raw), 2):
        operand = raw[i + 1] | extended
        extended = operand << 8 if raw[i] == dis.EXTENDED_ARG else 0
        if raw[i] == _LOAD_GLOBAL:
            reads.add(code.co_names[operand >> 1])  # the lowest bit is a flag
        elif raw[i] in _BIND_GLOBAL:
            binds.add(code.co_names[operand])
        elif raw[i] in _BIND_ATTRIBUTE:
            attributes.add(code.co_names[operand])
        elif raw[i] == _IS:  # x is y, but not x is None
            reads.update({"id"} if before not in _CONSTANTS else {IS_BOOL} if is_bool else ())
        elif raw[i] == _LOAD_CONST:
            is_bool = type(code.co_consts[operand]) is bool
        before = raw[i] or before  # 0: room for the interpreter
    if not reads.isdisjoint(_BY_TEXT):
        words = {word for c in code.co_consts if isinstance(c, str) for word in re.findall(r"\w+", c)}
        binds |= words
        reads |= words
    asks = not _ASKING.isdisjoint(code.co_names)
    texts = [c for c in code.co_consts if asks and isinstance(c, str)]
    strings = frozenset(name for text in texts for name in text.split(".") if name.isidentifier())
    own = Names(strings, frozenset(code.co_names) | reads, frozenset(reads), frozenset(binds), frozenset(attributes))
    inner = [names_of(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return Names(*(one.union(*others) for one, *others in zip(own, *inner, strict=True))) if inner else own


def asks_by_computed_name(code: types.CodeType) -> bool:
    """Whether code, or that of a function inside it, may call `getattr` with a name that is no text in it."""
    if any(isinstance(c, types.CodeType) and asks_by_computed_name(c) for c in code.co_consts):
        return True
    steps = list(dis.get_instructions(code)) if "getattr" in code.co_names else []
    starts = (i for i, step in enumerate(steps) if step.opname == "LOAD_GLOBAL" and step.argval == "getattr")
    return not all(_has_fixed_name(steps[start + 1 :]) for start in starts)


def imports_of(code: types.CodeType) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """The imports in code: the module, how many packages up it is looked for, and the names that are taken from it."""
    if _IMPORT in code.co_code[::2]:
        steps = [step for step in dis.get_instructions(code) if step.opname not in ("EXTENDED_ARG", "CACHE")]
        for level, taken, step in zip(steps, steps[1:], steps[2:], strict=False):
            if step.opcode == _IMPORT:
                yield step.argval, level.argval, taken.argval or ()
    for inner in filter(lambda c: isinstance(c, types.CodeType), code.co_consts):
        yield from imports_of(inner)


def _has_fixed_name(steps: list[dis.Instruction]) -> bool:
    """Whether the second argument of the call that these instructions lead to is a constant."""
    depth, is_fixed = 0, False
    for step in steps:
        depth += dis.stack_effect(step.opcode, step.arg, jump=False)
        if depth < 0:
            return is_fixed
        if depth == 2 and step.opname not in ("PRECALL", "KW_NAMES", "CACHE"):
            is_fixed = step.opname == "LOAD_CONST"
    return False


IS_BOOL = "is True"
"""Stands among the globals of code that has `x is True` or `x is False`."""

MEMO = type(functools.cache(len))
"""The class of functions under `functools.cache`."""

_ASKING = frozenset({"getattr", "hasattr", "attrgetter", "methodcaller"})
_BY_TEXT = ("globals", "eval", "exec")
"""Functions by which code names globals in strings: `globals()["N"] = 1`."""
_IMPORT = dis.opmap["IMPORT_NAME"]
_IS = dis.opmap["IS_OP"]
_CONSTANTS = frozenset(code for name, code in dis.opmap.items() if "CONST" in name or "SMALL_INT" in name)
_LOAD_CONST = dis.opmap["LOAD_CONST"]
_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
_BIND_GLOBAL = (dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"])
_BIND_ATTRIBUTE = (dis.opmap["STORE_ATTR"], dis.opmap["DELETE_ATTR"])


class Inner(NamedTuple):
    """The part of a `Reach` that code inside of the model's modules finds, without the function around them."""

    functions: frozenset[int]
    """Ids."""
    classes: frozenset[type]
    """The classes of which it follows the methods, or some."""
    names: frozenset[tuple[int, str]]
    """The keys of `Reach.globals` and `Reach.looked_up`."""
    cells: frozenset[int]
    """Ids."""


class Reach(abc.ABC):
    """Follows names from functions and classes. Subclasses say what is done with each object that a name leads to."""

    def __init__(self) -> None:
        self.functions: list[types.FunctionType] = []
        """The functions that may run, in the order in which they were found."""
        self.classes: dict[type, None] = {}
        """The users' classes whose attributes they may write to."""
        self.bases: dict[type, None] = {}
        """The users' classes that they name."""
        self.cells: dict[int, tuple[str, types.CellType]] = {}
        """By id, the variables of enclosing functions, with their names."""
        self.globals: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        """The globals that they bind: the table and the name."""
        self.looked_up: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        """The globals that they name, with their values."""
        self._seen: set[int] = set()
        self.names: set[str] = set()
        """The globals and attributes that they name."""
        self.asked: set[str] = set()
        """The attributes that they may ask for by `getattr` or `hasattr`."""
        self.takes_any = False
        """Whether code that belongs to no installed library may ask for a method by a computed name."""
        self.takes_dicts = False
        """Whether code that belongs to no installed library may ask for a `__dict__`, as `vars` does."""
        self.hooks: list[Any] = []
        """The hooks on gradients of tensors from outside, where the forward may differentiate."""
        self.inner: Inner | None = None
        """What of it was found before a function that is around the modules; None where there is none."""
        self.outer_objects: Set[int] = frozenset()
        """The ids of the objects with contents to which only that function leads."""
        self._known: set[type] = set()
        self._unnamed: dict[str, list[type]] = {}
        """The classes that have an attribute which no function has named so far."""
        self._pending: list[types.FunctionType] = []

    @abc.abstractmethod
    def visit(self, name: str, key: str, x: Any) -> None:
        """Take an object, with its name in source (`globals()['CACHE']`, `closure hits`) and the key of `uses`."""

    def end_inner(self) -> None:
        """What was followed so far is what code inside of the modules may run. The function around them comes next."""
        functions, classes = frozenset(map(id, self.functions)), frozenset((*self._known, *self.bases))
        self.inner = Inner(functions, classes, frozenset((*self.globals, *self.looked_up)), frozenset(self.cells))

    def is_inner(self, x: Any) -> bool:
        """Whether what a function, a class or an object of the users leads to was looked at for code in the modules."""
        if self.inner is None:
            return True
        if isinstance(x, types.FunctionType):
            return id(x) in self.inner.functions or not is_users(x.__code__.co_filename)
        if isinstance(x, type):
            return x in self.inner.classes or not is_users_class(x)
        return id(x) not in self.outer_objects

    def add(self, x: Any) -> None:
        """Follow a function, method, partial or class; nothing is done for other objects."""
        while isinstance(x, functools.partial):
            self.visit("partial", "", (*x.args, *x.keywords.values()))
            x = x.func
        if isinstance(x, types.MethodType):
            if isinstance(x.__self__, type):
                self._look_into_class(x.__self__, names_of(x.__func__.__code__))
            x = x.__func__
        if isinstance(x, (staticmethod, classmethod)):
            x = x.__func__
        if isinstance(x, property):
            for accessor in (x.fget, x.fset):
                self.add(accessor)
        elif isinstance(x, types.FunctionType):
            self._add_function(x)
        elif isinstance(x, MEMO):
            self.add(x.__wrapped__)
        elif isinstance(x, operator.attrgetter):  # code that names attributes in C
            names = [name for path in x.__reduce__()[1] for name in path.split(".")]
            self.asked.update(names)
            self._add_names(frozenset(names))

    def add_class(self, kind: type) -> None:
        """Follow the methods of a class that some function names, its `forward` and its operators."""
        for base in kind.__mro__:
            if base in self._known:
                continue
            self._known.add(base)
            if not is_users_class(base):
                continue
            self.classes[base] = None
            operators = _OPERATORS if is_installed(base) else _OF_OBJECTS
            names, unnamed = self.names, self._unnamed
            for name, member in vars(base).items():
                if name in names or name in operators or self.may_take(base, member):
                    self._add_member(base, name, member)
                else:
                    unnamed.setdefault(name, []).append(base)

    def may_take(self, base: type, member: Any) -> bool:
        """Whether a method may be found by a computed name."""
        return self.takes_any and isinstance(member, types.FunctionType) and not is_installed(base)

    def _take_any(self) -> None:
        """Follow all methods of the classes so far; those of installed libraries are found by names."""
        self.takes_any = True
        for name, bases in list(self._unnamed.items()):
            for base in bases:
                if self.may_take(base, vars(base)[name]):
                    self._add_member(base, name, vars(base)[name])

    def _add_member(self, base: type, name: str, member: Any) -> None:
        member = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
        self.add(member)
        if name[:2] != "__" and not isinstance(member, (types.FunctionType, property)):
            self.visit(f"{base.__name__}.{name}", f".{name}", member)

    def _add_function(self, function: types.FunctionType) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        if not is_users(function.__code__.co_filename):
            inner = function.__dict__.get("__wrapped__")  # contextlib's around a generator
            if inner is not None and not is_installed(inner):
                self.add(inner)
            return
        self.functions.append(function)
        self._pending.append(function)
        if len(self._pending) > 1:
            return  # the loop below is running
        while self._pending:
            self._follow(self._pending[0])
            self._pending.pop(0)

    def _follow(self, function: types.FunctionType) -> None:
        code, table = function.__code__, function.__globals__
        names = names_of(code)
        for name in names.bound_globals:
            self.globals[id(table), name] = table, name
        self.asked |= names.asked
        named = names.all
        if not is_installed(function):
            self._note_of_users(code, names)
            self._add_imports(function, names)
            named |= names.asked
        self._add_names(named)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            self._add_cell(name, cell, names)
        for name in names.globals & table.keys():
            found = self.looked_up.get((id(table), name))
            if found is None and name.isidentifier():  # pytest has its own in an assert
                self._look_up(table, name, names)
            elif found is not None and not (isinstance(found[2], type) and is_installed(found[2])):
                self._look_into(found[2], names)  # of which this function may name something else
        if function.__defaults__ or function.__kwdefaults__:
            self._visit_defaults(function)

    def _add_names(self, names: Set[str]) -> None:
        """Note what code names, and follow the methods of these names."""
        new = names - self.names
        self.names |= new
        for name in new & self._unnamed.keys():
            for base in self._unnamed.pop(name, ()):
                self._add_member(base, name, vars(base)[name])

    def _visit_defaults(self, function: types.FunctionType) -> None:
        values, code = function.__defaults__ or (), function.__code__
        names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
        for name, default in zip(names, values, strict=True):
            if type(default) not in ATOMS:
                self.visit(f"{function.__name__}'s default of {name}", f"{name}=", default)
        if function.__kwdefaults__:  # a table, which can be written
            self.visit(f"{function.__name__}.__kwdefaults__", "=", function.__kwdefaults__)

    def _note_of_users(self, code: types.CodeType, names: Names) -> None:
        """What matters of code that belongs to no installed library, beside its names."""
        self.takes_dicts = self.takes_dicts or not names.all.isdisjoint(("vars", "__dict__"))
        if not self.takes_any and asks_by_computed_name(code):
            self._take_any()

    def _add_imports(self, function: types.FunctionType, names: Names) -> None:
        """Follow what a function imports itself, if it was imported before, as if its file had done so."""
        for name, level, taken in imports_of(function.__code__):
            if level:
                name = _absolute(name, level, function.__globals__)
            packages = [] if taken else list(itertools.accumulate(name.split("."), "{}.{}".format))[:-1]
            for module in filter(None, map(sys.modules.get, [*packages, name])):
                table = vars(module)
                for key in taken if _is_followed(module) else ():
                    if (id(table), key) in self.looked_up:
                        self._look_into(self.looked_up[id(table), key][2], names)
                    elif key in table:
                        self._look_up(table, key, names)
                self._look_into(module, names)

    def _add_cell(self, name: str, cell: types.CellType, names: Names) -> None:
        content = content_of(cell)
        self._look_into(content, names)
        if id(cell) in self.cells:
            return
        self.cells[id(cell)] = name, cell
        self.add(content)
        self.visit(f"closure {name}", name, content)

    def _look_up(self, table: dict[str, Any], name: str, names: Names | None) -> None:
        """Follow a global; `names` are those of the function that reads it, None where it is in another file."""
        value = table[name]
        self.looked_up[id(table), name] = table, name, value
        if type(value) is types.FunctionType:
            self._add_function(value)
            if value.__dict__:
                self.visit(f"globals()[{name!r}]", name, value)
        elif type(value) in ATOMS:
            return
        elif isinstance(value, type | types.ModuleType):
            self._look_into(value, names)
        else:
            self.add(value)
            self.visit(f"globals()[{name!r}]", name, value)

    def _look_into(self, value: Any, names: Names | None) -> None:
        """What a function names of a class or Python module; None where a function of another file names it."""
        if names is None:
            return
        if isinstance(value, type):
            self._look_into_class(value, names)
        elif isinstance(value, types.ModuleType):
            self._look_into_module(vars(value), names, _is_followed(value))

    def _look_into_module(self, inside: dict[str, Any], names: Names, follow: bool) -> None:
        for name in names.bound_attributes:
            self.globals[id(inside), name] = inside, name
        wanted = names.all | names.asked
        if isinstance(ask := inside.get("__getattr__"), types.FunctionType) and not is_installed(ask):
            wanted |= {"__getattr__"}
        for name in wanted & inside.keys() if follow else ():
            if (id(inside), name) not in self.looked_up:
                self._look_up(inside, name, None)

    def _look_into_class(self, kind: type, names: Names) -> None:
        """What a function names of a class; instances are followed where they are found."""
        if not is_users_class(kind) or issubclass(kind, enum.Enum):
            return
        self.bases.setdefault(kind)
        wanted = names.all if is_installed(kind) else names.all | _OF_NAMED_CLASSES
        if issubclass(kind, torch.autograd.Function):
            wanted |= _OF_AUTOGRAD
        if type(kind) is not type:
            self.add_class(type(kind))
        for base in kind.__mro__:
            for name in wanted & vars(base).keys() if is_users_class(base) else ():
                self._add_member(base, name, vars(base)[name])


def _is_followed(module: types.ModuleType) -> bool:
    """Whether what code names of a Python module is followed."""
    file = getattr(module, "__file__", None)
    is_made = file is None and module.__spec__ is None  # by hand, or that of `python -c`
    return is_made or is_users(file or "<frozen")


def _absolute(name: str, level: int, table: dict[str, Any]) -> str:
    """The whole name of a module that a file with these globals imports relatively."""
    package = str(table.get("__package__") or table.get("__name__"))
    return ".".join(filter(None, [*package.split(".")[: len(package.split(".")) + 1 - level], name]))


def is_installed(x: Any) -> bool:
    """Whether a function or class belongs to an installed library, which is taken to change nothing that it reads."""
    return _is_package(x.__module__)


@functools.cache
def _is_package(name: str) -> bool:
    return str(getattr(sys.modules.get(name), "__file__", None)).startswith(PACKAGES)


# What functions that ran read of variables, after the forward --------------------------------------------------------


class _Ran(Reach):
    """Follows the objects that it meets, and what their containers hold."""

    def visit(self, name: str, key: str, x: Any) -> None:
        self.add(x)
        self._add_kind(x)
        for item in (x.values() if type(x) is dict else x) if type(x) in (dict, list, tuple) else ():
            self._add_kind(item)
            if type(item) is types.FunctionType and not is_installed(item):
                self.add(item)

    def _add_kind(self, x: Any) -> None:
        """Follow the class of an object, or what is a class itself: what code names of it counts as read.

        So does what it names of the class of an object without a `__dict__`, which is not watched.
        """
        kind = type(x)
        self.add_class(kind)
        found = x if isinstance(x, type) else None if kind.__dictoffset__ else kind
        if found is not None and not is_installed(found) and not issubclass(found, enum.Enum):
            self.bases.update(dict.fromkeys(filter(is_users_class, found.__mro__)))


def functions_that_ran(fn: Any, values: Sequence[Any], tape: Tape, reach: Reach) -> Reach:
    """Those that ran, since calls and ops were in them, and those that may have, since these or `values` name them."""
    ran = _Ran()
    ran.add(fn)
    ran.add_class(type(getattr(fn, "__self__", fn)))
    for kind in {call.module_type: None for call in recorded(tape.calls) if call.module_type is not None}:
        ran.add_class(kind)
    objects = {id(x): x for x in values if type(x) not in ATOMS}  # that of many layers may be one
    held = [x for x in objects.values() if not (type(x) is tuple and ATOMS.issuperset(map(type, x)))]
    for found in (*functions_of(reach, tape), *_hooks_of_calls(tape), *reach.hooks, *held):
        ran.visit("", "", found)
    return ran


def has_hooks(own: dict[str, Any]) -> bool:
    """Whether hooks run when the module is called of which this is the `__dict__`."""
    return any(map(own.get, HOOKS))


def _hooks_of_calls(tape: Tape) -> list[Any]:
    """The hooks of the modules that were called, and of all modules; one that runs no op is in no frame of the tape."""
    called = {id(call.module): vars(call.module) for call in recorded(tape.calls) if call.module is not None}
    tables = [own[name] for own in called.values() if has_hooks(own) for name in HOOKS if own.get(name)]
    return [hook for table in (*tables, *hooks_of_all_modules().values()) for hook in table.values()]


def functions_of(reach: Reach, tape: Tape) -> list[types.FunctionType]:
    """The functions that calls and ops of a tape were in, also methods that the forward got by a computed name."""
    frames = [op.frames for op in recorded(tape.ops) if op.kind == "call_function"] + [
        call.frames for call in recorded(tape.calls)
    ]
    codes = {id(code) for inner in frames if inner and isinstance(inner, tuple) for code, _ in inner[1]}
    found = [f for f in reach.functions if id(f.__code__) in codes]
    if {"getattr"} & reach.names:
        members = [m for kind in reach.classes for m in vars(kind).values() if type(m) is types.FunctionType]
        found += [m for m in members if id(m.__code__) in codes]
    return list(dict.fromkeys(found))


def variables_read(ran: Reach, written: Set[str], changed: Set[tuple[int, str]], root: str) -> Iterator[Read]:
    """What these functions name of globals, classes and enclosing functions, but for what the forward wrote."""
    for table, name, value in ran.looked_up.values():
        if name not in written and not isinstance(value, types.ModuleType) and not _is_of_others(value):
            is_registry = str(table.get("__file__")).startswith(PACKAGES)  # of a library, which it fills itself
            yield Read(name, value if is_registry else snapshot(value), InTable(table, name), (), root)
    for kind in ran.bases:
        for name in ran.names.intersection(vars(kind)):
            value = vars(kind)[name]
            if name[:2] != "__" and not hasattr(type(value), "__get__") and (id(kind), name) not in changed:
                yield Read(f"{kind.__name__}.{name}", snapshot(value), InTable(vars(kind), name), (), root)
    for name, cell in ran.cells.values():
        value = content_of(cell)
        if name not in written and value is not MISSING and not _is_of_others(value):
            yield Read(name, snapshot(value), InClosure(cell), (), root)


def functions_read(ran: Reach, tape: Tape, written: Set[str]) -> Iterator[Read]:
    """Where classes have the functions that ran, what makes these, and default arguments that may change."""
    root, functions = tape.root.path, {id(f) for f in ran.functions}
    calls = [call for call in recorded(tape.calls) if not call.leaf]
    called = {call.module_type: None for call in calls if call.module_type is not None}
    wanted = ran.names | {"forward", "__call__", "__getitem__"}
    members = {
        base: {k: x for k, x in vars(base).items() if k in wanted or (k[:2] != "__" and ran.may_take(base, x))}
        for base in {base: None for kind in called | ran.classes for base in kind.__mro__}
        if is_users_class(base)
    }
    for kind in called | ran.classes:
        if issubclass(kind, LazyGraphModule | torch.jit.ScriptModule):
            continue  # the first has a forward of its own when it first runs, the second in C++
        names = dict.fromkeys(("forward", "__call__") if kind in called else ())
        for base in kind.__mro__:
            for name, member in members.get(base, {}).items():
                function = getattr(member, "fget", getattr(member, "__func__", member))
                if id(function) in functions:
                    names[name] = None
        for slot in [InSlot(kind, name) for name in names]:
            yield Read(f"{kind.__name__}.{slot.key}", slot.now(NO_CALL), slot, (), root)
    place = OfFunctions(tuple(ran.functions))
    yield Read("functions", place.now(NO_CALL), place, (), root)
    for f in ran.functions:
        for key in ("__defaults__", "__kwdefaults__"):
            defaults = getattr(f, key) or ()
            values = list(defaults.values()) if isinstance(defaults, dict) else defaults
            if any(isinstance(x, list | dict | set) for x in values) and not any(k[-1:] == "=" for k in written):
                yield Read(f"default arguments of {f.__name__}", snapshot(defaults or None), InSlot(f, key), (), root)


def _is_of_others(value: Any) -> bool:
    """Whether it is a function of torch, Python or NumPy, which nobody replaces but for a while."""
    if isinstance(value, types.FunctionType):
        return not is_users(value.__code__.co_filename)
    return callable(value) and not isinstance(value, type | torch.nn.Module) and not is_users_class(type(value))
