"""Higher-order ops: how they are called, what they give for fake tensors, and what eager runs of them."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey
from torch._higher_order_ops import utils
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

# the package has an op of this name
_subgraphs: Any = importlib.import_module("torch._higher_order_ops.invoke_subgraph")


def hop_entry_points(
    in_tracing_thread: Callable[[], bool], on_nested_region: Callable[[Callable[[], Any]], Any]
) -> list[tuple[Any, str, Any]]:
    """Replacements for two functions of torch, as (module, name, function), by which higher-order ops are called.

    `torch.cond` and its kind compile their callables first, which finds what these close over; the recorder finds that
    itself, so the replacement calls the op. `on_nested_region` calls a function under `nested_compile_region`.
    """
    compile_and_call, region = utils._hop_compile_and_call, _subgraphs.invoke_subgraph_placeholder

    def call(fn: Callable[..., Any], args: Any, kwargs: Any = None) -> Any:
        if not in_tracing_thread():
            return compile_and_call(fn, args, kwargs)
        if not callable(args[0]):  # the predicate of cond, the one op whose operands are still nested
            args = _flat_operands(*args)
        return fn(*args, **(kwargs or {}))

    def call_region(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(fn, *args, **kwargs)
        return on_nested_region(run) if in_tracing_thread() else region(fn, *args, **kwargs)

    return [(utils, "_hop_compile_and_call", call), (_subgraphs, "invoke_subgraph_placeholder", call_region)]


def _flat_operands(pred: Any, true_fn: Any, false_fn: Any, operands: Any) -> tuple[Any, ...]:
    flat, spec = pytree.tree_flatten(operands)

    def nested(branch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands: branch(*pytree.tree_unflatten(operands, spec))

    return pred, nested(true_fn), nested(false_fn), tuple(flat)


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
