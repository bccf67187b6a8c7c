"""A program in pieces that a backend of torch.compile compiles: each distinct one once.

Data flow:
    graph with calls of functions -> pieces: each call, and the runs of nodes between calls -> a graph that calls pieces
    pieces with equal bodies and equal operands -> one Piece, compiled once, with its backward where autograd is on
    operands at a call -> of the sizes and strides that the code is made for? -> the compiled code, else the body

Equal layers are one piece, as in torch's `nested_compile_region`. A backend compiles each as if it were a model of its
own, and autograd sees one op for each call of a piece, so that gradients cross pieces as they cross modules in eager.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx

from scopetrace._compat.compilers import COMPILING, Backend
from scopetrace._compat.graph_module import method_of, set_grad_enabled, switches_grad, without_grad_switches
from scopetrace._compat.ops import OpOverload
from scopetrace._compat.shape_env import new_size
from scopetrace._compat.symbols import Symbolic, all_hold, hint_of, to_expr
from scopetrace._compat.tensors import FakeFactory, without_dispatch
from scopetrace.containers.structure import leaves
from scopetrace.errors import CompileError
from scopetrace.ops.history import NOT_COMPILED
from scopetrace.program.outlined import OutlinedTrace, outline_calls
from scopetrace.record.dynamic_shapes import symbolic_strides

_CALL = torch.ops.higher_order.invoke_subgraph
BETWEEN = "between"
"""The name of pieces that are no functions."""
KEPT_META = ("custom", "nn_module_stack", "stack_trace")
"""What a backend gets of `node.meta`; values are made anew, in the environment of the examples."""


class Piece:
    """A graph that is compiled apart: once, and again where autograd follows operands that it did not follow before.

    Operands of other sizes or strides than the code is made for go through the graph, uncompiled. So do all of a graph
    with an op that needs autograd around it: compilers run a forward without, and record its backward beside it.

    Attributes:
        name: that of the function, or `"between"` for nodes between calls.
        body: the graph.
        calls: how often the program calls it.
        forms: what the backend made of it, by the positions of the operands that autograd follows.
    """

    def __init__(self, name: str, body: torch.fx.GraphModule, examples: Sequence[Any], backend: Backend) -> None:
        self.name = self.__name__ = name
        self.body, self.calls = body, 0
        self.forms: dict[frozenset[int], Callable[..., Any]] = {}
        self._inputs = _ExampleInputs(examples)
        self._can_be_compiled = self._inputs.are_known and not any(n.target in NOT_COMPILED for n in body.graph.nodes)
        self._backend = backend
        self._tensors = [i for i, x in enumerate(examples) if isinstance(x, torch.Tensor)]
        self._followed: dict[bool, set[int]] = {}
        self._form_of: dict[tuple[bool, ...], Callable[..., Any]] = {}
        """By which of the tensors among the operands require gradients."""

    def add_call(self, operands: Sequence[Any], grad: bool) -> None:
        """Count a call of the program, which has these operands in the trace, with autograd on or off."""
        self.calls += 1
        followed = self._followed.setdefault(grad, set())
        followed |= {i for i in self._tensors if grad and operands[i].requires_grad}

    def compile(self) -> None:
        """Compile the forms for all calls that the program has: one with autograd, one without. Raises CompileError."""
        if self._can_be_compiled:
            for followed in self._followed.values():
                self._form(frozenset(followed))

    def __call__(self, *operands: Any) -> Any:
        sizes = self._inputs.sizes_of(operands) if self._can_be_compiled else None
        if sizes is None:
            return self.body(*operands)
        require = tuple([operands[i].requires_grad for i in self._tensors]) if torch.is_grad_enabled() else ()
        form = self._form_of.get(require)
        if form is None:
            form = self._form_of[require] = self._form(frozenset(itertools.compress(self._tensors, require)))
        return form(*sizes, *operands)

    def _form(self, followed: frozenset[int]) -> Callable[..., Any]:
        """A form with gradients for these operands at least, whose other gradients autograd drops."""
        with COMPILING:
            if followed not in self.forms:
                wider = [form for others, form in self.forms.items() if followed and others >= followed]
                if wider:
                    return wider[0]
                self.forms[followed] = self._compile(followed)
            return self.forms[followed]

    def _compile(self, followed: frozenset[int]) -> Callable[..., Any]:
        graph = torch.fx.Graph()
        for i in range(len(self._inputs.sizes)):
            graph.placeholder(f"size_{i}")
        graph.output(graph.graph_copy(self.body.graph, {}))  # a backend may change what it gets
        for node in graph.nodes:
            node.meta = {key: node.meta[key] for key in KEPT_META if key in node.meta}
        module = torch.fx.GraphModule(self.body, graph, class_name=self.name)
        try:
            with torch.set_grad_enabled(bool(followed)):
                return self._backend(module, self._inputs.with_gradients(followed))
        except Exception as error:  # whatever a backend raises
            raise CompileError(
                f"the backend failed on {self.name}, called {self.calls}×: {type(error).__name__}: {error}",
                hint="leave it out with functions=, or compile with another backend",
            ) from error


class _ExampleInputs:
    """What a piece is compiled for: fake tensors and sizes, with an environment of their own.

    Compilers assume more of sizes than the trace does, and what they assume is checked at each call. Equal sizes of the
    trace are one symbol here; other relations between sizes are found by the compiler where it needs them.

    Attributes:
        are_known: False where sizes of operands depend on data, or an operand is no dense tensor: nothing is compiled.
        sizes: the symbolic sizes, which compiled code takes before the operands, as Dynamo's graphs do.
    """

    def __init__(self, examples: Sequence[Any]) -> None:
        self._factory = FakeFactory()
        self._symbols: dict[Any, tuple[Any, Any]] = {}  # symbol and SymInt, by size of the trace
        self._places: list[tuple[int, int | None]] = []  # operand and dimension, of each size
        self._static_strides = [_static_strides(x) for x in examples]
        self._strides: list[tuple[int, int, Any]] = []  # operand, dimension, expression; of the other operands
        self.are_known = all(map(_is_known, examples))
        self._fakes = [self._fake(i, x) for i, x in enumerate(examples)] if self.are_known else []
        self._checked: tuple[int, Callable[..., bool]] | None = None

    @property
    def sizes(self) -> list[Any]:
        return [size for _, size in self._symbols.values()]

    def with_gradients(self, followed: frozenset[int]) -> list[Any]:
        tensors = [x.detach() if isinstance(x, torch.Tensor) else x for x in self._fakes]
        return [*self.sizes, *(x.requires_grad_() if i in followed else x for i, x in enumerate(tensors))]

    def sizes_of(self, operands: Sequence[Any]) -> list[int] | None:
        """The values of `sizes`; None where compiled code is not right for operands of these sizes and strides."""
        if not self.are_known:
            return None
        for x, static in zip(operands, self._static_strides, strict=True):
            if static and x.stride() != static:
                return None
        if not self._places and not self._strides:
            return []
        guards = self._factory.shape_env.guards
        if self._checked is None or self._checked[0] != len(guards):
            self._checked = len(guards), self._check([guard.expr for guard in guards])
        sizes = [operands[i] if dim is None else operands[i].size(dim) for i, dim in self._places]
        strides = [operands[i].stride(dim) for i, dim, _ in self._strides]
        try:
            return sizes if self._checked[1](*sizes, *strides) else None
        except ZeroDivisionError:  # a guard divides by a size that is 0 in this call
            return None

    def _check(self, guards: list[Any]) -> Callable[..., bool]:
        """A function of sizes and strides: whether the strides follow from the sizes as in the examples, and guards."""
        symbols = [symbol for symbol, _ in self._symbols.values()]
        strides = [sympy.Symbol(f"stride_{i}", integer=True) for i in range(len(self._strides))]
        are_same = [sympy.Eq(n, expr) for n, (_, _, expr) in zip(strides, self._strides, strict=True)]
        return all_hold([*symbols, *strides], [*are_same, *guards])

    def _fake(self, i: int, example: Any) -> Any:
        if not isinstance(example, torch.Tensor):
            return self._size(i, None, example) if isinstance(example, torch.SymInt) else example
        sizes = [self._size(i, dim, n) for dim, n in enumerate(example.size())]
        hints = [[hint_of(n) for n in numbers] for numbers in (example.size(), example.stride())]
        like = torch.empty_strided(*hints, device="meta")
        with without_dispatch(), torch.no_grad():
            strides = symbolic_strides(like, sizes)
            if not self._static_strides[i]:
                self._strides += [(i, dim, to_expr(n)) for dim, n in enumerate(strides)]
            return self._factory.fresh(sizes, strides, example.dtype, example.device, False)

    def _size(self, i: int, dim: int | None, n: Any) -> Any:
        if type(n) is int:
            return n
        if to_expr(n) not in self._symbols:
            self._symbols[to_expr(n)] = new_size(self._factory.shape_env, hint_of(n), i, dim)
            self._places.append((i, dim))
        return self._symbols[to_expr(n)][1]


def _is_known(example: Any) -> bool:
    """Whether a compiler takes it: a dense tensor or number whose sizes are numbers or follow from those of inputs."""
    if not isinstance(example, torch.Tensor):
        return not isinstance(example, Symbolic) or (isinstance(example, torch.SymInt) and hint_of(example) is not None)
    is_dense = example.layout is torch.strided and not (example.is_conj() or example.is_neg())
    return is_dense and all(_is_known(n) for n in (*example.size(), *example.stride()))


def _static_strides(example: Any) -> tuple[int, ...]:
    if not isinstance(example, torch.Tensor) or example.layout is not torch.strided:
        return ()
    return tuple(example.stride()) if all(type(n) is int for n in example.stride()) else ()


Table = tuple[dict[str, Any], str]
"""Where a tensor is held: a dict, and the key in it."""


class Pieces:
    """The pieces of a program, and the function that calls them.

    Args:
        graph_module: the program, with calls of functions.
        backend: what compiles a piece.
        table_of: where the tensor behind a `get_attr` target is held; None for targets that are no tensors.
        grad: whether autograd is on where the program begins.
    """

    def __init__(
        self,
        graph_module: torch.fx.GraphModule,
        backend: Backend,
        table_of: Callable[[str], Table | None],
        *,
        grad: bool,
    ) -> None:
        self._graph_module, self._backend, self._grad = graph_module, backend, grad
        self._pieces: dict[Any, Piece] = {}
        self._graph = torch.fx.Graph()
        self._copies: dict[torch.fx.Node, torch.fx.Node] = {}
        self._held: list[Table] = []
        graph = graph_module.graph
        for node in graph.find_nodes(op="placeholder"):
            self._copies[node] = self._graph.node_copy(node)
        for node in graph.find_nodes(op="get_attr"):
            table = table_of(str(node.target))
            if table is not None:
                self._copies[node] = self._graph.placeholder(node.name)
                self._held.append(table)
        for nodes in _runs(graph, self._copies):
            self._add(nodes)
        self._run = method_of(self._graph, graph_module)

    def __call__(self, *inputs: Any) -> Any:
        """What the graph does, on the tensors that are held now."""
        return self._run(*inputs, *[table[name] for table, name in self._held])

    @functools.cached_property
    def in_other_grad_mode(self) -> Callable[..., Any] | None:
        """The same without the nodes that switch autograd on or off; None where a piece has some inside."""
        if any(switches_grad(piece.body) for piece in self.distinct):
            return None
        run = method_of(without_grad_switches(self._graph), self._graph_module)
        return lambda *inputs: run(*inputs, *[table[name] for table, name in self._held])

    @property
    def distinct(self) -> tuple[Piece, ...]:
        """The pieces, in the order of their first calls."""
        return tuple(self._pieces.values())

    def _add(self, nodes: list[torch.fx.Node]) -> None:
        first = nodes[0]
        if first.target is _CALL:
            name = str(first.all_input_nodes[0].target)
            self._copies[first] = self._call(name, name, getattr(self._graph_module, name), list(first.args[2:]))
        elif _is_compiled(first) or len(nodes) > 1:
            self._add_between(nodes)
        else:
            if first.target is set_grad_enabled:
                self._grad = bool(first.args[0])
            self._copies[first] = self._graph.node_copy(first, self._copies.__getitem__)

    def _add_between(self, nodes: list[torch.fx.Node]) -> None:
        inside = set(nodes)
        operands = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
        results = [node for node in nodes if not inside.issuperset(node.users)]
        graph = torch.fx.Graph()
        copies = {operand: graph.placeholder(f"operand_{i}") for i, operand in enumerate(operands)}
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[result] for result in results))
        body = torch.fx.GraphModule({}, graph, class_name=BETWEEN)
        call = self._call(BETWEEN, body.code, body, operands)
        for i, result in enumerate(results):
            self._copies[result] = self._graph.call_function(operator.getitem, (call, i))

    def _call(self, name: str, code: str, body: torch.fx.GraphModule, operands: list[Any]) -> torch.fx.Node:
        examples = [x.meta["val"] if isinstance(x, torch.fx.Node) else x for x in operands]
        piece = self._pieces.setdefault((code, *map(_kind, examples)), Piece(name, body, examples, self._backend))
        piece.add_call(examples, self._grad)
        return self._graph.call_function(piece, torch.fx.node.map_arg(tuple(operands), self._copies.__getitem__))


def _kind(example: Any) -> Any:
    if not isinstance(example, torch.Tensor):
        return type(example), str(example)
    shape = str(example.size()), str(example.stride()) if example.layout is torch.strided else example.layout
    return *shape, example.dtype, example.device


def without_single_ops(outlined: OutlinedTrace) -> OutlinedTrace:
    """The program with functions of at most one op, beside views, inline: they are compiled with what is around."""
    single = {call.record.position for f in outlined.functions if _is_single_op(f.graph) for call in f.calls}
    kept = {call for call in outlined.chosen if call.position not in single}
    return outline_calls(outlined.source, kept)


def _is_single_op(body: torch.fx.Graph) -> bool:
    inner = [node for node in body.nodes if node.op not in ("placeholder", "output")]
    ops = [node for node in inner if isinstance(node.target, OpOverload) and not node.target.is_view]
    drops_nothing = [node for node in ops if node.target is torch.ops.aten.dropout.default and not node.args[2]]
    return len(ops) - len(drops_nothing) < 2 and all(map(_is_compiled, inner))


def _runs(graph: torch.fx.Graph, inputs: Container[torch.fx.Node]) -> Iterator[list[torch.fx.Node]]:
    """The nodes beside inputs, in order: alone calls, and nodes that stay as they are; the others together."""
    between: dict[torch.fx.Node, None] = {}
    for node in graph.nodes:
        is_body = node.op == "get_attr" and all(u.target is _CALL and u.args[0] is node for u in node.users)
        if node in inputs or is_body:
            continue
        waits = not between.keys().isdisjoint(node.all_input_nodes)
        is_number = isinstance(node.meta.get("val"), Symbolic)
        if _is_compiled(node) or (waits and is_number):
            between[node] = None
            continue
        if between and (waits or not (is_number or node.op == "get_attr")):
            yield list(between)
            between = {}
        yield [node]


def _is_compiled(node: torch.fx.Node) -> bool:
    """Whether a node is an op that gives tensors, or one of its results."""
    if node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node):
        return _is_compiled(node.args[0])
    tensors = leaves(node.meta.get("val"), torch.Tensor)
    return bool(tensors and node.users) and isinstance(node.target, OpOverload) and node.target not in NOT_COMPILED
