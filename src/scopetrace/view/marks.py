"""What a part of a program writes that lives on after a call, and which parameters it shares with other modules.

Data flow:
    mutations of the recorded program, by scope path -> the names that a section writes
    ops of a Tree -> by parameter, the modules whose calls read it -> those of a section that others read, too
"""

from __future__ import annotations

import torch

from scopetrace.functionalization.report import mutations
from scopetrace.program.traced import TracedProgram
from scopetrace.view.tree import Op, Run, Section, Tree, module_prefix


class Marks:
    """Which sections of a tree write to inputs, buffers and parameters, and which read shared parameters."""

    def __init__(self, program: TracedProgram, tree: Tree) -> None:
        self._writes = [(f"{m.module}/", m.name, m.kind) for m in mutations(program.reported)]
        self._readers: dict[str, list[tuple[int, str | None]]] = {}  # by parameter, ops and the modules around
        for section in tree.root.walk():
            for op in section.items:
                for node in op.attributes if isinstance(op, Op) else ():
                    if isinstance(program.tape.attributes.get(str(node.target)), torch.nn.Parameter):
                        self._readers.setdefault(str(node.target), []).append((op.first, section.call.fqn))
        self._shared = {name for name, readers in self._readers.items() if len({fqn for _, fqn in readers}) > 1}

    def writes(self, section: Section) -> tuple[str, ...]:
        """The inputs of the model by path, and the parameters and buffers by name, without the module's own prefix."""
        if section.kind == "backward":  # its path is that of the forward, which did it
            return ()
        prefix = module_prefix(section) or ""
        writes = [(name, kind) for path, name, kind in self._writes if path.startswith(f"{section.path}/")]
        return tuple(dict.fromkeys(name if kind == "input" else name.removeprefix(prefix) for name, kind in writes))

    def shares(self, part: Op | Section | Run) -> tuple[str, ...]:
        """The parameters that ops of a part read, and other modules, too."""
        names = []
        for name in self._shared:
            inside = {fqn for number, fqn in self._readers[name] if part.first <= number < part.stop}
            outside = {fqn for number, fqn in self._readers[name] if not part.first <= number < part.stop}
            if inside and outside - inside:
                names.append(name)
        return tuple(sorted(names))
