"""Values that Python reads while it is traced: `.item()`, `if t:`, `torch.equal`.

Those that depend on constants alone are computed, by running for real the part of the tape that leads to them.
"""

from __future__ import annotations

from typing import Any

import torch

from scopetrace._compat.dispatch import eager
from scopetrace.record.tape import Op, Tape, Value, flat

_aten = torch.ops.aten
_READERS = (
    _aten.item.default,
    _aten._local_scalar_dense.default,
    _aten.is_nonzero.default,
    _aten.equal.default,
    _aten.allclose.default,
)


def reads_a_value(func: Any) -> bool:
    """Whether Python gets a number from the op, in place of a tensor."""
    return func in _READERS


def read_constant(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """(True, the number) when it does not depend on the inputs or the model's state; else (False, None)."""
    ops = _leading_to(tape, [v for v in flat((args, kwargs)) if isinstance(v, Value)])
    if ops is None:
        return False, None
    env: dict[Value, torch.Tensor] = {}
    with eager():
        for op in ops:
            _run(op, env)
        return True, func(*_real(args, env), **_real(kwargs, env))


def _leading_to(tape: Tape, wanted: list[Value]) -> list[Op] | None:
    """The ops that decide the data of `wanted`, in order; None when inputs, state or chance have a part in it."""
    needed = {v.storage for v in wanted}
    found: list[Op] = []
    for op in reversed(tape.ops):
        if not needed:
            break
        made = {v.storage for v in op.values()}
        if needed.isdisjoint(made) and needed.isdisjoint(v.storage for v in op.writes):
            continue
        if not _is_constant(op):
            return None
        found.append(op)
        read = {v.storage for v in op.inputs()}
        needed = (needed - (made - read)) | read
    return None if needed else found[::-1]


def _is_constant(op: Op) -> bool:
    if op.kind == "get_attr":
        return op.target.startswith("_tensor_constant")
    if (
        op.kind != "call_function"
        or op.bodies()
        or torch.Tag.nondeterministic_seeded in op.target.tags
        or op.unbacked is not None
    ):
        return False
    return not any(isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool)) for a in flat((op.args, op.kwargs)))


def _run(op: Op, env: dict[Value, torch.Tensor]) -> None:
    if op.kind == "get_attr":
        value = op.outputs
        env[value] = value.real.clone()  # ops of the tape may write to it
        return
    out = op.target(*_real(op.args, env), **_real(op.kwargs, env))
    for value, tensor in zip(flat(op.outputs), flat(out), strict=True):
        if isinstance(value, Value):
            env[value] = tensor


def _real(x: Any, env: dict[Value, torch.Tensor]) -> Any:
    if isinstance(x, Value):
        return env[x]
    if isinstance(x, (list, tuple)):
        return type(x)([_real(item, env) for item in x])
    if isinstance(x, dict):
        return {name: _real(item, env) for name, item in x.items()}
    return x
