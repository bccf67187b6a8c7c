"""`scopetrace estimate`: what a model needs in training or inference, whether that fits, and what would."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import click
import torch

from scopetrace.cli.plan import DTYPES
from scopetrace.cli.run import Asked, json_text, model_command, takes_json
from scopetrace.distributed.estimate import Estimate
from scopetrace.distributed.estimate import estimate as make
from scopetrace.errors import UsageError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B", re.IGNORECASE)


def _size(ctx: click.Context, option: click.Parameter, text: str | None) -> int | None:
    match = None if text is None else _SIZE.fullmatch(text.strip())
    if match is None:
        if text is not None:
            raise click.BadParameter(f"{text!r} is no number of bytes; write one such as 80GB or 24GiB.", ctx, option)
        return None
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2].lower() or " "))


@functools.partial(model_command, steps=True)
@click.option("--gpu", "gpu_bytes", metavar="SIZE", callback=_size, help="The memory to fit into: 80GB, 24GiB.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="own", help="Cast the model and its inputs.")
@click.option("--inference", is_flag=True, help="Of a forward without gradients, in place of a training step.")
@click.option("--depth", type=click.IntRange(min=0), default=1, show_default=True, help="Levels of calls with rows.")
@takes_json
def estimate(asked: Asked, gpu_bytes: int | None, dtype: str, inference: bool, depth: int, as_json: bool) -> str:
    """Estimate the memory and FLOPs of training TARGET, whether that fits a GPU, and what would.

    The model neither runs nor trains: one trace says what a step makes when. TARGET is as for `scopetrace show`; with
    --meta, a model of any size.

    \b
        scopetrace estimate timm:resnet18 --optimizer adamw --gpu 8GB
        scopetrace estimate mypackage.models:build --meta -i ids=1x4096:int64 --dtype bf16 --optimizer adamw --gpu 80GB
    """
    if asked.target.endswith(".st") or asked.dynamic_shapes or asked.specialize:
        raise UsageError("an estimate is of a model and the sizes of its inputs: leave out --dynamic and --specialize")
    step = asked.step
    if step is None or (inference and (step.loss or step.optimizer)):
        raise UsageError("--loss and --optimizer are for training steps: leave out --inference")
    asked.say("estimating")

    def of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Estimate:
        options: dict[str, Any] = {"dtype": DTYPES[dtype], "gpu_bytes": gpu_bytes, "depth": depth}
        return make(model, args, kwargs, step=not inference, loss=step.loss, optimizer=step.optimizer, **options)

    estimated = dataclasses.replace(asked, step=None if inference else step).apply(of)
    return json_text(estimated.to_dict()) if as_json else str(estimated)
