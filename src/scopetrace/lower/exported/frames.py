"""The module calls of a tape that `torch.export.unflatten` can tell apart."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

import torch
import torch.fx

from scopetrace.ir.tape import Call, FunctionalTape


@dataclasses.dataclass(eq=False)
class ModuleCallFrame:
    """A module call that `torch.export.unflatten` can tell apart from the calls around it."""

    call: Call
    fqn: str
    index: int
    """0 for the first call with this fqn."""
    parent: ModuleCallFrame | None

    @property
    def name(self) -> str:
        """The name of the call in `module_call_graph`: `a.b`, `a.b@1` for the second."""
        return f"{self.fqn}@{self.index}" if self.index else self.fqn

    def chain(self) -> Iterator[ModuleCallFrame]:
        """This frame and those around it, inner before outer."""
        frame: ModuleCallFrame | None = self
        while frame is not None:
            yield frame
            frame = frame.parent

    def module_stack(self) -> dict[str, tuple[str, str]]:
        """The `nn_module_stack` of the nodes in it."""
        return {f"L__self__{f.name}": (f.fqn, f.type_name) for f in reversed(list(self.chain()))}

    @property
    def is_graph(self) -> bool:
        """Whether a GraphModule was called, whose nodes say themselves in which modules they are."""
        return isinstance(self.call.module, torch.fx.GraphModule)

    @property
    def type_name(self) -> str:
        """The module's class, as torch.export writes it."""
        kind = self.call.module_type or torch.nn.Module
        return f"{kind.__module__}.{kind.__qualname__}"


def frames_of(tape: FunctionalTape) -> dict[Call, ModuleCallFrame]:
    """The frame of each call of the tape: its own, or that of a call around it."""
    count: collections.Counter[str] = collections.Counter()
    frames: dict[Call, ModuleCallFrame] = {}
    for call in sorted(tape.calls, key=lambda c: c.position):
        if call.parent is None:
            frames[call] = ModuleCallFrame(call, "", 0, None)
            continue
        around = frames[call.parent]
        prefix = f"{around.fqn}." if around.fqn else ""
        if call.fqn and call.fqn.startswith(prefix) and call.module_type is not None and call.raised is None:
            frames[call] = ModuleCallFrame(call, call.fqn, count[call.fqn], around)
            count[call.fqn] += 1
        else:
            frames[call] = around
    return frames
