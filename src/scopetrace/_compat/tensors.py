"""Private attributes of tensors, storages and modules, and fake tensors.

A fake tensor has metadata and no data. torch makes one by running an op or through `FakeTensorConverter`; `FakeMaker`
wraps a meta tensor of known sizes and strides, which is much faster.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._prims_common import suggest_memory_format
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
    PendingUnbackedSymbolNotFound,
    compute_unbacked_bindings,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from scopetrace._compat.fake_mode import fake_mode_of, or_real
from scopetrace._compat.questions import inference_mode_enabled
from scopetrace._compat.shape_env import WatchedShapeEnv
from scopetrace._compat.symbols import Symbolic, is_static

__all__ = ["FakeFactory", "FakeMaker", "FakeTensor", "FakeTensorMode"]

DATA_DEPENDENT = (GuardOnDataDependentSymNode, DataDependentOutputException)
"""Raised where Python or an op needs a value that depends on data."""

NO_SHAPE_RULE = (DynamicOutputShapeException, UnsupportedOperatorException, PendingUnbackedSymbolNotFound)
"""Raised by ops that cannot run on fake tensors."""

_make_subclass = torch.Tensor._make_subclass
_resize_storage = torch.ops.inductor.resize_storage_bytes_.default
_forbid_data_ptr = torch._C._set_throw_on_mutable_data_ptr
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


# Attributes. Most are read for every op: attrgetter costs less than a Python function. -------------------------------

_base: Any = torch._C.TensorBase
version_of: Callable[[torch.Tensor], int] = _base._version.__get__
"""How often the storage of a tensor was written in place. Raises RuntimeError for an inference tensor."""


def with_version(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`t`, with the version counter of `like`."""
    if not (is_inference_of(t) or is_inference_of(like)) and version_of(like) != version_of(t):
        torch._C._autograd._unsafe_set_version_counter((t,), (like._version,))
    return t


@contextlib.contextmanager
def uncounted(t: torch.Tensor) -> Iterator[None]:
    """What is written to a tensor here does not count as a write."""
    before = None if is_inference_of(t) else version_of(t)
    yield
    if before is not None:
        torch._C._autograd._unsafe_set_version_counter((t,), (before,))


stride_of: Callable[[torch.Tensor], Any] = _base.stride
offset_of: Callable[[torch.Tensor], Any] = _base.storage_offset
requires_grad_of: Callable[[torch.Tensor], bool] = _base.requires_grad.__get__
set_requires_grad: Callable[[torch.Tensor, bool], None] = _base.requires_grad.__set__
is_leaf_of: Callable[[torch.Tensor], bool] = _base.is_leaf.__get__
is_inference_of: Callable[[torch.Tensor], bool] = _base.is_inference
is_conj_of: Callable[[torch.Tensor], bool] = _base.is_conj
is_neg_of: Callable[[torch.Tensor], bool] = _base.is_neg
nbytes_of: Callable[[torch.UntypedStorage], Any] = torch.UntypedStorage.nbytes
"""What `x.stride()`, `x.requires_grad` and so on call: in a trace these report who asks."""


def is_known_leaf(t: torch.Tensor) -> bool:
    """`t.is_leaf`; False of a view made in inference mode whose base was written since, of which torch says nothing."""
    try:
        return is_leaf_of(t)
    except RuntimeError:
        return False


base_of: Callable[[torch.Tensor], torch.Tensor | None] = _base._base.__get__
"""What autograd takes a tensor for a view of."""

is_view: Callable[[torch.Tensor], bool] = operator.methodcaller("_is_view")
"""Whether autograd holds a tensor to be a view of another."""

is_symbolic: Callable[[torch.Tensor], bool] = operator.attrgetter("_has_symbolic_sizes_strides")
"""Whether a size, a stride or the storage offset is symbolic."""

id_of_storage: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""Equal for Python objects that are the same storage. May be used again once the storage is freed."""


_torch_function: Any = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


def passes_its_class(t: torch.Tensor) -> bool:
    """Whether what torch's functions make of `t` in eager is of its class, a subclass, and in a graph is not."""
    kind: Any = type(t)
    return (
        kind not in (torch.Tensor, FakeTensor)
        and getattr(kind.__torch_function__, "__func__", None) is _torch_function
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def tags_of(t: torch.Tensor) -> dict[str, Any]:
    """The attributes that users set on a tensor; those of torch are private, or such as all fake tensors have."""
    attributes = vars(t)
    of_buffers = {"persistent"} if "_is_buffer" in attributes else ()
    return {k: x for k, x in attributes.items() if not (k[0] == "_" or k in _OF_FAKES or k in of_buffers)}


_OF_FAKES = frozenset(FakeTensor.__annotations__)


_storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]
default_tolerances: Callable[..., tuple[float, float]] = torch.testing._comparison.default_tolerances
"""The relative and the absolute tolerance of `torch.testing.assert_close` for some tensors."""


def storage_id(t: torch.Tensor) -> int:
    """Equal for tensors that share memory; unique for layouts without a storage. May be reused after `t` is freed."""
    try:
        return _storage_id(t)
    except NotImplementedError:
        return -id(t)


def dense_order(t: torch.Tensor) -> list[int]:
    """The dimensions by stride, the longest first, of a tensor without gaps in memory; empty for any other."""
    size, stride = t.size(), stride_of(t)
    dims = range(len(size))
    order = sorted(dims, key=lambda i: (-stride[i], i)) if is_static((*size, *stride)) else list(dims)
    expected = 1
    for i in reversed(order):
        if size[i] != 1 and stride[i] != expected:
            return []
        expected *= size[i]
    return order


# Functions, as Dynamo cannot trace an attrgetter.


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The parameters of the module itself by name, as the dict that the module reads."""
    return module._parameters


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers of the module itself by name, as the dict that the module reads."""
    return module._buffers


def unsaved_buffers_of(module: torch.nn.Module) -> set[str]:
    """The names of the module's buffers that are not in its state dict, as the set that the module reads."""
    return module._non_persistent_buffers_set


def persistent_buffers_of(module: torch.nn.Module) -> list[str]:
    """The names of the module's own buffers that are in its state dict."""
    # a ScriptModule has no dict there, but what has keys
    return [name for name in buffers_of(module).keys() if name not in unsaved_buffers_of(module)]  # noqa: SIM118


# Making fake tensors -------------------------------------------------------------------------------------------------


_keys = torch._C.DispatchKey
_OF_PYTHON = (_keys.Python, _keys.PreDispatch, _keys.PythonTLSSnapshot, _keys.PythonDispatcher)
_OF_AUTOGRAD = (_keys.AutogradFunctionality, _keys.AutogradOther, _keys.AutogradNestedTensor)
_ABOVE = functools.reduce(operator.or_, map(torch._C.DispatchKeySet, (*_OF_PYTHON, *_OF_AUTOGRAD)))
without_dispatch: Callable[[], contextlib.AbstractContextManager[Any]] = functools.partial(
    torch._C._ExcludeDispatchKeyGuard, _ABOVE
)
"""A context without Python dispatch and autograd: no mode, subclass or Python dispatcher sees the ops inside."""


class FakeMaker:
    """Makes fake tensors of one mode from metadata alone. Call its methods inside `without_dispatch`."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._templates: dict[torch.device, dict[str, Any]] = {}

    def fresh(
        self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device, requires_grad: bool
    ) -> torch.Tensor:
        """A fake with a storage of its own. `size` and `stride` are in elements, and may be symbolic."""
        meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return self._wrap(meta, device, requires_grad)

    def placed(
        self, place: tuple[Any, Any, Any, Any], dtype: torch.dtype, device: torch.device, requires_grad: bool
    ) -> torch.Tensor:
        """A fake with a storage of its own, which it need not fill.

        Args:
            place: the bytes of the storage; size, stride and storage offset of the tensor in elements.
        """
        nbytes, size, stride, offset = place
        if isinstance(nbytes, int) and type(offset) is int and offset == 0:
            meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            if nbytes_of(meta.untyped_storage()) == nbytes:
                return self._wrap(meta, device, requires_grad)
        memory = torch.empty(0, dtype=dtype, device="meta")
        _resize_storage(memory, nbytes)  # empty_strided would compute the bytes of symbolic sizes again, in sympy
        return self._wrap(torch.as_strided(memory, size, stride, offset), device, requires_grad)

    def in_storage(
        self, storage: torch.UntypedStorage, size: Any, stride: Any, offset: int, like: torch.Tensor
    ) -> torch.Tensor:
        """A fake in `storage`, of the meta device, with dtype, device and `requires_grad` of `like`."""
        with without_dispatch(), in_inference_mode(False) if not is_inference_of(like) else _NOTHING, torch.no_grad():
            meta = torch.empty(0, dtype=like.dtype, device="meta").set_(storage, offset, size, stride)
            return self._wrap(meta, like.device, like.requires_grad)

    def view(
        self, base: torch.Tensor, size: Any, stride: Any, offset: Any, device: torch.device, requires_grad: bool
    ) -> torch.Tensor:
        """A fake over the storage of `base`, with its version counter."""
        numbers = (*size, *stride, offset, nbytes_of(base.untyped_storage()))
        symbolic = is_symbolic(base) or torch.SymInt in map(type, numbers)
        # as a meta tensor: kernels of other devices take no symbols
        as_meta = in_kernel_invocation_manager(self.mode) if symbolic else _NOTHING
        with in_inference_mode(False) if not is_inference_of(base) else _NOTHING:
            with as_meta:
                # of a plain alias: for a FakeTensor torch would ask its class, in Python, for the device
                view = torch.as_strided(base if symbolic else base.detach(), size, stride, offset)
            return self._wrap(view, device, requires_grad)

    def detached(self, t: torch.Tensor) -> torch.Tensor:
        """`t.detach()` of a fake, below autograd."""
        with without_dispatch():
            return self.view(t, t.size(), t.stride(), t.storage_offset(), t.device, False)

    def _wrap(self, meta: torch.Tensor, device: torch.device, requires_grad: bool) -> torch.Tensor:
        """The FakeTensor of a meta tensor, without FakeTensor's constructor, which is slow in Python."""
        template = self._templates.get(device)
        if template is None:
            template = self._templates[device] = dict(vars(FakeTensor(self.mode, meta.detach(), device)))
        fake = _make_subclass(FakeTensor, meta, requires_grad, dispatch_device=True, device_for_backend_keys=device)
        _forbid_data_ptr(fake)
        fake.__dict__.update(template)
        return fake


class FakeFactory(FakeMaker):
    """Makes the fake tensors of one trace. All views of one real storage share one fake storage.

    It keeps the real tensors alive, since it knows them by `id`.
    """

    def __init__(self) -> None:
        self.shape_env = WatchedShapeEnv()
        super().__init__(fake_mode_of(self.shape_env))
        self.mode.fake_tensor_converter = _Converter(self)
        self.unbacked_bindings = functools.partial(compute_unbacked_bindings, self.shape_env)
        """Where in its outputs the last op returned the symbols that it made, or None if it made none."""
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # the real and the meta one
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the real tensor and its fake
        self._real_of: dict[int, torch.Tensor] = {}

    def from_real(self, real: torch.Tensor) -> torch.Tensor:
        """The fake of `real`: same metadata, same `requires_grad`, and a leaf of autograd if `real` is one."""
        if id(real) not in self._fakes:
            # a tensor of the model is none of the block or torch.func transform in which it is first used
            with in_inference_mode(False), torch._C._DisableFuncTorch():
                fake = self._make(real)
            self._fakes[id(real)] = real, fake
            self._real_of.setdefault(storage_id(fake), real)
        return self._fakes[id(real)][1]

    def forget(self) -> None:
        """Let go of all real tensors: ops that meet one of them later see a new tensor."""
        for table in (self._storages, self._real_of, self._fakes):
            table.clear()

    def symbolic(self, real: torch.Tensor, size: list[Any], stride: list[Any]) -> torch.Tensor:
        """A fake of `real`, an input with a storage of its own, with symbolic sizes and strides."""
        self.mode.cache_enabled = False  # with symbolic sizes, torch's cache of results costs more than it saves
        with without_dispatch(), torch.no_grad():
            fake = self.fresh(size, stride, real.dtype, real.device, real.requires_grad)
        if not is_leaf_of(real):
            self.give_history(fake)
        self._fakes[id(real)] = real, fake
        return fake

    def real_of(self, fake: torch.Tensor) -> torch.Tensor | None:
        """The first real tensor that was made fake with the storage of `fake`."""
        return self._real_of.get(storage_id(fake))

    def give_history(self, fake: torch.Tensor) -> None:
        """Make `fake` a tensor that requires grad and is the result of an op, not a leaf. It counts as no write."""
        fake.requires_grad_(False)
        kernels = in_kernel_invocation_manager(self.mode)
        with torch._C._DisablePythonDispatcher(), torch.enable_grad(), kernels:
            with uncounted(fake):
                fake.copy_(torch.zeros((), dtype=fake.dtype, device="meta").requires_grad_())
            _base.grad_fn.__get__(fake)  # of a view, torch makes it anew for this version: under its lock, by an op

    def _make(self, real: torch.Tensor) -> torch.Tensor:
        if not is_plain_real(real):
            with torch._C._DisablePythonDispatcher():
                converter = FakeTensorConverter()
                env = self.shape_env if is_symbolic(real) else None
                return converter.from_real_tensor(self.mode, real, shape_env=env)
        with without_dispatch():
            fake = self._wrap(self._meta_of(real), real.device, requires_grad_of(real))
        if type(real) is torch.nn.Parameter or getattr(real, "_is_param", False):  # isinstance would be a read
            fake._is_param = True
        if not is_leaf_of(real):
            self.give_history(fake)
        return fake

    def _meta_of(self, real: torch.Tensor) -> torch.Tensor:
        """A meta tensor at the same place in its storage as `real`."""
        storage = real.untyped_storage()
        if storage._cdata not in self._storages:
            meta = torch.empty_strided(real.size(), stride_of(real), dtype=real.dtype, device="meta")
            if offset_of(real) == 0 and nbytes_of(meta.untyped_storage()) == nbytes_of(storage):
                self._storages[storage._cdata] = storage, meta.untyped_storage()
                return meta
            self._storages[storage._cdata] = storage, torch.UntypedStorage(nbytes_of(storage), device="meta")
        shared = self._storages[storage._cdata][1]
        meta = torch.empty(0, dtype=real.dtype, device="meta")
        return meta.set_(shared, real.storage_offset(), real.size(), real.stride())


_NOTHING = contextlib.nullcontext()


def in_inference_mode(enabled: bool) -> contextlib.AbstractContextManager[Any]:
    """Inside, inference mode is on or off, and autograd is off where it changes.

    Tensors that are made where it is off are no inference tensors, as views of normal ones are in inference mode too.
    """
    if enabled is inference_mode_enabled():
        return _NOTHING
    stack = contextlib.ExitStack()
    stack.enter_context(torch._C._InferenceMode(enabled))  # a block under torch.inference_mode is one of the forward
    stack.enter_context(torch.no_grad())
    return stack


class _Converter(FakeTensorConverter):
    """Gives the fakes of the trace to real tensors that the fake mode meets below the recorder (`parameter.data`)."""

    def __init__(self, factory: FakeFactory) -> None:
        super().__init__()
        self._factory = weakref.ref(factory)

    def from_real_tensor(self, fake_mode: Any, t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        factory = self._factory()
        if factory is not None and is_plain_real(t) and not kwargs.get("symbolic_context"):
            with torch._C._DisableTorchDispatch():
                return factory.from_real(t)
        return super().from_real_tensor(fake_mode, t, *args, **kwargs)


def forget_real_tensors(mode: Any) -> None:
    """`FakeFactory.forget` of the factory that made a fake mode."""
    factory = mode.fake_tensor_converter._factory()
    if factory is not None:
        factory.forget()


def is_plain_real(real: torch.Tensor) -> bool:
    """Whether the fake of a real tensor is made here, without an op."""
    return (
        type(real) in (torch.Tensor, torch.nn.Parameter, FakeTensor)
        and real.layout is torch.strided
        and not (real.is_quantized or is_conj_of(real) or is_neg_of(real) or real.is_nested or is_inference_of(real))
        and (real.untyped_storage().device == real.device or type(real) is FakeTensor)
        and not is_symbolic(real)
    )


# Running ops on fake tensors -----------------------------------------------------------------------------------------


def run_fake(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, *, grad: bool = False) -> Any:
    """What an op returns for fake tensors, with autograd if `grad`. Raises what the op raises."""
    with mode, torch.set_grad_enabled(grad):
        return run_op(mode, func, args, kwargs)


def run_op(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op on fake tensors of `mode` as eager would run it.

    In a trace with symbolic sizes torch's cache of results is off (see `FakeFactory.symbolic`), and the Python
    dispatcher decomposes composite ops. Ops without symbolic arguments need neither, and the parts of a composite op
    may alias otherwise than the op: those of `dropout` in eval mode return a copy.
    """
    try:
        if inference_mode_enabled() and _has_kernel(func.name(), _COMPOSITE):
            out = _run_composite_in_inference_mode(mode, func, args, kwargs)
        else:
            out = _run_op(mode, func, args, kwargs)
    except ValueError as error:
        if func is not torch.ops.aten.view.default:
            raise
        raise RuntimeError(str(error)) from None  # as its kernel does: `except RuntimeError` may be around it
    if func in _OF_TWO and isinstance(args[1], torch.Tensor):
        second = args[func is not _aten.log_sigmoid_backward.default]  # which takes the strides of the first
        kernel = torch.add(args[0].detach(), second.detach())
        return out if kernel.stride() == out.stride() else torch.add(kernel.to(out.dtype), out)
    return _as_on_cpu(func, args, out) if func in _AS_SUGGESTED or func in _ROW_MAJOR else out


_aten = torch.ops.aten
_OF_TWO = frozenset(
    getattr(_aten, f"{name}_backward").default
    for name in ("hardswish", "hardtanh", "log_sigmoid", "logit", "softplus", "native_dropout")
) | {_aten.copysign.Tensor, _aten.floor_divide.default, _aten.div.Tensor_mode}
"""Elementwise ops of two tensors, whose result lies as that of other kernels of two tensors."""
_ROW_MAJOR = frozenset(
    getattr(_aten, name).default
    for name in (
        *("one_hot", "rrelu", "log_sigmoid_forward", "_log_softmax_backward_data", "huber_loss_backward"),
        *("native_layer_norm_backward", "native_group_norm_backward", "nll_loss2d_forward"),
    )
) | {_aten.isin.Tensor_Tensor, _aten.pow.Scalar, _aten.normal.Tensor_Tensor}
_GRADIENT_FIRST = frozenset({_aten.batch_norm_backward.default, _aten.native_batch_norm_backward.default})
_AS_SUGGESTED = frozenset(
    getattr(_aten, name).default
    for name in (
        *("batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
        *("_native_batch_norm_legit_no_training", "_batch_norm_impl_index", "_batch_norm_with_update"),
        *("_batch_norm_with_update_functional", "_batch_norm_no_update", "roll", "channel_shuffle", "max_unpool2d"),
    )
) | {_aten._native_batch_norm_legit.no_stats, *_GRADIENT_FIRST}


def _as_on_cpu(func: Any, args: Any, out: Any) -> Any:
    """What an op gives on the CPU: in the memory format that its input suggests, or row-major.

    Fake tensors keep the order of dimensions in memory, of a transposed input too, as kernels of other devices do.
    """
    if any(t.device.type != "cpu" for t in tree_leaves(out) if t is not None):
        return out
    if func in _ROW_MAJOR:
        return tree_map_only(torch.Tensor, torch.Tensor.contiguous, out)
    x = args[func in _GRADIENT_FIRST]
    first, *others = (out,) if isinstance(out, torch.Tensor) else out
    first = first if first is None else first.contiguous(memory_format=suggest_memory_format(x))
    return first if isinstance(out, torch.Tensor) else type(out)((first, *others))


def _run_composite_in_inference_mode(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """As `run_op`, in a mode that skips autograd's dispatch keys.

    There a composite op runs as its parts in C++; without them torch would take its Python parts. What it gives of a
    normal tensor is a view, which requires grad as that does, but for fake tensors. An op in place runs once.
    """
    parts = functools.partial(run_parts, func)
    out = _run_op(mode, parts, args, kwargs)
    inputs, results = ([t for t in tree_leaves(x) if isinstance(t, torch.Tensor)] for x in ((args, kwargs), out))
    in_place = any(t is x for t in results for x in inputs)
    if any(map(requires_grad_of, inputs)) and not (in_place or all(map(is_inference_of, results))):
        with in_inference_mode(False):
            return _run_op(mode, parts, args, kwargs)
    return out


def _run_op(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    operands = tree_leaves((args, kwargs))
    if any(map(_is_symbolic, operands)):
        with enable_python_dispatcher():  # which is on in a recording, and not where one is copied
            return func(*args, **kwargs)
    if not any(isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.numel() for x in operands):
        return _run_static(mode, func, args, kwargs)
    run = functools.partial(_run_static, mode, func, args, kwargs)
    return or_real(run, mode, func, args, kwargs, (*DATA_DEPENDENT, *NO_SHAPE_RULE))


def _run_static(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    if runs_in_python(func, args):
        return func.decompose(*args, **kwargs)
    before = mode.cache_enabled
    conjugates = bool(args) and isinstance(args[0], complex)  # in a backward: the cache takes no view of a number
    mode.cache_enabled = torch._dynamo.config.fake_tensor_cache_enabled and not conjugates
    try:
        with torch._C._DisablePythonDispatcher():
            return func(*args, **kwargs)
    except DataDependentOutputException:
        if _COMPOSITE not in getattr(func, "py_kernels", ()):
            raise
        return func(*args, **kwargs)  # torch's parts in Python do not look at data, as those in C++ do
    finally:
        mode.cache_enabled = before


def run_parts(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the parts of a composite op: in C++ as in eager, or in Python for symbolic sizes.

    Torch's own Python for a dropout that drops nothing copies its input, which eager gives back.
    """
    if func is torch.ops.aten.dropout.default and not (args[1] and args[2]):
        return args[0]
    if not _has_kernel(func.name(), _COMPOSITE) or runs_in_python(func, (*args, *kwargs.values())):
        return func.decompose(*args, **kwargs)
    return func._op_dk(_COMPOSITE, *args, **kwargs)


RECURRENT = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for overload in ("input", "data")
)


def runs_in_python(func: Any, args: Iterable[Any]) -> bool:
    """Whether a composite op is taken apart in Python: with symbolic sizes, and where C++ looks into memory.

    For the kernels of cuDNN, the recurrent ops look there whether the weights lie one after the other.
    """
    is_cudnn = func in RECURRENT and any(isinstance(t, torch.Tensor) and t.is_cuda for t in tree_leaves(tuple(args)))
    return is_cudnn or any(map(_is_symbolic, args))


def _is_symbolic(x: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return is_symbolic(x)
    return any(map(_is_symbolic, x)) if isinstance(x, (list, tuple)) else isinstance(x, Symbolic)
