"""A value of the graph, or a Python value, as torch.export's signatures name it."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch.export.graph_signature import (
    ConstantArgument,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)

PLAIN = (bool, int, float, str, type(None))
_KINDS: tuple[tuple[type, Any], ...] = (
    (torch.Tensor, TensorArgument),
    (torch.SymInt, SymIntArgument),
    (torch.SymFloat, SymFloatArgument),
    (torch.SymBool, SymBoolArgument),
)


def argument_of(x: Any) -> Any:
    """The argument spec of a node or of a plain Python value; None for what signatures have no word for."""
    if isinstance(x, torch.fx.Node):
        val = x.meta.get("val")
        return next((spec(x.name) for kind, spec in _KINDS if isinstance(val, kind)), None)
    return ConstantArgument("", x) if type(x) in PLAIN else None
