"""`--input NAME=SHAPE[:DTYPE]`: tensors made from their description, bound to parameters of `forward`; `--dynamic`.

text -> Input: a tensor, or a Python value -> inputs with dots in their names put together -> arguments of forward
`NAME.DIM=symbol` -> the argument `dynamic_shapes` of `trace`
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.export import Dim

from scopetrace.errors import UsageError

FORM = "NAME=SHAPE[:DTYPE], for example x=1x3x224x224 or ids=1x16:int64"

_WORDS = {"true": True, "false": False, "none": None}
_PYTHON: dict[str, type] = {"int": int, "float": float, "str": str}


class Input(NamedTuple):
    """One `--input`."""

    name: str
    """The name of a parameter of `forward`, or its position as text."""
    value: Any
    """A tensor; or True, False, None, an int, a float or a string."""


def parse_input(text: str) -> Input:
    """The input that a command-line value describes. Raises UsageError, saying what to write instead."""
    name, equals, rest = text.partition("=")
    name, rest = name.strip(), rest.strip()
    if not equals or not all(part.strip() for part in name.split(".")):
        raise UsageError(f"--input {text}: write {FORM}")
    if rest.lower() in _WORDS:
        return Input(name, _WORDS[rest.lower()])
    kind, colon, value = rest.partition(":")
    if colon and kind in _PYTHON:
        try:
            return Input(name, _PYTHON[kind](value))
        except ValueError as error:
            raise UsageError(f"--input {text}: {value!r} is no {kind}") from error
    shape_text, colon, dtype_text = rest.partition(":")
    shape = _shape(text, name, shape_text.strip())
    dtype = _dtype(text, dtype_text.strip()) if colon else torch.float32
    try:
        return Input(name, torch.zeros(shape, dtype=dtype))
    except (RuntimeError, NotImplementedError, OverflowError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--input {text}: no tensor of that size and dtype can be made ({reason})") from error


def nested(inputs: list[Input]) -> list[Input]:
    """The inputs, with those whose names have dots put together: `batch.ids` and `batch.mask` are a dict `batch`.

    Raises UsageError where a name is a value and a dict.
    """
    dicts: dict[str, Any] = {}
    plain = []
    for path, value in inputs:
        name, *keys = path.split(".")
        if not keys:
            plain.append(Input(name, value))
            continue
        inner = dicts.setdefault(name, {})
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        if not isinstance(inner, dict) or keys[-1] in inner or any(p.name == name for p in plain):
            raise UsageError(f"--input {path}: another --input gives a part of it, or all of {name}")
        inner[keys[-1]] = value
    return [*plain, *(Input(name, value) for name, value in dicts.items())]


def _shape(text: str, name: str, shape: str) -> list[int]:
    if shape in ("", "scalar"):
        return []
    sizes = [part.strip() for part in re.split(r"[x×,]", shape.strip("[]()"))]
    for size in sizes:
        if not size.isascii() or not size.isdigit():
            raise UsageError(
                f"--input {text}: {size!r} is not a size; "
                f"write sizes as in {name}=1x3x224x224 or {name}=1,3,224,224, {name}=scalar for no dimensions, "
                f"and a number as {name}=float:0.5 or {name}=int:3"
            )
    return [int(size) for size in sizes]


def _dtype(text: str, name: str) -> torch.dtype:
    known = {word: value for word, value in vars(torch).items() if isinstance(value, torch.dtype)}
    known |= {str(getattr(dtype, "abbr", dtype)): dtype for dtype in known.values()}
    dtype = known.get(name.removeprefix("torch."))
    if dtype is None:
        usual = ["float32", "int64", "bool", "bfloat16", "float16", "float64", "int32", "uint8"]
        near = difflib.get_close_matches(name, usual, n=2) or usual[:4]
        raise UsageError(f"--input {text}: {name!r} is no dtype; write one such as {' or '.join(near)}")
    return dtype


def bind(model: torch.nn.Module, inputs: list[Input]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for a model. Raises UsageError for a wrong name, a missing one, or one given twice."""
    arguments = dict(inputs)
    if len(arguments) < len(inputs):
        raise UsageError("an --input is given twice: write each argument once")
    signature, args = _signature(model), []
    kinds = {p.name: p.kind for p in signature.parameters.values()}
    positional = [name for name, kind in kinds.items() if kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD]
    for keys in itertools.zip_longest(map(str, itertools.count()), positional):
        key = next(filter(arguments.__contains__, keys), None)
        if key is None:
            break
        args.append(arguments.pop(key))
    problem = wrong_name(model, arguments)
    if problem is not None and inspect.Parameter.VAR_KEYWORD not in kinds.values():
        raise UsageError(problem)
    try:
        bound = signature.bind(*args, **arguments)
    except TypeError as error:
        raise UsageError(_of_forward(model, str(error))) from error
    return bound.args, bound.kwargs


def wrong_name(model: torch.nn.Module, names: Iterable[str]) -> str | None:
    """What to say of the first of some names that is no parameter of a model's forward; None where all are."""
    known = _signature(model).parameters
    return next((_of_forward(model, f"no argument {name!r}") for name in names if name not in known), None)


def _of_forward(model: torch.nn.Module, problem: str) -> str:
    names = [p.name for p in _signature(model).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return f"{type(model).__name__}.forward: {problem}; its arguments are {', '.join(names) or 'none'}; write {FORM}"


def _signature(model: torch.nn.Module) -> inspect.Signature:
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):  # scripted modules have none
        return inspect.signature(lambda *args, **kwargs: None)


_DYNAMIC_FORM = "NAME.DIM=SYMBOL[:MIN[:MAX]], for example x.0=batch or ids.1=length:1:512"
_DYNAMIC = re.compile(r"(?P<name>\w+)\.(?P<dim>-?\d+)=(?P<symbol>[A-Za-z_]\w*)(:(?P<min>\d+))?(:(?P<max>\d+))?")


def parse_dynamic(texts: tuple[str, ...]) -> dict[str, dict[int, Any]] | None:
    """`dynamic_shapes` as a dict by argument name, with one `Dim` for each symbol; None without options.

    Raises UsageError, saying what to write instead.
    """
    limits: dict[str, tuple[str | None, str | None]] = {}
    symbols: dict[str, dict[int, str]] = {}
    for text in texts:
        match = _DYNAMIC.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"--dynamic {text}: write {_DYNAMIC_FORM}")
        name, dim, symbol, low, high = (match[k] for k in ("name", "dim", "symbol", "min", "max"))
        if limits.setdefault(symbol, (low, high)) != (low, high) and (low or high):
            raise UsageError(f"--dynamic {text}: {symbol} has other limits elsewhere; write them the first time only")
        if symbols.setdefault(name, {}).setdefault(int(dim), symbol) != symbol:
            raise UsageError(
                f"--dynamic {text}: {name}.{dim} is {symbols[name][int(dim)]} already; give a size one symbol"
            )
    dims = {symbol: _dim(symbol, low, high) for symbol, (low, high) in limits.items()}
    return {name: {d: dims[symbol] for d, symbol in sizes.items()} for name, sizes in symbols.items()} or None


def _dim(symbol: str, low: str | None, high: str | None) -> Any:
    kept = {key: int(text) for key, text in (("min", low), ("max", high)) if text is not None}
    try:
        return Dim(symbol, **kept)
    except (ValueError, AssertionError) as error:
        raise UsageError(f"--dynamic: {symbol} cannot be between {low} and {high}") from error
