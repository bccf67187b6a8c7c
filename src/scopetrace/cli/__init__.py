"""The command line. A command of the table below is imported when it runs.

Exit codes: 0, 1 when a model cannot be traced or raises, 2 for a wrong argument (one line on standard error), 3 when
`diff` finds differences.
"""

from __future__ import annotations

import sys

import click

from scopetrace.cli.group import LazyGroup

COMMANDS = {
    "completion": "Print the script that lets SHELL complete the commands and options of scopetrace.",
    "demo": "A tour: what scopetrace tells of a small decoder with a cache, which comes with the package.",
    "diff": "Show what OTHER does in another way than TARGET, by scope: ops, module calls, shapes, constants, results.",
    "memory": "Show which memory TARGET needs when, by module; with --step of a training step, else of an inference.",
    "onnx": "Write the model TARGET as an ONNX file, with modules as ONNX functions.",
    "order": "Show in which order the modules of TARGET run and use their parameters.",
    "plan": "Plan FSDP2 for the model TARGET: groups, prefetch lists, the order of all-gathers, and their cost",
    "show": "Trace the model TARGET, and show every op in the module that called it.",
    "summary": "Show what each module of TARGET takes, gives and costs.",
    "view": "Draw TARGET: modules are boxes in boxes, with the shapes of what goes in and out.",
}
"""By name, the first sentence of the help of a command."""


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
