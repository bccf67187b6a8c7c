"""A tape as a `torch.fx` graph, and typed access to `node.meta`: all that scopetrace writes there.

Data flow:
    ops of the tape -> without dead ones -> one node each, in order, with `node.meta` as torch.export writes it
    results of ops with several outputs -> `getitem` nodes; parameters, buffers and constants -> `get_attr` nodes
    symbolic sizes among arguments -> `sym_size` nodes and arithmetic; bodies of higher-order ops -> graphs of their own

The keys of torch (`val`, `nn_module_stack`, `stack_trace`, `unbacked_bindings`) have the form that torch.export gives
them. Those of scopetrace are plain data under `meta["custom"]["scopetrace"]`: `custom` is the one key for other tools
that torch keeps when it traces a graph again.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import keyword
import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.fx

from scopetrace._compat.graph_module import (
    TracedGraphModule,
    enter_autocast,
    exit_autocast,
    is_writable,
    make_graph_module,
    module_shown_as,
    reserved_names,
    set_arguments,
    set_grad_enabled,
)
from scopetrace._compat.ops import is_collective, is_random
from scopetrace._compat.symbols import Symbolic, SymbolNodes, number_text, surely_equal, to_expr
from scopetrace._compat.tensors import is_symbolic
from scopetrace.containers.structure import leaves, map_structure, open_container
from scopetrace.errors import UnsupportedOpError
from scopetrace.ir.scopes import format_stack
from scopetrace.ir.tape import Autocast, BodyTape, Call, Op, Phase, ProgramTape, Tape, Value
from scopetrace.ops.history import History, can_require_grad

KEY = "scopetrace"
_aten = torch.ops.aten
_RESHAPES = (_aten.view.default, _aten.reshape.default)
_ASSERT = _aten._assert_scalar.default
_PARTS = (Value, *Symbolic)
"""What of a result is the value of a node."""
_ATOMS = frozenset({int, float, bool, str, type(None), torch.dtype})
"""The types of most arguments that are no values."""


class NodeState(NamedTuple):
    """A node with all that decides what it computes, at one time: a pass may change it later."""

    node: torch.fx.Node
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


_state_of = operator.attrgetter(*NodeState._fields[1:])


def node_states(graph: torch.fx.Graph) -> list[NodeState]:
    """The nodes of a graph as they are now, in order."""
    return [NodeState(node, *_state_of(node)) for node in graph.nodes]


def refuse_names(names: Iterable[str], module: str) -> None:
    """Raise for a name of a tensor or module that a GraphModule has of its own, or cannot write in its code."""
    for name in names:
        if not is_writable(name):
            raise UnsupportedOpError(
                f"a graph cannot name {name!r}: it is a Python keyword, or has quotes, backslashes or line breaks",
                module=module,
                hint="give the attribute, or the key in the nn.ModuleDict, another name",
            )
        if name.partition(".")[0] in reserved_names():
            first = name.partition(".")[0]
            raise UnsupportedOpError(
                f"the model has an attribute {first!r}, and so has each torch.fx.GraphModule: a graph cannot hold both",
                module=module,
                hint="give the attribute another name, or trace a module that holds the model, as nn.Sequential(model)",
            )


class FxLowering:
    """The torch.fx graph of a tape, and the node of each of its values.

    The output node holds the values of `tape.graph_outputs()`, then the tensors that forward assigned to attributes.
    The body of a higher-order op is an FxLowering of its own, whose GraphModule is a submodule of the outer one.

    Attributes:
        tape: what the graph is made from.
        graph: the graph; passes may change it.
        bodies: the bodies of higher-order ops, by the name of the submodule.
        op_of: the op of the tape behind each node that has one.
        states: the nodes as they were when the graph was lowered, before any pass.
    """

    def __init__(
        self,
        tape: Tape,
        asserted: Iterable[Any] = (),
        messages: Container[str] = (),
        graph: torch.fx.Graph | None = None,
        *,
        modes: bool = False,
    ) -> None:
        """`asserted` are conditions on sizes of the inputs that the graph asserts.

        Assertions of a body say what is among `messages` in words of their own. `graph` is one that the tape is read
        from: `bind` gets what its nodes give. With `modes`, the graph switches autograd and autocast for each block of
        them, else only autograd, and where an op depends on it.
        """
        self._messages = {s.message for s in tape.specializations} if isinstance(tape, ProgramTape) else messages
        self.tape = tape
        self.graph = torch.fx.Graph() if graph is None else graph
        self.op_of: dict[torch.fx.Node, Op] = {}
        self._nodes: dict[Value, torch.fx.Node] = {}
        self._all = self.graph.nodes
        """The nodes that there are at the time, as `graph.nodes` is a view of the graph."""
        self._symbols = SymbolNodes(self.graph)
        self._stacks: dict[Call | None, dict[str, tuple[str, str]]] = {None: {}}
        self._opaque: dict[str, Any] = {}
        self.bodies: dict[str, FxLowering] = {}
        self._modes = modes
        self._state: tuple[bool, Autocast | None] = tape.outer_grad, None
        """Whether autograd is on, and the block under `torch.autocast` that was entered."""
        self._entered: torch.fx.Node | None = None
        self._history: History | None = None
        self._places: dict[tuple[int, int, int], tuple[dict[str, Any], dict[str, tuple[str, str]]]] = {}
        """By the ids of an op's scope, call and phase, which the tape keeps alive: what its nodes say of these."""
        self.module_shown_as = functools.cache(module_shown_as)
        self._traces: dict[int, str | None] = {}
        """By the id of frames, which the tape keeps alive, as text."""
        self._asserted = asserted
        if graph is None:
            self._build()
        self.states = node_states(self.graph)

    def bind(self, results: dict[torch.fx.Node, Any]) -> None:
        """Take what the nodes of a graph give, from which the tape was read."""
        for node, result in results.items():
            if isinstance(result, _PARTS):
                self._bind_one(node, result)

    @property
    def output(self) -> Any:
        """The output node."""
        return self.graph.output_node()

    def _build(self) -> None:
        tape = self.tape
        live = live_ops(tape)
        first = [op for op in tape.ops if op.kind == "placeholder"]
        for op in first:
            self._emit(op)
        before = len(self._all)
        symbols = [s for op in first if isinstance(op.outputs, Symbolic) for s in to_expr(op.outputs).free_symbols]
        self._symbols.assert_facts(tape.shape_env, symbols, self._messages)
        for condition in self._asserted:
            self._symbols.assert_condition(condition)
        for op in tape.ops:
            # an op of a graph that was traced again may assert what the lowering asserts anyway
            is_new = op.target is not _ASSERT or not self._symbols.is_asserted(op.args[0])
            if id(op) in live and op.kind != "placeholder" and is_new:
                self._emit_described(op, before)
                before = len(self._all)
        self._switch(tape.outer_grad)
        returned = tape.outputs
        if isinstance(tape, ProgramTape):
            returned = (*tape.graph_outputs(), *(w.value for w in tape.attribute_writes))
        output = self.graph.output(self.lower(returned))
        output.meta["val"] = fakes_of(returned)
        set_place(output, str(tape.root), 0)

    def _emit_described(self, op: Op, before: int) -> None:
        """As `_emit`; the nodes after so many, which compute and assert numbers, get its annotations and phase too."""
        self._emit(op)
        for node in itertools.islice(reversed(self.graph.nodes), len(self._all) - before):
            if op.meta is not None and "custom" in op.meta:
                node.meta.setdefault("custom", dict(op.meta["custom"]))
            if op.phase is not None and scope_path(node) is None:
                set_place(node, op.scope.path, 0 if op.call is None else op.call.position, op.phase)

    def is_edited(self, graph_module: Any) -> bool:
        """Whether a GraphModule in the place of this one, or of a body, has another graph, or nodes that are others."""
        graph = getattr(graph_module, "graph", None)
        bodies = ((body, getattr(graph_module, name, None)) for name, body in self.bodies.items())
        is_other = graph is not self.graph or self.states != node_states(self.graph)
        return is_other or any(body.is_edited(module) for body, module in bodies)

    def walk(self) -> Iterator[FxLowering]:
        """This graph and those of all bodies inside it, outer before inner."""
        yield self
        for body in self.bodies.values():
            yield from body.walk()

    def graph_module(self) -> TracedGraphModule:
        """The graph as a GraphModule, which holds the model's own tensors and submodules, not copies."""
        tape = self.tape
        written = tape.name if isinstance(tape, BodyTape) else tape.root.type_name
        name = "".join(c for c in written if c.isidentifier() or c.isdigit()) or "Traced"
        used = dict.fromkeys(n.target for n in self.graph.nodes if n.op in ("get_attr", "call_module"))
        bodies = {name: body.graph_module() for name, body in self.bodies.items()}
        modules = tape.modules if isinstance(tape, ProgramTape) else {}
        everything = {**tape.attributes, **modules, **self._opaque, **bodies}
        held = {name: everything[name] for name in used}
        refuse_names(held, tape.root.path)
        context_fn = tape.context_fn if isinstance(tape, BodyTape) else None
        return make_graph_module(held, self.graph, name, is_body=isinstance(tape, BodyTape), context_fn=context_fn)

    def lower(self, x: Any) -> Any:
        """A structure of arguments or results with nodes in place of tape values and symbolic numbers."""
        if isinstance(x, Value):
            return self._nodes[x]
        kind = type(x)
        if kind in _ATOMS:
            return x
        if kind is list or kind is tuple:
            return kind([self.lower(item) for item in x])
        return map_structure(self._lower_leaf, x, (Value, BodyTape, torch.ScriptObject, *Symbolic))

    def node_of(self, value: Value) -> torch.fx.Node | None:
        """The node of a value; None for a dead one."""
        return self._nodes.get(value)

    def has(self, x: Any) -> bool:
        """Whether a value or symbolic number has a node; dead ones have none."""
        return x in self._nodes if isinstance(x, Value) else self._symbols.has(x)

    def _lower_leaf(self, x: Any) -> Any:
        if isinstance(x, BodyTape):
            return self._body(x)
        if isinstance(x, torch.ScriptObject):
            return self._held(x)
        return self._nodes[x] if isinstance(x, Value) else self._symbols.node_of(x)

    def _held(self, x: Any) -> torch.fx.Node:
        """A `get_attr` node of an object that an op takes and Python code cannot write, such as packed weights."""
        name = next((name for name, other in self._opaque.items() if other is x), f"_argument{len(self._opaque)}")
        self._opaque[name] = x
        return self.graph.create_node("get_attr", name)

    def _body(self, tape: BodyTape) -> torch.fx.Node:
        """A `get_attr` node of a body's GraphModule. Ops with the same body tape share the GraphModule."""
        name = next((name for name, body in self.bodies.items() if body.tape is tape), None)
        if name is None:
            used = [body.tape.name for body in self.bodies.values() if isinstance(body.tape, BodyTape)]
            name = f"{tape.name}_{used.count(tape.name)}"
            self.bodies[name] = FxLowering(tape, messages=self._messages, modes=self._modes)
        return self.graph.create_node("get_attr", name, name=name)

    # ---------------------------------------------------------------- emitting

    def _emit(self, op: Op) -> None:
        if self._modes or op.grad != self._state[0]:
            self._switch_for(op)
        if op.kind == "call_function":
            args = tuple([self.lower(a) for a in op.args])
            kwargs = {name: self.lower(a) for name, a in op.kwargs.items()} if op.kwargs else op.kwargs
            name = str(getattr(getattr(op.target, "overloadpacket", op.target), "__name__", "op"))
            node = self._call(op.target, args, kwargs, name)
            for body in node.all_input_nodes if self.bodies and op.bodies() else ():
                if body.target in self.bodies:
                    self._describe(body, op)
        elif op.kind == "call_module":
            args, kwargs = self._as_arguments((op.args, op.kwargs))
            _refuse_keywords(kwargs, op)
            node = self.graph.create_node("call_module", op.target, args, kwargs)
        else:
            node = self.graph.create_node(op.kind, op.name)
        self.op_of[node] = op
        self._describe(node, op)
        self._bind(node, op)
        if op.unbacked:
            node.meta["unbacked_bindings"] = op.unbacked
            self._symbols.add_unbacked(node, op.unbacked)
            self._symbols.assert_facts(self.tape.shape_env, op.unbacked, self._messages)

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None) -> torch.fx.Node:
        """A `call_function` node. It gets its arguments at the end: `create_node` would look for symbols in them."""
        node = self.graph.create_node("call_function", target, name=name)
        set_arguments(node, args, kwargs)
        return node

    def _describe(self, node: torch.fx.Node, op: Op) -> None:
        key = id(op.scope), id(op.call), id(op.phase)
        if key not in self._places:
            place = place_of(op.scope.path, 0 if op.call is None else op.call.position, op.phase)
            stack = self._module_stack(op.call)
            if op.call is not None and op.scope is not op.call.scope:
                stack = stack | _modules_within(op, op.call)
            self._places[key] = place, stack
        place, stack = self._places[key]
        node.meta["custom"] = {KEY: place.copy()}
        if op.kind != "placeholder":
            set_origin(node, stack, format_stack(op.frames, self._traces))
        if op.meta is not None:
            node.meta.update({key: dict(x) for key, x in op.meta.items() if key != "custom"})
            node.meta["custom"] = {**op.meta.get("custom", {}), **node.meta["custom"]}

    def _bind(self, node: torch.fx.Node, op: Op) -> None:
        """Map the values of an op to nodes: the op's own, or `getitem` nodes for ops with several results."""
        outputs = op.outputs
        node.meta["val"] = fakes_of(outputs)
        if isinstance(outputs, _PARTS):
            self._bind_one(node, outputs)
        elif outputs is not None:
            self._bind_parts(node, op, outputs)

    def _bind_parts(self, node: torch.fx.Node, op: Op, parts: Any) -> None:
        children = enumerate(parts) if isinstance(parts, (list, tuple)) else open_container(parts) or ()
        for key, part in children:
            if isinstance(part, _PARTS):
                self._bind_one(self._take(node, op, key, part), part)
            elif leaves(part, _PARTS):
                self._bind_parts(self._take(node, op, key, part), op, part)

    def _bind_one(self, node: torch.fx.Node, part: Any) -> None:
        if not isinstance(part, Value):
            self._symbols.add_number(part, node)
            return
        self._nodes[part] = node
        fake = part.fake
        if is_symbolic(fake) and fake.layout is torch.strided:
            self._symbols.add_sizes(fake, node)

    def _take(self, node: torch.fx.Node, op: Op, key: int | str, part: Any) -> torch.fx.Node:
        how: Any = operator.getitem
        if isinstance(key, str):  # `[0]` or `.logits`
            how, key = (getattr, key[1:]) if key[0] == "." else (how, ast.literal_eval(key[1:-1]))
        taken = self._call(how, (node, key), {}, how.__name__)
        self._describe(taken, op)
        taken.meta["val"] = fakes_of(part)
        return taken

    def _as_arguments(self, x: Any) -> Any:
        """Arguments of a leaf module; objects that a node cannot hold become attributes of the GraphModule."""
        if isinstance(x, _PARTS):
            return self._lower_leaf(x)
        if type(x) in (tuple, list):
            return type(x)([self._as_arguments(item) for item in x])
        if type(x) is dict:
            return {key: self._as_arguments(item) for key, item in x.items()}
        if isinstance(x, torch.fx.node.base_types) or x is None:
            return x
        return self._held(self.lower(x))

    def _module_stack(self, call: Call | None) -> dict[str, tuple[str, str]]:
        """`nn_module_stack` in torch.export's format: `L__self__<fqn>[@index]` to (fqn, qualified class name)."""
        if call not in self._stacks:
            assert call is not None
            stack = dict(self._module_stack(call.parent))
            if call.module_type is not None:
                key = f"L__self__{call.fqn or ''}" + (f"@{call.index}" if call.index else "")
                stack[key] = (call.fqn or "", class_text(call))
            self._stacks[call] = stack
        return self._stacks[call]

    # ---------------------------------------------------------------- autograd and autocast on and off

    def _switch_for(self, op: Op) -> None:
        """Switch autograd before an op under the other mode, if an input may require grad, and back before any op."""
        is_step = op.kind not in ("placeholder", "get_attr")
        if self._modes:
            if is_step and op.values():
                self._switch(op.grad, op.autocast)
        elif (is_step and op.grad == self.tape.outer_grad) or any(map(self._may_require_grad, op.inputs())):
            self._switch(op.grad)

    def _may_require_grad(self, v: Value) -> bool:
        """Whether a value requires grad, or would in a call whose inputs did, where such calls are not refused."""
        if self._history is None:
            tape = self.tape  # inputs may require grad in a call that did not in the trace: not where it writes
            writes = isinstance(tape, ProgramTape) and bool(tape.written_storages())
            is_condition = isinstance(tape, BodyTape) and tape.is_condition
            is_forward = all(op.phase is None for op in tape.ops)
            ops = tape.ops if is_forward and not (writes or is_condition) else []
            inputs = [v for op in ops if op.kind == "placeholder" for v in op.values() if can_require_grad(v)]
            self._history = History(ops, dict.fromkeys(inputs, 1), assumed=True)
        return v.ever_requires_grad or self._history.of(v) > 0

    def _switch(self, grad: bool, autocast: Autocast | None = None) -> None:
        """Switch to these modes. In blocks of both, autocast is the inner one."""
        autocast = autocast and dataclasses.replace(autocast, casts=False)  # of one block some ops are cast
        if self._entered is not None and self._state != (grad, autocast):
            self._call_switch(exit_autocast, self._entered)
            self._state, self._entered = (self._state[0], None), None
        if self._state[0] != grad:
            self._call_switch(set_grad_enabled, grad)
        if autocast is not None and self._entered is None:
            self._entered = self._call_switch(enter_autocast, autocast.device, autocast.dtype, True, False)
        self._state = grad, autocast

    def _call_switch(self, switch: Any, *args: Any) -> torch.fx.Node:
        node = self.graph.create_node("call_function", switch, args, name=switch.__name__.lstrip("_"))
        set_place(node, str(self.tape.root), 0)
        node.meta["val"] = None
        return node


def class_text(call: Call) -> str:
    """The name of the class of a called module, as in `nn_module_stack`."""
    cls = call.module_type or torch.nn.Module
    is_graph = issubclass(cls, torch.fx.GraphModule)  # whose class has no name in a Python module
    return call.scope.type_name if is_graph else f"{cls.__module__}.{cls.__qualname__}"


def _modules_within(op: Op, call: Call) -> dict[str, tuple[str, str]]:
    """The modules around an op inside its call, as `nn_module_stack` has them: those of a node of a traced graph."""
    stack, fqn = {}, call.fqn or ""
    inner = list(itertools.takewhile(lambda s: s is not call.scope, op.scope.ancestors()))
    for scope in reversed([s for s in inner if s.is_module]):
        fqn = f"{fqn}.{scope.name}" if fqn else scope.name
        stack[f"L__self__{fqn}"] = fqn, scope.type_name
    return stack


def live_ops(tape: Tape) -> set[int]:
    """The ids of the ops that stay: those with effects, and those that results or module calls depend on.

    Arguments and results of module calls count as used, so that a ModuleCall can show them.
    """
    needed: set[Value] = set()
    for call in tape.calls:
        needed.update(leaves((call.args, call.kwargs, call.outputs, call.mutated), Value))
    needed.update(v for v in tape.graph_outputs() if isinstance(v, Value))
    if isinstance(tape, ProgramTape):
        needed.update(w.value for w in tape.attribute_writes)
    live: set[int] = set()
    for op in reversed(tape.ops):
        if not needed.isdisjoint(op.values()) or has_effect(op):
            live.add(id(op))
            needed.update(op.inputs())
    return live


def has_effect(op: Op) -> bool:
    """Whether an op stays although its results are not used: it writes, has an effect, or returns nothing.

    A view stays too with a size of -1 for which symbolic sizes may leave a fraction: eager raises there.
    """
    if op.kind in ("placeholder", "call_module") or op.writes or op.unbacked:
        return True
    return op.kind != "get_attr" and (not op.values() or _checks_sizes(op) or _acts(op.target))


@functools.cache
def _acts(target: Any) -> bool:
    return is_random(target) or is_collective(target)


def _checks_sizes(op: Op) -> bool:
    """Whether a view has the elements of its argument only at sizes that a division leaves no remainder for."""
    if op.target not in _RESHAPES or not is_symbolic(op.result.fake):
        return False
    return not surely_equal(math.prod(op.result.fake.size()), math.prod(op.tensor(0).fake.size()))


def _refuse_keywords(kwargs: Iterable[str], op: Op) -> None:
    name = next((name for name in kwargs if not name.isidentifier() or keyword.iskeyword(name)), None)
    if name is not None:
        raise UnsupportedOpError(
            f"a graph cannot pass the keyword argument {name!r}, which is no Python name",
            module=op.scope.path,
            hint="trace without leaf_modules= for this module, or give the argument another name",
        )


def plain(x: Any, leaf: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """Arguments of a node, whose containers are immutable, in those of Python, with `leaf` of each leaf for it."""
    if isinstance(x, (list, tuple)):
        items = [plain(item, leaf) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else items if isinstance(x, list) else tuple(items)
    if isinstance(x, dict):
        return {key: plain(item, leaf) for key, item in x.items()}
    return slice(*[plain(i, leaf) for i in (x.start, x.stop, x.step)]) if isinstance(x, slice) else leaf(x)


def fakes_of(x: Any) -> Any:
    """A structure with the fake tensors of values in their place."""
    return x.fake if isinstance(x, Value) else map_structure(fakes_of, x, Value)


# node.meta -----------------------------------------------------------------------------------------------------------


def set_place(node: torch.fx.Node, scope: str, call: int, phase: Phase | None = None) -> None:
    """Write the path of the node's scope, the position in `Trace.calls` of the innermost call around it, its phase."""
    node.meta.setdefault("custom", {})[KEY] = place_of(scope, call, phase)


def place_of(scope: str, call: int, phase: Phase | None) -> dict[str, Any]:
    """What `set_place` writes."""
    place: dict[str, Any] = {"scope": scope, "call": call}
    if phase is not None:
        place["phase"] = phase.name
    if phase is not None and phase.scope is not None:
        place["forward"] = {"scope": phase.scope.path, "call": phase.call}
    if phase is not None and phase.recomputed:
        place["recomputed"] = True
    return place


def phase_of(node: torch.fx.Node) -> str:
    """`forward`, `backward` or `other`."""
    return str(place_in_meta(node).get("phase", "forward"))


def is_recomputed(node: torch.fx.Node) -> bool:
    """Whether it is an op of the forward that runs again in backward, in a region under `torch.utils.checkpoint`."""
    return bool(place_in_meta(node).get("recomputed", False))


def forward_place(node: torch.fx.Node) -> tuple[str, int] | None:
    """Of a node of backward, scope and call of the op of the forward that it belongs to; None for other nodes."""
    forward = place_in_meta(node).get("forward")
    return None if forward is None else (str(forward["scope"]), int(forward["call"]))


def scope_path(node: torch.fx.Node) -> str | None:
    """The path of the node's scope, such as `"Net/Linear[fc]"`; None for a node of another tool."""
    return place_in_meta(node).get("scope")


def call_position(node: torch.fx.Node) -> int | None:
    """The position in `Trace.calls` of the innermost call around the node; None for a node of another tool."""
    return place_in_meta(node).get("call")


def place_in_meta(node: torch.fx.Node) -> dict[str, Any]:
    """What `set_place` wrote, the very dict: passes that copy meta copy a reference to it. Empty for other nodes."""
    custom = node.meta.get("custom")
    return (isinstance(custom, dict) and custom.get(KEY)) or node.meta.get(KEY) or {}


def leave_custom_to_users(graph: torch.fx.Graph) -> None:
    """Move what scopetrace wrote from `meta["custom"]["scopetrace"]` to `meta["scopetrace"]`."""
    for node in graph.nodes:
        custom = dict(node.meta.pop("custom", {}))
        if KEY in custom:
            node.meta[KEY] = custom.pop(KEY)
        if custom:
            node.meta["custom"] = custom


def node_value(node: torch.fx.Node) -> Any:
    """What the node returns: a fake tensor, a symbolic number, or a nesting of these; None where it returns nothing."""
    return node.meta.get("val")


def set_origin(node: torch.fx.Node, module_stack: dict[str, tuple[str, str]], stack_trace: str | None) -> None:
    """Write `nn_module_stack` and `stack_trace` as torch.export does. The dict is copied."""
    node.meta["nn_module_stack"] = dict(module_stack)
    if stack_trace is not None:
        node.meta["stack_trace"] = stack_trace


# Nodes and types as text, in the notation of torch.fx ---------------------------------------------------------------


def type_text(value: Any) -> str:
    """`f32[2, 3]` for a tensor, `Sym(2*batch)` for a symbolic number, `(f32[2], f32[3])` for several."""
    if isinstance(value, torch.Tensor):
        sizes = [str(size) if type(size) is int else number_text(size) for size in value.shape]
        return f"{getattr(value.dtype, 'abbr', value.dtype)}[{', '.join(sizes)}]"  # `f32`, `i64`, `b8`
    if isinstance(value, Symbolic):
        return f"Sym({number_text(value)})"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(type_text, value))})"
    return "" if value is None else type(value).__name__


def named(node: torch.fx.Node) -> str:
    """`%name`; a parameter, buffer or constant by its name in the model."""
    return str(node.target) if node.op == "get_attr" else f"%{node.name}"


def typed(node: torch.fx.Node) -> str:
    """`%name: f32[2, 3]`."""
    text = type_text(node_value(node))
    return f"{named(node)}: {text}" if text else named(node)
