"""`scopetrace plan`: how to shard a model with FSDP2, and what that costs on many ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import click
import torch

from scopetrace.cli.group import print_result
from scopetrace.cli.run import Asked, json_text, progress, quiet, takes_json, takes_model
from scopetrace.distributed.planning import Plan
from scopetrace.distributed.planning import plan as make_plan
from scopetrace.distributed.simulation import Simulation, simulate
from scopetrace.errors import UsageError
from scopetrace.formatting import amount, columns, duration

_DTYPES = {"own": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@click.command()
@takes_model
@click.option("--ranks", required=True, type=click.IntRange(min=1), help="How many ranks share the parameters.")
@click.option("--classes", "-c", metavar="NAME", multiple=True, help="A class of modules that are each a group.")
@click.option("--target-mb", type=click.FloatRange(min=0, min_open=True), help="Instead: groups of about so many MB.")
@click.option("--prefetch", type=click.IntRange(min=0), default=1, show_default=True, help="Groups to gather ahead.")
@click.option(
    "--bandwidth", type=click.FloatRange(min=0, min_open=True), default=50.0, show_default=True, help="GB/s of a rank."
)
@click.option(
    "--tflops", type=click.FloatRange(min=0, min_open=True), default=400.0, show_default=True, help="TFLOP/s of a rank."
)
@click.option("--latency", type=click.FloatRange(min=0), default=0.0, help="Microseconds of a collective.")
@click.option("--dtype", type=click.Choice(list(_DTYPES)), default="own", help="Of gathered parameters and gradients.")
@takes_json
def plan(
    asked: Asked,
    ranks: int,
    classes: tuple[str, ...],
    target_mb: float | None,
    prefetch: int,
    bandwidth: float,
    tflops: float,
    latency: float,
    dtype: str,
    as_json: bool,
) -> None:
    """Plan FSDP2 for the model TARGET: groups, prefetch lists, the order of all-gathers, and their cost on paper.

    The inputs are those of one rank. TARGET is as for `scopetrace show`; with --meta, a model of any size.

    \b
        scopetrace plan timm:vit_base_patch16_224 --ranks 8 --classes Block
        scopetrace plan mypackage.models:build --meta -i ids=1x4096:int64 --ranks 1024 --target-mb 500 --dtype bf16
    """
    if bool(classes) == bool(target_mb):
        raise UsageError("write --classes NAME, once for each class, or --target-mb N")
    if asked.step is not None:
        raise UsageError("a plan is of the forward, and of a backward that is the forward in reverse: leave out --step")
    numbers = {"target-mb": target_mb, "bandwidth": bandwidth, "tflops": tflops, "latency": latency}
    for name, number in numbers.items():
        if number is not None and not math.isfinite(number):
            raise UsageError(f"--{name} {number}: write a finite number")
    with quiet(), progress() as say, torch.no_grad():
        traced = asked.trace(say, functional=False)
        model = traced.model
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"{asked.target} is a saved trace, which has no model to plan for: name the model")
        say("planning")
        chosen = {"classes": _classes(model, classes)} if classes else {"target_bytes": int((target_mb or 0) * 1e6)}
        results = {}
        for ahead in sorted({0, 1, 2, prefetch}):
            found = make_plan(model, traced.order, prefetch=ahead, **chosen)
            results[ahead] = (
                found,
                simulate(
                    found,
                    traced,
                    ranks=ranks,
                    bandwidth=bandwidth * 1e9,
                    flops=tflops * 1e12,
                    latency=latency * 1e-6,
                    param_dtype=_DTYPES[dtype],
                ),
            )
    simulations = {ahead: simulation for ahead, (_, simulation) in results.items()}
    found, own = results[prefetch]
    text = json_text(_data(found, simulations)) if as_json else "\n\n".join(map(str, (found, own, _table(simulations))))
    print_result(text)


def _data(found: Plan, simulations: dict[int, Simulation]) -> dict[str, Any]:
    """The plan with the prefetch that was asked for, and the cost with each."""
    return {
        "groups": [dataclasses.asdict(group) for group in found.groups],
        "forward_gathers": found.forward_gathers,
        "backward_gathers": found.backward_gathers,
        "simulations": [
            {"prefetch": ahead, "seconds": s.seconds, **{k: v for k, v in vars(s).items() if k != "transfers"}}
            for ahead, s in simulations.items()
        ],
    }


def _classes(model: torch.nn.Module, names: tuple[str, ...]) -> list[type[torch.nn.Module]]:
    known = {type(module).__name__: type(module) for module in model.modules()}
    missing = [name for name in names if name not in known]
    if missing:
        raise UsageError(f"--classes: no module of the model is a {missing[0]}; there are: {', '.join(sorted(known))}")
    return [known[name] for name in names]


def _table(results: dict[int, Simulation]) -> str:
    rows = [["prefetch", "step", "exposed forward", "exposed backward", "gathered at most"]]
    for ahead, result in results.items():
        times = map(duration, (result.seconds, result.exposed_forward, result.exposed_backward))
        rows.append([str(ahead), *times, amount(result.memory["gathered parameters, at most"], "B")])
    return columns(rows)
