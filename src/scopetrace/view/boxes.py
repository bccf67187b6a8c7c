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
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.fx

from scopetrace.containers.structure import leaves, leaves_with_path
from scopetrace.ir.selection import Selection
from scopetrace.program.graph import named, node_value, type_text
from scopetrace.program.traced import ModuleCall, TracedProgram
from scopetrace.view.measures import Marks, Measures, Meter, cost_text
from scopetrace.view.text import counted, op_line, outermost, refuse_unnamed
from scopetrace.view.tree import OpItem, Run, Section, Tree, callee_text, index_of, source_line

Kind = Literal["call", "scope", "body", "run", "op"]
"""A module call, a user scope, the body of a higher-order op, equal neighbours, an op."""


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
    assert root.section is not None
    refuse_unnamed(root.call.scope, [box.call for box in root.walk()], selection)
    sections = set(outermost(root.section, selection))
    return [box for box in root.walk() if box.section in sections]


_MASKS = "positions and masks"
_FEW = 3
"""More ops than these are folded."""

Item = OpItem | Section | Run
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
        return self._section(self._tree.root, self._tree.root.path, {})

    # ---------------------------------------------------------------- boxes

    def _section(self, section: Section, key: str, needed: Nodes) -> Box:
        kind: Kind = "scope" if section.kind == "backward" else section.kind
        box = Box(self._unique(key), section.label, kind, section.call, self._meter.of(section), section)
        box.writes = self._marks.writes(section)
        runs = self._tree.runs(self._folded(section))
        items = [x.members[0] if isinstance(x, Run) and len(x.members) == 1 else x for x in runs]
        self._fill(box, section, items, dict.fromkeys([*_results(section), *needed]))
        return box

    def _folded(self, section: Section) -> list[OpItem | Section]:
        """The items of a section, with neighbours that only make positions and masks in a section of their own."""
        items: list[OpItem | Section] = []
        for makes_mask, group in itertools.groupby(section.items, self._makes_mask):
            ops = list(group)
            if makes_mask and _FEW < len(ops) < len(section.items):
                ops = [Section("scope", section.path, section.call, _MASKS, None, ops, ops[0].first, ops[-1].stop)]
                self._tree.runs(ops)
            items += ops
        return items

    def _makes_mask(self, item: OpItem | Section) -> bool:
        """Whether an op computes with no float but constants, and with what such ops make."""
        if isinstance(item, Section) or item.bodies:
            return False
        constants = self._program.tape.constants
        others = (n for n in item.node.all_input_nodes if n not in self._masks and str(n.target) not in constants)
        if any(isinstance(x := node_value(n), torch.Tensor) and x.is_floating_point() for n in others):
            return False
        self._masks |= dict.fromkeys([item.node, *item.results])
        return True

    def _run(self, run: Run, key: str, needed: Nodes) -> Box:
        members = run.members
        label = counted([member.label for member in members])
        box = Box(self._unique(f"{key} ×{len(members)}"), label, "run", members[0].call, self._meter.of(*members))
        self._fill(box, run, members, needed)
        box.writes = tuple(dict.fromkeys(name for member in box.children for name in member.writes))
        return box

    def _op(self, op: OpItem, key: str, results: Nodes) -> Box:
        box = Box(self._unique(key), callee_text(op.node), "op", self._tree.call_of(op.node), self._meter.of(op))
        if op.node.target is torch.ops.higher_order.invoke_subgraph:
            box.label = f"function {[*op.bodies, *op.shared][0].name}"
        box.text = op_line(op, named)
        box.source = source_line(op.node, self._program.lowering)
        box.inputs = [_port(node) for node in self._used(op)]
        box.outputs = [_port(node) for node in results]
        box.children = [self._section(body, f"{key}/{body.name}", {}) for body in op.bodies]
        read = [_port(node) for node in op.attributes if str(node.target) in self._program.tape.attributes]
        inside = [port for body in box.children for port in body.parameters]
        box.parameters = tuple(dict.fromkeys([*read, *inside]))
        box.shares = self._marks.shares(op)
        return box

    def _fill(self, box: Box, around: Section | Run, items: Sequence[Item], needed: Nodes) -> None:
        """Add ports, children and edges to a box. `needed` are its nodes that are used outside."""
        names = _argument_names(around)
        box.inputs = [_port(node, names.get(node)) for node in self._used(around)]
        names = _result_names(around)
        box.outputs = [_port(node, names.get(node)) for node in needed]
        results = [dict.fromkeys(_results(item)) for item in items]
        starts = [item.first for item in items]
        for node in [*itertools.chain.from_iterable(map(self._used, items)), *needed]:
            child = bisect.bisect_right(starts, number := self._number(node)) - 1
            if child >= 0 and number < items[child].stop:
                results[child][node] = None
        box.children = [self._item(item, box.key, nodes) for item, nodes in zip(items, results, strict=True)]
        box.parameters = tuple(dict.fromkeys(port for inner in box.children for port in inner.parameters))
        box.shares = self._marks.shares(around)

    def _item(self, item: Item, around: str, needed: Nodes) -> Box:
        if isinstance(item, OpItem):
            return self._op(item, f"{around}/%{item.node.name}", needed)
        first = item.members[0] if isinstance(item, Run) else item
        key = first.path + (index_of(first.call) if first.kind == "call" else "")
        return self._run(item, key, needed) if isinstance(item, Run) else self._section(item, key, needed)

    def _number(self, node: torch.fx.Node) -> int:
        """The number of the op that makes a node; -1 for an input or attribute."""
        return self._tree.ops[node][0].first if node in self._tree.ops else -1

    def _used(self, item: Item) -> list[torch.fx.Node]:
        """The nodes from outside an item that it uses, in order, without parameters, buffers and bodies."""
        if isinstance(item, OpItem):
            nodes = item.node.all_input_nodes
        elif isinstance(item, Run):
            used = dict.fromkeys(node for member in item.members for node in member.outside)
            nodes = [n for n in used if not item.first <= self._number(n) < item.stop]
        elif item is self._tree.root:
            nodes = self._program.lowering.graph.find_nodes(op="placeholder")
        else:
            nodes = item.inputs if item.kind == "body" else item.outside
        return [node for node in nodes if node.op != "get_attr"]

    def _unique(self, key: str) -> str:
        self._keys[key] += 1
        return key if self._keys[key] == 1 else f"{key}~{self._keys[key]}"


def _results(item: Item) -> list[torch.fx.Node]:
    if isinstance(item, OpItem):
        return item.results
    return [] if isinstance(item, Run) else leaves(item.outputs, torch.fx.Node)


def _argument_names(item: Section | Run) -> dict[torch.fx.Node, str]:
    section = item.members[0] if isinstance(item, Run) else item
    arguments = section.inputs.items() if section.kind == "call" else ()
    return _by_leaf([(name + path, leaf) for name, x in arguments for path, leaf in leaves_with_path(x)])


def _result_names(item: Section | Run) -> dict[torch.fx.Node, str]:
    section = item.members[-1] if isinstance(item, Run) else item
    results = leaves_with_path(section.outputs) if section.kind == "call" else ()
    names = ((path.strip("[].'\""), path, leaf) for path, leaf in results)
    return _by_leaf([(name if name.isidentifier() else f"output{path}", leaf) for name, path, leaf in names])


def _by_leaf(names: list[tuple[str, Any]]) -> dict[torch.fx.Node, str]:
    """By node, the first of its names."""
    return {leaf: name for name, leaf in reversed(names) if isinstance(leaf, torch.fx.Node)}


def _port(node: torch.fx.Node, name: str | None = None) -> Port:
    return Port(name or named(node), type_text(node_value(node)), node)
