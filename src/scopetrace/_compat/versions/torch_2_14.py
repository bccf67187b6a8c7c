"""torch 2.14."""

import dataclasses

from scopetrace._compat.versions.torch_2_13 import TORCH_2_13

TORCH_2_14 = dataclasses.replace(
    TORCH_2_13,
    # Dropout that drops nothing decomposed into a copy before.
    erased_ops=TORCH_2_13.erased_ops | {"aten::dropout"},
    hop_defaults={"map_impl": {"mutated_arg_indices": ""}},
)
