"""torch 2.14."""

from scopetrace._compat.versions.torch_2_13 import TORCH_2_13

TORCH_2_14 = TORCH_2_13
