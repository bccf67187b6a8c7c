"""torch 2.13."""

from scopetrace._compat.versions.base import Differences

TORCH_2_13 = Differences(
    erased_ops=frozenset(
        f"aten::{name}"
        for name in (
            *("alpha_dropout", "feature_alpha_dropout", "feature_dropout"),
            *("conj", "conj_physical", "positive", "resolve_conj", "resolve_neg"),
        )
    ),
    hop_defaults={},
)
