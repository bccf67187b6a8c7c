"""Higher-order ops, which take callables: where `torch.cond`, `while_loop`, `scan` and others have their operands."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from scopetrace.ir.tape import BodyTape, Value

_hops = torch.ops.higher_order


@dataclasses.dataclass(frozen=True)
class Form:
    """Where a higher-order op has its callables and what goes into them."""

    bodies: tuple[tuple[int, str, str], ...]
    """Of each callable: its position, the parameter's name, and what torch.export names its graph after."""
    operands: tuple[int, ...]
    """The arguments that hold the operands, in the order in which the callables take them. The last one takes more."""
    sliced: int | None = None
    """The argument of whose tensors the callables get slices."""
    carried: int | None = None
    """The argument whose tensors and numbers the callables get anew in each iteration."""
    runs_once: bool = False
    """Whether a body runs at most once in a call, so that it may write to its operands."""
    has_rest: bool = False
    """Whether the operands are not one argument but all arguments from the last of `operands` on."""
    takes_all: bool = True
    """Whether each body takes all operands, and gives results in memory of their own."""

    def gathered(self, args: tuple[Any, ...]) -> list[Any]:
        """The arguments, the operands always in lists or tuples."""
        last = self.operands[-1]
        args = (*args, *[()] * (last + 1 - len(args)))
        return [*args[:last], tuple(args[last:])] if self.has_rest else list(args)

    def spread(self, args: list[Any]) -> tuple[Any, ...]:
        """The arguments as the op takes them: the inverse of `gathered`."""
        return (*args[:-1], *args[-1]) if self.has_rest else tuple(args)


FORMS: dict[Any, Form] = {
    _hops.cond: Form(((1, "true_fn", "true_graph"), (2, "false_fn", "false_graph")), (3,), runs_once=True),
    _hops.while_loop: Form(
        ((0, "cond_fn", "while_loop_cond_graph"), (1, "body_fn", "while_loop_body_graph")), (2, 3), carried=2
    ),
    _hops.scan: Form(((0, "combine_fn", "scan_combine_graph"),), (1, 2, 3), sliced=2, carried=1),
    _hops.map_impl: Form(((0, "f", "body_graph"),), (1, 2), sliced=1),
    _hops.associative_scan: Form(((0, "combine_fn", "associative_scan_combine_graph"),), (1, 1, 2), sliced=1),
    _hops.autograd_function_apply: Form(
        ((0, "forward", "fwd_body"), (1, "backward", "bwd_body")), (2,), has_rest=True, takes_all=False
    ),
    _hops.tag_activation_checkpoint: Form(((0, "function", "wrap_body"),), (1,), runs_once=True, has_rest=True),
    _hops.flex_attention: Form(((3, "score_mod", "sdpa_score"), (4, "mask_mod", "sdpa_mask")), (7, 8), takes_all=False),
    _hops.invoke_subgraph: Form(((0, "subgraph", "repeated_subgraph"),), (2,), runs_once=True, has_rest=True),
}
"""The ops whose callables are recorded as bodies."""

CHECKPOINTS = (_hops.tag_activation_checkpoint, _hops.wrap_activation_checkpoint)
"""The ops that call their callable and say how autograd is to keep its results, as torch.utils.checkpoint does."""


def written_inputs(body: BodyTape) -> list[int]:
    """The positions of the placeholders that a body writes to."""
    written = {v.storage for op in body.ops for v in op.writes}
    placeholders = [op.outputs for op in body.ops if op.kind == "placeholder"]
    return [i for i, v in enumerate(placeholders) if isinstance(v, Value) and v.storage in written]
