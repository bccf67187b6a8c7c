"""The jobs of `benchmarks.bench` on models that repeat a layer, and on how fast JAX traces one.

Seconds are of the processor: on a shared machine they tell more than those of the clock.
"""

import gc
import resource
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import models

Result = dict[str, Any]

MODELS: dict[str, Callable[[], models.Built]] = {
    "llama-70b, 8 layers": lambda: models.llama_70b(8),
    "llama-70b, 80 layers": models.llama_70b,
    "llama-405b, 126 layers": models.llama_405b,
    "deepseek-v3, 61 layers": models.deepseek_v3,
    "vit-giant, 40 layers": models.vit_giant,
    "resnet-200d, 66 blocks": models.resnet200d,
}


def processor(fn: Callable[[], Any]) -> float:
    """Seconds of the processor that `fn` takes, without the garbage of what ran before."""
    gc.collect()
    start = time.process_time()
    fn()
    return time.process_time() - start


def least(table: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The least seconds of each after a first run that does not count, all in turn."""
    runs = [{name: processor(fn) for name, fn in table.items()} for _ in range(rounds + 1)]
    return {name: min(run[name] for run in runs[1:]) for name in table}


def repeated(model: str, rounds: int, slow_peers: bool) -> Result:
    """A model that repeats a layer: its trace, with what is made of it; and by torch.export."""
    st = models.import_scopetrace()
    assert st is not None
    net, args = MODELS[model]()

    def onnx() -> Any:
        return st.trace(net, args).to_onnx(functions="layers", weight_inputs=True)

    table: dict[str, Callable[[], Any]] = {
        "trace": lambda: st.trace(net, args),
        "calls": lambda: st.trace(net, args).calls,
        "functions": lambda: (lambda t: (t.calls, t.outline("layers").functions))(st.trace(net, args)),
        "graph_module": lambda: st.trace(net, args).graph_module,
    }
    with torch.no_grad():
        best = least(table, rounds)
        tracemalloc.start()
        trace = st.trace(net, args)
        python = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        result = {"best": best, "python": python}
        del trace
        result["rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        try:
            best["onnx"] = processor(onnx)
        except Exception as error:
            result["onnx"] = f"{type(error).__name__}: {str(error)[:150]}"
        if slow_peers:
            best["export"] = processor(lambda: torch.export.export(net, args).run_decompositions({}))
    return result


def jaxpr(rounds: int) -> Result:
    """BERT-base: `jax.make_jaxpr` of pure functions, beside a trace of the module."""
    try:
        from benchmarks import jax_bert
    except ImportError:
        return {"error": "jax is not installed: pip install jax"}
    st = models.import_scopetrace()
    assert st is not None
    net, args = models.bert_base()
    with torch.no_grad():
        best = least(
            {
                "st.trace": lambda: st.trace(net, args),
                "st.trace and calls": lambda: st.trace(net, args).calls,
                "st.trace and graph_module": lambda: st.trace(net, args).graph_module,
                "jax.make_jaxpr": jax_bert.trace,
            },
            rounds,
        )
        nodes = len(st.trace(net, args).graph_module.graph.nodes)
    return {"best": best, "equations": len(jax_bert.trace().eqns), "nodes": nodes}
