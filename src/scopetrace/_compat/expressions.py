"""Sizes as data: sympy expressions, and the state of a shape environment, as JSON and back.

Data flow:
    expression -> nested lists `[class, argument, ...]`, symbols as `[name, assumptions]` -> the same expression

Reading makes instances of a fixed set of classes only. sympy computes when it makes an expression, so what could take
long (powers of powers) is refused. Nothing is parsed.
"""

from __future__ import annotations

from typing import Any

import sympy  # type: ignore[import-untyped]
import torch.utils._sympy.functions as torch_functions
from sympy.logic.boolalg import BooleanAtom  # type: ignore[import-untyped]
from torch.fx.experimental.symbolic_shapes import RuntimeAssert
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from scopetrace._compat.shape_env import Assumption, WatchedShapeEnv

_ATOMS: dict[str, Any] = {
    "true": sympy.true,
    "false": sympy.false,
    "oo": sympy.oo,
    "-oo": -sympy.oo,
    "int_oo": int_oo,
    "-int_oo": -int_oo,
}
_NAMES = {atom: name for name, atom in _ATOMS.items()}

_SYMPY = ("Add", "Mul", "Pow", "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "And", "Or", "Not", "Max", "Min", "Piecewise", "Abs")
_CLASSES: dict[str, Any] = {f"sympy.{name}": getattr(sympy, name) for name in _SYMPY} | {
    f"torch.{name}": kind
    for name, kind in vars(torch_functions).items()
    if isinstance(kind, type) and issubclass(kind, sympy.Basic) and kind.__module__ == "torch.utils._sympy.functions"
}
_CLASS_NAMES = {kind: name for name, kind in _CLASSES.items()}

_LARGEST_POWER = 64
_LARGEST_NUMBER = 2**256


def encode_expression(expr: Any) -> Any:
    """An expression as JSON. Raises ValueError for one that has a part of a class that is not known here."""
    if isinstance(expr, sympy.Symbol):
        (name,), assumptions = expr.__getnewargs_ex__()
        return {name: {key: value for key, value in assumptions.items() if value is not None}}
    if expr in _NAMES and isinstance(expr, (BooleanAtom, type(sympy.oo), type(-sympy.oo), type(int_oo), type(-int_oo))):
        return _NAMES[expr]
    if isinstance(expr, bool):
        return "true" if expr else "false"
    if isinstance(expr, (int, sympy.Integer)):
        return int(expr)
    if isinstance(expr, sympy.Rational):
        return ["rational", int(expr.p), int(expr.q)]
    if isinstance(expr, sympy.Float):
        return float(expr)
    name = _CLASS_NAMES.get(expr.func)
    if name is None:
        raise ValueError(f"{expr.func.__name__} in the expression {expr}")
    return [name, *map(encode_expression, expr.args)]


def decode_expression(data: Any) -> Any:
    """The expression of what `encode_expression` gave. Raises ValueError, TypeError, LookupError for anything else."""
    if isinstance(data, str):
        return _ATOMS[data]
    if isinstance(data, bool):
        raise ValueError("a truth value in an expression")
    if isinstance(data, int):
        if abs(data) > _LARGEST_NUMBER:
            raise ValueError("a number in an expression is too large")
        return sympy.Integer(data)
    if isinstance(data, float):
        return sympy.Float(data)
    if isinstance(data, dict):
        ((name, assumptions),) = data.items()
        if not name.isidentifier() or not all(type(value) is bool for value in assumptions.values()):
            raise ValueError(f"{name!r} is no symbol")
        return sympy.Symbol(name, **assumptions)
    name, *args = data
    if name == "rational":
        return sympy.Rational(*map(decode_expression, args))
    parts = [decode_expression(arg) for arg in args]
    if name in ("sympy.Pow", "torch.PowByNatural", "torch.FloatPow"):
        _refuse_large_power(*parts)
    return _CLASSES[name](*parts)


def _refuse_large_power(base: Any, exponent: Any) -> None:
    is_large = exponent.is_number and abs(exponent) > _LARGEST_POWER
    # a Float has so many digits, whatever the exponent is
    if not base.is_Float and (is_large or (base.is_number and not exponent.is_Integer)):
        raise ValueError("a power in an expression is too large")


# The state of a shape environment -------------------------------------------------------------------------------------

_TABLES = ("backed_var_to_val", "replacements", "axioms", "unbacked_renamings")


def encode_environment(env: WatchedShapeEnv) -> dict[str, Any]:
    """What a loaded trace needs of its shape environment, as JSON. Raises ValueError as `encode_expression` does."""
    encode, asserts = encode_expression, env.deferred_runtime_asserts
    return {
        **{name: [[encode(key), encode(value)] for key, value in getattr(env, name).items()] for name in _TABLES},
        "ranges": [[encode(s), encode(r.lower), encode(r.upper)] for s, r in env.var_to_range.items()],
        "version": env._replacements_version_counter,
        "fixed": [[encode(f.symbol), encode(f.value), f.place] for f in env.fixed],
        "assumed": [[encode(a.symbol), a.value, a.place] for a in env.assumed.values()],
        "smallest": [[encode(symbol), value] for symbol, value in env.smallest.items()],
        "names": [[encode(symbol), name] for symbol, name in env.names.items()],
        "guards": [encode(guard.expr) for guard in env.guards],
        "asserts": [[encode(s), [[encode(a.expr), a.msg] for a in of_symbol]] for s, of_symbol in asserts.items()],
    }


def restore_environment(env: WatchedShapeEnv, data: dict[str, Any]) -> None:
    """Set the state that `encode_environment` gave. Raises ValueError, TypeError, LookupError for anything else."""
    decode = decode_expression
    assumed = [Assumption(decode(symbol), int(value), dict(place)) for symbol, value, place in data["assumed"]]
    env.restore(
        **{name: {decode(key): decode(value) for key, value in data[name]} for name in _TABLES},
        var_to_range={decode(s): ValueRanges(decode(lower), decode(upper)) for s, lower, upper in data["ranges"]},
        _replacements_version_counter=int(data["version"]),
        fixed=[Assumption(decode(symbol), decode(value), dict(place)) for symbol, value, place in data["fixed"]],
        assumed={(a.symbol, a.value): a for a in assumed},
        smallest={decode(symbol): int(value) for symbol, value in data["smallest"]},
        names={decode(symbol): str(name) for symbol, name in data["names"]},
        guards=[decode(guard) for guard in data["guards"]],
        deferred_runtime_asserts={
            decode(s): [RuntimeAssert(decode(e), message, None) for e, message in of_symbol]  # type: ignore[arg-type]
            for s, of_symbol in data["asserts"]
        },
    )
