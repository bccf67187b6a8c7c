"""`scopetrace completion`: what a shell needs to complete commands, options and files."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from scopetrace.cli.group import print_result


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that lets SHELL complete the commands and options of scopetrace.

    \b
        scopetrace completion bash >> ~/.bashrc
        scopetrace completion zsh >> ~/.zshrc
        scopetrace completion fish > ~/.config/fish/completions/scopetrace.fish
    """
    made_by = get_completion_class(shell)
    assert made_by is not None
    print_result(made_by(ctx.find_root().command, {}, "scopetrace", "_SCOPETRACE_COMPLETE").source())
