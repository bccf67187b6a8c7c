"""Measurements of planning, for `benchmarks.bench_jobs`."""

import itertools
import pathlib
import resource
import sys
import time
from typing import Any

import torch

from benchmarks import models

Result = dict[str, Any]

LAYERS = {"llama_405b": "LlamaDecoderLayer", "moe_1t": "Qwen3MoeDecoderLayer"}


def plan_giant(model: str, ranks: int) -> Result:
    """Seconds to trace, to plan and to simulate a model of examples/giants.py, and the peak memory of the process."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
    models.import_torchvision()
    st = models.import_scopetrace()
    assert st is not None
    from examples import giants

    net = getattr(giants, model)()
    layer = next(type(m) for m in net.modules() if type(m).__name__ == LAYERS[model])
    times = [time.perf_counter()]
    with torch.no_grad():
        tr = st.trace(net, (torch.zeros(1, 4096, dtype=torch.long, device="meta"),), functional=False)
    times.append(time.perf_counter())
    plans = [st.distributed.plan(net, tr.order, classes=layer, prefetch=ahead) for ahead in (0, 1, 2)]
    times.append(time.perf_counter())
    results = [st.distributed.simulate(p, tr, ranks=ranks, bandwidth=50e9, flops=400e12) for p in plans]
    times.append(time.perf_counter())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "params": sum(p.numel() for p in net.parameters()),
        "seconds": [b - a for a, b in itertools.pairwise(times)],
        "rss_peak": peak,
        "exposed": [r.exposed_forward + r.exposed_backward for r in results],
        "compute": results[0].compute,
        "padding": results[0].padding,
    }
