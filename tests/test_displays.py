"""What objects show of themselves: short reprs, and in notebooks tables and trees in which all text is escaped."""

import copy
import json
import re
import shutil
from importlib import resources

import pytest
import torch
from torch import nn

import scopetrace as st
from scopetrace.api.runnable import program_of
from scopetrace.cli.demo import Decoder
from scopetrace.view.boxes import boxes
from scopetrace.view.dot import dot_text

ARGS = (torch.zeros(1, 2, dtype=torch.int64), torch.arange(2))


class Evil(nn.Module):
    def forward(self, x, label="<img src=x>"):
        with st.scope("<img"):
            return {"<img>": x + 1}


Evil.__name__ = Evil.__qualname__ = "<img src=x onerror=alert(1)>"


def shown(model, args):
    """By their reprs, the objects that people get from a trace."""
    tr = st.trace(model, args)
    outlined = tr.outline("layers")
    order, mutations, scopes = tr.order, tr.mutations, list(tr.scope.walk())
    diff = st.diff(tr, outlined)
    objects = [tr, outlined, order, tr.write_back, tr.summary(), diff, *tr.calls, *scopes, *outlined.functions]
    if mutations:
        plan = st.distributed.plan(model, order, classes=[type(model.layers[0])])
        frozen = copy.deepcopy(model).requires_grad_(False)  # its embedding and head are tied
        points = st.distributed.split_points(st.trace(frozen, args), 2)
        objects += [plan, points, *tr.activations(*args).values()]
        objects += [st.distributed.simulate(plan, tr, ranks=8, bandwidth=1e9, flops=1e12)]
    return objects


def test_reprs_are_short():
    objects = shown(Decoder(), ARGS)
    assert max(len(repr(x)) for x in objects) < 100
    assert not any("\n" in repr(x) or " at 0x" in repr(x) for x in objects)
    assert [repr(x) for x in objects[:4]] == [
        "<Trace of Decoder: 57 ops, 26 module calls>",
        "<OutlinedProgram of Decoder: 1 function>",
        "<ExecutionOrder of Decoder: 26 calls, 31 parameters used>",
        "<WriteBack: 3 updates, 1 results>",
    ]


def test_notebooks_show_a_table_or_a_tree():
    for x in shown(Decoder(), ARGS):
        if isinstance(x, st.Function) or type(x).__name__ in ("CallValues",):
            continue
        html = x._repr_html_()
        assert html.startswith("<") and html.endswith(">")
    html = st.trace(Decoder(), ARGS).call("layers.0.mlp")._repr_html_()
    assert ">input<" in html and "%add: f32[1, 2, 64]" in html


def test_what_comes_from_the_model_is_text_in_notebooks():
    for x in shown(Evil(), (torch.ones(2),)):
        if hasattr(x, "_repr_html_"):
            assert "<img" not in x._repr_html_()


@pytest.mark.parametrize("change", [copy.deepcopy, lambda order: order])
def test_orders_are_equal_as_before(change):
    order = st.trace(Decoder(), ARGS).order
    assert change(order) == order


# What is marked ------------------------------------------------------------------------------------------------------


def noted(rows):
    return {row.path: (row.writes, row.shares) for row in rows if row.writes or row.shares}


def test_writes_and_shared_weights_are_marked():
    found = st.trace(Decoder(2), ARGS).summary()
    assert noted(found.rows) == {
        "Decoder": (("layers.0.cache", "layers.1.cache"), ()),
        "Decoder/Embedding[embed]": ((), ("embed.weight",)),
        "Decoder/Block[layers.0]": (("cache",), ()),
        "Decoder/Block[layers.0]/attention": (("cache",), ()),
        "Decoder/Block[layers.1]": (("cache",), ()),
        "Decoder/Block[layers.1]/attention": (("cache",), ()),
    }
    lines = str(found).splitlines()
    assert lines[0].endswith("share  notes")
    assert lines[2].endswith("shares embed.weight")
    assert lines[4].strip().startswith('scope("attention")') and lines[4].endswith("writes cache")


class Inputs(nn.Module):
    """Writes to an input, and to tensors of its own, in modules that are called twice."""

    def __init__(self):
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4)

    def forward(self, x, cache):
        y = self.act(self.head(self.act(self.head(self.norm(x)))))
        cache["k"].add_(1)
        return y


def test_only_writes_that_live_on_are_marked():
    found = st.trace(Inputs().train(), (torch.ones(2, 4), {"k": torch.ones(1)})).summary()
    assert noted(found.rows) == {
        "Inputs": (("norm.num_batches_tracked", "norm.running_mean", "norm.running_var", "cache['k']"), ()),
        "Inputs/BatchNorm1d[norm]": (("num_batches_tracked", "running_mean", "running_var"), ()),
    }
    assert str(found).splitlines()[0].endswith("notes")
    assert str(st.trace(nn.Linear(2, 2), (torch.ones(2),)).summary()).splitlines()[0].endswith("share")


def test_pictures_and_pages_have_the_marks():
    tr = st.trace(Decoder(2), ARGS)
    root = boxes(program_of(tr))
    notes = {box.label: [note for note in box.notes() if note[0] in ("writes", "shares")] for box in root.walk()}
    assert notes["Embedding[embed]"] == notes["aten.t"] == [("shares", "shares embed.weight")]
    assert notes["Block[layers.0, layers.1] ×2"] == [("writes", "writes cache")]
    drawn = dot_text([root], 1)
    assert 'label="attention"' in dot_text([root], 2)
    assert "shares embed.weight" in drawn and "writes cache" in drawn
    assert '["writes","writes cache"]' in tr.to_html()


# Outlined and decomposed programs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [("layers",), ("repeated",), (True,), ("**.mlp", nn.LayerNorm)])
def test_an_outlined_program_costs_what_its_trace_costs(targets):
    tr = st.trace(Decoder(), ARGS)
    rows, outlined = tr.summary().rows, tr.outline(*targets).summary().rows
    costs = {row.path: (row.flops, row.parameters, row.activation_bytes, row.share, row.writes) for row in rows}
    for row in outlined:
        if row.path.count("/") <= 1 and row.inputs and row.type:
            assert costs[row.path] == (row.flops, row.parameters, row.activation_bytes, row.share, row.writes)


def test_a_function_is_one_row_and_one_box():
    outlined = st.trace(Decoder(), ARGS).outline("layers")
    assert sum(row.type == "" and "attention" not in row.path for row in outlined.summary().rows) == 1
    found = json.loads(re.search(r'id="program">(.*?)</script>', outlined.to_html(), re.DOTALL)[1])["boxes"]
    assert [box["label"] for box in found].count("function Block_0") == 3
    assert [box["kind"] for box in found].count("body") == 1
    assert outlined._repr_html_().startswith("<table>")
    assert b"</svg>" in outlined.to_svg(depth=2) if shutil.which("dot") else True


def test_the_larger_branch_of_a_cond_counts():
    class Branches(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x @ x @ x, lambda x: x @ x, (x,))

    (root, *bodies) = st.trace(Branches(), (torch.ones(3, 3),)).summary().rows
    assert [row.flops for row in bodies] == [2 * 2 * 27, 2 * 27]
    assert root.flops == 2 * 2 * 27
    assert root.activation_bytes == 2 * 36 + 4 + 1


def test_differences_of_outlined_and_decomposed_programs():
    tr, other = st.trace(Decoder(), ARGS), Decoder()
    for layer in other.layers:
        layer.mlp[1] = nn.ReLU()
    changed = st.trace(other, ARGS)
    assert not st.diff(tr.outline("layers"), tr.outline("layers"))
    assert tr.outline("layers").digest == tr.outline("layers").digest != tr.digest
    assert "ReLU[1]" in str(st.diff(tr.outline("layers"), changed.outline("layers")))
    assert st.diff(tr, tr.decompose()) and not st.diff(tr.decompose(), tr.decompose())
    assert [row.flops for row in tr.decompose().summary(0).rows] == [row.flops for row in tr.summary(0).rows]


def test_bodies_that_return_other_values_differ():
    def net(fn):
        class Branches(nn.Module):
            def forward(self, x):
                return torch.cond(x.sum() > 0, fn, lambda x: (x + 1, x + 2), (x,))

        return st.trace(Branches(), (torch.ones(3),))

    def swapped(x):
        a, b = x.sin(), x.cos()
        return b, a

    one, other = net(lambda x: (x.sin(), x.cos())), net(swapped)
    assert one != other
    assert "true_graph_0" in str(st.diff(one, other))


# The schema of differences -------------------------------------------------------------------------------------------

TYPES = {"object": dict, "array": list, "string": str, "null": type(None)}


def fits(data, schema):
    """Whether data is as a JSON schema says, of whose words these are all that ours uses."""
    known = {"$schema", "title", "description", "type", "required", "additionalProperties", "properties", "items"}
    assert set(schema) <= known | {"const", "enum"}, "a word of JSON Schema that this check does not know"
    kinds = schema.get("type", [])
    if kinds and not isinstance(data, tuple(TYPES[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds))):
        return False
    if "const" in schema and data != schema["const"]:
        return False
    if "enum" in schema and data not in schema["enum"]:
        return False
    properties = schema.get("properties", {})
    if properties and not set(schema["required"]) <= set(data) <= set(properties):
        return False
    inside = [(data[key], properties[key]) for key in properties]
    items = [(item, schema["items"]) for item in data] if "items" in schema else []
    return all(fits(*pair) for pair in [*inside, *items])


def test_differences_as_json_fit_the_schema():
    schema = json.loads((resources.files("scopetrace.view") / "assets" / "diff.schema.json").read_text())
    tr, other = st.trace(Decoder(2), ARGS), st.trace(Decoder(3), ARGS)
    found = json.loads(st.diff(tr, other).to_json())
    assert len(found["differences"]) > 5
    assert {d["kind"] for d in found["differences"]} == {"added", "changed"}
    assert fits(found, schema)
    assert fits(json.loads(st.diff(tr, tr).to_json()), schema)
    wrong = [{}, {"version": 2, "differences": []}, {"version": 1, "differences": [{"kind": "added"}]}]
    wrong.append({"version": 1, "differences": [found["differences"][0] | {"what": "module"}]})
    wrong.append({"version": 1, "differences": [found["differences"][0] | {"scope": None}]})
    assert not any(fits(data, schema) for data in wrong)
