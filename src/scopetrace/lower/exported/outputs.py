"""The outputs of an ExportedProgram: new values of parameters, buffers and inputs, then the results.

Data flow:
    updates of the write-back program, tensors assigned to buffers -> one _Change each, with the node of the new value
    results of the write-back program -> nodes: outputs of the graph, changed values, views made with ops at the end
    both -> the output node and its OutputSpecs; a clone wherever two entries would share memory
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    OutputKind,
    OutputSpec,
)
from torch.utils import _pytree as pytree

from scopetrace._compat.symbols import Symbolic
from scopetrace._compat.tensors import run_fake
from scopetrace.containers.structure import container_type, map_structure
from scopetrace.errors import ExportError
from scopetrace.ir import meta
from scopetrace.ir.tape import FunctionalTape, Value
from scopetrace.ir.write_back import (
    CopyInto,
    FromGraph,
    GraphInput,
    SameAs,
    Source,
    StateRef,
    StridedStep,
    ViewOf,
)
from scopetrace.lower.exported.calls import argument_of
from scopetrace.lower.exported.inputs import State
from scopetrace.program.graph import FxLowering

_aten = torch.ops.aten
_KINDS = {InputKind.PARAMETER: OutputKind.PARAMETER_MUTATION, InputKind.BUFFER: OutputKind.BUFFER_MUTATION}


@dataclasses.dataclass
class _Change:
    """A parameter, buffer or input that gets a new value: its placeholder and the node of the value."""

    kind: OutputKind
    target: str
    placeholder: torch.fx.Node
    value: torch.fx.Node


class Outputs:
    """Makes the output node of a lifted graph.

    Attributes:
        specs: the OutputSpec of each output, in order.
        spec: the pytree spec of the result.
    """

    def __init__(
        self,
        program: FxLowering,
        tape: FunctionalTape,
        lower: Callable[[Any], Any],
        inputs: list[torch.fx.Node],
        state: dict[str, tuple[State, torch.fx.Node]],
    ) -> None:
        self._program, self._tape, self._graph, self._lower = program, tape, program.graph, lower
        self._inputs, self._state = inputs, state
        self._values = [lower(v) for v in tape.graph_outputs()]
        self._memory = {lower(v): v.storage for op in self._tape.ops for v in op.values() if program.has(v)}
        self._results: list[Any] = []
        self._changes = self._find_changes()
        results, self.spec = self._flat_results()
        for change in self._changes.values():
            change.value = self._apart(change)
        changes = [(c, self._settled(c)) for c in self._changes.values()]
        self.specs = [OutputSpec(c.kind, argument_of(node), c.target) for c, node in changes]
        self.specs += [OutputSpec(OutputKind.USER_OUTPUT, self._argument(path, x), None) for path, x in results]
        program.output.args = ((*(node for _, node in changes), *(x for _, x in results)),)
        meta.set_value(program.output, None)

    # ---------------------------------------------------------------- changes

    def _find_changes(self) -> dict[Any, _Change]:
        """By GraphInput or StateRef, the changes, in the order of the placeholders."""
        found: dict[Any, _Change] = {}
        for update in self._tape.write_back.updates if self._tape.write_back is not None else ():
            if not isinstance(update, CopyInto):
                raise ExportError(
                    f"`{update}` changes the shape or memory of a tensor from outside",
                    module=self._tape.root.path,
                    hint="an ExportedProgram can only give it new values: let the model return a new tensor",
                )
            found[update.target] = self._change(update.target, self._values[update.value.index])
        for write in self._tape.attribute_writes:
            name = f"{write.fqn}.{write.name}" if write.fqn else write.name
            change = self._binding(name, self._lower(write.value)) if name in self._state else None
            if change is not None:
                found[StateRef(name)] = change
        order = {node: i for i, node in enumerate(self._graph.nodes)}
        return dict(sorted(found.items(), key=lambda item: order[item[1].placeholder]))

    def _change(self, target: GraphInput | StateRef, value: torch.fx.Node) -> _Change:
        if isinstance(target, GraphInput):
            node = self._inputs[target.index]
            return _Change(OutputKind.USER_INPUT_MUTATION, node.name, node, value)
        state, node = self._state[target.name]
        if state.kind not in _KINDS:
            raise ExportError(
                f"the forward changes {state.fqn}, which is neither parameter nor buffer",
                module=self._tape.root.path,
                hint="register it with register_buffer",
            )
        return _Change(_KINDS[state.kind], state.fqn, node, value)

    def _binding(self, name: str, value: torch.fx.Node) -> _Change | None:
        """`self.n = self.n + 1` as a change of the buffer's data, since an ExportedProgram cannot rebind a buffer.

        None for a buffer of another shape or dtype that the graph does not read, such as a cache that forward fills.
        """
        if self._state[name][0].kind is not InputKind.BUFFER:
            raise ExportError(
                f"the forward reads self.{name} and binds it to a new tensor, and it is no buffer",
                module=self._tape.root.path,
                hint="register it with register_buffer",
            )
        old, new = self._state[name][1].meta["val"], value.meta["val"]
        if old.shape != new.shape or old.dtype != new.dtype:
            if not self._state[name][1].users:
                return None
            raise ExportError(
                f"the forward binds the buffer {name}, {list(old.shape)} of {old.dtype}, to a tensor of "
                f"{list(new.shape)} of {new.dtype}",
                module=self._tape.root.path,
                hint="a buffer of an ExportedProgram keeps its shape and dtype: register it as it becomes",
            )
        return self._change(StateRef(name), value)

    def _apart(self, change: _Change) -> torch.fx.Node:
        """The new value, cloned where it is the value of another change or shares memory with a placeholder."""
        first = next(c for c in self._changes.values() if c.value is change.value)
        if first is change and not self._is_from_outside(change.value):
            return change.value
        return self._node(_aten.clone.default, (change.value,))

    def _settled(self, change: _Change) -> torch.fx.Node:
        """The node of the new value, cloned where ops after it read the old one.

        `torch.export.unflatten` writes the buffer where the value is computed, before those ops.
        """
        memory, after = self._storage(change.placeholder), False
        for node in self._graph.nodes:
            if after and node.op != "output" and any(self._storage(n) == memory for n in node.all_input_nodes):
                return self._node(_aten.clone.default, (change.value,))
            after = after or node is change.value
        return change.value

    def _is_from_outside(self, value: torch.fx.Node) -> bool:
        memory = self._storage(value)
        return any(self._storage(n) == memory for n in self._graph.find_nodes(op="placeholder"))

    def _storage(self, node: torch.fx.Node) -> Any:
        """A key that is equal for nodes whose tensors share a storage."""
        return self._memory.get(node, node)

    # ---------------------------------------------------------------- results

    def _flat_results(self) -> tuple[list[tuple[str, Any]], Any]:
        program = self._tape.write_back
        if program is None:
            results = [self._fresh(v) for v in self._values]
        else:
            for source in program.results:
                self._results.append(self._result(source))
            results = self._results
        found = iter(results)
        out = map_structure(lambda _: next(found), self._tape.outputs, (Value, *Symbolic))
        flat, spec = pytree.tree_flatten_with_path(out)
        return [(pytree.keystr(path), leaf) for path, leaf in flat], spec

    def _fresh(self, value: Any, *, copied: bool = False) -> Any:
        """A graph output as a result; cloned where it is the new value of a parameter or buffer as well."""
        shared = any(c.value is value for c in self._changes.values())
        return self._node(_aten.clone.default, (value,)) if shared or copied else value

    def _result(self, source: Source) -> Any:
        if isinstance(source, SameAs):
            return self._results[source.index]
        if isinstance(source, FromGraph):
            return self._fresh(self._values[source.index], copied=bool(source.copy))
        if isinstance(source, ViewOf):
            return self._view(source)
        change = self._changes.get(source)
        if change is not None:
            return change.value
        return self._inputs[source.index] if isinstance(source, GraphInput) else self._state[source.name][1]

    def _view(self, source: ViewOf) -> torch.fx.Node:
        node: torch.fx.Node = self._result(source.base)
        for step in source.steps:
            if isinstance(step, StridedStep):
                offset = node.meta["val"].storage_offset() + step.shift
                node = self._node(_aten.as_strided.default, (node, list(step.size), list(step.stride), offset))
            else:
                node = self._node(step.op, (node, *step.args), step.kwargs)
                if step.slot is not None:
                    node = self._part(node, step.slot)
        return node

    # ---------------------------------------------------------------- nodes

    def _node(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> torch.fx.Node:
        """A new op before the output node, in the scope of the root."""
        values = torch.fx.map_arg(args, lambda n: n.meta["val"])
        out = run_fake(values[0].fake_mode, op, values, kwargs or {})
        return self._placed(op, self._lower(args), self._lower(kwargs or {}), out)

    def _part(self, node: torch.fx.Node, slot: int) -> torch.fx.Node:
        return self._placed(operator.getitem, (node, slot), {}, node.meta["val"][slot])

    def _placed(self, op: Any, args: Any, kwargs: Any, out: Any) -> torch.fx.Node:
        with self._graph.inserting_before(self._program.output):
            node = self._graph.call_function(op, args, kwargs)
        meta.set_value(node, out)
        meta.set_place(node, self._tape.root.path, 0)
        meta.set_origin(node, {}, None)
        return node

    def _argument(self, path: str, x: Any) -> Any:
        found = argument_of(x)
        if found is None:
            raise ExportError(
                f"the result{path} is a {container_type(x).__name__}, which is no tensor, number, text or None",
                module=self._tape.root.path,
                hint="register its class with torch.utils._pytree.register_pytree_node, or do not return it",
            )
        if isinstance(found, ConstantArgument):
            found.name = ""
        return found
