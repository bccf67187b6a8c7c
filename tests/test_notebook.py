"""Notebooks in examples/: their cells run in order, and print what is stored beside them."""

import ast
import contextlib
import io
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


def run(source, namespace):
    """What a cell prints, and what its last line shows."""
    tree = ast.parse(source)
    is_shown = isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";")
    last = ast.Expression(tree.body.pop().value) if is_shown else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "notebook", "exec"), namespace)
        shown = None if last is None else eval(compile(last, "notebook", "eval"), namespace)
    return printed.getvalue(), shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_shows_what_its_cells_give(path):
    namespace = {"__name__": "__main__"}
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    for cell in cells:
        printed, shown = run("".join(cell["source"]), namespace)
        assert printed == "".join(text for o in cell["outputs"] if "text" in o for text in o["text"])
        for data in (o["data"] for o in cell["outputs"] if "data" in o):
            assert repr(shown) == "".join(data["text/plain"])
            assert shown._repr_html_() == "".join(data["text/html"])
