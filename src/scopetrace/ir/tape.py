"""The tape: what a recording leaves behind, and what everything else is derived from.

Three lists: the ops in the order in which they ran, the module calls in forward order, and nothing more. An op has
its inputs and outputs as `Value`s, its scope, its call and its Python frames. A call is a range of ops with the
arguments that went in and the structure that came out. Each value knows its storage, so aliasing and mutation are
questions to the tape and need no record of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch

from scopetrace.containers.objects import Returned
from scopetrace.containers.structure import leaves
from scopetrace.ir.registered import Registered
from scopetrace.ir.scopes import Scope

Frames = tuple[Any, ...] | str
"""Where an op was called: a linked list, (outer frames | (), ((code, line), ...)), outermost first; or a stack trace
as text, for ops of a graph that has it on its nodes."""


class Value:
    """A tensor of the traced program: one output of one op.

    `fake` has its shape, dtype, strides and device; `storage` is equal for values that share memory; `key` stands
    for all that decides the metadata of an op's results (None when that is not known, as for symbolic sizes).
    """

    __slots__ = ("fake", "key", "offset", "op", "real", "requires_grad", "slot", "stand_in", "storage")

    def __init__(self, fake: torch.Tensor, op: Op, slot: int, storage: int, key: int | None) -> None:
        self.fake = fake
        self.op = op
        self.slot = slot
        self.storage = storage
        self.key = key
        self.requires_grad = fake.requires_grad  # when it was made; writes may change that
        self.offset = fake.storage_offset() if fake.layout is torch.strided else 0
        self.real: torch.Tensor | None = None  # the tensor itself, for attributes and constants
        self.stand_in = False  # requires grad without autograd's own history (see recorder)

    def __getstate__(self) -> tuple[Any, ...]:
        # Without the op, which has its values: pickle would recurse along the whole program.
        return self.fake, self.slot, self.storage, self.real, self.offset

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.fake, self.slot, self.storage, self.real, self.offset = state
        self.key, self.stand_in, self.requires_grad = None, False, self.fake.requires_grad

    def __repr__(self) -> str:
        return f"Value({self.op.kind} {self.op.target}, {self.slot})"


@dataclasses.dataclass(slots=True, eq=False)
class Op:
    """One step of the program."""

    kind: str
    """`placeholder`, `get_attr`, `call_function` or `call_module`, as in torch.fx."""
    target: Any
    """The OpOverload or higher-order op; a name for placeholders; a dotted path for attributes and modules."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    """Value, SymInt, None, or a list or tuple of these. For `call_module`, a template. A placeholder of a body may be a
    plain number, which is fixed."""
    scope: Scope
    call: Call | None
    frames: Frames
    grad: bool = True
    """Whether autograd was on."""
    writes: tuple[Value, ...] = ()
    """The values whose data or metadata the op changed."""
    unbacked: Any = None
    """The `unbacked_bindings` of torch.fx, where the op made symbols."""
    tracked: tuple[Value, ...] = ()
    """If the op writes: its inputs that required grad before it. A write can make its target do so."""

    def values(self) -> list[Value]:
        """The tensors that the op made, in order."""
        return values_in(self.outputs)

    def inputs(self) -> list[Value]:
        """The tensors that the op read or wrote, in order."""
        return values_in((self.args, self.kwargs))

    def bodies(self) -> list[Tape]:
        """Of a higher-order op such as `cond`, the tapes among its arguments."""
        return [a for a in self.args if type(a) is Tape]

    def moved_to(self, call: Call | None) -> Op:
        """The same op, as one of another call."""
        return Op(
            self.kind,
            self.target,
            self.args,
            self.kwargs,
            self.outputs,
            self.scope,
            call,
            self.frames,
            self.grad,
            self.writes,
            self.unbacked,
            self.tracked,
        )


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """One call of a module; the root of the tape is the call of the traced callable itself."""

    module: torch.nn.Module | None
    fqn: str | None
    """The module's name in the model; None for a module that is not in its tree."""
    index: int
    """0 for the first call of this instance."""
    parent: Call | None
    scope: Scope
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    start: int
    frames: Frames
    attributes: dict[str, Any]
    position: int
    """Its index in `Tape.calls`."""
    stop: int = -1
    outputs: Any = None
    raised: BaseException | None = None
    """The exception that ended the call, if one did."""
    leaf: bool = False
    direct: bool = False
    """Whether `module.forward(...)` was called in place of the module, so that no hook ran."""
    mutated: Any = None
    """In a tape without mutation: (args, kwargs, held), what was changed as its new value, all else None. `held` are
    the module's own tensors by their names in it."""
    module_type: type | None = None
    replaced: tuple[str, ...] = ()
    """The module's parameters in whose place it had other tensors, as in `torch.func.functional_call`."""

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        kept = {name: a for name, a in self.attributes.items() if _is_plain(a)}
        raised = self.raised and RuntimeError(f"{type(self.raised).__name__}: {self.raised}")
        return {**state, "module": None, "attributes": kept, "raised": raised}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, a in state.items():
            setattr(self, name, a)


@dataclasses.dataclass(slots=True, eq=False)
class AttributeWrite:
    """A module attribute that the forward bound to a new tensor (`self.n = self.n + 1`)."""

    module: torch.nn.Module | None
    """None in a loaded trace, which holds the attribute itself."""
    fqn: str
    name: str
    value: Value

    def __getstate__(self) -> tuple[Any, ...]:
        return None, self.fqn, self.name, self.value

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.module, self.fqn, self.name, self.value = state


@dataclasses.dataclass(slots=True, eq=False)
class Tape:
    """A recorded program."""

    root: Scope
    ops: list[Op] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)
    inputs: list[Value] = dataclasses.field(default_factory=list)
    """The placeholders' values, in order; one object given twice has one value in two places."""
    input_paths: list[str] = dataclasses.field(default_factory=list)
    numbers: list[Any] = dataclasses.field(default_factory=list)
    """The symbolic numbers that stand for whole numbers given as arguments: placeholders after those of the tensors."""
    args: Any = None
    """Template of (args, kwargs)."""
    outputs: Any = None
    """Template of the result."""
    attribute_writes: list[AttributeWrite] = dataclasses.field(default_factory=list)
    attributes: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """The real tensors behind `get_attr` ops: parameters and buffers by fqn, constants as `_tensor_constant0`."""
    owners: dict[str, tuple[torch.nn.Module, str]] = dataclasses.field(default_factory=dict)
    """Where the model keeps them: the module, and the name there. Constants have no owner."""
    modules: dict[str, torch.nn.Module] = dataclasses.field(default_factory=dict)
    """The modules behind `call_module` ops."""
    shape_env: Any = None
    sizes: Any = None
    """The rules of symbolic input sizes (`record.sizes`); None where all sizes are those of the example."""
    fake_mode: Any = None
    """The mode of the fake tensors, for passes that make more of them."""
    returned: list[Value] | None = None
    """What the graph gives, where that is not the tensors of `outputs` in order."""
    write_back: Any = None
    """What follows the graph (`passes.write_back`), in a tape without mutation."""
    written: frozenset[int] = frozenset()
    """The storages that the recorded program writes to, in a tape without mutation."""
    uses_absolute_offset: set[int] = dataclasses.field(default_factory=set)
    """The storages in which as_strided counts from the start, so that it matters where an input lies in them."""
    specializations: list[Any] = dataclasses.field(default_factory=list)
    """What the example inputs decided (`record.specialize`)."""
    registered: Registered = dataclasses.field(default_factory=Registered)
    """The model's modules and parameters with all their names."""
    exact_autograd: bool = False
    name: str = ""
    """Of the body of a higher-order op: what its GraphModule is named after, as `true_graph`. See `record.bodies`."""

    @property
    def result(self) -> Any:
        """Template of the result, without what the forward puts into the containers of its arguments."""
        return self.outputs.result if isinstance(self.outputs, Returned) else self.outputs

    @property
    def is_body(self) -> bool:
        """Whether this is the body of a higher-order op. It gives `outputs` as they are: a tuple, or one value."""
        return bool(self.name)

    @property
    def is_condition(self) -> bool:
        """Whether this is the body that says if a loop goes on: it gives one value."""
        return self.is_body and not isinstance(self.outputs, tuple)

    def bodies(self) -> list[Tape]:
        """The bodies of the program's higher-order ops, each once, without those inside them."""
        return list(dict.fromkeys(body for op in self.ops for body in op.bodies()))

    def walk(self) -> Iterator[Tape]:
        """This tape and all bodies inside it, outer before inner."""
        yield self
        for body in self.bodies():
            yield from body.walk()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**state, "owners": {}, "fake_mode": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, a in state.items():
            setattr(self, name, a)
        for op in self.ops:
            for value in leaves(op.outputs, Value) if op.kind == "call_module" else op.values():
                value.op = op


def _is_plain(x: Any) -> bool:
    if isinstance(x, (tuple, list)):
        return all(map(_is_plain, x))
    return x is None or isinstance(x, (bool, int, float, str, torch.dtype, torch.device))


def flat(x: Any) -> list[Any]:
    """The leaves of the lists, tuples and dicts in op arguments (which hold nothing deeper)."""
    if isinstance(x, (list, tuple)):
        return [leaf for item in x for leaf in flat(item)]
    if isinstance(x, dict):
        return [leaf for item in x.values() for leaf in flat(item)]
    return [x]


def values_in(x: Any) -> list[Value]:
    """The values among the leaves of `flat`, in order."""
    found: list[Value] = []
    _collect(x, found)
    return found


def _collect(x: Any, found: list[Value]) -> None:
    kind = type(x)
    if kind is Value:
        found.append(x)
    elif kind is not int and kind is not float:  # most leaves
        if isinstance(x, (list, tuple)):
            for item in x:
                _collect(item, found)
        elif isinstance(x, dict):
            for item in x.values():
                _collect(item, found)


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Tapes, graphs and files under construction only grow.

    Looking through them for garbage again and again would make long programs cost more per op.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def walk_frames(frames: Frames) -> list[tuple[CodeType, int]]:
    """The frames of an op or call, outermost first; none of a stack trace that is text."""
    if isinstance(frames, str):
        return []
    parts: list[tuple[tuple[CodeType, int], ...]] = []
    linked: tuple[Any, ...] = frames
    while linked:
        parts.append(linked[1])
        linked = linked[0]
    return [frame for part in reversed(parts) for frame in part]
