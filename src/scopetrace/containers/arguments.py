"""What a forward calls its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch


def signature_of_forward(forward: Any) -> inspect.Signature:
    """That of a function or of a module's forward. Raises TypeError and ValueError where it has none."""
    return inspect.signature(forward.forward if isinstance(forward, torch.nn.Module) else forward)


def argument_names(forward: Any, count: int) -> list[str]:
    """What forward calls its first `count` positional arguments; `args[0]` and so on past `*args`."""
    names: list[str] = []
    try:
        parameters = list(signature_of_forward(forward).parameters.values())
    except (TypeError, ValueError):  # built-in callables have no signature
        parameters = []
    for p in parameters:
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name)
        elif p.kind is p.VAR_POSITIONAL:
            names += [f"{p.name}[{i}]" for i in range(count - len(names))]
    names += [f"arg[{i}]" for i in range(count - len(names))]
    return names[:count]


def named_arguments(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Each argument with what forward calls it."""
    return [*zip(argument_names(forward, len(args)), args, strict=True), *kwargs.items()]


def more_keywords(forward: Any, keywords: Iterable[str]) -> list[str]:
    """Those of the keywords that forward takes by `**kwargs`; none where its signature is not known."""
    try:
        parameters = signature_of_forward(forward).parameters
    except (TypeError, ValueError):
        return []
    return [name for name in keywords if name not in parameters]
