"""The text of a program in colour, for terminals."""

from __future__ import annotations

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
    """Print the text of a program to `file`, or to standard output; in colour when that is a terminal."""
    out = file if file is not None else sys.stdout
    if not out.isatty():
        print(text, file=out)
        return
    console = Console(file=out, theme=_THEME, highlight=False, soft_wrap=True)
    highlight = _Program()
    for line in text.splitlines():
        console.print(highlight(line))
