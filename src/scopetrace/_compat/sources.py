"""Where the Python files of torch, sympy and this package are, to tell their stack frames from those of the model.

`co_filename` has the path by which a module was imported. In a linked virtual environment that is not the resolved
path, so each directory is here in both forms. All are prefixes for `str.startswith`.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import sympy  # type: ignore[import-untyped]
import torch


def prefixes(directory: Path, *parts: str) -> tuple[str, ...]:
    """The files and folders `parts` of a directory, or all of it, as imported and resolved."""
    roots = dict.fromkeys((f"{directory}/", f"{directory.resolve()}/"))
    return tuple(root + part for root in roots for part in parts or ("",))


TORCH_DIRECTORY = Path(torch.__file__).parent

TORCH = prefixes(TORCH_DIRECTORY)
SYMPY = prefixes(Path(sympy.__file__).parent)
SCOPETRACE = prefixes(Path(__file__).parents[1])

NOT_THE_MODEL = (*TORCH, *SYMPY, *SCOPETRACE)

# Python's own library, in which packages may be installed too; those are not of it.
PYTHON = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<frozen")
PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
