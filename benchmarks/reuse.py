"""Tracing Llama-70B on the meta device with `reuse=True`, beside each layer recorded and torch.export.

    python -m benchmarks.reuse [LAYERS ...]

Prints seconds of CPU time: the least of five traces, and one export with `run_decompositions({})` of the fewest layers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import scopetrace as st
from benchmarks.models import llama_70b


def seconds(run: Callable[[], Any], times: int = 5) -> float:
    """The least CPU time of some runs."""
    found = []
    for _ in range(times):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


def compare(count: int) -> None:
    """Print a line for a model of some layers."""
    model, args = llama_70b(count)
    plain = seconds(lambda: st.trace(model, args))
    reused = seconds(lambda: st.trace(model, args, reuse=True))
    report = st.trace(model, args, reuse=True).reuse
    print(f"{count} layers: {plain:.3f} s, with reuse {reused:.3f} s; {report}")


def main(layers: list[int]) -> None:
    """Print a line for each number of layers, and one for torch.export."""
    with torch.no_grad():
        for count in layers:
            compare(count)
        model, args = llama_70b(min(layers))
        exported = seconds(lambda: torch.export.export(model, args).run_decompositions({}), 1)
        print(f"{min(layers)} layers: torch.export with run_decompositions {exported:.3f} s")


if __name__ == "__main__":
    main([int(n) for n in sys.argv[1:]] or [8, 80])
