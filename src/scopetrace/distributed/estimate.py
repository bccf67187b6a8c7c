"""`estimate`: the memory and FLOPs of a model in training or inference, whether that fits, and what would.

Data flow:
    model -> a copy whose parameters are CPU memory that nobody touches, in the dtype asked for
    the copy -> forward and backward traced -> Memory, op_flops
    optimizer -> two steps on meta tensors: the state that the first makes, what the second makes besides
    all -> Estimate; of what does not fit, a checkpoint plan, an FSDP2 plan and its simulated memory -> Remedy

The copy is no meta model, since on the meta device torch has no fused attention that can be differentiated.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only

from scopetrace._compat.allocations import peak_of
from scopetrace._compat.tensors import storage_id
from scopetrace.api.checkpoints import checkpoint_plan
from scopetrace.api.runnable import knows_others, program_of
from scopetrace.api.steps import TrainingStep
from scopetrace.api.trace import Trace, trace
from scopetrace.distributed.costs import op_flops
from scopetrace.distributed.planning import plan
from scopetrace.distributed.simulation import simulate
from scopetrace.errors import ArgumentError, PlanError
from scopetrace.formatting import Tabular, amount
from scopetrace.ir.tape import ProgramTape
from scopetrace.view.memory import Memory, forward_calls, gradients_among, storages_of, timeline_of

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer | None]
_MOST_RANKS = 1024
_GROUPS = 32
"""Into about how many groups of equal bytes a plan cuts the parameters, as FSDP2 is used with one for each layer."""


@dataclasses.dataclass(frozen=True)
class ModuleEstimate:
    """A module call. Sizes are bytes, and include what is inside."""

    fqn: str
    type: str
    depth: int
    parameter_bytes: int
    saved_bytes: int
    """What its forward makes and backward reads."""
    peak_bytes: int
    """The most that is in use while it runs, forward or backward, parameters and all else included."""
    flops: int
    """Of forward and backward."""


@dataclasses.dataclass(frozen=True)
class Remedy:
    """What makes a step fit."""

    peak_bytes: int
    """Of each rank."""
    ranks: int = 1
    """Over how many ranks FSDP2 shards parameters, gradients and optimizer state."""
    checkpoints: tuple[str, ...] = ()
    """The names of modules that run again in backward, under `torch.utils.checkpoint`."""
    recomputed_flops: int = 0

    def __str__(self) -> str:
        parts = [f"FSDP2 over {self.ranks} ranks"] if self.ranks > 1 else []
        if self.checkpoints:
            more = len(self.checkpoints) - 3
            names = ", ".join(self.checkpoints[:3]) + (f", … {more} more" if more > 0 else "")
            parts.append(f"checkpoints of {names} ({amount(self.recomputed_flops, 'FLOP')} computed twice)")
        return f"{' and '.join(parts)}: {amount(self.peak_bytes, 'B')}" + " on each" * (self.ranks > 1)


@dataclasses.dataclass(frozen=True, repr=False)
class Estimate(Tabular):
    """What a step needs, in bytes. `print(estimate)`; in a notebook, an HTML table."""

    parameter_bytes: int
    buffer_bytes: int
    """Buffers and constants."""
    input_bytes: int
    optimizer_bytes: int
    """The state of the optimizer."""
    gradient_bytes: int
    saved_bytes: int
    """What forward makes and backward reads."""
    peak_bytes: int
    """The most that is in use at one time, all of the above included."""
    peak_at: str
    """The phase, module and op of the peak."""
    flops: int
    rows: tuple[ModuleEstimate, ...]
    """The module calls down to the depth asked for, outer before inner, in the order of execution."""
    gpu_bytes: int | None = None
    """What it is to fit into."""
    remedies: tuple[Remedy, ...] = ()
    """Where it does not fit: checkpoints alone, sharding alone, else both; those that make it fit."""

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits into `gpu_bytes`; None where that was not asked for."""
        return None if self.gpu_bytes is None else self.peak_bytes <= self.gpu_bytes

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return {**dataclasses.asdict(self), "fits": self.fits}

    def __repr__(self) -> str:
        return f"<Estimate: peak {amount(self.peak_bytes, 'B')}, {amount(self.flops, 'FLOP')}>"

    def _table(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("module", "parameters", "saved", "peak", "FLOPs")]
        for row in self.rows:
            label = "  " * row.depth + (f"{row.type}[{row.fqn}]" if row.fqn else row.type)
            counts = (row.parameter_bytes, "B"), (row.saved_bytes, "B"), (row.peak_bytes, "B"), (row.flops, "")
            rows.append((label, *(amount(n, unit) if n else "-" for n, unit in counts)))
        return rows

    def _notes(self) -> Iterator[str]:
        names = ("parameters", "buffers", "inputs", "optimizer state", "gradients", "saved for backward")
        sizes = zip(names, dataclasses.astuple(self), strict=False)
        yield ", ".join(f"{name} {amount(n, 'B')}" for name, n in sizes if n)
        yield f"peak {amount(self.peak_bytes, 'B')} with all of these, {self.peak_at}; {amount(self.flops, 'FLOP')}"
        if self.gpu_bytes is None:
            return
        yield f"{'fits' if self.fits else 'does not fit'} into {amount(self.gpu_bytes, 'B')}"
        yield from (f"would fit: {remedy}" for remedy in self.remedies)
        if not (self.fits or self.remedies):
            yield f"neither checkpoints nor FSDP2 over {_MOST_RANKS} ranks make it fit: take smaller inputs"
        yield (
            "not counted, of a GPU: the CUDA context, what the caching allocator rounds up and fragments, "
            "workspaces of cuBLAS and cuDNN, what kernels take while they run, buffers of NCCL"
        )


@knows_others("st.estimate", {})
def estimate(
    model: torch.nn.Module,
    args: tuple[Any, ...] | torch.Tensor = (),
    kwargs: dict[str, Any] | None = None,
    *,
    step: bool = True,
    dtype: torch.dtype | None = None,
    optimizer: str | MakeOptimizer | None = None,
    loss: str | Callable[[Any], torch.Tensor] | None = None,
    gpu_bytes: int | None = None,
    depth: int | None = 1,
) -> Estimate:
    """What a model needs in training or inference, without running it or making its memory; about one trace long.

        print(st.estimate(model, (x,), optimizer="adamw", gpu_bytes=80 * 10**9))

    The training step is forward, loss, `backward()`, a step of the optimizer and `zero_grad()`, as each after the first
    one. Inference runs under `torch.no_grad`. The model, which may be on the meta device, stays as it is.

    Args:
        model: the model, in the mode that is estimated.
        args: its positional arguments, as for `trace`; tensors on any device.
        kwargs: its keyword arguments.
        step: whether to estimate a training step; else an inference.
        dtype: cast parameters, buffers and inputs of floating point to it.
        optimizer: the name of a class of torch.optim, such as "adamw"; or a function from parameters to an optimizer.
        loss: the name of the loss in the result, or a function of the result; None for `loss` where the result has it,
            else the sum of its floats.
        gpu_bytes: what it is to fit into. Then optimizers are those of a GPU (`foreach=True`), and `Estimate.remedies`
            has what would fit.
        depth: levels of calls below the model that have rows; None for all.

    Raises ArgumentError for an optimizer or loss that is none, or with step=False, or an optimizer whose step reads
    values (ASGD, Adafactor); what `trace` raises.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"estimate takes a torch.nn.Module, not {type(model).__name__}")
    if not step and (optimizer is not None or loss is not None):
        raise ArgumentError("optimizer= and loss= are of a training step: leave them out, or step=False")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(f"dtype={dtype!r}: give one of floating point, such as torch.bfloat16")
    if gpu_bytes is not None and not isinstance(gpu_bytes, int | float):
        raise ArgumentError(f"gpu_bytes={gpu_bytes!r}: give a number, such as 80 * 10**9")
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"optimizer= makes one: write lambda params: {type(optimizer).__name__}(params, ...)")
    twin = _copy(model, dtype)
    arguments = (args,) if isinstance(args, torch.Tensor) else args, kwargs
    cast = tree_map_only(torch.Tensor, functools.partial(_on_cpu, dtype=dtype), arguments)
    after = TrainingStep(loss, optimizer if isinstance(optimizer, str) else None)
    with torch.set_grad_enabled(step):
        tr = trace(after.of(twin, None) if step else twin, *cast, functional=False)
    make = optimizer if callable(optimizer) else functools.partial(after.optimizer_of, foreach=gpu_bytes is not None)
    return _of_trace(tr, twin, make, gpu_bytes, depth)


def _on_cpu(t: torch.Tensor, dtype: torch.dtype | None, *, keeps: bool = True) -> torch.Tensor:
    """A tensor on the CPU; without values, memory that an operating system gives only when somebody writes there."""
    dtype = dtype if t.is_floating_point() else None
    if t.is_meta or not keeps:
        return torch.empty_like(t, device="cpu", dtype=dtype, requires_grad=t.requires_grad)
    return t.detach().to("cpu", dtype).requires_grad_(t.requires_grad)


def _copy(model: torch.nn.Module, dtype: torch.dtype | None) -> torch.nn.Module:
    """The model with parameters without values; a lazy one itself, which trace refuses."""
    if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
        return model
    plain = [t for module in model.modules() for t in vars(module).values() if isinstance(t, torch.Tensor)]
    copies: dict[int, Any] = {id(t): _on_cpu(t, None) for t in plain}
    copies |= {id(b): _on_cpu(b, dtype) for b in model.buffers()}
    for p in model.parameters():
        copies[id(p)] = torch.nn.Parameter(_on_cpu(p.detach(), dtype, keeps=False), p.requires_grad)
    return copy.deepcopy(model, copies)


# ---------------------------------------------------------------- what it needs


def _bytes(tensors: Iterable[Any]) -> int:
    """The bytes of the storages of tensors, each once."""
    return sum({storage_id(t): t.untyped_storage().nbytes() for t in tensors if isinstance(t, torch.Tensor)}.values())


def _stepping(tape: ProgramTape, model: torch.nn.Module, make: MakeOptimizer) -> tuple[int, int]:
    """The bytes of an optimizer's state, and the most that a step makes besides."""
    trained = {id(tape.attributes.get(write.fqn)) for write in tape.attribute_writes if write.of is not None}
    metas = [torch.nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()]
    optimizer = make(metas)
    if optimizer is None:
        return 0, 0
    for p, meta in zip(model.parameters(), metas, strict=True):
        meta.grad = torch.empty_like(meta) if id(p) in trained else None
    try:
        optimizer.step()
    except (AttributeError, RuntimeError, TypeError) as error:  # it reads values, needs a closure, or is none
        raise ArgumentError(f"{type(optimizer).__name__} takes no step on meta tensors: {error}") from error
    state = tree_leaves(list(optimizer.state.values()))
    return _bytes(state), peak_of(optimizer.step, [*metas, *(p.grad for p in metas), *state])


def _of_trace(
    tr: Trace, model: torch.nn.Module, make: MakeOptimizer, gpu_bytes: int | None, depth: int | None
) -> Estimate:
    tape, is_step = program_of(tr).as_run, tr.model is not model
    memory = Memory(program_of(tr), None if depth is None else depth + is_step)
    state, besides = _stepping(tape, model, make)
    params = list(model.parameters())
    known = set(map(id, params))
    others = [*model.buffers(), *(t for t in tape.attributes.values() if id(t) not in known)]
    held = _bytes(params), _bytes(others), _bytes(v.fake for v in tape.inputs), state
    storages = storages_of(tape)[1]
    gradients = gradients_among(tape, storages)
    left = sum(s.size for s in gradients)
    updating = left + besides
    name = _name(memory.peak_call) if is_step else memory.peak_call
    at = f"in the {memory.peak_phase}{f' of {name}' if name else ''}: {memory.peak_op}"
    at = "in the step of the optimizer" if updating > memory.eager_peak_bytes else at
    peak = sum(held) + max(memory.eager_peak_bytes, updating)
    flops = op_flops(tape)
    rows = tuple(_rows(tape, memory, flops, sum(held), is_step=is_step))
    needs = Estimate(*held, left, memory.saved_bytes, peak, at, sum(flops), rows, gpu_bytes)
    if needs.fits is not False:
        return needs
    activations = max(timeline_of(len(tape.ops), set(storages) - set(gradients)), default=0)
    return dataclasses.replace(needs, remedies=tuple(_remedies(tr, model, needs, activations, updating)))


def _name(fqn: str) -> str:
    """The name in the model of a module in a step, in which the model has the name of a variable."""
    return fqn.partition(".")[2]


def _rows(tape: ProgramTape, memory: Memory, flops: list[int], held: int, *, is_step: bool) -> Iterator[ModuleEstimate]:
    """The calls of the model, of a step those inside it."""
    total, params = collections.Counter[Any](), collections.defaultdict[Any, list[torch.Tensor]](list)
    for op, count in zip(tape.ops, flops, strict=True):
        reads = [tape.attributes[v.op.name] for v in op.inputs() if v.op is not None and v.op.kind == "get_attr"]
        for call in forward_calls(op, tape):
            total[call] += count
            params[call] += [t for t in reads if isinstance(t, torch.nn.Parameter)]
    calls = {(call.fqn, call.index): call for call in tape.calls}
    for row in memory.rows[is_step:]:
        call, fqn = calls[row.fqn, row.index], row.fqn or ""
        place = _name(fqn) if is_step else fqn, row.type, row.depth - is_step
        yield ModuleEstimate(*place, _bytes(params[call]), row.saved, row.peak and row.peak + held, total[call])


# ---------------------------------------------------------------- what would fit


def _remedies(tr: Trace, model: torch.nn.Module, needs: Estimate, activations: int, updating: int) -> Iterator[Remedy]:
    """`activations`: the peak of what a step makes besides gradients; `updating`: those and what an optimizer makes."""
    gpu, whole = needs.gpu_bytes or 0, needs.buffer_bytes + needs.input_bytes
    sharded = needs.parameter_bytes + needs.optimizer_bytes
    alone = _checkpoints(tr, gpu - whole - sharded, gradients=True) if whole + sharded + updating <= gpu else None
    if alone is not None:
        yield dataclasses.replace(alone, peak_bytes=whole + sharded + max(alone.peak_bytes, updating))
    gathered = _gathered(tr, model)

    def of_rank(ranks: int, results: int) -> int:
        part = -(-(sharded + needs.gradient_bytes) // ranks) + gathered + results
        return whole + max(part, -(-(sharded + updating) // ranks))

    counts = [2**i for i in range(1, _MOST_RANKS.bit_length())] if gathered else []
    for n in counts:
        if of_rank(n, activations) <= gpu:
            yield Remedy(of_rank(n, activations), n)
            return
    if alone is not None or not counts:
        return
    half = next((n for n in counts if of_rank(n, 0) <= gpu // 2), _MOST_RANKS)
    for n in dict.fromkeys((half, _MOST_RANKS)):  # a search takes long
        both = _checkpoints(tr, gpu - of_rank(n, 0), gradients=False)
        if both is not None:
            n = next(n for n in counts if of_rank(n, both.peak_bytes) <= gpu)
            yield dataclasses.replace(both, peak_bytes=of_rank(n, both.peak_bytes), ranks=n)
            return


def _checkpoints(tr: Trace, budget: int, *, gradients: bool) -> Remedy | None:
    try:
        plan = checkpoint_plan(program_of(tr), budget, gradients=gradients)
    except ArgumentError:  # no backward, or a budget that checkpoints do not reach
        return None
    return Remedy(plan.peak_bytes, 1, tuple(map(_name, plan.fqns)), plan.flops)


def _gathered(tr: Trace, model: torch.nn.Module) -> int:
    """What a rank of FSDP2 has whole at one time: parameters, gradients of a group. 0 where FSDP2 cannot shard it."""
    try:
        groups = plan(model, tr.order, target_bytes=max(_bytes(model.parameters()) // _GROUPS, 1))
        memory = simulate(groups, tr, ranks=1, bandwidth=1.0, flops=1.0).memory
    except PlanError:
        return 0
    return memory["gathered parameters, at most"] + memory["gradients of a group, at most"]
