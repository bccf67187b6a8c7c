"""From a tape of ATen ops to one of torch-level ops.

A node becomes one op again if it writes nothing and makes no view of a storage that is written. A node that writes
becomes the op of its pure form and a `Renew` for each tensor that it wrote, if that form ran the functional variants of
the same ATen ops. All other nodes stay ATen ops.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from scopetrace.containers.structure import leaves
from scopetrace.ir.tape import Op, RecordedTape, Value, checks_enabled, own_values
from scopetrace.ir.verify import verify
from scopetrace.ops.functional_variants import functional_variant, undeclared_variant
from scopetrace.torch_level.step import Renew, Step
from scopetrace.torch_level.stepping import NodeRecord, Trial

_EFFECTS = (torch.Tag.nondeterministic_seeded,)


def lift(tape: RecordedTape, nodes: list[NodeRecord]) -> tuple[RecordedTape, dict[int, NodeRecord]]:
    """The tape with torch-level ops, and by the id of each of its ops, the node that made it."""
    return _Lifter(tape, nodes).run()


class _Lifter:
    def __init__(self, tape: RecordedTape, nodes: list[NodeRecord]) -> None:
        self.tape = tape
        self.nodes = nodes
        self.written = {v.storage for op in tape.ops for v in op.writes}
        self.root = tape.calls[0].replace()
        self.new = dataclasses.replace(tape, ops=[], calls=[self.root], modules=dict(tape.modules))
        self.origin: dict[int, NodeRecord] = {}
        self._born: dict[int, int] = {}  # storage -> the index of the op that made it
        for i, op in enumerate(tape.ops):
            for v in op.values():
                self._born.setdefault(v.storage, i)

    def run(self) -> tuple[RecordedTape, dict[int, NodeRecord]]:
        chosen = [s for s in self.nodes if self._can_lift(s)]
        while True:
            needed = self._needed(chosen)
            kept = [s for s in chosen if not self._hides(s, needed)]
            if len(kept) == len(chosen):
                break
            chosen = kept
        self._build({s.start: s for s in chosen}, {i: s for s in self.nodes for i in range(s.start, s.stop)})
        self.root.stop = len(self.new.ops)
        nodes = [self.origin.get(id(op)) for op in self.new.ops]
        lifted = own_values(self.new)
        if checks_enabled():
            verify(lifted, "torch level")
        return lifted, {id(op): s for op, s in zip(lifted.ops, nodes, strict=True) if s is not None}

    # ---------------------------------------------------------------- which nodes

    def _ops(self, s: NodeRecord) -> list[Op]:
        return [op for op in self.tape.ops[s.start : s.stop] if op.kind != "get_attr"]

    def _can_lift(self, s: NodeRecord) -> bool:
        ops = self._ops(s)
        if not s.known or not ops or any(op.unbacked for op in ops):
            return False
        if not self._reads_only_arguments(s, ops):
            return False
        outer = {v.storage for op in ops for v in op.writes if self._born[v.storage] < s.start}
        if outer:
            return self._has_pure_form(s, ops, outer)
        outs = leaves(s.outputs, Value)
        if not outs or (s.node.op != "call_module" and not _is_flat(s.outputs)):
            return False
        shared = [v.storage for v in outs if v.storage in self.written]
        return len(set(shared)) == len(shared) and all(self._born[v] >= s.start for v in shared)

    def _reads_only_arguments(self, s: NodeRecord, ops: list[Op]) -> bool:
        """Whether every written tensor that the node reads is an argument: a module may read a buffer of its own."""
        own = {v for op in ops for v in op.values()} | set(leaves((s.args, s.kwargs), Value))
        return all(v in own or v.storage not in self.written for op in ops for v in op.inputs())

    def _has_pure_form(self, s: NodeRecord, ops: list[Op], outer: set[int]) -> bool:
        trial = s.trial
        if trial is None or any(op.writes for op in trial.ops) or not _is_flat(trial.outputs):
            return False
        new = leaves(trial.outputs, Value)
        if outer != {v.storage for v in trial.before} or len(new) != len(trial.before) or len(outer) != len(new):
            return False
        if any(v.storage in self._born or v.storage in outer for v in new):
            return False  # the pure form returned a view where the node wrote
        if trial.call.is_out and any(n.fake.dtype != b.fake.dtype for n, b in zip(new, trial.before, strict=True)):
            return False  # some ops compute in the dtype of `out`
        if not all(v in (*trial.after, *trial.before) for v in leaves(s.outputs, Value)):
            return False
        return [_pure_target(op) for op in ops] == [op.target for op in trial.ops]

    def _needed(self, chosen: list[NodeRecord]) -> set[Value]:
        """The values that ops of other nodes, arguments of chosen nodes and results use."""
        inside = {i for s in chosen for i in range(s.start, s.stop)}
        needed = {v for i, op in enumerate(self.tape.ops) if i not in inside for v in op.inputs()}
        needed.update(v for s in chosen for v in leaves(_call_of(s), Value))
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
                self._add_step(s)
                skip = s.stop
            if i >= skip:
                self._add(op.replace(call=op.call and self.root), node_of.get(i))

    def _add(self, op: Op, s: NodeRecord | None) -> None:
        if s is not None:
            self.origin[id(op)] = s
        self.new.ops.append(op)

    def _add_step(self, s: NodeRecord) -> None:
        ops = self._ops(s)
        for op in self.tape.ops[s.start : s.stop]:
            if op.kind == "get_attr":
                self._add(op.replace(call=self.root), s)
        base = ops[0].replace(call=self.root, scope=s.scope or self.root.scope, grad=s.grad, writes=(), unbacked=None)
        writes = tuple(op for op in ops if any(self._born[v.storage] < s.start for v in op.writes))
        if not writes:
            self._add_call(s, base, s.node.op, s.target, s.args, s.kwargs, s.outputs)
            return
        trial = s.trial
        assert trial is not None
        self._add_call(s, base, trial.call.kind, trial.call.target, trial.args, trial.kwargs, trial.outputs)
        for old, new, after in zip(trial.before, leaves(trial.outputs, Value), trial.after, strict=True):
            out = None if after is old else after
            tracked = tuple(old if v.fake is old.fake else v for op in writes for v in op.tracked)
            target = Renew(_name(s), writes)
            self._add(
                base.replace(
                    kind="call_function",
                    target=target,
                    args=(old, new),
                    kwargs={},
                    outputs=out,
                    writes=(old,),
                    tracked=tracked,
                ),
                s,
            )

    def _add_call(self, s: NodeRecord, base: Op, kind: str, target: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        if kind == "call_module":
            self.new.modules[str(s.node.target)] = target
            target = str(s.node.target)
        else:
            tags = {tag for op in self._ops(s) for tag in getattr(op.target, "tags", ()) if tag in _EFFECTS}
            target = Step(kind, target, tuple(tags))
            outputs = (
                tuple(outputs) if isinstance(outputs, tuple) else outputs
            )  # without the names of torch.return_types
        kind = "call_module" if kind == "call_module" else "call_function"
        self._add(base.replace(kind=kind, target=target, args=args, kwargs=kwargs, outputs=outputs), s)


def _call_of(s: NodeRecord) -> Any:
    trial: Trial | None = s.trial
    return (s.args, s.kwargs) if trial is None else (s.args, s.kwargs, trial.args, trial.kwargs)


def _name(s: NodeRecord) -> str:
    target = s.node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def _is_flat(x: Any) -> bool:
    """One tensor, or a tuple or list of tensors and None."""
    parts = x if isinstance(x, (list, tuple)) else [x]
    return all(isinstance(p, Value) or p is None for p in parts)


def _pure_target(op: Op) -> Any:
    if not op.writes or op.kind != "call_function":
        return op.target
    twin = undeclared_variant(op.target, op.args, op.kwargs) or functional_variant(op.target)
    return None if twin is None else twin.op
