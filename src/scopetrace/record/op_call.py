"""One call of an op: what is known of the op, its arguments, and what it may write.

Data flow:
    an op -> OpFacts, looked up once
    op and arguments as Python passed them -> OpCall, with tape values for the tensors
    before torch runs an op that may write -> BeforeWrite -> after it: what it wrote, and what it moved
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx

from scopetrace._compat.ops import autocast_may_change, can_decompose, has_kernel_of_its_own, is_op, schema_of
from scopetrace._compat.symbols import to_expr
from scopetrace._compat.tensors import is_inference_of, requires_grad_of, storage_id, version_of
from scopetrace.infer.inference import may_infer
from scopetrace.infer.rules import is_elementwise
from scopetrace.ir.tape import Value, flat
from scopetrace.ops.functional_variants import MAY_WRITE_UNDECLARED, is_metadata_only
from scopetrace.record.builder import TapeBuilder
from scopetrace.record.data import READERS
from scopetrace.record.reads import FAST_PATH
from scopetrace.record.rewritten_ops import REWRITES
from scopetrace.record.values import layout_of

_OF_ONE_DTYPE = frozenset(
    {
        *("linear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "addmv", "dot", "vdot", "convolution"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    }
)
"""Ops of which the kernels raise for tensors of several dtypes, and torch's fake tensors do not."""


class OpFacts:
    """What recording needs to know of an op, looked up once: of one that is not torch's, once in a trace."""

    def __init__(self, func: Any) -> None:
        schema = schema_of(func)
        self.func = func  # also keeps its id from being used again
        collective = schema.name.startswith("c10d::")
        record: Any = lambda ops, *args: ops.collectives.record(func, args)  # noqa: E731
        self.rewrite = record if collective else REWRITES.get(func)
        self.reads = func in READERS
        self.inferable = may_infer(func)
        self.convolves = "conv" in schema.name
        self.is_custom = not schema.name.startswith(("aten::", "prim"))
        self.reshapes = torch.Tag.inplace_view in func.tags
        self.written = tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.is_written)
        self.positions = tuple(enumerate(schema.names))
        self.is_composite = can_decompose(func)
        """Whether it is a composition of others."""
        self.is_atomic = not self.is_custom and (not self.is_composite or has_kernel_of_its_own(func))
        """Whether autograd runs it as this op, and its schema says which results lie in the memory of an argument."""
        self.may_alias = not self.is_atomic or any(a.aliases for a in schema.arguments)
        self.updates = bool(self.written) and not any(r.is_written or r.is_out for r in schema.returns)
        """Whether it writes to arguments that it does not return, as batch_norm to its statistics."""
        self.in_place = torch.Tag.inplace in func.tags and is_elementwise(func)
        writes_one = torch.Tag.inplace in func.tags and len(self.written) == 1 and self.is_atomic
        self.keeps_layout = self.in_place or (writes_one and not (self.reshapes or is_metadata_only(func)))
        """Whether it is an op in place that changes nothing but elements of its first argument."""
        self.is_new = schema.name.startswith("aten::new_")
        """Whether it makes a tensor of the dtype and device of its first argument."""
        self.has_dtype = any(a.name == "dtype" and a.kwarg_only for a in schema.arguments)
        self.squeezes = schema.name.startswith("aten::squeeze")
        self.may_be_cast = autocast_may_change(func)
        self.is_fast_path = schema.name == FAST_PATH
        self.may_write_undeclared = schema.name in MAY_WRITE_UNDECLARED
        self.takes_one_dtype = schema.op_name in _OF_ONE_DTYPE


def facts_of(func: Any) -> OpFacts:
    """Those of an op; an op that is not torch's may go before the process does."""
    is_torchs = is_op(func) and func.namespace in ("aten", "prims")
    return _facts_of_torch(func) if is_torchs else OpFacts(func)


_facts_of_torch = functools.cache(OpFacts)


class OpCall:
    """One call of an op: what Python gave, and what of it goes on the tape."""

    __slots__ = ("args", "facts", "inputs", "kwargs", "python_arguments")

    def __init__(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.facts = facts
        self.python_arguments = args, kwargs
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.inputs: list[Value] = []
        """The values in `args` and `kwargs`, in order."""

    def fakes(self) -> list[torch.Tensor]:
        """The fake tensors of `inputs`."""
        return [v.fake for v in self.inputs]

    def written(self, positions: Iterable[tuple[int, str]]) -> list[Value]:
        """The values at these positions of the schema."""
        values: list[Value] = []
        for position, name in positions:
            a = self.args[position] if position < len(self.args) else self.kwargs.get(name)
            values += [v for v in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(v, Value)]
        return values

    def all_written(self, undeclared: Sequence[str]) -> list[Value]:
        """The values that it writes by its schema, and those of the parameters `undeclared`."""
        values = self.written(self.facts.written)
        if undeclared:
            values += self.written(p for p in self.facts.positions if p[1] in undeclared)
        return values

    def overlaps(self, undeclared: Sequence[str] = ()) -> bool:
        """Whether the op may read, by another of its inputs, memory that it writes to."""
        written = self.all_written(undeclared)
        return any(v.storage == target.storage and v is not target for target in written for v in self.inputs)

    def python_tensor(self, fake: torch.Tensor) -> torch.Tensor:
        """The tensor that Python passed and that the op returned, as `weight.to(weight.dtype)` does."""
        pairs = zip(tensors_in(self.python_arguments), self.inputs, strict=True)
        return next((t for t, value in pairs if value.fake is fake), fake)

    def takes_default_dtype(self, outputs: Any) -> bool:
        """Whether the result is floating and neither an input nor an argument says so."""
        if type(outputs) is not Value or any(v.fake.dtype.is_floating_point for v in self.inputs):
            return False
        operands = (*self.args, *self.python_arguments[1].values())
        return outputs.fake.dtype.is_floating_point and not any(type(a) is torch.dtype for a in operands)

    def refuse_other_dtypes(self, builder: TapeBuilder) -> None:
        """Raise as eager does where tensors are of several dtypes. On the meta device it does not."""
        fakes = [t for t in self.fakes() if t.device.type != "meta"]
        others = dict.fromkeys(t.dtype for t in fakes)
        if len(others) > 1:
            dtypes = " and ".join(map(str, others))
            hint = f"convert the input, as by x.to({fakes[-1].dtype}), or the model"
            with builder.run_by_torch(self.facts.func):
                raise RuntimeError(f"{self.facts.func} takes tensors of one dtype, and is given {dtypes}: {hint}")


class BeforeWrite:
    """What an op may change in its arguments, as it is before; `undeclared` are the parameters that it writes too."""

    __slots__ = ("_call", "_places", "_undeclared", "_versions", "fakes", "tracked")

    def __init__(self, call: OpCall, fakes: list[torch.Tensor], undeclared: tuple[str, ...]) -> None:
        self.fakes = fakes
        self.tracked: tuple[Value, ...] = ()
        """Of an op that writes: the inputs that require grad."""
        self._call = call
        self._undeclared = undeclared
        self._versions = [version_counter(t) for t in fakes]
        self._places: list[tuple[Value, int, Any]] = []
        if call.facts.written:
            self.tracked = tuple([v for v, t in zip(call.inputs, fakes, strict=True) if requires_grad_of(t)])
            targets = call.written(call.facts.written)
            self._places = [(v, storage_id(v.fake), layout_of(v.fake)) for v in targets]

    def moved(self) -> list[tuple[Value, Any]]:
        """The written values whose tensors got another storage or geometry, with their layout from before."""
        return [
            (value, layout)
            for value, storage, layout in self._places
            if storage_id(value.fake) != storage or to_expr(layout_of(value.fake)) != to_expr(layout)
        ]

    def is_undeclared_alone(self) -> bool:
        """Whether the op has only writes that its schema does not declare, which no version counter tells either."""
        is_alone = bool(self._undeclared) and not self._call.facts.written
        return is_alone and [version_counter(t) for t in self.fakes] == self._versions

    def written(self) -> tuple[Value, ...]:
        """What the op wrote: by its schema, by what is known of it, and by the version counters of what it read."""
        call = self._call
        values = call.all_written(self._undeclared)
        storages = {v.storage for v in values}  # views in these have the same version counter
        values += [
            value
            for value, t, old in zip(call.inputs, self.fakes, self._versions, strict=True)
            if version_counter(t) != old and value.storage not in storages
        ]
        return tuple(dict.fromkeys(values))


def version_counter(t: torch.Tensor) -> int:
    """How often a tensor was written; always -1 for one of inference mode, which does not count."""
    return -1 if is_inference_of(t) else version_of(t)


def tensors_in(x: Any) -> list[torch.Tensor]:
    """The tensors in an argument, or in several."""
    return [t for t in flat(x) if isinstance(t, torch.Tensor)]
