"""What scopetrace writes on `node.meta`, in one place.

torch's own keys have torch's own form (`val`, `nn_module_stack`, `stack_trace`). Ours are plain data under
`meta["custom"]["scopetrace"]`, since `custom` is the one key open to others that re-tracing carries along.
"""

from __future__ import annotations

from typing import Any

import torch.fx

KEY = "scopetrace"


def set_place(node: torch.fx.Node, scope: str, call: int) -> None:
    """Write the scope's path and the position in `Trace.calls` of the innermost call."""
    node.meta.setdefault("custom", {})[KEY] = {"scope": scope, "call": call}


def scope_path(node: torch.fx.Node) -> str | None:
    """The path of the node's scope, such as `"Net/Linear[fc]"`; None for a node that no trace made."""
    place = _place(node)
    return None if place is None else str(place["scope"])


def call_position(node: torch.fx.Node) -> int | None:
    """The position in `Trace.calls` of the innermost call around the node; None for a node that no trace made."""
    place = _place(node)
    return None if place is None else int(place["call"])


def _place(node: torch.fx.Node) -> dict[str, Any] | None:
    custom = node.meta.get("custom")
    found: dict[str, Any] | None = custom.get(KEY) if isinstance(custom, dict) else None
    return found


def set_value(node: torch.fx.Node, value: Any) -> None:
    """Write the fake tensor, symbolic number, or nesting of these that the node gives."""
    node.meta["val"] = value


def value(node: torch.fx.Node) -> Any:
    """The fake tensor, symbolic number, or nesting of these that the node gives; None where it gives nothing."""
    return node.meta.get("val")


def set_origin(node: torch.fx.Node, module_stack: dict[str, tuple[str, str]], stack_trace: str | None) -> None:
    """Write `nn_module_stack` and `stack_trace` as torch.export does. The dict is copied."""
    node.meta["nn_module_stack"] = dict(module_stack)
    if stack_trace is not None:
        node.meta["stack_trace"] = stack_trace


def set_unbacked_bindings(node: torch.fx.Node, bindings: Any) -> None:
    """Write which symbols the node makes, as torch.fx's `unbacked_bindings`."""
    node.meta["unbacked_bindings"] = bindings
