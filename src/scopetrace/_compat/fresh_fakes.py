"""Fake tensors like others, with symbols of their own."""

from __future__ import annotations

from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from scopetrace._compat.shape_env import WatchedShapeEnv, new_size
from scopetrace._compat.symbols import Symbolic


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
