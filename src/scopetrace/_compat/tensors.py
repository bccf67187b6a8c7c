"""Private attributes of tensors, storages and modules.

These are read for every op, so most are `operator.attrgetter`: it costs less than a Python function.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch

version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""How often the memory of a tensor was written in place. Raises RuntimeError for an inference tensor."""

is_symbolic: Callable[[torch.Tensor], bool] = operator.attrgetter("_has_symbolic_sizes_strides")
"""Whether a size, a stride or the storage offset is symbolic."""

id_of_storage: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""Equal for Python objects that are the same storage. May be used again once the storage is freed."""

parameters_of: Callable[[torch.nn.Module], dict[str, torch.nn.Parameter | None]] = operator.attrgetter("_parameters")
"""The parameters of the module itself by name, as the dict that the module reads."""

buffers_of: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]] = operator.attrgetter("_buffers")
"""The buffers of the module itself by name, as the dict that the module reads."""


def storage_id(t: torch.Tensor) -> int:
    """Equal for tensors that share memory; unique for layouts without a storage. May be reused after `t` is freed."""
    if t.layout is torch.strided:
        return t.untyped_storage()._cdata
    return -id(t)


def persistent_buffers_of(module: torch.nn.Module) -> list[str]:
    """The names of the module's own buffers that are in its state dict."""
    return [name for name in module._buffers if name not in module._non_persistent_buffers_set]
