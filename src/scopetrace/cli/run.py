"""What the commands share: options for the model and its inputs, tracing, progress messages, text in colour.

Data flow:
    TARGET and options -> a model, and with `--step` a function around it: forward, loss, backward(), an optimizer
    that and inputs -> Trace, or an error in the words of the options
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click
import torch
from click.shell_completion import CompletionItem
from rich.console import Console
from rich.text import Text
from torch.utils._pytree import tree_map_only

from scopetrace.api.functions import load
from scopetrace.api.steps import OPTIMIZERS, TrainingStep
from scopetrace.api.trace import Trace, trace
from scopetrace.cli import ModelError
from scopetrace.cli.inputs import Input, bind, nested, parse_dynamic, parse_input, wrong_name
from scopetrace.cli.targets import default_inputs, error_text, load_model, model_raised
from scopetrace.errors import DynamicShapeError, ScopetraceError, TraceError, UsageError

T = TypeVar("T")


def _complete(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """What a shell offers for TARGET: the libraries, and files."""
    libraries = [CompletionItem(name) for name in ("timm:", "torchvision:", "hf:") if name.startswith(typed)]
    return [*libraries, CompletionItem(typed, type="file")]


_MODEL = (
    click.argument("target", shell_complete=_complete),
    click.option(
        "--input",
        "-i",
        "inputs",
        metavar="NAME=SHAPE[:DTYPE]",
        multiple=True,
        help="An argument of forward, by name or position: x=1x3x224x224, ids=1,16:int64, t=scalar:bf16. The dtype is "
        "float32 where none is given. NAME=true, false, none, int:3, float:0.5 and str:text give Python values; "
        "batch.ids=1x16:int64 is the item ids of a dict batch. Once for each argument; a model that declares inputs of "
        "its own (timm, transformers, dummy_inputs, example_input_array) needs none.",
    ),
    click.option(
        "--dynamic",
        metavar="NAME.DIM=SYMBOL",
        multiple=True,
        help="A size that may differ from call to call: x.0=batch, ids.1=length:1:512 with its limits. Equal symbols "
        "are equal sizes. The example must have 2 or more there.",
    ),
    click.option("--meta", is_flag=True, help="Make the model on the meta device: shapes without memory, of any size."),
    click.option("--train", is_flag=True, help="Trace in training mode; eval mode is the default."),
    click.option(
        "--specialize", is_flag=True, help="Where the model branches on data, go the way of the example inputs."
    ),
    click.option(
        "--step", is_flag=True, help="Trace a training step: forward, the sum of its floats as loss, and backward."
    ),
    click.option("--loss", metavar="NAME", help="With --step: the loss is this item or attribute of the result."),
    click.option(
        "--optimizer",
        type=click.Choice(sorted(OPTIMIZERS), case_sensitive=False),
        help="With --step: an optimizer of torch.optim, which steps at the end.",
    ),
    click.option("--json", "as_json", is_flag=True, help="One JSON document in place of text."),
)


def model_command(command: Callable[..., Any], *, steps: bool = False) -> click.Command:
    """A command with the argument TARGET and the options for inputs, which `command` gets as one `Request`.

    `command` returns what to print, with --json a dict or what has `to_dict`; or that and an exit code.
    `steps`: training steps are the default.
    """

    @functools.wraps(command)
    def run(target: str, inputs: tuple[str, ...], dynamic: tuple[str, ...], **options: Any) -> int:
        meta, train, specialize, step, as_json = map(options.pop, ("meta", "train", "specialize", "step", "as_json"))
        after, step = TrainingStep(options.pop("loss"), options.pop("optimizer")), step or steps
        if not step and after != TrainingStep():
            raise UsageError("--loss and --optimizer are for training steps: add --step")
        examples, dynamic_shapes = list(map(parse_input, inputs)), parse_dynamic(dynamic)
        with quiet(), _progress() as say, torch.no_grad():
            taken = after if step else None
            request = Request(target, examples, dynamic_shapes, meta, train, specialize, taken, as_json, say)
            result = command(request, **options)
            result, code = result if isinstance(result, tuple) else (result, 0)
            text = _json(result) if as_json else str(result)
        print_text(text)
        return code

    for add in reversed(_MODEL):
        run = add(run)
    return click.command()(run)


FILE = click.Path(dir_okay=False, path_type=Path)
"""The name of a file to write."""


def patterns(ctx: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    """The values of an option for patterns, of which none is empty: "" is the name of the model itself."""
    if not all(texts):
        raise click.BadParameter("the pattern is empty; name the class of the model for all of it.", ctx, option)
    return texts


takes_depth = click.option(
    "--depth", type=click.IntRange(min=0), help="Show calls down to this level; 0 is the model's own line."
)


def _json(result: Any) -> str:
    """As JSON, with its version: raised where a key goes or changes its meaning."""
    data = result if isinstance(result, dict) else result.to_dict()
    return json.dumps({"version": 1, **data}, indent=1, ensure_ascii=False)


takes_scope = click.option(
    "--scope",
    metavar="PATTERN",
    multiple=True,
    callback=lambda *args: patterns(*args) or None,
    help="Only the module calls and user scopes that have this name ('layers.*.attn'), class ('Attention') or scope "
    "path ('**/Attention[attn]'). Once for each pattern.",
)


@dataclasses.dataclass(frozen=True)
class Request:
    """A model and how to trace it, from the command line."""

    target: str
    inputs: list[Input]
    dynamic_shapes: Any
    meta: bool
    train: bool
    specialize: bool
    step: TrainingStep | None
    as_json: bool
    say: Callable[[str], None]

    def trace(self, *, functional: bool = True) -> Trace:
        """Make the model and trace it.

        Raises UsageError for a wrong argument, ModelError for a model that cannot be traced or raises.
        """
        if self.target.endswith(".st"):
            return self._load()
        grad = contextlib.nullcontext() if self.step is None else torch.enable_grad()

        def traced(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
            with grad:
                return trace(
                    model if self.step is None else self.step.of(model, self.step.optimizer_of(model.parameters())),
                    args,
                    kwargs,
                    dynamic_shapes=self.dynamic_shapes,
                    functional=functional,
                    specialize=self.specialize,
                    progress=lambda path, ops: self.say(f"tracing {path}, {ops:,} ops"),
                )

        return self.apply(traced)

    def apply(self, do: Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], T]) -> T:
        """What `do` makes of the model and its arguments. Raises as `trace`."""
        self.say(f"making {self.target}")
        with torch.device("meta") if self.meta else contextlib.nullcontext():
            model = load_model(self.target).train(self.train or self.step is not None)
        args, kwargs = bind(model, nested(self.inputs) or default_inputs(model))
        devices = {t.device for t in (*model.parameters(), *model.buffers())}
        if len(devices) == 1:
            args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to(*devices), (args, kwargs))
        try:
            return do(model, args, kwargs)
        except (Exception, SystemExit) as error:  # a model's own error may have any class
            explained = _explained(error, model, kwargs)
            if explained is None:
                raise
            raise explained from error

    def _load(self) -> Trace:
        if self.inputs or self.dynamic_shapes or self.meta or self.train or self.specialize or self.step:
            raise UsageError(f"{self.target} is a saved trace, which has its inputs: leave out the options for them")
        if not Path(self.target).exists():
            raise UsageError(f"there is no file {self.target}; tr.save(path) writes one")
        return load(self.target)


def _explained(error: BaseException, model: torch.nn.Module, kwargs: dict[str, Any]) -> Exception | None:
    """What to raise in place of an error of `trace`; None for an error that says enough."""
    if isinstance(error, DynamicShapeError) and error.module is None:
        return UsageError(f"--dynamic: {error.problem}" + (f"; {error.hint}" if error.hint else ""))
    if isinstance(error, TraceError):
        return ModelError(f"cannot trace {type(model).__name__}: {error}")
    if isinstance(error, ScopetraceError):
        return None
    swallowed = wrong_name(model, kwargs)
    if swallowed is not None:  # in **kwargs, where nobody may have looked for it
        return UsageError(f"{swallowed}; with it in **kwargs it raised {error_text(error)}")
    return model_raised(type(model).__name__, error)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Send what models print to standard error, and suppress logging and warnings."""
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
def _progress() -> Iterator[Callable[[str], None]]:
    """A progress line on standard error, where that is a terminal: a status has a thread, which others need not."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield lambda text: status.update(Text(text))


def print_text(text: str, file: TextIO | None = None) -> None:
    """Print a command's result to `file` or standard output, in colour on a terminal.

    A pipe closed by its reader, such as `head`, is no error.
    """
    out = sys.stdout if file is None else file
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="backslashreplace")
    try:
        if out.isatty():
            Console(file=out, soft_wrap=True, markup=False, emoji=False).print(text)
        else:
            print(text, file=out)
        out.flush()
    except BrokenPipeError:
        # Python flushes standard output once more at exit, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
