"""The commands that print or write what a trace says of itself."""

from __future__ import annotations

import dataclasses
import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch

from scopetrace.api import functions
from scopetrace.api.runnable import program_of
from scopetrace.cli.run import FILE, Request, model_command, patterns, takes_depth, takes_scope
from scopetrace.errors import UsageError
from scopetrace.formatting import columns
from scopetrace.lower.onnx import require_packages
from scopetrace.view.boxes import boxes, outermost_boxes
from scopetrace.view.html import document
from scopetrace.view.text import calls_table

if TYPE_CHECKING:
    from scopetrace.lower.onnx.assemble import Exported
    from scopetrace.view.diff import Diff
    from scopetrace.view.memory import Memory
    from scopetrace.view.summary import Summary


@model_command
@click.option(
    "--depth", type=click.IntRange(min=0), help="Show what is in calls down to this level; 0 is the model's own."
)
@takes_scope
@click.option("--calls", "as_table", is_flag=True, help="A table of the module calls, with arguments and outputs.")
@click.option("--grad/--no-grad", default=False, help="Trace with autograd on; off is the default.")
def show(request: Request, grad: bool, depth: int | None, scope: tuple[str, ...] | None, as_table: bool) -> Any:
    """Trace the model TARGET, and show every op in the module that called it.

    TARGET is package.module:name (a torch.nn.Module, or a class or function that makes one when called without
    arguments; modules in the current directory are found), timm:NAME, torchvision:NAME, hf:NAME (a kind of model of
    transformers, a class, or a local config file; random weights), or a file NAME.st that tr.save wrote.

    \b
        scopetrace show timm:vit_tiny_patch16_224 --depth 2
        scopetrace show mypackage.models:build --input ids=1x16:int64 --calls
    """
    if as_table and request.as_json:
        raise UsageError("--calls and --json are two forms of output: write one of them")
    with torch.set_grad_enabled(grad):
        traced = request.trace()
    request.say("writing")
    if not (request.as_json or as_table):
        return traced.print_readable(depth, scope=scope, print_output=False)
    root = boxes(program_of(traced))
    roots = [root] if scope is None else outermost_boxes(root, scope)
    if depth is not None:
        for box in roots:
            box.close(depth)
    if request.as_json:
        specializations = [dataclasses.asdict(s) for s in program_of(traced).tape.specializations]
        return {**document(roots), "specializations": specializations}
    return calls_table([box.call for outer in roots for box in outer.walk() if box.kind == "call"])


@model_command
@takes_depth
def summary(request: Request, depth: int | None) -> Summary:
    """Show what each module of TARGET takes, gives and costs.

    FLOPs are those of torch.utils.flop_counter, two for each multiply-add; a parameter that several modules use counts
    once in what is around them. TARGET is as for `scopetrace show`.

    \b
        scopetrace summary timm:resnet18 --depth 1
        scopetrace summary mypackage.models:build --input ids=1x16:int64 --json
    """
    traced = request.trace()
    request.say("measuring")
    return traced.summary(depth)


@model_command
@takes_depth
def memory(request: Request, depth: int | None) -> Memory:
    """Show which memory TARGET needs when, by module; with --step of a training step, else of an inference.

    "made" is what the ops of a call make, "freed" what is freed before it returns, "saved" what backward reads, and
    "peak" the most that is in use while the call runs. TARGET is as for `scopetrace show`; with --meta no memory is
    used.

    \b
        scopetrace memory timm:resnet18 --depth 2
        scopetrace memory hf:llama --step --optimizer adamw --meta
    """
    return request.trace().memory(depth)


@model_command
def order(request: Request) -> Any:
    """Show in which order the modules of TARGET run and use their parameters.

    The parameters stand in the order of first use, beside the order of registration. Below are shared parameters, those
    used outside their module or never, modules that are never called, and a hash of the whole order, which is equal
    wherever the model runs in the same order. TARGET is as for `scopetrace show`.

    \b
        scopetrace order timm:vit_tiny_patch16_224
        scopetrace order mypackage.models:build --input ids=1x16:int64 --json
    """
    traced = request.trace(functional=False).order
    if request.as_json:
        calls = [{"fqn": call.fqn, "index": call.index, "class": call.type_name} for call in traced.calls]
        data = {"digest": traced.digest, "parameters": traced.param_forward_order, "calls": calls}
        return {**data, "steps": [step._asdict() for step in traced.steps]}
    return f"{traced}\ndigest: {traced.digest}"


@model_command
@click.argument("other")
@click.option("--html", type=FILE, help="Also write them to this file.")
def diff(request: Request, other: str, html: Path | None) -> tuple[Diff, int]:
    """Show what OTHER does in another way than TARGET, by scope: ops, module calls, shapes, constants, results.

    Both are as TARGET of `scopetrace show`, or files that `Trace.save` wrote, and get the same inputs and options. The
    exit code is 0 where they do the same, 3 where they differ.

    \b
        scopetrace diff before.st after.st
        scopetrace diff timm:resnet18 timm:resnet26
    """
    differences = functions.diff(request.trace(), dataclasses.replace(request, target=other).trace())
    if html is not None:
        differences.to_html(html)
    return differences, 3 if differences else 0


@model_command
@click.option(
    "--output",
    "-o",
    type=FILE,
    help="The file to write: .html; .svg, .png, .pdf by Graphviz; .json for Model Explorer. Without it, a page opens "
    "in the browser.",
)
@click.option("--depth", type=click.IntRange(min=0), default=1, help="Of a picture, levels of calls that are open; 1.")
@takes_scope
def view(request: Request, output: Path | None, depth: int, scope: tuple[str, ...] | None) -> Any:
    """Draw TARGET: modules are boxes in boxes, with the shapes of what goes in and out.

    The HTML page is one file that needs no network: boxes open and close, and are searched by name. TARGET is as for
    `scopetrace show`.

    \b
        scopetrace view timm:resnet18
        scopetrace view timm:resnet18 -o resnet18.svg --depth 2 --scope 'layer1'
    """
    traced = request.trace()
    request.say("drawing")
    path = output or Path(tempfile.mkdtemp(prefix="scopetrace-")) / "model.html"
    if path.suffix == ".html":
        traced.to_html(path)
    elif path.suffix == ".json":
        traced.to_model_explorer(path)
    else:
        traced.to_svg(path, depth=depth, scope=scope)
    if output is None:
        webbrowser.open(path.as_uri())
    return {"path": str(path)} if request.as_json else path


_PATTERN = "a class name, or the name of a module, with * and ?, and ** across dots, as in 'layers.*'"


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
@click.option("--output", "-o", required=True, type=FILE, help="The file to write.")
@click.option(
    "--opset", "opset_version", type=click.IntRange(min=7), help="The opset version; torch.onnx's own is the default."
)
@click.option("--attributes", is_flag=True, help="Plain attributes of the modules as ONNX attributes of the calls.")
@click.option("--optimize/--no-optimize", default=True, help="Run torch.onnx's optimizer.")
@click.option("--external-data", is_flag=True, help="The weights in a file of their own, also below 2 GB.")
@click.option("--verify", is_flag=True, help="Check the file, and compare it with the model in ONNX Runtime.")
def onnx(request: Request, output: Path, external_data: bool, verify: bool, **options: Any) -> Any:
    """Write the model TARGET as an ONNX file, with modules as ONNX functions.

    TARGET is as for `scopetrace show`.

    \b
        scopetrace onnx timm:vit_tiny_patch16_224 --functions repeated -o vit.onnx --verify
        scopetrace onnx mypackage.models:build -i ids=2x16:int64 --dynamic ids.0=batch -f Layer -o out.onnx
    """
    require_packages()
    from scopetrace.lower.onnx.export import Options, write

    program = program_of(request.trace()).without_argument_mutation()
    data = _written(write(program, output, Options(**options), external_data or None, verify, request.say), output)
    return data if request.as_json else _table_of(data)


def _written(written: Exported, output: Path) -> dict[str, Any]:
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


def _table_of(data: dict[str, Any]) -> str:
    rows = [("function", "calls", "nodes")]
    for f in data["functions"]:
        rows.append((f["name"], str(f["calls"]), "no body" if f["nodes"] is None else str(f["nodes"])))
    rows.append(("main program", "", str(data["nodes"])))
    error = "" if data["largest_error"] is None else f", largest error {data['largest_error']:.2g}"
    return f"{columns(rows)}\n{data['path']}: {data['bytes']:,} bytes{error}"
