"""The arguments of `Trace.to_onnx`, read and checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from scopetrace.errors import OnnxOptionError

Targets = Any
"""Targets of `Trace.outline` (one, or several in a list, tuple or set), or a dict from classes to `"domain::Name"`."""

_NAME = re.compile(r"[A-Za-z_][\w.\-]*::[A-Za-z_]\w*")

_OF_RUNTIMES = frozenset({"ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "com.microsoft"})


def read_targets(targets: Targets, where: str) -> tuple[list[Any], dict[type, str]]:
    """The targets for `Trace.outline`, and the names chosen for classes. Raises OnnxOptionError."""
    if isinstance(targets, Mapping):
        for cls, name in targets.items():
            if not isinstance(cls, type):
                raise OnnxOptionError(
                    f"{where}: {cls!r} is no class; a dict names classes, {{Block: 'my.domain::Block'}}"
                )
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise OnnxOptionError(f"{where}: {name!r} is no name of a function; write 'my.domain::{cls.__name__}'")
            if where == "functions" and name.partition("::")[0] in _OF_RUNTIMES:
                raise OnnxOptionError(
                    f"{where}: {name!r} is in a domain of ops that runtimes have, and these win over a function: "
                    f"write 'my.domain::{cls.__name__}', or name it in plugins="
                )
        return list(targets), dict(targets)
    if isinstance(targets, (list, tuple, set, frozenset)):
        return list(targets), {}
    return [targets], {}


def chosen_name(names: Mapping[type, str], cls: type | None) -> str | None:
    """The name that was given to a class, or to the nearest of its bases that has one."""
    return next((names[base] for base in (cls.__mro__ if cls is not None else ()) if base in names), None)


def read_names(given: Sequence[str] | None, own: Sequence[str], where: str, taken: Container[str]) -> list[str]:
    """The names of inputs or outputs: those given for the first ones, the model's own for the rest.

    Raises OnnxOptionError for names that are `taken` by tensors of the model, as well.
    """
    if given is None:
        return list(own)
    if isinstance(given, str) or len(given) > len(own):
        raise OnnxOptionError(f"{where} has {len(given)} names for {len(own)}: {', '.join(own)}")
    if len(set(given)) != len(given):
        raise OnnxOptionError(f"{where} has a name twice; names of {where.split('_')[0]}s have to differ")
    for name in given:
        if name in taken:
            raise OnnxOptionError(f"{where}: {name} is a tensor of the model, which has that name in the file")
    return [*given, *own[len(given) :]]


def read_attributes(attributes: bool | Sequence[str]) -> Callable[[str], bool]:
    """Which module attributes become ONNX attributes."""
    if isinstance(attributes, bool):
        return lambda name: attributes
    if isinstance(attributes, str):
        raise OnnxOptionError(f"attributes={attributes!r}: write attributes=[{attributes!r}], or True for all")
    return set(attributes).__contains__


def is_onnx_attribute(value: Any) -> bool:
    """Whether ONNX has the type: int, float, str, bool, and lists of one of them."""
    if isinstance(value, (list, tuple)):
        kinds = {type(item) for item in value}
        return len(kinds) == 1 and kinds <= {int, float, str, bool}
    return type(value) in (int, float, str, bool)
