"""Runs Python functions on the fake tensors of values, and hands the ops that they call to a tape.

Data flow:
    values -> their fake tensors -> the function runs under a mode -> each op, with values again -> `append`
    arguments of an op -> which of them it writes, and what decides what the op does with them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from scopetrace._compat.ops import PreDispatchMode, dispatching_to, is_op, schema_of, with_mode
from scopetrace._compat.shape_env import WatchedShapeEnv
from scopetrace._compat.symbols import Symbolic, to_expr
from scopetrace._compat.tensors import FakeTensor, FakeTensorMode, storage_id
from scopetrace.containers.structure import leaves, map_structure
from scopetrace.functionalization.emitter import Emitter
from scopetrace.ir.tape import BodyTape, Op, Value, values_in
from scopetrace.ops.functional_variants import by_name, undeclared_writes
from scopetrace.ops.history import can_require_grad
from scopetrace.program.graph import fakes_of


def written_by(func: Any, args: Any, kwargs: Any) -> list[Value]:
    """The values that an op writes."""
    schema = schema_of(func)
    names = {*schema.written, *undeclared_writes(func, args, kwargs)}
    arguments = by_name(func, args, kwargs) if names else {}
    return values_in([arguments.get(name) for name in schema.names if name in names])


def append_op(emitter: Emitter, origin: Op, func: Any, args: Any, kwargs: Any) -> Any:
    """Append an op whose results are inferred; returns them."""
    writes, ops = written_by(func, args, kwargs) if is_op(func) else [], emitter.tape.ops
    outputs = emitter.run(origin, func, args, kwargs)
    if writes:
        known = emitter.with_history
        tracked = tuple([v for v in values_in((args, kwargs)) if v.fake.requires_grad or v.storage in known])
        ops[-1] = ops[-1].replace(writes=tuple(writes), tracked=tracked).take_values()
        if origin.grad and tracked:
            known |= {v.storage for v in writes if can_require_grad(v)}
    return outputs


def makes_numbers(env: WatchedShapeEnv | None) -> bool:
    """Whether an op that ran on fake tensors made a number that depends on data, which is forgotten."""
    pending = [] if env is None else env.pending_fresh_unbacked_symbols
    count = len(pending)
    pending.clear()
    return count > 0


def described(x: Any, storages: dict[int, int]) -> Any:
    """What decides what an op does with arguments: their metadata, the memory that they share, and constants.

    `storages` gets a number for each storage, in the order in which they are met.
    """
    if isinstance(x, Value):
        t = x.fake
        place = storages.setdefault(x.storage, len(storages))
        return place, *layout_of(t), t.device, t.layout, t.requires_grad, x.requires_grad
    if isinstance(x, BodyTape):
        return described(leaves(x.outputs, (Value, *Symbolic)), {})
    if isinstance(x, (list, tuple)):
        return [described(item, storages) for item in x]
    if isinstance(x, dict):
        return {key: described(item, storages) for key, item in x.items()}
    return type(x), to_expr(x) if isinstance(x, Symbolic) else x


def layout_of(t: torch.Tensor) -> tuple[Any, ...]:
    """Sizes, strides and offset, as expressions, and dtype."""
    place = (to_expr(t.stride()), to_expr(t.storage_offset())) if t.layout is torch.strided else ()
    return to_expr(tuple(t.size())), place, t.dtype


class FakeRun:
    """What values the tensors of a run are."""

    def __init__(self, mode: FakeTensorMode | None, own_tensor: Callable[[torch.Tensor], Value]) -> None:
        """`own_tensor` gives the value of a real tensor that a function holds."""
        assert mode is not None
        self.mode, self._own_tensor = mode, own_tensor
        self._by_id: dict[int, tuple[torch.Tensor, Value]] = {}  # the tensors too, so that no id is used again
        self._ops: PreDispatchMode | None = None

    def register(self, values: Iterable[Value], real: torch.Tensor | None = None) -> None:
        """Know these values by their fake tensors, or by a real one."""
        self._by_id.update((id(t), (t, v)) for v in values for t in (v.fake, real) if t is not None)

    def run(
        self, fn: Any, args: Any, kwargs: Any, grad: bool, append: Callable[..., Any], refuse: Callable[[str], Any]
    ) -> Any:
        """What `fn` gives for values. `append(op, args, kwargs)` gives results, `refuse` gets what else it calls."""

        def on_op(func: Any, args: Any, kwargs: Any) -> Any:
            outputs = append(func, *self.lifted((args, kwargs)))
            self.register(values_in(outputs))
            return fakes_of(outputs)

        self._ops = PreDispatchMode(on_op, lambda hop, args, kwargs: refuse(f"calls {hop}"))
        with dispatching_to(self._ops, self.mode), torch.set_grad_enabled(grad):
            return self.lifted(fn(*fakes_of(args), **fakes_of(kwargs)))

    def call(self, fn: Any, args: Any, kwargs: Any) -> Any:
        """What `fn` gives for values, called in `append`: the ops that it calls go there too."""
        assert self._ops is not None
        return self.lifted(with_mode(self._ops, lambda: fn(*fakes_of(args), **fakes_of(kwargs))))

    def lifted(self, x: Any) -> Any:
        """A structure with values for tensors."""
        return map_structure(lambda t: self._known(t) or self._own_tensor(t), x, torch.Tensor)

    def _known(self, t: torch.Tensor) -> Value | None:
        """The value of a tensor that ran through torch, which may wrap it anew: by identity, else by its memory."""
        if id(t) in self._by_id or not isinstance(t, FakeTensor):
            return self._by_id.get(id(t), (t, None))[1]
        where = storage_id(t)
        same = (v for fake, v in reversed(self._by_id.values()) if storage_id(fake) == where)
        value = next(v for v in same if layout_of(v.fake) == layout_of(t))
        self.register([value], t)
        return value

    def tensors_of(self, value: Value) -> list[torch.Tensor]:
        """The tensors that stand for a value in the run."""
        return [t for t, v in self._by_id.values() if v is value]
