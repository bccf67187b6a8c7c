"""Describe what goes into and out of a module call, so that two recordings of it can be compared.

`describe` turns any Python value into a tree of `Shape`. A tensor is its shape and dtype, and so is a
`torch.fx.Node` (by its `meta["val"]`): the tree of an eager run and the tree of a trace are then comparable.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
import torch.utils._pytree as pytree

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice, enum.Enum)
_TORCH_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Anything:
    """Equal to everything: stands for a number that the trace knows only as an unbacked symbol."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "?"


ANYTHING = _Anything()


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One value: what kind it is, what is compared of it, and its children when it is a container."""

    kind: str
    """`tensor`, `value`, `object`, `container`, or `problem` for what a trace must not hold."""
    what: object
    """(sizes, dtype) of a tensor, the value of a plain value, the type's name of the others."""
    items: tuple[tuple[Any, "Shape"], ...] = ()
    """The children of a container with their keys."""


def type_name(value: object) -> str:
    """`module.QualName` of the type of `value`."""
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}"


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """The children of a container with their keys, or None if `value` is a leaf."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=False))
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, _field(value, f.name)) for f in dataclasses.fields(value)]
    if type(value) in pytree.SUPPORTED_NODES:
        return list(enumerate(pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0]))
    return None


def _field(value: Any, name: str) -> Any:
    """A field as it is stored: the configs of transformers are dataclasses whose `__getattribute__` may raise."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return None


def number(value: Any) -> Any:
    """A comparable form of a size or a scalar: unbacked symbols become ANYTHING, NaN becomes a string."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        node = value.node
        return node.hint if node.has_hint() else ANYTHING
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return value


def describe(value: Any, tensors: list[Any] | None = None) -> Shape:
    """The tree of `value`; its tensors (or the nodes that stand for them) are appended to `tensors`."""
    if isinstance(value, torch.fx.Node):
        return _describe_node(value, tensors)
    if isinstance(value, torch.Tensor):
        if tensors is not None:
            tensors.append(value)
        return Shape("tensor", (tuple(number(s) for s in value.shape), value.dtype))
    found = children(value)
    if found is not None:
        return Shape("container", type_name(value), tuple((k, describe(v, tensors)) for k, v in found))
    return _describe_leaf(value)


def _describe_leaf(value: Any) -> Shape:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return Shape("value", number(value))
    if isinstance(value, _PLAIN + _TORCH_PLAIN):
        return Shape("value", number(value))
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return Shape("object", value.__qualname__)
    return Shape("object", type_name(value))


def _describe_node(node: torch.fx.Node, tensors: list[Any] | None) -> Shape:
    val = node.meta.get("val", ANYTHING)
    if val is ANYTHING:
        return Shape("problem", f"node {node.name} has no meta['val']")
    if not isinstance(val, torch.Tensor):
        return Shape("value", number(val))
    if tensors is not None:
        tensors.append(node)
    return Shape("tensor", (tuple(number(s) for s in val.shape), val.dtype))


def raw_tensors(value: Any) -> bool:
    """True if a recorded value still holds a tensor where a node belongs."""
    if isinstance(value, torch.Tensor):
        return True
    return any(raw_tensors(v) for _, v in children(value) or ())


def differences(seen: Shape, got: Shape, path: str) -> Iterator[str]:
    """Say where two trees differ, one line each."""
    if seen.kind != got.kind or seen.what != got.what:
        yield f"{path}: eager {seen.kind} {_short(seen.what)}, trace {got.kind} {_short(got.what)}"
        return
    if [k for k, _ in seen.items] != [k for k, _ in got.items]:
        yield f"{path}: eager keys {[k for k, _ in seen.items]}, trace {[k for k, _ in got.items]}"
        return
    for (key, a), (_, b) in zip(seen.items, got.items, strict=True):
        yield from differences(a, b, f"{path}[{key!r}]")


def _short(what: object) -> str:
    text = repr(what)
    return text if len(text) < 90 else text[:87] + "..."


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with `fn` applied to its tensors (pytree containers)."""
    return pytree.tree_map_only(torch.Tensor, fn, value)
