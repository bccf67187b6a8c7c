"""The arguments of a call by the names of forward's parameters."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from scopetrace.ir.tape import Call


def forward_of(call: Call, root: Any) -> Any:
    """The forward that a call ran; `root` is what the root call ran, where that is known."""
    if call.module is not None and call.position > 0:
        return call.module.forward
    if root is not None or call.module_type is None:
        return root
    forward: Any = getattr(call.module_type, "forward", None)
    return types.MethodType(forward, object())  # a loaded trace has the class only


@functools.cache
def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # scripted and built-in callables have none
        return None


def bind(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Parameter names and values, defaults included; positional `arg[0]`… where there is no signature."""
    function = getattr(forward, "__func__", None)
    try:
        signature = _signature(function) if function is not None else inspect.signature(forward)
        if signature is not None:
            bound = signature.bind(None, *args, **kwargs) if function is not None else signature.bind(*args, **kwargs)
            bound.apply_defaults()
            named = dict(bound.arguments)
            if function is not None:
                named.pop(next(iter(signature.parameters)), None)
            return named
    except (TypeError, ValueError):  # no signature, or one that the call did not go through
        pass
    return {f"arg{i}": a for i, a in enumerate(args)} | kwargs
