"""Module calls of a program chosen by name, class or predicate, `Trace.calls[...]`, and their values in a run.

Data flow:
    targets -> calls (`Calls`) -> the nodes of their arguments and results
    a run of the graph, node by node -> the values of these nodes -> CallValues of each call

The values are what people use forward hooks for; a hook does not see keyword arguments, a second call or a direct
`forward`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex, overload

import torch
import torch.fx

from scopetrace.containers.structure import instantiate, leaves
from scopetrace.errors import CallNotFoundError
from scopetrace.ir.selection import LISTED, Selection, is_named, near_text, several, target_text
from scopetrace.program.traced import ModuleCall, TracedProgram


class Calls(list[ModuleCall]):
    """Module calls in forward order. An index or slice is that of a list; targets give the calls that they name."""

    @overload
    def __getitem__(self, key: SupportsIndex, /) -> ModuleCall: ...
    @overload
    def __getitem__(self, key: slice | Selection, /) -> Calls: ...
    def __getitem__(self, key: Any, /) -> Any:
        """One call for an index; for a slice or a target the calls, in order.

        Raises CallNotFoundError where a class, module or pattern names no call, IndexError for an index.
        """
        if isinstance(key, slice):
            return Calls(super().__getitem__(key))
        if isinstance(key, SupportsIndex):
            return super().__getitem__(key)
        targets = several(key)
        for target in targets:
            if isinstance(target, (str, type, torch.nn.Module)) and not any(is_named(call, target) for call in self):
                raise CallNotFoundError(f"no module call is named {target_text(target)}; {near_calls(target, self)}")
        return Calls(call for call in self if is_named(call, targets))

    def of(self, fqn: str, index: int = 0) -> ModuleCall:
        """The call of the module with this exact name; `index` 1 is its second call. Raises CallNotFoundError."""
        matches = {call.index: call for call in self if call.fqn == fqn}
        if index in matches:
            return matches[index]
        if matches:
            times = "once" if len(matches) == 1 else f"{len(matches)} times"
            raise CallNotFoundError(f"{fqn!r} is called {times}: there is no call with index {index}")
        raise CallNotFoundError(f"no module call has the name {fqn!r}; {near_calls(fqn, self)}")

    def __repr__(self) -> str:
        if len(self) <= LISTED:
            return super().__repr__()
        return f"[{', '.join(map(repr, super().__getitem__(slice(LISTED - 1))))}, … {len(self) - LISTED + 1} more]"


def near_calls(target: Any, calls: Iterable[ModuleCall], words: Sequence[str] = ()) -> str:
    """What a message says of a target that names no call; `words` could stand there, too."""
    calls = [call for call in calls if call.fqn]
    if not calls:
        return "only the model itself is called"
    fqns, paths = [str(call.fqn) for call in calls], [call.scope.path for call in calls]
    kinds = [call.scope.type_name for call in calls]
    return near_text(target, fqns, kinds if isinstance(target, type) else [*kinds, *words], paths)


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
        value = super().run_node(n)
        if n in self._wanted:
            self.values[n] = value.clone() if self._copies and isinstance(value, torch.Tensor) else value
        return value
