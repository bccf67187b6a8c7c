"""Values and calls of which a part is made when it is read: of calls that repeat others (see `tape.OpList`).

Classes of their own: reading any attribute takes longer where the class has a `__getattr__`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from scopetrace._compat.tensors import offset_of, requires_grad_of
from scopetrace.ir.scopes import Frames, Scope
from scopetrace.ir.tape import Call, Op, Value


class UnmadeValue(Value):
    """A value whose `fake` is made when it is asked for, and which no tensor stands for before."""

    __slots__ = ("unmade",)

    unmade: Callable[[], torch.Tensor] | None
    """Makes `fake`; None once that is made."""

    def __init__(
        self,
        unmade: Callable[[], torch.Tensor],
        slot: int,
        storage: int,
        key: int | None,
        offset: int | torch.SymInt,
        requires_grad: bool,
    ) -> None:
        self.unmade, self.slot, self.storage, self.key = unmade, slot, storage, key
        self.offset, self.requires_grad, self.real = offset, requires_grad, None
        self.op, self.autograd_placeholder = None, False  # type: ignore[assignment]

    if not TYPE_CHECKING:  # for the one attribute that may not be set

        def __getattr__(self, name: str) -> Any:
            if name != "fake":
                raise AttributeError(name)
            make = self.unmade
            if make is not None:  # else another thread has just made it
                self.fake, self.unmade = make(), None
            return object.__getattribute__(self, "fake")

    @property
    def requires_grad_now(self) -> bool:
        """Whether `fake` requires grad."""
        return self.requires_grad if self.unmade is not None else requires_grad_of(self.fake)

    def copy(self, storage: int) -> Value:
        """A value for the same tensor, for an op of another tape. It becomes that of the op that is made with it."""
        if self.unmade is None:
            return super().copy(storage)
        later = functools.partial(getattr, self, "fake")
        new = UnmadeValue(later, self.slot, storage, self.key, self.offset, self.requires_grad)
        new.real, new.autograd_placeholder = self.real, self.autograd_placeholder
        return new


class WaitingValue(Value):
    """A value of a part of the tape that is not made yet (see `OpList`): what is not known of it makes that part.

    `fill` makes it. Another thread waits there until it is made.
    """

    __slots__ = ("fill", "made_by")

    fill: Callable[[], None]
    made_by: Op | None
    """Its op, once that is made."""

    def __init__(self, fill: Callable[[], None], real: torch.Tensor | None) -> None:
        self.fill, self.real, self.made_by = fill, real, None

    def know(self, fake: torch.Tensor, slot: int, storage: int, key: int | None, placeholder: bool) -> None:
        """Set all but the op. `placeholder` is `autograd_placeholder`."""
        self.fake, self.slot, self.storage, self.key = fake, slot, storage, key
        self.requires_grad = requires_grad_of(fake)
        self.offset = offset_of(fake)
        self.autograd_placeholder = placeholder

    if not TYPE_CHECKING:  # in the place of attributes

        @property
        def op(self) -> Op | None:
            """As of a Value; None while the op itself is made."""
            if self.made_by is None:
                self.fill()
            return self.made_by

        @op.setter
        def op(self, op: Op) -> None:
            self.made_by = op

        def __getattr__(self, name: str) -> Any:
            self.fill()
            return object.__getattribute__(self, name)


class HasAttributes(Protocol):
    """What a module was before the forward."""

    def plain_attributes(self) -> dict[str, Any]:
        """Its attributes that are neither tensors nor modules."""


_WAITING = ("args", "kwargs", "outputs")


class CopiedCall(Call):
    """A call inside of one that repeats another: the fields of `_WAITING`, and `attributes`, are made when read.

    What makes them is shared by all calls of a repetition: a trace may have thousands of calls that nobody reads.
    """

    repeats: Call
    """The call that it is a copy of."""
    make: Callable[[Call], tuple[Any, ...]]
    """Makes the part of the tape that the call is in, and gives the fields of `_WAITING` for `repeats`."""
    described_by: HasAttributes
    """Has `attributes`."""

    # Each of its fields is set by itself, and none that has its default value: Python makes no dict for them then.
    def __init__(
        self,
        repeats: Call,
        module: torch.nn.Module | None,
        fqn: str | None,
        place: tuple[Call, Scope],
        number: tuple[int, int],
        start: int,
        frames: Frames,
        make: Callable[[Call], tuple[Any, ...]],
        described_by: HasAttributes,
    ) -> None:
        """`place` is the call around it and its scope, and `number` its position and its index.

        What it repeats is no leaf, raised nothing and had no tensors in the place of the module's.
        """
        self.repeats, self.module, self.fqn = repeats, module, fqn
        self.parent, self.scope = place
        self.position, self.index = number
        self.start, self.frames, self.direct, self.module_type = start, frames, repeats.direct, repeats.module_type
        self.make, self.described_by = make, described_by

    def whole(self) -> dict[str, Any]:
        """The fields of a call."""
        fields = self.__dict__
        repeats, make = fields.get("repeats"), fields.get("make")
        if make is not None:  # else another thread may have just done it, and removes these in this order
            fields.update(zip(_WAITING, make(repeats), strict=True))
            fields.pop("make", None)
            fields.pop("repeats", None)
        self.attributes  # noqa: B018
        return fields

    def replace(self, **changed: Any) -> Call:
        """As the base's."""
        new = Call.__new__(Call)
        new.__dict__.update(self.whole(), **changed)
        return new

    if not TYPE_CHECKING:  # in the place of the field

        @property
        def attributes(self) -> dict[str, Any]:
            """As of a Call."""
            fields = self.__dict__
            described_by = fields.get("described_by")
            if described_by is not None:  # as above
                fields["attributes"] = described_by.plain_attributes()
                fields.pop("described_by", None)
            return fields["attributes"]


def _made_late(name: str) -> Any:
    return property(lambda self: self.whole()[name], lambda self, x: self.whole().update({name: x}))


for _name in _WAITING:
    setattr(CopiedCall, _name, _made_late(_name))  # in the place of the fields
