"""What a forward read from outside of its program, so that a call can be compared with the trace.

Data flow:
    Python asks for a fact of an input, an attribute, a global or a flag -> a Read on the tape: name, value, place
    a call -> each place is asked again -> another answer is an error, since the program holds for the first one

Tensors and arguments are no reads: they are the inputs of the program. Nor are values that the forward wrote itself.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Sequence
from types import CellType
from typing import Any, NamedTuple, Protocol

import torch

from scopetrace._compat.questions import fact_of, flag
from scopetrace._compat.sources import NOT_THE_MODEL
from scopetrace.ir.scopes import Frames, source_of, walk_frames


@dataclasses.dataclass(frozen=True, repr=False)
class Missing:
    """Stands for the value of a name that is not there."""

    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()


@dataclasses.dataclass(frozen=True)
class CallInputs:
    """What a call is given, for places that are in its arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: Sequence[torch.Tensor]
    """The tensors among the arguments, in the order of `ProgramTape.inputs`."""


class Place(Protocol):
    """Where a read can be asked again. Equal for two reads of one thing."""

    @property
    def kind(self) -> str:
        """What it belongs to: `attribute`, `closure`, `input`, `tensor`, `state` or `environment`."""

    @property
    def stays(self) -> bool:
        """Whether it exists in another process too: it belongs to the call or to torch, not to the model's objects."""

    def now(self, call: CallInputs) -> Any:
        """What is there at a call; MISSING where there is nothing."""


class InTable(NamedTuple):
    """An entry of the `__dict__` of a module, an object, a class or a Python file."""

    table: Any
    key: str

    @property
    def kind(self) -> str:
        """As `Place.kind`."""
        return "global" if "__name__" in self.table else "attribute"

    @property
    def stays(self) -> bool:
        """As `Place.stays`."""
        return False

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        return self.table.get(self.key, MISSING)


@dataclasses.dataclass(frozen=True)
class InClosure:
    """A variable of a function around the one that read it."""

    cell: CellType
    kind, stays = "closure", False

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        try:
            return self.cell.cell_contents
        except ValueError:
            return MISSING


class InLayer(NamedTuple):
    """All attributes of one of torch's layers that its code names: a tuple of their values."""

    table: dict[str, Any]
    keys: tuple[str, ...]

    @property
    def kind(self) -> str:
        """As `Place.kind`."""
        return "attribute"

    @property
    def stays(self) -> bool:
        """As `Place.stays`."""
        return False

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        return tuple([self.table.get(key, MISSING) for key in self.keys])


class InSlot(NamedTuple):
    """An attribute of an object that has no `__dict__`."""

    owner: Any
    key: str

    @property
    def kind(self) -> str:
        """As `Place.kind`."""
        return "attribute"

    @property
    def stays(self) -> bool:
        """As `Place.stays`."""
        return False

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        return getattr(self.owner, self.key, MISSING)


@dataclasses.dataclass(frozen=True)
class OfInput:
    """What an input tensor answers to a question: `x.stride(0)`."""

    index: int
    """Its position among `ProgramTape.inputs`."""
    fact: str
    args: tuple[Any, ...] = ()
    kind, stays = "input", True

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        return fact_of(call.tensors[self.index], self.fact, self.args)


@dataclasses.dataclass(frozen=True)
class OfTensor:
    """What a parameter, buffer or other tensor of the model answers to a question without arguments."""

    module: torch.nn.Module
    name: str
    fact: str
    kind, stays = "tensor", False

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        tensor = getattr(self.module, self.name, None)
        return fact_of(tensor, self.fact, ()) if isinstance(tensor, torch.Tensor) else MISSING


@dataclasses.dataclass(frozen=True)
class Flag:
    """The state of the process, as a function of torch tells it; `torch.autocast` stands for `autocast_state()`."""

    function: str
    args: tuple[Any, ...] = ()
    kind, stays = "state", True

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        return flag(self.function, self.args)


@dataclasses.dataclass(frozen=True)
class OfEnvironment:
    """An environment variable."""

    key: str
    kind, stays = "environment", True

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        return os.environ.get(self.key, MISSING)


@dataclasses.dataclass(slots=True, eq=False)
class Read:
    """One thing that the forward read, and on which the program depends."""

    name: str
    """As in source: `x.stride(0)`, `layers.0.training`, `SCALE`, `os.environ['SCALE']`, `torch.is_grad_enabled()`."""
    value: Any
    """What was there: a copy, of a list, dict or set."""
    place: Place
    frames: Frames = ()
    """The Python frames of the first read."""
    module: str = ""
    """The path of the scope in which it was read first."""

    @property
    def is_of_model(self) -> bool:
        """Whether it is data, rather than an object or function, that the model's own code read, not torch's code."""
        if not isinstance(self.value, _DATA):
            return False
        if self.place.kind in ("global", "closure"):
            return True  # only those in the model's code are looked for
        frames = walk_frames(self.frames)
        return self.name not in _READ_BY_OPS and not (frames and frames[-1][0].co_filename.startswith(NOT_THE_MODEL))

    @property
    def parts(self) -> list[Read]:
        """A read of each attribute, of one of a layer; else itself."""
        place = self.place
        if not isinstance(place, InLayer):
            return [self]
        return [
            Read(f"{self.name}.{key}", value, InTable(place.table, key), self.frames, self.module)
            for key, value in zip(place.keys, self.value, strict=True)
        ]

    @property
    def source(self) -> str | None:
        """The user's line that read it first: `model.py:12, in forward: if x.is_contiguous():`."""
        return source_of(self.frames)

    def __str__(self) -> str:
        at = f", at {self.source}" if self.source else ""
        return f"{self.name} was {self.value!r}{at}"


_DATA = (bool, int, float, str, type(None), torch.dtype, torch.device, list, tuple, dict, set, Missing)
_READ_BY_OPS = ("torch.autocast", "torch.get_default_dtype()")


def snapshot(value: Any) -> Any:
    """`value`, with copies of Python's containers and of NumPy arrays in it."""
    kind = type(value)
    if kind in _DICTS:
        return {key: snapshot(item) for key, item in value.items()}
    if kind in (list, tuple, collections.deque):
        return (tuple if kind is tuple else list)(map(snapshot, value))
    if kind is set:
        return set(value)
    is_array = kind.__module__ == "numpy" and hasattr(kind, "tobytes")
    return (str(value.dtype), value.shape, value.tobytes()) if is_array else value


_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)


def same(then: Any, now: Any) -> bool:
    """Whether a place has the value that it had: equal numbers and text of one type, containers of such, one object."""
    if then is now:
        return True
    kind = type(then)
    if kind is not type(now):
        return False
    if kind in (list, tuple):
        return len(then) == len(now) and all(map(same, then, now))
    if kind is dict:
        return list(then) == list(now) and all(map(same, then.values(), now.values()))
    if isinstance(then, float) and then != then:
        return bool(now != now)
    try:
        return not isinstance(then, torch.Tensor) and bool(then == now)
    except Exception:  # objects of others may raise anything, as tables of numbers do
        return False
