"""What calls make that is used outside of them."""

from __future__ import annotations

import collections
from typing import Any

from scopetrace._compat.symbols import Symbolic, to_expr
from scopetrace.containers.structure import leaves
from scopetrace.ir.tape import Call, FunctionalTape, Value


class Readers:
    """Of each value of a tape: the op that makes it, the last op that reads it, and the calls that take or give it.

    The same of each symbol that an op makes from data.
    """

    def __init__(self, tape: FunctionalTape) -> None:
        self._made: dict[Any, int] = {}
        self._last: dict[Any, int] = {}
        self._calls: dict[Any, list[Call]] = collections.defaultdict(list)
        self._symbols = [symbol for op in tape.ops for symbol in op.unbacked or ()]
        for i, op in enumerate(tape.ops):
            read = op.inputs() if not self._symbols else [*op.inputs(), *self._symbols_in((op.args, op.kwargs))]
            self._last.update(dict.fromkeys(read, i))
            self._made.update(dict.fromkeys([*op.values(), *(op.unbacked or ())], i))
        for call in tape.calls:
            used = (call.args, call.kwargs, call.outputs, call.mutated)
            for value in [*leaves(used, Value), *self._symbols_in(used)]:
                self._calls[value].append(call)
        results = [*tape.graph_outputs(), *(w.value for w in tape.attribute_writes)]
        self._results = {*leaves(results, Value), *self._symbols_in(results)}

    def _symbols_in(self, x: Any) -> set[Any]:
        numbers = leaves(x, Symbolic) if self._symbols else ()
        return {symbol for number in numbers for symbol in to_expr(number).free_symbols}

    def makes(self, call: Call, value: Any) -> bool:
        """Whether a value or symbol is made in a call, including the calls inside it."""
        return call.start <= self._made.get(value, -1) < call.stop

    def lost_numbers(self, call: Call) -> list[Any]:
        """The symbols that a call makes and that are used outside of it, though they are no sizes of its results."""
        used = [symbol for symbol in self._symbols if self.leaves(symbol, call)]
        sizes = {to_expr(n) for v in leaves(call.outputs, Value) for n in v.fake.size()} if used else ()
        return [symbol for symbol in used if symbol not in sizes]

    def leaves(self, value: Any, call: Call) -> bool:
        """Whether a value or symbol is made in a call and used outside of it."""
        if not self.makes(call, value):
            return False
        if value in self._results or self._last.get(value, -1) >= call.stop:
            return True
        return not all(call in reader.ancestors() for reader in self._calls.get(value, ()))
