"""`flex_attention`: one op, with the functions of scores and of the mask as bodies.

Data flow:
    `score_mod` and `mask_mod` -> each runs once, on numbers of no dimension -> a body, which gives one number
    what a body reads from outside -> one more operand for it, a "buffer" in torch's words
    bodies, operands -> torch's own shape function -> an Op
"""

from __future__ import annotations

from typing import Any

import torch

from scopetrace._compat.higher_order import fake_results, indexing_as_op
from scopetrace.ir.segment import body_tape, captured
from scopetrace.ir.tape import BodyTape, values_in
from scopetrace.ops.higher_order import written_inputs
from scopetrace.record.higher_order import BodyRecorder, fakes_of

_INDICES = ("b", "h", "q_idx", "kv_idx")
_SCORE_BUFFERS, _MASK_BUFFERS = 7, 8
"""The arguments that hold what the bodies capture."""


class FlexRecorder(BodyRecorder):
    """Records one call of `flex_attention`."""

    def run(self) -> Any:
        """What the op returns to the model."""
        self._refuse_transforms()
        query, key, value, score_mod, (*mask, mask_mod), scale, options, *_ = self.args
        score, score_buffers = self._body(score_mod, "score_mod", "sdpa_score", ("score", *_INDICES), _SCORE_BUFFERS)
        chosen, mask_buffers = self._body(mask_mod, "mask_mod", "sdpa_mask", _INDICES, _MASK_BUFFERS)
        tensors = tuple(map(self._lifted, (query, key, value)))
        block_mask = (*map(self._lifted, mask), chosen)
        args = (*tensors, score, block_mask, scale, options, score_buffers, mask_buffers)
        # torch's shape function gives views, which no op outside of it makes
        out = tuple(map(self._like, fake_results(self.factory.mode, self.hop, fakes_of(args))))
        if torch.is_grad_enabled() and any(v.fake.requires_grad for v in values_in((tensors, score_buffers))):
            self._give_grad(out[:2])
        self._append_op(args, {}, out)
        return out

    def _body(
        self, function: Any, parameter: str, graph: str, names: tuple[str, ...], group: int
    ) -> tuple[BodyTape, tuple[Any, ...]]:
        def run() -> tuple[list[Any], None]:
            numbers = [self._number(name) for name in names]
            placeholders = [self._placeholder(i, x, g) for i, (x, g) in enumerate(self.grouped_operands) if g == group]
            with indexing_as_op():
                result = self.recorded(function, (*numbers, *placeholders))
            return [self.values.value_of(result)], None

        segment, _ = self._cut(run, parameter, graph)
        free_values = captured([segment])
        body = body_tape(self.builder.tape, segment, free_values)
        self._forget([segment], free_values)
        if written_inputs(body):
            self._refuse(f"{parameter} writes to a tensor", "give it a tensor that does not change")
        if any(op.bodies() for op in body.ops):  # a table that requires grad is indexed by a torch.autograd.Function
            self._refuse(f"{parameter} indexes a tensor that requires grad", "detach() it, or trace under no_grad()")
        return body, (*(self.operands[i] for i, (_, g) in enumerate(self.grouped_operands) if g == group), *free_values)

    def _number(self, name: str) -> torch.Tensor:
        query = self._lifted(self.args[0]).fake
        dtype = query.dtype if name == "score" else torch.int32
        number = self.factory.fresh((), (), dtype, query.device, name == "score" and query.requires_grad)
        self.values.append_body_input(name, number)
        return number
