"""The order of execution as a timeline in the trace event format, which Perfetto and chrome://tracing open.

Data flow:
    sections and ops of a Tree -> one event each; an op takes a microsecond, since a trace has no times
    results of ops, from where they are made to their last use -> a counter of the bytes that are alive
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import torch.fx

from scopetrace.program.graph import named
from scopetrace.program.traced import TracedProgram
from scopetrace.view.measures import Measures, Meter
from scopetrace.view.text import label_of, op_line
from scopetrace.view.tree import Op, Section, Tree, target_text


def chrome_trace(program: TracedProgram) -> dict[str, Any]:
    """`{"traceEvents": [...]}`; the time of an op is its number in microseconds."""
    tree, meter = Tree(program), Meter(program)
    return {"traceEvents": [*_events(tree.root, meter), *_memory(tree, meter)], "displayTimeUnit": "ns"}


def _events(section: Section, meter: Meter) -> Iterator[dict[str, Any]]:
    cost = meter.of(section)
    facts = {"path": section.path, "ops": cost.ops, "parameters": cost.parameter_count, **_cost(cost)}
    yield _event(section.body or label_of(section), section.first, section.op_count, facts)
    for item in section.items:
        if isinstance(item, Section):
            yield from _events(item, meter)
            continue
        facts = {"op": op_line(item, named), **_cost(meter.of_op(item))}
        yield _event(target_text(item.node), item.number, 1, facts)
        for body in item.bodies:
            yield from _events(body, meter)


def _cost(cost: Measures) -> dict[str, int]:
    return {"flops": cost.flops, "activation bytes": cost.activation_bytes}


def _event(name: str, start: int, length: int, facts: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "X", "pid": 0, "tid": 0, "ts": start, "dur": length, "args": facts}


def _memory(tree: Tree, meter: Meter) -> Iterator[dict[str, Any]]:
    """The bytes of results that are still needed after each op."""
    last: dict[torch.fx.Node, int] = {}  # the number of the last op that needs the memory of a node
    for node, (op, _) in reversed(tree.ops.items()):
        readers = [tree.ops.get(user, (None, 0))[0] for user in node.users]
        views = [user for user, reader in zip(node.users, readers, strict=True) if reader and _is_view(reader, meter)]
        numbers = [tree.root.stop if reader is None else reader.number for reader in readers]
        last[node] = max([op.number, *numbers, *(last.get(view, 0) for view in views)])
    change = collections.Counter[int]()
    for op in dict.fromkeys(op for op, _ in tree.ops.values()):
        made = meter.of_op(op).activation_bytes
        change[op.number] += made
        change[max(last[node] for node in (op.node, *op.parts.values())) + 1] -= made
    alive = 0
    for number in sorted(change):
        alive += change[number]
        yield {"name": "activations", "ph": "C", "pid": 0, "ts": number, "args": {"bytes": alive}}


def _is_view(op: Op, meter: Meter) -> bool:
    return not meter.of_op(op).activation_bytes
