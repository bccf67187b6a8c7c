"""A whole training step, forward and backward, beside torch's joint graph of the same model in the same process.

    python -m benchmarks.step_times [TIMES]

Prints the least seconds of CPU time of TIMES (4) runs each, in turn, on one thread, with a full pass of the garbage
collector before each; a first run of the trace does not count. Ours is `st.trace`, and the trace with its
`graph_module`; torch's is `aot_export_joint_with_descriptors` alone, without Dynamo.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import scopetrace as st
from benchmarks.models import import_torchvision
from benchmarks.steps import loss_of


def bert() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """BERT-base, 2x64 token ids."""
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig()).train(), (torch.randint(3, 1000, (2, 64)),)


def resnet() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """ResNet-152 of timm, two small pictures."""
    import timm

    return timm.create_model("resnet152", pretrained=False).train(), (torch.randn(2, 3, 64, 64),)


def efficientnet() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """EfficientNet-B0 of timm, whose activations write over what backward reads, two small pictures."""
    import timm

    return timm.create_model("efficientnet_b0", pretrained=False).train(), (torch.randn(2, 3, 64, 64),)


class WithLoss(torch.nn.Module):
    """A model whose result is its loss."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> tuple[torch.Tensor]:
        """The sum of its floats."""
        return (loss_of(self.model(*args)),)


def joint(model: torch.nn.Module, args: tuple[Any, ...]) -> None:
    """Torch's joint graph."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with contextlib.ExitStack() as stack:
        aot_export_joint_with_descriptors(stack, model, args, {})


def seconds(run: Callable[[], Any]) -> float:
    """The CPU time of a run."""
    gc.collect()
    start = time.process_time()
    run()
    return time.process_time() - start


def compare(name: str, model: torch.nn.Module, args: tuple[Any, ...], times: int) -> None:
    """Print a line for a model."""
    with_loss = WithLoss(model)

    def step(*args: Any) -> torch.Tensor:
        loss = loss_of(model(*args))
        loss.backward()
        return loss

    def traced() -> None:
        st.trace(step, args)

    def with_graph() -> None:
        _ = st.trace(step, args).graph_module

    with_graph()
    runs = traced, with_graph, lambda: joint(with_loss, args)
    found = [[seconds(run) for run in runs] for _ in range(times)]
    trace, graph, peer = [min(column) for column in zip(*found, strict=True)]
    print(
        f"{name}: trace {trace:.3f} s, with graph_module {graph:.3f} s, torch's joint graph {peer:.2f} s: "
        f"{peer / trace:.1f} and {peer / graph:.1f} times",
        flush=True,
    )


def main(argv: list[str] | None = None) -> None:
    """Print a line for each model."""
    given = sys.argv[1:] if argv is None else argv
    torch.set_num_threads(1)
    import_torchvision()
    for name, build in (("BERT-base", bert), ("ResNet-152", resnet), ("EfficientNet-B0", efficientnet)):
        compare(name, *build(), times=int(given[0]) if given else 4)


if __name__ == "__main__":
    main()
