"""Fake tensors: made from real ones without looking at data, and made again from known metadata without running ops."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
)
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    compute_unbacked_bindings,
)
from torch.utils._pytree import tree_leaves

from scopetrace._compat.shape_env import WatchedShapeEnv
from scopetrace._compat.tensors import is_symbolic, storage_id

__all__ = ["FakeFactory", "FakeMaker", "FakeTensor", "FakeTensorMode"]

DATA_DEPENDENT = (GuardOnDataDependentSymNode, DataDependentOutputException)
NO_SHAPE_RULE = (DynamicOutputShapeException, UnsupportedOperatorException)

_make_subclass = torch.Tensor._make_subclass
_resize_storage = torch.ops.inductor.resize_storage_bytes_.default
_forbid_data_ptr = torch._C._set_throw_on_mutable_data_ptr


class FakeMaker:
    """Makes fake tensors of one mode from metadata alone."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._templates: dict[torch.device, dict[str, Any]] = {}

    def fresh(
        self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device, requires_grad: bool
    ) -> torch.Tensor:
        """A new fake with its own storage. Call inside `without_dispatch`."""
        meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return self._wrap(meta, device, requires_grad)

    def placed(
        self, place: tuple[Any, Any, Any, Any], dtype: torch.dtype, device: torch.device, requires_grad: bool
    ) -> torch.Tensor:
        """As `fresh`, with a `place`: the bytes of its memory, and size, stride and offset in elements.

        Call inside `without_dispatch`.
        """
        nbytes, size, stride, offset = place
        if isinstance(nbytes, int) and type(offset) is int and offset == 0:
            meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            if meta.untyped_storage().nbytes() == nbytes:
                return self._wrap(meta, device, requires_grad)
        memory = torch.empty(0, dtype=dtype, device="meta")
        _resize_storage(memory, nbytes)  # torch would count the bytes anew, with sympy
        return self._wrap(torch.as_strided(memory, size, stride, offset), device, requires_grad)

    def view(
        self,
        base: torch.Tensor,
        size: Any,
        stride: Any,
        offset: int | torch.SymInt,
        device: torch.device,
        requires_grad: bool,
    ) -> torch.Tensor:
        """A fake over the storage of `base`, with its version counter. Call inside `without_dispatch`."""
        numbers = (*size, *stride, offset, base.untyped_storage().nbytes())
        if not is_symbolic(base) and not any(isinstance(n, torch.SymInt) for n in numbers):
            return self._wrap(torch.as_strided(base, size, stride, offset), device, requires_grad)
        with in_kernel_invocation_manager(self.mode):  # the kernel of the device takes no symbols, that of meta does
            meta = torch.as_strided(base, size, stride, offset)
        return self._wrap(meta, device, requires_grad)

    def _wrap(self, meta: torch.Tensor, device: torch.device, requires_grad: bool) -> torch.Tensor:
        template = self._templates.get(device)
        if template is None:
            template = self._templates[device] = dict(vars(FakeTensor(self.mode, meta.detach(), device)))
        fake = _make_subclass(FakeTensor, meta, requires_grad, dispatch_device=True, device_for_backend_keys=device)
        _forbid_data_ptr(fake)
        fake.__dict__.update(template)
        return fake


class FakeFactory(FakeMaker):
    """Makes the fake tensors of one trace. All views of one real storage share one fake storage."""

    def __init__(self) -> None:
        self.shape_env = WatchedShapeEnv()
        super().__init__(FakeTensorMode(shape_env=self.shape_env, allow_non_fake_inputs=True, static_shapes=True))
        self.mode.fake_tensor_converter = _Converter(self)
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._real_of: dict[int, torch.Tensor] = {}
        self._fakes: dict[int, torch.Tensor] = {}
        self._keep: list[Any] = []

    def from_real(self, real: torch.Tensor) -> torch.Tensor:
        """A fake of `real`: same metadata, same `requires_grad`, and a leaf of autograd if `real` is one."""
        found = self._fakes.get(id(real))
        if found is None:
            found = self._fakes[id(real)] = self._make(real)
            self._keep.append(real)
            self._real_of.setdefault(storage_id(found), real)
        return found

    def symbolic(self, real: torch.Tensor, size: list[Any], stride: list[Any]) -> torch.Tensor:
        """A fake of `real`, an input with memory of its own, with symbolic sizes and strides."""
        self.mode.cache_enabled = False  # its book-keeping costs more than it saves where sizes are symbolic
        with without_dispatch(), torch.no_grad():
            fake = self.fresh(size, stride, real.dtype, real.device, real.requires_grad)
        if not real.is_leaf:
            self._leave_leaf(fake)
        self._fakes[id(real)] = fake
        self._keep.append(real)
        return fake

    def real_of(self, fake: torch.Tensor) -> torch.Tensor | None:
        """The real tensor that was made fake with the memory of `fake`."""
        return self._real_of.get(storage_id(fake))

    def _make(self, real: torch.Tensor) -> torch.Tensor:
        if not _is_plain(real):
            with torch._C._DisablePythonDispatcher():
                converter = FakeTensorConverter()
                return converter.from_real_tensor(self.mode, real, shape_env=self.shape_env)
        with without_dispatch():
            fake = self._wrap(self._meta_of(real), real.device, real.requires_grad)
        if isinstance(real, torch.nn.Parameter):
            fake._is_param = True
        if not real.is_leaf:
            self._leave_leaf(fake)
        return fake

    def _meta_of(self, real: torch.Tensor) -> torch.Tensor:
        """A meta tensor that lies in its memory as `real` does."""
        storage = real.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None:
            self._keep.append(storage)
            meta = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device="meta")
            known = meta.untyped_storage()
            if real.storage_offset() == 0 and known.nbytes() == storage.nbytes():
                self._storages[storage._cdata] = known
                return meta
            known = self._storages[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device="meta")
        meta = torch.empty(0, dtype=real.dtype, device="meta")
        return meta.set_(known, real.storage_offset(), real.size(), real.stride())

    def give_history(self, fake: torch.Tensor) -> None:
        """Make a leaf that requires grad what autograd would have made: a result of an op."""
        fake.requires_grad_(False)
        self._leave_leaf(fake)

    def _leave_leaf(self, fake: torch.Tensor) -> None:
        fake.requires_grad_(False)
        with torch._C._DisablePythonDispatcher(), torch.enable_grad(), in_kernel_invocation_manager(self.mode):
            fake.copy_(torch.zeros((), dtype=fake.dtype, device="meta").requires_grad_())

    def unbacked_bindings(self, outputs: Any) -> Any:
        """The bindings of the symbols that the last op made, or None; see `compute_unbacked_bindings` of torch."""
        if not self.shape_env.pending_fresh_unbacked_symbols:
            return None
        return compute_unbacked_bindings(self.shape_env, outputs)


class _Converter(FakeTensorConverter):
    """What the fake mode meets below the recorder (`parameter.data` is one way) gets the fakes of the trace."""

    def __init__(self, factory: FakeFactory) -> None:
        super().__init__()
        self._factory = weakref.ref(factory)

    def from_real_tensor(self, fake_mode: Any, t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        factory = self._factory()
        if factory is not None and _is_plain(t) and not kwargs.get("symbolic_context"):
            with torch._C._DisableTorchDispatch():
                return factory.from_real(t)
        return super().from_real_tensor(fake_mode, t, *args, **kwargs)


def _is_plain(real: torch.Tensor) -> bool:
    return (
        type(real) in (torch.Tensor, torch.nn.Parameter, FakeTensor)
        and real.layout is torch.strided
        and not (real.is_quantized or real.is_conj() or real.is_neg() or real.is_nested or real.is_inference())
        and (real.untyped_storage().device == real.device or type(real) is FakeTensor)
        and not any(isinstance(n, torch.SymInt) for n in (*real.size(), *real.stride()))
    )


class without_dispatch:
    """No Python dispatch inside: neither modes nor subclasses nor the Python dispatcher see the ops."""

    __slots__ = ("_autograd", "_python", "_torch")

    def __enter__(self) -> None:
        self._torch = torch._C._DisableTorchDispatch()
        self._python = torch._C._DisablePythonDispatcher()
        self._autograd = torch._C._AutoDispatchBelowAutograd()
        self._torch.__enter__()
        self._python.__enter__()
        self._autograd.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._autograd.__exit__(*exc)
        self._python.__exit__(*exc)
        self._torch.__exit__(*exc)


def run_fake(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """What an op returns for fake tensors, without autograd. Raises what the op raises."""
    with mode, torch.no_grad():
        return run_op(mode, func, args, kwargs)


def run_op(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op on fake tensors of `mode` as eager would run it.

    Where sizes are symbolic, torch's cache of results is off (see `FakeFactory.symbolic`), and the Python dispatcher
    takes composite ops apart. Other ops in such a trace need neither; and the parts do not alias as the op does
    (`dropout` in eval mode returns a copy there).
    """
    if any(map(_is_symbolic, tree_leaves((args, kwargs)))):
        return func(*args, **kwargs)
    before, mode.cache_enabled = mode.cache_enabled, torch._dynamo.config.fake_tensor_cache_enabled
    try:
        with torch._C._DisablePythonDispatcher():
            return func(*args, **kwargs)
    finally:
        mode.cache_enabled = before


def _is_symbolic(x: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return is_symbolic(x)
    return isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool))
