"""Repeated calls: which consecutive calls do the same, each on its own weights.

Every section gets a signature, a number that is equal for sections of equal structure: the same class, ops, constants
and shapes, wired in the same way. The signature of a section is made of those of the sections in it, so all of them
together cost one pass over the ops. What comes from outside a section has no place in its signature but the order of
first use; `Signed.outside` keeps it, so that runs can be told apart by where each member's inputs come from.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.fx

from scopetrace.containers.structure import container_type, open_container
from scopetrace.ir import meta
from scopetrace.view.tree import Op, Section, Tree
from scopetrace.view.values import op_text, type_text, value_text

CONSTANT = "_tensor_constant"  # what the names of constants that are no parameter or buffer begin with

_SMALL = 16  # elements of a constant up to which its values count


@dataclasses.dataclass(slots=True)
class SectionSignature:
    """A section's signature, and the nodes from outside that it uses, in order of first use."""

    signature: int
    outside: list[torch.fx.Node]


@dataclasses.dataclass(slots=True)
class Run:
    """Consecutive items of a section: one op, one section, or sections that repeat the first of them."""

    members: list[Any]
    relation: tuple[Any, ...] | None = None
    """Where each outside node of a member comes from, seen from the member before it; equal for all members."""

    @property
    def is_chain(self) -> bool:
        """Whether each member works on results of the one before."""
        return self.relation is not None and any(kind not in ("same", "own") for kind in self.relation)


class Folder:
    """Signatures of all sections of a tree. `constants` are the tensors behind `get_attr` nodes."""

    def __init__(self, tree: Tree, constants: dict[str, torch.Tensor]) -> None:
        self._tree = tree
        self._constants = constants
        self._numbers: dict[Any, int] = {}
        self._signed: dict[int, SectionSignature] = {}
        for section in reversed(list(tree.root.walk())):  # inner before outer
            self.signature(section)

    def signature(self, section: Section) -> int:
        """A number that is equal for sections of equal structure."""
        found = self._signed.get(id(section))
        if found is None:
            found = self._signed[id(section)] = self._sign(section)
        return found.signature

    # ---------------------------------------------------------------- runs

    def runs(self, items: list[Any]) -> list[Run]:
        """The items in order, equal neighbours together."""
        found: list[Run] = []
        for item in items:
            if not (found and self._joins(found[-1], item)):
                found.append(Run([item]))
        return found

    def _joins(self, run: Run, item: Any) -> bool:
        """Put `item` in the run if it repeats the run's members."""
        last = run.members[-1]
        if not (_is_call(last) and _is_call(item)):
            return False
        before, now = self._signed[id(last)], self._signed[id(item)]
        if before.signature != now.signature:
            return False
        relation = tuple([self._relation(last, a, b) for a, b in zip(before.outside, now.outside, strict=True)])
        if run.relation is not None and run.relation != relation:
            return False
        extended = Run([*run.members, item], relation) if run.relation is None else run
        # What follows reads each result of calls that stand side by side; a single op says more than a fold.
        if not extended.is_chain and item.op_count <= 1:
            return False
        run.relation = relation
        run.members.append(item)
        return True

    def _relation(self, before: Section, old: torch.fx.Node, new: torch.fx.Node) -> Any:
        if old is new:
            return "same"
        op, slot = self._tree.ops.get(new, (None, 0))
        if op is not None and before.first <= op.number < before.stop:
            return (op.number - before.first, slot)
        return "own"

    def differing(self, run: Run) -> list[str]:
        """The arguments that each member of a run has of its own, neither shared nor from the member before."""
        last = run.members[-1]
        own = {
            node for node, kind in zip(self._signed[id(last)].outside, run.relation or (), strict=True) if kind == "own"
        }
        return [name for name, x in last.call.arguments.items() if isinstance(x, torch.fx.Node) and x in own]

    # ---------------------------------------------------------------- signatures

    def _sign(self, section: Section) -> SectionSignature:
        names = _Names(section, self._tree, self._constants)
        text: list[Any] = [section.user_scope]
        if _is_call(section):
            text = [section.call.module_type, section.call.is_leaf, type(section.call.raised)]
            text += [(key, _wiring(x, names)) for key, x in section.call.arguments.items()]
        for item in section.items:
            if isinstance(item, Op):
                text.append((self._op(item, names), *map(self.signature, [*item.bodies, *item.shared])))
            else:
                text.append(
                    (self.signature(item), item.first - section.first, *map(names, self._signed[id(item)].outside))
                )
        if section.program is not None:
            text.append(_wiring(section.program.output.args[0], names))
        elif not section.user_scope:
            text.append(_wiring(section.call.outputs, names))
        signature = self._numbers.setdefault(tuple(text), len(self._numbers))
        return SectionSignature(signature, names.outside)

    def _op(self, op: Op, names: _Names) -> str:
        return f"{tuple(op.parts)} {type_text(meta.value(op.node))} = {op_text(op.node, names)}"


class _Names:
    """Names of nodes that do not depend on where in the program a section is."""

    def __init__(self, section: Section, tree: Tree, constants: dict[str, torch.Tensor]) -> None:
        self._section = section
        self._tree = tree
        self._constants = constants
        self._prefix = module_prefix(section)
        self._found: dict[torch.fx.Node, str] = {}
        self.outside: list[torch.fx.Node] = []
        if section.program is not None:  # a body takes nothing from outside but its operands
            taken = section.program.graph.find_nodes(op="placeholder")
            self._found = {node: f"operand {i}: {type_text(meta.value(node))}" for i, node in enumerate(taken)}
        self._found |= dict.fromkeys(tree.bodies, "body")

    def __call__(self, node: torch.fx.Node) -> str:
        op, slot = self._tree.ops.get(node, (None, 0))
        if op is not None and self._section.first <= op.number < self._section.stop:
            return f"%{op.number - self._section.first}.{slot}"
        target = str(node.target)
        if node.op == "get_attr" and self._prefix and target.startswith(self._prefix):
            return f"self.{target.removeprefix(self._prefix)}: {type_text(meta.value(node))}"
        text = self._found.get(node)
        if text is None:
            text = self._found[node] = f"{len(self.outside)}: {type_text(meta.value(node))}{self._content(node)}"
            self.outside.append(node)
        return text

    def _content(self, node: torch.fx.Node) -> str:
        """The values of a small constant; of parameters and buffers, which training changes, only the shape counts."""
        target = str(node.target)
        tensor = self._constants.get(target) if node.op == "get_attr" and "." not in target else None
        if tensor is None or not target.startswith(CONSTANT) or tensor.numel() > _SMALL:
            return ""
        return "" if tensor.is_meta else str(tensor.tolist())


def module_prefix(section: Section) -> str | None:
    """What the names of the parameters of a section's module begin with; None outside the model's tree."""
    fqn = section.call.fqn
    return None if fqn is None else f"{fqn}." if fqn else ""


def _wiring(x: Any, names: _Names) -> Any:
    """An argument or result, with names for nodes.

    Of other objects that hold tensors, such as a cache that grows from layer to layer, only the class.
    """
    if isinstance(x, torch.fx.Node):
        return names(x)
    children = open_container(x)
    if children is None:
        return value_text(x, names)
    if isinstance(x, (list, tuple, dict)) or dataclasses.is_dataclass(x):
        return (type(x), *((key, _wiring(item, names)) for key, item in children))
    return container_type(x)


def _is_call(item: Any) -> bool:
    return isinstance(item, Section) and not item.user_scope and item.program is None
