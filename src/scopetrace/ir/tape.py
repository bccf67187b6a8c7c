"""Tapes: the program as data, on which every stage works.

    callable -> RecordedTape -> FunctionalTape -> torch.fx graph, ExportedProgram, ONNX
                 an op may hold a BodyTape: the branch or loop body of a higher-order op, or an outlined function

A tape has the ops in the order in which they ran, and the module calls in the order in which they began. An op reads
and makes `Value`s and knows its scope, its call and the Python frames that it was called from. A call is a range of
ops, with the arguments that went in and the result that came out. Each value knows its storage, so that aliasing and
mutation are read off the ops.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import operator
import os
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from scopetrace._compat.ops import OpOverload
from scopetrace._compat.shape_env import WatchedShapeEnv
from scopetrace._compat.symbols import Symbolic
from scopetrace._compat.tensors import FakeTensorMode, offset_of, requires_grad_of
from scopetrace.containers.contents import Place
from scopetrace.containers.structure import GivenPart, Returned, leaves, map_structure, weak_cache
from scopetrace.ir.conditions import SizeRules, Specialization
from scopetrace.ir.guards import ArgumentNumber, Guard
from scopetrace.ir.registered import Registered
from scopetrace.ir.scopes import Frames, Nested, Scope
from scopetrace.ir.side_effects import SideEffect
from scopetrace.ir.write_back import GraphInput, StateRef, WriteBack

Target = str | Callable[..., Any]
"""What an op runs, as `torch.fx.node.Target`: an op, or the name of a placeholder, attribute or module."""

Argument = Any
"""What an op takes, as `torch.fx.node.Argument`: values stand for tensors, tapes for bodies. An op of kind
`call_module` takes templates instead, since a module takes anything."""

Output = Any
"""What an op gives: a value for a tensor, a symbolic number, None, or a list, tuple or dict of these. An op of kind
`call_module` gives a template instead."""

Template = Any
"""A user's container tree (see `containers.structure`) with a `Value` in the place of each tensor."""


class Value:
    """A tensor of the program: one output of one op. It belongs to the tape of that op."""

    __slots__ = ("autograd_placeholder", "fake", "key", "offset", "op", "real", "requires_grad", "slot", "storage")

    fake: torch.Tensor
    """Its metadata: shape, dtype, strides, device."""
    op: Op
    """The op that made it: the first one that has it among its outputs."""
    slot: int
    """Its position among the op's outputs."""
    storage: int
    """Equal for values of one tape that share memory. Any number otherwise."""
    key: int | None
    """Stands for the metadata that decides that of an op's results, for the cache of `infer.results`. None where it is
    not known, as for symbolic sizes."""
    requires_grad: bool
    """As the op left it; a later write may change that of `fake`."""
    offset: int | torch.SymInt
    """Its position in its storage, in elements, as the op left it."""
    real: torch.Tensor | None
    """The tensor itself, of a parameter, buffer or constant."""
    autograd_placeholder: bool
    """Whether `fake` requires grad without the history that autograd would have given it: its metadata was inferred."""

    def __init__(self, fake: torch.Tensor, slot: int, storage: int, key: int | None) -> None:
        self.fake = fake
        self.op = None  # type: ignore[assignment]
        self.slot = slot
        self.storage = storage
        self.key = key
        self.requires_grad = requires_grad_of(fake)
        self.offset = offset_of(fake) if fake.layout is torch.strided else 0
        self.real = None
        self.autograd_placeholder = False

    @property
    def currently_requires_grad(self) -> bool:
        """Whether `fake` requires grad."""
        return requires_grad_of(self.fake)

    @property
    def ever_requires_grad(self) -> bool:
        """Whether it requires grad, or did as the op left it: `detach_()` takes its history, a write may bring one."""
        return self.requires_grad or self.currently_requires_grad

    def copy(self, storage: int) -> Value:
        """A value for the same tensor, for an op of another tape. It becomes that of the op that is made with it."""
        new = Value.__new__(Value)
        new.fake, new.slot, new.storage, new.key = self.fake, self.slot, storage, self.key
        new.offset, new.requires_grad, new.real = self.offset, self.requires_grad, self.real
        new.autograd_placeholder = self.autograd_placeholder
        new.op = None  # type: ignore[assignment]
        return new

    def __repr__(self) -> str:
        made_by = "of no op yet" if self.op is None else f"{self.op.kind} {self.op.target}"
        return f"Value({made_by}, {self.slot})"


@dataclasses.dataclass(frozen=True)
class Autocast:
    """The block under `torch.autocast` in which an op ran."""

    device: str
    dtype: torch.dtype
    casts: bool
    """Whether the op is one that autocast casts the inputs of, with these, or such a cast."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """What an op does in a training step where it is not of the forward."""

    name: str
    """`backward`, or `other`: of an optimizer, or between backward and optimizer."""
    call: int = 0
    """Of `backward`, the position in `Tape.calls` of the call that made the op of the forward to which it belongs."""
    scope: Scope | None = None
    """Of `backward`, the scope of that op."""
    recomputed: bool = False
    """Whether it is that op itself, which runs again in a region under `torch.utils.checkpoint`."""


@dataclasses.dataclass(frozen=True)
class BackwardNode:
    """A node of autograd's graph that ran in a backward."""

    op: Op
    """The op of the forward that made it."""
    stop: int
    """The number of ops on the tape when it had run."""
    has_saved: bool
    """Whether it has saved tensors in a region under `torch.utils.checkpoint`, which runs again for them."""
    freed: bool = False
    """Whether what it has saved was freed then: nothing differentiates through it again."""


GIVEN_META = ("custom", "fwd_nn_module_stack")
"""What ops get of the `node.meta` of a graph that is traced; `custom` is of `torch.fx.traceback.annotate` too."""


@dataclasses.dataclass(eq=False, slots=True)
class _OpFields:
    kind: str
    """`placeholder`, `get_attr`, `call_function` or `call_module`, as in torch.fx."""
    target: Target
    """Of `call_function`, the OpOverload or higher-order op. The name of a placeholder; the dotted path of an attribute
    or module."""
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    outputs: Output
    """Value, symbolic number, None, or a list or tuple of these. Of `call_module`, a template. A placeholder of a body
    may be a plain number, which is fixed."""
    scope: Scope
    """The module scope or user scope in which it ran."""
    call: Call | None
    """The innermost module call around it; None before the first."""
    frames: Frames
    """The Python frames that it was called from."""
    grad: bool = True
    """Whether autograd was on."""
    writes: tuple[Value, ...] = ()
    """The values whose data or metadata the op changed."""
    unbacked: dict[Any, Any] | None = None
    """The `unbacked_bindings` of torch.fx: by sympy symbol that the op made, where in its result it stands."""
    tracked: tuple[Value, ...] = ()
    """Of an op that writes: its inputs that required grad before it. A write can make its target do so."""
    meta: dict[str, Any] | None = None
    """What its node gets in `node.meta`, by keys of `GIVEN_META`."""
    autocast: Autocast | None = None
    """None outside of such a block, and of what would be another op inside one."""
    phase: Phase | None = None
    """None in the forward."""


class Op(_OpFields):
    """One step of the program. It does not change.

    It becomes the op of those values among its outputs that have none yet (see `take_values`).
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # for which the fields of the dataclass say what an op is made of

        def __new__(cls, *args: Any, **kwargs: Any) -> Op:
            new = _OpFields(*args, **kwargs) if args or kwargs else _OpFields.__new__(_OpFields)  # as `copy` does
            new.__class__ = cls  # a frozen dataclass takes four times as long to make
            return new

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            outputs = self.outputs
            if type(outputs) is Value:  # as of most
                outputs.op = outputs.op or self
            elif outputs is not None:
                for value in self.values():
                    value.op = value.op or self

        def __setattr__(self, name: str, value: Any) -> None:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        for name, value in state[1].items():
            object.__setattr__(self, name, value)

    def values(self) -> list[Value]:
        """The tensors that the op made, in order."""
        outputs = self.outputs
        if type(outputs) is Value:  # as of most
            return [outputs]
        return leaves(self.outputs, Value) if self.kind == "call_module" else values_in(self.outputs)

    def inputs(self) -> list[Value]:
        """The tensors that the op read or wrote, in order."""
        if self.kind == "call_module":
            return leaves((self.args, self.kwargs), Value)
        values: list[Value] = []
        _collect(self.args, values)
        if self.kwargs:
            _collect(self.kwargs.values(), values)
        return values

    @property
    def name(self) -> str:
        """The target of an op that is not of kind `call_function`. Raises TypeError for one that is."""
        if not isinstance(self.target, str):
            raise TypeError(f"{self.target} has no name in the program")
        return self.target

    @property
    def result(self) -> Value:
        """The one tensor that the op made. Raises TypeError if its outputs are anything else."""
        if not isinstance(self.outputs, Value):
            raise TypeError(f"the result of {self.target} is no tensor")
        return self.outputs

    def tensor(self, position: int) -> Value:
        """The tensor that is the positional argument at `position`. Raises TypeError for anything else."""
        operand = self.args[position]
        if not isinstance(operand, Value):
            raise TypeError(f"argument {position} of {self.target} is no tensor")
        return operand

    def bodies(self) -> list[BodyTape]:
        """Of a higher-order op such as `cond`, the tapes in its arguments. One of them is an argument itself."""
        if type(self.target) is OpOverload or BodyTape not in map(type, self.args):
            return []
        return [a for a in flat(self.args) if type(a) is BodyTape]

    def replace(self, **changed: Any) -> Op:
        """A copy with other fields, as of `dataclasses.replace`. The values of this op stay its own."""
        fields = dict(zip(_OP_FIELDS, _fields_of(self), strict=True))
        fields.update(changed)
        # in order, which is faster than by name; by name where one is no field's, for the error
        return Op(*fields.values()) if len(fields) == len(_OP_FIELDS) else Op(**fields)

    def copied(
        self,
        values: dict[Value, Value],
        storages: Mapping[int, int] = types.MappingProxyType({}),
        calls: Mapping[Call, Call] = types.MappingProxyType({}),
    ) -> Op:
        """A copy for another tape: it reads the values that stand in `values`, and adds those that it makes.

        These are in the `storages` that stand for theirs, and the op in that of `calls`, else in the same.
        """
        for v in self.values():
            values[v] = v.copy(storages.get(v.storage, v.storage))
        taken = [(name, getattr(self, name)) for name in ("args", "kwargs", "writes", "tracked")]
        changed = {name: renamed(x, values) for name, x in taken if x}  # attributes have outputs alone
        call = None if self.call is None else calls.get(self.call, self.call)
        return self.replace(outputs=renamed(self.outputs, values), call=call, **changed)

    def take_values(self) -> Op:
        """Become the op of all its outputs, since it takes the place of the one that had them. Returns itself."""
        for value in self.values():
            value.op = self
        return self


_OP_FIELDS = tuple([field.name for field in dataclasses.fields(Op)])
_fields_of = operator.attrgetter(*_OP_FIELDS)


@dataclasses.dataclass(eq=False)
class Call(Nested):
    """One call of a module. The first call of a tape, its root, is that of the traced callable.

    Also a user scope that was entered, or a function under `nested_compile_region` that was called: see `is_module`.
    """

    module: torch.nn.Module | None
    """None of a function, of nodes of a graph, and in a loaded trace."""
    fqn: str | None
    """The module's name in the model; None for a module that is not in its tree."""
    index: int
    """How many calls of this module were before it."""
    parent: Call | None
    """The call around it; None of the root."""
    scope: Scope
    args: tuple[Template, ...]
    kwargs: dict[str, Template]
    start: int
    """The position in `Tape.ops` of its first op."""
    frames: Frames
    """The Python frames that it was called from."""
    attributes: dict[str, Any]
    """The module's plain attributes at the start of the call: neither tensors nor modules."""
    position: int
    """Its position in `Tape.calls` of the recording."""
    stop: int = -1
    """The position in `Tape.ops` after its last op; equal to `start` for a call without ops."""
    outputs: Template = None
    raised: BaseException | None = None
    """The exception that ended the call, if one did."""
    leaf: bool = False
    """Whether the call is one op of kind `call_module`."""
    direct: bool = False
    """Whether `module.forward(...)` was called in place of the module, so that no hook ran."""
    mutated: tuple[Any, Any, dict[str, Value]] | None = None
    """In a functional tape: the templates of `args` and `kwargs` with the new values of what the call changed and None
    for all else, and the new values of the module's own tensors, by their names in it. None if nothing was changed."""
    module_type: type | None = None
    """None of a function."""
    signature: inspect.Signature | None = None
    """Of a function or region, of a scripted module in a loaded trace, and of nodes of a graph, if it has one."""
    replaced: tuple[str, ...] = ()
    """The module's parameters in whose place it had other tensors, as in `torch.func.functional_call`."""
    is_region: bool = False
    """Whether a function under `nested_compile_region` was called, which has arguments and a result."""
    method: str = ""
    """Of a method of another module, other than its forward, that was called: `Encoder.encode`. A user scope."""

    @property
    def is_module(self) -> bool:
        """False for what a user scope or region did, which is in the call of the module around it."""
        return self.parent is None or self.scope.is_module

    @property
    def of_module(self) -> Call:
        """This call, or for a user scope or region that of the module around it."""
        call = self
        while call.parent is not None and not call.scope.is_module:
            call = call.parent
        return call

    @property
    def group(self) -> type | str | None:
        """What calls have in common that may share a function: the class of the modules, the method or the scope."""
        return self.module_type if self.is_module else self.method or self.scope.name

    @property
    def prefix(self) -> str:
        """What the names of the module's tensors begin with in the model: `"fc."`, or nothing for the root."""
        fqn = self.of_module.fqn
        return f"{fqn}." if fqn else ""

    def replace(self, **changed: Any) -> Call:
        """A copy with other fields, as of `dataclasses.replace`, which takes ten times as long."""
        new = Call.__new__(Call)
        new.__dict__.update(self.__dict__, **changed)
        return new

    def rename(self, values: Mapping[Value, Value]) -> Call:
        """Take other values in place of those that are keys of `values`. Returns the call."""
        self.args, self.kwargs = renamed((self.args, self.kwargs), values)
        self.outputs, self.mutated = renamed((self.outputs, self.mutated), values)
        return self


class Signed:
    """Stands for a function of which the signature is known, and nothing else."""

    def __init__(self, signature: inspect.Signature) -> None:
        self.__signature__ = signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing calls it; `inspect.signature` wants a callable."""
        raise NotImplementedError


signature_of = weak_cache(inspect.signature)
"""The signature of a function, read once. Raises TypeError and ValueError where it has none."""


def forward_of(call: Call, root: Any) -> Any:
    """The function that a call ran, for its signature; `root` is that of the root call, None where it is not known."""
    if not call.is_module:
        return None if call.signature is None else Signed(call.signature)
    if call.position == 0 and root is not None:
        return root
    if call.module is not None:
        return call.module.forward
    forward: Any = getattr(call.module_type, "forward", None)
    if call.signature is not None or forward is None:  # of a function, scripted, or read off the nodes of a graph
        return None if call.signature is None else Signed(call.signature)
    return types.MethodType(forward, object())  # in a loaded trace, which has no modules


def bind(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by the names of forward's parameters, defaults included.

    Without a signature that fits, positional arguments are named `arg0`, `arg1`, ...
    """
    function = getattr(forward, "__func__", None)
    try:
        if function is None:
            bound = inspect.signature(forward).bind(*args, **kwargs)
        else:
            bound = signature_of(function).bind(None, *args, **kwargs)
    except (TypeError, ValueError):  # scripted and built-in callables have no signature
        return {f"arg{i}": a for i, a in enumerate(args)} | kwargs
    bound.apply_defaults()
    return dict(itertools.islice(bound.arguments.items(), function is not None, None))


@dataclasses.dataclass(eq=False)
class AttributeWrite:
    """A module attribute that the forward bound to a new tensor (`self.n = self.n + 1`), or the `grad` of a tensor."""

    module: torch.nn.Module | None
    """None in a loaded trace, which holds the attribute itself, and where it is that of a tensor."""
    fqn: str
    """The name of the module, or tensor, in the model."""
    name: str
    """The attribute's name in the module."""
    value: Value
    of: GraphInput | StateRef | None = None
    """The tensor whose `grad` it is; None for an attribute of a module."""
    adds: bool = False
    """Whether a call adds the value to the gradient that is there, as `backward()` does, in place of binding it."""
    buffer: bool | None = None
    """Of a buffer, whether it is in the state dict; None for other attributes."""
    is_cache: bool = False
    """Whether it is bound only where there is no tensor: the forward computes it once, and each call the same again."""
    place: Place | None = None
    """Where Python holds a number, which a call puts there; None for a tensor, and in a loaded trace."""

    @property
    def path(self) -> str:
        """The attribute's name in the model: `"norm.running_mean"`."""
        return f"{self.fqn}.{self.name}" if self.fqn else self.name


@dataclasses.dataclass(eq=False)
class Tape:
    """What all tapes share."""

    root: Scope
    ops: list[Op] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)
    inputs: list[Value] = dataclasses.field(default_factory=list)
    """The tensors among the placeholders, in order. One tensor given twice has two values, and the ops read the first
    one."""
    outputs: Template = None
    """The result. Of a program it may be a `Returned`, with what the forward puts into the containers of its
    arguments."""
    attributes: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """The real tensors behind `get_attr` ops: those of the model by fqn, constants by the name that `add_constant` gave
    them. A complete body has none: it takes them as operands."""
    owners: dict[str, tuple[torch.nn.Module | None, str]] = dataclasses.field(default_factory=dict)
    """Where the model keeps the tensors of `attributes`: the module, None in a loaded trace, and the name there. The
    others are constants: from a closure, a global or a literal."""
    shape_env: WatchedShapeEnv | None = None
    """What is known of the symbols of its sizes."""
    fake_mode: FakeTensorMode | None = None
    """The mode of its fake tensors, for passes that make more of them."""
    inference: Any = None
    """The `infer.Inference` of ops on its fake tensors; None in a loaded trace."""

    def scopes(self) -> Iterator[Scope]:
        """All scopes, outer before inner."""
        return self.root.walk()

    def bodies(self) -> list[BodyTape]:
        """The bodies of the higher-order ops, each once, without those inside them."""
        return list(dict.fromkeys(body for op in self.ops for body in op.bodies()))

    def walk(self) -> Iterator[Tape]:
        """This tape and all bodies inside it, outer before inner."""
        yield self
        for body in self.bodies():
            yield from body.walk()

    @property
    def outer_grad(self) -> bool:
        """Whether autograd is on around the ops: the mode that the graph begins and ends in."""
        return self.ops[0].grad if self.ops else True

    def has_writes(self) -> bool:
        """Whether an op writes, of this tape or of a body inside it."""
        return any(op.writes for inner in self.walk() for op in inner.ops)

    def attribute_reads(self) -> list[tuple[str, Value]]:
        """The names and values of the parameters, buffers and constants that ops read, in order."""
        return [(op.name, op.result) for op in self.ops if op.kind == "get_attr"]

    def graph_outputs(self) -> list[Any]:
        """What the graph of this tape gives beside the tensors bound to attributes: values and symbolic numbers."""
        return leaves(self.outputs, (Value, *Symbolic))

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """Those of `attributes` that are not the model's, in order."""
        return {name: t for name, t in self.attributes.items() if name not in self.owners}

    def add_constant(self, real: torch.Tensor, reserved: Container[str] = (), wanted: str = "") -> str:
        """Hold a tensor that is not the model's. Returns its name, not one in `reserved`; `wanted` if it can be."""
        counted = map("_tensor_constant{}".format, itertools.count(len(self.attributes) - len(self.owners)))
        names = itertools.chain([wanted] if wanted else [], counted)
        name = next(n for n in names if n not in self.attributes and n not in reserved)
        self.attributes[name] = real
        return name


@dataclasses.dataclass(eq=False)
class BodyTape(Tape):
    """The body of a higher-order op: a program whose placeholders are all that it reads.

    `outputs` is what it gives as it is: a tuple, or one value where it is a condition.
    """

    name: str = ""
    """What its GraphModule is named after, as `true_graph`."""
    is_condition: bool = False
    """Whether it gives one value, not a tuple: it says if a loop goes on, or computes a score."""
    context_fn: Any = None
    """Of a checkpointed region, the `context_fn` that chooses which results backward does not compute again; None if
    all are. It is code, which a file does not have."""


@dataclasses.dataclass(eq=False)
class ProgramTape(Tape):
    """A whole program: what `RecordedTape` and `FunctionalTape` share."""

    args: Template = None
    """(args, kwargs) of the traced call."""
    example_inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """The arguments themselves with which it was traced; None for a loaded program."""
    input_paths: list[str] = dataclasses.field(default_factory=list)
    """Where each of `inputs` stands in the arguments, such as `cache[0]`."""
    numbers: list[torch.SymInt] = dataclasses.field(default_factory=list)
    """The symbolic numbers that stand for whole numbers among the arguments: placeholders after those of `inputs`."""
    attribute_writes: list[AttributeWrite] = dataclasses.field(default_factory=list)
    settled: dict[str, tuple[torch.dtype, torch.Size]] = dataclasses.field(default_factory=dict)
    """Of attributes that the forward binds to tensors of other metadata when it first runs: what they are from then on.
    """
    cleared: list[GraphInput | StateRef] = dataclasses.field(default_factory=list)
    """The tensors whose gradient is None after a call, whatever it was before."""
    modules: dict[str, torch.nn.Module] = dataclasses.field(default_factory=dict)
    """The modules behind `call_module` ops."""
    sizes: SizeRules | None = None
    """The rules of symbolic input sizes; None where all sizes are those of the example."""
    uses_absolute_offset: set[int] = dataclasses.field(default_factory=set)
    """The storages that `as_strided` reads at an offset from their start, so that the offset of an input matters."""
    specializations: list[Specialization] = dataclasses.field(default_factory=list)
    """The values that depend on data and are fixed, because Python looked at them."""
    grad: bool = True
    """Whether autograd was on when the forward began."""
    guards: list[Guard] = dataclasses.field(default_factory=list)
    """What the forward read from outside of the program, in order: another value at a call is another program."""
    argument_numbers: list[ArgumentNumber] = dataclasses.field(default_factory=list)
    """The numbers in objects among the arguments that the forward may have read, and that are fixed."""
    given: list[GivenPart] = dataclasses.field(default_factory=list)
    """The parts of the result that are objects among the arguments, which a call gives back: `return cache`."""
    side_effects: list[SideEffect] = dataclasses.field(default_factory=list)
    """What the forward did to Python objects, which the graph does not carry."""
    warns_of_effects: bool = False
    """Whether a call warns, rather than raises, where the program is right for one call only."""
    registered: Registered = dataclasses.field(default_factory=Registered)
    """The model's modules and parameters with all their names."""
    edited: bool = False
    """Whether it was read from a graph that a user or a pass changed, so that the recorded program is another one."""
    write_back: WriteBack | None = None
    """What makes the results and effects of the recorded program from what the graph gives; None where the graph's
    outputs are the results, and there are no effects."""

    @property
    def outer_grad(self) -> bool:
        """As `grad`."""
        return self.grad

    @property
    def result(self) -> Template:
        """The result of the forward, without what it puts into the containers of its arguments."""
        return self.outputs.result if isinstance(self.outputs, Returned) else self.outputs

    def written_storages(self) -> frozenset[int]:
        """The storages that the recorded program writes to."""
        return frozenset(v.storage for op in self.ops for v in op.writes)


@dataclasses.dataclass(eq=False)
class RecordedTape(ProgramTape):
    """The ops as they ran: they may write."""

    exact_autograd: bool = False
    """Whether autograd saw every op while it was recorded, because the forward itself differentiates."""
    backwards: list[list[BackwardNode]] = dataclasses.field(default_factory=list)
    """For each time that the forward differentiates, the nodes of autograd's graph that ran, in order."""
    checkpointed: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Where the forward differentiates: of each region under `torch.utils.checkpoint` the positions of its first op and
    after its last one."""

    def differentiated(self) -> set[Op]:
        """The ops through which the program has differentiated once and for all: autograd keeps nothing of them."""
        return {node.op for nodes in self.backwards for node in nodes if node.freed}


@dataclasses.dataclass(eq=False)
class FunctionalTape(ProgramTape):
    """A program in which no op writes, and what has to follow it so that the whole does what the recorded one does."""

    returned: list[Any] | None = None
    """The values and symbolic numbers that the graph gives; None for the leaves of `outputs` in order."""
    written: frozenset[int] = frozenset()
    """The storages that the recorded program writes to."""
    decomposed: bool = False
    """Whether a table of decompositions was applied."""

    @classmethod
    def of(cls, program: ProgramTape, **changed: Any) -> FunctionalTape:
        """A functional tape with the fields of another program, but for those that are given.

        Without `changed` it shares the ops of `program`, none of which may write.
        """
        shared = {f.name: getattr(program, f.name) for f in dataclasses.fields(ProgramTape)}
        return cls(**{**shared, **changed})

    def graph_outputs(self) -> list[Any]:
        """What the graph of this tape gives beside the tensors bound to attributes: values and symbolic numbers."""
        return super().graph_outputs() if self.returned is None else self.returned

    def written_storages(self) -> frozenset[int]:
        """The storages that the recorded program writes to."""
        return self.written


def is_plain(x: Any) -> bool:
    """Whether `x` is text, a number, None, a dtype or a device, or a list or tuple of these."""
    if isinstance(x, (tuple, list)):
        return all(map(is_plain, x))
    return x is None or isinstance(x, (bool, int, float, str, torch.dtype, torch.device))


def flat(x: Argument | Output) -> list[Any]:
    """The leaves of an op's argument, in order."""
    if isinstance(x, (list, tuple)):
        return [leaf for item in x for leaf in flat(item)]
    if isinstance(x, dict):
        return [leaf for item in x.values() for leaf in flat(item)]
    return [x]


def map_argument(fn: Callable[[Any], Any], x: Any) -> Any:
    """An op's argument or output with `fn` of each leaf in its place."""
    kind = type(x)
    if kind is not Value and kind not in _LEAVES:
        if isinstance(x, (list, tuple)):
            return kind([map_argument(fn, item) for item in x])
        if isinstance(x, dict):
            return {name: map_argument(fn, item) for name, item in x.items()}
    return fn(x)


def values_in(x: Any) -> list[Value]:
    """The values among the leaves of an op's arguments or outputs, in order. Of a template, use `leaves`."""
    if isinstance(x, Value):
        return [x]
    values: list[Value] = []
    _collect((x,), values)
    return values


def _collect(items: Iterable[Any], values: list[Value]) -> None:
    for x in items:
        kind = type(x)
        if kind is Value:
            values.append(x)
        elif kind not in _LEAVES:
            if isinstance(x, (list, tuple)):
                _collect(x, values)
            elif isinstance(x, dict):
                _collect(x.values(), values)


_LEAVES = frozenset({bool, int, float, str, type(None), torch.dtype})  # as most leaves are: isinstance takes longer


def renamed(x: Any, values: Mapping[Value, Value]) -> Any:
    """An op's argument, or a template, with other values in place of those that are keys of `values`."""
    return map_structure(lambda v: values.get(v, v), x, (Value, BodyTape))


def checks_enabled() -> bool:
    """Whether each stage verifies its result, because the environment variable `SCOPETRACE_CHECK` is `1`.

    Asked once per stage, not once per op.
    """
    return os.environ.get("SCOPETRACE_CHECK") == "1"
