"""What Python asks torch during a trace, of its state and of tensors, where no op runs.

Data flow:
    `torch.is_grad_enabled()`, `x.stride(0)`, `os.environ["A"]`, replaced -> the answer, and a Listener is told of it

Only questions of the model and of torch's Python on its way count: while the recorder handles an op its mode is off,
and contexts such as `torch.no_grad` ask only to restore what was.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
import torch.amp.autocast_mode
from torch._ops import mode_stack_state_for_pre_dispatch

from scopetrace._compat.sources import NOT_THE_MODEL, SCOPETRACE, TORCH_DIRECTORY, is_of_python, prefixes

Mine = Callable[[], bool]
Replace = Callable[[Any, str, Any], None]

_slots = mode_stack_state_for_pre_dispatch()
# Code that asks to restore what was, or to choose between kernels that compute the same.
_KEEPING_STATE = (
    *SCOPETRACE,
    *prefixes(
        TORCH_DIRECTORY,
        *("autograd/grad_mode.py", "amp/autocast_mode.py", "utils/checkpoint.py", "utils/_device.py", "_tensor.py"),
        *("utils/_contextlib.py", "_dynamo/", "_compile.py", "fx/", "_subclasses/", "_library/", "_ops.py"),
        *("nn/modules/module.py", "nn/modules/transformer.py", "nn/modules/activation.py", "nn/functional.py"),
    ),
)
_FAKE_TENSORS = prefixes(TORCH_DIRECTORY, "_subclasses/")
_TORCH = prefixes(TORCH_DIRECTORY)

FLAGS = {
    "torch": """
        is_grad_enabled is_inference_mode_enabled get_default_dtype get_default_device is_autocast_enabled
        get_autocast_dtype are_deterministic_algorithms_enabled is_deterministic_algorithms_warn_only_enabled
        get_deterministic_debug_mode get_float32_matmul_precision get_num_threads is_anomaly_enabled""",
    "torch.backends.cuda": "flash_sdp_enabled mem_efficient_sdp_enabled math_sdp_enabled cudnn_sdp_enabled",
    "torch.backends.mha": "get_fastpath_enabled",
}
"""Functions that answer questions about the state of the process."""

METHODS = ("stride", "is_contiguous", "contiguous", "storage_offset", "is_inference", "is_conj", "is_neg")
PROPERTIES = ("requires_grad", "is_leaf", "grad_fn", "_version")
"""What a tensor is asked beside its shape, dtype and device, which every call is compared with anyway."""

_flags: dict[str, Callable[..., Any]] = {
    f"{path}.{name}": getattr(importlib.import_module(path), name)
    for path, names in FLAGS.items()
    for name in names.split()
}
_methods = {name: getattr(torch.Tensor, name) for name in METHODS}
_properties = {name: getattr(torch.Tensor, name).__get__ for name in PROPERTIES}
_default_device, _is_autocast_enabled = torch.get_default_device, torch.is_autocast_enabled
_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "hpu", "mps")

default_dtype: Callable[[], torch.dtype] = torch.get_default_dtype
grad_enabled: Callable[[], bool] = torch.is_grad_enabled
inference_mode_enabled: Callable[[], bool] = torch.is_inference_mode_enabled
default_device: Callable[[], torch.device] = torch.get_default_device
"""torch's own functions, whose answer is no read."""


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """The types of device for which autocast is on, each with its dtype."""
    if not _any_autocast():
        return ()
    return tuple((d, torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES if _is_autocast_enabled(d))


def flag(name: str, args: tuple[Any, ...]) -> Any:
    """What a function of FLAGS answers, such as `torch.is_grad_enabled`; `torch.autocast` is `autocast_state`."""
    return autocast_state() if name == "torch.autocast" else _flags[name](*args)


def fact_of(t: torch.Tensor, name: str, args: tuple[Any, ...]) -> Any:
    """What a tensor answers to a question of METHODS or PROPERTIES; of `grad_fn`, whether there is one.

    The fact `layout` is its strides, with 0 for dimensions of one element, whose stride does not matter.
    """
    if name == "layout":
        sizes = zip(t.size(), _methods["stride"](t), strict=True)
        return tuple([0 if type(n) is int and n == 1 else stride for n, stride in sizes])
    if name in _methods:
        return _methods[name](t, *args)
    found = _properties[name](t)
    return found is not None if name == "grad_fn" else found


class Listener(Protocol):
    """Who is told of questions."""

    def on_flag(self, name: str, args: tuple[Any, ...], answer: Any) -> None:
        """A question about the state of the process: `torch.is_grad_enabled`."""

    def on_fact(self, t: torch.Tensor, name: str, args: tuple[Any, ...], answer: Any) -> None:
        """A question of METHODS or PROPERTIES to a tensor."""

    def on_environment(self, key: str, answer: str | None) -> None:
        """An environment variable is read; None where it is not set."""

    def on_grad_mode(self, enabled: bool) -> None:
        """The forward switches autograd on or off, as at the beginning of a block."""

    def on_grad_block_end(self) -> None:
        """A block ends, and autograd is as before it."""

    def on_autocast(self, entered: bool) -> None:
        """A block under `torch.autocast` begins or ends."""


def report_questions(replace: Replace, listener: Listener, mine: Mine) -> None:
    """Replace what answers questions by functions that tell `listener`, too."""

    def asked() -> bool:
        mode: Any = _slots._schema_check_mode
        if mode is None or not mine():
            return False
        frame: FrameType | None = sys._getframe(2)
        if frame is not None and frame.f_code.co_filename.startswith(_KEEPING_STATE):
            return False
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            if frame.f_code.co_filename.startswith(_FAKE_TENSORS):
                return False  # a fake tensor that is made without an op, as for `x.data`
            frame = frame.f_back
        return True

    for path, ask in _flags.items():
        module, _, name = path.rpartition(".")
        replace(sys.modules[module], name, _reported_flag(path, ask, listener, asked))
    for name in METHODS:
        replace(torch.Tensor, name, _method(name, listener, asked))
    for name in PROPERTIES:
        replace(torch.Tensor, name, _property(name, listener, asked))
    _report_environment(replace, listener, mine)
    _report_switches(replace, listener, mine)


def _reported_flag(name: str, ask: Callable[..., Any], listener: Listener, asked: Mine) -> Callable[..., Any]:
    @functools.wraps(ask)
    def answered(*args: Any) -> Any:
        answer = ask(*args)
        if asked():
            listener.on_flag(name, args, answer)
        return answer

    return answered


def _method(name: str, listener: Listener, asked: Mine) -> Callable[..., Any]:
    ask = _methods[name]

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = ask(self, *args, **kwargs)
        if _slots._schema_check_mode is not None and asked():
            listener.on_fact(self, name, (*args, *kwargs.values()), answer)
        return answer

    return method


def _property(name: str, listener: Listener, asked: Mine) -> property:
    own = getattr(torch.Tensor, name)

    def get(self: torch.Tensor) -> Any:
        answer = own.__get__(self)
        if _slots._schema_check_mode is not None and asked():
            listener.on_fact(self, name, (), answer is not None if name == "grad_fn" else answer)
        return answer

    return property(get, own.__set__, own.__delete__)


NOT_SET: Any = None
"""Stands for the value of an environment variable that is not set."""


def _report_environment(replace: Replace, listener: Listener, mine: Mine) -> None:
    environment: Any = type(os.environ)
    ask = environment.__getitem__

    def __getitem__(self: Any, key: str) -> str:
        found = NOT_SET
        try:
            found = ask(self, key)
            return found
        finally:
            if self is os.environ and mine() and not (_asker().startswith(NOT_THE_MODEL) or _is_importing()):
                listener.on_environment(key, found)

    replace(environment, "__getitem__", __getitem__)


def _asker() -> str:
    """The file of the nearest frame outside of this file and of Python's own library."""
    frame = sys._getframe(2)
    while frame.f_back is not None and is_of_python(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename


def _is_importing() -> bool:
    """Whether a module is imported, which happens once, rather than a call of the forward."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(SCOPETRACE):
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _tell_grad_mode(listener: Listener, enabled: bool, frame: FrameType) -> None:
    """Tell of a call of `torch._C._set_grad_enabled` in `frame`."""
    while frame.f_code.co_name == "__init__" and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_code.co_name == "__exit__":
        listener.on_grad_block_end()
    else:
        listener.on_grad_mode(enabled)


def _report_switches(replace: Replace, listener: Listener, mine: Mine) -> None:
    switch, autocast = torch._C._set_grad_enabled, torch.amp.autocast_mode.autocast
    enter, leave, infer = autocast.__enter__, autocast.__exit__, torch.inference_mode.__enter__

    def set_grad_enabled(enabled: bool) -> None:
        if _slots._schema_check_mode is not None and mine():
            _tell_grad_mode(listener, enabled, sys._getframe(1))
        switch(enabled)

    def enter_inference(self: Any) -> Any:
        if mine() and self.mode:
            listener.on_grad_mode(False)
        return infer(self)

    def __enter__(self: Any) -> Any:
        if mine():
            listener.on_autocast(True)
        return enter(self)

    def __exit__(self: Any, *error: Any) -> Any:
        if mine():
            listener.on_autocast(False)
        return leave(self, *error)

    replace(torch._C, "_set_grad_enabled", set_grad_enabled)
    replace(torch.inference_mode, "__enter__", enter_inference)
    replace(autocast, "__enter__", __enter__)
    replace(autocast, "__exit__", __exit__)
