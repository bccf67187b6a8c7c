"""Where an op comes from: its scope in the module tree, and the Python frames that it was called from.

A scope is a place, not a call: two calls of one module from one parent share it. Scopes form a tree whose root is the
model. The idea is TorchScript's tracing scopes (pytorch PR #3016), the form of the names is that of torch.onnx.

    Llama/LlamaDecoderLayer[layers.3]/Attention[attn]/rotary
    root  module, relative to its parent's name        user scope

Data flow:
    modules and user scopes that are open -> TracingState -> the scope of the next op
    op under recording -> capture_frames: the frames since the enclosing call, linked to those of that call
    frames -> `stack_trace` of a node, or the one line of the user's code that an error names
"""

from __future__ import annotations

import contextlib
import functools
import html
import linecache
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from scopetrace.errors import ScopeError
from scopetrace.sources import SCOPETRACE, TORCH, TORCH_DIRECTORY, is_of_python, prefixes

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")


class Nested:
    """What has a `parent`: what is around it, None where nothing is."""

    __slots__ = ()
    parent: Any

    def ancestors(self) -> Iterator[Self]:
        """This one, then those around it, inner before outer."""
        around: Self | None = self
        while around is not None:
            yield around
            around = around.parent


class Scope(Nested):
    """A place in a model: a module where its parent calls it, or what `st.scope` names inside a module.

        [str(scope) for scope in tr.scope.walk()]  # ["Sequential", "Sequential/Linear[0]", …]

    `name` is relative to the enclosing module (`"layers.3"`) or, for a user scope, the text given to `scope`;
    `type_name` is the module's class name, empty for user scopes. The root has an empty name. `path` is the text of the
    scope, `"Net/Linear[fc]/rotary"`, and `parent` the scope around it, None for the root.
    """

    __slots__ = ("_children", "name", "parent", "path", "type_name")

    def __init__(self, name: str, type_name: str, parent: Scope | None = None) -> None:
        self.name = name
        self.type_name = type_name
        self.parent = parent
        self.path: str = self.label if parent is None else f"{parent.path}/{self.label}"
        self._children: dict[str, Scope] = {}

    @property
    def label(self) -> str:
        """The last part of the path: `"Linear[fc]"`, `"rotary"`, or `"Net"` for the root."""
        if not self.type_name:
            return self.name
        return f"{self.type_name}[{self.name}]" if self.name else self.type_name

    @property
    def children(self) -> list[Scope]:
        """The scopes directly inside this one, in the order in which they were first entered."""
        return list(self._children.values())

    @property
    def is_module(self) -> bool:
        """False for scopes that `st.scope` or `push_scope` opened."""
        return bool(self.type_name)

    def child(self, name: str, type_name: str = "") -> Scope:
        """The scope of this name inside this one; a new one the first time."""
        key = f"{type_name}\n{name}"  # a tuple for each would be work for Python's garbage collector
        inner = self._children.get(key)
        if inner is None:
            inner = self._children[key] = Scope(name, type_name, self)
        return inner

    def remove(self, inner: Scope) -> None:
        """Forget a scope inside this one."""
        self._children = {key: scope for key, scope in self._children.items() if scope is not inner}

    def walk(self) -> Iterator[Scope]:
        """This scope and all inside it, outer before inner."""
        yield self
        for inner in self._children.values():
            yield from inner.walk()

    def __str__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"Scope({self.path!r})"

    def _repr_html_(self, is_open: bool = True) -> str:  # for notebooks: opens and closes
        label, inside = html.escape(self.label), "".join(s._repr_html_(False) for s in self.children)
        indent = "style='margin-left:1.5em'"
        if not inside:
            return f"<div {indent}>{label}</div>"
        return f"<details {indent}{' open' * is_open}><summary>{label}</summary>{inside}</details>"


def innermost_common(chains: Iterable[Iterable[_T]]) -> _T:
    """The innermost scope, call or frame around several, of each of which a chain has it and those around it."""
    first, *others = map(list, chains)
    around = [set(map(id, other)) for other in others]
    return next(x for x in first if all(id(x) in ids for ids in around))


class TracingState:
    """The stack of open scopes of a running trace, which `tracing_state()` returns."""

    def __init__(self, root: Scope) -> None:
        self._stack: list[tuple[Scope, str]] = [(root, "")]
        self.listener: Any = None
        """While a forward runs, its `open_scope` and `close_scope` are called with each user scope."""
        self._floor = 1  # scopes below this belong to modules and cannot be popped by users
        self._last_closed = ""

    @property
    def current_scope(self) -> Scope:
        """The innermost open scope, which the next op gets."""
        return self._stack[-1][0]

    def push_scope(self, name: str) -> Scope:
        """Open a user scope inside the current one. Raises ScopeError for a name that is empty or has a `/`."""
        opened = _caller()
        if not name or "/" in name:
            raise ScopeError(f"scope name {name!r} at {opened}: use a non-empty name without '/'")
        inner = self.current_scope.child(name)
        self._stack.append((inner, opened))
        if self.listener is not None:
            self.listener.open_scope(inner)
        return inner

    def pop_scope(self) -> None:
        """Close the innermost user scope. Raises ScopeError when none is open in the running module."""
        if len(self._stack) <= self._floor:
            closed = f"; the last one closed was {self._last_closed}" if self._last_closed else ""
            raise ScopeError(
                f"pop_scope() at {_caller()}: no user scope is open in {self.current_scope}{closed}. "
                "Pop each scope once, in the module that pushed it; `with st.scope(name):` does both."
            )
        scope, opened = self._stack[-1]
        self.close_scopes(len(self._stack) - 1)
        self._last_closed = f"{scope.name!r}, opened at {opened}, closed at {_caller()}"

    def close_scopes(self, count: int) -> None:
        """Close the innermost user scopes until `count` scopes are open."""
        while len(self._stack) > count:
            scope, _ = self._stack.pop()
            if self.listener is not None:
                self.listener.close_scope(scope)

    def enter_module(self, scope: Scope) -> tuple[int, int]:
        """Open a module's scope. Returns the state of the stack before, for `leave_module`."""
        mark = (len(self._stack), self._floor)
        self._stack.append((scope, ""))
        self._floor = len(self._stack)
        return mark

    def leave_module(self, mark: tuple[int, int], *, raising: bool) -> None:
        """Close a module's scope and all that are still open in it.

        Raises ScopeError where a user scope is, unless an exception ended the module (`raising`).
        """
        innermost, opened = self._stack[-1]
        is_open = len(self._stack) > self._floor
        self.close_scopes(self._floor)
        del self._stack[mark[0] :]
        self._floor = mark[1]
        if is_open and not raising:
            raise _still_open(innermost, opened)


_active = threading.local()


def tracing_state() -> TracingState | None:
    """The scope stack of the trace that is running in this thread, or None outside a trace.

        if (state := st.tracing_state()) is not None:
            state.push_scope("rotary")

    Its `pop_scope()` ends the scope, and `current_scope` is the innermost one.
    """
    stack: list[TracingState] | None = getattr(_active, "stack", None)
    return stack[-1] if stack else None


def running_recorder() -> Any:
    """The recorder of the forward that runs in this thread; None where none is recorded."""
    state = tracing_state()
    return None if state is None else state.listener


@contextlib.contextmanager
def activate(state: TracingState) -> Iterator[None]:
    """Make `state` the tracing state of this thread while the block runs."""
    stack = _active.__dict__.setdefault("stack", [])
    stack.append(state)
    try:
        yield
    finally:
        stack.pop()


class scope:
    """A user scope, as a context manager or a decorator. Outside a trace it does nothing.

        with st.scope("rotary"):
            q, k = rotate(q), rotate(k)

        @st.scope("attention")
        def attend(q, k, v): ...

    Raises ScopeError (inside a trace) for a name that is empty or has a `/`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._open: list[tuple[TracingState, int]] = []

    def __repr__(self) -> str:
        return f"scope({self.name!r})"

    def __enter__(self) -> scope:
        state = tracing_state()
        if state is None:
            return self
        mark = len(state._stack)
        state.push_scope(self.name)
        self._open.append((state, mark))
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if not self._open or tracing_state() is None:
            return
        state, mark = self._open.pop()
        if len(state._stack) == mark + 1:
            state.pop_scope()
        elif len(state._stack) > mark + 1:
            inner, opened = state._stack[-1]
            state.close_scopes(mark)
            if kind is None:
                raise _still_open(inner, opened)
        elif kind is None:
            raise ScopeError(f"scope {self.name!r} was already closed by pop_scope() inside its `with` block")

    def __call__(self, fn: _F) -> _F:
        @functools.wraps(fn)
        def scoped(*args: Any, **kwargs: Any) -> Any:
            with scope(self.name):
                return fn(*args, **kwargs)

        return scoped  # type: ignore[return-value]


def _still_open(scope: Scope, opened: str) -> ScopeError:
    return ScopeError(
        f"scope {scope.name!r}, opened at {opened}, is still open at the end of {scope.parent}. "
        "Close it with pop_scope(), or use `with st.scope(name):`."
    )


def _caller() -> str:
    """`file:line` of the nearest frame outside this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


# Frames --------------------------------------------------------------------------------------------------------------


class Code(NamedTuple):
    """What is needed of a code object for the text of a frame; those of a loaded trace are such."""

    co_filename: str
    co_name: str


Frame = tuple[CodeType, int]
"""The code that runs, and the line in it. In a loaded trace, a `Code` in place of the code."""

Frames = tuple[()] | tuple["Frames", tuple[Frame, ...]] | str
"""A linked list, so that ops of one call share the outer part: the frames outside, then those inside, outermost first.
Or a stack trace as text, for ops of a graph that has it on its nodes."""

_MACHINERY = (
    *SCOPETRACE,
    *prefixes(
        TORCH_DIRECTORY,
        *("_ops.py", "_compile.py", "_higher_order_ops/", "_library/utils.py"),
        *("_dynamo/eval_frame.py", "nn/modules/module.py"),
    ),
)
_MODULES = prefixes(TORCH_DIRECTORY, "nn/")
"""The code of torch that stands for a line of users where only its modules call each other."""


def is_hidden(filename: str) -> bool:
    """Whether a file is a part of scopetrace or torch that runs between the user's frames while tracing."""
    return filename.startswith(_MACHINERY) or filename.endswith("contextlib.py")


Ran = dict[int, tuple[CodeType, dict[str, Any] | None]]
"""By id, code that has run, with its globals; None for code that is hidden."""


def capture_frames(outer: Frames, boundary: CodeType, ran: Ran) -> tuple[Frames, tuple[Frame, ...]]:
    """The frames from the caller's caller up to the nearest one that runs `boundary`, linked to `outer`.

    `ran` gets their code.
    """
    frames: list[Frame] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code is boundary:
            break
        known = ran.get(id(code))
        if known is None:
            known = ran[id(code)] = code, None if is_hidden(code.co_filename) else frame.f_globals
        if known[1] is not None:
            frames.append((code, frame.f_lineno))
        frame = frame.f_back
    frames.reverse()
    return (outer, tuple(frames))


def walk_frames(frames: Frames) -> list[Frame]:
    """The frames, outermost first; none of a stack trace that is text."""
    if isinstance(frames, str) or not frames:
        return []
    outer, inner = frames
    return [*walk_frames(outer), *inner]


def format_stack(frames: Frames, cache: dict[int, str | None]) -> str | None:
    """The frames of functions named `forward`, in the form of torch.export's `stack_trace`; None without any.

    `cache` keeps the texts by the ids of the frames, which have to live as long as it does: many ops share outer ones.
    """
    if isinstance(frames, str):
        return frames
    if not frames:
        return None
    key = id(frames)
    if key not in cache:
        outer = format_stack(frames[0], cache)
        inner = [_format(code.co_filename, line, code.co_name) for code, line in frames[1] if code.co_name == "forward"]
        cache[key] = "\n  ".join(inner if outer is None else [outer, *inner]) if inner else outer
    return cache[key]


@functools.cache
def _format(filename: str, line: int, function: str) -> str:
    source = linecache.getline(filename, line).strip()
    return f'File "{filename}", line {line}, in {function}' + (f"\n    {source}" if source else "")


def source_of(frames: Frames) -> str | None:
    """The user's line that made an op or call: see `user_line`."""
    if not isinstance(frames, str):
        return user_line(walk_frames(frames))
    lines = [line.strip() for line in frames.splitlines()]
    last = max((i for i, line in enumerate(lines) if line.startswith("File ")), default=None)
    if last is None:
        return None
    where = re.sub(r'^File "(.*)", line (\d+), (in .*)$', r"\1:\2, \3", lines[last])
    return ": ".join([where, *lines[last + 1 : last + 2]])


def user_line(frames: list[Frame]) -> str | None:
    """The innermost line outside torch and scopetrace, as `model.py:12, in forward: return self.fc(x)`.

    That in a module of torch where there is no such line, else the innermost of all; None without frames.
    """
    if not frames:
        return None
    shown = [f for f in frames if not is_hidden(f[0].co_filename)]
    users = [f for f in shown if not f[0].co_filename.startswith(TORCH) and not is_of_python(f[0].co_filename)]
    code, line = (users or [f for f in shown if f[0].co_filename.startswith(_MODULES)] or shown or frames)[-1]
    source = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line}, in {code.co_name}" + (f": {source}" if source else "")
