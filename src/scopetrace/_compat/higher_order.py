"""Higher-order ops: what they give for fake tensors, and what eager runs of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey
from torch._higher_order_ops import utils
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from scopetrace.errors import UnsupportedOpError


def fake_results(mode: FakeTensorMode, hop: Any, args: tuple[Any, ...]) -> Any:
    """What a higher-order op returns for fake tensors, by its own shape function, which calls the callables.

    Raises what that raises, for branches whose results do not fit together and the like.
    """
    kernel = utils.registered_hop_fake_fns.get(hop)
    with mode, torch.no_grad():
        if hop is torch.ops.higher_order.tag_activation_checkpoint:
            return args[0](*args[1:])
        if kernel is not None:
            return kernel(*args)
        return hop.python_key_table[FakeTensorMode](mode, *args)


def eager_kernel(hop: HigherOrderOperator) -> Callable[..., Any] | None:
    """What eager runs of a higher-order op where autograd has no part in it."""
    kernel: Callable[..., Any] | None = hop.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
    return kernel


def eager_ops(
    mode: FakeTensorMode, hop: HigherOrderOperator, args: Sequence[Any]
) -> tuple[torch.fx.GraphModule, list[Any]]:
    """What eager runs of a higher-order op, as ops, and what that assumes of sizes beside what is known of them.

    The graph takes the fakes and symbolic numbers among `args`.
    """
    leaves, spec = pytree.tree_flatten(args)
    places = [i for i, x in enumerate(leaves) if isinstance(x, (torch.Tensor, torch.SymInt))]
    kernel = eager_kernel(hop)
    assert kernel is not None

    def run(*operands: Any) -> Any:
        proxies = dict(zip(places, operands, strict=True))
        return kernel(*pytree.tree_unflatten([proxies.get(i, x) for i, x in enumerate(leaves)], spec))

    guards = [] if mode.shape_env is None else mode.shape_env.guards
    before = len(guards)
    with mode, torch.no_grad():
        graph_module = make_fx(run)(*(leaves[i] for i in places))
    return graph_module, [guard.expr for guard in guards[before:]]


def indexing_as_op() -> contextlib.AbstractContextManager[Any]:
    """Inside, `table[i]` with a tensor `i` of no dimension is an op, where torch would ask for the number."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


class ApplyByGradients(HigherOrderOperator):
    """`autograd_function_apply` of a Function with `count` differentiable results.

    It is for a Function that asks for None in place of gradients that are zero. torch's own op has one backward, which
    gets zeros for results without a gradient; which results have one is known only when `backward()` runs.

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
