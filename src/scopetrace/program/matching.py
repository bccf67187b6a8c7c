"""Where the ops of an edited graph belong: which nodes are which of the traced graph, and in which calls they are.

Data flow:
    nodes as the trace made them + nodes of the edited graph
        -> pairs: the same node object, else the same name and call, else the same place in meta, which is copied
    a node that is gone -> its replacement: what its readers read now in its place
    new nodes -> the call of the nodes that they replace, else the innermost call around what they read and feed
    the call that each op asks for -> of each call, outer first, the longest stretch of its ops -> its range
    an op that asks for a call outside of its range -> the innermost call around it
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch.fx

from scopetrace.containers.structure import Removed, leaves, map_structure
from scopetrace.ir.scopes import Scope, innermost_common
from scopetrace.ir.tape import Call, Op, Tape, Value
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
            return Position(places[0].call, innermost_common(place.scope.ancestors() for place in places))
        shared = innermost_common(call.ancestors() for call in calls)
        return self._root if shared is self._root.call else Position(shared, shared.scope)


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


# Ranges --------------------------------------------------------------------------------------------------------------


class CallRanges:
    """The ranges of the calls of a tape whose ops were put in another order, or are others."""

    def __init__(self, tape: Tape) -> None:
        self.tape, self.calls = tape, set(tape.calls)
        self.asked = {
            i: [] if op.call is None else [*op.call.ancestors()][::-1]
            for i, op in enumerate(tape.ops)
            if op.kind in ("call_function", "call_module")
        }
        """By the position of an op, the calls that it asks to be in, outer ones first."""
        self.steps = list(self.asked)
        self.children = collections.defaultdict[Call | None, list[Call]](list)
        for call in tape.calls:
            self.children[call.parent if call.parent in self.calls else None].append(call)
        self.made_at = {v: i for i, op in enumerate(tape.ops) for v in op.values()}

    def settle(self) -> dict[Op, Op]:
        """Set `start` and `stop` of all calls, and move ops that lie outside of the range of their call.

        Returns the new op for each that moved.
        """
        ops, moved = self.tape.ops, dict[Op, Op]()
        first = next((i for i, op in enumerate(ops) if op.kind != "placeholder"), len(ops))
        self._place_children(None, first, len(ops))
        innermost: list[Call | None] = [None] * len(ops)
        for call in self.tape.calls:
            # what is made after a call begins is no argument of it any more, and what is made after it no result
            call.args, call.kwargs = self._made_before(call.start, (call.args, call.kwargs))
            call.outputs, call.mutated = self._made_before(call.stop, (call.outputs, call.mutated))
            if call.mutated is not None:
                args, kwargs, held = call.mutated
                call.mutated = args, kwargs, {name: v for name, v in held.items() if isinstance(v, Value)}
            innermost[call.start : call.stop] = [call] * (call.stop - call.start)
        for i, asked in self.asked.items():
            op, inside = ops[i], innermost[i]
            scope = self.tape.root if inside is None else inside.scope
            inside = inside or next((call for call in reversed(asked) if call not in self.calls), None)
            if op.call is not inside:
                moved[op] = ops[i] = op.replace(call=inside, scope=scope).take_values()
        return moved

    def _made_before(self, limit: int, template: Any) -> Any:
        def in_time(v: Value) -> Value | Removed:
            is_late = v.op.kind in ("call_function", "call_module") and self.made_at.get(v, -1) >= limit
            return Removed(str(v.op.target)) if is_late else v

        return map_structure(in_time, template, Value)

    def _place_children(self, parent: Call | None, start: int, stop: int) -> None:
        """Give the calls made directly in `parent` ranges in it, in their order."""
        children = self.children[parent]
        is_root = [child.parent for child in children] == [None]
        runs: list[tuple[int, int] | None] = [(start, stop)] if is_root else self._runs(children, start, stop)
        for number, child in enumerate(children):
            child.start, child.stop = runs[number] or self._empty(child, start, runs[number + 1 :], stop)
            self._place_children(child, child.start, child.stop)
            start = child.stop

    def _runs(self, children: list[Call], start: int, stop: int) -> list[tuple[int, int] | None]:
        """Of each call, the longest stretch of ops that are all in it; None without any."""
        inside = self.steps[bisect.bisect_left(self.steps, start) : bisect.bisect_left(self.steps, stop)]
        among = set(children)
        stretches = collections.defaultdict[Call | None, list[list[int]]](list)
        for call, stretch in itertools.groupby(inside, lambda i: next((c for c in self.asked[i] if c in among), None)):
            stretches[call].append([*stretch])
        runs: list[tuple[int, int] | None] = []
        for child in children:
            longest = max((s for s in stretches[child] if s[0] >= start), key=len, default=None)
            runs.append(None if longest is None else (longest[0], longest[-1] + 1))
            start = start if longest is None else longest[-1] + 1
        return runs

    def _empty(self, call: Call, start: int, later: list[tuple[int, int] | None], stop: int) -> tuple[int, int]:
        """The range of a call without ops: after its arguments are made, before the next call with ops."""
        limit = next((run[0] for run in later if run is not None), stop)
        starts = [self.made_at[v] + 1 for v in leaves((call.args, call.kwargs), Value) if v in self.made_at]
        at = min(max([start, *starts]), limit)
        return at, at
