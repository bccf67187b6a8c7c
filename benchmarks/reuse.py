"""What it costs to look for calls that repeat, in models of timm that hardly do.

    python -m benchmarks.reuse NAME [NAME ...]

Prints the least seconds of CPU time of 24 traces with `reuse=False` and 24 by default, in turn. Models that repeat
their layers are in `python -m benchmarks.bench --only reuse`.
"""

import sys

import torch

import scopetrace as st
from benchmarks.models import import_torchvision
from benchmarks.reuse_jobs import least


def main(names: list[str]) -> None:
    """Print a line for each model."""
    import_torchvision()
    import timm

    for name in names:
        found = seconds(timm.create_model(name, pretrained=False).eval())
        ratio = found["default"] / found["all"]
        print(f"{name}: {found['all']:.4f} s, by default {found['default']:.4f}, ratio {ratio:.2f}")


def seconds(model: torch.nn.Module) -> dict[str, float]:
    """The least seconds of both."""
    args = (torch.randn(1, 3, 224, 224),)
    with torch.no_grad():
        return least({"all": lambda: st.trace(model, args, reuse=False), "default": lambda: st.trace(model, args)}, 24)


if __name__ == "__main__":
    main(sys.argv[1:] or ["mobilenetv3_large_100", "densenet121", "resnet50"])
