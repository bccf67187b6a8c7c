"""Compare two counts of ops. Needs no torch, so that the driver stays light."""

import re
from collections import Counter
from typing import Any

NOISE = re.compile(
    r"_assert|sym_constrain|sym_size|sym_numel|sym_stride|getitem|lift_fresh|detach|aten\.alias|_set_grad_enabled"
    r"|_(enter|exit)_autocast|^wrap_with_|_operator"
    r"|^(add|mul|sub|neg|pow|mod|floordiv|truediv|eq|ge|le|lt|gt|ne|and_|or_|not_|sym_(max|min|not|ite|float|int))$"
)
"""Targets that say nothing of the model's own ops: checks, symbol arithmetic, regions, wrapping of constants."""


def normal(counts: Counter[str]) -> Counter[str]:
    """The model's own ops: without `NOISE`, an in-place op counted as its functional twin."""
    out: Counter[str] = Counter()
    for name, n in counts.items():
        if not NOISE.search(name):
            out[re.sub(r"(?<=[a-z0-9])_(?=\.|$)", "", name)] += n
    return out


def op_difference(ours: Counter[str], theirs: Counter[str]) -> dict[str, int]:
    """Ops that we have more often (positive) or less often (negative)."""
    names = ours.keys() | theirs.keys()
    return {name: ours[name] - theirs[name] for name in sorted(names) if ours[name] != theirs[name]}


def compare_ops(ours: dict[str, Any], export: dict[str, Any]) -> dict[str, Any]:
    """How far our ops are from torch.export's, as they are and without noise."""
    if "ops" not in ours or "ops" not in export:
        return {}
    a, b = Counter(ours["ops"]), Counter(export["ops"])
    diff = op_difference(normal(a), normal(b))
    raw = op_difference(a, b)
    return {"op_diff": _size(diff), "op_diff_raw": _size(raw), "op_diff_items": diff}


def _size(diff: dict[str, int]) -> int:
    return sum(map(abs, diff.values()))
