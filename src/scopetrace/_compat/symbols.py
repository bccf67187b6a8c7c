"""Symbolic sizes as graph nodes: `sym_size` of a tensor, and arithmetic on those, made where an op needs them."""

from __future__ import annotations

import operator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import OptimizedPythonReferenceAnalysis
from torch.utils._sympy.symbol import SymT, symbol_is_type

_UNBACKED = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)
Symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)


class SymbolNodes:
    """Nodes of `graph` for symbolic expressions. Each expression has one node."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._graph = graph
        self._tracer = GraphAppendingTracer(graph)
        self._nodes: dict[Any, torch.fx.Node] = {}
        self._sizes: dict[sympy.Symbol, tuple[torch.fx.Node, int]] = {}

    def learn_number(self, number: Any, node: torch.fx.Node) -> None:
        """`node` gives the symbolic number."""
        self._nodes.setdefault(number.node.expr, node)

    def learn_sizes(self, fake: torch.Tensor, node: torch.fx.Node) -> None:
        """The sizes of the tensor that `node` gives can be asked for."""
        for dim, size in enumerate(fake.size()):
            if isinstance(size, torch.SymInt):
                self._sizes.setdefault(size.node.expr, (node, dim))

    def node_of(self, number: Any) -> Any:
        """The node that gives `number`; a plain Python number when it is constant."""
        expr = number.node.expr
        if expr.is_number:
            return number.node.pytype(expr)
        found = self._node(expr)
        found.meta.setdefault("val", number)
        return found

    def assert_deferred(self, shape_env: Any) -> None:
        """Put the conditions on data that tracing took for true into the graph, as torch.export does."""
        asserts = [a for group in shape_env.deferred_runtime_asserts.values() for a in group] if shape_env else []
        for found in asserts:
            if all(s in self._nodes or s in self._sizes for s in found.expr.free_symbols):
                condition = self._node(found.expr)
                self._graph.call_function(
                    torch.ops.aten._assert_scalar.default, (condition, f"Runtime assertion failed: {found.expr}")
                )

    def _node(self, expr: Any) -> torch.fx.Node:
        found = self._nodes.get(expr)
        if found is None:
            for symbol in sorted(expr.free_symbols, key=str):
                self._symbol(symbol)
            proxies = {s: torch.fx.Proxy(self._nodes[s], self._tracer) for s in expr.free_symbols}
            result = sympy_interp(OptimizedPythonReferenceAnalysis, proxies, expr)
            found = self._nodes[expr] = result.node
        return found

    def _symbol(self, symbol: sympy.Symbol) -> None:
        if symbol in self._nodes:
            return
        if symbol not in self._sizes:
            self._nodes[symbol] = self._root(symbol)
            return
        self._nodes[symbol] = self._size(*self._sizes[symbol])

    def _root(self, symbol: sympy.Symbol) -> torch.fx.Node:
        """The node of a symbol of which only `a * symbol + b` is the size of something, as derived dims have it."""
        expr = next(e for e in self._sizes if e.free_symbols == {symbol} and sympy.Poly(e, symbol).degree() == 1)
        a, b = sympy.Poly(expr, symbol).all_coeffs()
        node = self._size(*self._sizes[expr])
        if b:
            node = self._graph.call_function(operator.sub, (node, int(b)))
        return self._graph.call_function(operator.floordiv, (node, int(a)))

    def _size(self, tensor: torch.fx.Node, dim: int) -> torch.fx.Node:
        node = self._graph.create_node(
            "call_function", torch.ops.aten.sym_size.int, (tensor, dim), {}, name="sym_size_int"
        )
        node.meta["val"] = tensor.meta["val"].size(dim)
        return node


def number_text(number: Any) -> str:
    """A symbolic number with the names of the Dims in it: `2*batch`."""
    env = number.node.shape_env
    return expression_text(number.node.expr, getattr(env, "names", {}))


def expression_text(expr: Any, names: dict[Any, str]) -> str:
    """An expression with these names for its symbols."""
    known = {s: sympy.Symbol(names[s], integer=True) for s in getattr(expr, "free_symbols", ()) if s in names}
    return str(expr.xreplace(known)) if known else str(expr)


def bare(numbers: Any) -> Any:
    """A size, or a tuple of sizes, with expressions for symbolic ones: they compare and hash without a guard."""
    if isinstance(numbers, (tuple, list)):
        return tuple([n if type(n) is int else bare(n) for n in numbers])
    return numbers.node.expr if isinstance(numbers, Symbolic) else numbers


def surely_equal(a: Any, b: Any) -> bool:
    """Whether two sizes are equal whatever the values of their symbols; asks nothing of the shape environment."""
    if type(a) is int and type(b) is int:
        return a == b
    x, y = bare(a), bare(b)
    return bool(x == y or sympy.expand(x - y) == 0)


def is_static(numbers: Any) -> bool:
    """Whether all are plain numbers."""
    return all(isinstance(n, int) for n in numbers)


def expanded(expr: Any) -> Any:
    """The form that equal polynomials have in common."""
    return sympy.expand(expr)


def exact_quotient(a: Any, b: Any) -> Any:
    """`a / b` for products of sizes, as a size; None where it is not a product of whole numbers and symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    expr = sympy.cancel(bare(a) / bare(b))
    if expr.is_Integer:
        return int(expr)
    if not expr.is_polynomial() or not all(c.is_Integer for c in sympy.Poly(expr).coeffs()):
        return None
    env = (a if isinstance(a, torch.SymInt) else b).node.shape_env
    return env.create_symintnode(expr, hint=example(a) // example(b))


def example(number: Any) -> int:
    """The number in the example run; raises ValueError for one that depends on data."""
    if not isinstance(number, Symbolic):
        return int(number)
    if not number.node.has_hint():
        raise ValueError(f"{number} depends on data")
    return int(number.node.hint)


def has_unbacked(expr: Any) -> bool:
    """Whether an expression has a symbol whose value depends on data."""
    return not isinstance(expr, int) and any(symbol_is_type(s, _UNBACKED) for s in expr.free_symbols)


def symbols_of(number: Any) -> list[Any]:
    """The symbols in a symbolic number, each as a SymInt."""
    node = number.node
    env = node.shape_env
    found = []
    for symbol in sorted(node.expr.free_symbols, key=str):
        hint = env.backed_var_to_val.get(symbol)
        found.append(env.create_symintnode(symbol, hint=None if hint is None else int(hint)))
    return found
