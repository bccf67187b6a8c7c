"""`Runnable`: what the objects that people hold have in common, a program that runs.

program -> graph_module, write_back, mutations, aliases; a call runs the graph, then the write-back
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.fx

from scopetrace._compat.dynamo import CompiledApart
from scopetrace.functionalization.report import Alias, Mutation, aliases, mutations
from scopetrace.ir.write_back import WriteBack
from scopetrace.program.traced import TracedProgram


class Runnable(CompiledApart):
    """A graph and its write-back: what Trace, OutlinedProgram and Functionalized have in common."""

    def __init__(self, program: TracedProgram) -> None:
        super().__init__(program)
        self._held = program

    @property
    def _program(self) -> TracedProgram:
        """The program that the graph is now: an edit of `graph_module` is an edit of the program."""
        self._held = self._held.current
        return self._held

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The graph: the input tensors in order as placeholders, the result's tensors in order as outputs.

        Parameters, buffers and constants are `get_attr` nodes; the module holds the model's own tensors. In an
        OutlinedProgram, equal module calls are `invoke_subgraph` nodes that share a submodule.
        """
        return self._held.graph_module

    @property
    def write_back(self) -> WriteBack | None:
        """The steps after the graph that change inputs and build results; None where its outputs are the result."""
        return self._program.tape.write_back

    @property
    def mutations(self) -> list[Mutation]:
        """What the original changes in its inputs, parameters and buffers, in the order of execution."""
        return mutations(self._program.reported)

    @property
    def aliases(self) -> list[Alias]:
        """For each tensor of the result: whether it is new, an input, or a view of an input or earlier result."""
        return aliases(self._program.reported)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph, then the write-back: same results and same effects as the original.

        Raises InputMismatchError when the structure, shapes, dtypes, devices or Python values of the arguments are not
        those of the trace, tensors share memory in another way, or a value that the trace is specialized on differs.
        Raises SideEffectError at a second call where the program depends on what forward wrote into Python objects.
        """
        return self._held(*args, **kwargs)

    def run(self, graph: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call that runs `graph`, such as a compiled form of `graph_module`, in its place.

        `graph` gets the tensors among the inputs, then the dynamic numbers, and returns the values of the output node
        of `graph_module`, as list or tuple. Values in other memory or with other strides than those of `graph_module`
        are copied or viewed again, so that the write-back is right.

        Raises InputMismatchError as a call does, CompiledGraphError for values of other shapes or dtypes.
        """
        return self._program.run(graph, *args, **kwargs)


def program_of(traced: Runnable) -> TracedProgram:
    """The program that a trace holds, for `distributed` and `cli`, which read tapes."""
    return traced._program
