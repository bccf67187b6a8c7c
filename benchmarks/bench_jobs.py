"""One measurement in this process, printed as one JSON line: `python -m benchmarks.bench_jobs '{"job": "speed", …}'`.

Started by `benchmarks.bench`, each in a fresh process, so that no measurement warms the caches of the next.
"""

import contextlib
import cProfile
import functools
import gc
import json
import os
import pathlib
import pstats
import resource
import statistics
import sys
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks import functional_jobs, layer_jobs, models, onnx_jobs, plan_jobs
from benchmarks.timing import best_in_turn, seconds

Result = dict[str, Any]


def peers(model: Any, args: tuple[Any, ...]) -> dict[str, Callable[[], Any]]:
    """What we are compared with. make_fx needs its private switch to take a model's own parameters."""

    def fx(**options: Any) -> Any:
        return make_fx(model, tracing_mode="fake", _allow_non_fake_inputs=True, **options)(*args)

    def jit() -> Any:
        return torch.jit.trace(model, args, check_trace=False, strict=False)  # type: ignore[no-untyped-call]

    return {
        "export+run_decompositions": lambda: torch.export.export(model, args).run_decompositions({}),
        "export": lambda: torch.export.export(model, args),
        "make_fx": fx,
        "make_fx(pre_dispatch)": lambda: fx(pre_dispatch=True),
        "jit.trace": jit,
    }


def ours(st: Any, model: Any, args: tuple[Any, ...]) -> dict[str, Callable[[], Any]]:
    """What is measured of scopetrace. Each starts from the model; none keeps anything of the other."""
    return {
        "trace": lambda: st.trace(model, args),
        "trace+graph_module": lambda: st.trace(model, args).graph_module,
    }


def parts(st: Any, model: Any, args: tuple[Any, ...]) -> dict[str, float]:
    """Seconds by part of one trace, each part asked for in turn."""
    from scopetrace.api.trace import program_of

    gc.collect()
    start = time.perf_counter()
    tr = st.trace(model, args)
    found = {"recording (st.trace)": time.perf_counter() - start}
    found["building the graph"] = seconds(lambda: program_of(tr).lowering)
    for label, name in {"GraphModule": "graph_module", "calls": "calls", "scope": "scope"}.items():
        found[f"{label} (.{name})"] = seconds(functools.partial(getattr, tr, name))
    return found


def speed(model: str, grad: bool, rounds: int, slow_peers: bool) -> Result:
    """All runners in turn, `rounds` times: so that other load on the machine falls on all alike."""
    st = models.import_scopetrace()
    net, args = models.MODELS[model]()
    slow = {"export+run_decompositions", "export"}
    with contextlib.nullcontext() if grad else torch.no_grad():
        runners = {k: f for k, f in peers(net, args).items() if slow_peers or k not in slow}
        mine = ours(st, net, args) if st else {}
        times: dict[str, list[float]] = defaultdict(list)
        failed: dict[str, str] = {}
        by_part: list[dict[str, float]] = []
        for _ in range(rounds):
            for name, fn in (mine | runners).items():
                _round(name, fn, times, failed, 3 if name in mine else 1)
            if st and "trace" not in failed:
                by_part.append(parts(st, net, args))
    best = {name: min(ts) for name, ts in times.items()}
    median = {name: statistics.median(ts) for name, ts in times.items()}
    split = {key: min(p[key] for p in by_part) for key in by_part[0]} if by_part else {}
    return {"best": best, "median": median, "failed": failed, "parts": split, "nodes": _nodes(st, net, args)}


def dynamic(model: str, rounds: int) -> Result:
    """A trace with a dynamic batch beside one without, and torch.export with the same batch; all in turn."""
    st: Any = models.import_scopetrace()
    net, args = models.MODELS[model]()
    args = tuple(torch.cat([a] * 3) for a in args)
    shapes = tuple({0: torch.export.Dim("batch")} for _ in args)
    export = functools.partial(torch.export.export, net, args, dynamic_shapes=shapes)
    runners: dict[str, Callable[[], Any]] = {
        "trace, static": lambda: st.trace(net, args),
        "trace": lambda: st.trace(net, args, dynamic_shapes=shapes),
        "trace+graph_module": lambda: st.trace(net, args, dynamic_shapes=shapes).graph_module,
        "export": export,
        "export+run_decompositions": lambda: export().run_decompositions({}),
    }
    with torch.no_grad():
        best, failed = best_in_turn(runners, rounds)
    return {"best": best, "failed": failed}


def decompositions(model: str, rounds: int) -> Result:
    """A trace in core ATen beside torch.export's program in core ATen, each from the model; in turn."""
    st: Any = models.import_scopetrace()
    net, args = models.MODELS[model]()
    runners: dict[str, Callable[[], Any]] = {
        "trace+decompose": lambda: st.trace(net, args).decompose(),
        "trace+decompose+graph_module": lambda: st.trace(net, args).decompose().graph_module,
        "export+run_decompositions": lambda: torch.export.export(net, args).run_decompositions(),
    }
    with torch.no_grad():
        best, failed = best_in_turn(runners, rounds)
    return {"best": best, "failed": failed}


def _round(name: str, fn: Callable[[], Any], times: dict[str, list[float]], failed: dict[str, str], n: int) -> None:
    if name in failed:
        return
    try:
        times[name] += [seconds(fn) for _ in range(n)]
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"[:200]


def _nodes(st: Any, net: Any, args: tuple[Any, ...]) -> int | None:
    try:
        return len(st.trace(net, args).graph_module.graph.nodes)
    except Exception:
        return None


def profile(model: str, grad: bool) -> Result:
    """Share of a trace's own time by the file or package that spends it (cProfile: small calls look dearer)."""
    st: Any = models.import_scopetrace()
    net, args = models.MODELS[model]()
    profiler = cProfile.Profile()
    with contextlib.nullcontext() if grad else torch.no_grad():
        st.trace(net, args).graph_module  # noqa: B018
        profiler.runcall(lambda: st.trace(net, args).graph_module)
    spent: dict[str, float] = defaultdict(float)
    for (file, _, function), entry in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        spent[_where(file, function)] += entry[2]
    whole = sum(spent.values())
    return {"share": {k: v / whole for k, v in sorted(spent.items(), key=lambda kv: -kv[1])[:20]}}


def _where(file: str, function: str) -> str:
    names = pathlib.Path(file).parts
    for package, depth in (("scopetrace", 3), ("torch", 3), ("transformers", 1), ("timm", 1)):
        if package in names:
            at = len(names) - 1 - names[::-1].index(package)
            return "/".join(names[at : at + depth])
    return f"builtin {function[:60]}" if file == "~" else "Python library"


# -- a large model without memory for its weights ---------------------------------------------------------------


def _llama_runner(runner: str, layers: int) -> Callable[[], Any]:
    net, args = models.llama_70b(layers)
    st = models.import_scopetrace()
    table = ours(st, net, args) if st else {}
    return (table | peers(net, args))[runner]


def _warm() -> None:
    """Load what a first trace loads, on a small model."""
    st = models.import_scopetrace()
    net, args = models.Chain(8), (torch.randn(2, 8),)
    if st:
        st.trace(net, args).graph_module  # noqa: B018
    torch.export.export(net, args).run_decompositions({})


def llama_time(runner: str, layers: int, rounds: int) -> Result:
    """Best of `rounds`."""
    fn = _llama_runner(runner, layers)
    _warm()
    return {"seconds": min(seconds(fn) for _ in range(rounds))}


def llama_python_memory(runner: str, layers: int) -> Result:
    """Peak of Python's own allocations while `runner` works (tracemalloc; C++ allocations are not in it)."""
    fn = _llama_runner(runner, layers)
    _warm()
    gc.collect()
    tracemalloc.start()
    result = fn()
    peak = tracemalloc.get_traced_memory()[1]
    del result
    return {"python_peak": peak}


def llama_process_memory(runner: str, layers: int) -> Result:
    """Resident memory of the whole process before, and its highest while `runner` works.

    From VmRSS and VmHWM of /proc, the mark being reset just before; elsewhere ru_maxrss, which cannot be reset
    and so gives only the highest since the start of the process.
    """
    fn = _llama_runner(runner, layers)
    _warm()
    gc.collect()
    reset = _reset_peak()
    before = _status("VmRSS") if reset else _maxrss()
    result = fn()
    peak = _status("VmHWM") if reset else _maxrss()
    del result
    return {"rss_before": before, "rss_peak": peak, "rss_reset": reset, "maxrss": _maxrss()}


def _reset_peak() -> bool:
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        return abs(_status("VmHWM") - _status("VmRSS")) < 16 << 20
    except (OSError, StopIteration):
        return False


def _status(key: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _maxrss() -> int:
    value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return value if sys.platform == "darwin" else value * 1024


# -- cost by op -------------------------------------------------------------------------------------------------


def ops(count: int, runner: str, rounds: int) -> Result:
    """Best of `rounds` for a chain of `count` ops, in a process that traced nothing of that size before."""
    st = models.import_scopetrace()
    small, net, args = models.Chain(200), models.Chain(count), (torch.randn(2, 8),)
    with torch.no_grad():
        table = (ours(st, small, args) if st else {}) | peers(small, args)
        table[runner]()
        table = (ours(st, net, args) if st else {}) | peers(net, args)
        return {"seconds": min(seconds(table[runner]) for _ in range(rounds))}


JOBS: dict[str, Callable[..., Result]] = {
    job.__name__: job
    for job in (
        *(speed, dynamic, decompositions, profile, ops),
        *(llama_time, llama_python_memory, llama_process_memory),
        *(plan_jobs.plan_giant, onnx_jobs.onnx_export, layer_jobs.repeated, layer_jobs.jaxpr),
        *(functional_jobs.functional_share, functional_jobs.functional_writes, functional_jobs.functionalizers),
    )
}


def main() -> None:
    """Run the job of the command line; what models print goes to stderr."""
    request = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    models.quiet()
    try:
        result = JOBS[request.pop("job")](**request)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    print(json.dumps(result), file=out, flush=True)


if __name__ == "__main__":
    main()
