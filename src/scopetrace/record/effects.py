"""What a forward does that its graph of ops does not: it writes to Python objects, draws, makes tensors require grad.

Data flow:
    the modules, functions, globals, closures and arguments of a forward -> their contents, saved before it runs
    after it -> what differs -> model and arguments put back -> a SideEffect each, with the line that wrote it
    functions of `_ASKED` that the forward names (random numbers, clocks, files, the screen) -> replaced while it runs
    a call of one by the user's code -> a Draw: what was called, what it gave, and where
    a SideEffect whose name the forward reads elsewhere, and each draw -> baked into the program
    inputs and attributes that require grad, and tensors that the forward makes require grad -> `History`: a bit each
    a result, or what an input or attribute becomes, with the second bit alone -> UnsupportedOpError

Tensors that the graph carries are no side effects: those that the forward binds to attributes of modules. Draws from
generators that are objects (`random.Random(0)`) are seen by their state: see `record.model`.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import datetime
import functools
import operator
import os
import pathlib
import random
import secrets
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import torch

from scopetrace._compat.gradients import hooks_of, is_function, node_of, nodes_of, sequence_number
from scopetrace._compat.ops import is_random
from scopetrace._compat.patches import replacing
from scopetrace._compat.tensors import base_of, is_symbolic, is_view, parameters_of, requires_grad_of, tags_of
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
from scopetrace.ops.history import DETACHED, NO_VIEWS, History, plain_leaves
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
        """Everything that `fn` and the model's modules may run, and the objects that they may write to."""
        snapshot, reach = self._snapshot, self.reach
        reach.add(fn)
        if isinstance(fn, types.MethodType):
            snapshot.add("self", "self", fn.__self__)
        else:
            snapshot.add("callable", "self", fn)
        self._follow_modules()

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


# Autograd's history --------------------------------------------------------------------------------------------------


_KEPT, _MADE = 1, 2


def refuse_lost_gradients(
    tape: RecordedTape,
    results: Iterable[Value],
    examples: Mapping[Value, torch.Tensor],
    differentiated: Container[int] | None,
    former: list[Value],
) -> None:
    """Raise UnsupportedOpError where a tensor requires grad only by `requires_grad_()` or the like in the forward.

    That is one of the results, an input, or a tensor of the model. `examples` are the inputs as they were given, and
    `differentiated` the numbers of the nodes through which the forward itself has differentiated once and for all,
    None where torch applied no function of autograd itself. `former` are tensors that no longer require grad.
    """
    ops = tape.ops
    late = [v for op in ops for v in op.values() if not v.requires_grad and v.requires_grad_now]
    given = [v for v in late if not v.op.grad and not v.op.writes and not is_view(v.fake)]
    if differentiated is not None:  # what such a function gives may be a view, also of what requires grad
        quiet = [op for op in ops if op.kind == "call_function" and not op.grad]
        given = [v for op in quiet for v in op.values() if v.requires_grad_now]
    written = tape.written_storages()
    functions = ((v, node) for v in given for node in _functions(v, behind_writes=v.storage in written))
    if differentiated is None:
        unseen = next((v for v, _ in functions), None)
    else:
        found = [(v, sequence_number(node)) for v, node in functions]
        reached = _reached_from_outside(tape, results) if found else ()
        unseen = next((v for v, number in found if number in reached and number not in differentiated), None)
    if unseen is not None and differentiated is not None:
        raise UnsupportedOpError(
            "the forward differentiates, and has autograd_function_apply of tensors that require grad, through which "
            "gradients may go to a result too",
            **place_of(unseen.op),
            hint="trace the forward alone, without torch.autograd.grad in it",
        )
    if unseen is not None:
        raise UnsupportedOpError(
            "a torch.autograd.Function is called by an `apply` that was bound before the trace, which torch 2.15 and "
            "later do not show, so that its backward would be lost",
            **place_of(unseen.op),
            hint="call Function.apply(...) itself, in a function where one is needed",
        )
    if not (late or former):
        return
    outside = [v for op in tape.ops if op.kind in ("placeholder", "get_attr") for v in op.values()]
    tracked = {v.storage for op in tape.ops if op.grad for v in op.writes}  # what is outside is no leaf after that
    candidates = (v for v in late if v.storage not in tracked or v not in outside)
    made = [v for v in candidates if (not v.op.writes or v.op.target in DETACHED) and _is_leaf(v, examples)]
    made += former
    if not made:
        return
    leaves = {v: _KEPT for v in outside if v.requires_grad} | dict.fromkeys(made, _MADE)
    history = History(tape.ops, leaves, _KEPT)
    bound = [w.value for w in tape.attribute_writes]
    for value in (*results, *bound, *(v for v in outside if v not in made)):
        if history.of(value) == _MADE and value not in former:
            raise UnsupportedOpError(
                "the forward itself makes a tensor require grad (requires_grad_(), requires_grad=True, nn.Parameter), "
                "and a result depends on it, which a graph of ops does not have",
                **place_of(value.op),
                hint="give the tensor as an argument that requires grad, or make it a parameter of the model, as by "
                "one run before st.trace; or return x.detach()"
                + ("; or trace under torch.no_grad()" if tape.grad else ""),
            )


def _reached_from_outside(tape: RecordedTape, results: Iterable[Value]) -> set[int]:
    """The numbers of the nodes to which a backward from what the forward leaves goes: results, attributes, writes."""
    written = tape.written_storages()
    outside = (v for op in tape.ops if op.kind in ("placeholder", "get_attr") for v in op.values())
    left = [*results, *(w.value for w in tape.attribute_writes), *(v for v in outside if v.storage in written)]
    return set(map(sequence_number, nodes_of([v.fake for v in left if requires_grad_of(v.fake)])))


def refuse_lost_hooks(
    tape: RecordedTape,
    results: Iterable[Value],
    hooked: Mapping[int, UnsupportedOpError],
    differentiated: Container[int],
) -> None:
    """Raise UnsupportedOpError where a backward from outside would run a hook that the forward has made.

    Those are on the nodes of `hooked`, by their numbers; through those of `differentiated` the forward itself has
    differentiated once and for all. A result whose `grad` the forward keeps is refused too.
    """
    if hooked:
        bound = [w.value for w in tape.attribute_writes]
        found = [v.fake for v in (*results, *bound) if requires_grad_of(v.fake)]
        numbers = [n for n in map(sequence_number, nodes_of(found)) if n not in differentiated]
        for number in numbers:
            if number in hooked:
                raise hooked[number]
        if any(t.retains_grad for t in found):  # a write may have given it another node since
            raise next(iter(hooked.values()))


def _functions(v: Value, *, behind_writes: bool) -> Iterator[Any]:
    """The nodes of a `torch.autograd.Function` that made a tensor, or that are behind the writes to it."""
    nodes = [node_of(v.fake)]
    for node in nodes:
        if is_function(node):
            yield node
        elif behind_writes and node is not None:
            nodes += [n for n, _ in node.next_functions if n not in nodes]


def _is_leaf(v: Value, examples: Mapping[Value, torch.Tensor]) -> bool:
    """Whether the forward made this tensor require grad; inputs and attributes that did before are none."""
    if v.autograd_placeholder or not v.fake.requires_grad or is_view(v.fake) or not v.fake.is_leaf:
        return False
    real = v.real if v.real is not None else examples.get(v)
    return not real.requires_grad if real is not None else v.op.kind == "call_function"


def inputs_made_leaves(tape: RecordedTape, examples: Mapping[Value, torch.Tensor]) -> list[SideEffect]:
    """The inputs that the forward made require grad, which no call of the trace does."""
    names = [path for path, v in zip(tape.input_paths, tape.inputs, strict=True) if _is_leaf(v, examples)]
    return [SideEffect(f"{n}.requires_grad", "False", "True", tape.root.path, None, baked_in=False) for n in names]


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


def without_hidden_gradients(tape: RecordedTape) -> Iterator[tuple[Value, Op]]:
    """The inputs and parameters that do not require grad, where the program would differ if they did.

    Each is given with the first such op of either grad mode. It runs in another grad mode than that of the call, or
    writes to a detached tensor: the memory of others.
    """
    there = tape.ops
    other = [op for op in there if op.writes or (op.grad != tape.grad and op.kind == "call_function")]
    has_hidden = any(op.grad != tape.grad for op in other) or any(op.target in NO_VIEWS for op in there)
    if not other or not has_hidden:
        return
    ops = _up_to_last(tape, other)
    other = [op for op in ops if op.writes or (op.grad != tape.grad and op.kind == "call_function")]
    bits = plain_leaves(tape, ops)
    if not bits:
        return
    if tape.grad:  # one op for each leaf is enough, and many programs have that early
        first = _first_of_each(ops, bits)
        if len(first) == len(bits):
            yield from first.items()
            return
    yield from _by_whole_history(tape, ops, other, bits)


def _by_whole_history(
    tape: RecordedTape, ops: list[Op], other: list[Op], bits: dict[Value, int]
) -> Iterator[tuple[Value, Op]]:
    """As `without_hidden_gradients`, of the leaves of `bits`; `other` are those of the ops to look at."""
    history = History(ops, bits, assumed=True)

    @functools.cache
    def sharing() -> dict[int, int]:
        found: dict[int, int] = collections.defaultdict(int)
        for v in [v for op in ops for v in op.values()]:
            found[v.storage] |= history.of(v)
        return found

    left = dict.fromkeys((False, True), (1 << len(bits)) - 1)
    for op in other:
        if not left[op.grad]:
            continue
        found = 0
        for v in op.inputs() if op.grad != tape.grad else ():
            found |= history.of(v)
        for v in op.writes:
            is_hidden = op.grad != tape.grad or history.is_detached(v) or op.target in DETACHED
            found |= sharing()[v.storage] if is_hidden else 0
        found &= left[op.grad]
        left[op.grad] &= ~found
        if found:
            yield from ((leaf, op) for leaf, bit in bits.items() if found & bit)


def _first_of_each(ops: list[Op], bits: dict[Value, int]) -> dict[Value, Op]:
    """By leaf, the first op without autograd that takes what autograd leads from to it. Ends when all leaves have one.

    What later ops write counts for none.
    """
    history, left, found = History((), bits, assumed=True), (1 << len(bits)) - 1, dict[Value, Op]()
    for op in ops:
        if not op.grad and op.kind == "call_function":
            taken = left & functools.reduce(operator.or_, map(history.of, op.inputs()), 0)
            if taken:
                left &= ~taken
                found.update({leaf: op for leaf, bit in bits.items() if bit & taken})
                if not left:
                    break
        history.add(op)
    return found


def _up_to_last(tape: RecordedTape, found: list[Op]) -> list[Op]:
    """The ops of a tape up to the last of those which were found among the recorded ones.

    All of them where one of these writes, since later ones may share its memory.
    """
    if any(op.writes for op in found):
        return tape.ops
    wanted = set(found)
    last = max(i for i, op in enumerate(tape.ops) if op in wanted)
    return tape.ops[: last + 1]


def writes_to_inputs_apart(tape: RecordedTape, examples: Mapping[Value, torch.Tensor]) -> Iterator[Op]:
    """The ops that write to memory of several inputs which autograd keeps apart, such as `x` and `x.detach()`."""
    for op in tape.ops:
        for written in op.writes:
            sharing = [examples[v] for v in tape.inputs if v.storage == written.storage]
            if len({id(t if (base := base_of(t)) is None else base) for t in sharing}) > 1:
                yield op


def refuse_detached_inputs(tape: RecordedTape, examples: Mapping[Value, torch.Tensor]) -> None:
    """Raise UnsupportedOpError where a gradient flows into memory of several inputs, which autograd keeps apart."""
    for op in writes_to_inputs_apart(tape, examples):
        if op.grad and op.tracked:
            raise UnsupportedOpError(
                "a tensor that requires grad is written into memory that inputs share, one of which is detached",
                **place_of(op),
                hint="clone() one of the inputs, or trace under torch.no_grad()",
            )


def refuse_detached_bases(tape: RecordedTape, detached: set[int]) -> None:
    """Raise UnsupportedOpError for a view under no_grad in memory that a tensor had which was detached in place.

    Each view of it requires grad as the tensor does, which does again in a trace.
    """
    for op in tape.ops if detached else ():
        if not op.grad and any(v.storage in detached for v in op.values()):
            raise UnsupportedOpError(
                "the forward detaches a tensor in place, and makes a view under no_grad of one of its views",
                **place_of(op),
                hint="to cut a gradient, use x.detach()",
            )


def place_of(op: Op) -> dict[str, str | None]:
    """`op`, `module` and `source` for an error about an op."""
    return {"op": str(op.target), "module": str(op.scope), "source": source_of(op.frames)}
