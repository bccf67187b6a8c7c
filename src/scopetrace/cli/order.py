"""`scopetrace order`: in which order modules run and parameters are used."""

from __future__ import annotations

from typing import Any

import click
import torch

from scopetrace.cli.group import print_result
from scopetrace.cli.run import Asked, json_text, progress, quiet, takes_json, takes_model
from scopetrace.order.execution import ExecutionOrder, steps_text


@click.command()
@takes_model
@click.option("--steps", is_flag=True, help="The calls as a tree, each with the parameters that its ops use together.")
@takes_json
def order(asked: Asked, steps: bool, as_json: bool) -> None:
    """Show in which order the modules of TARGET run and use their parameters.

    The parameters stand in the order of first use, beside the order of registration. Below are shared parameters, those
    used outside their module or never, modules that are never called, and a hash of the whole order, which is equal
    wherever the model runs in the same order. TARGET is as for `scopetrace show`.

    \b
        scopetrace order timm:vit_tiny_patch16_224
        scopetrace order mypackage.models:build --input ids=1x16:int64 --steps
    """
    with quiet(), progress() as say, torch.no_grad():
        found = asked.trace(say, functional=False).order
        text = steps_text(found) if steps else str(found)
    print_result(json_text(_data(found)) if as_json else f"{text}\ndigest: {found.digest}")


def _data(found: ExecutionOrder) -> dict[str, Any]:
    calls = [{"fqn": call.fqn, "index": call.index, "class": call.type_name} for call in found.calls]
    steps = [step._asdict() for step in found.steps]
    return {"digest": found.digest, "parameters": found.param_forward_order, "calls": calls, "steps": steps}
