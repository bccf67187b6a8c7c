"""torch's higher-order ops, which take callables: how Python's `torch.cond` reaches them, and what they return."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._higher_order_ops import utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

_regions: Any = importlib.import_module("torch._higher_order_ops.invoke_subgraph")  # the package has an op of this name


@contextlib.contextmanager
def called_at_once(mine: Callable[[], bool]) -> Iterator[None]:
    """`torch.cond` and its kind call their op, where they would first go through torch.compile.

    That is for the sake of closures, which the recorder sees itself. A function under `mark_compile_region` is called,
    as in eager.
    """
    compile_and_call, placeholder = utils._hop_compile_and_call, _regions.invoke_subgraph_placeholder

    def call(fn: Callable[..., Any], args: Any, kwargs: Any = None) -> Any:
        if not mine():
            return compile_and_call(fn, args, kwargs)
        if not callable(args[0]):  # the predicate of cond, the one that leaves its operands nested
            args = _flat_operands(*args)
        return fn(*args, **(kwargs or {}))

    def call_region(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs) if mine() else placeholder(fn, *args, **kwargs)

    utils._hop_compile_and_call = call
    _regions.invoke_subgraph_placeholder = call_region
    try:
        yield
    finally:
        utils._hop_compile_and_call = compile_and_call
        _regions.invoke_subgraph_placeholder = placeholder


def _flat_operands(pred: Any, true_fn: Any, false_fn: Any, operands: Any) -> tuple[Any, ...]:
    flat, spec = pytree.tree_flatten(operands)

    def nested(branch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands: branch(*pytree.tree_unflatten(operands, spec))

    return pred, nested(true_fn), nested(false_fn), tuple(flat)


def fake_results(mode: FakeTensorMode, hop: Any, args: tuple[Any, ...]) -> Any:
    """What a higher-order op returns for fake tensors: its own shape function, which calls the callables.

    Raises what that raises, for branches whose results do not fit together and the like.
    """
    kernel = utils.registered_hop_fake_fns.get(hop)
    with mode, torch.no_grad():
        if kernel is not None:
            return kernel(*args)
        return hop.python_key_table[FakeTensorMode](mode, *args)


def unbacked_symint(mode: FakeTensorMode) -> torch.SymInt:
    """A whole number of unknown value, which no op of the program makes."""
    assert mode.shape_env is not None
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        return mode.shape_env.create_unbacked_symint()


def indexing_by_symbols() -> Any:
    """While it is open, `x[i]` and `x[:i]` take symbolic numbers, as in torch.export."""
    from torch._export.non_strict_utils import _NonStrictTorchFunctionHandler

    return _NonStrictTorchFunctionHandler()


def first_slice(mode: FakeTensorMode, t: torch.Tensor) -> torch.Tensor:
    """`t[0]` in memory of its own."""
    with mode, torch.no_grad():
        return torch.select_copy(t, 0, 0)
