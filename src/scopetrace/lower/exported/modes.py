"""Blocks under `torch.no_grad()`, `torch.enable_grad()` and `torch.autocast` as torch.export has them, by choice.

Data flow:
    tape with autocast's casts as ops -> the ops read what was cast, since autocast casts it again (`without_casts`)
    lowered graph -> switches of autograd and autocast where the ops of another block begin (`switch_modes`)
    both -> torch.export's passes, which put what is between two switches into a subgraph (`_compat.export`)

In blocks of both modes autocast is the inner one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch

from scopetrace._compat.graph_module import enter_autocast, exit_autocast, set_grad_enabled
from scopetrace.ir.tape import Autocast, BodyTape, FunctionalTape, Op, Value, renamed
from scopetrace.lower.exported.calls import is_cast
from scopetrace.program.graph import FxLowering, set_place

_T = TypeVar("_T", FunctionalTape, BodyTape)


def without_casts(tape: _T) -> _T:
    """The tape, and its bodies, with ops reading what autocast has cast for them."""
    source = {op.result: op.tensor(0) for op in tape.ops if _is_autocasts(op)}
    ops = [_uncast(op, source) for op in tape.ops]
    read = {v for op in ops for v in op.inputs()} | {v for v in tape.graph_outputs() if isinstance(v, Value)}
    return dataclasses.replace(tape, ops=[op for op in ops if not _is_autocasts(op) or op.result in read])


def _is_autocasts(op: Op) -> bool:
    return op.autocast is not None and op.autocast.casts and is_cast(op)


def _uncast(op: Op, source: dict[Value, Value]) -> Op:
    new: dict[Any, Any] = {body: without_casts(body) for body in op.bodies()}
    if op.autocast is not None and op.autocast.casts and not _is_autocasts(op):
        new |= {v: source[v] for v in op.inputs() if v in source}
    return op.replace(args=renamed(op.args, new), kwargs=renamed(op.kwargs, new)) if new else op


def switch_modes(program: FxLowering) -> None:
    """Call `set_grad_enabled`, `_enter_autocast` and `_exit_autocast` between the ops of a graph, and in its bodies."""
    for lowered in program.walk():
        for node in lowered.graph.find_nodes(op="call_function", target=set_grad_enabled):
            lowered.graph.erase_node(node)
        _switch_in(lowered)


def _switch_in(lowered: FxLowering) -> None:
    graph, outer, place = lowered.graph, lowered.tape.outer_grad, str(lowered.tape.root)
    grad, state, entered = outer, (), None

    def call(switch: Any, *args: Any) -> torch.fx.Node:
        node = graph.call_function(switch, args)
        set_place(node, place, 0)
        node.meta["val"] = None
        return node

    for node in list(graph.nodes):
        op = lowered.op_of.get(node)
        if node.op != "output" and (op is None or op.kind != "call_function" or not op.values()):
            continue
        wanted = (outer, ()) if op is None else (op.grad, _arguments(op.autocast))
        with graph.inserting_before(node):
            if entered is not None and wanted != (grad, state):
                call(exit_autocast, entered)
                state, entered = (), None
            if wanted[0] != grad:
                call(set_grad_enabled, wanted[0])
            if wanted[1] != state:
                entered = call(enter_autocast, *wanted[1])
        grad, state = wanted


def _arguments(autocast: Autocast | None) -> tuple[Any, ...]:
    return () if autocast is None else (autocast.device, autocast.dtype, True, False)
