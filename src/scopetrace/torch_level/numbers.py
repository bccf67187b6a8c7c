"""Inputs of a graph from Dynamo that stand for numbers of Python.

Under `dynamic=True` Dynamo gives a float of the model, such as an `eps`, as a tensor of which the graph, or the body
of a checkpointed region or a branch in it, takes the `item`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.fx

from scopetrace.ops.higher_order import FORMS


def number_inputs(gm: torch.fx.GraphModule) -> list[int]:
    """The positions of the inputs of which the graph reads nothing but the number."""
    readers = [{(n.op, n.target) for n in _readers(gm, node)} for node in gm.graph.find_nodes(op="placeholder")]
    return [i for i, calls in enumerate(readers) if calls == {("call_method", "item")}]


def with_numbers(gm: torch.fx.GraphModule, tensors: Mapping[int, torch.Tensor]) -> torch.fx.GraphModule:
    """The graph with constants for inputs, by their positions: recording knows the `item` of a constant."""
    if not tensors:
        return gm
    new = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    inputs = list(new.graph.find_nodes(op="placeholder"))
    for i, tensor in tensors.items():
        with new.graph.inserting_after(inputs[-1]):
            kwargs: dict[str, Any] = {"dtype": tensor.dtype, "device": "cpu"}
            inputs[i].replace_all_uses_with(new.graph.call_function(torch.tensor, (tensor.item(),), kwargs))
    new.recompile()
    return new


def _readers(gm: torch.fx.GraphModule, node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """What reads a node; in place of a higher-order op, what reads it in the bodies that take it as it is."""
    for user in node.users:
        inner = [*_in_bodies(gm, user, node)]
        for body, placeholder in inner:
            yield from _readers(body, placeholder)
        if not inner:
            yield user


def _in_bodies(
    gm: torch.fx.GraphModule, call: torch.fx.Node, operand: torch.fx.Node
) -> Iterator[tuple[torch.fx.GraphModule, torch.fx.Node]]:
    """The bodies of a higher-order op that take `operand` as it is, and what stands for it there."""
    form = FORMS.get(call.target)
    if form is None or not form.takes_all or not form.runs_once:
        return
    gathered = form.gathered(call.args)
    operands = list(itertools.chain.from_iterable(gathered[i] for i in form.operands))
    for position, _, _ in form.bodies:
        body: Any = gm.get_submodule(call.args[position].target)  # type: ignore[union-attr, arg-type]
        for other, placeholder in zip(operands, body.graph.find_nodes(op="placeholder"), strict=True):
            if other is operand:
                yield body, placeholder
