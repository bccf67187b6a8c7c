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
import itertools
import operator
from typing import Any, NamedTuple, NoReturn

import torch
import torch.fx

from scopetrace._compat.graph_module import holder_of, look_up, set_grad_enabled
from scopetrace._compat.ops import building, eager, is_higher_order, is_op, schema_of
from scopetrace._compat.symbols import Symbolic, to_expr
from scopetrace._compat.tensors import buffers_of, parameters_of
from scopetrace.containers.contents import Contents
from scopetrace.containers.structure import Removed, leaves, map_structure
from scopetrace.errors import EditError, ScopetraceError
from scopetrace.functionalization.emitter import Emitter, TapeRewriter
from scopetrace.ir.scopes import source_of
from scopetrace.ir.tape import BodyTape, FunctionalTape, Op, ProgramTape, Value, checks_enabled, renamed, values_in
from scopetrace.ir.verify import verify
from scopetrace.ops.higher_order import FORMS
from scopetrace.program.fake_run import FakeRun, append_op, described, makes_numbers, written_by
from scopetrace.program.graph import FxLowering, fakes_of, plain, scope_path, set_place
from scopetrace.program.matching import Matching
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


class Reading(TapeRewriter):
    """The tape of an edited graph: of a program, or of a body in it.

    Attributes:
        program: the old tape of the whole program.
        lowering: the graph that was read, with the node of each value of the new tape.
    """

    def __init__(
        self,
        traced: FxLowering,
        root: torch.nn.Module,
        graph: torch.fx.Graph,
        held: HeldTensors,
        around: Reading | None = None,
    ) -> None:
        """`traced` is what the graph was made from, `root` holds the tensors and modules that the nodes name."""
        super().__init__(traced.tape, around)
        self.program: Any = traced.tape if around is None else around.program
        empty: dict[str, Any] = {"inputs": [], "attributes": {}, "owners": {}}
        if isinstance(self.old, ProgramTape):
            empty |= {"modules": {}, "attribute_writes": [], "edited": True}
        self.new = dataclasses.replace(self.new, **empty)
        self.lowering = FxLowering(self.new, graph=graph)
        self._traced, self._root, self._graph, self._held = traced, root, graph, held
        self._emitter = Emitter(self.new, self.storages)
        self._results: dict[Node, Any] = {}  # by node, what it gives: a value, a number, or a structure of these
        self._inner: dict[str, Reading] = {}
        self._passed = 0  # boundaries of calls
        self._fakes = FakeRun(self.new.fake_mode, self._own_tensor)
        self._attributes: dict[str, Value] = {}  # parameters, buffers and constants that were read
        self._attribute_ops = {op.target: op for op in self.old.ops if op.kind == "get_attr"}
        self._grad: bool = self.old.outer_grad
        switches = (bool(s.args[0]) if s.target is set_grad_enabled else None for s in traced.states)
        grads = itertools.accumulate(switches, lambda grad, new: grad if new is None else new, initial=self._grad)
        self._grads = dict(zip((s.node for s in traced.states), itertools.islice(grads, 1, None), strict=True))
        """By node of the old graph, whether autograd is on there by the switches in the graph."""
        asserts = {} if self.old.shape_env is None else self.old.shape_env.deferred_runtime_asserts
        self._facts = {fact.expr for facts in asserts.values() for fact in facts}  # which lowering asserts
        outputs = graph.find_nodes(op="output")
        if not outputs:
            raise EditError("the edited graph has no output", hint="keep the output node, as the last one")
        self._output = outputs[-1]
        with building():
            self._read_graph()
        self.lowering.bind(self._results)
        if around is None and checks_enabled():
            verify(self.new, "reading an edited graph")

    def _read_graph(self) -> None:
        self._read_placeholders()
        self._matching = Matching(self._traced, self._graph, self.calls, {s.path: s for s in self.program.scopes()})
        for node in self._graph.nodes:
            if node is not self._output:
                if node.op != "placeholder":
                    self._results[node] = self._result_of(node)
                self._fakes.register(values_in(self._results[node]))
        self._pass(len(self._matching.boundaries))
        outputs = plain(self._output.args[0], self._value_of)
        if isinstance(self.new, BodyTape):
            self.new.outputs = outputs if self.new.is_condition else tuple(outputs)
            count = len(self.old.outputs)
            if not self.new.is_condition and len(outputs) != count:
                self._refuse(self._output, f"the body returns {len(outputs)} values, and returned {count}")
            self.replacements[self.old] = self.new
        else:
            self.new.args = renamed(self.program.args, self.replacements)
            values = [*outputs] if isinstance(outputs, (list, tuple)) else [outputs]
            state = self.program.attributes | self._held.current  # the write-back may name what no node reads
            outputs_of_edit(self.program, self.new, values, lambda name: self._tensor(name, state[name]))
        steps = ((i, op) for i, op in enumerate(self.new.ops) if op.kind in ("call_function", "call_module"))
        positions = {v: i for i, op in steps for v in op.values()}
        for call in self.old.calls:
            self._fill(call, positions)

    def _read_placeholders(self) -> None:
        """Copy the placeholders to the new tape. They must be those of the old graph."""
        nodes = self._graph.find_nodes(op="placeholder")
        ops = [op for op in self.old.ops if op.kind == "placeholder"]
        if len(nodes) != len(ops):
            raise EditError(
                f"the edited graph has {len(nodes)} placeholders ({', '.join(n.name for n in nodes)}), "
                f"and the trace has {len(ops)} inputs",
                module=self.new.root.path,
                hint="keep the placeholders, also those that nothing reads; trace the model again for other inputs",
            )
        for node, op in zip(nodes, ops, strict=True):
            self._results[node] = self._append(op.copied(self.replacements, calls=self.calls))
        self.new.inputs += [v for op in self.new.ops for v in op.values()]

    def _append(self, op: Op) -> Any:
        self.new.ops.append(op)
        return op.outputs

    def describe(self) -> None:
        """Write value, scope and call of each node into its meta."""
        for node, result in self._results.items():
            op: Any = self.lowering.op_of.get(node) or (scope_path(node) is None and self._matching.place(node))
            if op:
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
        args, kwargs = plain((node.args, node.kwargs), self._value_of)
        if node.target is set_grad_enabled:
            self._grad = bool(args[0])
            return None
        if node.target in (operator.getitem, getattr) and not isinstance(args[0], Value):
            return node.target(*args)
        if is_op(node.target) and schema_of(node.target).name.startswith("aten::sym_"):
            return node.target(*fakes_of(args))
        if node.target is _aten._assert_scalar.default and to_expr(args[0]) in self._facts:
            return None  # lowering writes it again
        return self._op(node, args, kwargs)

    def _op(self, node: Node, args: Any, kwargs: Any) -> Any:
        old, before, now = self._matching.old_op(node), dict[int, int](), dict[int, int]()
        described_now = described((args, kwargs), now)
        if old is not None and self._is_kept(node, old) and described((old.args, old.kwargs), before) == described_now:
            outputs = self._copied(node, old, args, kwargs, dict(zip(before, now, strict=True)))
        elif old is not None and old.unbacked:
            self._refuse(node, "it makes a number that depends on data, and its inputs or target were changed")
        elif node.target in FORMS:
            self._refuse(node, "its operands or body were changed, and what it computes with them is not known")
        elif is_op(node.target) or is_higher_order(node.target):
            outputs = self._inferred(node, self._origin(node), node.target, args, kwargs)
        else:
            return self._run(node, args, kwargs)
        self.lowering.op_of[node] = self.new.ops[-1]
        return outputs

    def _is_kept(self, node: Node, old: Op) -> bool:
        """Whether a node calls what it called: of a leaf module, the same one or a copy."""
        if old.kind == node.op == "call_module" and old.target == node.target:
            module, current = self.program.modules.get(old.name), self._root.get_submodule(old.name)
            if current is not module and type(current) is not type(module):
                return False
            self.new.modules[old.name] = current
        return old.kind == node.op and old.target == node.target

    def _origin(self, node: Node, grad: bool | None = None) -> Op:
        """An op with the place, frames and grad mode of those that the node becomes. Calls begin and end before it."""
        count, place = self._matching.enter(node, self._passed)
        self._pass(count)
        old, call = self._matching.old_op(node), None if place.call is None else self.calls[place.call]
        frames, phase = (node.stack_trace or (), None) if old is None else (old.frames, old.phase)
        grad = self._grad_at(node) if grad is None else grad
        return Op("call_function", node.target, (), {}, None, place.scope, call, frames, grad, phase=phase)

    def _pass(self, count: int) -> None:
        """So many boundaries of calls are before the next op."""
        for _, call, begins in self._matching.boundaries[self._passed : count]:
            self.begin(call) if begins else self.end(call)
        self._passed = count

    def _grad_at(self, node: Node) -> bool:
        old = self._matching.old_op(node)
        return self._grad if old is None or self._grads[self._matching.traced[node].node] != self._grad else old.grad

    def _copied(self, node: Node, old: Op, args: Any, kwargs: Any, storages: dict[int, int]) -> Any:
        """Append an op of the old tape on operands of the same metadata, in the storages that stand for theirs."""
        values = dict(zip(old.inputs(), values_in((args, kwargs)), strict=True))
        fakes = {id(a.fake): b.fake for a, b in values.items()}
        for v in old.values():
            if v.storage not in storages:
                storages[v.storage] = next(self.storages)
        origin = self._origin(node)
        new = old.replace(args=args, kwargs=kwargs, scope=origin.scope, grad=origin.grad).copied(values, storages)
        for value in new.values():  # one may be the same tensor object as an operand
            value.fake = fakes.get(id(value.fake), value.fake)
        return self._append(new.replace(call=origin.call).take_values())

    def _inferred(self, node: Node, origin: Op, func: Any, args: Any, kwargs: Any) -> Any:
        if is_op(func) and written_by(func, args, kwargs):
            if isinstance(self.program, FunctionalTape):
                self._refuse(
                    node, f"{func} writes to a tensor, and the graph is free of mutation: use its functional variant"
                )
            if torch.Tag.inplace_view in func.tags:
                self._refuse(node, f"{func} changes the shape of a tensor in place")
        outputs = append_op(self._emitter, origin, func, args, kwargs)
        if makes_numbers(self.new.shape_env):
            self._refuse(node, "it makes a number that depends on data")
        self._fakes.register(self.new.ops[-1].values())
        return outputs

    def _run(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Run a function, method or module on fake tensors, and append the ATen ops that it calls."""

        def append(func: Any, args: Any, kwargs: Any) -> Any:
            return self._inferred(node, self._origin(node, torch.is_grad_enabled()), func, args, kwargs)

        fn: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
        if node.op == "call_module":
            fn = self._root.get_submodule(str(node.target))
        contents, grad = Contents(), self._grad_at(node)
        saved = [ModuleSnapshot("", m, contents) for m in fn.modules()] if isinstance(fn, torch.nn.Module) else []
        try:
            return self._fakes.run(fn, args, kwargs, grad, append, lambda what: self._refuse(node, f"it {what}"))
        finally:
            changes = [*contents.restore(), *(change for module in saved for change in module.restore())]
            if changes:
                name = changes[0].attribute or changes[0].name
                self._refuse(node, f"the module writes its attribute {name}, which a graph does not do")

    # ---------------------------------------------------------------- attributes and bodies

    def _attribute(self, node: Node) -> Any:
        name = str(node.target)
        try:
            attribute = look_up(self._root, name)
        except AttributeError as error:
            self._refuse(node, f"the graph module has no attribute {name}", error)
        if isinstance(attribute, torch.fx.GraphModule):
            return self._body(name, attribute)
        return self._tensor(name, attribute) if isinstance(attribute, torch.Tensor) else attribute

    def _own_tensor(self, t: torch.Tensor) -> Value:
        """A tensor that a module or function of the graph reads: under its name in the graph module, or a constant."""
        tables = (
            *self._root.named_parameters(remove_duplicate=False),
            *self._root.named_buffers(remove_duplicate=False),
        )
        name = next((name for name, other in tables if other is t), None)
        return self._tensor(self.new.add_constant(t) if name is None else name, t)

    def _tensor(self, name: str, t: torch.Tensor) -> Value:
        """Append the read of a parameter, buffer or constant, the first time."""
        program, current = self.program, self._held.current
        if t is not program.attributes.get(name) and t is not current.get(name):
            name = next((other for other, known in (program.attributes | current).items() if known is t), name)
        if name in self._attributes:
            return self._attributes[name]
        old = program.attributes.get(name)
        present = current.get(name, old)
        known = (old, present, self._held.bound.get(name))
        is_models = old is not None and (any(t is other for other in known) or _is_copy(t, present))
        self.new.attributes[name] = tensor = present if is_models else t
        owner = program.owners.get(name) if is_models else self._owner(name, t)
        if owner is not None:
            self.new.owners[name] = owner
        read = self._attribute_ops.get(name)
        if read is not None and (is_models or _metadata_of(old) == _metadata_of(t)):
            value: Value = self._append(read.copied(self.replacements, calls=self.calls))
            value.real = tensor
        else:
            place = self._matching.place(self._output)
            call = None if place.call is None else self.calls[place.call]
            origin = Op("get_attr", name, (), {}, None, place.scope, call, (), self._grad)
            value = self._emitter.attribute(origin, name, tensor)
        self._attributes[name] = value
        self._fakes.register([value], t)
        return value

    def _owner(self, name: str, t: torch.Tensor) -> tuple[torch.nn.Module, str] | None:
        """Where the graph module has a tensor of its own; None for a constant."""
        holder, leaf = holder_of(self._root, name)
        is_constant = name in self.program.constants and not isinstance(t, torch.nn.Parameter)
        is_owned = not is_constant and (leaf in parameters_of(holder) or leaf in buffers_of(holder))
        return (holder, leaf) if is_owned else None

    def _body(self, name: str, body: torch.fx.GraphModule) -> Any:
        bodies = self._traced.bodies
        traced = bodies.get(name) or bodies.get(name.rpartition(".")[2])  # `split_module` moves it
        if traced is None:
            return body
        if name not in self._inner:
            self._inner[name] = Reading(traced, body, body.graph, self._held, self)
            self.lowering.bodies[name] = self._inner[name].lowering
        return self._inner[name].new

    # ---------------------------------------------------------------- arguments, calls

    def _value_of(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            hint = "set it as a buffer of the GraphModule, and give the node graph.get_attr(name)"
            raise EditError("a node takes a tensor, which no code of a graph can hold", hint=hint)
        return self._results[x] if isinstance(x, Node) else x

    def _fill(self, old: Any, positions: dict[Value, int]) -> None:
        """Give a call what stands for its arguments and results, as far as that is made before it begins, and ends."""
        new = self.calls[old]

        def stand_in(value: Value, stop: int, call: Any = None) -> Any:
            traced = self._traced.node_of(value)
            node = traced and (self._matching.stand_in(traced, call) or traced)
            result = None if node is None else self._results.get(node)
            if isinstance(result, Value) and positions.get(result, -1) >= stop:
                return Removed(str(result.op.target))
            return result if isinstance(result, (Value, *Symbolic)) else Removed(str(node or value.op.target))

        taken, gives = (old.args, old.kwargs), (old.outputs, old.mutated)
        new.args, new.kwargs = map_structure(lambda v: stand_in(v, new.start, old), taken, Value)
        new.outputs, new.mutated = map_structure(lambda v: stand_in(v, new.stop), gives, Value)
        if new.mutated is not None:
            *arguments, held = new.mutated
            new.mutated = *arguments, {name: v for name, v in held.items() if isinstance(v, Value)}
        if old.parent is None and isinstance(self.new, ProgramTape):
            new.outputs = self.new.result


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
