"""What Python asks torch during a trace where no op runs: its state, facts of tensors, and their values as text.

Data flow:
    `torch.is_grad_enabled()`, `x.stride(0)`, `os.environ["A"]`, replaced -> the answer, and a Listener is told of it
    `f"{x}"`, `x.numpy()`, `hash(n)` -> what the ValueListener knows; else a text that may be shown, not looked into

Only questions of the model and of torch's Python on its way count: while the recorder handles an op its mode is off,
and contexts such as `torch.no_grad` ask only to restore what was.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import inspect
import logging
import operator
import os
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Set
from types import FrameType
from typing import Any, Protocol

import torch
import torch.amp.autocast_mode
import torch.autograd.graph
import torch.utils.checkpoint
from torch._ops import mode_stack_state_for_pre_dispatch

from scopetrace._compat.ops import eager
from scopetrace._compat.sources import NOT_THE_MODEL, PACKAGES, PYTHON, SCOPETRACE, TORCH_DIRECTORY, prefixes
from scopetrace._compat.symbols import GETTERS, Symbolic, asked_by_model, caller, class_of_number
from scopetrace._compat.tensors import FakeTensor


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
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any type of device."""
AUTOCAST = "torch.autocast"
"""The name of the flag that `autocast_state` tells."""
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""How many modes of torch functions are active, such as `with torch.device("cuda")`."""
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "hpu", "mps")

default_dtype: Callable[[], torch.dtype] = torch.get_default_dtype
grad_enabled: Callable[[], bool] = torch.is_grad_enabled
inference_mode_enabled: Callable[[], bool] = torch.is_inference_mode_enabled
default_device: Callable[[], torch.device] = torch.get_default_device
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
    return _flags[name](*args) if name in _flags else operator.attrgetter(name.removeprefix("torch."))(torch)


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
    for name in ("is_initialized", "get_rank", "get_world_size", "get_backend")
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


_OF_MODES = {*(name for name in _flags if "autocast" in name), "torch.get_default_device"}
"""Those that take arguments, or run an op to answer."""
_SETTINGS = [
    *[(name, ask) for name, ask in (*_flags.items(), *_BACKENDS) if name not in _OF_MODES],
    ("torch.is_autocast_cache_enabled", torch.is_autocast_cache_enabled),
    ("torch.backends.quantized.engine", torch._C._get_qengine),
]


def settings() -> dict[str, Any]:
    """The state of the process that a forward may change, by name."""
    dtypes = tuple(map(torch.get_autocast_dtype, _AUTOCAST_DEVICES))  # also where autocast is off
    return {AUTOCAST: autocast_state(), "dtypes of torch.autocast": dtypes, **{name: ask() for name, ask in _SETTINGS}}


_asks = [ask for _, ask in _SETTINGS]


def setting_values() -> tuple[Any, ...]:
    """As `settings`, without names. To compare these takes half as long."""
    return (autocast_state(), *map(torch.get_autocast_dtype, _AUTOCAST_DEVICES), *[ask() for ask in _asks])


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
    if name == "is_contiguous" and args:  # it takes no positional argument
        return _methods[name](t, memory_format=args[0])
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


def report_questions(replace: Replace, listener: Listener, mine: Mine, tags: Set[str]) -> None:
    """Replace what answers questions by functions that tell `listener`, too.

    `tags` are attributes that the forward may ask of tensors, and that users set on these.
    """

    def asked() -> bool:
        mode: Any = _slots._schema_check_mode
        if mode is None or not mine():
            return False
        frame = caller(2)
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
    _report_process_group(replace, listener, asked)
    for name in (*METHODS, *PROPERTIES):
        make = _method if name in METHODS else _property
        replace(torch.Tensor, name, make(name, listener, asked))
    for name in {name for name in tags if not hasattr(torch.Tensor, name)}:
        replace(torch.Tensor, name, _tag(name, listener, mine))
    _report_classes(replace, listener, mine)
    if "__class__" in tags:
        replace(FakeTensor, "__getattribute__", _with_class_of_users)
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


def _report_process_group(replace: Replace, listener: Listener, asked: Mine) -> None:
    for path, ask in _PROCESS_GROUP.items():
        replace(torch.distributed, path.rpartition(".")[2], _reported_of_group(path, ask, listener, asked))


def _reported_of_group(name: str, ask: Callable[..., Any], listener: Listener, asked: Mine) -> Callable[..., Any]:
    @functools.wraps(ask)
    def answered(*args: Any, **kwargs: Any) -> Any:
        answer = ask(*args, **kwargs)
        if asked() and all(group is None for group in (*args, *kwargs.values())):
            listener.on_flag(name, (), answer)
        return answer

    return answered


def _method(name: str, listener: Listener, asked: Mine) -> Callable[..., Any]:
    ask = _methods[name]

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            answer = ask(self, *args, **kwargs)
        except Exception as error:
            listener.on_failed(error)
            raise
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
            return class_of_number(x) if mine() else type(x)
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


def _with_class_of_users(self: FakeTensor, name: str) -> Any:
    """The `__getattribute__` of fake tensors for code that asks for `x.__class__`."""
    if name == "__class__" and not sys._getframe(1).f_code.co_filename.startswith(NOT_THE_MODEL):
        return _Type.class_of(self)
    return object.__getattribute__(self, name)


GETTERS.add(_with_class_of_users.__code__)


def _report_environment(replace: Replace, listener: Listener, mine: Mine) -> None:
    def tell(environment: Any, key: str | None, answer: Any) -> None:
        if environment is os.environ and mine() and not (asker().startswith(NOT_THE_MODEL) or _is_importing()):
            listener.on_environment(key, answer)

    replace(sys.modules[__name__], "_tell_of_environment", tell)
    replace(os.environ, "__class__", _Environment)


def _tell_of_environment(environment: Any, key: str | None, answer: Any) -> None:
    """What hears of reads of the environment while something is traced."""


class _Environment(type(os.environ)):  # type: ignore[misc]
    """The class of `os.environ` while something is traced.

    Its own class is left alone: where the methods of a class changed a thousand times, Python 3.13 goes on calling the
    `__getitem__` of an earlier time (`_spec_cache.getitem` of a type without a version).
    """

    def __getitem__(self, key: str) -> str:
        found: Any = MISSING
        try:
            found = super().__getitem__(key)
            return found
        finally:
            _tell_of_environment(self, key, found)

    def __iter__(self) -> Iterator[str]:
        found = list(super().__iter__())
        _tell_of_environment(self, None, found)
        return iter(found)


def report_static(
    replace: Replace, behind: Callable[[Any, FrameType], Any], ask: Callable[[Any, str, FrameType], None]
) -> None:
    """What `inspect.getattr_static` asks a class and an object by, in all versions of Python so far.

    `behind` gives what an entry of a class stands for, MISSING where for nothing; `ask` hears of a name that an object
    is asked for. Both get the frame that asks.
    """
    of_class, of_object = inspect._check_class, inspect._check_instance  # type: ignore[attr-defined]

    def check_class(cls: type, name: str) -> Any:
        found = behind(of_class(cls, name), sys._getframe(2))
        return inspect._sentinel if found is MISSING else found  # type: ignore[attr-defined]

    def check_instance(owner: Any, name: str) -> Any:
        ask(owner, name, sys._getframe(2))
        return of_object(owner, name)

    replace(inspect, "_check_class", check_class)
    replace(inspect, "_check_instance", check_instance)


Check = Callable[[Any, Collection[str], FrameType], contextlib.AbstractContextManager[None]]


def report_protocols(replace: Replace, check: Check) -> None:
    """What asks whether an object is of a class that looks at attributes: a Protocol, or one with `__subclasshook__`.

    `check` is entered meanwhile, with the names that a Protocol asks for and the frame that asks. Python keeps what it
    finds for classes, also after the trace. `issubclass` is left as it is, since typing looks at the frames around it.
    """
    asked = functools.cache(_attributes_asked)
    for meta in (abc.ABCMeta, typing._ProtocolMeta):
        replace(meta, "__instancecheck__", _checked(vars(meta)["__instancecheck__"], check, asked))


def _attributes_asked(cls: Any) -> Collection[str] | None:
    """Those that a Protocol asks for; none of another class with a hook of users, and None of any other."""
    if getattr(cls, "_is_protocol", False):
        return frozenset(typing._get_protocol_attrs(cls))  # type: ignore[attr-defined]
    hook = next(vars(base)["__subclasshook__"] for base in cls.__mro__ if "__subclasshook__" in vars(base))
    code = getattr(getattr(hook, "__func__", None), "__code__", None)
    return None if code is None or is_of_python(code.co_filename) else ()


def _checked(ask: Any, check: Check, asked: Callable[[Any], Collection[str] | None]) -> Callable[[Any, Any], bool]:
    @functools.wraps(ask)
    def checked(cls: Any, x: Any) -> bool:
        names = asked(cls)
        with contextlib.nullcontext() if names is None else check(x, names, sys._getframe(1)):
            found: bool = ask(cls, x)
        return found

    GETTERS.add(checked.__code__)  # type: ignore[attr-defined]
    return checked


def is_of_python(path: str) -> bool:
    """Whether a file is of Python's own library, in which other packages may be installed too."""
    return path.startswith(PYTHON) and not path.startswith(PACKAGES)


@functools.cache
def is_users(filename: str) -> bool:
    """Whether a file is neither torch's nor the standard library's."""
    return not filename.startswith(NOT_THE_MODEL) and not is_of_python(filename)


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


def _report_loggers(replace: Replace, listener: Listener, mine: Mine) -> None:
    def reported(ask: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: logging.Logger, *args: Any) -> Any:
            answer = ask(self, *args)
            if mine() and not sys._getframe(1).f_code.co_filename.startswith((logging.__file__, *NOT_THE_MODEL)):
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


def asker() -> str:
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
    """Tell of a call of `torch._C._set_grad_enabled` in `frame`.

    A mode of torch functions, such as that of a default device, gets the call too, and calls it again.
    """
    if frame.f_code.co_name == "__torch_function__":
        return
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


# Values of tensors and symbolic numbers: arrays, text, keys, copies --------------------------------------------------


class ValueListener(Protocol):
    """Who is told."""

    def on_reduce(self) -> None:
        """Python copies or pickles a tensor that was made in the trace, or an input."""

    def on_number(self, x: Any) -> Any:
        """A tensor of one element, or a symbolic number, becomes text or a dictionary key.

        Returns the number, or NotImplemented for what torch would do.
        """

    def on_text(self, frame: FrameType) -> None:
        """Code of the model makes text of a tensor without data, or of a symbolic number, in this frame."""

    def on_base(self, name: str) -> None:
        """The model asks whether a tensor is a view, or of what."""

    def on_storage_nbytes(self, storage: torch.UntypedStorage) -> None:
        """The model asks for the size of a storage."""

    def on_failed(self, error: Exception) -> None:
        """As `Listener.on_failed`."""

    def on_numpy(self, t: torch.Tensor) -> Any:
        """A tensor becomes an array of NumPy. Returns the tensor to take it from, or NotImplemented."""


def report_values(replace: Replace, listener: ValueListener, mine: Mine) -> None:
    """Tell `listener` of what this thread takes out of tensors and symbolic numbers, and give what it answers."""
    replace(torch.Tensor, "numpy", _array(torch.Tensor.numpy, listener, mine))
    replace(torch.Tensor, "tolist", _list(torch.Tensor.tolist, mine))
    replace(torch.Tensor, "__format__", _format(torch.Tensor.__format__, listener, mine))
    replace(torch.Tensor, "__repr__", _repr_of_tensor(torch.Tensor.__repr__, listener, mine))
    replace(torch.Tensor, "__reduce_ex__", _of_plain(torch.Tensor.__reduce_ex__, listener, mine))
    replace(torch.Tensor, "__deepcopy__", _deepcopy(_of_plain(torch.Tensor.__deepcopy__, listener, mine), mine))
    for name in ("apply_", "map_", "map2_"):
        replace(torch.Tensor, name, _of_elements(getattr(torch.Tensor, name), mine))
    for cls in Symbolic:
        for name in ("__hash__", "__repr__", "__format__"):
            replace(cls, name, _of_number(getattr(cls, name), listener, mine))
    base: Any = torch.Tensor._base
    replace(torch.Tensor, "_is_view", _asked("_is_view", torch.Tensor._is_view, listener, mine))
    replace(torch.Tensor, "_base", property(_asked("_base", base.__get__, listener, mine)))
    replace(torch.UntypedStorage, "nbytes", _nbytes(torch.UntypedStorage.nbytes, listener, mine))
    for owner, names in _OF_MEMORY.items():
        for name in names.split():
            replace(owner, name, _may_fail(getattr(owner, name), listener))


_OF_MEMORY: dict[Any, str] = {
    torch.Tensor: "data_ptr share_memory_ __dlpack__",
    torch.UntypedStorage: "data_ptr __getitem__ tolist",
    torch.TypedStorage: "data_ptr __getitem__ tolist",
    torch.utils.dlpack: "to_dlpack",
}
"""What asks for the address of data, or for the data there: it raises for tensors in a trace."""


def _may_fail(outer: Callable[..., Any], listener: ValueListener) -> Callable[..., Any]:
    @functools.wraps(outer)
    def asked(*args: Any, **kwargs: Any) -> Any:
        try:
            return outer(*args, **kwargs)
        except Exception as error:
            listener.on_failed(error)
            raise

    return asked


def _array(outer: Callable[..., Any], listener: ValueListener, mine: Mine) -> Callable[..., Any]:
    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        found = listener.on_numpy(self) if mine() else NotImplemented
        if found is NotImplemented:
            try:
                return outer(self, force=force)
            except Exception as error:
                listener.on_failed(error)
                raise
        with eager():
            array = outer(found, force=force)
        array.flags.writeable = False  # a write to it would not be in the graph
        return array

    return numpy


def _list(outer: Callable[..., Any], mine: Mine) -> Callable[..., Any]:
    """`tolist` of a tensor of the model, whose data C code would take without any op: the numbers of its elements."""

    def tolist(self: torch.Tensor) -> Any:
        if isinstance(self, FakeTensor) or not (mine() and asked_by_model()):
            return outer(self)
        return [t.tolist() for t in self] if self.dim() > 0 else self.item()

    return tolist


def _asked(name: str, ask: Callable[[Any], Any], listener: ValueListener, mine: Mine) -> Callable[[Any], Any]:
    def answered(self: torch.Tensor) -> Any:
        if mine() and asked_by_model():
            listener.on_base(name)
        return ask(self)

    return answered


def _nbytes(ask: Callable[[Any], int], listener: ValueListener, mine: Mine) -> Callable[[Any], int]:
    def nbytes(self: torch.UntypedStorage) -> int:
        if mine() and asked_by_model(_STORAGES):
            listener.on_storage_nbytes(self)
        return ask(self)

    return nbytes


_STORAGES = prefixes(TORCH_DIRECTORY, "storage.py")


# Text ----------------------------------------------------------------------------------------------------------------


def _format(outer: Callable[..., str], listener: ValueListener, mine: Mine) -> Callable[..., str]:
    """`f"{tensor:.3f}"`; without a number there is no text of that form, and it is that of `repr`."""

    def __format__(self: torch.Tensor, spec: str) -> str:
        if not mine() or self.dim() > 0:
            return outer(self, spec)
        found = listener.on_number(self)
        if found is not NotImplemented:
            return format(found, spec)
        return outer(self, "" if isinstance(self, FakeTensor) else spec)

    return __format__


def _repr_of_tensor(outer: Callable[..., str], listener: ValueListener, mine: Mine) -> Callable[..., str]:
    def __repr__(self: torch.Tensor, **options: Any) -> str:
        if mine() and isinstance(self, FakeTensor):
            _tell_text(listener)
        return outer(self, **options)

    return __repr__


def _of_number(outer: Callable[..., Any], listener: ValueListener, mine: Mine) -> Callable[..., Any]:
    """`hash`, `repr` or `format` of a symbolic number: of the number itself where the model's own code asks for it."""

    def read(self: Any, *spec: str) -> Any:
        if not (mine() and asked_by_model()):
            return outer(self, *spec)
        found = listener.on_number(self)
        if found is not NotImplemented:
            return getattr(found, outer.__name__)(*spec)
        if outer.__name__ != "__hash__":
            _tell_text(listener)
        return outer(self, *(("",) if spec else ()))

    return read


def _tell_text(listener: ValueListener) -> None:
    """Tell in which frame of the model text is made, beyond `__repr__`s, whose text is that of their object.

    What torch makes text of by itself, in an op, is for messages.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (
        frame.f_code.co_name in _OF_TEXT
        or frame.f_code.co_filename.startswith(_MAKES_TEXT)
        or is_of_python(frame.f_code.co_filename)
    ):
        frame = frame.f_back
    if frame is not None and not frame.f_code.co_filename.startswith(NOT_THE_MODEL):
        listener.on_text(frame)


_MAKES_TEXT = (__file__, *prefixes(TORCH_DIRECTORY, "_tensor.py", "_tensor_str.py"))
_OF_TEXT = ("__repr__", "__str__", "__format__", "extra_repr")


# Copies, and functions of elements ---------------------------------------------------------------------------------


def _of_plain(outer: Callable[..., Any], listener: ValueListener, mine: Mine) -> Callable[..., Any]:
    """A way by which Python copies tensors, which fake ones do not go."""

    def copied(self: torch.Tensor, *args: Any) -> Any:
        if mine() and isinstance(self, FakeTensor):
            listener.on_reduce()
        return outer(self, *args)

    return copied


def _deepcopy(outer: Callable[..., Any], mine: Mine) -> Callable[..., Any]:
    """Of a tensor of the model that autograd does not know, such as a buffer, the copy is an op.

    Copies of tensors that share memory would share theirs.
    """

    def copied(self: torch.Tensor, memo: dict[Any, Any]) -> Any:
        is_plain = type(self) is torch.Tensor and self.layout == torch.strided and not self.requires_grad
        if not (is_plain and mine()) or id(self) in memo:
            return outer(self, memo)
        copies = memo.setdefault("scopetrace", set())
        storage = self.untyped_storage()
        if storage._cdata in copies or storage.nbytes() != self.numel() * self.itemsize:
            return outer(self, memo)
        copies.add(storage._cdata)
        memo[id(self)] = self.clone()
        return memo[id(self)]

    return copied


def _of_elements(outer: Callable[..., Any], mine: Mine) -> Callable[..., Any]:
    """A method that calls a function of Python for each element, at the address of the data."""

    def called(self: torch.Tensor, *args: Any) -> Any:
        if mine() and isinstance(self, FakeTensor):
            raise NoData("a tensor in a trace doesn't have data for a function of its elements")
        return outer(self, *args)

    return called
