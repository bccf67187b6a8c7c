"""Prints what each room of src/scopetrace holds beside its budget, and fails where a room has more: `make budgets`.

A room is a folder of src/scopetrace; files beside the folders are the room `top`. Counted are lines, as `wc -l` does;
names that say nothing; and docstrings that refer to a base class. A count may only shrink: `--lower` writes counts that
are smaller than their budgets into budgets.toml. To raise one is an edit of that file by hand, whose commit says why.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, FILE = ROOT / "src" / "scopetrace", ROOT / "budgets.toml"

EMPTY_NAMES = {"found", "given", "own", "made"}
"""Names of which no reader knows what they hold: operands, matches, example inputs, results."""
NAME_FIELDS = ("id", "arg", "attr", "name", "asname", "rest", "kwd_attrs", "names")
"""Where syntax trees keep identifiers. Trees, as tokens of f-strings differ between versions of Python."""
BASE_DOCSTRING = "As the base's."

HEADER = """\
# What each room of src/scopetrace may hold at most, which only shrinks; `make budgets` prints it beside what it holds.
# lines: as `wc -l`. names: identifiers that are `found`, `given`, `own` or `made`. docstrings: those "As the base's."
"""


@dataclasses.dataclass(frozen=True)
class Count:
    """What is counted in a room, or the most that may be."""

    lines: int = 0
    names: int = 0
    docstrings: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.lines + other.lines, self.names + other.names, self.docstrings + other.docstrings)


def count(source: str) -> Count:
    """That of one file."""
    tree = ast.parse(source)
    names = sum(name in EMPTY_NAMES for node in ast.walk(tree) for name in identifiers(node))
    return Count(source.count("\n"), names, sum(map(refers_to_base, ast.walk(tree))))


def identifiers(node: ast.AST) -> Iterator[str]:
    """The names that stand in a node itself."""
    for field in NAME_FIELDS:
        value = getattr(node, field, None)
        yield from (part for part in (value if isinstance(value, list) else [value]) if isinstance(part, str))


def refers_to_base(node: ast.AST) -> bool:
    """Whether it is a function or class whose docstring says only that it is as in the base class."""
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) == BASE_DOCSTRING


def rooms(folder: Path) -> dict[str, Count]:
    """The counts by room."""
    counts: dict[str, Count] = {}
    for path in sorted(folder.rglob("*.py")):
        room, *below = path.relative_to(folder).parts
        name = room if below else "top"
        counts[name] = counts.get(name, Count()) + count(path.read_text(encoding="utf-8"))
    return counts


def problems(counts: Mapping[str, Count], budgets: Mapping[str, Count]) -> Iterator[str]:
    """What has more than its budget, and the rooms without one."""
    for room, has in counts.items():
        if room not in budgets:
            yield f"{room}: no budget; add `{line(room, has)}` to budgets.toml"
            continue
        for kind, most in dataclasses.asdict(budgets[room]).items():
            n = getattr(has, kind)
            if n > most:
                yield f"{room}: {n:,} {kind}, {n - most:,} more than its budget of {most:,}"
    yield from (f"{room}: in budgets.toml, and not in the source" for room in budgets.keys() - counts.keys())


def line(room: str, counts: Count) -> str:
    """A room's line of budgets.toml."""
    return f"{room} = {{ " + ", ".join(f"{kind} = {n}" for kind, n in dataclasses.asdict(counts).items()) + " }"


def text_of(budgets: Mapping[str, Count], targets: Mapping[str, int]) -> str:
    """budgets.toml."""
    rows = [line(room, budgets[room]) for room in sorted(budgets)]
    aims = [f'"{group}" = {n}' for group, n in targets.items()]
    return "\n".join(
        [HEADER, "[budgets]", *rows, "", "# The lines that groups of rooms are to have.", "[targets]", *aims, ""]
    )


def table(counts: Mapping[str, Count], budgets: Mapping[str, Count], targets: Mapping[str, int]) -> Iterator[str]:
    """What `make budgets` prints: rooms, and then groups of rooms with the lines that they are to have."""
    yield f"{'room':16}{'lines':>8}{'budget':>8}{'names':>8}{'budget':>8}{'docstrings':>12}{'budget':>8}"
    everything = {**counts, "all": sum(counts.values(), Count())}
    most = {**budgets, "all": sum(budgets.values(), Count())}
    for room, has in everything.items():
        b = most.get(room, Count())
        yield (f"{room:16}{has.lines:8,}{b.lines:8,}{has.names:8,}{b.names:8,}{has.docstrings:12,}{b.docstrings:8,}")
    yield f"\n{'rooms':56}{'lines':>8}{'target':>8}"
    for group, target in targets.items():
        lines = sum(everything.get(room, Count()).lines for room in group.split())
        yield f"{group:56}{lines:8,}{target:8,}"


def main(arguments: list[str]) -> int:
    """Print the table, and what is over its budget on standard error; 1 where there is such."""
    content = tomllib.loads(FILE.read_text(encoding="utf-8"))
    budgets = {room: Count(**counts) for room, counts in content["budgets"].items()}
    counts, targets = rooms(SOURCE), content["targets"]
    if "--lower" in arguments:
        budgets = lowered(counts, budgets)
        FILE.write_text(text_of(budgets, targets), encoding="utf-8")
    print("\n".join(table(counts, budgets, targets)))
    over = list(problems(counts, budgets))
    print(*over, sep="\n", end="\n" * bool(over), file=sys.stderr)
    return int(bool(over))


def lowered(counts: Mapping[str, Count], budgets: Mapping[str, Count]) -> dict[str, Count]:
    """The budgets with what is smaller now; those of rooms that are gone are gone."""
    kinds = [field.name for field in dataclasses.fields(Count)]
    return {
        room: Count(*(min(getattr(counts[room], kind), getattr(most, kind)) for kind in kinds))
        for room, most in budgets.items()
        if room in counts
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
