"""Which models of the zoo, and where their rows go: what the scripts with one row a model have in common."""

from __future__ import annotations

import argparse
import fnmatch
import json
import pathlib
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent

Row = dict[str, Any]


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


def named(folder: pathlib.Path, only: list[str] | None) -> list[str]:
    """The models of the zoo in a folder that the patterns name, in the order of models.txt."""
    names = (folder / "models.txt").read_text().split()
    patterns = [p for given in only or ["*"] for p in given.split(",")]
    return [n for n in names if any(fnmatch.fnmatch(n, p) or p in n for p in patterns)]


def wanted(options: argparse.Namespace) -> list[str]:
    """The models chosen on the command line."""
    return named(options.zoo, options.only)[options.offset :: options.every]


def kept_rows(options: argparse.Namespace) -> dict[str, Row]:
    """By model, the rows of earlier runs that are to be kept."""
    if not options.out.exists() or not (options.resume or options.report_only):
        return {}
    return {row["model"]: row for row in map(json.loads, options.out.read_text().splitlines())}
