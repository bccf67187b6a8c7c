"""What Python reads of tensors while the tape is written: constants, symbols, and what the example decides.

`.item()` and its kind give a symbol for a value that depends on data; `if t:`, `torch.equal(a, b)` and `t.numpy()` want
the value itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from scopetrace._compat import dispatch
from scopetrace._compat.symbols import plain_number
from scopetrace.errors import DataDependentError
from scopetrace.record.specialize import Decider
from scopetrace.record.values import RealValues, reads_a_value
from scopetrace.record.writer import TapeWriter

_aten = torch.ops.aten


class ReadingWriter(TapeWriter):
    """Answers what Python asks of values."""

    mode: dispatch.PreDispatchMode

    def learn_values(self, specialize: bool) -> None:
        """Say whether the example inputs decide what depends on data."""
        self.specialize = specialize
        self.running: Any = None  # the op that torch runs now, for errors
        self.values = RealValues(self.tape, self.factory.shape_env)
        if specialize:
            self.factory.shape_env.decide = Decider(self.values, self.tape.specializations, self.where_asked)

    def answer(self, func: Any, args: tuple[Any, ...], lifted: tuple[Any, ...], lifted_kwargs: dict[str, Any]) -> Any:
        """What an op that reads values gives to Python; NotImplemented for a symbol, which torch makes."""
        found, constant = self.values.constant(func, lifted, lifted_kwargs)
        if found:
            return constant
        if func in (_aten.equal.default, _aten.allclose.default):
            return self._asked(func, lifted, lifted_kwargs)
        if func is _aten.is_nonzero.default and args[0].numel() == 1:
            return self._is_true(func, dispatch.with_mode(self.mode, args[0].item))
        return NotImplemented

    def _asked(self, func: Any, args: Any, kwargs: Any) -> bool:
        """A yes or no that depends on data, and that Python wants at once."""
        answer = self.factory.shape_env.create_unbacked_symbool()
        op = self._append("call_function", func, args, kwargs)
        op.unbacked = self.factory.unbacked_bindings(answer)
        op.outputs = answer
        return self._is_true(func, answer)

    def _is_true(self, func: Any, number: Any) -> bool:
        self.running = func
        answer = bool(number) if isinstance(number, torch.SymBool) else bool(number != 0)
        self.running = None
        return answer

    def number_of(self, x: Any) -> Any:
        """The number that Python looks at; NotImplemented where the trace is not specialized."""
        if not self.specialize:
            return NotImplemented
        return plain_number(x.item() if isinstance(x, torch.Tensor) else x)

    def data_of(self, t: torch.Tensor) -> Any:
        """A real tensor with the data of one that Python looks at as a whole.

        NotImplemented where it depends on inputs or state and the trace is not specialized.
        """
        value = self.value_of(t)
        found, real = self.values.constant(_aten.clone.default, (value,), {})
        if not found and not self.specialize:
            return NotImplemented
        if not found:
            real = self.values.tensor(value)
            if not torch.equal(t, real):
                raise DataDependentError(
                    "Python reads a tensor with NaN, which no trace can hold fixed", **self.where()
                )
        with dispatch.eager():
            return real.clone().requires_grad_(t.requires_grad)

    def where_asked(self, expr: Any) -> dict[str, Any]:
        """`op`, `module`, `fqn` and `source` of a question that Python asks now."""
        return {"op": self.reader(expr), "fqn": self.call.fqn if self.call is not None else None, **self.where()}

    def reader(self, expr: Any) -> str | None:
        """The op by which Python got at the value of an expression."""
        maker = self.values.maker(expr)
        if maker is None or reads_a_value(self.running):
            return None if self.running is None else str(self.running)
        return str(maker.target)


def _split(self: ReadingWriter, x: torch.Tensor, at: torch.Tensor, dim: int = 0) -> Any:
    return dispatch.with_mode(self.mode, lambda: torch.tensor_split(x, at.tolist(), dim))


def _narrow(self: ReadingWriter, x: torch.Tensor, dim: int, start: torch.Tensor, length: Any) -> Any:
    return dispatch.with_mode(self.mode, lambda: torch.narrow(x, dim, start.item(), length))  # type: ignore[arg-type]


READ_INSIDE: dict[Any, Callable[..., Any]] = {
    _aten.tensor_split.tensor_indices_or_sections: _split,
    _aten.narrow.Tensor: _narrow,
}
"""Ops that read numbers from a tensor, as an op for each number and one that takes numbers."""
