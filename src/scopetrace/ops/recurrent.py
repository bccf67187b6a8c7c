"""The recurrent ops, `lstm`, `gru`, `rnn_tanh` and `rnn_relu`, as far as their arguments matter to us."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scopetrace._compat.tensors import RECURRENT


def drops_between_layers(op: Any, args: Sequence[Any]) -> bool:
    """Whether an op has dropout between its layers: its kernel has it, and torch's decomposition in Python lacks it."""
    if op not in RECURRENT:
        return False
    layers, dropout, train = args[5:8] if str(op).endswith(".data") else args[4:7]
    return bool(train and dropout and layers > 1)
