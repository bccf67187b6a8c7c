"""What `make budgets` counts, refuses and writes."""

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "budgets.py"
spec = importlib.util.spec_from_file_location("budgets", SCRIPT)
budgets = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = budgets  # where dataclasses look up their types
spec.loader.exec_module(budgets)
Count = budgets.Count


NAMES = {
    "found = 1": 1,
    "found: int = 1": 1,
    "x.given": 1,
    "f(own=1)": 1,
    "def made(): ...": 1,
    "class own: ...": 1,
    "def f(given, *made, own=1, **found): ...": 4,
    "lambda found: found": 2,
    "from a import b as found": 1,
    "from a import found": 1,
    "import found": 1,
    "try: ...\nexcept E as given: ...": 1,
    "def f():\n    global made, own": 2,
    "match x:\n    case [given, *found]: ...\n    case {'a': 1, **own}: ...\n    case A(made=1) as made: ...": 5,
    "f'{found} {x!r:{given}}'": 2,
    "[own for own in x]": 2,
    "not_found = foundation = 'found'  # found": 0,
}


@pytest.mark.parametrize("source", NAMES)
def test_names_are_counted(source):
    assert budgets.count(source).names == NAMES[source]


def test_lines_and_docstrings_are_counted(tmp_path):
    (tmp_path / "ir" / "inner").mkdir(parents=True)
    (tmp_path / "top.py").write_text("x = 1\n")
    (tmp_path / "ir" / "a.py").write_text('def f():\n    """As the base\'s."""\n')
    (tmp_path / "ir" / "inner" / "b.py").write_text('\n\ndef f():\n    """As the base\'s, but sorted."""\n')
    assert budgets.rooms(tmp_path) == {"top": Count(1), "ir": Count(6, 0, 1)}


def test_what_is_over_its_budget_is_named():
    counts = {"ir": Count(10, 2), "new": Count(5)}
    assert list(budgets.problems(counts, {"ir": Count(9, 2), "gone": Count(1)})) == [
        "ir: 10 lines, 1 more than its budget of 9",
        "new: no budget; add `new = { lines = 5, names = 0, docstrings = 0 }` to budgets.toml",
        "gone: in budgets.toml, and not in the source",
    ]


def test_budgets_are_only_lowered(tmp_path, monkeypatch):
    (tmp_path / "ir").mkdir()
    (tmp_path / "ir" / "a.py").write_text("found = 1\nx = 2\n")
    file = tmp_path / "budgets.toml"
    file.write_text(budgets.text_of({"ir": Count(9, 0, 3), "gone": Count(1)}, {"ir all": 5}))
    monkeypatch.setattr(budgets, "SOURCE", tmp_path)
    monkeypatch.setattr(budgets, "FILE", file)
    assert budgets.main(["--lower"]) == 1
    content = tomllib.loads(file.read_text())
    assert content["budgets"] == {"ir": {"lines": 2, "names": 0, "docstrings": 0}}
    assert content["targets"] == {"ir all": 5}
