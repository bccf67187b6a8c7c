"""`scopetrace onnx`: a model as an ONNX file, with chosen modules as functions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch

from scopetrace.api.runnable import program_of
from scopetrace.cli.group import print_result
from scopetrace.cli.run import Asked, progress, quiet, takes_model
from scopetrace.formatting import columns
from scopetrace.lower.onnx import require_packages

if TYPE_CHECKING:
    from scopetrace.lower.onnx.assemble import Exported

_PATTERN = "a class name, or the name of a module, with * and ? as in 'layers.*'"


@click.command()
@takes_model
@click.option(
    "--functions",
    "-f",
    metavar="PATTERN",
    multiple=True,
    help=f"Modules that become functions: {_PATTERN}; 'repeated', every class with two equal calls; "
    "or 'layers', the outermost of these.",
)
@click.option(
    "--plugins", metavar="PATTERN", multiple=True, help=f"Modules that become ops without a body: {_PATTERN}."
)
@click.option(
    "--output", "-o", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The file to write."
)
@click.option("--opset", type=click.IntRange(min=7), help="The opset version; torch.onnx's own is the default.")
@click.option("--attributes", is_flag=True, help="Plain attributes of the modules as ONNX attributes of the calls.")
@click.option("--optimize/--no-optimize", default=True, help="Run torch.onnx's optimizer.")
@click.option("--external-data", is_flag=True, help="The weights in a file of their own, also below 2 GB.")
@click.option("--verify", is_flag=True, help="Check the file, and compare it with the model in ONNX Runtime.")
def onnx(
    asked: Asked,
    functions: tuple[str, ...],
    plugins: tuple[str, ...],
    output: Path,
    opset: int | None,
    attributes: bool,
    optimize: bool,
    external_data: bool,
    verify: bool,
) -> None:
    """Write the model TARGET as an ONNX file, with modules as ONNX functions.

    TARGET is as for `scopetrace show`.

    \b
        scopetrace onnx timm:vit_tiny_patch16_224 --functions repeated -o vit.onnx --verify
        scopetrace onnx mypackage.models:build -i ids=2x16:int64 --dynamic ids.0=batch -f Layer -o out.onnx
    """
    require_packages()
    from scopetrace.lower.onnx.export import Options, write

    options = Options(functions, plugins, opset, None, None, optimize, attributes)
    with quiet(), progress() as say, torch.no_grad():
        program = program_of(asked.trace(say)).without_argument_mutation()
        text = _table(write(program, output, options, external_data or None, verify, say), output)
    print_result(text)


def _table(written: Exported, output: Path) -> str:
    calls = written.calls_in_file()
    rows = [("function", "calls", "nodes")]
    for function in written.functions:
        name = f"{function.domain}::{function.name}"
        has_body = function.identifier() in written.model.functions
        rows.append((name, str(calls[function.domain, function.name]), str(len(function)) if has_body else "no body"))
    rows.append(("main program", "", str(len(written.model.graph))))
    size = sum(path.stat().st_size for path in (output, Path(f"{output}.data")) if path.exists())
    error = "" if written.error is None else f", largest error {written.error:.2g}"
    return f"{columns(rows)}\n{output}: {size:,} bytes{error}"
