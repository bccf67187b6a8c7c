"""The command line. Each command is a file, added to `main` below.

Exit codes: 0, 1 when a model cannot be traced or raises, 2 for a wrong argument (one line on standard error), 3 when
`diff` finds differences.
"""

from __future__ import annotations

import sys

import click

from scopetrace.cli.completion import completion
from scopetrace.cli.demo import demo
from scopetrace.cli.diff import diff
from scopetrace.cli.group import OneLineGroup
from scopetrace.cli.memory import memory
from scopetrace.cli.onnx import onnx
from scopetrace.cli.order import order
from scopetrace.cli.plan import plan
from scopetrace.cli.show import show
from scopetrace.cli.summary import summary
from scopetrace.cli.view import view


@click.group(
    "scopetrace",
    cls=OneLineGroup,
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


for command in (demo, show, summary, memory, view, diff, onnx, order, plan, completion):
    main.add_command(command)
