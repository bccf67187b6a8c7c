"""The placeholders of an ExportedProgram: parameters, buffers and constants, then the arguments.

Data flow:
    module's parameters and buffers, tensors that the tape reads -> State records in torch.export's order (`states`)
    `get_attr` nodes -> placeholders of these; Python values among the arguments -> placeholders, too (`Lifted`)
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
from torch.export.graph_signature import ConstantArgument, CustomObjArgument, InputKind, InputSpec, TensorArgument
from torch.utils import _pytree as pytree

from scopetrace._compat.export import modules_as_containers, opaque_name
from scopetrace._compat.shape_env import source_of_input
from scopetrace._compat.symbols import Symbolic
from scopetrace._compat.tensors import FakeTensor, buffers_of, persistent_buffers_of
from scopetrace.containers.structure import container_type, identifier, instantiate, map_structure
from scopetrace.errors import ExportError
from scopetrace.ir.tape import Call, FunctionalTape, Value
from scopetrace.lower.exported.calls import PLAIN, ModuleCallFrame, argument_of, is_erased
from scopetrace.ops.history import OVERWRITE
from scopetrace.program.graph import FxLowering, node_value

_aten = torch.ops.aten
_PREFIX = {InputKind.PARAMETER: "p_", InputKind.BUFFER: "b_", InputKind.CONSTANT_TENSOR: "c_", InputKind.USER_INPUT: ""}


@dataclasses.dataclass
class State:
    """A parameter, buffer or constant of an ExportedProgram; or, a USER_INPUT, of a module among its arguments."""

    kind: InputKind
    fqn: str
    """Its key in `state_dict` or `constants`; of a module among the arguments the path."""
    tensor: torch.Tensor
    persistent: bool | None = None
    """For a buffer, whether it is in `state_dict`; else None."""
    aliases: tuple[str, ...] = ()
    """Further keys: names of tied tensors; for a constant one in each module that reads it, as `unflatten` expects."""

    @property
    def in_state_dict(self) -> bool:
        """Whether it is in `state_dict`; else it is in `constants`."""
        return self.kind is InputKind.PARAMETER or self.persistent is True

    @property
    def placeholder(self) -> str:
        """The name of its placeholder in torch.export's format, `p_fc_weight`."""
        return _PREFIX[self.kind] + re.sub(r"\W+", "_", self.fqn.rstrip("']")).lower()


def flat_arguments(tape: FunctionalTape, names: list[str]) -> tuple[list[tuple[str, Any]], Any]:
    """The leaves of `example_of` the arguments with their paths, and the pytree spec.

    Modules are containers of their tensors.

    Raises ExportError for a class that pytree knows without keys.
    """
    with modules_as_containers(tape.args):
        try:
            flat, tree = pytree.tree_flatten_with_path(example_of(tape.args))
        except ValueError as error:  # torch.export says it in the same words
            raise ExportError(
                f"an ExportedProgram knows the parts of its arguments by keys: {error}",
                module=tape.root.path,
                hint="register the class with flatten_with_keys_fn=, or give its parts as arguments",
            ) from None
    return [(_path(path, names), leaf) for path, leaf in flat], tree


def is_traced(x: Any, tape: FunctionalTape) -> bool:
    """Whether a leaf of what `example_of` gives is a tensor of the program, and none of a module."""
    return isinstance(x, FakeTensor) and x.fake_mode is tape.fake_mode


def example_of(template: Any) -> Any:
    """What a user has for a template, of fake tensors: a registered class may compute with them, and takes no nodes."""
    return instantiate(lambda v: v.fake if isinstance(v, Value) else v, template, (Value, *Symbolic))


def _path(keys: pytree.KeyPath, names: list[str]) -> str:
    _, argument, *inner = keys
    path = names[argument.idx] if isinstance(argument, pytree.SequenceKey) else argument.key  # type: ignore[attr-defined]
    return str(path) + pytree.keystr(tuple(inner))


def states(
    tape: FunctionalTape, frames: dict[Call, ModuleCallFrame], graph: torch.fx.Graph, arguments: list[tuple[str, Any]]
) -> dict[str, State]:
    """By name on the tape, the state of the program: parameters, then buffers, then constants, then module arguments.

    For a traced module all its parameters and buffers; for a function or a loaded trace, those that the tape reads.
    Constants that no node of `graph` reads and that nothing changes are left out.
    """
    needed = {n.target for n in graph.find_nodes(op="get_attr")}
    written = {n for n, v in tape.attribute_reads() if v.storage in tape.written_storages()}
    module = tape.calls[0].module if tape.calls else None
    readers = _readers(tape, frames)
    once = {id(tape.attributes[n]): n for n in written}
    state = {s.fqn: s for s in _of_module(module, once)} if module is not None else {}
    if tape.edited:  # an edit may have put other tensors in the place of the model's
        new = {id(s.tensor): tape.attributes.get(n, s.tensor) for n, s in reversed(state.items()) if n in readers}
        state = {n: dataclasses.replace(s, tensor=new.get(id(s.tensor), s.tensor)) for n, s in state.items()}
    on_tape = {id(t): n for n, t in tape.attributes.items()}
    for path, tensor in arguments:
        if isinstance(tensor, torch.Tensor) and not is_traced(tensor, tape):
            name = on_tape.get(id(tensor), path)
            if name in state:
                raise ExportError(
                    f"the argument {path} is a tensor of the model, or of another argument",
                    module=tape.root.path,
                    hint="give a module of its own, or none",
                )
            state[name] = State(InputKind.USER_INPUT, path, tensor)
    for name, tensor in tape.attributes.items():
        if name in readers and name not in state and (name in tape.owners or name in needed | written):
            state[name] = _beside(tape, name, tensor, readers[name])
    return dict(sorted(state.items(), key=lambda item: list(_PREFIX).index(item[1].kind)))


def _of_module(root: torch.nn.Module, written: dict[int, str]) -> Iterator[State]:
    """Parameters and buffers of a module, tied ones under each of their names, as torch.export has them.

    Those that are `written`, by id and name on the tape, once: torch decomposes no program with such tensors twice.
    """
    modules = root.named_modules(remove_duplicate=False)
    kept = {f"{fqn}.{name}" if fqn else name for fqn, module in modules for name in persistent_buffers_of(module)}
    tensors = *root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)
    for name, tensor in tensors:
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        kind, persistent = (InputKind.PARAMETER, None) if is_parameter else (InputKind.BUFFER, name in kept)
        first = written.get(id(tensor), name)
        if name == first:
            others = [n for n, t in tensors if t is tensor and n != name] if id(tensor) in written else ()
            yield State(kind, name, tensor, persistent, tuple(others))


def _readers(tape: FunctionalTape, frames: dict[Call, ModuleCallFrame]) -> dict[str, list[str]]:
    """By name on the tape, the fqns of the modules whose ops read a tensor."""
    readers: dict[str, dict[str, None]] = {name: {} for name, _ in tape.attribute_reads()}
    for op in tape.ops:
        for value in op.inputs():
            if value.op.kind == "get_attr":
                readers[value.op.name][frames[op.call].fqn if op.call is not None else ""] = None
    return {name: list(fqns) for name, fqns in readers.items()}


def _beside(tape: FunctionalTape, name: str, tensor: torch.Tensor, readers: list[str]) -> State:
    """The record of a tensor that is not in the state of a traced module."""
    if name not in tape.owners and isinstance(tensor, torch.nn.Parameter):
        return State(InputKind.PARAMETER, f"lifted_{name.lstrip('_')}", tensor)
    if name not in tape.owners:
        leaf = f"lifted_tensor_{list(tape.constants).index(name)}"
        fqn, *others = [f"{reader}.{leaf}" if reader else leaf for reader in readers or [""]]
        return State(InputKind.CONSTANT_TENSOR, fqn, tensor, aliases=tuple(others))
    if isinstance(tensor, torch.nn.Parameter):
        return State(InputKind.PARAMETER, name, tensor)
    module, attribute = tape.owners[name]
    if module is None:  # a loaded trace
        return State(InputKind.BUFFER, name, tensor, persistent=True)
    if attribute in buffers_of(module):
        return State(InputKind.BUFFER, name, tensor, attribute in persistent_buffers_of(module))
    root = tape.calls[0].module
    modules = root.named_modules(remove_duplicate=False) if root is not None else ()
    held = ((f"{fqn}.{a}" if fqn else a, value) for fqn, inner in modules for a, value in vars(inner).items())
    aliases = tuple([path for path, value in held if value is tensor and path != name])
    return State(InputKind.CONSTANT_TENSOR, name, tensor, aliases=aliases)


class Lifted:
    """Replaces the `get_attr` nodes of a graph by placeholders, in torch.export's order.

    Attributes:
        specs: the InputSpec of each placeholder, in order.
        inputs: the placeholders of the tensors among the arguments.
        state: by name on the tape, the State and its placeholder.
        guards: conditions on arguments, beside those that the specs say.
    """

    def __init__(
        self, program: FxLowering, tape: FunctionalTape, held: dict[str, State], arguments: list[tuple[str, Any]]
    ) -> None:
        self._program, self._tape, self._graph = program, tape, program.graph
        self._moved: dict[torch.fx.Node, torch.fx.Node] = {}
        nodes = self._graph.find_nodes(op="placeholder")  # the tensors, then the numbers
        self.inputs, self._numbers = nodes[: len(tape.inputs)], nodes[len(tape.inputs) :]
        read = {n.target: n for n in self._graph.find_nodes(op="get_attr") if n.target in held}
        self.state = {name: (state, self._lift(state, read.get(name))) for name, state in held.items()}
        of_model = [(s, node) for s, node in self.state.values() if s.kind is not InputKind.USER_INPUT]
        self.specs = [InputSpec(s.kind, TensorArgument(node.name), s.fqn, s.persistent) for s, node in of_model]
        self.guards: list[str] = []
        of_arguments = list(self._arguments(arguments))
        for node in reversed([*(node for _, node in of_model), *of_arguments]):
            next(iter(self._graph.nodes)).prepend(node)
        for node in list(self._graph.nodes):
            of_literal = node.target is _aten.detach.default and node.args[0].target is _aten.lift_fresh_copy.default
            if of_literal or (node.op == "call_function" and is_erased(node)):  # `torch.tensor(...)` detaches its copy
                self._move(node, node.all_input_nodes[0])
        written = [n for n, v in tape.attribute_reads() if v.storage in tape.written_storages()]
        if any(self.state[n][0].kind is InputKind.PARAMETER for n in written if n in self.state):
            self._drop_hidden_writes()

    def _drop_hidden_writes(self) -> None:
        """Replace `scopetrace::overwrite`, which says where gradients go, in a program that runs without gradients."""
        sources = {v.storage for v in (*self._tape.inputs, *(v for _, v in self._tape.attribute_reads()))}
        for node in self._graph.find_nodes(op="call_function", target=OVERWRITE):
            new = node.args[1]
            if self._program.op_of[node].tensor(1).storage in sources:  # the results of the op are new memory
                with self._graph.inserting_before(node):
                    new = self._graph.call_function(_aten.clone.default, (new,))
                new.meta = node.meta
            self._move(node, new)

    def lower(self, x: Any) -> Any:
        """A structure with nodes of the lifted graph in place of tape values and symbolic numbers.

        Symbolic numbers without a node in the graph stay as they are.
        """
        nodes = map_structure(lambda n: self._program.lower(n) if self._program.has(n) else n, x, (Value, *Symbolic))
        return map_structure(lambda n: self._moved.get(n, n), nodes, torch.fx.Node)

    def _lift(self, state: State, read: torch.fx.Node | None) -> torch.fx.Node:
        mode: Any = self._tape.fake_mode
        value = mode.from_tensor(state.tensor, static_shapes=True) if read is None else node_value(read)
        node = self._placeholder(state.placeholder, value)
        if read is not None:
            self._move(read, node)
        return node

    def _move(self, old: torch.fx.Node, new: torch.fx.Node) -> None:
        self._moved[old] = new
        old.replace_all_uses_with(new)
        self._graph.erase_node(old)

    def _placeholder(self, name: str, value: Any) -> torch.fx.Node:
        with self._graph.inserting_before(next(iter(self._graph.nodes))):
            node = self._graph.placeholder(name)
        taken = next((n for n in self._graph.nodes if n.name == name), node)
        if taken.op == "call_function":  # as in torch.export, an input has its name, and an op another
            node.name, taken.name = taken.name, node.name
        node.target = node.name
        node.meta["val"] = value
        return node

    def _arguments(self, arguments: list[tuple[str, Any]]) -> Iterator[torch.fx.Node]:
        tensors, numbers = iter(self.inputs), iter(self._numbers)
        of_modules = (node for state, node in self.state.values() if state.kind is InputKind.USER_INPUT)
        spec: Any
        for path, leaf in arguments:
            plain = leaf.value if isinstance(leaf, enum.Enum) and isinstance(leaf, (int, str)) else leaf
            if isinstance(leaf, (torch.SymInt, torch.Tensor)):
                is_input, is_number = is_traced(leaf, self._tape), isinstance(leaf, torch.SymInt)
                node = next(tensors if is_input else numbers if is_number else of_modules)
                node.target = node.name  # torch.export knows arguments by their targets
                spec = argument_of(node)
            elif type(plain) in PLAIN:
                node = self._placeholder(identifier(path, set()), plain)
                spec = ConstantArgument(node.name, plain)
            elif (kind := opaque_name(leaf)) is not None:
                node = self._placeholder(identifier(path, set()), leaf)
                spec = CustomObjArgument(node.name, kind, leaf)
                if isinstance(leaf, enum.Enum):
                    self.guards.append(f"{source_of_input(path)}.name == {leaf.name!r}")
            else:
                name = container_type(leaf).__name__
                raise ExportError(
                    f"the argument {path} is a {name}, which is no tensor, number, text or None",
                    module=self._tape.root.path,
                    hint="register its class with torch.utils._pytree.register_pytree_node, or bind it to the model",
                )
            self.specs.append(InputSpec(InputKind.USER_INPUT, spec, None))
            yield node
