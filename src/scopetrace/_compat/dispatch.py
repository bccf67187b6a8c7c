"""The pre-dispatch mode slot, where ops arrive before autocast, autograd and decomposition.

torch keeps three slots there: for proxy tracing, for functionalization, and for schema checking. The recorder takes
the third: torch's own code looks into the other two (`torch.vmap`, symbolic integers and higher-order ops each look for
a proxy tracer) and would find a tracer that is none. Schema checking is a test tool that is never on in a trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, OpOverload, _higher_order_ops, _pop_mode_from_pre_dispatch
from torch._ops import _set_mode_pre_dispatch as _put_mode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from scopetrace._compat.versions import CURRENT

OnOp = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]
OnHigherOrderOp = Callable[[HigherOrderOperator, tuple[Any, ...], dict[str, Any]], Any]

_AUTOCAST_KEYS = {
    name: getattr(DispatchKey, key)
    for name, key in {
        "cpu": "AutocastCPU",
        "cuda": "AutocastCUDA",
        "xpu": "AutocastXPU",
        "hpu": "AutocastHPU",
        "mps": "AutocastMPS",
        "xla": "AutocastXLA",
    }.items()
    if hasattr(DispatchKey, key)
}


class PreDispatchMode(SchemaCheckMode):
    """Calls `on_op` for each op that Python or C++ code calls, whole, with itself out of the way.

    `on_higher_order` gets torch.cond and its kind.
    """

    def __init__(self, on_op: OnOp, on_higher_order: OnHigherOrderOp) -> None:
        super().__init__()
        self._dispatch_key = DispatchKey.PreDispatch
        self.on_op = on_op
        self.on_higher_order = on_higher_order

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: dynamo and others need not stand back from it."""
        return True

    def __enter__(self) -> PreDispatchMode:
        _register_higher_order_ops()
        super().__enter__()
        return self


def _torch_dispatch(
    self: PreDispatchMode, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    return self.on_op(func, args, kwargs or {})


# Set from outside the class body: TorchDispatchMode wraps what stands in the body with dynamo's `disable`, which costs
# as much as recording an op does.
PreDispatchMode.__torch_dispatch__ = _torch_dispatch  # type: ignore[method-assign, assignment]


def _register_higher_order_ops() -> None:
    """Register an implementation under `PreDispatchMode` for each higher-order op that has none yet."""
    for hop in _higher_order_ops.values():
        if PreDispatchMode not in hop.python_key_table:
            hop.py_impl(PreDispatchMode)(_reported(hop))


def _reported(hop: HigherOrderOperator) -> Callable[..., Any]:
    """Hands a call of `hop` to the mode, without the keyword arguments that torch passes with a default value."""
    defaults = CURRENT.hop_defaults.get(hop.name(), {})

    def call(mode: PreDispatchMode, *args: Any, **kwargs: Any) -> Any:
        given = {name: value for name, value in kwargs.items() if name not in defaults or value != defaults[name]}
        return mode.on_higher_order(hop, args, given)

    return call


@contextlib.contextmanager
def dispatching_to(mode: PreDispatchMode, *others: Any) -> Iterator[None]:
    """`others` and, above them, `mode`, with an earlier trace of this thread set aside."""
    outer = _pop_mode_from_pre_dispatch() if _pre_dispatch_modes() else None
    try:
        with contextlib.ExitStack() as stack:
            for other in others:
                stack.enter_context(other)
            stack.enter_context(enable_python_dispatcher())
            stack.enter_context(mode)
            yield
    finally:
        if outer is not None:
            _put_mode(outer)


def _pre_dispatch_modes() -> int:
    return torch._ops._len_torch_dispatch_stack_pre_dispatch()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Ops inside are not recorded (they stay fake). A no-op where recording is already out of the way."""
    mode = _pop_mode_from_pre_dispatch() if _pre_dispatch_modes() else None
    try:
        yield
    finally:
        if mode is not None:
            _put_mode(mode)


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Ops inside run for real, outside all modes and transforms, without autograd and autocast."""
    no_transforms, no_autocast = torch._C._DisableFuncTorch(), torch._C._DisableAutocast()
    with _disable_current_modes(), torch._C._DisablePythonDispatcher(), no_transforms, no_autocast, torch.no_grad():
        yield


def in_transform() -> bool:
    """Whether a functorch transform (vmap, grad, jvp) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def unwrapped(t: torch.Tensor) -> torch.Tensor:
    """The tensor inside the wrappers of functorch transforms: all of a batch, for one example of it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


def through_autocast(mode: PreDispatchMode, func: OpOverload, device: str, args: Any, kwargs: Any) -> Any:
    """Apply autocast's rule for `func` with the recorder on, so that the casts are recorded as ops.

    Returns NotImplemented when autocast does not touch the op.
    """
    key = _AUTOCAST_KEYS.get(device)
    if key is None or not torch.is_autocast_enabled(device) or torch._C._dispatch_tls_is_dispatch_key_excluded(key):
        return NotImplemented
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
        return with_mode(mode, lambda: func._op_dk(key, *args, **kwargs))
    if func._can_decompose() and not func.is_view:
        return decomposed(mode, func, args, kwargs)
    return NotImplemented


def decomposed(mode: PreDispatchMode, func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Run a composite op as its parts, with the recorder on."""
    return with_mode(mode, lambda: func.decompose(*args, **kwargs))


class _BelowTransforms(TorchDispatchMode):
    """Sees the ops that functorch transforms turn an op into, on plain tensors."""

    def __init__(self, on_op: OnOp) -> None:
        super().__init__()
        self.on_op = on_op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.on_op(func, args, kwargs or {})


def through_transform(on_op: OnOp, func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Apply the running functorch transforms to `func`; `on_op` gets the ops that come out below them."""
    with _BelowTransforms(on_op):
        return func(*args, **kwargs)


def with_mode(mode: PreDispatchMode, run: Callable[[], Any]) -> Any:
    """What `run` returns, with the recorder on again: for what an op that has arrived calls."""
    _put_mode(mode)
    try:
        return run()
    finally:
        _pop_mode_from_pre_dispatch()


def auto_functionalized() -> Any:
    """The higher-order op that runs a mutating op on copies and returns what it changed."""
    from torch._higher_order_ops.auto_functionalize import auto_functionalized as op

    return op
