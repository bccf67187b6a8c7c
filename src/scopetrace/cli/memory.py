"""`scopetrace memory`: what module calls make, keep and free, and the peak."""

from __future__ import annotations

import click
import torch

from scopetrace.cli.group import print_result
from scopetrace.cli.run import Asked, json_text, progress, quiet, takes_json, takes_model


@click.command()
@takes_model
@click.option("--depth", type=click.IntRange(min=0), help="Show calls down to this level; 0 is the model's own line.")
@takes_json
def memory(asked: Asked, depth: int | None, as_json: bool) -> None:
    """Show which memory TARGET needs when, by module; with --step of a training step, else of an inference.

    "made" is what the ops of a call make, "freed" what is freed before it returns, "saved" what backward reads, and
    "peak" the most that is in use while the call runs. TARGET is as for `scopetrace show`; with --meta no memory is
    used.

    \b
        scopetrace memory timm:resnet18 --depth 2
        scopetrace memory hf:llama --step --optimizer adamw --meta
    """
    with quiet(), progress() as say, torch.no_grad():
        found = asked.trace(say).memory(depth)
        text = json_text(found.to_dict()) if as_json else str(found)
    print_result(text)
