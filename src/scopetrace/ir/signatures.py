"""The signatures of what the calls of a tape ran, by which arguments get their names."""

from __future__ import annotations

import inspect
import itertools
import types
from typing import Any

from scopetrace.containers.weak_cache import weak_cache
from scopetrace.ir.tape import Call


class Signed:
    """Stands for a function of which the signature is known, and nothing else."""

    def __init__(self, signature: inspect.Signature) -> None:
        self.__signature__ = signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing calls it; `inspect.signature` wants a callable."""
        raise NotImplementedError


signature_of = weak_cache(inspect.signature)
"""The signature of a function, read once. Raises TypeError and ValueError where it has none."""


def forward_of(call: Call, root: Any) -> Any:
    """The function that a call ran, for its signature; `root` is that of the root call, None where it is not known."""
    if call.module is not None and call.position > 0:
        return call.module.forward
    if root is not None:
        return root
    forward: Any = getattr(call.module_type, "forward", None)
    if forward is None:  # of a function, or scripted
        return None if call.signature is None else Signed(call.signature)
    return types.MethodType(forward, object())  # in a loaded trace, which has no modules


def bind(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by the names of forward's parameters, defaults included.

    Without a signature that fits, positional arguments are named `arg0`, `arg1`, ...
    """
    function = getattr(forward, "__func__", None)
    try:
        if function is None:
            bound = inspect.signature(forward).bind(*args, **kwargs)
        else:
            bound = signature_of(function).bind(None, *args, **kwargs)
    except (TypeError, ValueError):  # scripted and built-in callables have no signature
        return {f"arg{i}": a for i, a in enumerate(args)} | kwargs
    bound.apply_defaults()
    return dict(itertools.islice(bound.arguments.items(), function is not None, None))
