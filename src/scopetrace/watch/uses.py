"""What source text says: whether a text is only shown to people.

Data flow:
    a frame that makes text of a tensor -> the expression it is at -> `print`, a logger, an error around it, or not

Where there is no source, the answer is that which refuses more.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import types
from collections.abc import Iterator
from typing import Any

from scopetrace.guards.reach import names_of

Parents = tuple[ast.AST, ...]
"""The nodes around a node, innermost first."""


def shows_only(frame: types.FrameType) -> bool:
    """Whether code only shows to people what the expression gives that it is at: by print, a logger or an error.

    It is an argument there, or what a local variable is that is read nowhere else. Without source, the answer
    is whether the code names what prints.
    """
    place = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    outer: types.FrameType | None = frame
    while outer is not None and outer.f_code.co_name in ("<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>"):
        outer = outer.f_back
    code = frame.f_code if outer is None else outer.f_code
    tree = _tree(code)
    if tree is None:
        return not names_of(code).all.isdisjoint({"print", *_TELLING})
    nodes = list(_walk(tree, ()))
    at_place = (n for n in nodes if isinstance(n[0], ast.expr) and _place_of(n[0]) == place)
    expression = next(at_place, None)
    return expression is not None and _is_shown(nodes, *expression)


def _place_of(node: ast.expr) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _is_shown(nodes: list[tuple[ast.AST, Parents]], node: ast.AST, parents: Parents, *, by_name: bool = True) -> bool:
    """Whether the value of an expression goes nowhere but into what shows it; `by_name`, by one variable too."""
    for parent, outer in zip(parents, (*parents[1:], None), strict=True):
        if isinstance(parent, ast.Call) and _name_of(parent.func) not in _CONVERSIONS:
            return isinstance(outer, ast.Raise) or _shows(parent, node, is_statement=isinstance(outer, ast.Expr))
        if by_name and isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name):
            uses = [n for n in nodes if isinstance(n[0], ast.Name) and n[0].id == parent.targets[0].id]
            reads = [n for n in uses if n[0] is not parent.targets[0]]
            return all(isinstance(n.ctx, ast.Load) and _is_shown(nodes, n, p, by_name=False) for n, p in reads)  # type: ignore[attr-defined]
        if isinstance(parent, (ast.NamedExpr, ast.stmt)):
            is_message = isinstance(parent, ast.Assert) and node is parent.msg
            return is_message or isinstance(parent, (ast.Raise, ast.Expr))
        node = parent
    return False


def _shows(call: ast.Call, node: ast.AST, *, is_statement: bool) -> bool:
    """Whether a call with this argument shows it; methods of the model do anything."""
    name, owner = str(_name_of(call.func)), getattr(call.func, "value", None)
    if name in _CHECKS:
        return node not in call.args[:1]
    is_models = owner is not None and _name_of(owner) == "self"
    if name == "print" or (name in _GIVING_NOTHING and not is_models):
        return True
    helps = owner is None and any(word in name.lower() for word in _FOR_PEOPLE)  # as `warn_once`
    return is_statement and (helps or (name in _TELLING and owner is not None and not is_models))


def _name_of(node: ast.AST) -> str | None:
    """The last name of `n`, `self.n`."""
    return getattr(node, "attr", getattr(node, "id", None))


_TELLING = (
    *("warn", "debug", "info", "warning", "error", "critical", "exception", "log", "write"),
    *("warning_once", "info_once", "warning_advice", "set_description", "set_postfix"),
)
_FOR_PEOPLE = ("print", "warn", "log", "info", "debug", "error", "report", "show", "message")
_GIVING_NOTHING = ("warn", "record_function", "range_push")
_CHECKS = ("_assert", "_check", "_check_index", "_check_type", "_check_value", "_check_with")
"""They take a condition, and a text that they show where it does not hold."""
_CONVERSIONS = ("round", "float", "int", "str", "repr", "abs", "len", "tuple", "list", "format", "join", "size")


# Syntax trees --------------------------------------------------------------------------------------------------------


def _tree(code: types.CodeType) -> ast.AST | None:
    """The syntax of a function; None where its source is not there, as in a file, or is not that of the function."""
    if not isinstance(code, types.CodeType):
        return None
    kind = ast.Lambda if code.co_name == "<lambda>" else (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [n for n in _nodes(code.co_filename) if isinstance(n, kind) and _first_line(n) == code.co_firstlineno]
    if len(functions) > 1:  # lambdas of one line
        places = {(line, column) for line, _, column, _ in code.co_positions() if column}
        functions = [n for n in functions if not places.isdisjoint(map(_start_of, ast.walk(n)))]
    return functions[0] if len(functions) == 1 else None


@functools.lru_cache(maxsize=8)
def _nodes(file: str) -> list[ast.AST]:
    """The nodes of the syntax tree of a file."""
    try:
        return [*ast.walk(ast.parse("".join(linecache.getlines(file))))]
    except (SyntaxError, ValueError):
        return []


def _start_of(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _first_line(node: Any) -> int:
    """The line at which Python says that a function begins: that of its first decorator."""
    return int(min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]))


def _walk(node: ast.AST, parents: Parents) -> Iterator[tuple[ast.AST, Parents]]:
    yield node, parents
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, (node, *parents))
