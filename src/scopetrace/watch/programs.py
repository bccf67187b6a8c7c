"""Whether two recordings of one forward are the same program.

Data flow:
    ops of the second, in order -> ops of the first with equal targets and arguments -> their values are one
    a tensor that the first run has stored and the second reads -> the value that was stored
    ops of the first that only made what it stored -> passed over
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from scopetrace._compat.ops import eager, is_random
from scopetrace._compat.symbols import Symbolic
from scopetrace.containers.stand_ins import plain
from scopetrace.containers.structure import leaves, leaves_with_path
from scopetrace.ir.tape import Op, ProgramTape, Tape, Value

LITERAL = "_tensor_constant"
"""What tensors are called that no module has, numbered as they come: more of them in a run that stores something."""


def is_same_program(first: ProgramTape, second: ProgramTape, stored: Mapping[int, Value] | None = None) -> bool:
    """Whether two recordings have the same ops, with the same results.

    `stored` has the values of `first` that are stored, by the id of the tensor that `second` reads in their place: then
    it may have the ops for these, too.
    """
    return _Match(first, second, stored).run()


def what_is_left(tape: ProgramTape) -> dict[Any, Value]:
    """What a program gives, binds and writes, by what tells that it is the same in another recording."""
    written, inputs = tape.written_storages(), enumerate(tape.inputs)
    outside = [*((-1 - i, v) for i, v in inputs), *((id(v.real), v) for _, v in tape.attribute_reads())]
    bound = [(w.path if w.place is None else w.place.id, w.value) for w in tape.attribute_writes]
    results = [(f"result {i}", v) for i, v in enumerate(leaves(tape.outputs, Value))]
    return dict([*results, *bound, *((key, v) for key, v in outside if v.storage in written)])


class _Match:
    def __init__(self, first: Tape, second: Tape, stored: Mapping[int, Value] | None = None) -> None:
        self._first, self._second, self._stored = first, second, stored or {}
        self._is_filled = stored is not None
        self._now: dict[int, int] = {}
        """By id of a fake tensor of the second program, that of the first; `to` may return what it takes."""
        self._passed: set[int] = set()
        """The memory that only ops which are passed over have made."""
        self._attributes = [op for op in first.ops if op.kind == "get_attr"]
        self._ops = [op for op in first.ops if op.kind not in ("get_attr", "placeholder")]

    def run(self) -> bool:
        first, second = self._first, self._second
        if len(first.inputs) != len(second.inputs):
            return False
        self._pair(first.inputs, second.inputs)
        at = 0
        for op in second.ops:
            if op.kind == "placeholder":
                continue
            if op.kind == "get_attr":
                if not self._find_attribute(op):
                    return False
                continue
            while at < len(self._ops) and not self._are_equal(self._ops[at], op):
                if not self._may_pass(self._ops[at]):
                    return False
                at += 1
            if at == len(self._ops):
                return False
            self._pair(self._ops[at].values(), op.values())
            at += 1
        rest = self._ops[at:]
        return all(map(self._may_pass, rest)) and self._has_same_results()

    def _may_pass(self, op: Op) -> bool:
        """Whether an op of the first program may have made what is stored, and does nothing but to give results."""
        kept = (*op.inputs(), *self._stored.values())
        may = self._is_filled and not is_random(op.target) and op.kind == "call_function"
        changes_data = op.target is not torch.ops.aten.detach_.default  # of `torch.tensor(0.0)`
        may = may and not (changes_data and any(v.storage not in self._passed for v in op.writes))
        self._passed |= {v.storage for v in op.values()} - {v.storage for v in kept}
        return may

    def _find_attribute(self, op: Op) -> bool:
        (value,) = op.values()
        real = value.real
        if id(real) in self._stored:
            self._now[id(value.fake)] = id(self._stored[id(real)].fake)
            return True
        for known in self._attributes:
            (of_first,) = known.values()
            if of_first.real is real or (known.name == op.name and _are_equal_tensors(of_first.real, real)):
                self._now[id(value.fake)] = id(of_first.fake)
                return True
        return str(op.target).startswith(LITERAL)  # compared where it is read

    def _are_equal(self, first: Op, second: Op) -> bool:
        facts = [(op.kind, op.target, op.grad, len(op.values())) for op in (first, second)]
        return facts[0] == facts[1] and self._same((first.args, first.kwargs), (second.args, second.kwargs))

    def _pair(self, first: list[Value], second: list[Value]) -> None:
        for old, new in zip(first, second, strict=True):
            self._now.setdefault(id(new.fake), id(old.fake))

    def _same(self, first: Any, second: Any) -> bool:
        if isinstance(second, Value):
            is_paired = isinstance(first, Value) and self._now.get(id(second.fake)) == id(first.fake)
            are_literals = isinstance(first, Value) and all(
                str(v.op.target).startswith(LITERAL) for v in (first, second)
            )
            return is_paired or (are_literals and _are_equal_tensors(first.real, second.real))
        if isinstance(second, Tape):
            return isinstance(first, Tape) and _Match(first, second).run()
        if isinstance(second, Symbolic):
            return type(first) is type(second) and str(first.node.expr) == str(second.node.expr)
        if isinstance(second, (list, tuple)):
            is_alike = isinstance(first, (list, tuple)) and len(first) == len(second)
            return is_alike and all(map(self._same, first, second))
        if isinstance(second, dict):
            is_alike = isinstance(first, dict) and [*first] == [*second]
            return is_alike and self._same([*first.values()], [*second.values()])
        return first is second or (type(first) is type(second) and repr(first) == repr(second))

    def _has_same_results(self) -> bool:
        first, second = self._first, self._second
        of_first, of_second = (leaves(tape.outputs, (Value, *Symbolic)) for tape in (first, second))
        if len(of_first) != len(of_second) or not self._same(of_first, of_second):
            return False
        if _plain_results(first) != _plain_results(second):
            return False
        writes = [tape.attribute_writes if isinstance(tape, ProgramTape) else [] for tape in (first, second)]
        written = [[(write.path, write.value) for write in of_tape] for of_tape in writes]
        by_path = dict(written[0])
        return all(path in by_path and self._same(by_path[path], value) for path, value in written[1])


def _plain_results(tape: Tape) -> list[tuple[str, str]]:
    """The numbers and texts that a program gives beside its tensors, and the keys that lead to them and to these."""
    outputs = tape.result if isinstance(tape, ProgramTape) else ()
    values = [(path, plain(x)) for path, x in leaves_with_path(outputs)]
    return [(path, repr(x) if isinstance(x, (bool, int, float, complex, str, bytes)) else "") for path, x in values]


def _are_equal_tensors(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """Whether two constants, as of `torch.tensor([1, 2])`, are equal."""
    if first is None or second is None or (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with eager():
        return first.device.type != "meta" and torch.equal(first, second)
