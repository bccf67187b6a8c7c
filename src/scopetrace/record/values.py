"""Which value of the tape each tensor is.

Data flow:
    a tensor that an op returned -> ValueTable.new -> its Value
    any other tensor of the model, the trace or Python -> ValueTable.value_of -> the Value that stands for it
    one over memory that torch did not make, as `torch.from_numpy` gives -> its data, when it is read
    at the end of the forward, and once more when Python's state is put back -> other data: an array has changed
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from scopetrace._compat.gradients import node_of
from scopetrace._compat.ops import unwrapped
from scopetrace._compat.symbols import to_expr
from scopetrace._compat.tensors import (
    FakeFactory,
    FakeTensor,
    in_inference_mode,
    is_conj_of,
    is_inference_of,
    is_neg_of,
    offset_of,
    requires_grad_of,
    storage_id,
    stride_of,
    without_dispatch,
)
from scopetrace.containers.structure import leaves
from scopetrace.errors import ControlFlowError, ForeignTensorError, UnsupportedOpError
from scopetrace.infer.inference import Inference
from scopetrace.infer.rules import Identity, Outputs
from scopetrace.ir.guards import NO_CALL
from scopetrace.ir.tape import Op, RecordedTape, Value
from scopetrace.ops.functional_variants import is_factory
from scopetrace.record.builder import TapeBuilder, place_of
from scopetrace.record.model import Model

_aten = torch.ops.aten
ForeignTensor = tuple[Op, torch.Tensor, torch.Tensor]
"""A tensor whose memory torch did not make, as an op reads it: the op, the tensor, and its bytes then, u8[n]."""
_FOREIGN = "make tensors in the thread and trace that use them; a thread started in forward is not recorded"


def _of_same_history(values: Sequence[Value], t: torch.Tensor) -> Value:
    """Of values that are one view, that with the history of `t`, which autograd has saved and gives as a new tensor.

    Where a checkpointed region was computed again, its tensors have nodes of the same kinds in place of the same nodes.
    """
    node, nodes = node_of(t), [(v, node_of(v.fake)) for v in values if v.fake.requires_grad]
    same = [v for v, n in nodes if n is node] or [v for v, n in nodes if type(n) is type(node)]
    return next(iter(same), values[0])


class ValueTable:
    """Which value of the tape a tensor is.

    A tensor is known by its identity. Python also meets tensors that no op returned: C++ wraps a tensor anew, `.data`
    and autograd make aliases, and models hold parameters. These are found by storage and geometry, or get an op of
    their own (`detach`, `as_strided`, `get_attr`).
    """

    def __init__(self, builder: TapeBuilder, factory: FakeFactory, inference: Inference, model: Model) -> None:
        self.builder, self.factory, self.inference, self.model = builder, factory, inference, model
        self.by_id: dict[int, Value] = {}
        """By the id of a tensor. Only good where the tensor still has the storage of its value; see `value_of`."""
        self.examples: dict[Value, torch.Tensor] = {}
        """The example inputs by their placeholders."""
        self._tape = builder.tape
        self._by_storage: dict[int, list[Value]] = {}
        self._keep: list[torch.Tensor | torch.UntypedStorage] = []  # their ids must not be used again in this trace
        self.same: list[tuple[Value, Value]] = []
        """Of each op that returned the tensor it was given, as `x.to(x.dtype)` does: its result, and what it took."""
        self.transformed = False
        """Whether a transform such as torch.vmap took a tensor of the model itself as an argument."""
        self._given: set[int] = set()  # the ids of the inputs
        self.factory_leaves: list[torch.Tensor] = []
        """The results of ops such as `torch.ones` that require grad."""
        self.new_tensors: list[torch.Tensor] = []
        """What is a leaf too where it requires grad: `torch.tensor([...])`, `x.new_ones(...)`, `y.requires_grad_()`."""
        self._of_bodies: set[int] = set()  # the storages that bodies of higher-order ops made
        self.foreign: list[ForeignTensor] = []
        self._replaced: set[int] = set()  # the storages that tensors of the model had before they got another in place

    def new(self, t: torch.Tensor, slot: int, storage: int, key: int | None) -> Value:
        """The value of a tensor that an op returned; the op is to be appended next."""
        value = Value(t, slot, storage, key)
        self.by_id[id(t)] = value
        self._by_storage.setdefault(storage, []).append(value)
        return value

    def new_result(self, t: torch.Tensor, slot: int = 0) -> Value:
        """As `new`, with the storage and key of the tensor."""
        return self.new(t, slot, storage_id(t), self.inference.key_of(t))

    def new_results(self, out: Any, slot: int = 0) -> Any:
        """What an op returned, with a new value in place of each tensor."""
        if isinstance(out, (list, tuple)):
            return type(out)([self.new_results(t, slot) for slot, t in enumerate(out)])
        return self.new_result(out, slot) if isinstance(out, torch.Tensor) else out

    def new_same(self, t: torch.Tensor, slot: int, before: Value, *, is_written: bool = False) -> Value:
        """As `new`, where the op returns a tensor that it was given, the value of which is `before`."""
        value = self.new(t, slot, before.storage, self.inference.current_key(before))
        if not is_written:
            self.same.append((value, before))
        return value

    def new_inferred(
        self, outputs: Outputs, fakes: Sequence[torch.Tensor | None], inputs: Sequence[Value], *, is_written: bool
    ) -> list[Value | None]:
        """As `new` for each result that was made from metadata alone; `is_written` says that the op writes."""
        results: list[Value | None] = []
        for slot, (meta, fake) in enumerate(zip(outputs.tensors, fakes, strict=True)):
            value = None
            if isinstance(meta, Identity):
                value = self.new_same(inputs[meta.input].fake, slot, inputs[meta.input], is_written=is_written)
                value.autograd_placeholder = inputs[meta.input].autograd_placeholder
            elif meta is not None and fake is not None:
                value = self.new(fake, slot, storage_id(fake), meta.key)
                value.autograd_placeholder = meta.requires_grad
            results.append(value)
        return results

    def leave(self, start: int, results: Any) -> None:
        """At the end of a call: a tensor is again what it was outside, before the entries of `same` from `start` on.

        That a norm reads `x.to(torch.float32)` of its input is no matter of who reads `x` after it.
        """
        kept = leaves(results, Value)
        for value, before in reversed(self.same[start:]):
            if self.by_id.get(id(value.fake)) is value and value not in kept:
                self.by_id[id(value.fake)] = before

    def append_op(self, target: Any, args: tuple[Any, ...], out: torch.Tensor) -> Value:
        """Append an op of one result to the tape."""
        value = self.new_result(out)
        self.builder.append("call_function", target, args, {}, value)
        return value

    def append_input(self, name: str, fake: torch.Tensor, example: torch.Tensor) -> Value:
        """Append a placeholder. A tensor given twice has two values, and the ops read the first."""
        first = self.by_id.get(id(fake))
        value = self.new_result(fake)
        self.builder.append("placeholder", name, (), {}, value)
        self._given.add(id(fake))
        self.by_id[id(fake)] = first or value
        self._tape.inputs.append(value)
        self.examples[value] = example
        return value

    def append_body_input(self, name: str, x: Any) -> None:
        """Append a placeholder of the body that is being recorded: a new tensor or a number."""
        self.builder.append("placeholder", name, (), {}, self.new_results(x))

    # ---------------------------------------------------------------- values of tensors

    def value_of(self, t: torch.Tensor) -> Value:
        """The value of any tensor that reaches an op or a module call.

        Raises ForeignTensorError for a tensor that another trace or thread made, UnsupportedOpError for a subclass.
        """
        t = unwrapped(t)
        value = self.known(t)
        if value is not None:
            return value
        if isinstance(t, FakeTensor) and (t.fake_mode is self.factory.mode or self.model.owner(t) is None):
            value = self._alias(t)
        elif type(t) in (torch.Tensor, FakeTensor) or isinstance(t, torch.nn.Parameter):
            value = self._adopt(t)
        else:
            problem = f"a {type(t).__module__}.{type(t).__name__} reached the trace"
            hint = "pass plain tensors; tensor subclasses cannot be traced"
            raise UnsupportedOpError(problem, **self.builder.where(), hint=hint)
        self.by_id[id(t)] = value
        self._keep.append(t)
        return value

    def known(self, t: torch.Tensor) -> Value | None:
        """The value of a tensor; None for a result of the op that torch is running."""
        value = self.by_id.get(id(unwrapped(t)))
        if value is not None and isinstance(t, FakeTensor) and value.storage != storage_id(t):
            return None  # `t.data = other` has given it another storage, unseen by the dispatcher
        return value

    def in_storage(self, storage: int) -> list[Value]:
        """The values that lie in a storage, in the order in which they were made."""
        return self._by_storage.get(storage, [])

    def sharing(self, t: torch.Tensor) -> list[Value]:
        """The values in the memory of a tensor that the forward has."""
        return self.in_storage(self.value_of(t).storage)

    def made_leaves(self) -> list[torch.Tensor]:
        """What the forward has made that requires grad by itself, and not by what was written into it."""
        ops = self._tape.ops if self.new_tensors else ()
        written = {v.storage for op in ops if op.grad and op.tracked for v in op.writes}
        new = [t for t in self.new_tensors if requires_grad_of(t) and self.value_of(t).storage not in written]
        return [*self.factory_leaves, *new]

    def names_of(self, t: torch.Tensor) -> list[Value]:
        """All values that are this tensor: each op that returns or writes its argument adds one."""
        return [v for v in self.sharing(t) if v.fake is self.value_of(t).fake]

    def fake_of(self, t: torch.Tensor) -> torch.Tensor:
        """The fake tensor of this trace for a known tensor; `t` itself where it is one."""
        if isinstance(t, FakeTensor) and t.fake_mode is self.factory.mode:
            return t
        return self.by_id[id(unwrapped(t))].fake

    def bound_value(self, t: torch.Tensor) -> Value | None:
        """The value of a tensor that the forward bound to an attribute; None for one that is not of this trace.

        Raises ControlFlowError for a tensor of the body of a higher-order op.
        """
        if not isinstance(t, FakeTensor) and self.model.owner(t) is not None:
            return self.value_of(t)
        value = self.by_id.get(id(t))
        if value is None and isinstance(t, FakeTensor) and storage_id(t) in self._of_bodies:
            raise body_error("a body binds one of its tensors to an attribute of a module", self._tape.root.path)
        return None if value is None else self.value_of(t)

    def _alias(self, t: FakeTensor) -> Value:
        """The value of a fake tensor that no op returned, as C++ makes for factories and autograd."""
        if t.fake_mode is not self.factory.mode:
            raise ForeignTensorError("a fake tensor of another trace was used", **self.builder.where(), hint=_FOREIGN)
        self._refuse_replaced(t)
        real = self.factory.real_of(t)
        if real is not None and storage_id(t) not in self._by_storage:
            self.value_of(real)
        same_memory = self.in_storage(storage_id(t))
        geometry = geometry_key(t)
        same = [v for v in reversed(same_memory) if geometry_key(v.fake) == geometry]
        if same:
            value = _of_same_history(same, t) if t.requires_grad and len(same) > 1 else same[0]
            is_new = value.op.kind == "call_function" and (not value.op.inputs() or is_factory(value.op))
            if len(same_memory) == 1 and value.fake.is_leaf and not value.fake.requires_grad and is_new:
                self._keep.append(value.fake)
                value.fake = t  # torch.ones(2) is another object than the op gave, and may require grad
                if t.requires_grad:
                    self.factory_leaves.append(t)
            # `.data` of a tensor that requires grad is another tensor for autograd
            shared = t.requires_grad or not value.fake.requires_grad
            return value if shared else self.append_op(_aten.detach.default, (value,), t)
        if not same_memory:
            raise ForeignTensorError(
                "a tensor was used whose making was not recorded", **self.builder.where(), hint=_FOREIGN
            )
        base = same_memory[-1]
        if base.fake.dtype != t.dtype:
            raise UnsupportedOpError("a view of another dtype was made outside the dispatcher", **self.builder.where())
        return self.append_op(_aten.as_strided.default, (base, list(t.size()), list(t.stride()), t.storage_offset()), t)

    def _adopt(self, real: torch.Tensor) -> Value:
        """The value of a parameter, buffer or attribute of the model, or of a constant from a closure or global."""
        owner = self.model.owner(real)
        if owner is not None:
            name = owner[0]
            self._tape.owners[name] = owner[1:]
            self._tape.attributes[name] = real
        else:
            wanted = self.model.state_names.get(id(real), "")
            name = self._tape.add_constant(real, self.model.tensor_names, wanted)
        fake = self.factory.from_real(real)
        if owner is None:
            self._refuse_replaced(fake)
        self._keep.append(real)
        value = self.new_result(fake)
        value.real = real
        self.builder.append("get_attr", name, (), {}, value)
        if _is_foreign(real):
            self.foreign.append((value.op, real, _data_of(real)))
        return value

    def lift_fresh(self, real: torch.Tensor) -> torch.Tensor:
        """`torch.tensor([...])` in a forward: a constant that each run copies."""
        source = self.by_id.get(id(real))
        if source is None:
            source = self.by_id[id(real)] = self._adopt(real)
        new = self.inference.like(source.fake)
        self.append_op(_aten.lift_fresh_copy.default, (source,), new)
        self.new_tensors.append(new)
        return new

    # ---------------------------------------------------------------- aliases that Python makes

    def detach_alias(self, t: FakeTensor) -> None:
        """Give a detached alias a value of its own: `x.data.t_()` changes the shape of `x.data`, not that of x."""
        value = self.value_of(t)
        if value.fake is not t and value.fake.layout is torch.strided:
            self.append_op(_aten.detach.default, (value,), t)

    def detach_result_alias(self, t: torch.Tensor) -> None:
        """Give a result of the program a value of its own where it is `.data` of another tensor."""
        if not isinstance(t, FakeTensor):
            return
        value = self.value_of(t)
        if value.op.kind in ("placeholder", "get_attr") or value.op.target is _aten.detach.default:
            self.detach_alias(t)

    def data_source(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor whose `.data` is to be read for `t.data`.

        For a tensor of the model that got another storage in place, that is its present fake tensor. A buffer is read
        as a fake tensor too where autograd is on: `self.mean.data.add_(x)` must not give it a history.
        """
        if isinstance(t, FakeTensor):
            return t
        if torch.is_grad_enabled() and not t.requires_grad and t.is_floating_point() and self.model.owner(t):
            return self.value_of(t).fake
        value = self.by_id.get(id(t)) if self._replaced else None
        return t if value is None or value.real is not None else value.fake

    def is_outside(self, t: torch.Tensor) -> bool:
        """Whether a tensor is an input, or real: of the model, or from a closure or global."""
        return self.is_given(t) or self.model.owner(unwrapped(t)) is not None

    def is_state(self, t: torch.Tensor) -> bool:
        """Whether a real tensor belongs to an optimizer: its state, or a setting such as the learning rate."""
        return id(t) in self.model.state_names

    def is_given(self, t: torch.Tensor) -> bool:
        """Whether a tensor was there before the forward ran."""
        t = unwrapped(t)
        return not isinstance(t, FakeTensor) or id(t) in self._given

    def are_one_view(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether both are the same view of the same storage."""
        first, second = self.value_of(a), self.value_of(b)
        return first.storage == second.storage and geometry_key(first.fake) == geometry_key(second.fake)

    # ---------------------------------------------------------------- tensors that change in place

    def keep_memory(self, tensors: Iterable[torch.Tensor]) -> None:
        """Before some tensors get other memory in place: no new tensor may get the storage that their values have."""
        self._keep += [t.untyped_storage() for t in tensors if t.layout is torch.strided]

    def leave_memory(self, t: torch.Tensor) -> None:
        """Before `t.data = new`, of a tensor made in the trace: its value keeps the memory, sizes and dtype it has."""
        self.keep_memory([t])
        self.freeze(self.value_of(t), layout_of(t))
        del self.by_id[id(t)]

    def freeze(self, value: Value, layout: tuple[Any, ...]) -> None:
        """After an op gave the tensor of `value` another shape in place: the value keeps what it was before.

        `layout` is its `layout_of` from before the op.
        """
        offset, size, stride, dtype = layout
        changed = value.fake
        with without_dispatch(), in_inference_mode(is_inference_of(changed)), torch.no_grad():
            before = self.factory.fresh(size, stride, dtype, changed.device, changed.requires_grad)
        value.key = None
        for same in self.in_storage(value.storage):
            if same.fake is changed:
                same.fake = before
                same.offset = offset
                if same.op.kind == "placeholder":  # of a tensor that is two of the inputs
                    same.key = None
        self.by_id[id(changed)] = value

    def follow(self, tensors: list[torch.Tensor], fakes: list[torch.Tensor], op: str) -> None:
        """After an op gave some of `fakes` another storage or shape in place: the model's own tensors, `tensors`, too.

        Raises UnsupportedOpError where Python would go on to see the sizes and strides that a tensor had before.
        """
        for t, fake in zip(tensors, fakes, strict=True):
            before, current = self.by_id[id(t)], self.by_id[id(fake)]
            if t is fake or before is current:
                continue
            if _shape_of(t) != _shape_of(fake):
                owner = self.model.owner(t)
                name = owner[0] if owner else "a constant"
                problem = f"{name}, a tensor of the model, gets other sizes or strides in place"
                hint = "bind a new tensor: `self.name = self.name.t()`"
                raise self.builder.refusal(problem, op=op, hint=hint)
            self._replaced.add(before.storage)
            self.by_id[id(t)] = current

    def _refuse_replaced(self, t: torch.Tensor) -> None:
        """A tensor that Python made without an op from one of the model's lies in the storage that it had at first."""
        if self._replaced and storage_id(t) in self._replaced:
            problem = "a tensor of the model got other memory, and is read in a way that shows the memory before"
            hint = "read the tensor itself, or its detach()"
            raise UnsupportedOpError(problem, **self.builder.where(), hint=hint)

    def forget(self, values: Collection[Value], storages: set[int]) -> None:
        """Values of a body are none outside: `values`, of which `storages` are of the body alone."""
        forgotten = [key for key, v in self.by_id.items() if v in values]
        for key in forgotten:
            del self.by_id[key]
        for tensors in (self.new_tensors, self.factory_leaves):
            tensors[:] = [t for t in tensors if id(t) not in forgotten]
        for storage in {v.storage for v in values}.intersection(self._by_storage):
            self._by_storage[storage] = [v for v in self._by_storage[storage] if v not in values]
        self._of_bodies |= storages


def body_error(problem: str, module: str) -> ControlFlowError:
    """The error for a body of a higher-order op that does what the tape cannot say."""
    hint = "let the body return what others need, and do the rest outside"
    return ControlFlowError(f"torch.cond and its kind: {problem}", module=module, hint=hint)


def geometry_key(t: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors of one storage that are the same view of it."""
    if t.layout is not torch.strided:
        return (id(t),)
    return to_expr(offset_of(t)), to_expr(t.size()), to_expr(stride_of(t)), t.dtype, is_conj_of(t), is_neg_of(t)


def layout_of(t: torch.Tensor) -> tuple[Any, ...]:
    """Storage offset, size, stride and dtype of a tensor."""
    strided = t.layout is torch.strided
    return (offset_of(t) if strided else 0, t.size(), stride_of(t) if strided else (), t.dtype)


def _shape_of(t: torch.Tensor) -> tuple[Any, ...]:
    return t.dtype, to_expr(t.size()), to_expr(t.stride())


# Memory that torch did not make: what Python does to it is no op -----------------------------------------------------


def refuse_changes(tensors: Sequence[ForeignTensor]) -> None:
    """Raise UnsupportedOpError where Python has changed the data of one since its op read it."""
    for op, t, data in tensors:
        if not torch.equal(_data_of(t), data):
            _refuse(op, "the forward changes a NumPy array in whose memory this tensor lies")


def refuse_writes(tensors: Sequence[ForeignTensor], tape: RecordedTape) -> None:
    """Raise UnsupportedOpError where an op writes to the memory of one, and the forward may read it as an array."""
    written = tape.written_storages()
    for op, t, _ in tensors:
        lifted = (o.result for o in tape.ops if o.target is _aten.lift_fresh_copy.default and o.args[0] is op.result)
        if next(lifted, op.result).storage in written:  # lifted: what `torch.from_numpy` gave
            start, stop = _bytes_of(t)
            others = [_bytes_of(other) for other_op, other, _ in tensors if other_op is not op]
            if any(a < stop and start < b for a, b in (*others, *_arrays_read(tape))):
                _refuse(op, "the forward writes to this tensor, which lies in the memory of a NumPy array")


def _refuse(op: Op, what: str) -> None:
    hint = "keep it as a tensor alone, self.a = torch.from_numpy(a).clone() in __init__, and change it by ops of torch"
    raise UnsupportedOpError(f"{what}: {op.name}", **{**place_of(op), "op": "torch.from_numpy"}, hint=hint)


def _is_foreign(t: torch.Tensor) -> bool:
    """Whether torch did not make the memory of a tensor. Weights may be a file that is mapped."""
    is_plain = t.layout is torch.strided and t.device.type == "cpu" and not isinstance(t, torch.nn.Parameter)
    return is_plain and not t.untyped_storage().resizable()


def _data_of(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: u8[n]."""
    with without_dispatch(), torch.no_grad():
        return t.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _bytes_of(t: torch.Tensor) -> tuple[int, int]:
    storage = t.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _arrays_read(tape: RecordedTape) -> Iterator[tuple[int, int]]:
    """The addresses of the arrays that the forward read."""
    for guard in tape.guards:
        array: Any = None if guard.source.kind == "input" else guard.source.current(NO_CALL)
        if hasattr(array, "__array_interface__"):
            start = array.__array_interface__["data"][0]
            yield start, start + array.nbytes
