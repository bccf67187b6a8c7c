"""Names and arguments of a file that reach the Python code that torch.fx makes of a graph.

torch.fx writes names of arguments, attributes and keywords as they are, and the `repr` of constants. So a name that is
no name, and an object whose text a file chooses, would be code that the file brings.
"""

from __future__ import annotations

import enum
import keyword
from collections.abc import Iterator
from typing import Any

import torch

from scopetrace._compat.graph_module import is_writable
from scopetrace._compat.ops import OPS, is_op, schema_of
from scopetrace._compat.symbols import METHODS, CallMethodKey, Symbolic
from scopetrace.ir.tape import BodyTape, FunctionalTape, Op, ProgramTape, Tape, Value

_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, type(...), enum.Enum, *OPS),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Classes whose `repr` is the object, or which torch.fx writes in another safe way."""
_TENSORS = (Value, type(None), bool, int, float, complex, *Symbolic)
"""What an op takes for a tensor."""
_OPERANDS = (Value, BodyTape, *Symbolic)


def refuse_code(tape: ProgramTape, *, is_file: bool) -> None:
    """Raise ValueError for a tape whose names or constants would be code. A pickle may also have objects of its own."""
    for inner in tape.walk():
        for op in inner.ops:
            _check_op(op, is_file)
        for x in _outputs(inner):
            if not isinstance(x, _OPERANDS):
                raise ValueError(f"a program gives {type(x).__name__}")
        for call in inner.calls:
            if not is_writable(call.fqn or "", keywords=True):
                raise ValueError(f"{call.fqn!r} is no name of a module")
        if isinstance(inner, BodyTape):
            _check_name(inner.name)


def _outputs(tape: Tape) -> Iterator[Any]:
    if isinstance(tape, ProgramTape):
        yield from (write.value for write in tape.attribute_writes)
    if isinstance(tape, FunctionalTape) and tape.returned is not None:
        yield from tape.returned
    elif isinstance(tape, BodyTape):
        yield from (x for x in _leaves(tape.outputs) if not isinstance(x, _CONSTANTS))


def _check_op(op: Op, is_file: bool) -> None:
    if op.kind == "placeholder":
        _check_name(op.target)
    elif op.kind != "call_function" and not (isinstance(op.target, str) and is_writable(op.target)):
        raise ValueError(f"{op.target!r} is no name of an attribute")
    for name in op.kwargs:
        _check_name(name)
    if any(isinstance(key, CallMethodKey) and key.name not in METHODS for key in _leaves(op.unbacked or {})):
        raise ValueError(f"a size is no result of {op.unbacked}")
    if op.kind == "call_module" and is_file:
        raise ValueError(f"a file has no code of a leaf module, such as {op.target}")
    if op.kind == "call_function":
        _check_arguments(op)
        for x in _leaves((op.args, op.kwargs)):
            if not isinstance(x, (*_OPERANDS, *_CONSTANTS)) and (is_file or not isinstance(x, torch.ScriptObject)):
                raise TypeError(f"an argument of {op.target} is an object of {type(x).__name__}")


def _check_arguments(op: Op) -> None:
    """Raise TypeError for arguments that the op does not have, and for others than tensors where it takes tensors."""
    if not is_op(op.target):
        return
    arguments = schema_of(op.target).arguments
    operands = dict(zip([a.name for a in arguments if not a.kwarg_only], op.args, strict=False)) | op.kwargs
    kinds = {a.name: a for a in arguments}
    if len(operands) != len(op.args) + len(op.kwargs) or not operands.keys() <= kinds.keys():
        raise TypeError(f"{op.target} does not take these arguments")
    for name, x in operands.items():
        if kinds[name].is_tensor and not all(isinstance(leaf, _TENSORS) for leaf in _leaves(x)):
            raise TypeError(f"{name} of {op.target} is no tensor")


def _leaves(x: Any) -> Iterator[Any]:
    """What torch.fx writes of an argument, beside lists, tuples, dicts and slices."""
    if isinstance(x, (list, tuple)):
        for item in x:
            yield from _leaves(item)
    elif isinstance(x, dict):
        yield from _leaves([*x, *x.values()])
    elif isinstance(x, slice):
        yield from (x.start, x.stop, x.step)
    else:
        yield x


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} is no name of an argument")
