"""`scopetrace diff`: what two models do differently."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import torch

from scopetrace.api.trace import diff as diff_of_traces
from scopetrace.cli.group import print_result
from scopetrace.cli.run import Asked, FilePath, progress, quiet, takes_json, takes_model


@click.command()
@takes_model
@click.argument("other")
@takes_json
@click.option("--html", type=FilePath(), help="Also write them to this file.")
def diff(asked: Asked, other: str, as_json: bool, html: Path | None) -> None:
    """Show what OTHER does in another way than TARGET, by scope: ops, module calls, shapes, constants, results.

    Both are as TARGET of `scopetrace show`, or files that `Trace.save` wrote, and get the same inputs and options. The
    exit code is 0 where they do the same, 3 where they differ.

    \b
        scopetrace diff before.st after.st
        scopetrace diff timm:resnet18 timm:resnet26
    """
    with quiet(), progress() as say, torch.no_grad():
        found = diff_of_traces(asked.trace(say), asked.of(other).trace(say))
    if html is not None:
        html.write_text(f"<!doctype html><meta charset='utf-8'>{found.to_html()}", encoding="utf-8")
    print_result(found.to_json() if as_json else str(found))
    sys.exit(3 if found else 0)
