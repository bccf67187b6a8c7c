"""The one mode of torch functions by which a trace hears what is asked of tensors, in the tracing thread alone.

Data flow:
    `x.stride()`, `x.data = y`, `f"{x}"`, `torch.tensor(n)` -> FunctionMode -> the handler of that function, else torch

torch gives each call of a function, method or property of tensors to the innermost mode, which is off meanwhile. This
one is below those of the model, so that it gets what these make of a call. torch's Python would go another way under
any mode: `without_mode` says what it asks to find out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional
from torch.overrides import TorchFunctionMode

Handler = Callable[..., Any]
"""Answers a call of a function. It gets the function, by which it may ask torch, and the arguments."""

depth: Callable[[], int] = torch._C._len_torch_function_stack
"""How many modes of torch functions are active."""
_pop, _push = torch._C._pop_torch_function_stack, torch._C._push_on_torch_function_stack
_at = torch._C._get_function_stack_at


class FunctionMode(TorchFunctionMode):
    """Gives calls of torch's functions to handlers."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers: dict[Any, tuple[Handler, Callable[..., Any]]] = {}  # with what it asks

    def on(self, func: Callable[..., Any], handler: Handler) -> None:
        """Let a handler answer calls of a function of torch: a method, `Tensor.data.__get__`, `torch.tensor`.

        Where there is one already, the new one gets that as the function.
        """
        before = self.handlers.get(func)
        self.handlers[func] = handler, func if before is None else functools.partial(before[0], before[1])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        entry = self.handlers.get(func)
        if entry is not None:
            handler, ask = entry
            return handler(ask, *args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, it is on, below all modes that are. Nothing happens where it is on already."""
        if any(_at(i) is self for i in range(depth())):
            yield
            return
        _put_back([*_taken(), self])
        try:
            yield
        finally:
            _put_back([mode for mode in _taken() if mode is not self])


def _taken() -> list[Any]:
    """All modes, the innermost first, which are off then."""
    return [_pop() for _ in range(depth())]


def _put_back(modes: list[Any]) -> None:
    for mode in reversed(modes):
        _push(mode)


def after(tell: Callable[..., Any]) -> Handler:
    """Lets torch answer, after `tell` was called with the arguments."""

    def handler(ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tell(*args, **kwargs)
        return ask(*args, **kwargs)

    return handler


def without_mode(replace: Callable[[Any, str, Any], None], mode: FunctionMode) -> None:
    """Let torch's Python not count `mode` where it asks whether modes or subclasses get a call.

    `nn.TransformerEncoder` has its fast path only where nobody does, higher-order ops go to the dispatcher, and
    `nn.functional` runs in Python under the mode.
    """
    names = "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"
    for module, name in ((torch.overrides, names[0]), *[(torch.nn.functional, name) for name in names]):
        replace(module, name, _asked_without(mode, getattr(module, name)))


def _asked_without(mode: FunctionMode, ask: Callable[..., bool]) -> Callable[..., bool]:
    def asked(*args: Any) -> bool:
        answer = ask(*args)
        if not answer or depth() != 1 or _at(0) is not mode:
            return answer
        _pop()
        try:
            return ask(*args)
        finally:
            _push(mode)

    return asked
