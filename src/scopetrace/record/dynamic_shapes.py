"""The `dynamic_shapes` argument: which sizes of the inputs may differ from call to call.

Data flow:
    dynamic_shapes + arguments -> read_dynamic_shapes: for each tensor and whole number, what is said of it
    that + example sizes -> DynamicShapes: a symbol for each Dim, the symbolic sizes of the fake inputs, and SizeRules
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from scopetrace._compat.shape_env import (
    ANY_LOWER,
    DimSpec,
    WatchedShapeEnv,
    new_number,
    new_symbol,
    read_dim,
    symint,
)
from scopetrace._compat.tensors import storage_id
from scopetrace.containers.structure import open_container
from scopetrace.errors import DynamicShapeError
from scopetrace.ir.conditions import DynamicInput, SizeRules

Spec = tuple[str, Any, Any]
"""The path of a tensor or a whole number in the arguments, itself, and what `dynamic_shapes` says of it: of a number a
DimSpec, of a tensor one for each dimension; None for what is static."""


class DynamicShapes:
    """Makes symbols for the dynamic sizes and numbers of the example inputs, and collects the rules that they keep."""

    def __init__(self, env: WatchedShapeEnv, specs: list[Spec]) -> None:
        self.rules = SizeRules(env)
        self._specs = {id(x): spec for _, x, spec in specs if isinstance(x, torch.Tensor)}
        self._numbers = {path: spec for path, x, spec in specs if not isinstance(x, torch.Tensor)}
        self._named: dict[str, Any] = {}
        self._values: dict[Any, int] = {}

    def sizes_of(self, t: torch.Tensor, path: str, index: int) -> list[Any] | None:
        """The sizes of an input, symbolic where `dynamic_shapes` says so; None where all are static."""
        spec = self._specs.get(id(t))
        if not spec:
            return None
        sizes: list[Any] = list(t.size())
        for d in sorted(spec):
            expr = None if spec[d] is None else self._expression(spec[d], sizes[d], path, d)
            if expr is not None:
                sizes[d] = symint(self.rules.env, expr, sizes[d])
                self.rules.dynamic.append(DynamicInput(path, index, d, expr))
        return sizes if any(isinstance(n, torch.SymInt) for n in sizes) else None

    def number_of(self, path: str, value: int, index: int) -> Any:
        """The symbolic number for an argument that is a whole number; None where it is static."""
        spec = self._numbers.get(path)
        if spec is None:
            return None
        symbol = new_number(self.rules.env, value, path)
        self.rules.specs[symbol] = dataclasses.replace(spec, lower=ANY_LOWER)
        self.rules.where[symbol] = path
        self.rules.dynamic.append(DynamicInput(path, index, None, symbol))
        return symint(self.rules.env, symbol, value)

    def _expression(self, spec: DimSpec, value: int, path: str, d: int) -> Any:
        root = spec.root_of(value)
        if root is None:
            raise DynamicShapeError(
                f"{path}, dimension {d} is {value} in the example, which is not of the form that it must have"
            )
        symbol = self._symbol(spec, root, path, d)
        return symbol if symbol is None or spec.derive is None else spec.derive(symbol)

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
        yield path, x, _read(spec, x, path, path)
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


def _read(dim: Any, value: int, where: str, path: str) -> DimSpec | None:
    """What is said of one size or number, which is `value` in the example; None for a static one."""
    try:
        said = read_dim(dim)
    except TypeError as error:
        raise DynamicShapeError(f"dynamic_shapes, {where}: {error}") from None
    if isinstance(said, int):
        if said != value:
            raise DynamicShapeError(f"{where} is {value} in the example, and {said} in dynamic_shapes")
        return None
    if said is not None and said.name is not None and where == path:
        raise DynamicShapeError(
            f"dynamic_shapes has the Dim {said.name} for {path}, which is a whole number, not a size",
            hint="write Dim.DYNAMIC or Dim.AUTO for it, as for torch.export",
        )
    return said


def _dims(t: torch.Tensor, spec: Any, path: str) -> dict[int, DimSpec | None]:
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
    return {d: _read(dim, t.size(d), f"{path}, dimension {d}", path) for d, dim in dims.items()}


def symbolic_strides(real: torch.Tensor, sizes: list[Any]) -> list[Any]:
    """The strides of an input with symbolic sizes: products of sizes, where the example has such products."""
    strides: list[Any] = list(real.stride())
    order = sorted(range(real.dim()), key=lambda d: (real.stride(d), -d))
    extent = {1: 1}  # by product of the example's sizes so far: its symbolic form
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
