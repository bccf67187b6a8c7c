"""From a tape of ATen ops to one of torch-level ops.

A node becomes one op again if it writes nothing and makes no view of a storage that is written. All other nodes stay
ATen ops, which functionalization makes pure, and `names` calls as the node did where torch has such a function.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from scopetrace._compat.ops import is_collective
from scopetrace.containers.structure import leaves
from scopetrace.functionalization.emitter import TapeRewriter
from scopetrace.ir.tape import Op, RecordedTape, Value, checks_enabled
from scopetrace.ir.verify import verify
from scopetrace.torch_level.stepping import NodeRecord
from scopetrace.torch_level.target import ORIGIN

_SEEDED = torch.Tag.nondeterministic_seeded


def lifted(tape: RecordedTape, nodes: list[NodeRecord]) -> RecordedTape:
    """The tape with torch-level ops; ATen ops have the node behind them as `ORIGIN`."""
    return _Lifter(tape, nodes).run()


class _Lifter(TapeRewriter):
    def __init__(self, tape: RecordedTape, nodes: list[NodeRecord]) -> None:
        super().__init__(dataclasses.replace(tape, calls=tape.calls[:1]))
        self.nodes = nodes
        self.written = {v.storage for op in tape.ops for v in op.writes}
        self.new.modules = dict(tape.modules)
        self.calls = dict.fromkeys(tape.calls, self.calls[tape.calls[0]])
        self._born: dict[int, int] = {}  # storage -> the index of the op that made it; -1 for one from outside
        for i, op in enumerate(tape.ops):
            for v in op.values():
                self._born.setdefault(v.storage, -1 if op.kind == "get_attr" else i)
        self._node_of = {op: s for s in nodes for op in tape.ops[s.start : s.stop]}
        self._lifted = set[int]()  # the ids of the nodes that become one op

    def run(self) -> RecordedTape:
        chosen: list[NodeRecord] = []
        candidates = [s for s in self.nodes if self._can_lift(s)]
        while len(chosen) != len(candidates):
            chosen, needed = candidates, self._needed(candidates)
            candidates = [s for s in chosen if not self._hides(s, needed)]
        self._lifted = set(map(id, chosen))
        new: RecordedTape = super().run()
        if checks_enabled():
            verify(new, "torch level")
        return new

    # ---------------------------------------------------------------- which nodes

    def _ops(self, s: NodeRecord) -> list[Op]:
        return [op for op in self.old.ops[s.start : s.stop] if op.kind != "get_attr"]

    def _can_lift(self, s: NodeRecord) -> bool:
        ops = self._ops(s)
        if not s.known or not ops or any(op.unbacked or is_collective(op.target) for op in ops):
            return False
        if self.written and s.node.target == "view":  # the strides after functionalization may be others
            return False
        if any(self._born[v.storage] < s.start for op in ops for v in op.writes):
            return False
        outs = leaves(s.outputs, Value)
        if not outs or not self._reads_only_arguments(s, ops):
            return False
        if s.node.op != "call_module" and not _is_flat(s.outputs):
            return False
        shared = [v.storage for v in outs if v.storage in self.written]
        return len(set(shared)) == len(shared) and all(self._born[v] >= s.start for v in shared)

    def _reads_only_arguments(self, s: NodeRecord, ops: list[Op]) -> bool:
        """Whether every written tensor that the node reads is an argument: a module may read a buffer of its own."""
        known = {v for op in ops for v in op.values()} | set(leaves((s.args, s.kwargs), Value))
        return all(v in known or v.storage not in self.written for op in ops for v in op.inputs())

    def _needed(self, chosen: list[NodeRecord]) -> set[Value]:
        """The values that ops of other nodes, arguments of chosen nodes and results use."""
        inside = {i for s in chosen for i in range(s.start, s.stop)}
        needed = {v for i, op in enumerate(self.old.ops) if i not in inside for v in op.inputs()}
        needed.update(v for s in chosen for v in leaves((s.args, s.kwargs), Value))
        needed.update(leaves(self.old.outputs, Value))
        needed.update(w.value for w in self.old.attribute_writes)
        return needed

    def _hides(self, s: NodeRecord, needed: set[Value]) -> bool:
        """Whether a value that the node made is needed, but is not among its outputs."""
        shown = set(leaves(s.outputs, Value))
        return any(v in needed and v not in shown for op in self._ops(s) for v in op.values())

    # ---------------------------------------------------------------- building

    def step(self, op: Op) -> None:
        s = self._node_of.get(op)
        is_lifted = s is not None and id(s) in self._lifted
        if op.kind == "get_attr" or not is_lifted:
            meta = op.meta if s is None else {**(op.meta or {}), ORIGIN: {"node": s.node}}
            self._add(op.replace(meta=meta))
        if s is not None and is_lifted and op is self.old.ops[s.stop - 1]:
            self._add_node(s)

    def _add(self, op: Op) -> None:
        self.new.ops.append(op.copied(self.replacements, calls=self.calls))

    def _add_node(self, s: NodeRecord) -> None:
        ops, target, outputs = self._ops(s), s.target, s.outputs
        kind: str = s.node.op
        new_target: Any = str(s.node.target)
        if kind == "call_module":
            self.new.modules[new_target] = target.target
        else:
            draws = any(_SEEDED in getattr(op.target, "tags", ()) for op in ops)
            kind, new_target = "call_function", dataclasses.replace(target, tags=(_SEEDED,) if draws else ())
            # without the names of torch.return_types
            outputs = tuple(outputs) if isinstance(outputs, tuple) else outputs
        op = ops[0].replace(scope=s.scope, grad=s.grad, writes=(), unbacked=None)
        self._add(op.replace(kind=kind, target=new_target, args=s.args, kwargs=s.kwargs, outputs=outputs))


def _is_flat(x: Any) -> bool:
    """One tensor, or a tuple or list of tensors and None."""
    parts = x if isinstance(x, (list, tuple)) else [x]
    return all(isinstance(p, Value) or p is None for p in parts)
