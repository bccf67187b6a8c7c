"""The write-back of a functional program: what is done after its graph has run, in a call.

Data flow:
    values that the graph returns -> updates: copied into the inputs, parameters and buffers that the model writes
    values, inputs, model's tensors -> results: each result of the model is one of these, or a view of one

AOTAutograd has the same in its runtime wrappers, as code; here it is data, so that ExportedProgram and ONNX read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypeVar

import torch

from scopetrace._compat.ops import schema_of
from scopetrace._compat.symbols import Symbolic
from scopetrace.containers.structure import map_structure
from scopetrace.errors import EditError
from scopetrace.formatting import Printed

T = TypeVar("T")
Number = Callable[[Any], Any]
"""From a symbolic number, or a number that the graph returns, to its value in a call."""


@dataclasses.dataclass(frozen=True)
class GraphInput:
    """An input tensor."""

    index: int
    """Its position among the tensors of the placeholders."""
    name: str
    """The name of its placeholder."""

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class StateRef:
    """A parameter, buffer or constant of the graph module."""

    name: str
    """Its dotted name there."""

    def __str__(self) -> str:
        return f"self.{self.name}"


@dataclasses.dataclass(frozen=True)
class FromGraph:
    """A value that the graph returns."""

    index: int
    """Its position among the returned values."""
    stride: tuple[int | FromGraph, ...] | None = None
    """The strides that the result has in eager, in elements; None for those that the value has."""
    copy: int = 0
    """0 for the value itself. Results that share memory in the graph but not in eager are copies 1, 2, ... of it."""
    freed: bool = False
    """Whether it requires grad, but the program has differentiated through its history, which autograd has freed."""

    def __hash__(self) -> int:
        return hash((self.index, self.copy))  # without the strides: symbolic ones have no hash

    def __str__(self) -> str:
        layout = f" with strides [{', '.join(map(str, self.stride))}]" if self.stride is not None else ""
        copied = ", copied" if self.copy else ""
        return f"graph[{self.index}]{layout}{copied}{', its history freed by backward' if self.freed else ''}"


@dataclasses.dataclass(frozen=True)
class ViewStep:
    """A view op, applied to a base."""

    op: Callable[..., Any]
    """An `OpOverload`."""
    args: tuple[Any, ...]
    """The arguments after the first, which is the base. A number that depends on data is a `FromGraph`."""
    kwargs: dict[str, Any]
    slot: int | None
    """Which result of the op it is; None for an op with one."""
    grad: bool | None = None
    """Whether autograd records the op; None where it does so if it is on in the call."""

    def __call__(self, base: torch.Tensor, number: Number) -> torch.Tensor:
        """The view of `base` in a call, where `number` gives the values of its numbers."""
        with _grad_mode(self.grad):
            out = self.op(base, *resolved(self.args, number), **resolved(self.kwargs, number))
        return out if self.slot is None else out[self.slot]

    def __str__(self) -> str:
        args = ", ".join([*map(str, self.args), *(f"{k}={v}" for k, v in self.kwargs.items())])
        return f".{schema_of(self.op).op_name}({args})" + (f"[{self.slot}]" if self.slot is not None else "")


@dataclasses.dataclass(frozen=True)
class StridedStep:
    """`as_strided` relative to where the base begins, since in a call it may lie elsewhere in its storage."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    """In elements."""
    shift: Any
    """How many elements after the base it begins."""
    grad: bool | None = None
    """Whether autograd records the op; None where it does so if it is on in the call."""

    def __call__(self, base: torch.Tensor, number: Number) -> torch.Tensor:
        """The view of `base` in a call, where `number` gives the values of its numbers."""
        size, stride, shift = resolved((self.size, self.stride, self.shift), number)
        with _grad_mode(self.grad):
            return base.as_strided(size, stride, base.storage_offset() + shift)

    def __str__(self) -> str:
        return f".as_strided({list(self.size)}, {list(self.stride)}, storage_offset() + {self.shift})"


@dataclasses.dataclass(frozen=True)
class ViewOf:
    """A view of another tensor."""

    base: GraphInput | StateRef | FromGraph | SameAs
    steps: tuple[ViewStep | StridedStep, ...]
    """Applied to the base in order."""

    def __str__(self) -> str:
        return str(self.base) + "".join(map(str, self.steps))


@dataclasses.dataclass(frozen=True)
class SameAs:
    """The same tensor object as an earlier result."""

    index: int
    """The position of that result."""

    def __str__(self) -> str:
        return f"result[{self.index}]"


ValueSource = GraphInput | StateRef | FromGraph | ViewOf | SameAs
"""Where a tensor comes from."""

Written = GraphInput | StateRef | ViewOf
"""What a model changes: a tensor from outside, or memory around one that the model reaches by `as_strided`."""


@dataclasses.dataclass(frozen=True)
class CopyInto:
    """`copy_` of a value that the graph returns into a tensor that the model writes."""

    target: Written
    value: FromGraph
    grad: bool | None
    """Whether autograd records the copy; None where it does so if it is on in the call."""

    def __str__(self) -> str:
        return f"{self.target}.copy_({self.value})"


@dataclasses.dataclass(frozen=True)
class ChangeShape:
    """An op such as `transpose_` that changes the sizes and strides of a tensor, not its data."""

    target: Written
    step: ViewStep

    def __str__(self) -> str:
        return f"{self.target}{self.step}"


@dataclasses.dataclass(frozen=True)
class SetTo:
    """`set_`: the target gets the storage of another tensor."""

    target: Written
    value: ValueSource

    def __str__(self) -> str:
        return f"{self.target}.set_({self.value})"


Update = CopyInto | ChangeShape | SetTo
"""A change of an input, parameter or buffer."""


@dataclasses.dataclass(frozen=True)
class WriteBackRow:
    """What a compiler is told of one step of the write-back."""

    action: Literal["copy", "reshape", "set", "return", "view"]
    """`copy`: the output is copied into the input. `reshape`, `set`: the input gets other sizes, or another storage.
    `return`: a result is the output, the input itself, or an earlier result. `view`: it is a view of such."""
    output: int | None
    """The position among what the graph returns; None where no output takes part."""
    input: int | None
    """The position among what the graph takes; None where no input takes part."""
    result: int | None
    """The position among the results of the original; None where an input is changed."""
    by: Literal["scopetrace", "compiler"]
    """Who does it."""
    step: Update | ValueSource
    """The step itself, with strides and views."""

    def __str__(self) -> str:
        return f"{'' if self.result is None else f'result[{self.result}] = '}{self.step}  # by {self.by}"


_ACTIONS: dict[type, Any] = {CopyInto: "copy", ChangeShape: "reshape", SetTo: "set", ViewOf: "view"}


@dataclasses.dataclass(repr=False)
class WriteBack(Printed):
    """The whole write-back: first the updates, in order, then the results, then what attributes are bound to."""

    updates: list[Update]
    results: list[ValueSource]
    """One for each tensor and symbolic number of the model's result, in order."""
    bound: list[ValueSource | None] = dataclasses.field(default_factory=list)
    """For each `AttributeWrite`, what the attribute is bound to; None where it shares no memory with other results, and
    is the write's value."""

    def statements(self, constant: Callable[[Any], str]) -> list[str]:
        """Python that writes back and binds `results`: the results, in order, then what `bound` has.

        It takes `inputs`, the tensors of the call, as the graph took them; `values`, what the graph returned; `held`,
        which gives a tensor of the graph module by its name; and `number(inputs)`, which gives what gives a symbolic
        size its value. `constant` gives the name of an object.
        """
        sources = _Expressions(constant)
        for i, source in enumerate(copies := self._copies()):  # before the inputs change
            sources.copies[source] = f"copy{i}"
        lines = [
            f"{sources.copies[s]} = {constant(_laid_out)}(values[{s.index}], {constant(s)}, {sources.number}, inputs)"
            for s in dict.fromkeys(copies)
        ]
        for update in self.updates:
            target = sources.get(update.target)
            if isinstance(update, ChangeShape):
                lines.append(f"{constant(update.step)}({target}, {sources.number})")
            elif isinstance(update, SetTo):
                lines.append(f"{target}.data = {sources.get(update.value)}.data")  # `set_` would cut a leaf's history
            else:
                mode = "" if update.grad is None else f"with {constant(torch.set_grad_enabled)}({update.grad}): "
                lines.append(f"{mode}{constant(copy_into)}({target}, {sources.get(update.value)}, {constant(update)})")
        for i, returned in enumerate((*self.results, *self.bound)):
            result = "None" if returned is None else sources.get(returned)
            if isinstance(returned, FromGraph) and returned.freed:
                result = f"{constant(_freed)}({result})"
            sources.results.append(f"result{i}")
            lines.append(f"result{i} = {result}")
        if any(sources.number in line for line in lines):
            lines.insert(0, f"{sources.number} = {constant(_numbers)}(number(inputs), values)")
        return [*lines, f"results = [{', '.join(sources.results)}]"]

    def rows(self, by_compiler: Sequence[Update] = ()) -> tuple[WriteBackRow, ...]:
        """The updates and the results in order, as a table for a compiler that does the updates in `by_compiler`."""
        steps: list[tuple[Any, int | None]] = [*((u, None) for u in self.updates)]
        steps += [(source, i) for i, source in enumerate(self.results)]
        rows: list[WriteBackRow] = []
        for step, result in steps:
            ends = [base_of(x) for x in (getattr(step, "target", None), getattr(step, "value", None), step)]
            output, place = (next((x.index for x in ends if type(x) is c), None) for c in (FromGraph, GraphInput))
            by: Any = "compiler" if any(step is u for u in by_compiler) else "scopetrace"
            rows.append(WriteBackRow(_ACTIONS.get(type(step), "return"), output, place, result, by, step))
        return tuple(rows)

    def left_to_compiler(self, has_history: Callable[[GraphInput, FromGraph], bool]) -> list[Update]:
        """The copies into inputs that a compiler can do, before the rest.

        Not those that autograd records, as `has_history` says; nor those into an input that changes its shape. None
        where a value is read after others are written, because it lies in the memory of these.
        """
        others = {base_of(u.target) for u in self.updates if not isinstance(u, CopyInto)}
        return [
            u
            for u in ([] if self._copies() else self.updates)
            if isinstance(u, CopyInto) and isinstance(u.target, GraphInput) and u.target not in others
            if not has_history(u.target, u.value)
        ]

    def inputs_left_behind(self) -> set[int]:
        """The inputs that get new values or shapes of which autograd knows, but not that results come from these."""
        return {target.index for target, _ in self.seen_updates()} if self.given_results() else set()

    def seen_updates(self) -> list[tuple[GraphInput, FromGraph | None]]:
        """The inputs that autograd sees change, and what is copied into them; None where only their shape changes."""
        seen: list[tuple[GraphInput, FromGraph | None]] = []
        for update in self.updates:
            if isinstance(update.target, GraphInput):
                if isinstance(update, CopyInto) and update.grad is not False:
                    seen.append((update.target, update.value))
                elif isinstance(update, ChangeShape) and update.step.grad is not False:
                    seen.append((update.target, None))
        return seen

    def given_results(self) -> list[FromGraph]:
        """What results and attributes are made of that the graph gives."""
        return [s for s in self._bases() if isinstance(s, FromGraph)]

    def returned_inputs(self) -> set[int]:
        """The inputs that results and attributes are, or are views of."""
        return {s.index for s in self._bases() if isinstance(s, GraphInput)}

    def _bases(self) -> list[ValueSource | None]:
        return [base_of(s) for s in (*self.results, *self.bound)]

    def _copies(self) -> list[FromGraph]:
        """What is a copy of a value of the graph, and not that value."""
        sources = [*self._bases(), *(base_of(u.value) for u in self.updates if isinstance(u, (CopyInto, SetTo)))]
        return [s for s in sources if isinstance(s, FromGraph) and (s.copy or s.stride is not None)]

    def __str__(self) -> str:
        rows = [str(u) for u in self.updates]
        rows += [f"result[{i}] = {s}" for i, s in enumerate(self.results)]
        rows += [f"attribute[{i}] = {s}" for i, s in enumerate(self.bound) if s is not None]
        return "\n".join(rows)

    def __repr__(self) -> str:
        return f"<WriteBack: {len(self.updates)} updates, {len(self.results)} results>"


class Resolver(Generic[T]):
    """What each source is: a tensor in a call, or a node where the write-back is put into a graph.

    Attributes:
        inputs: the inputs.
        state: gives a parameter, buffer or constant by its name.
        values: what the graph returns.
        updated: the new values of inputs and state; for tensors it is empty, since they are written themselves.
        results: the results so far, then what attributes are bound to.
    """

    def __init__(self, inputs: Sequence[T], state: Callable[[str], T], values: Sequence[T]) -> None:
        self.inputs, self.state, self.values = inputs, state, values
        self.updated: dict[GraphInput | StateRef, T] = {}
        self.results: list[Any] = []

    def get(self, source: ValueSource) -> T:
        """What the source is at this point of the write-back."""
        if isinstance(source, FromGraph):
            return self.value(source)
        if isinstance(source, SameAs):
            same: T = self.results[source.index]
            return same
        if isinstance(source, ViewOf):
            view = self.base(source)
            for step in source.steps:
                view = self.view(view, step)
            return view
        return self.updated[source] if source in self.updated else self.before(source)

    def before(self, target: GraphInput | StateRef) -> T:
        """An input or a tensor of the state, without its new value."""
        return self.inputs[target.index] if isinstance(target, GraphInput) else self.state(target.name)

    def value(self, source: FromGraph) -> T:
        """A value that the graph returns."""
        return self.values[source.index]

    def base(self, source: ViewOf) -> T:
        """What the steps of a view begin with."""
        return self.get(source.base)

    def view(self, base: T, step: ViewStep | StridedStep) -> T:
        """One step of a view."""
        raise NotImplementedError


class _Expressions(Resolver[str]):
    """The Python expression of each source; see `WriteBack.statements`."""

    number = "number_of"

    def __init__(self, constant: Callable[[Any], str]) -> None:
        super().__init__((), lambda name: f"held({constant(name)})", ())
        self._constant = constant
        self.copies: dict[FromGraph, str] = {}

    def before(self, target: GraphInput | StateRef) -> str:
        return f"inputs[{target.index}]" if isinstance(target, GraphInput) else self.state(target.name)

    def value(self, source: FromGraph) -> str:
        return self.copies.get(source) or f"values[{source.index}]"

    def view(self, base: str, step: ViewStep | StridedStep) -> str:
        return f"{self._constant(step)}({base}, {self.number})"


def _numbers(symbol: Number, values: Sequence[Any]) -> Number:
    return lambda x: values[x.index] if isinstance(x, FromGraph) else symbol(x)


def copy_into(target: torch.Tensor, value: torch.Tensor, update: CopyInto) -> None:
    """Copy a value into a tensor. Raises EditError for one of another size, which `copy_` would repeat."""
    if value.size() != target.size():
        raise EditError(
            f"{update}: the graph gives {list(value.size())} for {list(target.size())}",
            hint="run a model that sizes its buffers at the first call, as observers of quantization do, "
            "once before st.trace; in an edited graph, keep the sizes of what is written back",
        )
    _ = target.grad_fn  # brings up to date what autograd knows of a view whose base was written
    once = once_each(target.stride())
    target[once].copy_(value[once]) if once else target.copy_(value)


class _Freed(torch.autograd.Function):
    """What a result requires grad by where the history that led to it is freed."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(
            "Trying to backward through the graph a second time: the traced program has called backward(), or "
            "torch.autograd.grad(), which freed it, and a call keeps none of it. Give retain_graph=True there, and "
            "trace again, if you need to backward through it once more"
        )


def _freed(result: torch.Tensor) -> torch.Tensor:
    """A tensor over the memory of `result` that requires grad, by a history that nobody can go back through."""
    if result.grad_fn is not None:  # where an edited graph runs it under autograd
        return result
    with torch.enable_grad():
        # `data` is no view: autograd does not let one that was made without it be written
        freed: torch.Tensor = _Freed.apply(result.data, torch.empty(0, requires_grad=True))
    return freed


def resolved(x: Any, number: Number) -> Any:
    """`x` with the value of each symbolic number, and of each that the graph returns, in its place."""
    return map_structure(number, x, (FromGraph, *Symbolic))


def base_of(source: ValueSource | None) -> ValueSource | None:
    """What a view is of; any other source itself."""
    return source.base if isinstance(source, ViewOf) else source


def _laid_out(value: torch.Tensor, source: FromGraph, number: Number, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The value, or a copy of it, with the strides that `source` asks for, and what history the graph has given it."""
    stride = resolved(source.stride, number)
    is_laid_out = stride is None or value.stride() == stride
    if is_laid_out and not source.copy:
        return value
    has_own_history = not (value.is_leaf or any(value is t for t in inputs))
    with torch.set_grad_enabled(torch.is_grad_enabled() or has_own_history):
        if is_laid_out:
            copy = value.clone()
            if value.layout is not torch.strided or copy.stride() == value.stride():
                return copy
            stride = value.stride()  # clone() packs a view with gaps
        once = once_each(stride)
        part = value[once] if once else value
        moved = torch.empty_strided(part.size(), stride, dtype=value.dtype, device=value.device).copy_(part)
        return moved if moved.size() == value.size() else moved.expand(value.size())


def once_each(stride: Sequence[int]) -> tuple[slice, ...]:
    """An index of one element of each that `expand` repeats; empty where none is repeated."""
    return tuple(slice(0, 1) if s == 0 else slice(None) for s in stride) if 0 in stride else ()


def _grad_mode(grad: bool | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if grad is None else torch.set_grad_enabled(grad)
