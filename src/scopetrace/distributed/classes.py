"""The classes of modules that are named in `classes=`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from scopetrace.errors import PlanError

Classes = type[torch.nn.Module] | Iterable[type[torch.nn.Module]]


def read_classes(classes: Classes) -> tuple[type[torch.nn.Module], ...]:
    """The classes, one or several. Raises PlanError for what is no class."""
    kinds = (classes,) if isinstance(classes, (type, str)) else tuple(classes)
    for kind in kinds:
        if not isinstance(kind, type):
            raise PlanError(
                f"classes= takes classes of modules, such as nn.Linear, and {kind!r} is a {type(kind).__name__}"
            )
    return kinds
