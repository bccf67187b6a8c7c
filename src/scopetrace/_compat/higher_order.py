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
