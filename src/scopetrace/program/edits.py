"""An edited graph as a tape: the inverse of `program.graph`.

Data flow:
    nodes of the graph -> Matching: what each was, and its call -> one op each, copied where nothing about it changed
    a new op -> its results by inference; a function, method or module -> the ATen ops that it runs on fake tensors
    outputs of the graph -> results, write-back and attribute writes of the old tape, position by position
    calls -> the old ones with the values of the new tape, `Removed` where these are gone

The graph keeps its inputs, the number of its outputs, and what the write-back needs of them; else it is an EditError.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import torch
import torch.fx

from scopetrace._compat.graph_module import look_up, set_grad_enabled
from scopetrace._compat.ops import building, eager, is_higher_order, is_op, schema_of
from scopetrace._compat.symbols import Symbolic, to_expr
from scopetrace._compat.tensors import buffers_of, parameters_of
from scopetrace.containers.contents import Contents
from scopetrace.containers.structure import Removed, leaves, map_structure
from scopetrace.errors import EditError, ScopetraceError
from scopetrace.functionalization.emitter import Emitter, copied_calls, new_storages
from scopetrace.ir.scopes import source_of
from scopetrace.ir.tape import BodyTape, Call, FunctionalTape, Op, ProgramTape, Tape, Value, checks_enabled, values_in
from scopetrace.ir.verify import verify
from scopetrace.ops.higher_order import FORMS
from scopetrace.program.fake_run import FakeRun, append_op, described, makes_numbers, written_by
from scopetrace.program.graph import FxLowering, fakes_of, scope_path, set_place
from scopetrace.program.matching import CallRanges, Matching, Position
from scopetrace.program.outputs import outputs_of_edit
from scopetrace.record.model import ModuleSnapshot

Node = torch.fx.Node
_aten = torch.ops.aten


class HeldTensors(NamedTuple):
    """The tensors that a program and its graph module hold, by name on the tape.

    In an edited graph, a tensor is the model's where it is one of these, or a copy with equal values of the model's, as
    a deepcopy of the graph module has. Any other tensor belongs to the graph module.
    """

    current: dict[str, torch.Tensor]  # what the model has now
    bound: dict[str, torch.Tensor]  # what was last bound to the graph module


class Reading:
    """The tape of an edited graph: of a program, or of a body in it.

    Attributes:
        program: the old tape of the whole program.
        tape: the new tape.
        lowering: its graph, which is the one that was read, with the node of each value.
        bodies: by body tape of the old program, that of the new one.
        calls: by call of the old program, that of the new one.
    """

    def __init__(
        self,
        old: FxLowering,
        root: torch.nn.Module,
        graph: torch.fx.Graph,
        held: HeldTensors,
        around: Reading | None = None,
    ) -> None:
        """`old` is what the graph was made from, `root` holds the tensors and modules that the nodes name."""
        self.old, self.root, self.graph, self.held = old, root, graph, held
        self.program: Any = old.tape if around is None else around.program
        self.bodies: dict[Tape, BodyTape] = {} if around is None else around.bodies
        self.calls: dict[Call, Call] = copied_calls(old.tape) if around is None else around.calls
        self.tape = _empty(old.tape)
        self._storages: Iterator[int] = new_storages(old.tape) if around is None else around._storages
        self.emitter = Emitter(self.tape, self._storages)
        self._results: dict[Node, Any] = {}  # by node, what it gives: a value, a number, or a structure of these
        self._op_of: dict[Node, Op] = {}
        self._inner: dict[str, Reading] = {}
        self._fakes = FakeRun(self.tape.fake_mode, self._own_tensor)
        self._read_before: dict[str, Value] = {}  # parameters, buffers and constants
        self._attribute_ops = {op.target: op for op in old.tape.ops if op.kind == "get_attr"}
        self._grad = old.tape.outer_grad
        self._grads = _grads(old)
        asserts = {} if old.tape.shape_env is None else old.tape.shape_env.deferred_runtime_asserts
        self._facts = {fact.expr for facts in asserts.values() for fact in facts}  # which lowering asserts
        outputs = graph.find_nodes(op="output")
        if not outputs:
            raise EditError("the edited graph has no output", hint="keep the output node, as the last one")
        self._output = outputs[-1]
        with building():
            self._read_graph()
        bodies: dict[str, FxLowering] = {name: inner.lowering for name, inner in self._inner.items()}
        self.lowering: FxLowering = FxLowering.of_graph(self.tape, graph, self._results, self._op_of, bodies)
        if around is None and checks_enabled():
            verify(self.tape, "reading an edited graph")

    # ---------------------------------------------------------------- the whole

    def _read_graph(self) -> None:
        placeholders, old = self._placeholders(), self.old.tape
        by_position = {call.position: copy for call, copy in self.calls.items()}
        outer = old.ops[0].call if isinstance(old, BodyTape) and old.ops else None  # of what is in no call of the graph
        root = Position(by_position[min(by_position)] if outer is None else self.calls[outer], old.root)
        scopes = {scope.path: scope for scope in self.program.scopes()}
        self._matching = Matching(self.old.states, self.graph, by_position, scopes, root)
        for node in self.graph.nodes:
            if node is not self._output:
                self._results[node] = placeholders[node] if node in placeholders else self._result_of(node)
                self._fakes.register(values_in(self._results[node]))
        outputs = self._value_of(self._output.args[0])
        if isinstance(self.tape, BodyTape):
            self.tape.outputs = outputs if self.tape.is_condition else tuple(outputs)
            if not self.tape.is_condition and len(outputs) != len(old.outputs):
                self._refuse(self._output, f"the body returns {len(outputs)} values, and returned {len(old.outputs)}")
            self.bodies[old] = self.tape
        else:
            inputs = dict(zip(old.inputs, self.tape.inputs, strict=True))
            self.tape.args = map_structure(lambda v: inputs[v], self.program.args, Value)
            values = [*outputs] if isinstance(outputs, (list, tuple)) else [outputs]
            state = self.program.attributes | self.held.current  # the write-back may name what no node reads
            outputs_of_edit(self.program, self.tape, values, lambda name: self._tensor(name, state[name]))
        for call in old.calls:
            self._fill(call, self.calls[call])
            self.tape.calls.append(self.calls[call])
        moved = CallRanges(self.tape).settle()
        self._op_of = {node: moved.get(op, op) for node, op in self._op_of.items()}

    def _placeholders(self) -> dict[Node, Any]:
        """The placeholders, copied to the new tape. They must be those of the old graph."""
        nodes = self.graph.find_nodes(op="placeholder")
        ops = [op for op in self.old.tape.ops if op.kind == "placeholder"]
        if len(nodes) != len(ops):
            raise EditError(
                f"the edited graph has {len(nodes)} placeholders ({', '.join(n.name for n in nodes)}), "
                f"and the trace has {len(ops)} inputs",
                module=self.tape.root.path,
                hint="keep the placeholders, also those that nothing reads; trace the model again for other inputs",
            )
        results = [self._copied(op, None) for op in ops]
        self.tape.inputs += values_in(results)
        return dict(zip(nodes, results, strict=True))

    def describe(self) -> None:
        """Write value, scope and call of each node into its meta."""
        for node, result in self._results.items():
            if node not in self._matching.traced or scope_path(node) is not None:
                op: Any = self._op_of.get(node) or self._matching.place(node)
                set_place(node, op.scope.path, 0 if op.call is None else op.call.position, getattr(op, "phase", None))
            if result is None or leaves(result, (Value, *Symbolic)):
                node.meta["val"] = fakes_of(result)
        for inner in self._inner.values():
            inner.describe()

    def _refuse(self, node: Node, problem: str, error: Exception | None = None) -> NoReturn:
        raise EditError(
            f"node {node.name}: {problem}",
            op=str(node.target),
            module=self._matching.place(node).scope.path,
            source=source_of(node.stack_trace or ()),
            hint="trace a model that does this, or write the node with ops whose results follow from their inputs",
        ) from error

    # ---------------------------------------------------------------- nodes

    def _result_of(self, node: Node) -> Any:
        try:
            return self._attribute(node) if node.op == "get_attr" else self._read(node)
        except ScopetraceError:
            raise
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            self._refuse(node, f"it cannot be run on fake tensors: {type(error).__name__}: {first}", error)

    def _read(self, node: Node) -> Any:
        args, kwargs = self._value_of((node.args, node.kwargs))
        if node.target is set_grad_enabled:
            self._grad = bool(args[0])
            return None
        if node.target in (operator.getitem, getattr) and not isinstance(args[0], Value):
            by_name = isinstance(args[1], str) and not isinstance(args[0], dict)
            return getattr(args[0], args[1]) if by_name else args[0][args[1]]
        if is_op(node.target) and schema_of(node.target).name.startswith("aten::sym_"):
            return node.target(*fakes_of(args))
        if node.target is _aten._assert_scalar.default and to_expr(args[0]) in self._facts:
            return None  # lowering writes it again
        return self._op(node, args, kwargs)

    def _op(self, node: Node, args: Any, kwargs: Any) -> Any:
        state = self._matching.traced.get(node)
        old = None if state is None else self.old.op_of.get(state.node)
        origin, before, now = self._origin(node, old), dict[int, int](), dict[int, int]()
        described_now = described((args, kwargs), now)
        if old is not None and self._is_kept(node, old) and described((old.args, old.kwargs), before) == described_now:
            outputs = self._copied(old, origin, args, kwargs, dict(zip(before, now, strict=True)))
        elif old is not None and old.unbacked:
            self._refuse(node, "it makes a number that depends on data, and its inputs or target were changed")
        elif node.target in FORMS:
            self._refuse(node, "its operands or body were changed, and what it computes with them is not known")
        elif is_op(node.target) or is_higher_order(node.target):
            outputs = self._inferred(node, origin, node.target, args, kwargs)
        else:
            return self._run(node, origin, args, kwargs)
        self._op_of[node] = self.tape.ops[-1]
        return outputs

    def _is_kept(self, node: Node, old: Op) -> bool:
        """Whether a node calls what it called: of a leaf module, the same one or a copy."""
        if old.kind == node.op == "call_module" and old.target == node.target:
            module, current = self.program.modules.get(old.name), self.root.get_submodule(old.name)
            if current is not module and type(current) is not type(module):
                return False
            self.tape.modules[old.name] = current
        return old.kind == node.op and old.target == node.target

    def _origin(self, node: Node, old: Op | None) -> Op:
        """An op with the place, frames and grad mode of those that the node becomes."""
        place, state, grad = self._matching.place(node), self._matching.traced.get(node), self._grad
        if old is not None and state is not None and self._grads[state.node] == grad:
            grad = old.grad
        frames, phase = (node.stack_trace or (), None) if old is None else (old.frames, old.phase)
        return Op("call_function", node.target, (), {}, None, place.scope, place.call, frames, grad, phase=phase)

    def _copied(
        self, old: Op, origin: Op | None, args: Any = (), kwargs: Any = None, storages: dict[int, int] | None = None
    ) -> Any:
        """Append an op of the old tape on operands of the same metadata, at the place of `origin`, else in its call."""
        if origin is None:
            copied = old.replace(call=None if old.call is None else self.calls.get(old.call))
        else:
            copied = old.replace(scope=origin.scope, call=origin.call, grad=origin.grad)
        outputs = self.emitter.copy(copied, args, kwargs or {}, storages)
        operands = dict(zip(old.inputs(), values_in((args, kwargs)), strict=True))
        fakes = {id(a.fake): b.fake for a, b in operands.items()}
        for value in self.tape.ops[-1].values():  # one may be the same tensor object as an operand
            value.fake = fakes.get(id(value.fake), value.fake)
        if old.writes or old.tracked:
            writes, tracked = (tuple([operands[v] for v in values]) for values in (old.writes, old.tracked))
            self.tape.ops[-1] = self.tape.ops[-1].replace(writes=writes, tracked=tracked).take_values()
        return outputs

    def _inferred(self, node: Node, origin: Op, func: Any, args: Any, kwargs: Any) -> Any:
        if is_op(func) and written_by(func, args, kwargs):
            if isinstance(self.program, FunctionalTape):
                self._refuse(
                    node, f"{func} writes to a tensor, and the graph is free of mutation: use its functional variant"
                )
            if torch.Tag.inplace_view in func.tags:
                self._refuse(node, f"{func} changes the shape of a tensor in place")
        outputs = append_op(self.emitter, origin, func, args, kwargs)
        if makes_numbers(self.tape.shape_env):
            self._refuse(node, "it makes a number that depends on data")
        self._fakes.register(self.tape.ops[-1].values())
        return outputs

    def _run(self, node: Node, origin: Op, args: Any, kwargs: Any) -> Any:
        """Run a function, method or module on fake tensors, and append the ATen ops that it calls."""

        def append(func: Any, args: Any, kwargs: Any) -> Any:
            return self._inferred(node, origin.replace(grad=torch.is_grad_enabled()), func, args, kwargs)

        fn: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
        if node.op == "call_module":
            fn = self.root.get_submodule(str(node.target))
        contents = Contents()
        saved = [ModuleSnapshot("", m, contents) for m in fn.modules()] if isinstance(fn, torch.nn.Module) else []
        try:
            return self._fakes.run(fn, args, kwargs, origin.grad, append, lambda what: self._refuse(node, f"it {what}"))
        finally:
            changes = [*contents.restore(), *(change for module in saved for change in module.restore())]
            if changes:
                name = changes[0].attribute or changes[0].name
                self._refuse(node, f"the module writes its attribute {name}, which a graph does not do")

    # ---------------------------------------------------------------- attributes and bodies

    def _attribute(self, node: Node) -> Any:
        name = str(node.target)
        try:
            attribute = look_up(self.root, name)
        except AttributeError as error:
            self._refuse(node, f"the graph module has no attribute {name}", error)
        if isinstance(attribute, torch.fx.GraphModule):
            return self._body(name, attribute)
        return self._tensor(name, attribute) if isinstance(attribute, torch.Tensor) else attribute

    def _own_tensor(self, t: torch.Tensor) -> Value:
        """A tensor that a module or function of the graph reads: under its name in the graph module, or a constant."""
        tables = (*self.root.named_parameters(remove_duplicate=False), *self.root.named_buffers(remove_duplicate=False))
        name = next((name for name, other in tables if other is t), None)
        return self._tensor(self.tape.add_constant(t) if name is None else name, t)

    def _tensor(self, name: str, t: torch.Tensor) -> Value:
        """Append the read of a parameter, buffer or constant, the first time."""
        program, current = self.program, self.held.current
        if t is not program.attributes.get(name) and t is not current.get(name):
            name = next((other for other, known in (program.attributes | current).items() if known is t), name)
        if name in self._read_before:
            return self._read_before[name]
        old = program.attributes.get(name)
        present = current.get(name, old)
        known = (old, present, self.held.bound.get(name))
        is_models = old is not None and (any(t is other for other in known) or _is_copy(t, present))
        self.tape.attributes[name] = tensor = present if is_models else t
        owner = program.owners.get(name) if is_models else self._owner(name, t)
        if owner is not None:
            self.tape.owners[name] = owner
        read = self._attribute_ops.get(name)
        if read is not None and (is_models or _metadata_of(old) == _metadata_of(t)):
            value: Value = self._copied(read, None)
            value.real = tensor
        else:
            value = self.emitter.attribute(self._origin(self._output, None), name, tensor)
        self._read_before[name] = value
        self._fakes.register([value], t)
        return value

    def _owner(self, name: str, t: torch.Tensor) -> tuple[torch.nn.Module, str] | None:
        """Where the graph module has a tensor of its own; None for a constant."""
        path, _, leaf = name.rpartition(".")
        holder = self.root.get_submodule(path)
        is_constant = name in self.program.constants and not isinstance(t, torch.nn.Parameter)
        is_owned = not is_constant and (leaf in parameters_of(holder) or leaf in buffers_of(holder))
        return (holder, leaf) if is_owned else None

    def _body(self, name: str, body: torch.fx.GraphModule) -> Any:
        lowering = self.old.bodies.get(name) or self.old.bodies.get(name.rpartition(".")[2])  # `split_module` moves it
        if lowering is None:
            return body
        if name not in self._inner:
            self._inner[name] = Reading(lowering, body, body.graph, self.held, self)
        return self._inner[name].tape

    # ---------------------------------------------------------------- arguments, calls

    def _value_of(self, x: Any) -> Any:
        if isinstance(x, Node):
            return self._results[x]
        if isinstance(x, (list, tuple)):
            return (list if isinstance(x, list) else tuple)([self._value_of(item) for item in x])
        if isinstance(x, dict):
            return {key: self._value_of(item) for key, item in x.items()}
        if isinstance(x, slice):
            return slice(*map(self._value_of, (x.start, x.stop, x.step)))
        if isinstance(x, torch.Tensor):
            hint = "set it as a buffer of the GraphModule, and give the node graph.get_attr(name)"
            raise EditError("a node takes a tensor, which no code of a graph can hold", hint=hint)
        return x

    def _fill(self, old: Call, new: Call) -> None:
        arguments, results = (functools.partial(self._stand_in, call=call) for call in (new, None))
        new.args, new.kwargs = map_structure(arguments, (old.args, old.kwargs), Value)
        new.outputs, new.mutated = map_structure(results, (old.outputs, old.mutated), Value)
        if old.parent is None and isinstance(self.tape, ProgramTape):
            new.outputs = self.tape.result

    def _stand_in(self, value: Value, call: Call | None) -> Any:
        traced = self.old.node_of(value)
        if traced is None:
            return Removed(str(value.op.target))
        node = self._matching.stand_in(traced, call)
        result = self._results.get(node) if node is not None else None
        return result if isinstance(result, (Value, *Symbolic)) else Removed((node or traced).name)


def _empty(old: Tape) -> Any:
    changed: dict[str, Any] = {"ops": [], "calls": [], "inputs": [], "attributes": {}, "owners": {}}
    if isinstance(old, ProgramTape):
        changed |= {"modules": {}, "attribute_writes": [], "edited": True}
    return dataclasses.replace(old, **changed)


def _grads(old: FxLowering) -> dict[Node, bool]:
    """By node of the old graph, whether autograd is on there by the switches in the graph."""
    grad, modes = old.tape.outer_grad, {}
    for state in old.states:
        if state.target is set_grad_enabled:
            grad = bool(state.args[0])
        modes[state.node] = grad
    return modes


def _is_copy(t: torch.Tensor, present: torch.Tensor) -> bool:
    """Whether a tensor has the metadata and values of the model's."""
    if _metadata_of(t) != _metadata_of(present) or t.layout is not torch.strided or t.is_quantized:
        return False
    if t.device.type == "meta":
        return True
    with eager():
        return torch.equal(t, present)


def _metadata_of(t: torch.Tensor) -> tuple[object, ...]:
    """All that a tensor is, beside its values."""
    stride = t.stride() if t.layout is torch.strided else ()
    return type(t), t.size(), stride, t.dtype, t.device, t.layout, t.requires_grad
