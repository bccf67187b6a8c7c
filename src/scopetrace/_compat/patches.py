"""What a trace replaces in the process while it runs, and puts back when it ends, with an exception too.

A dispatch mode sees ops only. Module calls, `backward`, custom autograd functions, seeding, writes to `.data`, and the
ways from a tensor to a Python value that run no op are seen by replacing the functions that do them. A replacement asks
`is_observed()`, whether the calling thread is the one that traces and recording is not paused, and otherwise calls what
it replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.autograd.graph
import torch.utils.checkpoint
from torch._functorch import eager_transforms, vmap
from torch._higher_order_ops import utils
from torch.autograd.function import BackwardCFunction, FunctionMeta, _SingleLevelFunction
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import _get_overridable_functions, _get_tensor_methods, get_testing_overrides
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from scopetrace._compat.gradients import report_hooks, report_optimizers, report_scalers
from scopetrace._compat.ops import device_at_once, in_transform, short_way, without_transforms
from scopetrace._compat.questions import Condition, Replace
from scopetrace._compat.replaced import Handler, Interception, after, without_mode
from scopetrace._compat.symbol_questions import behave_as_numbers, index_with_symbols
from scopetrace._compat.tensors import requires_grad_of
from scopetrace.sources import TORCH_DIRECTORY, asked_by_model, asking_frame, prefixes

_FRAMES_PER_CALL = 3
"""How many times the Python frames of a module call in eager a reported one takes."""
_CACHES_OF_FUNCTIONS = get_testing_overrides, _get_overridable_functions, _get_tensor_methods
"""Sets of torch's functions, by identity, that torch makes once. What they get inside a trace is forgotten after it."""


@contextlib.contextmanager
def observing(
    observer: Any, autograd: Any, watch_questions: Callable[[Interception], None], modules: Iterable[torch.nn.Module]
) -> Iterator[Condition]:
    """Tell observers what this thread does inside, and tell models that they are being exported. Gives `is_observed`.

    Args:
        observer: a `CallRecorder` of room `record`, which is told unless it is paused.
        autograd: an `AutogradRecorder` of room `autograd`, which is told unless `observer` is paused.
        watch_questions: enters what answers questions.
        modules: those whose direct calls of `forward` are reported.
    """
    with contextlib.ExitStack() as stack:
        _prepare(stack, modules)
        torch_calls = Interception(stack, lambda: observer.paused)
        _report_module_calls(torch_calls, observer, modules)
        _report_backward(torch_calls, autograd)
        _report_custom_functions(torch_calls, autograd)
        _report_modes(torch_calls, observer)
        report_hooks(torch_calls, autograd)
        _report_seeding(torch_calls, observer)
        _report_object_collectives(torch_calls, observer)
        index_with_symbols(torch_calls)
        behave_as_numbers(torch_calls)
        _report_transforms(torch_calls, autograd)
        report_optimizers(torch_calls, autograd)
        report_scalers(torch_calls, autograd)
        watch_questions(torch_calls)
        _call_higher_order_ops(torch_calls, observer.on_nested_region)
        short_way(torch_calls.put)
        device_at_once(torch_calls.put)
        without_mode(torch_calls.put, torch_calls.mode)
        _not_compiling(torch_calls.put)
        stack.enter_context(torch_calls.mode.active())
        yield torch_calls.is_observed


def _prepare(stack: contextlib.ExitStack, modules: Iterable[torch.nn.Module]) -> None:
    """Set what torch and the modules are to be while they are traced, until the stack ends."""
    for cache in _CACHES_OF_FUNCTIONS:
        if not cache.cache_info().currsize:
            stack.callback(cache.cache_clear)
    stack.callback(sys.setrecursionlimit, sys.getrecursionlimit())
    sys.setrecursionlimit(_FRAMES_PER_CALL * sys.getrecursionlimit())  # as many nested modules as in eager
    for module in modules:
        if isinstance(module, _LazyGraphModule):  # its first forward replaces the class's forward, and calls it
            stack.callback(setattr, type(module), "forward", type(module).forward)
            module.real_recompile()
        if getattr(module, "_compiled_call_impl", None) is not None:
            module._compiled_call_impl = None  # put back with the other attributes of the module
    stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
    torch.set_autocast_cache_enabled(False)  # it would keep casts of parameters, which are fake here
    stack.enter_context(exporting())


# Module calls --------------------------------------------------------------------------------------------------------


def _report_module_calls(torch_calls: Interception, observer: Any, modules: Iterable[torch.nn.Module]) -> None:
    """Give modules a `_call_impl`, a `forward` and methods of their own that report, until the stack ends.

    `_call_impl` rather than `__call__`, which Python takes from the class. Hooks are no way: they turn off the fast
    path of `nn.TransformerEncoderLayer`. Classes stay as they are. A module that the forward makes, or copies, is seen
    where it is called first: each call asks `torch._C._get_tracing_state` before it looks for `forward`.
    """
    is_observed, ask = torch_calls.is_observed, torch._C._get_tracing_state
    of_class: Any = functools.cache(functools.partial(_reported, observer, is_observed))
    entries = list[tuple[torch.nn.Module, str, Any, Any]]()
    torch_calls.stack.callback(_take_back, entries)

    def give(module: torch.nn.Module, methods: dict[str, Callable[..., Any]]) -> None:
        attributes = vars(module)
        for name, function in methods.items():
            outer = dict.get(attributes, name)
            if outer is None or hasattr(outer, "_scopetrace_original"):  # that of an outer trace tells the wrong one
                ours = types.MethodType(function, module)
                dict.__setitem__(attributes, name, ours)
                entries.append((module, name, ours, outer))

    def tracing_state() -> Any:
        call = sys._getframe(1)
        if call.f_code is _CALL_IMPL and call.f_back and call.f_back.f_code is _WRAPPED_CALL_IMPL and is_observed():
            module = call.f_locals["self"]  # one with a `_call_impl` of its own has another way here
            if not dict.__contains__(vars(module), "forward"):
                give(module, _forward_of(type(module), observer, is_observed, "call"))
        return ask()

    for module in modules:
        give(module, of_class(type(module)))
    torch_calls.put(torch._C, "_get_tracing_state", tracing_state)


_CALL_IMPL, _WRAPPED_CALL_IMPL = torch.nn.Module._call_impl.__code__, torch.nn.Module._wrapped_call_impl.__code__


def _take_back(entries: Iterable[tuple[torch.nn.Module, str, Any, Any]]) -> None:
    for module, name, ours, outer in entries:
        attributes = vars(module)
        if attributes.get(name) is not ours:
            continue  # the model has set another one
        if outer is None:
            del attributes[name]
        else:
            attributes[name] = outer


def _method(
    outer: Any, observer: Any, is_observed: Condition, method: str, run: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A method of a module, reported as a call of `method`, which is to be `run`: by default as it is."""

    @functools.wraps(outer)
    def reported(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_observed():
            return outer(self, *args, **kwargs)
        return observer.on_call(self, method, run or outer, args, kwargs)

    reported._scopetrace_original = outer  # type: ignore[attr-defined]
    return reported


def _reported(observer: Any, is_observed: Condition, kind: Any) -> dict[str, Callable[..., Any]]:
    """What the modules of a class get, by name."""
    original, run = torch.nn.Module._call_impl, None
    if kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch."):
        run = _run_compiled
    elif issubclass(kind, torch.jit.ScriptModule):
        run = functools.partial(_run_scripted, original)
    methods = {name: _method(x, observer, is_observed, name) for name, x in observer.methods_of(kind).items()}
    call = {"_call_impl": _method(original, observer, is_observed, "call", run)}
    return {**call, **_forward_of(kind, observer, is_observed, "forward"), **methods}


def _forward_of(kind: type, observer: Any, is_observed: Condition, method: str) -> dict[str, Callable[..., Any]]:
    """The `forward` of a class, if it can be replaced, which is mostly reported where it was not called itself."""
    base = next((base for base in kind.__mro__ if "forward" in vars(base)), torch.nn.Module)
    forward: Any = vars(base).get("forward")
    is_bound = hasattr(forward, "__get__") and not isinstance(forward, (functools.partial, staticmethod))
    is_method = callable(forward) and is_bound and not issubclass(kind, torch.jit.ScriptModule)
    if not is_method or base is torch.nn.Module:
        return {}
    run = _batch_norm if base is _BatchNorm else None
    return {"forward": _method(forward, observer, is_observed, method, run)}


def _run_compiled(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._orig_mod(*args, **kwargs)


def _run_scripted(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a script module as outside an export.

    While the exporting flags are set, a script method calls the Python function that it was compiled from, and passes
    `self` twice. What TorchScript has compiled of it after some calls computes gradients as one op, which is forgotten
    before and after.
    """
    _forget_compiled(module)
    try:
        with exporting(False), torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            return original(module, *args, **kwargs)
    finally:
        _forget_compiled(module)


def _forget_compiled(module: Any) -> None:
    for name in module._c._method_names():  # its `forward` may be Python
        module._c._get_method(name)._debug_flush_compilation_cache()


# Autograd, seeds, storages -------------------------------------------------------------------------------------------


def _report_backward(torch_calls: Interception, observer: Any) -> None:
    """The mode is on in the engine too: hooks, functions of autograd and regions that run again are of the model."""

    def run(outer: Handler, outputs: Any, grads: Any, keep: bool, create_graph: bool, *more: Any, **kw: Any) -> Any:
        accumulates, (inputs, *args) = kw.pop("accumulate_grad", False), more or ((),)

        def differentiate(by: Sequence[torch.Tensor]) -> Any:
            return outer(outputs, grads, keep, create_graph, tuple(by), *args, **kw) if by else ()

        outputs, grads = pytree.tree_map_only(torch.Tensor, observer.gradients.differentiated, (outputs, grads))
        how = {"accumulates": accumulates, "create_graph": create_graph, "keeps_graph": keep}
        with torch_calls.mode.active():
            return observer.gradients.on_backward(differentiate, outputs, grads, inputs, **how)

    for module in (torch.autograd, torch.autograd.graph):  # each has imported it under its name
        torch_calls.replace(module, "_engine_run_backward", run)

    def make_dual(*_: Any, **__: Any) -> None:
        if not in_transform():
            observer.on_forward_ad()

    torch_calls.on(torch._C._VariableFunctions._make_dual, after(make_dual))


def _report_transforms(torch_calls: Interception, observer: Any) -> None:
    """Transforms such as torch.vmap wrap what stands for a parameter in autograd's graph of the forward."""

    def wrapped(wrap: Callable[..., Any], t: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(t, torch.Tensor):
            with without_transforms():
                t = observer.gradients.differentiated(t)
        return wrap(t, *args, **kwargs)

    torch_calls.replace(vmap, "_add_batch_dim", wrapped)
    torch_calls.replace(eager_transforms, "_wrap_tensor_for_grad", wrapped)


def _report_modes(torch_calls: Interception, observer: Any) -> None:
    """Modes that see ops below autograd, where a trace has only their metadata.

    Those of selective checkpointing stay off: what they keep is asked of their policy where a region runs again.
    """
    off: set[int] = set()

    def enter(ask: Callable[..., Any], mode: TorchDispatchMode) -> Any:
        kind = type(mode)
        if kind.__module__ == torch.utils.checkpoint.__name__:
            off.add(id(mode))
            return mode
        if not kind.__module__.startswith(_QUIET_MODES):
            observer.on_dispatch_mode(kind.__name__)
        return ask(mode)

    def leave(ask: Callable[..., Any], mode: TorchDispatchMode, *error: Any) -> Any:
        return off.remove(id(mode)) if id(mode) in off else ask(mode, *error)

    torch_calls.replace(TorchDispatchMode, "__enter__", enter)
    torch_calls.replace(TorchDispatchMode, "__exit__", leave, when=lambda: bool(off))


_QUIET_MODES = ("torch._", "torch.autograd.", "torch.fx.", "torch.utils._", "scopetrace.")
"""Modules whose modes change no results, and tell Python nothing as `FlopCounterMode` does."""


def _report_custom_functions(torch_calls: Interception, observer: Any) -> None:
    """Below `Function.apply`: in a transform such as torch.vmap, the function that is applied there is reported."""
    outer = torch._C._FunctionBase.__dict__["apply"]
    applying = 0

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal applying
        if not torch_calls.is_observed():
            return outer.__get__(None, cls)(*args, **kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:  # reentrant checkpointing: run what it wraps
            return _reentrant(observer, *args)
        if cls.__module__ != "torch._library.autograd" and not in_transform():  # a custom op is recorded itself
            out = observer.on_custom_function(cls, _with_defaults(cls, args, kwargs), is_seen=True)
            if out is not NotImplemented:
                return out
            # autograd takes tensors, and not those in lists
            args = tuple([observer.on_applied(x) if isinstance(x, torch.Tensor) else x for x in args])
            kwargs = {k: observer.on_applied(x) if isinstance(x, torch.Tensor) else x for k, x in kwargs.items()}
        applying += 1
        try:
            return outer.__get__(None, cls)(*args, **kwargs)
        finally:
            applying -= 1

    _report_bound_apply(torch_calls, observer, lambda: applying > 0)
    for owner in (_SingleLevelFunction, torch.autograd.Function):
        if vars(owner).get("apply", outer) is outer:
            torch_calls.put(owner, "apply", classmethod(apply))


def _report_bound_apply(torch_calls: Interception, observer: Any, is_applying: Condition) -> None:
    """Since torch 2.14 `Function.apply` is in C++: one that somebody holds makes a node, then asks for `forward`."""
    unseen: list[tuple[Any, bool]] = []  # a node that was made, and whether autograd was on

    def make_node(_: Callable[..., Any], node: Any) -> None:
        if not is_applying():
            unseen[:] = [(node, torch.is_grad_enabled())]

    def forward_of(cls: Any) -> Callable[..., Any]:
        forward: Callable[..., Any] = inspect.getattr_static(cls, "forward").__get__(None, cls)
        is_asked_by_apply = unseen and torch_calls.is_observed() and unseen[0][0]._forward_cls is cls
        return functools.partial(run_unseen, forward, *unseen.pop()) if is_asked_by_apply else forward

    def run_unseen(forward: Callable[..., Any], node: Any, grad: bool, *args: Any) -> Any:
        cls, inputs = node._forward_cls, args[1:] if args and args[0] is node else args
        with torch.set_grad_enabled(grad):
            out = observer.on_custom_function(cls, inputs, is_seen=False)
        if out is NotImplemented:
            return forward(*args)
        results = [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, torch.Tensor)]
        node.mark_non_differentiable(*[x for x in results if not requires_grad_of(x)])
        return out

    torch_calls.replace(BackwardCFunction, "__init__", make_node)
    torch_calls.put(FunctionMeta, "forward", property(forward_of))


def _with_defaults(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments as a forward beside `setup_context` takes them."""
    if cls.setup_context is torch.autograd.Function.setup_context:
        return args
    bound = inspect.signature(cls.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args


def _reentrant(observer: Any, function: Callable[..., Any], keeps_rng: bool, *args: Any) -> Any:
    """A reentrant checkpoint: what it wraps runs. Its results require grad only if one of its arguments does."""
    tensors = [t for t in args if isinstance(t, torch.Tensor)]
    grad = any(map(requires_grad_of, tensors))
    region = observer.checkpointed(tensors, grad=grad, early_stop=False, keeps_rng=keeps_rng)
    with region, observer.on_reentrant(tensors), contextlib.nullcontext() if grad else torch.no_grad():
        return function(*args)


def _report_seeding(torch_calls: Interception, observer: Any) -> None:
    """Fake tensors draw no numbers, so the state of torch's generators changes only where the forward sets it.

    `torch.manual_seed`, `torch.seed` and the functions of `torch.cuda` tell all GPUs, which `_lazy_call` does.
    """

    def seed(*_: Any, **__: Any) -> None:
        if asked_by_model(_SEEDING):
            observer.on_seed()

    for module, name in ((torch.cuda.random, "_lazy_call"), (torch, "set_rng_state"), (torch.random, "set_rng_state")):
        torch_calls.replace(module, name, after(seed), torch_calls.in_forward)


_SEEDING = prefixes(TORCH_DIRECTORY, "random.py", "cuda/random.py", "_compile.py", "_dynamo/", "utils/_contextlib.py")


def _report_object_collectives(torch_calls: Interception, observer: Any) -> None:
    """`dist.broadcast_object_list` and its kind send pickled objects as tensors. All ask for the device of these."""

    def device(*_: Any) -> None:
        frame = asking_frame()
        if frame is not None:
            observer.on_object_collective(f"torch.distributed.{frame.f_code.co_name}")

    if torch.distributed.is_available():
        torch_calls.replace(torch.distributed.distributed_c10d, "_get_object_coll_device", after(device))


# Batch norm ----------------------------------------------------------------------------------------------------------


def _batch_norm(norm: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
    """BatchNorm with `momentum=None` in training reads its number of batches as a Python float.

    In a trace that float would be a constant. This computes the same running statistics with tensors.
    """
    averages = norm.training and norm.momentum is None and norm.track_running_stats
    if not averages or norm.num_batches_tracked is None:
        return _BatchNorm.forward(norm, input)
    norm._check_input_dim(input)
    assert norm.running_mean is not None and norm.running_var is not None
    norm.num_batches_tracked.add_(1)
    mean, var = torch.zeros_like(norm.running_mean), torch.zeros_like(norm.running_var)
    out = torch.nn.functional.batch_norm(input, mean, var, norm.weight, norm.bias, True, 1.0, norm.eps)
    share = norm.num_batches_tracked.reciprocal().to(mean.dtype)
    norm.running_mean.lerp_(mean, share)
    norm.running_var.lerp_(var, share)
    return out


# Higher-order ops ----------------------------------------------------------------------------------------------------

# the package has an op of this name
_subgraphs: Any = importlib.import_module("torch._higher_order_ops.invoke_subgraph")


def _call_higher_order_ops(torch_calls: Interception, on_nested_region: Callable[[Callable[[], Any]], Any]) -> None:
    """Let `torch.cond` and its kind call their op, and `on_nested_region` a function under `nested_compile_region`.

    They compile their callables first, which finds what these close over; the recorder finds that itself.
    """

    def call(_: Callable[..., Any], fn: Callable[..., Any], args: Any, kwargs: Any = None) -> Any:
        if not callable(args[0]):  # the predicate of cond, the one op whose operands are still nested
            args = _flat_operands(*args)
        return fn(*args, **(kwargs or {}))

    def call_region(_: Callable[..., Any], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return on_nested_region(functools.partial(fn, *args, **kwargs))

    torch_calls.replace(utils, "_hop_compile_and_call", call)
    torch_calls.replace(_subgraphs, "invoke_subgraph_placeholder", call_region)


def _flat_operands(pred: Any, true_fn: Any, false_fn: Any, operands: Any) -> tuple[Any, ...]:
    flat, spec = pytree.tree_flatten(operands)

    def nested(branch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands: branch(*pytree.tree_unflatten(operands, spec))

    return pred, nested(true_fn), nested(false_fn), tuple(flat)


# The state of the process --------------------------------------------------------------------------------------------


class _InThisThread(int):
    """A flag of the process that is True in the thread that makes it alone, until `ended`."""

    def __init__(self, _: int) -> None:
        self._thread, self.ended = threading.get_ident(), False

    def __bool__(self) -> bool:
        by_wrapper = sys._getframe(1).f_code.co_name == "nonrecursive_disable_wrapper"  # it raises where torch exports
        return not (self.ended or by_wrapper) and threading.get_ident() == self._thread

    def __eq__(self, other: object) -> bool:
        return bool(self) == bool(other)

    def __hash__(self) -> int:
        return hash(bool(self))


@contextlib.contextmanager
def exporting(flag: bool = True) -> Iterator[None]:
    """`is_exporting()` and `is_compiling()` of torch.compiler return `flag` inside.

    As under torch.export: models ask them to choose a path that can be traced. In other threads they are False.
    """
    answer: Any = _InThisThread(True) if flag else False
    with mock.patch.multiple(torch.compiler, _is_compiling_flag=answer, _is_exporting_flag=answer):
        try:
            yield
        finally:
            if flag:
                answer.ended = True  # another thread, which compiles, may have it, to put it back


class _ForcedEager:
    """The stance of torch.compile: in this thread compiled functions run their Python, in others all is as it was."""

    def __init__(self, before: Any) -> None:
        self._thread, self._before = threading.get_ident(), before
        self._inside = dataclasses.replace(before, stance="force_eager", backend=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside if threading.get_ident() == self._thread else self._before, name)


def _not_compiling(replace: Replace) -> None:
    """Compiled functions inside the model run their Python. Nothing to do where dynamo was never imported."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and not isinstance(dynamo._stance, _ForcedEager):  # as it is in a trace inside a trace
        replace(dynamo, "_stance", _ForcedEager(dynamo._stance))
