"""Trace every model of the zoo beside torch.export, and check all that a trace promises.

    python -m benchmarks.zoo                      # all models of the zoo (--zoo FOLDER), two processes
    python -m benchmarks.zoo --only 'hf:*moe*' --no-export
    python -m benchmarks.zoo --resume             # go on after an interruption
    python -m benchmarks.zoo --report-only        # print the last table again

Columns:
    1st s     seconds of `st.trace` on a model that never ran
    s         the same once more, after torch.export ran in between: so both find warm caches
    +gm s     seconds of `.graph_module`
    same      equal to eager on the example inputs and on other ones
    calls     equal to what a patched `_call_impl` saw; `ok+`: besides, direct calls of `module.forward`, which it
              cannot see and which a count of forward's runs confirms
    values    in a run of the graph every call's tensors have the values that they have in eager
    state     tracing left the model, the random number generators and the process as they were
    ops-diff  size of the multiset difference to torch.export's ops that some output or effect needs, an in-place op
              counted as its functional twin, without checks and symbol arithmetic; `raw`: with them
    ratio     torch.export's seconds over `s` and `+gm s`
"""

import argparse
import json
import os
import pathlib
import queue
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
if __package__ in {None, ""}:
    sys.path[0] = str(ROOT)

from benchmarks import each_model, opdiff, report  # noqa: E402

Row = each_model.Row


class Worker:
    """One subprocess that checks a list of models; iterating gives its messages."""

    def __init__(self, names: list[str], options: argparse.Namespace) -> None:
        """Start it."""
        command = [sys.executable, "-m", "benchmarks.worker", "--zoo", str(options.zoo), *names]
        command += ["--no-export"] * (options.no_export or options.reuse_export) + ["--mutable"] * options.mutable
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.timeout = options.timeout
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=self.log, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        self.died: str | None = None

    def __iter__(self) -> Iterator[Row]:
        """The messages up to the end of the process, which is killed when it says nothing for too long."""
        assert self.process.stdout is not None
        buffer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while chunk := self._read(selector):
                *lines, buffer = (buffer + chunk).split(b"\n")
                yield from map(json.loads, lines)
        self._finish()

    def _read(self, selector: selectors.BaseSelector) -> bytes:
        """The next bytes; none at the end or when nothing came for the length of the timeout."""
        assert self.process.stdout is not None
        if not selector.select(self.timeout):
            self.died = f"timeout: nothing for {self.timeout} s"
            self.process.kill()
            return b""
        return os.read(self.process.stdout.fileno(), 1 << 16)

    def _finish(self) -> None:
        code = self.process.wait()
        if code and self.died is None:
            self.log.seek(0)
            self.died = f"exit {code}: {last_words(self.log.read())}"
        self.log.close()


def last_words(log: str) -> str:
    """The lines of a process's stderr that say why it ended: faulthandler's top frames, else the last ones."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    fatal = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    return " / ".join(lines[-3:] if fatal is None else lines[fatal : fatal + 5])[:500]


class Run:
    """The models still to do, shared by the threads that each drive one worker after the other."""

    def __init__(self, names: list[str], done: dict[str, Row], options: argparse.Namespace) -> None:
        """Queue these models; `done` holds the rows that stand and gets the new ones."""
        self.options = options
        self.rows = done
        self.total = len(names) + len(done)
        self.todo: queue.Queue[list[str]] = queue.Queue()
        self.lock = threading.Lock()
        for i in range(0, len(names), options.chunk):
            self.todo.put(names[i : i + options.chunk])

    def drive(self) -> None:
        """Take chunks until none is left; a chunk cut short goes on in a fresh worker."""
        while True:
            try:
                names = self.todo.get_nowait()
            except queue.Empty:
                return
            while names:
                names = self._chunk(names)

    def _chunk(self, names: list[str]) -> list[str]:
        """Check these models; returns those still to do after a crash."""
        left = list(names)
        row: Row = {}
        worker = Worker(names, self.options)
        for message in worker:
            row |= message
            if row.pop("done", False):
                left.remove(row["model"])
                self._keep(row)
                row = {}
        if worker.died and left:
            row = {"model": left[0]} | row | {"died": f"{worker.died} at stage {row.get('stage', 'start')}"}
            left.remove(row["model"])
            self._keep(row)
        return left

    def _keep(self, row: Row) -> None:
        with self.lock:
            finish_row(row, self.options)
            self.rows[row["model"]] = row
            each_model.append(self.options.out, row)
            if row.get("export") and not row.get("export_reused"):
                each_model.append(export_file(self.options.out), {"model": row["model"], "export": row["export"]})
            ours, export = row.get("ours", {}), row.get("export", {})
            state = "ok" if ours.get("ok") else "MISS " + report.reasons(ours, row)[0][:150]
            beside = "" if not export else "  (torch.export ok)" if export.get("ok") else "  (torch.export misses)"
            print(f"[{len(self.rows):3d}/{self.total}] {row['model']:45s} {state}{beside}", flush=True)


def export_file(out: pathlib.Path) -> pathlib.Path:
    """Where torch.export's columns are kept from run to run, for `--reuse-export`."""
    return out.with_suffix(".export.jsonl")


def finish_row(row: Row, options: argparse.Namespace) -> None:
    """Add what needs both columns."""
    if options.reuse_export and row["model"] in options.earlier:
        row["export"] = options.earlier[row["model"]]
        row["export_reused"] = True
    if "ours" in row and "export" in row:
        row.update(opdiff.compare_ops(row["ours"], row["export"]))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = each_model.parser(__doc__, "zoo.jsonl")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--chunk", type=int, default=10, help="models for each process")
    parser.add_argument("--timeout", type=float, default=600, help="seconds without a sign of life")
    parser.add_argument("--retry", action="store_true", help="with --resume: do those again that we missed")
    parser.add_argument("--no-export", action="store_true", help="leave torch.export's column out")
    parser.add_argument("--reuse-export", action="store_true", help="torch.export's column of earlier runs")
    parser.add_argument("--mutable", action="store_true", help="trace with functional=False")
    return parser.parse_args(argv)


def earlier_rows(options: argparse.Namespace) -> dict[str, Row]:
    """What of an earlier run stands."""
    earlier = each_model.read_rows(export_file(options.out))
    options.earlier = {name: row["export"] for name, row in earlier.items()}
    if not (options.resume or options.report_only):
        return {}
    rows = each_model.read_rows(options.out)
    return {n: r for n, r in rows.items() if not options.retry or report.is_ok(r, "ours")}


def main(argv: list[str] | None = None) -> int:
    """Run the zoo; the exit code is 1 if we miss a model that torch.export gets right."""
    options = parse(argv)
    if not each_model.has_zoo(options):
        return 0
    options.zoo = options.zoo.resolve()
    names = each_model.wanted(options)
    rows = {n: r for n, r in earlier_rows(options).items() if n in names}
    if not options.report_only:
        each_model.start_file(options.out, rows)
        run_all([n for n in names if n not in rows], rows, options)
    ordered = [rows[n] for n in names if n in rows]
    print("\n" + report.report(ordered) if ordered else "no models")
    return int(any(report.is_ok(r, "export") and not report.is_ok(r, "ours") for r in ordered))


def run_all(names: list[str], rows: dict[str, Row], options: argparse.Namespace) -> None:
    """Check these models in `--jobs` threads, each with its worker; adds to `rows`."""
    start = time.perf_counter()
    run = Run(names, rows, options)
    threads = [threading.Thread(target=run.drive) for _ in range(max(1, options.jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{len(names)} models in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
