"""`torch.export.ExportedProgram` from a tape, without tracing again.

Data flow:
    tape -> a graph of its own, with a mark in calls that have no op (frames)
    `get_attr` nodes -> placeholders in torch.export's order (state); Python values among the arguments get one too
    write-back program -> outputs: new values of buffers, parameters and inputs, then the results (outputs)
    module calls -> `module_call_graph` (module_calls)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.fx
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    SymIntArgument,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from scopetrace._compat import export as compat
from scopetrace._compat.symbols import Symbolic
from scopetrace.containers.structure import container_type, identifier, instantiate, map_structure
from scopetrace.errors import ExportError
from scopetrace.ir import meta
from scopetrace.ir.tape import FunctionalTape, Value, garbage_collection_paused
from scopetrace.lower.exported.arguments import PLAIN
from scopetrace.lower.exported.frames import frames_of, is_erased, place_nodes, with_marks
from scopetrace.lower.exported.module_calls import ModuleCalls
from scopetrace.lower.exported.outputs import Outputs
from scopetrace.lower.exported.state import State, states
from scopetrace.program.graph import FxLowering
from scopetrace.program.traced import TracedProgram
from scopetrace.record import argument_names


def to_exported_program(program: TracedProgram) -> ExportedProgram:
    """The ExportedProgram of a program without mutation.

    Raises ExportError for what an ExportedProgram cannot say.
    """
    with garbage_collection_paused():
        assert isinstance(program.tape, FunctionalTape)
        return _build(program.tape, program.forward)


def _build(tape: FunctionalTape, forward: Any) -> ExportedProgram:
    _refuse(tape)
    frames = frames_of(tape)
    marked = with_marks(tape, frames)
    program = FxLowering(marked)
    _fill_values(program.graph)
    names = argument_names(forward, len(tape.args[0]))
    lifted = Lifted(program, marked, states(tape, frames), names)
    outputs = Outputs(program, marked, lifted.lower, lifted.inputs, lifted.state)
    place = place_nodes(program.graph, frames)
    calls = ModuleCalls(place, [f for c, f in frames.items() if f.call is c], lifted.lower)
    signature = ExportGraphSignature(lifted.specs, outputs.specs)
    with torch.set_grad_enabled(tape.ops[0].grad if tape.ops else True):
        holder, graph, signature = compat.with_grad_regions(_bodies(program), program.graph, signature)
    held = [state for state, _ in lifted.state.values()]
    root = ModuleCallSignature([], [], lifted.spec, outputs.spec, _identifiers(names, tape.args[1]))
    return ExportedProgram(
        holder,
        graph,
        signature,
        state_dict={name: s.tensor for s in held if s.in_state_dict for name in (s.fqn, *s.aliases)},
        range_constraints=compat.symbol_ranges(tape.shape_env) | (tape.sizes.range_constraints() if tape.sizes else {}),
        module_call_graph=[ModuleCallEntry("", root), *calls.entries(_module_names(tape))],
        example_inputs=_example_inputs(tape),
        constants={name: s.tensor for s in held if not s.in_state_dict for name in (s.fqn, *s.aliases)},
    )


def _refuse(tape: FunctionalTape) -> None:
    leaf = next((op for op in tape.ops if op.kind == "call_module"), None)
    if leaf is not None:
        raise ExportError(
            "a leaf module is no op of an ExportedProgram",
            op=str(leaf.target),
            module=leaf.scope.path,
            hint="trace without leaf_modules=",
        )
    seen: dict[int, str] = {}
    for path, value in zip(tape.input_paths, tape.inputs, strict=True):
        other = seen.setdefault(id(value.fake), path)
        if other != path:
            raise ExportError(
                f"{other} and {path} were one tensor when traced, and the trace holds for such only",
                module=tape.root.path,
                hint="clone() one of them for the trace: the program then takes any two",
            )


class Lifted:
    """A graph whose state and arguments are placeholders, in torch.export's order.

    Attributes:
        specs: one InputSpec for each placeholder.
        spec: the tree of (args, kwargs).
        inputs: the placeholders of the tensors among the arguments.
        state: by name on the tape, what the program takes from the model, and its placeholder.
    """

    def __init__(self, program: FxLowering, tape: FunctionalTape, held: dict[str, State], names: list[str]) -> None:
        self._program, self._tape, self._graph = program, tape, program.graph
        self._moved: dict[torch.fx.Node, torch.fx.Node] = {}
        given = self._graph.find_nodes(op="placeholder")  # the tensors, then the numbers
        self.inputs, self._numbers = given[: len(tape.inputs)], given[len(tape.inputs) :]
        read = {n.target: n for n in self._graph.find_nodes(op="get_attr") if n.target in held}
        self.state = {name: (state, self._lift(state, read.get(name))) for name, state in held.items()}
        self.specs = [
            InputSpec(s.kind, TensorArgument(node.name), s.fqn, s.persistent) for s, node in self.state.values()
        ]
        arguments, self.spec = self._arguments(names)
        for node in reversed([*(node for _, node in self.state.values()), *arguments]):
            next(iter(self._graph.nodes)).prepend(node)
        for node in list(self._graph.nodes):
            if node.op == "call_function" and is_erased(node):
                self._move(node, node.all_input_nodes[0])

    def lower(self, x: Any) -> Any:
        """The structure with nodes of the lifted graph in place of tape values and symbolic numbers.

        Numbers that the graph does not compute stay as they are.
        """
        known = map_structure(lambda n: self._program.lower(n) if self._program.has(n) else n, x, (Value, *Symbolic))
        return map_structure(lambda n: self._moved.get(n, n), known, torch.fx.Node)

    def _lift(self, state: State, read: torch.fx.Node | None) -> torch.fx.Node:
        if read is None:
            mode = self._tape.fake_mode
            return self._placeholder(state.placeholder, compat.stored_fake(mode, state.tensor))
        node = self._placeholder(state.placeholder, meta.value(read))
        self._move(read, node)
        return node

    def _move(self, old: torch.fx.Node, new: torch.fx.Node) -> None:
        self._moved[old] = new
        old.replace_all_uses_with(new)
        self._graph.erase_node(old)

    def _placeholder(self, name: str, value: Any) -> torch.fx.Node:
        with self._graph.inserting_before(next(iter(self._graph.nodes))):
            node = self._graph.placeholder(name)
        node.target = node.name
        meta.set_value(node, value)
        return node

    def _arguments(self, names: list[str]) -> tuple[list[torch.fx.Node], Any]:
        flat, spec = pytree.tree_flatten_with_path(self._tape.args)
        tensors, numbers, found = iter(self.inputs), iter(self._numbers), list[torch.fx.Node]()
        for (_, argument, *inner), leaf in flat:
            path = names[argument.idx] if isinstance(argument, pytree.SequenceKey) else argument.key  # type: ignore[attr-defined]
            path += pytree.keystr(tuple(inner))
            if isinstance(leaf, Value):
                node = next(tensors)
                node.target = node.name  # torch.export knows arguments by their targets
                self.specs.append(InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None))
            elif isinstance(leaf, torch.SymInt):
                node = next(numbers)
                node.target = node.name
                self.specs.append(InputSpec(InputKind.USER_INPUT, SymIntArgument(node.name), None))
            elif type(leaf) in PLAIN:
                node = self._placeholder(identifier(path, set()), leaf)
                self.specs.append(InputSpec(InputKind.USER_INPUT, ConstantArgument(node.name, leaf), None))
            else:
                kind = container_type(leaf).__name__
                raise ExportError(
                    f"the argument {path} is a {kind}, which is no tensor, number, text or None",
                    module=self._tape.root.path,
                    hint="register its class with torch.utils._pytree.register_pytree_node, or bind it to the model",
                )
            found.append(node)
        return found, spec


def _bodies(program: FxLowering) -> dict[str, torch.fx.GraphModule]:
    """The GraphModules that the graph takes as attributes."""
    return {name: torch.fx.GraphModule(_bodies(body), body.graph) for name, body in program.bodies.items()}


def _fill_values(graph: torch.fx.Graph) -> None:
    """Steps in between, in the arithmetic of symbolic sizes, have no value yet."""
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            args = torch.fx.map_arg(node.args, meta.value)
            symbolic = node.target is not torch.ops.aten._assert_scalar.default
            meta.set_value(node, node.target(*args) if symbolic and callable(node.target) else None)


def _identifiers(positional: list[str], keywords: Iterable[str]) -> list[str]:
    taken: set[str] = set()
    return [identifier(name, taken) for name in positional] + list(keywords)


def _module_names(tape: FunctionalTape) -> list[str]:
    root = tape.calls[0].module
    if root is not None:
        return [name for name, _ in root.named_modules(remove_duplicate=False)]
    return list(dict.fromkeys(call.fqn for call in tape.calls if call.fqn))


def _example_inputs(tape: FunctionalTape) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Zeros like the inputs: AOTInductor and the guards of `ExportedProgram.module` ask for their form."""
    args, kwargs = instantiate(
        lambda x: compat.example_of(x.fake if isinstance(x, Value) else x), tape.args, (Value, *compat.INPUTS)
    )
    return args, kwargs
