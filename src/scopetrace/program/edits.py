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
import math
import operator
from typing import Any, NoReturn

import torch
import torch.fx

from scopetrace._compat.graph_module import look_up, set_grad_enabled
from scopetrace._compat.higher_order import fake_results
from scopetrace._compat.ops import building, is_higher_order, is_op, schema_of
from scopetrace._compat.symbols import Symbolic, to_expr
from scopetrace.containers.structure import Removed, leaves, map_structure
from scopetrace.errors import EditError, ScopetraceError
from scopetrace.functionalization.emitter import Emitter, copied_calls, new_storages
from scopetrace.ir.scopes import source_of
from scopetrace.ir.tape import BodyTape, Call, FunctionalTape, Op, ProgramTape, Tape, Value, checks_enabled, values_in
from scopetrace.ir.verify import verify
from scopetrace.ops.higher_order import FORMS
from scopetrace.program.fake_run import FakeRun, append_op, are_alike, fakes_of, makes_numbers, written_by
from scopetrace.program.graph import FxLowering, scope_path, set_place
from scopetrace.program.matching import Matching, Place
from scopetrace.program.outputs import outputs_of_edit
from scopetrace.program.ranges import CallRanges
from scopetrace.program.state import HeldTensors

Node = torch.fx.Node
_aten = torch.ops.aten


class Reading:
    """The tape of an edited graph.

    Attributes:
        tape: the tape.
        lowering: its graph, which is the one that was read, with the node of each value.
        bodies: by body tape of the old tape, that of the new one.
    """

    def __init__(self, old: FxLowering, root: torch.nn.Module, graph: torch.fx.Graph, held: HeldTensors) -> None:
        """`old` is what the graph was made from, `root` holds the tensors and modules that the nodes name."""
        assert isinstance(old.tape, ProgramTape)
        self.bodies: dict[Tape, BodyTape] = {}
        self.is_pure = isinstance(old.tape, FunctionalTape)
        self.calls = copied_calls(old.tape)
        self.stops: dict[Call, int] = {}
        """By old call, the position after that of the last call in it."""
        for call in self.calls:
            self.stops |= dict.fromkeys(call.ancestors(), call.position + 1)
        self.by_position = {call.position: copy for call, copy in self.calls.items()}
        self.scopes = {scope.path: scope for scope in old.tape.scopes()}
        self.held = held
        self.old = old.tape
        """The tape of the program that the graph was made from."""
        self.storages = new_storages(old.tape)
        with building():
            self._reader = _GraphReader(self, old, root, graph)
            self.tape, self.lowering = self._reader.program(), self._reader.lowering()
        if checks_enabled():
            verify(self.tape, "reading an edited graph")

    def call_around(self, tape: Tape) -> Call:
        """The call that ops of a tape are in which are in no call of it: that of the callable, or around a body."""
        outer = tape.ops[0].call if isinstance(tape, BodyTape) and tape.ops else None
        return self.by_position[min(self.by_position)] if outer is None else self.calls[outer]

    def describe(self) -> None:
        """Write value, scope and call of each node into its meta."""
        self._reader.describe()


class _GraphReader:
    """Reads one graph: that of the program, or of a body."""

    def __init__(self, reading: Reading, old: FxLowering, root: torch.nn.Module, graph: torch.fx.Graph) -> None:
        self.reading, self.old, self.root, self.graph = reading, old, root, graph
        self.tape = _empty(old.tape)
        self.emitter = Emitter(self.tape, reading.storages)
        place = Place(reading.call_around(old.tape), old.tape.root)
        self.matching = Matching([*old.states], graph, reading.by_position, reading.scopes, place)
        self.results: dict[Node, Any] = {}
        """By node, what it gives: a value, a number, or a structure of these."""
        self.op_of: dict[Node, Op] = {}
        self.lowered: dict[str, FxLowering] = {}
        self.readers: dict[str, _GraphReader] = {}
        self._fakes = FakeRun(self.tape.fake_mode, self._own_tensor)
        self._read_before: dict[str, Value] = {}  # parameters, buffers and constants
        self._attribute_ops = {op.target: op for op in old.tape.ops if op.kind == "get_attr"}
        self._grad = old.tape.outer_grad
        self._grads = _grads(old)
        self._facts = _facts(old.tape)

    # ---------------------------------------------------------------- the whole

    def program(self) -> ProgramTape:
        """Read the graph of a program."""
        self._read_nodes()
        inputs = dict(zip(self.reading.old.inputs, self.tape.inputs, strict=True))
        self.tape.args = map_structure(lambda v: inputs[v], self.reading.old.args, Value)
        args = self._output_node().args[0]
        values = [self._value_of(x) for x in (args if isinstance(args, (list, tuple)) else [args])]
        outputs_of_edit(self.reading.old, self.tape, values, self._state)
        self._finish()
        return self.tape

    def _state(self, name: str) -> Value:
        """The value of a tensor that the write-back names, which the graph need not read."""
        tape = self.old.tape
        return self._tensor(name, self.reading.held.current.get(name, tape.attributes[name]))

    def body(self) -> BodyTape:
        """Read the graph of a body."""
        self._read_nodes()
        node, old = self._output_node(), self.old.tape
        outputs = self._value_of(node.args[0])
        self.tape.outputs = outputs if self.tape.is_condition else tuple(outputs)
        if not self.tape.is_condition and len(outputs) != len(old.outputs):
            self._refuse(node, f"the body returns {len(outputs)} values, and returned {len(old.outputs)}")
        self._finish()
        self.reading.bodies[old] = self.tape
        return self.tape

    def lowering(self) -> FxLowering:
        """The graph that was read, as the lowering of the new tape."""
        return FxLowering.of_graph(self.tape, self.graph, self.results, self.op_of, self.lowered)

    def _finish(self) -> None:
        for old in self.old.tape.calls:
            self._fill(old, self.reading.calls[old])
            self.tape.calls.append(self.reading.calls[old])
        moved = CallRanges(self.tape).settle()
        self.op_of = {node: moved.get(op, op) for node, op in self.op_of.items()}

    def describe(self) -> None:
        """Write value, scope and call of each node into its meta."""
        for node, result in self.results.items():
            op, place = self.op_of.get(node), self.matching.place(node)
            if node not in self.matching.traced or scope_path(node) is not None:
                scope, call = (place.scope, place.call) if op is None else (op.scope, op.call)
                set_place(node, scope.path, 0 if call is None else call.position)
            if result is None or leaves(result, (Value, *Symbolic)):
                node.meta["val"] = fakes_of(result)
        for reader in self.readers.values():
            reader.describe()

    def _read_nodes(self) -> None:
        placeholders = self._check_placeholders()
        for node in self.graph.nodes:
            if node.op == "output":
                continue
            try:
                self.results[node] = placeholders[node] if node.op == "placeholder" else self._read(node)
            except ScopetraceError:
                raise
            except Exception as error:
                first = (str(error).splitlines() or [""])[0]
                self._refuse(node, f"it cannot be run on fake tensors: {type(error).__name__}: {first}", error)
            self._fakes.register(values_in(self.results[node]))

    def _check_placeholders(self) -> dict[Node, Any]:
        """The placeholders, copied to the new tape. They must be those of the old graph."""
        nodes = [n for n in self.graph.nodes if n.op == "placeholder"]
        ops = [op for op in self.old.tape.ops if op.kind == "placeholder"]
        if len(nodes) != len(ops):
            raise EditError(
                f"the edited graph has {len(nodes)} placeholders ({', '.join(n.name for n in nodes)}), "
                f"and the trace has {len(ops)} inputs",
                module=self.tape.root.path,
                hint="keep the placeholders, also those that nothing reads; trace the model again for other inputs",
            )
        results = [self._copied(op, (), {}, op, {v.storage: v.storage for v in op.values()}) for op in ops]
        self.tape.inputs += values_in(results)
        return dict(zip(nodes, results, strict=True))

    def _output_node(self) -> Node:
        return next(n for n in reversed(self.graph.nodes) if n.op == "output")

    def _refuse(self, node: Node, problem: str, error: Exception | None = None) -> NoReturn:
        place = self.matching.place(node)
        raise EditError(
            f"node {node.name}: {problem}",
            op=str(node.target),
            module=place.scope.path,
            source=source_of(node.stack_trace or ()),
            hint="trace a model that does this, or write the node with ops whose results follow from their inputs",
        ) from error

    # ---------------------------------------------------------------- nodes

    def _read(self, node: Node) -> Any:
        if node.op == "get_attr":
            return self._attribute(node)
        args, kwargs = self._value_of((node.args, node.kwargs))
        if node.target is set_grad_enabled:
            self._grad = bool(args[0])
            return None
        if node.op == "call_function" and not is_op(node.target) and not kwargs:
            if node.target in (operator.getitem, getattr) and not isinstance(args[0], Value):
                by_name = isinstance(args[1], str) and not isinstance(args[0], dict)
                return getattr(args[0], args[1]) if by_name else args[0][args[1]]
            if _is_on_numbers(node.target, args):
                function: Any = node.target
                return function(*args)
        if is_op(node.target) and schema_of(node.target).name.startswith("aten::sym_"):
            return node.target(*fakes_of(args))
        if node.target is _aten._assert_scalar.default and to_expr(args[0]) in self._facts:
            return None  # lowering writes it again
        return self._op(node, args, kwargs)

    def _op(self, node: Node, args: Any, kwargs: Any) -> Any:
        state = self.matching.traced.get(node)
        old = None if state is None else self.old.op_of.get(state.node)
        origin = self._origin(node, old)
        if old is not None and old.kind == node.op and old.target == node.target and self._keeps_module(old):
            storages: dict[int, int] = {}
            if are_alike((old.args, old.kwargs), (args, kwargs), storages):
                return self._noted(node, self._copied(old, args, kwargs, origin, storages))
        if isinstance(old, Op) and old.unbacked:
            self._refuse(node, "it makes a number that depends on data, and its inputs or target were changed")
        if node.target in FORMS:
            return self._noted(node, self._higher_order(node, origin, args))
        if is_op(node.target) or is_higher_order(node.target):
            return self._noted(node, self._inferred(node, origin, node.target, args, kwargs))
        return self._run(node, origin, args, kwargs)

    def _keeps_module(self, op: Op) -> bool:
        """For an op that is a leaf module: whether the graph module has that module still."""
        if op.kind != "call_module":
            return True
        module = self.reading.held.module(self.reading.old, self.root, op.name)
        if module is not None:
            self.tape.modules[op.name] = module
        return module is not None

    def _noted(self, node: Node, outputs: Any) -> Any:
        self.op_of[node] = self.tape.ops[-1]
        return outputs

    def _origin(self, node: Node, old: Op | None) -> Op:
        """An op with the place, frames and grad mode of those that the node becomes."""
        place = self.matching.place(node)
        state = self.matching.traced.get(node)
        grad = self._grad
        if old is not None and state is not None and self._grads[state.node] == grad:
            grad = old.grad
        frames = old.frames if old is not None else node.stack_trace or ()
        phase = None if old is None else old.phase
        return Op("call_function", node.target, (), {}, None, place.scope, place.call, frames, grad, phase=phase)

    def _copied(self, old: Op, args: Any, kwargs: Any, origin: Op, storages: dict[int, int]) -> Any:
        """Append an op of the old tape on operands of the same metadata."""
        copied = old.replace(scope=origin.scope, call=origin.call, grad=origin.grad, phase=origin.phase)
        if old.kind in ("placeholder", "get_attr"):
            copied = old.replace(call=None if old.call is None else self.reading.calls.get(old.call))
        outputs = self.emitter.copy(copied, args, kwargs, storages)
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
            if self.reading.is_pure:
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

    def _higher_order(self, node: Node, origin: Op, args: Any) -> Any:
        """Append a higher-order op whose operands or bodies changed."""
        form = FORMS[node.target]
        if not form.takes_all:
            self._refuse(node, "its operands were changed, and what it computes with them is not known")
        if not all(isinstance(args[position], BodyTape) for position, _, _ in form.bodies):
            self._refuse(node, "its body is a GraphModule that the trace did not make")
        fakes = form.gathered(fakes_of(args))
        for position, _, _ in form.bodies:
            fakes[position] = functools.partial(self._results_of, form.gathered(args)[position])
        out = tuple(fake_results(self.tape.fake_mode, node.target, form.spread(fakes)))
        grad = origin.grad and any(v.fake.requires_grad for v in values_in(args))
        outputs = []
        for slot, t in enumerate(out):
            if isinstance(t, torch.Tensor):
                if grad and t.is_floating_point():
                    t.requires_grad_()
                outputs.append(self.emitter.new_value(t, slot))
            else:
                outputs.append(t)
        self.tape.ops.append(origin.replace(args=args, outputs=tuple(outputs)))
        return tuple(outputs)

    def _results_of(self, body: BodyTape, *_: Any) -> tuple[Any, ...]:
        results = leaves(body.outputs, (Value, *Symbolic))
        return tuple([self.emitter.like(v.fake) if isinstance(v, Value) else v for v in results])

    def _run(self, node: Node, origin: Op, args: Any, kwargs: Any) -> Any:
        """Run a function, method or module on fake tensors, and append the ATen ops that it calls."""

        def append(func: Any, args: Any, kwargs: Any) -> Any:
            return self._inferred(node, origin.replace(grad=torch.is_grad_enabled()), func, args, kwargs)

        def refuse(problem: str) -> NoReturn:
            self._refuse(node, f"it {problem}")

        fn: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
        if node.op == "call_module":
            fn = self.root.get_submodule(str(node.target))
        held = [vars(m) for m in fn.modules()] if isinstance(fn, torch.nn.Module) else []
        tables = [(t, t.copy()) for attributes in held for t in (attributes, *attributes.values()) if type(t) is dict]
        try:
            return self._fakes.run(fn, args, kwargs, origin.grad, append, refuse)
        finally:
            for table, before in tables:
                written = next((key for key in {**before, **table} if table.get(key) is not before.get(key)), None)
                if written is not None:
                    table.clear()
                    table.update(before)
                    self._refuse(node, f"the module writes its attribute {written}, which a graph does not do")

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
        name = self.reading.held.name_of(self.reading.old, name, t)
        if name in self._read_before:
            return self._read_before[name]
        held = self.reading.held.find(self.reading.old, self.root, name, t)
        self.tape.attributes[name] = held.tensor
        if held.owner is not None:
            self.tape.owners[name] = held.owner
        old = self._attribute_ops.get(name)
        if old is not None and held.is_known:
            value: Value = self._copied(old, (), {}, old, {old.result.storage: old.result.storage})
            value.real = held.tensor
        else:
            origin = self._origin(self._output_node(), None)
            value = self.emitter.attribute(origin, name, held.tensor)
        self._read_before[name] = value
        self._fakes.register([value], t)
        return value

    def _body(self, name: str, body: torch.fx.GraphModule) -> Any:
        lowering = self.old.bodies.get(name) or self.old.bodies.get(name.rpartition(".")[2])  # `split_module` moves it
        if lowering is None:
            return body
        if name not in self.lowered:
            reader = _GraphReader(self.reading, lowering, body, body.graph)
            reader.body()
            self.readers[name], self.lowered[name] = reader, reader.lowering()
        return self.lowered[name].tape

    # ---------------------------------------------------------------- arguments, calls

    def _value_of(self, x: Any) -> Any:
        if isinstance(x, Node):
            return self.results[x]
        if isinstance(x, (list, tuple)):
            return (list if isinstance(x, list) else tuple)([self._value_of(item) for item in x])
        if isinstance(x, dict):
            return {key: self._value_of(item) for key, item in x.items()}
        if isinstance(x, slice):
            return slice(*map(self._value_of, (x.start, x.stop, x.step)))
        return x

    def _fill(self, old: Call, new: Call) -> None:
        stop = self.reading.stops[old]
        new.args, new.kwargs = map_structure(
            lambda v: self._argument(v, old.position, stop), (old.args, old.kwargs), Value
        )
        new.outputs = map_structure(self._result, old.outputs, Value)
        new.mutated = map_structure(self._result, old.mutated, Value)
        if old.parent is None and isinstance(self.tape, ProgramTape):
            new.outputs = self.tape.result

    def _argument(self, value: Value, start: int, stop: int) -> Any:
        """What a call takes now: what its ops read in place of the old argument."""
        traced = self.old.node_of(value)
        if traced is None:
            return Removed(str(value.op.target))
        current = self.matching.current.get(traced)
        if current is not None and self.matching.is_read_in(current, start, stop):
            return self._one(current)
        read = self.matching.current_operands(traced, start, stop)
        one = read[0] if len(read) == 1 else None
        if one in self.results and not start <= self.matching.place(one).call.position < stop:
            return self._one(one)
        return Removed(traced.name) if current is None else self._one(current)

    def _result(self, value: Value) -> Any:
        """What a call gives now: the node of the old result, or the one that replaces it."""
        traced = self.old.node_of(value)
        if traced is None:
            return Removed(str(value.op.target))
        current = self.matching.current.get(traced) or self.matching.replacement(traced)
        return Removed(traced.name) if current is None or current not in self.results else self._one(current)

    def _one(self, node: Node) -> Any:
        result = self.results[node]
        return result if isinstance(result, (Value, *Symbolic)) else Removed(node.name)


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


def _facts(tape: Tape) -> set[Any]:
    """What lowering asserts of the symbols of a tape."""
    env = tape.shape_env
    return set() if env is None else {fact.expr for facts in env.deferred_runtime_asserts.values() for fact in facts}


def _is_on_numbers(target: Any, args: Any) -> bool:
    """Whether a call is arithmetic on numbers, as lowering writes for symbolic sizes."""
    name = getattr(target, "__name__", "")
    module = next((m for m in (operator, math, torch) if getattr(m, name, None) is target), None)
    is_arithmetic = module in (operator, math) or name.lstrip("_").startswith("sym_")
    if not (is_arithmetic if module is not None else target in (round, float, int, bool)):
        return False
    return bool(args) and all(isinstance(a, (bool, int, float, *Symbolic)) for a in args)
