"""The view model of pictures: boxes in boxes, with ports and edges on each level.

Data flow:
    Tree of sections -> runs of equal neighbours -> a Box for each call, user scope, body, run and op
    nodes that a box uses and that come from outside -> its inputs; those that it returns or others use -> its outputs
    producer and user of a node inside one box -> an Edge of that box

A renderer that opens a box draws its children and edges; one that leaves it closed draws its ports.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
import torch.fx

from scopetrace.containers.structure import leaves, leaves_with_path
from scopetrace.ir.scopes import source_of
from scopetrace.ir.selection import Selection
from scopetrace.program.graph import call_position, named, node_value, type_text
from scopetrace.program.traced import ModuleCall, TracedProgram
from scopetrace.view.marks import Marks
from scopetrace.view.measures import Measures, Meter, cost_text
from scopetrace.view.text import counted, is_section_named, label_of, op_line
from scopetrace.view.tree import Folder, Op, Run, Section, Tree, target_text

Kind = Literal["call", "scope", "body", "run", "op"]
"""A module call, a user scope, the body of a higher-order op, equal neighbours, an op."""


@dataclasses.dataclass(frozen=True)
class Port:
    """A value that goes into a box or comes out of it."""

    name: str
    """The parameter of `forward`, with the path inside it; for other values the node."""
    type: str
    """`f32[1, 8]`."""


@dataclasses.dataclass(frozen=True)
class End:
    """Where a value in a box begins or ends: at a port of a child, or at a port of the box itself."""

    child: int | None
    """The position of the child; None for the box."""
    port: int
    """Which output of the child that makes the value, which input of one that uses it; of the box, the other way."""


@dataclasses.dataclass(frozen=True)
class Edge:
    """A value inside a box, from where it is made to where it is used."""

    source: End
    target: End
    type: str
    """`f32[1, 8]`."""


@dataclasses.dataclass(eq=False)
class Box:
    """A part of a program.

    Attributes:
        key: unique in the program, and the same in each run: the scope's path with the index of the call; of an op, the
            key of the box around it and the op's name.
        inputs, outputs: its ports.
        children: the boxes inside, in the order of execution.
        parameters: the parameters, buffers and constants that it reads, by their names in the model.
    """

    key: str
    label: str
    kind: Kind
    call: ModuleCall
    """The call that it is, or is in."""
    cost: Measures
    section: Section | None = None
    """Of a call, user scope or body, its place in the tree."""
    text: str = ""
    """Of an op, its line in the program's text."""
    source: str = ""
    """Of an op, the line of the model's code: `model.py:12`."""
    writes: tuple[str, ...] = ()
    """The inputs, buffers and parameters of the model that it changes; names without that of the module itself."""
    shares: tuple[str, ...] = ()
    """The parameters that modules outside read, too."""
    inputs: list[Port] = dataclasses.field(default_factory=list)
    outputs: list[Port] = dataclasses.field(default_factory=list)
    children: list[Box] = dataclasses.field(default_factory=list)
    edges: list[Edge] = dataclasses.field(default_factory=list)
    parameters: tuple[Port, ...] = ()

    def notes(self) -> Iterator[tuple[str, str]]:
        """The lines below its label, each with its kind: `cost`, `weights` of an op, `writes`, `shares`."""
        prefix = f"{self.call.fqn}." if self.call.fqn else ""
        weights = ", ".join(port.name.removeprefix(prefix) for port in self.parameters)
        first = ("weights", weights) if self.kind == "op" else ("cost", cost_text(self.cost))
        marks = ((kind, names) for kind, names in (("writes", self.writes), ("shares", self.shares)) if names)
        found = [first, *((kind, f"{kind} {', '.join(names)}") for kind, names in marks)]
        return ((kind, text) for kind, text in found if text)

    def walk(self) -> Iterator[Box]:
        """This box and all inside it, outer before inner."""
        yield self
        for inner in self.children:
            yield from inner.walk()


def boxes(program: TracedProgram) -> Box:
    """The box of a program: that of its root call."""
    return _Boxes(program).root()


def outermost_boxes(box: Box, selection: Selection) -> Iterator[Box]:
    """The boxes of calls and user scopes that a selection names and that are not inside another one of them."""
    if box.section is not None and is_section_named(box.section, selection):
        yield box
        return
    for inner in box.children:
        yield from outermost_boxes(inner, selection)


Item = Op | Section | Run
Nodes = dict[torch.fx.Node, None]
"""A set of nodes that keeps their order."""


class _Boxes:
    def __init__(self, program: TracedProgram) -> None:
        self._program = program
        self._tree = Tree(program)
        self._folder = Folder(self._tree, program.tape.constants)
        self._meter = Meter(program)
        self._marks = Marks(program, self._tree)
        self._attributes = program.tape.attributes
        self._keys: collections.Counter[str] = collections.Counter()

    def root(self) -> Box:
        root = self._tree.root
        return self._section(root, root.path, {})

    # ---------------------------------------------------------------- boxes

    def _section(self, section: Section, key: str, needed: Nodes) -> Box:
        kind: Kind = "call" if section.is_call else "body" if section.program is not None else "scope"
        label = section.body or label_of(section)
        box = Box(self._unique(key), label, kind, section.call, self._meter.of(section), section)
        box.writes = self._marks.writes(section)
        needed = dict.fromkeys([*self._results(section), *needed])
        items: list[Item] = []
        for run in self._folder.runs(section.items):
            items.append(run if len(run.members) > 1 else run.members[0])
        self._fill(box, section, items, needed)
        return box

    def _run(self, run: Run, key: str, needed: Nodes) -> Box:
        members = run.sections
        label = counted([label_of(member) for member in members])
        box = Box(self._unique(f"{key} ×{len(members)}"), label, "run", members[0].call, self._meter.sum(members))
        self._fill(box, run, list(members), needed)
        box.writes = tuple(dict.fromkeys(name for member in box.children for name in member.writes))
        return box

    def _op(self, op: Op, key: str, given: Nodes) -> Box:
        """`given` are its results, also one without an example value, as a number that is computed of numbers."""
        box = Box(self._unique(key), target_text(op.node), "op", self._call_of(op), self._meter.of_op(op))
        bodies = [*op.bodies, *op.shared]
        if op.node.target is torch.ops.higher_order.invoke_subgraph:
            box.label = f"function {bodies[0].body}"
        box.text = op_line(op, named)
        box.source = self._source(op)
        box.inputs = [self._port(node) for node in self._taken(op)]
        box.outputs = [self._port(node) for node in given]
        box.children = [self._section(body, f"{key}/{body.body}", {}) for body in op.bodies]
        read = [
            self._port(n) for n in op.node.all_input_nodes if n.op == "get_attr" and str(n.target) in self._attributes
        ]
        inside = [port for body in box.children for port in body.parameters]
        box.parameters = tuple(dict.fromkeys([*read, *inside]))
        box.shares = self._marks.shares(*self._range(op))
        return box

    def _fill(self, box: Box, item: Section | Run, items: list[Item], needed: Nodes) -> None:
        """Add ports, children and edges to a box. `needed` are its nodes that are used outside."""
        names, taken = self._argument_names(item), self._taken(item)
        box.inputs = [self._port(node, names.get(node)) for node in taken]
        results = self._result_names(item)
        box.outputs = [self._port(node, results.get(node)) for node in needed]
        uses = [self._taken(inner) for inner in items]
        given = [dict.fromkeys(self._results(inner)) for inner in items]
        starts = [self._range(inner)[0] for inner in items]
        for node in dict.fromkeys([node for nodes in uses for node in nodes] + list(needed)):
            child = self._producer(node, items, starts)
            if child is not None:
                given[child][node] = None
        ends = {node: End(None, port) for port, node in enumerate(taken)}
        for child, nodes in enumerate(uses):
            box.edges += _edges(ends, child, nodes)
            ends |= {node: End(child, port) for port, node in enumerate(given[child])}  # Identity gives what it got
        box.edges += _edges(ends, None, needed)
        box.children = [self._item(inner, box.key, nodes) for inner, nodes in zip(items, given, strict=True)]
        box.parameters = tuple(dict.fromkeys(port for inner in box.children for port in inner.parameters))
        box.shares = self._marks.shares(*self._range(item))

    def _producer(self, node: torch.fx.Node, items: list[Item], starts: list[int]) -> int | None:
        """Which of `items`, whose ops begin at `starts`, makes a node; None where it comes from outside them."""
        number = self._number(node)
        child = -1 if number is None else bisect.bisect_right(starts, number) - 1
        return child if number is not None and child >= 0 and number < self._range(items[child])[1] else None

    def _item(self, item: Item, around: str, needed: Nodes) -> Box:
        if isinstance(item, Op):
            return self._op(item, f"{around}/%{item.node.name}", needed)
        first = item.sections[0] if isinstance(item, Run) else item
        index = f"#{first.call.index}" if first.is_call and first.call.index else ""
        key = f"{first.path}{index}"
        return self._run(item, key, needed) if isinstance(item, Run) else self._section(item, key, needed)

    # ---------------------------------------------------------------- nodes of an item

    def _range(self, item: Item) -> tuple[int, int]:
        """The numbers of the ops in an item: from the first to before the second."""
        if isinstance(item, Op):
            return item.number, max([item.number + 1, *(body.stop for body in item.bodies)])
        if isinstance(item, Run):
            return item.sections[0].first, item.sections[-1].stop
        return item.first, item.stop

    def _number(self, node: torch.fx.Node) -> int | None:
        op = self._tree.ops.get(node)
        return None if op is None else op[0].number

    def _taken(self, item: Item) -> list[torch.fx.Node]:
        """The nodes from outside an item that it uses, in order, without parameters, buffers and bodies."""
        return [node for node in self._outside(item) if node.op != "get_attr"]

    def _outside(self, item: Item) -> list[torch.fx.Node]:
        if isinstance(item, Op):
            return item.node.all_input_nodes
        if isinstance(item, Run):
            first, stop = self._range(item)
            every = dict.fromkeys(node for member in item.sections for node in member.outside)
            return [n for n in every if (at := self._number(n)) is None or not first <= at < stop]
        if item.program is not None:
            return list(item.program.graph.find_nodes(op="placeholder"))
        if item is self._tree.root:
            return list(self._program.lowering.graph.find_nodes(op="placeholder"))
        return item.outside

    def _results(self, item: Item) -> list[torch.fx.Node]:
        """The nodes that an op gives or a call or body returns."""
        if isinstance(item, Op):
            return _given(item)
        if isinstance(item, Run):
            return []
        if item.program is not None:
            return leaves(item.program.output.args[0], torch.fx.Node)
        return leaves(item.call.output_template, torch.fx.Node) if item.is_call else []

    def _argument_names(self, item: Item) -> dict[torch.fx.Node, str]:
        section = item.sections[0] if isinstance(item, Run) else item
        if not isinstance(section, Section) or not section.is_call:
            return {}
        arguments = section.call.argument_templates.items()
        return _first_names((name + path, leaf) for name, x in arguments for path, leaf in leaves_with_path(x))

    def _result_names(self, item: Item) -> dict[torch.fx.Node, str]:
        section = item.sections[-1] if isinstance(item, Run) else item
        if not isinstance(section, Section) or not section.is_call:
            return {}
        named = ((path.strip("[].'\""), path, leaf) for path, leaf in leaves_with_path(section.call.output_template))
        return _first_names((n if n.isidentifier() else f"output{path}", leaf) for n, path, leaf in named)

    def _call_of(self, op: Op) -> ModuleCall:
        position = call_position(op.node) or 0
        return self._tree.calls[position] if position < len(self._tree.calls) else self._tree.calls[0]

    def _source(self, op: Op) -> str:
        made_by = self._program.lowering.op_of.get(op.node)
        return (source_of(made_by.frames) or "") if made_by is not None else ""

    def _port(self, node: torch.fx.Node, name: str | None = None) -> Port:
        return Port(name or named(node), _type(node))

    def _unique(self, key: str) -> str:
        self._keys[key] += 1
        return key if self._keys[key] == 1 else f"{key}~{self._keys[key]}"


def _first_names(named: Iterable[tuple[str, Any]]) -> dict[torch.fx.Node, str]:
    found: dict[torch.fx.Node, str] = {}
    for name, leaf in named:
        if isinstance(leaf, torch.fx.Node):
            found.setdefault(leaf, name)
    return found


def _edges(ends: dict[torch.fx.Node, End], child: int | None, nodes: Iterable[torch.fx.Node]) -> list[Edge]:
    """The edges to a child, or to the outputs of the box around it."""
    return [Edge(ends[n], End(child, port), _type(n)) for port, n in enumerate(nodes) if n in ends]


def _type(node: torch.fx.Node) -> str:
    return type_text(node_value(node))


def _given(op: Op) -> list[torch.fx.Node]:
    return [op.parts[slot] for slot in sorted(op.parts)] or ([op.node] if node_value(op.node) is not None else [])
