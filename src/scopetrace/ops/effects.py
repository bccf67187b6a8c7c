"""Ops that have to run even where nobody reads what they return."""

from __future__ import annotations

from typing import Any

import torch

from scopetrace._compat.schema import is_op, schema_of


def is_random(target: Any) -> bool:
    """Whether an op draws random numbers, so that it advances the generator."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def is_collective(target: Any) -> bool:
    """Whether an op communicates: other processes wait for it."""
    return is_op(target) and schema_of(target).name.startswith(("_c10d_functional", "c10d_functional", "c10d::"))


def has_effect(target: Any) -> bool:
    """Whether an op does something beside what it returns and writes."""
    return is_random(target) or is_collective(target)
