"""torch 2.15."""

from scopetrace._compat.versions.torch_2_14 import TORCH_2_14

TORCH_2_15 = TORCH_2_14
