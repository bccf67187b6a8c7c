"""Errors and results of commands: one line for a wrong argument, the source line for an error in a model."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import click

from scopetrace.errors import ArgumentError, ScopetraceError

_OURS = Path(__file__).parents[1]


class ModelError(Exception):
    """A model that raised, or that cannot be traced; the message is for people."""


class OneLineGroup(click.Group):
    """A click group that prints errors without tracebacks."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command and exit: 1 for a model that cannot be traced, 2 for a wrong argument."""
        try:
            code = super().main(*args, **{"prog_name": self.name, **options, "standalone_mode": False})
        except click.Abort:
            code = _fail("interrupted", 130)
        except click.ClickException as error:
            code = _fail(_click_message(error), error.exit_code)
        except (ArgumentError, OSError) as error:  # those of models are a ModelError
            code = _fail(str(error), 2)
        except (ScopetraceError, ModelError) as error:
            code = _fail(str(error), 1)
        sys.exit(code if isinstance(code, int) else 0)


class LazyGroup(OneLineGroup):
    """A group whose commands are imported when they run: the names and first sentences of all cost nothing.

    Its `commands` are those sentences by name.
    """

    commands: dict[str, str]  # type: ignore[assignment]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, of the file of that name."""
        if cmd_name not in self.commands:
            return None
        command = getattr(importlib.import_module(f"scopetrace.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of the commands, as the base class does of commands that it has imported."""
        limit = formatter.width - 6 - max(map(len, self.commands))
        stubs = [click.Command(name, help=text) for name, text in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl([(stub.name or "", stub.get_short_help_str(limit)) for stub in stubs])


def _click_message(error: click.ClickException) -> str:
    ctx = getattr(error, "ctx", None)
    command = ctx.command_path if ctx is not None else "scopetrace"
    message = " ".join(error.format_message().split())
    return f"{message} See {command} --help." if isinstance(error, click.UsageError) else message


def _fail(message: str, code: int) -> int:
    click.echo(f"scopetrace: {message}", err=True)
    return code


def print_result(text: str) -> None:
    """Print a command's result. A pipe closed by its reader, such as `head`, is no error."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if sys.stdout.isatty():
            from scopetrace.cli.terminal import print_text  # with colours: imports rich

            print_text(text)
        else:
            click.echo(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output once more at exit, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def error_text(error: BaseException) -> str:
    """The class of an exception and the first line of its message."""
    message = str(error).partition("\n")[0]
    return type(error).__name__ + (f": {message}" if message else "")


def model_raised(what: str, error: BaseException) -> ModelError:
    """An error with the message of a model's exception, and where it was raised.

    The places are the notes that tracing added to the exception; else the innermost line of the traceback.
    """
    frames = _frames(error)
    notes = [note.removeprefix("scopetrace: ") for note in getattr(error, "__notes__", ())]
    places = [note for note in notes if note.startswith("while tracing ")]
    is_refused_op = bool(places) and type(error) is RuntimeError  # as torch's kernels raise it
    if frames and _is_ours(frames[-1]) and not is_refused_op:
        return ModelError(f"an error in scopetrace itself, please report it: {error_text(error)}\n  {_at(frames[-1])}")
    return ModelError("\n  ".join([f"{what} raised {error_text(error)}", *(places or source_line(error))]))


def source_line(error: BaseException) -> list[str]:
    """`at file.py:12, in forward` for the innermost line outside this package, where there is one."""
    theirs = [frame for frame in _frames(error) if not _is_ours(frame) and not frame.filename.startswith("<frozen")]
    return [_at(theirs[-1])] if theirs else []


def _frames(error: BaseException) -> traceback.StackSummary:
    return traceback.extract_tb(error.__traceback__)


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return Path(frame.filename).is_relative_to(_OURS)


def _at(frame: traceback.FrameSummary) -> str:
    return f"at {frame.filename}:{frame.lineno}, in {frame.name}"
