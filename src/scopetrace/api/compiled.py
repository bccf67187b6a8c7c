"""`CompiledTrace`: a trace whose distinct functions are compiled once each by a backend of torch.compile.

Data flow:
    Trace -> outline -> pieces, each compiled once
    a call: checks of the trace -> the graph that calls pieces -> write-back of the trace
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from scopetrace._compat.compilers import backend_for
from scopetrace.errors import ArgumentError, CompileError
from scopetrace.ir.scopes import tracing_state
from scopetrace.lower.compiled import BETWEEN, Piece, Pieces, without_single_ops
from scopetrace.program.outlined import GENERAL, OUTERMOST, OutlinedTrace, OutlineTarget, outline_calls, tells_calls
from scopetrace.program.traced import TracedProgram


class CompiledTrace:
    """A compiled trace: `compiled(*args, **kwargs)` does what the trace and the model do, gradients included.

    Attributes:
        backend: the name of the backend.
    """

    def __init__(self, program: OutlinedTrace, pieces: Pieces, backend: str) -> None:
        self._program, self._pieces = program, pieces
        self.backend = backend

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What was compiled: a `Piece` for each distinct function, and for each stretch of ops between calls."""
        return self._pieces.distinct

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled program: same results, effects and gradients as the model, up to the backend's rounding.

        Where autograd follows tensors that it did not follow in the trace, the first such call compiles again. Inputs
        of sizes that the trace takes and the compiled code does not run through the graph, uncompiled. So do calls in a
        function that is being traced itself.

        Raises InputMismatchError and SideEffectError as `Trace.__call__`, CompileError where the backend fails.
        """
        if tracing_state() is not None:
            source = self._program.source
            return source.run(source.graph_module, *args, **kwargs)
        return self._program.run_compiled(self._pieces, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise CompileError: neither `copy` nor `pickle` take compiled code."""
        raise CompileError(
            "a compiled trace is neither copied nor pickled",
            hint="copy or save the Trace and compile that: backends such as Inductor keep what they made on disk",
        )

    def __repr__(self) -> str:
        functions = [p for p in self.pieces if p.name != BETWEEN]
        calls = sum(p.calls for p in functions)
        shared = f"{calls} layers: {len(functions)} compiled, {calls - len(functions)} shared; " if functions else ""
        others = len(self.pieces) - len(functions)
        text = f"{shared}{others} piece{'s' * (others != 1)} between"
        return f"<CompiledTrace of {self._program.tape.root.path} by {self.backend}: {text}>"


def compile_program(
    program: TracedProgram,
    targets: Sequence[OutlineTarget],
    backend: str | Callable[..., Any],
    mode: str | None,
    options: dict[str, Any] | None,
    progress: Callable[[str], None] | None,
) -> CompiledTrace:
    """See `Trace.compile`."""
    if not isinstance(backend, str) and not callable(backend):
        raise ArgumentError(
            f"backend={backend!r} is neither a name of torch.compile's, such as 'inductor', nor a function"
        )
    try:
        compiler = backend_for(backend, mode, options)
    except Exception as error:  # torch has a class for each mistake, some of them private
        said = textwrap.shorten(str(error), 160, placeholder=" …")
        raise ArgumentError(f"torch.compile does not take this backend, mode or options: {said}") from error
    targets = targets if tells_calls(program) else [t for t in targets if t not in GENERAL]  # one function for all
    outlined = outline_calls(program, targets, nested=False)
    outlined = without_single_ops(outlined) if OUTERMOST in targets else outlined
    table_of, grad = outlined.boundary.state.table_of, program.tape.grad
    pieces = Pieces(outlined.graph_module, compiler, table_of, grad=grad)
    for i, piece in enumerate(pieces.distinct):
        if progress is not None:
            progress(f"compiling {piece.name}, called {piece.calls}×, {i + 1} of {len(pieces.distinct)}")
        piece.compile()
    return CompiledTrace(outlined, pieces, backend if isinstance(backend, str) else getattr(backend, "__name__", "?"))
