"""`Trace.order` of the models of the zoo, beside what hooks and a TorchFunctionMode see in a real run.

    python -m benchmarks.orders                    # all models of the zoo (--zoo FOLDER)
    python -m benchmarks.orders --only 'hf:*bert*'

Columns:
    calls, params   module calls, and parameters that are used
    ms              milliseconds of processor time for the order, of a model that is traced already
    same            modules in the same order, the same parameters in each call in the same order, no earlier last use;
                    else the first difference
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from benchmarks import each_model, order_oracle, report
from benchmarks.models import import_scopetrace, import_torchvision
from benchmarks.oracle import exporting_flags

Row = each_model.Row


def check(st: Any, build: each_model.Build) -> Row:
    """One model. A model that branches on data is traced with specialize=True."""
    model, args, kwargs = build()
    traced = trace(st, model, args, kwargs)
    start = time.process_time()
    order = traced.order
    used = order.param_forward_order
    row: Row = {"ms": 1000 * (time.process_time() - start), "calls": len(order.calls), "params": len(used)}
    with exporting_flags():
        truth = order_oracle.record(model, args, kwargs)
    found = order_oracle.differences(order, truth)
    return row | {"ok": not found, "same": found[0] if found else "yes"}


def trace(st: Any, model: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """A trace; specialized where the model branches on data."""
    try:
        return st.trace(model, args, kwargs, functional=False)
    except st.DataDependentError:
        return st.trace(model, args, kwargs, functional=False, specialize=True)


def line(row: Row) -> list[str]:
    """The cells of one model."""
    same = row.get("error") or row["same"]
    return [row["model"], str(row.get("calls", "-")), str(row.get("params", "-")), f"{row.get('ms', 0):.1f}", same]


def table(rows: list[Row]) -> str:
    """The rows, and how many are equal."""
    cells = [["model", "calls", "params", "ms", "same"], *map(line, rows)]
    return f"{report.table(cells)}\n\n{sum(bool(r.get('ok')) for r in rows)} of {len(rows)} equal"


def main() -> int:
    """Run, and print the table."""
    options = each_model.parser(__doc__, "orders.jsonl").parse_args()
    import_torchvision()
    st = import_scopetrace()
    with torch.no_grad():
        each_model.run(options, lambda _, build: check(st, build), line, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
