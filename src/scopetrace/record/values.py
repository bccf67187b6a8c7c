"""Real values that Python asks for while a model is traced: `.item()`, `if t:`, `torch.equal`.

Data flow:
    a tensor of the tape, or a symbol -> the ops on the tape that decide its data -> these ops, run for real

The ops run on the inputs and parameters themselves; what they write to is copied first. What has run is kept: the next
value costs the ops that are new. Values of constants are always computed, others where the trace is specialized.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from scopetrace._compat.dispatch import eager
from scopetrace._compat.shape_env import WatchedShapeEnv, bound_values, evaluated
from scopetrace._compat.symbols import Symbolic, to_expr
from scopetrace._compat.tensors import FakeTensor, storage_id
from scopetrace.ir.tape import Op, Tape, Value, flat

_aten = torch.ops.aten
_Wanted = tuple[Any, int]
"""A value or a symbolic expression, and the number of ops before the place where it is wanted."""
_READERS = (
    _aten.item.default,
    _aten._local_scalar_dense.default,
    _aten.is_nonzero.default,
    _aten.equal.default,
    _aten.allclose.default,
)


def reads_a_value(func: Any) -> bool:
    """Whether Python gets a number from the op, in place of a tensor."""
    return func in _READERS


class NoRealValue(Exception):
    """A value depends on something that has none: a tensor on the meta device, a leaf module."""


class RealValues:
    """Runs parts of a tape that is being recorded."""

    def __init__(self, tape: Tape, shape_env: WatchedShapeEnv) -> None:
        self._tape = tape
        self._env = shape_env
        self._random_state = torch.get_rng_state()
        self._inputs: dict[Value, torch.Tensor] = {}
        self._seen = 0  # the ops before are in the two tables that follow
        self._last: Op | None = None
        self._touching: dict[int, list[int]] = {}  # by storage: the ops that make or write it
        self._binder: dict[Any, int] = {}  # by symbol: the op that makes it
        self._start_over()

    def add_input(self, value: Value, real: torch.Tensor) -> None:
        """An input of the program, and the example for it."""
        self._inputs[value] = real

    def constant(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """(True, what the op gives) when it depends neither on inputs nor on the model's state; else (False, None)."""
        wanted = [(a, len(self._tape.ops)) for a in flat((args, kwargs))]
        ops = self._leading_to(wanted, _is_constant)
        if ops is None:
            return False, None
        self._run(wanted)
        with eager():
            return True, func(*self._real(args), **self._real(kwargs))

    def tensor(self, value: Value) -> torch.Tensor:
        """A copy of a tensor at this point of the example run. Raises NoRealValue."""
        self._run([(value, len(self._tape.ops))])
        with eager():
            return self._tensors[value].clone()

    def number(self, expr: Any) -> Any:
        """What an expression of symbols is in the example run. Raises NoRealValue."""
        self._run([(expr, len(self._tape.ops))])
        return self._evaluated(expr)

    def _evaluated(self, expr: Any) -> Any:
        values: dict[Any, Any] = {}
        for symbol in expr.free_symbols:
            values[symbol] = self._numbers.get(symbol, self._env.backed_var_to_val.get(symbol))
            if values[symbol] is None:
                raise NoRealValue(f"no op on the tape made {symbol}")
        return evaluated(expr, values)

    def maker(self, expr: Any) -> Op | None:
        """The last op that made a symbol of an expression."""
        made = self._deciding(expr)
        return self._tape.ops[max(made)] if made else None

    # ---------------------------------------------------------------- which ops

    def _leading_to(self, wanted: list[_Wanted], may: Callable[[Op], bool] | None = None) -> list[int] | None:
        """The ops, in order, that decide what is wanted; None where one of them `may` not.

        Without `may`, those that have run and what is before them are left out.
        """
        found: set[int] = set()
        work = list(wanted)
        while work:
            a, before = work.pop()
            for i in self._deciding(a):
                if i >= before or i in found or (may is None and i in self._done):
                    continue
                op = self._tape.ops[i]
                if may is not None and not may(op):
                    return None
                found.add(i)
                work += [(read, i) for read in flat((op.args, op.kwargs)) if isinstance(read, (Value, *Symbolic))]
        return sorted(found)

    def _deciding(self, a: Any) -> list[int]:
        """The ops that make or write a tensor's memory, or that make the symbols of a number."""
        self._index()
        if isinstance(a, Value):
            return self._touching.get(a.storage, [])
        return [self._binder[s] for s in getattr(to_expr(a), "free_symbols", ()) if s in self._binder]

    def _index(self) -> None:
        ops = self._tape.ops
        if self._seen and (self._seen > len(ops) or ops[self._seen - 1] is not self._last):
            self._seen, self._touching, self._binder = 0, {}, {}  # a body of a higher-order op was cut off the tape
            self._start_over()
        for i in range(self._seen, len(ops)):
            for storage in {v.storage for v in (*ops[i].values(), *ops[i].writes)}:
                self._touching.setdefault(storage, []).append(i)
            for symbol in ops[i].unbacked or ():
                self._binder[symbol] = i
        self._seen = len(ops)
        self._last = ops[-1] if ops else None

    # ---------------------------------------------------------------- running them

    def _start_over(self) -> None:
        self._done: set[int] = set()
        self._written: dict[int, int] = {}  # by storage on the tape: the last op that ran and wrote there
        self._tensors: dict[Value, torch.Tensor] = {}
        self._numbers: dict[Any, Any] = {}
        self._borrowed: set[int] = set()  # the real storages that are not ours to write to
        self._copies: dict[int, torch.UntypedStorage] = {}  # by real storage: what is written to in its place

    def _run(self, wanted: list[_Wanted]) -> None:
        ops = self._leading_to(wanted) or []
        if any(self._written.get(v.storage, -1) > i for i in ops for v in self._tape.ops[i].inputs()):
            self._start_over()  # an op needs memory as it was before something that has run
            ops = self._leading_to(wanted) or []
        with eager(), self._drawing():
            for i in ops:
                self._run_op(self._tape.ops[i])
                self._done.add(i)
                self._written.update({v.storage: i for v in self._tape.ops[i].writes})

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        """Random ops go on from where the ones before ended; the generators stay as they are for all others."""
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
            torch.set_rng_state(self._random_state)
            yield
            self._random_state = torch.get_rng_state()

    def _run_op(self, op: Op) -> None:
        if op.kind in ("placeholder", "get_attr"):
            self._tensors[op.outputs] = self._source(op.outputs)
            return
        if op.kind != "call_function" or not hasattr(op.target, "_schema"):
            raise NoRealValue(f"the value depends on {op.target}, which does not run while a model is traced")
        for value in op.writes:
            self._own(self._tensors[value])
        out = op.target(*self._real(op.args), **self._real(op.kwargs))
        for value, tensor in zip(flat(op.outputs), flat(out), strict=True):
            if isinstance(value, Value):
                self._tensors[value] = tensor
        self._numbers.update(bound_values(op.unbacked, out))

    def _source(self, value: Value) -> torch.Tensor:
        real = value.real if value.real is not None else self._inputs.get(value)
        if real is None:
            raise NoRealValue("it depends on what a higher-order op gives to a body, which does not run")
        if real.device.type == "meta" or isinstance(real, FakeTensor):
            name = value.op.target
            raise NoRealValue(f"{name} has no data: give {name} on a device other than meta, to specialize on values")
        if real.layout is not torch.strided:
            return real.detach().clone()
        copy = self._copies.get(storage_id(real))
        if copy is not None:
            return _over(copy, real)
        self._borrowed.add(storage_id(real))
        return real.detach()

    def _own(self, written: torch.Tensor) -> None:
        """Before a write: what lies in memory of the model or its inputs moves to a copy of that memory."""
        storage = storage_id(written)
        if storage not in self._borrowed:
            return
        copy = self._copies[storage] = written.untyped_storage().clone()
        for value, t in self._tensors.items():
            if storage_id(t) == storage:
                self._tensors[value] = _over(copy, t)
        self._borrowed.discard(storage)

    def _real(self, x: Any) -> Any:
        if isinstance(x, Value):
            return self._tensors[x]
        if isinstance(x, Symbolic):
            return self._evaluated(to_expr(x))
        if isinstance(x, (list, tuple)):
            return type(x)([self._real(item) for item in x])
        if isinstance(x, dict):
            return {name: self._real(item) for name, item in x.items()}
        return x


def _over(storage: torch.UntypedStorage, t: torch.Tensor) -> torch.Tensor:
    """The view `t` of its storage, of another one."""
    new = torch.empty(0, dtype=t.dtype, device=t.device)
    return new.set_(storage, t.storage_offset(), t.size(), t.stride())


def _is_constant(op: Op) -> bool:
    if op.kind == "get_attr":
        return str(op.target).startswith("_tensor_constant")
    if (
        op.kind != "call_function"
        or op.bodies()
        or torch.Tag.nondeterministic_seeded in op.target.tags
        or op.unbacked is not None
    ):
        return False
    return not any(isinstance(a, Symbolic) for a in flat((op.args, op.kwargs)))
