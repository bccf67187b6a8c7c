"""The command line: its commands, each imported when it runs, and the one line in which an error is told.

Exit codes: 0, 1 when a model cannot be traced or raises, 2 for a wrong argument (one line on standard error), 3 when
`diff` finds differences.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from scopetrace.errors import ArgumentError, ScopetraceError

COMMANDS = {
    "demo": "A tour: what scopetrace tells of a small decoder with a cache, which comes with the package.",
    "diff": "Show what OTHER does in another way than TARGET, by scope: ops, module calls, shapes, constants, results.",
    "estimate": "Estimate the memory and FLOPs of training TARGET, whether that fits a GPU, and what would.",
    "memory": "Show which memory TARGET needs when, by module; with --step of a training step, else of an inference.",
    "onnx": "Write the model TARGET as an ONNX file, with modules as ONNX functions.",
    "order": "Show in which order the modules of TARGET run and use their parameters.",
    "plan": "Plan FSDP2 for the model TARGET: groups, prefetch lists, the order of all-gathers, and their cost",
    "show": "Trace the model TARGET, and show every op in the module that called it.",
    "summary": "Show what each module of TARGET takes, gives and costs.",
    "view": "Draw TARGET: modules are boxes in boxes, with the shapes of what goes in and out.",
}
"""By name, the first sentence of the help of a command."""


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
            command = getattr(getattr(error, "ctx", None), "command_path", "scopetrace")
            usage = f" See {command} --help." if isinstance(error, click.UsageError) else ""
            code = _fail(" ".join(error.format_message().split()) + usage, error.exit_code)
        except (ArgumentError, OSError) as error:  # those of models are a ModelError
            code = _fail(str(error), 2)
        except (ScopetraceError, ModelError) as error:
            code = _fail(str(error), 1)
        sys.exit(code if isinstance(code, int) else 0)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """The command itself, of its file."""
        name, stub, rest = super().resolve_command(ctx, args)
        if stub is None:
            return name, stub, rest
        file = {"demo": "demo", "estimate": "training", "plan": "training"}.get(str(stub.name), "commands")
        return name, getattr(importlib.import_module(f"scopetrace.cli.{file}"), str(stub.name)), rest


def _fail(message: str, code: int) -> int:
    click.echo(f"scopetrace: {message}", err=True)
    return code


@click.group(
    "scopetrace",
    cls=LazyGroup,
    commands={name: click.Command(name, help=text) for name, text in COMMANDS.items()},
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(getattr(sys.modules["scopetrace"], "__version__", "unknown"), message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """See what a PyTorch model does: every op, in the module that called it.

    \b
        scopetrace demo
        scopetrace show mypackage.models:build --input x=1x3x224x224 --depth 2
        scopetrace COMMAND --help
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
