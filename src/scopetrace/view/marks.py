"""What a part of a program writes that lives on after a call, and which parameters it shares with other modules.

Data flow:
    mutations of the recorded program, by scope path -> the names that a section writes
    ops of a Tree -> by parameter, the modules whose calls read it -> those of a section that others read, too
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from scopetrace.functionalization.report import mutations
from scopetrace.program.traced import TracedProgram
from scopetrace.view.tree import Section, Tree, module_prefix


class Marks:
    """Which sections of a tree write to inputs, buffers and parameters, and which read shared parameters."""

    def __init__(self, program: TracedProgram, tree: Tree) -> None:
        self._writes = [(f"{m.module}/", m.name, m.kind) for m in mutations(program.reported)]
        self._readers: dict[str, list[tuple[int, str | None]]] = {}
        for number, fqn, name in _reads(tree.root):
            if isinstance(program.tape.attributes.get(name), torch.nn.Parameter):
                self._readers.setdefault(name, []).append((number, fqn))
        self._shared = {name for name, found in self._readers.items() if len({fqn for _, fqn in found}) > 1}

    def writes(self, section: Section) -> tuple[str, ...]:
        """The inputs of the model by path, and the parameters and buffers by name, without the module's own prefix."""
        if section.is_backward:  # its path is that of the forward, which did it
            return ()
        prefix = module_prefix(section) or ""
        found = [(name, kind) for path, name, kind in self._writes if path.startswith(f"{section.path}/")]
        return tuple(dict.fromkeys(name if kind == "input" else name.removeprefix(prefix) for name, kind in found))

    def shares(self, first: int, stop: int) -> tuple[str, ...]:
        """The parameters that ops with the numbers from `first` to before `stop` read, and other modules, too."""
        found = []
        for name in self._shared:
            inside = {fqn for number, fqn in self._readers[name] if first <= number < stop}
            outside = {fqn for number, fqn in self._readers[name] if not first <= number < stop}
            if inside and outside - inside:
                found.append(name)
        return tuple(sorted(found))


def _reads(section: Section) -> Iterator[tuple[int, str | None, str]]:
    """Each read of an attribute: the number of the op, the module in whose call it runs, the name."""
    for item in section.items:
        if isinstance(item, Section):
            yield from _reads(item)
            continue
        for node in item.node.all_input_nodes:
            if node.op == "get_attr":
                yield item.number, section.call.fqn, str(node.target)
        for body in item.bodies:
            yield from _reads(body)
