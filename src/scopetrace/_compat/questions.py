"""What Python asks torch during a trace where no op runs: its state, and facts of tensors.

Data flow:
    `x.stride(0)`, `x.requires_grad`, by the mode of `function_mode` -> torch's answer, and a Listener is told of it
    `torch.is_grad_enabled()`, replaced                              -> the same

Only questions of the model and of torch's Python on its way count: while the recorder handles an op its mode is off,
and contexts such as `torch.no_grad` ask only to restore what was.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol

import torch
import torch.amp.autocast_mode
import torch.autograd.graph
import torch.utils.checkpoint
from torch._ops import mode_stack_state_for_pre_dispatch

from scopetrace._compat.function_mode import Handler, On
from scopetrace._compat.function_mode import depth as function_modes
from scopetrace._compat.sources import (
    SCOPETRACE,
    TORCH_DIRECTORY,
    asked_by_model,
    asking_frame,
    prefixes,
)


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
        "_functorch/eager_transforms.py",
        *("nn/modules/module.py", "nn/modules/transformer.py", "nn/modules/activation.py", "nn/functional.py"),
    ),
)
_FAKE_TENSORS = prefixes(TORCH_DIRECTORY, "_subclasses/")
_TORCH = prefixes(TORCH_DIRECTORY)

FLAGS = (
    *("is_grad_enabled", "is_inference_mode_enabled", "get_default_dtype", "get_default_device"),
    *("is_autocast_enabled", "get_autocast_dtype", "is_autocast_cpu_enabled", "get_autocast_gpu_dtype"),
)
"""Functions of torch that answer questions about the state of the process, and that models ask."""

METHODS = (
    *("stride", "is_contiguous", "contiguous", "storage_offset", "is_inference", "is_conj", "is_neg", "is_coalesced"),
    "dim_order",
)
_BY_KEYWORD = {"is_contiguous": "memory_format", "dim_order": "ambiguity_check"}
"""The methods that take no positional argument, with that which they take."""
PROPERTIES = ("requires_grad", "is_leaf", "grad_fn", "_version")
"""What a tensor is asked beside its shape, dtype and device, which every call is compared with anyway."""
_tensor: Any = torch.Tensor
VIEW_QUESTIONS: dict[str, Any] = {"_is_view": _tensor._is_view, "_base": _tensor._base.__get__}
"""What tells whether a tensor is a view, or of what."""

_flags: dict[str, Callable[..., Any]] = {f"torch.{name}": getattr(torch, name) for name in FLAGS}
_methods = {name: getattr(torch.Tensor, name) for name in METHODS}
_CPU = torch.device("cpu")
_properties = {name: getattr(torch.Tensor, name).__get__ for name in PROPERTIES}
_default_device, _is_autocast_enabled = torch.get_default_device, torch.is_autocast_enabled
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any type of device."""
AUTOCAST = "torch.autocast"
"""The name of the flag that `autocast_state` tells."""
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "hpu", "mps")

default_dtype: Callable[[], torch.dtype] = torch.get_default_dtype
grad_enabled: Callable[[], bool] = torch.is_grad_enabled
inference_mode_enabled: Callable[[], bool] = torch.is_inference_mode_enabled
fast_path_enabled: Callable[[], bool] = torch.backends.mha.get_fastpath_enabled
"""torch's own functions, whose answer is no read."""


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """The types of device for which autocast is on, each with its dtype."""
    if not any_autocast():
        return ()
    return tuple((d, torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES if _is_autocast_enabled(d))


def flag(name: str, args: tuple[Any, ...]) -> Any:
    """What a function of FLAGS answers, such as `torch.is_grad_enabled`, or a setting of `torch.backends` is.

    `torch.autocast` is `autocast_state`.
    """
    if name == AUTOCAST:
        return autocast_state()
    if name in _PROCESS_GROUP:
        return _of_process_group(_PROCESS_GROUP[name])
    if name == "torch.get_default_device" and not function_modes():
        return _CPU  # another one is a mode on that stack; torch's own function takes 9 µs
    ask = _flags.get(name) or _settings.get(name)
    return ask(*args) if ask is not None else operator.attrgetter(name.removeprefix("torch."))(torch)


def quick_flag(name: str, args: tuple[Any, ...], answer: Any) -> tuple[Callable[..., Any], tuple[Any, ...], Any] | None:
    """A function of torch, its arguments and what it gives where `flag(name, args)` is `answer`; None for no such.

    It takes less time than `flag`, and may give something else where the flag is the same.
    """
    if name == AUTOCAST:
        return None if answer else (any_autocast, (), False)
    if name == "torch.get_default_device":
        return (function_modes, (), 0) if answer == _CPU else None
    return (_flags[name], args, answer) if name in _flags else None


_PROCESS_GROUP: dict[str, Callable[..., Any]] = {
    f"torch.distributed.{name}": getattr(torch.distributed, name)
    for name in ("is_initialized", "get_rank", "get_world_size")
    if hasattr(torch.distributed, name)
}
"""Functions that answer questions about the default process group."""


def _of_process_group(ask: Callable[..., Any]) -> Any:
    try:
        return ask()
    except ValueError:  # there is none
        return MISSING


_BACKENDS = [
    (f"{module.__name__}.{name}", x.getter)
    for module in (torch.backends.cudnn, torch.backends.mkldnn)
    for name, x in vars(type(module)).items()
    if isinstance(x, torch.backends.ContextProp)
]


_OTHERS = {
    "torch": """
        are_deterministic_algorithms_enabled is_deterministic_algorithms_warn_only_enabled
        get_deterministic_debug_mode get_float32_matmul_precision is_autocast_cache_enabled get_num_threads
        get_num_interop_threads is_anomaly_enabled is_anomaly_check_nan_enabled is_warn_always_enabled""",
    "torch.__future__": "get_overwrite_module_params_on_conversion get_swap_module_params_on_conversion",
    "torch.sparse.check_sparse_tensor_invariants": "is_enabled",
    "torch.backends.cuda": "flash_sdp_enabled mem_efficient_sdp_enabled math_sdp_enabled cudnn_sdp_enabled",
    "torch.backends.mha": "get_fastpath_enabled",
    "torch.backends.quantized": "engine",
}
"""Further settings. Code that asks for one of these is not seen."""


def _others() -> Iterator[tuple[str, Callable[..., Any]]]:
    for path, names in _OTHERS.items():
        owner: Any = functools.reduce(getattr, path.split(".")[1:], torch)
        for name in names.split():
            yield f"{path}.{name}", torch._C._get_qengine if name == "engine" else getattr(owner, name)


_SETTINGS = [
    *[(name, ask) for name, ask in _flags.items() if "autocast" not in name and name != "torch.get_default_device"],
    *_BACKENDS,
    *_others(),
]
"""Those that take no arguments, and run no op to answer."""
_settings = dict(_SETTINGS)


def settings() -> dict[str, Any]:
    """The state of the process that a forward may change, by name."""
    dtypes = tuple(map(torch.get_autocast_dtype, _AUTOCAST_DEVICES))  # also where autocast is off
    return {AUTOCAST: autocast_state(), "dtypes of torch.autocast": dtypes, **{name: ask() for name, ask in _SETTINGS}}


_attention_flags: list[Callable[[], Any]] = [
    *(torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled, torch._C._get_math_sdp_enabled),
    *(torch._C._get_cudnn_sdp_enabled, torch._C._get_overrideable_sdp_enabled),
]
_backend_flags: list[Callable[[], Any]] = [
    *(torch._C._get_cudnn_enabled, torch._C._get_mkldnn_enabled, torch._C._get_deterministic_algorithms),
    *_attention_flags,
]


def attention_kernels() -> tuple[Any, ...]:
    """What `torch.nn.attention.sdpa_kernel` sets: which kernels may compute attention, and in which order to try."""
    return (*[ask() for ask in _attention_flags], *torch._C._get_sdp_priority_order())


def backend_flags() -> tuple[Any, ...]:
    """What decides which backend of torch computes attention, convolutions and the like, and gives strides."""
    return (*[ask() for ask in _backend_flags], *torch._C._get_sdp_priority_order())


def fact_of(t: torch.Tensor, name: str, args: tuple[Any, ...]) -> Any:
    """What a tensor answers to a question of METHODS or PROPERTIES; of `grad_fn`, whether there is one.

    The fact `data` is the number of a tensor of one element, else how often it was written; `layout` is its strides,
    with 0 for dimensions of one element, whose stride does not matter.
    """
    if name == "layout":
        sizes = zip(t.size(), _methods["stride"](t), strict=True)
        return tuple([0 if type(n) is int and n == 1 else stride for n, stride in sizes])
    if name == "metadata":
        return t.dtype, tuple(t.size()), t.device
    if name == "has_grad":
        return t.grad is not None
    if name == "data":
        return t.tolist() if t.numel() == 1 else t._version
    if name == "is_parameter":
        return isinstance(t, torch.nn.Parameter)
    if name[0] == ".":  # an attribute that users set on it
        return vars(t).get(name[1:], MISSING)
    if name == "storage_nbytes":
        return t.untyped_storage().nbytes()
    if name in _BY_KEYWORD and args:
        return _methods[name](t, **{_BY_KEYWORD[name]: args[0]})
    if name in _methods:
        return _methods[name](t, *args)
    found = _properties[name](t)
    return found is not None if name == "grad_fn" else found


class NoData(RuntimeError):
    """Python needs data that a tensor in a trace does not have."""


class Listener(Protocol):
    """Who is told of questions."""

    def on_failed(self, error: Exception) -> None:
        """A question to a tensor has raised this."""

    def on_flag(self, name: str, args: tuple[Any, ...] | None, answer: Any) -> None:
        """A question about the state of the process: `torch.is_grad_enabled`; no `args` for what is no function."""

    def on_fact(self, t: torch.Tensor, name: str, args: tuple[Any, ...], answer: Any) -> None:
        """A question of METHODS or PROPERTIES to a tensor."""

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


def report_questions(replace: Replace, on: On, listener: Listener, mine: Mine) -> None:
    """Let what answers questions tell `listener`, too."""

    def asked() -> bool:
        if _slots._schema_check_mode is None or not mine():
            return False
        frame = asking_frame()
        if frame is not None and frame.f_code.co_filename.startswith(_KEEPING_STATE):
            return False
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            if frame.f_code.co_filename.startswith(_FAKE_TENSORS):
                return False  # a fake tensor that is made without an op, as for `x.data`
            frame = frame.f_back
        return True

    for path, ask in _flags.items():
        replace(torch, path.rpartition(".")[2], _reported_flag(path, ask, listener, asked))
    for path, ask in _PROCESS_GROUP.items():
        replace(torch.distributed, path.rpartition(".")[2], _reported_of_group(path, ask, listener, asked))
    for name, method in _methods.items():
        on(method, _fact(name, listener, asked))
    for name, get in _properties.items():
        on(get, _fact(name, listener, asked))
    _report_parameters(replace, listener, mine)
    _report_members(replace, listener, mine)
    _report_backends(replace, listener, mine)
    _report_switches(replace, on, listener, mine)


def _reported_flag(name: str, ask: Callable[..., Any], listener: Listener, asked: Mine) -> Callable[..., Any]:
    @functools.wraps(ask)
    def answered(*args: Any) -> Any:
        answer = ask(*args)
        if asked():
            listener.on_flag(name, args, answer)
        return answer

    return answered


def _reported_of_group(name: str, ask: Callable[..., Any], listener: Listener, asked: Mine) -> Callable[..., Any]:
    @functools.wraps(ask)
    def answered(*args: Any, **kwargs: Any) -> Any:
        answer = ask(*args, **kwargs)
        if asked() and all(group is None for group in (*args, *kwargs.values())):
            listener.on_flag(name, (), answer)
        return answer

    return answered


def _fact(name: str, listener: Listener, asked: Mine) -> Handler:
    def answered(ask: Callable[..., Any], t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            answer = ask(t, *args, **kwargs)
        except Exception as error:
            listener.on_failed(error)
            raise
        if asked():
            args = () if name in PROPERTIES else (*args, *kwargs.values())
            listener.on_fact(t, name, args, answer is not None if name == "grad_fn" else answer)
        return answer

    return answered


def _report_parameters(replace: Replace, listener: Listener, mine: Mine) -> None:
    """`isinstance(x, nn.Parameter)`."""
    meta: Any = type(torch.nn.Parameter)
    ask = meta.__instancecheck__

    def __instancecheck__(cls: Any, x: Any) -> bool:
        found: bool = ask(cls, x)
        if isinstance(x, torch.Tensor) and mine() and asked_by_model(()):
            listener.on_fact(x, "is_parameter", (), found)
        return found

    replace(meta, "__instancecheck__", __instancecheck__)


def _report_backends(replace: Replace, listener: Listener, mine: Mine) -> None:
    """`torch.backends.cudnn.enabled` and its kind, where code outside of torch asks."""
    ask: Any = torch.backends.ContextProp.__get__

    def told(name: str, answer: Any) -> Any:
        if mine() and asked_by_model(()):
            listener.on_flag(name, None, answer)
        return answer

    def __get__(self: Any, module: Any, cls: type) -> Any:
        name = next((key for key, x in vars(type(module)).items() if x is self), "")
        return told(f"{module.__name__}.{name}", ask(self, module, cls))

    replace(torch.backends.ContextProp, "__get__", __get__)


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

    def state_dict(self: torch.nn.Module, *args: Any, **options: Any) -> Any:
        found = of_state(self, *args, **options)
        if mine() and asked_by_model():
            plain = of_state(self) if args or options else found
            listener.on_question("state_dict()", _names_in_state, (self,), list(plain))
        return found

    of_state = torch.nn.Module.state_dict
    replace(torch.nn.Module, "state_dict", state_dict)
    replace(torch.nn.Module, "_named_members", _named_members)


def _names_of_members(module: torch.nn.Module, method: str, recurse: bool) -> list[str]:
    return [name for name, _ in getattr(module, method)(recurse=recurse)]


def _names_in_state(module: torch.nn.Module) -> list[str]:
    return list(module.state_dict())


def hooks_of_all_modules() -> dict[str, dict[Any, Any]]:
    """The tables of hooks that run for each module of the process, by what to call them."""
    module = torch.nn.modules.module
    return {
        "forward pre-hooks": module._global_forward_pre_hooks,
        "forward hooks": module._global_forward_hooks,
        "backward pre-hooks": module._global_backward_pre_hooks,
        "backward hooks": module._global_backward_hooks,
    }


def _tell_grad_mode(listener: Listener, enabled: bool, frame: FrameType) -> None:
    """Tell of a call of `torch._C._set_grad_enabled` in `frame`, from which a mode of the model may have got it."""
    while frame.f_code.co_name == "__init__" and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_code.co_name == "__exit__":
        listener.on_grad_block_end()
    else:
        listener.on_grad_mode(enabled)


def _report_switches(replace: Replace, on: On, listener: Listener, mine: Mine) -> None:
    inference = torch.inference_mode
    enter, leave = inference.__enter__, inference.__exit__

    def set_grad_enabled(switch: Callable[..., None], enabled: bool) -> None:
        frame = asking_frame()
        if _slots._schema_check_mode is not None and frame is not None and mine():
            _tell_grad_mode(listener, enabled, frame)
        switch(enabled)

    def __enter__(self: Any) -> Any:
        if mine():
            listener.on_grad_mode(not self.mode)  # `inference_mode(False)` switches autograd on
        return enter(self)

    def __exit__(self: Any, *error: Any) -> None:
        if mine():
            listener.on_grad_block_end()
        leave(self, *error)

    on(torch._C._set_grad_enabled, set_grad_enabled)
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
