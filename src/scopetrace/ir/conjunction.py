"""Many comparisons of what is there now with what was there, as one expression of Python.

    Conditions: a form, `{}[{}] is {}`, and the objects that it is about
        -> one function without arguments, which asks all of them joined by `and`

A call of a trace asks all of them each time. In an expression one takes about a third of what a loop takes for it.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Condition(NamedTuple):
    """Something that is true or false when it is asked."""

    form: str
    """An expression with `{}` for each operand."""
    operands: tuple[Any, ...]


def is_attribute(owner: Any, name: str, value: Any) -> Condition:
    """Whether an attribute is this very object."""
    if name.isidentifier() and not keyword.iskeyword(name):
        return Condition(f"{{}}.{name} is {{}}", (owner, value))
    return Condition("{}({}, {}) is {}", (getattr, owner, name, value))


def is_entry(table: Any, key: str, value: Any) -> Condition:
    """Whether a table has this very object under a key."""
    return Condition("{}[{}] is {}" if type(table) is dict else "{}.get({}) is {}", (table, key, value))


def check(conditions: Iterable[Condition], otherwise: Callable[[], None]) -> Callable[[], None]:
    """A function that asks all conditions, and calls `otherwise` where one does not hold or cannot be asked.

    It cannot where an attribute, an entry or the content of a cell is gone.
    """
    names: dict[int, str] = {}
    given: dict[str, Any] = {"otherwise": otherwise}

    def name(x: Any) -> str:
        found = names.setdefault(id(x), f"x{len(names)}")
        given[found] = x
        return found

    terms = [condition.form.format(*map(name, condition.operands)) for condition in conditions]
    exec(_CHECK.replace("CONDITIONS", " and ".join(terms) or "True"), given)  # of forms and names made here
    found: Callable[[], None] = given.pop("check")  # a function in its own globals would be freed late
    return found


_CHECK = """
def check():
    try:
        if CONDITIONS:
            return
    except (AttributeError, LookupError, ValueError):
        pass
    otherwise()
"""
