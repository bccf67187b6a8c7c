"""What Python takes out of tensors, storages and symbolic numbers in a trace: arrays, text, keys, copies, addresses.

Data flow:
    `x.numpy()`, `f"{x}"`, `hash(n)`, `copy.copy(x)` -> a ValueListener -> a value, what torch gives, or a refusal
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch

from scopetrace._compat.function_mode import Handler, On, after
from scopetrace._compat.ops import eager
from scopetrace._compat.questions import Mine, NoData, Replace
from scopetrace._compat.sources import (
    NOT_THE_MODEL,
    TORCH_DIRECTORY,
    asked_by_model,
    asking_frame,
    is_of_python,
    prefixes,
)
from scopetrace._compat.tensors import FakeTensor


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


def report_values(replace: Replace, on: On, listener: ValueListener, mine: Mine) -> None:
    """Tell `listener` of what this thread takes out of tensors and symbolic numbers, and give what it answers."""
    tensor: Any = torch.Tensor

    def may_fail(ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return ask(*args, **kwargs)
        except Exception as error:
            listener.on_failed(error)
            raise

    for ask in (tensor.numpy, tensor.__array__, tensor.data_ptr, tensor.share_memory_, tensor.__dlpack__):
        on(ask, may_fail)
    for ask in (tensor.numpy, tensor.__array__):
        on(ask, _array(listener, mine))
    on(tensor.tolist, _list(mine))
    on(tensor.__format__, _format(listener, mine))
    on(tensor.nbytes.__get__, lambda _, t: t.numel() * t.element_size())  # torch's takes no symbolic sizes
    _tell_first(on, listener, mine)
    on(tensor.__deepcopy__, _deepcopy(mine))
    texts = [(cls, name) for cls in (torch.SymInt, torch.SymFloat) for name in ("__repr__", "__format__")]
    for cls, name in ((torch.SymInt, "__hash__"), (torch.SymBool, "__repr__"), *texts):
        replace(cls, name, _of_number(getattr(cls, name), listener, mine))
    storage: Any = torch.UntypedStorage
    replace(storage, "nbytes", _nbytes(storage.nbytes, listener, mine))
    address = storage.data_ptr
    replace(storage, "data_ptr", lambda self: may_fail(address, self))


def _tell_first(on: On, listener: ValueListener, mine: Mine) -> None:
    """What torch answers after the listener has heard of it, which may refuse."""
    tensor: Any = torch.Tensor

    def of_elements() -> None:
        error = NoData("a tensor in a trace doesn't have data for a function of its elements")
        listener.on_failed(error)
        raise error

    def of_fakes(tell: Callable[[], None]) -> Handler:
        return after(lambda t, *_, **__: tell() if isinstance(t, FakeTensor) else None, mine)

    on(tensor.__repr__, of_fakes(lambda: _tell_text(listener)))
    for copy in (tensor.__reduce_ex__, tensor.__deepcopy__):
        on(copy, of_fakes(listener.on_reduce))
    for run in (tensor.apply_, tensor.map_, tensor.map2_):  # which call a function of Python for each element
        on(run, of_fakes(of_elements))
    for name, func in (("_is_view", tensor._is_view), ("_base", tensor._base.__get__)):
        tell = functools.partial(_tell_base, listener, name)
        on(func, after(tell, mine))


def _tell_base(listener: ValueListener, name: str, *_: Any) -> None:
    if asked_by_model():
        listener.on_base(name)


def _array(listener: ValueListener, mine: Mine) -> Handler:
    def array(ask: Callable[..., Any], t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        known = listener.on_numpy(t) if mine() else NotImplemented
        if known is NotImplemented:
            return ask(t, *args, **kwargs)
        with eager():
            result = ask(known, *args, **kwargs)
        result.flags.writeable = False  # a write to it would not be in the graph
        return result

    return array


def _list(mine: Mine) -> Handler:
    """`tolist` of a tensor of the model, whose data C code would take without any op: the numbers of its elements."""

    def tolist(ask: Callable[..., Any], t: torch.Tensor) -> Any:
        if isinstance(t, FakeTensor) or not (mine() and asked_by_model()):
            return ask(t)
        return [row.tolist() for row in t] if t.dim() > 0 else t.item()

    return tolist


def _nbytes(ask: Callable[[Any], int], listener: ValueListener, mine: Mine) -> Callable[[Any], int]:
    def nbytes(self: torch.UntypedStorage) -> int:
        if mine() and asked_by_model(_STORAGES):
            listener.on_storage_nbytes(self)
        return ask(self)

    return nbytes


_STORAGES = prefixes(TORCH_DIRECTORY, "storage.py")


# Text ----------------------------------------------------------------------------------------------------------------


def _format(listener: ValueListener, mine: Mine) -> Handler:
    """`f"{tensor:.3f}"`; without a number there is no text of that form, and it is that of `repr`."""

    def text(ask: Callable[..., str], t: torch.Tensor, spec: str) -> str:
        if not mine():
            return ask(t, spec)
        number = NotImplemented if t.dim() > 0 else listener.on_number(t)
        if number is not NotImplemented:
            return format(number, spec)
        if isinstance(t, FakeTensor):
            _tell_text(listener)
        return ask(t, "" if isinstance(t, FakeTensor) and t.dim() == 0 else spec)

    return text


def _of_number(ask: Callable[..., Any], listener: ValueListener, mine: Mine) -> Callable[..., Any]:
    """`hash`, `repr` or `format` of a symbolic number: of the number itself where the model's own code asks for it."""

    def read(self: Any, *spec: str) -> Any:
        if not (mine() and asked_by_model()):
            return ask(self, *spec)
        number = listener.on_number(self)
        if number is not NotImplemented:
            return getattr(number, ask.__name__)(*spec)
        if ask.__name__ != "__hash__":
            _tell_text(listener)
        return ask(self, *(("",) if spec else ()))

    return read


def _tell_text(listener: ValueListener) -> None:
    """Tell in which frame of the model text is made, beyond `__repr__`s, whose text is that of their object.

    What torch makes text of by itself, in an op, is for messages.
    """
    frame = asking_frame()
    while frame is not None and (
        frame.f_code.co_name in _OF_TEXT
        or frame.f_code.co_filename.startswith(_MAKES_TEXT)
        or is_of_python(frame.f_code.co_filename)
    ):
        frame = frame.f_back
    if frame is not None and not frame.f_code.co_filename.startswith(NOT_THE_MODEL):
        listener.on_text(frame)


_MAKES_TEXT = prefixes(TORCH_DIRECTORY, "_tensor.py", "_tensor_str.py")
_OF_TEXT = ("__repr__", "__str__", "__format__", "extra_repr")


# Copies --------------------------------------------------------------------------------------------------------------


def _deepcopy(mine: Mine) -> Handler:
    """Of a tensor of the model that autograd does not know, such as a buffer, the copy is an op.

    Copies of tensors that share memory would share theirs.
    """

    def copied(ask: Callable[..., Any], t: torch.Tensor, memo: dict[Any, Any]) -> Any:
        is_plain = type(t) is torch.Tensor and t.layout == torch.strided and not t.requires_grad
        if not (is_plain and mine()) or id(t) in memo:
            return ask(t, memo)
        copies = memo.setdefault("scopetrace", set())
        storage = t.untyped_storage()
        if storage._cdata in copies or storage.nbytes() != t.numel() * t.itemsize:
            return ask(t, memo)
        copies.add(storage._cdata)
        memo[id(t)] = t.clone()
        return memo[id(t)]

    return copied
