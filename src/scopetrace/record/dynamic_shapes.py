"""The `dynamic_shapes` argument: which sizes of the inputs may differ from call to call.

Data flow:
    dynamic_shapes + arguments -> for each tensor and whole number, what is said of it
    that + example sizes -> DynamicShapes: a symbol for each Dim, the symbolic sizes of the fake inputs, and SizeRules
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import warnings
from collections.abc import Collection, Iterator
from typing import Any

import torch

from scopetrace._compat.shape_env import ANY_LOWER, DimSpec, WatchedShapeEnv, new_number, new_symbol, read_dim
from scopetrace._compat.tensors import storage_id
from scopetrace.containers.structure import Children, leaves_with_path, open_container
from scopetrace.errors import DynamicShapeError
from scopetrace.ir.conditions import DynamicInput, SizeRules
from scopetrace.record.model import named_arguments, signature_of_forward

Spec = tuple[str, Any, Any]
"""The path of a tensor or a whole number in the arguments, itself, and what `dynamic_shapes` says of it: of a number a
DimSpec, of a tensor one for each dimension; None for what is static."""


class DynamicShapes:
    """Makes symbols for the dynamic sizes and numbers of the example inputs, and collects the rules that they keep."""

    def __init__(
        self, env: WatchedShapeEnv, said: Any, forward: Any, arguments: tuple[Any, ...], object_types: Collection[type]
    ) -> None:
        """`said` is the argument, `arguments` (args, kwargs). Raises DynamicShapeError where it does not fit these."""
        specs = _read_dynamic_shapes(said, *_arguments_of(forward, *arguments), object_types)
        _refuse_shared([x for _, x, _ in specs], [x for _, x in leaves_with_path(arguments, "", object_types)])
        self.rules = SizeRules(env, dynamic_shapes=said)
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
                sizes[d] = self.rules.env.create_symintnode(expr, hint=sizes[d])
                self.rules.dynamic.append(DynamicInput(path, index, d, expr))
        return sizes if any(isinstance(n, torch.SymInt) for n in sizes) else None

    def number_of(self, path: str, value: int, index: int) -> Any:
        """The symbolic number for an argument that is a whole number; None where it is static."""
        spec = self._numbers.get(path)
        if spec is None:
            return None
        _check_limits(spec, value, path)
        symbol = new_number(self.rules.env, value, path, spec)
        self.rules.specs[symbol] = spec
        self.rules.where[symbol] = path
        self.rules.dynamic.append(DynamicInput(path, index, None, symbol))
        return self.rules.env.create_symintnode(symbol, hint=value)

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
            first = self.rules.specs[symbol]
            if (first.lower, first.upper) != (spec.lower, spec.upper):
                raise DynamicShapeError(
                    f"{where} has a Dim {spec.name} of {_range(spec)}, "
                    f"and {self.rules.where[symbol]} one of {_range(first)}",
                    hint="use one Dim object for both, or give the Dims two names",
                )
            return symbol
        if value < 2 and not self.rules.env.takes_small_examples:
            problem = f"{where} is {value} in the example, and torch fixes sizes 0 and 1 (they broadcast)"
            if spec.may_be_fixed:
                warnings.warn(f"scopetrace: {problem}: it is static", stacklevel=2)
                return None
            raise DynamicShapeError(problem, hint="give an example whose size there is 2 or more")
        _check_limits(spec, value, where)
        symbol = new_symbol(self.rules.env, value, path, d, spec)
        self.rules.specs[symbol], self.rules.where[symbol] = dataclasses.replace(spec, derive=None), where
        self._values[symbol] = value
        if spec.name:
            self._named[spec.name] = symbol
            self.rules.env.names[symbol] = spec.name
        return symbol


def _range(spec: DimSpec) -> str:
    lower, upper = ("" if n in (None, ANY_LOWER) else n for n in (spec.lower, spec.upper))
    return f"[{lower}, {upper}]"


def _check_limits(spec: DimSpec, value: int, where: str) -> None:
    if value < spec.lower or (spec.upper is not None and value > spec.upper):
        raise DynamicShapeError(f"{where} is {value} in the example, outside of {_range(spec)}")


def _arguments_of(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The arguments by name, in the order of torch.export's `dynamic_shapes`, and the names of `*args` and `**kwargs`.

    What is passed for these is in a tuple and in a dict.
    """
    try:
        signature = signature_of_forward(forward)
    except ValueError:  # built-in callables have no signature
        return dict(named_arguments(forward, args, kwargs)), set()
    arguments = signature.bind(*args, **kwargs).arguments
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return arguments, {name for name in arguments if signature.parameters[name].kind in kinds}


def collected(collection: Any, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The `dynamic_shapes` that a `ShapesCollection` or `AdditionalInputs` makes for these arguments."""
    try:
        return collection.dynamic_shapes(forward, args, kwargs)
    except Exception as error:  # torch raises several
        raise DynamicShapeError(
            f"{type(collection).__name__} does not fit the arguments: {error}",
            hint="give the tensors themselves, not copies of them; those in an object that pytree does not know, as in "
            'a dataclass, are named by a dict: dynamic_shapes={"argument": {"attribute": {0: Dim("n")}}}',
        ) from error


def _read_dynamic_shapes(
    spec: Any, arguments: dict[str, Any], variadic: Collection[str], object_types: Collection[type]
) -> list[Spec]:
    """Each tensor of the arguments with its dynamic dimensions, and the dynamic numbers.

    `spec` is a dict by the names of forward's parameters, or a tuple in their order. It has a tuple for `*args` and a
    dict for `**kwargs`, or says each of their items as an argument of its own. `variadic` are the names of these two.
    Raises DynamicShapeError where the specification does not fit the arguments.
    """
    items = {path: x for name, x in arguments.items() for path, x in _items(name, x, name in variadic).items()}
    if isinstance(spec, (tuple, list)):
        is_whole = len(spec) == len(arguments) and all(
            s is None or name not in variadic or _fits(arguments[name], s)
            for name, s in zip(arguments, spec, strict=True)
        )
        names = [*(arguments if is_whole else items)]
        if len(spec) != len(names):
            raise DynamicShapeError(f"dynamic_shapes has {len(spec)} items for {len(arguments)} arguments")
        spec = dict(zip(names, spec, strict=True))
    elif not isinstance(spec, dict):
        raise DynamicShapeError(
            f"dynamic_shapes is a {type(spec).__name__}: pass a dict or a tuple, as to torch.export"
        )
    specs: list[Spec] = []
    for name, s in spec.items():
        if name not in arguments and name not in items:
            names = [*dict.fromkeys((*arguments, *items))]
            raise DynamicShapeError(f"dynamic_shapes names {name!r}; the arguments are {', '.join(names)}")
        is_whole = name in variadic and _fits(arguments[name], s)
        for path, part in _items(name, s, is_whole).items():
            specs += _walk({**arguments, **items}[path], part, path, object_types)
    return specs


def _items(name: str, x: Any, is_variadic: bool) -> dict[str, Any]:
    """By path, what is passed for a parameter."""
    if not is_variadic:
        return {name: x}
    return dict(x) if isinstance(x, dict) else {f"{name}[{i}]": item for i, item in enumerate(x)}


def _fits(passed: Any, spec: Any) -> bool:
    """Whether `spec` is that of all `*args` or `**kwargs`, rather than of one item."""
    if isinstance(passed, dict):
        return isinstance(spec, dict) and spec.keys() <= passed.keys()
    return isinstance(spec, (tuple, list)) and len(spec) == len(passed)


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
    for key, item in _children(spec, x, inner, path, object_types).items():
        yield from _walk(dict(inner)[key], item, path + key, object_types)


def _children(spec: Any, x: Any, inner: Children, path: str, object_types: Collection[type]) -> dict[str, Any]:
    """What `spec` says of the children of a container, by their paths: `[0]`, `['k']`, `.keys`.

    It is a container of the same class, as torch.export has it, a dict by index, key or attribute, or a sequence; not
    a sequence for a dict, whose order says nothing. Classes of dicts that have fields in order take one.
    """
    names = [key for key, _ in inner]
    if isinstance(spec, dict):
        paths = [next((k for k in (f"[{key!r}]", f".{key}") if k in names), "") for key in spec]
        if "" in paths:
            raise DynamicShapeError(f"dynamic_shapes has keys {list(spec)} for {path}, which has {_said(names)}")
        return dict(zip(paths, spec.values(), strict=True))
    items = [s for _, s in open_container(spec, object_types) or []]
    is_dict = isinstance(x, dict) and type(x).__module__ in ("builtins", "collections")
    if not isinstance(spec, (tuple, list, type(x))) or (is_dict and not isinstance(spec, dict)):
        raise DynamicShapeError(
            f"dynamic_shapes has {spec!r} for {path}, a {type(x).__name__} with {_said(names)}: "
            f"write {'a dict' if is_dict else 'a tuple, a list or a dict'} of what is in it, or None"
        )
    if len(items) != len(names):
        raise DynamicShapeError(
            f"dynamic_shapes has {len(items)} items, {spec!r}, for {path}, a {type(x).__name__} with {len(names)}, "
            f"{_said(names)}: write one for each of these, or a dict with those that have dynamic sizes"
        )
    return dict(zip(names, items, strict=True))


def _said(names: list[str]) -> str:
    return ", ".join(name.removeprefix(".") for name in names) or "nothing"


def _read(dim: Any, value: int, where: str, path: str) -> DimSpec | None:
    """What is said of one size or number, which is `value` in the example; None for a static one."""
    try:
        said = read_dim(dim, ANY_LOWER if where == path else 0)
    except TypeError as error:
        raise DynamicShapeError(f"dynamic_shapes, {where}: {error}") from None
    if isinstance(said, int):
        if said != value:
            raise DynamicShapeError(f"{where} is {value} in the example, and {said} in dynamic_shapes")
        return None
    if said is not None and said.is_static:
        _check_limits(said, value, where)
        return None
    if said is not None and said.name is not None and where == path:
        raise DynamicShapeError(
            f"dynamic_shapes has the Dim {said.name} for {path}, which is a whole number, not a size",
            hint="write Dim.DYNAMIC or Dim.AUTO for it, as for torch.export",
        )
    return said


def _dims(t: torch.Tensor, spec: Any, path: str) -> dict[int, DimSpec | None]:
    if isinstance(spec, dict):
        other = next((d for d in spec if type(d) is not int), None)
        if other is not None:
            raise DynamicShapeError(f"dynamic_shapes has the key {other!r} for {path}: a dimension is a whole number")
        dims = {(d + t.dim() if d < 0 else d): dim for d, dim in spec.items()}
        beyond = [d for d in dims if not 0 <= d < t.dim()]
        if beyond:
            raise DynamicShapeError(
                f"dynamic_shapes has dimension {beyond[0]} of {path}, which has {t.dim()}, from 0 on"
            )
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


def _refuse_shared(dynamic: list[Any], inputs: list[Any]) -> None:
    """Raise DynamicShapeError for a tensor with dynamic sizes that shares its memory with another input."""
    sharing = collections.Counter(map(storage_id, {id(t): t for t in inputs if isinstance(t, torch.Tensor)}.values()))
    for t in [t for t in dynamic if isinstance(t, torch.Tensor)]:
        if t.layout is not torch.strided or sharing[storage_id(t)] > 1:
            raise DynamicShapeError(
                "a tensor with dynamic sizes shares its memory with another input, or has a sparse layout",
                hint="clone() one of them, or leave the tensor out of dynamic_shapes",
            )
