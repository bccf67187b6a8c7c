"""The zoo's table and totals, as plain text."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]

HEADER = [
    *("model", "export", "s", "nodes", "same", "|"),
    *(
        "ours",
        "1st s",
        "s",
        "+gm s",
        "nodes",
        "same",
        "lint",
        "calls",
        "values",
        "state",
        "ops-diff",
        "raw",
        "|",
        "ratio",
    ),
]


def mark(part: Row, *keys: str) -> str:
    """`ok`, `no` or `-` (not reached) for the checks of these names."""
    if any(key not in part for key in keys):
        return "-"
    return "no" if any(part[key] for key in keys) else "ok"


def seconds(value: float | None) -> str:
    """Seconds with two digits, or a dash."""
    return "-" if value is None else f"{value:.2f}"


def trace_seconds(part: Row) -> float | None:
    """Tracing and the GraphModule together."""
    return part["seconds"] + part["graph_seconds"] if "graph_seconds" in part else None


def ratio(row: Row) -> str:
    """How many times faster than torch.export, GraphModule included."""
    ours, theirs = trace_seconds(row.get("again", {})), row.get("export", {})
    if not ours or not theirs.get("traced"):
        return "-"
    return f"{theirs['seconds'] / ours:.1f}"


def line(row: Row) -> list[str]:
    """The cells of one model."""
    export, ours, again = row.get("export", {}), row.get("ours", {}), row.get("again", {})
    left = ["ok" if export.get("traced") else "no" if export else "-"]
    left += [seconds(export.get("seconds")), str(export.get("nodes", "-")), mark(export, "equal", "equal2")]
    right = ["ok" if ours.get("traced") else "no" if ours else "-", seconds(ours.get("seconds"))]
    right += [seconds(again.get("seconds")), seconds(again.get("graph_seconds"))]
    right += [str(ours.get("nodes", "-")), mark(ours, "equal", "equal2")]
    right += [mark(ours, "lint"), mark(ours, "calls") + "+" * bool(ours.get("n_extra"))]
    right += ["ok" if ours.get("values_compared") and not ours["values"] else "no" if ours.get("values") else "-"]
    right += [mark(ours, "state"), str(row.get("op_diff", "-")), str(row.get("op_diff_raw", "-"))]
    return [row["model"], *left, "|", *right, "|", ratio(row)]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, the first to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        rest = (cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *rest]))
    return "\n".join(lines)


def category(reason: str) -> str:
    """A reason without the numbers and names that differ from model to model."""
    text = re.sub(r"\bu\d+\b|\b\d+(\.\d+)?(e-?\d+)?\b", "#", reason)
    text = re.sub(r"'[^']*'|\[[^\]]*\]", "'…'", text)
    return text.partition(" / source")[0][:170]


def reasons(part: Row, row: Row) -> list[str]:
    """Why one column is not ok, one entry for each failed check."""
    if row.get("broken"):
        return [f"broken: {row['broken']}"]
    if not part:
        return [f"not reached: {row.get('died', 'no result')}"]
    keys = ("equal", "equal2", "lint", "calls", "values", "state")
    found = [f"{key}: {part[key]}" for key in keys if part.get(key)]
    return found or [part.get("error") or "unknown"]


def is_ok(row: Row, column: str) -> bool:
    """Whether every check of a column passed."""
    return bool(row.get(column, {}).get("ok"))


def misses(rows: Iterable[Row], column: str) -> list[str]:
    """The reasons of a column's misses: first counted by kind, then model by model."""
    found = [(row["model"], reasons(row.get(column, {}), row)) for row in rows if not is_ok(row, column)]
    kinds = Counter(category(rs[0]) for _, rs in found)
    lines = [f"  {n:4d} x {kind}" for kind, n in kinds.most_common()]
    for model, rs in found:
        lines += [f"  {model}", *(f"      {reason[:400]}" for reason in rs)]
    return lines


def totals(rows: Sequence[Row]) -> list[str]:
    """The numbers that are judged."""
    taken = [row for row in rows if row.get("export", {}).get("traced")]
    right = [row for row in rows if is_ok(row, "export")]
    ours = [row for row in rows if is_ok(row, "ours")]
    both = [row for row in taken if "again" in row]
    theirs_s = sum(row["export"]["seconds"] for row in both)
    ours_s, first_s = (sum(trace_seconds(row[key]) or 0.0 for row in both) for key in ("again", "ours"))
    traced = sum(bool(row.get("ours", {}).get("traced")) for row in rows)
    lines = [
        f"models: {len(rows)}",
        f"torch.export: takes {len(taken)}, right on {len(right)}",
        f"scopetrace: takes {traced}, every check passes on {len(ours)}",
        f"of the {len(taken)} that torch.export takes, every check passes on {sum(is_ok(r, 'ours') for r in taken)}",
        f"time on the {len(both)} that both take: torch.export {theirs_s:.1f} s, "
        f"scopetrace with GraphModule {ours_s:.1f} s",
    ]
    if ours_s and first_s:
        lines[-1] += f", ratio {theirs_s / ours_s:.1f}"
        lines.append(f"(first trace of each, before torch.export warmed up anything: {first_s:.1f} s)")
    if any(row.get("export_reused") for row in rows):
        lines.append("(torch.export's column is of an earlier run: --reuse-export)")
    return lines


def op_totals(rows: Sequence[Row]) -> list[str]:
    """Which ops differ from torch.export's, over all models."""
    diff: Counter[str] = Counter()
    for row in rows:
        diff.update({name: abs(n) for name, n in row.get("op_diff_items", {}).items()})
    same = sum(row.get("op_diff") == 0 for row in rows)
    compared = sum("op_diff" in row for row in rows)
    lines = [f"ops equal to torch.export's (in-place counted as functional, without checks): {same} of {compared}"]
    return lines + [f"  {n:5d}  {name}" for name, n in diff.most_common(15)]


def beside(row: Row) -> str:
    """A remark on a model that torch.export takes and we miss."""
    return "" if is_ok(row, "export") else "  (torch.export's graph is not equal to eager either)"


def report(rows: Sequence[Row]) -> str:
    """Everything that `make zoo` prints at the end."""
    cells = [line(row) for row in rows]
    lost = [row for row in rows if row.get("export", {}).get("traced") and not is_ok(row, "ours")]
    parts = [table([HEADER, *cells]), "", *totals(rows), "", *op_totals(rows), ""]
    tried = [row for row in rows if row.get("export") or row.get("died") or row.get("broken")]
    parts += ["torch.export misses:", *misses(tried, "export"), ""]
    parts += ["scopetrace misses:", *misses(rows, "ours"), ""]
    parts += [
        f"taken by torch.export, missed by scopetrace ({len(lost)}):",
        *(f"  {row['model']}{beside(row)}" for row in lost),
    ]
    return "\n".join(parts)
