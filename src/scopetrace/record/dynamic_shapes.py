"""Sizes that may differ from call to call: what `dynamic_shapes` says, as symbols, and the rules that calls must keep.

Data flow:
    dynamic_shapes + example inputs -> a symbol for each Dim, and symbolic sizes of the fake inputs
    the recording -> what torch's ShapeEnv took for true of the symbols -> SizeRules, checked at each call
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from scopetrace._compat.shape_env import (
    ANY_LOWER,
    DimSpec,
    WatchedShapeEnv,
    evaluated,
    new_number,
    new_symbol,
    ranges,
    read_dim,
    root_symbol,
    solved,
    symint,
)
from scopetrace._compat.symbols import expression_text, to_expr
from scopetrace._compat.tensors import storage_id
from scopetrace.containers.structure import open_container
from scopetrace.errors import DynamicShapeError, InputMismatchError


@dataclasses.dataclass(frozen=True)
class DynamicInput:
    """A number that may differ from call to call: the size of an input tensor, or a whole number given as argument."""

    path: str
    index: int
    """Of the tensor among the inputs, or of the number among the numbers."""
    dim: int | None
    """None for a number."""
    expr: Any

    @property
    def text(self) -> str:
        """`x: dimension 0`, or `n`."""
        return self.path if self.dim is None else f"{self.path}: dimension {self.dim}"

    def value(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> int:
        """What it is in a call."""
        return numbers[self.index] if self.dim is None else tensors[self.index].size(self.dim)


@dataclasses.dataclass
class SizeRules:
    """What sizes a call may have."""

    env: WatchedShapeEnv
    dynamic: list[DynamicInput] = dataclasses.field(default_factory=list)
    specs: dict[Any, DimSpec] = dataclasses.field(default_factory=dict)
    """By symbol."""
    where: dict[Any, str] = dataclasses.field(default_factory=dict)
    """By symbol, where it was met first: `x, dimension 0`."""

    def name(self, symbol: Any) -> str:
        """What the user calls a symbol."""
        spec = self.specs.get(symbol)
        return (spec.name if spec is not None else None) or self.where.get(symbol, str(symbol))

    def bounds(self) -> dict[Any, tuple[int, int | None]]:
        """By symbol, the least and greatest size that a call may have."""
        found = {}
        for symbol, spec in self.specs.items():
            limits = self.env.var_to_range.get(symbol)
            lower, upper = spec.lower, spec.upper
            if limits is not None and limits.lower.is_Integer and (limits.lower > 2 or lower == ANY_LOWER):
                lower = max(lower, int(limits.lower))
            if limits is not None and limits.upper.is_Integer:
                upper = int(limits.upper) if upper is None else min(upper, int(limits.upper))
            found[symbol] = (lower, upper)
        return found

    def range_constraints(self) -> dict[Any, Any]:
        """By symbol, torch's ValueRanges of the sizes that a call may have."""
        return ranges({s: limits for s, limits in self.bounds().items() if self.env.replace(s) == s})

    def check(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
        """Raise InputMismatchError, naming argument, dimension and rule, for sizes that were not captured."""
        given = [d.value(tensors, numbers) for d in self.dynamic]
        values = self._bind(given)
        for d, value in zip(self.dynamic, given, strict=True):
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
        for guard in self.env.guards:
            known = {s: values[s] for s in guard.expr.free_symbols if s in values}
            if len(known) == len(guard.expr.free_symbols) and not evaluated(guard.expr, known):
                said = ", ".join(f"{self._place(s)} is {v}" for s, v in known.items())
                raise InputMismatchError(f"{said}: the trace holds for {self._say(guard.expr)}; trace again")

    def values(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> Callable[[Any], Any]:
        """A function from symbolic numbers to their values in a call with these inputs."""
        values = self._bind([d.value(tensors, numbers) for d in self.dynamic])
        return lambda number: evaluated(to_expr(number), values)

    def _bind(self, given: list[int]) -> dict[Any, int]:
        values: dict[Any, int] = {}
        for d, value in zip(self.dynamic, given, strict=True):
            if d.expr.is_Symbol:
                values.setdefault(d.expr, value)
        for d, value in zip(self.dynamic, given, strict=True):
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

    def refuse_fixed(self) -> None:
        """Raise DynamicShapeError where the model fixed what was said to be dynamic."""
        for symbol, spec in self.specs.items():
            now = self.env.replace(symbol)
            if now == symbol or spec.may_be_fixed:
                continue
            fixed = next((f for f in self.env.fixed if f.symbol == symbol), None)
            place = fixed.place if fixed is not None else {}
            if not now.is_number and spec.name is None:
                continue  # Dim.DYNAMIC: equal to another dimension, and still dynamic
            if now.is_number:
                problem = f"{self._place(symbol)} was said to be dynamic, and the model fixes it at {now}"
                hint = (
                    f"write {now} for it in dynamic_shapes, or Dim.AUTO to let the model decide; "
                    "or take the number from the tensor's shape in the model"
                )
            else:
                problem = f"{self._place(symbol)} must always be {self._say(now)} in this model"
                hint = f"give both the same Dim, or say {self.name(symbol)} as {self._say(now)} in dynamic_shapes"
            raise DynamicShapeError(problem, hint=hint, **place)


Spec = tuple[str, Any, Any]
"""The path of a tensor or a whole number in the arguments, itself, and what `dynamic_shapes` says of it."""


class DynamicSizes:
    """Makes symbols for what `dynamic_shapes` says of the arguments of a call."""

    def __init__(self, env: WatchedShapeEnv, specs: list[Spec]) -> None:
        self.rules = SizeRules(env)
        self._specs = {id(x): spec for _, x, spec in specs if isinstance(x, torch.Tensor)}
        self._numbers = {path: spec for path, x, spec in specs if not isinstance(x, torch.Tensor)}
        self._named: dict[str, Any] = {}
        self._values: dict[Any, int] = {}

    def sizes_of(self, t: torch.Tensor, path: str, index: int) -> list[Any] | None:
        """The sizes of an input, symbolic where said so; None where all are as they are."""
        spec = self._specs.get(id(t))
        if not spec:
            return None
        sizes: list[Any] = list(t.size())
        for d in sorted(spec):
            expr = self._expression(spec[d], sizes[d], path, d)
            if expr is not None:
                sizes[d] = symint(self.rules.env, expr, sizes[d])
                self.rules.dynamic.append(DynamicInput(path, index, d, expr))
        return sizes if any(isinstance(n, torch.SymInt) for n in sizes) else None

    def number_of(self, path: str, value: int, index: int) -> Any:
        """The symbolic number of an argument that is a whole number; None where it is as it is."""
        spec = read_dim(self._numbers.get(path))
        if spec is None or isinstance(spec, int):
            return None
        symbol = new_number(self.rules.env, value, path)
        self.rules.specs[symbol] = dataclasses.replace(spec, lower=ANY_LOWER)
        self.rules.where[symbol] = path
        self.rules.dynamic.append(DynamicInput(path, index, None, symbol))
        return symint(self.rules.env, symbol, value)

    def _expression(self, dim: Any, value: int, path: str, d: int) -> Any:
        spec, where = read_dim(dim), f"{path}, dimension {d}"
        if isinstance(spec, int) and spec != value:
            raise DynamicShapeError(f"{where} is {value} in the example, and {spec} in dynamic_shapes")
        if spec is None or isinstance(spec, int):
            return None
        root = value
        if spec.derive is not None and spec.name is not None:
            found = solved(spec.derive(root_symbol(spec.name)), root_symbol(spec.name), value)
            if found is None:
                raise DynamicShapeError(
                    f"{where} is {value} in the example, which is not of the form that it must have"
                )
            root = found
        symbol = self._symbol(spec, root, path, d)
        return symbol if spec.derive is None or symbol is None else spec.derive(symbol)

    def _symbol(self, spec: DimSpec, value: int, path: str, d: int) -> Any:
        symbol, where = self._named.get(spec.name or ""), f"{path}, dimension {d}"
        if symbol is not None:
            if self._values[symbol] != value:
                raise DynamicShapeError(
                    f"{where} gives {spec.name} = {value}, and {self.rules.where[symbol]} gives "
                    f"{self._values[symbol]}: one Dim stands for one size"
                )
            return symbol
        if value < 2:
            problem = f"{where} is {value} in the example, and torch fixes sizes 0 and 1 (they broadcast)"
            if spec.may_be_fixed:
                warnings.warn(f"scopetrace: {problem}: it is static", stacklevel=2)
                return None
            raise DynamicShapeError(problem, hint="give an example whose size there is 2 or more")
        if value < spec.lower or (spec.upper is not None and value > spec.upper):
            raise DynamicShapeError(f"{where} is {value} in the example, outside of [{spec.lower}, {spec.upper}]")
        symbol = new_symbol(self.rules.env, value, path, d, spec)
        self.rules.specs[symbol], self.rules.where[symbol] = dataclasses.replace(spec, derive=None), where
        self._values[symbol] = value
        if spec.name:
            self._named[spec.name] = symbol
            self.rules.env.names[symbol] = spec.name
        return symbol


def read_dynamic_shapes(
    spec: Any, named: list[tuple[str, Any]], whole: Callable[[], dict[str, Any]], object_types: Collection[type]
) -> list[Spec]:
    """Each tensor of the arguments with its dynamic dimensions, and the dynamic numbers.

    `named` are the arguments with forward's names. `whole` gives them as forward's signature binds them, `*args` and
    `**kwargs` under their own names.
    Raises DynamicShapeError where the specification does not fit them.
    """
    if isinstance(spec, (tuple, list)):
        if len(spec) != len(named):
            raise DynamicShapeError(f"dynamic_shapes has {len(spec)} items for {len(named)} arguments")
        pairs = [(name, a, s) for (name, a), s in zip(named, spec, strict=True)]
    elif isinstance(spec, dict):
        table = dict(named)
        if not spec.keys() <= table.keys():
            table = whole()
        for name in spec:
            if name not in table:
                raise DynamicShapeError(f"dynamic_shapes names {name!r}; the arguments are {', '.join(table)}")
        pairs = [(name, table[name], s) for name, s in spec.items()]
    else:
        raise DynamicShapeError(
            f"dynamic_shapes is a {type(spec).__name__}: pass a dict or a tuple, as to torch.export"
        )
    return [found for name, a, s in pairs for found in _walk(a, s, name, object_types)]


def _walk(x: Any, spec: Any, path: str, object_types: Collection[type]) -> Iterator[Spec]:
    if spec is None:
        return
    if isinstance(x, torch.Tensor):
        yield path, x, _dims(x, spec, path)
        return
    if type(x) is int:
        yield path, x, _number(x, spec, path)
        return
    inner = open_container(x, object_types)
    if inner is None:
        raise DynamicShapeError(
            f"dynamic_shapes has {spec!r} for {path}, which is a {type(x).__name__}: "
            "Python values are fixed in a trace; write None, or pass a tensor"
        )
    named = vars(x) if type(x) in object_types else x
    if isinstance(spec, dict) and isinstance(named, dict):
        if not spec.keys() <= named.keys():
            raise DynamicShapeError(f"dynamic_shapes has keys {list(spec)} for {path}, which has {list(named)}")
        for key, item in spec.items():
            yield from _walk(named[key], item, path + (f"[{key!r}]" if named is x else f".{key}"), object_types)
        return
    items = list(spec.values()) if isinstance(spec, dict) else list(spec)
    if len(items) != len(inner):
        raise DynamicShapeError(f"dynamic_shapes has {len(items)} items for {path}, which has {len(inner)}")
    for (key, value), item in zip(inner, items, strict=True):
        yield from _walk(value, item, path + key, object_types)


def _number(x: int, spec: Any, path: str) -> Any:
    try:
        said = read_dim(spec)
    except TypeError as error:
        raise DynamicShapeError(f"dynamic_shapes, {path}: {error}") from None
    if isinstance(said, int) and said != x:
        raise DynamicShapeError(f"{path} is {x} in the example, and {said} in dynamic_shapes")
    if isinstance(said, DimSpec) and said.name is not None:
        raise DynamicShapeError(
            f"dynamic_shapes has the Dim {said.name} for {path}, which is a whole number, not a size",
            hint="write Dim.DYNAMIC or Dim.AUTO for it, as for torch.export",
        )
    return spec


def _dims(t: torch.Tensor, spec: Any, path: str) -> dict[int, Any]:
    if isinstance(spec, dict):
        dims = {(d + t.dim() if d < 0 else d): dim for d, dim in spec.items()}
        beyond = [d for d in dims if not 0 <= d < t.dim()]
        if beyond:
            raise DynamicShapeError(f"dynamic_shapes has dimension {beyond[0]} of {path}, which has {t.dim()}")
    elif isinstance(spec, (list, tuple)):
        if len(spec) != t.dim():
            raise DynamicShapeError(f"dynamic_shapes has {len(spec)} dimensions for {path}, which has {t.dim()}")
        dims = dict(enumerate(spec))
    else:
        raise DynamicShapeError(f"dynamic_shapes has {spec!r} for the tensor {path}: write a dict, a list or a tuple")
    for d, dim in dims.items():
        try:
            read_dim(dim)
        except TypeError as error:
            raise DynamicShapeError(f"dynamic_shapes, {path}, dimension {d}: {error}") from None
    return dims


def symbolic_strides(real: torch.Tensor, sizes: list[Any]) -> list[Any]:
    """The strides of an input with symbolic sizes: where one is the extent of an inner dimension, it follows that."""
    strides: list[Any] = list(real.stride())
    order = sorted(range(real.dim()), key=lambda d: (real.stride(d), -d))
    extent = {1: 1}  # what comes after the dimensions so far: stride -> its symbolic form
    for d in order:
        stride = real.stride(d)
        if stride in extent:
            strides[d] = extent[stride]
        reach = stride * real.size(d)
        extent[reach] = strides[d] * sizes[d]
    return strides


def refuse_shared(dynamic: list[torch.Tensor], given: list[Any]) -> None:
    """Raise DynamicShapeError for a tensor with dynamic sizes that shares its memory with another input."""
    others: dict[int, set[int]] = {}
    for t in given:
        if isinstance(t, torch.Tensor) and t.layout is torch.strided:
            others.setdefault(storage_id(t), set()).add(id(t))
    for t in dynamic:
        if t.layout is not torch.strided or len(others[storage_id(t)]) > 1:
            raise DynamicShapeError(
                "a tensor with dynamic sizes shares its memory with another input, or has a sparse layout",
                hint="clone() one of them, or leave the tensor out of dynamic_shapes",
            )
