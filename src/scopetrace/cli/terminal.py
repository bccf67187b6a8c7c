"""The text of a program in colour, for terminals."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from rich.console import Console
from rich.highlighter import RegexHighlighter
from rich.theme import Theme

_LABEL = r"\w+(\[[^\]]*\])?"
_PARTS = (
    ("value", "cyan", r"%\w+"),
    ("type", "green", r"\b[a-z]+\d+\w*\[[^\]]*\]"),
    ("op", "yellow", r"(?<= = )[\w.]+(?=\()"),
    ("attribute", "blue", r"\bself\.[\w.]+"),
    ("scope", "bold magenta", r"^ *scope\(\"[^\"]*\"\)"),
    ("call", "bold", rf"^ *{_LABEL}(/{_LABEL})*(#\d+)?(?=\()"),
    ("call", "bold", r"^ *[^%(]*( ×\d+)? as [^\s(]+"),
    ("note", "dim", r"  # .*$"),
)
"""What of a program is coloured: its name, how, and how it is found."""

_THEME = Theme({f"st.{name}": style for name, style, _ in _PARTS})


class _Program(RegexHighlighter):
    base_style = "st."
    highlights = [f"(?P<{name}>{pattern})" for name, _, pattern in _PARTS]  # noqa: RUF012  (rich's own way)


def print_text(text: str, file: TextIO | None = None) -> None:
    """Print a command's result to `file` or standard output, in colour on a terminal.

    A pipe closed by its reader, such as `head`, is no error.
    """
    out = sys.stdout if file is None else file
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="backslashreplace")
    try:
        if out.isatty():
            console = Console(file=out, theme=_THEME, highlighter=_Program(), soft_wrap=True, markup=False, emoji=False)
            for line in text.splitlines():
                console.print(line)
        else:
            print(text, file=out)
        out.flush()
    except BrokenPipeError:
        # Python flushes standard output once more at exit, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
