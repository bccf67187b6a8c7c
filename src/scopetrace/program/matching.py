"""Where the ops of an edited graph belong: which nodes are which of the traced graph, and in which calls they are.

Data flow:
    nodes as the trace made them + nodes of the edited graph
        -> pairs: the same node object, else the same name and call, else the same place in meta, which is copied
    a node that is gone -> its replacement: what its readers read now in its place
    new nodes -> the call of the nodes that they replace, else the innermost call around what they read and feed
    the call that each op asks for -> where calls begin and end, in the order that they had: as many ops as can be are
        in the calls that they ask for, the others in one around that runs there
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch.fx

from scopetrace.functionalization.rewrites import boundaries
from scopetrace.ir.scopes import Scope, innermost_common
from scopetrace.ir.tape import BodyTape, Call, Op
from scopetrace.program.graph import FxLowering, NodeState, call_position, place_in_meta, scope_path

Node = torch.fx.Node
_OUTSIDE = ("placeholder", "get_attr")


class Position(NamedTuple):
    """Where an op belongs: a call of the old tape, and the scope."""

    call: Call | None
    scope: Scope
    after: int = -1
    """Of a new node, the position of the last op that it replaces."""

    def is_in(self, call: Call) -> bool:
        """Whether that is in a call or in one inside it."""
        return self.call is not None and call in self.call.ancestors()


class Matching:
    """The nodes of an edited graph beside those of the graph that it was made from.

    Attributes:
        traced: by node, what it was in the old graph; new nodes are not in it.
        boundaries: the calls that begin or end in the old tape, in order; each with its place and whether it begins.
    """

    def __init__(self, old: FxLowering, graph: torch.fx.Graph, calls: Iterable[Call], scopes: dict[str, Scope]) -> None:
        """`calls` and `scopes` are those of the whole old program, the scopes by their paths."""
        self._old, self._graph, self._scopes = old, graph, scopes
        self._calls = {call.position: call for call in calls}
        ops = old.tape.ops
        around = ops[0].call if isinstance(old.tape, BodyTape) and ops else None  # of a body
        self._root = Position(around or self._calls[min(self._calls)], old.tape.root)
        self.traced = self._pairs()
        self._current = {state.node: node for node, state in self.traced.items()}
        self._readers = collections.defaultdict[Node, list[tuple[Node, int]]](list)
        for reader, state in self.traced.items():
            for i, operand in enumerate(_arguments(state)):
                if operand is not None:
                    self._readers[operand].append((reader, i))
        self._gone = {s.node: s for s in old.states if s.node not in self._current and s.op not in _OUTSIDE}
        self._positions = {op: i for i, op in enumerate(ops)}
        self._new = self._places_of_new_nodes()
        at = boundaries(old.tape.calls)
        self.boundaries = [(i, call, begins) for i in sorted(at) for call, begins in at[i]]
        self._running = [around, *(call if begins else call.parent for _, call, begins in self.boundaries)]
        """By number of boundaries, the call that is running after so many."""
        self._last = self._latest()

    def _pairs(self) -> dict[Node, NodeState]:
        inputs = (state for state in self._old.states if state.op == "placeholder")
        pairs = dict(zip(self._graph.find_nodes(op="placeholder"), inputs, strict=True))
        ways: tuple[Callable[[Node], Any], ...] = (
            lambda n: n,
            lambda n: (n.name, n.op, call_position(n)),  # of another graph, perhaps with another target
            # `split_module` gives nodes other names, and copies their meta
            lambda n: (id(place_in_meta(n)), n.op, n.target) if place_in_meta(n) else None,
        )
        for way in ways:
            taken = {state.node for state in pairs.values()}
            left = {key: s for s in self._old.states if s.node not in taken and (key := way(s.node)) is not None}
            pairs |= {n: left[key] for n in self._graph.nodes if n not in pairs and (key := way(n)) in left}
        return pairs

    def old_op(self, node: Node) -> Op | None:
        """The op of the old tape that a node was."""
        state = self.traced.get(node)
        return None if state is None else self._old.op_of.get(state.node)

    def stand_in(self, old: Node, call: Call | None = None) -> Node | None:
        """The node that is in the place of an old one now: as an argument of `call`, where one is given.

        That is the same one, or what all who read it read now; of an argument, in the call and made outside of it.
        """
        node = self._current.get(old)
        if node is not None and (call is None or any(self.place(n).is_in(call) for n in node.users)):
            return node
        readers = [(n, i) for n, i in self._readers[old] if call is None or self.place(n).is_in(call)]
        read = {dict(enumerate(_arguments(n))).get(i) for n, i in readers}
        one = read.pop() if len(read) == 1 else None
        return node if one is None or (call is not None and self.place(one).is_in(call)) else one

    # ---------------------------------------------------------------- places

    def place(self, node: Node) -> Position:
        """The call that a node of the edited graph asks for, and its scope."""
        op = self.old_op(node)
        return self._new.get(node) or (op and Position(op.call, op.scope)) or self._of_meta(node) or self._root

    def _of_meta(self, node: Node) -> Position | None:
        position, scope = call_position(node), self._scopes.get(scope_path(node) or "")
        if node.op == "output" or position not in self._calls:
            return None
        call = self._calls[position]
        return Position(call, scope if scope is not None and call.scope in scope.ancestors() else call.scope)

    def _places_of_new_nodes(self) -> dict[Node, Position]:
        new = {n for n in self._graph.nodes if n.op not in _OUTSIDE and n not in self.traced and not self._of_meta(n)}
        replaced = collections.defaultdict[Node | None, list[Node]](list)
        for old in self._gone if new else ():
            replaced[self.stand_in(old)].append(old)
        places: dict[Node, Position] = {}
        for node in self._graph.nodes:
            if node in new and node not in places:
                group = _reached([node], lambda n: [m for m in (*n.all_input_nodes, *n.users) if m in new])
                first = [old for n in group for old in replaced[n]]
                gone = _reached(first, lambda n: [m for m in _arguments(self._gone[n]) if m in self._gone])
                around = gone or [m for n in group for m in (*n.all_input_nodes, *n.users) if m.op not in _OUTSIDE]
                known = [place for n in around if (place := self._of_meta(n)) is not None]
                after = [self._positions[self._old.op_of[n]] for n in gone if n in self._old.op_of]
                places |= dict.fromkeys(group, self._common(known)._replace(after=max(after, default=-1)))
        return places

    def _common(self, places: list[Position]) -> Position:
        """The innermost call around all of `places`, and the scope in it."""
        calls = dict.fromkeys(place.call for place in places if place.call is not None)
        if len(calls) == 1:
            return Position(places[0].call, innermost_common(place.scope.ancestors() for place in places))
        shared = innermost_common(call.ancestors() for call in calls) if calls else self._root.call
        return self._root if shared is None or shared is self._root.call else Position(shared, shared.scope)

    # ---------------------------------------------------------------- ranges of calls

    def _before(self, node: Node) -> int:
        """How many boundaries are before the op that a node was, or before the end of what it replaces."""
        op = self.old_op(node)
        after = self.place(node).after if op is None else self._positions[op]
        return bisect.bisect_right(self.boundaries, after, key=lambda boundary: boundary[0])

    def _latest(self) -> dict[Node, int]:
        """How many boundaries are before each node at most, so that few calls lose what asks to be in them."""
        places = collections.defaultdict[Call | None, list[int]](list)
        for i, call in enumerate(self._running):
            places[call].append(i)
        nodes = list(self._graph.nodes)
        steps = [n for n in nodes if n.op not in _OUTSIDE and (n not in self._new or self._new[n].after >= 0)]
        steps = [n for n in steps if n not in self.traced or self.old_op(n)]  # no parts of results, no sizes
        wanted = [(self._before(n), self.place(n).call) for n in steps]
        stay = [i for i, call in wanted if self._running[i] is call]
        in_order = stay == sorted(stay)  # so that there is nothing to choose
        choices = [[i] if in_order and self._running[i] is call else places[call] for i, call in wanted]
        sizes = collections.Counter(call for _, call in wanted)
        weights = [1 / sizes[call] for _, call in wanted]
        inside = {steps[i]: choices[i] for i in _ascending([*zip(choices, weights, strict=True)])}
        last, latest = len(self.boundaries), dict[Node, int]()
        for node in reversed(nodes):
            if node in inside:
                last = inside[node][bisect.bisect_right(inside[node], last) - 1]
            latest[node] = last
        return latest

    def enter(self, node: Node, passed: int) -> tuple[int, Position]:
        """How many boundaries are before a node, of which so many were passed, and its place."""
        wanted, before, span = self.place(node), self._before(node), range(passed, self._last[node] + 1)
        if before <= passed and self._running[passed] is wanted.call:  # as of most
            return passed, wanted
        running = [self._running[i] for i in span]
        outer = [] if wanted.call is None else wanted.call.ancestors()
        call = next((call for call in outer if call in running), None)
        call = call or min(running, key=lambda c: 0 if c is None else len([*c.ancestors()]))
        inside = [i for i in span if self._running[i] is call]
        place = wanted if call is wanted.call else Position(call, self._old.tape.root if call is None else call.scope)
        return next((i for i in inside if i >= before), inside[-1]), place


def _arguments(node: Node | NodeState) -> list[Node | None]:
    """The leaves of a node's arguments, in order: nodes, and None for all else."""
    leaves: list[Node | None] = []
    torch.fx.node.map_aggregate((node.args, node.kwargs), lambda x: leaves.append(x if isinstance(x, Node) else None))
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


def _ascending(items: list[tuple[list[int], float]]) -> Iterator[int]:
    """The positions, the last first, of the heaviest that ascend; each item is one of several numbers, and a weight."""
    ends: list[int] = [-1]
    chains: list[Any] = [(0, 0, None)]  # by end, heavier than those that end lower: weight, position, what is before
    for i, (numbers, weight) in enumerate(items):
        for number in reversed(numbers):
            n = bisect.bisect_right(ends, number)
            total = chains[n - 1][0] + weight
            start, stop = n - (ends[n - 1] == number), n
            while stop < len(ends) and chains[stop][0] <= total:
                stop += 1
            ends[start:stop], chains[start:stop] = [number], [(total, i, chains[n - 1])]
    chain = chains[-1]
    while chain[2] is not None:
        yield chain[1]
        chain = chain[2]
