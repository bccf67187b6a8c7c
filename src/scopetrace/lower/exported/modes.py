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
from scopetrace._compat.ops import is_op, schema_of
from scopetrace.ir.tape import Autocast, BodyTape, FunctionalTape, Op, Value, renamed
from scopetrace.lower.exported.identities import CASTS
from scopetrace.program.graph import FxLowering, set_place

_T = TypeVar("_T", FunctionalTape, BodyTape)


def without_casts(tape: _T) -> _T:
    """The tape, and its bodies, with ops reading what autocast has cast for them."""
    source = {op.result: op.tensor(0) for op in tape.ops if _is_cast(op)}
    ops = [_uncast(op, source) for op in tape.ops]
    read = {v for op in ops for v in op.inputs()} | {v for v in tape.graph_outputs() if isinstance(v, Value)}
    return dataclasses.replace(tape, ops=[op for op in ops if not _is_cast(op) or op.result in read])


def _is_cast(op: Op) -> bool:
    cast = op.autocast is not None and op.autocast.casts
    return cast and is_op(op.target) and schema_of(op.target).name in CASTS


def _uncast(op: Op, source: dict[Value, Value]) -> Op:
    now: dict[Any, Any] = {body: without_casts(body) for body in op.bodies()}
    if op.autocast is not None and op.autocast.casts and not _is_cast(op):
        now |= {v: source[v] for v in op.inputs() if v in source}
    return op.replace(args=renamed(op.args, now), kwargs=renamed(op.kwargs, now)) if now else op


def switch_modes(program: FxLowering) -> None:
    """Call `set_grad_enabled`, `_enter_autocast` and `_exit_autocast` between the ops of a graph, and in its bodies."""
    for lowered in program.walk():
        for node in lowered.graph.find_nodes(op="call_function", target=set_grad_enabled):
            lowered.graph.erase_node(node)
        switches = _Switches(lowered)
        for node in list(lowered.graph.nodes):
            op = lowered.op_of.get(node)
            if node.op == "output":
                switches.to(node, lowered.tape.outer_grad, None)
            elif op is not None and op.kind == "call_function" and op.values():
                switches.to(node, op.grad, op.autocast)


class _Switches:
    """Writes the switches into a graph, in order."""

    def __init__(self, lowered: FxLowering) -> None:
        self._graph, self._place = lowered.graph, str(lowered.tape.root)
        self._grad = lowered.tape.outer_grad
        self._state: tuple[Any, ...] | None = None
        self._entered: torch.fx.Node | None = None

    def to(self, node: torch.fx.Node, grad: bool, autocast: Autocast | None) -> None:
        """Switch before `node` to these modes."""
        state = None if autocast is None else (autocast.device, autocast.dtype, True, False)
        with self._graph.inserting_before(node):
            if self._entered is not None and (grad != self._grad or state != self._state):
                self._call(exit_autocast, self._entered)
                self._entered = self._state = None
            if grad != self._grad:
                self._call(set_grad_enabled, grad)
                self._grad = grad
            if state != self._state:
                self._entered, self._state = self._call(enter_autocast, *state or ()), state

    def _call(self, switch: Any, *args: Any) -> torch.fx.Node:
        node = self._graph.call_function(switch, args)
        set_place(node, self._place, 0)
        node.meta["val"] = None
        return node
