"""A plugin for pytest: the fixture `graph_snapshot` compares traces with texts that are stored beside the tests.

    graph_snapshot(model, args) -> st.trace -> its text, compared with the stored one by `st.diff` -> the trace
    @pytest.mark.graph_snapshot(...) -> what the trace of the test has to keep -> a failure that says what it does not

scopetrace, and with it torch, is imported by the first test that uses the fixture.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import scopetrace as st

UPDATE = "--graph-snapshot-update"
MARKER = """\
graph_snapshot(one_graph=False, pure=False, max_functions=None): what the traces of the test must keep. \
one_graph: no call of them depends on values of the example inputs or on what forward wrote into Python objects; \
pure: the model changes no inputs, parameters, buffers or Python objects; \
max_functions: so many functions at most that repeated layers become, as by Trace.outline("layers")."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes the texts."""
    group = parser.getgroup("scopetrace")
    group.addoption(UPDATE, action="store_true", help="write the texts that graph_snapshot compares traces with")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", MARKER)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a marker that nothing reads, or with arguments that it does not have."""
    for mark in item.iter_markers("graph_snapshot"):
        unknown = mark.kwargs.keys() - {"one_graph", "pure", "max_functions"}
        if unknown or mark.args:
            pytest.fail(f"the marker graph_snapshot takes one_graph=, pure=, max_functions=, not {mark}", pytrace=False)
        if "graph_snapshot" not in getattr(item, "fixturenames", ()):
            pytest.fail("a test with the marker graph_snapshot has to use the fixture of that name", pytrace=False)


class GraphSnapshot:
    """Compares the traces of one test with stored texts. The fixture `graph_snapshot` gives it."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._update = request.config.getoption(UPDATE)
        marks = list(request.node.iter_markers("graph_snapshot"))  # the closest first
        self._limits = {key: value for mark in reversed(marks) for key, value in mark.kwargs.items()}
        name = quote(request.node.nodeid.partition("::")[2].replace("::", "."), "[]")  # with that of the class
        self._stem = request.path.parent / "snapshots" / request.path.stem / name
        self._used: set[Path] = set()

    def __call__(
        self, model: Any, args: Any = (), kwargs: dict[str, Any] | None = None, *, name: str = "", **options: Any
    ) -> st.Trace | st.OutlinedProgram:
        """Compare a model, a trace or an outlined program with the text in `snapshots/FILE_OF_TEST/TEST.txt`.

        Names of values may differ. `--graph-snapshot-update` writes the text. Returns the trace.

        Args:
            model: a model or function, which is traced; or what `st.trace`, `st.load` or `outline` gave.
            args: its positional arguments; tensors and models may be on the meta device.
            kwargs: its keyword arguments.
            name: what to add to the name of the file; needed where a test compares several.
            options: other arguments of `st.trace`.

        Fails the test where the text differs or is not there, and raises what `st.trace` does.
        """
        traced, path = self.trace(model, args, kwargs, **options), self._path(name)
        effects = "" if traced.write_back is None else f"\n{traced.write_back}"
        self._compare(path, re.sub(r", at .+:\d+, in .+", "", f"{traced}{effects}\n"))  # without source lines
        return traced

    def trace(
        self, model: Any, args: Any = (), kwargs: dict[str, Any] | None = None, **options: Any
    ) -> st.Trace | st.OutlinedProgram:
        """As a call, with what the marker says alone: nothing is stored."""
        import scopetrace as st

        is_traced = isinstance(model, (st.Trace, st.OutlinedProgram))
        if is_traced and (not isinstance(args, tuple) or args or kwargs or options):
            pytest.fail("graph_snapshot got a trace, which takes no arguments or options: give the model", False)
        traced = model if is_traced else st.trace(model, args, kwargs, **options)
        if problems := list(_problems(traced, **self._limits)):
            pytest.fail(
                "\n".join([f"{traced.scope} is not what the marker graph_snapshot asks for:", *problems]), False
            )
        return traced

    def _path(self, name: str) -> Path:
        path = self._stem.with_name(f"{self._stem.name}{'-' * bool(name)}{quote(name, '')}.txt")
        if path in self._used:
            pytest.fail(f"two graphs for {path.name}: give each call of graph_snapshot a name= of its own", False)
        self._used.add(path)
        return path

    def _compare(self, path: Path, text: str) -> None:
        import scopetrace as st

        stored = path.read_text(encoding="utf-8") if path.exists() else None
        difference = "there is no such file" if stored is None else st.diff(stored, text)
        if not difference:
            return
        if not self._update:
            where = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            pytest.fail(f"the graph is not that of {where}:\n\n{difference}\n\nIf it is right: pytest {UPDATE}", False)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _problems(
    traced: st.Trace | st.OutlinedProgram, one_graph: bool = False, pure: bool = False, max_functions: int | None = None
) -> Iterator[str]:
    flat: st.Trace = traced.inline() if hasattr(traced, "inline") else traced
    if one_graph:
        yield from (f"  it depends on data: {read}" for read in flat.specializations if read.op.startswith("aten."))
        yield from (f"  it is right for one call only: {effect}" for effect in flat.side_effects if effect.baked_in)
    if pure:
        yield from (f"  it changes {change}" for change in [*flat.mutations, *flat.side_effects])
    if max_functions is not None:
        functions = traced.functions if hasattr(traced, "functions") else flat.outline("layers").functions
        if len(functions) > max_functions:
            yield f"  it has {len(functions)} functions, not at most {max_functions}:"
            yield from (f"    {function}" for function in functions)


@pytest.fixture
def graph_snapshot(request: pytest.FixtureRequest) -> GraphSnapshot:
    """Compares traces with texts stored beside the test: `graph_snapshot(model, args)`."""
    return GraphSnapshot(request)
