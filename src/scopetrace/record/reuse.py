"""`reuse=True`: a module call that is equal to one before is not run; its ops are copied.

Data flow:
    a call of a module that may repeat -> recorded as ever, and kept as an Original where nothing but ops happened in it
    a later call -> its arguments, the state of Python and its module compared with an Original's -> a Match, or why not
    a Match -> `replay.Replay`: the ops, values and calls of the Original again, with the tensors of this call

What a call may do is decided by the code of its class, which both have, and by what that reads: attributes (`pairs`),
arguments, and all else, which must be as it was when the forward began (`State`) at the begin and end of the Original
and at the begin of its repetition. A call that did anything beside ops that a copy would not do is never an Original:
see `CallRecorderWithReuse._marks`. Where this file does not know, the call runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from scopetrace._compat.questions import caches_parametrizations, hooks_of_all_modules, setting_values
from scopetrace._compat.symbols import has_unbacked, to_expr
from scopetrace._compat.tensors import FakeFactory, FakeTensor, tags_of
from scopetrace.containers.structure import instantiate, leaves, open_container
from scopetrace.ir.reuse import NotShared
from scopetrace.ir.scopes import Frames, Scope
from scopetrace.ir.selection import Target
from scopetrace.ir.tape import Call, CallList, Value, ops_between
from scopetrace.ir.unmade import CopiedCall
from scopetrace.record.builder import TapeBuilder, ValueTable
from scopetrace.record.calls import CallRecorder, Progress
from scopetrace.record.code import ATOMS, HOOKS, TOLD_BY_TEXT, has_hooks
from scopetrace.record.effects import EffectWatch
from scopetrace.record.model import BOOKKEEPING, Model, is_torchs, modules_in, plain_attributes
from scopetrace.record.object_reads import ObjectReads
from scopetrace.record.ops import OpRecorder
from scopetrace.record.original import LayoutOfModel, Original
from scopetrace.record.pairs import Differs, Pairs
from scopetrace.record.python_state import State
from scopetrace.record.reads import Noted, ReadRecorder
from scopetrace.record.replay import Replay, Tools

_COMPARED = {"_parameters", "_buffers", "_modules", "_compiled_call_impl", *HOOKS}
_UNCOMPARED = BOOKKEEPING - _COMPARED | {"id", "hash", "_getframe", "currentframe", "f_back", "geterr"}
"""The names by which code tells equal modules or calls apart: which object a module is, tables of nn.Module that are
not compared, the frames around a call, how NumPy reports errors."""
_FEW = 4
"""So often modules that look alike may run in vain, and so often the state of Python objects may change, until
nothing more is tried."""
SMALLEST = 20
"""Where it is not asked for, a call with fewer ops and calls inside is recorded: to compare it takes as long."""
_FREE = 5
"""So many calls become originals at once. Each further one waits for twenty times `smallest` more ops on the tape, so
that it takes little time where calls never repeat."""


class ReadRecorderWithReuse(ReadRecorder):
    """Notes also what a copy of the ops would have to note again, or cannot."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: list[Value] = []
        """The tensors whose layout the forward asked for."""
        self.layouts: list[LayoutOfModel] = []
        """The parameters, buffers and other tensors of the model of which it asked what, and where."""
        self.unshared = 0
        """How often the forward asked for what a copy would have to ask again."""

    def on_fact(self, t: torch.Tensor, name: str, args: tuple[Any, ...], answer: Any) -> None:
        """As the base's."""
        value = self._values.by_id.get(id(t))
        if name in _LAYOUT and value is not None:
            self.asked.append(value)
        elif name not in _LAYOUT:
            self.unshared += 1
        super().on_fact(t, name, args, answer)

    def on_layout_of_model(self, t: torch.Tensor, question: str, noted: Noted) -> None:
        """As the base's."""
        self.layouts.append((t, question, noted))
        super().on_layout_of_model(t, question, noted)

    def on_gradient(self, t: torch.Tensor) -> None:
        """As the base's."""
        self.unshared += 1
        super().on_gradient(t)

    def on_requires_grad(self, t: torch.Tensor) -> None:
        """As the base's."""
        self.unshared += 1
        super().on_requires_grad(t)

    def on_question(self, name: str, ask: Callable[..., Any], args: tuple[Any, ...], answer: Any) -> None:
        """As the base's."""
        self.unshared += not isinstance(args[0], logging.Logger)
        super().on_question(name, ask, args, answer)

    def on_grad_mode(self, enabled: bool) -> None:
        """As the base's."""
        self.unshared += 1
        super().on_grad_mode(enabled)

    def on_autocast(self, entered: bool) -> None:
        """As the base's."""
        self.unshared += 1
        super().on_autocast(entered)


_LAYOUT = frozenset({"stride", "is_contiguous", "storage_offset", "contiguous", "is_conj", "is_neg", "is_inference"})


@dataclasses.dataclass(eq=False)
class Arguments:
    """What a call is given: equal keys, equal structure and metadata."""

    key: list[Any]
    tensors: list[torch.Tensor]
    values: list[Value]
    modules: list[torch.nn.Module]


class _Described:
    """Describes the arguments of one call. Raises Differs for what cannot be compared."""

    def __init__(self, calls: CallRecorderWithReuse) -> None:
        self._calls = calls
        self.found = Arguments([], [], [], [])
        self._numbers: dict[Any, int] = {}
        self._keep: list[Any] = []

    def _number(self, x: Any) -> int:
        return self._numbers.setdefault(x, len(self._numbers))

    def add(self, x: Any) -> None:
        """Append what `x` is."""
        key, kind = self.found.key, type(x)
        key.append(kind)
        if isinstance(x, torch.Tensor):
            self._add_tensor(x)
        elif kind in (list, tuple, dict) or (kind is torch.Size and torch.SymInt in map(type, x)):
            self._add_container(x, kind)
        elif kind is torch.SymInt and not has_unbacked(to_expr(x)):
            key.append(to_expr(x))
        elif kind in ATOMS or isinstance(x, enum.Enum):
            key.append(repr(x) if kind in TOLD_BY_TEXT else x)
        elif isinstance(x, torch.nn.Module):
            self.found.modules.append(x)
        elif self._calls.is_fixed(x):
            key.append(id(x))
        else:
            raise Differs(f"it takes a {kind.__name__}, which is not compared")

    def _add_container(self, x: Any, kind: type) -> None:
        if kind in (list, dict):
            self._keep.append(x)
            self.found.key.append(self._number(id(x)))
        if kind is dict:
            if not ATOMS.issuperset(map(type, x)):
                raise Differs("it takes a dict with keys that are not compared")
            self.found.key += map(repr, x)
        self.found.key.append(len(x))
        for item in x.values() if kind is dict else x:
            self.add(item)

    def _add_tensor(self, t: torch.Tensor) -> None:
        value, metadata = self._calls.metadata_of(t)
        is_fake = isinstance(t, FakeTensor)
        if metadata is None or tags_of(t) or not (is_fake or value.real is t):
            raise Differs("it takes a tensor whose metadata is not compared")
        same = id(t), value, value.storage  # a storage is an address too, or odd
        self.found.key += [metadata, value.autograd_placeholder, is_fake, *map(self._number, same)]
        self.found.tensors.append(t)
        self.found.values.append(value)


class CallRecorderWithReuse(CallRecorder):
    """Records the calls that are not equal to one before, and copies the others."""

    def __init__(
        self,
        builder: TapeBuilder,
        values: ValueTable,
        ops: OpRecorder,
        reads: ReadRecorder,
        model: Model,
        object_types: frozenset[type],
        leaves: list[Target],
        progress: Progress | None,
        effects: EffectWatch,
        object_reads: ObjectReads,
        maker: FakeFactory,
        smallest: int,
    ) -> None:
        """The first arguments are those of the base. A call of fewer than `smallest` ops and calls runs."""
        super().__init__(builder, values, ops, reads, model, object_types, leaves, progress)
        assert isinstance(reads, ReadRecorderWithReuse)
        self.unshared = 0
        """How often the forward did what is no op, and what a copy of its ops would not do."""
        self._hooked = 0
        """How many calls of modules began with hooks: of code that is not in the class, and may be gone later."""
        self._asked = reads
        self._effects = effects
        self._object_reads = object_reads
        self._tools = Tools(builder, values, ops, maker, model, object_reads, reads)
        self._groups: dict[int, _Group] = {}
        self._smallest = smallest
        self._renewals = self._kept = 0
        report = self._builder.tape.reuse
        assert report is not None
        self._report = report

    def run_root(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As the base's."""
        with self._looking():
            self._report.each_runs = self._report.each_runs or self._obstacle()
            self._groups = {} if self._report.each_runs else _groups(self._model.modules)
        return super().run_root(fn, args, kwargs)

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        """Inside, what is asked of the model's objects is no read of the forward."""
        self.paused = self._builder.looks_at_objects = True
        try:
            yield
        finally:
            self.paused = self._builder.looks_at_objects = False

    def _obstacle(self) -> str:
        """Why no call may be replayed: most often, code may find out without the module which module it is."""
        if self._builder.tape.exact_autograd:
            return "autograd runs the ops"
        if self._leaves or any(hooks_of_all_modules().values()):
            return "leaf_modules= is given" if self._leaves else "hooks of all modules are set"
        reach = self._effects.reach
        for function in filter(reach.is_inner, reach.functions):
            names = sorted(_UNCOMPARED.intersection(function.__code__.co_names))
            if names:
                return f"{function.__qualname__} may tell equal modules apart, since it names {names[0]}"
        return ""

    @functools.cached_property
    def _state(self) -> State:
        """That in which a call may be kept; begins with the first one that may be."""
        state = State.of_now(self._effects, self._model, self._model.snapshot.saved)
        if state.tells_modules_apart():
            self._groups.clear()
            self._report.each_runs = "code in modules may reach modules, or what cannot be watched, by other ways"
        return state

    def close(self) -> None:
        """As the base's."""
        super().close()
        self.__dict__.pop("_state", None)  # which knows the replaced classes, and these this recorder
        self._groups.clear()  # of which the kept calls know the state

    # ---------------------------------------------------------------- calls

    def run(self, call: Call, entered: set[str], run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """As the base's; a call that is equal to one before does not run."""
        group = self._group_of(call)
        if group is None:
            return self._run_anew(call, entered, run, args, kwargs)
        name = type(call.module).__name__
        self.paused = self._builder.looks_at_objects = True  # as _looking, which takes longer
        try:
            found = self._kept_or_replay(call, group, args[1:], kwargs)
        finally:
            self.paused = self._builder.looks_at_objects = False
        if isinstance(found, Replay):
            self._report.replayed[name] = self._report.replayed.get(name, 0) + 1
            return self._replayed(call, found)
        first = len(self._builder.tape.calls)
        out = self._run_anew(call, entered, run, args, kwargs)
        ops = ops_between(self._builder.tape.ops, call.start, call.stop)
        size = sum(op.kind == "call_function" for op in ops) + len(self._builder.tape.calls) - first
        is_small = group.kind.is_small = size < self._smallest
        self._report.traced[name] = self._report.traced.get(name, 0) + (not is_small)
        if found is not None and not is_small:
            self._kept += 1
            with self._looking():
                problem = self._problem(found, out, args[1:], kwargs)
            if problem:
                self._note(call, problem)
            else:
                group.originals.insert(0, found)
        return out

    def _run_anew(self, call: Call, entered: set[str], run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._hooked += call.module is not None and has_hooks(call.module.__dict__)
        return super().run(call, entered, run, args, kwargs)

    def _open(self, module: torch.nn.Module | None, fqn: str | None, scope: Scope, args: Any, kwargs: Any) -> Call:
        calls = self._builder.tape.calls
        if self._counts.get(id(module)) and isinstance(calls, CallList):
            calls.fill()  # the scopes inside are in the order in which they were first entered
        return super()._open(module, fqn, scope, args, kwargs)

    def _group_of(self, call: Call) -> _Group | None:
        """The modules that look like that of a call, where it may be worth to compare it."""
        group = self._groups.get(id(call.module))
        if group is None or call.parent is None or not self._builder.is_plain() or call.replaced:
            return None
        is_alone = group.size == 1 and call.index == 0
        if is_alone or group.kind.is_small or group.in_vain > _FEW:
            return None
        if caches_parametrizations() or any(hooks_of_all_modules().values()):
            return None
        return group if group.originals or self._may_keep() else None

    def _may_keep(self) -> bool:
        """Whether one more call may become an original."""
        return 20 * self._smallest * (self._kept - _FREE) <= len(self._builder.tape.ops)

    def _note(self, call: Call, reason: str) -> None:
        self._report.not_shared.append(NotShared(call.scope.path, type(call.module).__name__, reason))

    def _kept_or_replay(self, call: Call, group: _Group, args: Any, kwargs: Any) -> _Kept | Replay | None:
        """How the call repeats an original; else what is kept of it while it runs, None where it cannot be one."""
        module, reason = call.module, ""
        assert module is not None
        group.in_vain += 1
        try:
            given = self._arguments(args, kwargs)
            for kept in group.originals:
                try:
                    found = self._replay(kept, call, module, given)
                    group.in_vain = 0
                    return found
                except Differs as unlike:
                    reason = reason or str(unlike)
        except Differs as unknown:
            given, reason = None, str(unknown)
        if reason:
            self._note(call, reason)
        if given is None or group.in_vain > _FEW or not self._may_keep():
            return None
        if not self._state.is_unchanged(draws=False):
            self._renew()
        if not self._groups or not all(map(self._state.is_same, modules_in(module))):
            return None
        reads = self._asked
        asked = len(reads.asked), len(reads.layouts), len(reads.contiguous)
        where = self._builder.body, len(self._builder.tape.calls), self._state.asked_memos()
        return _Kept(call, given, self._state, setting_values(), self._marks(), asked, *where)

    def _renew(self) -> None:
        """Begin anew with the state of now; where that changes all the time, give up."""
        self._state, self._renewals = self._state.renewed(), self._renewals + 1
        if self._renewals > _FEW or self._state.tells_modules_apart():
            self._groups.clear()

    def _arguments(self, args: Any, kwargs: Any) -> Arguments:
        described = _Described(self)
        described.add(tuple(args))
        described.add(dict(kwargs))
        return described.found

    def is_fixed(self, x: Any) -> bool:
        """Whether an object was there before the forward, and what it holds is watched."""
        if not self._effects.reach.is_inner(x):
            return False
        if isinstance(x, types.FunctionType):
            return not x.__closure__ and not self._state.watch.problem(x)
        return isinstance(x, type) or (self._state.watch.has_attributes(x) and not self._state.watch.problem(x))

    def metadata_of(self, t: torch.Tensor) -> tuple[Value, int | None]:
        """The value of a tensor among the arguments of a call, and its key in `infer`."""
        value = self._values.value_of(t)
        return value, self._ops.inference.key_now(value)

    # ---------------------------------------------------------------- originals

    def _marks(self) -> dict[str, Any]:
        """What must be the same before and after an original, by what to say of it."""
        builder, ops = self._builder, self._ops
        return {
            "it has a checkpointed region": len(builder.regions),
            "it catches an error": len(builder.deferred),
            "it takes an object that may hold tensors": len(self.templates.unsettled),
            "it draws, or asks for files or the time": len(self._effects.draws),
            "Python reads data in it": (ops.answers, len(builder.tape.specializations)),
            "it makes a tensor that requires grad": len(self._values.made_leaves()),
            "it asks autograd, or for all parameters, or switches a mode": self._asked.unshared,
            "it does what is no op with a tensor": self.unshared,
            "it differentiates": "gradients" in self.__dict__,
            "it has hooks": self._hooked,
        }

    def _problem(self, kept: _Kept, out: Any, args: Any, kwargs: Any) -> str:
        """Why a call that has ended cannot be repeated; empty where it can."""
        call, tape, now = kept.call, self._builder.tape, self._marks()
        assert call.module is not None
        changed = next((text for text, before in kept.marks.items() if now[text] != before), "")
        if changed:
            return changed
        if setting_values() != kept.settings:
            return "it changes a setting of torch"
        if not kept.state.is_unchanged(draws=False) or not all(map(self._state.is_same, modules_in(call.module))):
            return "it writes to Python objects"
        if kept.state.has_memo_with_state(kept.memos):
            return "it asks a memo for what can be written to"
        if not kept.state.is_unchanged():  # by it, or before it
            self._renew()
            return "random generators of Python have changed"
        reads = self._asked
        values, layouts, contiguous = kept.asked
        asked = reads.asked[values:], reads.layouts[layouts:], reads.contiguous[contiguous:]
        ops, calls = ops_between(tape.ops, call.start, call.stop), tape.calls[kept.calls :]
        if not all(self._state.knows(inner.module) for inner in calls):
            return "it calls a module that the forward makes"
        kept.original = Original(call, ops, calls, kept.given.values, *asked)
        return kept.original.problem(tape.owners) or self._problem_of_result(kept, out, args, kwargs)

    def _problem_of_result(self, kept: _Kept, out: Any, args: Any, kwargs: Any) -> str:
        try:
            if self._arguments(args, kwargs).key != kept.given.key:
                return "it changes its arguments"
        except Differs:
            return "it changes its arguments"
        held = set(map(id, _mutable((args, kwargs)))) | self._model.snapshot.saved.keys()
        if any(id(x) in held for x in _mutable(out)):
            return "it returns a container that it was given"
        if not _is_copy(instantiate(lambda v: v.fake, kept.call.outputs, Value), out):
            return "its result cannot be made again"
        if any(tags_of(t) for t in leaves(out, torch.Tensor)):
            return "it sets attributes of tensors"
        return ""

    # ---------------------------------------------------------------- repetitions

    def _replay(self, kept: _Kept, call: Call, module: torch.nn.Module, given: Arguments) -> Replay:
        """How `call` repeats an original. Raises Differs."""
        original = kept.original
        assert original is not None and original.call.module is not None
        self._expect_same_state(kept, call, given)
        pairs = Pairs(self._object_reads.may_have_read, self._state.watch, self._model.saved, original.facts)
        pairs.module(original.call.module, module)
        for a, b in zip(kept.given.modules, given.modules, strict=True):
            pairs.argument(a, b)
        for t, u in zip(kept.given.tensors, given.tensors, strict=True):
            if not isinstance(t, FakeTensor):
                pairs.argument(t, u)
        return Replay(original, call, pairs, given.tensors, given.values, self._tools, self)

    def _expect_same_state(self, kept: _Kept, call: Call, given: Arguments) -> None:
        """Raise Differs where a call is given something else than an original, or runs in another state."""
        if kept.call.direct != call.direct:
            raise Differs("forward is called directly in one of them")
        if kept.body not in (None, self._builder.body):
            raise Differs("one of them is in the body of a higher-order op")
        if kept.given.key != given.key:
            raise Differs("the arguments differ")
        if kept.settings != setting_values():
            raise Differs("a setting of torch differs")
        if kept.state is not self._state or not self._state.is_unchanged(draws=False):
            raise Differs("the state of Python objects has changed")

    def _replayed(self, call: Call, replay: Replay) -> Any:
        """The result of a call whose ops are copied."""
        same = len(self._values.same)
        self._report.repeats[call.position] = replay.original.call.position
        self._ops.mode.switch(False)
        try:
            out = self._builder.in_call(call, replay.run)
        finally:
            self._ops.mode.switch(True)
        if len(self._values.same) > same:
            self._values.leave(same, call.outputs)
        return out

    @property
    def reports(self) -> bool:
        """As `CallOpener.reports`."""
        return self._progress is not None

    def number(self, modules: Sequence[Any]) -> tuple[int, list[int]]:
        """As `CallOpener.number`."""
        counts, indices, first = self._counts, [], self._next
        for module in modules:
            index = counts.get(id(module), 0)
            counts[id(module)] = index + 1
            indices.append(index)
        self._next += len(indices)
        return first, indices

    def open_copy(
        self,
        call: Call,
        module: Any,
        place: tuple[Call, Scope],
        frames: Frames,
        start: int,
        given: Any,
        number: tuple[int, int],
    ) -> Call:
        """As `CallOpener.open_copy`."""
        fqn, scope = self.place(module, *place)
        if callable(given):
            saved = self._model.saved(module)
            assert saved is not None
            new: Call = CopiedCall(call, module, fqn, (place[0], scope), number, start, frames, given, saved)
        else:
            where = {"fqn": fqn, "scope": scope, "parent": place[0], "frames": frames, "start": start, "module": module}
            where["position"], where["index"] = number
            args, kwargs = given
            new = call.replace(args=args, kwargs=kwargs, attributes=plain_attributes(module.__dict__), **where)
        if self._progress is not None:
            self._progress(str(scope), new.start)
        return new


@dataclasses.dataclass(eq=False)
class _Kept:
    """A call that may become an original, with what was so when it began."""

    call: Call
    given: Arguments
    state: State
    settings: tuple[Any, ...]
    marks: dict[str, Any]
    asked: tuple[int, int, int]
    """How many layouts of values, of the model's tensors, and calls of `contiguous()` had been noted."""
    body: object
    """That of the higher-order op that it is in; None outside. What is in a body leaves the tape at its end."""
    calls: int
    """The number of calls on the tape before the first one inside of it."""
    memos: list[tuple[int, ...]]
    """How often memos had been asked: see `State.asked_memos`."""
    original: Original | None = None


@dataclasses.dataclass(eq=False)
class _Kind:
    """Modules of one class with such submodules. Those with parameters of other shapes are as small or large."""

    is_small: bool
    """Whether the last call had fewer ops and calls than is worth to compare."""


@dataclasses.dataclass(eq=False)
class _Group:
    """Modules that look alike: of one class, with such submodules and parameters."""

    kind: _Kind
    size: int = 0
    originals: list[_Kept] = dataclasses.field(default_factory=list)
    in_vain: int = 0
    """How many calls ran since the last one that was copied."""


def _groups(modules: list[torch.nn.Module]) -> dict[int, _Group]:
    """By id, of each module those that look like it; `modules` are all."""
    found = _Groups()
    if not any(isinstance(m, torch.jit.ScriptModule) for m in modules):
        for module in modules:
            found.of(module)
    return found.known


class _Groups:
    """Finds modules that look alike."""

    def __init__(self) -> None:
        self.known: dict[int, _Group] = {}
        """By id of the module."""
        self._groups: dict[Any, _Group] = {}
        self._kinds: dict[Any, _Kind] = {}
        self._unknown = _Group(_Kind(True))

    def of(self, module: torch.nn.Module) -> _Group:
        """Those that look like a module."""
        found = self.known.get(id(module))
        return self._find(module) if found is None else found

    def _find(self, module: torch.nn.Module) -> _Group:
        like: list[Any]
        same: list[Any]
        self.known[id(module)] = self._unknown  # of one that is inside of itself
        own, like, same = module.__dict__, [type(module)], [type(module)]
        same += [p.shape for p in own["_parameters"].values() if p is not None]
        for name, m in own["_modules"].items():
            if m is not None:
                inner = self.known.get(id(m)) or self._find(m)
                like += name, inner.kind
                same += name, inner
        key = tuple(like)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(len(like) == 1 and is_torchs(module))
        key = tuple(same)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(kind)
        self.known[id(module)] = group
        group.size += 1
        return group


def _mutable(x: Any) -> Iterator[Any]:
    """The containers in a value that can change."""
    children = open_container(x)
    if children is not None and type(x) is not tuple:
        yield x
    for _, item in children or ():
        yield from _mutable(item)


def _is_copy(made: Any, x: Any) -> bool:
    """Whether `made` is what `x` is, with other tensors."""
    if isinstance(x, torch.Tensor):
        return isinstance(made, torch.Tensor)
    inside, wanted = open_container(made), open_container(x)
    if inside is None or wanted is None:
        return made is x and (type(x) in ATOMS or isinstance(x, torch.SymInt | enum.Enum))
    same = type(made) is type(x) and [key for key, _ in inside] == [key for key, _ in wanted]
    return same and all(_is_copy(a, b) for (_, a), (_, b) in zip(inside, wanted, strict=True))


def _not_an_op(name: str) -> Callable[..., Any]:
    original = getattr(CallRecorder, name)

    def method(self: CallRecorderWithReuse, *args: Any, **kwargs: Any) -> Any:
        self.unshared += 1
        return original(self, *args, **kwargs)

    return method


for _name in (
    *("on_custom_function", "on_unseen_function", "on_applied", "on_reentrant", "on_hook", "on_graph", "on_grad_fn"),
    *("on_requires_grad", "on_detach", "on_recomputed", "on_nested_region", "mark", "on_storage_resize", "on_data"),
    *("on_set_data", "on_number", "on_numpy"),
):
    setattr(CallRecorderWithReuse, _name, _not_an_op(_name))
