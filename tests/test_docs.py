"""The pages for readers: every Python block and every `scopetrace` command runs, and prints what the page says.

A page is one program: its ```python blocks run in order in one module named `model`, in an empty directory. A ```text
block right after a Python block is what that block prints. In a ```console block, the lines after `$ scopetrace ...`
are what the command prints; other commands (pip, make) are not run. In expected output `…` stands for any text on a
line, and a line with nothing else for any number of lines.

A block whose first line is `# needs: PACKAGE, ...` is left out where a package is missing; the page is then
reported as skipped, after its other blocks passed. A block with `# needs: several GPUs` is never run.
"""

import ast
import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from test_layers import LAYERS

import scopetrace as st
from scopetrace.cli import main
from scopetrace.cli.targets import declare_missing_ops

ROOT = Path(__file__).parents[1]
KEPT = declare_missing_ops()  # parts of transformers import torchvision

README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
ALL_PAGES = [*PAGES, ROOT / "CONTRIBUTING.md"]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"# needs: (.+)")
HARDWARE = "several GPUs"


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    line: int
    language: str
    text: str
    output: str | None
    """For Python: what it prints, if the page says so."""


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text, each Python block with the text block that follows it as its output."""
    found = list(FENCE.finditer(text))
    blocks = []
    for match, following in zip(found, [*found[1:], None], strict=False):
        output = None
        if following and following[1] == "text" and not text[match.end() : following.start()].strip():
            output = following[2]
        line = text.count("\n", 0, match.start()) + 1
        blocks.append(Block(line, match[1], match[2], output))
    return blocks


def matches(expected: str, printed: str) -> bool:
    """Whether `printed` is `expected`, where `…` stands for any text on a line or any lines; trailing blanks aside."""
    lines = [r"(?:.*\n)*?" if line.strip() == "…" else one_line(line) for line in expected.strip("\n").splitlines()]
    printed = "".join(f"{line.rstrip()}\n" for line in printed.strip("\n").splitlines())
    return re.fullmatch("".join(lines), printed) is not None


def one_line(line: str) -> str:
    return ".*".join(map(re.escape, line.rstrip().split("…"))) + r"\n"


def missing(block: Block) -> list[str]:
    """The packages that a block asks for and that are not installed."""
    needs = NEEDS.match(block.text)
    names = [name.strip() for name in needs[1].split(",")] if needs else []
    return [name for name in names if name == HARDWARE or importlib.util.find_spec(name) is None]


class Page:
    """Runs the blocks of one page."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "model.py"
        self.file.write_text("")
        self.module = types.ModuleType("model")
        self.module.__file__ = str(self.file)

    def run_python(self, block: Block) -> str:
        """Append the block to model.py, so that source lines can be read, and run it. Returns what it prints."""
        before = self.file.read_text()
        self.file.write_text(before + block.text)
        code = compile("\n" * before.count("\n") + block.text, self.file, "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, vars(self.module))
        return printed.getvalue()

    def run_console(self, block: Block) -> Iterator[tuple[str, str, str]]:
        """(command, expected output, printed output) of each `scopetrace` command."""
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            program, *arguments = shlex.split(command, comments=True)
            if program == "scopetrace":
                result = CliRunner().invoke(main, arguments)
                assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
                yield command, expected, result.output


LONG = ("export-with-transformers.md", "distributed.md")
"""Pages that train on two ranks, or export several models."""
RUN = [pytest.param(page, marks=[pytest.mark.slow] * (page.name in LONG)) for page in ALL_PAGES]


@pytest.mark.sample(3)
@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_print_what_it_says(page, tmp_path, monkeypatch):
    run = Page(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setitem(sys.modules, "model", run.module)
    torch.manual_seed(0)
    torch.compiler.reset()  # as in a process of its own
    left_out = []
    for block in blocks_of(page.read_text()):
        where = f"{page.name}:{block.line}"
        if names := missing(block):
            left_out += [f"line {block.line} needs {name}" for name in names if name != HARDWARE]
        elif block.language == "python":
            check(where, block.output, run.run_python(block))
        elif block.language == "console":
            for command, expected, printed in run.run_console(block):
                check(f"{where}: {command}", expected, printed)
    if left_out:
        pytest.skip("left out: " + "; ".join(left_out))


@pytest.mark.slow
def test_the_first_command_of_the_readme(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    [block] = [block for block in blocks_of(README.read_text()) if block.language == "shell"]
    [(command, expected, printed)] = Page(tmp_path).run_console(block)
    check(command, expected, printed)


def check(where: str, expected: str | None, printed: str) -> None:
    if expected is None:
        assert not printed, f"{where} prints what the page does not show:\n{printed}"
    elif not matches(expected, printed):
        pytest.fail(f"{where}\n--- the page\n{expected}\n--- printed\n{printed}", pytrace=False)


# Links and sizes ----------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(file.read_text()), f"{page.name}: {target}"


def links(page: Path) -> set[Path]:
    """The files that a page links to."""
    targets = re.findall(r"\]\(([^)#\s]+)", FENCE.sub("", page.read_text()))
    return {(page.parent / target).resolve() for target in targets if not target.startswith("http")}


def test_links_from_the_readme_lead_to_every_page():
    found, new = set(), {README}
    while new:
        found |= new
        new = set().union(*map(links, new)) & set(PAGES) - found
    assert sorted(page.name for page in set(PAGES) - found) == []


def test_the_site_has_every_page():
    def pages(entries):
        for entry in entries:
            yield from [entry] if isinstance(entry, str) else pages(*entry.values())

    listed = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    made = ["changelog.md", "contributing.md"]  # docs/hooks.py takes them from the repository's root
    assert sorted(listed) == sorted([*made, *(str(page.relative_to(DOCS)) for page in PAGES[1:])])


def test_the_api_page_has_every_name():
    shown = set(re.findall(r"^::: ([\w.]+)", (DOCS / "api.md").read_text(), flags=re.MULTILINE))
    modules, bases = {"distributed", "errors"}, {c.__name__ for c in vars(st.errors).values() if isinstance(c, type)}
    assert {f"scopetrace.{name}" for name in set(st.__all__) - modules - bases} - shown == set()


def test_every_image_is_small_and_shown():
    shown = set().union(*map(links, PAGES))
    for image in (DOCS / "images").iterdir():
        assert image in shown, image.name
        assert image.stat().st_size < 300_000, image.name


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) < 120


def test_figures_of_the_readme_are_measured():
    """A cell of the comparison that begins with a number has it from the page of measurements."""
    [table] = re.findall(r"\n(\|(?:.+\|\n)+)", README.read_text())
    measured = set(re.findall(r"[\d.]+", (DOCS / "benchmarks.md").read_text()))
    figures = [
        number for cell in table.split("|") if cell.strip()[:1].isdigit() for number in re.findall(r"[\d.]+", cell)
    ]
    assert len(figures) > 5
    assert [number for number in figures if number not in measured] == []


# Refusals -------------------------------------------------------------------------------------------------------------


def refusals() -> set[str]:
    """The messages that functionalization gives `refusal(...)`, with OP for what it fills in."""
    messages = set()
    for file in (ROOT / "src" / "scopetrace" / "functionalization").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "refusal":
                parts = node.args[0].values if isinstance(node.args[0], ast.JoinedStr) else [node.args[0]]
                text = "".join(part.value if isinstance(part, ast.Constant) else "OP" for part in parts)
                messages.add(text.partition(" (")[0])
    return messages


def test_every_refusal_of_a_mutation_is_explained():
    cells = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "mutation.md").read_text(), flags=re.MULTILINE)
    listed = {message for cell in cells for message in cell.split("<br>")}
    assert refusals()
    assert refusals() - listed == set()


# CONTRIBUTING.md -----------------------------------------------------------------------------------------------------

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PLACE = re.compile(r"`([\w/]+\.py):([\w.]+)`")


def section(title: str) -> str:
    return CONTRIBUTING.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


PROFILED = """
import json, pathlib, sys, torch, scopetrace as st

source = f"{pathlib.Path(st.__file__).parent}/"
x = torch.randn(3)
trace = st.trace  # imports what tracing needs


def functions_entered(forward):
    entered = []

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(source) and code.co_filename.endswith(".py"):
            entered.append((code.co_filename.removeprefix(source), code.co_qualname))

    model = type("Net", (torch.nn.Module,), {"forward": forward})()
    sys.setprofile(profile)
    tr = trace(model, (x,))
    str(tr)
    tr(x)
    sys.setprofile(None)
    return entered


ways = {"relu": lambda self, x: torch.relu(x), "add_": lambda self, x: x.add_(1)}
print(json.dumps({op: functions_entered(forward) for op, forward in ways.items()}))
"""


@pytest.fixture(scope="module")
def functions_entered():
    """For each op, [file below src/scopetrace, qualified name] of our functions in a trace, its text and a call of it.

    In a process of its own: what other tests left in caches is not entered again.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "SCOPETRACE_CHECK": "0"}
    done = subprocess.run([sys.executable, "-c", PROFILED], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("op", ["relu", "add_"])
def test_the_way_of_an_op_is_as_described(op, functions_entered):
    named = PLACE.findall(section(f"The way of one `{op}`"))
    assert len(named) == 10
    entered = iter(functions_entered[op])
    for place in named:
        assert list(place) in entered, f"{':'.join(place)} is not entered, or not after the one before it"


@pytest.mark.parametrize(("op", "files", "functions"), [("relu", 45, 780), ("add_", 55, 996)])
def test_the_way_of_an_op_passes_few_files_and_functions(op, files, functions, functions_entered):
    entered = set(map(tuple, functions_entered[op]))
    passed = {file for file, _ in entered}
    assert len(passed) <= files, f"{len(passed)} files, of which one may be a part of another: {sorted(passed)}"
    assert len(entered) <= functions, f"{len(entered)} functions"


def test_functions_that_are_named_exist():
    for file, name in PLACE.findall(CONTRIBUTING):
        tree = ast.parse((ROOT / "src" / "scopetrace" / file).read_text())
        assert name in defined(tree), f"{file} has no {name}"


def defined(node: ast.AST, prefix: str = "") -> set[str]:
    """Qualified names of functions, classes and assigned names."""
    names = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            names |= {prefix + child.name} | defined(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            names |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_the_table_of_rooms_is_that_of_the_layer_test():
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section("Rooms"), flags=re.MULTILINE)) == LAYERS


# The functions above -------------------------------------------------------------------------------------------------

PAGE = """
# A page

```python
print(1)
```

```text
1
```

```python
x = 2
```

Words.

```console
$ scopetrace --version
scopetrace …
```
"""


def test_blocks_and_their_output_are_found():
    found = [(b.line, b.language, b.output) for b in blocks_of(PAGE) if b.language != "text"]
    assert found == [(4, "python", "1\n"), (12, "python", None), (18, "console", None)]


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\nb\n", "a\nc\n", False),
        ("a …\n", "a b c\n", True),
        ("a …\n", "b\n", False),
        ("a\n…\nd\n", "a\nb\nc\nd\n", True),
        ("a\n…\nd\n", "a\nd\n", True),
        ("a\n…\nd\n", "a\nd\ne\n", False),
        ("  …\nd\n", "a\nd\n", True),
        ("[1 … 11] (x)\n", "[1 … 11] (x)\n", True),
        ("a\n", "", False),
    ],
)
def test_expected_output_is_compared(expected, printed, same):
    assert matches(expected, printed) is same


@pytest.mark.parametrize("text", ["```python\nprint(2)\n```\n\n```text\n3\n```\n", "```python\nprint(2)\n```\n"])
def test_wrong_or_unshown_output_fails(text, tmp_path):
    [block, *_] = blocks_of(text)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check("page", block.output, Page(tmp_path).run_python(block))


def test_a_missing_package_is_found():
    assert missing(Block(1, "python", "# needs: torch, no_such_package\n", None)) == ["no_such_package"]
    assert missing(Block(1, "python", "# needs: torch\n", None)) == []
    assert missing(Block(1, "python", "import torch\n", None)) == []
