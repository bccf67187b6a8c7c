"""torch 2.15."""

import dataclasses

from scopetrace._compat.versions.torch_2_14 import TORCH_2_14

TORCH_2_15 = dataclasses.replace(
    TORCH_2_14,
    # Dropout that drops nothing decomposed into a copy before.
    erased_ops=TORCH_2_14.erased_ops | {"aten::dropout"},
    hop_defaults={"map_impl": {"mutated_arg_indices": ""}},
)
