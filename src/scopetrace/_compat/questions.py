"""What Python asks torch during a trace, and tells it, where no op runs: its state, facts of tensors, autograd's hooks.

Data flow:
    `torch.is_grad_enabled()`, `x.stride(0)`, `os.environ["A"]`, replaced -> the answer, and a Listener is told of it
    `y.register_hook(f)`, `y.retain_grad()`, `with saved_tensors_hooks(...)`, `y.grad_fn`, replaced -> a HookListener
    `p.requires_grad = False`, `p.grad = None`, replaced                                            -> the same

Only questions of the model and of torch's Python on its way count: while the recorder handles an op its mode is off,
and contexts such as `torch.no_grad` ask only to restore what was. Backward hooks of modules are functions of autograd,
which `_compat.patches` reports.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
import torch.amp.autocast_mode
import torch.autograd.graph
import torch.utils.checkpoint
from torch._ops import mode_stack_state_for_pre_dispatch
from torch.nn.modules._functions import BackwardHookFunction

from scopetrace._compat.ops import is_recording
from scopetrace._compat.sources import NOT_THE_MODEL, PACKAGES, PYTHON, SCOPETRACE, TORCH_DIRECTORY, prefixes
from scopetrace._compat.tensors import FakeTensor, storage_id


@dataclasses.dataclass(frozen=True, repr=False)
class Missing:
    """Stands for the value of a name that is not there."""

    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()

Mine = Callable[[], bool]
"""Whether what happens now is to be reported."""

Replace = Callable[[Any, str, Any], None]
"""Sets an attribute of a class or module for the time of the trace."""

_slots = mode_stack_state_for_pre_dispatch()
# Code that asks to restore what was, or to choose between kernels that compute the same.
_KEEPING_STATE = (
    *SCOPETRACE,
    *prefixes(
        TORCH_DIRECTORY,
        *("autograd/grad_mode.py", "amp/autocast_mode.py", "utils/checkpoint.py", "utils/_device.py", "_tensor.py"),
        *("utils/_contextlib.py", "_dynamo/", "_compile.py", "fx/", "_subclasses/", "_library/", "_ops.py"),
        *("nn/modules/module.py", "nn/modules/transformer.py", "nn/modules/activation.py", "nn/functional.py"),
    ),
)
_FAKE_TENSORS = prefixes(TORCH_DIRECTORY, "_subclasses/")
_TORCH = prefixes(TORCH_DIRECTORY)

FLAGS = {
    "torch": """
        is_grad_enabled is_inference_mode_enabled get_default_dtype get_default_device is_autocast_enabled
        get_autocast_dtype is_autocast_cpu_enabled get_autocast_cpu_dtype get_autocast_gpu_dtype
        are_deterministic_algorithms_enabled is_deterministic_algorithms_warn_only_enabled
        get_deterministic_debug_mode get_float32_matmul_precision get_num_threads get_num_interop_threads
        is_anomaly_enabled is_anomaly_check_nan_enabled is_warn_always_enabled""",
    "torch.__future__": "get_overwrite_module_params_on_conversion get_swap_module_params_on_conversion",
    "torch.sparse.check_sparse_tensor_invariants": "is_enabled",
    "torch.backends.cuda": "flash_sdp_enabled mem_efficient_sdp_enabled math_sdp_enabled cudnn_sdp_enabled",
    "torch.backends.mha": "get_fastpath_enabled",
}
"""Functions that answer questions about the state of the process."""

METHODS = ("stride", "is_contiguous", "contiguous", "storage_offset", "is_inference", "is_conj", "is_neg")
PROPERTIES = ("requires_grad", "is_leaf", "grad_fn", "_version")
"""What a tensor is asked beside its shape, dtype and device, which every call is compared with anyway."""

_owners: dict[str, Any] = {path: functools.reduce(getattr, path.split(".")[1:], torch) for path in FLAGS}
_flags: dict[str, Callable[..., Any]] = {
    f"{path}.{name}": getattr(_owners[path], name) for path, names in FLAGS.items() for name in names.split()
}
_methods = {name: getattr(torch.Tensor, name) for name in METHODS}
_CPU = torch.device("cpu")
_properties = {name: getattr(torch.Tensor, name).__get__ for name in PROPERTIES}
_default_device, _is_autocast_enabled = torch.get_default_device, torch.is_autocast_enabled
_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "hpu", "mps")

default_dtype: Callable[[], torch.dtype] = torch.get_default_dtype
grad_enabled: Callable[[], bool] = torch.is_grad_enabled
inference_mode_enabled: Callable[[], bool] = torch.is_inference_mode_enabled
default_device: Callable[[], torch.device] = torch.get_default_device
"""torch's own functions, whose answer is no read."""


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """The types of device for which autocast is on, each with its dtype."""
    if not _any_autocast():
        return ()
    return tuple((d, torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES if _is_autocast_enabled(d))


def flag(name: str, args: tuple[Any, ...]) -> Any:
    """What a function of FLAGS answers, such as `torch.is_grad_enabled`, or a setting of `torch.backends` is.

    `torch.autocast` is `autocast_state`.
    """
    if name == "torch.autocast":
        return autocast_state()
    if name == "torch.get_default_device" and not torch._C._len_torch_function_stack():
        return _CPU  # another one is a mode on that stack; torch's own function takes 9 µs
    return _flags[name](*args) if name in _flags else operator.attrgetter(name.removeprefix("torch."))(torch)


_BACKENDS = [
    (f"{module.__name__}.{name}", x.getter)
    for module in (torch.backends.cudnn, torch.backends.mkldnn)
    for name, x in vars(type(module)).items()
    if isinstance(x, torch.backends.ContextProp)
]


_OF_MODES = {*(name for name in _flags if "autocast" in name), "torch.get_default_device"}
"""Those that take arguments, or run an op to answer."""


def settings() -> dict[str, Any]:
    """The state of the process that a forward may change, by name."""
    found = {name: ask() for name, ask in (*_flags.items(), *_BACKENDS) if name not in _OF_MODES}
    return {**found, "torch.autocast": autocast_state()}


def fact_of(t: torch.Tensor, name: str, args: tuple[Any, ...]) -> Any:
    """What a tensor answers to a question of METHODS or PROPERTIES; of `grad_fn`, whether there is one.

    The fact `layout` is its strides, with 0 for dimensions of one element, whose stride does not matter.
    """
    if name == "layout":
        sizes = zip(t.size(), _methods["stride"](t), strict=True)
        return tuple([0 if type(n) is int and n == 1 else stride for n, stride in sizes])
    if name == "metadata":
        return t.dtype, tuple(t.size()), t.device
    if name == "has_grad":
        return t.grad is not None
    if name == "is_parameter":
        return isinstance(t, torch.nn.Parameter)
    if name[0] == ".":  # an attribute that users set on it
        return vars(t).get(name[1:], MISSING)
    if name in _methods:
        return _methods[name](t, *args)
    found = _properties[name](t)
    return found is not None if name == "grad_fn" else found


class Listener(Protocol):
    """Who is told of questions."""

    def on_flag(self, name: str, args: tuple[Any, ...] | None, answer: Any) -> None:
        """A question about the state of the process: `torch.is_grad_enabled`; no `args` for what is no function."""

    def on_fact(self, t: torch.Tensor, name: str, args: tuple[Any, ...], answer: Any) -> None:
        """A question of METHODS or PROPERTIES to a tensor."""

    def on_environment(self, key: str | None, answer: Any) -> None:
        """An environment variable is read, or with None the list of all."""

    def on_question(self, name: str, ask: Callable[..., Any], args: tuple[Any, ...], answer: Any) -> None:
        """A question to an object of Python, which `ask(*args)` asks again."""

    def on_member(self, t: torch.Tensor) -> None:
        """The forward goes through parameters or buffers of a module, and gets this one."""

    def on_grad_mode(self, enabled: bool) -> None:
        """The forward switches autograd on or off, as at the beginning of a block."""

    def on_grad_block_end(self) -> None:
        """A block ends, and autograd is as before it."""

    def on_autocast(self, entered: bool) -> None:
        """A block under `torch.autocast` begins or ends."""


def report_questions(replace: Replace, listener: Listener, mine: Mine, tags: Iterable[str]) -> None:
    """Replace what answers questions by functions that tell `listener`, too.

    `tags` are attributes that the forward may ask of tensors, and that users set on these.
    """

    def asked() -> bool:
        mode: Any = _slots._schema_check_mode
        if mode is None or not mine():
            return False
        frame: FrameType | None = sys._getframe(2)
        if frame is not None and frame.f_code.co_filename.startswith(_KEEPING_STATE):
            return False
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            if frame.f_code.co_filename.startswith(_FAKE_TENSORS):
                return False  # a fake tensor that is made without an op, as for `x.data`
            frame = frame.f_back
        return True

    for path, ask in _flags.items():
        module, _, name = path.rpartition(".")
        answered = _reported_flag(path, ask, listener, asked)
        replace(_owners[module], name, staticmethod(answered) if isinstance(_owners[module], type) else answered)
    for name in (*METHODS, *PROPERTIES):
        make = _method if name in METHODS else _property
        replace(torch.Tensor, name, make(name, listener, asked))
    for name in {name for name in tags if not hasattr(torch.Tensor, name)}:
        replace(torch.Tensor, name, _tag(name, listener, mine))
    _report_classes(replace, listener, mine)
    _report_environment(replace, listener, mine)
    _report_members(replace, listener, mine)
    _report_loggers(replace, listener, mine)
    _report_backends(replace, listener, mine)
    _report_switches(replace, listener, mine)


def _reported_flag(name: str, ask: Callable[..., Any], listener: Listener, asked: Mine) -> Callable[..., Any]:
    @functools.wraps(ask)
    def answered(*args: Any) -> Any:
        answer = ask(*args)
        if asked():
            listener.on_flag(name, args, answer)
        return answer

    return answered


def _method(name: str, listener: Listener, asked: Mine) -> Callable[..., Any]:
    ask = _methods[name]

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = ask(self, *args, **kwargs)
        if _slots._schema_check_mode is not None and asked():
            listener.on_fact(self, name, (*args, *kwargs.values()), answer)
        return answer

    return method


def _property(name: str, listener: Listener, asked: Mine) -> property:
    own = getattr(torch.Tensor, name)

    def get(self: torch.Tensor) -> Any:
        answer = own.__get__(self)
        if _slots._schema_check_mode is not None and asked():
            listener.on_fact(self, name, (), answer is not None if name == "grad_fn" else answer)
        return answer

    return property(get, own.__set__, own.__delete__)


def _tag(name: str, listener: Listener, mine: Mine) -> property:
    """Stands for an attribute that users set on tensors."""
    written: set[int] = set()

    def get(self: torch.Tensor) -> Any:
        found = vars(self).get(name, MISSING)
        if id(self) not in written and mine():
            listener.on_fact(self, f".{name}", (), found)
        if found is MISSING:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return found

    def put(self: torch.Tensor, value: Any) -> None:
        written.add(id(self))
        vars(self)[name] = value

    def remove(self: torch.Tensor) -> None:
        written.add(id(self))
        if vars(self).pop(name, MISSING) is MISSING:
            raise AttributeError(name)

    return property(get, put, remove)


def _report_classes(replace: Replace, listener: Listener, mine: Mine) -> None:
    """`isinstance(x, nn.Parameter)`, and `type(x)` where `type` is TypeForUsers."""
    meta: Any = type(torch.nn.Parameter)
    ask = meta.__instancecheck__

    def __instancecheck__(cls: Any, x: Any) -> bool:
        found: bool = ask(cls, x)
        if isinstance(x, torch.Tensor) and mine() and not sys._getframe(1).f_code.co_filename.startswith(NOT_THE_MODEL):
            listener.on_fact(x, "is_parameter", (), found)
        return found

    def class_of(x: Any) -> type:
        if not isinstance(x, FakeTensor) or not mine():
            return type(x)
        is_parameter = fact_of(x, "is_parameter", ())
        listener.on_fact(x, "is_parameter", (), is_parameter)
        return torch.nn.Parameter if is_parameter else torch.Tensor

    replace(meta, "__instancecheck__", __instancecheck__)
    replace(_Type, "class_of", staticmethod(class_of))


class _Type(type):
    """The class of `TypeForUsers`."""

    class_of: Callable[[Any], type] = type
    """The class of an object, as `type(x)` says it outside of a trace."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return type(*args, **kwargs) if len(args) != 1 else _Type.class_of(args[0])

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, type)

    def __subclasscheck__(cls, x: Any) -> bool:
        return issubclass(x, type)


class TypeForUsers(type, metaclass=_Type):
    """Stands for `type` in the files of users while a forward runs."""


def _report_environment(replace: Replace, listener: Listener, mine: Mine) -> None:
    environment: Any = type(os.environ)
    ask, names = environment.__getitem__, environment.__iter__

    def tell(self: Any, key: str | None, answer: Any) -> None:
        if self is os.environ and mine() and not (_asker().startswith(NOT_THE_MODEL) or _is_importing()):
            listener.on_environment(key, answer)

    def __getitem__(self: Any, key: str) -> str:
        found: Any = MISSING
        try:
            found = ask(self, key)
            return found
        finally:
            tell(self, key, found)

    def __iter__(self: Any) -> Iterator[str]:
        found = list(names(self))
        tell(self, None, found)
        return iter(found)

    replace(environment, "__getitem__", __getitem__)
    replace(environment, "__iter__", __iter__)


def is_of_python(path: str) -> bool:
    """Whether a file is of Python's own library, in which other packages may be installed too."""
    return path.startswith(PYTHON) and not path.startswith(PACKAGES)


def _report_backends(replace: Replace, listener: Listener, mine: Mine) -> None:
    """`torch.backends.cudnn.enabled` and its kind, where code outside of torch asks."""
    ask: Any = torch.backends.ContextProp.__get__
    matmul: Any = torch.backends.cuda.cuBLASModule.__getattr__

    def told(name: str, answer: Any) -> Any:
        if mine() and not sys._getframe(2).f_code.co_filename.startswith(_TORCH):
            listener.on_flag(name, None, answer)
        return answer

    def __get__(self: Any, module: Any, cls: type) -> Any:
        name = next((key for key, x in vars(type(module)).items() if x is self), "")
        return told(f"{module.__name__}.{name}", ask(self, module, cls))

    replace(torch.backends.ContextProp, "__get__", __get__)
    replace(
        torch.backends.cuda.cuBLASModule,
        "__getattr__",
        lambda module, name: told(f"torch.backends.cuda.matmul.{name}", matmul(module, name)),
    )


def _report_members(replace: Replace, listener: Listener, mine: Mine) -> None:
    """`next(self.parameters()).dtype` and its kind."""
    members = torch.nn.Module._named_members

    def _named_members(
        self: torch.nn.Module, get: Callable[..., Any], prefix: str = "", recurse: bool = True, **options: Any
    ) -> Iterator[tuple[str, torch.Tensor]]:
        names = []
        for name, t in members(self, get, prefix, recurse, **options):
            if mine():
                listener.on_member(t)
            names.append(name.removeprefix(f"{prefix}."))
            yield name, t
        if mine() and options.get("remove_duplicate") is not False:  # the forward would see one that is added
            kind = "parameters" if "_parameters" in get.__code__.co_names else "buffers"
            listener.on_question(f"{kind}()", _names_of_members, (self, f"named_{kind}", recurse), names)

    replace(torch.nn.Module, "_named_members", _named_members)


def _names_of_members(module: torch.nn.Module, method: str, recurse: bool) -> list[str]:
    return [name for name, _ in getattr(module, method)(recurse=recurse)]


def _report_loggers(replace: Replace, listener: Listener, mine: Mine) -> None:
    def reported(ask: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: logging.Logger, *args: Any) -> Any:
            answer = ask(self, *args)
            if mine() and sys._getframe(1).f_code.co_filename != logging.__file__:
                text = f"{self.name}.{ask.__name__}({', '.join(map(repr, args))})"
                listener.on_question(text, ask, (self, *args), answer)
            return answer

        return method

    for name in ("isEnabledFor", "getEffectiveLevel"):
        replace(logging.Logger, name, reported(getattr(logging.Logger, name)))


def hooks_of_all_modules() -> dict[str, dict[Any, Any]]:
    """The tables of hooks that run for each module of the process, by what to call them."""
    module = torch.nn.modules.module
    return {
        "forward pre-hooks": module._global_forward_pre_hooks,
        "forward hooks": module._global_forward_hooks,
        "backward pre-hooks": module._global_backward_pre_hooks,
        "backward hooks": module._global_backward_hooks,
    }


def _asker() -> str:
    """The file of the nearest frame outside of this file and of Python's own library."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or is_of_python(frame.f_code.co_filename)):
        frame = frame.f_back
    return frame.f_code.co_filename


def _is_importing() -> bool:
    """Whether a module is imported, which happens once, rather than a call of the forward."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and not frame.f_code.co_filename.startswith(SCOPETRACE):
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _tell_grad_mode(listener: Listener, enabled: bool, frame: FrameType) -> None:
    """Tell of a call of `torch._C._set_grad_enabled` in `frame`."""
    while frame.f_code.co_name == "__init__" and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_code.co_name == "__exit__":
        listener.on_grad_block_end()
    else:
        listener.on_grad_mode(enabled)


def _report_switches(replace: Replace, listener: Listener, mine: Mine) -> None:
    switch, inference = torch._C._set_grad_enabled, torch.inference_mode
    enter, leave = inference.__enter__, inference.__exit__

    def set_grad_enabled(enabled: bool) -> None:
        if _slots._schema_check_mode is not None and mine():
            _tell_grad_mode(listener, enabled, sys._getframe(1))
        switch(enabled)

    def __enter__(self: Any) -> Any:
        if mine():
            listener.on_grad_mode(not self.mode)  # `inference_mode(False)` switches autograd on
        return enter(self)

    def __exit__(self: Any, *error: Any) -> None:
        if mine():
            listener.on_grad_block_end()
        leave(self, *error)

    replace(torch._C, "_set_grad_enabled", set_grad_enabled)
    replace(inference, "__enter__", __enter__)
    replace(inference, "__exit__", __exit__)
    _report_autocast(replace, listener, mine)


def _report_autocast(replace: Replace, listener: Listener, mine: Mine) -> None:
    autocast = torch.amp.autocast_mode.autocast
    enter, leave = autocast.__enter__, autocast.__exit__

    def __enter__(self: Any) -> Any:
        if mine():
            listener.on_autocast(True)
        return enter(self)

    def __exit__(self: Any, *error: Any) -> Any:
        if mine():
            listener.on_autocast(False)
        return leave(self, *error)

    replace(autocast, "__enter__", __enter__)
    replace(autocast, "__exit__", __exit__)


# Hooks of autograd, and the graph that they hang on ------------------------------------------------------------------


_saved_tensors_hooks = torch.autograd.graph.saved_tensors_hooks
_METHODS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")
_TAKES_GRADIENTS = prefixes(TORCH_DIRECTORY, "optim/", "nn/utils/clip_grad.py")
_HANGS_HOOKS = prefixes(TORCH_DIRECTORY, "autograd/graph.py", "nn/modules/module.py")


class GradientListener(Protocol):
    """Who is told of derivatives, and of the `grad` of tensors."""

    def on_backward(
        self,
        run: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]],
        outputs: Sequence[torch.Tensor],
        given: Iterable[torch.Tensor | None],
        inputs: Sequence[torch.Tensor],
        *,
        accumulates: bool,
        create_graph: bool,
    ) -> Any:
        """The forward differentiates by `inputs`; with `accumulates`, into their `grad`, or that of all leaves.

        `run` gives the gradients by some tensors. Returns what torch's engine returns.
        """

    def differentiated(self, t: torch.Tensor) -> torch.Tensor:
        """What stands for `t` in autograd's graph of the forward."""

    def get(self, t: torch.Tensor) -> Any:
        """The forward reads `t.grad`. Returns it, or NotImplemented for what torch has."""

    def set(self, t: torch.Tensor, new: torch.Tensor | None) -> bool:
        """The forward sets `t.grad`. Returns whether the listener did that."""

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer begins a step."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The step has ended."""


class HookListener(Protocol):
    """Who is told of hooks."""

    def on_hook(self, t: torch.Tensor, method: str) -> None:
        """A method of `_METHODS` is called."""

    def on_graph(self, t: torch.Tensor) -> None:
        """The forward reads `grad_fn` or `is_leaf`: it wants autograd's history of `t`."""

    def on_grad_fn(self) -> None:
        """The forward gets a node of autograd's graph."""

    def on_requires_grad(self, t: torch.Tensor, required: bool) -> None:
        """The forward sets `requires_grad` of a tensor."""

    def on_detach(self, t: torch.Tensor) -> bool:
        """The forward detaches a tensor in place. Returns whether that changes anything."""

    @property
    def gradients(self) -> GradientListener:
        """Who is told of the `grad` of tensors."""

    def mark(self) -> tuple[int, int]:
        """A mark of this place in the program."""

    def leave_saved_tensors_hooks(self, mark: tuple[int, int]) -> None:
        """The forward leaves `saved_tensors_hooks` that it entered at `mark`."""

    def on_recomputed(self, mark: tuple[int, int], context_fn: Any = None) -> None:
        """A checkpointed region that began at `mark` ends; `context_fn` chooses what it keeps, None for nothing."""


def is_module_hook(cls: Any) -> bool:
    """Whether a `torch.autograd.Function` is the one by which modules call their backward hooks."""
    return cls is BackwardHookFunction


def has_other_gradient(by: Sequence[torch.Tensor], outside: Iterable[torch.Tensor]) -> bool:
    """Whether the derivative by one of these tensors is not what the ops of the forward say.

    It has a hook on its gradient and is no parameter, or is a leaf and yet a view of what requires grad, which has
    none; or a tensor from `outside` of the forward was computed from it.
    """
    if any(t.retains_grad or _is_leaf_view(t) or (_hooks(t) and not isinstance(t, torch.nn.Parameter)) for t in by):
        return True
    edges = {_edge(t) for t in by if t.requires_grad}
    seen: set[Any] = set()
    work = [t.grad_fn for t in outside if t.grad_fn is not None] if edges else []
    while work:
        node = work.pop()
        if node not in seen:
            seen.add(node)
            if not edges.isdisjoint(node.next_functions):
                return True
            work += [found for found, _ in node.next_functions if found is not None]
    return False


def _hooks(t: torch.Tensor) -> list[Callable[..., Any]]:
    return [*(t._backward_hooks or {}).values(), *(t._post_accumulate_grad_hooks or {}).values()]


def hooks_of(*tensors: torch.Tensor) -> list[list[Callable[..., Any]]]:
    """The hooks on the gradient of each tensor."""
    return list(map(_hooks, tensors))


def give_hooks(t: torch.Tensor, to: torch.Tensor) -> None:
    """Let the hooks on the gradient of `t` run on that of `to` too."""
    if t._backward_hooks:
        to._backward_hooks = t._backward_hooks


def run_after_accumulation(t: torch.Tensor) -> None:
    """Run the hooks that ask for `t.grad` after a gradient was added to it."""
    for hook in list((t._post_accumulate_grad_hooks or {}).values()):
        hook(t)


def leaves_of(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that autograd leads to from some tensors, each once."""
    found: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    for t in outputs:
        work = [t.grad_fn] if t.grad_fn is not None else []
        if not work and t.requires_grad:
            found[id(t)] = t
        while work:
            node: Any = work.pop()
            if node not in seen:
                seen.add(node)
                if hasattr(node, "variable"):
                    found[id(node.variable)] = node.variable
                work += [n for n, _ in node.next_functions if n is not None]
    return list(found.values())


def _is_leaf_view(t: torch.Tensor) -> bool:
    return t.is_leaf and t._base is not None and t._base.requires_grad


def _edge(t: torch.Tensor) -> tuple[Any, int]:
    edge = torch.autograd.graph.get_gradient_edge(t)
    return edge.node, edge.output_nr


def report_hooks(replace: Replace, listener: HookListener, mine: Mine) -> None:
    """Replace what makes hooks by functions that tell `listener` first."""
    for name in _METHODS:
        replace(torch.Tensor, name, _hook(name, listener, mine))
    for name in ("grad_fn", "is_leaf"):
        replace(torch.Tensor, name, _history(name, listener, mine))
    _report_flags(replace, listener, lambda: is_recording() and mine())
    _report_gradients(replace, listener, lambda: is_recording() and mine())
    _report_saved_tensors_hooks(replace, listener, mine)


def _hook(name: str, listener: HookListener, mine: Mine) -> Callable[..., Any]:
    run = getattr(torch.Tensor, name)

    @functools.wraps(run)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if mine():
            listener.on_hook(self, name)
        return run(self, *args, **kwargs)

    return method


def _history(name: str, listener: HookListener, mine: Mine) -> property:
    own = getattr(torch.Tensor, name)

    def get(self: torch.Tensor) -> Any:
        asker = _asker() if is_recording() and mine() else ""
        asked = bool(asker) and not asker.startswith(SCOPETRACE)  # a trace inside this one
        if asked and self.requires_grad:
            listener.on_graph(self)
        found = own.__get__(self)
        if asked and name == "grad_fn" and found is not None and _takes_graph(asker):
            listener.on_grad_fn()
        return found

    return property(get, getattr(own, "__set__", None))


def _report_flags(replace: Replace, listener: HookListener, mine: Mine) -> None:
    """`requires_grad` of a tensor."""
    required: Any = torch.Tensor.requires_grad
    require, detach = torch.Tensor.requires_grad_, torch.Tensor.detach_

    def told(t: torch.Tensor, flag: bool) -> torch.Tensor:
        if mine():
            listener.on_requires_grad(t, flag)
        return t

    def detach_(self: torch.Tensor) -> torch.Tensor:
        return detach(self) if not mine() or listener.on_detach(self) else self

    replace(
        torch.Tensor, "requires_grad_", lambda t, requires_grad=True: require(told(t, requires_grad), requires_grad)
    )
    replace(torch.Tensor, "detach_", detach_)
    set_required = property(required.__get__, lambda t, flag: required.__set__(told(t, flag), flag))
    replace(torch.Tensor, "requires_grad", set_required)


def _report_gradients(replace: Replace, listener: HookListener, mine: Mine) -> None:
    """The `grad` of tensors."""
    grad: Any = torch.Tensor.grad
    module, optimizer = torch.nn.Module, torch.optim.Optimizer

    def get_grad(self: torch.Tensor) -> Any:
        code = sys._getframe(1).f_code
        takes = code.co_name == "zero_grad" or code.co_filename.startswith(_TAKES_GRADIENTS)
        asked = mine() and (takes or not _asker().startswith(NOT_THE_MODEL))
        found = listener.gradients.get(self) if asked else NotImplemented
        return grad.__get__(self) if found is NotImplemented else found

    def set_grad(self: torch.Tensor, new: Any) -> None:
        if not (mine() and listener.gradients.set(self, new)):
            grad.__set__(self, new)

    def zero_grad(outer: Callable[..., Any], given: Callable[[Any], Iterable[torch.Tensor]]) -> Callable[..., Any]:
        def run(self: Any, set_to_none: bool = True) -> Any:
            if not (mine() and set_to_none):
                return outer(self, set_to_none)
            for t in given(self):
                t.grad = None  # without a look at what it was

        return run

    def of_groups(self: Any) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    replace(torch.Tensor, "grad", property(get_grad, set_grad, grad.__delete__))
    replace(module, "zero_grad", zero_grad(module.zero_grad, module.parameters))
    replace(optimizer, "zero_grad", zero_grad(optimizer.zero_grad, of_groups))


def _takes_graph(file: str) -> bool:
    """Whether the code in a file that reads `grad_fn` may hang hooks there."""
    return file.startswith(_HANGS_HOOKS) or not file.startswith(NOT_THE_MODEL)


def _report_saved_tensors_hooks(replace: Replace, listener: HookListener, mine: Mine) -> None:
    """Those of torch itself (checkpointing, `save_on_cpu`) leave values and gradients as they are."""
    enter, leave = _saved_tensors_hooks.__enter__, _saved_tensors_hooks.__exit__
    marks: dict[int, tuple[int, int]] = {}
    chosen: dict[int, Any] = {}

    def __enter__(self: Any) -> None:
        if mine() and (_is_users(self) or type(self).__module__ == torch.utils.checkpoint.__name__):
            marks[id(self)] = listener.mark()
            chosen[id(self)] = _context_fn(sys._getframe(1))
        if id(self) not in marks or not _is_users(self):
            enter(self)

    def __exit__(self: Any, *error: Any) -> None:
        mark = marks.pop(id(self), None)
        if mark is None or not _is_users(self):
            leave(self, *error)
        if mark is not None and error == (None, None, None):
            if _is_users(self):
                listener.leave_saved_tensors_hooks(mark)
            else:
                listener.on_recomputed(mark, chosen.pop(id(self)))

    replace(_saved_tensors_hooks, "__enter__", __enter__)
    replace(_saved_tensors_hooks, "__exit__", __exit__)


def _context_fn(frame: FrameType | None) -> Any:
    """The `context_fn` of the function that checkpoints, which runs in `frame` or around it; None for its default."""
    checkpoint = torch.utils.checkpoint
    while frame is not None and frame.f_code.co_filename == checkpoint.__file__:
        if "context_fn" in frame.f_locals:
            found = frame.f_locals["context_fn"]
            return None if found is checkpoint.noop_context_fn else found
        frame = frame.f_back
    return None


def _is_users(hooks: Any) -> bool:
    return type(hooks) is _saved_tensors_hooks or not type(hooks).__module__.startswith("torch.")


def saved_in_storage(results: list[torch.Tensor], storage: int) -> bool:
    """Whether an op that led to one of `results` has saved a tensor that lies in this storage."""
    seen: set[Any] = set()
    work = [t.grad_fn for t in results]
    while work:
        node = work.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(storage_id(t) == storage for t in _saved_by(node)):
            return True
        work += [found for found, _ in node.next_functions]
    return False


def _saved_by(node: Any) -> Iterator[torch.Tensor]:
    """The tensors that a node of autograd has saved, which its attributes `_saved_...` show."""
    for name in dir(node):
        if name.startswith("_saved_"):
            found = getattr(node, name)
            yield from (
                t for t in (found if isinstance(found, (list, tuple)) else [found]) if isinstance(t, torch.Tensor)
            )
