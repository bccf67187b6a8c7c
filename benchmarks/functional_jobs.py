"""Jobs of `benchmarks.bench_jobs` about graphs without mutation."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks import models
from benchmarks.timing import best_in_turn

Result = dict[str, Any]


def functional_share(model: str, rounds: int) -> Result:
    """Seconds of a whole trace, and of its functional pass alone on the same recording."""
    st: Any = models.import_scopetrace()
    from scopetrace.api.trace import program_of
    from scopetrace.program.traced import functional_tape

    net, args = models.MUTATION[model]()
    with torch.no_grad():
        tape = program_of(st.trace(net, args, functional=False)).tape
        table = {"trace": lambda: st.trace(net, args), "pass": lambda: functional_tape(tape)}
        best, failed = best_in_turn(table, rounds)
    return best | {"writes": sum(bool(op.writes) for op in tape.ops), "failed": failed}


def functional_writes(count: int, rows: bool, rounds: int) -> Result:
    """The same for `count` consecutive writes to one base, on the whole of it or on its rows."""
    models.MUTATION["writes"] = lambda: (models.Writes(count, rows), (torch.randn(8, 8),))
    return functional_share("writes", rounds)


def functionalizers(model: str, rounds: int) -> Result:
    """`st.functionalize` of a graph with its mutations beside AOTAutograd and torch.export, in turn."""
    st: Any = models.import_scopetrace()
    net, args = models.MUTATION[model]()
    with torch.no_grad():
        gm = st.trace(net, args, functional=False).graph_module
        table: dict[str, Callable[[], Any]] = {
            "aten": lambda: st.functionalize(gm, args),
            "torch": lambda: st.functionalize(gm, args, level="torch"),
            "AOTAutograd": lambda: _aot(gm, args),
            "export+run_decompositions": lambda: torch.export.export(gm, args).run_decompositions({}),
        }
        best, failed = best_in_turn(table, rounds)
    return {"best": best, "failed": failed}


def _aot(gm: torch.fx.GraphModule, args: tuple[Any, ...]) -> torch.fx.GraphModule:
    """AOTAutograd's forward graph, by a compiler that keeps it and does nothing else."""
    from torch._functorch.aot_autograd import aot_export_module

    return aot_export_module(gm, args, trace_joint=False)[0]
