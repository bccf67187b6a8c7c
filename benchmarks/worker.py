"""Check a list of models in this process and write one JSON line for each step to stdout.

    python -m benchmarks.worker --zoo ../shared/zoo timm:resnet18 hf:bert

Started by `benchmarks.zoo`, which restarts it after a crash or a timeout. What models print goes to stderr.
"""

import argparse
import faulthandler
import gc
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch
import torch.utils._pytree as pytree

from benchmarks import checks, oracle
from benchmarks.models import import_scopetrace, load_zoo

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def timed(fn: Callable[[], Any]) -> tuple[Any, float]:
    """The result of `fn` and the seconds that it took."""
    start = time.perf_counter()
    result = fn()
    return result, time.perf_counter() - start


def eager(model: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Run on copies of the inputs, with the random numbers of a fixed seed."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, (args, kwargs))
    torch.manual_seed(1)
    return model(*args, **kwargs)


def equal_to_eager(run: Callable[..., Any], model: torch.nn.Module, args: Args, kwargs: Kwargs) -> checks.Reason:
    """Compare on these inputs; if they differ, say whether eager's path under `is_exporting()` agrees."""
    try:
        got = eager(run, args, kwargs)
    except Exception as error:
        return f"run: {checks.first_line(error)}"
    try:
        reason = checks.same_result(got, eager(model, args, kwargs))
        if reason:
            with oracle.exporting_flags():
                other = checks.same_result(got, eager(model, args, kwargs))
            reason += "" if other else " (but equal to eager under is_exporting())"
    except Exception as error:
        return f"eager after tracing: {checks.first_line(error)}"
    return reason


def both_inputs(
    run: Callable[..., Any], model: torch.nn.Module, args: Args, kwargs: Kwargs
) -> dict[str, checks.Reason]:
    """Equality on the example inputs and on other ones of the same shapes."""
    model.eval()  # as it is: whoever serves a model says so before a call
    torch.manual_seed(2)
    args2, kwargs2 = checks.other_inputs((args, kwargs))
    return {
        "equal": equal_to_eager(run, model, args, kwargs),
        "equal2": equal_to_eager(run, model, args2, kwargs2),
    }


def check_export(model: torch.nn.Module, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """torch.export's column."""
    start = time.perf_counter()
    try:
        ep = torch.export.export(model, args, kwargs)
    except Exception as error:
        return {"ok": False, "seconds": time.perf_counter() - start, "error": checks.all_lines(error)}
    row: dict[str, Any] = {"seconds": time.perf_counter() - start}
    row |= {"nodes": len(ep.graph.nodes), "ops": checks.op_counts(ep.graph_module)}
    row |= both_inputs(ep.module(), model, args, kwargs)
    row["error"] = row["equal"] or row["equal2"]
    return row | {"traced": True, "ok": not row["error"]}


def check_ours(
    st: Any, model: torch.nn.Module, args: Args, kwargs: Kwargs, how: Kwargs, stage: Callable[[str], object] = str
) -> dict[str, Any]:
    """scopetrace's column. Tracing comes first, on a model that never ran: what it leaves behind shows."""
    before = checks.snapshot(model)
    start = time.perf_counter()
    try:
        tr = st.trace(model, args, kwargs, **how)
        row: dict[str, Any] = {"seconds": time.perf_counter() - start}
        gm, row["graph_seconds"] = timed(lambda: tr.graph_module)
    except Exception as error:
        state = checks.state_changes(before, model)
        return failed(error, time.perf_counter() - start) | {"state": _some(state)}
    row["state"] = _some(checks.state_changes(before, model))
    row |= {"traced": True, "nodes": len(gm.graph.nodes), "ops": checks.op_counts(gm)}
    row["lint"] = attempt(tr.lint)
    stage("ours: run")
    row |= both_inputs(tr, model, args, kwargs)
    stage("ours: calls")
    row |= check_calls(tr, model, args, kwargs)
    bad = [f"{k}: {row[k]}" for k in ("equal", "equal2", "lint", "calls", "values", "state") if row[k]]
    return row | {"ok": not bad, "error": "; ".join(bad)[:600] or None}


def failed(error: Exception, seconds: float) -> dict[str, Any]:
    """The row of a model that could not be traced."""
    frames = checks.last_frames(error)
    return {"ok": False, "seconds": seconds, "error": checks.all_lines(error), "frames": frames}


def attempt(fn: Callable[[], Any]) -> checks.Reason:
    """None, or what `fn` raised."""
    try:
        fn()
    except Exception as error:
        return checks.first_line(error)
    return None


def check_calls(tr: Any, model: torch.nn.Module, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Compare `tr.calls` with the oracle: structure, then values."""
    try:
        with oracle.exporting_flags():
            seen = eager(lambda *a, **k: oracle.record_calls(model, a, k), args, kwargs)
    except Exception as error:
        return {"calls": f"oracle: {checks.first_line(error)}", "values": None}
    try:
        match = oracle.match_calls(seen, tr.calls)
        wrong = oracle.compare_calls(match, tr.calls) + check_extras(match, tr, model, args, kwargs)
    except Exception as error:
        frames = "; ".join(checks.last_frames(error, 2))
        return {"calls": f"{checks.first_line(error)} at {frames}", "values": None, "n_calls": len(seen)}
    row = {"n_calls": len(seen), "n_extra": len(match.extra), "calls": _some(wrong), "values": None}
    return row if wrong else row | check_values(tr, match, args, kwargs)


def check_extras(match: oracle.Match, tr: Any, model: torch.nn.Module, args: Args, kwargs: Kwargs) -> list[str]:
    """Calls that `_call_impl` did not see must be direct calls of `forward`: count its runs."""
    if not match.extra or match.problem:
        return []
    modules = [call.module for call in match.extra]
    with oracle.exporting_flags():
        runs = eager(lambda *a, **k: oracle.forward_runs(model, modules, a, k), args, kwargs)
    return oracle.unproven_extras(match, tr.calls, runs)


def check_values(tr: Any, match: oracle.Match, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """The value of every call's tensors in a run of the graph, against eager's."""
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    count = len(tr.graph_module.graph.find_nodes(op="placeholder"))
    inputs = next((x for x in (tensors, leaves) if len(x) == count), None)
    if inputs is None:
        return {"values_note": f"graph has {count} placeholders, the call {len(tensors)} tensors: not run"}
    inputs = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, inputs)
    torch.manual_seed(1)
    try:
        wrong, compared, skipped = oracle.compare_values(match.pairs, tr.graph_module, inputs)
    except Exception as error:
        return {"values_note": f"graph not run by itself: {checks.first_line(error)}"}
    return {"values": _some(wrong), "values_compared": compared, "values_skipped": skipped}


def _some(lines: list[str], most: int = 3) -> checks.Reason:
    if not lines:
        return None
    more = f" (+{len(lines) - most} more)" if len(lines) > most else ""
    return " | ".join(line[:240] for line in lines[:most]) + more


class Fresh:
    """A model of the zoo, built anew whenever a run or a trace changed it (some keep tensors for the next call)."""

    def __init__(self, name: str, zoo: pathlib.Path) -> None:
        """Build it."""
        self.name, self.zoo = name, load_zoo(zoo)
        self._build()

    def _build(self) -> None:
        self.model, self.args, self.kwargs = self.zoo.build(self.name)
        self.state = checks.snapshot(self.model)

    def get(self) -> tuple[torch.nn.Module, Args, Kwargs]:
        """The model as it was built, and its inputs."""
        if checks.model_changes(self.state, self.model):
            self._build()
        return self.model, self.args, self.kwargs


def check_model(name: str, options: argparse.Namespace, emit: Callable[..., None]) -> None:
    """All columns for one model; every part is emitted as soon as it is known.

    First our trace, with all that is done for the first time; then torch.export; then our trace again. So neither
    is measured only with the imports and caches of torch that the other has filled.
    """
    emit(stage="build")
    start = time.perf_counter()
    fresh = Fresh(name, options.zoo)
    emit(stage="ours: trace", build_seconds=time.perf_counter() - start)
    ours: dict[str, Any] = {"ok": False, "error": "scopetrace cannot be imported", "missing": True}
    how = {"functional": False} if options.mutable else {}
    if options.st is not None:
        ours = check_ours(options.st, *fresh.get(), how, lambda stage: emit(stage=stage))
    emit(stage="export", ours=ours)
    if options.export:
        emit(export=check_export(*fresh.get()))
    if ours.get("traced"):
        emit(stage="ours again", again=again(options.st, *fresh.get(), how))


def again(st: Any, model: torch.nn.Module, args: Args, kwargs: Kwargs, how: Kwargs) -> dict[str, float]:
    """Seconds of a second trace, of its GraphModule, and of an eager run."""
    gc.collect()
    tr, seconds = timed(lambda: st.trace(model, args, kwargs, **how))
    _, graph_seconds = timed(lambda: tr.graph_module)
    _, eager_seconds = timed(lambda: eager(model, args, kwargs))
    return {"seconds": seconds, "graph_seconds": graph_seconds, "eager_seconds": eager_seconds}


def warm_up(st: Any) -> None:
    """Pay for imports and caches on both sides before anything is timed."""
    net, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval(), torch.randn(2, 4)
    attempt(lambda: torch.export.export(net, (x,)))
    if st is not None:
        attempt(lambda: st.trace(net, (x,)).graph_module)


def serve(options: argparse.Namespace, out: TextIO) -> None:
    """Check the models one after the other."""
    for name in options.names:

        def emit(name: str = name, **parts: Any) -> None:
            print(json.dumps({"model": name} | parts, default=str), file=out, flush=True)

        try:
            check_model(name, options, emit)
        except Exception as error:
            emit(broken=checks.first_line(error), frames=checks.last_frames(error))
        emit(done=True)


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--zoo", type=pathlib.Path, required=True)
    parser.add_argument("--no-export", dest="export", action="store_false")
    parser.add_argument("--mutable", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    faulthandler.enable()
    torch.set_num_threads(options.threads)
    options.st = import_scopetrace()
    with torch.no_grad():
        warm_up(options.st)
        serve(options, out)


if __name__ == "__main__":
    main()
