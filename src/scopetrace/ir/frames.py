"""The Python frames that an op or a module call was called from, and how they are written.

Data flow:
    op under recording -> capture_frames: the frames since the enclosing call, linked to those of that call
    frames -> `stack_trace` of a node, or the one line of the user's code that an error names
"""

from __future__ import annotations

import linecache
import re
import sys
from types import CodeType, FrameType, TracebackType
from typing import Any

from scopetrace._compat.sources import SCOPETRACE, TORCH, TORCH_DIRECTORY, prefixes

Frame = tuple[CodeType, int]
"""The code that runs, and the line in it."""

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

_hidden: dict[str, bool] = {}  # by file name; a cache, since frames are captured for each op


def is_hidden(filename: str) -> bool:
    """Whether a file is a part of scopetrace or torch that runs between the user's frames while tracing."""
    found = _hidden.get(filename)
    if found is None:
        found = _hidden[filename] = filename.startswith(_MACHINERY) or filename.endswith("contextlib.py")
    return found


def capture_frames(outer: Frames, boundary: CodeType) -> Frames:
    """The frames from the caller's caller up to the nearest one that runs `boundary`, linked to `outer`."""
    frames: list[Frame] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code is boundary:
            break
        if not is_hidden(code.co_filename):
            frames.append((code, frame.f_lineno))
        frame = frame.f_back
    frames.reverse()
    return (outer, tuple(frames))


def walk_frames(frames: Frames) -> list[Frame]:
    """The frames, outermost first; none of a stack trace that is text."""
    if isinstance(frames, str):
        return []
    parts: list[tuple[Frame, ...]] = []
    linked: Any = frames
    while linked:
        parts.append(linked[1])
        linked = linked[0]
    return [frame for part in reversed(parts) for frame in part]


_lines: dict[Frame, str] = {}  # a cache: frames are written for each node


def format_stack(frames: Frames) -> str | None:
    """The frames of functions named `forward`, in the form of torch.export's `stack_trace`; None without any."""
    if isinstance(frames, str):
        return frames
    found = [_format(f) for f in walk_frames(frames) if f[0].co_name == "forward"]
    return "\n  ".join(found) if found else None


def _format(frame: Frame) -> str:
    text = _lines.get(frame)
    if text is None:
        code, line = frame
        source = linecache.getline(code.co_filename, line).strip()
        text = f'File "{code.co_filename}", line {line}, in {code.co_name}'
        if source:
            text += f"\n    {source}"
        _lines[frame] = text
    return text


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

    The innermost of all where there is no such line; None without frames.
    """
    if not frames:
        return None
    users = [f for f in frames if not (is_hidden(f[0].co_filename) or f[0].co_filename.startswith(TORCH))]
    code, line = (users or frames)[-1]
    source = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line}, in {code.co_name}" + (f": {source}" if source else "")


def frames_of_traceback(tb: TracebackType | None) -> list[Frame]:
    """The frames of an exception, outermost first."""
    frames = []
    while tb is not None:
        frames.append((tb.tb_frame.f_code, tb.tb_lineno))
        tb = tb.tb_next
    return frames
