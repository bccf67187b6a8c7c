"""An execution order as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scopetrace.view.table import columns

if TYPE_CHECKING:
    from scopetrace.order.execution import ExecutionOrder, ParamUse


def order_text(order: ExecutionOrder) -> str:
    """The parameters in the order of their first use, beside the order of registration; then what is odd."""
    known = {name: i for i, name in enumerate(order.registered.params)}
    rows = [("order", "registered", "parameter", "shape", "first used by", "last used by")]
    for i, name in enumerate(order.param_forward_order):
        shape = "x".join(map(str, order.registered.params[name].shape)) or "scalar"
        first, last = order.param_first_use[name], order.param_last_use[name]
        rows.append((str(i), str(known[name]), name, shape, _by(order, first), _by(order, last)))
    used = len(rows) - 1
    total = f"{len(order.calls)} module calls, {used} of {len(known)} parameters used"
    return "\n".join([columns(rows), "", total, *_odd(order)])


def steps_text(order: ExecutionOrder) -> str:
    """The calls as a tree, a line each, and under each the parameters that its ops use together."""
    lines: list[str] = []
    depth = 0
    for step in order.steps:
        if step.kind == "call":
            call = order.calls[step.call]
            name = "(outside)" if call.fqn is None else call.fqn or "(root)"
            how = "".join([".forward" * call.direct, f"#{call.index}" * bool(call.index), ", raised" * call.raised])
            lines.append("  " * depth + name + how)
        elif step.kind == "use":
            lines.append("  " * depth + "- " + ", ".join(step.params))
        depth += {"call": 1, "return": -1}.get(step.kind, 0)
    return "\n".join(lines)


def _by(order: ExecutionOrder, use: ParamUse) -> str:
    index = order.calls[use.call].index
    name = "(root)" if use.module == "" else use.module or "(outside)"
    return f"{name}#{index}" if index else name


def _folded(names: list[str]) -> list[str]:
    """Names that differ in numbers only, as one: `layers.*.norm (12 times)`."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(".".join("*" if part.isdigit() else part for part in name.split(".")), []).append(name)
    return [f"{key} ({len(same)} times)" if len(same) > 1 else same[0] for key, same in found.items()]


def _odd(order: ExecutionOrder) -> list[str]:
    outside = {
        name: ", ".join(dict.fromkeys(_by(order, use) for use in uses)) for name, uses in order.outside_uses.items()
    }
    lines = {
        "shared": [" = ".join(names) for names in order.shared_params.values()],
        "used outside their module": [f"{name} by {who}" for name, who in outside.items()],
        "never used": _folded(order.unused_params),
        "never called": _folded(order.uncalled_modules),
    }
    return [f"{what}: {'; '.join(found)}" for what, found in lines.items() if found]
