"""The conditions under which a trace holds: the sizes that a call may have, and the values that it is specialized on.

Data flow:
    dynamic_shapes, and what torch's ShapeEnv assumed in the recording -> SizeRules, checked at each call
    a value that Python looked at in the example run -> a Specialization, asserted by the graph
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from scopetrace._compat.shape_env import ANY_LOWER, DimSpec, WatchedShapeEnv, evaluated, inverse, ranges, solved
from scopetrace._compat.symbols import all_hold, expression_text, to_expr
from scopetrace.errors import DynamicShapeError, InputMismatchError
from scopetrace.formatting import Printed, columns, short_repr


@dataclasses.dataclass(frozen=True)
class DynamicInput:
    """A number that may differ from call to call: the size of an input tensor, or a whole number given as argument."""

    path: str
    """Where the tensor or number stands in the arguments."""
    index: int
    """Its position among the input tensors, or among the dynamic numbers."""
    dim: int | None
    """The dimension of the tensor; None for a number."""
    expr: Any
    """The sympy expression of it."""

    @property
    def text(self) -> str:
        """`x: dimension 0`, or `n`."""
        return self.path if self.dim is None else f"{self.path}: dimension {self.dim}"

    def value(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> int:
        """Its value in a call with these inputs."""
        return numbers[self.index] if self.dim is None else tensors[self.index].size(self.dim)


@dataclasses.dataclass
class SizeRules:
    """Which sizes and numbers a call may have. `check` raises for others."""

    env: WatchedShapeEnv
    """torch's guards, and what Python read of the symbols."""
    dynamic: list[DynamicInput] = dataclasses.field(default_factory=list)
    specs: dict[Any, DimSpec] = dataclasses.field(default_factory=dict)
    """By symbol, what `dynamic_shapes` says of it."""
    where: dict[Any, str] = dataclasses.field(default_factory=dict)
    """By symbol, the first input that has it: `x, dimension 0`."""
    dynamic_shapes: Any = None
    """The argument of this name, as it was given; None for a loaded trace."""

    def name(self, symbol: Any) -> str:
        """The name that a symbol has for the user: that of its Dim, else where it stands."""
        spec = self.specs.get(symbol)
        return (spec.name if spec is not None else None) or self.where.get(symbol, str(symbol))

    def bounds(self) -> dict[Any, tuple[int, int | None]]:
        """By symbol, the least and greatest size that a call may have."""
        bounds = {}
        for symbol, spec in self.specs.items():
            limits = self.env.var_to_range.get(symbol)
            lower, upper = spec.lower, spec.upper
            if limits is not None and limits.lower.is_Integer and (limits.lower > 2 or lower == ANY_LOWER):
                lower = max(lower, int(limits.lower))
            if limits is not None and limits.upper.is_Integer:
                upper = int(limits.upper) if upper is None else min(upper, int(limits.upper))
            bounds[symbol] = (lower, upper)
        return bounds

    def range_constraints(self) -> dict[Any, Any]:
        """By symbol, and expression of a derived Dim, torch's ValueRanges of the sizes that a call may have."""
        limits: dict[Any, Any] = {s: bounds for s, bounds in self.bounds().items() if self.env.replace(s) == s}
        for d, root in self.derived():
            if root in limits:
                lower, upper = (None if n is None else int(d.expr.subs(root, n)) for n in limits[root])
                limits[d.expr] = lower, upper
        return ranges(limits)

    def assumptions(self) -> list[Any]:
        """What tracing assumed of the sizes, as sympy conditions."""
        return [guard.expr for guard in self.env.guards]

    def inequalities(self) -> list[str]:
        """The relations between several sizes that tracing assumed, as text, but for `!=`."""
        relations = [e for e in self.assumptions() if e.is_Relational and e.rel_op not in ("==", "!=")]
        return [self._say(e) for e in relations if len(e.free_symbols) > 1]

    def derived(self) -> Iterator[tuple[DynamicInput, Any]]:
        """The sizes that have a derived Dim, such as `2*s + 1`, each with the symbol of its root."""
        return ((d, root) for d in self.dynamic if not d.expr.is_Symbol for root in d.expr.free_symbols)

    def check(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
        """Raise InputMismatchError, naming argument, dimension and rule, for sizes that were not captured."""
        sizes = [d.value(tensors, numbers) for d in self.dynamic]
        values = self._bind(sizes)
        for d, value in zip(self.dynamic, sizes, strict=True):
            want = int(evaluated(d.expr, values))
            if value != want:
                raise InputMismatchError(f"{d.text} is {value} and must be {self._say(d.expr)} = {want}")
        for symbol, (lower, upper) in self.bounds().items():
            size = values.get(symbol)
            if size is not None and (size < lower or (upper is not None and size > upper)):
                limit = f"at least {lower}" if size < lower else f"at most {upper}"
                raise InputMismatchError(f"{self._place(symbol)} is {size} and must be {limit}; trace again for it")
        for rule in self.env.assumed.values():
            if values.get(rule.symbol) == rule.value:
                raise InputMismatchError(
                    f"{self._place(rule.symbol)} is {rule.value}, for which the model goes another way, in "
                    f"{rule.place.get('module')} at {rule.place.get('source')}; trace again for this size"
                )
        for condition in self.assumptions():
            if condition.free_symbols <= values.keys() and not evaluated(condition, values):
                sizes_text = ", ".join(f"{self._place(s)} is {values[s]}" for s in condition.free_symbols)
                hint = ", or write math.trunc(n) for int(n), which fixes it" if "TruncToInt" in str(condition) else ""
                raise InputMismatchError(f"{sizes_text}: the trace holds for {self._say(condition)}; trace again{hint}")

    def all_hold(self) -> Callable[[Sequence[torch.Tensor], Sequence[int]], bool]:
        """Whether `check` raises nothing, as a function that torch.compile traces if the rules are of simple kinds."""
        sizes = [sympy.Symbol(f"n{i}", integer=True) for i in range(len(self.dynamic))]
        values: dict[Any, Any] = {}
        for d, n in sorted(zip(self.dynamic, sizes, strict=True), key=lambda pair: not pair[0].expr.is_Symbol):
            for symbol in d.expr.free_symbols - values.keys():
                root = inverse(d.expr, symbol, n)
                if root is None:
                    return lambda tensors, numbers: not self.check(tensors, numbers)  # type: ignore[func-returns-value]
                values[symbol] = root
        values |= {f.symbol: f.value.xreplace(values) for f in self.env.fixed if f.symbol not in values}
        conditions = [sympy.Eq(d.expr, n) for d, n in zip(self.dynamic, sizes, strict=True)]
        for symbol, (lower, upper) in self.bounds().items():
            conditions += [symbol >= lower] if upper is None else [symbol >= lower, symbol <= upper]
        conditions += [sympy.Ne(rule.symbol, rule.value) for rule in self.env.assumed.values()]
        conditions += self.assumptions()
        hold = all_hold(sizes, [c.xreplace(values) for c in conditions if c.free_symbols <= values.keys() | {*sizes}])
        return lambda tensors, numbers: hold(*[d.value(tensors, numbers) for d in self.dynamic])

    def values(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> Callable[[Any], Any]:
        """A function from symbolic numbers to their values in a call with these inputs."""
        values = self._bind([d.value(tensors, numbers) for d in self.dynamic])
        return lambda number: evaluated(to_expr(number), values)

    def _bind(self, sizes: list[int]) -> dict[Any, int]:
        """The values of the symbols where the dynamic sizes and numbers are these."""
        values: dict[Any, int] = {}
        for d, value in zip(self.dynamic, sizes, strict=True):
            if d.expr.is_Symbol:
                values.setdefault(d.expr, value)
        for d, value in zip(self.dynamic, sizes, strict=True):
            for symbol in d.expr.free_symbols - values.keys():
                root = solved(d.expr, symbol, value)
                if root is None:
                    raise InputMismatchError(f"{d.text} is {value} and must be of the form {self._say(d.expr)}")
                values[symbol] = root
        for fixed in self.env.fixed:
            if fixed.symbol not in values and fixed.value.free_symbols <= values.keys():
                values[fixed.symbol] = int(evaluated(fixed.value, values))
        return values

    def _place(self, symbol: Any) -> str:
        name = self.specs[symbol].name if symbol in self.specs else None
        where = self.where.get(symbol, str(symbol))
        return f"{where} ({name})" if name else where

    def _say(self, expr: Any) -> str:
        return expression_text(expr, {s: self.name(s) for s in expr.free_symbols})

    def _only_value(self, symbol: Any) -> Any:
        """The number that a guard such as `2*d - 12 == d` leaves for a symbol; None where there is no such guard."""
        for guard in self.env.guards:
            if guard.expr.is_Relational and guard.expr.rel_op == "==" and guard.expr.free_symbols == {symbol}:
                value = solved(guard.expr.lhs - guard.expr.rhs, symbol, 0)
                if value is not None:
                    return sympy.Integer(value)
        return None

    def narrowed(self) -> list[str]:
        """What the model takes of the range of a named Dim, for each of which it does not take all."""
        narrowed = []
        for symbol, (lower, upper) in self.bounds().items():
            spec = self.specs[symbol]
            more = max(lower, 2) > max(spec.lower, 2) or (
                upper is not None and (spec.upper is None or upper < spec.upper)
            )
            if spec.is_dim and more and self.env.replace(symbol) == symbol:
                limits = f"at least {lower}" + ("" if upper is None else f" and at most {upper}")
                narrowed.append(f"{self._place(symbol)} must be {limits} in this model, which is a part of its range")
        return narrowed

    def refuse_fixed(self) -> None:
        """Raise DynamicShapeError where the model fixed a size that `dynamic_shapes` says is dynamic.

        `Dim.AUTO`, `Dim.DYNAMIC` and names given as strings may equal other dimensions.
        """
        for symbol, spec in self.specs.items():
            if spec.lower == 1 and not spec.may_be_fixed and self.env.replace(symbol) == symbol:
                self._refuse_other_for_one(symbol)
        dims: dict[Any, Any] = {}  # by a symbol that is no Dim's, the Dim that equals it
        for symbol, spec in self.specs.items():
            only = self._only_value(symbol)
            expr = self.env.replace(symbol) if only is None else only
            if spec.may_be_fixed or not (expr.is_number or (spec.is_dim and _is_linear(expr))):
                continue
            if expr in self.specs and not self.specs[expr].is_dim:
                expr = dims.setdefault(expr, symbol)
            if expr != symbol and not (expr in self.specs and self.specs[expr].name == spec.name):
                self._refuse(symbol, expr)

    def _refuse_other_for_one(self, symbol: Any) -> None:
        """Raise DynamicShapeError where `dynamic_shapes` allows a size of 1, and the program does not hold for it."""
        rule = next((r for r in self.env.assumed.values() if r.symbol == symbol and r.value == 1), None)
        alone = (c for c in self.assumptions() if c.free_symbols == {symbol})
        holds = self.bounds()[symbol][0] <= 1 and all(evaluated(c, {symbol: 1}) for c in alone)
        if rule is not None or not holds:
            problem = f"{self._place(symbol)} may be 1 as dynamic_shapes has it, and the model goes another way for 1"
            hint = "write min=2, and trace once more, without dynamic_shapes there, for a size of 1"
            raise DynamicShapeError(problem, hint=hint, **{} if rule is None else rule.place)

    def name_equal(self) -> None:
        """Give dimensions that the model makes equal one name: that of a Dim, else the first. Warns of the other."""
        for symbol, spec in list(self.specs.items()):
            equal = self.env.replace(symbol)
            if not spec.name or equal == symbol or equal not in self.specs:
                continue
            other = self.specs[equal]
            kept, lost = (spec, other) if other.name is None or spec.is_dim else (other, spec)
            upper = min((n for n in (spec.upper, other.upper) if n is not None), default=None)
            self.specs[equal] = dataclasses.replace(kept, lower=max(spec.lower, other.lower), upper=upper)
            self.env.names[equal] = str(kept.name)
            if lost.name not in (None, kept.name):
                warnings.warn(  # in the words of torch.onnx, for which users may have filters
                    f"# The axis name: {lost.name} will not be used, since it shares the same shape constraints with "
                    f"another axis: {kept.name}.",
                    stacklevel=2,
                )

    def _refuse(self, symbol: Any, expr: Any) -> None:
        place = next((f.place for f in self.env.fixed if f.symbol == symbol), {})
        if expr.is_number:
            problem = f"{self._place(symbol)} was said to be dynamic, and the model fixes it at {expr}"
            hint = (
                f"write {expr} for it in dynamic_shapes, or Dim.AUTO to let the model decide; name the sizes of other "
                "inputs that must equal it, too; write n ** 0.5 for math.sqrt(n), math.trunc(n / 2) for int(n / 2)"
            )
        else:
            problem = f"{self._place(symbol)} must always be {self._say(expr)} in this model"
            hint = f"give both the same Dim, or say {self.name(symbol)} as {self._say(expr)} in dynamic_shapes"
        raise DynamicShapeError(problem, hint=hint, **place)


def _is_linear(expr: Any) -> bool:
    """Whether a derived Dim can say it: `2 * d + 1`."""
    return len(expr.free_symbols) == 1 and expr.diff(*expr.free_symbols).is_number


@dataclasses.dataclass(frozen=True)
class Specialization:
    """Something that a trace fixes, because Python looked at it."""

    expression: str
    """What Python asked: of data in the symbols of the graph, `u0 > 3`; of all else as in source, `x.stride(0)`."""
    value: Any
    """The answer in the trace: a number or bool for data."""
    op: str
    """For data, the op that read it, `aten.item.default`; for all else, the kind of thing: `argument`, `input`,
    `attribute`, `tensor`, `global`, `closure`, `state` (of torch)."""
    module: str
    """The scope path in which Python asked: `Net/Linear[fc]`."""
    fqn: str | None
    """The name of the module there; None for a module outside the model."""
    source: str | None
    """The user's line: `model.py:12, in forward: if x.sum() > 0:`."""

    @property
    def message(self) -> str:
        """What the graph's assertion says on inputs that decide otherwise."""
        return f"the trace is specialized, and these inputs differ: {self}; trace again with inputs like these"

    def __str__(self) -> str:
        at = f", at {self.source}" if self.source else ""
        return f"{self.expression} was {self.value} ({self.op}) in {self.module}{at}"


class Specializations(list[Specialization], Printed):
    """What a trace fixes. As text a line for each kind, name and value, with `*` for the numbers of layers.

    In it stands the line of code that read it first; after them stand the names of all else that a call is checked for.
    """

    def __init__(self, data: Iterable[Specialization] = (), others: Iterable[tuple[str, str]] = ()) -> None:
        """`others` are kind and name of what a call is checked for beside data that the model's code read."""
        super().__init__(data)
        self.others = list(others)

    def __str__(self) -> str:
        rows: dict[tuple[str, str, str], list[str]] = {}
        others: dict[str, str] = {}  # by name, its kind
        for kind, name in sorted(self.others, key=operator.itemgetter(0)):
            others.setdefault(_of_all_layers(name), kind)
        for s in sorted(self, key=operator.attrgetter("op")):
            name, value = _of_all_layers(s.expression), short_repr(s.value)
            if s.op == "attribute" and not s.source:  # of a class, where no line is known to read it
                others[f"{name} = {value}"] = s.op
            else:
                line = (s.source or "").partition(", in ")[0].rpartition("/")[2]  # `model.py:12`
                rows.setdefault((s.op, name, value), []).append(line)
        counts = {row: f"in {len(lines)} places" if len(lines) > 1 else "" for row, lines in rows.items()}
        cells = [(*row, counts[row], next(filter(None, lines), "")) for row, lines in rows.items()]
        text = columns(cells, widest=_WIDEST) if cells else "nothing is fixed"
        names: dict[str, list[str]] = {}
        for name, kind in others.items():
            names.setdefault(kind, []).append(name)
        wrapped = functools.partial(textwrap.fill, width=_WIDTH, subsequent_indent="  ")
        also = [wrapped(f"{kind}: {', '.join(of)}") for kind, of in sorted(names.items())]
        return "\n".join([text, "also as when traced:", *also] if also else [text])


def _of_all_layers(name: str) -> str:
    return re.sub(r"(?:(?<=\.)|^)\d+(?=\.)", "*", name)


_WIDTH = 110
_WIDEST = 50
