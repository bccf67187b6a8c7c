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
        was: by node, what it was in the old graph; new nodes are not in it.
        now: by old node, the one of the edited graph; nodes that are gone are not in it.

    `root` is the place of what is in no call of the graph.
    """

    def __init__(
        self,
        made: list[NodeState],
        graph: torch.fx.Graph,
        calls: dict[int, Call],
        scopes: dict[str, Scope],
        root: Place,
    ) -> None:
        self._made, self._graph, self._calls, self._scopes, self._root = made, graph, calls, scopes, root
        self.was = self._pairs()
        self.now = {state.node: node for node, state in self.was.items()}
        self._readers = collections.defaultdict[Node, list[tuple[NodeState, tuple[Any, ...]]]](list)
        for state in made:
            for path, operand in operands(state.args, state.kwargs):
                self._readers[operand].append((state, path))
        self._gone = {state.node: state for state in made if state.node not in self.now}
        self._fresh = self._places_of_new_nodes()

    def _pairs(self) -> dict[Node, NodeState]:
        inputs = [state for state in self._made if state.op == "placeholder"]
        placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        found = dict(zip(placeholders, inputs, strict=True)) if len(inputs) == len(placeholders) else {}
        old = {state.node: state for state in self._made}
        by_name = {state.node.name: state for state in self._made}
        for node in self._graph.nodes:
            state = old.get(node) or by_name.get(node.name)
            if node not in found and state is not None and (state.node is node or _are_one(state, node)):
                found[node] = state
        taken = {state.node for state in found.values()}
        left = _by_kind(state.node for state in self._made if state.node not in taken)
        renamed = _by_kind(node for node in self._graph.nodes if node not in found)
        for kind, nodes in renamed.items():
            if len(left.get(kind, ())) == len(nodes):  # as `split_module` does
                found |= {new: old[was] for new, was in zip(nodes, left[kind], strict=True)}
        return found

    # ---------------------------------------------------------------- values

    def read_now(self, old: Node, start: int = 0, stop: int | None = None) -> list[Node | None]:
        """What those who read an old node read now in its place: the readers in calls from `start` to before `stop`.

        None for a reader that reads no node there.
        """
        found: dict[Node | None, None] = {}
        for state, path in self._readers[old]:
            reader = self.now.get(state.node)
            if reader is None or not _is_between(call_position(state.node), start, stop):
                continue
            found[dict(operands(reader.args, reader.kwargs)).get(path)] = None
        return list(found)

    def replacement(self, old: Node) -> Node | None:
        """The node that all who read a gone node read now; None where there is no single one."""
        found = self.read_now(old)
        return found[0] if len(found) == 1 else None

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
        call, scope = self._calls.get(_position(node)), self._scopes.get(scope_path(node) or "")
        if call is None:
            return None
        return Place(call, scope if scope is not None and call.scope in scope.ancestors() else call.scope)

    def _places_of_new_nodes(self) -> dict[Node, Place]:
        new = {n for n in self._graph.nodes if n.op in _STEPS and n not in self.was and self._of_meta(n) is None}
        replaced = collections.defaultdict[Node, list[Node]](list)
        for old in self._gone if new else ():
            by = self.replacement(old)
            if by is not None:
                replaced[by].append(old)
        found: dict[Node, Place] = {}
        for node in self._graph.nodes:
            if node in new and node not in found:
                group = list(_connected(node, new))
                place = self._place_of(group, [old for n in group for old in replaced[n]])
                found |= dict.fromkeys(group, place)
        return found

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
        found: set[Node] = set()
        todo = list(replaced)
        while todo:
            node = todo.pop()
            if node in self._gone and node not in found and node.op not in ("placeholder", "get_attr"):
                found.add(node)
                state = self._gone[node]
                todo += [operand for _, operand in operands(state.args, state.kwargs)]
        return found


def _common_call(a: Call, b: Call) -> Call:
    outer = set(around(a))
    return next(call for call in around(b) if call in outer)


def around(call: Call | None) -> Iterator[Call]:
    """A call, then those around it up to the root."""
    while call is not None:
        yield call
        call = call.parent


def operands(args: Any, kwargs: Any) -> list[tuple[tuple[Any, ...], Node]]:
    """The nodes among the arguments of a node, each with where it stands there."""
    found: list[tuple[tuple[Any, ...], Node]] = []
    _collect((args, kwargs), (), found)
    return found


def _collect(x: Any, path: tuple[Any, ...], found: list[tuple[tuple[Any, ...], Node]]) -> None:
    if isinstance(x, Node):
        found.append((path, x))
    elif isinstance(x, (list, tuple)):
        for i, item in enumerate(x):
            _collect(item, (*path, i), found)
    elif isinstance(x, dict):
        for key, item in x.items():
            _collect(item, (*path, key), found)
    elif isinstance(x, slice):
        _collect((x.start, x.stop, x.step), path, found)


def _are_one(state: NodeState, node: Node) -> bool:
    """Whether a node of another graph with the name of an old one is that node, perhaps with another target."""
    return state.op == node.op and call_position(state.node) == call_position(node)


def _by_kind(nodes: Iterable[Node]) -> dict[Any, list[Node]]:
    """Nodes by what they call and in which call, in order; only those that have their place in meta."""
    found = collections.defaultdict[Any, list[Node]](list)
    for node in nodes:
        if call_position(node) is not None:
            found[node.op, node.target, call_position(node), scope_path(node)].append(node)
    return found


def _position(node: Node) -> int:
    position = call_position(node)
    return -1 if position is None else position


def _is_between(position: int | None, start: int, stop: int | None) -> bool:
    return stop is None or (position is not None and start <= position < stop)


def _connected(node: Node, within: set[Node]) -> Iterator[Node]:
    """The nodes of `within` that are connected with `node` through each other."""
    seen, todo = {node}, [node]
    while todo:
        found = todo.pop()
        yield found
        near = [n for n in (*found.all_input_nodes, *found.users) if n in within and n not in seen]
        seen.update(near)
        todo += near
