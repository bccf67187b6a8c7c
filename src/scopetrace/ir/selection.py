"""Which module calls a target names: one rule for `leaf_modules=`, `outline`, `calls[...]`, `scope=` and `--scope`.

target + module, class, fqn and scope of a call -> is_named: a class by `issubclass`, a module by identity, a pattern by
`matches`, a predicate by a call; several targets where one of them does
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from scopetrace._compat.ops import is_op
from scopetrace.errors import ArgumentTypeError
from scopetrace.ir.scopes import Scope

Target = type | torch.nn.Module | str | Callable[..., bool]
"""A class; a module of the model; a pattern of names, scope paths or class names; a predicate, which gets the call, or
module and fqn where it has two parameters."""

Selection = Target | Iterable[Target]
"""One target or several."""


class Candidate(NamedTuple):
    """A module that is about to be called. Targets are compared with one, or with a `program.traced.ModuleCall`."""

    module: torch.nn.Module | None
    module_type: type | None
    fqn: str | None
    scope: Scope


def several(selection: Any) -> list[Any]:
    """The targets of a selection."""
    is_one = isinstance(selection, (str, torch.nn.Module, type)) or not isinstance(selection, Iterable)
    return [selection] if is_one else list(selection)


def is_named(call: Any, selection: Any) -> bool:
    """Whether a selection names a call. Raises ArgumentTypeError for what is no target.

    A pattern is compared with the call's fqn (`"layers.*.attn"`, `"layers.[0-3]"`), the path of its scope, in which
    brackets stand for themselves (`"**/Attention[attn]"`), and the name of its class; see `matches`.
    """
    return any(_is_named(call, target) for target in several(selection))


def _is_named(call: Any, target: Any) -> bool:
    if isinstance(target, type):
        kind = call.module_type if call.module is None else type(call.module)
        return kind is not None and issubclass(kind, target)
    if isinstance(target, torch.nn.Module):
        return call.module is target
    if isinstance(target, str):
        return (call.fqn is not None and matches(call.fqn, target)) or is_scope_named(call.scope, target)
    if callable(target) and not is_op(target):
        return bool(target(call.module, call.fqn) if _takes_two(target) else target(call))
    raise ArgumentTypeError(
        f"{target!r} is a {type(target).__name__}; give a module class, a module of the model, a pattern of names "
        "such as 'layers.*.attn', or a predicate on a ModuleCall"
    )


def is_scope_named(scope: Scope, selection: Any) -> bool:
    """Whether a pattern matches a scope's path or name: of a module its name in the model, or its class's name.

    Brackets stand for themselves in a path, since most paths contain them; in names they are a set of characters.
    """
    names = [scope.name]
    if scope.is_module:
        names = [scope.type_name, ".".join(s.name for s in [*scope.ancestors()][::-1] if s.is_module and s.name)]
    patterns = [target for target in several(selection) if isinstance(target, str)]
    in_path = any(matches(scope.path, pattern, "/") for pattern in patterns)
    return in_path or any(matches(name, pattern) for pattern in patterns for name in names)


def matches(name: str, pattern: str, separator: str = ".") -> bool:
    """Whether a pattern is one of a name, whose parts end at `separator`: `.`, or `/` in a scope path.

    `*`, `?` and `[...]` are as in fnmatch within a part; `**` stands for any text, and `**.` for no part as well. In
    paths brackets stand for themselves, and what is between them is a name, in which `*` stops at dots.
    """
    return name == pattern or _regex(pattern, separator).fullmatch(name) is not None


@functools.lru_cache(1024)
def _regex(pattern: str, separator: str) -> re.Pattern[str]:
    parts, stops, end = [], separator, re.escape(separator)
    brackets = r"|\[!?\]?[^\]]*\]" if separator == "." else ""
    for token in re.findall(rf"(?<![^{separator}])\*\*{end}|\*\*+|\*|\?{brackets}|.", pattern, re.DOTALL):
        if separator == "/" and token in ("[", "]"):
            stops = "./" if token == "[" else "/"
        if token.startswith("**"):
            parts.append(f"(?:.*{end})?" if token.endswith(separator) else ".*" if stops == separator else "[^/]*")
        elif token in ("*", "?"):
            parts.append(f"[^{stops}]{token.strip('?')}")
        elif len(token) > 1:  # a set of characters
            parts.append(rf"(?!\.){fnmatch.translate(token)[4:-3]}")  # in 3.11 `(?s:[ab])\Z`
        else:
            parts.append(re.escape(token))
    return re.compile("".join(parts), re.DOTALL)


LISTED = 6
"""Names in a message or a repr."""


def crossing(pattern: Any, names: Iterable[str]) -> str:
    """What a message says of a pattern that names nothing, where it would with `**` in place of `*`; else nothing."""
    wider = re.sub(r"\*+", "**", pattern) if isinstance(pattern, str) else ""
    separator = "/" if "/" in wider else "."
    if not any(matches(name, wider, separator) for name in names):
        return ""
    return f"* stops at dots and slashes, ** crosses them: write {wider!r}; "


def near_text(target: Any, names: Iterable[str], classes: Iterable[str] = (), paths: Iterable[str] = ()) -> str:
    """What a message says of a target that names nothing: up to three names like it, or which names there are.

    These are names of modules (`names`) and of their classes; for a class, of classes alone. `paths` are scope paths.
    """
    is_class, classes = isinstance(target, type), sorted(set(classes))
    names = classes if is_class else list(dict.fromkeys(names))
    text = target.__name__ if is_class else target if isinstance(target, str) else ""
    known = {name.lower(): name for name in (*([] if "*" in text else classes), *names)}
    cutoff = 0.6 if is_class else 0.4
    near = [known[name] for name in difflib.get_close_matches(text.lower(), known, n=3, cutoff=cutoff)]
    some = ", ".join(map(repr, near or names[:LISTED])) + (", …" if not near and len(names) > LISTED else "")
    return f"{crossing(target, [*names, *paths])}{'similar names:' if near else 'there are'} {some or 'none'}"


def target_text(target: Any) -> str:
    """A target as a message names it."""
    if isinstance(target, torch.nn.Module):
        return f"this {type(target).__name__}"
    return target.__name__ if isinstance(target, type) else repr(target)


def _takes_two(predicate: Callable[..., bool]) -> bool:
    """Whether a predicate has two parameters without defaults: the module and its fqn."""
    try:
        parameters = inspect.signature(predicate).parameters.values()
    except (TypeError, ValueError):  # built-in callables
        return False
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) == 2
