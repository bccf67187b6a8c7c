"""Where to cut a model into pipeline stages.

Data flow:
    ops of the trace -> cost of each; possible cuts: ops with which a module that is called once begins, between layers,
                        and which have all uses of each parameter that is trained on one side
    values made before a cut and read after it -> the bytes sent across it
    cuts -> the most even stages; among those nearly as even, the ones with the fewest bytes sent
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from scopetrace.api.runnable import program_of
from scopetrace.api.trace import Trace
from scopetrace.containers.structure import leaves
from scopetrace.distributed.costs import op_bytes, op_flops, op_params, param_uses
from scopetrace.errors import PlanError
from scopetrace.formatting import Printed, columns
from scopetrace.ir.selection import Selection, several
from scopetrace.ir.tape import Call, Op, ProgramTape, Value
from scopetrace.program.selection import Calls
from scopetrace.view.measures import byte_count

if TYPE_CHECKING:
    from torch.distributed.pipelining import SplitPoint

Balance = Literal["params", "flops", "bytes"]
Alive = dict[Value, tuple[int, int]]
Places = dict[int, tuple[str, int]]
_COSTS = {"params": op_params, "flops": op_flops, "bytes": op_bytes}


@dataclasses.dataclass(frozen=True)
class Cut:
    """A place between two stages."""

    module: str
    """The module with which the later stage begins."""
    at: int
    """The number of the op of the trace with which it begins."""
    depth: int
    """The depth of that module's call; 1 for children of the root."""
    nbytes: int
    """Bytes of the tensors sent to the later stage (made before it, read in it), at the sizes of the example."""
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of these tensors."""
    past: tuple[str, ...] = ()
    """The modules that make those of them that come from further back than the stage before."""


class SplitPoints(Printed, dict[str, "SplitPoint"]):
    """A `split_spec` for `torch.distributed.pipelining.pipeline`; `print(points)` shows costs and traffic.

    Attributes:
        cuts: the cuts in order.
        weights: the cost of each stage in the unit of `balance`: elements, FLOPs or bytes.
        shared: frozen parameters that several stages use, and which stages: each gets a copy.
    """

    def __init__(
        self, cuts: Sequence[Cut], weights: Sequence[int], balance: Balance, shared: dict[str, list[int]]
    ) -> None:
        from torch.distributed.pipelining import SplitPoint

        super().__init__({cut.module: SplitPoint.BEGINNING for cut in cuts})
        self.cuts = tuple(cuts)
        self.weights = tuple(weights)
        self.balance = balance
        self.shared = shared

    @property
    def crossing_bytes(self) -> list[int]:
        """The bytes sent to each stage but the first."""
        return [cut.nbytes for cut in self.cuts]

    def __str__(self) -> str:
        rows: list[Sequence[str]] = [("stage", "begins with", self.balance, "bytes in", "tensors in")]
        rows.append(("0", "(start)", f"{self.weights[0]:,}", "", ""))
        for i, (cut, weight) in enumerate(zip(self.cuts, self.weights[1:], strict=True)):
            tensors = " ".join("x".join(map(str, shape)) or "scalar" for shape in cut.shapes)
            rows.append((str(i + 1), cut.module, f"{weight:,}", f"{cut.nbytes:,}", tensors))
        notes = [f"{name} is used in stages {', '.join(map(str, stages))}" for name, stages in self.shared.items()]
        notes += [
            f"stage {i} reads what stages before the one before it make, in {', '.join(cut.past)}: ScheduleGPipe and "
            "Schedule1F1B send that, torch's schedules with several stages for a rank do not"
            for i, cut in enumerate(self.cuts, 1)
            if cut.past
        ]
        return "\n".join([columns(rows), *notes])


def split_points(
    tr: Trace, stages: int, balance: Balance = "params", *, classes: Selection | None = None, tolerance: float = 0.1
) -> SplitPoints:
    """The modules at which to cut a model into pipeline stages.

    Args:
        tr: a trace with the sizes of one micro-batch.
        stages: how many stages, two or more.
        balance: what to divide evenly: `params`, elements of parameters; `flops` of a forward, as
            `torch.utils.flop_counter` counts them; `bytes` of parameters and results.
        classes: targets as of `Trace.calls`, one or several: classes, modules, patterns such as `"layers.*"`, with
            whose modules stages begin. None for modules that are in no layer: in no module of a class of which there
            are several calls. Where that leaves too few cuts, or a stage twice as large as it could be, the modules in
            the outermost layers count too, and so on.
        tolerance: the fraction by which the largest stage may exceed that of the most even division, where this
            reduces the bytes sent.

    torch.distributed.pipelining passes the inputs of the model to the first stage only, in the order in which it reads
    them, and returns the outputs of the last stage. So no cut lies between an input and its last use, or between a
    result and the end. Each stage has its own copy of a parameter, so that no cut lies between two uses of one that is
    trained, such as tied weights.

    Raises PlanError for a trace with too few possible cuts, with the reason; for a model that reads its inputs in
    another order than that of its signature; for dynamic sizes; for a model that was split before. CallNotFoundError
    for one of `classes` that names no call.
    """
    _refuse_arguments(tr, stages, balance)
    program = program_of(tr).without_regions().functional()
    tape = program.tape
    if tape.sizes is not None:
        raise PlanError("the trace has dynamic sizes: trace with the sizes of one micro-batch")
    _refuse_order_of_inputs(tape)
    alive = _alive(tape)
    calls = tape.calls if classes is None else [call.record for call in Calls(program.calls)[several(classes)]]
    places = _places(tape, calls)
    cuts = _possible_cuts(tape, alive, places)
    _refuse_few(tape, alive, places, cuts, stages)
    before = [0, *itertools.accumulate(_COSTS[balance](tape))]
    if classes is None:
        cuts = _between_layers(tape, cuts, stages, before)
    at = [0, *(before[cut.at] for cut in cuts), before[-1]]
    chosen = _cheapest(at, cuts, stages, _most_even(at, stages) * (1 + tolerance))
    picked = _with_what_is_sent(tape, alive, [cuts[i] for i in chosen])
    bounds = [0, *(before[cut.at] for cut in picked), before[-1]]
    return SplitPoints(picked, [b - a for a, b in itertools.pairwise(bounds)], balance, _shared(tape, picked))


def _refuse_arguments(tr: Any, stages: Any, balance: Any) -> None:
    """Raise PlanError. For a model that was split before, `pipeline` would call itself without end."""
    if balance not in _COSTS:
        raise PlanError(f"balance={balance!r}: write one of {', '.join(map(repr, _COSTS))}")
    if not isinstance(stages, int):
        raise PlanError(f"stages={stages!r}: write the number of stages, 2 or more")
    if stages < 2:
        raise PlanError(f"stages={stages}: write 2 or more")
    if not isinstance(tr, Trace):
        raise PlanError(f"split_points takes a trace, st.trace(model, args), not {type(tr).__name__}")
    for name, module in tr.model.named_modules() if isinstance(tr.model, torch.nn.Module) else ():
        forward = vars(module).get("forward")
        if getattr(forward, "__module__", "").startswith("torch.distributed.pipelining"):
            raise PlanError(
                f"pipeline() has split this model before, at {name}: split a new one, or a deepcopy from before"
            )


# ---------------------------------------------------------------- the possible cuts


def _inputs(tape: ProgramTape) -> list[Value]:
    """The inputs that ops read, in the order of the signature."""
    read = {v for op in tape.ops for v in op.inputs()}
    return [v for op in tape.ops if op.kind == "placeholder" for v in op.values() if v in read]


def _refuse_order_of_inputs(tape: ProgramTape) -> None:
    """Raise PlanError: pipelining would pass inputs in the order in which the first stage reads them."""
    inputs = _inputs(tape)
    by_use = list(dict.fromkeys(v for op in tape.ops for v in op.inputs() if v.op.kind == "placeholder"))
    if by_use != inputs:
        raise PlanError(
            "torch.distributed.pipelining gives a stage its inputs in the order in which it reads them, which here is "
            f"{', '.join(v.op.name for v in by_use)}: {_cloned(inputs)}"
        )


def _cloned(inputs: Sequence[Value]) -> str:
    names = [str(v.op.target) for v in inputs]
    return f"begin the forward with {', '.join(names)} = {', '.join(f'{name}.clone()' for name in names)}"


def _refuse_few(tape: ProgramTape, alive: Alive, places: Places, cuts: Sequence[Cut], stages: int) -> None:
    if len(cuts) >= stages - 1:
        return
    need = f"{stages} stages need {stages - 1} cuts; there are"
    if len(places) < stages - 1:
        raise PlanError(f"{need} {len(places)} modules called once, after others: take fewer stages or other classes")
    text = f"{need} {len(cuts)} modules that are called once"
    if len(_possible_cuts(tape, alive, places, in_ties=True)) >= stages - 1:
        raise PlanError(f"{text}, with all uses of a trained parameter on one side: {_tie(tape, places)}")
    last = max(places)
    late = [v.op.name for v, (start, stop) in alive.items() if v.op.kind == "placeholder" and min(places) <= stop]
    early = [v.op for v in leaves(tape.outputs, Value) if v in alive and alive[v][0] < last]
    reasons = []
    if late:
        reasons.append(
            f"torch hands inputs to the first stage alone, and {', '.join(late)} is used later: "
            f"{_cloned(_inputs(tape))}, which are sent on"
        )
    if early:
        modules = ", ".join(dict.fromkeys(map(_call_of, early)))
        reasons.append(
            f"torch returns what the last stage returns, and a result is made before it, in {modules}: end the forward "
            "with a clone() of it"
        )
    raise PlanError(f"{text}, with all inputs used before and all results made after: " + "; ".join(reasons))


def _tie(tape: ProgramTape, places: Places) -> str:
    """Of the parameter that is in the way of most cuts: who uses it, and what to do."""
    name, uses = max(_trained(tape).items(), key=lambda item: sum(item[1][0] < at <= item[1][-1] for at in places))
    users = " and ".join(dict.fromkeys(_call_of(tape.ops[i]) for i in uses))
    return (
        f"{name} is used in {users}, and each stage would train a copy of it: give each its own weights, or for "
        "inference freeze it with requires_grad_(False)"
    )


def _trained(tape: ProgramTape) -> dict[str, list[int]]:
    """By parameter that requires grad, the ops that read it."""
    held = tape.attributes
    return {name: at for name, at in param_uses(tape).items() if name not in held or held[name].requires_grad}


def _possible_cuts(tape: ProgramTape, alive: Alive, places: Places, *, in_ties: bool = False) -> list[Cut]:
    """The possible cuts in order; with `in_ties`, those between uses of a trained parameter too."""
    ordered = sorted(places)
    crossing: dict[int, list[Value]] = {place: [] for place in ordered}  # what is made before it, and read after it
    for value, (start, stop) in alive.items():
        for place in ordered[bisect.bisect_right(ordered, start) : bisect.bisect_right(ordered, stop)]:
            crossing[place].append(value)
    results = {id(v) for v in leaves(tape.outputs, Value)}
    trained = [] if in_ties else [(uses[0], uses[-1]) for uses in _trained(tape).values()]
    return [
        _cut(*places[at], at, values)
        for at, values in crossing.items()
        if not any(v.op.kind == "placeholder" or id(v) in results for v in values)
        and not any(first < at <= last for first, last in trained)
    ]


def _cut(module: str, depth: int, at: int, values: Sequence[Value], past: Sequence[str] = ()) -> Cut:
    shapes = tuple(tuple(v.fake.shape) for v in values)
    return Cut(module, at, depth, sum(byte_count(v.fake) for v in values), shapes, tuple(dict.fromkeys(past)))


def _places(tape: ProgramTape, calls: Iterable[Call]) -> Places:
    """By first op, the module that begins with it and is called once, and its depth; of these calls alone."""
    counts = collections.Counter(tape.registered.module(call.fqn) for call in tape.calls)
    first = next((i for i, op in enumerate(tape.ops) if op.kind.startswith("call")), len(tape.ops))
    outermost: Places = {}
    for call in calls:
        name = tape.registered.module(call.fqn)
        if name and counts[name] == 1 and first < call.start < call.stop:
            outermost.setdefault(call.start, (name, len([*call.ancestors()]) - 1))
    return outermost


_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_TOO_UNEVEN = 2
"""Stages of whole layers are less than twice as large as the most even ones, where there is a layer for each."""


def _between_layers(tape: ProgramTape, cuts: list[Cut], stages: int, before: Sequence[int]) -> list[Cut]:
    """The cuts that are in as few layers as possible: between layers, if these are enough and divide evenly."""
    counts = collections.Counter(call.module_type for call in tape.calls)
    layers = [c for c in tape.calls if counts[c.module_type] > 1 and c.module and not isinstance(c.module, _CONTAINERS)]
    inside = {cut: sum(c.start < cut.at < c.stop for c in layers) for cut in cuts}

    def largest(chosen: Sequence[Cut]) -> int:
        return _most_even([0, *(before[cut.at] for cut in chosen), before[-1]], stages)

    for level in sorted(set(inside.values())):
        chosen = [cut for cut in cuts if inside[cut] <= level]
        if len(chosen) >= stages - 1 and largest(chosen) <= _TOO_UNEVEN * largest(cuts):
            return chosen
    return cuts


def _alive(tape: ProgramTape) -> Alive:
    """By value, the op that makes it and the last one that reads it; without parameters, buffers and constants."""
    first = {v: i for i, op in enumerate(tape.ops) if op.kind != "get_attr" for v in op.values()}
    last = dict.fromkeys(first, -1)
    for i, op in enumerate(tape.ops):
        last |= {v: i for v in op.inputs() if v in last}
    last |= {v: len(tape.ops) for v in leaves(tape.outputs, Value) if v in last}
    return {v: (start, last[v]) for v, start in first.items()}


def _with_what_is_sent(tape: ProgramTape, alive: Alive, cuts: Sequence[Cut]) -> list[Cut]:
    """The cuts with the tensors sent to each stage: torch sends a tensor directly to every stage that reads it."""
    places = [cut.at for cut in cuts]
    read: list[dict[Value, None]] = [{} for _ in cuts]
    for i, op in enumerate(tape.ops):
        stage = bisect.bisect_right(places, i)
        if stage:
            read[stage - 1] |= {v: None for v in op.inputs() if v in alive and alive[v][0] < places[stage - 1]}
    stages = zip(cuts, [0, *places], read, strict=False)
    return [
        _cut(cut.module, cut.depth, cut.at, list(values), [_call_of(v.op) for v in values if alive[v][0] < before])
        for cut, before, values in stages
    ]


def _call_of(op: Op) -> str:
    return (op.call and op.call.of_module.fqn) or "the root"


def _shared(tape: ProgramTape, cuts: list[Cut]) -> dict[str, list[int]]:
    places = [cut.at for cut in cuts]
    users = {n: dict.fromkeys(bisect.bisect_right(places, i) for i in at) for n, at in param_uses(tape).items()}
    return {name: list(stages) for name, stages in users.items() if len(stages) > 1}


# ---------------------------------------------------------------- the choice


def _most_even(at: Sequence[int], stages: int) -> int:
    """The smallest possible cost of the largest stage; `at` is the cost up to each possible cut."""

    def is_enough(limit: int) -> bool:
        count, start = 1, 0
        for place, following in itertools.pairwise(at):
            if following - place > limit:
                return False
            if following - start > limit:
                count, start = count + 1, place
        return count <= stages

    return bisect.bisect_left(range(at[-1]), True, key=is_enough)


def _cheapest(at: Sequence[int], cuts: Sequence[Cut], stages: int, limit: float) -> list[int]:
    """The cuts with the fewest bytes sent, no stage above the limit.

    Among equal ones those that divide the fewest modules, then the most even ones.
    """
    costs = [(0, 0), *((cut.nbytes, cut.depth) for cut in cuts), (0, 0)]  # the ends are no cuts
    rows: list[dict[int, tuple[int, int, int, int]]] = [{0: (0, 0, 0, 0)}]
    for number in range(stages):
        row = {}
        for i in range(1, len(at) - 1) if number < stages - 1 else [len(at) - 1]:
            options = [
                (crossed + costs[i][0], depth + costs[i][1], squares + (at[i] - at[j]) ** 2, j)
                for j, (crossed, depth, squares, _) in rows[-1].items()
                if j < i and at[i] - at[j] <= limit
            ]
            if options:
                row[i] = min(options)
        rows.append(row)
    chosen = [len(at) - 1]
    for row in reversed(rows[1:]):
        chosen.append(row[chosen[-1]][3])
    return [i - 1 for i in reversed(chosen[1:-1])]
