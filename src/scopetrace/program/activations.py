"""`activations`: the values of chosen module calls in a run of a trace.

Data flow:
    targets -> calls -> the nodes of their arguments and results
    a run of the graph, node by node -> the values of these nodes -> CallValues of each call

What people use forward hooks for; a hook does not see keyword arguments, a second call or a direct `forward`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
import torch.fx

from scopetrace.containers.structure import instantiate, leaves
from scopetrace.errors import CallNotFoundError
from scopetrace.program.selection import Calls
from scopetrace.program.traced import ModuleCall, TracedProgram


@dataclasses.dataclass(frozen=True)
class CallValues:
    """What a module call took and gave in a run."""

    call: ModuleCall
    arguments: dict[str, Any] = dataclasses.field(repr=False)
    """By parameter name of `forward`, defaults included."""
    outputs: Any = dataclasses.field(repr=False)
    """The returned structure; None where the call raised."""


def activations(
    program: TracedProgram, calls: Iterable[ModuleCall], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, CallValues]:
    """The values of calls in a call of the program, by `"fqn"`, for a second call of a module `"fqn#1"`.

    Raises CallNotFoundError for a call inside a body of `torch.cond` and its kind.
    """
    chosen = Calls(calls)
    templates = {call: (call.argument_templates, call.output_template) for call in chosen}
    for call in chosen:
        if call.lowering is not program.lowering:
            raise CallNotFoundError(f"{call} is in a body of a higher-order op, whose values a run does not give")
    wanted = set(leaves(list(templates.values()), torch.fx.Node))
    run = _Keeping(program.graph_module, wanted, program.reported.has_writes())
    program.run(run.run, *args, **kwargs)
    by_name = {}
    for call, template in templates.items():
        arguments, outputs = instantiate(run.values.__getitem__, template, torch.fx.Node)
        by_name[f"{call.fqn}#{call.index}" if call.index else str(call.fqn)] = CallValues(call, arguments, outputs)
    return by_name


class _Keeping(torch.fx.Interpreter):
    """Runs a graph and keeps the values of some nodes; copies of tensors where the program writes to memory."""

    def __init__(self, graph_module: torch.fx.GraphModule, wanted: set[torch.fx.Node], copies: bool) -> None:
        super().__init__(graph_module)
        self._wanted, self._copies = wanted, copies
        self.values: dict[torch.fx.Node, Any] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        """As in the base class."""
        value = super().run_node(n)
        if n in self._wanted:
            self.values[n] = value.clone() if self._copies and isinstance(value, torch.Tensor) else value
        return value
