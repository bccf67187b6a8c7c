"""Python reads the data of tensors while the model is traced: `.item()`, `if t:`, `torch.equal`, `t.numpy()`.

Data flow:
    a read of a constant                     -> the ops that made it run for real -> the value itself
    `.item()` and the like of anything else  -> an unbacked symbol, which torch makes
    a read that needs the value (`if t:`)    -> refused; with specialize=True, its value in the example run, kept as a
                                                Specialization and asserted by the graph

The example run is the part of the tape that decides a value, run on the inputs and parameters themselves; what its ops
write to is copied first. Results are kept, so the next value costs only the ops that are new.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from scopetrace._compat.ops import eager, is_collective, is_op, is_random, schema_of
from scopetrace._compat.questions import fact_of
from scopetrace._compat.shape_env import evaluated
from scopetrace._compat.symbols import Symbolic, to_expr
from scopetrace._compat.tensors import FakeTensor
from scopetrace.errors import DataDependentError
from scopetrace.guards.reach import names_of
from scopetrace.ir.conditions import Specialization
from scopetrace.ir.guards import Asked
from scopetrace.ir.scopes import walk_frames
from scopetrace.ir.tape import Op, RecordedTape, Value, flat, map_argument
from scopetrace.ops.history import KEEP_MORE
from scopetrace.record.reads import ReadRecorder
from scopetrace.record.values import ValueTable

_aten = torch.ops.aten
_Wanted = tuple[Any, int]
"""A value or symbolic expression, and the number of ops before the place where it is wanted."""

_OF_STORED = frozenset(
    getattr(_aten, name).default
    for name in ("_nnz", "values", "_values", "indices", "_indices", "col_indices", "row_indices")
)
"""The ops that give the elements of a sparse tensor, or their number."""
_FROM_ELEMENTS = re.compile(r"^aten::_?sparse_\w*tensor")
"""The ops that take these: as many as are given are stored."""

READERS = _OF_STORED | {
    getattr(_aten, name).default for name in ("item", "_local_scalar_dense", "is_nonzero", "equal", "allclose")
}
"""The ops that give Python a number or truth value, or a tensor of which data decides the size."""

_LITERAL = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default)
"""The ops that begin with a tensor that Python has just made of numbers."""


class NoRealValue(Exception):
    """A value depends on something that has no data: a tensor on the meta device, a leaf module."""


class DataReader:
    """Answers what Python asks of the data of tensors."""

    def __init__(self, values: ValueTable, reads: ReadRecorder, *, specialize: bool) -> None:
        self._builder, self._values, self._factory = values.builder, values, values.factory
        self._reads, self._specialize = reads, specialize

    @functools.cached_property
    def _example(self) -> ExampleRun:
        return ExampleRun(self._values, self._builder.tape, self._values.examples)

    def _on_constant(self, name: str, t: torch.Tensor) -> None:
        """Python reads the data of a constant: a call in which it is another one is another program."""
        self._reads.note_once(f"the data of {name}", fact_of(t, "data", ()), Asked(fact_of, (t, "data", ())))

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an op of `READERS` gives to Python; NotImplemented where torch is to make a symbol for it.

        Raises DataDependentError, or torch's error that it stands for, where Python needs a value that there is not.
        """
        if func in _OF_STORED:
            self._refuse_unknown_count(func, args[0])
            return NotImplemented
        constant = self._example.constant(func, args, kwargs, self._on_constant)
        if constant is NotImplemented and func in (_aten.equal.default, _aten.allclose.default):
            answer = self._factory.shape_env.create_unbacked_symbool()
            unbacked = self._factory.unbacked_bindings(answer)
            self._builder.append("call_function", func, args, kwargs, answer, unbacked=unbacked)
            return self.is_true(func, answer)
        is_python_bool = _aten.is_nonzero.default in (func, self._builder.running)
        if constant is NotImplemented and args[0].fake.dtype is torch.bool and not is_python_bool:
            self._refuse_identity(func)
        return constant

    def _refuse_identity(self, func: Any) -> None:
        """Raise where code that takes the number of a bool tensor asks whether something `is True`."""
        frames = walk_frames(self._builder.frames())
        if frames and names_of(frames[-1][0]).compares_bools:
            raise DataDependentError(
                "the forward compares by `is True` or `is False` where it takes the number of a bool tensor, which is "
                "neither in a trace",
                op=str(func),
                **self._builder.where(),
                hint="write `== True`, or compute with the tensor: torch.where",
            )

    def _refuse_unknown_count(self, func: Any, sparse: Value) -> None:
        """Raise where data decides how many elements a sparse tensor stores: a fake one says 0."""
        made_by = sparse.op.target
        if sparse.fake.layout is not torch.strided and not (
            is_op(made_by) and _FROM_ELEMENTS.search(schema_of(made_by).name)
        ):
            raise DataDependentError(
                "the forward asks for the elements that a sparse tensor stores, and data decides how many there are",
                op=str(func),
                **self._builder.where(),
                hint="compute with the tensor as a whole, or pass its indices and values as arguments, and make it of "
                "them by torch.sparse_coo_tensor",
            )

    def is_true(self, func: Any, number: Any) -> bool:
        """The truth of what `func` gave, which Python wants at once."""
        with self._builder.run_by_torch(func):
            return bool(number) if isinstance(number, torch.SymBool) else bool(number != 0)

    def number_of(self, x: Any) -> Any:
        """The number behind a tensor of one element or a symbolic number; NotImplemented without specialization."""
        if not self._specialize:
            return NotImplemented
        number = x.item() if isinstance(x, torch.Tensor) else x
        return number.node.pytype(number) if isinstance(number, Symbolic) else number

    def data_of(self, t: torch.Tensor) -> Any:
        """A real tensor with the data of `t`; NotImplemented where inputs or state decide, without specialization."""
        value = self._values.value_of(t)
        real = self._example.constant(_aten.clone.default, (value,), {}, self._on_constant)
        if real is NotImplemented:
            if not self._specialize:
                return NotImplemented
            real = self._example.tensor(value)
            if not torch.equal(t, real):
                raise DataDependentError(
                    "Python reads a tensor with NaN, which no trace can hold fixed", **self._builder.where()
                )
        with eager():
            return real.clone().requires_grad_(t.requires_grad)

    @contextlib.contextmanager
    def real_tensors(self, values: list[Value]) -> Iterator[None]:
        """Inside, the fake mode knows the tensors of the example run, and compares what an op gives for both."""
        fakes, real = list[Any](v.fake for v in values), list[torch.Tensor]()
        with contextlib.suppress(NoRealValue):
            real = list(map(self._example.tensor, values))
        for fake, tensor in zip(fakes, real, strict=False):
            fake.real_tensor = tensor
        try:
            yield
        finally:
            for fake in fakes:
                fake.real_tensor = None

    def reader(self, expr: Any, running: Any) -> str | None:
        """The op by which Python got at the value of an expression, while torch ran the op `running`."""
        maker = self._example.maker(expr)
        if maker is None or running in READERS:
            return None if running is None else str(running)
        return str(maker.target)

    def decide(self, expr: Any) -> tuple[bool | int | float, str] | None:
        """What `expr` is in the example run, a specialization, and the error where it is not. Raises NoRealValue.

        None where the trace is not to be specialized. What an optimizer asks of its own state, as the number of the
        step, is one also then: it changes once, after some steps.
        """
        if not self._specialize and not (self._builder.optimizer and self._example.is_of_state(expr)):
            return None
        call, specializations = self._builder.call, self._builder.tape.specializations
        fqn, op = (call.fqn if call is not None else None), self.reader(expr, self._builder.running)
        where: dict[str, Any] = {"op": op, "fqn": fqn, **self._builder.where()}
        value = self._example.number(expr)
        value = value if isinstance(value, (bool, float)) else int(value)
        known = Specialization(str(expr), value, **where)
        if known not in specializations:
            specializations.append(known)
        return value, known.message


class ExampleRun:
    """Runs parts of a tape that is being recorded, on the example `inputs`."""

    def __init__(self, values: ValueTable, tape: RecordedTape, inputs: dict[Value, torch.Tensor]) -> None:
        self._tape = tape
        self._env, self._is_state = values.factory.shape_env, values.is_state
        self._random_state = torch.get_rng_state()
        self._inputs = inputs
        self._seen = 0  # the ops before are in the two tables that follow
        self._last: Op | None = None
        self._touching: dict[int, list[int]] = {}  # by storage: the ops that make or write it
        self._binder: dict[Any, int] = {}  # by symbol: the op that makes it
        self._start_over()

    def constant(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], note: Callable[..., None]) -> Any:
        """What an op gives that depends neither on inputs nor on the model's state; else NotImplemented.

        `note` is told of the constants that it depends on: name and tensor.
        """
        wanted = [(a, len(self._tape.ops)) for a in flat((args, kwargs))]
        ops = self._leading_to(wanted, self._is_constant)
        if ops is None:
            return NotImplemented
        needed = [self._tape.ops[i] for i in ops]
        literals = {op.tensor(0) for op in needed if op.target in _LITERAL}
        for op in needed:
            if op.kind == "get_attr" and op.result not in literals:
                note(op.name, self._tape.attributes[op.name])
        self._run(wanted)
        with eager():
            return func(*self._real(args), **self._real(kwargs))

    def tensor(self, value: Value, before: int | None = None) -> torch.Tensor:
        """A copy of a tensor at this point of the example run, or before so many ops. Raises NoRealValue."""
        self._run([(value, len(self._tape.ops) if before is None else before)])
        with eager():
            return self._tensors[value].clone()

    def number(self, expr: Any) -> Any:
        """The value of an expression of symbols in the example run. Raises NoRealValue."""
        self._run([(expr, len(self._tape.ops))])
        return self._evaluated(expr)

    def _evaluated(self, expr: Any) -> Any:
        values: dict[Any, Any] = {}
        for symbol in expr.free_symbols:
            values[symbol] = self._numbers.get(symbol, self._env.backed_var_to_val.get(symbol))
            if values[symbol] is None:
                raise NoRealValue(f"no op on the tape made {symbol}")
        return evaluated(expr, values)

    def is_of_state(self, expr: Any) -> bool:
        """Whether an expression depends on an optimizer's state alone."""

        def may(op: Op) -> bool:
            if op.kind == "get_attr":
                return self._is_state(self._tape.attributes[op.name]) or self._is_constant(op)
            return is_op(op.target) and not is_random(op.target)

        return self._leading_to([(expr, len(self._tape.ops))], may) is not None

    def maker(self, expr: Any) -> Op | None:
        """The last op that made a symbol of an expression."""
        deciding = self._deciding(expr)
        return self._tape.ops[max(deciding)] if deciding else None

    def _leading_to(self, wanted: list[_Wanted], may: Callable[[Op], bool] | None = None) -> list[int] | None:
        """The positions of the ops that decide what is wanted; None where one of them does not satisfy `may`.

        Without `may`, ops that have run and all that leads to them are left out.
        """
        positions: set[int] = set()
        work = list(wanted)
        while work:
            a, before = work.pop()
            deciding = self._deciding(a)
            if isinstance(a, Value) and not any(i < before for i in deciding):  # its body is no longer on the tape
                if may is not None:
                    return None
                raise NoRealValue("it was made in the forward of a torch.autograd.Function, whose backward reads it")
            for i in deciding:
                if i >= before or i in positions or (may is None and i in self._done):
                    continue
                op = self._tape.ops[i]
                if may is not None and not may(op):
                    return None
                positions.add(i)
                work += [(read, i) for read in flat((op.args, op.kwargs)) if isinstance(read, (Value, *Symbolic))]
        return sorted(positions)

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

    def _start_over(self) -> None:
        self._done: set[int] = set()
        self._written: dict[int, int] = {}  # by storage on the tape: the last op that ran and wrote there
        self._tensors: dict[Value, torch.Tensor] = {}
        self._numbers: dict[Any, Any] = {}
        self._borrowed: set[int] = set()  # the storages on the tape that are those of the model or its inputs
        self._copies: dict[int, torch.UntypedStorage] = {}  # by storage on the tape: what is written to in its place

    def _run(self, wanted: list[_Wanted]) -> None:
        ops = self._leading_to(wanted) or []
        is_late = any(self._written.get(v.storage, -1) > i for i in ops for v in self._tape.ops[i].inputs())
        if is_late or any(v.storage in self._borrowed for i in ops for v in self._tape.ops[i].writes):
            self._start_over()  # an op needs memory as it was before something that has run, or writes to the model's
            ops = self._leading_to(wanted) or []
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with eager(), torch.random.fork_rng(devices=devices):  # random ops go on from where those before ended
            torch.set_rng_state(self._random_state)
            for i in ops:
                self._run_op(self._tape.ops[i])
                self._done.add(i)
                self._written.update({v.storage: i for v in self._tape.ops[i].writes})
            self._random_state = torch.get_rng_state()

    def _run_op(self, op: Op) -> None:
        if op.kind in ("placeholder", "get_attr"):
            self._tensors[op.result] = self._source(op.result)
            return
        if op.kind != "call_function" or not is_op(op.target):
            raise NoRealValue(f"the value depends on {op.target}, which does not run while a model is traced")
        if is_collective(op.target):
            raise NoRealValue(f"the value depends on {op.target}, which needs the other processes")
        args, kwargs = self._real(op.args), self._real(op.kwargs)
        if op.target in KEEP_MORE and op.grad:
            args = map_argument(lambda t: t.detach().requires_grad_() if isinstance(t, torch.Tensor) else t, args)
            with torch.enable_grad():
                out = tuple([t.detach() for t in op.target(*args, **kwargs)])
        else:
            out = op.target(*args, **kwargs)
        for value, tensor in zip(flat(op.outputs), flat(out), strict=True):
            if isinstance(value, Value):
                self._tensors[value] = tensor
        self._numbers.update({symbol: pytree.key_get(out, path) for symbol, path in (op.unbacked or {}).items()})

    def _source(self, value: Value) -> torch.Tensor:
        real = value.real if value.real is not None else self._inputs.get(value)
        if real is None:
            raise NoRealValue("it depends on what a higher-order op gives to a body, which does not run")
        if real.device.type == "meta" or isinstance(real, FakeTensor):
            name = value.op.target
            raise NoRealValue(f"{name} has no data: give {name} on a device other than meta, to specialize on values")
        if real.layout is not torch.strided:
            return real.detach().clone()
        if value.storage not in self._tape.written_storages():
            self._borrowed.add(value.storage)
            return real.detach()
        if value.storage not in self._copies:
            self._copies[value.storage] = real.untyped_storage().clone()
        new = torch.empty(0, dtype=real.dtype, device=real.device)
        return new.set_(self._copies[value.storage], real.storage_offset(), real.size(), real.stride())

    def _is_constant(self, op: Op) -> bool:
        if op.kind == "get_attr":
            storage = op.result.storage
            written = (v.storage for i in self._touching[storage] for v in self._tape.ops[i].writes)
            if op.target in self._tape.owners or storage in written:
                return False
            return not self._is_state(self._tape.attributes[op.name])  # a learning rate that a scheduler may set
        if not is_op(op.target) or is_random(op.target) or is_collective(op.target) or op.unbacked is not None:
            return False
        return not any(isinstance(a, Symbolic) for a in flat((op.args, op.kwargs)))

    def _real(self, x: Any) -> Any:
        numbers = map_argument(lambda n: self._evaluated(to_expr(n)) if isinstance(n, Symbolic) else n, x)
        return map_argument(lambda v: self._tensors[v] if isinstance(v, Value) else v, numbers)
