"""The program as a tree of module calls, user scopes and ops, which of them repeat neighbours, and values as text.

Data flow:
    nodes of the graph, by `node.meta`'s call and scope -> Tree: sections (calls, user scopes, bodies) with ops in them
    each section -> its signature: a number that is equal for sections of equal structure -> Runs of equal neighbours
    values, types and ops -> text in the notation of torch.fx: `%add: f32[2, 3]`, `aten.add.Tensor(%x, 1)`

A signature covers class, ops, constants, shapes and how values are connected. It is made of the signatures of the
sections inside, so that all signatures together cost one pass over the ops. Nodes from outside a section enter its
signature by the order of their first use alone; `Section.outside` keeps them, so that a Run can compare where
each member's inputs come from.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.fx

from scopetrace._compat.graph_module import set_grad_enabled
from scopetrace._compat.symbols import Symbolic, number_text
from scopetrace.containers.structure import container_type, leaves, open_container
from scopetrace.formatting import LONGEST, short_repr
from scopetrace.ir.scopes import Scope
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
"""The label of the section for backward."""
RECOMPUTED = "recomputed"
"""In it, that of the section for ops of the forward that run again."""


@dataclasses.dataclass(slots=True, eq=False)
class Op:
    """One op, and the `getitem` nodes of its results."""

    node: torch.fx.Node
    number: int
    """Its position among the ops of the tree."""
    parts: dict[int, torch.fx.Node] = dataclasses.field(default_factory=dict)
    """For an op of several results: slot -> the `getitem` node."""
    bodies: list[Section] = dataclasses.field(default_factory=list)
    """The bodies of a higher-order op that no op before it has."""
    shared: list[Section] = dataclasses.field(default_factory=list)
    """Its bodies that an op before it has, too, as calls of one function of an outlined program do."""


@dataclasses.dataclass(slots=True, eq=False)
class Section:
    """A module call, a user scope, or the body of a higher-order op, with its items in execution order."""

    path: str
    """The scope's path."""
    call: ModuleCall
    """The call; for a user scope or body, the call around it."""
    user_scope: str = ""
    """The name of a user scope, or the label of a part of the backward; empty for a call."""
    body: str = ""
    """The name of a body's graph module; empty for a call."""
    program: FxLowering | None = None
    """The graph of a body."""
    items: list[Op | Section] = dataclasses.field(default_factory=list)
    first: int = 0
    """The number of the first op in it; the ops in it have the numbers from `first` to `stop` - 1."""
    stop: int = 0
    signature: int = -1
    """A number that is equal for sections of equal structure, given by a Folder."""
    outside: list[torch.fx.Node] = dataclasses.field(default_factory=list)
    """The nodes from outside that it uses, in order of first use, given by a Folder."""
    is_backward: bool = False
    """Whether it has ops of backward: `backward` itself, or in it the part that belongs to `call`."""

    @property
    def op_count(self) -> int:
        """How many ops ran in it and in what it called."""
        return self.stop - self.first

    @property
    def scope(self) -> Scope:
        """Its scope."""
        return next(s for s in self.call.scope.walk() if s.path == self.path)

    @property
    def folds(self) -> bool:
        """Whether equal neighbours are shown as one."""
        return self.is_call or self.is_backward

    @property
    def is_call(self) -> bool:
        """Whether it is a call, neither a user scope nor a body."""
        return not self.user_scope and self.program is None


class Tree:
    """The tree of a program, and the place of each node of its graph in it.

    Attributes:
        calls: the program's module calls.
        root: the section of the root call.
        ops: by node, its op and its slot among the op's results.
        bodies: the `get_attr` nodes that pass bodies to higher-order ops.
    """

    def __init__(self, program: TracedProgram) -> None:
        self.calls = program.calls
        self.ops: dict[torch.fx.Node, tuple[Op, int]] = {}
        self.bodies: set[torch.fx.Node] = set()
        self.root = Section(self.calls[0].scope.path, self.calls[0])
        self._bodies: dict[Tape, Section] = {}
        self._fill(program.lowering, self.root)
        self._number(self.root, 0)

    def _fill(self, program: FxLowering, top: Section) -> None:
        """Add the ops and calls of a graph to `top`, and a section for each body of its higher-order ops."""
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
        position = call_position(node)
        return next((call for call in self.calls if call.position == position), self.calls[0])

    def _number(self, section: Section, count: int) -> int:
        """Number the ops of a section from `count` on, in the order of the tree; returns the number after the last."""
        section.first = count
        for item in section.items:
            if isinstance(item, Op):
                item.number = count
                count += 1
            for inner in item.bodies if isinstance(item, Op) else [item]:
                count = self._number(inner, count)
        section.stop = count
        return count


class _Filling:
    """Adds each op of a graph to the section of its call, and each call to that of its parent, in graph order."""

    def __init__(self, tree: Tree, program: FxLowering, top: Section) -> None:
        self._tree = tree
        self._top = top
        self._calls = [call for call in tree.calls if call.lowering is program]
        self._sections = {call.position: Section(call.scope.path, call) for call in self._calls}
        if not isinstance(program.tape, BodyTape):
            self._sections[self._calls.pop(0).position] = top
        nodes = [n for n in program.graph.nodes if n.op in ("call_function", "call_module", "call_method")]
        self._places = _places(nodes)

    def run(self) -> list[Op]:
        """The ops, in the order of the graph."""
        coming = collections.deque(self._begins())
        found: list[Op] = []
        for number, (node, position, path, forward) in enumerate(self._places):
            while coming and coming[0][0] <= number:
                self._add_call(coming.popleft()[1])
            section = self._section(position)
            if forward is not None:
                section, path = self._backward(section, *forward, again=is_recomputed(node)), ""
            found += self._add_op(node, section, path)
        for _, call in coming:
            self._add_call(call)
        return found

    def _begins(self) -> Iterator[tuple[int, ModuleCall]]:
        """The calls in order, each with the number of the op before which it begins.

        That is the first op in it. A call without ops (`nn.Identity`) begins when its arguments are there.
        """
        numbers = {place[0]: number for number, place in enumerate(self._places)}
        first = {place[1]: number for number, place in reversed([*enumerate(self._places)])}
        limit, limits = len(numbers), []
        for call in reversed(self._calls):  # a call begins no later than those after it, so those inside it
            limit = min(limit, first.get(call.position, limit))
            limits.append(limit)
            if call.position in first and call.parent is not None:
                first.setdefault(call.parent.position, limit)
        begin = 0
        for call, limit in zip(self._calls, reversed(limits), strict=True):
            if call.position in first:
                yield limit, call
                begin = limit + 1
            else:
                given = leaves(call.argument_templates, torch.fx.Node)
                begin = min(limit, max(begin, *(numbers.get(node, -1) + 1 for node in given), 0))
                yield begin, call

    def _section(self, position: int) -> Section:
        """The section of a call in this graph; `top` for a call around the graph."""
        return self._sections.get(position, self._top)

    def _backward(self, section: Section, path: str, position: int, *, again: bool) -> Section:
        """The section for the backward of ops of the forward in a call and scope, in the section where it runs.

        With `again`, that for these ops themselves, where they run again.
        """
        outer, call = section.path, self._forward_call(path, position)
        section = _last_backward(section, outer, section.call, BACKWARD)
        if again:
            section = _last_backward(section, outer, section.call, RECOMPUTED)
        around: dict[str, ModuleCall] = {}
        while call.parent is not None:
            around[call.scope.path], call = call, call.parent
        if path.startswith(f"{outer}/"):
            inner = outer
            for part in path[len(outer) + 1 :].split("/"):
                inner = f"{inner}/{part}"
                owner = around.get(inner)
                label = part if owner is None else part + index_of(owner)
                section = _last_backward(section, inner, owner or section.call, label)
        return section

    def _forward_call(self, path: str, position: int) -> ModuleCall:
        """The call at a position; where it is inside of a function, the innermost around it that is outside."""
        found = self._tree.calls[position : position + 1]
        if found and found[0].position == position:  # as in each trace that is not outlined
            return found[0]
        around = [c for c in self._tree.calls if c.position <= position and f"{path}/".startswith(f"{c.scope.path}/")]
        return max(around, key=lambda c: c.position, default=self._tree.calls[0])

    def _add_op(self, node: torch.fx.Node, section: Section, path: str) -> list[Op]:
        """Add a node as an op, or as a result of an op before it; gives the new op, if there is one."""
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

    def _add_call(self, call: ModuleCall) -> None:
        parent, scope = call.parent, call.scope.parent
        assert parent is not None and scope is not None
        _inside(self._section(parent.position), scope.path).items.append(self._sections[call.position])


def _taken(node: torch.fx.Node) -> tuple[torch.fx.Node, int] | None:
    """For a `getitem` of an op with several results: the op's node and the slot."""
    if node.target is not operator.getitem:
        return None
    source, slot = node.args
    if isinstance(source, torch.fx.Node) and isinstance(slot, int) and isinstance(node_value(source), (list, tuple)):
        return source, slot
    return None


def _places(nodes: list[torch.fx.Node]) -> list[_Place]:
    """Each node with the position of its call, the path of its scope, and of a node of backward its `forward_place`.

    Nodes without a place of their own (switches of autograd, `sym_size`, nodes of users' passes) get that of the next
    node.
    """
    places: list[_Place] = []
    near: tuple[int, str, tuple[str, int] | None] = (0, "", None)
    for node in reversed(nodes):
        position = call_position(node)
        if position is not None and node.target is not set_grad_enabled:
            near = (position, scope_path(node) or "", forward_place(node))
        places.append((node, *near))
    return places[::-1]


_Place = tuple[torch.fx.Node, int, str, tuple[str, int] | None]


def _inside(section: Section, path: str) -> Section:
    """The section of a user scope inside a call's section, made if it is not the last item; `path` names the scope."""
    base = f"{section.path}/"
    if not path.startswith(base):
        return section
    for name in path[len(base) :].split("/"):
        last = section.items[-1] if section.items else None
        if not isinstance(last, Section) or last.user_scope != name:
            last = Section(f"{section.path}/{name}", section.call, name)
            section.items.append(last)
        section = last
    return section


def _last_backward(section: Section, path: str, call: ModuleCall, label: str) -> Section:
    """The last item of a section where it is a part of backward of this label and call; else a new one."""
    last = section.items[-1] if section.items else None
    if isinstance(last, Section) and last.is_backward and (last.user_scope, last.call) == (label, call):
        return last
    section.items.append(Section(path, call, label, is_backward=True))
    return section.items[-1]  # type: ignore[return-value]


Origin = Literal["same", "own"] | tuple[int, int]
"""Where a member's outside node comes from: the same node for all members, a node of its own, or (op, slot) in the
member before."""

_SMALL = 16  # elements up to which the values of a lifted constant are part of a signature


@dataclasses.dataclass(slots=True)
class Run:
    """Consecutive items of a section: one op, one section, or a section and repetitions of it."""

    members: list[Op | Section]
    relation: tuple[Origin, ...] | None = None
    """For each outside node of a member, where it comes from relative to the member before; equal for all members."""

    @property
    def sections(self) -> list[Section]:
        """The members that are sections: all, or none for an op."""
        return [member for member in self.members if isinstance(member, Section)]

    @property
    def is_chain(self) -> bool:
        """Whether each member takes results of the one before."""
        return any(isinstance(origin, tuple) for origin in self.relation or ())


class Folder:
    """Gives all sections of a tree their signatures. `constants` are those of the tape."""

    def __init__(self, tree: Tree, constants: dict[str, torch.Tensor]) -> None:
        self._tree = tree
        self._constants = constants
        self._numbers: dict[Hashable, int] = {}
        self._sign(tree.root)

    # ---------------------------------------------------------------- runs

    def runs(self, items: Sequence[Op | Section]) -> list[Run]:
        """The items in order, grouped into runs of equal neighbours."""
        found: list[Run] = []
        for item in items:
            if not (found and self._joins(found[-1], item)):
                found.append(Run([item]))
        return found

    def _joins(self, run: Run, item: Op | Section) -> bool:
        """Add `item` to the run if it repeats the run's members."""
        last = run.members[-1]
        if isinstance(last, Op) or isinstance(item, Op) or not (last.folds and item.folds):
            return False
        if last.signature != item.signature:
            return False
        relation = tuple([self._relation(last, a, b) for a, b in zip(last.outside, item.outside, strict=True)])
        repeated = Run([last, item], relation)
        # Parallel calls of a single op are shown one by one: a folded line would be no shorter and say less.
        if run.relation not in (None, relation) or (item.op_count <= 1 and not repeated.is_chain):
            return False
        run.members.append(item)
        run.relation = relation
        return True

    def _relation(self, before: Section, old: torch.fx.Node, new: torch.fx.Node) -> Origin:
        if old is new:
            return "same"
        op, slot = self._tree.ops.get(new, (None, 0))
        if op is not None and before.first <= op.number < before.stop:
            return (op.number - before.first, slot)
        return "own"

    def differing(self, run: Run) -> list[str]:
        """The names of arguments that are neither shared by all members of a run nor results of the member before."""
        last = run.sections[-1]
        if last.is_backward:
            return []
        own = {node for node, origin in zip(last.outside, run.relation or (), strict=True) if origin == "own"}
        return [name for name, x in last.call.argument_templates.items() if isinstance(x, torch.fx.Node) and x in own]

    # ---------------------------------------------------------------- signatures

    def _sign(self, section: Section) -> int:
        """The signature of a section, given to it with those of the sections inside."""
        if section.signature >= 0:
            return section.signature
        names = _Names(section, self._tree, self._constants)
        text: list[Hashable] = [section.call.module_type if section.is_backward else section.user_scope]
        if section.is_call:
            text = [section.call.module_type, section.call.is_leaf, type(section.call.raised).__qualname__]
            text += [(key, _wiring(x, names)) for key, x in section.call.argument_templates.items()]
        for item in section.items:
            if isinstance(item, Op):
                text.append((self._op(item, names), *map(self._sign, [*item.bodies, *item.shared])))
            else:
                text.append((self._sign(item), item.first - section.first, *map(names, item.outside)))
        if section.program is not None:
            text.append(_wiring(section.program.output.args[0], names))
        elif not section.user_scope:
            text.append(_wiring(section.call.output_template, names))
        section.signature = self._numbers.setdefault(tuple(text), len(self._numbers))
        section.outside = names.outside
        return section.signature

    def _op(self, op: Op, names: _Names) -> str:
        return f"{tuple(op.parts)} {type_text(node_value(op.node))} = {op_text(op.node, names)}"


class _Names:
    """Names of nodes relative to a section: equal for equal sections anywhere in the program."""

    def __init__(self, section: Section, tree: Tree, constants: dict[str, torch.Tensor]) -> None:
        self._section = section
        self._tree = tree
        self._constants = constants
        self._prefix = module_prefix(section)
        self._found: dict[torch.fx.Node, str] = {}
        self.outside: list[torch.fx.Node] = []
        if section.program is not None:  # a body uses nothing from outside but its operands
            taken = section.program.graph.find_nodes(op="placeholder")
            self._found = {node: f"operand {i}: {type_text(node_value(node))}" for i, node in enumerate(taken)}
        self._found |= dict.fromkeys(tree.bodies, "body")

    def __call__(self, node: torch.fx.Node) -> str:
        op, slot = self._tree.ops.get(node, (None, 0))
        if op is not None and self._section.first <= op.number < self._section.stop:
            return f"%{op.number - self._section.first}.{slot}"
        target = str(node.target)
        if node.op == "get_attr" and self._prefix and target.startswith(self._prefix):
            return f"self.{target.removeprefix(self._prefix)}: {type_text(node_value(node))}"
        text = self._found.get(node)
        if text is None:
            text = self._found[node] = f"{len(self.outside)}: {type_text(node_value(node))}{self._content(node)}"
            self.outside.append(node)
        return text

    def _content(self, node: torch.fx.Node) -> str:
        """The values of a small lifted constant; nothing for parameters and buffers, whose values training changes."""
        tensor = self._constants.get(str(node.target)) if node.op == "get_attr" else None
        if tensor is None or tensor.numel() > _SMALL:
            return ""
        return "" if tensor.is_meta or tensor.layout is not torch.strided else str(tensor.tolist())


def index_of(call: ModuleCall) -> str:
    """`#1` for the second call of a module."""
    return f"#{call.index}" if call.index else ""


def module_prefix(section: Section) -> str | None:
    """The prefix of the parameter names of a section's module; None for a module outside the model's tree."""
    fqn = section.call.fqn
    return None if fqn is None else f"{fqn}." if fqn else ""


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
    if children is None:
        return _object_text(x)
    return _container_text(x, children, name, limit)


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
    fields = [_field_text(key, text) for key, text in items if text != "None"]
    return f"{container_type(x).__name__}({', '.join([*fields, *more])})"


def _field_text(key: str, text: str) -> str:
    """`logits=%x` for the path `.logits` or `['logits']`; the value alone for a position."""
    word = key.strip("[].'\"")
    return f"{word}={text}" if word.isidentifier() else text


def _object_text(x: Any) -> str:
    """Any other object: its repr where that is short and does not contain an address, else its class."""
    if isinstance(x, (torch.dtype, torch.layout, torch.memory_format)):
        return str(x)
    if isinstance(x, Symbolic):
        return number_text(x)
    if isinstance(x, type) or hasattr(x, "__qualname__"):
        return str(x.__qualname__)
    return f"<{type(x).__name__}>" if isinstance(x, torch.nn.Module) else short_repr(x)


def target_text(node: torch.fx.Node) -> str:
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
    return f"{target_text(node)}({', '.join([*positional, *keywords])})"
