"""`--dynamic NAME.DIM=symbol` as the argument `dynamic_shapes` of `trace`."""

from __future__ import annotations

import re
from typing import Any

from torch.export import Dim

from scopetrace.errors import UsageError

FORM = "NAME.DIM=SYMBOL[:MIN[:MAX]], for example x.0=batch or ids.1=length:1:512"
_PATTERN = re.compile(r"(?P<name>\w+)\.(?P<dim>-?\d+)=(?P<symbol>[A-Za-z_]\w*)(:(?P<min>\d+))?(:(?P<max>\d+))?")


def parse_dynamic(texts: tuple[str, ...]) -> dict[str, dict[int, Any]] | None:
    """`dynamic_shapes` as a dict by argument name, with one `Dim` for each symbol; None without options.

    Raises UsageError, saying what to write instead.
    """
    limits: dict[str, tuple[str | None, str | None]] = {}
    symbols: dict[str, dict[int, str]] = {}
    for text in texts:
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"--dynamic {text}: write {FORM}")
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
