"""What training costs: `scopetrace plan`, by FSDP2 on many ranks; `scopetrace estimate`, and whether that fits."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import click
import torch

from scopetrace.cli.run import Request, model_command
from scopetrace.distributed.estimate import Estimate
from scopetrace.distributed.estimate import estimate as make_estimate
from scopetrace.distributed.planning import Plan
from scopetrace.distributed.planning import plan as make_plan
from scopetrace.distributed.simulation import Simulation, simulate
from scopetrace.errors import UsageError
from scopetrace.formatting import amount, columns, duration

DTYPES = {"own": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@model_command
@click.option("--ranks", required=True, type=click.IntRange(min=1), help="How many ranks share the parameters.")
@click.option("--classes", "-c", metavar="NAME", multiple=True, help="Modules that are each a group.")
@click.option("--target-mb", type=click.FloatRange(min=0, min_open=True), help="Instead: groups of about so many MB.")
@click.option("--prefetch", type=click.IntRange(min=0), default=1, show_default=True, help="Groups to gather ahead.")
@click.option(
    "--bandwidth", type=click.FloatRange(min=0, min_open=True), default=50.0, show_default=True, help="GB/s of a rank."
)
@click.option(
    "--tflops", type=click.FloatRange(min=0, min_open=True), default=400.0, show_default=True, help="TFLOP/s of a rank."
)
@click.option("--latency", type=click.FloatRange(min=0), default=0.0, help="Microseconds of a collective.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="own", help="Of gathered parameters and gradients.")
def plan(request: Request, ranks: int, classes: tuple[str, ...], prefetch: int, dtype: str, **numbers: Any) -> Any:
    """Plan FSDP2 for the model TARGET: groups, prefetch lists, the order of all-gathers, and their cost on paper.

    The inputs are those of one rank. TARGET is as for `scopetrace show`; with --meta, a model of any size.

    \b
        scopetrace plan timm:vit_base_patch16_224 --ranks 8 --classes Block
        scopetrace plan mypackage.models:build --meta -i ids=1x4096:int64 --ranks 1024 --target-mb 500 --dtype bf16
    """
    target_mb = numbers["target_mb"]
    if bool(classes) == bool(target_mb):
        raise UsageError("write --classes NAME, once for each class, or --target-mb N")
    if request.step is not None:
        raise UsageError("a plan is of the forward, and of a backward that is the forward in reverse: leave out --step")
    for name, number in numbers.items():
        if number is not None and not math.isfinite(number):
            raise UsageError(f"--{name.replace('_', '-')} {number}: write a finite number")
    traced = request.trace(functional=False)
    model = traced.model
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{request.target} is a saved trace, which has no model to plan for: name the model")
    request.say("planning")
    grouping = {"classes": classes} if classes else {"target_bytes": int((target_mb or 0) * 1e6)}
    bandwidth, flops, latency = numbers["bandwidth"] * 1e9, numbers["tflops"] * 1e12, numbers["latency"] * 1e-6
    rates: dict[str, Any] = {"bandwidth": bandwidth, "flops": flops, "latency": latency}
    plans = {ahead: make_plan(model, traced.order, prefetch=ahead, **grouping) for ahead in sorted({0, 1, 2, prefetch})}
    simulations = {
        ahead: simulate(each, traced, ranks=ranks, param_dtype=DTYPES[dtype], **rates) for ahead, each in plans.items()
    }
    if request.as_json:
        return _data(plans[prefetch], simulations)
    return "\n\n".join(map(str, (plans[prefetch], simulations[prefetch], _table(simulations))))


def _data(chosen: Plan, simulations: dict[int, Simulation]) -> dict[str, Any]:
    """The plan with the prefetch that was asked for, and the cost with each."""
    return {
        "groups": [dataclasses.asdict(group) for group in chosen.groups],
        "forward_gathers": chosen.forward_gathers,
        "backward_gathers": chosen.backward_gathers,
        "simulations": [
            {"prefetch": ahead, "seconds": s.seconds, **{k: v for k, v in vars(s).items() if k != "transfers"}}
            for ahead, s in simulations.items()
        ],
    }


def _table(results: dict[int, Simulation]) -> str:
    rows = [["prefetch", "step", "exposed forward", "exposed backward", "gathered at most"]]
    for ahead, result in results.items():
        times = map(duration, (result.seconds, result.exposed_forward, result.exposed_backward))
        rows.append([str(ahead), *times, amount(result.memory["gathered parameters, at most"], "B")])
    return columns(rows)


# Whether it fits ------------------------------------------------------------------------------------------------------

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B", re.IGNORECASE)


def _size(ctx: click.Context, option: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no number of bytes; write one such as 80GB or 24GiB.", ctx, option)
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2].lower() or " "))


@functools.partial(model_command, steps=True)
@click.option("--gpu", "gpu_bytes", metavar="SIZE", callback=_size, help="The memory to fit into: 80GB, 24GiB.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="own", help="Cast the model and its inputs.")
@click.option("--inference", is_flag=True, help="Of a forward without gradients, in place of a training step.")
@click.option("--depth", type=click.IntRange(min=0), default=1, show_default=True, help="Levels of calls with rows.")
def estimate(request: Request, gpu_bytes: int | None, dtype: str, inference: bool, depth: int) -> Estimate:
    """Estimate the memory and FLOPs of training TARGET, whether that fits a GPU, and what would.

    The model neither runs nor trains: one trace says what a step makes when. TARGET is as for `scopetrace show`; with
    --meta, a model of any size.

    \b
        scopetrace estimate timm:resnet18 --optimizer adamw --gpu 8GB
        scopetrace estimate mypackage.models:build --meta -i ids=1x4096:int64 --dtype bf16 --optimizer adamw --gpu 80GB
    """
    if request.target.endswith(".st") or request.dynamic_shapes or request.specialize:
        raise UsageError("an estimate is of a model and the sizes of its inputs: leave out --dynamic and --specialize")
    step = request.step
    if step is None or (inference and (step.loss or step.optimizer)):
        raise UsageError("--loss and --optimizer are for training steps: leave out --inference")
    request.say("estimating")

    def of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Estimate:
        options: dict[str, Any] = {"dtype": DTYPES[dtype], "gpu_bytes": gpu_bytes, "depth": depth}
        return make_estimate(
            model, args, kwargs, step=not inference, loss=step.loss, optimizer=step.optimizer, **options
        )

    return dataclasses.replace(request, step=None if inference else step).apply(of)
