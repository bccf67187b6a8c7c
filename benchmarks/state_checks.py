"""What a call of a trace takes to compare the state with that of the trace, beside the whole call, of small models.

    python -m benchmarks.state_checks

The state is what the forward read beside its inputs: grad mode, autocast, training flags and other attributes,
globals, the code of functions, hooks and submodules. Seconds are of processor time, the least of many rounds in which
all take turns. `ratio` is the comparison alone over the call, `in it` what a call takes less without it: there, the ops
have taken the caches of the processor. It is the difference of two times: ask for many rounds, without other load.
"""

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import scopetrace as st
from scopetrace.api.runnable import program_of


def mlp(layers: int) -> nn.Module:
    """Linear layers of width 8 with ReLU between them."""
    parts = [part for _ in range(layers) for part in (nn.Linear(8, 8), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


class Block(nn.Module):
    """Attention without heads, a norm and two layers: eight modules in all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.act, self.up, self.drop = nn.GELU(), nn.Linear(8, 8), nn.Dropout(0.1)
        self.scale = 8**-0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block of `x`."""
        y = self.norm(x)
        weights = (self.q(y) @ self.k(y).mT * self.scale).softmax(-1)
        return x + self.drop(self.up(self.act(weights @ self.v(y))))


SCALE, NAMES = 0.5, {"relu": torch.relu}


def scaled(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that reads a variable of the one around it."""
    return lambda x: x * by


class Reader(nn.Module):
    """Reads flags of torch, globals, a variable of another function, and attributes that are lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.sizes, self.options, self.scaled = [2, 4], {"act": "relu"}, scaled(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of parts of `x`."""
        y = NAMES[self.options["act"]](self.norm(self.layer(x)))
        if self.training or not torch.is_grad_enabled():
            y = y * SCALE
        first, second = y.view(2, *self.sizes).unbind(1)
        return self.scaled(first + second) + torch.zeros(4)


NETS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(8, 8),
    "LayerNorm, Linear": lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)),
    "MLP of 2 layers": lambda: mlp(2),
    "MLP of 3 layers": lambda: mlp(3),
    "MLP of 7 layers": lambda: mlp(7),
    "block": Block,
    "reader": Reader,
    "2 blocks": lambda: nn.Sequential(Block(), Block()),
}
"""Models of 1 to 17 modules."""


Run = Callable[[], Any]


def least(table: dict[str, tuple[Run, Run]], rounds: int, calls: int) -> dict[str, float]:
    """The least processor seconds of a call of each, in turn; before each round its first function is called."""
    found = dict.fromkeys(table, float("inf"))
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, (prepare, run) in table.items():
                prepare()
                start = time.process_time()
                for _ in range(calls):
                    run()
                found[name] = min(found[name], (time.process_time() - start) / calls)
    finally:
        gc.enable()
    return found


def nothing() -> None:
    """Stands for the comparison in calls that make none."""


def measured(net: nn.Module, rounds: int, calls: int) -> dict[str, float]:
    """Seconds of a call of a trace, with and without the comparison, of this alone, and of looking up the tensors."""
    x = torch.randn(2, 8)
    trace = st.trace(net, (x,))
    trace(x)
    boundary = program_of(trace).boundary
    check, tensors = boundary.check.run_state, boundary.state.refresh

    def comparing(how: Run) -> Run:
        return lambda: setattr(boundary.check, "run_state", how)

    found = least(
        {
            "call": (comparing(check), lambda: trace(x)),
            "without": (comparing(nothing), lambda: trace(x)),
            "check": (nothing, check),
            "tensors": (nothing, tensors),
        },
        rounds,
        calls,
    )
    return found | least({"eager": (nothing, lambda: net(x))}, rounds, calls)


def main(argv: list[str] | None = None) -> None:
    """Print a row for each model, with autograd on and off."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--calls", type=int, default=100, help="in each round")
    parser.add_argument("--only", help="the models whose name has this in it")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(
        f"{'model':20}{'autograd':>9}{'eager us':>10}{'call us':>9}{'check us':>10}{'ratio':>8}{'in it':>8}"
        f"{'tensors us':>12}"
    )
    for name, make in NETS.items():
        if options.only and options.only not in name:
            continue
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                found = measured(make().eval(), options.rounds, options.calls)
            us = {key: seconds * 1e6 for key, seconds in found.items()}
            print(
                f"{name:20}{'on' if grad else 'off':>9}{us['eager']:10.2f}{us['call']:9.2f}{us['check']:10.3f}"
                f"{us['check'] / us['call']:8.2%}{1 - us['without'] / us['call']:8.2%}{us['tensors']:12.3f}"
            )


if __name__ == "__main__":
    main()
