"""Ops that are recorded as other ops, or not at all.

Data flow:
    an op with a row in REWRITES -> its function gets the OpRecorder, and runs other ops, or answers without any
    NotImplemented from there    -> the op is recorded as it is
    inside of torch.vmap, grad and the like -> torch's transforms and its autograd -> the ops that are left of it
"""

from __future__ import annotations

import bisect
import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from scopetrace._compat.fake_mode import CTC_LIBRARIES
from scopetrace._compat.gradients import next_sequence_number
from scopetrace._compat.ops import BelowAutograd, eager, unwrapped, without_transforms
from scopetrace._compat.questions import attention_kernels, default_dtype
from scopetrace._compat.symbols import has_unbacked, to_expr
from scopetrace._compat.tensors import FakeTensor, is_symbolic, requires_grad_of, run_parts, runs_in_python
from scopetrace.containers.structure import leaves
from scopetrace.errors import DynamicShapeError
from scopetrace.ir.tape import map_argument
from scopetrace.ops.functional_variants import drops_between_layers
from scopetrace.record.builder import TapeBuilder
from scopetrace.record.values import ValueTable

_aten = torch.ops.aten
_ATTENTION = _aten.scaled_dot_product_attention.default
_END_OF_PROFILED = torch.ops.profiler._record_function_exit._RecordFunction


def _lift_fresh(ops: Any, t: torch.Tensor) -> torch.Tensor:
    if t.dtype == default_dtype():
        ops.reads.on_default_dtype()
    ops.reads.on_default_device(t.device)
    return ops.values.lift_fresh(t)


def _unbind(ops: Any, x: torch.Tensor, dim: int = 0) -> Any:
    """Rows of a number that depends on data: the shape rule of torch leaves them a dimension too many."""
    if not x.dim() or not has_unbacked(to_expr(x.shape[dim])):
        return NotImplemented
    return ops.recorded(lambda: tuple(x.select(dim, i) for i in range(int(x.shape[dim]))))


def _squeeze(ops: Any, x: torch.Tensor, *dims: Any) -> Any:
    """With `specialize=True`, where a size that depends on data is 1: that of a part of such a size."""
    sizes = {d: x.shape[d] for d in (leaves(dims, int) if dims else range(x.dim()))} if ops.specialize else {}
    ones = [d for d, size in sizes.items() if has_unbacked(to_expr(size)) and size == 1]
    if not ones:
        return NotImplemented
    return ops.recorded(lambda: functools.reduce(lambda t, d: t.narrow(d, 0, 1), ones, x).squeeze(*dims))


def _ctc_loss(
    ops: Any, log_probs: torch.Tensor, targets: torch.Tensor, lengths: Any, target_lengths: Any, *more: Any
) -> Any:
    """That of lengths as tensors on the device of `log_probs`: torch's parts divide by them, and have no data."""
    device = log_probs.device
    if isinstance(target_lengths, torch.Tensor) and target_lengths.device == device:
        return NotImplemented

    def run() -> Any:
        both = (
            n.to(device) if isinstance(n, torch.Tensor) else torch.tensor(n, device=device)
            for n in (lengths, target_lengths)
        )
        return _aten.ctc_loss.Tensor(log_probs, targets, *both, *more)

    return ops.recorded(run)


def _max_pool1d(ops: Any, x: torch.Tensor, *args: Any) -> Any:
    """Without gradients torch's kernel on a CPU gives contiguous memory; its shape rule, that of the other kernel."""
    if x.device.type != "cpu" or x.is_contiguous() or (torch.is_grad_enabled() and requires_grad_of(x)):
        return NotImplemented
    return ops.recorded(lambda: _aten.max_pool1d.default(x.contiguous(), *args))


def _dropout_in_place(ops: Any, x: torch.Tensor, p: float, train: bool) -> Any:
    """Nothing in eval mode, as in eager. On a GPU its parts, since the kernel of `aten.dropout` draws other numbers."""
    if not (p and train):
        return x
    if x.device.type == "cpu":
        return NotImplemented
    return ops.recorded(lambda: run_parts(_aten.dropout_.default, x, p, train))


_OTHER_DROPOUTS = (_aten.alpha_dropout_.default, _aten.feature_dropout_.default, _aten.feature_alpha_dropout_.default)


def _fill_diagonal(ops: Any, x: torch.Tensor, value: Any, wrap: bool = False) -> Any:
    """With symbolic sizes, which torch's kernel does not take, the writes to views that it does."""
    if not is_symbolic(x) or x.dim() < 2 or (x.dim() > 2 and any(n != x.size(0) for n in x.shape)):
        return NotImplemented  # the last raises

    def run() -> Any:
        rows, columns = x.shape[:2]
        step = columns + 1
        starts = range(0, int(rows), int(step)) if wrap and x.dim() == 2 and rows > step else (0,)
        for start in starts:
            diagonal = x[start : start + step] if start or len(starts) > 1 else x
            while diagonal.dim() > 1:
                diagonal = diagonal.diagonal(0, 0, 1)
            diagonal.fill_(value)
        return x

    return ops.recorded(run)


def _combinations(ops: Any, x: torch.Tensor, r: int = 2, with_replacement: bool = False) -> Any:
    """By indices: torch selects each column by a mask of its own, which makes as many sizes that depend on data."""
    if x.dim() != 1 or r < 1 or is_symbolic(x):
        return NotImplemented
    with eager():
        indices = torch.combinations(torch.arange(x.shape[0]), r, with_replacement).to(x.device)
    return ops.recorded(lambda: x[indices])


def _attention(ops: Any, *args: Any, **kwargs: Any) -> Any:
    """Under `torch.nn.attention.sdpa_kernel` in the forward the parts, which say the kernel that it chooses."""
    if attention_kernels() == ops.attention_kernels:
        return NotImplemented
    return ops.recorded(lambda: run_parts(_ATTENTION, *args, **kwargs))


def _refuse_batched(ops: Any, *_: Any) -> Any:
    problem = "autograd differentiates by a batch of gradients at once (is_grads_batched=True, vectorize=True)"
    hint = "take torch.func.vmap of torch.func.vjp, torch.func.jacrev or hessian, or one gradient at a time"
    raise ops.builder.refusal(problem, op="torch.autograd.grad", hint=hint)


def refuse_lost_dropout(builder: TapeBuilder, func: Any, args: tuple[Any, ...]) -> None:
    """Raise where torch decomposes an op in Python, and forgets its dropout."""
    tensors = leaves(list(args[:2]), torch.Tensor)
    if not drops_between_layers(func, args) or not runs_in_python(func, tensors):
        return
    problem = "the forward differentiates through a recurrent layer with dropout"
    hint = "make a module for each layer with nn.Dropout between them"
    if any(map(is_symbolic, tensors)):
        hint = f"trace with fixed sizes, or {hint}"
        raise DynamicShapeError(f"{problem}, of dynamic sizes", op=str(func), **builder.where(), hint=hint)
    raise builder.refusal(f"{problem}, on a GPU", op=str(func), hint=hint)


REWRITES: dict[Any, Callable[..., Any]] = {
    _aten._add_batch_dim.default: _refuse_batched,
    _aten.size.default: lambda ops, t: tuple(t.shape),
    _aten.is_set_to.default: lambda ops, a, b: ops.values.are_one_view(a, b),
    _aten.lift_fresh.default: _lift_fresh,
    _aten.tensor_split.tensor_indices_or_sections: lambda ops, x, at, dim=0: ops.recorded(
        lambda: torch.tensor_split(x, at.tolist(), dim)
    ),
    _aten.unbind.int: _unbind,
    **dict.fromkeys((_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims), _squeeze),
    _aten.narrow.Tensor: lambda ops, x, dim, start, n: ops.recorded(lambda: torch.narrow(x, dim, start.item(), n)),
    **dict.fromkeys((_aten.ctc_loss.IntList, _aten.ctc_loss.Tensor), _ctc_loss),
    **dict.fromkeys(CTC_LIBRARIES, lambda *_: False),
    _aten.max_pool1d.default: _max_pool1d,
    _aten.dropout_.default: _dropout_in_place,
    **dict.fromkeys(_OTHER_DROPOUTS, lambda ops, x, p, train: NotImplemented if p and train else x),
    _aten.fill_diagonal_.default: _fill_diagonal,
    _aten.combinations.default: _combinations,
    _ATTENTION: _attention,
    _END_OF_PROFILED: lambda ops, handle: _END_OF_PROFILED(handle),
}
"""Ops that are recorded as others, or not at all. What gives NotImplemented leaves one as it is.

Two of them read numbers from a tensor: that is an op for each number. `torch.profiler.record_function` marks a stretch
of time for the profiler: it runs, and is no part of the program.
"""

# Inside of torch.vmap, grad and other transforms ---------------------------------------------------------------------

_NUMBERS = (int, float, complex, torch.SymInt, torch.SymFloat)
_OF_NUMBERS = {
    getattr(op, tensor): getattr(op, tensor.replace("Tensor", "Scalar"))
    for kind in ("mul", "multiply", "div", "divide", "true_divide")
    for op in (getattr(_aten, kind), getattr(_aten, f"{kind}_"))
    for tensor in op.overloads()
    if tensor in ("Tensor", "Tensor_mode")
}
"""Ops whose backward reads both operands, with that for a number: a tensor of a number is none that torch could show to
Python as the operand of a transform's backward."""


def record_in_transform(ops: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let torch transform an op, and the OpRecorder `ops` record what is left of it. Gives what the model gets."""
    builder, tape = ops.builder, ops.builder.tape
    builder.expect_history("a transform such as torch.vmap runs")
    args, kwargs = map_argument(functools.partial(_differentiable, ops.values), (args, kwargs))
    if func in _OF_NUMBERS and isinstance(args[1], _NUMBERS):
        func = _OF_NUMBERS[func]
    start, first = len(tape.ops), next_sequence_number()
    with BelowAutograd(ops.record):
        out = func(*args, **kwargs)
    if next_sequence_number() > first and len(tape.ops) > start:
        bisect.insort(builder.made_nodes, (first, tape.ops[start]), key=operator.itemgetter(0))
    for v in [v for op in tape.ops[start:] for v in op.values()]:
        v.requires_grad = requires_grad_of(v.fake)  # autograd around the transform sees an op last
        if v.op.target is _aten._to_copy.default and v.fake.is_meta and not v.op.tensor(0).fake.is_meta:
            builder.loses_device = builder.refusal(
                "torch computes this derivative in forward mode with a tensor of zeros that is on no device",
                op=str(func),
                hint="use a derivative in reverse mode (torch.func.grad, vjp, jacrev), or compute it outside",
            )
    return out


def _differentiable(values: ValueTable, x: Any) -> Any:
    """A tensor of the model as the fake one by which autograd around a transform differentiates."""
    tensor = unwrapped(x) if isinstance(x, torch.Tensor) else None
    if tensor is None or isinstance(tensor, FakeTensor):
        return x
    if tensor is not x:
        values.transformed = True
        return x
    with without_transforms():
        return values.value_of(x).fake
