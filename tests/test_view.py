"""What a trace shows of itself: summaries, pictures, pages, differences, look-up of calls, their values in a run."""

import dataclasses
import itertools
import json
import re
import shutil
import sys
import textwrap

import pytest
import torch
from processes import in_another_process
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import scopetrace as st
from scopetrace.api.runnable import program_of
from scopetrace.errors import ArgumentTypeError, CallNotFoundError, ViewDependencyError
from scopetrace.view.boxes import boxes
from scopetrace.view.dot import dot_text
from scopetrace.view.html import page
from tests.nets import Gate

X = torch.randn(2, 4)


def trace(model, *args, **options):
    kwargs = options.pop("kwargs", None)
    with torch.no_grad():
        return st.trace(model.eval(), args, kwargs, **options)


def check(text, expected):
    assert textwrap.dedent(str(text)).strip() == textwrap.dedent(expected).strip()


class Block(nn.Module):
    def __init__(self, act=nn.ReLU):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.act = act()
        self.b = nn.Linear(4, 4, bias=False)

    def forward(self, x, *, scale=1.0):
        return self.act(self.a(x)) * scale + self.b(x)


class Net(nn.Module):
    def __init__(self, layers=2, act=nn.ReLU, scale=2.0):
        super().__init__()
        self.layers = nn.ModuleList(Block(act) for _ in range(layers))
        self.scale = scale

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=self.scale)
        return {"out": x}


class Uses(nn.Module):
    """A weight of two modules, one used without its module, one that nobody uses; a module called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.free, self.idle = (nn.Linear(4, 4, bias=False) for _ in range(4))
        self.second.weight = self.first.weight
        self.free.weight.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x, *, more=None):
        y = self.first(self.first(x)) + self.second(x) - self.mean
        return F.linear(y, self.free.weight), [y] if more is None else [y, more["t"]]


# Summaries -----------------------------------------------------------------------------------------------------------


def test_a_summary():
    check(
        trace(Net(3), X).summary(),
        """
        module                          input      output     parameters  FLOPs  activations  share
        Net                             f32[2, 4]  f32[2, 4]  108         384    480 B        100%
          Block[layers.0]               f32[2, 4]  f32[2, 4]  36          128    160 B        33%
            Linear[a]                   f32[2, 4]  f32[2, 4]  20          64     32 B         17%
            ReLU[act]                   f32[2, 4]  f32[2, 4]  -           -      32 B         0%
            Linear[b]                   f32[2, 4]  f32[2, 4]  16          64     32 B         17%
          Block[layers.1, layers.2] ×2  f32[2, 4]  f32[2, 4]  72          256    320 B        67%

        108 parameters, 432 B
        384 FLOP, 480 B of activations
        """,
    )


def test_one_more_of_the_same_layer_has_no_number():
    layers = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    tr = trace(layers, X)
    assert "\n  Sequential[1] as Sequential[0]  f32[2, 4]" in str(tr.summary())
    assert "\n  Sequential[1] as Sequential[0] -> %relu_1: f32[2, 4]" in str(tr)


def test_each_parameter_counts_once_and_what_is_not_used_is_named():
    found = trace(Uses(), X, kwargs={"more": {"t": torch.zeros(3)}}).summary()
    rows = {(row.fqn, row.index): row for row in found.rows}
    assert rows["", 0].parameters == 32
    assert rows["", 0].trainable == 16
    assert rows["", 0].inputs == ("f32[2, 4]", "f32[3]")
    assert rows["", 0].outputs == ("f32[2, 4]", "f32[2, 4]", "f32[3]")
    assert rows["first", 0].parameters == rows["first", 1].parameters == rows["second", 0].parameters == 16
    assert ("free", 0) not in rows
    assert found.unused == {"idle.weight": 16}
    assert rows["", 0].buffer_bytes == 16
    assert str(found).endswith("not used: 16 parameters, in idle.weight")


MODELS = {
    "linear": (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), X),
    "conv": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 3, 3)), torch.randn(2, 3, 8, 9)),
    "lstm": (nn.LSTM(4, 8, 2), torch.randn(5, 2, 4)),
    "layers": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_of_torch(name):
    """On the meta device, where attention is made of products that torch counts; its fused op on CPU is not counted."""
    model, x = MODELS[name]
    model, x = model.eval().to("meta"), x.to("meta")
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(x)
    assert trace(model, x).summary().rows[0].flops == counter.get_total_flops() > 0


def test_views_take_no_memory():
    class Views(nn.Module):
        def forward(self, x):
            return x.t().reshape(8)[2:].unsqueeze(0) + 1, x.view(-1)

    assert trace(Views(), X).summary().rows[0].activation_bytes == 4 * (8 + 6)  # the copy of reshape, the sum


def test_a_summary_to_a_depth_and_as_data():
    found = trace(Net(), X).summary(depth=1)
    assert [row.path for row in found.rows] == ["Net", "Net/Block[layers.0]", "Net/Block[layers.1]"]
    data = json.loads(json.dumps(found.to_dict()))
    assert data["total"]["flops"] == 256
    assert data["rows"][1]["type"] == "Block"


@pytest.mark.parametrize("depth", [-1, "1", 0.5])
def test_a_depth_that_is_no_number_of_levels(depth):
    tr = trace(Net(), X)
    for show in (tr.summary, lambda depth: tr.to_svg(depth=depth), lambda depth: tr.print_readable(depth)):
        with pytest.raises(st.ArgumentError, match=f"depth={depth!r}: give a number of levels"):
            show(depth)


def test_dynamic_sizes_count_as_in_the_example():
    tr = trace(nn.Linear(4, 8), X, dynamic_shapes=({0: torch.export.Dim("n")},))
    (row,) = tr.summary().rows
    assert (row.inputs, row.flops) == (("f32[n, 4]",), 2 * 2 * 4 * 8)


def test_bodies_of_a_cond_are_rows():
    assert [(row.path, row.ops) for row in trace(Gate(), X).summary().rows][1:] != []


# Calls ---------------------------------------------------------------------------------------------------------------


def test_calls_by_name():
    tr = trace(Net(), X)
    first, second = tr.calls["layers.*"][0], tr.call("layers.1")
    assert [call.fqn for call in tr.calls["layers.?.a"]] == ["layers.0.a", "layers.1.a"]
    assert len(tr.calls["Linear"]) == 4
    assert tr.calls["Linear"] == tr.calls[nn.Linear] == tr.calls["**/Linear[*"]
    assert tr.calls["Net/Block[layers.1]"] == [second] == tr.calls[lambda call: call.fqn == "layers.1"]
    assert tr.calls[tr.model.layers[0]] == [first]
    assert tr.calls[0] is tr.call("")
    assert isinstance(tr.calls[1:3], type(tr.calls))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("layer.1", "no module call is named 'layer.1'; similar names: 'layers.1'"),
        (nn.Conv2d, "no module call is named Conv2d; there are 'Block', 'Linear'"),
        (nn.Linear(2, 2), "no module call is named this Linear"),
    ],
)
def test_calls_that_are_not_there(key, message):
    with pytest.raises(CallNotFoundError, match=re.escape(message)):
        trace(Net(), X).calls[key]


def test_a_call_by_its_index():
    tr = trace(Uses(), X)
    assert tr.call("first", 1).index == 1
    with pytest.raises(LookupError, match="'first' is called 2 times: there is no call with index 2"):
        tr.call("first", 2)
    with pytest.raises(CallNotFoundError, match="no module call has the name 'frst'; similar names: 'first'"):
        tr.call("frst")
    with pytest.raises(ArgumentTypeError, match="give a module class"):
        tr.calls[1.5]


def test_few_calls_are_shown():
    assert repr(trace(Net(3), X).calls).endswith(", … 8 more]")


@pytest.mark.parametrize("target", ["layers.1", "Block", "*/Block[layers.0]", Block, lambda c: c.fqn == "layers.0"])
def test_text_and_functions_take_the_same_targets(target):
    tr = trace(Net(), X)
    count = len(tr.calls[target])
    assert tr.print_readable(scope=target, print_output=False).count("\nNet/Block") >= 1
    assert sum(len(f.calls) for f in tr.outline(target).functions) == count


# Values of a run -----------------------------------------------------------------------------------------------------


def seen_by_hooks(model, *args):
    found = {}

    def hook(module, args, kwargs, out, name):
        found.setdefault(name, []).append(out.clone())

    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(lambda *given, name=name: hook(*given, name), with_kwargs=True)
    model(*args)
    return {f"{name}#{i}" if i else name: out for name, outs in found.items() for i, out in enumerate(outs)}


@pytest.mark.parametrize("model", [Net(), Uses(), nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Identity())])
def test_activations_are_what_hooks_see(model):
    x = torch.randn(2, 4)
    found = trace(model, X).activations(x.clone())
    with torch.no_grad():
        expected = seen_by_hooks(model.eval(), x.clone())
    assert expected.keys() <= found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].outputs, value)


def test_activations_of_chosen_calls():
    tr, x = trace(Net(), X), torch.randn(2, 4)
    found = tr.activations(x, of=["layers.0", nn.ReLU])
    assert list(found) == ["layers.0", "layers.0.act", "layers.1.act"]
    assert found["layers.0"].arguments["scale"] == 2.0
    torch.testing.assert_close(found["layers.0"].arguments["x"], x)
    assert found["layers.0"].call.fqn == "layers.0"


def test_activations_are_from_before_a_later_write():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.id = nn.Identity()

        def forward(self, x):
            y = self.id(x)
            x.add_(1)
            return y * 1

    x = torch.zeros(2)
    assert trace(Writes(), x.clone()).activations(x, of="id")["id"].outputs.tolist() == [0, 0]
    assert x.tolist() == [1, 1]


def test_activations_have_gradients():
    tr = st.trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (X,))
    out = tr.activations(X, of="0")["0"].outputs
    assert out.requires_grad
    assert not out.is_leaf


def test_activations_inside_a_cond():
    with pytest.raises(CallNotFoundError, match="is in a body of a higher-order op"):
        trace(Gate(), X).activations(X, of="fc")


# Boxes ---------------------------------------------------------------------------------------------------------------


def verify(box):
    """Ports at both ends of an edge have its type, and values go forward."""
    for edge in box.edges:
        source = box if edge.maker == -1 else box.children[edge.maker]
        target = box if edge.user == -1 else box.children[edge.user]
        made = (source.inputs if source is box else source.outputs)[edge.output]
        used = (target.outputs if target is box else target.inputs)[edge.input]
        assert made.type == used.type == edge.type
        if source is not box and target is not box:
            assert edge.maker < edge.user
    for child in box.children:
        verify(child)


def reached(box):
    """How many inputs of children have no edge."""
    ends = {(edge.user, edge.input) for edge in box.edges}
    missing = [(k, p) for k, child in enumerate(box.children) for p in range(len(child.inputs)) if (k, p) not in ends]
    inside = [] if box.kind == "op" else [found for child in box.children for found in reached(child)]
    return missing + inside if box.kind != "op" else []


NETS = {
    "net": (Net(3), (X,)),
    "uses": (Uses(), (X,)),
    "gate": (Gate(), (X,)),
    "identity": (nn.Sequential(nn.Identity(), nn.Linear(4, 4), nn.Identity()), (X,)),
    "attention": (nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 3, enable_nested_tensor=False), (X,)),
    "lstm": (nn.LSTM(4, 8), (X,)),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("functional", [True, False])
def test_boxes(name, functional):
    model, args = NETS[name]
    root = boxes(program_of(trace(model, *args, functional=functional)))
    verify(root)
    assert reached(root) == []
    keys = [box.key for box in root.walk()]
    assert len(keys) == len(set(keys))


def test_the_picture_of_a_training_step():
    """AdamW computes with numbers, of which the graph has no example."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    root = boxes(program_of(st.trace(step, (X,))))
    verify(root)
    assert "operator.pow" in dot_text([root], 1)


def test_the_boxes_of_a_chain_of_layers():
    root = boxes(program_of(trace(Net(3), X)))
    (run,) = root.children
    assert (run.kind, run.label) == ("run", "Block[layers.0 … layers.2] ×3")
    assert [(e.maker, e.user, e.type) for e in run.edges] == [
        (-1, 0, "f32[2, 4]"),
        (0, 1, "f32[2, 4]"),
        (1, 2, "f32[2, 4]"),
        (2, -1, "f32[2, 4]"),
    ]
    assert [port.name for port in root.outputs] == ["out"]
    assert [(p.name, p.type) for p in run.parameters[:2]] == [
        ("layers.0.a.weight", "f32[4, 4]"),
        ("layers.0.a.bias", "f32[4]"),
    ]


def test_the_text_of_a_picture():
    check(
        re.sub(r"(?s)^.*?\n  edge [^\n]*\n", "", dot_text([boxes(program_of(trace(Net(1), X)))], 1)),
        """
          n0 [label="x", shape=ellipse, style=filled, fillcolor="#eaeef2"]
          subgraph cluster_n1 {
          label="Net"; bgcolor="#f6f8fa"; color="#d0d7de"
          subgraph cluster_n2 {
          label="Block[layers.0]"; bgcolor="#ffffff"; color="#d0d7de"
          n3 [label="Linear[a]\\n20 parameters, 64 FLOP", fillcolor="#ddf4ff"]
          n4 [label="ReLU[act]", fillcolor="#ddf4ff"]
          n5 [label="aten.mul.Tensor", fillcolor="#ffffff"]
          n6 [label="Linear[b]\\n16 parameters, 64 FLOP", fillcolor="#ddf4ff"]
          n7 [label="aten.add.Tensor", fillcolor="#ffffff"]
          }
          }
          n8 [label="out", shape=ellipse, style=filled, fillcolor="#eaeef2"]
          n0 -> n3 [label=" f32[2, 4]"]
          n3 -> n4 [label=" f32[2, 4]"]
          n4 -> n5 [label=" f32[2, 4]"]
          n0 -> n6 [label=" f32[2, 4]"]
          n5 -> n7 [label=" f32[2, 4]"]
          n6 -> n7 [label=" f32[2, 4]"]
          n7 -> n8 [label=" f32[2, 4]"]
        }
        """,
    )


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
@pytest.mark.parametrize("name", NETS)
def test_pictures(name, tmp_path):
    model, args = NETS[name]
    tr = trace(model, *args)
    for depth in range(4):
        assert b"</svg>" in tr.to_svg(depth=depth)
    tr.to_svg(tmp_path / "net.png")
    assert (tmp_path / "net.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_without_graphviz(monkeypatch, tmp_path):
    tr = trace(Net(), X)
    with pytest.raises(st.ArgumentError, match=r"ends in .svg, .png or .pdf"):
        tr.to_svg(tmp_path / "net.jpg")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ViewDependencyError, match="apt install graphviz"):
        tr.to_svg()
    monkeypatch.setitem(sys.modules, "graphviz", None)
    with pytest.raises(ViewDependencyError, match=re.escape("pip install 'scopetrace[view]'")):
        tr.to_svg()


# Pages ---------------------------------------------------------------------------------------------------------------


def records(text):
    data = re.search(r'<script type="application/json" id="program">(.*?)</script>', text, re.DOTALL)
    return json.loads(data[1])


class Evil(nn.Module):
    def forward(self, x):
        with st.scope("<script>alert(1)<"):
            return x + 1


def test_what_comes_from_the_model_is_text():
    Evil.__name__ = Evil.__qualname__ = "</script><img src=x onerror=alert(1)>"
    tr = trace(Evil(), X)
    text = tr.to_html()
    assert "<img" not in text
    assert text.count("<script") == 3
    assert records(text)["boxes"][0]["label"] == Evil.__name__
    assert "<img" not in tr._repr_html_()
    assert "<img" not in st.diff(tr, trace(Net(), X)).to_html()


def test_a_page_of_differences_has_both_programs_and_the_text(tmp_path):
    before, after = trace(Net(), X), trace(Net(act=nn.GELU), X)
    text = st.diff(before, after).to_html(tmp_path / "diff.html")
    assert (tmp_path / "diff.html").read_text() == text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    assert data["pages"] == [before.to_html(), after.to_html()]
    assert [d["before"].partition("(")[0] for d in data["differences"] if d["before"]] == ["ReLU[act]", "ReLU[act]"]
    assert "+ GELU[act](input=%linear)" in text


class Masked(nn.Module):
    def forward(self, x):
        at = torch.arange(x.shape[0])
        mask = (at[:, None] >= at) & (at > 0)
        bias = torch.where(mask, torch.zeros(()), torch.full((), -1e9))
        return (x @ x.T + bias).softmax(-1)


def test_ops_that_only_make_masks_are_folded_in_pictures():
    root = boxes(program_of(trace(Masked(), X)))
    folded, *others = root.children
    assert (folded.label, folded.key, folded.kind) == ("positions and masks", "Masked~2", "scope")
    assert [box.label for box in others] == ["aten.numpy_T", "aten.matmul", "aten.add.Tensor", "aten.softmax.int"]
    assert folded.children[-1].label == "aten.where.self"
    assert [port.type for port in folded.outputs] == ["f32[2, 2]"]


def test_the_records_of_a_page(tmp_path):
    tr = trace(Net(), X)
    text = tr.to_html(tmp_path / "net.html")
    assert (tmp_path / "net.html").read_text() == text
    found = records(text)["boxes"]
    assert [box["label"] for box in found[:3]] == ["Net", "Block[layers.0, layers.1] ×2", "Block[layers.0]"]
    assert found[0]["children"] == [1]
    assert ["name", "layers.0"] in found[2]["facts"]
    assert all(len(edge) == 5 for box in found for edge in box["edges"])


def test_a_page_of_many_ops_is_small():
    class Long(nn.Module):
        def forward(self, x):
            for _ in range(2000):
                x = x + 1
            return x

    assert len(page(boxes(program_of(trace(Long(), X))))) < 2000 * 900 + 100_000


# Files for viewers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETS)
def test_graphs_for_model_explorer(name, tmp_path):
    model, args = NETS[name]
    tr = trace(model, *args)
    tr.to_model_explorer(tmp_path / "net.json")
    found = json.loads((tmp_path / "net.json").read_text())
    assert found["label"] == tr.scope.path
    names = [graph["id"] for graph in found["graphs"]]
    for graph in found["graphs"]:
        nodes = {node["id"]: node for node in graph["nodes"]}
        assert len(nodes) == len(graph["nodes"])
        for node in nodes.values():
            assert all(
                int(e["sourceNodeOutputId"]) < len(nodes[e["sourceNodeId"]]["outputsMetadata"])
                for e in node["incomingEdges"]
            )
            assert set(node.get("subgraphIds", ())) <= set(names)
            assert not node["namespace"] or node["namespace"] in graph["groupNodeAttributes"]
    main = [node for node in tr.graph_module.graph.nodes if node.op == "call_function" and "getitem" not in node.name]
    assert {node.name for node in main} <= {node["id"] for node in found["graphs"][0]["nodes"]}


def test_a_second_call_is_a_layer_of_its_own(tmp_path):
    trace(Uses(), X).to_model_explorer(tmp_path / "net.json")
    groups = json.loads((tmp_path / "net.json").read_text())["graphs"][0]["groupNodeAttributes"]
    assert list(groups) == ["Uses", "Uses/Linear[first]", "Uses/Linear[first]#1", "Uses/Linear[second]"]
    assert groups["Uses/Linear[first]"]["class"] == "torch.nn.modules.linear.Linear"


@pytest.mark.parametrize("name", NETS)
def test_a_timeline(name, tmp_path):
    model, args = NETS[name]
    tr = trace(model, *args)
    tr.to_chrome_trace(tmp_path / "net.json")
    events = json.loads((tmp_path / "net.json").read_text())["traceEvents"]
    root, *bars = [e for e in events if e["ph"] == "X"]
    assert all(root["ts"] <= e["ts"] and e["ts"] + e["dur"] <= root["ts"] + root["dur"] for e in bars)
    assert max((e["args"]["bytes"] for e in events if e["ph"] == "C"), default=0) == tr.memory().peak_bytes


def drop_relu(tr):
    (node,) = tr.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    node.replace_all_uses_with(node.args[0])
    tr.graph_module.graph.erase_node(node)


def counted(tr, path):
    """The bytes in use while each op of a timeline runs, and the ops."""
    tr.to_chrome_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["ts"]: e["name"] for e in events if e["ph"] == "X"}
    return [e["args"]["bytes"] for e in events if e["ph"] == "C"], [names[e["ts"]] for e in events if e["ph"] == "C"]


@pytest.mark.parametrize("edit", [None, drop_relu])
@pytest.mark.parametrize("is_step", [False, True])
def test_a_timeline_has_the_bytes_of_memory(is_step, edit, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Dropout(inplace=True))
    optimizer = torch.optim.Adam(model.parameters())

    def step(x):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    tr = st.trace(step if is_step else model, (torch.ones(4, 4),))
    if edit is not None:
        edit(tr)
    found, ops = counted(tr, tmp_path / "net.json")
    whole = iter(tr.memory().timeline)
    assert all(now in whole for now in found)  # in this order; ops that nothing reads have no bar
    assert max(found) == tr.memory().peak_bytes
    assert ("aten.relu_" in ops) == (edit is None)  # ops as they ran


def test_a_timeline_counts_what_nobody_reads(tmp_path):
    def f(x):
        torch.cat([x, x, x])
        return x + 1

    tr = st.trace(f, (torch.ones(4, 4),))
    assert counted(tr, tmp_path / "net.json") == ([192], ["aten.add.Tensor"])
    assert tr.memory().timeline[1:] == [192, 64]


def test_memory_is_kept_by_views_and_freed_after_the_last_use(tmp_path):
    class Views(nn.Module):
        def forward(self, x):
            y = (x + 1).t()
            z = x * 2
            return y.sum() + z.sum()

    assert counted(trace(Views(), torch.ones(4, 4)), tmp_path / "net.json")[0] == [64, 64, 128, 132, 72, 12]


def test_a_summary_of_a_step_has_backward_by_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    summary = st.trace(lambda x: model(x).sum().backward(), (torch.ones(4, 4),)).summary()
    assert [line.split()[0] for line in str(summary).splitlines()[1:9]] == [
        *("function", "Sequential[model]", "Linear[0]", "BatchNorm1d[1]"),
        *("backward", "Sequential[model]", "BatchNorm1d[1]", "Linear[0]"),
    ]
    assert [len(row.writes) for row in summary.rows[1:]] == [3, 0, 3, 0, 0, 0, 0]


# Differences ---------------------------------------------------------------------------------------------------------


def test_what_differs():
    before = trace(Net(2), X)
    check(st.diff(before, trace(Net(2), X)), "no differences")
    check(
        st.diff(before, trace(Net(2, nn.GELU), X)),
        """
        Net/Block[layers.0]
          - ReLU[act](input=%linear) -> %relu  # 1 op
          + GELU[act](input=%linear) -> %gelu  # 1 op
        Net/Block[layers.1]
          - ReLU[act](input=%linear_2) -> %relu_1  # 1 op
          + GELU[act](input=%linear_2) -> %gelu_1  # 1 op
        2 added, 2 removed
        """,
    )
    check(
        st.diff(before, trace(Net(1), X)),
        """
        Net
          - layers.1.a.weight: f32[4, 4]
          - layers.1.a.bias: f32[4]
          - layers.1.b.weight: f32[4, 4]
          - Block[layers.1](x=%add, scale=2.0) -> {'out': %add_1}  # 5 ops
          - {'out': %add_1}
          + {'out': %add}
        1 changed, 4 removed
        """.replace("{'out': %add_1}  # 5", "%add_1  # 5"),
    )


def programs():
    """Pairs of a text and a trace; all do different things."""

    def forward(fn):
        class Fn(nn.Module):
            def forward(self, x):
                return fn(x)

        return trace(Fn(), torch.ones(2, 3))

    return {
        "add": forward(lambda x: x + 1),
        "other constant": forward(lambda x: x + 2),
        "swapped": forward(lambda x: 1 - x),
        "tensor": forward(lambda x: x + torch.tensor([1.0, 2.0, 3.0])),
        "other tensor": forward(lambda x: x + torch.tensor([1.0, 2.0, 4.0])),
        "order": forward(lambda x: (x.sin(), x.cos())),
        "other order": forward(lambda x: (x.cos(), x.sin())),
        "results": forward(lambda x: (x.cos(), x.cos())),
        "one result twice": forward(lambda x: (lambda y: (y, y))(x.cos())),
        "write": forward(lambda x: x.add_(1)),
        "write and more": forward(lambda x: (x.add_(1), x * 2)[1]),
        "cond": forward(lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x + 2, (x,))),
        "other cond": forward(lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x + 3, (x,))),
        "dtype": forward(lambda x: x.double()),
        "dict": forward(lambda x: {"a": x + 1}),
        "other dict": forward(lambda x: {"b": x + 1}),
    }


def test_equal_digests_are_no_differences():
    found, again = programs(), programs()
    for name, tr in found.items():
        assert tr == again[name]
        assert not st.diff(tr, again[name])
        assert hash(tr) == hash(again[name])
        for other_name, other in found.items():
            if other_name != name:
                assert tr != other, (name, other_name)
                assert st.diff(tr, other), (name, other_name)


@pytest.mark.slow
def test_the_digests_of_a_trace_and_of_its_order_are_the_same_in_another_process():
    code = "tr = st.trace(torch.nn.Sequential(torch.nn.Linear(2, 2)), (torch.ones(1, 2),)); print(tr.digest)\n"
    there = in_another_process(f"{code}print(tr.order.digest)").split()
    model = nn.Sequential(nn.Linear(2, 2))
    assert there == [st.trace(model, (torch.ones(1, 2),)).digest, st.trace(model, (torch.ones(3, 2),)).order.digest]


def test_a_loaded_trace_is_equal(tmp_path):
    tr = trace(Net(), X)
    tr.save(tmp_path / "net.st")
    assert st.load(tmp_path / "net.st") == tr


def test_before_and_after_a_pass():
    tr = trace(Net(1), X)
    before = trace(Net(1), X)
    for node in tr.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
        node.target = torch.ops.aten.gelu.default
    check(
        st.diff(before, tr),
        """
        Net/Block[layers.0]/ReLU[act]
          - %relu: f32[2, 4] = aten.relu(%linear)
          + %relu: f32[2, 4] = aten.gelu(%linear)
        1 changed
        """,
    )
    assert st.diff(before, tr).to_dict() == {
        "version": 1,
        "differences": [dataclasses.asdict(d) for d in st.diff(before, tr)],
    }


KINDS = ["one", "same", "frozen", "masked", "twice", "both", "rows", "off", "exact"]


class Kinds(nn.Module):
    """Calls of a layer in ways that make another function of it, or not."""

    def __init__(self):
        super().__init__()
        kinds = {
            name: Scaled(4) for name in ["one", "same", "frozen", "masked", "twice", "both", "rows", "off", "exact"]
        }
        self.a = nn.ModuleDict(kinds | {"wide": Scaled(8), "steep": Scaled(4, 2.0), "sub": Derived(4)})
        self.a.frozen.requires_grad_(False)
        self.a.exact.double()

    def forward(self, x, mask):
        a = self.a
        results = [a[name](x) for name in ("one", "same", "frozen", "wide", "steep", "sub")]
        with torch.no_grad():
            results.append(a.off(x))
        return [*results, a.masked(x, mask), a.twice(x, x), a.both(mask=mask, x=x), a.rows(x[:1]), a.exact(x.double())]


class Scaled(nn.Module):
    def __init__(self, width, slope=0.5):
        super().__init__()
        self.up, self.down, self.slope = nn.Linear(4, width), nn.Linear(width, 4), slope

    def forward(self, x, mask=None):
        x = nn.functional.leaky_relu(self.down(self.up(x)), self.slope)
        return x if mask is None else x * mask


class Derived(Scaled):
    pass


WHY = {
    "same": [],
    "frozen": [],
    "steep": ["%leaky_relu: f32[2, 4] = aten.leaky_relu(%linear_1, 2.0)"],
    "wide": ["%up_weight: f32[8, 4]", "%up_bias: f32[8]", "%down_weight: f32[4, 8]"],
    "sub": [f"{__name__}.Derived"],
    "masked": ["%mask: f32[2, 4]", "%mul: f32[2, 4] = aten.mul.Tensor(%leaky_relu, %mask)"],
    "rows": ["%x: f32[1, 4]"],
    "exact": ["%x: f64[2, 4]"],
    "off": ["autograd off"],
}


def test_why_two_calls_are_not_one_function():
    tr, again = (st.trace(Kinds(), (X, torch.ones(2, 4))) for _ in range(2))
    one, calls = tr.call("a.one"), tr.calls["a.*"]
    for name, texts in WHY.items():
        for other in (tr.call(f"a.{name}"), again.call(f"a.{name}")):
            assert [d.after for d in st.diff(one, other)][: len(texts)] == texts
            assert bool(st.diff(one, other)) == bool(texts)
    assert not st.diff(tr.call("a.masked"), tr.call("a.both"))
    assert [d.after for d in st.diff(tr.call("a.twice"), tr.call("a.both"))] == [
        "%mul: f32[2, 4] = aten.mul.Tensor(%leaky_relu, %mask)"
    ]
    functions = {call.fqn: f for f in tr.outline("a.*").functions for call in f.calls}
    for a, b in itertools.combinations(calls, 2):
        assert bool(st.diff(a, b)) == (functions[a.fqn] is not functions[b.fqn])
    first, second = tr.outline("a.*").functions[:2]
    assert st.diff(first.calls[0], second.calls[0])


def test_the_text_of_a_trace_is_compared_without_regard_to_names():
    class Twice(Net):
        def forward(self, x):
            return super().forward(x * 2)

    before = str(trace(Net(3), X))
    check(st.diff(before, trace(Net(3), X)), "no differences")
    check(st.diff(before.replace("%relu", "%r").replace("%add", "%a"), trace(Net(3), X)), "no differences")
    check(
        st.diff(before, str(trace(Twice(3), X)).replace("Twice", "Net")),
        """
        Net
          - Net: 15 ops, 13 module calls, 9 parameters (108 elements)
          + Net: 16 ops, 13 module calls, 9 parameters (108 elements)
          + %mul: f32[2, 4] = aten.mul.Tensor(%x, 2)
        Net/Block[layers.0]/Linear[a]
          - %linear: f32[2, 4] = aten.linear(%x, self.weight, self.bias)
          + %linear: f32[2, 4] = aten.linear(%mul, self.weight, self.bias)
        Net/Block[layers.0]
          - Linear[a](input=%x: f32[2, 4]) -> %linear: f32[2, 4]
          + Linear[a](input=%mul: f32[2, 4]) -> %linear: f32[2, 4]
        Net/Block[layers.0]/Linear[b]
          - %linear_1: f32[2, 4] = aten.linear(%x, self.weight)
          + %linear_1: f32[2, 4] = aten.linear(%mul, self.weight)
        Net/Block[layers.0]
          - Linear[b](input=%x: f32[2, 4]) -> %linear_1: f32[2, 4]
          + Linear[b](input=%mul: f32[2, 4]) -> %linear_1: f32[2, 4]
        Net
          - Block[layers.0](x=%x: f32[2, 4], scale=2.0) -> %add: f32[2, 4]
          + Block[layers.0](x=%mul: f32[2, 4], scale=2.0) -> %add: f32[2, 4]
        1 added, 6 changed
        """,
    )


def test_the_texts_of_programs_with_their_effects_differ_as_the_programs_do():
    texts, again = ({name: f"{tr}\n{tr.write_back or ''}" for name, tr in programs().items()} for _ in range(2))
    same = [(name, other) for name in texts for other in again if not st.diff(texts[name], again[other])]
    equal = {("tensor", "other tensor"), ("other tensor", "tensor")}  # values of constants are not in a text
    assert set(same) == {(name, name) for name in texts} | equal


@pytest.mark.parametrize("wrong", [Net(), "net.st", None])
def test_what_cannot_be_compared(wrong):
    for pair in ((trace(Net(), X), wrong), (wrong, trace(Net(), X))):
        with pytest.raises(ArgumentTypeError, match=f"takes two traces or two module calls.*{type(wrong).__name__}"):
            st.diff(*pair)


_A = torch.ops.aten


@pytest.mark.parametrize(
    ("queries", "keys", "values"), [((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)), ((5, 8), (7, 8), (7, 8))]
)
def test_attention_counts_as_its_products(queries, keys, values):
    given = tuple(map(torch.randn, (queries, keys, values)))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(*given)
    attention = st.trace(F.scaled_dot_product_attention, given)
    assert attention.summary().rows[0].flops == counter.get_total_flops() > 0
