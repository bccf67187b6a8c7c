"""What compilers of devices need of ONNX files: weights as inputs or apart, custom ops as functions, plugins."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import scopetrace as st

onnxruntime = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import onnx_devices as example  # noqa: E402

X = torch.randn(2, 32)
SLOW = pytest.mark.slow


def build():
    return nn.Sequential(example.Layer(32), example.Layer(32), nn.Linear(32, 4))


MODEL = build()


@pytest.fixture(scope="module")
def trace():
    return st.trace(MODEL, (X,))


def files(folder):
    return sorted(p.name for p in folder.iterdir())


def check(path, **given):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = dict(
        zip([o.name for o in session.get_outputs()], session.run(None, {"input": X.numpy(), **given}), strict=True)
    )
    torch.testing.assert_close(torch.from_numpy(found["output"]), MODEL(X).detach(), atol=1e-4, rtol=1e-4)
    return found


def test_custom_ops_as_functions(trace, tmp_path):
    model = example.custom_ops_as_functions(trace, tmp_path / "model.onnx")
    assert [n.op_type for n in model.graph] == ["Layer", "Layer", "Gemm"]
    assert [f.name for f in model.functions.values()] == ["Layer", "RmsNorm"]
    (call,) = [n for f in model.functions.values() for n in f if n.op_type == "RmsNorm"]
    assert call.attributes["eps"].value == pytest.approx(1e-5)
    assert call.name == "Layer/Norm[norm]/RmsNorm"
    check(tmp_path / "model.onnx")


@pytest.mark.parametrize("functions", ["layers", *(pytest.param(f, marks=SLOW) for f in ((), example.RMS_NORM))])
def test_a_script_is_inlined_unless_its_op_is_named(trace, functions):
    model = trace.to_onnx(functions=functions, custom_translation_table=example.FORMS, verify=True)
    every = [n.op_type for part in (model.graph, *model.functions.values()) for n in part]
    assert ("RmsNorm" in every) == (functions is example.RMS_NORM)


@SLOW
def test_a_script_of_another_opset_than_the_model_is_refused(trace):
    with pytest.raises(st.OnnxOptionError, match="is written in opset 20, and the model has opset 18"):
        trace.to_onnx(opset_version=18, custom_translation_table=example.FORMS)


def test_plugins_with_constants(trace, tmp_path):
    example.plugins_with_constants(trace, tmp_path / "model.onnx")
    node = onnx.load(tmp_path / "model.onnx").graph.node[0]
    assert (node.domain, node.op_type) == ("trt.plugins", "RmsNorm")
    found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert found == {"plugin_version": b"1", "plugin_namespace": b"", "eps": pytest.approx(1e-5)}


class Table(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def forward(self, x):
        return x + 1


def test_attributes_may_be_tensors():
    tr = st.trace(nn.Sequential(Table(2), Table(3)), (X,))
    model = tr.to_onnx(plugins={Table: "trt::Table"}, attributes=lambda call: {"t": torch.ones(call.module.rows)})
    assert [tuple(n.attributes["t"].value.shape) for n in model.graph] == [(2,), (3,)]
    with pytest.raises(st.OnnxOptionError, match="t=<function relu"):
        tr.to_onnx(plugins=Table, attributes=lambda call: {"t": nn.functional.relu})


def test_custom_ops_as_plugins(trace):
    model = example.custom_ops_as_plugins(trace, None)
    node = model.graph[0]
    assert (node.domain, node.op_type, [v.name for v in node.inputs]) == (
        "trt.plugins",
        "RmsNorm",
        ["input", "0.norm.weight"],
    )
    assert {n: a.value for n, a in node.attributes.items()} == {"eps": pytest.approx(1e-5)}
    assert not model.functions


@torch.library.custom_op("scopetrace_tests::several", mutates_args=())
def several(
    x: torch.Tensor, y: torch.Tensor | None, n: int, flag: bool, sizes: list[int], mode: str = "a"
) -> tuple[torch.Tensor, torch.Tensor]:
    return x * n, x + 1


@several.register_fake
def _(x, y, n, flag, sizes, mode="a"):
    return torch.empty_like(x), torch.empty_like(x)


class Several(nn.Module):
    def forward(self, x):
        a, b = several(x, None, 3, True, [1, 2])
        return a + b, several(x, x, 2, False, [], "b")[1]


def test_arguments_of_a_custom_op_that_is_a_plugin():
    model = st.trace(Several(), (X,)).to_onnx(plugins={torch.ops.scopetrace_tests.several.default: "trt::Several"})
    first, _, second = model.graph
    assert [len(n.inputs) for n in (first, second)] == [1, 2]
    assert {n: a.value for n, a in first.attributes.items()} == {"n": 3, "flag": 1, "sizes": (1, 2), "mode": "a"}
    assert {n: a.value for n, a in second.attributes.items()} == {"n": 2, "flag": 0, "sizes": (), "mode": "b"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"functions": example.RMS_NORM}, "has no body: give it one"),
        ({"functions": {example.RMS_NORM: "a::B"}}, "has the name of its onnxscript function"),
        ({"functions": torch.ops.example.rms_norm}, "name one, as torch.ops"),
        ({"plugins": example.RMS_NORM}, "needs a name"),
        ({"plugins": {example.RMS_NORM: "Norm"}}, "write 'my.domain::Norm'"),
        ({"weight_inputs": "*adapter*"}, "matches no parameter or buffer; there are '0.norm.weight'"),
        ({"export_params": False}, "give a path"),
        ({"external_data": "folder/shared.data"}, "the name of a file of its own, which lies beside"),
        ({"external_data": ""}, "the name of a file of its own, which lies beside"),
        ({"external_data": 0}, "the largest size of a file in bytes"),
    ],
)
def test_options_that_do_not_fit(trace, options, message):
    with pytest.raises(st.OnnxOptionError, match=message):
        trace.to_onnx(**options)


def test_lora_weights_as_inputs(trace, tmp_path):
    example.lora_as_inputs(trace, tmp_path / "model.onnx")
    lora = {name: p.detach().numpy() for name, p in MODEL.named_parameters() if ".lora_" in name}
    found = check(tmp_path / "model.onnx", **lora)
    assert set(found) == {"output", *(f"{name}_RetainedState" for name in lora)}
    assert all((found[f"{name}_RetainedState"] == value).all() for name, value in lora.items())
    assert not set(lora) & {i.name for i in onnx.load(tmp_path / "model.onnx").graph.initializer}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


def test_tied_weights_are_one_input_by_the_first_name():
    for pattern in ("a.weight", lambda name: name.endswith("weight")):
        model = st.trace(Tied(), (torch.ones(1, 4),)).to_onnx(weight_inputs=pattern, verify=True)
        assert [v.name for v in model.graph.inputs] == ["x", "a.weight"]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x):
        self.count += 1
        return self.fc(x) * self.count + self.table


def test_state_that_is_an_input_has_no_default():
    model = st.trace(Counting(), (torch.ones(1, 4),)).to_onnx(weight_inputs=True, retain_weights=True, verify=True)
    assert {v.name for v in model.graph.inputs} == {"x", *(held := ["count", "fc.weight", "fc.bias", "table"])}
    assert {v.name for v in model.graph.outputs} == {"output", *(f"{name}_updated" for name in held)}
    assert not set(held) & set(model.graph.initializers)


@pytest.mark.parametrize(
    ("functions", "size"),
    [((), 64), *(pytest.param(*c, marks=SLOW) for c in ((Counting, 64), ((), None), (Counting, None)))],
)
def test_weights_that_are_written_later(functions, size, tmp_path):
    path, model, x = tmp_path / "model.onnx", nn.Sequential(Counting(), Counting()), torch.randn(2, 4)
    wanted = st.trace(model, (x,))(x).detach()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options = {"functions": functions, "external_data": size, "export_params": False, "verify": True}
    st.trace(model, (x,)).to_onnx(path, **options)
    assert files(tmp_path) == ["model.onnx"]
    with pytest.raises(Exception, match="External data path"):
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    state["0.count"], state["1.count"] = torch.zeros(()), torch.zeros(())
    st.write_onnx_weights(path, state)
    assert len(files(tmp_path)) == (2 if size is None else 5)
    assert all(p.stat().st_size <= (size or 1000) for p in tmp_path.glob("*.data"))
    (found, *_) = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"input": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), wanted)


def test_the_file_of_a_model_without_memory(tmp_path):
    path = tmp_path / "model.onnx"
    example.without_weights(build, (X,), path)
    state = MODEL.state_dict()
    for wrong, message in (
        ({}, "needs '0.norm.weight' and"),
        (state | {"2.bias": torch.ones(5)}, r"2.bias is FLOAT\[5\], and the file has FLOAT\[4\]"),
        (state | {"2.bias": torch.ones(4).long()}, "2.bias is INT64"),
    ):
        with pytest.raises(st.OnnxOptionError, match=message):
            st.write_onnx_weights(path, wrong)
        assert files(tmp_path) == ["model.onnx"]
    st.write_onnx_weights(path, state)
    check(path)


def test_a_session_can_be_given_the_weights(tmp_path):
    path = tmp_path / "model.onnx"
    example.without_weights(build, (X,), path)
    options = onnxruntime.SessionOptions()
    state = {name: onnxruntime.OrtValue.ortvalue_from_numpy(t.numpy()) for name, t in MODEL.state_dict().items()}
    options.add_external_initializers(list(state), list(state.values()))
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"input": X.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), MODEL(X).detach(), atol=1e-4, rtol=1e-4)


def test_weights_in_chunks(trace, tmp_path):
    path = tmp_path / "model.onnx"
    for size, count in ((5000, 2), (10_000, 1)):  # an earlier file's are gone
        example.weights_in_chunks(trace, path, size)
        assert len(files(tmp_path)) == 1 + count
        assert all(p.stat().st_size <= size for p in tmp_path.glob("*.data"))
        check(path)
