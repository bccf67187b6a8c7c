"""How the supported versions of torch differ, one file for each.

A file holds what its version changed, on top of the version before. To support another version, see CONTRIBUTING.md.
"""

from __future__ import annotations

import warnings

import torch

from scopetrace._compat.versions.base import Differences
from scopetrace._compat.versions.torch_2_13 import TORCH_2_13
from scopetrace._compat.versions.torch_2_14 import TORCH_2_14
from scopetrace._compat.versions.torch_2_15 import TORCH_2_15

SUPPORTED: dict[tuple[int, int], Differences] = {(2, 13): TORCH_2_13, (2, 14): TORCH_2_14, (2, 15): TORCH_2_15}
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
