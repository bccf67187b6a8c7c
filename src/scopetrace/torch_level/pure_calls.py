"""The pure form of a torch call that mutates: `torch.relu` for `torch.relu_`, `inplace=False` for `inplace=True`.

Found by name and signature. Whether it computes the same is for the caller to check.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F

from scopetrace.torch_level.purity import bound_arguments, is_in_place_operator, mutates_by_name
from scopetrace.torch_level.step import Step


@dataclasses.dataclass(frozen=True)
class PureCall:
    """A call that mutates nothing and returns the new values of `written`, in order."""

    step: Step
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: tuple[torch.Tensor, ...]
    is_out: bool = False
    """Whether `written` were given as `out=`."""


def pure_call(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PureCall | None:
    """The pure form of a call with tensors; None if it does not mutate by its name, or has no such form."""
    if step.kind == "call_module":
        return _without_inplace_module(step.target, args, kwargs)
    if isinstance(kwargs.get("out"), (torch.Tensor, tuple, list)):
        rest = {name: a for name, a in kwargs.items() if name != "out"}
        out = kwargs["out"]
        return PureCall(step, args, rest, (out,) if isinstance(out, torch.Tensor) else tuple(out), is_out=True)
    if not args or not isinstance(args[0], torch.Tensor):
        return None
    if step.kind == "call_method":
        name = _plain_name(step.target)
        has_one = name is not None and hasattr(torch.Tensor, name)
        return PureCall(Step("call_method", name), args, kwargs, args[:1]) if has_one else None
    pure = _without_inplace(step, args, kwargs)
    if pure is None:
        plain = next(_functions_named(step.target), None)
        pure = plain and PureCall(Step("call_function", plain), args, kwargs, args[:1])
    return pure


def _plain_name(name: str) -> str | None:
    """`add` for `add_`, `__add__` for `__iadd__`."""
    if not mutates_by_name(name):
        return None
    return f"__{name[3:]}" if name.startswith("__") else name[:-1]


def _without_inplace(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PureCall | None:
    arguments = bound_arguments(step.target, args, kwargs)
    if arguments.get("inplace") is not True:
        return None
    position = list(arguments).index("inplace")
    if "inplace" not in kwargs:
        return PureCall(step, (*args[:position], False, *args[position + 1 :]), kwargs, args[:1])
    rest = {name: a for name, a in kwargs.items() if name != "inplace"}
    return PureCall(step, args, rest, args[:1])


def _without_inplace_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PureCall | None:
    if getattr(module, "inplace", False) is not True or not args or not isinstance(args[0], torch.Tensor):
        return None
    pure: Any = copy.copy(module)
    pure.inplace = False
    if getattr(pure.forward, "__self__", None) is module:  # one that the module itself has, as in a trace
        pure.forward = types.MethodType(pure.forward.__func__, pure)
    return PureCall(Step("call_module", pure), args, kwargs, args[:1])


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
