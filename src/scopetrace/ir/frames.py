"""Where in the user's Python an op was called."""

from __future__ import annotations

import linecache
import re
import sys
from types import CodeType, FrameType, TracebackType

from scopetrace._compat.sources import SCOPETRACE, TORCH, TORCH_DIRECTORY, prefixes
from scopetrace.ir.tape import Frames, walk_frames

_MACHINERY = (
    *SCOPETRACE,
    *prefixes(
        TORCH_DIRECTORY,
        *("_ops.py", "_compile.py", "_higher_order_ops/", "_library/utils.py"),
        *("_dynamo/eval_frame.py", "nn/modules/module.py"),
    ),
)

_hidden: dict[str, bool] = {}  # by file name, as frames are captured for each op


def is_hidden(filename: str) -> bool:
    """Whether frames of a file are tracing machinery that no reader wants."""
    found = _hidden.get(filename)
    if found is None:
        found = _hidden[filename] = filename.startswith(_MACHINERY) or filename.endswith("contextlib.py")
    return found


def capture_frames(outer: Frames, boundary: CodeType) -> Frames:
    """The caller's frames up to the nearest one that runs `boundary`, linked to those outside it."""
    frames: list[tuple[CodeType, int]] = []
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


_lines: dict[tuple[CodeType, int], str] = {}


def format_stack(frames: Frames) -> str | None:
    """The frames named `forward`, as torch.export writes a node's `stack_trace`; None when there is none."""
    if isinstance(frames, str):
        return frames
    found = [_format(f) for f in walk_frames(frames) if f[0].co_name == "forward"]
    return "\n  ".join(found) if found else None


def _format(frame: tuple[CodeType, int]) -> str:
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
    """The innermost line outside torch where an op or call was made."""
    if not isinstance(frames, str):
        return user_line(walk_frames(frames))
    lines = [line.strip() for line in frames.splitlines()]
    last = max((i for i, line in enumerate(lines) if line.startswith("File ")), default=None)
    if last is None:
        return None
    where = re.sub(r'^File "(.*)", line (\d+), (in .*)$', r"\1:\2, \3", lines[last])
    return ": ".join([where, *lines[last + 1 : last + 2]])


def user_line(frames: list[tuple[CodeType, int]]) -> str | None:
    """The innermost line outside torch, as `model.py:12, in forward: return self.fc(x)`."""
    if not frames:
        return None
    theirs = [f for f in frames if not (is_hidden(f[0].co_filename) or f[0].co_filename.startswith(TORCH))]
    code, line = (theirs or frames)[-1]
    source = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line}, in {code.co_name}" + (f": {source}" if source else "")


def frames_of_traceback(tb: TracebackType | None) -> list[tuple[CodeType, int]]:
    """The frames of an exception, outermost first."""
    frames = []
    while tb is not None:
        frames.append((tb.tb_frame.f_code, tb.tb_lineno))
        tb = tb.tb_next
    return frames
