"""The program as a tree: module calls, user scopes inside them, and ops, in execution order."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from scopetrace import meta
from scopetrace._compat.graph_module import set_grad_enabled
from scopetrace.calls import ModuleCall
from scopetrace.record.structure import leaves


@dataclasses.dataclass(slots=True, eq=False)
class Op:
    """One op, with the nodes that take single results out of it."""

    node: torch.fx.Node
    number: int
    """Its position among the ops of the tree."""
    parts: dict[int, torch.fx.Node] = dataclasses.field(default_factory=dict)
    """For an op of several results: slot -> the `getitem` node."""


@dataclasses.dataclass(slots=True, eq=False)
class Section:
    """A module call or a user scope, and what happened in it."""

    path: str
    """The scope's path."""
    call: ModuleCall
    """The call itself; for a user scope, the call that it is in."""
    user_scope: str = ""
    """The name of a user scope; empty for a call."""
    items: list[Op | Section] = dataclasses.field(default_factory=list)
    first: int = 0
    """The number of the first op in it; the ops in it have the numbers from `first` to `stop` - 1."""
    stop: int = 0

    @property
    def op_count(self) -> int:
        """How many ops ran in it and in what it called."""
        return self.stop - self.first

    def walk(self) -> Iterator[Section]:
        """This section and all inside it, outer before inner."""
        pending = [self]
        while pending:
            section = pending.pop()
            yield section
            pending += [item for item in reversed(section.items) if isinstance(item, Section)]


class Tree:
    """The tree of a trace: `root`, and where each node of the graph is in it."""

    def __init__(self, calls: list[ModuleCall]) -> None:
        self.calls = calls
        self.ops: dict[torch.fx.Node, tuple[Op, int]] = {}
        """Node -> its op, and its slot among the op's results."""
        self._sections = [Section(call.scope.path, call) for call in calls]
        self._attached = 1  # the calls before this one are in the section of their parent
        nodes = _nodes_of(calls)
        self._order = {node: i for i, node in enumerate(nodes)}
        self._fill(_places(nodes))
        self.root = self._sections[0]
        self._number()

    # ---------------------------------------------------------------- building

    def _fill(self, places: list[tuple[torch.fx.Node, int, str]]) -> None:
        """Put every op in the section of its call, and every call in that of its parent, in the order of the graph."""
        starts = self._silent_calls(places)
        self._attach_silent(starts, -1)
        for order, (node, position, path) in enumerate(places):
            self._attach_until(position)
            self._add_op(node, self._sections[position], path)
            self._attach_silent(starts, order)
        self._attach_until(len(self.calls) - 1)

    def _add_op(self, node: torch.fx.Node, section: Section, path: str) -> None:
        taken = _taken(node)
        if taken is not None and taken[0] in self.ops:
            op, slot = self.ops[taken[0]][0], taken[1]
            op.parts[slot] = node
        else:
            op, slot = Op(node, 0), 0
            _inside(section, path).items.append(op)
        self.ops[node] = (op, slot)

    def _attach_until(self, position: int) -> None:
        while self._attached <= position:
            section = self._sections[self._attached]
            parent, scope = section.call.parent, section.call.scope.parent
            assert parent is not None and scope is not None
            _inside(self._sections[parent.position], scope.path).items.append(section)
            self._attached += 1

    def _silent_calls(self, places: list[tuple[torch.fx.Node, int, str]]) -> dict[int, int]:
        """The calls in which no op ran (`Identity`), with the place in the graph of their last argument."""
        busy = {position for _, position, _ in places}
        for call in reversed(self.calls):
            if call.parent is not None and call.position in busy:
                busy.add(call.parent.position)
        found = {}
        for call in self.calls:
            if call.position not in busy:
                given = leaves(call.arguments, torch.fx.Node)
                found[call.position] = max((self._order.get(node, -1) for node in given), default=-1)
        return found

    def _attach_silent(self, starts: dict[int, int], done: int) -> None:
        """A call without ops stands where its arguments are there."""
        while self._attached in starts and starts[self._attached] <= done:
            self._attach_until(self._attached)

    def _number(self) -> None:
        """Number the ops in the order of the tree."""
        count = 0
        opened: list[tuple[Section, Iterator[Op | Section]]] = [(self.root, iter(self.root.items))]
        while opened:
            section, items = opened[-1]
            item = next(items, None)
            if item is None:
                section.stop = count
                opened.pop()
            elif isinstance(item, Op):
                item.number = count
                count += 1
            else:
                item.first = count
                opened.append((item, iter(item.items)))


def _nodes_of(calls: list[ModuleCall]) -> list[torch.fx.Node]:
    """The ops of the graph in order."""
    made = calls[0].nodes
    everything = made[0].graph.nodes if made else ()
    return [n for n in everything if n.op in ("call_function", "call_module", "call_method")]


def _taken(node: torch.fx.Node) -> tuple[torch.fx.Node, int] | None:
    """For a node that takes one result out of an op of several: the op's node and the slot."""
    if node.target is not operator.getitem:
        return None
    source, slot = node.args
    if isinstance(source, torch.fx.Node) and isinstance(slot, int) and isinstance(meta.value(source), (list, tuple)):
        return source, slot
    return None


def _places(nodes: list[torch.fx.Node]) -> list[tuple[torch.fx.Node, int, str]]:
    """Each node with the position of its call and the path of its scope.

    Nodes that scopetrace puts before an op, to switch autograd or to ask for a size, belong where that op is; so do
    those that a pass made without a place.
    """
    places: list[tuple[torch.fx.Node, int, str]] = []
    near: tuple[int, str] = (0, "")
    for node in reversed(nodes):
        position = meta.call_position(node)
        if position is not None and node.target is not set_grad_enabled:
            near = (position, meta.scope_path(node) or "")
        places.append((node, *near))
    return places[::-1]


def _inside(section: Section, path: str) -> Section:
    """The part of a call's section that belongs to a scope path: user scopes are opened as the path says."""
    base = f"{section.path}/"
    if not path.startswith(base):
        return section
    for name in path[len(base) :].split("/"):
        last: Any = section.items[-1] if section.items else None
        if not (isinstance(last, Section) and last.user_scope == name):
            last = Section(f"{section.path}/{name}", section.call, name)
            section.items.append(last)
        section = last
    return section
