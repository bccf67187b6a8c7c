"""The pure form of a torch call that mutates: `torch.relu` for `torch.relu_`, `inplace=False` for `inplace=True`.

Found by name and signature. Whether it computes the same is for the caller to check.
"""

from __future__ import annotations

import copy
import operator
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F

from scopetrace.torch_level.purity import bound_arguments, is_in_place_operator, mutates_by_name
from scopetrace.torch_level.step import OpTemplate, Trial


def pure_call(step: OpTemplate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trial | None:
    """The pure form of a call with tensors; None if it does not mutate by its name, or has no such form."""
    if step.kind == "call_module":
        return _without_inplace_module(step.target, args, kwargs)
    out = kwargs.get("out")
    if isinstance(out, (torch.Tensor, tuple, list)):
        written = (out,) if isinstance(out, torch.Tensor) else tuple(out)
        return Trial(step, args, _without(kwargs, "out"), written=written, is_out=True)
    if not args or not isinstance(args[0], torch.Tensor):
        return None
    target: Any = None
    if step.kind == "call_method":
        name = _plain_name(step.target)
        target = name if name is not None and hasattr(torch.Tensor, name) else None
    elif bound_arguments(step.target, args, kwargs).get("inplace") is True:
        return _without_inplace(step, args, kwargs)
    else:
        target = next(_functions_named(step.target), None)
    return target and Trial(OpTemplate(step.kind, target), args, kwargs, written=args[:1])


def _plain_name(name: str) -> str | None:
    """`add` for `add_`, `__add__` for `__iadd__`."""
    if not mutates_by_name(name):
        return None
    return f"__{name[3:]}" if name.startswith("__") else name[:-1]


def _without_inplace(step: OpTemplate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trial:
    if "inplace" not in kwargs:
        position = list(bound_arguments(step.target, args, kwargs)).index("inplace")
        args = (*args[:position], False, *args[position + 1 :])
    return Trial(step, args, _without(kwargs, "inplace"), written=args[:1])


def _without(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != name}


def _without_inplace_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trial | None:
    if getattr(module, "inplace", False) is not True or not args or not isinstance(args[0], torch.Tensor):
        return None
    pure: Any = copy.copy(module)
    pure.inplace = False
    if getattr(pure.forward, "__self__", None) is module:  # one that the module itself has, as in a trace
        pure.forward = types.MethodType(pure.forward.__func__, pure)
    return Trial(OpTemplate("call_module", pure), args, kwargs, written=args[:1])


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
