"""Models of the zoo with dynamic sizes: one trace, and equality with eager at five other sizes, beside torch.export.

    python -m benchmarks.dynamic                        # all models of the zoo (--zoo FOLDER), one process
    python -m benchmarks.dynamic --only 'hf:*bert*' --no-export
    python -m benchmarks.dynamic --report-only          # print the last table again

Each model is traced with a dynamic batch. One with token ids, audio samples or spectrogram frames is traced once more
with their lengths dynamic too; the sizes are then varied together.

Columns:
    export, ours  whether torch.export and scopetrace take the model with a dynamic batch
    s             seconds of processor time: torch.export; scopetrace, the best of three (static s: with fixed sizes)
    same          at how many of the five sizes the result equals eager
    over static   our time with dynamic sizes over that with fixed ones
    ratio         torch.export's time over ours
    seq           "same" with lengths dynamic too: ours (torch.export)
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.export import Dim

from benchmarks import checks, each_model, report
from benchmarks.models import import_scopetrace

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Call = tuple[Args, Kwargs]
Row = each_model.Row

EXAMPLE = 3
BATCHES = (1, 2, 5, 6, 7)
LENGTHS = (0.75, 1.5, 1.25, 2.0, 0.5)
"""By batch, the length as a part of the example's."""
SEQUENCES = {"input_ids": "seq", "attention_mask": "seq", "decoder_input_ids": "decoder_seq"}
SEQUENCES |= {"input_values": "samples", "input_features": "frames"}

HEADER = ["model", "export", "s", "same", "|", "ours", "static s", "s", "same", "over static", "|", "ratio", "seq"]


def named(model: torch.nn.Module, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """The arguments by the names of forward's parameters."""
    return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)


def resized(x: Any, batch: int, length: float, batch_now: int, path: str = "") -> Any:
    """An argument with other sizes: rows and positions of the example, in random order."""
    if isinstance(x, dict):
        return {key: resized(value, batch, length, batch_now, key) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(resized(value, batch, length, batch_now, path) for value in x)
    if not isinstance(x, torch.Tensor) or not x.dim() or x.shape[0] != batch_now:
        return x
    x = x[torch.randint(batch_now, (batch,))]
    if path in SEQUENCES and x.dim() > 1:
        x = x[:, torch.randint(x.shape[1], (max(2, int(x.shape[1] * length)),))]
    return x + torch.randn_like(x) if x.is_floating_point() else x


def shapes_of(arguments: dict[str, Any], lengths: bool) -> dict[str, Any]:
    """`dynamic_shapes` for these arguments."""
    dims: dict[str, Any] = {}

    def dim(name: str) -> Any:
        return dims.setdefault(name, Dim(name, min=1 if name == "batch" else 2))

    def spec(x: Any, name: str) -> Any:
        if isinstance(x, (dict, list, tuple)):
            items = x.items() if isinstance(x, dict) else enumerate(x)
            found = {key: spec(value, str(key)) for key, value in items}
            return found if isinstance(x, dict) else [*found.values()]
        if not isinstance(x, torch.Tensor) or not x.dim() or x.shape[0] != EXAMPLE:
            return None
        both = {0: dim("batch")}
        if lengths and name in SEQUENCES and x.dim() > 1:
            both[1] = dim(SEQUENCES[name])
        return both

    return {name: spec(x, name) for name, x in arguments.items()}


def timed(fn: Callable[[], Any]) -> tuple[Any, float]:
    """The result of `fn` and the seconds of processor time that it took."""
    start = time.process_time()
    result = fn()
    return result, time.process_time() - start


def eager(model: Any, calls: Sequence[Call]) -> list[Any]:
    """The model's own results; the error where it does not take the sizes."""
    found: list[Any] = []
    for args, kwargs in calls:
        try:
            torch.manual_seed(1)
            found.append(model(*pytree.tree_map_only(torch.Tensor, torch.clone, args), **kwargs))
        except Exception as error:
            found.append(error)
    return found


def compare(run: Callable[..., Any], calls: Sequence[Call], expected: Sequence[Any]) -> list[str]:
    """For each call, `ok` or what is wrong; `eager raises` where the model itself does not take the sizes."""
    found = []
    for (args, kwargs), want in zip(calls, expected, strict=True):
        if isinstance(want, Exception):
            found.append(f"eager raises {checks.first_line(want)[:80]}")
            continue
        try:
            torch.manual_seed(1)
            found.append(checks.same_result(run(*args, **kwargs), want) or "ok")
        except Exception as error:
            found.append(checks.first_line(error))
    return found


def column(
    capture: Callable[[], Any], runner: Callable[[Any], Any], calls: Sequence[Call], expected: Sequence[Any]
) -> Row:
    """Capture once, and run at all sizes."""
    start = time.process_time()
    try:
        captured, seconds = timed(capture)
    except Exception as error:
        return {"ok": False, "seconds": time.process_time() - start, "error": checks.all_lines(error)[:600]}
    found = compare(runner(captured), calls, expected)
    wrong = [s for s in found if s != "ok" and not s.startswith("eager raises")]
    ok = not wrong and "ok" in found
    return {"traced": True, "ok": ok, "seconds": seconds, "sizes": found, "error": "; ".join(wrong)[:600] or None}


def check_sizes(st: Any, build: each_model.Build, export: bool, lengths: bool) -> Row:
    """Both columns of one model with these dimensions dynamic."""
    model, args, kwargs = build()
    first = next(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
    names = list(named(model, args, kwargs))[: len(args)]

    def inputs(batch: int, length: float) -> tuple[Args, Kwargs]:
        torch.manual_seed(batch)
        by_name = {name: resized(a, batch, length, first.shape[0], name) for name, a in zip(names, args, strict=True)}
        return tuple(by_name.values()), resized(kwargs, batch, length, first.shape[0])

    example = inputs(EXAMPLE, 1.0)
    shapes = shapes_of(named(model, *example), lengths)
    calls = [inputs(b, length if lengths else 1.0) for b, length in zip(BATCHES, LENGTHS, strict=True)]
    expected = eager(build()[0], calls)
    row: Row = {"ours": column(lambda: trace(st, model, example, shapes), lambda tr: tr, calls, expected)}
    if export:
        model = build()[0]
        row["export"] = column(
            lambda: torch.export.export(model, *example, dynamic_shapes=shapes),
            lambda ep: ep.module(),
            calls,
            expected,
        )
    if row["ours"].get("traced"):
        pairs = [
            (timed(lambda: st.trace(model, *example))[1], timed(lambda: trace(st, model, example, shapes))[1])
            for _ in range(3)
        ]
        row["static"], row["again"] = (min(times) for times in zip(*pairs, strict=True))
    return row


def trace(st: Any, model: Any, example: tuple[Args, Kwargs], shapes: Any) -> Any:
    """One more trace."""
    return st.trace(model, *example, dynamic_shapes=shapes)


def check(st: Any, build: each_model.Build, options: argparse.Namespace) -> Row:
    """The batch alone; then with the lengths, where the model has some."""
    with each_model.time_limit(options.limit):
        row = check_sizes(st, build, not options.no_export, lengths=False)
    model, args, kwargs = build()
    if any(key in SEQUENCES and isinstance(x, torch.Tensor) for key, x in named(model, args, kwargs).items()):
        with each_model.time_limit(options.limit):
            row["lengths"] = check_sizes(st, build, not options.no_export, lengths=True)
    return row


def sizes(part: Row) -> str:
    """How many sizes are equal, of those that eager takes."""
    if not part.get("traced"):
        return "-"
    taken = [s for s in part["sizes"] if not s.startswith("eager raises")]
    return f"{taken.count('ok')}/{len(taken)}"


def line(row: Row) -> list[str]:
    """The cells of one model."""
    export, ours = row.get("export", {}), row.get("ours", {})
    again, static, theirs = row.get("again"), row.get("static"), export.get("seconds")
    cells = ["ok" if export.get("traced") else "no" if export else "-", report.seconds(theirs), sizes(export), "|"]
    cells += ["ok" if ours.get("traced") else "no", report.seconds(static), report.seconds(again), sizes(ours)]
    cells += [f"{again / static:.1f}" if again and static else "-", "|"]
    cells += [f"{theirs / again:.1f}" if again and export.get("traced") else "-"]
    longer = row.get("lengths", {})
    pair = f"{sizes(longer.get('ours', {}))} ({sizes(longer.get('export', {}))})" if longer else ""
    return [row["model"], *cells, pair]


def report_rows(rows: Sequence[Row]) -> str:
    """The table, the totals and what is missed."""
    longer = [row["lengths"] | {"model": row["model"]} for row in rows if "lengths" in row]
    parts = [report.table([HEADER, *map(line, rows)]), "", *totals("batch", rows)]
    return "\n".join([*parts, *totals("batch and lengths", longer)])


def totals(what: str, rows: Sequence[Row]) -> list[str]:
    """The numbers that are judged, for one set of dynamic dimensions."""
    lines = [f"{what} dynamic, {len(rows)} models:"]
    for name, part in (("torch.export", "export"), ("scopetrace", "ours")):
        taken, right = sum(took(r, part) for r in rows), sum(report.is_ok(r, part) for r in rows)
        lines.append(f"  {name}: takes {taken}, equal to eager at all sizes {right}")
    mine = [r for r in rows if r.get("again")]
    both = [r for r in mine if took(r, "export")]
    if mine:
        ratios = sorted(r["again"] / r["static"] for r in mine)
        whole = sum(r["again"] for r in mine) / sum(r["static"] for r in mine)
        middle = ratios[len(ratios) // 2]
        lines.append(f"  over a static trace: {whole:.2f} in all, median {middle:.2f}, most {ratios[-1]:.2f}")
    if both:
        again, first = times_as_long(both, lambda r: r["again"]), times_as_long(both, lambda r: r["ours"]["seconds"])
        slow = [r["model"] for r in both if r["export"]["seconds"] / r["again"] < 10]
        lines.append(f"  torch.export over scopetrace, {len(both)} models: {again}; over its first trace: {first}")
        lines.append(f"  below 10: {', '.join(slow) or 'none'}")
    lost = [r["model"] for r in rows if report.is_ok(r, "export") and not report.is_ok(r, "ours")]
    lines += [f"  right by torch.export, not by scopetrace: {', '.join(lost) or 'none'}", "  scopetrace misses:"]
    missed = [r for r in rows if not report.is_ok(r, "ours")]
    lines += [f"    {r['model']}: {r.get('ours', {}).get('error') or r.get('error')}" for r in missed]
    return [*lines, ""]


def times_as_long(rows: Sequence[Row], seconds: Callable[[Row], float]) -> str:
    """How many times as long torch.export takes, in all and in the median."""
    whole = sum(r["export"]["seconds"] for r in rows) / sum(map(seconds, rows))
    ratios = sorted(r["export"]["seconds"] / seconds(r) for r in rows)
    return f"{whole:.1f} in all, median {ratios[len(ratios) // 2]:.1f}"


def took(row: Row, part: str) -> bool:
    """Whether the model was captured."""
    return bool(row.get(part, {}).get("traced"))


def main(argv: list[str] | None = None) -> int:
    """Check the models; the exit code is 1 if we miss one that torch.export gets right."""
    parser = each_model.parser(__doc__, "dynamic.jsonl")
    parser.add_argument("--no-export", action="store_true", help="leave torch.export's column out")
    parser.add_argument("--limit", type=int, default=600, help="seconds for a model with one choice of dynamic sizes")
    options = parser.parse_args(argv)
    st = import_scopetrace()
    with torch.no_grad():
        rows = each_model.run(options, lambda _, build: check(st, build, options), line, report_rows)
    return int(any(report.is_ok(row, "export") and not report.is_ok(row, "ours") for row in rows))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
