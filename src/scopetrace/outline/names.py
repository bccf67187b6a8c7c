"""What a function's inputs are called that nobody passes."""

from __future__ import annotations

import itertools

import torch

from scopetrace.ir.tape import Call, Tape


def own_tensors(tape: Tape, call: Call) -> dict[int, tuple[int, str, str]]:
    """By identity, the place, kind and name of the module's parameters and buffers."""
    prefix = f"{call.fqn}." if call.fqn else ""
    if call.module is not None:
        tensors = itertools.chain(call.module.named_parameters(), call.module.named_buffers())
        named = [(_kind(t), n, t) for n, t in tensors]
    else:  # a loaded trace, whose attributes are in the order of their use
        held = [(n, t) for n, t in tape.attributes.items() if n.startswith(prefix) and n[0] != "_"]
        named = [(_kind(t), n.removeprefix(prefix), t) for n, t in held]
    found: dict[int, tuple[int, str, str]] = {}
    for i, (kind, name, t) in enumerate(named):
        found.setdefault(id(t), (i, kind, name))
    return found


def different(name: str, taken: set[str]) -> str:
    """The name, or one like it that is free; it is taken then."""
    more = (f"{name}_{i}" for i in itertools.count(1))
    found = next(n for n in itertools.chain([name], more) if n not in taken)
    taken.add(found)
    return found


def _kind(t: torch.Tensor) -> str:
    return "parameter" if isinstance(t, torch.nn.Parameter) else "buffer"
