"""The fake mode of a trace, and what torch's rules for fake tensors leave out or get wrong.

Data flow:
    an op -> FakeTensorMode.dispatch, with torch's questions of memory answered without guards where none is needed
    `ctc_loss` with lengths in tensors, of which torch says nothing -> rules of our own
    an op on empty tensors, whose rule fails -> the op itself, which computes next to nothing of them

Torch's rules ask first which sizes are 1, as these dimensions count in no stride. With a dynamic size, as that of
`x[1:]`, each such question is a guard, also where the answer is the same either way.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import _prims_common, _refs
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from scopetrace._compat.symbols import surely_equal

_GIVING_ONE_TWICE = (torch.ops.aten.mkldnn_rnn_layer_backward.default,)
"""Ops of which two results are one tensor. Torch's cache of fake tensors gives two where it knows the op."""


def fake_mode_of(shape_env: ShapeEnv) -> FakeTensorMode:
    """A FakeTensorMode of torch's own class, by which higher-order ops know it, that runs the parts of `ctc_loss`."""
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True, static_shapes=True)
    mode.dispatch = functools.partial(_dispatch, weakref.ref(mode))  # type: ignore[method-assign]
    return mode


def _dispatch(
    mode_ref: Callable[[], FakeTensorMode | None], func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """As `FakeTensorMode.dispatch`: what an op gives for fake tensors."""
    mode = mode_ref()
    assert mode is not None and mode.shape_env is not None
    if func in _CTC_RULES:
        return _CTC_RULES[func](mode, *args)
    schema = getattr(func, "_schema", None)  # higher-order ops have none
    if FakeTensor not in types and schema and schema.is_mutable:  # in a leaf module; torch would write to real tensors
        fake_of = functools.partial(mode.fake_tensor_converter.from_real_tensor, mode)
        args, kwargs = tree_map_only(torch.Tensor, fake_of, (args, kwargs))
    before, mode.cache_enabled = mode.cache_enabled, mode.cache_enabled and func not in _GIVING_ONE_TWICE
    try:
        with _asked_without_guards(func) if mode.shape_env.var_to_range else contextlib.nullcontext():
            return FakeTensorMode.dispatch(mode, func, types, args, kwargs)
    finally:
        mode.cache_enabled = before


# What torch asks of memory -------------------------------------------------------------------------------------------

_COPY = torch.ops.aten.copy_.default
_overlap = torch._debug_has_internal_overlap
_is_contiguous = _prims_common.check_contiguous_sizes_strides
_expanded = _refs.expand


def _internal_overlap(input: torch.Tensor) -> int:
    """As torch's: 1 where elements share memory, 0 where none do, 2 where that is not known."""
    if not any(isinstance(n, torch.SymInt) for n in (*input.size(), *input.stride())):
        return _overlap(input)
    expanded = [size for size, stride in zip(input.size(), input.stride(), strict=True) if surely_equal(stride, 0)]
    return 1 if any(size > 1 for size in expanded) else 2


def _contiguous(sizes: Sequence[Any], strides: Sequence[Any], false_if_dde: bool = False) -> bool:
    """As torch's: whether the strides are those of a contiguous tensor."""
    expected: Any = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if not surely_equal(stride, expected):
            return _is_contiguous(sizes, strides, false_if_dde)
        expected = expected * size
    return True


def _expand(a: torch.Tensor, *size: Any, **options: Any) -> Any:
    """As torch's, for the rule of `copy_`, which asks only whether it may be."""
    wanted = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    same = len(a.size()) == len(wanted) and all(map(surely_equal, a.size(), wanted))
    return a if same else _expanded(a, *size, **options)


@contextlib.contextmanager
def _asked_without_guards(func: Any) -> Iterator[None]:
    """Inside, where torch runs the rule of `func`, they make a guard only where the answer depends on it."""
    torch._debug_has_internal_overlap = _internal_overlap
    _prims_common.check_contiguous_sizes_strides = _contiguous
    if func is _COPY:
        _refs.expand = _expand
    try:
        yield
    finally:
        torch._debug_has_internal_overlap = _overlap
        _prims_common.check_contiguous_sizes_strides = _is_contiguous
        _refs.expand = _expanded


# ctc_loss -------------------------------------------------------------------------------------------------------------


def _ctc_loss(
    mode: FakeTensorMode, log_probs: torch.Tensor, targets: torch.Tensor, *both_lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each sequence, (N,), and what its backward reads, (N, T, 2 * the longest target + 1).

    `both_lengths` are those of the inputs and of the targets, (N,) each.
    Raises RuntimeError for shapes and dtypes that the kernel refuses.
    """
    times, count = log_probs.size()[:2] if log_probs.dim() == 3 else (0, -1)
    fits = count >= 0 and log_probs.dtype in (torch.float32, torch.float64) and targets.dim() in (1, 2)
    fits = fits and (targets.dim() == 1 or targets.size(0) == count)
    if not fits or any(n.numel() != count or n.is_floating_point() for n in both_lengths):
        shown = "; ".join(f"{t.dtype} of shape {list(t.size())}" for t in (log_probs, targets, *both_lengths))
        raise RuntimeError(
            "ctc_loss takes log_probs of (T, N, C) or (T, C) in float32 or float64, targets of (N, S) or all in a row, "
            f"and N integers each as input_lengths and target_lengths, not {shown}"
        )
    env = mode.shape_env
    assert env is not None
    states = env.create_unbacked_symint()
    env.ignorable_fresh_unbacked_symbols.append(states.node.expr)  # `ctc_loss` keeps it to itself
    return _empty_fake(mode, (count,), log_probs), _empty_fake(mode, (count, times, states), log_probs)


def _empty_fake(mode: FakeTensorMode, size: Any, like: torch.Tensor) -> torch.Tensor:
    with mode:
        return torch.empty(size, dtype=like.dtype, device=like.device)


CTC_LIBRARIES = frozenset(
    getattr(torch.ops.aten, name).Tensor
    for name in ("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss")
    if hasattr(torch.ops.aten, name)
)
"""Ops that tell whether a library computes the loss of tensors on a GPU. Its parts in a trace are those without."""
_CTC_RULES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._ctc_loss.Tensor: lambda mode, *args: _ctc_loss(mode, *args[:4]),
    torch.ops.aten._ctc_loss_backward.Tensor: lambda mode, _, x, *rest: _empty_fake(mode, x.size(), x),
    **dict.fromkeys(CTC_LIBRARIES, lambda *_: False),
}
"""By op; they get the mode and the arguments."""


# Empty tensors -------------------------------------------------------------------------------------------------------


def or_real(run: Callable[[], Any], mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, fails: Any) -> Any:
    """What `run` gives; where it raises, and not an error of the classes `fails`, what the op gives of real tensors.

    Raises the error of `run` where the op raises too, or may do more than give results.
    """
    try:
        return run()
    except fails:
        raise
    except Exception as error:  # a function of shapes that is wrong fails by any
        schema = getattr(func, "_schema", None)
        if schema is None or schema.is_mutable or func.is_view or func.namespace != "aten":
            raise
        try:
            with _disable_current_modes(), torch.no_grad():
                out = func(*_real(args), **_real(kwargs))
        except Exception:  # an op refuses operands by any error; the user is told that of the shapes
            raise error from None
    device = kwargs.get("device") or next((t.device for t in tree_leaves(args) if isinstance(t, torch.Tensor)), "cpu")
    with mode:
        return _empty_like(out, device)


def _real(x: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.Tensor.zero_, _empty_like(x, "cpu"))


def _empty_like(x: Any, device: Any) -> Any:
    return tree_map_only(
        torch.Tensor, lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device), x
    )
