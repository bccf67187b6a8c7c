"""What Python asks torch where no op runs: its state, and facts of tensors."""

from __future__ import annotations

import dataclasses
import operator
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
import torch.amp.autocast_mode
import torch.autograd.graph
import torch.utils.checkpoint
from torch.nn.attention import _cur_sdpa_kernel_backends


@dataclasses.dataclass(frozen=True, repr=False)
class Missing:
    """Stands for the value of a name that is not there."""

    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()

Condition = Callable[[], bool]
"""Whether what happens now is to be reported."""

Replace = Callable[[Any, str, Any], None]
"""Sets an attribute of a class or module for the time of the trace."""

flags: dict[str, Callable[..., Any]] = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        *("is_grad_enabled", "is_inference_mode_enabled", "get_default_dtype", "get_default_device"),
        *("is_autocast_enabled", "get_autocast_dtype", "is_autocast_cpu_enabled", "get_autocast_gpu_dtype"),
    )
}
"""Functions of torch that answer questions about the state of the process, and that models ask."""
methods: dict[str, Callable[..., Any]] = {
    name: getattr(torch.Tensor, name)
    for name in (
        *("stride", "is_contiguous", "contiguous", "storage_offset", "is_inference", "is_conj", "is_neg"),
        *("is_coalesced", "dim_order"),
    )
}
_BY_KEYWORD = {"is_contiguous": "memory_format", "dim_order": "ambiguity_check"}
"""The methods that take no positional argument, with that which they take."""
_tensor: Any = torch.Tensor
properties: dict[str, Callable[..., Any]] = {
    name: getattr(_tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn", "_version")
}
"""What a tensor is asked beside its shape, dtype and device, which every call is compared with anyway."""
VIEW_QUESTIONS: dict[str, Any] = {"_is_view": _tensor._is_view, "_base": _tensor._base.__get__}
"""What tells whether a tensor is a view, or of what."""
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""How many modes of torch functions are active."""
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many modes of the dispatcher are active."""
_CPU = torch.device("cpu")
_is_autocast_enabled = torch.is_autocast_enabled
autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any type of device."""
AUTOCAST = "torch.autocast"
"""The name of the flag that `autocast_state` tells."""
AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "hpu", "mps")

default_dtype: Callable[[], torch.dtype] = torch.get_default_dtype
grad_enabled: Callable[[], bool] = torch.is_grad_enabled
inference_mode_enabled: Callable[[], bool] = torch.is_inference_mode_enabled
fast_path_enabled: Callable[[], bool] = torch.backends.mha.get_fastpath_enabled
"""torch's own functions, whose answer is no read."""


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """The types of device for which autocast is on, each with its dtype."""
    if not autocast_enabled():
        return ()
    return tuple((d, torch.get_autocast_dtype(d)) for d in AUTOCAST_DEVICES if _is_autocast_enabled(d))


def flag(name: str, args: tuple[Any, ...]) -> Any:
    """What one of `flags` answers, such as `torch.is_grad_enabled`, or a setting of `torch.backends` is.

    `torch.autocast` is `autocast_state`.
    """
    if name == AUTOCAST:
        return autocast_state()
    if name in PROCESS_GROUP:
        try:
            return PROCESS_GROUP[name]()
        except ValueError:  # there is none
            return MISSING
    ask = flags.get(name) or _settings.get(name)
    return ask(*args) if ask is not None else operator.attrgetter(name.removeprefix("torch."))(torch)


def quick_flag(name: str, args: tuple[Any, ...], answer: Any) -> tuple[Callable[..., Any], tuple[Any, ...], Any] | None:
    """A function of torch, its arguments and what it gives where `flag(name, args)` is `answer`; None for no such.

    It takes less time than `flag`, and may give something else where the flag is the same.
    """
    if name == AUTOCAST:
        return None if answer else (autocast_enabled, (), False)
    if name == "torch.get_default_device":
        return (function_modes, (), 0) if answer == _CPU else None
    return (flags[name], args, answer) if name in flags else None


PROCESS_GROUP: dict[str, Callable[..., Any]] = {
    f"torch.distributed.{name}": getattr(torch.distributed, name)
    for name in ("is_initialized", "get_rank", "get_world_size")
    if hasattr(torch.distributed, name)
}
"""Functions that answer questions about the default process group."""
switch_grad: Callable[[bool], None] = torch._C._set_grad_enabled
"""By which all that switches autograd does it."""


_BACKENDS = {
    f"{module.__name__}.{name}": x.getter
    for module in (torch.backends.cudnn, torch.backends.mkldnn)
    for name, x in vars(type(module)).items()
    if isinstance(x, torch.backends.ContextProp)
}

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
"""Further settings, of which no question is seen: those that code names count as asked."""


OTHER_SETTINGS: dict[str, Callable[..., Any]] = {
    f"{path}.{name}": torch._C._get_qengine if name == "engine" else getattr(pkgutil.resolve_name(path), name)
    for path, names in _OTHERS.items()
    for name in names.split()
}
_settings = {
    **{name: ask for name, ask in flags.items() if "autocast" not in name and name != "torch.get_default_device"},
    **_BACKENDS,
    **OTHER_SETTINGS,
}
"""Those that take no arguments, and run no op to answer."""


def settings() -> dict[str, Any]:
    """The state of the process that a forward may change, by name."""
    dtypes = tuple(map(torch.get_autocast_dtype, AUTOCAST_DEVICES))  # also where autocast is off
    return {
        AUTOCAST: autocast_state(),
        "dtypes of torch.autocast": dtypes,
        **{name: ask() for name, ask in _settings.items()},
    }


_backend_flags = torch._C._get_cudnn_enabled, torch._C._get_mkldnn_enabled, torch._C._get_deterministic_algorithms


def attention_kernels() -> tuple[Any, ...]:
    """What `torch.nn.attention.sdpa_kernel` sets: which kernels may compute attention, in the order to try them."""
    return tuple(_cur_sdpa_kernel_backends(with_priority=True))


def backend_flags() -> tuple[Any, ...]:
    """What decides which backend of torch computes attention, convolutions and the like, and gives strides."""
    return (*[ask() for ask in _backend_flags], *attention_kernels())


def _layout(t: torch.Tensor) -> tuple[Any, ...]:
    sizes = zip(t.size(), methods["stride"](t), strict=True)
    return tuple([0 if type(n) is int and n == 1 else stride for n, stride in sizes])


_FACTS: dict[str, Callable[[torch.Tensor], Any]] = {
    **properties,
    "grad_fn": lambda t: properties["grad_fn"](t) is not None,
    "metadata": lambda t: (t.dtype, tuple(t.size()), t.device),
    "layout": _layout,
    "data": lambda t: t.tolist() if t.numel() == 1 else t._version,
    "has_grad": lambda t: t.grad is not None,
    "is_parameter": lambda t: isinstance(t, torch.nn.Parameter),
    "storage_nbytes": lambda t: t.untyped_storage().nbytes(),
}


def fact_of(t: torch.Tensor, name: str, args: tuple[Any, ...]) -> Any:
    """What a tensor answers to one of `methods` or `properties`; of `grad_fn`, whether there is one.

    The fact `data` is the number of a tensor of one element, else how often it was written; `layout` is its strides,
    with 0 for dimensions of one element, whose stride does not matter.
    """
    if name[0] == ".":  # an attribute that users set on it
        return vars(t).get(name[1:], MISSING)
    if name in _BY_KEYWORD and args:
        return methods[name](t, **{_BY_KEYWORD[name]: args[0]})
    return methods[name](t, *args) if name in methods else _FACTS[name](t)


def hooks_of_all_modules() -> dict[str, dict[Any, Any]]:
    """The tables of hooks that run for each module of the process, by what to call them."""
    module = torch.nn.modules.module
    return {
        "forward pre-hooks": module._global_forward_pre_hooks,
        "forward hooks": module._global_forward_hooks,
        "backward pre-hooks": module._global_backward_pre_hooks,
        "backward hooks": module._global_backward_hooks,
    }
