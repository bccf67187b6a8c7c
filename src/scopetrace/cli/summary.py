"""`scopetrace summary`: shapes, parameters, FLOPs and memory by module."""

from __future__ import annotations

import click
import torch

from scopetrace.cli.group import print_result
from scopetrace.cli.run import Asked, json_text, progress, quiet, takes_json, takes_model


@click.command()
@takes_model
@click.option("--depth", type=click.IntRange(min=0), help="Show calls down to this level; 0 is the model's own line.")
@takes_json
def summary(asked: Asked, depth: int | None, as_json: bool) -> None:
    """Show what each module of TARGET takes, gives and costs.

    FLOPs are those of torch.utils.flop_counter, two for each multiply-add; a parameter that several modules use counts
    once in what is around them. TARGET is as for `scopetrace show`.

    \b
        scopetrace summary timm:resnet18 --depth 1
        scopetrace summary mypackage.models:build --input ids=1x16:int64 --json
    """
    with quiet(), progress() as say, torch.no_grad():
        found = asked.trace(say).summary(depth)
        say("measuring")
        text = json_text(found.to_dict()) if as_json else str(found)
    print_result(text)
