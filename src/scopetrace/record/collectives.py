"""Collectives of torch.distributed, recorded as functional ones.

Data flow:
    `dist.all_reduce(y)` -> `c10d.allreduce_`, whose schema says nothing of what it writes
    -> `_c10d_functional.all_reduce(y)` on the tape at once, and the rest as a Finish
    when its work is waited for, its memory is used, or the forward ends -> `wait_tensor`, `y.copy_`

So communication overlaps with what the model does before it waits, as in eager, and no rank waits where it did not.
As in eager, a collective has no gradient: what it writes keeps the history that it had.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from scopetrace._compat.collectives import Group, functional_collectives, recorded_work, unboxed
from scopetrace._compat.gradients import saved_storages
from scopetrace._compat.ops import schema_of
from scopetrace._compat.tensors import storage_id
from scopetrace.containers.structure import leaves
from scopetrace.record.values import ValueTable

Tensors = list[torch.Tensor]

Write = tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]
"""A tensor that a collective writes, and its new data made of the result of the functional op."""

Finish = Callable[[], None]
"""Records the wait for a collective under way, and its writes, if that was not done yet."""

Started = Iterable[tuple[torch.Tensor, list[Write]]]
"""The functional ops of a collective, each as (its result, what is written from it when that is there)."""


class CollectiveRecorder:
    """Records the ops of namespace c10d."""

    def __init__(
        self, values: ValueTable, recorded: Callable[[Callable[[], Any]], Any], pending: dict[int, Finish]
    ) -> None:
        """`recorded` calls a function and records the ops in it; `pending` gets what is under way, by storage."""
        self._builder, self._values = values.builder, values
        self._recorded, self._pending = recorded, pending
        self._works: list[Any] = []  # torch keeps only the C++ part of a work handle
        self._started: dict[Finish, None] = {}

    def record(self, func: Any, args: tuple[Any, ...]) -> Any:
        """What a c10d op gives to the model. Raises UnsupportedOpError where there is no functional form."""
        form = _FORMS.get(schema_of(func).op_name)
        operands = [unboxed(a) for a in args]
        problem = "has no functional form" if form is None else _problem(operands)
        if form is None or problem is not None:
            raise self._builder.refusal(f"a collective that {problem}", op=str(func), hint=_INSTEAD)
        with torch.no_grad():
            parts = self._recorded(lambda: list(form(functional_collectives(), *operands)))
        finish = self._finish_of(parts)
        self._started[finish] = None
        for target in [target for _, writes in parts for target, _ in writes]:
            self._check_history(target, str(func))
            self._pending[storage_id(self._values.fake_of(target))] = finish
        work = recorded_work(args[0] if isinstance(args[0], list) else [args[0]], finish)
        self._works.append(work)
        returned = schema_of(func).returns
        if not returned:
            finish()
            return None
        return (args[0], work.boxed()) if len(returned) == 2 else work.boxed()

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """At the end all is finished, also what was never waited for."""
        try:
            yield
            for finish in [*self._started]:
                finish()
        finally:  # Python's collector does not see through the C++ part of a work handle
            self._started.clear()
            self._works.clear()

    def _finish_of(self, parts: list[tuple[torch.Tensor, list[Write]]]) -> Finish:
        wait = functional_collectives().wait_tensor

        def run() -> None:
            for result, writes in parts:
                data = wait(result)
                for target, piece_of in writes:
                    target.copy_(piece_of(data))

        def finish() -> None:
            if finish not in self._started:
                return
            del self._started[finish]
            for storage in [storage for storage, other in self._pending.items() if other is finish]:
                del self._pending[storage]
            with torch.no_grad():
                self._recorded(run)

        return finish

    def _check_history(self, target: torch.Tensor, op: str) -> None:
        """Autograd does not see that a collective writes: in eager, backward computes with what was overwritten."""
        if not (torch.is_grad_enabled() and target.requires_grad):
            return
        self._builder.expect_history("a collective writes to a tensor that requires grad")
        fake = self._values.fake_of(target)
        same_memory = storage_id(fake)
        users = [o for o in self._builder.tape.ops if any(v.storage == same_memory for v in (*o.inputs(), *o.values()))]
        if same_memory in saved_storages([v.fake for o in users for v in o.values()]):
            raise self._builder.refusal(
                "a collective overwrites a tensor that autograd has saved for backward, which torch does not notice",
                op=op,
                hint="give it a copy, `y = y.clone()`; or trace under torch.no_grad()",
            )


_INSTEAD = (
    "use all_reduce, all_gather, reduce_scatter, all_to_all_single, broadcast, gather, scatter, send or recv, "
    "with equal sizes; functional collectives of torch.distributed; or name the module in leaf_modules="
)


def _problem(args: list[Any]) -> str | None:
    """Why these arguments of a collective have no functional form."""
    tensors = leaves(args, torch.Tensor)
    if any(isinstance(a, str) and a == "premul_sum" for a in args):
        return "scales before it sums (PREMUL_SUM)"
    if any(t.layout is not torch.strided for t in tensors):
        return "takes a sparse tensor"
    lists = [tensors for a in args if isinstance(a, list) for tensors in a if isinstance(tensors, list)]
    if any(len({t.numel() for t in tensors}) != 1 for tensors in lists):
        return "takes tensors of different sizes in a list"
    return None


def _like(target: torch.Tensor) -> Write:
    return target, lambda data: data if data.shape == target.shape else data.reshape(target.shape)


def _each(results: Tensors, targets: Tensors) -> Started:
    return ((result, [_like(t)]) for result, t in zip(results, targets, strict=True))


def _pieces(targets: Tensors) -> list[Write]:
    """Equal pieces of the result, one for each target."""
    return [_piece(t, i, len(targets)) for i, t in enumerate(targets)]


def _piece(target: torch.Tensor, index: int, count: int) -> Write:
    return target, lambda data: data.reshape(count, *target.shape)[index]


def _rows(t: torch.Tensor) -> torch.Tensor:
    """A tensor that can be concatenated along its first dimension."""
    return t if t.dim() else t.reshape(1)


def _flat(tensors: Tensors) -> torch.Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _reduce_scatter(ops: Any, outputs: Tensors, inputs: list[Tensors], group: Group, op: str, *_: Any) -> Started:
    return _each([ops.reduce_scatter_tensor(_flat(t), op, group.size, group.name) for t in inputs], outputs)


def _all_to_all_single(ops: Any, output: torch.Tensor, input: torch.Tensor, group: Group, *sizes: Any) -> Started:
    sides = zip(sizes, (output, input), strict=False)
    into, sent = (of_ranks or [t.size(0) // group.size] * group.size for of_ranks, t in sides)
    yield ops.all_to_all_single(input, into, sent, group.name), [_like(output)]


def _gather(ops: Any, outputs: list[Tensors], inputs: Tensors, group: Group, root: int, *_: Any) -> Started:
    result = ops.all_gather_into_tensor(_rows(inputs[0]), group.size, group.name)
    yield result, _pieces(outputs[0]) if group.rank == root else []


def _scatter(ops: Any, outputs: Tensors, inputs: list[Tensors], group: Group, root: int, *_: Any) -> Started:
    (output,) = outputs
    buffer = _flat(inputs[0]) if group.rank == root else output.new_zeros(group.size * output.numel())
    result = ops.broadcast(buffer, root, group.name)
    yield result, [_piece(output, group.rank, group.size)]


_FORMS: dict[str, Callable[..., Started]] = {
    "allreduce_": lambda ops, tensors, group, op, *_: _each(
        [ops.all_reduce(t, op, group.name) for t in tensors], tensors
    ),
    "allreduce_coalesced_": lambda ops, tensors, group, op, *_: _each(
        ops.all_reduce_coalesced(tensors, op, group.name), tensors
    ),
    "allgather_": lambda ops, outputs, inputs, group, *_: [
        (ops.all_gather_into_tensor(_rows(t), group.size, group.name), _pieces(into))
        for into, t in zip(outputs, inputs, strict=True)
    ],
    "_allgather_base_": lambda ops, output, input, group, *_: _each(
        [ops.all_gather_into_tensor(_rows(input), group.size, group.name)], [output]
    ),
    "reduce_scatter_": _reduce_scatter,
    "_reduce_scatter_base_": lambda ops, output, input, group, op, *_: _each(
        [ops.reduce_scatter_tensor(input, op, group.size, group.name)], [output]
    ),
    "alltoall_base_": _all_to_all_single,
    "broadcast_": lambda ops, tensors, group, root, index=0, *_: [
        (ops.broadcast(tensors[index], root, group.name), [_like(t) for t in tensors])
    ],
    "reduce_": lambda ops, tensors, group, op, root, index=0, *_: [
        (ops.all_reduce(tensors[index], op, group.name), [_like(tensors[index])] if group.rank == root else [])
    ],
    "gather_": _gather,
    "scatter_": _scatter,
    "send": lambda ops, tensors, group, to, tag: ((ops.isend(t, to, tag, group.name), []) for t in tensors),
    "recv_": lambda ops, tensors, group, source, tag: _each(
        [ops.irecv(t, source, tag, group.name) for t in tensors], tensors
    ),
    # no rank has the sum before each has given its part
    "barrier": lambda ops, tensor, group, *_: [
        (ops.all_reduce(torch.zeros(1, device=tensor.device), "sum", group.name), [])
    ],
}
"""By name of a c10d op; they get the functional collectives and the arguments of the op."""
