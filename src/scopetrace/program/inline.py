"""The ops of regions in the place of their calls, for what has no form for them: functions, ONNX, pipelines.

Data flow:
    an op of a region -> the ops of its body, on its operands, in the scopes and calls of the body
    all other ops -> copied, bodies of branches and loops too
"""

from __future__ import annotations

from typing import Any

import torch

from scopetrace.functionalization.emitter import TapeRewriter
from scopetrace.ir.tape import BodyTape, FunctionalTape, Op, Tape, Value, values_in

_REGIONS = (torch.ops.higher_order.tag_activation_checkpoint, torch.ops.higher_order.invoke_subgraph)
"""The ops whose body computes what the op gives, and how often is all that differs."""


def has_regions(tape: Tape) -> bool:
    """Whether a program has ops of regions, in bodies too."""
    return any(op.target in _REGIONS for inner in tape.walk() for op in inner.ops)


def without_regions(tape: FunctionalTape) -> FunctionalTape:
    """The program with the ops of its regions in their places."""
    program: FunctionalTape = _Inliner(tape).run()
    return program


class _Inliner(TapeRewriter):
    def __init__(self, old: FunctionalTape | BodyTape, around: TapeRewriter | None = None) -> None:
        super().__init__(old, around)
        self._inlined: set[BodyTape] = around._inlined if isinstance(around, _Inliner) else set()
        self._depth = 0  # how many regions are around the op

    def step(self, op: Op) -> None:
        """The ops of a region in the place of its op."""
        if op.target in _REGIONS:
            self._inline(op)
        elif op.kind != "placeholder" or not self._depth:
            self.copy(op)

    def _inline(self, op: Op) -> None:
        body = op.bodies()[0]
        operands = [a for a in op.args if type(a) is not BodyTape and not isinstance(a, str)]
        placeholders = [o.outputs for o in body.ops if o.kind == "placeholder"]
        pairs = zip(placeholders, operands, strict=True)
        self.replacements |= {p: self.replacements[x] for p, x in pairs if isinstance(p, Value)}
        is_first = body not in self._inlined  # a shared body has the calls of its first one
        self._inlined.add(body)
        calls = self.calls
        if not is_first:
            around = None if op.call is None else calls[op.call]
            inside: dict[Any, Any] = dict.fromkeys({o.call for o in body.ops if o.call is not None}, around)
            self.calls = calls | inside
        self._depth += 1
        self.append(body, body.calls if is_first else [])
        self._depth -= 1
        self.calls = calls
        for v, result in zip(op.values(), values_in(body.outputs), strict=True):
            self.replacements[v] = self.replacements[result]
