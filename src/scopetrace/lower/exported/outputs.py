"""The outputs of an ExportedProgram: new values of parameters, buffers and inputs, then the results.

Data flow:
    updates of the write-back program, tensors assigned to buffers -> what changes, and the node of its new value
    results of the write-back program -> nodes: outputs of the graph, changed values, views made with ops at the end
    both -> the output node and its OutputSpecs; a clone wherever two entries would share memory
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.fx
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec
from torch.utils import _pytree as pytree

from scopetrace._compat.symbols import Symbolic
from scopetrace.containers.structure import container_type, walk
from scopetrace.errors import ExportError, SideEffectWarning
from scopetrace.ir.tape import FunctionalTape
from scopetrace.ir.write_back import CopyInto, FromGraph, GraphInput, StateRef, ViewOf
from scopetrace.lower.exported.calls import CHECK_OF_DTYPE, argument_of
from scopetrace.lower.exported.inputs import Lifted, example_of, is_traced
from scopetrace.lower.result_nodes import ResultNodes, write_back_of
from scopetrace.program.graph import FxLowering

_KINDS = {
    InputKind.PARAMETER: OutputKind.PARAMETER_MUTATION,
    InputKind.BUFFER: OutputKind.BUFFER_MUTATION,
    InputKind.USER_INPUT: OutputKind.USER_INPUT_MUTATION,
}


class Outputs(ResultNodes):
    """Makes the output node of a lifted graph.

    Attributes:
        specs: the OutputSpec of each output, in order.
        spec: the pytree spec of the result.
        buffers: the placeholder and the new value of each buffer that changes.
    """

    def __init__(self, program: FxLowering, tape: FunctionalTape, lifted: Lifted) -> None:
        values = [lifted.lower(v) for v in tape.graph_outputs()]
        super().__init__(program, lifted.inputs, self._kept_state, values, lifted.lower)
        self._tape, self._graph, self._state, self._write_back = tape, program.graph, lifted.state, write_back_of(tape)
        self._memory = {lifted.lower(v): v.storage for op in tape.ops for v in op.values() if program.has(v)}
        self._bound: set[Any] = set()
        """The memory of buffers that are bound to other tensors: an ExportedProgram overwrites it."""
        self._changes = self._find_changes()
        results = iter(self.all_results(self._write_back))
        leaves, self.spec = pytree.tree_flatten(example_of(tape.outputs))
        parts = [next(results) if is_traced(x, tape) or isinstance(x, Symbolic) else x for x in leaves]
        values, written = self._new_values(), list(map(self._written, self._changes))
        changes = zip(written, values, strict=True)
        self.specs = [OutputSpec(kind, argument_of(node), target) for (kind, target, _), node in changes]
        self.specs += [OutputSpec(OutputKind.USER_OUTPUT, self._argument(x), None) for x in parts]
        program.output.args = ((*values, *parts),)
        program.output.meta.pop("val", None)  # as in torch.export
        old = zip(written, self._changes.values(), strict=True)
        self.buffers = [(node, new) for (kind, _, node), new in old if kind is OutputKind.BUFFER_MUTATION]

    def _find_changes(self) -> dict[GraphInput | StateRef, torch.fx.Node]:
        """The new values of what changes, in the order of the placeholders."""
        for update in self._write_back.updates:
            if not isinstance(update, CopyInto) or isinstance(update.target, ViewOf):
                raise ExportError(
                    f"`{update}` changes the shape or memory of a tensor from outside, or memory around it",
                    module=self._tape.root.path,
                    hint="an ExportedProgram can only give it new values: let the model return a new tensor",
                )
            self.updated[update.target] = self.values[update.value.index]
        changes = dict(self.updated)
        for write in self._tape.attribute_writes:
            value = self.lower(write.value)
            if write.path in self._state and self._is_assigned(write.path, value):
                changes[StateRef(write.path)] = value
                self._bound.add(self._storage(self._state[write.path][1]))
            else:
                text = f"The tensor attribute self.{write.path} was assigned during export"
                text += ", and the program does not assign it"
                warnings.warn(f"{text}: register it as a buffer, or return the tensor", SideEffectWarning, stacklevel=6)
        order = {node: i for i, node in enumerate(self._graph.nodes)}
        return dict(sorted(changes.items(), key=lambda item: order[self._written(item[0])[2]]))

    def _written(self, target: GraphInput | StateRef) -> tuple[OutputKind, str, torch.fx.Node]:
        """How the signature names what changes, and its placeholder."""
        if isinstance(target, GraphInput):
            node = self.inputs[target.index]
            return OutputKind.USER_INPUT_MUTATION, node.name, node
        state, node = self._state[target.name]
        if state.kind not in _KINDS:
            raise ExportError(
                f"Constant {target.name} is changed by the forward, and is neither parameter nor buffer",
                module=self._tape.root.path,
                hint="register it with register_buffer; where it is the state of an optimizer, return the gradients, "
                "torch.autograd.grad(loss, list(model.parameters())), and step outside of the program",
            )
        key = node.name if state.kind is InputKind.USER_INPUT else state.fqn
        return _KINDS[state.kind], key, node

    def _is_assigned(self, name: str, value: torch.fx.Node) -> bool:
        """Whether `self.n = self.n + 1` is a change of the buffer's data: an ExportedProgram cannot rebind a buffer.

        Not of a tensor that it cannot write, no buffer or one of another shape or dtype, where it need not: such as a
        cache that forward fills, or what a metric sums up beside its result.
        """
        (state, node), is_kept = self._state[name], self._is_kept(name, value)
        if is_kept or not self._is_needed(StateRef(name)):
            return is_kept
        if state.kind is not InputKind.BUFFER:
            raise ExportError(
                f"the forward reads self.{name} and binds it to a new tensor, and it is no buffer",
                module=self._tape.root.path,
                hint="register it with register_buffer",
            )
        old, new = node.meta["val"], value.meta["val"]
        raise ExportError(
            f"the forward binds the buffer {name}, {list(old.shape)} of {old.dtype}, to a tensor of "
            f"{list(new.shape)} of {new.dtype}",
            module=self._tape.root.path,
            hint="a buffer of an ExportedProgram keeps its shape and dtype: register it as it becomes",
        )

    def _is_kept(self, name: str, value: torch.fx.Node) -> bool:
        state, node = self._state[name]
        facts = [(n.meta["val"].shape, n.meta["val"].dtype) for n in (node, value)]
        return state.kind is InputKind.BUFFER and facts[0] == facts[1]

    def _is_needed(self, ref: StateRef) -> bool:
        """Whether a result, a new value that the program writes or one of its checks depends on a tensor."""
        start = self._state[ref.name][1]
        reached = {start}
        for node in self._graph.nodes:
            if node.op == "call_function" and not reached.isdisjoint(node.all_input_nodes):
                reached.add(node)
        writes = [w for w in self._tape.attribute_writes if w.path in self._state]
        kept = [node for w in writes if self._is_kept(w.path, node := self.lower(w.value))]
        is_result = ref in [getattr(source, "base", source) for source in self._write_back.results]
        is_asked = any(n.is_impure() and n.target is not CHECK_OF_DTYPE for n in reached - {start})
        return is_result or is_asked or not reached.isdisjoint([*self.values, *kept])

    def _new_values(self) -> list[torch.fx.Node]:
        """The nodes of the new values: none twice, none in the memory of a placeholder, none before a read of the old.

        `torch.export.unflatten` writes a buffer where its new value is computed.
        """
        outside = {self._storage(n) for n in self._graph.find_nodes(op="placeholder")}
        seen: set[torch.fx.Node] = set()
        for target, value in self._changes.items():
            if value in seen or self._storage(value) in outside:
                self._changes[target] = self.copied(value)
            seen.add(self._changes[target])
        position = {node: i for i, node in enumerate(self._graph.nodes)}
        reads = {
            self._storage(n): i for node, i in position.items() if node.op != "output" for n in node.all_input_nodes
        }
        return [
            self.copied(value) if reads.get(self._storage(self._written(target)[2]), -1) > position[value] else value
            for target, value in self._changes.items()
        ]

    def _storage(self, node: torch.fx.Node) -> Any:
        """A key that is equal for nodes whose tensors share a storage."""
        return self._memory.get(node, node)

    def value(self, source: FromGraph) -> Any:
        """A value that the graph returns, copied where it is the new value of a parameter, buffer or input as well."""
        value = super().value(source)
        is_copied = source.copy or value in self._changes.values() or self._storage(value) in self._bound
        return self.copied(value) if is_copied else value

    def _kept_state(self, name: str) -> torch.fx.Node:
        node = self._state[name][1]
        return self.copied(node) if self._storage(node) in self._bound else node

    def _argument(self, x: Any) -> Any:
        spec = argument_of(x)
        if spec is None:
            kind = container_type(x)
            keys = next((keys for keys, part, _ in walk(self._tape.outputs) if container_type(part) is kind), ())
            raise ExportError(
                f"the result{''.join(keys)} is a {kind.__name__}, which is no tensor, number, text or None",
                module=self._tape.root.path,
                hint="register its class with torch.utils._pytree.register_pytree_node, or do not return it",
            )
        return spec
