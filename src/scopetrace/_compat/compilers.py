"""torch.compile's backends, called for one graph, and what Dynamo is told of a function."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from scopetrace.errors import ArgumentTypeError, CompiledGraphError

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


def compiler_for(backend: str | Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]) -> Backend:
    """A backend, or that of a name, which is told that sizes may depend on data, as Dynamo tells it."""
    compiler: Callable[..., Any] = backend_for(backend, None, None) if isinstance(backend, str) else backend
    if not callable(compiler):
        raise ArgumentTypeError(f"a compiler is a function or the name of a backend, not {type(compiler).__name__}")

    def compile_graph(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        for node in graph_module.graph.nodes:  # the symbols of this run have the names of those of the trace
            node.meta.pop("unbacked_bindings", None)
        fake_mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
        with tracing(TracingContext(fake_mode)):
            run = compiler(graph_module, list(inputs))
        if not callable(run):
            raise CompiledGraphError(f"the compiler returned {type(run).__name__}, not a function that runs the graph")
        return run

    return compile_graph


def constant_to_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function as `torch.compiler.assume_constant_result` does, which would import `torch._dynamo`."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def leave_to_python(function: Callable[..., Any]) -> None:
    """Let torch.compile not trace the code of a function, also after a graph break around it."""
    torch._dynamo.eval_frame.skip_code(function.__code__)  # loaded by torch.compile, which calls this


def stands_for_number(placeholder: torch.fx.Node) -> bool:
    """Whether Dynamo has made a tensor of a number of the model for an input of the graph that it compiles."""
    argument = placeholder.meta.get("grapharg")  # until the backend has returned
    return argument is not None and argument.pass_arg_as_tensor and not argument.is_tensor
