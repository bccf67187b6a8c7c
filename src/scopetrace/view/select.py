"""Choosing a part of a program by scope path and depth."""

from __future__ import annotations

import fnmatch

from scopetrace.ir.scopes import Scope
from scopetrace.program.calls import ModuleCall


def matches(path: str, pattern: str) -> bool:
    """Whether a scope path matches. Brackets stand for themselves, as paths are full of them."""
    return fnmatch.fnmatchcase(path, pattern.replace("[", "[[]"))


def level(scope: Scope, pattern: str | None = None) -> int | None:
    """How many modules deep a scope is, from the root or the outermost scope that matches; None when none matches."""
    found: Scope | None = None
    for outer in scope.ancestors():
        if matches(outer.path, pattern) if pattern is not None else outer.parent is None:
            found = outer
    if found is None:
        return None
    inside = len(list(found.ancestors()))
    return sum(s.is_module for s in list(scope.ancestors())[:-inside])


def select_calls(calls: list[ModuleCall], depth: int | None, pattern: str | None) -> list[ModuleCall]:
    """The calls in scopes that match, down to `depth` levels below the first that does."""
    levels = {call.scope: level(call.scope, pattern) for call in calls}
    chosen = {scope for scope, found in levels.items() if found is not None and (depth is None or found <= depth)}
    return [call for call in calls if call.scope in chosen]


def unmatched(root: Scope, pattern: str) -> str:
    """What to say when no scope matches."""
    paths = [scope.path for scope in root.walk()]
    some = [p for p in paths[1:] if p.count("/") <= 2][:2] or paths[:1]
    return f"no scope matches {pattern!r}; paths are such as {' and '.join(map(repr, some))}, and * stands for any text"
