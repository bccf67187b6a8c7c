"""Writing the tape: ops with their place, and the value of every tensor that turns up."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import torch

from scopetrace._compat.dispatch import unwrapped
from scopetrace._compat.symbols import to_expr
from scopetrace._compat.tensors import FakeFactory, FakeTensor, storage_id, without_dispatch
from scopetrace.errors import ForeignTensorError, UnsupportedOpError
from scopetrace.infer import results
from scopetrace.ir.frames import capture_frames, source_of
from scopetrace.ir.scopes import Scope, TracingState
from scopetrace.ir.tape import Call, Frames, Op, RecordedTape, Value
from scopetrace.record.model import Model

_aten = torch.ops.aten
_Parameter = torch.nn.Parameter
_FOREIGN = "make tensors in the thread and trace that use them; a thread started in forward is not recorded"


class TapeWriter:
    """The tape under recording, and what is known of its tensors."""

    def __init__(self, model: Model, root: Scope, *, exact_autograd: bool) -> None:
        self.factory = FakeFactory()
        shape_env, mode = self.factory.shape_env, self.factory.mode
        self.tape = RecordedTape(root, shape_env=shape_env, fake_mode=mode, exact_autograd=exact_autograd)
        self.model = model
        self.state = TracingState(root)
        self.call: Call | None = None
        self.boundary: Any = None  # the code that runs a module call; frames outside it belong to the caller
        self._keys = results.Keys()
        self._by_id: dict[int, Value] = {}
        self._by_storage: dict[int, list[Value]] = {}
        self._keep: list[torch.Tensor] = []
        self._constants = 0
        self._inner: set[int] = set()  # the storages that bodies of higher-order ops made
        self._of_data: dict[int, torch.Tensor] = {}  # what `.data` gave
        self._given: set[int] = set()  # the ids of the inputs
        self._left: set[int] = set()  # the storages of tensors of the model that got other memory in place
        self.broken: str | None = None  # what a body did that the tape cannot say
        self.positions = itertools.count()  # of module calls

    def _append(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op:
        frames = capture_frames(self.call.frames if self.call else (), self.boundary)
        op = Op(kind, target, args, kwargs, None, self.state.current_scope, self.call, frames, torch.is_grad_enabled())
        self.tape.ops.append(op)
        return op

    def _register(self, out: Any, op: Op) -> Any:
        """Tape values for what an op returned."""
        if isinstance(out, (list, tuple)):
            return type(out)([self._register_one(t, op, slot) for slot, t in enumerate(out)])
        return self._register_one(out, op, 0)

    def _register_one(self, t: Any, op: Op, slot: int) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        value = Value(t, op, slot, storage_id(t), self._keys.of(t))
        self._by_id[id(t)] = value
        self._by_storage.setdefault(value.storage, []).append(value)
        return value

    # ---------------------------------------------------------------- values

    def value_of(self, t: torch.Tensor) -> Value:
        """The tape value of any tensor that reaches an op or a module call.

        Raises ForeignTensorError for tensors that another trace or thread made.
        """
        t = unwrapped(t)
        found = self._by_id.get(id(t))
        if found is not None and not (isinstance(t, FakeTensor) and found.storage != storage_id(t)):
            return found  # `t.data = other` gives a tensor other memory, unseen by the dispatcher
        if isinstance(t, FakeTensor) and (t.fake_mode is self.factory.mode or self.model.owner(t) is None):
            value = self._alias(t)
        elif type(t) in (torch.Tensor, FakeTensor) or isinstance(t, _Parameter):
            value = self._adopt(t)
        else:
            raise UnsupportedOpError(
                f"a {type(t).__module__}.{type(t).__name__} reached the trace",
                **self.where(),
                hint="pass plain tensors; tensor subclasses cannot be traced",
            )
        self._by_id[id(t)] = value
        self._keep.append(t)
        return value

    def _alias(self, t: FakeTensor) -> Value:
        """The value of a tensor that C++ wrapped anew, as factories and autograd do."""
        if t.fake_mode is not self.factory.mode:
            raise ForeignTensorError("a fake tensor of another trace was used", **self.where(), hint=_FOREIGN)
        self._refuse_left(t)
        real = self.factory.real_of(t)
        if real is not None and storage_id(t) not in self._by_storage:
            self.value_of(real)
        same_memory = self._by_storage.get(storage_id(t), [])
        geometry = geometry_key(t)
        for value in reversed(same_memory):
            if geometry_key(value.fake) == geometry:
                return self._detached(t, value)
        if not same_memory:
            raise ForeignTensorError("a tensor was used whose making was not recorded", **self.where(), hint=_FOREIGN)
        base = same_memory[-1]
        if base.fake.dtype != t.dtype:
            raise UnsupportedOpError("a view of another dtype was made outside the dispatcher", **self.where())
        op = self._append(
            "call_function",
            _aten.as_strided.default,
            (base, list(t.size()), list(t.stride()), t.storage_offset()),
            {},
        )
        made: Value = self._register_one(t, op, 0)
        op.outputs = made
        return made

    def _detached(self, t: FakeTensor, value: Value) -> Value:
        """`.data` of a tensor that requires grad is another tensor for autograd."""
        return value if t.requires_grad or not value.fake.requires_grad else self._alias_of(value, t)

    def set_apart(self, t: FakeTensor) -> None:
        """Before an op in place: `x.data.t_()` changes the shape of `x.data`, not of x, and so with its history."""
        value = self.value_of(t)
        if value.fake is not t and value.fake.layout is torch.strided:
            self._alias_of(value, t)

    def tell_apart(self, t: torch.Tensor) -> None:
        """Before a tensor becomes a result: `x.data` is not x itself, though the tape has one value for both."""
        if isinstance(t, FakeTensor):
            op = self.value_of(t).op
            if op.kind in ("placeholder", "get_attr") or op.target is _aten.detach.default:
                self.set_apart(t)

    def _alias_of(self, value: Value, t: FakeTensor) -> Value:
        op = self._append("call_function", _aten.detach.default, (value,), {})
        made: Value = self._register_one(t, op, 0)
        op.outputs = made
        return made

    def _adopt(self, real: torch.Tensor) -> Value:
        """A parameter, buffer or attribute of the model; or a tensor from a closure or global."""
        owner = self.model.owner(real)
        if owner is not None:
            name = owner[0]
            self.tape.owners[name] = owner[1:]
        else:
            name = f"_tensor_constant{self._constants}"
            self._constants += 1
        fake = self.factory.from_real(real)
        if owner is None:
            self._refuse_left(fake)
        op = self._append("get_attr", name, (), {})
        self.tape.attributes[name] = real
        self._keep.append(real)
        value: Value = self._register_one(fake, op, 0)
        value.real = real
        op.outputs = value
        return value

    def _lift_fresh(self, real: torch.Tensor) -> torch.Tensor:
        """`torch.tensor([...])` in a forward: a constant, new at each run."""
        source = self._by_id.get(id(real))
        if source is None:
            source = self._adopt(real)
            self._by_id[id(real)] = source
        op = self._append("call_function", _aten.lift_fresh_copy.default, (source,), {})
        with without_dispatch():
            fake = source.fake
            new = self.factory.fresh(fake.size(), fake.stride(), fake.dtype, fake.device, False)
        op.outputs = self._register_one(new, op, 0)
        return new

    def follow(self, given: list[torch.Tensor], fakes: list[torch.Tensor], op: str) -> None:
        """Some of `fakes` got other memory in place, or another shape; `given` has the model's own tensors for theirs.

        Raises UnsupportedOpError where Python would go on to see the sizes and strides that a tensor had before.
        """
        for t, fake in zip(given, fakes, strict=True):
            before, now = self._by_id[id(t)], self._by_id[id(fake)]
            if t is fake or before is now:
                continue
            if _shape_of(t) != _shape_of(fake):
                raise UnsupportedOpError(
                    f"{self._name_of(t)}, a tensor of the model, gets other sizes or strides in place",
                    op=op,
                    **self.where(),
                    hint="bind a new tensor: `self.name = self.name.t()`",
                )
            self._left.add(before.storage)
            self._by_id[id(t)] = now

    def _refuse_left(self, t: torch.Tensor) -> None:
        """A tensor that Python made of one of the model's without an op lies in the memory that it had at first."""
        if self._left and storage_id(t) in self._left:
            raise UnsupportedOpError(
                "a tensor of the model got other memory, and is read in a way that shows the memory before",
                **self.where(),
                hint="read the tensor itself, or its detach()",
            )

    def _name_of(self, real: torch.Tensor) -> str:
        owner = self.model.owner(real)
        return owner[0] if owner is not None else "a constant"

    def present(self, t: torch.Tensor) -> torch.Tensor:
        """`t`, of which `.data` is asked; for a tensor of the model that got other memory in place, what it is now.

        A buffer is given as a fake tensor where autograd is on: `self.mean.data.add_(x)` must not give it a history.
        """
        if isinstance(t, FakeTensor):
            return t
        if (
            torch.is_grad_enabled()
            and not t.requires_grad
            and t.is_floating_point()
            and self.model.owner(t) is not None
        ):
            return self.value_of(t).fake
        value = self._by_id.get(id(t)) if self._left else None
        return t if value is None or value.real is not None else value.fake

    def data_alias(self, t: torch.Tensor) -> torch.Tensor:
        """`t`, which is `.data` of another tensor: a write may give it a history that the other does not get."""
        self._of_data[id(t)] = t
        return t

    def is_outside(self, t: torch.Tensor) -> bool:
        """Whether a tensor is an input, or real: of the model, or from a closure or global."""
        t = unwrapped(t)
        return not isinstance(t, FakeTensor) or id(t) in self._given or self.model.owner(t) is not None

    def are_one(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether both are the same view of the same memory."""
        first, second = self.value_of(a), self.value_of(b)
        return first.storage == second.storage and geometry_key(first.fake) == geometry_key(second.fake)

    def known_value(self, t: torch.Tensor) -> Value | None:
        """The tape value of a tensor of this trace or of the model, else None."""
        if isinstance(t, FakeTensor) or self.model.owner(t) is None:
            found = self._by_id.get(id(t))
            if found is None and isinstance(t, FakeTensor) and storage_id(t) in self._inner:
                self.broken = "a body binds one of its tensors to an attribute of a module"
            return found
        return self.value_of(t)

    def add_input(self, name: str, fake: torch.Tensor) -> Value:
        """A placeholder. A tensor given twice keeps its first value for the ops."""
        op = self._append("placeholder", name, (), {})
        value = Value(fake, op, 0, storage_id(fake), self._keys.of(fake))
        op.outputs = value
        self._given.add(id(fake))
        self._by_id.setdefault(id(fake), value)
        self._by_storage.setdefault(value.storage, []).append(value)
        self.tape.inputs.append(value)
        return value

    def add_number(self, name: str, number: torch.SymInt) -> None:
        """A placeholder for a whole number."""
        self._append("placeholder", name, (), {}).outputs = number
        self.tape.numbers.append(number)

    # ---------------------------------------------------------------- bodies

    def add_body_input(self, name: str, x: Any) -> None:
        """A placeholder of the body that is being recorded: a tensor of its own, or a number."""
        op = self._append("placeholder", name, (), {})
        op.outputs = self._register_one(x, op, 0)

    def append_op(self, target: Any, args: tuple[Any, ...]) -> Op:
        """An op with this place on the tape; its outputs are still to come."""
        return self._append("call_function", target, args, {})

    def register(self, out: Any, op: Op) -> Any:
        """Tape values for what an op returned."""
        return self._register(out, op)

    def forget(self, made: Collection[Value], storages: set[int]) -> None:
        """Values of a body are none outside: `made`, of which `storages` are of the body alone."""
        self._by_id = {key: v for key, v in self._by_id.items() if v not in made}
        for storage in {v.storage for v in made}:
            self._by_storage[storage] = [v for v in self._by_storage[storage] if v not in made]
        self._inner |= storages

    # ---------------------------------------------------------------- leaf modules

    def add_module_op(self, name: str, call: Call) -> Op:
        """A call of a leaf module, as one op."""
        op = self._append("call_module", name, call.args, call.kwargs)
        assert call.module is not None
        self.tape.modules[name] = call.module
        return op

    def add_results(self, op: Op, t: torch.Tensor, slot: int) -> Value:
        """A tensor that a leaf module returned."""
        value: Value = self._register_one(t, op, slot)
        return value

    # ---------------------------------------------------------------- context

    def frames(self) -> Frames:
        """The Python frames of the running op, for a module call that starts now."""
        return capture_frames(self.call.frames if self.call else (), self.boundary)

    def where(self, frames: Frames | None = None) -> dict[str, str | None]:
        """`module` and `source` for an error that is raised now."""
        found = self.frames() if frames is None else frames
        return {"module": str(self.state.current_scope), "source": source_of(found)}


def place_of(t: torch.Tensor) -> tuple[Any, ...]:
    """Its memory, and where it lies in that."""
    return storage_id(t), geometry_key(t)


def geometry_key(t: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors of one storage that are the same view of it."""
    if t.layout is not torch.strided:
        return (id(t),)
    return to_expr(t.storage_offset()), to_expr(t.size()), to_expr(t.stride()), t.dtype, t.is_conj(), t.is_neg()


def _shape_of(t: torch.Tensor) -> tuple[Any, ...]:
    return t.dtype, to_expr(t.size()), to_expr(t.stride())
