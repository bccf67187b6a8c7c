"""Where source text writes a name, and whether it reads it anywhere else.

Data flow:
    a function -> its source -> a syntax tree -> the nodes that stand for a variable or an attribute
    a node, and what is around it -> a write (`self.n += 1`, `self.hist.append(y)`, `self.stats["n"] = 1`) or a read

A write reads too, and that does not count: `self.n += 1` and `self.n = self.n + 1` tell nobody what n was. Where there
is no source, a name that the code has counts as read.
"""

from __future__ import annotations

import ast
import functools
import linecache
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from scopetrace.record.reach import names_of

# Methods that change a container and return None, so that a call of them tells nothing.
_MUTATORS = (
    *("append", "extend", "insert", "remove", "clear", "sort", "reverse", "appendleft", "extendleft", "rotate"),
    *("add", "discard", "update", "difference_update", "intersection_update", "symmetric_difference_update"),
)

Parents = tuple[ast.AST, ...]
"""The nodes around a node, innermost first."""


class Uses(NamedTuple):
    """How a function uses a name."""

    lines: list[int]
    """The lines that write it."""
    reads: bool
    """Whether it reads it."""


def uses(function: types.FunctionType, key: str, *, foreign_self: bool = False) -> Uses:
    """How a function uses a variable `n`, a parameter `n=` or an attribute `.n`.

    `foreign_self`: the function is a method of another class than that with the attribute, so that its `self.n` is
    another one.
    """
    code, name = function.__code__, key.strip(".=")
    if not _mentions(code, name):
        return Uses([], False)
    tree = _tree(code)
    if tree is None:
        return Uses([code.co_firstlineno], True)
    own = code.co_varnames[0] if foreign_self and code.co_argcount else None
    variable = key[:1] != "." and (key[-1:] == "=") == (name in code.co_varnames)
    lines, reads = [], False
    for node, parents in _walk(tree, ()):
        if _is_use(node, name, variable, own):
            if _is_write(node, parents) or _only_updates(node, parents):
                lines.append(node.lineno)  # type: ignore[attr-defined]  # an expression
            else:
                reads = True
    return Uses(lines, reads)


def is_discarded(code: types.CodeType, line: int, name: str) -> bool:
    """Whether each call of a function `name` in a line of code is a statement, so that nobody reads what it gives."""
    tree = _tree(code)
    if tree is None:
        return False
    found = [parents for n, parents in _walk(tree, ()) if isinstance(n, ast.Call) and _calls(n, line, name)]
    return bool(found) and all(isinstance(parents[0], ast.Expr) for parents in found if parents)


def _calls(call: ast.Call, line: int, name: str) -> bool:
    callee = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    return call.lineno == line and callee == name


def _mentions(code: types.CodeType, name: str) -> bool:
    variables = (*code.co_varnames, *code.co_freevars, *code.co_cellvars)
    if name in names_of(code).all or name in variables or name in code.co_consts:
        return True
    return any(_mentions(c, name) for c in code.co_consts if isinstance(c, types.CodeType))


# Syntax trees --------------------------------------------------------------------------------------------------------


def _tree(code: types.CodeType) -> ast.AST | None:
    """The syntax of a function; None where its source is not there, or is not that of the function."""
    found = _functions(code.co_filename).get((code.co_firstlineno, code.co_name == "<lambda>"), [])
    if len(found) > 1:  # lambdas of one line
        places = {(line, column) for line, _, column, _ in code.co_positions() if column}
        found = [n for n in found if any((e.lineno, e.col_offset) in places for e in _expressions(n))]
    return found[0] if len(found) == 1 else None


@functools.lru_cache(maxsize=8)
def _functions(file: str) -> dict[tuple[int, bool], list[ast.AST]]:
    """The functions of a file, by first line and whether they are lambdas."""
    found: dict[tuple[int, bool], list[ast.AST]] = {}
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            found.setdefault((_first_line(node), isinstance(node, ast.Lambda)), []).append(node)
    return found


def _first_line(node: Any) -> int:
    """The line at which Python says that a function begins: that of its first decorator."""
    return int(min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]))


def _expressions(function: ast.AST) -> list[ast.expr]:
    return [n for n in ast.walk(function) if isinstance(n, ast.expr)]


def _walk(node: ast.AST, parents: Parents) -> Iterator[tuple[ast.AST, Parents]]:
    yield node, parents
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, (node, *parents))


def _is_use(node: ast.AST, name: str, variable: bool, own: str | None) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == name and not (own and isinstance(node.value, ast.Name) and node.value.id == own)
    if isinstance(node, ast.Name):
        return variable and node.id == name
    return isinstance(node, ast.Constant) and node.value == name  # getattr(self, "n")


def _is_write(node: ast.AST, parents: Parents) -> bool:
    """Whether a use stands where it is bound, deleted or changed in place."""
    for parent in parents:
        if not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            return True
        if isinstance(parent, (ast.Attribute, ast.Subscript)) and parent.value is node:
            node = parent
        else:
            changes = isinstance(parent, ast.Call) and parent.func is node
            return changes and isinstance(node, ast.Attribute) and node.attr in _MUTATORS
    return False


def _only_updates(node: ast.AST, parents: Parents) -> bool:
    """Whether a value goes nowhere but back to where it came from: `self.n = self.n + 1`."""
    while parents and isinstance(parents[0], (ast.Attribute, ast.Subscript)):
        node, parents = parents[0], parents[1:]
    statement = next((p for p in parents if isinstance(p, ast.stmt)), None)
    if not isinstance(statement, ast.Assign) or not isinstance(node, ast.expr):
        return False
    text, around = ast.unparse(node), parents[0]
    if isinstance(node, ast.Constant) and isinstance(around, ast.Call) and _calls(around, node.lineno, "getattr"):
        text = f"{ast.unparse(around.args[0])}.{node.value!s}"
    return all(ast.unparse(target) == text for target in statement.targets)
