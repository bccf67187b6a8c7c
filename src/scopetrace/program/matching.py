"""Which nodes of an edited graph are which of the graph that a trace made, and in which calls the new ones are.

Data flow:
    nodes as the trace made them + nodes of the edited graph
        -> pairs: the same node object, else the same name and call, else the same place in meta, which is copied
    a node that is gone -> its replacement: what its readers read now in its place
    new nodes -> the call of the nodes that they replace, else the innermost call around what they read and feed
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch.fx

from scopetrace.ir.scopes import Scope, common_scope
from scopetrace.ir.tape import Call
from scopetrace.program.graph import NodeState, call_position, place_in_meta, scope_path

Node = torch.fx.Node
_OUTSIDE = ("placeholder", "get_attr")


class Position(NamedTuple):
    """Where an op belongs."""

    call: Call
    scope: Scope

    def is_in(self, call: Call) -> bool:
        """Whether that is in a call or in one inside it."""
        return call in self.call.ancestors()


class Matching:
    """The nodes of an edited graph beside those of the graph that it was made from.

    Attributes:
        traced: by node, what it was in the old graph; new nodes are not in it.

    `calls` and `scopes` are those of the new tape, by position and path; `root` is the place of what is in no call.
    """

    def __init__(
        self,
        states: list[NodeState],
        graph: torch.fx.Graph,
        calls: dict[int, Call],
        scopes: dict[str, Scope],
        root: Position,
    ) -> None:
        self._states, self._graph, self._calls, self._scopes, self._root = states, graph, calls, scopes, root
        self.traced = self._pairs()
        self._current = {state.node: node for node, state in self.traced.items()}
        self._readers = collections.defaultdict[Node, list[tuple[NodeState, int]]](list)
        for state in states:
            for i, operand in enumerate(_arguments(state)):
                if isinstance(operand, Node):
                    self._readers[operand].append((state, i))
        self._gone = {state.node: state for state in states if state.node not in self._current}
        self._fresh = self._places_of_new_nodes()

    def _pairs(self) -> dict[Node, NodeState]:
        inputs = (state for state in self._states if state.op == "placeholder")
        pairs = dict(zip(self._graph.find_nodes(op="placeholder"), inputs, strict=True))
        old = {state.node: state for state in self._states}
        by_name = {state.node.name: state for state in self._states}
        for node in self._graph.nodes:
            state = old.get(node) or by_name.get(node.name)
            if node in pairs or state is None:
                continue
            was = state.node  # of another graph with this name it is the same, perhaps with another target
            if was is node or (state.op == node.op and call_position(was) == call_position(node)):
                pairs[node] = state
        taken = {state.node for state in pairs.values()}
        by_place = {id(place_in_meta(state.node)): state for state in self._states if state.node not in taken}
        for node in self._graph.nodes:  # `split_module` gives nodes other names, and copies their meta
            state = by_place.get(id(place_in_meta(node))) if place_in_meta(node) and node not in pairs else None
            if state is not None and (state.op, state.target) == (node.op, node.target):
                pairs[node] = state
        return pairs

    # ---------------------------------------------------------------- values

    def stand_in(self, old: Node, call: Call | None = None) -> Node | None:
        """The node that is in the place of an old one now: as an argument of `call`, where one is given.

        That is the same one, or what all who read it read now; of an argument, in the call and made outside of it.
        """
        node = self._current.get(old)
        if node is not None and (
            call is None or any(self.place(n).is_in(call) for n in node.users if n.op != "output")
        ):
            return node
        read = self._operands_now(old, call)
        one = read[0] if len(read) == 1 else None
        return node if one is None or (call is not None and self.place(one).is_in(call)) else one

    def _operands_now(self, old: Node, call: Call | None = None) -> list[Node | None]:
        """What those who read an old node, in `call` if that is given, read now in its place; None for no node."""
        operands: dict[Node | None, None] = {}
        for state, i in self._readers[old]:
            reader = self._current.get(state.node)
            place = self._of_meta(state.node)
            if reader is not None and (call is None or (place is not None and place.is_in(call))):
                operand = dict(enumerate(_arguments(reader))).get(i)
                operands[operand if isinstance(operand, Node) else None] = None
        return list(operands)

    # ---------------------------------------------------------------- places

    def place(self, node: Node) -> Position:
        """The call and scope of a node of the edited graph."""
        return self._fresh.get(node) or self._of_meta(node) or self._root

    def _of_meta(self, node: Node) -> Position | None:
        if node.op == "output":
            return self._root
        position, scope = call_position(node), self._scopes.get(scope_path(node) or "")
        if position not in self._calls:
            return None
        call = self._calls[position]
        return Position(call, scope if scope is not None and call.scope in scope.ancestors() else call.scope)

    def _places_of_new_nodes(self) -> dict[Node, Position]:
        new = {n for n in self._graph.nodes if n.op not in _OUTSIDE and n not in self.traced and not self._of_meta(n)}
        replaced = collections.defaultdict[Node | None, list[Node]](list)
        for old in self._gone if new else ():
            if old.op not in _OUTSIDE:
                replaced[self.stand_in(old)].append(old)
        places: dict[Node, Position] = {}
        for node in self._graph.nodes:
            if node in new and node not in places:
                group = _reached([node], lambda n: [m for m in (*n.all_input_nodes, *n.users) if m in new])
                around = _reached([old for n in group for old in replaced[n]], self._gone_operands)
                around = around or [m for n in group for m in (*n.all_input_nodes, *n.users) if m.op not in _OUTSIDE]
                known = [place for n in around if (place := self._of_meta(n)) is not None]
                places |= dict.fromkeys(group, self._common(known) if known else self._root)
        return places

    def _gone_operands(self, node: Node) -> list[Node]:
        """The gone nodes that a gone one read, but for what comes from outside."""
        return [n for n in _arguments(self._gone[node]) if n in self._gone and n.op not in _OUTSIDE]

    def _common(self, places: list[Position]) -> Position:
        """The innermost call around all of `places` (at least one), and the scope in it."""
        calls = dict.fromkeys(place.call for place in places)
        if len(calls) == 1:
            return Position(places[0].call, common_scope([place.scope for place in places]))
        shared = functools.reduce(_common_call, calls)
        return self._root if shared is self._root.call else Position(shared, shared.scope)


def _common_call(a: Call, b: Call) -> Call:
    outer = set(a.ancestors())
    return next(call for call in b.ancestors() if call in outer)


def _arguments(node: Node | NodeState) -> list[Any]:
    """The leaves of a node's arguments, in order."""
    leaves: list[Any] = []
    torch.fx.node.map_aggregate((node.args, node.kwargs), leaves.append)
    return leaves


def _reached(first: Iterable[Node], near: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """Nodes, those near them, and so on."""
    reached = dict.fromkeys(first)
    todo = list(reached)
    while todo:
        more = dict.fromkeys(n for n in near(todo.pop()) if n not in reached)
        reached |= more
        todo += more
    return list(reached)
