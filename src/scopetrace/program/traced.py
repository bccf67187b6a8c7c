"""Module calls as people read them: which module, with which values, giving which.

The idea is RFC-0015 of pytorch/rfcs: a scope that knows the inputs and outputs of the module behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from scopetrace.containers.structure import leaves_with_path
from scopetrace.ir import meta
from scopetrace.ir.arguments import bind, forward_of
from scopetrace.ir.scopes import Scope
from scopetrace.ir.tape import Call, Tape, Value
from scopetrace.program.graph import FxLowering


class ModuleCall:
    """One call of a module in a trace. The first of `Trace.calls` is the call of the traced callable itself."""

    def __init__(self, call: Call, table: CallTable) -> None:
        self._call = call
        self._table = table

    @property
    def program(self) -> FxLowering:
        """The graph, or the body in it, where the call was made."""
        return self._table.program_of(self._call)

    @property
    def record(self) -> Call:
        """The call as the tape has it."""
        return self._call

    @property
    def fqn(self) -> str | None:
        """The module's name, `"layers.0.attn"`; `""` for the root, None for a module outside the model's tree."""
        return self._call.fqn

    @property
    def module(self) -> torch.nn.Module | None:
        """The module itself; None for the root when a plain function was traced, and in a loaded trace."""
        return self._call.module

    @property
    def module_type(self) -> type | None:
        """The module's class; None for the root when a plain function was traced.

        torch makes a class for each parametrized module: those with the same base and parametrizations have one here.
        """
        return self._call.module_type

    @property
    def index(self) -> int:
        """0 for the first call of this module instance, 1 for its second."""
        return self._call.index

    @property
    def position(self) -> int:
        """Where this call stands in `Trace.calls`."""
        return self._call.position

    @property
    def scope(self) -> Scope:
        """The scope of the ops that run directly in this call."""
        return self._call.scope

    @property
    def is_leaf(self) -> bool:
        """Whether the call was recorded as one op, because `leaves=` named its module."""
        return self._call.leaf

    @property
    def raised(self) -> BaseException | None:
        """The exception that ended this call, where one did and an outer module caught it."""
        return self._call.raised

    @property
    def parent(self) -> ModuleCall | None:
        """The call in which this one was made; None for the root."""
        return None if self._call.parent is None else self._table.at[self._call.parent.position]

    @property
    def children(self) -> list[ModuleCall]:
        """The calls made directly in this one, in order."""
        return self._table.children[self.position]

    @property
    def nodes(self) -> list[torch.fx.Node]:
        """The graph's nodes that this call and the calls inside it made, in order.

        For a call inside a body of `torch.cond` and its kind, those of the body's graph. In the other direction, a call
        with a cond in it has the cond's node, and not those of the bodies.
        """
        return self._table.nodes_between(self.program, self.position, self._table.ends[self.position])

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """forward's parameter names and what was passed for them, defaults included.

        Tensors are `torch.fx.Node`s, symbolic sizes too; everything else is the Python object itself. `*args` and
        `**kwargs` stand under their own names, as a tuple and a dict.
        """
        lower = self.program.lower
        args = tuple(lower(a) for a in self._call.args)
        kwargs = {name: lower(a) for name, a in self._call.kwargs.items()}
        return bind(self._forward(), args, kwargs)

    @functools.cached_property
    def outputs(self) -> Any:
        """What the call returned, tensors as `torch.fx.Node`s. None when it raised."""
        return self.program.lower(self._call.outputs)

    @property
    def attributes(self) -> dict[str, Any]:
        """The module's plain Python attributes when it was called (`eps`, `num_heads`, `training`)."""
        return self._call.attributes

    @functools.cached_property
    def mutated(self) -> dict[str, torch.fx.Node]:
        """What the call changed in place: an argument's path or a buffer's name, and the node after the change."""
        return self._table.mutated(self.program, self._call, self._forward())

    def _forward(self) -> Any:
        return forward_of(self._call, self._table.forward)

    def __repr__(self) -> str:
        index = f", index={self.index}" if self.index else ""
        name = self.module_type.__name__ if self.module_type else "function"
        return f"ModuleCall({self.fqn!r}, {name}{index})"


class CallTable:
    """All calls of a trace, and what they share."""

    def __init__(self, tape: Tape, program: Callable[[], FxLowering], forward: Callable[..., Any] | None) -> None:
        """`program` gives the graph of the tape, when a call is first asked for its nodes."""
        self._program = program
        self.forward = forward.forward if isinstance(forward, torch.nn.Module) else forward
        records = [record for inner in tape.walk() for record in inner.calls]
        made = {record: ModuleCall(record, self) for record in dict.fromkeys(records)}
        self.calls = sorted(made.values(), key=lambda call: call.position)
        self.at = {call.position: call for call in self.calls}
        self.children: dict[int, list[ModuleCall]] = {position: [] for position in self.at}
        self.ends = {position: position + 1 for position in self.at}
        for call in reversed(self.calls):
            if call.parent is not None:
                above = call.parent.position
                self.ends[above] = max(self.ends[above], self.ends[call.position])
        for call in self.calls:
            if call.parent is not None:
                self.children[call.parent.position].append(call)

    @property
    def program(self) -> FxLowering:
        """The graph of the whole."""
        return self._program()

    @functools.cached_property
    def _programs(self) -> dict[Call, FxLowering]:
        found: dict[Call, FxLowering] = {}
        for program in self.program.walk():
            for record in program.tape.calls:
                found.setdefault(record, program)  # a body may stand in several others
        return found

    def program_of(self, call: Call) -> FxLowering:
        """The graph, or the body in it, where a call was made; the whole for one in a body that nothing needs."""
        return self._programs.get(call, self.program)

    @functools.cached_property
    def _by_call(self) -> dict[FxLowering, list[tuple[int, torch.fx.Node]]]:
        return {program: _with_call(program) for program in self.program.walk()}

    def nodes_between(self, program: FxLowering, start: int, stop: int) -> list[torch.fx.Node]:
        """The nodes of a graph whose innermost call is from `start` to before `stop`."""
        return [n for position, n in self._by_call[program] if start <= position < stop and not n._erased]

    def mutated(self, program: FxLowering, call: Call, forward: Callable[..., Any]) -> dict[str, torch.fx.Node]:
        """See `ModuleCall.mutated`."""
        if self.program.tape.write_back is not None:
            return self._mutated_values(program, call, forward)
        ops = program.tape.ops[call.start : call.stop]
        last = {v.storage: op for op in ops for v in op.writes}
        named = bind(forward, call.args, call.kwargs)
        found = {
            name + path: leaf.storage
            for name, arg in named.items()
            for path, leaf in leaves_with_path(arg)
            if isinstance(leaf, Value)
        }
        prefix = f"{call.fqn}." if call.fqn else ""
        for op in program.tape.ops:
            if op.kind == "get_attr" and call.module is not None and op.target.startswith(prefix):
                found.setdefault(op.target.removeprefix(prefix), op.outputs.storage)
        return {
            name: program.lower(last[storage].values()[0])
            for name, storage in found.items()
            if storage in last and last[storage].values()
        }

    def _mutated_values(self, program: FxLowering, call: Call, forward: Any) -> dict[str, torch.fx.Node]:
        if call.mutated is None:
            return {}
        args, kwargs, held = call.mutated
        named = bind(forward, args, kwargs)
        found = {name + p: v for name, arg in named.items() for p, v in leaves_with_path(arg) if isinstance(v, Value)}
        found |= held
        return {name: program.lower(v) for name, v in found.items()}


def _with_call(program: FxLowering) -> list[tuple[int, torch.fx.Node]]:
    found = [(meta.call_position(n), n) for n in program.graph.nodes if n.op not in ("placeholder", "output")]
    return [(position, n) for position, n in found if position is not None]
