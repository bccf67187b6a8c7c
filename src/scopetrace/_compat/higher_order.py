"""Higher-order ops: what they give for fake tensors, and what eager runs of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch._higher_order_ops import utils
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode


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


def indexing_as_op() -> contextlib.AbstractContextManager[Any]:
    """Inside, `table[i]` with a tensor `i` of no dimension is an op, where torch would ask for the number."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()
