"""Where the Python files of torch, sympy and this package are, to tell their stack frames from those of the model.

`co_filename` has the path by which a module was imported. In a linked virtual environment that is not the resolved
path, so each directory is here in both forms. All are prefixes for `str.startswith`.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path
from types import FrameType

import sympy  # type: ignore[import-untyped]
import torch


def prefixes(directory: Path, *parts: str) -> tuple[str, ...]:
    """The files and folders `parts` of a directory, or all of it, as imported and resolved."""
    roots = dict.fromkeys((f"{directory}/", f"{directory.resolve()}/"))
    return tuple(root + part for root in roots for part in parts or ("",))


TORCH_DIRECTORY = Path(torch.__file__).parent

TORCH = prefixes(TORCH_DIRECTORY)
SYMPY = prefixes(Path(sympy.__file__).parents[1], "sympy/", "mpmath/")
SCOPETRACE = prefixes(Path(__file__).parent)

NOT_THE_MODEL = (*TORCH, *SYMPY, *SCOPETRACE)

# Python's own library, in which packages may be installed too; those are not of it.
PYTHON = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<frozen")
PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))

_OVERRIDES = prefixes(TORCH_DIRECTORY, "overrides.py")
_OURS = prefixes(Path(__file__).parent, "_compat/", "sources.py", "watch/questions.py")
_ON_THE_WAY = (*_OURS, *_OVERRIDES, *prefixes(TORCH_DIRECTORY, "utils/_device.py"))


def asking_frame() -> FrameType | None:
    """The nearest frame outside of what leads a question to where it is answered: `_compat`, the handlers of
    the recorder and torch's overrides.

    A function of torch in Python that calls `handle_torch_function`, such as `Tensor.__repr__`, is left out.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OVERRIDES) and frame.f_code.co_name == "handle_torch_function" and frame.f_back is not None:
            frame = frame.f_back.f_back
        elif file.startswith(_ON_THE_WAY):
            frame = frame.f_back
        else:
            break
    return frame


def is_of_python(path: str) -> bool:
    """Whether a file is of Python's own library, in which other packages may be installed too."""
    return path.startswith(PYTHON) and not path.startswith(PACKAGES)


def asked_by_model(on_its_way: tuple[str, ...] = ("<frozen abc>",)) -> bool:
    """Whether code of the model asks, perhaps through files `on_its_way`."""
    frame = asking_frame()
    while frame is not None and frame.f_code.co_filename.startswith(on_its_way):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(NOT_THE_MODEL)


@functools.cache
def is_users(filename: str) -> bool:
    """Whether a file is neither torch's nor the standard library's."""
    return not filename.startswith(NOT_THE_MODEL) and not is_of_python(filename)
