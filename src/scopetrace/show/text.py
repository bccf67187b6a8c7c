"""The program as text."""

from __future__ import annotations

import dataclasses

from scopetrace.calls import ModuleCall


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """How to write a program."""

    depth: int | None = None
    scope: str | None = None


def render(calls: list[ModuleCall], options: TextOptions) -> str:
    """The program as text."""
    return "\n".join(repr(c) for c in calls)
