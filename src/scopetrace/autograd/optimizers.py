"""The state of optimizers that step inside a forward.

Data flow:
    an optimizer steps for the first time -> its state, made before the program begins
    ops of the step -> read and write these, as any tensors from outside

Of an optimizer whose first step makes its state, the program is that of the later ones, on what the first begins with:
    a recording of a first step, and what it put into the state -> what was there before the step computed: constants as
    they are, zeros for what data decides, 0 for a count of 1
    the forward once more, on that -> a second recording, as of any later step
    both leave the same, by their ops or for the example inputs and random ones -> the second is right for both steps
An optimizer has that state from then on. Where they differ it is as before, and the first step is refused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, cast

import torch

from scopetrace._compat.gradients import counts_as_stepped, first_state, is_torchs
from scopetrace._compat.ops import eager, is_random
from scopetrace._compat.questions import MISSING
from scopetrace._compat.shape_env import evaluated
from scopetrace._compat.symbols import Symbolic
from scopetrace._compat.tensors import is_symbolic
from scopetrace.containers.contents import ATOMS, Place
from scopetrace.errors import UnsupportedOpError
from scopetrace.ir.guards import CallInputs, Source
from scopetrace.ir.tape import Value
from scopetrace.watch.programs import LITERAL, is_same_program, what_is_left
from scopetrace.watch.settle import LIKE, Run, operands


def settings_of(optimizer: torch.optim.Optimizer) -> list[tuple[int, str]]:
    """The settings of each group of parameters, such as `(0, "lr")`."""
    groups = enumerate(optimizer.param_groups)
    return [(i, key) for i, group in groups for key in sorted(group) if key != "params"]


def setting_of(optimizer: torch.optim.Optimizer, i: int, key: str, position: int | None = None) -> Any:
    """One setting, or what is at a position of a tuple such as `betas`; None where there is none any more."""
    x = optimizer.param_groups[i].get(key) if i < len(optimizer.param_groups) else None
    return x if position is None else dict(enumerate(x)).get(position) if type(x) is tuple else None


@dataclasses.dataclass(frozen=True, eq=False)
class Number(Source):
    """That a setting, or an entry of the state, is a number still. The program has a tensor, which a call fills."""

    optimizer: torch.optim.Optimizer
    name: str
    """In source: `SGD.param_groups[0]['lr']`."""
    tensor_name: str
    tensor: torch.Tensor
    value: Callable[[], Any]
    """Gives what is there now; None for nothing."""
    takes_tensor: bool = False
    """Whether ops get the tensor: the fused ones take no symbols."""

    def current(self, call: CallInputs) -> str:
        """`a number`, or the class of what is there in its place."""
        value: Any = self.value()
        if isinstance(value, Symbolic):
            raise UnsupportedOpError(
                "a traced training step is called inside of another trace, which has the numbers of its optimizer too",
                op=f"{type(self.optimizer).__name__}.step",
                hint="call it outside, or trace the function that makes the step in place of its trace",
            )
        counts_as_stepped(self.optimizer)
        if not isinstance(value, Real if self.tensor.is_floating_point() else int):
            return type(value).__name__
        with eager():
            self.tensor.fill_(float(value) if type(value) is not int else value)
        return "a number"


def answer_of(expr: Any, numbers: Sequence[tuple[Any, Number]]) -> Any:
    """What a comparison, or other expression, of numbers gives now."""
    return evaluated(expr, {symbol: number.value() for symbol, number in numbers})


def varied(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Place, list[Number]]]:
    """The numbers of each setting that schedules change: not one of zero that turns a part of the step off.

    Powers of betas are asserted to be small, so that they are if a scheduler says so. A fused op takes the rate alone.
    """
    kind = type(optimizer).__name__
    for i, key in settings_of(optimizer):
        x, group = setting_of(optimizer, i, key), optimizer.param_groups[i]
        is_varied = (key in ("momentum", "weight_decay") and x != 0) or (key == "betas" and "max_momentum" in group)
        parts = [*enumerate(x)] if type(x) is tuple else [(None, x)]
        if (key == "lr" or (is_varied and not group.get("fused"))) and all(isinstance(n, Real) for _, n in parts):
            numbers = []
            for at, n in parts:
                name = f"{kind}.param_groups[{i}][{key!r}]" + ("" if at is None else f"[{at}]")
                short = "_".join(map(str, filter(None, (kind, key, at, i))))
                value = functools.partial(setting_of, optimizer, i, key, at)
                numbers.append(Number(optimizer, name, short, _tensor_of(float(n)), value, bool(group.get("fused"))))
            yield Place(group, key), numbers


def counts(optimizer: torch.optim.Optimizer, name_of: Callable[[Any], str | None]) -> Iterator[tuple[Place, Number]]:
    """The numbers of Python in an optimizer's state, such as the number of steps; `name_of` a parameter is its name."""
    kind = type(optimizer).__name__
    for i, (p, key, place) in enumerate(entries_of(optimizer)):
        if type(n := place.current()) in (int, float):
            of = name_of(p) if isinstance(p, torch.Tensor) else None
            name = f"{kind}.state[{of or i if key else p!r}]" + (f"[{key!r}]" if key else "")
            short = f"{of or f'{kind}_{i}'}_{key}" if key else f"{kind}_{p}"
            yield place, Number(optimizer, name, short, _tensor_of(n), place.current)


def _tensor_of(n: float) -> torch.Tensor:
    with eager():
        return torch.tensor(n, dtype=torch.float64 if isinstance(n, float) else torch.int64, device="cpu")


def tensors_of(optimizer: torch.optim.Optimizer) -> list[int]:
    """Which parameters, tables and tensors of its state an optimizer has, by their ids."""
    params = [id(p) for group in optimizer.param_groups for p in group["params"]]
    tables = [id(state) for state in optimizer.state.values() if isinstance(state, dict) and state]
    return [*params, *tables, *(id(x) for _, _, x in state_tensors(optimizer))]


def how_many(tensors: list[int]) -> str:
    """What an error says of `tensors_of`."""
    return f"{len(tensors)} tensors"


def entries_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, Any, Place]]:
    """The entries of an optimizer's state: the key there, which is mostly a parameter, the one below, and the place."""
    for p, state in optimizer.state.items():
        if isinstance(state, dict):
            yield from ((p, key, Place(state, key)) for key in state)
        else:
            yield p, "", Place(optimizer.state, p)


def state_tensors(optimizer: torch.optim.Optimizer) -> list[tuple[Any, str, torch.Tensor]]:
    """The tensors of an optimizer's state, each with its key there, which is mostly a parameter, and its name below."""
    entries = [(p, str(key), place.current()) for p, key, place in entries_of(optimizer)]
    return [(p, key, x) for p, key, x in entries if isinstance(x, torch.Tensor)]


def are_held(places: Sequence[tuple[torch.nn.Module, str, torch.Tensor]]) -> bool:
    """Whether modules still have some tensors at these names."""
    return all(getattr(module, name, None) is t for module, name, t in places)


def has_gradient(t: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether the `grad` of a tensor is this one."""
    return t.grad is gradient


def state_of(optimizer: torch.optim.Optimizer) -> dict[tuple[Any, Any], Any]:
    """What an optimizer's state holds, by the parameter and the name."""
    return {(p, key): place.current() for p, key, place in entries_of(optimizer)}


def new_state(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> dict[torch.Tensor, dict[str, Any]]:
    """The state that an optimizer needs for those of the parameters for which it has none.

    It is what its first step makes before it computes. What classes other than those of torch.optim make is known only
    after a step, and so is that of SGD with dampening, whose first step is not like the others: see `begun`.
    """
    wanted = {id(p) for p in params if not optimizer.state.get(p)}
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for group in optimizer.param_groups if wanted and is_torchs(optimizer) else ():
        for p in (p for p in group["params"] if id(p) in wanted):
            state = first_state(optimizer, group, p)
            if type(optimizer) is torch.optim.SGD and group["momentum"] != 0 and not group["dampening"]:
                # from which a step makes what its first step makes without one: the gradient
                state = {"momentum_buffer": torch.zeros_like(p, memory_format=torch.preserve_format)}
            if state:
                states[p] = state
    return states


# First steps ---------------------------------------------------------------------------------------------------------


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
