"""Module calls: chosen by scope path and depth, and as a table."""

from __future__ import annotations

import fnmatch

from scopetrace.formatting import columns
from scopetrace.ir.scopes import Scope
from scopetrace.program.traced import ModuleCall
from scopetrace.view.tree import typed, value_text

_LIMIT = 8  # items of a container that a cell shows


def matches(path: str, pattern: str) -> bool:
    """Whether a scope path matches an fnmatch pattern. Brackets stand for themselves: most paths contain them."""
    return fnmatch.fnmatchcase(path, pattern.replace("[", "[[]"))


def level(scope: Scope, pattern: str | None = None) -> int | None:
    """The number of modules between a scope and the outermost scope that matches (None: the root).

    None where neither the scope nor one around it matches.
    """
    around = list(scope.ancestors())
    found = [i for i, s in enumerate(around) if (s.parent is None if pattern is None else matches(s.path, pattern))]
    return sum(s.is_module for s in around[: found[-1]]) if found else None


def select_calls(calls: list[ModuleCall], depth: int | None, pattern: str | None) -> list[ModuleCall]:
    """The calls in scopes that match, down to `depth` levels below the outermost match."""
    levels = {call.scope: level(call.scope, pattern) for call in calls}
    chosen = {scope for scope, found in levels.items() if found is not None and (depth is None or found <= depth)}
    return [call for call in calls if call.scope in chosen]


def unmatched(root: Scope, pattern: str) -> str:
    """The message for a pattern that no scope matches, with examples of paths."""
    paths = [scope.path for scope in root.walk()]
    some = [p for p in paths[1:] if p.count("/") <= 2][:2] or paths[:1]
    return f"no scope matches {pattern!r}; paths are such as {' and '.join(map(repr, some))}, and * stands for any text"


def calls_table(calls: list[ModuleCall]) -> str:
    """A table with a line for each call: position, fqn, index, class, arguments, outputs."""
    rows = [("call", "fqn", "index", "class", "arguments", "outputs"), *map(_row, calls)]
    return columns(rows, widest=80)  # so that one long cell does not move all outputs to the right


def _row(call: ModuleCall) -> tuple[str, ...]:
    cls = call.module_type.__name__ if call.module_type is not None else "function"
    given = ", ".join(f"{name}={value_text(x, typed, _LIMIT)}" for name, x in call.argument_templates.items())
    if call.raised is not None:
        result = f"raised {type(call.raised).__name__}"
    else:
        result = value_text(call.output_template, typed, _LIMIT)
    return str(call.position), "-" if call.fqn is None else call.fqn or '""', str(call.index), cls, given, result
