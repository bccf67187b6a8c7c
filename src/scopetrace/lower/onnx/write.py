"""From a trace to a file: make the model, write it, verify it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import onnx_ir as ir

from scopetrace.ir.tape import garbage_collection_paused
from scopetrace.lower.onnx.export import Exported, Options, export
from scopetrace.lower.onnx.verify import verify
from scopetrace.lower.onnx.weights import save
from scopetrace.program.traced import TracedProgram


@dataclasses.dataclass
class Written:
    """An ONNX model that was made, and perhaps written and verified."""

    exported: Exported
    error: float | None
    """The largest error against the model, where it was verified."""

    @property
    def model(self) -> ir.Model:
        """The model."""
        return self.exported.model


def write(
    program: TracedProgram,
    path: str | os.PathLike[str] | None,
    options: Options,
    external_data: bool | None,
    verified: bool,
    progress: Callable[[str], None] | None,
) -> Written:
    """Make a model, and only when it is right write it. For the arguments see `Trace.to_onnx`."""
    say = progress or (lambda text: None)
    with garbage_collection_paused():
        exported = export(program, options, say)
    error = verify(exported, program, say) if verified else None
    if path is not None:
        say(f"writing {os.fspath(path)}")
        save(exported.model, path, external_data)
    return Written(exported, error)
