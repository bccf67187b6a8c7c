"""The program as a tree of module calls, user scopes and ops, which of them repeat neighbours, and values as text.

Data flow:
    nodes of the graph, by `node.meta`'s call and scope -> Tree: sections (calls, user scopes, bodies) with ops in them
    each section -> its signature: a number that is equal for sections of equal structure -> runs of equal neighbours
    values, types and ops -> text in the notation of torch.fx: `%add: f32[2, 3]`, `aten.add.Tensor(%x, 1)`

A signature covers class, ops, constants, shapes and how values are connected. It is made of the signatures of the
sections inside, so that all signatures together cost one pass over the ops. Nodes from outside a section enter its
signature by the order of their first use alone; `Section.outside` keeps them, so that a run can compare where
each member's inputs come from.
"""

from __future__ import annotations

import bisect
import dataclasses
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.fx

from scopetrace._compat.graph_module import set_grad_enabled
from scopetrace._compat.symbols import Symbolic, number_text
from scopetrace.containers.structure import container_type, open_container
from scopetrace.formatting import LONGEST, short_repr
from scopetrace.ir.scopes import Scope, source_of
from scopetrace.ir.tape import BodyTape, Tape
from scopetrace.program.graph import (
    FxLowering,
    call_position,
    forward_place,
    is_recomputed,
    node_value,
    scope_path,
    type_text,
)
from scopetrace.program.traced import ModuleCall, TracedProgram

BACKWARD = "backward"
"""The name of the section for backward."""
RECOMPUTED = "recomputed"
"""In it, that of the section for ops of the forward that run again."""

Kind = Literal["call", "scope", "body", "backward", "op", "run"]
"""A module call, a user scope, the body of a higher-order op, a part of the backward, an op, equal neighbours."""
Origin = Literal["same", "different"] | tuple[int, int]
"""Where a member's outside node comes from: the same node for all members, a different one for each, or (op, slot) in
the member before."""


@dataclasses.dataclass(slots=True, eq=False)
class Section:
    """A part of the program with its items in execution order; of a run, these are its members."""

    kind: Kind
    path: str
    """The scope's path."""
    call: ModuleCall
    """The call; for a user scope or body, the call around it; of a part of the backward, the one that it belongs to."""
    name: str = ""
    """That of a user scope, of the graph module of a body, or of a part of the backward; empty for others."""
    lowering: FxLowering | None = None
    """The graph of a body."""
    items: list[Section] = dataclasses.field(default_factory=list)
    first: int = 0
    """The number of the first op in it, or its own; the ops in it have the numbers from `first` to `stop` - 1."""
    stop: int = 0
    signature: int = -1
    """A number that is equal for sections of equal structure, which `Tree.runs` sets."""
    outside: list[torch.fx.Node] = dataclasses.field(default_factory=list)
    """The nodes from outside that it uses, in order of first use, which `Tree.runs` sets."""
    relation: tuple[Origin, ...] | None = None
    """Of a run, for each outside node of a member where it comes from relative to the member before; equal for all."""

    @property
    def is_chain(self) -> bool:
        """Whether each member of a run takes results of the one before."""
        return any(isinstance(origin, tuple) for origin in self.relation or ())

    @property
    def op_count(self) -> int:
        """How many ops ran in it and in what it called."""
        return self.stop - self.first

    @property
    def scope(self) -> Scope:
        """Its scope."""
        return next(s for s in self.call.scope.walk() if s.path == self.path)

    @property
    def label(self) -> str:
        """Its name; of a call `Linear[fc]`, with `#1` for a second call of the same module."""
        return self.name or self.call.scope.label + index_of(self.call)

    @property
    def inputs(self) -> Any:
        """The arguments of a call, the operands of a body; others have none."""
        if self.lowering is not None:
            return list(self.lowering.graph.find_nodes(op="placeholder"))
        return self.call.argument_templates if self.kind == "call" else ()

    @property
    def outputs(self) -> Any:
        """What a call or a body returns; others return nothing."""
        if self.lowering is not None:
            return self.lowering.output.args[0]
        return self.call.output_template if self.kind == "call" else ()

    def sections(self) -> Iterator[Section]:
        """The sections directly inside, among them the bodies of its ops."""
        for item in self.items:
            yield from item.items if item.kind == "op" else [item]

    def walk(self) -> Iterator[Section]:
        """This section and all inside it, outer before inner."""
        yield self
        for inner in self.sections():
            yield from inner.walk()


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class OpItem(Section):
    """One op, and the `getitem` nodes of its results. Its items are the bodies that no op before it has."""

    node: torch.fx.Node
    parts: dict[int, torch.fx.Node] = dataclasses.field(default_factory=dict)
    """For an op of several results: slot -> the `getitem` node."""
    shared: list[Section] = dataclasses.field(default_factory=list)
    """Its bodies that an op before it has, too, as calls of one function of an outlined program do."""

    @property
    def bodies(self) -> list[Section]:
        """All bodies of a higher-order op."""
        return [*self.items, *self.shared]

    @property
    def label(self) -> str:
        """What it calls."""
        return callee_text(self.node)

    @property
    def outputs(self) -> list[torch.fx.Node]:
        """The nodes of its results, also of one without an example value, as a number that is computed of numbers."""
        parts = [self.parts[slot] for slot in sorted(self.parts)]
        return parts or ([self.node] if node_value(self.node) is not None else [])

    @property
    def attributes(self) -> list[torch.fx.Node]:
        """The nodes of the parameters, buffers, constants and bodies that it reads."""
        return [node for node in self.outside if node.op == "get_attr"]


class _NodePlace(NamedTuple):
    """Where a node of a graph belongs."""

    node: torch.fx.Node
    position: int
    """That of its call."""
    path: str
    """That of its scope."""
    forward: tuple[str, int] | None
    """Of a node of backward, its `forward_place`."""


class Tree:
    """The tree of a program, and the place of each node of its graph in it.

    Attributes:
        calls: the program's module calls.
        root: the section of the root call.
        constants: those of the program's tape.
        ops: by node, its op and its slot among the op's results.
        bodies: the `get_attr` nodes that pass bodies to higher-order ops.
    """

    def __init__(self, program: TracedProgram) -> None:
        self.calls = program.calls
        self.constants = program.tape.constants
        self.ops: dict[torch.fx.Node, tuple[OpItem, int]] = {}
        self.bodies: set[torch.fx.Node] = set()
        self.root = Section("call", self.calls[0].scope.path, self.calls[0])
        self._by_position = {call.record.position: call.of_module for call in program.all_calls}
        self._body_sections: dict[Tape, Section] = {}
        self._numbers: dict[Hashable, int] = {}  # by what a signature is of
        self._fill(program.lowering, self.root)
        _number(self.root, 0)

    def _fill(self, lowering: FxLowering, top: Section) -> None:
        """Add the ops and calls of a graph to the sections of their calls, which are in `top`, in graph order."""
        calls = [call for call in self.calls if call.lowering is lowering]
        sections = {call: Section("call", call.scope.path, call) for call in calls}
        if not isinstance(lowering.tape, BodyTape):
            sections[calls.pop(0)] = top
        places = _places(lowering.graph)
        in_order: list[tuple[int, ModuleCall | _NodePlace]] = [*_begins(calls, places, lowering), *enumerate(places)]
        for _, item in sorted(in_order, key=operator.itemgetter(0)):
            if isinstance(item, ModuleCall):
                parent, scope = item.parent, item.scope.parent
                assert parent is not None and scope is not None
                around = _in_scope(sections.get(parent, top), scope.path)
                around.items.append(sections[item])
            else:
                call = self._by_position.get(item.position, self.calls[0])
                section = sections.get(call, top)
                source, slot = _part_of(item.node)
                if source in self.ops:
                    op = self.ops[source][0]
                    op.parts[slot] = item.node
                else:
                    is_backward = item.forward is not None
                    around = self._backward(section, item) if is_backward else _in_scope(section, item.path)
                    op = OpItem("op", around.path, call, node=item.node, outside=item.node.all_input_nodes)
                    around.items.append(op)
                self.ops[item.node] = (op, slot)
                self._add_bodies(item.node, lowering)

    def _add_bodies(self, node: torch.fx.Node, lowering: FxLowering) -> None:
        for read in node.all_input_nodes:
            body = lowering.bodies.get(str(read.target)) if read.op == "get_attr" else None
            if body is None:
                continue
            op = self.ops[node][0]
            self.bodies.add(read)
            if body.tape in self._body_sections:
                op.shared.append(self._body_sections[body.tape])
            else:
                section = Section("body", body.tape.root.path, op.call, str(read.target), body)
                self._body_sections[body.tape] = section
                op.items.append(section)
                self._fill(body, section)

    def _backward(self, section: Section, place: _NodePlace) -> Section:
        """The section for the backward of ops of the forward in a call and scope, in the section where it runs."""
        assert place.forward is not None
        outer, path, call = section.path, place.forward[0], self._forward_call(*place.forward)
        section = _last(section, "backward", outer, section.call, BACKWARD)
        if is_recomputed(place.node):
            section = _last(section, "backward", outer, section.call, RECOMPUTED)
        around: dict[str, ModuleCall] = {}
        while call.parent is not None:
            around[call.scope.path], call = call, call.parent
        if path.startswith(f"{outer}/"):
            inner = outer
            for part in path[len(outer) + 1 :].split("/"):
                inner = f"{inner}/{part}"
                owner = around.get(inner)
                label = part if owner is None else part + index_of(owner)
                section = _last(section, "backward", inner, owner or section.call, label)
        return section

    def _forward_call(self, path: str, position: int) -> ModuleCall:
        """The call at a position; where it is inside of a function, the innermost around it that is outside."""
        if position in self._by_position:  # as in each trace that is not outlined
            return self._by_position[position]
        around = [c for c in self.calls if c.record.position <= position and f"{path}/".startswith(f"{c.scope.path}/")]
        return max(around, key=lambda c: c.record.position, default=self.calls[0])

    # ---------------------------------------------------------------- runs

    def runs(self, items: Sequence[Section]) -> list[Section]:
        """The items in order, with equal neighbours as one run; a section that repeats no other one is a run, too."""
        for section in (self.root, *(item for item in items if item.kind != "op")):
            self._sign(section)
        runs: list[Section] = []
        for item in items:
            if item.kind == "op":
                runs.append(item)
            elif not (runs and runs[-1].kind == "run" and self._joins(runs[-1], item)):
                runs.append(Section("run", item.path, item.call, items=[item], first=item.first, stop=item.stop))
        return runs

    def _joins(self, run: Section, section: Section) -> bool:
        """Add a section to the run if it repeats the run's members."""
        last = run.items[-1]
        if last.signature != section.signature or not {last.kind, section.kind} <= {"call", "backward"}:
            return False
        relation = tuple([self._relation(last, a, b) for a, b in zip(last.outside, section.outside, strict=True)])
        is_chain = any(isinstance(origin, tuple) for origin in relation)
        # Parallel calls of a single op are shown one by one: a folded line would be no shorter and say less.
        if run.relation not in (None, relation) or (section.op_count <= 1 and not is_chain):
            return False
        run.items.append(section)
        run.stop, run.relation = section.stop, relation
        return True

    def _relation(self, before: Section, old: torch.fx.Node, new: torch.fx.Node) -> Origin:
        if old is new:
            return "same"
        op, slot = self.ops.get(new, (None, 0))
        if op is not None and before.first <= op.first < before.stop:
            return (op.first - before.first, slot)
        return "different"

    def differing(self, run: Section) -> list[str]:
        """The names of arguments that are neither shared by all members of a run nor results of the member before."""
        last = run.items[-1]
        outside = zip(last.outside, run.relation or (), strict=True)
        differing = {node for node, origin in outside if origin == "different"}
        arguments = last.call.argument_templates.items()
        return [name for name, x in arguments if isinstance(x, torch.fx.Node) and x in differing]

    # ---------------------------------------------------------------- signatures

    def _sign(self, section: Section) -> int:
        """The signature of a section, set with those of the sections inside."""
        if section.signature >= 0:
            return section.signature
        names = _Names(section, self)
        text: list[Hashable] = [section.kind, section.name if section.kind == "scope" else section.call.module_type]
        if section.kind == "call":
            text += [section.call.is_leaf, type(section.call.raised).__qualname__]
            text += [(key, _wiring(x, names)) for key, x in section.call.argument_templates.items()]
        for item in section.items:
            if isinstance(item, OpItem):
                op = f"{tuple(item.parts)} {type_text(node_value(item.node))} = {op_text(item.node, names)}"
                text.append((op, *map(self._sign, item.bodies)))
            else:
                text.append((self._sign(item), item.first - section.first, *map(names, item.outside)))
        text.append(_wiring(section.outputs, names))
        section.signature = self._numbers.setdefault(tuple(text), len(self._numbers))
        section.outside = names.outside
        return section.signature


def _number(section: Section, count: int) -> int:
    """Number the ops of a section from `count` on, in the order of the tree; returns the number after the last."""
    section.first = count
    count += section.kind == "op"
    for item in section.items:
        count = _number(item, count)
    section.stop = count
    return count


def _places(graph: torch.fx.Graph) -> list[_NodePlace]:
    """The place of each node of an op; that of the next one for `sym_size` and for nodes of users' passes."""
    places: list[_NodePlace] = []
    near: tuple[int, str, tuple[str, int] | None] = (0, "", None)
    for node in reversed([n for n in graph.nodes if n.op in ("call_function", "call_module", "call_method")]):
        position = call_position(node)
        if position is not None and node.target is not set_grad_enabled:
            near = (position, scope_path(node) or "", forward_place(node))
        places.append(_NodePlace(node, *near))
    return places[::-1]


def _begins(
    calls: list[ModuleCall], places: list[_NodePlace], lowering: FxLowering
) -> Iterator[tuple[int, ModuleCall]]:
    """The calls in order, each with the number of the op before which it begins: the first that ran after its start."""
    positions = {op: i for i, op in enumerate(lowering.tape.ops)}
    last, starts = 0, []
    for place in places:  # of an op that the tape has not, as one of a pass, the position of the op before it
        op = lowering.op_of.get(place.node)
        last = max(last, 0 if op is None else positions.get(op, 0))
        starts.append(last)
    for call in calls:
        yield bisect.bisect_left(starts, call.record.start), call


def _part_of(node: torch.fx.Node) -> tuple[Any, int]:
    """For a `getitem` of an op with several results: the op's node and the slot."""
    if node.target is operator.getitem:
        source, slot = node.args
        if isinstance(source, torch.fx.Node) and type(slot) is int and isinstance(node_value(source), (list, tuple)):
            return source, slot
    return None, 0


def _last(section: Section, kind: Kind, path: str, call: ModuleCall, name: str) -> Section:
    """The last item of a section where it is this section; else a new one."""
    last = section.items[-1] if section.items else None
    if not isinstance(last, Section) or (last.kind, last.call, last.name) != (kind, call, name):
        last = Section(kind, path, call, name)
        section.items.append(last)
    return last


def _in_scope(section: Section, path: str) -> Section:
    """The section of a user scope inside a call's section; `path` names the scope."""
    base = f"{section.path}/"
    for name in path.removeprefix(base).split("/") if path.startswith(base) else ():
        section = _last(section, "scope", f"{section.path}/{name}", section.call, name)
    return section


class _Names:
    """Names of nodes relative to a section: equal for equal sections anywhere in the program."""

    def __init__(self, section: Section, tree: Tree) -> None:
        self._section = section
        self._tree = tree
        self._prefix = module_prefix(section)
        self._texts: dict[torch.fx.Node, str] = dict.fromkeys(tree.bodies, "body")
        self.outside: list[torch.fx.Node] = []
        if section.kind == "body":  # it uses nothing from outside but its operands
            self._texts |= {n: f"operand {i}: {type_text(node_value(n))}" for i, n in enumerate(section.inputs)}

    def __call__(self, node: torch.fx.Node) -> str:
        op, slot = self._tree.ops.get(node, (None, 0))
        if op is not None and self._section.first <= op.first < self._section.stop:
            return f"%{op.first - self._section.first}.{slot}"
        target = str(node.target)
        if node.op == "get_attr" and self._prefix and target.startswith(self._prefix):
            return f"self.{target.removeprefix(self._prefix)}: {type_text(node_value(node))}"
        text = self._texts.get(node)
        if text is None:
            # The values of small constants count; training changes those of parameters and buffers.
            constant = self._tree.constants.get(target) if node.op == "get_attr" else None
            values = "" if constant is None else values_text(constant) or ""
            text = self._texts[node] = f"{len(self.outside)}: {type_text(node_value(node))}{values}"
            self.outside.append(node)
        return text


_SMALL = 16


def values_text(constant: torch.Tensor) -> str | None:
    """The values of a small constant; None of others, and of one without strided data."""
    if constant.numel() > _SMALL or constant.is_meta or constant.layout is not torch.strided:
        return None
    return str(constant.tolist())


def index_of(call: ModuleCall) -> str:
    """`#1` for the second call of a module."""
    return f"#{call.index}" if call.index else ""


def source_line(node: torch.fx.Node, lowering: FxLowering) -> str:
    """The line of the model's code that made a node; empty where it is not known."""
    op = lowering.op_of.get(node)
    return "" if op is None else source_of(op.frames) or ""


def module_prefix(section: Section) -> str | None:
    """The prefix of the parameter names of a section's module; None for a module outside the model's tree."""
    fqn = section.call.fqn
    return None if fqn is None else f"{fqn}." if fqn else ""


def tensors_of(program: TracedProgram, *parts: Section) -> list[torch.Tensor]:
    """The parameters, buffers and constants that parts of a program read, and parameters of leaf modules, each once."""

    def read(part: Section) -> Iterator[torch.Tensor]:
        if isinstance(part, OpItem):
            names = [str(node.target) for node in part.attributes]
            yield from (attributes[name] for name in names if name in attributes)
        elif part.kind == "call" and part.call.is_leaf and part.call.module is not None:
            yield from part.call.module.parameters()
        for inner in part.bodies if isinstance(part, OpItem) else part.items:
            yield from read(inner)

    attributes = program.tape.attributes
    return list({id(t): t for part in parts for t in read(part)}.values())


def _wiring(x: Any, names: _Names) -> Hashable:
    """An argument or result as part of a signature, with relative names for nodes.

    Of other objects with tensors inside, such as a cache that grows from layer to layer, only the class counts.
    """
    if isinstance(x, torch.fx.Node):
        return names(x)
    children = open_container(x)
    if children is None:
        return value_text(x, names)
    if isinstance(x, (list, tuple, dict)) or dataclasses.is_dataclass(x):
        return (type(x), *((key, _wiring(item, names)) for key, item in children))
    return container_type(x)


# Values as text ------------------------------------------------------------------------------------------------------


Namer = Callable[[torch.fx.Node], str]
"""Gives the text of a node where it is an argument or result."""

_PLAIN = (int, float, bool, complex, str, bytes, type(None))


def value_text(x: Any, name: Namer, limit: int | None = None) -> str:
    """A Python value as text: nodes in it by `name`, of containers only the first `limit` items (None: all)."""
    if isinstance(x, torch.fx.Node):
        return name(x)
    if isinstance(x, _PLAIN):
        return repr(f"{x[:LONGEST]}…" if isinstance(x, str) and len(x) > LONGEST else x)
    if isinstance(x, torch.device):
        return repr(str(x))
    if type(x) is slice:
        return f"slice({', '.join(value_text(part, name, limit) for part in (x.start, x.stop, x.step))})"
    children = open_container(x)
    return _object_text(x) if children is None else _container_text(x, children, name, limit)


def _container_text(x: Any, children: list[tuple[str, Any]], name: Namer, limit: int | None) -> str:
    items = [(key, value_text(item, name, limit)) for key, item in children[:limit]]
    more = [f"… {len(children) - len(items)} more"] if len(items) < len(children) else []
    if isinstance(x, list):
        return f"[{', '.join([*(text for _, text in items), *more])}]"
    if type(x) is tuple:
        inside = ", ".join([*(text for _, text in items), *more])
        return f"({inside},)" if len(children) == 1 else f"({inside})"
    if type(x) is dict:
        return f"{{{', '.join([*(f'{key[1:-1]}: {text}' for key, text in items), *more])}}}"
    # Fields of a ModelOutput or dataclass that are None are left out: a model fills few of them.
    fields = [(key.strip("[].'\""), text) for key, text in items if text != "None"]
    texts = [f"{word}={text}" if word.isidentifier() else text for word, text in fields]
    return f"{container_type(x).__name__}({', '.join([*texts, *more])})"


def _object_text(x: Any) -> str:
    """Any other object: its repr where that is short and does not contain an address, else its class."""
    if isinstance(x, (torch.dtype, torch.layout, torch.memory_format)):
        return str(x)
    if isinstance(x, Symbolic):
        return number_text(x)
    if callable(x) and hasattr(x, "__qualname__"):  # the `__getattr__` of other objects may raise anything
        return str(x.__qualname__)
    return f"<{type(x).__name__}>" if isinstance(x, torch.nn.Module) else short_repr(x)


def callee_text(node: torch.fx.Node) -> str:
    """`aten.add.Tensor`, `aten.linear` (the default overload), `operator.mul`, or a module's name."""
    target = node.target
    if isinstance(target, str):
        return target
    if hasattr(target, "overloadpacket"):
        return str(target).removesuffix(".default")
    module = (getattr(target, "__module__", "") or "").removeprefix("_")
    word = getattr(target, "__name__", str(target))
    return f"{module}.{word}" if module and module != "torch.ops" else word


def op_text(node: torch.fx.Node, name: Namer) -> str:
    """The right side of an op's line: `aten.linear(%x, self.weight)`."""
    if node.target is operator.getitem and len(node.args) == 2:
        return f"{value_text(node.args[0], name)}[{value_text(node.args[1], name)}]"
    if node.target is getattr and len(node.args) == 2:
        return f"{value_text(node.args[0], name)}.{node.args[1]}"
    positional = [value_text(a, name) for a in node.args]
    keywords = [f"{key}={value_text(a, name)}" for key, a in node.kwargs.items()]
    return f"{callee_text(node)}({', '.join([*positional, *keywords])})"
