"""Which ops of a tape stay in its graph."""

from __future__ import annotations

import math

import torch

from scopetrace._compat.ops import is_collective, is_random
from scopetrace._compat.symbols import surely_equal
from scopetrace._compat.tensors import is_symbolic
from scopetrace.containers.structure import leaves
from scopetrace.ir.tape import Op, ProgramTape, Tape, Value

_aten = torch.ops.aten
_RESHAPES = (_aten.view.default, _aten.reshape.default)


def live_ops(tape: Tape) -> set[int]:
    """The ids of the ops that stay: those with effects, and those that results or module calls depend on.

    Arguments and results of module calls count as used, so that a ModuleCall can show them.
    """
    needed: set[Value] = set()
    for call in tape.calls:
        needed.update(leaves((call.args, call.kwargs, call.outputs, call.mutated), Value))
    needed.update(v for v in tape.graph_outputs() if isinstance(v, Value))
    if isinstance(tape, ProgramTape):
        needed.update(w.value for w in tape.attribute_writes)
    live: set[int] = set()
    effects: dict[int, bool] = {}  # by the id of an op's target, whether it has an effect of its own
    for op in reversed(tape.ops):
        if not needed.isdisjoint(op.values()) or has_effect(op, effects):
            live.add(id(op))
            needed.update(op.inputs())
    return live


def has_effect(op: Op, known: dict[int, bool] | None = None) -> bool:
    """Whether an op stays although its results are not used: it writes, has an effect, or returns nothing.

    A view stays too with a size of -1 for which symbolic sizes may leave a fraction: eager raises there. `known` keeps
    what the targets of ops do, by their ids.
    """
    if op.kind in ("placeholder", "call_module") or op.writes or op.unbacked:
        return True
    if op.kind == "get_attr":
        return False
    if not op.values() or _checks_sizes(op):
        return True
    known = {} if known is None else known
    if id(op.target) not in known:
        known[id(op.target)] = is_random(op.target) or is_collective(op.target)
    return known[id(op.target)]


def _checks_sizes(op: Op) -> bool:
    """Whether a view has the elements of its argument only at sizes that a division leaves no remainder for."""
    if op.target not in _RESHAPES or not is_symbolic(op.result.fake):
        return False
    return not surely_equal(math.prod(op.result.fake.size()), math.prod(op.tensor(0).fake.size()))
