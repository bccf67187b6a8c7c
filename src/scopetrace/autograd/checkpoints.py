"""What backward computes again of a region under `torch.utils.checkpoint`, where the forward differentiates.

Data flow:
    the region runs, and autograd saves tensors in it -> these tensors, and up to which op the region makes them
    a backward asks for one of them -> the region's ops are recorded again, with new results -> the new one of it
    an op that draws random numbers, or that a policy of selective checkpointing keeps -> its result of the forward

This is what torch.utils.checkpoint does, except that Python does not run again.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from scopetrace._compat.gradients import current_node, next_sequence_number, policy_of
from scopetrace._compat.ops import is_op, is_random, paused, schema_of
from scopetrace._compat.tensors import version_of
from scopetrace.containers.structure import Returned, leaves
from scopetrace.errors import UnsupportedOpError
from scopetrace.ir.segment import CHECKPOINT, Region
from scopetrace.ir.tape import Op, Phase, RecordedTape, Value, flat, map_argument, values_in
from scopetrace.ops.functional_variants import by_name
from scopetrace.ops.history import KEEP_MORE
from scopetrace.record.builder import place_of
from scopetrace.record.values import ValueTable

_aten = torch.ops.aten


class _SavedTensor(NamedTuple):
    tensor: torch.Tensor
    value: Value | None
    """None where the op that runs makes it."""
    before: int
    """The number of ops on the tape."""
    running: Any
    """The op that runs."""

    @property
    def is_result(self) -> bool:
        """Whether the op that runs makes it or, in place, leaves it."""
        return self.value is None or (is_op(self.running) and torch.Tag.inplace in self.running.tags)


class CheckpointedRegion:
    """One run of a region in the forward."""

    def __init__(
        self,
        values: ValueTable,
        record: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
        outer: CheckpointedRegion | None,
        arguments: Sequence[torch.Tensor],
        *,
        early_stop: bool,
        context_fn: Any,
    ) -> None:
        """The region begins.

        Args:
            record: records an op on fake tensors, and gives its results.
            outer: the one around it, which runs again before it does.
            arguments: the tensors that it is called with, which may not be written before it runs again.
        """
        self._builder, self._tape = values.builder, values.builder.tape
        self._values, self._record, self._outer = values, record, outer
        self._arguments = [(t, version_of(values.value_of(t).fake)) for t in arguments]
        self._early_stop, self._context_fn = early_stop, context_fn
        self._start = len(self._tape.ops)
        self._stop: int | None = None
        self._saved: list[_SavedTensor] = []
        self._again: dict[Value, Value] = {}
        self._backward = 0

    def end(self) -> None:
        """The region ends."""
        self._stop = len(self._tape.ops)
        if self._backward:
            self._builder.run_again.add((self._start, self._stop))

    def hooks(self) -> tuple[Callable[[torch.Tensor], int], Callable[[int], torch.Tensor]]:
        """What autograd saves tensors by, and reads them, as long as somebody holds the region.

        Autograd's graph has references to these, which Python's collector does not see, and the region has some to it.
        """
        region = weakref.proxy(self)
        return (lambda t: region.pack(t)), (lambda number: region.unpack(number))

    def pack(self, t: torch.Tensor) -> int:
        """Autograd saves a tensor. The number stands for it."""
        self._builder.saving.add(next_sequence_number() - 1)
        self._saved.append(_SavedTensor(t, self._values.known(t), len(self._tape.ops), self._builder.running))
        return len(self._saved) - 1

    def unpack(self, number: int) -> torch.Tensor:
        """Autograd reads a tensor: in a backward, that of the region's next run."""
        saved = self._saved[number]
        if current_node() is None:
            return saved.tensor
        repeated = self.again().get(self._value(saved))
        return saved.tensor if repeated is None else repeated.fake

    def _value(self, saved: _SavedTensor) -> Value:
        if saved.value is not None:
            return saved.value
        after = itertools.islice(self._tape.ops, saved.before, None)
        value = next((v for op in after for v in op.values() if v.fake is saved.tensor), None)
        return self._values.value_of(saved.tensor) if value is None else value

    def _after(self, saved: _SavedTensor) -> int:
        """The position after the op that ran when autograd saved a tensor."""
        ops = self._tape.ops
        makers = [self._value(saved).op] if saved.value is None else []
        positions = (i for i in range(saved.before, len(ops)) if ops[i].target is saved.running or ops[i] in makers)
        return 1 + next(positions, saved.before - 1)

    def again(self) -> dict[Value, Value]:
        """What the region makes when it runs again in this backward, by what it made in the forward."""
        backward = len(self._tape.backwards)
        if self._backward != backward:
            self._backward = backward
            if self._stop is not None:
                self._builder.run_again.add((self._start, self._stop))
            self._again = {} if self._outer is None else dict(self._outer.again())
            self._refuse_stale()
            with paused():
                for op in self._repeated():
                    self._repeat(op)
        return self._again

    def _repeat(self, op: Op) -> None:
        def fake_of(x: Any) -> Any:
            return self._again.get(x, x).fake if isinstance(x, Value) else x

        before = len(self._tape.ops)
        with torch.set_grad_enabled(op.grad and torch.is_grad_enabled()):  # it is in a backward with `create_graph`
            out = self._record(op.target, *map_argument(fake_of, (op.args, op.kwargs)))
        place = (0 if op.call is None else op.call.position, op.scope)
        if op.phase is not None and op.phase.scope is not None:  # of a backward inside of the region
            place = op.phase.call, op.phase.scope
        phase = Phase("backward", *place, recomputed=True)
        for i in range(before, len(self._tape.ops)):
            repeated = self._tape.ops[i]
            kept = {"phase": phase, "frames": op.frames, "meta": op.meta, "autocast": op.autocast}
            self._tape.ops[i] = repeated.replace(**kept)
            for v in repeated.values():
                v.op = self._tape.ops[i] if v.op is repeated else v.op
        for old, new in zip(flat(op.outputs), flat(out), strict=True):
            if isinstance(old, Value):
                self._again[old] = self._values.value_of(new)

    # ---------------------------------------------------------------- which ops

    def _repeated(self) -> list[Op]:
        ops = self._tape.ops[self._start : self._last()]
        kept = set(self._kept(ops))
        storages = {v.storage for op in kept for v in (*op.values(), *op.writes)}
        self._refuse_written(ops, kept, storages)
        return [
            op
            for op in ops
            if op.kind == "call_function"
            and op not in kept
            and all(v.storage not in storages for v in (*op.values(), *op.writes))
        ]

    def _last(self) -> int:
        """The position after the last op that has to run again."""
        if not self._early_stop:
            return len(self._tape.ops) if self._stop is None else self._stop
        return max((self._after(s) if s.is_result else s.before for s in self._saved), default=self._start)

    def _kept(self, ops: list[Op]) -> Iterator[Op]:
        """The ops that do not run again: random numbers, numbers that Python has, what a policy says."""
        policy = policy_of(self._context_fn)
        for i, op in enumerate(ops):
            if op.kind in ("placeholder", "get_attr"):
                continue
            fake = map_argument(lambda x: x.fake if isinstance(x, Value) else x, (op.outputs, op.args, op.kwargs))
            if is_op(op.target) and policy(fake[0], op.target, *fake[1], **fake[2]):
                storages = {v.storage for v in op.values()}
                written = (other for other in ops[i + 1 :] if any(v.storage in storages for v in other.writes))
                for other in written:
                    _refuse("writes to what its policy keeps", other, "write out of place")
                yield op
            elif op.kind != "call_function" or not is_op(op.target) or op.unbacked or _draws(op):
                yield op

    def _refuse_stale(self) -> None:
        """Refuse where torch finds that what autograd needs was written, or does not find it and is wrong."""
        ops = itertools.islice(self._tape.ops, self._start, self._last())
        last = {_counted_with(v): (i, op) for i, op in enumerate(ops, self._start) for v in _declared_writes(op)}
        for saved in self._saved if last else ():
            value, after = self._value(saved), self._after(saved)
            i, op = last.get(_counted_with(value), (-1, None))
            beside = op is not None and sum(v.storage == value.storage for v in op.inputs()) > 1  # `y.mul_(y)`
            if op is not None and (i >= after or (i == after - 1 and saved.value and beside)):
                _refuse("writes to what autograd has saved in it", op, "write out of place")
        for t, version in self._arguments:
            if version_of(self._values.value_of(t).fake) != version:
                op = next(op for op in reversed(self._tape.ops) if self._values.value_of(t) in op.values())
                _refuse("has an argument that is written before backward needs it", op, "write out of place")

    def _refuse_written(self, ops: list[Op], kept: set[Op], storages: set[int]) -> None:
        """Refuse where what is kept was there before the region, or is written after it."""
        of_region = _new_storages(ops)
        after = itertools.islice(self._tape.ops, self._last(), None)
        later = (op for op in after if any(v.storage in storages for v in op.writes))
        first = next((op for op in kept if any(v.storage not in of_region for v in op.writes)), next(later, None))
        if first is not None:
            hint = "clone() it before it is written; or trace the model without checkpointing"
            _refuse("keeps a tensor, which is written outside of it", first, hint)


def _refuse(what: str, op: Op, hint: str) -> NoReturn:
    raise UnsupportedOpError(f"a checkpointed region (torch.utils.checkpoint) {what}", **place_of(op), hint=hint)


def refuse_recomputed(
    tape: RecordedTape, regions: Iterable[Region], passed: Container[Op | Phase], run_again: Container[tuple[int, int]]
) -> Op | None:
    """Raise UnsupportedOpError where eager would compute a checkpointed region again from other data than before.

    That is after the forward, or at the first backward in it if it goes through the region, that is through ops of
    `passed`; not where that backward, as a part of the program, has run the region again, as those of `run_again`.
    Where autograd saves nothing in the region, but might with gradients, the result is the op that is in the way.
    """
    without = None
    for region in regions:
        ops = tape.ops[region.start : region.stop]
        if region.hop is not CHECKPOINT or (tape.grad and not any(op.grad for op in ops)):
            continue
        in_backward = any(op in passed for op in ops)
        ran_again = in_backward and (region.start, region.stop) in run_again
        for what, op, hint in _different_again(tape, region, in_backward=in_backward, ran_again=ran_again):
            if region.requires_grad(tape):
                _refuse(what, op, hint)
            without = without or op
    return without


def _different_again(
    tape: RecordedTape, region: Region, *, in_backward: bool, ran_again: bool
) -> Iterator[tuple[str, Op, str]]:
    """What a region does that eager does again, or in another way, in backward; the op, and what to do instead."""
    ops = tape.ops[region.start : region.stop]
    drawn = next((op for op in ops if op.kind == "call_function" and _draws(op)), None)
    if drawn is not None and not region.keeps_rng:
        yield (
            "draws random numbers, and others when backward runs it again, since preserve_rng_state is False",
            drawn,
            "leave preserve_rng_state=True, without which the gradients are not those of what was computed",
        )
    written = None if ran_again else _written_again(tape, region, within_forward=in_backward)
    if written is not None:
        yield (
            "reads a tensor that it or a later op writes, so that eager computes gradients from the new data, or "
            "writes twice",
            written,
            "trace the model without checkpointing, which gives the same results; or write to the tensor before the "
            "region",
        )
    inside = {v for op in ops for v in op.values()}
    bound = [(w.path, w.value) for w in tape.attribute_writes if w.of is None]
    if isinstance(tape.outputs, Returned):  # what the forward puts into its arguments
        bound += [("".join(e.path[1:]), v) for e in tape.outputs.effects for v in leaves(e.content, Value)]
    for name, value in [pair for pair in bound if pair[1] in inside][:1]:
        yield (
            f"binds a new tensor to {name}, and does it again when backward runs it again",
            value.op,
            "write to a tensor that is there, with copy_(); or return it from the region and bind it outside",
        )


def _written_again(tape: RecordedTape, region: Region, *, within_forward: bool) -> Op | None:
    """The first op that writes what a region reads from outside, in it or after it; or binds such an attribute anew.

    `within_forward`: before the first backward.
    """
    ops = tape.ops[region.start : region.stop]
    read = _storages(v for op in ops for v in op.inputs()) - _new_storages(ops)
    later: Iterable[Op] = tape.ops[region.start :]
    if within_forward:
        later = itertools.takewhile(lambda op: op.phase is None, later)
    bound = {w.path: w.value.op for w in tape.attribute_writes if w.of is None}
    held = [*((op.name, op.result) for op in tape.ops if op.kind == "get_attr"), *region.attributes.items()]
    rebound = {bound[name] for name, v in held if v.storage in read and bound.get(name, v.op) is not v.op}
    return next((op for op in later if op in rebound or any(v.storage in read for v in op.writes)), None)


def _new_storages(ops: Iterable[Op]) -> set[int]:
    """The memory that some ops of a region make."""
    computing = (op for op in ops if op.kind == "call_function")
    return {storage for op in computing for storage in _storages(op.values()) - _storages(op.inputs())}


def _storages(values: Iterable[Value]) -> set[int]:
    return {v.storage for v in values}


def _draws(op: Op) -> bool:
    """Whether an op draws random numbers: one for dropout does where it drops something."""
    if not is_random(op.target):  # or, as a kernel for RNNs, makes what its backward reads only where autograd is on
        return op.target in KEEP_MORE
    arguments = by_name(op.target, op.args, op.kwargs)
    return arguments.get("train") is not False and 0 not in (arguments.get("dropout_p"), arguments.get("p"))


_UNSAFE_SPLITS = (_aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default, _aten.unsafe_chunk.default)
"""Ops whose results share memory, and autograd counts the writes to each by itself, as a cell of `nn.GRU` needs."""


def _counted_with(v: Value) -> Value:
    """The value with which autograd counts the writes of another one: the first one of its memory."""
    while v.op.target not in _UNSAFE_SPLITS:
        base = next((i for i in v.op.inputs() if i.storage == v.storage), None)
        if base is None:
            break
        v = base
    return v


def _declared_writes(op: Op) -> Iterator[Value]:
    """What an op writes as autograd counts it, which leaves out the statistics of batch norms."""
    schema = schema_of(op.target) if op.writes and is_op(op.target) else None
    if schema is None or (schema.returns and not any(r.is_written or r.is_out for r in schema.returns)):
        return
    operands = by_name(op.target, op.args, op.kwargs)
    yield from values_in([operands.get(name) for name in schema.written])
