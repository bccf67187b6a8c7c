"""Optimizers whose first step makes their state: the program is that of the later ones, on what the first begins with.

Data flow:
    a recording of a first step, and what it put into the state -> what was there before the step computed: constants as
    they are, zeros for what data decides, 0 for a count of 1
    the forward once more, on that -> a second recording, as of any later step
    both leave the same, by their ops or for the example inputs and random ones -> the second is right for both steps

An optimizer has that state from then on. Where they differ it is as before, and the first step is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch

from scopetrace._compat.ops import eager, is_random
from scopetrace._compat.questions import MISSING
from scopetrace._compat.symbols import Symbolic
from scopetrace._compat.tensors import is_symbolic
from scopetrace.containers.contents import ATOMS, Place
from scopetrace.errors import UnsupportedOpError
from scopetrace.ir.tape import Value
from scopetrace.watch.programs import LITERAL, is_same_program, what_is_left
from scopetrace.watch.settle import LIKE, Run, operands


class FirstState(NamedTuple):
    """What one step of an optimizer has put into its state."""

    optimizer: torch.optim.Optimizer
    entries: Mapping[tuple[Any, Any], Any]
    """By the parameter and the name; a Value for each tensor."""
    error: UnsupportedOpError
    """That it cannot be traced."""


def begun(first: Run, again: Callable[[], Run]) -> Run:
    """The recording of the later steps, which `again` makes; the optimizers keep the state that these begin with.

    Raises the error of a FirstState where the first step computes other things; then the optimizers have no state, as
    after any other error.
    """
    begins, places = _Begins(first), list[Place]()
    try:
        for optimizer, entries, error in first.first_states:
            for (p, key), left in entries.items():
                if key != "" and p not in optimizer.state:
                    places.append(Place(optimizer.state, p))
                    places[-1].put({})
                place = Place(optimizer.state[p], key) if key != "" else Place(optimizer.state, p)
                begin = begins.of(left)
                if begin is MISSING:
                    raise error
                places.append(place)
                place.put(begin)
                begins.pairs[id(begin) if isinstance(left, Value) else place.id] = left, begin
        run = again()
        if run.first_states or not begins.lead_to(run):
            raise first.first_states[0].error
    except BaseException:  # an interrupt too leaves the optimizer as it was
        for place in reversed(places):
            place.put(MISSING)
        raise
    return run


class _Begins:
    """What the state is before a first step computes with it."""

    def __init__(self, first: Run) -> None:
        self._first, self._ops = first, {op: i for i, op in enumerate(first.tape.ops)}
        self.pairs: dict[Any, tuple[Any, Any]] = {}
        """What the first step has left in an entry, and what that begins with."""
        outside = [*first.tape.inputs, *(v for _, v in first.tape.attribute_reads())]
        self._others = {v.storage for v in (*outside, *what_is_left(first.tape).values())}
        self._constants = set[Value]()
        """What neither inputs nor state nor chance decide."""
        differs = set[int]()
        for op in first.tape.ops:
            is_literal = op.kind == "get_attr" and str(op.target).startswith(LITERAL)
            may = is_literal or (op.kind == "call_function" and not is_random(op.target))
            if may and differs.isdisjoint(v.storage for v in operands(op)):
                self._constants.update(op.values())
            else:
                differs |= {v.storage for v in (*op.values(), *op.writes)}

    def of(self, left: Any) -> Any:
        """What an entry begins with; MISSING where it cannot be."""
        if not isinstance(left, Value):
            is_atom = type(left) in ATOMS and not isinstance(left, Symbolic)
            return MISSING if not is_atom else type(left)(0) if type(left) in (int, float) and left == 1 else left
        for known, begin in self.pairs.values():
            if known is left:
                return begin
        if left.storage in self._others or is_symbolic(left.fake):  # two entries that share memory would be two tensors
            return MISSING
        self._others.add(left.storage)
        if left in self._constants:
            op, make = left.op, cast(Any, left.op.target)
            if LIKE.get(make) == 0 and not is_symbolic(op.tensor(0).fake):  # also of a gradient, which takes a run
                with eager():
                    return make(_zeros(op.tensor(0)), *op.args[1:], **op.kwargs)
            if (t := self._first.data_of(left, self._ops[op] + 1)) is not None:
                return t
        return _zeros(left)

    def lead_to(self, run: Run) -> bool:
        """Whether the first step computes on it what the later ones do."""
        stored = {key: left for key, (left, _) in self.pairs.items() if isinstance(left, Value)}
        is_constant = len(stored) == len(self.pairs) and self._constants.issuperset(stored.values())
        first = self._first
        return (is_constant and is_same_program(first.tape, run.tape, stored)) or not first.values_differ(
            run.tape, self.pairs
        )


def _zeros(value: Value) -> torch.Tensor:
    t, device = value.fake, "meta" if value.fake.is_meta else value.fake.device
    with eager():
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).zero_()
