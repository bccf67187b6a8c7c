"""What a part of a program costs: parameters, FLOPs and the memory of what its ops make; what it writes and shares.

Data flow:
    ops of a section and of those inside -> parameters that they read, each tensor once
                                         -> FLOPs of each op, by torch's own counter on tensors without data
                                         -> bytes of each new storage among their results
    mutations of the recorded program, by scope path -> the names that a section writes
    by parameter, the modules whose calls read it -> those of a section that others read, too
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.fx
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from scopetrace._compat.ops import can_decompose, is_op
from scopetrace._compat.symbols import Symbolic, example
from scopetrace._compat.tensors import storage_id
from scopetrace.containers.structure import leaves, map_structure
from scopetrace.formatting import amount
from scopetrace.functionalization.report import mutations
from scopetrace.ops.functional_variants import tensor_of
from scopetrace.program.graph import node_value, type_text
from scopetrace.program.traced import TracedProgram
from scopetrace.view.tree import OpItem, Section, Tree, module_prefix, tensors_of


@dataclasses.dataclass(frozen=True)
class Measures:
    """The cost of a part of a program; sizes that are symbolic count with those of the example."""

    ops: int
    parameters: int
    """Elements of the parameters that it reads, each tensor once."""
    trainable: int
    """Of these, elements of parameters that require gradients."""
    parameter_bytes: int
    buffer_bytes: int
    """Bytes of the buffers and constants that it reads."""
    flops: int
    """Floating-point operations as `torch.utils.flop_counter` counts them, two for each multiply-add."""
    activation_bytes: int
    """Bytes of the results of its ops, without views of memory that was there before."""


class _Cost(NamedTuple):
    """What can be added up of the parts of a program."""

    ops: int = 0
    flops: int = 0
    activation_bytes: int = 0


def cost_text(cost: Measures) -> str:
    """`1.2 M parameters, 22 MFLOP`; empty where it has neither."""
    parts = [f"{amount(cost.parameters, '').strip()} parameters"] if cost.parameters else []
    return ", ".join([*parts, *([amount(cost.flops, "FLOP")] if cost.flops else [])])


def share(part: Measures, whole: Measures) -> float:
    """The part of the FLOPs, from 0 to 1; of the activation bytes where the whole has no FLOPs."""
    if whole.flops:
        return part.flops / whole.flops
    return part.activation_bytes / whole.activation_bytes if whole.activation_bytes else 1.0


def byte_count(tensor: torch.Tensor) -> int:
    """Bytes of the elements of a tensor."""
    count = tensor.numel()
    return (count if type(count) is int else example(count)) * tensor.element_size()


class Meter:
    """Measures the sections of a program; a section is measured once."""

    def __init__(self, program: TracedProgram) -> None:
        self._program = program
        self._costs: dict[Section, _Cost] = {}

    def of(self, *parts: Section) -> Measures:
        """What sections and ops cost together, with all that is in them.

        A call of a function costs what its body costs. Of the bodies of `torch.cond`, the larger counts, as for torch's
        own counter; the body of a loop counts once.
        """
        cost, tensors = self._sum(parts), tensors_of(self._program, *parts)
        parameters = [t for t in tensors if isinstance(t, torch.nn.Parameter)]
        trainable = sum(p.numel() for p in parameters if p.requires_grad)
        size = sum(map(byte_count, parameters))
        others = sum(map(byte_count, tensors)) - size
        elements = sum(p.numel() for p in parameters)
        return Measures(cost.ops, elements, trainable, size, others, cost.flops, cost.activation_bytes)

    def _sum(self, parts: Iterable[Section]) -> _Cost:
        return _Cost(*map(sum, zip(_Cost(), *map(self._cost, parts), strict=True)))

    def _cost(self, part: Section) -> _Cost:
        if part not in self._costs:
            self._costs[part] = self._of_op(part) if isinstance(part, OpItem) else self._sum(part.items)
        return self._costs[part]

    def _of_op(self, op: OpItem) -> _Cost:
        bodies = op.bodies
        memory = 0 if any(_makes(body, op) for body in bodies) else new_bytes(op.node)
        ops, flops, inside = self._sum(bodies)
        if op.node.target is torch.ops.higher_order.cond:
            flops, inside = (max(self._cost(body)[i] for body in bodies) for i in (1, 2))
        return _Cost(1 + ops, self.flops(op.node) + flops, memory + inside)

    def flops(self, node: torch.fx.Node) -> int:
        """Floating-point operations of one op; 0 for a node that a pass made, or whose meta it dropped."""
        if any(node_value(n) is None for n in (node, *node.all_input_nodes)):
            return 0
        return flops_of(node.target, node.args, node.kwargs)


def _makes(body: Section, op: OpItem) -> bool:
    """Whether the results of a body are those of the op, as in a call of a function; a scan puts them together."""
    results = [type_text(node_value(node)) for node in leaves(body.outputs, torch.fx.Node)]
    return results == list(map(type_text, leaves(node_value(op.node), torch.Tensor)))


class Marks:
    """Which sections of a tree write to inputs, buffers and parameters, and which read shared parameters."""

    def __init__(self, program: TracedProgram, tree: Tree) -> None:
        self._writes = [(f"{m.module}/", m.name, m.kind) for m in mutations(program.reported)]
        self._readers: dict[str, list[tuple[int, str | None]]] = {}  # by parameter, ops and the modules around
        for section in tree.root.walk():
            for op in section.items:
                for node in op.attributes if isinstance(op, OpItem) else ():
                    if isinstance(program.tape.attributes.get(str(node.target)), torch.nn.Parameter):
                        self._readers.setdefault(str(node.target), []).append((op.first, section.call.fqn))
        self._shared = {name for name, readers in self._readers.items() if len({fqn for _, fqn in readers}) > 1}

    def writes(self, section: Section) -> tuple[str, ...]:
        """The inputs of the model by path, and the parameters and buffers by name, without the module's own prefix."""
        if section.kind in ("op", "backward"):  # the path is that of a call, or of the forward, which did it
            return ()
        prefix = module_prefix(section) or ""
        writes = [(name, kind) for path, name, kind in self._writes if path.startswith(f"{section.path}/")]
        return tuple(dict.fromkeys(name if kind == "input" else name.removeprefix(prefix) for name, kind in writes))

    def shares(self, part: Section) -> tuple[str, ...]:
        """The parameters that ops of a part read, and other modules, too."""
        names = []
        for name in self._shared:
            inside = {fqn for number, fqn in self._readers[name] if part.first <= number < part.stop}
            outside = {fqn for number, fqn in self._readers[name] if not part.first <= number < part.stop}
            if inside and outside - inside:
                names.append(name)
        return tuple(sorted(names))


# FLOPs ---------------------------------------------------------------------------------------------------------------


def _grouped_mm_flops(a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    """FLOPs of a grouped matrix product; either operand may have the groups as its first dimension."""
    if len(a) == 3 and len(b) == 2:
        return int(2 * a[-2] * torch.Size(b).numel())
    return int(2 * torch.Size(a).numel() * b[-1])


_MORE = {torch.ops.aten._grouped_mm: _grouped_mm_flops}
"""Formulas that `torch.utils.flop_counter` does not have."""


class _Strided(NamedTuple):
    """A tensor without data, whose sizes are those of the example where they are symbolic."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def flops_of(func: Any, args: Any, kwargs: Any) -> int:
    """The floating-point operations of an op as torch counts them, with nodes or values for tensors.

    0 where torch has no formula, or the op does not run without data.
    """
    if not is_op(func) or not (func.overloadpacket in flop_registry | _MORE or can_decompose(func)):
        return 0
    call = func, _without_data(args), tuple([(name, _without_data(x)) for name, x in kwargs.items()])
    try:
        return _count(*call)
    except TypeError:  # an unhashable Python argument
        return _count.__wrapped__(*call)


def _without_data(x: Any) -> Any:
    x = tensor_of(x)
    if isinstance(x, torch.Tensor):
        return _Strided(tuple(map(example, x.shape)), tuple(map(example, x.stride())), x.dtype)
    if isinstance(x, (list, tuple)):
        return tuple(map(_without_data, x))
    return example(x) if isinstance(x, Symbolic) else x


@functools.lru_cache(4096)
def _count(func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> int:
    def tensor(t: _Strided) -> torch.Tensor:
        return torch.empty_strided(t.size, t.stride, dtype=t.dtype, device="meta")

    args, keywords = map_structure(tensor, (args, dict(kwargs)), _Strided)
    counter = FlopCounterMode(display=False, custom_mapping=_MORE)
    try:
        with torch.no_grad(), counter:
            func(*args, **keywords)
    except Exception:  # ops whose results depend on data, or that the meta device does not have
        return 0
    return int(counter.get_total_flops())


def new_bytes(node: torch.fx.Node) -> int:
    """Bytes of the results of an op that are in new memory."""
    before = {storage_id(t) for n in node.all_input_nodes for t in leaves(node_value(n), torch.Tensor)}
    after = {storage_id(t): t for t in leaves(node_value(node), torch.Tensor)}
    return sum(byte_count(t) for storage, t in after.items() if storage not in before)
