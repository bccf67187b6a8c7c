"""Symbolic sizes: a ShapeEnv that records what tracing assumed of them, and torch.export's forms of `dynamic_shapes`.

dynamic_shapes -> DimSpec -> a symbol in the WatchedShapeEnv -> SymInts in the sizes of fake tensors
arithmetic and comparisons on these -> guards, and records of what the trace relies on
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import dis
import logging
import operator
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._guards import Source
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.dynamic_shapes import Dim, _DerivedDim, _DimHint, _DimHintType
from torch.fx.experimental import _config
from torch.fx.experimental.sym_node import _NO_HINT, SymNode
from torch.fx.experimental.symbolic_shapes import (  # type: ignore[attr-defined]
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    ShapeGuard,
    SLoc,
    StrictMinMaxConstraint,
    ValueRangesSLoc,
)
from torch.utils._sympy.functions import FloatTrueDiv, FloorDiv, IntTrueDiv, Max, Min, ToFloat
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.solve import try_solve
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from scopetrace._compat.symbols import Symbolic
from scopetrace.sources import NOT_THE_MODEL, SCOPETRACE, SYMPY, TORCH, TORCH_DIRECTORY, prefixes

_MACHINERY = (
    *prefixes(TORCH_DIRECTORY, "fx/", "__init__.py", "_guards.py", "utils/"),
    *SYMPY,
    *prefixes(Path(__file__).parent, "shape_env.py"),
)
_TORCH_INIT = prefixes(TORCH_DIRECTORY, "__init__.py")
_TORCH_NN = prefixes(TORCH_DIRECTORY, "nn/")

Origin = dict[str, str | None]


_NOWHERE = SLoc("", "")
_nobody: Callable[[], Any] = type(None)
"""Gives None, as a weak reference does to what is gone."""


@dataclasses.dataclass(frozen=True)
class Assumption:
    """That a symbol has, or has not, a value: a number or another symbol."""

    symbol: sympy.Symbol
    value: Any
    place: Origin
    """Where the model made it so, or took a branch that a symbol of this value might not take."""


def sym_node(env: Any, expr: Any, pytype: type, hint: Any) -> SymNode:
    """The node of an expression; `hint` is None where the value depends on data."""
    return SymNode(expr, env, pytype, _NO_HINT if hint is None else hint)


# The shape environment -----------------------------------------------------------------------------------------------


class WatchedShapeEnv(ShapeEnv):
    """A ShapeEnv that records where a size became fixed, and which branches assume that a size is neither 0 nor 1.

    torch traces with every symbolic size at least 2. The ops of such a graph are right for sizes 0 and 1 too, but if
    the model's Python branches on a size, the branch for 0 or 1 is not in the graph.
    """

    def __init__(self) -> None:
        super().__init__(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True, trace_asserts=True)
        self.fixed: list[Assumption] = []
        """The trace holds only where these symbols equal their values."""
        self.assumed: dict[tuple[sympy.Symbol, int], Assumption] = {}
        """The trace holds only where these do not."""
        self.smallest: dict[sympy.Symbol, int] = {}
        """The least value of a symbol, where `dynamic_shapes` allows 0 or 1."""
        self.narrow: dict[sympy.Symbol, Any] = {}
        """The range of a symbol that is at most 2, which is wider to torch: see `new_symbol`."""
        self.names: dict[sympy.Symbol, str] = {}
        """The names of symbols for users: those of their Dims."""
        self.live_numbers: dict[sympy.Symbol, float] = {}
        """Symbols that stand for numbers of Python which a call reads anew, with their values in the trace."""
        self.asked: dict[sympy.Expr, tuple[Any, Any]] = {}
        """What Python asked of `live_numbers` alone: the answer, and the frames."""
        self.takes_small_examples = bool(_config.backed_size_oblivious)
        """Whether torch treats sizes 0 and 1 of the example as any others."""
        self._recorder: Callable[[], Any] = _nobody
        self._decider: Callable[[], Any] = _nobody
        self._answers: dict[sympy.Expr, Any] = {}
        self._other_for_small: dict[sympy.Expr, list[tuple[sympy.Symbol, int]]] = {}
        """By condition, the symbols with values below 2, which are allowed, for which the answer is another one."""

    def watch(self, recorder: Any, decider: Any = None) -> None:
        """Ask `recorder.where()` what is running, and `decider.data.decide(expr)` for values that depend on data.

        The decider gives the value and the error message of a call with another one; without these, torch raises.
        Both are held weakly. A fake tensor leads to its environment, and autograd's C++ graph holds fake tensors: a
        strong reference to what holds the tape would be a cycle that Python's garbage collector cannot see.
        """
        self._recorder = weakref.ref(recorder)
        self._decider = _nobody if decider is None else weakref.ref(decider)

    def place(self) -> Origin:
        """The module and source line that are running; nothing after the recording."""
        recorder = self._recorder()
        return {} if recorder is None else recorder.where()

    def _set_replacement(self, a: Any, tgt: Any, msg: str) -> None:
        before = self.replacements.get(a)
        super()._set_replacement(a, tgt, msg)
        if self.replacements.get(a) != before:
            self.fixed.append(Assumption(a, tgt, self.place()))

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """Torch's, except that the decider says, with a runtime assert, what depends on data."""
        if self.narrow and not self.narrow.keys().isdisjoint(orig_expr.free_symbols):
            limits = bound_sympy(orig_expr, self.narrow)
            if limits.is_singleton():
                return limits.lower
        if self.live_numbers and orig_expr.free_symbols and orig_expr.free_symbols <= self.live_numbers.keys():
            answer, recorder = evaluated(orig_expr, self.live_numbers), self._recorder()
            if recorder is not None:  # a decomposition may ask after the recording
                answer, _ = self.asked.setdefault(orig_expr, (answer, recorder.frames()))
            return sympy.sympify(answer)
        orig_expr = _without_bounds(orig_expr)
        try:
            return super().evaluate_expr(orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode as error:
            if super()._is_python_assert() and self.guard_or_defer_runtime_assert(sympy.Not(orig_expr), "assert not"):
                return sympy.false
            decider = self._decider()
            decision = None if decider is None else decider.data.decide(orig_expr)
            if decision is None:
                getattr(self._recorder(), "raised", []).append((error, None))  # who only rewrites a tape notes none
                raise
            value, message = decision
            if isinstance(value, bool):
                condition = orig_expr if value else sympy.Not(orig_expr)
            else:
                condition = sympy.Eq(orig_expr, value)
            if not self.guard_or_defer_runtime_assert(condition, message):
                raise
            return sympy.sympify(value)

    def _is_python_assert(self) -> bool:
        """Whether Python raises an AssertionError for False; that of an `assert not` it raises for True."""
        frame = self._get_user_frame()
        code = dis.get_instructions(frame.f_code)
        jumps = (i.opname for i in code if i.offset >= frame.f_lasti and "JUMP" in i.opname)
        return super()._is_python_assert() and not next(jumps, "").endswith("IF_FALSE")

    def _get_user_frame(self) -> Any:
        """The nearest frame outside torch and scopetrace, in which torch looks for an `assert`."""
        frame = super()._get_user_frame()
        while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_THE_MODEL):
            frame = frame.f_back
        return frame

    def evaluate_sym_node(self, sym_node: Any, size_oblivious: bool = False, fallback_value: bool | None = None) -> Any:
        """Torch's, with a cache: the first answer made a guard, so that it holds for the rest of the trace.

        Records the answers that another size below 2 would change, where the model's Python asks.
        """
        expr = sym_node.expr
        answer = self._answers.get(expr)
        if answer is None:
            answer = super().evaluate_sym_node(sym_node, size_oblivious, fallback_value)
            if sym_node.hint is None or size_oblivious or self._suppress_guards_tls():
                return answer
            self._answers[expr] = answer
            if self.smallest and answer in (True, False, sympy.true, sympy.false):
                self._other_for_small[expr] = [
                    (symbol, value)
                    for symbol in expr.free_symbols
                    for value in range(self.smallest.get(symbol, 2), 2)
                    if self._differs(expr, symbol, value, bool(answer))
                ]
        small = self._other_for_small.get(expr, ())
        if any(key not in self.assumed for key in small) and _asked_by_the_model():
            for symbol, value in small:
                self._assume_not(symbol, value)
        return answer

    def _assume_not(self, symbol: sympy.Symbol, value: int, place: Origin | None = None) -> None:
        if (symbol, value) not in self.assumed:
            self.assumed[symbol, value] = Assumption(symbol, value, self.place() if place is None else place)
            self.add_guard(sympy.Ne(symbol, value, evaluate=False))

    def add_guard(self, condition: Any) -> None:
        """Add a condition on symbols to the guards, unless it is there."""
        if all(guard.expr != condition for guard in self.guards):
            self.guards.append(ShapeGuard(condition, _NOWHERE, False))

    def _differs(self, expr: Any, symbol: sympy.Symbol, value: int, answer: bool) -> bool:
        """Whether the answer changes when `symbol` has this value and other symbols their example values."""
        if not expr.free_symbols <= self.backed_var_to_val.keys():
            return False
        values = {s: int(self.backed_var_to_val[s]) for s in expr.free_symbols} | {symbol: value}
        try:
            return bool(evaluated(expr, values)) != answer
        except ZeroDivisionError:
            return True

    def restore(self, guards: list[Any], **state: Any) -> None:
        """Set the state of another environment: conditions, and attributes by name."""
        vars(self).update(state)
        # each with places of its own: where an op refines a bound, torch notes its place in this
        self.var_to_range_sloc = {symbol: ValueRangesSLoc(_NOWHERE, _NOWHERE) for symbol in self.var_to_range}
        self._update_version_counter()
        self.guards = []
        for condition in guards:
            self.add_guard(condition)

    def copied(self) -> WatchedShapeEnv:
        """Another environment with these symbols, and what is known of them."""
        new = copy.copy(self)
        vars(new).update({name: copy.copy(x) for name, x in vars(self).items() if isinstance(x, (dict, list, set))})
        return new

    @contextlib.contextmanager
    def unchanged(self, where_it_raises: bool = False) -> Iterator[None]:
        """What is assumed of sizes inside is forgotten after it, or only after an error."""
        before = vars(self.copied())
        keeps = False
        try:
            yield
            keeps = where_it_raises
        finally:
            if not keeps:
                counts = self._version_counter, self._replacements_version_counter
                vars(self).update(before)
                self._version_counter, self._replacements_version_counter = (n + 1 for n in counts)  # caches know them
                for function in vars(ShapeEnv).values():  # answers that made guards
                    getattr(function, "cache_clear", int)()

    def take_for_more_than_one(self, size: Any, place: Origin | None = None) -> None:
        """Record that the program holds where this size is not 1, for an op at `place`; None: that runs now.

        Where it is 1 in the example, the program holds for that. What depends on data, and is 1, is an error of a call.
        """
        expr = size.node.expr
        if size.node.has_hint() and size.node.hint == 1:
            return
        for symbol in expr.free_symbols:
            if self.smallest.get(symbol, 2) < 2 and self._differs(sympy.Eq(expr, 1), symbol, 1, False):
                self._assume_not(symbol, 1, place)
        is_backed = expr.free_symbols <= self.backed_var_to_val.keys()
        if is_backed and bound_sympy(expr, self.var_to_range).lower <= 1:
            self.add_guard(sympy.Ne(expr, 1, evaluate=False))
        if not is_backed and place is None:
            torch._check(size != 1)

    def take_for_defined(self, number: Any) -> None:
        """Record that the program holds where no divisor in this number is 0: Python would raise, where C++ divides."""
        for quotient in number.node.expr.atoms(FloatTrueDiv, IntTrueDiv):
            divisor = sympy.nsimplify(quotient.args[1].replace(ToFloat, lambda n: n), rational=True)
            if divisor.free_symbols and divisor.free_symbols <= self.backed_var_to_val.keys():
                self.add_guard(sympy.Ne(divisor, 0, evaluate=False))


def _without_bounds(expr: Any) -> Any:
    """An equal relation, without the numbers of a `Min` or `Max` that cannot decide it: `n < 2` for `Min(4, n) < 2`.

    torch takes what it can solve, such as `n - 1 == 1`, for a fixed size.
    """
    if not isinstance(expr, sympy.Rel) or not isinstance(expr.lhs, (Min, Max)) or not expr.rhs.is_number:
        return expr
    goes = operator.gt if isinstance(expr.lhs, Min) else operator.lt
    kept = [a for a in expr.lhs.args if not (a.is_number and goes(a, expr.rhs))]
    return expr.func(type(expr.lhs)(*kept), expr.rhs) if 0 < len(kept) < len(expr.lhs.args) else expr


def _asked_by_the_model() -> bool:
    """Whether a comparison is evaluated for Python code of the model, or of torch.nn, rather than for an op.

    Python evaluates a SymBool, whose `__bool__` is in `torch/__init__.py`; C++ calls the SymNode directly.
    """
    frame = sys._getframe(2)  # the caller of evaluate_sym_node
    by_python = False
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        by_python = by_python or file in _TORCH_INIT
        if not by_python and not file.startswith(_MACHINERY):
            return False
        if not file.startswith(_MACHINERY) and "<string>" not in file:
            return not file.startswith((*TORCH, *SCOPETRACE)) or file.startswith(_TORCH_NN)
        frame = frame.f_back
    return False


@dataclasses.dataclass(frozen=True)
class SizeSource(Source):
    """The source of a symbol, written as in the guards of an ExportedProgram: `L['x'].size()[0]`."""

    code: str

    @property
    def _name_template(self) -> str:
        return self.code


def source_of_input(path: str) -> str:
    """The argument at a path such as `cache[0]`, as guards of an ExportedProgram write it: `L['cache'][0]`."""
    root = re.match(r"\w*", path)
    assert root is not None
    return f"L[{root[0]!r}]{path[root.end() :]}"


def source_of_size(path: str, dim: int | None = None) -> str:
    """The size of an argument, or a number, as guards write it: `L['x'].size()[0]`."""
    return source_of_input(path) + ("" if dim is None else f".size()[{dim}]")


def _source(path: str, dim: int | None = None, derive: Callable[[Any], Any] | None = None) -> SizeSource:
    code = source_of_size(path, dim)
    if derive is not None:  # torch.export derives by linear functions with integer coefficients
        offset = int(derive(sympy.Integer(0)))
        factor = int(derive(sympy.Integer(1))) - offset
        code = f"(({code} - {offset}) // {factor})"
    return SizeSource(code)


def new_symbol(env: WatchedShapeEnv, value: int, path: str, dim: int, spec: DimSpec) -> sympy.Symbol:
    """A new symbol for the size of dimension `dim` of the argument at `path`, or for the root that it is derived from.

    `value` is its value in the example inputs.
    """
    lower, small = spec.lower, env.takes_small_examples
    least = lower if small else max(2, lower)
    # torch makes a number of a symbol with one value, so the range has two where `spec` allows 2, or less, only.
    limits = ValueRanges(least, int_oo if spec.upper is None else max(spec.upper, least + 1))
    constraint = StrictMinMaxConstraint(warn_only=False, vr=limits)
    source = _source(path, dim, spec.derive)
    symbol = env.create_symbol(value, source, DimDynamic.DYNAMIC, constraint, do_not_specialize_zero_one=small)
    if lower < 2:
        env.smallest[symbol] = lower
    if spec.upper is not None and spec.upper < limits.upper:
        env.narrow[symbol] = ValueRanges(lower, spec.upper)
    return symbol


ANY_LOWER = -(2**63)
"""The least 64-bit integer, as a bound that is none."""


def new_number(env: WatchedShapeEnv, value: int, path: str, spec: DimSpec) -> sympy.Symbol:
    """A new symbol for the integer argument at `path`, which is `value` in the example inputs."""
    lower = -int_oo if spec.lower == ANY_LOWER else spec.lower
    limits = ValueRanges(lower, int_oo if spec.upper is None else spec.upper)
    constraint = StrictMinMaxConstraint(warn_only=False, vr=limits)
    return env.create_unspecified_symbol(value, _source(path), DimDynamic.DYNAMIC, constraint)


def new_size(env: WatchedShapeEnv, value: int, operand: int, dim: int | None) -> tuple[sympy.Symbol, Any]:
    """A new symbol of any value from 0, for a dimension of an operand or for one that is a number, and its SymInt."""
    source = _source(f"operand_{operand}", dim)
    if dim is None:
        symbol = env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
    else:
        symbol = env.create_symbol(value, source, DimDynamic.DYNAMIC, do_not_specialize_zero_one=True)
    return symbol, env.create_symintnode(symbol, hint=value)


class FreshFakes:
    """Makes fake tensors like others, in a mode and shape environment of its own.

    torch knows a symbol by the first tensor that has it as a size. Graphs side by side that must not read each other's
    tensors need symbols of their own, so each symbol has a `realm`: any hashable value, one for each such graph.
    """

    def __init__(self) -> None:
        self._env = WatchedShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._env)
        self._symbols: dict[tuple[Any, sympy.Symbol], sympy.Symbol] = {}

    @property
    def origins(self) -> dict[str, sympy.Symbol]:
        """By name of a new symbol, the one that it replaces."""
        return {str(new): old for (_, old), new in self._symbols.items()}

    def like(self, realm: Any, value: Any) -> Any:
        """A contiguous tensor or a number like this one, with the symbols of the realm; other values as they are."""
        if isinstance(value, Symbolic):
            return self._number(realm, value)
        if not isinstance(value, torch.Tensor):
            return value
        sizes = [self._number(realm, n) for n in value.shape]
        with self._mode, torch.no_grad():
            return torch.empty(sizes, dtype=value.dtype, device=value.device)

    def _number(self, realm: Any, number: Any) -> Any:
        if not isinstance(number, torch.SymInt):
            return number
        env, expr = number.node.shape_env, number.node.expr
        new = {symbol: self._symbol(realm, symbol, env) for symbol in expr.free_symbols}
        hint = int(number.node.hint) if number.node.has_hint() else None
        return self._env.create_symintnode(expr.xreplace(new), hint=hint)

    def _symbol(self, realm: Any, old: sympy.Symbol, env: Any) -> sympy.Symbol:
        new = self._symbols.get((realm, old))
        if new is None:
            hint = env.backed_var_to_val.get(old)
            if hint is None:
                new = self._env.create_unbacked_symint().node.expr
                self._env.pending_fresh_unbacked_symbols.clear()
            else:
                new, _ = new_size(self._env, int(hint), len(self._symbols), 0)
            if old in env.var_to_range:
                self._env.var_to_range[new] = env.var_to_range[old]
            self._symbols[realm, old] = new
        return new


class _NumberArithmetic(PythonReferenceAnalysis):
    """Evaluates sympy on numbers. torch's class takes no sympy integers for `min` and `max`."""

    minimum = staticmethod(min)
    maximum = staticmethod(max)


def evaluated(expr: Any, values: dict[Any, Any]) -> Any:
    """The value of an expression for values of its symbols. Raises ZeroDivisionError."""
    was, _interpreter_log.disabled = _interpreter_log.disabled, True  # torch logs what it raises
    try:
        return sympy_interp(_NumberArithmetic, values, expr)
    finally:
        _interpreter_log.disabled = was


_interpreter_log = logging.getLogger("torch.utils._sympy.interp")


def solved(expr: Any, symbol: sympy.Symbol, value: int) -> int | None:
    """The integer value of `symbol` for which `expr == value`, or None."""
    solution = try_solve(sympy.Eq(expr, value), symbol)
    return None if solution is None or not solution[1].is_integer else int(solution[1])


def inverse(expr: Any, symbol: sympy.Symbol, value: sympy.Symbol) -> Any:
    """What `symbol` is where `expr` is `value`, rounded down; None where `expr` is not linear."""
    if expr.free_symbols != {symbol} or not expr.is_polynomial(symbol) or sympy.degree(expr, symbol) != 1:
        return None
    a, b = sympy.Poly(expr, symbol).all_coeffs()
    return FloorDiv(value - b, a) if (a, b) != (1, 0) else value


@dataclasses.dataclass(frozen=True)
class DimSpec:
    """One dynamic dimension in `dynamic_shapes`."""

    name: str | None
    """The name of the `Dim`, or of the root of a derived one; None for `Dim.AUTO` and `Dim.DYNAMIC`."""
    lower: int
    upper: int | None
    may_be_fixed: bool = False
    """`Dim.AUTO`: a model that requires one size makes the dimension static, and that is no error."""
    is_static: bool = False
    """`Dim.STATIC`: the size of the example, which has to be in the range."""
    may_be_equal: bool = False
    """A name given as a string: a model in which the dimension equals another one has one name for both."""
    derive: Callable[[Any], Any] | None = None

    @property
    def is_dim(self) -> bool:
        """Whether it is a `Dim`, or derived from one, which equals no other dimension."""
        return self.name is not None and not self.may_be_equal

    def root_of(self, size: int) -> int | None:
        """The value of the root for which the dimension has this size; None where there is none."""
        root = sympy.Symbol("root", integer=True)
        return size if self.derive is None else solved(self.derive(root), root, size)


def read_dim(dim: Any, least: int = 0) -> DimSpec | int | None:
    """One entry of `dynamic_shapes` in any of torch.export's forms; `least` is the lower bound where it says none.

    Returns a DimSpec for a dynamic dimension, or one with a range, an int for a size that the example must have, None
    for a static one.
    Raises TypeError for anything else.
    """
    if dim is None or isinstance(dim, (int, DimSpec)):
        return dim
    if isinstance(dim, str):
        return DimSpec(dim, least, None, may_be_equal=True)
    if isinstance(dim, _DerivedDim):
        root = dim.root
        return DimSpec(root.__name__, root.min, _bounded(root.max), derive=dim.fn)
    if isinstance(dim, Dim):
        return DimSpec(dim.__name__, dim.min, _bounded(dim.max))
    if isinstance(dim, _DimHint):
        lower, is_static = least if dim.min is None else dim.min, dim.type is _DimHintType.STATIC
        is_auto = dim.type is _DimHintType.AUTO
        return DimSpec(None, lower, _bounded(dim.max), may_be_fixed=is_auto, is_static=is_static)
    raise TypeError(f"{dim!r} is none of None, int, str, Dim, Dim.AUTO, Dim.DYNAMIC, Dim.STATIC")


def _bounded(upper: Any) -> int | None:
    return None if upper is None or upper == int_oo or upper > sys.maxsize // 2 else int(upper)


def ranges(bounds: dict[sympy.Symbol, tuple[int, int | None]]) -> dict[sympy.Symbol, ValueRanges[Any]]:
    """Bounds (lower, upper or None) by symbol, as `ExportedProgram.range_constraints` has them."""
    return {
        s: ValueRanges(-int_oo if lower == ANY_LOWER else lower, int_oo if upper is None else upper)
        for s, (lower, upper) in bounds.items()
    }
