"""`scopetrace show`: a model as a tree of calls and ops, as a table of calls, or as JSON."""

from __future__ import annotations

from typing import Any

import click
import torch

from scopetrace.api.runnable import program_of
from scopetrace.api.trace import Trace
from scopetrace.cli.group import print_result
from scopetrace.cli.run import Asked, progress, quiet, takes_json, takes_model, takes_scope
from scopetrace.errors import UsageError
from scopetrace.view.document import document, json_text
from scopetrace.view.text import calls_table, refuse_unnamed, select_calls


@click.command()
@takes_model
@click.option(
    "--depth", type=click.IntRange(min=0), help="Show what is in calls down to this level; 0 is the model's own."
)
@takes_scope
@click.option("--calls", "as_table", is_flag=True, help="A table of the module calls, with arguments and outputs.")
@takes_json
@click.option("--grad/--no-grad", default=False, help="Trace with autograd on; off is the default.")
def show(asked: Asked, grad: bool, **options: Any) -> None:
    """Trace the model TARGET, and show every op in the module that called it.

    TARGET is package.module:name (a torch.nn.Module, or a class or function that makes one when called without
    arguments; modules in the current directory are found), timm:NAME, torchvision:NAME, hf:NAME (a kind of model of
    transformers, a class, or a local config file; random weights), or a file NAME.st that st.save wrote.

    \b
        scopetrace show timm:vit_tiny_patch16_224 --depth 2
        scopetrace show mypackage.models:build --input ids=1x16:int64 --calls
    """
    if options["as_table"] and options["as_json"]:
        raise UsageError("--calls and --json are two forms of output: write one of them")
    with quiet(), progress() as say:
        with torch.set_grad_enabled(grad):
            traced = asked.trace(say)
        say("writing")
        text = _text(traced, **options)
    print_result(text)


def _text(traced: Trace, depth: int | None, scope: tuple[str, ...] | None, as_table: bool, as_json: bool) -> str:
    if scope is not None:
        refuse_unnamed(traced.scope, traced.calls, scope)
    if as_json:
        return json_text(document(program_of(traced), depth=depth, scope=scope))
    if as_table:
        return calls_table(select_calls(traced.calls, depth, scope))
    return traced.print_readable(depth, scope=scope, print_output=False)
