"""Makes torchvision importable on a torch build that its compiled operators do not fit.

torchvision's wheels from PyPI are built for a CUDA torch; on a CPU-only one their operators do not load, and `import
torchvision` (so also `import timm`, and parts of transformers) fails with "operator torchvision::nms does not exist".
Declaring the two missing ops makes the import work. They have no kernel, so a model that calls them cannot run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from importlib.machinery import PathFinder

import torch

_NAMESPACE = "torchvision"
_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


@functools.cache
def declare_missing_ops() -> torch.library.Library | None:
    """Declare the ops that torchvision needs at import, where its compiled operators do not load.

    The declarations last as long as the result, which the cache keeps.
    """
    package = importlib.util.find_spec(_NAMESPACE)
    if package is None:
        return None
    binary = PathFinder.find_spec("_C", package.submodule_search_locations)  # as torchvision itself does at import
    if binary is not None and binary.origin is not None:
        with contextlib.suppress(OSError):
            torch.ops.load_library(binary.origin)
    missing = [schema for name, schema in _SCHEMAS.items() if not hasattr(torch.ops.torchvision, name)]
    if not missing:
        return None
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    for schema in missing:
        library.define(schema)
    return library
