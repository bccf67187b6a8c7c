"""From a tape of ATen ops to one of torch-level ops.

A node becomes one op again if it writes nothing and makes no view of a storage that is written. A node that writes
becomes the op of its pure form and a `Renew` for each tensor that it wrote, if that form ran the functional variants of
the same ATen ops. All other nodes stay ATen ops.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from scopetrace._compat.ops import is_collective
from scopetrace.containers.structure import leaves
from scopetrace.ir.segment import own_values
from scopetrace.ir.tape import Op, RecordedTape, Value, checks_enabled
from scopetrace.ir.verify import verify
from scopetrace.ops.functional_variants import functional_variant, undeclared_variant
from scopetrace.torch_level.step import NodeCall, Renew, Trial
from scopetrace.torch_level.stepping import NodeRecord

_SEEDED = torch.Tag.nondeterministic_seeded


class Lifter:
    """Makes the tape with torch-level ops, of which `origins` then gives the node behind each."""

    def __init__(self, tape: RecordedTape, nodes: list[NodeRecord]) -> None:
        self.tape = tape
        self.nodes = nodes
        self.written = {v.storage for op in tape.ops for v in op.writes}
        self.root = tape.calls[0].replace()
        self.new = dataclasses.replace(tape, ops=[], calls=[self.root], modules=dict(tape.modules))
        self.origins: list[NodeRecord | None] = []
        """In the order of the ops of the new tape."""
        self._born: dict[int, int] = {}  # storage -> the index of the op that made it
        for i, op in enumerate(tape.ops):
            for v in op.values():
                self._born.setdefault(v.storage, i)

    def run(self) -> RecordedTape:
        """The new tape."""
        chosen: list[NodeRecord] = []
        candidates = [s for s in self.nodes if self._can_lift(s)]
        while len(chosen) != len(candidates):
            chosen, needed = candidates, self._needed(candidates)
            candidates = [s for s in chosen if not self._hides(s, needed)]
        self._build({s.start: s for s in chosen}, {i: s for s in self.nodes for i in range(s.start, s.stop)})
        self.root.stop = len(self.new.ops)
        lifted = own_values(self.new)
        if checks_enabled():
            verify(lifted, "torch level")
        return lifted

    # ---------------------------------------------------------------- which nodes

    def _ops(self, s: NodeRecord) -> list[Op]:
        return [op for op in self.tape.ops[s.start : s.stop] if op.kind != "get_attr"]

    def _can_lift(self, s: NodeRecord) -> bool:
        ops = self._ops(s)
        if not s.known or not ops or any(op.unbacked or is_collective(op.target) for op in ops):
            return False
        if not self._reads_only_arguments(s, ops):
            return False
        outer = {v.storage for op in ops for v in op.writes if self._born[v.storage] < s.start}
        if outer:
            return s.trial is not None and self._is_pure_form(s.trial, s, ops, outer)
        outs = leaves(s.outputs, Value)
        if not outs or (s.step.kind != "call_module" and not _is_flat(s.outputs)):
            return False
        shared = [v.storage for v in outs if v.storage in self.written]
        return len(set(shared)) == len(shared) and all(self._born[v] >= s.start for v in shared)

    def _reads_only_arguments(self, s: NodeRecord, ops: list[Op]) -> bool:
        """Whether every written tensor that the node reads is an argument: a module may read a buffer of its own."""
        known = {v for op in ops for v in op.values()} | set(leaves((s.args, s.kwargs), Value))
        return all(v in known or v.storage not in self.written for op in ops for v in op.inputs())

    def _is_pure_form(self, trial: Trial, s: NodeRecord, ops: list[Op], outer: set[int]) -> bool:
        if any(op.writes for op in trial.ops) or not _is_flat(trial.outputs):
            return False
        new = leaves(trial.outputs, Value)
        if outer != {v.storage for v in trial.before} or len(new) != len(trial.before) or len(outer) != len(new):
            return False
        if any(v.storage in self._born or v.storage in outer for v in new):
            return False  # the pure form returned a view where the node wrote
        if trial.is_out and any(n.fake.dtype != b.fake.dtype for n, b in zip(new, trial.before, strict=True)):
            return False  # some ops compute in the dtype of `out`
        if not all(v in (*trial.after, *trial.before) for v in leaves(s.outputs, Value)):
            return False
        return [_pure_target(op) for op in ops] == [op.target for op in trial.ops]

    def _needed(self, chosen: list[NodeRecord]) -> set[Value]:
        """The values that ops of other nodes, arguments of chosen nodes and results use."""
        inside = {i for s in chosen for i in range(s.start, s.stop)}
        needed = {v for i, op in enumerate(self.tape.ops) if i not in inside for v in op.inputs()}
        calls: list[NodeCall] = [*chosen, *(s.trial for s in chosen if s.trial is not None)]
        needed.update(v for call in calls for v in leaves((call.args, call.kwargs), Value))
        needed.update(leaves(self.tape.outputs, Value))
        needed.update(w.value for w in self.tape.attribute_writes)
        return needed

    def _hides(self, s: NodeRecord, needed: set[Value]) -> bool:
        """Whether a value that the node made is needed, but is not among its outputs."""
        shown = set(leaves(s.outputs, Value)) | set(s.trial.after if s.trial is not None else ())
        return any(v in needed and v not in shown for op in self._ops(s) for v in op.values())

    # ---------------------------------------------------------------- building

    def _build(self, lifted: dict[int, NodeRecord], node_of: dict[int, NodeRecord]) -> None:
        skip = -1
        for i, op in enumerate(self.tape.ops):
            s = lifted.get(i)
            if s is not None and s.stop > i:
                self._add_node(s)
                skip = s.stop
            if i >= skip:
                self._add(op.replace(call=op.call and self.root), node_of.get(i))

    def _add(self, op: Op, s: NodeRecord | None) -> None:
        self.origins.append(s)
        self.new.ops.append(op)

    def _add_node(self, s: NodeRecord) -> None:
        ops = self._ops(s)
        for op in self.tape.ops[s.start : s.stop]:
            if op.kind == "get_attr":
                self._add(op.replace(call=self.root), s)
        base = ops[0].replace(call=self.root, scope=s.scope, grad=s.grad, writes=(), unbacked=None)
        writes = tuple(op for op in ops if any(self._born[v.storage] < s.start for v in op.writes))
        if not writes or s.trial is None:
            self._add_call(s, base, s)
            return
        trial = s.trial
        self._add_call(s, base, trial)
        target = Renew(str(getattr(s.node.target, "__name__", s.node.target)), writes)
        base = base.replace(kind="call_function", target=target, kwargs={})
        for old, new, after in zip(trial.before, leaves(trial.outputs, Value), trial.after, strict=True):
            out = None if after is old else after
            tracked = tuple(old if v.fake is old.fake else v for op in writes for v in op.tracked)
            self._add(base.replace(args=(old, new), outputs=out, writes=(old,), tracked=tracked), s)

    def _add_call(self, s: NodeRecord, base: Op, call: NodeCall) -> None:
        op = base.replace(args=call.args, kwargs=call.kwargs, outputs=call.outputs)
        if call.step.kind == "call_module":
            name = str(s.node.target)
            self.new.modules[name] = call.step.target
            self._add(op.replace(kind="call_module", target=name), s)
            return
        draws = any(_SEEDED in getattr(op.target, "tags", ()) for op in self._ops(s))
        step = dataclasses.replace(call.step, tags=(_SEEDED,) if draws else ())
        # without the names of torch.return_types
        outputs = tuple(call.outputs) if isinstance(call.outputs, tuple) else call.outputs
        self._add(op.replace(kind="call_function", target=step, outputs=outputs), s)


def _is_flat(x: Any) -> bool:
    """One tensor, or a tuple or list of tensors and None."""
    parts = x if isinstance(x, (list, tuple)) else [x]
    return all(isinstance(p, Value) or p is None for p in parts)


def _pure_target(op: Op) -> Any:
    if not op.writes or op.kind != "call_function":
        return op.target
    variant = undeclared_variant(op.target, op.args, op.kwargs) or functional_variant(op.target)
    return None if variant is None else variant.op
