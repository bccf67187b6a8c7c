"""torch's wrappers of modules that run again in backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing


def checkpoint_modules(model: torch.nn.Module, modules: Sequence[torch.nn.Module]) -> None:
    """Put a CheckpointWrapper around each of these modules of a model, in place."""
    chosen = set(map(id, modules))
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in chosen)
