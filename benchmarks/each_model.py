"""One row for each model of the zoo: the command line, the loop and the file that the scripts have in common.

options -> names of models -> check(name, build) -> a row, as a line of JSON in the file --out -> table(rows)
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import gc
import json
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent

Row = dict[str, Any]
Build = Callable[[], Any]
"""Makes the model, its arguments and its keyword arguments."""


def parser(description: str | None, rows: str) -> argparse.ArgumentParser:
    """The options; `rows` is the name of the file of the rows."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--zoo", type=pathlib.Path, default=ROOT.parent / "shared" / "zoo", help="folder of the zoo")
    made.add_argument("--only", action="append", metavar="PATTERN", help="names or globs, also comma-separated")
    made.add_argument("--every", type=int, default=1, help="each n-th model")
    made.add_argument("--offset", type=int, default=0, help="the first of them")
    made.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results" / rows)
    made.add_argument("--resume", action="store_true", help="keep the rows of --out, do the others")
    made.add_argument("--report-only", action="store_true", help="only print the table of --out")
    return made


def has_zoo(options: argparse.Namespace) -> bool:
    """Whether there is a zoo; says so if there is none."""
    found: bool = (options.zoo / "zoo.py").exists()
    if not found:
        print(f"zoo not present: no zoo.py in {options.zoo} (give its folder with --zoo)")
    return found


def named(folder: pathlib.Path, only: list[str] | None) -> list[str]:
    """The models of the zoo in a folder that the patterns name, in the order of models.txt."""
    names = (folder / "models.txt").read_text().split()
    patterns = [p for given in only or ["*"] for p in given.split(",")]
    return [n for n in names if any(fnmatch.fnmatch(n, p) or p in n for p in patterns)]


def wanted(options: argparse.Namespace) -> list[str]:
    """The models chosen on the command line."""
    return named(options.zoo, options.only)[options.offset :: options.every]


def read_rows(path: pathlib.Path) -> dict[str, Row]:
    """The rows of a file by model; the last one of a model counts."""
    if not path.exists():
        return {}
    return {row["model"]: row for row in map(json.loads, path.read_text().splitlines())}


def start_file(path: pathlib.Path, rows: dict[str, Row]) -> None:
    """Begin a file with the rows that stand."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))


def append(path: pathlib.Path, row: Row) -> None:
    """Add one row."""
    with path.open("a") as file:
        print(json.dumps(row, default=str), file=file)


def run(
    options: argparse.Namespace,
    check: Callable[[str, Build], Row],
    line: Callable[[Row], list[str]],
    table: Callable[[list[Row]], str],
) -> list[Row]:
    """Check the models that have no row yet, in this process, print the table of all rows and return them.

    An exception of `check` goes into the row, as "error".
    """
    from benchmarks import checks, models

    rows = read_rows(options.out) if options.resume or options.report_only else {}
    if not options.report_only:
        if not has_zoo(options):
            return []
        models.quiet()
        zoo = models.load_zoo(options.zoo.resolve())
        start_file(options.out, rows)
        for name in [n for n in wanted(options) if n not in rows]:
            row: Row = {"model": name}
            try:
                row |= check(name, lambda name=name: zoo.build(name))  # type: ignore[misc]
            except Exception as error:
                row["error"] = checks.first_line(error)
            rows[name] = row
            append(options.out, row)
            print("  ".join(line(row)), row.get("error", ""), flush=True)
            gc.collect()
    print("\n" + table([*rows.values()]))
    return [*rows.values()]


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after so many seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
