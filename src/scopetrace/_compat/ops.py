"""torch's ops: their schemas and effects, and the dispatcher by which they get to the recorder.

Data flow:
    OpOverload -> schema_of, is_random -> what it takes, returns, writes, aliases, and does beside
    the model calls an op -> dispatcher -> PreDispatchMode.dispatch -> `on_op`, of autocast and transforms when asked
    the model calls `torch.cond` or its kind -> `on_higher_order`

Pre-dispatch is where ops arrive before autocast, autograd and decomposition. torch has three mode slots there, for
proxy tracing, for functionalization and for schema checking. The recorder takes the third: torch's own code (`vmap`,
symbolic integers, higher-order ops) looks into the first two, and would take the recorder for a proxy tracer. Schema
checking is a debugging tool, which is never on in a trace.

`OpOverload._schema` makes new Python objects each time its arguments are asked for. `schema_of` reads it once per op
and caches the result, so that it costs a dictionary lookup.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.autograd_function import custom_function_call as custom_function_call
from torch._functorch.pyfunctorch import dispatch_functorch as dispatch_functorch
from torch._higher_order_ops import utils as _hops
from torch._library.custom_ops import CustomOpDef as CustomOpDef
from torch._ops import (
    HigherOrderOperator,
    _higher_order_ops,
    _pop_mode_from_pre_dispatch,
    _set_mode_pre_dispatch,
    mode_stack_state_for_pre_dispatch,
)
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from scopetrace._compat.questions import AUTOCAST_DEVICES, Replace
from scopetrace._compat.tensors import run_parts
from scopetrace._compat.versions import CURRENT
from scopetrace.interrupts import interrupts as interrupts


class Argument(NamedTuple):
    """An argument or a return of an op."""

    name: str
    """Empty for a return that the schema does not name."""
    type: str
    """The TorchScript type: `Tensor`, `Optional[Tensor]`, `List[Tensor]`, `int`, ..."""
    kwarg_only: bool
    is_out: bool
    """Whether it is keyword-only and written, as `out=` is."""
    is_written: bool
    """Whether it is annotated as written: `Tensor(a!)`. A return is, when it is the argument that was written."""
    aliases: frozenset[str]
    """The alias sets that it is annotated with: `{"alias::a"}` for `Tensor(a)`; empty without annotation."""
    has_default: bool
    default: Any

    @property
    def is_tensor(self) -> bool:
        """Whether it takes tensors: one, a list of them, or None in their place."""
        return "Tensor" in self.type


class Schema(NamedTuple):
    """What an op takes and gives. Obtained by `schema_of`."""

    name: str
    """Namespace and name without the overload: `aten::add_`."""
    overload: str
    """`Tensor`, `out`, ...; empty for the default overload."""
    arguments: tuple[Argument, ...]
    returns: tuple[Argument, ...]
    is_mutable: bool
    """Whether an argument is written."""
    names: tuple[str, ...]
    """The names of the arguments."""
    written: tuple[str, ...]
    """The names of the written arguments."""

    @property
    def op_name(self) -> str:
        """The name without the namespace: `add_`."""
        return self.name.partition("::")[2]


@functools.cache
def schema_of(op: Any) -> Schema:
    """The schema of an `OpOverload`. Raises AttributeError for anything else, higher-order ops included."""
    schema = op._schema
    arguments, returns = (tuple(map(_argument, several)) for several in (schema.arguments, schema.returns))
    names, written = (tuple(a.name for a in several) for several in (arguments, [a for a in arguments if a.is_written]))
    return Schema(schema.name, schema.overload_name, arguments, returns, schema.is_mutable, names, written)


def _argument(a: Any) -> Argument:
    alias, default = a.alias_info, (a.has_default_value(), a.default_value)
    is_written, sets = (False, ()) if alias is None else (alias.is_write, map(str, alias.before_set))
    return Argument(a.name, str(a.type), a.kwarg_only, a.is_out, is_written, frozenset(sets), *default)


def is_op(target: Any) -> TypeGuard[OpOverload]:
    """Whether `target` is an op with a schema (`OpOverload`), not a higher-order op, a function or a method name."""
    return isinstance(target, OpOverload)


def can_decompose(op: OpOverload) -> bool:
    """Whether `op.decompose` can run the op as a composition of others: not one that the dispatcher does not know."""
    return torch._C._dispatch_has_kernel(op.name()) and op._can_decompose()


def has_kernel_of_its_own(op: OpOverload) -> bool:
    """Whether autograd takes an op as it is, though torch could decompose it, as `silu_backward`."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Meta")


OPS = (OpOverload, HigherOrderOperator)
"""The classes of ops."""


def is_higher_order(target: Any) -> TypeGuard[HigherOrderOperator]:
    """Whether `target` is an op that takes callables, such as `torch.cond`."""
    return isinstance(target, HigherOrderOperator)


def is_random(target: Any) -> bool:
    """Whether an op draws random numbers, so that it advances the generator."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def is_collective(target: Any) -> bool:
    """Whether an op communicates: other processes wait for it."""
    return is_op(target) and schema_of(target).name.startswith(("_c10d_functional", "c10d_functional", "c10d::"))


def find_op(name: str, overload: str) -> OpOverload | None:
    """The op of a schema's name and overload; None where this torch, with the libraries that are imported, has none."""
    target: Any = torch.ops
    for part in (*name.split("::", 1), overload or "default"):
        target = getattr(target, part, None) if part.isidentifier() else None
    return target if isinstance(target, OpOverload) else None


def find_higher_order(name: str) -> HigherOrderOperator | None:
    """The higher-order op of this name; None where this torch has none."""
    target = getattr(torch.ops.higher_order, name, None) if name.isidentifier() else None
    return target if isinstance(target, HigherOrderOperator) else None


OnOp = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]
OnHigherOrderOp = Callable[[HigherOrderOperator, tuple[Any, ...], dict[str, Any]], Any]


# The recorder's mode -------------------------------------------------------------------------------------------------


_slots = mode_stack_state_for_pre_dispatch()
_include_key = torch._C._dispatch_tls_set_dispatch_key_included
_key_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


class PreDispatchMode(SchemaCheckMode):
    """Calls `on_op` for each op, and `on_higher_order` for torch.cond and its kind, with the mode off inside."""

    def __init__(self, on_op: OnOp, on_higher_order: OnHigherOrderOp) -> None:
        super().__init__()
        self._dispatch_key = DispatchKey.PreDispatch
        self.on_op = on_op
        self.on_higher_order = on_higher_order

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, so that dynamo works under it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Where `short_way` is not in place.
        return self.on_op(func, args, kwargs or {})

    def switch(self, on: bool) -> None:
        """Report the ops of this thread, or do not. It is alone on the stack of pre-dispatch modes."""
        _slots._schema_check_mode = self if on else None
        _include_key(DispatchKey.PreDispatch, on)

    def dispatch(self, func: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
        """What `func` gives to the model."""
        self.switch(False)
        try:
            return self.on_op(func, args, kwargs)
        finally:
            self.switch(True)


def short_way(replace: Replace) -> None:
    """Let ops go from torch's dispatcher to `PreDispatchMode.dispatch` at once.

    torch's own way there flattens the arguments and makes a context manager, which takes as long as recording the op.
    """
    outer = OpOverload._get_dispatch

    def get_dispatch(self: OpOverload, key: DispatchKey) -> Any:
        mode = _slots._schema_check_mode
        if type(mode) is PreDispatchMode and key == DispatchKey.PreDispatch and not _key_excluded(DispatchKey.Python):
            return functools.partial(mode.dispatch, self)
        return outer(self, key)

    replace(OpOverload, "_get_dispatch", get_dispatch)


_DEVICE = torch.ops.prim.device.default


def _device_of(t: Any) -> Any:
    """The device of a fake tensor, as FakeTensorMode has it; inside of a kernel it is a meta tensor."""
    return torch.device("meta") if t.fake_mode.in_kernel_invocation else t.fake_device


def device_at_once(replace: Replace) -> None:
    """Let C++ learn the device of a fake tensor at once.

    Autograd asks for it several times for each op; by torch's own way it takes longer than the op.
    """
    outer: Any = FakeTensorMode.__torch_dispatch__

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _device_of(args[0]) if func is _DEVICE else outer(self, func, types, args, kwargs or {})

    replace(FakeTensorMode, "__torch_dispatch__", dispatch)


def _reported(hop: HigherOrderOperator) -> Callable[..., Any]:
    """Hands a call of `hop` to the mode, without the keyword arguments that torch passes with a default value."""
    defaults = CURRENT.hop_defaults.get(hop.name(), {})

    def call(mode: PreDispatchMode, *args: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name not in defaults or value != defaults[name]}
        return mode.on_higher_order(hop, args, kwargs)

    return call


@contextlib.contextmanager
def dispatching_to(mode: PreDispatchMode, *others: Any) -> Iterator[None]:
    """Enter the modes `others` and, above them, `mode`, which works once, with `short_way` in place.

    The mode of an outer trace in this thread is off inside.
    """
    for hop in _higher_order_ops.values():
        if PreDispatchMode not in hop.python_key_table:
            hop.py_impl(PreDispatchMode)(_reported(hop))
    with paused(), contextlib.ExitStack() as stack:
        for entered in (*others, enable_python_dispatcher(), mode):
            stack.enter_context(entered)
        yield
    del mode.on_op, mode.on_higher_order  # of a recorder that has the mode: all that it has is freed without a cycle


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Take the mode off: ops inside run on fake tensors and are not recorded. Does nothing if the mode is off."""
    mode = _pop_mode_from_pre_dispatch() if torch._ops._len_torch_dispatch_stack_pre_dispatch() else None
    try:
        yield
    finally:
        if mode is not None:
            _set_mode_pre_dispatch(mode)


def is_recording() -> bool:
    """Whether a recorder gets the ops of this thread now; while it handles an op it does not."""
    return _slots._schema_check_mode is not None


def with_mode(mode: PreDispatchMode, run: Callable[[], Any]) -> Any:
    """Call `run` with the mode on, which is off inside `on_op` and `on_higher_order`."""
    was_on = _slots._schema_check_mode is mode
    mode.switch(True)
    try:
        return run()
    finally:
        mode.switch(was_on)


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Ops inside run for real: outside all modes and transforms, without autograd and autocast."""
    no_transforms, no_autocast = torch._C._DisableFuncTorch(), torch._C._DisableAutocast()
    with outside_modes(), torch._C._DisablePythonDispatcher(), no_transforms, no_autocast, torch.no_grad():
        yield


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Inside, no mode is active: not the recorder's, and no FakeTensorMode of the user."""
    with one_at_a_time, _disable_current_modes():
        yield


one_at_a_time = threading.RLock()
"""The stack of pre-dispatch modes and what a trace replaces belong to the process: one thread builds programs."""


_NOTHING = contextlib.nullcontext()


def _compile_lock() -> Any:
    """The lock under which Dynamo compiles, which would read what a trace replaces; taken before `one_at_a_time`."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return getattr(dynamo, "compile_lock", _NOTHING)


# While programs are built --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Entered while tapes, graphs or files are built.

    Other threads wait, and signals too, since torch's modes and our patches are switched on and off inside. Python's
    garbage collector is off: it would visit programs, which only grow, again and again.
    """
    kept: Any = interrupts if threading.current_thread() is threading.main_thread() else _NOTHING
    with _compile_lock(), one_at_a_time, kept, to_undo(gc.enable) if gc.isenabled() else _NOTHING, _unlogged():
        gc.disable()
        yield


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Inside, torch's rules for fake tensors log nothing in this thread of the errors that they raise too."""
    log, thread = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def is_of_another(record: logging.LogRecord) -> bool:
        return record.thread != thread

    log.addFilter(is_of_another)
    with to_undo(lambda: log.removeFilter(is_of_another)):
        yield


_unfinished: list[Callable[[], None]] = []


@contextlib.contextmanager
def to_undo(undo: Callable[[], None]) -> Iterator[None]:
    """`undo` runs at the end, and in a process that is forked meanwhile by another thread, where there is no end."""
    _unfinished.append(undo)
    try:
        yield
    finally:
        _unfinished.remove(undo)
        undo()


def _forget_other_threads() -> None:
    """In a forked process: no other thread is there, and what one of the parent was building is never finished."""
    if one_at_a_time.acquire(blocking=False):  # nobody else was building
        one_at_a_time.release()
        return
    for lock in (one_at_a_time, _compile_lock()):
        getattr(lock, "_at_fork_reinit", bool)()
    _slots._schema_check_mode = None
    for i in range(2):
        _slots.set(i, None)
    while _unfinished:
        _unfinished.pop()()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)

T = TypeVar("T")


def in_large_stack(run: Callable[..., T], *args: Any) -> T:
    """What `run(*args)` returns. What it calls shares one piece of the memory that Python keeps frames in.

    CPython takes that memory in pieces of 16 KB. Where the frames of a loop happen to be at the end of one, each call
    takes a piece from the system and gives it back, so that a trace takes up to half as long again, depending on how
    deep it was called. A piece is as large as the frame that it begins with needs, and this one says that it is large.
    """
    return run(*args)


in_large_stack.__code__ = in_large_stack.__code__.replace(co_stacksize=33_000)


# Transforms ----------------------------------------------------------------------------------------------------------


def in_transform() -> bool:
    """Whether a functorch transform (vmap, grad, jvp) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_gradient_transform() -> bool:
    """Whether a transform such as torch.func.grad runs, around which the grad mode is the one from before it."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Grad for level in levels)


def unwrapped(t: torch.Tensor) -> torch.Tensor:
    """The tensor inside the wrappers of functorch transforms: under vmap, the whole batch."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


without_transforms: Any = torch._C._DisableFuncTorch
"""A context in which tensors are made and read as outside of functorch transforms."""


class BelowAutograd(TorchDispatchMode):
    """Sees the ops that autograd and functorch transforms turn an op into, on plain tensors."""

    def __init__(self, on_op: OnOp) -> None:
        super().__init__()
        self.on_op = on_op

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a trace, and torch's guard against it costs as much as an op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return _device_of(args[0])
        with without_transforms():  # which are on where Python's part of an op makes a tensor
            return self.on_op(func, args, kwargs or {})


# Higher-order ops ----------------------------------------------------------------------------------------------------


def fake_results(mode: FakeTensorMode, hop: Any, args: tuple[Any, ...]) -> Any:
    """What a higher-order op returns for fake tensors, by its own shape function, which calls the callables.

    Raises what that raises, for branches whose results do not fit together and the like.
    """
    kernel = _hops.registered_hop_fake_fns.get(hop)
    with mode, torch.no_grad():
        if hop is torch.ops.higher_order.tag_activation_checkpoint:
            return args[0](*args[1:])
        if kernel is not None:
            return kernel(*args)
        return hop.python_key_table[FakeTensorMode](mode, *args)


def eager_kernel(hop: HigherOrderOperator) -> Callable[..., Any] | None:
    """What eager runs of a higher-order op where autograd has no part in it."""
    kernel: Callable[..., Any] | None = hop.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
    return kernel


def indexing_as_op() -> contextlib.AbstractContextManager[Any]:
    """Inside, `table[i]` with a tensor `i` of no dimension is an op, where torch would ask for the number."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


# Autocast ------------------------------------------------------------------------------------------------------------

_AUTOCAST_KEYS = {device: getattr(DispatchKey, f"Autocast{device.upper()}") for device in AUTOCAST_DEVICES}


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of autocast on a type of device; None where it is off, as it is for what autocast itself calls."""
    return torch.get_autocast_dtype(device) if device in _AUTOCAST_KEYS and torch.is_autocast_enabled(device) else None


@functools.cache
def autocast_may_change(func: OpOverload) -> bool:
    """Whether autocast, if it is on, casts the inputs of an op or of the ops that it is composed of."""
    if not torch._C._dispatch_has_kernel(func.name()):  # a question about metadata, which C++ does not know
        return False
    if any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in _AUTOCAST_KEYS.values()):
        return True
    return func._can_decompose() and not func.is_view


def autocast_rule(func: OpOverload, device: str) -> tuple[Callable[..., Any] | None, bool]:
    """What autocast runs in the place of an op, None for the op itself, and whether that casts inputs of the op.

    The casts, and the op after them, are ops; composite ops without a rule of their own are taken apart.
    """
    key = _AUTOCAST_KEYS[device]
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
        return functools.partial(func._op_dk, key), True
    is_composite = func._can_decompose() and not func.is_view
    return (functools.partial(run_parts, func) if is_composite else None), False


CASTS_INSIDE = frozenset(
    {
        *(torch.ops.aten._transformer_encoder_layer_fwd.default, torch.ops.aten._native_multi_head_attention.default),
        *(torch.ops.aten.linalg_pinv.atol_rtol_tensor, torch.ops.aten.linalg_pinv.atol_rtol_float),
        torch.ops.aten._trilinear.default,
    }
)
"""Ops that autocast leaves alone, and of which the kernel calls ops that it casts. Found by torch's samples."""
