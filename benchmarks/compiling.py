"""Time to compile a model of equal layers, and the time of a call: ours beside torch's own ways.

    python -m benchmarks.compiling [--layers 2 8 32] [--ways ours whole layers region] [--hidden 64]

Each row is a process of its own with an empty cache, which compiles in one thread: seconds to compile forward (and
backward) by the clock and of the processor, milliseconds of the processor for a call, and the largest difference of
results and gradients from eager, relative to the largest value of eager.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

WAYS = {
    "ours": "st.trace(model, args).compile()",
    "whole": "torch.compile(model)",
    "layers": "layer.compile() for each layer",
    "region": "torch.compile(model), layers under nested_compile_region",
}


def build(layers: int, hidden: int) -> tuple[Any, Any]:
    """A Llama with random weights, and token ids of shape (1, 64)."""
    import torch

    from scopetrace.cli.targets import declare_missing_ops

    declare_missing_ops()
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=layers, vocab_size=128, use_cache=False)
    return LlamaModel(config), torch.randint(0, 128, (1, 64))


def prepare(way: str, model: Any, tokens: Any) -> Callable[..., Any]:
    """The function to call in the model's place."""
    import torch

    if way == "ours":
        import scopetrace as st

        return st.trace(model, (tokens,)).compile()
    if way == "layers":
        for layer in model.layers:
            layer.compile()
        return model
    if way == "region":
        layer_class = type(model.layers[0])
        layer_class.forward = torch.compiler.nested_compile_region(layer_class.forward)
    return torch.compile(model)


def measure(way: str, layers: int, hidden: int, train: bool) -> dict[str, float]:
    """One way in this process. Run it in one with `TORCHINDUCTOR_CACHE_DIR` at an empty folder."""
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(train)
    model, tokens = build(layers, hidden)
    parameters = list(model.parameters())

    def call(run: Callable[..., Any]) -> list[Any]:
        out = run(tokens).last_hidden_state
        return [out.detach(), *(torch.autograd.grad(out.square().sum(), parameters) if train else ())]

    wanted = call(model)
    compile_trivial()
    start, used = time.perf_counter(), processor_time()
    run = prepare(way, model, tokens)
    found = call(run)
    compiled, used = time.perf_counter() - start, processor_time() - used
    times = []
    for _ in range(200):
        start = time.process_time()
        call(run)
        times.append(time.process_time() - start)
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, wanted, strict=True)]
    return {"compile": compiled, "cpu": used, "call": min(times) * 1000, "error": max(errors)}


def processor_time() -> float:
    """Seconds of the processor that this process and those that it waited for have used."""
    return sum(os.times()[:4])


def compile_trivial() -> None:
    """What Inductor does once in each process, whatever it compiles."""
    import torch

    torch.compile(lambda x: x + 1)(torch.ones(2))


def in_process(*arguments: str) -> dict[str, float]:
    """`measure` in a process of its own, with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        one_thread = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, **one_thread}
        command = [sys.executable, "-m", "benchmarks.compiling", "--one", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return {"failed": 1.0}
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print a table, a row for each way, number of layers, and with or without gradients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--modes", nargs="+", choices=["train", "infer"], default=["train", "infer"])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        way, layers, hidden, mode = given.one
        print(json.dumps(measure(way, int(layers), int(hidden), mode == "train")))
        return
    print(f"{'mode':6} {'way':8} {'layers':>6} {'compile s':>10} {'cpu s':>8} {'call ms':>8} {'error':>9}")
    for mode in given.modes:
        for way in given.ways:
            for layers in given.layers:
                row = in_process(way, str(layers), str(given.hidden), mode)
                found = [f"{row[key]:{form}}" if key in row else "failed" for key, form in COLUMNS]
                print(
                    f"{mode:6} {way:8} {layers:6} {found[0]:>10} {found[1]:>8} {found[2]:>8} {found[3]:>9}", flush=True
                )


COLUMNS = (("compile", ".1f"), ("cpu", ".1f"), ("call", ".2f"), ("error", ".1e"))

if __name__ == "__main__":
    main()
