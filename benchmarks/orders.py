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

import json
import sys
import time
from typing import Any

import torch

from benchmarks import checks, choice, order_oracle, report
from benchmarks.models import import_scopetrace, import_torchvision, load_zoo, quiet
from benchmarks.oracle import exporting_flags

Row = dict[str, Any]


def check(st: Any, zoo: Any, name: str) -> Row:
    """One model. A model that branches on data is traced with specialize=True."""
    model, args, kwargs = zoo.build(name)
    row: Row = {"model": name}
    try:
        with torch.no_grad():
            traced = trace(st, model, args, kwargs)
            start = time.process_time()
            order = traced.order
            used = order.param_forward_order
            row |= {"ms": 1000 * (time.process_time() - start), "calls": len(order.calls), "params": len(used)}
            with exporting_flags():
                truth = order_oracle.record(model, args, kwargs)
        found = order_oracle.differences(order, truth)
        row |= {"ok": not found, "same": found[0] if found else "yes"}
    except Exception as error:
        row |= {"ok": False, "same": checks.first_line(error)}
    return row


def trace(st: Any, model: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """A trace; specialized where the model branches on data."""
    try:
        return st.trace(model, args, kwargs, functional=False)
    except st.DataDependentError:
        return st.trace(model, args, kwargs, functional=False, specialize=True)


def table(rows: list[Row]) -> str:
    """The rows, and how many are equal."""
    header = ["model", "calls", "params", "ms", "same"]
    cells = [
        [r["model"], str(r.get("calls", "-")), str(r.get("params", "-")), f"{r.get('ms', 0):.1f}", r["same"]]
        for r in rows
    ]
    return f"{report.table([header, *cells])}\n\n{sum(r['ok'] for r in rows)} of {len(rows)} equal"


def main() -> int:
    """Run, and print the table."""
    options = choice.parser(__doc__, "orders.jsonl").parse_args()
    rows = choice.kept_rows(options)
    if not options.report_only:
        quiet()
        import_torchvision()
        st, zoo = import_scopetrace(), load_zoo(options.zoo)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a" if options.resume else "w") as out:
            for name in choice.wanted(options):
                if name not in rows:
                    rows[name] = check(st, zoo, name)
                    print(f"{name:45s} {rows[name]['same'][:100]}", file=sys.stderr, flush=True)
                    print(json.dumps(rows[name]), file=out, flush=True)
    print(table(list(rows.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
