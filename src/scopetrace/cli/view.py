"""`scopetrace view`: a model as an HTML page or a picture."""

from __future__ import annotations

import tempfile
import webbrowser
from pathlib import Path

import click
import torch

from scopetrace.cli.group import print_result
from scopetrace.cli.run import Asked, FilePath, progress, quiet, takes_model, takes_scope


@click.command()
@takes_model
@click.option(
    "--output",
    "-o",
    type=FilePath(),
    help="The file to write: .html; .svg, .png, .pdf by Graphviz; .json for Model Explorer. Without it, a page opens "
    "in the browser.",
)
@click.option("--depth", type=click.IntRange(min=0), default=1, help="Of a picture, levels of calls that are open; 1.")
@takes_scope
def view(asked: Asked, output: Path | None, depth: int, scope: tuple[str, ...] | None) -> None:
    """Draw TARGET: modules are boxes in boxes, with the shapes of what goes in and out.

    The HTML page is one file that needs no network: boxes open and close, and are searched by name. TARGET is as for
    `scopetrace show`.

    \b
        scopetrace view timm:resnet18
        scopetrace view timm:resnet18 -o resnet18.svg --depth 2 --scope 'layer1'
    """
    with quiet(), progress() as say, torch.no_grad():
        traced = asked.trace(say)
        say("drawing")
        opens = output is None
        if output is None:
            folder = Path(tempfile.mkdtemp(prefix="scopetrace-"))
            output = folder / "model.html"
        if output.suffix == ".html":
            traced.to_html(output)
        elif output.suffix == ".json":
            traced.to_model_explorer(output)
        else:
            traced.to_svg(output, depth=depth, scope=scope)
    print_result(str(output))
    if opens:
        webbrowser.open(output.as_uri())
