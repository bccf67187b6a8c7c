"""A program that differentiates runs without autograd where eager has freed what autograd knew.

Data flow:
    ops that the program has differentiated once and for all -> results that autograd leads back to one of them
    such results -> marked in the write-back: in a call they require grad, and `backward()` through them raises
    what other results, updates and attributes get -> the ops that lead to it run under autograd as before, others not

In eager, `loss.backward()` frees the activations that it has read. A call of the trace would keep all of them for as
long as somebody holds the loss, since the ops of backward are ops of the graph and autograd knows nothing of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from scopetrace._compat.symbols import Symbolic
from scopetrace.containers.structure import leaves
from scopetrace.ir.tape import FunctionalTape, RecordedTape, Value
from scopetrace.ir.write_back import CopyInto, FromGraph, SetTo, ValueSource, ViewOf, WriteBack, base_of
from scopetrace.ops.history import DETACHED, KEEP_MORE, History, can_require_grad


def leave_out_freed_history(old: RecordedTape, new: FunctionalTape) -> None:
    """Mark the results of `new` whose history is freed, and switch autograd off for the ops that only they need."""
    differentiated = {v: 1 for op in old.differentiated() for v in op.values()}
    write_back, returned = new.write_back, new.returned
    if not differentiated or write_back is None or returned is None:
        return
    outputs = leaves(old.outputs, (Value, *Symbolic))
    with_history = [v for v in outputs if isinstance(v, Value) and v.fake.requires_grad]
    if not differentiated.keys() >= set(with_history):  # it is one of them, where it is the loss alone
        history = History(old.ops, differentiated)
        with_history = [v for v in with_history if history.of(v)]
    freed = [isinstance(v, Value) and v in with_history for v in outputs]
    outside = dict(old.attribute_reads()) | {op.name: op.result for op in old.ops if op.outputs in old.inputs}

    def gets_history(update: CopyInto) -> bool:
        """Whether what is written, one of the tensors from outside, requires grad after it for what it got."""
        target = update.target
        return update.grad is not False and (isinstance(target, ViewOf) or outside[target.name].currently_requires_grad)

    kept = {source.index for source in _taken(write_back, freed, gets_history)}
    for i, (source, is_freed) in enumerate(zip(write_back.results, freed, strict=True)):
        if is_freed and isinstance(source, FromGraph) and source.index not in kept:
            write_back.results[i] = dataclasses.replace(source, freed=True)
    live = [returned[i] for i in kept] + [w.value for w in new.attribute_writes]
    _switch_off(new, {v for v in live if isinstance(v, Value)})


def _taken(write_back: WriteBack, freed: list[bool], gets_history: Callable[[CopyInto], bool]) -> Iterator[FromGraph]:
    """What the write-back takes from the graph, but for results that are freed."""
    sources: list[ValueSource | None] = [*write_back.bound]
    sources += [u.value for u in write_back.updates if isinstance(u, SetTo)]
    sources += [u.value for u in write_back.updates if isinstance(u, CopyInto) and gets_history(u)]
    results = zip(write_back.results, freed, strict=True)
    sources += [s for s, is_freed in results if not (is_freed and isinstance(s, FromGraph))]
    for source in sources:
        base = base_of(source)
        if isinstance(base, FromGraph):
            yield base


def _switch_off(new: FunctionalTape, needed: set[Value]) -> None:
    """Switch autograd off for all ops but those of which the history of `needed` consists."""
    # not by the `requires_grad` of the trace: what torch.func gives has a history in a call that it does not see
    for i in reversed(range(len(new.ops))):
        op = new.ops[i]
        if not op.grad or op.kind != "call_function" or op.target in KEEP_MORE:
            continue
        if needed.isdisjoint(op.values()):
            new.ops[i] = op.replace(grad=False).take_values()
        elif op.target not in DETACHED:
            needed.update(filter(can_require_grad, op.inputs()))
