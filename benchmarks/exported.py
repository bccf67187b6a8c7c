"""`Trace.to_exported_program` on the models of the zoo, beside torch.export.

    python -m benchmarks.exported                       # all models of the zoo (--zoo FOLDER), one process
    python -m benchmarks.exported --only 'hf:*bert*' --no-export
    python -m benchmarks.exported --every 4 --offset 1  # each fourth model, from the second
    python -m benchmarks.exported --report-only         # print the last table again

Columns:
    ours s    seconds of `st.trace` and `.to_exported_program()`, the latter alone as ep s; of a second time, after
              torch.export ran in between, so that both find warm caches
    (all without autograd)
    export s  seconds of `torch.export.export` in the same process
    ratio     the second over the first
    equal     `ep.module()` gives what eager gives
    unflat    `torch.export.unflatten(ep)` too
    modules   unflattened modules, called with what their originals got, give what these gave: right / with a signature
    signed    module calls with a signature / all module calls with a module of the model
    saved     what `torch.export.save` and `load` give back, too
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

ROOT = pathlib.Path(__file__).resolve().parent.parent
if __package__ in {None, ""}:
    sys.path[0] = str(ROOT)

from benchmarks import checks, each_model, oracle, report  # noqa: E402
from benchmarks.models import import_scopetrace  # noqa: E402

Row = each_model.Row
Calls = list[tuple[str, tuple[Any, ...], dict[str, Any], Any]]


def copied(x: Any) -> Any:
    """The structure with copies of its tensors."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, x)


def eager_calls(model: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Calls]:
    """The result of a run, and of each module call by forward hooks: name, arguments, result."""
    seen: Calls = []
    open_calls: list[Any] = []

    def enter(_module: Any, args: Any, kwargs: Any) -> None:
        open_calls.append((copied(args), copied(kwargs)))

    def leave(name: str) -> Callable[..., None]:
        return lambda _module, _args, _kwargs, out: seen.append((name, *open_calls.pop(), copied(out)))

    with contextlib.ExitStack() as stack, oracle.exporting_flags():
        for name, module in model.named_modules():
            if name and not isinstance(module, torch.jit.ScriptModule):
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave(name), with_kwargs=True).remove)
        torch.manual_seed(0)
        return model(*copied(args), **copied(kwargs)), seen


def run(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The result on copies of the arguments, with the random numbers of the first run."""
    torch.manual_seed(0)
    return fn(*copied(args), **copied(kwargs))


def reason(fn: Callable[[], Any], expected: Any) -> str | None:
    """None where `fn()` gives what is expected, else why not."""
    try:
        return checks.same_result(fn(), expected)
    except Exception as error:
        return checks.first_line(error)


def check_modules(unflat: torch.nn.Module, ep: Any, seen: Calls) -> Row:
    """Call each unflattened module that has a signature with what its original got."""
    signed = {e.fqn for e in ep.module_call_graph if e.signature is not None and e.fqn}
    right, wrong = 0, []
    count: collections.Counter[str] = collections.Counter()
    for name, args, kwargs, out in seen:
        call = f"{name}@{count[name]}" if count[name] else name
        count[name] += 1
        if call in signed:
            bad = reason(lambda n=name, a=args, k=kwargs: run(unflat.get_submodule(n), a, k), out)  # type: ignore[misc]
            right += bad is None
            wrong += [f"{call}: {bad}"] if bad else []
    return {"right": right, "wrong": wrong[:5], "n_wrong": len(wrong), "signed": len(signed), "calls": len(seen)}


def saved(ep: Any) -> torch.nn.Module:
    """The module after a file."""
    file = io.BytesIO()
    torch.export.save(ep, file)
    file.seek(0)
    module: torch.nn.Module = torch.export.load(file).module()
    return module


def check(st: Any, build: Callable[[], Any], options: argparse.Namespace) -> Row:
    """One row."""
    model, args, kwargs = build()
    row: Row = {}
    ep = ours(st, model, args, kwargs, row)
    if options.no_unflatten:  # large models: the values of all calls take memory
        expected, seen = run(model, args, kwargs), []
    else:
        expected, seen = eager_calls(model, args, kwargs)
    row["equal"] = reason(lambda: run(ep.module(), args, kwargs), expected)
    if not options.no_unflatten:
        unflat: Any = None
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                unflat = torch.export.unflatten(ep)
                row["unflat"] = reason(lambda: run(unflat, args, kwargs), expected)
                row |= check_modules(torch.export.unflatten(ep), ep, seen)
            except Exception as error:
                row["unflat"] = checks.first_line(error)
    row["saved"] = reason(lambda: run(saved(ep), args, kwargs), expected) if options.save else "-"
    if not options.no_export:
        model, args, kwargs = build()
        start = time.perf_counter()
        try:
            torch.export.export(model, args, kwargs)
            row["export"] = time.perf_counter() - start
        except Exception as error:
            row["export_error"] = checks.first_line(error)
        ours(st, *build(), row)
    return row


def ours(st: Any, model: torch.nn.Module, args: Any, kwargs: Any, row: Row) -> Any:
    """The ExportedProgram; its seconds go into the row."""
    start = time.perf_counter()
    tr = st.trace(model, args, kwargs)
    traced = time.perf_counter()
    ep = tr.to_exported_program(preserve_module_call_signature=("*",))
    row |= {"ours": time.perf_counter() - start, "ep": time.perf_counter() - traced, "nodes": len(ep.graph.nodes)}
    return ep


def mark(row: Row, key: str) -> str:
    """`ok`, `no`, or `-` where it was not checked."""
    return "-" if row.get(key, "-") == "-" else "no" if row[key] else "ok"


def line(row: Row) -> list[str]:
    """The cells of one model."""
    if "error" in row:
        return [row["model"], *["-"] * 10]
    export = row.get("export")
    return [
        row["model"],
        str(row["nodes"]),
        f"{row['ours']:.2f}",
        f"{row['ep']:.2f}",
        f"{export:.2f}" if export else "-",
        f"{export / row['ours']:.1f}" if export else "-",
        mark(row, "equal"),
        mark(row, "unflat"),
        f"{row['right']}/{row['right'] + row['n_wrong']}" if "right" in row else "-",
        f"{row['signed']}/{row['calls']}" if "right" in row else "-",
        mark(row, "saved"),
    ]


def table(rows: list[Row]) -> str:
    """The table, what is wrong, and sums."""
    head = ["model", "nodes", "ours s", "ep s", "export s", "ratio", "equal", "unflat", "modules", "signed", "saved"]
    text = [report.table([head, *map(line, rows)]), ""]
    for row in rows:
        bad = [f"{k}: {row[k]}" for k in ("error", "equal", "unflat", "saved") if row.get(k, "-") not in (None, "-")]
        bad += [f"module {w}" for w in row.get("wrong", ())[:2]]
        text += [f"{row['model']}: {b[:300]}" for b in bad]
    done = [r for r in rows if "error" not in r]
    timed = [r for r in done if r.get("export")]
    text += [
        "",
        f"{len(rows)} models, {len(done)} with a program, {sum(r['equal'] is None for r in done)} equal to eager, "
        f"{sum(r.get('unflat', '-') is None for r in done)} unflattened equal, "
        f"modules right {sum(r.get('right', 0) for r in done)} of "
        f"{sum(r.get('right', 0) + r.get('n_wrong', 0) for r in done)}, "
        f"calls with a signature {sum(r.get('signed', 0) for r in done)} of {sum(r.get('calls', 0) for r in done)}",
    ]
    if timed:
        ours, export = sum(r["ours"] for r in timed), sum(r["export"] for r in timed)
        text.append(f"seconds: ours {ours:.1f}, torch.export {export:.1f}, ratio {export / ours:.1f}")
    return "\n".join(text)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = each_model.parser(__doc__, "exported.jsonl")
    parser.add_argument("--no-export", action="store_true", help="leave torch.export out")
    parser.add_argument("--no-unflatten", action="store_true", help="leave torch.export.unflatten out")
    parser.add_argument("--save", action="store_true", help="save and load, too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Check the models; the exit code is 1 if a program differs from eager."""
    options = parse(argv)
    st = import_scopetrace()
    assert st is not None
    with torch.no_grad():
        if not options.report_only:
            warm_up(st)
        rows = each_model.run(options, lambda _, build: check(st, build, options), line, table)
    return int(any(row.get("equal") for row in rows))


def warm_up(st: Any) -> None:
    """Import and fill caches on both sides with a first model."""
    model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    st.trace(model, (x,)).to_exported_program()
    torch.export.export(model, (x,))


if __name__ == "__main__":
    sys.exit(main())
