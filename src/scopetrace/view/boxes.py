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
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.fx

from scopetrace.containers.structure import leaves, leaves_with_path
from scopetrace.ir.selection import Selection
from scopetrace.program.graph import named, node_value, type_text
from scopetrace.program.traced import ModuleCall, TracedProgram
from scopetrace.view.measures import Marks, Measures, Meter, cost_text
from scopetrace.view.text import counted, op_line, outermost, refuse_unnamed
from scopetrace.view.tree import Kind, OpItem, Section, Tree, index_of, source_line


@dataclasses.dataclass(frozen=True)
class Port:
    """A value that goes into a box or comes out of it."""

    name: str
    """The parameter of `forward`, with the path inside it; for other values the node."""
    type: str
    """`f32[1, 8]`."""
    node: torch.fx.Node = dataclasses.field(compare=False)


class Edge(NamedTuple):
    """A value inside a box, from where it is made to where it is used."""

    maker: int
    """The position of the child that makes it; -1 for the box itself, to which it comes in."""
    output: int
    """Which output of the child, or input of the box."""
    user: int
    """The position of the child that uses it; -1 for the box itself, which gives it."""
    input: int
    """Which input of the child, or output of the box."""
    type: str


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
    """That of its section; `scope` for a part of the backward."""
    call: ModuleCall
    """The call that it is, or is in."""
    cost: Measures
    section: Section
    """Its place in the tree."""
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
    parameters: tuple[Port, ...] = ()

    @property
    def name(self) -> str:
        """Of an op, the name of its node."""
        return self.key.rpartition("/%")[2]

    @functools.cached_property
    def edges(self) -> list[Edge]:
        """From ports at which values come in, or children that make them, to children that use them, and out again."""
        edges: list[Edge] = []
        makers = {port.node: (-1, i) for i, port in enumerate(self.inputs)}
        users = [(child, box.inputs, box.outputs) for child, box in enumerate(self.children)]
        for child, used, gives in [*users, (-1, self.outputs, [])]:
            known = ((i, port) for i, port in enumerate(used) if port.node in makers)
            edges += [Edge(*makers[port.node], child, i, port.type) for i, port in known]
            makers |= {port.node: (child, i) for i, port in enumerate(gives)}  # Identity gives what it got
        return edges

    def notes(self) -> Iterator[tuple[str, str]]:
        """The lines below its label, each with its kind: `cost`, `weights` of an op, `writes`, `shares`."""
        prefix = f"{self.call.fqn}." if self.call.fqn else ""
        weights = ", ".join(port.name.removeprefix(prefix) for port in self.parameters)
        if self.kind != "op" and (cost := cost_text(self.cost)):
            yield "cost", cost
        elif self.kind == "op" and weights:
            yield "weights", weights
        for mark, names in (("writes", self.writes), ("shares", self.shares)):
            if names:
                yield mark, f"{mark} {', '.join(names)}"

    def close(self, depth: int) -> None:
        """Leave out what is in calls more than `depth` levels inside."""
        for inner in self.children:
            left = depth - (inner.kind == "call")
            if left < 0:
                inner.children = []
            inner.close(left)

    def walk(self) -> Iterator[Box]:
        """This box and all inside it, outer before inner."""
        yield self
        for inner in self.children:
            yield from inner.walk()


def boxes(program: TracedProgram) -> Box:
    """The box of a program: that of its root call."""
    return _Boxes(program).root()


def outermost_boxes(root: Box, selection: Selection) -> list[Box]:
    """The boxes of calls and user scopes that a selection names and that are not inside another one of them.

    Raises CallNotFoundError for what names none.
    """
    refuse_unnamed(root.call.scope, [box.call for box in root.walk()], selection)
    sections = set(outermost(root.section, selection))
    return [box for box in root.walk() if box.section in sections]


_MASKS = "positions and masks"
_FEW = 3
"""More ops than these are folded."""

Nodes = dict[torch.fx.Node, None]
"""A set of nodes that keeps their order."""


class _Boxes:
    def __init__(self, program: TracedProgram) -> None:
        self._program = program
        self._tree = Tree(program)
        self._meter = Meter(program)
        self._marks = Marks(program, self._tree)
        self._keys = collections.Counter[str]()
        self._masks: Nodes = {}

    def root(self) -> Box:
        return self._box(self._tree.root, "", leaves(self._tree.root.outputs, torch.fx.Node))

    def _box(self, part: Section, around: str, results: Iterable[torch.fx.Node]) -> Box:
        """The box of a part that is in the box with the key `around`. `results` are its nodes that are used outside."""
        members = part.items if part.kind == "run" else [part]
        first, last = members[0], members[-1]
        key = first.path + (index_of(first.call) if first.kind == "call" else "")
        if part.kind == "run":
            key += f" ×{len(members)}"
        elif part.kind in ("op", "body"):
            key = f"{around}/{f'%{part.node.name}' if isinstance(part, OpItem) else part.name}"
        kind: Kind = "scope" if part.kind == "backward" else part.kind
        box = Box(self._unique(key), counted([m.label for m in members]), kind, part.call, self._meter.of(part), part)
        names = _argument_names(first), _result_names(last)
        box.inputs = [_port(node, names[0].get(node)) for node in self._used(part)]
        box.outputs = [_port(node, names[1].get(node)) for node in results]
        box.children = self._children(part, box.key, results)
        read: list[Port] = []
        if isinstance(part, OpItem):
            box.text, box.source = op_line(part, named), source_line(part.node, self._program.lowering)
            read = [_port(node) for node in part.attributes if str(node.target) in self._program.tape.attributes]
            if part.node.target is torch.ops.higher_order.invoke_subgraph:
                box.label = f"function {part.bodies[0].name}"
        box.parameters = tuple(dict.fromkeys([*read, *(port for inner in box.children for port in inner.parameters)]))
        box.writes = tuple(dict.fromkeys(name for member in members for name in self._marks.writes(member)))
        box.shares = self._marks.shares(part)
        return box

    def _children(self, part: Section, key: str, results: Iterable[torch.fx.Node]) -> list[Box]:
        """The boxes in a box, with ports for what is used beside them or outside."""
        if part.kind in ("op", "run"):
            items = part.items
        else:
            runs = self._tree.runs(self._folded(part))
            items = [x.items[0] if x.kind == "run" and len(x.items) == 1 else x for x in runs]
        needed: list[Nodes] = [dict.fromkeys(leaves(item.outputs, torch.fx.Node)) for item in items]
        starts = [item.first for item in items]
        for node in [*itertools.chain.from_iterable(map(self._used, items)), *results]:
            child = bisect.bisect_right(starts, number := self._number(node)) - 1
            if part.kind != "op" and child >= 0 and number < items[child].stop:
                needed[child][node] = None
        return [self._box(item, key, nodes) for item, nodes in zip(items, needed, strict=True)]

    def _folded(self, section: Section) -> list[Section]:
        """The items of a section, with neighbours that only make positions and masks in a section of their own."""
        items: list[Section] = []
        for makes_mask, group in itertools.groupby(section.items, self._makes_mask):
            ops = list(group)
            if makes_mask and _FEW < len(ops) < len(section.items):
                ops = [Section("scope", section.path, section.call, _MASKS, None, ops, ops[0].first, ops[-1].stop)]
                self._tree.runs(ops)
            items += ops
        return items

    def _makes_mask(self, item: Section) -> bool:
        """Whether an op computes with no float but constants, and with what such ops make."""
        if not isinstance(item, OpItem) or item.bodies:
            return False
        constants = self._program.tape.constants
        others = (n for n in item.node.all_input_nodes if n not in self._masks and str(n.target) not in constants)
        if any(isinstance(x := node_value(n), torch.Tensor) and x.is_floating_point() for n in others):
            return False
        self._masks |= dict.fromkeys([item.node, *item.outputs])
        return True

    def _number(self, node: torch.fx.Node) -> int:
        """The number of the op that makes a node; -1 for an input or attribute."""
        return self._tree.ops[node][0].first if node in self._tree.ops else -1

    def _used(self, item: Section) -> list[torch.fx.Node]:
        """The nodes from outside an item that it uses, in order, without parameters, buffers and bodies."""
        if item.kind == "run":
            used = dict.fromkeys(node for member in item.items for node in member.outside)
            nodes = [n for n in used if not item.first <= self._number(n) < item.stop]
        elif item is self._tree.root:
            nodes = self._program.lowering.graph.find_nodes(op="placeholder")
        else:
            nodes = item.inputs if item.kind == "body" else item.outside
        return [node for node in nodes if node.op != "get_attr"]

    def _unique(self, key: str) -> str:
        self._keys[key] += 1
        return key if self._keys[key] == 1 else f"{key}~{self._keys[key]}"


def _argument_names(section: Section) -> dict[torch.fx.Node, str]:
    arguments = section.inputs.items() if section.kind == "call" else ()
    return _by_leaf([(name + path, leaf) for name, x in arguments for path, leaf in leaves_with_path(x)])


def _result_names(section: Section) -> dict[torch.fx.Node, str]:
    results = leaves_with_path(section.outputs) if section.kind == "call" else ()
    names = ((path.strip("[].'\""), path, leaf) for path, leaf in results)
    return _by_leaf([(name if name.isidentifier() else f"output{path}", leaf) for name, path, leaf in names])


def _by_leaf(names: list[tuple[str, Any]]) -> dict[torch.fx.Node, str]:
    """By node, the first of its names."""
    return {leaf: name for name, leaf in reversed(names) if isinstance(leaf, torch.fx.Node)}


def _port(node: torch.fx.Node, name: str | None = None) -> Port:
    return Port(name or named(node), type_text(node_value(node)), node)
