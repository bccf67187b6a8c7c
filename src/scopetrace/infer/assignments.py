"""Plain numbers for the symbols of a trace: those of the example, and others that its guards allow."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from scopetrace._compat.shape_env import WatchedShapeEnv, evaluated
from scopetrace._compat.symbols import example, to_expr
from scopetrace._compat.tensors import FakeMaker
from scopetrace.ir.tape import flat

Number = Callable[[Any], int]
"""Gives the plain number of a symbolic one."""


def assignments(maker: FakeMaker, tensors: list[torch.Tensor], args: Any) -> Iterator[Number]:
    """The example's sizes, and up to three others that the guards of the trace allow."""
    yield example
    symbols: set[Any] = set()
    facts = [(*t.size(), *t.stride(), t.storage_offset(), t.untyped_storage().nbytes()) for t in tensors]
    for n in itertools.chain(flat(args), *facts):
        if isinstance(n, torch.SymInt):
            symbols |= to_expr(n).free_symbols
    env = maker.mode.shape_env
    if not symbols or not isinstance(env, WatchedShapeEnv):
        return
    hints = {s: int(n) for s, n in env.backed_var_to_val.items()}
    if not symbols <= hints.keys():
        return  # a size depends on data
    order = sorted(symbols, key=str)
    for values in (
        {s: 2 * hints[s] for s in order},
        {s: 3 * hints[s] for s in order},
        {s: hints[s] + 1 + i for i, s in enumerate(order)},
    ):
        if _allowed(env, hints | values):
            yield _at(hints | values)


def without_ones(maker: FakeMaker, tensors: list[torch.Tensor], size: tuple[Any, ...], args: Any) -> Number | None:
    """The first of `assignments` for which no symbolic size of the tensors, or in `size`, is 1; None if there is none.

    The stride of a dimension of size 1 says nothing of where the dimension lies in memory at other sizes.
    """
    symbolic = [n for n in itertools.chain(size, *(t.size() for t in tensors)) if isinstance(n, torch.SymInt)]
    numbers = assignments(maker, tensors, args)
    return next((number for number in numbers if all(number(n) != 1 for n in symbolic)), None)


def _at(values: dict[Any, int]) -> Number:
    return lambda n: int(evaluated(n.node.expr, values)) if isinstance(n, torch.SymInt) else int(n)


def _allowed(env: WatchedShapeEnv, values: dict[Any, int]) -> bool:
    """Whether the ranges and guards so far hold for these values."""
    in_range = all(env.var_to_range[s].lower <= n <= env.var_to_range[s].upper for s, n in values.items())
    guards = [guard.expr for guard in env.guards if guard.expr.free_symbols <= values.keys()]
    return in_range and all(evaluated(expr, values) for expr in guards)
