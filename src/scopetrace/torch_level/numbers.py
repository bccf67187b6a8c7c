"""Inputs of a graph from Dynamo that stand for numbers of Python.

Under `dynamic=True` Dynamo gives a float of the model, such as an `eps`, as a tensor of which the graph, or the body
of a checkpointed region or a branch in it, takes the `item`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch.fx

from scopetrace.ops.higher_order import FORMS


def number_inputs(gm: torch.fx.GraphModule) -> list[int]:
    """The positions of the inputs of which the graph reads nothing but the number."""
    return [i for i, node in enumerate(_inputs(gm.graph)) if _items(gm, node)]


def with_numbers(gm: torch.fx.GraphModule, numbers: Mapping[int, Any]) -> torch.fx.GraphModule:
    """The graph with these numbers in place of the `item` of inputs, by their positions."""
    new = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    inside: dict[tuple[torch.fx.Node, int], dict[int, Any]] = {}
    inputs = _inputs(new.graph)
    for i, number in numbers.items():
        for user in list(inputs[i].users):
            if _is_item(user):
                _put(number, user)
                continue
            for position, _, at in _bodies(new, user, inputs[i]):
                inside.setdefault((user, position), {})[at] = number
    for (user, position), of_body in inside.items():
        old: Any = user.args[position]
        name = f"{old.target}_of_{user.name}"
        new.add_submodule(name, with_numbers(new.get_submodule(old.target), of_body))  # type: ignore[arg-type]
        with new.graph.inserting_before(user):
            user.update_arg(position, new.graph.get_attr(name))
    new.recompile()
    return new


def _inputs(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return list(graph.find_nodes(op="placeholder"))


def _is_item(node: torch.fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item"


def _items(gm: torch.fx.GraphModule, node: torch.fx.Node) -> list[torch.fx.Node] | None:
    """The `item`s of an input, in bodies too; None where the graph reads it in another way."""
    items: list[torch.fx.Node] = []
    for user in node.users:
        parts: list[list[torch.fx.Node] | None] = [[user]]
        if not _is_item(user):
            parts = [_items(body, _inputs(body.graph)[at]) for _, body, at in _bodies(gm, user, node)] or [None]
        for part in parts:
            if part is None:
                return None
            items += part
    return items


def _bodies(
    gm: torch.fx.GraphModule, call: torch.fx.Node, operand: torch.fx.Node
) -> Iterator[tuple[int, torch.fx.GraphModule, int]]:
    """The bodies of a higher-order op that take `operand` as it is: argument, body, position among its inputs."""
    form = FORMS.get(call.target)
    if form is None or not form.takes_all or not form.runs_once:
        return
    gathered = form.gathered(call.args)
    operands = list(itertools.chain.from_iterable(gathered[i] for i in form.operands))
    for position, _, _ in form.bodies:
        body: Any = call.args[position]
        for at, other in enumerate(operands):
            if other is operand:
                yield position, gm.get_submodule(body.target), at  # type: ignore[misc]


def _put(number: Any, item: torch.fx.Node) -> None:
    for user in list(item.users):
        user.args, user.kwargs = torch.fx.node.map_aggregate(
            (user.args, user.kwargs), lambda leaf: number if leaf is item else leaf
        )
    item.graph.erase_node(item)
