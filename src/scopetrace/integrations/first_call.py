"""What the callbacks of training runs have in common: they log what a module is when the run first calls it.

forward pre-hook -> the arguments of the first call -> traces of the forward, and of it with its backward
traces -> numbers for the run's loggers, and scopetrace.txt, scopetrace.html and scopetrace.svg in its folder
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

import scopetrace as st

_logger = logging.getLogger("scopetrace")


def log_first_call(
    module: torch.nn.Module, folder: str | Path, depth: int | None, log: Callable[[dict[str, float], str], None]
) -> RemovableHandle:
    """At the next call of the module, write the files, and give the numbers and the text to `log`.

    The numbers are `scopetrace/parameters`, `scopetrace/flops` of the forward, `scopetrace/peak_bytes` and
    `scopetrace/saved_bytes` of forward and backward. A module that cannot be traced is a warning, and the run goes on.
    """

    @torch.compiler.disable
    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        try:
            log(*_report(module, args, kwargs, Path(folder), depth))
        except Exception as error:  # a report is not worth a run
            _logger.warning("scopetrace cannot trace %s: %s: %s", type(module).__name__, type(error).__name__, error)

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    return handle


def _report(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], folder: Path, depth: int | None
) -> tuple[dict[str, float], str]:
    def step(*args: Any, **kwargs: Any) -> None:
        out = module(*args, **kwargs)
        loss = out.get("loss") if isinstance(out, Mapping) else None
        results = [loss] if loss is not None else pytree.tree_leaves(out)
        losses = [t.sum() for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
        if losses:
            sum(losses[1:], losses[0]).backward()

    with warnings.catch_warnings():  # of what calls of a trace do not do; there are none
        warnings.simplefilter("ignore", st.errors.ScopetraceWarning)
        tr = st.trace(module, args, kwargs, side_effects="warn")
        memory = st.trace(step, args, kwargs, side_effects="warn").memory(depth)
    summary = tr.summary(depth)
    text = f"{summary}\n\n{memory}\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scopetrace.txt").write_text(text, encoding="utf-8")
    tr.to_html(folder / "scopetrace.html")
    with contextlib.suppress(st.errors.ViewDependencyError):  # the page needs nothing
        tr.to_svg(folder / "scopetrace.svg")
    _logger.info("%s", text)
    row = summary.rows[0]
    numbers = {"parameters": row.parameters, "flops": row.flops, "peak_bytes": memory.peak_bytes}
    numbers["saved_bytes"] = memory.saved_bytes
    return {f"scopetrace/{name}": float(number) for name, number in numbers.items()}, text
