"""`ModuleCall`: a call of a module in a program, with what it took, gave and computed as nodes of the graph.

That a module call knows its arguments and outputs as graph values is the idea of RFC-0015 in pytorch/rfcs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.fx

from scopetrace._compat.graph_module import was_erased
from scopetrace.containers.structure import Removed, instantiate, leaves, leaves_with_path
from scopetrace.errors import EditError
from scopetrace.formatting import html_table, short_repr
from scopetrace.ir.scopes import Scope
from scopetrace.ir.tape import Call, FunctionalTape, ProgramTape, Tape, Value, bind, forward_of
from scopetrace.outline.signature import new_values, values_with_path
from scopetrace.program.graph import FxLowering, call_position, forward_place, node_value, typed


class CallGraphs:
    """The graphs of a program, which its module calls are parts of."""

    def __init__(self, tape: ProgramTape, forward: Callable[..., Any] | None, lower: Callable[[], FxLowering]) -> None:
        """`forward` has the signature of the program; `lower` gives its graph, which is made when first asked for."""
        self.tape, self.forward, self._lower = tape, forward, lower

    def calls(self) -> list[ModuleCall]:
        """Every module call in forward order, the root first."""
        records = dict.fromkeys(record for tape in self.tape.walk() for record in tape.calls)
        at: dict[int, ModuleCall] = {}
        for record in sorted(records, key=lambda record: record.position):
            at[record.position] = ModuleCall(record, self, at[record.parent.position] if record.parent else None)
        return list(at.values())

    @functools.cached_property
    def _lowerings(self) -> dict[Call, FxLowering]:
        lowerings = reversed([*self._lower().walk()])  # several higher-order ops may share a body: the first one counts
        return {record: lowering for lowering in lowerings for record in lowering.tape.calls}

    def lowering_of(self, call: Call) -> FxLowering:
        """The graph or subgraph that holds a call's nodes; the outermost graph for a call in a dead body."""
        return self._lowerings.get(call, self._lower())

    @functools.cached_property
    def _nodes(self) -> dict[FxLowering, list[tuple[int, torch.fx.Node]]]:
        """The nodes of each graph that a module call made, with the position of the innermost one."""
        positions: dict[FxLowering, list[tuple[int, torch.fx.Node]]] = {}
        for lowering in self._lower().walk():
            nodes = [(call_position(n), n) for n in lowering.graph.nodes if n.op not in ("placeholder", "output")]
            positions[lowering] = [(position, n) for position, n in nodes if position is not None]
        return positions

    def nodes_between(self, lowering: FxLowering, start: int, stop: int) -> list[torch.fx.Node]:
        """The nodes of a graph or subgraph whose innermost call has a position from `start` to before `stop`."""
        return [n for position, n in self._nodes[lowering] if start <= position < stop and not was_erased(n)]


class Saved(NamedTuple):
    """A tensor that a module call keeps for its backward."""

    node: torch.fx.Node
    shape: tuple[int | torch.SymInt, ...]
    bytes: int | torch.SymInt

    @classmethod
    def among(cls, nodes: Iterable[torch.fx.Node]) -> list[Saved]:
        """Of each of the nodes whose value is a tensor."""
        values = [(n, node_value(n)) for n in nodes]
        tensors = [(n, t) for n, t in values if isinstance(t, torch.Tensor)]
        return [cls(n, tuple(t.shape), t.numel() * t.element_size()) for n, t in tensors]  # `nbytes` takes no symbols


class ModuleCall:
    """One call of a module in a trace. The first of `Trace.calls` is the call of the traced callable itself."""

    def __init__(self, record: Call, graphs: CallGraphs, parent: ModuleCall | None) -> None:
        self._graphs = graphs
        self.record = record
        """The record of the call on the tape."""
        self.parent = parent
        """The call in which this one was made; None for the root."""
        self.children: list[ModuleCall] = []
        """The calls made directly in this one, in order."""
        if parent is not None:
            parent.children.append(self)

    @property
    def fqn(self) -> str | None:
        """The module's name, `"layers.0.attn"`; `""` for the root, None for a module outside the model's tree."""
        return self.record.fqn

    @property
    def module(self) -> torch.nn.Module | None:
        """The module itself; None for the root when a plain function was traced, and in a loaded trace."""
        return self.record.module

    @property
    def module_type(self) -> type | None:
        """The module's class; None for the root when a plain function was traced.

        torch makes a class for each parametrized module: those with the same base and parametrizations have one here.
        """
        return self.record.module_type

    @property
    def index(self) -> int:
        """0 for the first call of this module instance, 1 for its second."""
        return self.record.index

    @property
    def position(self) -> int:
        """Where this call stands in `Trace.calls`."""
        return self.record.position

    @property
    def scope(self) -> Scope:
        """The scope of the ops that run directly in this call."""
        return self.record.scope

    @property
    def is_leaf(self) -> bool:
        """Whether the call was recorded as one op, because `leaf_modules=` named its module."""
        return self.record.leaf

    @property
    def raised(self) -> BaseException | None:
        """The exception that ended this call and that an outer module caught; else None."""
        return self.record.raised

    @property
    def _stop(self) -> int:
        return self.children[-1]._stop if self.children else self.position + 1

    @property
    def attributes(self) -> dict[str, Any]:
        """The module's plain Python attributes when it was called (`eps`, `num_heads`, `training`)."""
        return self.record.attributes

    @property
    def lowering(self) -> FxLowering:
        """The graph, or the subgraph of a higher-order op, that has the call's nodes."""
        return self._graphs.lowering_of(self.record)

    @property
    def nodes(self) -> list[torch.fx.Node]:
        """The graph's nodes that this call and the calls inside it made, in order.

        For a call inside a body of `torch.cond` or another higher-order op, the nodes of the body's graph. A call that
        contains a cond has the cond's node, and not those of its bodies.
        """
        return self._graphs.nodes_between(self.lowering, self.position, self._stop)

    @property
    def backward_nodes(self) -> list[torch.fx.Node]:
        """The graph's nodes of the backward of this call and of the calls inside it, in order."""
        places = ((forward_place(node), node) for node in self.lowering.graph.nodes)
        return [n for place, n in places if place is not None and self.position <= place[1] < self._stop]

    @property
    def saved(self) -> list[Saved]:
        """The tensors of the forward that the backward of this call and of the calls inside it reads, each once."""
        read = dict.fromkeys(n for node in self.backward_nodes for n in node.all_input_nodes)
        return Saved.among(n for n in read if forward_place(n) is None)

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """By parameter name of `forward`, what was passed, defaults included.

        Tensors and symbolic sizes are `torch.fx.Node`s; everything else is the Python object itself. `*args` and
        `**kwargs` are under their own names, a tuple and a dict.
        """
        return {name: self._with_objects(template) for name, template in self.argument_templates.items()}

    @functools.cached_property
    def argument_templates(self) -> dict[str, Any]:
        """As `arguments`, with an OpaqueContainer for each object that holds tensors and that pytree does not know."""
        lower = self.lowering.lower
        args = tuple(lower(a) for a in self.record.args)
        kwargs = {name: lower(a) for name, a in self.record.kwargs.items()}
        return bind(self._forward(), args, kwargs)

    @functools.cached_property
    def outputs(self) -> Any:
        """The returned structure, with `torch.fx.Node`s for tensors and symbolic sizes. None when the call raised."""
        return self._with_objects(self.output_template)

    @functools.cached_property
    def output_template(self) -> Any:
        """As `outputs`, with an OpaqueContainer for each object that holds tensors and that pytree does not know."""
        return self.lowering.lower(self.record.outputs)

    @functools.cached_property
    def mutated(self) -> dict[str, torch.fx.Node]:
        """By argument path or buffer name, the node of the new value of each tensor that the call changed in place."""
        forward, lowering = self._forward(), self.lowering
        if isinstance(self._graphs.tape, FunctionalTape):
            values = dict(new_values(self.record, forward))
        else:
            values = _written_values(self.record, forward, lowering.tape)
        return {name: lowering.lower(value) for name, value in values.items()}

    def _with_objects(self, template: Any) -> Any:
        removed = leaves(template, Removed)
        if removed:
            names = ", ".join(r.name for r in removed)
            raise EditError(
                f"{self}: an edit of the graph removed {names}, which this call took or gave",
                module=self.scope.path,
                hint="ModuleCall.nodes has what is left of the call, argument_templates and output_template the rest",
            )
        return instantiate(lambda node: node, template, torch.fx.Node)

    def _forward(self) -> Callable[..., Any]:
        return forward_of(self.record, self._graphs.forward)

    if not TYPE_CHECKING:  # type checkers know what there is

        def __getattr__(self, name: str) -> Any:
            """What a name that people expect is called here, in an AttributeError."""
            instead = {
                "name": "fqn",
                "path": "scope.path",
                "inputs": "arguments",
                "output": "outputs",
                "args": "arguments",
            }
            hint = f": write call.{instead[name]}" if name in instead else ""
            raise AttributeError(f"a ModuleCall has no {name!r}{hint}")

    def __repr__(self) -> str:
        index = f", index={self.index}" if self.index else ""
        name = self.module_type.__name__ if self.module_type else "function"
        return f"ModuleCall({self.fqn!r}, {name}{index})"

    def _repr_html_(self) -> str:  # for notebooks
        templates = [*self.argument_templates.items(), ("->", self.output_template), *self.attributes.items()]
        parts = [(name + path, leaf) for name, template in templates for path, leaf in leaves_with_path(template)]
        rows = [(name, typed(x) if isinstance(x, torch.fx.Node) else short_repr(x)) for name, x in parts]
        return html_table(rows, (repr(self), str(self.scope)))


def _written_values(call: Call, forward: Callable[..., Any], tape: Tape) -> dict[str, Value]:
    """For a recorded tape, as `new_values`: from the last op in the call that writes each storage."""
    last = {v.storage: op for op in tape.ops[call.start : call.stop] for v in op.writes}
    values = dict(values_with_path(bind(forward, call.args, call.kwargs)))
    prefix = call.prefix
    for name, value in tape.attribute_reads():
        if call.module is not None and name.startswith(prefix):
            values.setdefault(name.removeprefix(prefix), value)
    writers = {name: last[v.storage] for name, v in values.items() if v.storage in last}
    return {name: op.values()[0] for name, op in writers.items() if op.values()}
