"""How a trace hears, in the thread that traces alone, what is asked of torch, and how all is put back.

Data flow:
    `x.stride()`, `x.data = y`, `f"{x}"`, `torch.tensor(n)` -> FunctionMode -> the handler of that function, else torch
    what no mode of torch sees, since it is no function of tensors, or torch's own way would have to change
    -> the attributes that a trace replaces in the process, in one table; each does what it replaced for other threads
    Interception -> both, for the time of a trace
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional
from torch.overrides import TorchFunctionMode

from scopetrace._compat.ops import is_recording, to_undo
from scopetrace._compat.questions import MISSING, Condition, Replace, function_modes
from scopetrace._compat.versions import CURRENT

Handler = Callable[..., Any]
"""Answers a call of a function. It gets the function, by which it may ask torch, and the arguments."""

_pop, _push = torch._C._pop_torch_function_stack, torch._C._push_on_torch_function_stack
_at = torch._C._get_function_stack_at

STATIC_LOOKUP = "_lazy_load_getattr_static"
"""What gives `typing` the function that it looks for attributes with."""
REPLACED = {
    "a question that runs no op and takes no tensor": """
        torch.get_autocast_dtype torch.get_autocast_gpu_dtype torch.get_default_device torch.get_default_dtype
        torch.is_autocast_cpu_enabled torch.is_autocast_enabled torch.is_grad_enabled torch.is_inference_mode_enabled
        torch.distributed.get_rank torch.distributed.get_world_size torch.distributed.is_initialized
        torch.backends.ContextProp.__get__ torch.nn.parameter._ParameterMeta.__instancecheck__""",
    "a model that asks takes the path that can be traced": """
        torch.compiler._is_compiling_flag torch.compiler._is_exporting_flag""",
    "a module is called that the forward made, or nobody knew": "torch._C._get_tracing_state",
    "a block begins or ends, by which ops run otherwise": """
        torch.inference_mode.__enter__ torch.inference_mode.__exit__ torch.autocast.__enter__ torch.autocast.__exit__
        torch.autograd.graph.saved_tensors_hooks.__enter__ torch.autograd.graph.saved_tensors_hooks.__exit__
        torch.utils._python_dispatch.TorchDispatchMode.__enter__
        torch.utils._python_dispatch.TorchDispatchMode.__exit__""",
    "a region under checkpointing where autograd is off, which makes no hooks": f"""
        torch.utils.checkpoint.{CURRENT.checkpoint_generator}
        torch.distributed._composable.checkpoint_activation.{CURRENT.checkpoint_generator}""",
    "Python's door to autograd's engine, bound under two names": """
        torch.autograd._engine_run_backward torch.autograd.graph._engine_run_backward""",
    "a function with a backward of its own is applied, or its node made": """
        torch.autograd.function._SingleLevelFunction.apply torch.autograd.Function.apply
        torch.autograd.function.BackwardCFunction.__init__ torch.autograd.function.FunctionMeta.forward""",
    "a transform wraps what stands for a parameter in autograd's graph": """
        torch._functorch.vmap._add_batch_dim torch._functorch.eager_transforms._wrap_tensor_for_grad""",
    "an optimizer or a scaler, of which torch's hooks tell only the steps": """
        torch.optim.Optimizer.__init__ torch.optim.Optimizer.zero_grad torch.amp.GradScaler._check_scale_growth_tracker
        torch.amp.GradScaler._lazy_init_scale_growth_tracker torch.amp.GradScaler._maybe_opt_step
        torch.amp.GradScaler.scale""",
    "an optimizer takes the greater of two numbers that data decides": """
        torch.optim._adafactor.max torch.optim._adafactor.min""",
    "the state of the random generators is set": """
        torch.set_rng_state torch.random.set_rng_state torch.cuda.random._lazy_call""",
    "Python objects are exchanged with other processes": """
        torch.distributed.distributed_c10d._get_object_coll_device""",
    "a storage is asked or resized, which is no tensor": """
        torch.UntypedStorage.data_ptr torch.UntypedStorage.nbytes torch.UntypedStorage.resize_""",
    "a symbolic number is asked for what Python's numbers have": """
        torch.SymInt.__getattribute__ torch.SymFloat.__getattribute__ torch.SymBool.__getattribute__
        torch.SymInt.__repr__ torch.SymFloat.__repr__ torch.SymBool.__repr__ torch.SymInt.__format__
        torch.SymFloat.__format__ torch.SymInt.__hash__ torch.SymInt.__round__ torch.SymBool.__eq__
        torch.SymBool.__ne__ torch.SymBool.__index__""",
    "a higher-order op is called without being compiled first": """
        torch._higher_order_ops.utils._hop_compile_and_call
        torch._higher_order_ops.invoke_subgraph.invoke_subgraph_placeholder""",
    "a compiled function runs its Python": "torch._dynamo.eval_frame._stance",
    "an op gets from the dispatcher to the recorder, and C++ learns the device of a fake tensor, fast": """
        torch._ops.OpOverload._get_dispatch torch._subclasses.fake_tensor.FakeTensorMode.__torch_dispatch__""",
    "torch's Python goes the way that it goes without a mode of torch functions": """
        torch.overrides.has_torch_function torch.nn.functional.has_torch_function
        torch.nn.functional.has_torch_function_unary torch.nn.functional.has_torch_function_variadic""",
    "Python 3.12 tells an instance of a Protocol": f"typing.{STATIC_LOOKUP}",
    "a call of another trace reads a gradient, or adds to it": "scopetrace._compat.gradients.Leaf.grad",
    "torch's own, of a mode that is active": "torch.utils._python_dispatch._is_in_torch_dispatch_mode",
}
"""By reason, the names. Some are there in some versions of torch only, or where a module is imported."""


class FunctionMode(TorchFunctionMode):
    """Gives calls of torch's functions to handlers.

    torch gives each call of a function, method or property of tensors to the innermost mode, which is off meanwhile.
    This one is below those of the model, so that it gets what these make of a call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.handlers: dict[Any, tuple[Handler, Callable[..., Any]]] = {}  # with what it asks

    def on(self, func: Callable[..., Any], handler: Handler) -> None:
        """Let a handler answer calls of a function of torch: a method, `Tensor.data.__get__`, `torch.tensor`.

        Where there is one already, the new one gets that as the function.
        """
        before = self.handlers.get(func)
        self.handlers[func] = handler, func if before is None else functools.partial(before[0], before[1])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        entry = self.handlers.get(func)
        if entry is not None:
            handler, ask = entry
            return handler(ask, *args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, it is on, below all modes that are. Nothing happens where it is on already."""
        if any(_at(i) is self for i in range(function_modes())):
            yield
            return
        _put_back([*_taken(), self])
        try:
            yield
        finally:
            _put_back([mode for mode in _taken() if mode is not self])


def _taken() -> list[Any]:
    """All modes, the innermost first, which are off then."""
    return [_pop() for _ in range(function_modes())]


def _put_back(modes: list[Any]) -> None:
    for mode in reversed(modes):
        _push(mode)


def after(tell: Callable[..., Any]) -> Handler:
    """Lets torch answer, after `tell` was called with the arguments."""

    def handler(ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tell(*args, **kwargs)
        return ask(*args, **kwargs)

    return handler


def without_mode(replace: Replace, mode: FunctionMode) -> None:
    """Let torch's Python not count `mode` where it asks whether modes or subclasses get a call.

    `nn.TransformerEncoder` has its fast path only where nobody does, higher-order ops go to the dispatcher, and
    `nn.functional` runs in Python under the mode.
    """
    names = "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"
    for module, name in ((torch.overrides, names[0]), *[(torch.nn.functional, name) for name in names]):
        replace(module, name, _asked_without(mode, getattr(module, name)))


def _asked_without(mode: FunctionMode, ask: Callable[..., bool]) -> Callable[..., bool]:
    def asked(*args: Any) -> bool:
        answer = ask(*args)
        if not answer or function_modes() != 1 or _at(0) is not mode:
            return answer
        _pop()
        try:
            return ask(*args)
        finally:
            _push(mode)

    return asked


class Interception:
    """Lets handlers answer in the place of torch in the thread that traces, until the stack ends.

    A handler gets what it stands for, by which it may ask torch, and the arguments. It is called where `when()`: by
    default, where recording is not paused.
    """

    def __init__(self, stack: contextlib.ExitStack, is_paused: Condition) -> None:
        thread = threading.get_ident()
        self.stack = stack
        self._replaced: list[tuple[Any, str, Any]] = []
        stack.enter_context(to_undo(self._put_back))
        self.mode = FunctionMode()
        stack.callback(self.mode.handlers.clear)  # they lead to it, and to the tape

        def in_tracing_thread() -> bool:
            return threading.get_ident() == thread

        def is_observed() -> bool:
            return threading.get_ident() == thread and not is_paused()

        def in_forward() -> bool:
            return is_recording() and is_observed()

        self.in_tracing_thread, self.is_observed, self.in_forward = in_tracing_thread, is_observed, in_forward

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a class or Python module. At the end it is again what it was, or inherited."""
        self._replaced.append((owner, name, vars(owner).get(name, MISSING)))
        setattr(owner, name, value)

    def _put_back(self) -> None:
        for owner, name, before in reversed(self._replaced):
            if before is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def replace(self, owner: Any, name: str, handler: Handler, when: Condition | None = None) -> None:
        """Let a handler answer in the place of a function of a module or class, or a builtin that it uses."""
        ask, is_heard = getattr(owner, name, None) or vars(builtins)[name], when or self.is_observed

        @functools.wraps(ask)
        def answered(*args: Any, **kwargs: Any) -> Any:
            return handler(ask, *args, **kwargs) if is_heard() else ask(*args, **kwargs)

        self.put(owner, name, answered)

    def on(self, func: Callable[..., Any], handler: Handler, when: Condition | None = None) -> None:
        """Let a handler answer calls of a function of tensors."""
        is_heard = when or self.is_observed

        def answered(ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return handler(ask, *args, **kwargs) if is_heard() else ask(*args, **kwargs)

        self.mode.on(func, answered)
