"""The program as a tree: module calls, user scopes inside them, and ops, in execution order."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from scopetrace._compat.graph_module import set_grad_enabled
from scopetrace.containers.structure import leaves
from scopetrace.ir import meta
from scopetrace.ir.tape import BodyTape, Tape
from scopetrace.program.graph import FxLowering
from scopetrace.program.traced import ModuleCall, TracedProgram


@dataclasses.dataclass(slots=True, eq=False)
class Op:
    """One op, with the nodes that take single results out of it."""

    node: torch.fx.Node
    number: int
    """Its position among the ops of the tree."""
    parts: dict[int, torch.fx.Node] = dataclasses.field(default_factory=dict)
    """For an op of several results: slot -> the `getitem` node."""
    bodies: list[Section] = dataclasses.field(default_factory=list)
    """Of a higher-order op, what it runs, where no op before it runs the same."""
    shared: list[Section] = dataclasses.field(default_factory=list)
    """What it runs that an op before it runs, too, as equal calls of an outlined program do."""


@dataclasses.dataclass(slots=True, eq=False)
class Section:
    """A module call, a user scope, or the body of a higher-order op, and what happened in it."""

    path: str
    """The scope's path."""
    call: ModuleCall
    """The call itself; for a user scope or body, the call that it is in."""
    user_scope: str = ""
    """The name of a user scope; empty for a call."""
    body: str = ""
    """The name of the graph of a body."""
    program: FxLowering | None = None
    """The body."""
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
            pending += [item for item in reversed(list(section.contents())) if isinstance(item, Section)]

    def contents(self) -> Iterator[Op | Section]:
        """The items, and after an op its bodies."""
        for item in self.items:
            yield item
            if isinstance(item, Op):
                yield from item.bodies


class Tree:
    """The tree of a trace: `root`, and where each node of the graph is in it."""

    def __init__(self, program: TracedProgram) -> None:
        self.calls = program.calls
        self.ops: dict[torch.fx.Node, tuple[Op, int]] = {}
        """Node -> its op, and its slot among the op's results."""
        self.bodies: set[torch.fx.Node] = set()
        """The nodes that stand for bodies of higher-order ops among their arguments."""
        self.root = Section(self.calls[0].scope.path, self.calls[0])
        self._bodies: dict[Tape, Section] = {}
        self._fill(program.lowering, self.root)
        self._number()

    def _fill(self, program: FxLowering, top: Section) -> None:
        """Put in `top` what a graph has: for each higher-order op, the bodies too."""
        for op in _Filling(self, program, top).run():
            for node in op.node.all_input_nodes:
                body = program.bodies.get(str(node.target)) if node.op == "get_attr" else None
                if body is None:
                    continue
                self.bodies.add(node)
                if body.tape in self._bodies:
                    op.shared.append(self._bodies[body.tape])
                else:
                    section = Section(body.tape.root.path, self._call_of(op.node), "", str(node.target), body)
                    self._bodies[body.tape] = section
                    op.bodies.append(section)
                    self._fill(body, section)

    def _call_of(self, node: torch.fx.Node) -> ModuleCall:
        position = meta.call_position(node)
        return next((call for call in self.calls if call.position == position), self.calls[0])

    def _number(self) -> None:
        """Number the ops in the order of the tree."""
        count = 0
        opened: list[tuple[Section, Iterator[Op | Section]]] = [(self.root, self.root.contents())]
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
                opened.append((item, item.contents()))


class _Filling:
    """Puts every op of a graph in the section of its call, and every call in that of its parent, in graph order."""

    def __init__(self, tree: Tree, program: FxLowering, top: Section) -> None:
        self._tree = tree
        self._top = top
        self._calls = [call for call in tree.calls if call.lowering is program]
        self._sections = {call.position: Section(call.scope.path, call) for call in self._calls}
        self._attached = 0  # the calls before this one are in the section of their parent
        if not isinstance(program.tape, BodyTape):
            self._sections[self._calls[0].position] = top
            self._attached = 1
        nodes = [n for n in program.graph.nodes if n.op in ("call_function", "call_module", "call_method")]
        self._order = {node: i for i, node in enumerate(nodes)}
        self._places = _places(nodes)

    def run(self) -> list[Op]:
        """The ops, in the order of the graph."""
        starts = self._silent_calls()
        found: list[Op] = []
        self._attach_silent(starts, -1)
        for order, (node, position, path) in enumerate(self._places):
            self._attach_until(position)
            found += self._add_op(node, self._section(position), path)
            self._attach_silent(starts, order)
        if self._calls:
            self._attach_until(self._calls[-1].position)
        return found

    def _section(self, position: int) -> Section:
        """Of a call in this graph; what belongs to a call around it is at the top."""
        return self._sections.get(position, self._top)

    def _add_op(self, node: torch.fx.Node, section: Section, path: str) -> list[Op]:
        """The new op, if it is one."""
        ops = self._tree.ops
        taken = _taken(node)
        if taken is not None and taken[0] in ops:
            op, slot = ops[taken[0]][0], taken[1]
            op.parts[slot] = node
            ops[node] = (op, slot)
            return []
        op = Op(node, 0)
        _inside(section, path).items.append(op)
        ops[node] = (op, 0)
        return [op]

    def _attach_until(self, position: int) -> None:
        while self._attached < len(self._calls) and self._calls[self._attached].position <= position:
            call = self._calls[self._attached]
            parent, scope = call.parent, call.scope.parent
            assert parent is not None and scope is not None
            _inside(self._section(parent.position), scope.path).items.append(self._sections[call.position])
            self._attached += 1

    def _silent_calls(self) -> dict[int, int]:
        """The calls in which no op ran (`Identity`), with the place in the graph of their last argument."""
        busy = {position for _, position, _ in self._places}
        for call in reversed(self._calls):
            if call.parent is not None and call.position in busy:
                busy.add(call.parent.position)
        found = {}
        for call in self._calls:
            if call.position not in busy:
                given = leaves(call.arguments, torch.fx.Node)
                found[call.position] = max((self._order.get(node, -1) for node in given), default=-1)
        return found

    def _attach_silent(self, starts: dict[int, int], done: int) -> None:
        """A call without ops stands where its arguments are there."""
        while self._attached < len(self._calls):
            position = self._calls[self._attached].position
            if starts.get(position, done + 1) > done:
                return
            self._attach_until(position)


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
