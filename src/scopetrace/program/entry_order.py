"""Entries of dicts and of `**kwargs` that come in another order than in the trace.

Data flow:
    arguments of a call -> the same with entries in the order of the trace
    the forward, recorded with both -> one program: the order does not matter; two: the call is refused
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_structure

from scopetrace.errors import InputMismatchError, ScopetraceError
from scopetrace.ir.scopes import tracing_state
from scopetrace.ir.tape import RecordedTape
from scopetrace.program.arguments import ExpectedArguments
from scopetrace.session import Arguments, record
from scopetrace.watch.programs import is_same_program

_DICTS = (dict, collections.OrderedDict)


class EntryOrder:
    """Puts entries of arguments into the order of the trace, where the forward computes the same in both."""

    def __init__(self, forward: Callable[..., Any] | None, expected: ExpectedArguments, more: list[str]) -> None:
        """`more` are the names in `**kwargs`, in the order of the trace."""
        self._forward, self._expected, self._more = forward, expected, more
        self._traced = self._sorted(tuple(expected.args), expected.kwargs)
        self._matters: dict[Any, bool] = {}
        """By the order of all entries, what was seen."""

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Those of a call as they are, where the order may matter. The first call in an order runs the forward twice.

        Of a trace from a file, and in a forward that is traced, it may. Raises InputMismatchError for `**kwargs`.
        """
        called = self._sorted(args, kwargs)
        ordered = _ordered(self._traced, called)
        order = tree_structure(called)
        if order != tree_structure(ordered) and self._forward is not None and tracing_state() is None:
            if order not in self._matters:
                self._matters[order] = self._is_another_program(ordered, called)
            if not self._matters[order]:
                return ordered
        more = [name for name in kwargs if name in self._more]
        if more != self._more and len(more) == len(self._more):
            orders = f"{self._more} when traced and {more} now"
            raise InputMismatchError(f"the order of **kwargs was {orders}; pass them in that of the trace")
        return args, kwargs

    def _sorted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """With keywords that are parameters by name, before those in `**kwargs`: their order never matters."""
        parameters = sorted(kwargs.keys() - self._more)
        return args, {name: kwargs[name] for name in (*parameters, *(name for name in kwargs if name in self._more))}

    def _is_another_program(self, ordered: Arguments, called: Arguments) -> bool:
        def recorded(form: Arguments) -> RecordedTape:
            def forward(*args: Any, **kwargs: Any) -> Any:
                args, kwargs = _ordered(form, (args, kwargs))
                return self._forward(*args, **kwargs)  # type: ignore[misc]

            return record(forward, *ordered)

        try:
            self._expected.match(*ordered)
            return not is_same_program(recorded(ordered), recorded(called))
        except ScopetraceError:  # the call says what does not fit
            return True


def _ordered(form: Any, x: Any) -> Any:
    """`x` with entries of dicts in the order that they have in `form`."""
    kind = type(form)
    if kind is type(x) and kind in _DICTS and form.keys() == x.keys():
        return kind({key: _ordered(form[key], x[key]) for key in form})
    if kind is type(x) and kind in (list, tuple) and len(form) == len(x):
        return kind([_ordered(*pair) for pair in zip(form, x, strict=True)])
    return x
