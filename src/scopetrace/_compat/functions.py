"""Ops that apply a `torch.autograd.Function` which asks for None in place of gradients that are zero.

torch's own `autograd_function_apply` has one backward, which gets zeros for results without a gradient. Which results
have one is known only when `backward()` runs, and a Function that calls `ctx.set_materialize_grads(False)` may do
something else for each set of them. These ops have a backward for each set, and run that for those which are given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator

from scopetrace.errors import UnsupportedOpError


class ApplyByGradients(HigherOrderOperator):
    """`autograd_function_apply` of a Function with `count` differentiable results.

    Its arguments are the forward, the backwards, and the operands. The backward at position `s` is that of the set `s`:
    of the differentiable results whose bits it has. It takes their gradients alone, and then what the forward saved.
    None stands for a backward that failed when it was recorded.
    """

    def __init__(self, count: int) -> None:
        super().__init__(f"autograd_function_apply_{count}")
        self.count = count
        """How many of the results are differentiable."""

    def __call__(self, *args: Any, non_differentiable_idx: Any = (), saved_for_backward_idx: Any = ()) -> Any:
        """What the forward returns first: the results."""
        bodies, operands = args[: 2**self.count], args[2**self.count :]
        saved: Any = ()

        class Applied(torch.autograd.Function):
            @staticmethod
            def forward(*operands: Any) -> Any:
                nonlocal saved
                results, saved = torch.fx.Interpreter(bodies[0]).run(*operands)
                return results

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                ctx.set_materialize_grads(False)
                ctx.mark_non_differentiable(*[output[i] for i in non_differentiable_idx])

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                differentiable = [grad for i, grad in enumerate(grads) if i not in non_differentiable_idx]
                known = [grad for grad in differentiable if grad is not None]
                if not known:
                    return tuple([None for _ in operands])
                body = bodies[sum(1 << i for i, grad in enumerate(differentiable) if grad is not None)]
                if body is None:
                    raise UnsupportedOpError(
                        "backward of a torch.autograd.Function raised an error when it was recorded with gradients of "
                        f"{len(known)} of its results alone",
                        hint="ask for gradients of all of its results, as eager may need too",
                    )
                return torch.fx.Interpreter(body).run(*known, *saved)

        return Applied.apply(*operands)


APPLY_BY_GRADIENTS = {count: ApplyByGradients(count) for count in (2, 3, 4)}
"""The op by the number of differentiable results."""
