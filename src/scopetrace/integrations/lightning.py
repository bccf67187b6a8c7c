"""A callback for Lightning that logs what the model is at the start of a run. Needs `scopetrace[lightning]`.

trainer = L.Trainer(callbacks=[ModelReport()])
"""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.hooks import RemovableHandle

from scopetrace.errors import IntegrationDependencyError
from scopetrace.integrations.first_call import log_first_call

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise IntegrationDependencyError("this needs Lightning: pip install 'scopetrace[lightning]'") from error

_logger = logging.getLogger("scopetrace")


class ModelReport(Callback):
    """Logs summary, memory peak and picture of the model at its first training batch, in the process of rank 0.

    The numbers go to the run's loggers, the text also to those with TensorBoard's `add_text`; summary, page and picture
    are the files `scopetrace.*` in the log folder of the run.

    Args:
        module: the submodule that `training_step` calls, as `"model"`; empty where it calls `self(batch)`.
        depth: how many levels of calls below it have rows; None for all.
    """

    def __init__(self, module: str = "", depth: int | None = 3) -> None:
        self._module, self._depth = module, depth
        self._handle: RemovableHandle | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the first call of the module, which is that of the first batch."""

        def log(numbers: dict[str, float], text: str) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)
                if hasattr(logger.experiment, "add_text"):
                    logger.experiment.add_text("scopetrace", f"<pre>{text}</pre>")

        if trainer.is_global_zero:
            module = pl_module.get_submodule(self._module)
            folder = trainer.log_dir or trainer.default_root_dir
            self._handle = log_first_call(module, folder, self._depth, log)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Say so where the module was not called."""
        handle = self._handle
        if handle is not None and handle.id in (handle.hooks_dict_ref() or ()):
            handle.remove()
            name = self._module or "the LightningModule itself"
            _logger.warning('scopetrace: training_step never called %s; write ModelReport("NAME_OF_SUBMODULE")', name)
