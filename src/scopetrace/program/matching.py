"""Which nodes of an edited graph are which of the graph that a trace made, and in which calls the new ones are.

Data flow:
    nodes as the trace made them + nodes of the edited graph
        -> pairs: the same node object, else the same name and call, else as many of one target in one call
    a node that is gone -> its replacement: what its readers read now in its place
    new nodes -> the call of the nodes that they replace, else the innermost call around what they read and feed
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch.fx

from scopetrace.ir.scopes import Scope, common_scope
from scopetrace.ir.tape import Call
from scopetrace.program.graph import NodeState, call_position, scope_path

Node = torch.fx.Node
_STEPS = ("call_function", "call_method", "call_module")


class Place(NamedTuple):
    """Where an op belongs."""

    call: Call
    scope: Scope


class Matching:
    """The nodes of an edited graph beside those of the graph that it was made from.

    Attributes:
        traced: by node, what it was in the old graph; new nodes are not in it.
        current: by old node, the one of the edited graph; nodes that are gone are not in it.

    `root` is the place of what is in no call of the graph.
    """

    def __init__(
        self,
        states: list[NodeState],
        graph: torch.fx.Graph,
        calls: dict[int, Call],
        scopes: dict[str, Scope],
        root: Place,
    ) -> None:
        self._states, self._graph, self._calls, self._scopes, self._root = states, graph, calls, scopes, root
        self.traced = self._pairs()
        self.current = {state.node: node for node, state in self.traced.items()}
        self._readers = collections.defaultdict[Node, list[tuple[NodeState, tuple[Any, ...]]]](list)
        for state in states:
            for path, operand in operands((state.args, state.kwargs)):
                self._readers[operand].append((state, path))
        self._gone = {state.node: state for state in states if state.node not in self.current}
        self._fresh = self._places_of_new_nodes()

    def _pairs(self) -> dict[Node, NodeState]:
        inputs = [state for state in self._states if state.op == "placeholder"]
        placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        pairs = dict(zip(placeholders, inputs, strict=True)) if len(inputs) == len(placeholders) else {}
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
        left = _by_kind(state.node for state in self._states if state.node not in taken)
        renamed = _by_kind(node for node in self._graph.nodes if node not in pairs)
        for kind, nodes in renamed.items():
            if len(left.get(kind, ())) == len(nodes):  # as `split_module` does
                pairs |= {new: old[was] for new, was in zip(nodes, left[kind], strict=True)}
        return pairs

    # ---------------------------------------------------------------- values

    def current_operands(self, old: Node, start: int = 0, stop: int | None = None) -> list[Node | None]:
        """What those who read an old node read now in its place: the readers in calls from `start` to before `stop`.

        None for a reader that reads no node there.
        """
        current: dict[Node | None, None] = {}
        for state, path in self._readers[old]:
            reader = self.current.get(state.node)
            if reader is not None and _is_between(call_position(state.node), start, stop):
                current[dict(operands((reader.args, reader.kwargs))).get(path)] = None
        return list(current)

    def replacement(self, old: Node) -> Node | None:
        """The node that all who read a gone node read now; None where there is no single one."""
        read = self.current_operands(old)
        return read[0] if len(read) == 1 else None

    def is_read_in(self, node: Node, start: int, stop: int) -> bool:
        """Whether a node in the calls from `start` to before `stop` reads `node`."""
        return any(_is_between(self.place(user).call.position, start, stop) for user in node.users if user.op in _STEPS)

    # ---------------------------------------------------------------- places

    def place(self, node: Node) -> Place:
        """The call and scope of a node of the edited graph."""
        return self._fresh.get(node) or self._of_meta(node) or self._root

    def _of_meta(self, node: Node) -> Place | None:
        if node.op == "output":
            return self._root
        position, scope = call_position(node), self._scopes.get(scope_path(node) or "")
        if position not in self._calls:
            return None
        call = self._calls[position]
        return Place(call, scope if scope is not None and call.scope in scope.ancestors() else call.scope)

    def _places_of_new_nodes(self) -> dict[Node, Place]:
        new = {n for n in self._graph.nodes if n.op in _STEPS and n not in self.traced and self._of_meta(n) is None}
        replaced = collections.defaultdict[Node, list[Node]](list)
        for old in self._gone if new else ():
            by = self.replacement(old)
            if by is not None:
                replaced[by].append(old)
        places: dict[Node, Place] = {}
        for node in self._graph.nodes:
            if node in new and node not in places:
                group = list(_connected(node, new))
                place = self._place_of(group, [old for n in group for old in replaced[n]])
                places |= dict.fromkeys(group, place)
        return places

    def _place_of(self, group: list[Node], replaced: list[Node]) -> Place:
        """That of the gone nodes that a group of new ones replaces, else of its neighbours."""
        around = self._gone_before(replaced)
        if not around:
            around = {
                m for n in group for m in (*n.all_input_nodes, *n.users) if m.op not in ("placeholder", "get_attr")
            }
        places = [place for n in around if (place := self._of_meta(n)) is not None]
        return self._common(places) if places else self._root

    def _common(self, places: list[Place]) -> Place:
        """The innermost call around all of `places` (at least one), and the scope in it."""
        calls = dict.fromkeys(place.call for place in places)
        if len(calls) == 1:
            return Place(places[0].call, common_scope([place.scope for place in places]))
        shared = functools.reduce(_common_call, calls)
        return self._root if shared is self._root.call else Place(shared, shared.scope)

    def _gone_before(self, replaced: Iterable[Node]) -> set[Node]:
        """Those nodes, and the gone ones that they read, directly or through others."""
        before: set[Node] = set()
        todo = list(replaced)
        while todo:
            node = todo.pop()
            if node in self._gone and node not in before and node.op not in ("placeholder", "get_attr"):
                before.add(node)
                state = self._gone[node]
                todo += [operand for _, operand in operands((state.args, state.kwargs))]
        return before


def _common_call(a: Call, b: Call) -> Call:
    outer = set(a.ancestors())
    return next(call for call in b.ancestors() if call in outer)


def operands(x: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Node]]:
    """The nodes among arguments of a node, each with where it stands there."""
    if isinstance(x, slice):
        x = (x.start, x.stop, x.step)
    if isinstance(x, Node):
        yield path, x
    elif isinstance(x, (list, tuple, dict)):
        for key, item in x.items() if isinstance(x, dict) else enumerate(x):
            yield from operands(item, (*path, key))


def _by_kind(nodes: Iterable[Node]) -> dict[Any, list[Node]]:
    """Nodes by what they call and in which call, in order; only those that have their place in meta."""
    by_kind = collections.defaultdict[Any, list[Node]](list)
    for node in nodes:
        if call_position(node) is not None:
            by_kind[node.op, node.target, call_position(node), scope_path(node)].append(node)
    return by_kind


def _is_between(position: int | None, start: int, stop: int | None) -> bool:
    return stop is None or (position is not None and start <= position < stop)


def _connected(node: Node, within: set[Node]) -> Iterator[Node]:
    seen, todo = {node}, [node]
    while todo:
        current = todo.pop()
        yield current
        near = [n for n in (*current.all_input_nodes, *current.users) if n in within and n not in seen]
        seen.update(near)
        todo += near
