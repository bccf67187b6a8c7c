"""The model's tensors as they are now, and which tensors of a graph module are those of the model.

Data flow:
    owners of the tape's attributes -> the tensors that the model has there now -> bound to the GraphModule at a call
    what a call gives -> attributes of the model's modules, and gradients
    a GraphModule that somebody edited -> each of its tensors: the model's, under its name on the tape, or another one
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from scopetrace._compat.ops import eager
from scopetrace._compat.tensors import buffers_of, parameters_of, unsaved_buffers_of
from scopetrace.errors import StateMismatchError
from scopetrace.ir.tape import ProgramTape
from scopetrace.ir.write_back import GraphInput, StateRef


@dataclasses.dataclass(slots=True)
class _Bound:
    holder: torch.nn.Module
    leaf: str
    """Its name in the holder, a submodule of the GraphModule."""
    module: torch.nn.Module
    attribute: str
    """Its name in the module, a part of the model."""
    table: dict[str, Any]
    """Where the module had it in the trace: its parameters, buffers or other attributes."""
    last: torch.Tensor
    """The one that the GraphModule got last from the model."""
    dtype: torch.dtype
    shape: torch.Size
    """As they were in the trace."""


class LiveState:
    """The model's tensors as they are now: a parameter or buffer may have been assigned anew since the trace."""

    def __init__(self, tape: ProgramTape, graph_module: torch.nn.Module) -> None:
        self._tape = tape
        self._writes = [
            (w, w.module or _submodule(graph_module, w.fqn if w.of is None else "")) for w in tape.attribute_writes
        ]
        self._owners = _owners(tape)
        self._bound: dict[str, _Bound] = {}
        self._places: dict[str, tuple[torch.nn.Module, str]] = {}
        fakes = {name: value.fake for name, value in tape.attribute_reads()}
        targets = {n.target for n in graph_module.graph.nodes if n.op == "get_attr"}  # type: ignore[union-attr]
        for name in targets & tape.attributes.keys():
            path, _, leaf = name.rpartition(".")
            place = self._places[name] = graph_module.get_submodule(path), leaf
            if name in self._owners:
                owner, last = self._owners[name], tape.attributes[name]
                fake = fakes.get(name, last)
                self._bound[name] = _Bound(*place, *owner, _table_of(*owner) or {}, last, fake.dtype, fake.shape)
        self._unread = [
            (name, self._owners[name], (fake.dtype, fake.shape))
            for name, fake in fakes.items()
            if name in self._owners and name not in targets and not tape.edited
        ]
        """Tensors that only ops without effect take, as where Python asks them for their number."""

    def refresh(self) -> None:
        """Bind the tensors that the model has now to the GraphModule, but for those that somebody replaced there.

        Raises StateMismatchError for one that is gone, or of another dtype or shape than in the trace.
        """
        for name, bound in self._bound.items():
            t = bound.table.get(bound.attribute)
            if t is not bound.last:
                t = _look_up(bound.module, bound.attribute)
                if t is None:
                    raise not_as_traced(self._tape, name, (bound.dtype, bound.shape), None)
                if _look_up(bound.holder, bound.leaf) is bound.last:
                    _bind(bound.holder, bound.leaf, t)
                    bound.last = t
            if t.dtype is not bound.dtype or t.shape != bound.shape:
                raise not_as_traced(self._tape, name, (bound.dtype, bound.shape), (t.dtype, t.shape))
        for name, place, traced in self._unread:
            t = _look_up(*place)
            current = None if t is None else (t.dtype, t.shape)
            if current is None or current not in (traced, self._tape.settled.get(name)):
                raise not_as_traced(self._tape, name, traced, current)

    @property
    def places(self) -> list[tuple[torch.nn.Module, str, torch.nn.Module, str]]:
        """Where the model, and where the GraphModule has each tensor of the model: module and name."""
        return [(bound.module, bound.attribute, bound.holder, bound.leaf) for bound in self._bound.values()]

    @property
    def bound(self) -> dict[str, torch.Tensor]:
        """By name, the tensor that was last bound to the GraphModule."""
        return {name: bound.last for name, bound in self._bound.items()}

    def current(self, names: Iterable[str]) -> list[torch.Tensor]:
        """The present tensors behind `get_attr` targets, as they were last bound to the GraphModule."""
        return [self._bound[name].last if name in self._bound else self.held(name) for name in names]

    def held(self, name: str) -> torch.Tensor:
        """The present tensor behind a `get_attr` target: that of the GraphModule, or of the model if none reads it."""
        place = self._places.get(name) or self._owners.get(name)
        t = None if place is None else _look_up(*place)
        return self._tape.attributes[name] if t is None else t

    def table_of(self, name: str) -> tuple[dict[str, Any], str] | None:
        """Where the GraphModule has the tensor behind a `get_attr` target: a table and a key; else None."""
        place = self._places.get(name)
        table = None if place is None else _table_of(*place)
        return None if place is None or table is None else (table, place[1])

    def write(self, results: Iterator[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Assign the tensors that forward assigned to attributes of the model's modules, and the gradients."""

        def outside(of: GraphInput | StateRef) -> torch.Tensor:
            return inputs[of.index] if isinstance(of, GraphInput) else self.held(of.name)

        for of in self._tape.cleared:
            outside(of).grad = None
        for (write, module), tensor in zip(self._writes, results, strict=True):
            if write.is_cache and _look_up(module, write.name) is not None:
                continue
            if write.of is not None:
                _give_gradient(outside(write.of), tensor, adds=write.adds)
            elif write.buffer is None:
                _bind(module, write.name, tensor)
            else:  # it may be new: the forward registered it
                buffers_of(module)[write.name] = tensor
                unsaved = unsaved_buffers_of(module)
                (unsaved.discard if write.buffer else unsaved.add)(write.name)


def current_tensors(tape: ProgramTape) -> dict[str, torch.Tensor]:
    """By name on the tape, the tensors that the model has now."""
    current = {name: _look_up(module, attribute) for name, (module, attribute) in _owners(tape).items()}
    return {name: t for name, t in current.items() if t is not None}


def _owners(tape: ProgramTape) -> dict[str, tuple[torch.nn.Module, str]]:
    """By name on the tape, module and attribute; without script modules, which keep their tensors in C++."""
    owners = {n: (module, at) for n, (module, at) in tape.owners.items() if module is not None}
    return {n: owner for n, owner in owners.items() if not isinstance(owner[0], torch.jit.ScriptModule)}


def _submodule(module: torch.nn.Module, path: str) -> torch.nn.Module:
    """A submodule of a loaded trace, which has no model; an empty one for attributes that the graph does not read."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return torch.nn.Module()


def not_as_traced(tape: ProgramTape, name: str, traced: Any, current: Any) -> StateMismatchError:
    """The error for another tensor of the model. Both are dtype, shape, and device where that was asked."""
    count = 3 if current is not None and current[:2] == traced[:2] else 2
    text = "no tensor" if current is None else _metadata_text(*current[:count])
    hint = "trace again, or put it back"
    if any(write.path == name for write in tape.attribute_writes):
        hint += "; the forward puts another tensor there: run the model once before st.trace if that one stays"
    return StateMismatchError(f"{name} was {_metadata_text(*traced[:count])} when traced and is {text} now; {hint}")


def _metadata_text(dtype: torch.dtype, shape: torch.Size, device: torch.device | None = None) -> str:
    on = "" if device is None else f" on {device}"
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}{on}"


def _give_gradient(t: torch.Tensor, gradient: torch.Tensor, *, adds: bool) -> None:
    """Bind the `grad` of a tensor, or add to it as autograd does: in place, but where gradients flow through it."""
    if not adds or t.grad is None:
        t.grad = gradient
    elif gradient.requires_grad:
        t.grad = t.grad + gradient
    else:
        with torch.no_grad():
            t.grad += gradient


def _table_of(module: torch.nn.Module, name: str) -> dict[str, Any] | None:
    """Where a module has a tensor of this name; None where it has none."""
    tables: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module), module.__dict__)
    return next((table for table in tables if isinstance(table.get(name), torch.Tensor)), None)


def _look_up(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """A tensor of a module, or the gradient of one, `weight.grad`."""
    if name.endswith(".grad"):
        t = getattr(module, name.removesuffix(".grad"), None)
        return None if t is None else t.grad
    table = _table_of(module, name)
    return None if table is None else table[name]


def _bind(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    tables: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module))
    next((table for table in tables if name in table), module.__dict__)[name] = tensor


# An edited graph module ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Held:
    """A tensor of an edited graph."""

    tensor: torch.Tensor
    owner: tuple[torch.nn.Module | None, str] | None
    """As in `Tape.owners`; None for a constant."""
    is_known: bool
    """Whether the trace has it under this name already, or had one of the same metadata."""


@dataclasses.dataclass(frozen=True)
class HeldTensors:
    """Finds the tensors of an edited graph.

    A tensor is the model's where the graph module holds the very tensor of the model, now or when it last ran, or a
    copy with equal values, as a deepcopy of the graph module has. Any other tensor belongs to the graph module.
    """

    current: dict[str, torch.Tensor]
    """By name on the tape, the model's present tensors."""
    bound: dict[str, torch.Tensor]
    """By name, what was last bound to the graph module."""

    def name_of(self, tape: ProgramTape, name: str, t: torch.Tensor) -> str:
        """The name by which the tape knows a tensor that the graph module holds as `name`; else `name` itself."""
        if t is tape.attributes.get(name) or t is self.current.get(name):
            return name
        return next((other for other, held in (tape.attributes | self.current).items() if held is t), name)

    def find(self, tape: ProgramTape, root: torch.nn.Module, name: str, t: torch.Tensor) -> Held:
        """The tensor that a `get_attr` node of this name stands for, where the graph module `root` holds `t`."""
        old = tape.attributes.get(name)
        if old is not None:
            present = self.current.get(name, old)
            if any(t is known for known in (old, present, self.bound.get(name))) or _is_copy(t, present):
                return Held(present, tape.owners.get(name), True)
        path, _, leaf = name.rpartition(".")
        holder = root.get_submodule(path)
        is_constant = name in tape.constants and not isinstance(t, torch.nn.Parameter)
        is_owned = not is_constant and (leaf in parameters_of(holder) or leaf in buffers_of(holder))
        return Held(t, (holder, leaf) if is_owned else None, old is not None and _metadata(old) == _metadata(t))

    def module(self, tape: ProgramTape, root: torch.nn.Module, name: str) -> torch.nn.Module | None:
        """The leaf module of this name, where the graph module holds it or a copy; None where it holds another one."""
        old, module = tape.modules.get(name), root.get_submodule(name)
        return module if module is old or (old is not None and type(module) is type(old)) else None


def _is_copy(t: torch.Tensor, present: torch.Tensor) -> bool:
    if _metadata(t) != _metadata(present) or t.layout is not torch.strided or t.is_quantized:
        return False
    if t.device.type == "meta":
        return True
    with eager():
        return torch.equal(t, present)


def _metadata(t: torch.Tensor) -> tuple[object, ...]:
    stride = t.stride() if t.layout is torch.strided else ()
    return type(t), t.size(), stride, t.dtype, t.device, t.layout, t.requires_grad
