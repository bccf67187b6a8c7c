"""Errors of commands: one line for a wrong argument, the source line for an error in a model."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

import click

from scopetrace.errors import ArgumentError, ScopetraceError

_OURS = Path(__file__).parents[1]


class ModelError(Exception):
    """A model that raised, or that cannot be traced; the message is for people."""


class LazyGroup(click.Group):
    """A group that prints errors without tracebacks, and imports a command when it runs.

    Its `commands` are stubs, which have the names and first sentences for the list of commands.
    """

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

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """The command itself, of the file of its name or of `commands`."""
        name, stub, rest = super().resolve_command(ctx, args)
        if stub is None:
            return name, stub, rest
        file = stub.name if stub.name in ("demo", "onnx", "plan") else "commands"
        return name, getattr(importlib.import_module(f"scopetrace.cli.{file}"), str(stub.name)), rest


def _click_message(error: click.ClickException) -> str:
    ctx = getattr(error, "ctx", None)
    command = ctx.command_path if ctx is not None else "scopetrace"
    message = " ".join(error.format_message().split())
    return f"{message} See {command} --help." if isinstance(error, click.UsageError) else message


def _fail(message: str, code: int) -> int:
    click.echo(f"scopetrace: {message}", err=True)
    return code


def error_text(error: BaseException) -> str:
    """The class of an exception and the first line of its message."""
    message = str(error).partition("\n")[0]
    return type(error).__name__ + (f": {message}" if message else "")


def model_raised(what: str, error: BaseException) -> ModelError:
    """An error with the message of a model's exception, and where it was raised.

    The places are the notes that tracing added to the exception; else the innermost line of the traceback.
    """
    frames = traceback.extract_tb(error.__traceback__)
    notes = [note.removeprefix("scopetrace: ") for note in getattr(error, "__notes__", ())]
    places = [note for note in notes if note.startswith("while tracing ")]
    is_refused_op = bool(places) and type(error) is RuntimeError  # as torch's kernels raise it
    if frames and _is_ours(frames[-1]) and not is_refused_op:
        return ModelError(f"an error in scopetrace itself, please report it: {error_text(error)}\n  {_at(frames[-1])}")
    return ModelError("\n  ".join([f"{what} raised {error_text(error)}", *(places or source_line(error))]))


def source_line(error: BaseException) -> list[str]:
    """`at file.py:12, in forward` for the innermost line outside this package, where there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not _is_ours(frame) and not frame.filename.startswith("<frozen")]
    return [_at(theirs[-1])] if theirs else []


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return Path(frame.filename).is_relative_to(_OURS)


def _at(frame: traceback.FrameSummary) -> str:
    return f"at {frame.filename}:{frame.lineno}, in {frame.name}"
