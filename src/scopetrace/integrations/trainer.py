"""A callback for the Trainer of transformers that logs what the model is at the start of a run.

trainer = Trainer(model, args, callbacks=[ModelReport()])       # needs `scopetrace[trainer]`
"""

from __future__ import annotations

from typing import Any

from scopetrace.errors import IntegrationDependencyError
from scopetrace.integrations.first_call import log_first_call

try:
    from transformers.trainer_callback import TrainerCallback
except ImportError as error:
    raise IntegrationDependencyError("this needs transformers: pip install 'scopetrace[trainer]'") from error


class ModelReport(TrainerCallback):
    """Logs summary, memory peak and picture of the model at its first training batch, in the main process.

    The numbers go to `state.log_history`, which `trainer_state.json` has too; summary, page and picture are the files
    `scopetrace.*` in `args.output_dir`.

    Args:
        depth: how many levels of calls below the model have rows; None for all.
    """

    def __init__(self, depth: int | None = 3) -> None:
        self._depth = depth

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the first call of the model, which is that of the first batch."""

        def log(numbers: dict[str, float], text: str) -> None:
            state.log_history.append({**numbers, "step": state.global_step})

        if state.is_world_process_zero:
            log_first_call(kwargs["model"], args.output_dir, self._depth, log)
