"""Tracing with `reuse=True`, beside each module call recorded and torch.export.

    python -m benchmarks.reuse [LAYERS ...]       Llama-70B on the meta device
    python -m benchmarks.reuse NAME [NAME ...]    models of timm, which may hardly repeat

Prints the least seconds of CPU time of eight runs, all ways in turn, and of one export of each number of layers.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import scopetrace as st
from benchmarks.models import Built, import_torchvision, llama_70b


def seconds(runs: list[Callable[[], Any]], times: int = 8) -> list[float]:
    """The least CPU time of each, all in turn; a first run of each does not count."""
    found = [float("inf")] * len(runs)
    for i in range(times + 1):
        for k, run in enumerate(runs):
            gc.collect()
            start = time.process_time()
            run()
            took = time.process_time() - start
            found[k] = min(found[k], took) if i else found[k]
    return found


def llama(count: int) -> None:
    """Print a line for a model of some layers."""
    model, args = llama_70b(count)

    def outline(reuse: bool | None) -> Any:
        return st.trace(model, args, reuse=reuse).outline("layers").functions

    plain, reused, calls, plain_outline, outlined = seconds(
        [
            lambda: st.trace(model, args, reuse=False),
            lambda: st.trace(model, args),
            lambda: st.trace(model, args).calls,
            lambda: outline(False),
            lambda: outline(None),
        ]
    )
    start = time.process_time()
    torch.export.export(model, args).run_decompositions({})
    exported = time.process_time() - start
    report = st.trace(model, args).reuse
    print(
        f"{count} layers: trace {plain:.3f} s, with reuse {reused:.3f}, and calls {calls:.3f}; with outline and "
        f"functions {plain_outline:.3f}, with reuse {outlined:.3f}; torch.export {exported:.2f}; {report}"
    )


def other(name: str, built: Built) -> None:
    """Print a line for a model."""
    model, args = built
    plain, reused = seconds([lambda: st.trace(model, args, reuse=False), lambda: st.trace(model, args)], 12)
    print(f"{name}: trace {plain:.4f} s, with reuse {reused:.4f}, ratio {reused / plain:.2f}")


def main(wanted: list[str]) -> None:
    """Print a line for each number of layers, and each model."""
    with torch.no_grad():
        for name in wanted:
            if name.isdigit():
                llama(int(name))
            else:
                import_torchvision()
                import timm

                other(name, (timm.create_model(name, pretrained=False).eval(), (torch.randn(1, 3, 224, 224),)))


if __name__ == "__main__":
    main(sys.argv[1:] or ["8", "80"])
