"""`module_call_graph`: what goes into and out of every module call, in torch.export's words.

`torch.export.unflatten` gives a module its own signature from it, if everything that the module takes from outside, but
for parameters and buffers, is among the arguments, and everything that others take from it among the results. A call
for which that does not hold (a value handed on through an attribute) has no signature: unflatten then makes one of
what goes in and out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from torch.export import ModuleCallEntry, ModuleCallSignature
from torch.utils import _pytree as pytree

from scopetrace._compat.export import can_be_saved
from scopetrace.containers.structure import map_structure
from scopetrace.lower.exported.arguments import argument_of
from scopetrace.lower.exported.frames import ModuleCallFrame, Placement

Node = torch.fx.Node


class _Passed:
    """What goes into and out of a call."""

    def __init__(self, frame: ModuleCallFrame, lower: Callable[[Any], Any]) -> None:
        call = frame.call
        flat, self.in_spec = pytree.tree_flatten(_plain((lower(call.args), lower(call.kwargs))))
        out, self.out_spec = pytree.tree_flatten(_plain(lower(call.outputs)))
        self.inputs, self.outputs = [argument_of(x) for x in flat], [argument_of(x) for x in out]
        self.taken = {x for x in flat if isinstance(x, Node)}
        self.given = {x for x in out if isinstance(x, Node)}

    @property
    def can_be_said(self) -> bool:
        """Whether signatures have words for all of it."""
        return None not in (*self.inputs, *self.outputs) and can_be_saved(self.in_spec) and can_be_saved(self.out_spec)

    def signature(self) -> ModuleCallSignature:
        """The signature as torch.export writes it."""
        return ModuleCallSignature(self.inputs, self.outputs, self.in_spec, self.out_spec)


class ModuleCalls:
    """The calls of a lifted graph."""

    def __init__(self, placement: Placement, frames: list[ModuleCallFrame], lower: Callable[[Any], Any]) -> None:
        self._place = placement.frame
        seen = {frame for inner in set(self._place.values()) for frame in inner.chain()}
        inside = [f for f in frames if f.parent is not None]
        self._passed = {f: _Passed(f, lower) for f in inside if f in seen}
        said = {f for f, p in self._passed.items() if p.can_be_said and placement.hidden.isdisjoint(p.taken | p.given)}
        self._unsigned = {f.fqn for f in inside if f not in said}
        while not self._settle():
            pass

    def entries(self, fqns: list[str]) -> list[ModuleCallEntry]:
        """One entry for each module of `fqns`, then for the calls beyond the first of each."""
        signed = {f.name: p.signature() for f, p in self._passed.items() if f.fqn not in self._unsigned}
        found = [ModuleCallEntry(fqn, signed.pop(fqn, None)) for fqn in fqns if fqn]
        return found + [ModuleCallEntry(name, signature) for name, signature in signed.items()]

    # ---------------------------------------------------------------- what passes beside arguments and results

    def _settle(self) -> bool:
        """Take their signatures from the calls that something passes by; True when none had to be taken."""
        before = len(self._unsigned)
        for frame, node in self._reads():
            self._read(node, frame)
        for frame, passed in self._passed.items():
            if self._is_signed(frame):
                for node in passed.given - passed.taken:
                    if node.op == "placeholder":
                        self._unsigned.add(frame.fqn)
        return len(self._unsigned) == before

    def _reads(self) -> Iterator[tuple[ModuleCallFrame, Node]]:
        """Each value with a frame in which it is read: by a node, as argument of an inner call, as result."""
        for node, frame in self._place.items():
            for read in node.all_input_nodes:
                yield frame, read
        for frame, passed in self._passed.items():
            if self._is_signed(frame):
                assert frame.parent is not None
                for node in passed.taken:
                    yield frame.parent, node
                for node in passed.given:
                    yield frame, node

    def _read(self, node: Node, reader: ModuleCallFrame) -> None:
        if node.op == "placeholder" or self._place[node] is reader:
            return
        made_in = list(self._place[node].chain())
        for frame in reader.chain():
            if frame in made_in:
                self._leave(node, made_in[: made_in.index(frame)], reader)
                return
            if self._is_signed(frame):
                if node in self._passed[frame].taken:
                    return
                if _can_be_repeated(node):
                    for below in node.all_input_nodes:
                        self._read(below, frame)
                    return
                self._unsigned.add(frame.fqn)

    def _leave(self, node: Node, frames: list[ModuleCallFrame], reader: ModuleCallFrame) -> None:
        """A value leaves `frames` on its way to its reader."""
        for frame in frames:
            if self._is_signed(frame):
                if node not in self._passed[frame].given:
                    self._unsigned.add(frame.fqn)
            elif all(user in self._place and frame in self._place[user].chain() for user in node.users):
                self._unsigned.add(reader.fqn)  # unflatten lets out what nodes outside read, and none does

    def _is_signed(self, frame: ModuleCallFrame) -> bool:
        return frame.parent is not None and frame.fqn not in self._unsigned


def _plain(x: Any) -> Any:
    """With tuples for `torch.Size`s: unflatten hands tuples on, and checks the type."""
    return map_structure(tuple, x, torch.Size)


def _can_be_repeated(node: Node) -> bool:
    """Whether unflatten computes a symbolic size again where it is read."""
    return node.target is torch.ops.aten.sym_size.int or getattr(node.target, "__module__", "") == operator.__name__
