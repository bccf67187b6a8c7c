"""The order of execution as a timeline in the trace event format, which Perfetto and chrome://tracing open.

Data flow:
    ops as they ran -> Tree: sections and ops -> one event each; an op takes a microsecond, since a trace has no times
    Memory -> a counter of the bytes in use
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scopetrace.program.graph import named
from scopetrace.program.traced import TracedProgram
from scopetrace.view.measures import Measures, Meter
from scopetrace.view.memory import Memory
from scopetrace.view.text import op_line
from scopetrace.view.tree import OpItem, Section, Tree, callee_text


def chrome_trace(program: TracedProgram) -> dict[str, Any]:
    """`{"traceEvents": [...]}`; the time of an op is its number in microseconds."""
    program = program.with_tape(program.as_run)
    tree, meter = Tree(program), Meter(program)
    return {"traceEvents": [*_events(tree.root, meter), *_memory(tree, program)], "displayTimeUnit": "ns"}


def _events(section: Section, meter: Meter) -> Iterator[dict[str, Any]]:
    cost = meter.of(section)
    facts = {"path": section.path, "ops": cost.ops, "parameters": cost.parameters, **_cost(cost)}
    yield _event(section.label, section.first, section.op_count, facts)
    for item in section.items:
        if isinstance(item, OpItem):
            facts = {"op": op_line(item, named), **_cost(meter.of(item))}
            yield _event(callee_text(item.node), item.first, 1, facts)
        for inner in item.bodies if isinstance(item, OpItem) else [item]:
            yield from _events(inner, meter)


def _cost(cost: Measures) -> dict[str, int]:
    return {"flops": cost.flops, "activation bytes": cost.activation_bytes}


def _event(name: str, start: int, length: int, facts: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "X", "pid": 0, "tid": 0, "ts": start, "dur": length, "args": facts}


def _memory(tree: Tree, program: TracedProgram) -> Iterator[dict[str, Any]]:
    """The bytes in use while each op runs, with those of ops just before it whose results nobody reads."""
    ops = {program.lowering.op_of.get(op.node): op for op, _ in tree.ops.values()}
    most = 0
    for ran, in_use in zip(program.tape.ops, Memory(program).timeline, strict=True):
        most = max(most, in_use)
        if ran in ops:
            yield {"name": "memory", "ph": "C", "pid": 0, "ts": ops[ran].first, "args": {"bytes": most}}
            most = 0
