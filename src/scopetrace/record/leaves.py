"""Which module calls become one op: the `leaf_modules=` argument."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from typing import Any

import torch

from scopetrace.errors import LeafPatternError
from scopetrace.record.model import Model

LeafRule = Callable[[torch.nn.Module, str], bool]
"""(module, fqn) -> whether the module is a leaf, as `torch.fx.Tracer.is_leaf_module`."""


def leaf_rule(leaves: Any, model: Model) -> LeafRule:
    """One rule from classes, fqn patterns (`"layers.*.attn"`, as fnmatch reads them) and predicates (module, fqn).

    Raises LeafPatternError for another kind of entry, and for a pattern or class that matches no module of the model.
    """
    single = isinstance(leaves, (str, type)) or callable(leaves) or not isinstance(leaves, Iterable)
    entries = [leaves] if single else list(leaves)
    if not entries:
        return lambda module, fqn: False
    classes = tuple(e for e in entries if isinstance(e, type))
    patterns = [e for e in entries if isinstance(e, str)]
    predicates = [e for e in entries if callable(e) and not isinstance(e, type)]
    for entry in entries:
        if not (isinstance(entry, (str, type)) or callable(entry)):
            raise LeafPatternError(
                f"leaf_modules: {entry!r} is a {type(entry).__name__}; give a module class, a pattern of names such as "
                "'layers.*.attn', or a predicate (module, fqn) -> bool"
            )
    _refuse_unused(patterns, classes, model)

    def rule(module: torch.nn.Module, fqn: str) -> bool:
        return (
            isinstance(module, classes)
            or any(fnmatch.fnmatchcase(fqn, p) for p in patterns)
            or any(p(module, fqn) for p in predicates)
        )

    return rule


def _refuse_unused(patterns: Iterable[str], classes: Iterable[type], model: Model) -> None:
    names = [name for known in model.names.values() for name in known if name]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            some = ", ".join(names[:5])
            raise LeafPatternError(f"leaf_modules: no module is named {pattern!r}; the model has {some or 'none'}, …")
    for cls in classes:
        if not issubclass(cls, torch.nn.Module):
            raise LeafPatternError(f"leaf_modules: {cls.__name__} is not a torch.nn.Module class")
        if model.modules and not any(isinstance(m, cls) for m in model.modules):
            raise LeafPatternError(f"leaf_modules: the model has no {cls.__name__}")
