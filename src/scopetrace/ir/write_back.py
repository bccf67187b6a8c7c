"""What follows a graph without mutation, so that the whole does what the model does: a short program of typed steps.

The graph gives new values. The updates copy them into the inputs and the model's tensors that eager would have changed;
the results say for each tensor of the model's result whether it is a value of the graph, an input itself, or a view of
another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from scopetrace._compat.symbols import Symbolic

Number = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class GraphInput:
    """An input tensor: the `index`-th placeholder."""

    index: int
    name: str

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class StateRef:
    """A parameter, buffer or constant, by its name in the graph module."""

    name: str

    def __str__(self) -> str:
        return f"self.{self.name}"


@dataclasses.dataclass(frozen=True)
class FromGraph:
    """The `index`-th value that the graph gives. `stride`: laid out so; `copy`: above 0, that copy of it."""

    index: int
    stride: tuple[int | FromGraph, ...] | None = None
    copy: int = 0

    def __hash__(self) -> int:
        return hash((self.index, self.copy))  # symbolic strides have none

    def __str__(self) -> str:
        layout = f" with strides [{', '.join(map(str, self.stride))}]" if self.stride is not None else ""
        return f"graph[{self.index}]{layout}{', copied' if self.copy else ''}"


@dataclasses.dataclass(frozen=True)
class ViewStep:
    """A view op with the arguments after its first; `slot` picks one of several results.

    A number that depends on data is one that the graph gives. `grad`: as an op that autograd sees.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slot: int | None
    grad: bool = True

    def __call__(self, base: torch.Tensor, number: Number) -> torch.Tensor:
        """The view of `base`. `number` gives the value of a symbolic size, or of one from the graph, in this call."""
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            out = self.op(base, *resolved(self.args, number), **resolved(self.kwargs, number))
        found: torch.Tensor = out if self.slot is None else out[self.slot]
        return found

    def __str__(self) -> str:
        args = ", ".join([*map(str, self.args), *(f"{k}={v}" for k, v in self.kwargs.items())])
        return f".{self.op._schema.name.split('::')[1]}({args})" + (f"[{self.slot}]" if self.slot is not None else "")


@dataclasses.dataclass(frozen=True)
class StridedStep:
    """`as_strided`, `shift` elements after the base begins: at a call that may be elsewhere in the memory.

    `grad`: as an op that autograd sees.
    """

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    shift: Any
    grad: bool = True

    def __call__(self, base: torch.Tensor, number: Number) -> torch.Tensor:
        """The view of `base`. `number` gives the value of a symbolic size in this call."""
        size, stride, shift = resolved((self.size, self.stride, self.shift), number)
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            return base.as_strided(size, stride, base.storage_offset() + shift)

    def __str__(self) -> str:
        return f".as_strided({list(self.size)}, {list(self.stride)}, storage_offset() + {self.shift})"


@dataclasses.dataclass(frozen=True)
class ViewOf:
    """A view made again: `steps` applied to `base`."""

    base: GraphInput | StateRef | FromGraph | SameAs
    steps: tuple[ViewStep | StridedStep, ...]

    def __str__(self) -> str:
        return str(self.base) + "".join(map(str, self.steps))


@dataclasses.dataclass(frozen=True)
class SameAs:
    """The very tensor that is result number `index`."""

    index: int

    def __str__(self) -> str:
        return f"result[{self.index}]"


Source = GraphInput | StateRef | FromGraph | ViewOf | SameAs


@dataclasses.dataclass(frozen=True)
class CopyInto:
    """Copy a graph value into a tensor that the model changed. `grad`: as an op that autograd sees."""

    target: GraphInput | StateRef
    value: FromGraph
    grad: bool

    def __str__(self) -> str:
        return f"{self.target}.copy_({self.value})"


@dataclasses.dataclass(frozen=True)
class ChangeShape:
    """An op such as `transpose_` that changes an input's sizes and strides, not its data."""

    target: GraphInput | StateRef
    step: ViewStep

    def __str__(self) -> str:
        return f"{self.target}{self.step}"


@dataclasses.dataclass(frozen=True)
class SetTo:
    """`set_`: give an input the memory of another tensor."""

    target: GraphInput | StateRef
    value: Source

    def __str__(self) -> str:
        return f"{self.target}.set_({self.value})"


Update = CopyInto | ChangeShape | SetTo


@dataclasses.dataclass
class WriteBack:
    """The program: `updates` in order, then `results`, one for each tensor of the model's result."""

    updates: list[Update]
    results: list[Source]

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        held: Callable[[str], torch.Tensor],
        values: Sequence[torch.Tensor],
        number: Number,
    ) -> list[torch.Tensor]:
        """Carry it out: `values` are what the graph gave, `held` looks up the graph module's tensors.

        `number` gives the value of a symbolic size in this call.
        """
        machine = _Machine(inputs, held, values, number)
        fresh = {s: machine.get(s) for s in self._fresh()}
        machine.ready = fresh
        for update in self.updates:
            target = machine.get(update.target)
            if isinstance(update, ChangeShape):
                update.step(target, machine.number)
            elif isinstance(update, SetTo):
                with torch.no_grad():
                    target.set_(machine.get(update.value))  # type: ignore[call-overload]
            else:
                with torch.set_grad_enabled(update.grad and torch.is_grad_enabled()):
                    target.copy_(machine.get(update.value))
        for source in self.results:
            machine.results.append(machine.get(source))
        return machine.results

    def _fresh(self) -> list[FromGraph]:
        """Copies have to be made before the inputs change."""
        sources = [s.base if isinstance(s, ViewOf) else s for s in self.results]
        sources += [u.value for u in self.updates if isinstance(u, CopyInto)]
        return [s for s in sources if isinstance(s, FromGraph) and (s.copy or s.stride is not None)]

    def __str__(self) -> str:
        rows = [str(u) for u in self.updates]
        rows += [f"result[{i}] = {s}" for i, s in enumerate(self.results)]
        return "\n".join(rows)


class _Machine:
    def __init__(self, inputs: Any, held: Any, values: Any, number: Number) -> None:
        self.inputs, self.held, self.values, self._symbol = inputs, held, values, number
        self.ready: dict[FromGraph, torch.Tensor] = {}
        self.results: list[torch.Tensor] = []

    def number(self, x: Any) -> Any:
        return self.values[x.index] if isinstance(x, FromGraph) else self._symbol(x)

    def get(self, source: Source) -> torch.Tensor:
        if isinstance(source, GraphInput):
            found: torch.Tensor = self.inputs[source.index]
            return found
        if isinstance(source, StateRef):
            held: torch.Tensor = self.held(source.name)
            return held
        if isinstance(source, SameAs):
            return self.results[source.index]
        if isinstance(source, ViewOf):
            view = self.get(source.base)
            for step in source.steps:
                view = step(view, self.number)
            return view
        if source in self.ready:
            return self.ready[source]
        return _laid_out(self.values[source.index], source, self.number)


def resolved(x: Any, number: Number) -> Any:
    """`x` with numbers for the symbolic sizes in it."""
    if isinstance(x, (list, tuple)):
        return type(x)([resolved(item, number) for item in x])
    if isinstance(x, dict):
        return {name: resolved(item, number) for name, item in x.items()}
    return number(x) if isinstance(x, (FromGraph, *Symbolic)) else x


def _laid_out(value: torch.Tensor, source: FromGraph, number: Number) -> torch.Tensor:
    stride = resolved(source.stride, number)
    if stride is None or value.stride() == stride:
        return value.clone() if source.copy else value
    once = tuple(slice(0, 1) if s == 0 else slice(None) for s in stride)  # without what expand() repeats
    part = value[once]
    moved = torch.empty_strided(part.size(), stride, dtype=value.dtype, device=value.device).copy_(part)
    return moved if moved.size() == value.size() else moved.expand(value.size())
