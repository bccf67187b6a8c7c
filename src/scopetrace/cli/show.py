"""`scopetrace show`: a model as a tree of calls and ops, as a table of calls, or as JSON."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import click
import torch
from rich.console import Console
from rich.text import Text

from scopetrace.cli.dynamic import parse_dynamic
from scopetrace.cli.group import cannot_trace, model_raised, print_result
from scopetrace.cli.inputs import Forward, Input, parse_input
from scopetrace.cli.targets import default_inputs, load_model
from scopetrace.errors import DynamicShapeError, ScopetraceError, TraceError, UsageError
from scopetrace.show.document import document, json_text
from scopetrace.show.select import level, select_calls, unmatched
from scopetrace.show.table import calls_table
from scopetrace.trace import Trace, trace

Say = Callable[[str], None]


@click.command()
@click.argument("target")
@click.option(
    "--input",
    "-i",
    "inputs",
    metavar="NAME=SHAPE[:DTYPE]",
    multiple=True,
    help="An argument of forward, by name or position: x=1x3x224x224, ids=1,16:int64, t=scalar:bf16. The dtype is "
    "float32 where none is given. NAME=true, false and none give these Python values. Once for each argument; a timm "
    "model that is given none gets an image of its own size.",
)
@click.option(
    "--dynamic",
    metavar="NAME.DIM=SYMBOL",
    multiple=True,
    help="A size that may differ from call to call: x.0=batch, ids.1=length:1:512 with its limits. Equal symbols are "
    "equal sizes. The example must have 2 or more there.",
)
@click.option(
    "--depth", type=click.IntRange(min=0), help="Show what is in calls down to this level; 0 is the model's own."
)
@click.option("--scope", metavar="PATTERN", help="Only the scopes whose path matches, such as '*/Attention[*.3.attn]'.")
@click.option("--calls", "as_table", is_flag=True, help="A table of the module calls, with arguments and outputs.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document with all ops and calls.")
@click.option("--train", is_flag=True, help="Trace in training mode; eval mode is the default.")
@click.option("--specialize", is_flag=True, help="Where the model branches on data, go the way of the example inputs.")
@click.option("--grad/--no-grad", default=False, help="Trace with autograd on; off is the default.")
def show(
    target: str,
    inputs: tuple[str, ...],
    dynamic: tuple[str, ...],
    specialize: bool,
    train: bool,
    grad: bool,
    **options: Any,
) -> None:
    """Trace the model TARGET, and show every op in the module that called it.

    TARGET is package.module:name (a torch.nn.Module, or a class or function that makes one when called without
    arguments; modules in the current directory are found), timm:NAME or torchvision:NAME.

    \b
        scopetrace show timm:vit_tiny_patch16_224 --depth 2
        scopetrace show mypackage.models:build --input ids=1x16:int64 --calls
    """
    if options["as_table"] and options["as_json"]:
        raise UsageError("--calls and --json are two forms of output: write one of them")
    given = [parse_input(text) for text in inputs]
    shapes = parse_dynamic(dynamic)
    with _quiet(), _progress() as say:
        say(f"making {target}")
        model = load_model(target).train(train)
        with torch.set_grad_enabled(grad):
            traced = _trace(model, given, say, dynamic_shapes=shapes, specialize=specialize)
        say("writing")
        text = _text(traced, **options)
    print_result(text)


def _trace(model: torch.nn.Module, given: list[Input], say: Say, **options: Any) -> Trace:
    forward = Forward(model)
    size = default_inputs(model)
    if not given and size is not None and forward.first is not None:
        given = [Input(forward.first, torch.zeros(size))]
    args, kwargs = forward.bind(given)
    name = type(model).__name__
    try:
        return trace(model, args, kwargs, progress=_reporter(say), **options)
    except DynamicShapeError as error:
        if error.module is not None:
            raise cannot_trace(name, error) from error
        raise UsageError(f"--dynamic: {error.problem}" + (f"; {error.hint}" if error.hint else "")) from error
    except TraceError as error:
        raise cannot_trace(name, error) from error
    except ScopetraceError:
        raise
    except Exception as error:
        swallowed = forward.swallowed(given)
        if swallowed:  # in **kwargs, where nobody may have looked for it
            raised = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise UsageError(f"{forward.wrong_name(swallowed[0])}; with it in **kwargs it raised {raised}") from error
        raise model_raised(name, error) from error


def _text(traced: Trace, depth: int | None, scope: str | None, as_table: bool, as_json: bool) -> str:
    if scope is not None and all(level(s, scope) is None for s in traced.scope.walk()):
        raise UsageError(f"--scope: {unmatched(traced.scope, scope)}")
    if as_json:
        return json_text(document(traced.graph_module.graph, traced.calls, depth=depth, scope=scope))
    if as_table:
        return calls_table(select_calls(traced.calls, depth, scope))
    return traced.print_readable(depth, scope=scope, print_output=False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what models print, log and warn of out of the result and out of one-line errors."""
    level_before = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
        logging.disable()  # torch logs a traceback for each op that refuses its arguments
        try:
            yield
        finally:
            logging.disable(level_before)


@contextlib.contextmanager
def _progress() -> Iterator[Say]:
    """A line on standard error that says what is going on, on a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield lambda text: status.update(Text(text))


def _reporter(say: Say) -> Callable[[str, int], None]:
    """What the tracer calls at each module call; speaks ten times a second at most."""
    last = 0.0

    def report(path: str, ops: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > 0.1:
            last = now
            say(f"tracing {path}, {ops:,} ops")

    return report
