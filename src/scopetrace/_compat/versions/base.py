"""What may differ between versions of torch, as far as this package depends on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Differences:
    """The form of torch in one version."""

    erased_ops: frozenset[str]
    """Ops by schema name that `ExportedProgram.run_decompositions` replaces by their argument, where they return it."""

    hop_defaults: Mapping[str, Mapping[str, Any]]
    """By name of a higher-order op, the keyword arguments that torch always passes, and their default values."""
