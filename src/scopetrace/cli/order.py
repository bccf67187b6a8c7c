"""`scopetrace order`: in which order modules run and parameters are used."""

from __future__ import annotations

import contextlib

import click
import torch

from scopetrace.cli.group import print_result
from scopetrace.cli.inputs import parse_input
from scopetrace.cli.run import input_option, meta_option, progress, quiet, specialize_option, trace_model, train_option
from scopetrace.cli.targets import load_model
from scopetrace.order.text import steps_text


@click.command()
@click.argument("target")
@input_option
@click.option("--steps", is_flag=True, help="The calls as a tree, each with the parameters that its ops use together.")
@meta_option
@train_option
@specialize_option
def order(target: str, inputs: tuple[str, ...], steps: bool, meta: bool, train: bool, specialize: bool) -> None:
    """Show in which order the modules of TARGET run and use their parameters.

    The parameters stand in the order of first use, beside the order of registration. Below are shared parameters, those
    used outside their module or never, modules that are never called, and a hash of the whole order, which is equal
    wherever the model runs in the same order. TARGET is as for `scopetrace show`.

    \b
        scopetrace order timm:vit_tiny_patch16_224
        scopetrace order mypackage.models:build --input ids=1x16:int64 --steps
    """
    given = [parse_input(text) for text in inputs]
    with quiet(), progress() as say:
        say(f"making {target}")
        with torch.device("meta") if meta else contextlib.nullcontext():
            model = load_model(target)
        with torch.no_grad():
            traced = trace_model(model.train(train), given, say, functional=False, specialize=specialize)
        found = traced.order
        text = steps_text(found) if steps else str(found)
    print_result(f"{text}\ndigest: {found.digest}")
