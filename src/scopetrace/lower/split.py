"""A program as two graphs, forward and backward, with the tensors that backward keeps of the forward between them.

Data flow:
    graph of a forward -> its nodes run again, with a tangent for each result that requires grad -> joint graph
    graph of a training step, which has its backward -> joint graph as it is
    parameters and other state of the joint graph -> inputs; the node of the forward behind each node -> node.meta
    joint graph -> a partitioner of torch -> forward, backward

A joint graph takes `primals` (state, then the inputs of the program) and `tangents`, as those of AOTAutograd do.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx
from torch.export import Dim

from scopetrace._compat.graph_module import look_up, set_grad_enabled
from scopetrace._compat.ops import is_op
from scopetrace._compat.shape_env import DimSpec
from scopetrace._compat.symbols import Symbolic, example, has_unbacked
from scopetrace._compat.tensors import FakeFactory, dense_order
from scopetrace.containers.structure import leaves
from scopetrace.errors import ArgumentTypeError, DynamicShapeError, ModeError, StateMismatchError, UnsupportedOpError
from scopetrace.ir.conditions import SizeRules
from scopetrace.ir.scopes import scope
from scopetrace.ir.tape import Phase
from scopetrace.ir.write_back import CopyInto, StateRef
from scopetrace.lower.compiled import KEPT_META
from scopetrace.lower.result_nodes import ResultNodes, write_back_of
from scopetrace.ops.history import differentiated_once
from scopetrace.program.graph import call_position, forward_place, node_value, phase_of, scope_path, set_place
from scopetrace.program.traced import Saved, TracedProgram, functional_tape
from scopetrace.session import record

Partition = Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]]
"""As `functorch.compile.default_partition`."""
Rewrite = Callable[[TracedProgram], TracedProgram]


@dataclasses.dataclass(frozen=True, eq=False)
class SplitProgram:
    """A program as a forward and a backward graph. A call runs the forward, and its results have the backward."""

    forward: torch.fx.GraphModule
    """Takes `primals`; returns `results` values, then those that the backward takes."""
    backward: torch.fx.GraphModule
    """Takes what the forward has saved, then a tangent for each result that requires grad; returns gradients. Of a
    training step it takes no tangents, and returns all that is computed from the gradients."""
    primals: tuple[str, ...]
    """What the forward takes: the names of parameters, buffers and constants in the model, then those of inputs."""
    results: int
    """How many values of the forward are results and new values of what the program writes."""
    gradients: tuple[str, ...]
    """Of which of `primals` the backward returns the gradients, in order; none of a training step."""
    saved: tuple[Saved, ...]
    """What the forward keeps for the backward: its node, shape and bytes."""
    _program: TracedProgram
    _joint: _Joint
    _places: tuple[int, ...]
    """Of each value that the backward takes from the forward, the position among those that the forward returns."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a call of the trace. Gradients of its results come from `backward`."""
        return self._program.run(self.run_by(self.forward, self.backward), *args, **kwargs)

    def run_by(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the inputs of the program's graph, which runs compiled forms of both graphs."""
        joint = self._joint

        def run(*inputs: Any) -> list[Any]:
            primals = self.inputs_of_forward(inputs)
            if joint.sizes is not None:
                tensors = [x for x in primals if isinstance(x, torch.Tensor)]
                joint.sizes.check(tensors, primals[len(tensors) :])
            if joint.differentiable and torch.is_grad_enabled():
                self._check_requires_grad(primals)
                values = list(_Differentiable.apply(self, forward, backward, *primals))
            else:
                values = list(forward(*map(_detached, primals)))
            if not joint.differentiable:
                values = [*values[: self.results], *backward(*(values[i] for i in self._places))]
            return [values[i] for i in joint.order]

        return run

    def inputs_of_forward(self, inputs: Sequence[Any]) -> list[Any]:
        """What the forward takes: the current state, then the inputs of the program's graph."""
        names = self.primals[: len(self.primals) - len(inputs)]
        return [*(look_up(self._program.graph_module, name) for name in names), *inputs]

    def _check_requires_grad(self, primals: list[Any]) -> None:
        placeholders = self.forward.graph.find_nodes(op="placeholder")
        for name, t, node in zip(self.primals, primals, placeholders, strict=True):
            if isinstance(t, torch.Tensor) and t.requires_grad and not node_value(node).requires_grad:
                raise StateMismatchError(
                    f"{name} requires grad, and backward does not give its gradient; trace again, and split that"
                )


class _Differentiable(torch.autograd.Function):
    """The forward graph, with the backward graph as its derivative."""

    @staticmethod
    def forward(ctx: Any, split: SplitProgram, forward: Any, backward: Any, *primals: Any) -> Any:
        with torch.enable_grad():  # without it, a kernel of LSTMs gives nothing for its backward
            values = forward(*map(_detached, primals))
        results = tuple(values[: split.results])
        kept = [values[i] for i in split._places]
        ctx.save_for_backward(*(x for x in kept if isinstance(x, torch.Tensor)))
        ctx.numbers = [None if isinstance(x, torch.Tensor) else x for x in kept]
        ctx.split, ctx.run = split, backward
        constant = [t for i, t in enumerate(results) if i not in split._joint.differentiable]
        ctx.mark_non_differentiable(*(t for t in constant if isinstance(t, torch.Tensor)))
        return results

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        split, create_graph = ctx.split, torch.is_grad_enabled()
        like = [node_value(n) for n in split.backward.graph.find_nodes(op="placeholder")[len(split._places) :]]
        with torch.no_grad():
            laid_out = [_laid_out(tangents[i], t) for i, t in zip(split._joint.differentiable, like, strict=True)]
            tensors = iter(ctx.saved_tensors)
            kept = [next(tensors) if x is None else x for x in ctx.numbers]
            gradients = ctx.run(*kept, *laid_out)
        if create_graph:  # without a history, derivatives of them would be left out
            error = UnsupportedOpError(
                "the gradients that the backward graph of a split program gives cannot be differentiated again",
                hint="trace a step with both derivatives and split that; or give functional_backend no "
                "backward_compiler",
            )
            gradients = [None if g is None else differentiated_once(g, error) for g in gradients]
        by_name = dict(zip(split.gradients, gradients, strict=True))
        return None, None, None, *(by_name.get(name) for name in split.primals)


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


def _laid_out(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tangent with the strides for which the graph was made, which are those of `empty_like`: without gaps."""
    order = dense_order(like) or list(range(like.dim()))
    return t.permute(order).contiguous().permute([order.index(i) for i in range(like.dim())])


def split_backward(
    program: TracedProgram, partition_fn: Partition | None, rewrite: Rewrite | None = None
) -> SplitProgram:
    """The two graphs of a program; see `Trace.split_backward`. The joint program of a forward is rewritten first."""
    if partition_fn is None:
        from functorch.compile import default_partition  # type: ignore[import-untyped]  # which imports a compiler

        partition_fn = default_partition
    if not callable(partition_fn):
        raise ArgumentTypeError(
            f"partition_fn= is {partition_fn!r}, and no function: give functorch.compile.default_partition or "
            "functorch.compile.min_cut_rematerialization_partition"
        )
    program = program.without_regions().functional()
    late = _late(program)
    joint = None if _is_step(program, late) else _joint_of_forward(program, rewrite, is_needed=not late)
    joint = joint or _joint_of_step(program, late)
    for node in joint.module.graph.find_nodes(op="call_function", target=set_grad_enabled):
        joint.module.graph.erase_node(node)
    forward, backward = partition_fn(joint.module, joint.examples, num_fwd_outputs=joint.results)
    for node in reversed(backward.graph.nodes):  # what partitioners leave, as random ops and checks, has run in forward
        if node.op == "call_function" and not node.users and node.meta.get("partitioner_tag") == "is_forward":
            backward.graph.erase_node(node)
    backward.recompile()
    after = {n.name: i for i, n in reversed([*enumerate(_outputs(forward.graph))])}
    names = (str(n.target) for n in backward.graph.find_nodes(op="placeholder"))  # a node's name has no capitals
    taken = [name for name in names if not name.startswith("tangents_")]
    nodes, places = {n.name: n for n in forward.graph.nodes}, tuple(map(after.__getitem__, taken))
    saved = tuple(Saved.among(map(nodes.__getitem__, taken)))
    return SplitProgram(forward, backward, joint.primals, joint.results, joint.gradients, saved, program, joint, places)


class _Joint(NamedTuple):
    """A joint graph, and as in SplitProgram what of it is what."""

    module: torch.fx.GraphModule
    examples: list[Any]
    primals: tuple[str, ...]
    results: int
    order: tuple[int, ...]
    """Of each output of the program's graph, the position among the results, and after these those of a step's
    backward."""
    differentiable: tuple[int, ...] = ()
    """The positions of the results that have a tangent."""
    gradients: tuple[str, ...] = ()
    sizes: SizeRules | None = None
    """For which sizes of what the forward takes the backward holds too."""


def _refuse_unbacked(program: TracedProgram) -> None:
    for node in program.graph_module.graph.nodes:
        values = leaves(node_value(node), (*Symbolic, torch.Tensor))
        sizes = [n for x in values for n in (x.size() if isinstance(x, torch.Tensor) else [x])]
        if any(isinstance(n, Symbolic) and has_unbacked(n.node.expr) for n in sizes):
            raise DynamicShapeError(
                "split_backward() of a forward with sizes that depend on data",
                op=str(node.target),
                hint="compute with a mask, or split a training step that calls backward()",
            )


def _dynamic_shapes(program: TracedProgram, count: int) -> tuple[Any, ...]:
    """The `dynamic_shapes` of a program for `count` inputs, of which the last are its own."""
    shapes: list[Any] = [None] * count
    rules = program.tape.sizes
    if rules is None:
        return tuple(shapes)
    bounds, tensors = rules.bounds(), len(program.tape.inputs)
    first = count - len(program.graph_module.graph.find_nodes(op="placeholder"))
    for d in rules.dynamic:
        expr = rules.env.replace(d.expr)  # that of another size, where the model made both equal
        if expr.is_number:
            continue
        (symbol,) = expr.free_symbols
        if d.dim is None:
            shapes[first + tensors + d.index] = Dim.DYNAMIC
            continue
        lower, upper = bounds[symbol]
        derive = None if expr.is_Symbol else functools.partial(expr.subs, symbol)
        sizes = shapes[first + d.index] = shapes[first + d.index] or {}
        sizes[d.dim] = DimSpec(str(symbol), lower, upper, derive=derive)
    return tuple(shapes)


def _late(program: TracedProgram) -> set[torch.fx.Node]:
    """Ops of backward and of what follows, and all that reads them."""
    late: set[torch.fx.Node] = set()
    for node in program.graph_module.graph.nodes:
        is_size = node.target is torch.ops.aten.sym_size.int  # backward may ask for a size of the forward
        if (phase_of(node) != "forward" and not is_size) or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return late


def _is_step(program: TracedProgram, late: Collection[torch.fx.Node]) -> bool:
    """Whether the program differentiates for its effects: it changes a `grad`, or parameters by what it computed.

    One that differentiates for its results is a forward, which can be differentiated again.
    """
    tape = program.tape
    if tape.cleared or any(write.name == "grad" for write in tape.attribute_writes):
        return True
    outputs = _outputs(program.graph_module.graph)
    written = [u for u in write_back_of(tape).updates if isinstance(u, CopyInto) and u.grad is False]
    into = [u.target for u in written if outputs[u.value.index] in late]
    return any(look_up(program.graph_module, t.name).requires_grad for t in into if isinstance(t, StateRef))


def _outputs(graph: torch.fx.Graph) -> list[Any]:
    outputs: Any = graph.output_node().args[0]
    return list(outputs)


def _with_inputs(
    source: torch.fx.GraphModule,
    nodes: Sequence[torch.fx.Node],
    inputs: Sequence[torch.fx.Node],
    names: Sequence[str],
    outputs: Sequence[Any],
    tags: Mapping[torch.fx.Node, str],
) -> torch.fx.GraphModule:
    """A graph of `nodes` of another, whose `inputs` are nodes of that under new names.

    `tags` say to torch's partitioners where nodes belong.
    """
    graph = torch.fx.Graph()
    new: dict[Any, torch.fx.Node] = {}
    for node, name in zip(inputs, names, strict=True):
        new[_key(node)] = graph.placeholder(name)
        new[_key(node)].meta = dict(node.meta)
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in nodes:
        if _key(node) in new:
            copies[node] = new[_key(node)]
        elif node.op != "output":
            copy = copies[node] = graph.node_copy(node, copies.__getitem__)
            copy.meta["partitioner_tag"] = tags.get(node, "is_forward")
            if node.op == "call_function" and node_value(node) is None and not is_op(node.target):
                of_numbers: Any = node.target
                copy.meta["val"] = of_numbers(*torch.fx.map_arg(copy.args, node_value))
    graph.output([copies[n] if isinstance(n, torch.fx.Node) else n for n in outputs])
    return torch.fx.GraphModule(source, graph)


def _key(node: torch.fx.Node) -> Any:
    """What is one input: an attribute that several nodes read, another node by itself."""
    return (node.op, node.target) if node.op == "get_attr" else node


def _lifted(
    program: TracedProgram, nodes: Sequence[torch.fx.Node], outputs: Sequence[Any], tags: Mapping[torch.fx.Node, str]
) -> tuple[torch.fx.GraphModule, tuple[str, ...]]:
    graph = program.graph_module.graph
    tensors = [n for n in graph.find_nodes(op="get_attr") if isinstance(node_value(n), torch.Tensor)]
    state, inputs = {str(n.target): n for n in tensors}, graph.find_nodes(op="placeholder")
    names = [f"primals_{i + 1}" for i in range(len(state) + len(inputs))]
    module = _with_inputs(program.graph_module, nodes, [*state.values(), *inputs], names, outputs, tags)
    return module, (*state, *(n.name for n in inputs))


def _joint_of_step(program: TracedProgram, late: Collection[torch.fx.Node]) -> _Joint:
    outputs = _outputs(program.graph_module.graph)
    early = [i for i, n in enumerate(outputs) if n not in late]
    order = [*early, *(i for i, n in enumerate(outputs) if n in late)]
    tags = dict.fromkeys(program.graph_module.graph.nodes, "is_forward")
    for node in late:  # a partitioner puts parts of results where the op is, which may be equal to one of the forward
        tags[node] = "is_backward" if node.target is operator.getitem else "must_be_in_backward"
    module, primals = _lifted(program, sorted(tags, key=late.__contains__), [outputs[i] for i in order], tags)
    examples = [node_value(n) for n in module.graph.find_nodes(op="placeholder")]
    return _Joint(module, examples, primals, len(early), tuple(order.index(i) for i in range(len(outputs))))


def _joint_of_forward(program: TracedProgram, rewrite: Rewrite | None, is_needed: bool) -> _Joint | None:
    """None, or an error where it `is_needed`, for a program of which no result requires grad."""
    _refuse_unbacked(program)
    outputs = _outputs(program.graph_module.graph)
    module, primals = _lifted(program, list(program.graph_module.graph.nodes), outputs, {})
    factory = FakeFactory()
    examples = [_like(factory, node_value(n)) for n in module.graph.find_nodes(op="placeholder")]
    with factory.mode, torch.enable_grad():
        values = torch.fx.Interpreter(module).run(*examples)
    differentiable = [i for i, t in enumerate(values) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not differentiable and not is_needed:
        return None
    if not all(isinstance(t, torch.Tensor) for t in values):
        raise DynamicShapeError(
            "split_backward() of a forward that gives a dynamic size as a result", hint="give tensors alone as results"
        )
    if not differentiable:
        raise ModeError(
            "split_backward() of a program in which nothing requires grad: trace with autograd on, and parameters or "
            "inputs that require grad"
        )
    traced, differentiated = _with_gradients(program, module, examples, differentiable, primals)
    traced = traced if rewrite is None else rewrite(traced)
    results = ResultNodes.of(traced.lowering).all_results(write_back_of(traced.tape))
    graph = traced.lowering.graph
    tags = {n: "is_forward" if forward_place(n) is None else "is_backward" for n in graph.nodes}
    paths = {n: str(scope_path(n)) for n in graph.nodes}
    _place(graph, program)
    last = {path.rpartition("/")[2]: n for n, path in paths.items() if isinstance(node_value(n), torch.Tensor)}
    tangents = [f"{_TANGENTS}{i + 1}" for i in range(len(differentiable))]
    names = [*(str(n.target) for n in module.graph.find_nodes(op="placeholder")), *tangents]
    inputs = [*graph.find_nodes(op="placeholder"), *map(last.__getitem__, tangents)]
    whole = _with_inputs(traced.graph_module, list(graph.nodes), inputs, names, results, tags)
    kept = primals, len(outputs), tuple(range(len(outputs)))
    return _Joint(whole, list(map(node_value, inputs)), *kept, tuple(differentiable), differentiated, traced.tape.sizes)


_TANGENTS = "tangents_"


def _with_gradients(
    program: TracedProgram,
    module: torch.fx.GraphModule,
    examples: Sequence[Any],
    differentiable: Sequence[int],
    primals: Sequence[str],
) -> tuple[TracedProgram, tuple[str, ...]]:
    """A trace of a forward, `module`, that gives its gradients too, and the names of the inputs that have one."""
    by = [i for i, t in enumerate(examples) if isinstance(t, torch.Tensor) and t.requires_grad]
    reached: list[bool] = []

    def joint(*inputs: torch.Tensor) -> Any:
        values = _InScopes(module).run(*inputs)
        results, tangents = [values[i] for i in differentiable], []
        for i, result in enumerate(results):
            with scope(_TANGENTS + str(i + 1)), torch.no_grad():  # an input of the graph in the end, of symbolic sizes
                tangents.append(torch.empty_like(result))
        gradients = torch.autograd.grad(results, [inputs[i] for i in by], tangents, allow_unused=True)
        reached[:] = [gradient is not None for gradient in gradients]
        return values, gradients

    with torch.enable_grad():
        shapes = _dynamic_shapes(program, len(examples))
        tape = record(joint, tuple(examples), {}, dynamic_shapes={"inputs": shapes} if any(shapes) else None)
    if tape.sizes is not None:
        positions = [d.index + (len(tape.inputs) if d.dim is None else 0) for d in tape.sizes.dynamic]
        named = zip(tape.sizes.dynamic, positions, strict=True)
        tape.sizes.dynamic = [dataclasses.replace(d, path=primals[i]) for d, i in named]
        tape.sizes.where = {s: d.text for d in reversed(tape.sizes.dynamic) for s in d.expr.free_symbols}
    differentiated = tuple([primals[i] for i, is_reached in zip(by, reached, strict=True) if is_reached])
    return TracedProgram(tape, functional_tape(tape), joint), differentiated


def _like(factory: FakeFactory, x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return example(x)
    size, stride = (tuple(map(example, numbers)) for numbers in (x.size(), x.stride()))
    return factory.fresh(size, stride, x.dtype, x.device, x.requires_grad)


class _InScopes(torch.fx.Interpreter):
    """Runs each node in a scope of its name, by which its op and those of its backward are known afterwards."""

    def run_node(self, n: torch.fx.Node) -> Any:
        with scope(n.name):
            return super().run_node(n)


def _place(graph: torch.fx.Graph, program: TracedProgram) -> None:
    """Give the nodes of a joint graph the metadata of the nodes of the forward that they belong to."""
    origins = {n.name: n for n in program.graph_module.graph.nodes}
    for node in graph.nodes:
        forward = forward_place(node)
        path = scope_path(node) if forward is None else forward[0]
        origin = origins.get(str(path).rpartition("/")[2])
        node.meta = {"val": node_value(node)}
        if origin is not None:
            node.meta |= {key: origin.meta[key] for key in KEPT_META if key in origin.meta}
        if forward is not None:
            call = 0 if origin is None else call_position(origin) or 0
            where = program.tape.root if origin is None else program.scope_of(origin)
            node.meta = {**node.meta, "custom": dict(node.meta.get("custom", {}))}
            node.meta["fwd_nn_module_stack"] = node.meta.pop("nn_module_stack", {})
            set_place(node, program.tape.root.path, 0, Phase("backward", call, where))
