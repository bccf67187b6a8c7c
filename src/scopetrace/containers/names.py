"""Names of placeholders."""

from __future__ import annotations

import keyword
import re

_RESERVED = {"self", "torch", "device", "inf", "nan", "fx_pytree", "pytree"}  # of the code that torch.fx writes


def identifier(path: str, taken: set[str]) -> str:
    """A placeholder's name, as torch.export makes it: `ys[0]['k']` gives `ys_0_k`."""
    name = base = re.sub(r"\W+", "_", path).strip("_") or "arg"
    count = 0
    if keyword.iskeyword(name) or name in _RESERVED or name[0].isdigit():
        name = base = f"{name}_" if not name[0].isdigit() else f"_{name}"
    while name in taken:
        count += 1
        name = f"{base}_{count}"
    taken.add(name)
    return name
