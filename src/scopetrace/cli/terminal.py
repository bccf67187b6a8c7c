"""The text of a program in colour, for terminals."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from rich.console import Console
from rich.highlighter import RegexHighlighter
from rich.theme import Theme

_THEME = Theme(
    {
        "st.value": "cyan",
        "st.type": "green",
        "st.op": "yellow",
        "st.call": "bold",
        "st.scope": "bold magenta",
        "st.attribute": "blue",
        "st.note": "dim",
    }
)

_LABEL = r"\w+(\[[^\]]*\])?"


class _Program(RegexHighlighter):
    base_style = "st."
    highlights = [  # noqa: RUF012  (rich's own way to list them)
        r"(?P<value>%\w+)",
        r"(?P<type>\b[a-z]+\d+\w*\[[^\]]*\])",
        r"(?<= = )(?P<op>[\w.]+)(?=\()",
        r"(?P<attribute>\bself\.[\w.]+)",
        r"(?P<scope>^ *scope\(\"[^\"]*\"\))",
        rf"(?P<call>^ *{_LABEL}(/{_LABEL})*(#\d+)?(?=\())",
        r"(?P<call>^ *[^%(]*( ×\d+)? as [^\s(]+)",
        r"(?P<note>  # .*$)",
    ]


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
