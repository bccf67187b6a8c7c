"""Batch norms folded into convolutions of a program with functions, whose weights torch.onnx's optimizer does not see.

Data flow:
    an outlined program -> pairs: a convolution, and the batch norm in eval mode that alone reads it, in one function
    the tensors of a pair -> a weight and a bias, which are constants of the program -> a program without the batch norm
    -> the same calls outlined again; they pass the new weights
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch.nn.utils.fusion import fuse_conv_bn_weights

from scopetrace._compat.ops import eager
from scopetrace.containers.structure import leaves
from scopetrace.functionalization.emitter import Emitter, TapeRewriter
from scopetrace.ir.tape import Call, Op, ProgramTape, Value
from scopetrace.lower.onnx.targets import Label
from scopetrace.program.outlined import OutlinedTrace, outline_calls
from scopetrace.program.traced import ModuleCall

_aten = torch.ops.aten
NORM = _aten.batch_norm.default
CONVOLUTIONS = frozenset(
    getattr(packet, overload)
    for packet in (_aten.conv1d, _aten.conv2d, _aten.conv3d)
    for overload in ("default", "padding")
)
FOLDED = CONVOLUTIONS | {NORM}


def fold_batch_norms(main: OutlinedTrace, kept: Container[str], labels: Callable[[ModuleCall], Label]) -> OutlinedTrace:
    """The program with batch norms folded into convolutions, but those with tensors in `kept`, or inside of plugins."""
    chosen = set(main.chosen)
    left_out = {c.record for c in main.source.all_calls if c.record in chosen and labels(c).is_plugin}
    pairs = dict(_pairs(main.source.tape, chosen, kept, left_out))
    if not pairs:
        return main
    folding = _Folding(main.source.tape, pairs)
    return outline_calls(main.source.with_tape(folding.run()), [folding.calls[call] for call in main.chosen], labels)


def _pairs(
    tape: ProgramTape, chosen: set[Call], kept: Container[str], left_out: Container[Call]
) -> Iterator[tuple[Op, Op]]:
    reads = Counter(v for op in tape.ops for v in op.inputs())
    reads.update(leaves([tape.graph_outputs(), [w.value for w in tape.attribute_writes]], Value))
    reads.update(leaves([(call.args, call.kwargs, call.outputs, call.mutated) for call in chosen], Value))
    for norm in tape.ops:
        conv = norm.tensor(0).op if norm.target is NORM and norm.args[3] is not None and not norm.args[5] else None
        if conv is None or conv.target not in CONVOLUTIONS or reads[conv.result] > 1:
            continue
        weights = [v.op for v in (*conv.inputs()[1:], *norm.inputs()[1:])]
        is_held = all(op.kind == "get_attr" and op.name not in kept for op in weights)
        around = [[c for c in op.call.ancestors() if c in chosen] for op in (conv, norm) if op.call is not None]
        is_cut = around[:1] != around[1:] or any(call in left_out for call in around[0])
        if is_held and not is_cut and all(tape.attributes[op.name].device.type != "meta" for op in weights):
            yield conv, norm


class _Folding(TapeRewriter):
    def __init__(self, old: ProgramTape, pairs: dict[Op, Op]) -> None:
        super().__init__(old)
        self._pairs, self._norms = pairs, set(pairs.values())
        self._emitter = Emitter(self.new, self.storages, calls=self.calls)

    def step(self, op: Op) -> None:
        """A convolution of a pair computes what its batch norm gave."""
        if op in self._norms:
            self.replacements[op.result] = self.replacements[op.tensor(0)]
            return
        if op in self._pairs:
            weight, bias = self._folded(op, self._pairs[op])
            self.replacements |= {weight: weight, bias: bias}
            op = op.replace(args=(op.args[0], weight, bias, *op.args[3:]))
        self.copy(op)

    def _folded(self, conv: Op, norm: Op) -> list[Value]:
        values = (*(*conv.args, None)[1:3], *norm.args[1:5])
        tensors: list[Any] = [None if v is None else self.old.attributes[v.op.name] for v in values]
        weight, bias, scale, shift, mean, var = tensors
        with eager(), torch.no_grad():
            new = fuse_conv_bn_weights(weight, bias, mean, var, norm.args[7], scale, shift)
        name = conv.tensor(1).op.name
        return [
            self._emitter.attribute(conv, self.new.add_constant(t.detach(), wanted=wanted), t.detach())
            for t, wanted in zip(new, (f"{name}_folded", f"{name}_bias"), strict=True)
        ]
