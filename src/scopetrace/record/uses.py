"""What source text says: whether a text is only shown to people, entries are taken by key, errors are caught.

Data flow:
    a frame that makes text of a tensor -> the expression it is at -> `print`, a logger, an error around it, or not
    a function and the name of a dict -> whether it takes entries by constant keys alone

Where there is no source, the answer is that which refuses more.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import linecache
import types
from collections.abc import Iterator
from typing import Any

import torch

from scopetrace._compat.sources import is_users
from scopetrace.guards.reach import names_of

# Methods that change a container and return None, so that a call of them tells nothing.
_MUTATORS = (
    *("append", "extend", "insert", "remove", "clear", "sort", "reverse", "appendleft", "extendleft", "rotate"),
    *(
        "__setitem__",
        "add",
        "discard",
        "update",
        "difference_update",
        "intersection_update",
        "symmetric_difference_update",
    ),
)

Parents = tuple[ast.AST, ...]
"""The nodes around a node, innermost first."""
Place = tuple[int | None, ...]
"""The lines and columns between which an expression is."""


def shows_only(frame: types.FrameType) -> bool:
    """Whether code only shows to people what the expression gives that it is at: by print, a logger or an error.

    Without source, whether it names what prints.
    """
    place = place_in(frame)
    outer: types.FrameType | None = frame
    while outer is not None and outer.f_code.co_name in ("<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>"):
        outer = outer.f_back
    code = frame.f_code if outer is None else outer.f_code
    tree = _tree(code)
    if tree is None:
        return not names_of(code).all.isdisjoint({"print", *_TELLING})
    telling = _Telling(code, tree, None, of_text=True)
    found = next((f for f in _walk(tree, ()) if isinstance(f[0], ast.expr) and _place_of(f[0]) == place), None)
    if found is None or not telling.is_told(*found) or telling.kept:
        return False
    caller = None if outer is None else outer.f_back
    return not telling.returned or (caller is not None and is_users(caller.f_code.co_filename) and shows_only(caller))


def place_in(frame: types.FrameType) -> Place:
    """The place of the expression that code is at."""
    return next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))


def _place_of(node: ast.expr) -> Place:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


class _Telling:
    """What code shows to people, as a warning that is given once; what it does with a value that it only shows.

    The value is that of a name `key`, which the code may write too, or for None a clock's, which it may keep.
    """

    def __init__(self, code: types.CodeType, tree: Any, key: str | None, *, of_text: bool = False) -> None:
        """`of_text`: the value is a text, which may be returned too."""
        self._tree, self._key, self._of_text = tree, key, of_text
        self._local = {*code.co_varnames, *code.co_cellvars}
        self.kept: set[str] = set()
        """The attributes `.n`, globals and variables of enclosing functions `n` in which it is kept."""
        self.returned = False
        """Whether it goes to the caller."""

    def is_told(self, node: ast.AST, parents: Parents) -> bool:
        """Whether the value of an expression is only shown or kept."""
        for parent, outer in zip(parents, (*parents[1:], None), strict=True):
            in_call = isinstance(parent, ast.Call)
            found = self._is_told_by(parent, node, outer) if in_call else self._is_told_in(parent, node)  # type: ignore[arg-type]
            if found is not None:
                return found
            node = parent
        return False

    def _is_told_in(self, parent: ast.AST, node: ast.AST) -> bool | None:
        """Whether the value of `node` is only shown or kept by the expression or statement around; None: passed on."""
        if isinstance(parent, ast.If):
            return node is parent.test and all(map(self._only_tells, (*parent.body, *parent.orelse)))
        if isinstance(parent, ast.Return) and self._of_text:
            self.returned = True
            return True
        if isinstance(parent, ast.NamedExpr):
            return None if self._keeps(parent.target) else False
        if isinstance(parent, ast.IfExp):
            return False if node is parent.test else None
        if isinstance(parent, (ast.Raise, ast.Assert)):
            return isinstance(parent, ast.Raise) or node is parent.msg
        if isinstance(parent, (ast.Assign, ast.AugAssign)):
            return all(map(self._keeps, _targets(parent)))
        return None if isinstance(parent, _PASSING) else isinstance(parent, ast.Expr)

    def _is_told_by(self, call: ast.Call, node: ast.AST, outer: ast.AST | None) -> bool | None:
        """As `_is_told_in`, of an argument of a call, around which is `outer`."""
        if isinstance(outer, ast.Raise):
            return True
        if _name_of(call.func) in _CHECKS:
            return node not in call.args[:1]
        if _name_of(call.func) in _GIVING_NOTHING and self._tells(call):
            return True
        if self._of_text and _is_for_people(call, outer):
            return True
        if _converts(call):
            return None
        is_kept = _method(call) in _MUTATORS and self._keeps(call.func.value)  # type: ignore[attr-defined]
        return isinstance(outer, ast.Expr) and (is_kept or self._tells(call))

    def _keeps(self, target: ast.AST) -> bool:
        """Whether `target`, a variable or attribute or an entry of one, keeps what it gets and is only shown too."""
        place = target
        while isinstance(place, ast.Subscript) or _is_entry(place):
            place = place.value if isinstance(place, ast.Subscript) else place.func.value  # type: ignore[attr-defined]
        key = f".{place.attr}" if isinstance(place, ast.Attribute) else None
        if isinstance(place, ast.Name) and place.id not in self._local:
            key = place.id
        if key is not None and self._key is None:
            self.kept.add(key)
            return True
        if key is not None or not isinstance(place, ast.Name):
            return False
        if isinstance(place.ctx, ast.Load) and not self._makes(place.id):  # another name of what others read
            return False
        target = place
        loads = [f for f in _walk(self._tree, ()) if isinstance(f[0], ast.Name) and f[0].id == target.id]
        self._local.discard(target.id)  # it is looked at once
        return all(_is_write(*found) or self.is_told(*found) for found in loads)

    def _makes(self, name: str) -> bool:
        """Whether all that a variable is ever bound to are new containers that the code makes: `logs = {}`."""
        stores = [f for f in _walk(self._tree, ()) if _name_of(f[0]) == name and _is_store(f[0])]
        values = [getattr(parents[0], "value", None) for _, parents in stores]
        is_argument = any(isinstance(n, ast.arg) and n.arg == name for n in ast.walk(self._tree))
        return not is_argument and bool(values) and all(isinstance(v, _DISPLAYS) or _is_container(v) for v in values)

    def _only_tells(self, statement: ast.stmt) -> bool:
        """Whether a statement shows something, or writes the name `key` alone."""
        if isinstance(statement, ast.If):
            return all(map(self._only_tells, (*statement.body, *statement.orelse)))
        if isinstance(statement, (ast.Assign, ast.AugAssign)):
            runs = any(isinstance(n, ast.Call) for n in ast.walk(statement))
            return self._key is not None and not runs and all(_name_of(t) == self._key for t in _targets(statement))
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call):
            return isinstance(statement, ast.Pass)
        writes = _method(call) in _MUTATORS and _name_of(call.func.value) == self._key  # type: ignore[attr-defined]
        inside = [n for n in ast.walk(call) if isinstance(n, ast.Call) and n is not call]
        return (writes or self._tells(call)) and all(map(_converts, inside))

    def _tells(self, call: ast.Call) -> bool:
        """Whether it is `print`, `warnings.warn`, a method of a logger; methods of the model do what they want."""
        own = self._tree.args.args[0].arg if self._tree.args.args else ""
        is_own = _name_of(getattr(call.func, "value", call)) == own
        return _name_of(call.func) == "print" or (_method(call) in _TELLING and not is_own)


def _is_for_people(call: ast.Call, outer: ast.AST | None) -> bool:
    """Whether a call names a range for profilers, or is of a function such as `warn_once` whose result nobody takes."""
    name = str(_name_of(call.func)).lower()
    is_helper = isinstance(call.func, ast.Name) and any(word in name for word in _FOR_PEOPLE)
    return name in ("record_function", "range_push") or (is_helper and isinstance(outer, ast.Expr))


def _method(call: ast.Call) -> str | None:
    return getattr(call.func, "attr", None)


def _targets(statement: ast.Assign | ast.AugAssign) -> list[ast.expr]:
    return statement.targets if isinstance(statement, ast.Assign) else [statement.target]


def _is_entry(node: ast.AST) -> bool:
    """Whether it gives an entry of a dict, which it may make: `d.setdefault("a", [])`."""
    return isinstance(node, ast.Call) and _method(node) == "setdefault"


def _is_store(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)


def _is_container(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and _name_of(node.func) in _CONTAINERS


def _name_of(node: ast.AST) -> str | None:
    """The last name of `n`, `self.n`."""
    return getattr(node, "attr", getattr(node, "id", None))


def _converts(call: ast.Call) -> bool:
    return _name_of(call.func) in _CONVERSIONS


_TELLING = (
    *("warn", "debug", "info", "warning", "error", "critical", "exception", "log", "write"),
    *("warning_once", "info_once", "warning_advice", "set_description", "set_postfix"),
)
_FOR_PEOPLE = ("print", "warn", "log", "info", "debug", "error", "report", "show", "message")
_GIVING_NOTHING = ("print", "warn")
_CHECKS = ("_assert", "_check", "_check_index", "_check_type", "_check_value", "_check_with")
"""They take a condition, and a text that they show where it does not hold."""
_CONVERSIONS = ("round", "float", "int", "str", "repr", "abs", "len", "tuple", "list", "format", "join", "size")
_DISPLAYS = (ast.Dict, ast.List, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp)
_CONTAINERS = ("dict", "list", "set", "deque", "defaultdict", "OrderedDict", "Counter")
_PASSING = (
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.JoinedStr, ast.FormattedValue, ast.keyword, ast.Starred),
    *(ast.Tuple, ast.List, ast.ListComp, ast.GeneratorExp, ast.Dict, ast.IfExp, ast.NamedExpr),
)
"""Expressions whose value is made of that of their parts."""


def takes_by_key(forward: Any, name: str | None) -> bool:
    """Whether a function, method or module takes entries of its dict `name` by constant keys, so that order is nothing.

    None for `**kwargs`, whatever their name.
    """
    module = forward if isinstance(forward, torch.nn.Module) else getattr(forward, "__self__", None)
    if isinstance(module, torch.nn.Module):
        if vars(module)["_forward_pre_hooks"] or type(module).__call__ is not torch.nn.Module.__call__:
            return False
        forward = module.forward if forward is module else forward
    code = getattr(forward, "__code__", None)
    tree = None if code is None or {"locals", "eval"} & names_of(code).globals else _tree(code)
    if code is None or tree is None:
        return False
    count = code.co_argcount + code.co_kwonlyargcount
    if name is None and code.co_flags & inspect.CO_VARKEYWORDS:
        name = code.co_varnames[count + bool(code.co_flags & inspect.CO_VARARGS)]
    elif name not in code.co_varnames[:count]:
        return False
    found = [(n, p) for n, p in _walk(tree, ()) if isinstance(n, ast.Name) and n.id == name]
    return all(_is_by_key(node, parents[0], parents[1]) for node, parents in found)


def _is_by_key(node: ast.AST, around: Any, outer: ast.AST) -> bool:
    """Whether `d`, in `around`, is that of `d["a"]`, `d.get("a")` or `"a" in d`."""
    if isinstance(around, ast.Subscript) and isinstance(around.ctx, ast.Load):
        return around.value is node and isinstance(around.slice, ast.Constant)
    if isinstance(around, ast.Attribute):
        return around.attr == "get" and isinstance(outer, ast.Call) and isinstance(outer.args[0], ast.Constant)
    return isinstance(around, ast.Compare) and all(isinstance(op, (ast.In, ast.NotIn)) for op in around.ops)


def catches_errors(code: types.CodeType, line: int) -> bool:
    """Whether a line of code is in the body of a `try` that catches something."""
    tree = _tree(code)
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Try) and n.handlers] if tree is not None else []
    return any(n.body[0].lineno <= line <= (n.body[-1].end_lineno or 0) for n in found)


# Syntax trees --------------------------------------------------------------------------------------------------------


def _tree(code: types.CodeType) -> ast.AST | None:
    """The syntax of a function; None where its source is not there, as in a file, or is not that of the function."""
    if not isinstance(code, types.CodeType):
        return None
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


def _is_write(node: ast.AST, parents: Parents) -> bool:
    """Whether a use stands where it is bound, deleted or changed in place."""
    for parent in parents:
        if not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            return True
        if (isinstance(parent, (ast.Attribute, ast.Subscript)) and parent.value is node) or (
            _is_entry(parent) and parent.func is node  # type: ignore[attr-defined]  # a call
        ):
            node = parent
        elif isinstance(parent, ast.Expr):
            return isinstance(node, ast.Call)  # setdefault alone
        else:
            changes = isinstance(parent, ast.Call) and parent.func is node
            return changes and isinstance(node, ast.Attribute) and node.attr in _MUTATORS
    return False
