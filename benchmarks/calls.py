"""What a call of a trace takes beside the model, the bare GraphModule, TorchScript and an ExportedProgram's module.

    python -m benchmarks.calls

Small models, whose ops take little. Microseconds of processor time, the least of many rounds in which all take turns;
in brackets, over that of the model. `graph` is the bare GraphModule, which compares nothing and writes nothing back.
"""

import argparse
import gc
import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import scopetrace as st
from benchmarks.models import import_torchvision


class Arguments(nn.Module):
    """Takes tensors and numbers by keyword and in containers, and returns containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: dict[str, Any], scale: float = 1.0, *, mask: torch.Tensor) -> dict[str, Any]:
        """The layer of `x["x"]`, and a part of `x`."""
        return {"y": self.layer(x["x"]) * scale + mask, "rest": [x["rest"][0] + 1]}


def layers(count: int) -> nn.Module:
    """Linear layers of width 8."""
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(count)])


ROWS = torch.randn(2, 8)
NESTED = ({"x": ROWS, "rest": (torch.randn(2, 8),)},)
CASES: dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = {
    "Linear": (nn.Linear(8, 8).eval(), (ROWS,), {}, None),
    "16 layers": (layers(16).eval(), (ROWS,), {}, None),
    "Linear, any batch": (nn.Linear(8, 8).eval(), (ROWS,), {}, ({0: torch.export.Dim("batch")},)),
    "containers": (Arguments().eval(), NESTED, {"scale": 2.5, "mask": torch.randn(2, 8)}, None),
    "BatchNorm, training": (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), (ROWS,), {}, None),
}
"""By name: a model, its arguments, and dynamic_shapes of the trace."""


def with_transformers() -> dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]]:
    """The cases, with one of transformers where that is installed: a call is compared with its classes and configs."""
    if importlib.util.find_spec("transformers") is None:
        return CASES
    import_torchvision()
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 4}
    bert = BertModel(BertConfig(vocab_size=50, return_dict=False, **sizes)).eval()
    return {**CASES, "BERT, 4 layers": (bert, (torch.ones(1, 5, dtype=torch.long),), {}, None)}


def ways(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Any) -> dict[str, Callable[[], Any]]:
    """A call in each way; TorchScript takes no keywords here."""
    trace = st.trace(model, args, kwargs, dynamic_shapes=sizes)
    graph, exported = trace.graph_module, torch.export.export(model, args, kwargs, dynamic_shapes=sizes).module()
    inputs = torch.utils._pytree.tree_leaves((args, kwargs))
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    calls = {
        "model": lambda: model(*args, **kwargs),
        "trace": lambda: trace(*args, **kwargs),
        "graph": lambda: graph(*tensors),
        "ExportedProgram": lambda: exported(*args, **kwargs),
    }
    if not kwargs:
        script = torch.jit.trace(model, args)
        calls["TorchScript"] = lambda: script(*args)
    return calls


def least(calls: Sequence[Callable[[], Any]], rounds: int, count: int) -> list[float]:
    """The least processor seconds of a call of each, in turn."""
    seconds = [float("inf")] * len(calls)
    for call in (*calls, *calls, *calls):
        call()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for i, call in enumerate(calls):
                start = time.process_time()
                for _ in range(count):
                    call()
                seconds[i] = min(seconds[i], (time.process_time() - start) / count)
    finally:
        gc.enable()
    return seconds


def main(argv: list[str] | None = None) -> None:
    """Print a row for each model, with autograd on and off."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--calls", type=int, default=50, help="in each round")
    parser.add_argument("--only", default="", help="the models whose name has this in it")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    for name, case in with_transformers().items():
        for grad in (True, False) if options.only in name else ():
            with torch.set_grad_enabled(grad):
                calls = ways(*case)
                us = [seconds * 1e6 for seconds in least([*calls.values()], options.rounds, options.calls)]
            row = "".join(f"  {way} {n:.1f} ({n / us[0]:.2f})" for way, n in zip(calls, us, strict=True))
            print(f"{name}, autograd {'on' if grad else 'off'}:{row}")


if __name__ == "__main__":
    main()
