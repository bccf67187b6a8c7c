"""`scopetrace onnx`: a model as an ONNX file, with chosen modules as functions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scopetrace.api.runnable import program_of
from scopetrace.cli.run import Asked, FilePath, json_text, model_command, patterns, takes_json
from scopetrace.formatting import columns
from scopetrace.lower.onnx import require_packages

if TYPE_CHECKING:
    from scopetrace.lower.onnx.assemble import Exported

_PATTERN = "a class name, or the name of a module, with * and ? as in 'layers.*'"


@model_command
@click.option(
    "--functions",
    "-f",
    metavar="PATTERN",
    multiple=True,
    callback=patterns,
    help=f"Modules that become functions: {_PATTERN}; 'repeated', every class with two equal calls; "
    "or 'layers', the outermost of these.",
)
@click.option(
    "--plugins",
    metavar="PATTERN",
    multiple=True,
    callback=patterns,
    help=f"Modules that become ops without a body: {_PATTERN}.",
)
@click.option("--output", "-o", required=True, type=FilePath(), help="The file to write.")
@click.option(
    "--opset", "opset_version", type=click.IntRange(min=7), help="The opset version; torch.onnx's own is the default."
)
@click.option("--attributes", is_flag=True, help="Plain attributes of the modules as ONNX attributes of the calls.")
@click.option("--optimize/--no-optimize", default=True, help="Run torch.onnx's optimizer.")
@click.option("--external-data", is_flag=True, help="The weights in a file of their own, also below 2 GB.")
@click.option("--verify", is_flag=True, help="Check the file, and compare it with the model in ONNX Runtime.")
@takes_json
def onnx(asked: Asked, output: Path, external_data: bool, verify: bool, as_json: bool, **options: Any) -> str:
    """Write the model TARGET as an ONNX file, with modules as ONNX functions.

    TARGET is as for `scopetrace show`.

    \b
        scopetrace onnx timm:vit_tiny_patch16_224 --functions repeated -o vit.onnx --verify
        scopetrace onnx mypackage.models:build -i ids=2x16:int64 --dynamic ids.0=batch -f Layer -o out.onnx
    """
    require_packages()
    from scopetrace.lower.onnx.export import Options, write

    program = program_of(asked.trace()).without_argument_mutation()
    data = _data(write(program, output, Options(**options), external_data or None, verify, asked.say), output)
    return json_text(data) if as_json else _table(data)


def _data(written: Exported, output: Path) -> dict[str, Any]:
    """What was written: the functions, with None for the nodes of those without a body."""
    calls = written.calls_in_file()
    functions = [
        {
            "name": f"{f.domain}::{f.name}",
            "calls": calls[f.domain, f.name],
            "nodes": len(f) if f.identifier() in written.model.functions else None,
        }
        for f in written.functions
    ]
    size = sum(path.stat().st_size for path in (output, Path(f"{output}.data")) if path.exists())
    nodes, error = len(written.model.graph), written.error
    return {"path": str(output), "bytes": size, "functions": functions, "nodes": nodes, "largest_error": error}


def _table(data: dict[str, Any]) -> str:
    rows = [("function", "calls", "nodes")]
    for f in data["functions"]:
        rows.append((f["name"], str(f["calls"]), "no body" if f["nodes"] is None else str(f["nodes"])))
    rows.append(("main program", "", str(data["nodes"])))
    error = "" if data["largest_error"] is None else f", largest error {data['largest_error']:.2g}"
    return f"{columns(rows)}\n{data['path']}: {data['bytes']:,} bytes{error}"
