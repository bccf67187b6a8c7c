"""How the supported versions of torch differ: a row for each, with what it changed on top of the version before.

To support another version, see CONTRIBUTING.md.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Differences:
    """The form of torch in one version."""

    erased_ops: frozenset[str]
    """Ops by schema name that `ExportedProgram.run_decompositions` replaces by their argument, where they return it."""
    hop_defaults: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """By name of a higher-order op, the keyword arguments that torch always passes, and their default values."""
    checkpoint_generator: str = "_checkpoint_without_reentrant_generator"
    """The generator of `torch.utils.checkpoint` around a region that is not reentrant."""


_ERASED = "alpha_dropout feature_alpha_dropout feature_dropout conj conj_physical positive resolve_conj resolve_neg"

TORCH_2_13 = Differences(frozenset(f"aten::{name}" for name in _ERASED.split()))
TORCH_2_14 = dataclasses.replace(
    TORCH_2_13,
    erased_ops=TORCH_2_13.erased_ops | {"aten::dropout"},  # one that drops nothing decomposed into a copy before
    hop_defaults={"map_impl": {"mutated_arg_indices": ""}},
    checkpoint_generator="_checkpoint_without_reentrant_generator_impl",
)
TORCH_2_15 = TORCH_2_14

SUPPORTED = {(2, 13): TORCH_2_13, (2, 14): TORCH_2_14, (2, 15): TORCH_2_15}
"""By (major, minor) of torch, oldest first."""


def differences_of(version: str) -> Differences:
    """Those of a torch version such as `2.15.0+cpu`; of one outside the supported range, those of the nearest.

    Warns outside the range: private parts of torch that this package uses may have another form there.
    """
    major, minor = version.split(".")[:2]
    number = int(major), int(minor)
    if number in SUPPORTED:
        return SUPPORTED[number]
    (first, *_, last) = sorted(SUPPORTED)
    warnings.warn(
        f"scopetrace supports torch {first[0]}.{first[1]} to {last[0]}.{last[1]}, and this is torch {version}: "
        "tracing may fail, or give wrong graphs. Install a supported version of torch, or a newer scopetrace.",
        stacklevel=2,
    )
    return SUPPORTED[first if number < first else last]


CURRENT = differences_of(torch.__version__)
"""What may differ between versions of torch, as far as this package depends on it."""
