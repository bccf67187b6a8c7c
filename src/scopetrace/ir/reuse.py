"""What `reuse=True` recorded once and repeated: data for a report, and its text."""

from __future__ import annotations

import collections
import dataclasses


@dataclasses.dataclass(eq=False)
class NotShared:
    """A call that was recorded though its class was recorded before."""

    module: str
    """The scope path of the call."""
    type_name: str
    reason: str
    """Why it may do something else: `window_size differs: 128, 4096`."""


@dataclasses.dataclass(eq=False)
class Reuse:
    """Which module calls of a trace ran, and which repeat the ops of an equal call.

    Only calls that might repeat count: of modules with submodules or of the user's classes, of which the model has
    several that look alike, or which were called before; and not those inside of a repeated call.
    """

    each_runs: str = ""
    """Why no call of the trace is compared with another; empty where calls are."""
    traced: dict[str, int] = dataclasses.field(default_factory=dict)
    """By class name, the calls that ran."""
    replayed: dict[str, int] = dataclasses.field(default_factory=dict)
    """By class name, the calls whose ops are a copy."""
    not_shared: list[NotShared] = dataclasses.field(default_factory=list)
    """The calls that ran because they differ from those before, in order."""
    repeats: dict[int, int] = dataclasses.field(default_factory=dict)
    """By position in `Tape.calls` of a call whose ops are a copy, the position of the call that ran, in order.

    The calls inside of both follow in the same order."""

    def __str__(self) -> str:
        names = dict.fromkeys((*self.replayed, *self.traced))
        counts = [(name, self.traced.get(name, 0), self.replayed.get(name, 0)) for name in names]
        lines = [
            f"{ran + copied} {name}: {ran} traced, {copied} replayed"
            for name, ran, copied in counts
            if ran + copied > 1
        ]
        reasons: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
        for each in self.not_shared:
            reasons[each.type_name, each.reason].append(each.module)
        for (_, reason), modules in reasons.items():
            more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
            lines.append(f"  {modules[0]}{more}: {reason}")
        if self.each_runs:
            return f"every module call ran: {self.each_runs}"
        return "\n".join(lines) or "no module call repeats another"
