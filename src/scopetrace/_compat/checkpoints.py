"""torch's wrappers of modules that run again in backward."""

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing as apply_activation_checkpointing,
)
