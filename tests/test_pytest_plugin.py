"""The plugin for pytest: which texts `graph_snapshot` stores, what its failures say, what a marker asks for."""

import re
import subprocess
import sys
import types

import pytest
import torch
from torch import nn

from scopetrace.integrations.pytest import UPDATE, GraphSnapshot

X = torch.zeros(2, 4, device="meta")


def model(act=nn.ReLU, layers=3):
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), act()) for _ in range(layers)))


@pytest.fixture
def snapshot(tmp_path):
    """The fixture of a test of `test_model.py` in an empty folder."""

    def snapshot(update=False, name="test_net", **limits):
        marks = [pytest.mark.graph_snapshot(**limits).mark]
        node = types.SimpleNamespace(nodeid=f"tests/test_model.py::{name}", iter_markers=lambda _: iter(marks))
        config = types.SimpleNamespace(getoption={UPDATE: update}.__getitem__)
        return GraphSnapshot(types.SimpleNamespace(config=config, node=node, path=tmp_path / "test_model.py"))

    return snapshot


def failure(function, *args, **kwargs):
    with pytest.raises(pytest.fail.Exception) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def test_a_text_is_written_then_compared(snapshot, tmp_path):
    path = tmp_path / "snapshots" / "test_model" / "test_net.txt"
    assert failure(snapshot(), model(), (X,)) == (
        f"the graph is not that of {path}:\n\nthere is no such file\n\nIf it is right: pytest --graph-snapshot-update"
    )
    tr = snapshot(update=True)(model(), (X,))
    assert path.read_text() == f"{tr}\n"
    snapshot()(model(), (X,))
    snapshot()(tr)


def test_a_failure_is_a_difference(snapshot):
    snapshot(update=True)(model(), (X,))
    assert failure(snapshot(), model(nn.GELU), (X,)).split("\n\n")[1].splitlines() == [
        "Sequential/Sequential[0]",
        "  - ReLU[1](input=%linear: f32[2, 4]) -> %relu: f32[2, 4]  # 1 op",
        "  + GELU[1](input=%linear: f32[2, 4]) -> %gelu: f32[2, 4]  # 1 op",
        "1 added, 1 removed",
    ]


def test_names_of_values_may_differ(snapshot, tmp_path):
    snapshot(update=True)(model(), (X,))
    path = tmp_path / "snapshots" / "test_model" / "test_net.txt"
    path.write_text(path.read_text().replace("%relu", "%r").replace("%input_1", "%x"))
    snapshot()(model(), (X,))
    path.write_text(path.read_text().replace("aten.relu(%linear)", "aten.relu(%x)"))
    assert "- %r: f32[2, 4] = aten.relu(%x)\n  + %relu: f32[2, 4] = aten.relu(%linear)" in failure(
        snapshot(), model(), (X,)
    )


def test_a_text_that_is_the_same_is_not_written_anew(snapshot, tmp_path):
    snapshot(update=True)(model(), (X,))
    path = tmp_path / "snapshots" / "test_model" / "test_net.txt"
    path.write_text(renamed := path.read_text().replace("%relu", "%r"))
    snapshot(update=True)(model(), (X,))
    assert path.read_text() == renamed


def test_what_a_model_writes_is_part_of_the_text(snapshot):
    snapshot(update=True)(lambda x, y: x.copy_(y), (X, X.clone()))
    assert "  - x.copy_(graph[0])\n" in failure(snapshot(), lambda x, y: y, (X, X.clone()))


def test_where_the_source_is_is_not(snapshot, tmp_path):
    tr = snapshot(update=True)(lambda x: x if x.sum() > 0 else -x, (torch.ones(2),), specialize=True)
    text = (tmp_path / "snapshots" / "test_model" / "test_net.txt").read_text()
    assert text.splitlines()[-1] == "  Eq(u0, 1) was True (aten.is_nonzero.default) in function"
    assert __file__ in str(tr)


def test_files_of_parameters_and_of_several_calls(snapshot, tmp_path):
    for n in (1, 2):
        both = snapshot(update=True, name=f"TestNet::test_net[{n}-a/b c]")
        tr = both(model(layers=n), (X,))
        both(tr.outline(True), name="by/layer")
        assert failure(both, tr) == (
            f"two graphs for TestNet.test_net[{n}-a%2Fb%20c].txt: give each call of graph_snapshot a name= of its own"
        )
    files = {path.name for path in (tmp_path / "snapshots" / "test_model").iterdir()}
    assert files == {f"TestNet.test_net[{n}-a%2Fb%20c]{end}.txt" for n in (1, 2) for end in ("", "-by%2Flayer")}


def test_ids_that_differ_in_one_sign_have_texts_of_their_own(snapshot, tmp_path):
    for name in ("test_a", "test[a]", "test[a_b]", "test[a b]", "test[a/b]", "Test::a"):
        snapshot(update=True, name=name)(model(layers=1), (X,))
    assert len(list((tmp_path / "snapshots" / "test_model").iterdir())) == 6


class Count(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.n += 1
        self.calls += 1
        return x * self.calls


def sign(x):
    return x if x.sum() > 0 else -x


LIMITS = {
    "as many functions": ({"max_functions": 1}, model(), {}, []),
    "too many functions": (
        {"max_functions": 0},
        model(),
        {},
        [r"it has 1 functions, not at most 0:", r"  torch.*::Sequential\(input, 0.weight, 0.bias\) -> \(result\)"],
    ),
    "no repeated layers": ({"max_functions": 0}, nn.Linear(4, 4, device="meta"), {}, []),
    "pure": ({"pure": True, "one_graph": True}, model(), {}, []),
    "writes": (
        {"pure": True},
        Count(),
        {"side_effects": "warn"},
        [
            r"it changes buffer n: data by aten.add_.Tensor in Count, at .*",
            "it changes self.calls was 0 and became 1.*",
        ],
    ),
    "state of Python": (
        {"one_graph": True},
        Count(),
        {"side_effects": "warn"},
        [r"it is right for one call only: self.calls was 0 and became 1, in Count, at .*"],
    ),
    "a branch on data": (
        {"one_graph": True},
        sign,
        {"specialize": True},
        [r"it depends on data: Eq\(u0, 1\) was False \(aten.is_nonzero.default\) in sign, at .*"],
    ),
}


@pytest.mark.filterwarnings("ignore::scopetrace.errors.SideEffectWarning")
@pytest.mark.parametrize("name", LIMITS)
def test_what_a_marker_asks_for(name, snapshot):
    limits, net, options, expected = LIMITS[name]
    x = torch.zeros(2, 4) if options else X
    if not expected:
        snapshot(**limits).trace(net, (x,), **options)
        return
    first, *problems = failure(snapshot(**limits).trace, net, (x,), **options).splitlines()
    assert first.endswith(" is not what the marker graph_snapshot asks for:")
    for pattern, problem in zip(expected, problems, strict=True):
        assert re.fullmatch(f"  {pattern}", problem)


TESTS = """
import sys, pytest

def test_torch_is_not_imported():
    assert "scopetrace" in sys.modules and "torch" not in sys.modules

@pytest.mark.graph_snapshot(pure=True)
def test_without_the_fixture():
    pass

@pytest.mark.graph_snapshot(pur=True)
def test_a_misspelt_argument(graph_snapshot):
    pass

@pytest.mark.graph_snapshot(pure=True)
class TestMarks:
    @pytest.mark.graph_snapshot(one_graph=True)
    def test_closest_marks(self, graph_snapshot):
        assert graph_snapshot._limits == {"pure": True, "one_graph": True} and graph_snapshot._update
"""


def test_in_a_project_of_its_own(tmp_path):
    (tmp_path / "test_net.py").write_text(TESTS)
    plugins = ("-p", "no:scopetrace", "-p", "scopetrace.integrations.pytest", "-p", "no:hypothesispytest")
    command = [sys.executable, "-m", "pytest", "--strict-markers", *plugins, UPDATE]  # also where it is not installed
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "2 passed, 2 errors" in done.stdout, done.stdout
    assert "a test with the marker graph_snapshot has to use the fixture of that name" in done.stdout
    assert "the marker graph_snapshot takes one_graph=, pure=, max_functions=, not Mark(" in done.stdout
