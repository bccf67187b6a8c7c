"""What a process pays for having traced: an eager pass before and after a thousand traces of another model.

    python -m benchmarks.after_traces [TRACES]

A trace replaces names of torch and puts them back. CPython 3.13 stops to remember the methods of a class, and of all
its subclasses, when its attributes have changed a thousand times. Prints the CPU time that the fastest tenth
of 2,000 passes stay below, on one thread, and the ratio of the two.
"""

from __future__ import annotations

import gc
import sys
import time

import torch
from torch import nn

import scopetrace as st


class Block(nn.Module):
    """Three small layers, whose time is Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.scale = nn.Linear(8, 8), nn.LayerNorm(8), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layers in a row."""
        out: torch.Tensor = self.norm(torch.relu(self.linear(x))) * self.scale
        return out


def eager(model: nn.Module, x: torch.Tensor) -> float:
    """Seconds of a pass."""
    times = []
    for _ in range(2000):
        start = time.process_time()
        model(x)
        times.append(time.process_time() - start)
    return sorted(times)[len(times) // 10]


def main(traces: int) -> None:
    """Print the two times and their ratio."""
    torch.set_num_threads(1)
    model, x = nn.Sequential(*[Block() for _ in range(40)]).eval(), torch.ones(2, 8)
    with torch.no_grad():
        before = eager(model, x)
        other, y = nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4)
        for _ in range(traces):
            st.trace(other, (y,))
        gc.collect()
        after = eager(model, x)
    version = ".".join(map(str, sys.version_info[:2]))
    print(f"Python {version}, torch {torch.__version__}, {traces} traces")
    print(f"eager pass before {before * 1e6:.0f} µs, after {after * 1e6:.0f} µs: {after / before:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 1000)
