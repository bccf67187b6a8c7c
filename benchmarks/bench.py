"""Time and memory of a trace beside torch's own ways to capture a model. Prints ratios; asserts nothing.

    python -m benchmarks.bench                       # everything (several minutes)
    python -m benchmarks.bench --only speed --quick  # fewer rounds, no slow peers where a ratio is not judged
    python -m benchmarks.bench --only speed,profile --models bert-base

Parts: `speed` (BERT-base, ViT-B/16, ResNet-152: every runner in turn in one process, best of the rounds, with
grad mode on and off), `dynamic` (the same models with a dynamic batch, beside a static trace), `decompositions` (the
same models in core ATen), `profile` (where a trace spends its time), `functional` (the functional pass's share of a
trace, its cost by write, `st.functionalize` beside AOTAutograd and torch.export), `llama` (the shape of Llama-70B on
the meta device: time, memory), `ops` (cost by op from 1,000 to 100,000 ops, each in a fresh process), `plan` (FSDP2
plans of a Llama-405B and of 10^12 parameters), `onnx` (a small Llama of 4, 16 and 32 layers as an ONNX model, beside
torch.onnx.export), `layers` (models that repeat a layer, beside torch.export), `jaxpr` (BERT-base beside
`jax.make_jaxpr`, where jax is installed).
"""

import argparse
import json
import pathlib
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
Result = dict[str, Any]

PARTS = (
    "speed",
    "dynamic",
    "decompositions",
    "profile",
    "functional",
    "llama",
    "ops",
    "plan",
    "onnx",
    "layers",
    "jaxpr",
)
MODELS = ("bert-base", "vit-b16", "resnet152")
REPEATED = (
    *("llama-70b, 8 layers", "llama-70b, 80 layers", "llama-405b, 126 layers", "deepseek-v3, 61 layers"),
    *("vit-giant, 40 layers", "resnet-200d, 66 blocks"),
)
RUNNERS = ("trace", "trace+graph_module")
SLOW = "export+run_decompositions"


def job(name: str, timeout: float = 1800, **options: Any) -> Result:
    """The result of one measurement in a fresh process; `error` is set if it gave none."""
    command = [sys.executable, "-m", "benchmarks.bench_jobs", json.dumps({"job": name} | options)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"timeout after {timeout:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": f"exit {done.returncode}: {done.stderr.strip()[-300:]}"}
    result: Result = json.loads(lines[-1])
    return result


def say(*cells: str, widths: tuple[int, ...] = (34, 12, 12, 14, 20)) -> None:
    """Print one line of a table."""
    first, *others = cells
    rest = "".join(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=False))
    print("  " + first.ljust(widths[0]) + rest, flush=True)


def over(theirs: float, mine: float | None) -> str:
    """How many times longer theirs takes."""
    return f"{theirs / mine:.1f} x" if mine else "-"


def megabytes(value: float) -> str:
    """Bytes as MB (10^6)."""
    return f"{value / 1e6:.0f} MB"


def run_speed(options: argparse.Namespace) -> None:
    """A table for each model and grad mode."""
    for model in options.models:
        for grad in (True, False):
            rounds = options.rounds or (2 if options.quick else 5)
            result = job("speed", model=model, grad=grad, rounds=rounds, slow_peers=True)
            print(f"\n{model}, {'grad mode' if grad else 'torch.no_grad()'}, best of {rounds} rounds in turn", end="")
            print(f", {result.get('nodes')} nodes")
            show_speed(result)


def show_speed(result: Result) -> None:
    """Times of every runner and its ratio to ours."""
    if "error" in result:
        return say(result["error"])
    best, median = result["best"], result["median"]
    say("", "best ms", "median ms", "over trace", "over trace+gm")
    for name, value in best.items():
        ratios = ("", "") if name in RUNNERS else (over(value, best.get(r)) for r in RUNNERS)
        say(name, f"{value * 1e3:.1f}", f"{median[name] * 1e3:.1f}", *ratios)
    for name, reason in result["failed"].items():
        say(name, "failed: " + reason)
    for name, value in result["parts"].items():
        say("  " + name, f"{value * 1e3:.1f}")


def run_dynamic(options: argparse.Namespace) -> None:
    """What symbolic sizes cost."""
    for model in options.models:
        rounds = options.rounds or (2 if options.quick else 5)
        result = job("dynamic", model=model, rounds=rounds)
        print(f"\n{model}, dynamic batch, torch.no_grad(), best of {rounds} rounds in turn")
        say("", result.get("error") or "best ms", "over static", "over trace", "over trace+gm")
        best: dict[str, float] = result.get("best", {})
        for name, value in best.items():
            others = ("", "") if name.startswith("trace") else (over(value, best.get(r)) for r in RUNNERS)
            say(name, f"{value * 1e3:.1f}", over(value, best.get("trace, static")), *others)
        for name, reason in result.get("failed", {}).items():
            say(name, "failed: " + reason)


def run_decompositions(options: argparse.Namespace) -> None:
    """What core ATen costs."""
    for model in options.models:
        rounds = options.rounds or (2 if options.quick else 5)
        result = job("decompositions", model=model, rounds=rounds)
        print(f"\n{model} in core ATen, torch.no_grad(), best of {rounds} rounds in turn")
        best: dict[str, float] = result.get("best", {})
        mine = [best.get(name) for name in ("trace+decompose", "trace+decompose+graph_module")]
        say("", result.get("error") or "best ms", "", "over ours", "over ours+gm")
        for name, value in best.items():
            ratios = ("", "") if name.startswith("trace") else (over(value, m) for m in mine)
            say(name, f"{value * 1e3:.1f}", "", *ratios)
        for name, reason in result.get("failed", {}).items():
            say(name, "failed: " + reason)


def run_profile(options: argparse.Namespace) -> None:
    """Where a trace spends its time."""
    for model in options.models:
        result = job("profile", model=model, grad=False)
        print(f"\n{model}: share of the time of st.trace(...).graph_module by file (cProfile, own time)")
        if "error" in result:
            say(result["error"])
        for name, share in result.get("share", {}).items():
            say(name, f"{share:.1%}", widths=(60, 8))


def run_functional(options: argparse.Namespace) -> None:
    """What it costs to make a graph pure."""
    rounds = options.rounds or (2 if options.quick else 5)
    names = [*options.models, "llama-cache"]
    print(
        f"\nthe functional pass in st.trace (torch.no_grad(), best of {rounds} in turn; a fresh process for each line)"
    )
    say("", "trace ms", "pass ms", "share", "writes")
    for name in names:
        say_share(name, job("functional_share", model=name, rounds=rounds))
    for what, rows in (("one base", False), ("rows of one base", True)):
        for count in (1000, 3000, 10_000):
            r = job("functional_writes", count=count, rows=rows, rounds=min(rounds, 3))
            say_share(f"{count:,} writes to {what}", r)
            if "pass" in r:
                say("", f"{r['pass'] / count * 1e6:.1f} us of the pass for each write")
    print(f"\nst.functionalize of a graph with its mutations, best of {rounds} in turn in one process", end="")
    print("; AOTAutograd: its forward graph, nothing compiled")
    for name in names:
        say_functionalizers(name, job("functionalizers", model=name, rounds=rounds))


def say_share(name: str, r: Result) -> None:
    """One line, or what went wrong."""
    if "trace" not in r or "pass" not in r:
        return say(name, str(r.get("error") or r.get("failed")))
    share = f"{r['pass'] / r['trace']:.1%}"
    say(name, f"{r['trace'] * 1e3:.1f}", f"{r['pass'] * 1e3:.2f}", share, str(r["writes"]))


def say_functionalizers(model: str, r: Result) -> None:
    """Times, and how many times longer the others take."""
    say(model, r.get("error") or "best ms", *(() if "error" in r else ("", "over aten", "over torch")))
    best: dict[str, float] = r.get("best", {})
    for name, value in best.items():
        ratios = ("", "") if name in ("aten", "torch") else (over(value, best.get(k)) for k in ("aten", "torch"))
        say("  " + name, f"{value * 1e3:.1f}", "", *ratios)
    for name, reason in r.get("failed", {}).items():
        say("  " + name, "failed: " + reason)


def run_llama(options: argparse.Namespace) -> None:
    """Time and memory of a Llama-70B shape on the meta device."""
    layers = options.layers
    print(f"\nLlama-70B shape on the meta device, {layers} layers, 128 tokens; each number from its own process")
    print("  RSS: the whole process (torch, transformers, the model's Python objects too), by VmHWM, reset before")
    print("  growth: RSS peak less RSS just before, after a warm-up on a small model")
    print("  Python peak: tracemalloc, Python's allocations during the trace only; C++ allocations are not in it")
    say("", "seconds", "Python peak", "RSS before", "RSS peak", "growth", widths=(34, 12, 14, 14, 14, 14))
    times: dict[str, float] = {}
    for runner in (*RUNNERS, *(() if options.quick else (SLOW,))):
        rounds = 1 if runner == SLOW else 3
        time = job("llama_time", runner=runner, layers=layers, rounds=rounds)
        python = job("llama_python_memory", runner=runner, layers=layers)
        process = job("llama_process_memory", runner=runner, layers=layers)
        times[runner] = time.get("seconds", 0.0)
        show_llama(runner, time | python | process)
    if times.get(SLOW):
        print(f"  {SLOW} takes {over(times[SLOW], times['trace'])} as long as trace", end="")
        print(f", {over(times[SLOW], times['trace+graph_module'])} as long as trace+graph_module")


def show_llama(runner: str, r: Result) -> None:
    """One line, or what went wrong."""
    if "error" in r:
        return say(runner, r["error"])
    growth = r["rss_peak"] - r["rss_before"]
    cells = [f"{r['seconds']:.2f}", *map(megabytes, (r["python_peak"], r["rss_before"], r["rss_peak"], growth))]
    say(runner, *cells, widths=(34, 12, 14, 14, 14, 14))
    if not r["rss_reset"]:
        say("  (the mark could not be reset: ru_maxrss, highest since the process started)")


def run_plan(options: argparse.Namespace) -> None:
    """FSDP2 plans of models that no machine here could hold."""
    print(
        "\nFSDP2 plans on the meta device, 4,096 tokens, 1,024 ranks, 50 GB/s and 400 TFLOP/s; each in a fresh process"
    )
    print(
        "  plan, simulate: of three plans, 0, 1 and 2 groups ahead; exposed: their communication beside the computation"
    )
    widths = (34, 12, 12, 12, 12, 26, 12)
    say("", "trace", "plan", "simulate", "RSS peak", "exposed s, of computing s", "padding", widths=widths)
    for model in ("llama_405b", "moe_1t"):
        r = job("plan_giant", model=model, ranks=1024)
        if "error" in r:
            say(model, r["error"])
            continue
        exposed = " ".join(f"{s:.1f}" for s in r["exposed"]) + f", {r['compute']:.1f}"
        cells = [*(f"{s:.1f} s" for s in r["seconds"]), megabytes(r["rss_peak"]), exposed, f"{r['padding']:.0%}"]
        say(f"{model}, {r['params'] / 1e9:.0f} billion", *cells, widths=widths)


def run_ops(options: argparse.Namespace) -> None:
    """Microseconds for each op of a chain."""
    counts = [1000, 10_000] if options.quick else [1000, 10_000, 100_000]
    print("\ncost by op (a chain of linear, relu, add, mul; torch.no_grad; each number from a fresh process)")
    say("", *(f"{n:,} ops" for n in counts), "last / first", widths=(34, 16, 16, 16, 16))
    for runner in (*RUNNERS, "make_fx(pre_dispatch)"):
        costs = []
        for n in counts:
            if runner not in RUNNERS and n > 10_000:
                continue
            result = job("ops", count=n, runner=runner, rounds=1 if n > 10_000 else 3)
            costs.append(result["seconds"] / n * 1e6 if "seconds" in result else None)
            if "error" in result:
                say(runner, f"{n}: {result['error']}")
        cells = ["-" if c is None else f"{c:.1f} us" for c in costs] + [""] * (len(counts) - len(costs))
        flat = f"{costs[-1] / costs[0]:.2f}" if costs[0] and costs[-1] else "-"
        say(runner, *cells, flat, widths=(34, 16, 16, 16, 16))


def run_onnx(options: argparse.Namespace) -> None:
    """An ONNX model with a function for the layers, the same inlined, and flat, beside torch.onnx.export."""
    rounds = options.rounds or (1 if options.quick else 3)
    runners = ("torch.onnx.export", "to_onnx, flat", "to_onnx, functions, inlined", "to_onnx, functions")
    for layers in (4, 16, 32):
        print(f"\na small Llama of {layers} layers, CPU seconds from the model, best of {rounds}, a process each")
        say("", "seconds", "nodes", "torch over")
        theirs = None
        for runner in runners:
            r = job("onnx_export", runner=runner, layers=layers, rounds=rounds)
            if "error" in r:
                say(runner, r["error"])
                continue
            theirs = r["seconds"] if theirs is None else theirs
            say(runner, f"{r['seconds']:.2f}", str(r["nodes"]), over(theirs, r["seconds"]))


def run_layers(options: argparse.Namespace) -> None:
    """Models that repeat a layer."""
    rounds = options.rounds or (3 if options.quick else 8)
    print(f"\nmodels that repeat a layer, torch.no_grad(), CPU seconds, least of {rounds} in turn, a process each;")
    print("  in brackets: how many times longer torch.export and run_decompositions({}) take")
    widths = (26, 18, 18, 18, 18, 12, 12, 12)
    head = ("", "trace", "and calls", "and functions", "and graph", "to_onnx", "export", "Python peak")
    say(*head, widths=widths)
    traced: dict[str, float] = {}
    for model in REPEATED:
        r = job("repeated", model=model, rounds=rounds, slow_peers=True)
        if "error" in r:
            say(model, r["error"])
            continue
        best, theirs = r["best"], r["best"]["export"]
        traced[model] = best["trace"]
        ours = [f"{best[k]:.3f} ({theirs / best[k]:.0f})" for k in ("trace", "calls", "functions", "graph_module")]
        last = [f"{best['onnx']:.2f}" if "onnx" in best else "-", f"{theirs:.1f}", megabytes(r["python"])]
        say(model, *ours, *last, widths=widths)
        if "onnx" in r:
            say("", "ONNX: " + r["onnx"], widths=(2, 0))
    few, many = (traced.get(name) for name in REPEATED[:2])
    if few and many:
        print(f"  80 layers take {many / few:.2f} times as long as 8")


def run_jaxpr(options: argparse.Namespace) -> None:
    """BERT-base by JAX."""
    r = job("jaxpr", rounds=options.rounds or (3 if options.quick else 10))
    print("\nBERT-base, CPU milliseconds, least of the rounds, in one process")
    say("", r.get("error") or f"{r['equations']} equations, {r['nodes']} nodes", widths=(34, 40))
    for name, value in r.get("best", {}).items():
        say(name, f"{value * 1e3:.1f}", over(r["best"]["jax.make_jaxpr"], value))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, comma-separated, of {', '.join(PARTS)}")
    parser.add_argument(
        "--models",
        default=",".join(MODELS),
        help="models of speed, dynamic, decompositions, profile and functional, comma-separated",
    )
    parser.add_argument("--rounds", type=int, help="rounds of speed")
    parser.add_argument("--layers", type=int, default=80, help="layers of the Llama")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes, no slow peer for Llama")
    options = parser.parse_args(argv)
    options.only, options.models = options.only.split(","), options.models.split(",")
    unknown = [p for p in options.only if p not in PARTS] + [m for m in options.models if m not in MODELS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; parts are {', '.join(PARTS)}, models {', '.join(MODELS)}")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the chosen parts in their order."""
    options = parse(argv)
    runs = {
        "speed": run_speed,
        "dynamic": run_dynamic,
        "decompositions": run_decompositions,
        "profile": run_profile,
        "functional": run_functional,
        "llama": run_llama,
        "ops": run_ops,
        "plan": run_plan,
        "onnx": run_onnx,
        "layers": run_layers,
        "jaxpr": run_jaxpr,
    }
    for part in PARTS:
        if part in options.only:
            runs[part](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
