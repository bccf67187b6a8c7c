"""Typed access to `node.meta`: all that scopetrace writes there.

The keys of torch (`val`, `nn_module_stack`, `stack_trace`, `unbacked_bindings`) have the form that torch.export gives
them. Those of scopetrace are plain data under `meta["custom"]["scopetrace"]`: `custom` is the one key for other tools
that torch keeps when it traces a graph again. An ExportedProgram has them under `meta["scopetrace"]`, since tools for
torch.export take `custom` for the users' own.
"""

from __future__ import annotations

from typing import Any

import torch.fx

KEY = "scopetrace"


def set_place(node: torch.fx.Node, scope: str, call: int) -> None:
    """Write the path of the node's scope, and the position in `Trace.calls` of the innermost call around it."""
    node.meta.setdefault("custom", {})[KEY] = {"scope": scope, "call": call}


def scope_path(node: torch.fx.Node) -> str | None:
    """The path of the node's scope, such as `"Net/Linear[fc]"`; None for a node of another tool."""
    place = _place(node)
    return None if place is None else str(place["scope"])


def call_position(node: torch.fx.Node) -> int | None:
    """The position in `Trace.calls` of the innermost call around the node; None for a node of another tool."""
    place = _place(node)
    return None if place is None else int(place["call"])


def _place(node: torch.fx.Node) -> dict[str, Any] | None:
    custom = node.meta.get("custom")
    found: dict[str, Any] | None = custom.get(KEY) if isinstance(custom, dict) else None
    return found or node.meta.get(KEY)


def leave_custom_to_users(graph: torch.fx.Graph) -> None:
    """Move what scopetrace wrote from `meta["custom"]["scopetrace"]` to `meta["scopetrace"]`."""
    for node in graph.nodes:
        custom = dict(node.meta.pop("custom", {}))
        if KEY in custom:
            node.meta[KEY] = custom.pop(KEY)
        if custom:
            node.meta["custom"] = custom


def set_value(node: torch.fx.Node, value: Any) -> None:
    """Write what the node returns: a fake tensor, a symbolic number, or a nesting of these."""
    node.meta["val"] = value


def value(node: torch.fx.Node) -> Any:
    """What the node returns: a fake tensor, a symbolic number, or a nesting of these; None where it returns nothing."""
    return node.meta.get("val")


def set_origin(node: torch.fx.Node, module_stack: dict[str, tuple[str, str]], stack_trace: str | None) -> None:
    """Write `nn_module_stack` and `stack_trace` as torch.export does. The dict is copied."""
    node.meta["nn_module_stack"] = dict(module_stack)
    if stack_trace is not None:
        node.meta["stack_trace"] = stack_trace


def set_given(node: torch.fx.Node, given: dict[str, Any]) -> None:
    """Write what a user or an earlier graph says of the node: `custom` beside ours, other keys in place of ours."""
    node.meta.update({key: dict(found) for key, found in given.items() if key != "custom"})
    node.meta["custom"] = {**given.get("custom", {}), **node.meta.get("custom", {})}


def set_unbacked_bindings(node: torch.fx.Node, bindings: Any) -> None:
    """Write `unbacked_bindings`: by symbol that the node makes, where in its result it stands."""
    node.meta["unbacked_bindings"] = bindings
