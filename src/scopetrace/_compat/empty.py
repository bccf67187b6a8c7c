"""Ops on empty tensors, of which some functions of shapes in torch are wrong: `upsample_nearest1d` of no batch.

The op itself says what it gives: it computes next to nothing of empty tensors.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

_log = logging.getLogger("torch._subclasses.fake_tensor")


def has_empty(operands: Sequence[Any]) -> bool:
    """Whether a tensor among these has no elements."""
    return any(isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.numel() for x in operands)


def or_real(run: Callable[[], Any], mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, fails: Any) -> Any:
    """What `run` gives; where it raises, and not an error of the classes `fails`, what the op gives of real tensors.

    Raises the error of `run` where the op raises too, or may do more than give results.
    """
    try:
        with _silent():
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
    return tree_map_only(torch.Tensor, lambda t: _fake(mode, t, kwargs.get("device") or _device_of(args)), out)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Inside, torch logs no traceback of an op of this thread that refuses its operands."""
    thread = threading.get_ident()

    def is_other(record: logging.LogRecord) -> bool:
        return threading.get_ident() != thread

    _log.addFilter(is_other)
    try:
        yield
    finally:
        _log.removeFilter(is_other)


def _real(x: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype).zero_(), x)


def _fake(mode: FakeTensorMode, t: torch.Tensor, device: Any) -> torch.Tensor:
    with mode:
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device)


def _device_of(args: Any) -> torch.device:
    tensors: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, tensors.append, args)
    return tensors[0].device if tensors else torch.device("cpu")
