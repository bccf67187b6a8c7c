"""Values, types and ops as text, in the notation of torch.fx: `%add: f32[2, 3]`, `aten.add.Tensor(%x, 1)`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from scopetrace._compat.symbols import Symbolic, number_text
from scopetrace.containers.structure import container_type, open_container
from scopetrace.formatting import LONGEST, short_repr
from scopetrace.ir import meta

Namer = Callable[[torch.fx.Node], str]
"""Gives the text of a node where it is an argument or result."""

_PLAIN = (int, float, bool, complex, str, bytes, type(None))


def type_text(value: Any) -> str:
    """`f32[2, 3]` for a tensor, `Sym(2*batch)` for a symbolic number, `(f32[2], f32[3])` for several."""
    if isinstance(value, torch.Tensor):
        sizes = (number_text(size) if isinstance(size, Symbolic) else str(size) for size in value.shape)
        return f"{dtype_text(value.dtype)}[{', '.join(sizes)}]"
    if isinstance(value, Symbolic):
        return f"Sym({number_text(value)})"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(type_text, value))})"
    return "" if value is None else type(value).__name__


def dtype_text(dtype: torch.dtype) -> str:
    """torch's short name of a dtype: `f32`, `i64`, `b8`."""
    return str(getattr(dtype, "abbr", dtype))


def named(node: torch.fx.Node) -> str:
    """`%name`; a parameter, buffer or constant by its name in the model."""
    return str(node.target) if node.op == "get_attr" else f"%{node.name}"


def typed(node: torch.fx.Node) -> str:
    """`%name: f32[2, 3]`."""
    text = type_text(meta.value(node))
    return f"{named(node)}: {text}" if text else named(node)


def value_text(x: Any, name: Namer, limit: int | None = None) -> str:
    """A Python value as text: nodes in it by `name`, of containers only the first `limit` items (None: all)."""
    if isinstance(x, torch.fx.Node):
        return name(x)
    if isinstance(x, _PLAIN):
        return repr(f"{x[:LONGEST]}…" if isinstance(x, str) and len(x) > LONGEST else x)
    if isinstance(x, torch.device):
        return repr(str(x))
    if type(x) is slice:
        return f"slice({', '.join(value_text(part, name, limit) for part in (x.start, x.stop, x.step))})"
    children = open_container(x)
    if children is None:
        return _object_text(x)
    return _container_text(x, children, name, limit)


def _container_text(x: Any, children: list[tuple[str, Any]], name: Namer, limit: int | None) -> str:
    items = [(key, value_text(item, name, limit)) for key, item in children[:limit]]
    more = [f"… {len(children) - len(items)} more"] if len(items) < len(children) else []
    if isinstance(x, list):
        return f"[{', '.join([*(text for _, text in items), *more])}]"
    if type(x) is tuple:
        inside = ", ".join([*(text for _, text in items), *more])
        return f"({inside},)" if len(children) == 1 else f"({inside})"
    if type(x) is dict:
        return f"{{{', '.join([*(f'{key[1:-1]}: {text}' for key, text in items), *more])}}}"
    # Fields of a ModelOutput or dataclass that are None are left out: a model fills few of them.
    fields = [_field_text(key, text) for key, text in items if text != "None"]
    return f"{container_type(x).__name__}({', '.join([*fields, *more])})"


def _field_text(key: str, text: str) -> str:
    """`logits=%x` for the path `.logits` or `['logits']`; the value alone for a position."""
    word = key.strip("[].'\"")
    return f"{word}={text}" if word.isidentifier() else text


def _object_text(x: Any) -> str:
    """Any other object: its repr where that is short and does not contain an address, else its class."""
    if isinstance(x, (torch.dtype, torch.layout, torch.memory_format)):
        return str(x)
    if isinstance(x, Symbolic):
        return number_text(x)
    if isinstance(x, type) or hasattr(x, "__qualname__"):
        return str(x.__qualname__)
    return f"<{type(x).__name__}>" if isinstance(x, torch.nn.Module) else short_repr(x)


def target_text(node: torch.fx.Node) -> str:
    """`aten.add.Tensor`, `aten.linear` (the default overload), `operator.mul`, or a module's name."""
    target = node.target
    if isinstance(target, str):
        return target
    if hasattr(target, "overloadpacket"):
        return str(target).removesuffix(".default")
    module = (getattr(target, "__module__", "") or "").removeprefix("_")
    word = getattr(target, "__name__", str(target))
    return f"{module}.{word}" if module and module != "torch.ops" else word


def op_text(node: torch.fx.Node, name: Namer) -> str:
    """The right side of an op's line: `aten.linear(%x, self.weight)`."""
    if node.target is operator.getitem and len(node.args) == 2:
        return f"{value_text(node.args[0], name)}[{value_text(node.args[1], name)}]"
    if node.target is getattr and len(node.args) == 2:
        return f"{value_text(node.args[0], name)}.{node.args[1]}"
    positional = [value_text(a, name) for a in node.args]
    keywords = [f"{key}={value_text(a, name)}" for key, a in node.kwargs.items()]
    return f"{target_text(node)}({', '.join([*positional, *keywords])})"
