"""Templates of what calls take and return: the structure, with a value of the tape in place of each tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch

from scopetrace._compat.tensors import storage_id
from scopetrace.containers.structure import OpaqueContainer, is_plain_object, map_structure
from scopetrace.ir.tape import Call
from scopetrace.record.values import ValueTable


@dataclasses.dataclass(slots=True, eq=False)
class _Noted:
    """Stands in a template for an object of which only the end of the forward says whether its class is opened."""

    original: Any
    contents: Any
    """The template of what it held."""


def _opened(template: Any, kinds: Collection[type]) -> Any:
    """A template with the contents of its objects of `kinds`; the others are leaves."""

    def settled(noted: _Noted) -> Any:
        return _opened(noted.contents, kinds) if type(noted.original) in kinds else noted.original

    return map_structure(settled, template, _Noted)


class Templates:
    """Makes the templates of the arguments and results of calls.

    An object may get its first tensors after a call has taken it, as an empty cache does. So what an object of an
    unknown class holds is noted when a call takes it, and `settle` says at the end which of them were containers.
    """

    def __init__(self, values: ValueTable, object_types: frozenset[type], *, notes_objects: bool) -> None:
        """`object_types` are the classes whose instances are known to hold tensors; see `containers.structure`."""
        self._values = values
        self._object_types = object_types
        self._is_plain: dict[type, bool] = {}
        self._noted: dict[int, Any] = {}  # by id, those in the template that is being made
        self._unsettled: list[Call] = []
        """The calls whose templates have some."""
        self._knows_all = notes_objects

    def of(self, x: Any) -> Any:
        """The template of a value of the user; `belong_to` says of which call it is."""
        return map_structure(self._values.value_of, x, torch.Tensor, self._object_types, self._note)

    def belong_to(self, call: Call) -> None:
        """The templates that were made last are those of `call`."""
        if self._noted:
            self._noted.clear()
            self._unsettled.append(call)

    def settle(self, kinds: Collection[type]) -> bool:
        """Open the noted objects of `kinds`, and keep the others as leaves. False where not all is known of them."""

        for call in self._unsettled:
            call.args, call.kwargs, call.outputs = _opened((call.args, call.kwargs, call.outputs), kinds)
        return self._knows_all

    def _note(self, x: Any) -> Any:
        kind = type(x)
        if kind not in self._is_plain:
            self._is_plain[kind] = is_plain_object(x)
        self._knows_all &= len(self._noted) < _MANY
        if not (self._is_plain[kind] and self._knows_all):
            return x
        if id(x) not in self._noted:
            self._noted[id(x)] = x  # for those inside of it that lead back to it
            keys, values = [f".{name}" for name in vars(x)], [*vars(x).values()]
            items = map_structure(self._known, values, torch.Tensor, self._object_types, self._note)
            self._noted[id(x)] = _Noted(x, OpaqueContainer(kind, None, keys, items))
        return self._noted[id(x)]

    def _known(self, t: torch.Tensor) -> Any:
        """The value of a tensor in an object. One that no op has met yet gets none: that may put an op on the tape."""
        value = self._values.by_id.get(id(t))
        self._knows_all &= value is not None and value.storage == storage_id(t)
        return value


_MANY = 100  # objects inside of each other, beyond which they are no containers of a model
