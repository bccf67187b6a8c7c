"""torch.compile's backends, called for one graph, and what Dynamo is told of a function."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

Backend = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]

COMPILING = threading.RLock()
"""Held while a backend runs: compilers have state for the whole process."""


def backend_for(backend: str | Callable[..., Any], mode: str | None, options: dict[str, Any] | None) -> Backend:
    """What torch.compile takes for these arguments: a function from graph and example inputs to a callable.

    Raises torch's own errors for a backend, a mode or an option that it does not know.
    """
    if mode is not None and options is not None:
        raise RuntimeError("Either mode or options can be specified, but both can't be specified at the same time.")
    if backend == "inductor":
        return torch._TorchCompileInductorWrapper(mode, options, None)
    return torch._TorchCompileWrapper(backend, mode, options, None)


def constant_to_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function as `torch.compiler.assume_constant_result` does, which would import `torch._dynamo`."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
