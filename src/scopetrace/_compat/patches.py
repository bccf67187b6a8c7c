"""What a trace changes in the process while it runs, and puts back when it ends, however it ends.

`nn.Module._call_impl` rather than `__call__`: torch.fx kept `__call__` at import, so that a later patch of it is not
seen under make_fx and export; hooks rather than either would turn off the fast path of `nn.TransformerEncoderLayer`.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
import torch.autograd.graph
import torch.utils.checkpoint

from scopetrace._compat.batch_norm import averaging_in_tensors
from scopetrace._compat.higher_order import called_at_once
from scopetrace._compat.reads import Reader, report_reads


class Observer(Reader, Protocol):
    """Who is told of module calls. `run` does what would have happened without the patch."""

    paused: bool

    def on_call(self, module: torch.nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module is called."""

    def on_forward(self, module: torch.nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The forward of a module is called."""

    def on_backward(self, *, accumulates: bool) -> None:
        """The forward differentiates; with `accumulates`, into `.grad`."""

    def on_custom_function(self, cls: type, args: Any) -> None:
        """A `torch.autograd.Function` with its own backward is applied."""

    def on_seed(self) -> None:
        """The forward seeds torch's generator."""

    def on_storage_resize(self, storage: torch.UntypedStorage, size: int) -> bool:
        """The forward gives a storage `size` bytes. Returns whether that is done."""

    def on_data(self, t: torch.Tensor, get: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The forward reads `t.data`, which `get` gives. Returns it."""

    def on_set_data(self, t: torch.Tensor, new: Any) -> bool:
        """The forward sets `t.data`, perhaps in a leaf module. Returns whether that is done."""


@contextlib.contextmanager
def observing(observer: Observer, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Tell `observer` of all module calls in this thread, and present the process to models as exporting."""
    thread = threading.get_ident()

    def here() -> bool:
        return threading.get_ident() == thread

    def mine() -> bool:
        return here() and not observer.paused

    with contextlib.ExitStack() as stack:
        stack.callback(_set, torch.nn.Module, "_call_impl", torch.nn.Module._call_impl)
        torch.nn.Module._call_impl = _call_impl(observer, mine)  # type: ignore[method-assign]
        stack.enter_context(averaging_in_tensors(mine))
        for cls in {owner for m in modules if (owner := _owner(type(m))) is not None}:
            stack.callback(_set, cls, "forward", cls.__dict__["forward"])
            _set(cls, "forward", _forward(cls, observer, mine))
        stack.enter_context(_backward_reported(observer, mine))
        stack.enter_context(_custom_functions_reported(observer, mine))
        stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.enter_context(_seeding_reported(observer, mine))
        stack.enter_context(_storage_resizes_reported(observer, mine))
        stack.enter_context(_data_reported(observer, here, mine))
        report_reads(stack, observer, mine)
        stack.enter_context(exporting())
        stack.enter_context(_not_compiling())
        stack.enter_context(called_at_once(mine))
        stack.enter_context(_no_autocast_cache())
        for module in modules:
            if getattr(module, "_compiled_call_impl", None) is not None:
                module._compiled_call_impl = None  # what the module was is put back with its other attributes
        yield


def _set(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _bare(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function under the patches of an outer trace."""
    return getattr(fn, "_scopetrace_original", fn)


def _call_impl(observer: Observer, mine: Callable[[], bool]) -> Callable[..., Any]:
    outer = torch.nn.Module._call_impl
    original = _bare(outer)

    def call_impl(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not mine():
            return outer(self, *args, **kwargs)
        if _is_compiled(self):
            return observer.on_call(self, lambda _, *a, **k: self._orig_mod(*a, **k), args, kwargs)  # type: ignore[operator]
        if isinstance(self, torch.jit.ScriptModule):
            return observer.on_call(self, _scripted(original), args, kwargs)
        return observer.on_call(self, original, args, kwargs)

    call_impl._scopetrace_original = original  # type: ignore[attr-defined]
    return call_impl


def _is_compiled(module: torch.nn.Module) -> bool:
    return "_orig_mod" in module.__dict__.get("_modules", ()) and type(module).__name__ == "OptimizedModule"


def _owner(cls: type) -> type | None:
    """The class that defines the `forward` of `cls`, when it can be patched."""
    for base in cls.__mro__:
        if "forward" in base.__dict__:
            plain = callable(base.__dict__["forward"]) and not issubclass(cls, torch.jit.ScriptModule)
            return base if plain and base is not torch.nn.Module else None
    return None


def _forward(cls: type, observer: Observer, mine: Callable[[], bool]) -> Callable[..., Any]:
    """`forward` of a class, seen when it is called without the module being called."""
    outer = cls.__dict__["forward"]
    original = _bare(outer)

    @functools.wraps(original)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not mine():
            return outer(self, *args, **kwargs)
        if _owner(type(self)) is not cls:  # super().forward(): part of the same call
            return original(self, *args, **kwargs)
        return observer.on_forward(self, original, args, kwargs)

    forward._scopetrace_original = original  # type: ignore[attr-defined]
    return forward


@contextlib.contextmanager
def _backward_reported(observer: Observer, mine: Callable[[], bool]) -> Iterator[None]:
    """autograd's engine is entered from two modules that each hold its name."""
    places = [m for m in (torch.autograd, torch.autograd.graph) if hasattr(m, "_engine_run_backward")]
    outer = places[0]._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if mine():
            observer.on_backward(accumulates=bool(kwargs.get("accumulate_grad")))
        return outer(*args, **kwargs)

    for place in places:
        place._engine_run_backward = run_backward  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for place in places:
            place._engine_run_backward = outer  # type: ignore[attr-defined]


def _scripted(original: Callable[..., Any]) -> Callable[..., Any]:
    """A script method calls the Python that it was compiled from, with one `self` too many, when the flags are set."""

    def run(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with exporting(False), torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            return original(module, *args, **kwargs)

    return run


@contextlib.contextmanager
def exporting(flag: bool = True) -> Iterator[None]:
    """Models ask `torch.compiler.is_exporting()` to choose a path that can be traced; torch.export sets both too."""
    old = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = flag
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = old


@contextlib.contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Autocast keeps casts of parameters; those of a trace are fake and must not outlive it."""
    old = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(old)


@contextlib.contextmanager
def _not_compiling() -> Iterator[None]:
    """Compiled functions inside the model run their Python. Nothing to do where dynamo was never imported."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _custom_functions_reported(observer: Observer, mine: Callable[[], bool]) -> Iterator[None]:
    """Reentrant checkpointing is a custom function too; what it computes is what it was given to run."""
    outer = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if mine():
            if cls is torch.utils.checkpoint.CheckpointFunction:
                return args[0](*args[2:])
            if cls.__module__ != "torch._library.autograd":  # that of a custom op, which is itself recorded
                observer.on_custom_function(cls, args)
        return outer.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = outer  # type: ignore[method-assign]


@contextlib.contextmanager
def _seeding_reported(observer: Observer, mine: Callable[[], bool]) -> Iterator[None]:
    """Fake tensors draw no numbers, so that torch's generators change only where the forward seeds them."""
    places = [(torch, "manual_seed"), (torch.random, "manual_seed"), (torch, "seed"), (torch.random, "seed")]
    outer = [getattr(owner, name) for owner, name in places]

    def report(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def seed(*args: Any, **kwargs: Any) -> Any:
            if mine():
                observer.on_seed()
            return fn(*args, **kwargs)

        return seed

    for (owner, name), fn in zip(places, outer, strict=True):
        setattr(owner, name, report(fn))
    try:
        yield
    finally:
        for (owner, name), fn in zip(places, outer, strict=True):
            setattr(owner, name, fn)


@contextlib.contextmanager
def _overridden(cls: type, name: str, value: Any) -> Iterator[None]:
    """Inside, `cls` itself has what it inherits, or has from an outer trace, in another form."""
    own = cls.__dict__.get(name)
    _set(cls, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(cls, name)
        else:
            _set(cls, name, own)


@contextlib.contextmanager
def _storage_resizes_reported(observer: Observer, mine: Callable[[], bool]) -> Iterator[None]:
    """Memory that is freed by hand (`x.untyped_storage().resize_(0)`) is no op that a mode would see."""
    inherited = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        if mine() and observer.on_storage_resize(self, size):
            return self
        return inherited(self, size)

    with _overridden(torch.UntypedStorage, "resize_", resize_):
        yield


@contextlib.contextmanager
def _data_reported(observer: Observer, here: Callable[[], bool], mine: Callable[[], bool]) -> Iterator[None]:
    """`x.data = y` is no op that a mode would see either, and would make a tensor of the model a fake one."""
    data: Any = torch._C.TensorBase.data

    def get_data(self: torch.Tensor) -> Any:
        return observer.on_data(self, data.__get__) if mine() else data.__get__(self)

    def set_data(self: torch.Tensor, new: Any) -> None:
        if not (here() and observer.on_set_data(self, new)):
            data.__set__(self, new)

    with _overridden(torch.Tensor, "data", property(get_data, set_data)):
        yield


@contextlib.contextmanager
def python_random_state_kept() -> Iterator[None]:
    """Put the generators of Python and NumPy back, which a forward may draw from."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
