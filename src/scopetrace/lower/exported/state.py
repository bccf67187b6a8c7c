"""The tensors that a program holds, as `torch.export` files them: parameters, buffers, constants."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Container, Iterator

import torch
from torch.export.graph_signature import InputKind

from scopetrace._compat.tensors import buffers_of, persistent_buffers_of
from scopetrace.ir.tape import Call, FunctionalTape
from scopetrace.lower.exported.frames import ModuleCallFrame

_PREFIX = {InputKind.PARAMETER: "p_", InputKind.BUFFER: "b_", InputKind.CONSTANT_TENSOR: "c_"}
_UNNAMED = "_tensor_constant"


@dataclasses.dataclass
class State:
    """One tensor that the program takes from the model."""

    kind: InputKind
    fqn: str
    """Its key in the state dict, or among the constants."""
    tensor: torch.Tensor
    persistent: bool | None = None
    """Of a buffer: whether it is in the state dict."""
    aliases: tuple[str, ...] = ()
    """Its other names. A constant has one in each module that reads it: `unflatten` gives each module its own."""

    @property
    def in_state_dict(self) -> bool:
        """Whether it belongs to the state dict; else it is among the constants."""
        return self.kind is InputKind.PARAMETER or self.persistent is True

    @property
    def placeholder(self) -> str:
        """The name of its placeholder, as torch.export makes it: `p_fc_weight`."""
        return _PREFIX[self.kind] + re.sub(r"\W", "_", self.fqn).lower()


def states(tape: FunctionalTape, frames: dict[Call, ModuleCallFrame]) -> dict[str, State]:
    """By name on the tape, all tensors of the model and of the program, in torch.export's order.

    All parameters and buffers of a traced module, a tied one once, then constants. Of a function, and
    of a loaded trace, those that the program reads.
    """
    module = tape.calls[0].module if tape.calls else None
    readers = _readers(tape, frames)
    found = {s.fqn: s for s in _of_module(module, readers)} if module is not None else {}
    for name, tensor in tape.attributes.items():
        if name in readers and name not in found:
            found[name] = _beside(tape, name, tensor, readers[name])
    return dict(sorted(found.items(), key=lambda item: list(_PREFIX).index(item[1].kind)))


def _of_module(root: torch.nn.Module, read: Container[str]) -> Iterator[State]:
    """Parameters and buffers; of the names of a tied one, that by which the program reads it, the others as aliases."""
    kept, tensors = _persistent(root), collections.defaultdict[int, list[tuple[str, torch.Tensor]]](list)
    for name, tensor in (
        *root.named_parameters(remove_duplicate=False),
        *root.named_buffers(remove_duplicate=False),
    ):
        tensors[id(tensor)].append((name, tensor))
    for named in tensors.values():
        names = [name for name, _ in named]
        first = next((name for name in names if name in read), names[0])
        aliases = tuple(name for name in names if name != first)
        is_parameter = isinstance(named[0][1], torch.nn.Parameter)
        kind = InputKind.PARAMETER if is_parameter else InputKind.BUFFER
        yield State(kind, first, named[0][1], None if is_parameter else first in kept, aliases)


def _persistent(root: torch.nn.Module) -> set[str]:
    """The names of the buffers that are in the state dict."""
    found: set[str] = set()
    for fqn, module in root.named_modules(remove_duplicate=False):
        prefix = f"{fqn}." if fqn else ""
        found.update(prefix + name for name in persistent_buffers_of(module))
    return found


def _readers(tape: FunctionalTape, frames: dict[Call, ModuleCallFrame]) -> dict[str, list[str]]:
    """By name on the tape, the modules that read a tensor."""
    found: dict[str, list[str]] = {op.target: [] for op in tape.ops if op.kind == "get_attr"}
    for op in tape.ops:
        for value in op.inputs():
            if value.op.kind == "get_attr":
                fqn = frames[op.call].fqn if op.call is not None else ""
                if fqn not in found[value.op.target]:
                    found[value.op.target].append(fqn)
    return found


def _beside(tape: FunctionalTape, name: str, tensor: torch.Tensor, readers: list[str]) -> State:
    """What the program reads beside the state of a traced module."""
    if name.startswith(_UNNAMED):
        leaf = f"lifted_tensor_{name.removeprefix(_UNNAMED)}"
        fqn, *others = [f"{reader}.{leaf}" if reader else leaf for reader in readers or [""]]
        return State(InputKind.CONSTANT_TENSOR, fqn, tensor, aliases=tuple(others))
    if isinstance(tensor, torch.nn.Parameter):
        return State(InputKind.PARAMETER, name, tensor)
    module, attribute = tape.owners.get(name, (None, name))
    if module is None:  # a loaded trace
        return State(InputKind.BUFFER, name, tensor, persistent=True)
    if attribute in buffers_of(module):
        return State(InputKind.BUFFER, name, tensor, attribute in persistent_buffers_of(module))
    return State(InputKind.CONSTANT_TENSOR, name, tensor)
