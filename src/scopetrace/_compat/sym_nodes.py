"""Symbolic numbers that remember what they were combined to: an op's shape rule asks the same few questions of the same
few sizes again and again, and torch works each out anew in Python and sympy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._ops import mode_stack_state_for_pre_dispatch
from torch.fx.experimental.sym_node import _NO_HINT, SymNode

_PROXY = torch._C._TorchDispatchModeKey.PROXY
_get_dispatch_mode = torch._C._get_dispatch_mode
_pre_dispatch_modes = mode_stack_state_for_pre_dispatch()

_TRUTH = {sympy.true: True, sympy.false: False}
_BINARY = (
    *("add", "sub", "mul", "mod", "int_floordiv", "sym_min", "sym_max"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_"),
)
_LAYOUT = (
    *("is_contiguous", "is_channels_last_contiguous_2d", "is_channels_last_contiguous_3d"),
    *("is_channels_last_strides_2d", "is_channels_last_strides_3d", "is_non_overlapping_and_dense_indicator"),
)


class RememberingNode(SymNode):
    """A SymNode; equal questions about equal expressions get the first answer.

    Expressions are immutable, and what tracing learns of their symbols later is applied when a node's `expr` is read,
    so an answer stays right. The answers live in the shape environment.
    """

    shape_env: Any
    _is_constant: bool | None = None
    _whole: tuple[int, int | None] | None = None
    """The number of replacements made so far, and with these the number that this is."""

    @property
    def expr(self) -> Any:
        """The expression, with what tracing learned of its symbols."""
        if self._is_constant is None:
            self._is_constant = isinstance(self._expr, int) or bool(getattr(self._expr, "is_number", False))
        version = self.shape_env._replacements_version_counter
        if self._is_constant or version == 0:
            return self._expr
        if self._expr_ver == version and self._expr_cache is not None:
            return self._expr_cache
        return super().expr

    def maybe_as_int(self) -> int | None:
        """The number that it is, if it is one."""
        version = self.shape_env._replacements_version_counter
        if self._whole is None or self._whole[0] != version:
            found = super().maybe_as_int()
            self._whole = self.shape_env._replacements_version_counter, found
        return self._whole[1]

    def guard_bool(self, file: str, line: int) -> bool:
        """Its truth value."""
        known = _TRUTH.get(self._expr)
        return super().guard_bool(file, line) if known is None else known

    def expect_true(self, file: str, line: int) -> bool:
        """Its truth value, which has to be true."""
        return True if self._expr is sympy.true else super().expect_true(file, line)

    def guard_or_false(self, file: str, line: int) -> bool:
        """Its truth value, or False where that depends on data."""
        known = _TRUTH.get(self._expr)
        return super().guard_or_false(file, line) if known is None else known

    @classmethod
    def of(cls, node: SymNode) -> SymNode:
        """`node`, remembering from now on."""
        if type(node) is SymNode:
            node.__class__ = cls
        return node

    def wrap_int(self, num: int) -> SymNode:
        """The node of a constant."""
        memo = self.shape_env.answers
        found: SymNode | None = memo.get(num)
        if found is None:
            made = SymNode(sympy.Integer(num), self.shape_env, int, num, constant=num, fx_node=num)
            found = memo[num] = self.of(made)
        return found


def _is_recorded() -> bool:
    """Whether a ProxyTorchDispatchMode writes arithmetic into a graph; torch's `get_proxy_mode`, in half the time."""
    return _pre_dispatch_modes.get(0) is not None or _get_dispatch_mode(_PROXY) is not None


def sym_node(env: Any, expr: Any, pytype: type, hint: Any) -> SymNode:
    """The node of an expression; `hint` is None where the value depends on data."""
    return RememberingNode.of(SymNode(expr, env, pytype, _NO_HINT if hint is None else hint))


def _remembered(name: str) -> Callable[[SymNode, SymNode], SymNode]:
    compute = getattr(SymNode, name)

    def method(self: Any, other: SymNode) -> SymNode:
        if _is_recorded():
            result: SymNode = compute(self, other)
            return result
        key = (name, self._expr, other._expr)
        memo = self.shape_env.answers
        found: SymNode | None = memo.get(key)
        if found is None:
            found = memo[key] = RememberingNode.of(compute(self, other))
        return found

    return method


def _remembered_layout(name: str) -> Callable[[SymNode, list[SymNode], list[SymNode]], SymNode]:
    compute = getattr(SymNode, name)

    def method(self: Any, sizes: list[SymNode], strides: list[SymNode]) -> SymNode:
        if _is_recorded():
            result: SymNode = compute(self, sizes, strides)
            return result
        key = (name, *[n._expr for n in sizes], *[n._expr for n in strides])
        memo = self.shape_env.answers
        found: SymNode | None = memo.get(key)
        if found is None:
            found = memo[key] = RememberingNode.of(compute(self, sizes, strides))
        return found

    return method


for _name in _BINARY:
    setattr(RememberingNode, _name, _remembered(_name))
for _name in _LAYOUT:
    setattr(RememberingNode, _name, _remembered_layout(_name))
