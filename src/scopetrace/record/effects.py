"""What a forward does that its graph of ops does not: it writes to Python objects, and draws.

Data flow:
    the modules, functions, globals, closures and arguments of a forward -> their contents, saved before it runs
    after it -> what differs -> model and arguments put back -> a SideEffect each, with the line that wrote it
    functions of `_ASKED` that the forward names (random numbers, clocks, files, the screen) -> replaced while it runs
    a call of one by the user's code -> a Draw: what was called, what it gave, and where
    a SideEffect whose name the forward reads elsewhere, and each draw -> baked into the program

Tensors that the graph carries are no side effects: those that the forward binds to attributes of modules. Draws from
generators that are objects (`random.Random(0)`) are seen by their state: see `record.model`.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import functools
import os
import pathlib
import random
import secrets
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import torch

from scopetrace._compat.gradients import hooks_of
from scopetrace._compat.ops import is_random
from scopetrace._compat.patches import replacing
from scopetrace._compat.tensors import is_symbolic, parameters_of, tags_of
from scopetrace.containers.structure import leaves_with_path, object_classes
from scopetrace.errors import UnsupportedOpError
from scopetrace.ir.reads import MISSING, Read, content_of
from scopetrace.ir.scopes import Frames, source_of, user_line, walk_frames
from scopetrace.ir.side_effects import SideEffect
from scopetrace.ir.tape import (
    AttributeWrite,
    Call,
    Op,
    RecordedTape,
    Value,
)
from scopetrace.record.builder import TapeBuilder, ValueTable
from scopetrace.record.code import Reach, functions_of, is_installed, is_users, is_users_class, names_of
from scopetrace.record.model import READ_BY_A_CALL, Change, Model, Snapshot, Words, holds_fake, same, same_tables, short
from scopetrace.record.uses import Place, are_only_shown, kept_in, place_in, uses

# Draws ---------------------------------------------------------------------------------------------------------------


_RANDOM = (
    "random uniform triangular randint choice choices randrange sample shuffle normalvariate lognormvariate "
    "expovariate vonmisesvariate gammavariate gauss betavariate paretovariate weibullvariate getrandbits randbytes"
)
_NUMPY = (
    "rand randn random random_sample ranf sample randint uniform normal standard_normal choice permutation shuffle "
    "beta binomial exponential gamma geometric gumbel laplace logistic lognormal multinomial multivariate_normal "
    "poisson standard_exponential standard_gamma standard_t triangular vonmises wald weibull zipf bytes dirichlet "
    "default_rng"
)
_CLOCKS = (
    "time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time process_time_ns localtime "
    "thread_time thread_time_ns"
)
_ASKED: dict[str, tuple[Any, str]] = {
    "random": (random, _RANDOM),
    "time": (time, _CLOCKS + " gmtime ctime strftime"),
    "uuid": (uuid, "uuid1 uuid4"),
    "secrets": (secrets, "token_bytes token_hex token_urlsafe randbelow choice randbits"),
    "os": (os, "urandom getpid getppid getcwd listdir scandir stat cpu_count"),
    "os.path": (os.path, "exists isfile isdir getsize getmtime"),
    "datetime": (datetime, "datetime date"),
    "": (builtins, "print open input"),
}
_NO_TAGS: dict[str, Any] = {}

_CLOCKS_OF_CLASSES = ("now", "utcnow", "today")
_OF_PATHS = ("open", "read_text", "read_bytes", "exists", "is_file", "is_dir", "stat", "iterdir", "glob", "rglob")
"""The methods of `pathlib.Path` that look at files."""


class Draw(NamedTuple):
    """A call of one of the functions."""

    name: str
    """As in source: `random.random()`."""
    value: Any
    baked_in: bool
    """Whether the program may depend on the value."""
    module: str
    """The scope path in which it was called."""
    frames: Frames
    place: Place
    """Where in the code of the innermost frame."""


class Draws:
    """Notes the draws of one forward."""

    def __init__(self, builder: TapeBuilder) -> None:
        self._builder = builder
        self.found: list[Draw] = []

    @contextlib.contextmanager
    def observing(self, reach: Reach, held: Set[int], tables: Iterable[Table]) -> Iterator[None]:
        """Inside, draws of this thread are noted.

        Those by the functions in `reach`, and by those in C that objects hold: the ids of these, and what has them.
        """
        thread = threading.get_ident()
        replaced: dict[Any, Callable[..., Any]] = {}
        places: list[tuple[dict[str, Any], str, Any]] = []
        for prefix, table, names in _reached(reach, held):
            for name in names:
                make = self._clocks if isinstance(table[name], type) else self._noted
                replaced[table[name]] = make(prefix + name, table[name], thread)
                places.append((table, name, table[name]))
        if replaced:
            places += [place for place in reach.looked_up.values() if _is_function(place[2]) and place[2] in replaced]
        new = {id(function): replaced[function] for function in replaced if id(function) in held}
        touched = [each for each in tables if each.holds(new)] if new else []
        try:
            for table, name, function in places:
                table[name] = replaced[function]
            for each in touched:
                each.exchange(new)
            with replacing() as replace:
                for name in reach.names.intersection(_OF_PATHS):
                    replace(pathlib.Path, name, self._noted(f"Path.{name}", getattr(pathlib.Path, name), thread))
                yield
        finally:
            for table, name, function in places:
                table[name] = function
            for each in touched:
                each.exchange({id(found): function for function, found in replaced.items()})

    def _noted(self, name: str, function: Callable[..., Any], thread: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            caller = sys._getframe(1)
            if threading.get_ident() == thread and is_users(caller.f_code.co_filename):
                module, frames = self._builder.state.current_scope.path, self._builder.frames()
                opens = name.rpartition(".")[2] == "open"
                baked_in = name != "print" and (not opens or value.readable())
                if not (name.endswith("default_rng") and (args or kwargs)):  # a seed decides what it draws
                    self.found.append(Draw(f"{name}()", value, baked_in, module, frames, place_in(caller)))
            return value

        return functools.update_wrapper(call, function)

    def _clocks(self, name: str, kind: type, thread: int) -> Any:
        """Stands for a class of `datetime`, whose methods that tell the time are noted. It makes objects of `kind`."""

        class Meta(type):
            def __instancecheck__(cls, x: Any) -> bool:
                return isinstance(x, kind)

            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                return kind(*args, **kwargs)

        found = [key for key in _CLOCKS_OF_CLASSES if hasattr(kind, key)]
        noted = {key: staticmethod(self._noted(f"{name}.{key}", getattr(kind, key), thread)) for key in found}
        return Meta(kind.__name__, (kind,), noted)


class Table(NamedTuple):
    """Something that holds values."""

    read: Callable[[], Any]
    """Its content: a dict, list or set."""
    write: Callable[[Any], None]
    """Gives it another content."""

    def holds(self, ids: Collection[int]) -> bool:
        """Whether it holds one of these, given by id."""
        content = self.read()
        items = content.values() if isinstance(content, dict) else content
        return isinstance(content, (dict, list, set)) and any(id(item) in ids for item in items)

    def exchange(self, new: Mapping[int, Any]) -> None:
        """Put `new` in the place of what has these ids."""
        if not self.holds(new):
            return
        content = self.read()
        if isinstance(content, dict):
            self.write({key: new.get(id(item), item) for key, item in content.items()})
        else:
            self.write(type(content)(new.get(id(item), item) for item in content))


def _content(cell: types.CellType) -> list[Any]:
    return [cell.cell_contents]


def _fill(cell: types.CellType, content: list[Any]) -> None:
    (cell.cell_contents,) = content


def _defaults(function: types.FunctionType) -> list[Any]:
    return list(function.__defaults__ or ())


def _set_defaults(function: types.FunctionType, content: list[Any]) -> None:
    function.__defaults__ = tuple(content)


def _reached(reach: Reach, held: Set[int]) -> Iterator[tuple[str, dict[str, Any], frozenset[str]]]:
    """Of each module, the prefix of its functions in source, its table, and the names that the forward may call."""
    numpy = sys.modules.get("numpy")
    modules = [(prefix, module, names) for prefix, (module, names) in _ASKED.items()]
    if numpy is not None:
        modules.append(("numpy.random", numpy.random, _NUMPY))
    known = {id(value) for _, _, value in reach.looked_up.values()} | held  # from time import time as now
    for prefix, module, names in modules:
        table = vars(module)
        named = frozenset(n for n in names.split() if n in table and (n in reach.names or id(table[n]) in known))
        if named:
            yield f"{prefix}." if prefix else "", table, named


def _is_function(x: Any) -> bool:
    return isinstance(x, (types.BuiltinFunctionType, types.FunctionType, types.MethodType)) or type(x) is type


# Python objects ------------------------------------------------------------------------------------------------------


class EffectWatch:
    """What a forward may write to, saved: made before it runs."""

    def __init__(
        self,
        fn: Any,
        model: Model,
        arguments: list[tuple[str, Any]],
        object_types: Collection[type],
        builder: TapeBuilder,
        values: ValueTable,
    ) -> None:
        self._model = model
        self._tape = builder.tape
        self._values = values
        self._draws = Draws(builder)
        self._snapshot = model.snapshot
        self.reach = _ReachInto(self._snapshot)
        for name, argument in arguments:
            for path, leaf in leaves_with_path(argument, name, object_types):
                self._snapshot.add(path, f"{name}=", leaf)
            for kind in object_classes(argument, object_types):
                self.reach.add_class(kind)
        for name, module in (("random", random), ("numpy.random", getattr(sys.modules.get("numpy"), "random", None))):
            if module is not None:
                self._snapshot.add(name, name, module.random.__self__)
        self._tensors = [*[v.fake for v in builder.tape.inputs], *self._model.tensors]
        self._tags = [tags_of(t) if vars(t) else _NO_TAGS for t in self._tensors]
        for i, tags in enumerate(self._tags):
            for name, x in tags.items():
                self._snapshot.add(f"{self._path(i)}.{name}", f".{name}", x, self._tensors[i])
        self._follow(fn)
        if not self.reach.names.isdisjoint(("backward", "grad")):  # then hooks on gradients may run in the forward
            self._follow_hooks()
        if not self.reach.names.isdisjoint(("environ", "putenv")):
            self._snapshot.add("os.environ", "environ", os.environ)
        self.tag_names = {name for tags in self._tags for name in tags}
        """The attributes that users have set on inputs and tensors of the model."""
        self._bindings = [(t, name, t.get(name, MISSING)) for t, name in self.reach.globals.values()]
        self._cells = [(name, cell, content_of(cell)) for name, cell in self.reach.cells.values()]
        self._classes = [(kind, dict(vars(kind))) for kind in self.reach.classes | self.reach.bases]

    def _follow(self, fn: Any) -> None:
        """Everything that `fn` and the model's modules may run, and the objects that they may write to.

        A function around the modules comes after them: what it alone leads to, no code inside of them finds.
        """
        snapshot, reach = self._snapshot, self.reach
        inner: set[int] | None = None
        if self._model.root is None:
            self._follow_modules()
            reach.end_inner()
            inner = set(snapshot.saved)
        reach.add(fn)
        if isinstance(fn, types.MethodType):
            snapshot.add("self", "self", fn.__self__)
        else:
            snapshot.add("callable", "self", fn)
        self._follow_modules()
        if inner is not None:
            reach.outer_objects = snapshot.saved.keys() - inner

    def _follow_hooks(self) -> None:
        """What hooks on the gradients of tensors from outside may run, and the objects that they may write to."""
        inside = [
            (f"{s.name}.{name}", p) for s in self._model.saved_modules for name, p in parameters_of(s.module).items()
        ]
        tensors = self._model.tensors
        own = zip(self._model.names_of_tensors(tensors), tensors, strict=True)
        found = {id(t): (path, t) for path, t in (*own, *self._snapshot.tensors, *inside) if t is not None}
        for path, t in found.values():
            (hooks,) = hooks_of(t)
            for hook in hooks:
                self._snapshot.add(f"{path}'s hook", "", hook)
            self.reach.hooks += hooks
        self._follow_modules()

    def _follow_modules(self) -> None:
        snapshot, reach = self._snapshot, self.reach
        for kind in {type(module): None for module in self._model.modules}:
            reach.add_class(kind)
        while snapshot.modules or snapshot.functions or snapshot.classes:
            functions, modules, classes = snapshot.take_found()
            for name, module in modules:
                for found in self._model.save_outside(name, module):
                    reach.add_class(type(found))
            for function in functions:
                reach.add(function)
            for kind in classes:
                reach.add_class(kind)

    @property
    def draws(self) -> list[Draw]:
        """Those noted so far."""
        return self._draws.found

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Inside, draws are noted."""
        return self._draws.observing(self.reach, self._snapshot.builtins, self._tables())

    def _tables(self) -> Iterator[Table]:
        """What holds the values that the forward finds: objects, attributes of modules, variables of functions."""
        for saved in self._snapshot.saved.values():
            yield Table(
                functools.partial(saved.kind.copy, saved.owner), functools.partial(saved.kind.restore, saved.owner)
            )
        for module in self._model.saved_modules:
            yield Table(functools.partial(dict, module.own), module.own.update)
        for _, cell, content in self._cells:
            if content is not MISSING:
                yield Table(functools.partial(_content, cell), functools.partial(_fill, cell))
        for function in self.reach.functions:
            if function.__defaults__:
                yield Table(functools.partial(_defaults, function), functools.partial(_set_defaults, function))

    def restore(self, *, outside: bool = False) -> list[Change]:
        """Put the model and its arguments back, and say what had changed; elsewhere fake tensors are removed.

        With `outside`, all else is put back too.
        """
        found = self._model.restore(outside=outside)
        for table, name, old in self._bindings:
            new = table.get(name, MISSING)
            if new is not old:
                if outside or holds_fake(new):
                    _bind(table.__setitem__, table.__delitem__, name, old)
                found.append(Change(f"globals()[{name!r}]", name, old, new, None))
        for name, cell, old in self._cells:
            new = content_of(cell)
            if new is not old:
                if outside or holds_fake(new):
                    _bind(functools.partial(setattr, cell), functools.partial(delattr, cell), "cell_contents", old)
                found.append(Change(f"closure {name}", name, old, new, None))
        for kind, before in self._classes:
            now = dict(vars(kind))
            for name in () if same_tables(now, before) else before.keys() | now.keys():
                old, new = before.get(name, MISSING), now.get(name, MISSING)
                if new is not old and name[:2] != "__":
                    _bind(functools.partial(setattr, kind), functools.partial(delattr, kind), name, old)
                    found.append(Change(f"{kind.__name__}.{name}", f".{name}", old, new, kind))
        found += self._restore_tags()
        return [change for change in found if not same(change.old, change.new)]

    def _path(self, i: int) -> str:
        """The name in source, or in the model, of one of the tensors."""
        inputs = self._tape.input_paths
        return inputs[i] if i < len(inputs) else self._model.names_of_tensors([self._tensors[i]])[0]

    def _restore_tags(self) -> Iterator[Change]:
        for i, (t, before) in enumerate(zip(self._tensors, self._tags, strict=True)):
            now = tags_of(t) if vars(t) else _NO_TAGS
            if now or before:
                for key in now.keys() - before.keys():
                    del vars(t)[key]
                vars(t).update(before)
                for k, x in now.items():
                    yield Change(f"{self._path(i)}.{k}", f".{k}", before.get(k, MISSING), x, t, k)

    def note(
        self,
        changes: list[Change],
        overwritten: Mapping[tuple[int, str], Read],
        is_written_first: Callable[[Change], bool],
    ) -> None:
        """Put `changes`, which `restore` gave, and draws on the tape.

        A tensor of the trace that the forward bound to an attribute of the model's modules is an AttributeWrite there.
        `overwritten` has what the forward read of attributes that it changed, and `is_written_first` says whether it
        wrote one before it read it, so that the program does not depend on what was there.
        """
        others: list[Change] = []
        effects: list[SideEffect] = []
        for change in changes:
            names, value = self._model.names_of(change.holder), None
            if names and change.attribute and isinstance(change.new, torch.Tensor):
                value = self._values.bound_value(change.new)
            if names and value is not None:
                write = AttributeWrite(change.holder, names[0], change.attribute, value, buffer=change.buffer)
                self._tape.attribute_writes.append(write)
                read = overwritten.get((id(change.holder), change.attribute))
                is_alike = _are_alike(change.old, value.fake)
                if read is not None and not is_alike and not self._is_same_in_each_call(change.new):
                    # the next call reads this tensor
                    old, new = short(change.old), short(change.new)
                    effects.append(SideEffect(change.name, old, new, read.module, read.source, True))
            else:
                is_same = (change.old is None or change.old is MISSING) and self._is_same_in_each_call(change.new)
                others.append(change._replace(is_memo=is_same or is_written_first(change)))
        if others or self._draws.found:
            functions = list(dict.fromkeys((*self.reach.functions, *functions_of(self.reach, self._tape))))
            effects += _side_effects(others, self._draws.found, functions, self._tape.calls)
        self._tape.side_effects += effects

    def _is_same_in_each_call(self, x: Any) -> bool:
        """Whether `x` is a tensor that neither inputs, random numbers nor state that the forward writes decide."""
        value = self._values.bound_value(x) if isinstance(x, torch.Tensor) else None
        if value is None:
            return False
        differs = {v.storage for v in self._tape.inputs} | self._tape.written_storages()
        for op in self._tape.ops:
            if is_random(op.target) or any(v.storage in differs for v in op.inputs()):
                differs |= {v.storage for v in op.values()}
        return value.storage not in differs


def _are_alike(old: Any, new: torch.Tensor) -> bool:
    """Whether what Python sees of two tensors, while no op takes the first, is equal."""
    if not isinstance(old, torch.Tensor) or is_symbolic(new):
        return False
    return (old.dtype, old.shape, old.device) == (new.dtype, new.shape, new.device)


class _ReachInto(Reach):
    """Adds the objects that it meets to a snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self._snapshot = snapshot

    def visit(self, name: str, key: str, x: Any) -> None:
        self._snapshot.outside = True
        self._snapshot.add(name, key, x)
        self._snapshot.outside = False


def _bind(put: Callable[[str, Any], None], remove: Callable[[str], None], name: str, value: Any) -> None:
    if value is MISSING:
        remove(name)
    else:
        put(name, value)


# What the changes mean -----------------------------------------------------------------------------------------------


def _side_effects(
    changes: list[Change], draws: list[Draw], functions: list[types.FunctionType], calls: list[Call]
) -> list[SideEffect]:
    """The effects of a forward that called `calls` and may have run `functions`."""
    at = {id(call.module): call for call in reversed(calls) if call.module is not None}
    drawn = any(draw.name.startswith(("random.", "numpy.random.")) for draw in draws)
    changes = [change for change in changes if not (drawn and _is_process_state(change))]
    found = [_of_change(change, functions, calls, at) for change in changes]
    return [*found, *(_of_draw(draw, functions) for draw in draws)]


def _is_process_state(change: Change) -> bool:
    """Whether it is the state of the generators of the process, whose draws are known one by one."""
    return change.name in ("random", "numpy.random")


def _of_change(
    change: Change, functions: list[types.FunctionType], calls: list[Call], at: dict[int, Call]
) -> SideEffect:
    kind = change.holder if isinstance(change.holder, type) else type(change.holder)
    line, reads = None, change.is_draw or change.key[1:] in READ_BY_A_CALL or _read_by_torch(kind, {change.key[1:]})
    is_child = isinstance(change.old, torch.nn.Module) or isinstance(change.new, torch.nn.Module)
    finds_all = is_child and (_read_by_torch(kind, _CHILDREN) or any(map(_finds_children, functions)))
    writer, of_object = None, change.key[0] == "." and change.holder is not None and not _delegate(functions)
    for function in functions:
        foreign = of_object and _is_method_of_other(function, kind)
        use = uses(function, change.key, foreign_self=foreign, is_tensor=isinstance(change.new, torch.Tensor))
        reads = reads or use.reads
        if line is None and use.lines:
            line, writer = user_line([(function.__code__, use.lines[0])]), function.__code__
    if line is None and change.attribute and is_users_class(kind) and not is_installed(kind):
        reads = True  # it is written by a name that code has made, and may be read so
    is_memo = change.is_memo or (isinstance(change.new, Words) and not change.is_draw)
    call = at.get(id(change.holder)) or _caller(writer, calls)
    baked_in = finds_all or (reads and not is_memo)
    return SideEffect(change.name, short(change.old), short(change.new), call.scope.path, line, baked_in)


def _delegate(functions: list[types.FunctionType]) -> bool:
    """Whether an object may have attributes of another by code of users, so that its `self.n` is that one's."""
    found = [f for f in functions if f.__name__ in ("__getattr__", "__getattribute__")]
    return not all(map(is_installed, found))


def _is_method_of_other(function: types.FunctionType, kind: type) -> bool:
    """Whether a function is a method of a class that `kind` does not inherit from, whatever decorators it has there."""
    owner = function.__qualname__.rpartition(".")[0]
    if not owner or owner.endswith("<locals>") or any(base.__qualname__ == owner for base in kind.__mro__):
        return False
    return function.__code__ not in _codes_of(kind)


def _codes_of(kind: Any) -> set[types.CodeType]:
    """The code of the methods of a class."""
    return {m.__code__ for base in kind.__mro__ for m in vars(base).values() if isinstance(m, types.FunctionType)}


_CHILDREN = frozenset({"_modules", "children", "modules", "named_children", "named_modules"})
"""By which code finds submodules without their names."""


def _finds_children(function: types.FunctionType) -> bool:
    return not names_of(function.__code__).all.isdisjoint(_CHILDREN)


def _read_by_torch(kind: Any, keys: Set[str]) -> bool:
    """Whether torch's own part of a module's class reads one of these attributes."""
    bases: list[Any] = [b for b in kind.__mro__ if issubclass(b, torch.nn.Module) and b is not torch.nn.Module]
    codes = [code for base in bases if not is_users_class(base) for code in _codes_of(base)]
    return any(not names_of(code).all.isdisjoint(keys) for code in codes)


def _caller(code: types.CodeType | None, calls: list[Call]) -> Call:
    """The first call of a module whose class has a method of this code; the root call where there is none."""
    found = (c for c in calls if c.module_type is not None and code in _codes_of(c.module_type))
    return next(found, calls[0]) if code is not None else calls[0]


def _of_draw(draw: Draw, functions: list[types.FunctionType]) -> SideEffect:
    frames = walk_frames(draw.frames)
    returns = draw.value is not None  # as random.shuffle does not, whose draw is in its argument
    kept = kept_in(frames[-1][0], draw.place) if draw.baked_in and returns and frames else None
    baked_in = draw.baked_in and (kept is None or not are_only_shown(kept, functions))
    return SideEffect(draw.name, "", short(draw.value), draw.module, user_line(frames), baked_in)


def refuse_tags(tape: RecordedTape, results: Iterable[Value]) -> None:
    """Raise UnsupportedOpError where a result that the forward made has an attribute of users."""
    for v in results:
        if tags_of(v.fake) and v.op.kind == "call_function":
            raise UnsupportedOpError(
                f"the forward sets the attribute {next(iter(tags_of(v.fake)))!r} of its result, which results of a "
                "graph do not have",
                **place_of(v.op),
                hint="return the value beside the tensor, or set it outside of the forward",
            )


def settings_left(before: dict[str, Any], after: dict[str, Any], root: str) -> list[SideEffect]:
    """The settings of the process, by name, that the forward leaves changed; a call of the trace does not."""
    changed = [name for name in before if after[name] != before[name]]
    return [SideEffect(n, repr(before[n]), repr(after[n]), root, None, baked_in=True) for n in changed]


def place_of(op: Op) -> dict[str, str | None]:
    """`op`, `module` and `source` for an error about an op."""
    return {"op": str(op.target), "module": str(op.scope), "source": source_of(op.frames)}
