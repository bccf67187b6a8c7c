"""Symbolic numbers as expressions, and as graph nodes: `sym_size` of a tensor, and arithmetic on these."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import CallMethodKey as CallMethodKey
from torch.fx.experimental.symbolic_shapes import ConvertIntKey, DivideByKey
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._pytree import GetAttrKey, MappingKey, SequenceKey
from torch.utils._sympy.functions import FloorDiv, Max
from torch.utils._sympy.interp import _run_sympy_handler, sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import OptimizedPythonReferenceAnalysis
from torch.utils._sympy.symbol import SymT, symbol_is_type

_UNBACKED = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)
METHODS = ("size", "stride", "storage_offset")
"""The methods that a CallMethodKey may name: those by which torch finds symbols in a tensor."""
BINDING_KEYS = (SequenceKey, MappingKey, GetAttrKey, CallMethodKey, ConvertIntKey, DivideByKey)
"""The classes of the keys that say where an unbacked symbol stands in the result of an op."""

Symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _called(fn: Callable[..., Any], x: Any, *args: Any) -> Any:
    """`fn(x, *args)`, as a node of the graph where `x` is a proxy."""
    is_proxy = isinstance(x, torch.fx.Proxy)
    return x.tracer.create_proxy("call_function", fn, (x, *args), {}) if is_proxy else fn(x, *args)


class _NodeArithmetic(OptimizedPythonReferenceAnalysis):
    """Evaluates sympy on graph nodes. torch's class has no conversion from float to int, which Inductor adds itself.

    It adds by `torch.sym_sum`, which `torch.export.save` does not know.
    """

    int_truediv = staticmethod(operator.truediv)
    round_decimal = staticmethod(functools.partial(_called, round))
    trunc_to_int = staticmethod(lambda x, dtype: _called(math.trunc, x))
    floor_to_int = staticmethod(lambda x, dtype: _called(math.floor, x))
    ceil_to_int = staticmethod(lambda x, dtype: _called(math.ceil, x))
    round_to_int = staticmethod(lambda x, dtype: _called(round, x))
    sym_sum = staticmethod(functools.partial(functools.reduce, operator.add))


class SymbolNodes:
    """Computes symbolic expressions in `graph`, one node for each, from the sizes and numbers that it is told of."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._graph = graph
        self._tracer = GraphAppendingTracer(graph)
        self._nodes: dict[Any, torch.fx.Node] = {}
        self._sizes: dict[sympy.Symbol, tuple[torch.fx.Node, int]] = {}
        self._replaced: dict[sympy.Symbol, tuple[torch.fx.Node, int]] = {}
        """Sizes by the symbols that they had before tracing found what these equal."""
        self._unbacked: dict[sympy.Symbol, tuple[torch.fx.Node, Any]] = {}
        self._asserted: set[Any] = set()

    def add_number(self, number: Any, node: torch.fx.Node) -> None:
        """Tell that the symbolic number is the result of `node`."""
        self._nodes.setdefault(number.node.expr, node)

    def add_sizes(self, fake: torch.Tensor, node: torch.fx.Node) -> None:
        """Tell that `fake` is the result of `node`, so that its sizes can be read there."""
        for dim, size in enumerate(fake.size()):
            if isinstance(size, torch.SymInt):
                self._sizes.setdefault(size.node.expr, (node, dim))
                self._replaced.setdefault(size.node._expr, (node, dim))

    def node_of(self, number: Any) -> Any:
        """The node that computes `number`, or a Python number if it is constant.

        Raises LookupError if the graph has nothing to compute it from.
        """
        expr = number.node.expr
        if _is_known(expr):
            return number.node.pytype(expr)
        node = self._node(expr)
        node.meta.setdefault("val", number)
        return node

    def has(self, number: Any) -> bool:
        """Whether there is a node for `number` already, or it is constant."""
        return number.node.expr in self._nodes or _is_known(number.node.expr)

    def add_unbacked(self, node: torch.fx.Node, bindings: Any) -> None:
        """Tell that `node` makes unbacked symbols. `bindings` has the key path of each in its result."""
        for symbol, path in bindings.items():
            self._unbacked[symbol] = node, path
            if path == (ConvertIntKey(),):  # a bool: its symbol is 0 or 1
                self._nodes.setdefault(sympy.Eq(symbol, 1), node)

    def assert_facts(self, shape_env: Any, symbols: Any, messages: Container[str]) -> None:
        """Assert in the graph what tracing assumed of unbacked symbols, as torch.export does.

        The messages are torch.export's, except for assertions whose own message is among `messages`.
        """
        for symbol in symbols:
            facts = shape_env.deferred_runtime_asserts.get(symbol, ())
            parts = [(part, fact.msg) for fact in facts for part in self._parts(fact.expr)]
            for expr, message in parts:
                if not all(map(self._gives, expr.free_symbols)):
                    continue  # about a symbol inside an op, which is in no result
                if message in messages or not _is_looser(expr, [other for other, _ in parts]):
                    self.assert_condition(expr, message if message in messages else None)

    def _parts(self, expr: Any) -> Iterator[Any]:
        """What a condition consists of, so that a message names what failed; a number is two limits, as in torch."""
        for part in sympy.And.make_args(expr):
            is_number = isinstance(part, sympy.Eq) and part.lhs.is_symbol and part.rhs.is_number
            is_limits = is_number and part not in self._nodes
            yield from (sympy.Ge(*part.args), sympy.Le(*part.args)) if is_limits else (part,)

    def assert_condition(self, expr: Any, message: str | None = None) -> None:
        """Assert in the graph that a condition holds, with torch.export's message if there is none."""
        self._asserted.add(expr)
        condition = self._node(expr)
        shown = expr.reversed if _limit(expr) and expr.lhs.is_number else expr
        said = message or f"Runtime assertion failed for expression {shown} on node '{condition}'"
        self._graph.call_function(torch.ops.aten._assert_scalar.default, (condition, said))

    def is_asserted(self, condition: Any) -> bool:
        """Whether a condition is symbolic, and always holds or is asserted by the graph already."""
        expr = condition.node.expr if isinstance(condition, torch.SymBool) else sympy.false
        turned = expr.reversed if expr.is_Relational else expr
        return expr == sympy.true or not self._asserted.isdisjoint((expr, turned))

    def _node(self, expr: Any) -> torch.fx.Node:
        node = self._nodes.get(expr)
        if node is None and isinstance(expr, sympy.Ne) and sympy.Eq(*expr.args) in self._nodes:
            node = self._nodes[expr] = self._graph.call_function(torch.sym_not, (self._nodes[sympy.Eq(*expr.args)],))
        if node is None:
            is_known = all(self._gives(s) or s in self._replaced for s in expr.free_symbols)
            parts = {} if is_known else dummy_symbols((*self._sizes, *self._nodes))
            rest = expr.xreplace(parts)
            nodes = {d: self._part(part) for part, d in parts.items() if d in rest.free_symbols}
            nodes |= {s: self._part(s) for s in sorted(rest.free_symbols - nodes.keys(), key=str)}
            proxies = {symbol: torch.fx.Proxy(node, self._tracer) for symbol, node in nodes.items()}
            node = self._nodes[expr] = self._computed(rest, proxies).node
        return node

    def _computed(self, expr: Any, proxies: dict[Any, Any]) -> Any:
        """The proxy, or the constant, of an expression; a part that was computed before is not computed again."""
        if expr.is_Atom:
            return sympy_interp(_NodeArithmetic, proxies, expr)
        if expr not in self._nodes:
            taken = [-part for part in expr.args if part.is_Mul and part.args[0].is_negative] if expr.is_Add else []
            if taken and not (rest := expr + sympy.Add(*taken)).is_number:  # `a - 3 * b`, not `a + -3 * b`
                proxy = self._computed(rest, proxies) - self._computed(sympy.Add(*taken), proxies)
            else:
                args = [self._computed(arg, proxies) for arg in expr.args]
                proxy = _run_sympy_handler(_NodeArithmetic, args, expr)
            if not isinstance(proxy, torch.fx.Proxy):  # a constant, or a pair of value and condition in a Piecewise
                return proxy
            self._nodes[expr] = proxy.node
        return torch.fx.Proxy(self._nodes[expr], self._tracer)

    def _gives(self, symbol: sympy.Symbol) -> bool:
        return symbol in self._nodes or symbol in self._sizes or symbol in self._unbacked

    def _part(self, expr: Any) -> torch.fx.Node:
        """The node of a symbol, or of an expression that is itself the size of a tensor or a known number."""
        node = self._nodes.get(expr)
        if node is None:
            size = self._sizes.get(expr) or self._replaced.get(expr)
            if size is not None:
                node = self._size(*size)
            elif expr in self._unbacked:
                node = self._graph._resolve_unbacked_binding(*self._unbacked[expr], self.node_of)
            else:
                node = self._root(expr)
            self._nodes[expr] = node
        return node

    def _root(self, symbol: sympy.Symbol) -> torch.fx.Node:
        """The node of a symbol that is no size itself, from a size `a * symbol + b`, as derived Dims make them."""
        linear = (e for e in self._sizes if _is_linear(e, symbol))
        expr = next(linear, None)
        if expr is None:
            raise LookupError(f"no input or result of this graph has the size {symbol}")
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


def dummy_symbols(known: Iterable[Any]) -> dict[Any, sympy.Symbol]:
    """A dummy symbol for each integer expression that is not a symbol, to be substituted in larger expressions."""
    return {e: sympy.Dummy(integer=True) for e in known if getattr(e, "is_integer", False) and not e.is_Atom}


def number_text(number: Any) -> str:
    """A symbolic number as text, with the names of Dims for its symbols: `2*batch`."""
    env = number.node.shape_env
    return expression_text(number.node.expr, getattr(env, "names", {}))


def _limit(expr: Any) -> tuple[Any, bool, Any] | None:
    """Of a limit of one symbol, `u0 >= 4` or `4 <= u0`: the symbol, whether it is a lower limit, and the number."""
    if not isinstance(expr, (sympy.Ge, sympy.Le)):
        return None
    expr = expr.reversed if expr.lhs.is_number else expr
    is_limit = expr.lhs.is_symbol and expr.rhs.is_number
    return (expr.lhs, isinstance(expr, sympy.Ge), expr.rhs) if is_limit else None


def _is_looser(expr: Any, others: list[Any]) -> bool:
    """Whether one of the other limits of the same symbol says more."""
    limit = _limit(expr)
    if limit is None:
        return False
    symbol, is_lower, number = limit
    same = [n for s, lower, n in filter(None, map(_limit, others)) if s == symbol and lower == is_lower]
    return any(n > number if is_lower else n < number for n in same)


def expression_text(expr: Any, names: dict[Any, str]) -> str:
    """An expression as text, with these names for its symbols."""
    named = {s: sympy.Symbol(names[s], integer=True) for s in getattr(expr, "free_symbols", ()) if s in names}
    return str(expr.xreplace(named)) if named else str(expr)


python_text: Callable[[Any], str] = PythonPrinter().doprint
"""A condition as Python code, as the guards of an ExportedProgram are written: `x == 1 + y`."""


def named_text(expr: Any, names: dict[Any, str]) -> str:
    """As `python_text`, with these names for symbols, and numbers as Python writes them."""
    names = names | {number: repr(float(number)) for number in expr.atoms(sympy.Float)}
    return python_text(expr.xreplace({part: sympy.Symbol(name) for part, name in names.items()}))


def all_hold(symbols: Sequence[sympy.Symbol], conditions: Iterable[Any]) -> Callable[..., bool]:
    """A function of the values of `symbols`, whether all conditions hold, in Python that torch.compile traces."""
    names = {symbol: sympy.Symbol(f"n{i}", integer=True) for i, symbol in enumerate(symbols)}
    tests = [f"({python_text(sympy.sympify(condition).xreplace(names))})" for condition in conditions]
    function: Callable[..., bool] = eval(
        f"lambda {', '.join(map(str, names.values()))}: bool({' and '.join(tests) or True})",
        {"math": math, "torch": torch},
    )
    return function


def to_expr(numbers: Any) -> Any:
    """A size or a tuple of sizes, with sympy expressions for symbolic ones, which compare and hash without a guard."""
    if isinstance(numbers, (tuple, list)):
        return tuple([n if type(n) is int else to_expr(n) for n in numbers])
    return numbers.node.expr if isinstance(numbers, Symbolic) else numbers


def hint_of(n: Any) -> Any:
    """The value of a number in the example; None where it depends on data."""
    return n if not isinstance(n, Symbolic) else n.node.hint if n.node.has_hint() else None


def surely_equal(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for all values of their symbols. Adds no guard."""
    if type(a) is int and type(b) is int:
        return a == b
    x, y = to_expr(a), to_expr(b)
    return bool(x == y) or difference(x, y) == 0


def difference(a: Any, b: Any) -> int | None:
    """`a - b` if that is the same number for all values of the symbols, else None. Adds no guard."""
    return _difference(to_expr(a), to_expr(b))


@functools.lru_cache(4096)  # of immutable expressions
def _difference(a: Any, b: Any) -> int | None:
    terms = sympy.expand(a - b)
    return int(terms) if isinstance(terms, int) or terms.is_Integer else None


def without_floor(stride: Any, sizes: Sequence[Any]) -> Any:
    """The expression of a stride, with `size` for each `Max(1, size)`, which torch writes for empty tensors' sake."""
    expr = to_expr(stride)
    if not expr.has(Max):
        return expr
    return expr.xreplace({Max(1, n): n for n in sizes if not isinstance(n, int)})


def row_major_strides(size: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of a new contiguous tensor of this size."""
    return tuple(itertools.accumulate(reversed(size[1:]), operator.mul, initial=1))[::-1][: len(size)]


def is_static(numbers: Any) -> bool:
    """Whether none is symbolic."""
    return all(isinstance(n, int) for n in numbers)


@functools.lru_cache(4096)  # of immutable expressions
def expanded(expr: Any) -> Any:
    """The expanded form, in which equal polynomials are equal expressions."""
    return expr if isinstance(expr, int) else sympy.expand(expr)


def whole_quotient(a: Any, b: Any) -> Any:
    """`a / b` as a size, where the caller knows that `b` divides `a`; None if it is no simple expression."""
    if type(a) is int and type(b) is int:
        return a // b if b and a % b == 0 else None
    over, under = _ratio(to_expr(a), to_expr(b))
    if not under.is_Integer or under == 0:
        return None
    result = FloorDiv(over, under)
    if result.is_Integer:
        return int(result)
    env = next(n for n in (a, b) if isinstance(n, torch.SymInt)).node.shape_env
    return env.create_symintnode(result, hint=example(a) // example(b))


@functools.lru_cache(4096)  # of immutable expressions
def _ratio(a: Any, b: Any) -> tuple[Any, Any]:
    """Numerator and denominator of `a / b` in lowest terms; functions such as floor count as variables."""
    ratio = sympy.sympify(a) / sympy.sympify(b)
    terms = {term: sympy.Dummy(integer=True) for term in ratio.atoms(sympy.core.function.Application)}
    over, under = sympy.fraction(sympy.together(sympy.cancel(ratio.xreplace(terms))))
    back = {dummy: term for term, dummy in terms.items()}
    return over.xreplace(back), under.xreplace(back)


def example(number: Any) -> int:
    """The value for the example inputs; for an unbacked number, a made-up value."""
    if not isinstance(number, Symbolic):
        return int(number)
    if number.node.has_hint():
        return int(number.node.hint)
    expr, hints = number.node.expr, number.node.shape_env.backed_var_to_val
    numbers = {s: int("".join(c for c in s.name if c.isdigit()) or 0) for s in expr.free_symbols}
    # numbers that equal no other size: sizes are equal only if they always are
    return int(expr.xreplace({s: hints.get(s, 100_003 + 10_007 * n) for s, n in numbers.items()}))


def has_unbacked(expr: Any) -> bool:
    """Whether an expression has an unbacked symbol, one whose value depends on data."""
    return not isinstance(expr, int) and any(symbol_is_type(s, _UNBACKED) for s in expr.free_symbols)


def symbols_of(number: Any) -> list[Any]:
    """The symbols in a symbolic number, each as a SymInt."""
    node = number.node
    env = node.shape_env
    hints = [(s, env.backed_var_to_val.get(s)) for s in sorted(node.expr.free_symbols, key=str)]
    return [env.create_symintnode(s, hint=None if hint is None else int(hint)) for s, hint in hints]


def _is_linear(expr: Any, symbol: sympy.Symbol) -> bool:
    """Whether an expression is `a * symbol + b` with integers a and b."""
    poly = expr.as_poly(symbol) if expr.free_symbols == {symbol} else None  # None for a floor division
    return poly is not None and poly.degree() == 1 and all(c.is_Integer for c in poly.all_coeffs())


def _is_known(expr: Any) -> bool:
    return bool(expr.is_number or expr in (sympy.true, sympy.false))
