"""The pure form of a torch call that mutates: `torch.relu` for `torch.relu_`, `inplace=False` for `inplace=True`.

Found by name and signature. Whether it computes the same is for the caller to check.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F

from scopetrace.torch_level.purity import bound_arguments, is_in_place_operator, mutates_by_name


@dataclasses.dataclass(frozen=True)
class PureCall:
    """A call that mutates nothing and returns the new values of `written`, in order."""

    kind: str
    target: Any
    """A function, the name of a method, or a module."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: tuple[torch.Tensor, ...]
    is_out: bool = False
    """Whether `written` were given as `out=`."""


def pure_call(kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PureCall | None:
    """The pure form of a call; None for a call that does not mutate by its name, or has no such form.

    Args:
        kind: `call_function`, `call_method` or `call_module`.
        target: a function, the name of a method, or a module.
        args: of the call, with tensors.
        kwargs: of the call, with tensors.
    """
    if kind == "call_module":
        return _without_inplace_module(target, args, kwargs)
    if isinstance(kwargs.get("out"), (torch.Tensor, tuple, list)):
        rest = {name: a for name, a in kwargs.items() if name != "out"}
        out = kwargs["out"]
        return PureCall(kind, target, args, rest, (out,) if isinstance(out, torch.Tensor) else tuple(out), is_out=True)
    if not args or not isinstance(args[0], torch.Tensor):
        return None
    if kind == "call_method":
        name = _plain_name(target)
        found = name is not None and hasattr(torch.Tensor, name)
        return PureCall(kind, name, args, kwargs, args[:1]) if found else None
    return _without_inplace(target, args, kwargs) or _other_function(target, args, kwargs)


def _plain_name(name: str) -> str | None:
    """`add` for `add_`, `__add__` for `__iadd__`."""
    if not mutates_by_name(name):
        return None
    return f"__{name[3:]}" if name.startswith("__") else name[:-1]


def _without_inplace(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PureCall | None:
    given = bound_arguments(fn, args, kwargs)
    if given.get("inplace") is not True:
        return None
    position = list(given).index("inplace")
    if "inplace" not in kwargs:
        return PureCall("call_function", fn, (*args[:position], False, *args[position + 1 :]), kwargs, args[:1])
    rest = {name: a for name, a in kwargs.items() if name != "inplace"}
    return PureCall("call_function", fn, args, rest, args[:1])


def _without_inplace_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PureCall | None:
    if getattr(module, "inplace", False) is not True or not args or not isinstance(args[0], torch.Tensor):
        return None
    pure: Any = copy.copy(module)
    pure.inplace = False
    return PureCall("call_module", pure, args, kwargs, args[:1])


def _other_function(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PureCall | None:
    for plain in _functions_named(fn):
        return PureCall("call_function", plain, args, kwargs, args[:1])
    return None


def _functions_named(fn: Any) -> Iterator[Any]:
    """`operator.add` for `operator.iadd`, `torch.relu` for `torch.relu_`."""
    name = getattr(fn, "__name__", "")
    if getattr(fn, "__module__", None) == "_operator":
        plain = name[1:] if is_in_place_operator(name) else ""
        for candidate in (plain, f"{plain}_"):
            if plain and hasattr(operator, candidate):
                yield getattr(operator, candidate)
        return
    plain_name = _plain_name(name)
    if plain_name is None:
        return
    owner = getattr(fn, "__objclass__", None)  # torch.Tensor.add_ called as a function
    for place in (torch.Tensor,) if owner is not None else (torch, F, torch.special):
        if getattr(place, name, None) is fn and hasattr(place, plain_name):
            yield getattr(place, plain_name)
