"""User scopes and functions under `nested_compile_region` as functions of `outline` and `to_onnx`."""

import pytest
import torch
from torch import nn

import scopetrace as st


@torch.compiler.nested_compile_region
def gated(x, w, b):
    return nn.functional.linear(x, w, b).sigmoid() * x


@torch.compiler.nested_compile_region
def normed(layer, x):
    with st.scope("scale"):
        return layer.cos * layer(x)


class Gates(nn.Module):
    def __init__(self):
        super().__init__()
        self.ls = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.ls:
            x = gated(x, layer.weight, layer.bias)
        return x


class Rotary(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("cos", torch.randn(4))

    def forward(self, x):
        q, k = x * 2, super().forward(x)
        for t in (q, k):
            with st.scope("rotary"):
                x = x + t * self.cos
        return x


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def encode(self, x, scale=1):
        return self.active(self.fc(x)) * scale

    def active(self, x):
        return x.relu()

    def width(self):
        return self.fc.out_features

    def pieces(self, x):
        yield from x.unbind()

    @st.scope("named")
    def with_scope(self, x):
        return x + 1

    def forward(self, x):
        return self.encode(x) + self.width()


class Encoders(nn.Module):
    def __init__(self):
        super().__init__()
        self.ls = nn.ModuleList(Encoder() for _ in range(2))

    def forward(self, x):
        for encoder in self.ls:
            x = encoder.encode(x, scale=encoder.width())
        return encoder.with_scope(encoder(torch.stack([*encoder.pieces(x)])))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.ls = nn.ModuleList(Rotary() for _ in range(2))
        self.seen = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x):
        for layer in self.ls:
            x = normed(layer, x)
        with st.scope("count"):
            self.seen.add_(x.detach().sum(0))
        with st.scope("nothing"):
            return x


def functions(tr, targets):
    program = tr.outline(*targets)
    program.lint()
    return [f"{str(f).partition('::')[2]} ×{len(f.calls)}" for f in program.functions]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("model", "targets", "expected"),
    [
        (Gates, ["gated"], ["gated(x, w, b) -> (result) ×3"]),
        (Gates, ["repeated"], ["gated(x, w, b) -> (result) ×3"]),
        (Gates, ["layers"], ["gated(x, w, b) -> (result) ×3"]),
        (Gates, ["Gates/gat*"], ["gated(x, w, b) -> (result) ×3"]),
        (Layers, ["rotary"], ["rotary(captured, cos, x) -> (captured_0) ×4"]),
        (Layers, ["scale"], ["scale(x, ls.0.weight, ls.0.bias, ls.0.cos) -> (captured_0) ×2"]),
        (Layers, ["count"], ["count(captured, seen) -> (seen) ×1"]),
        (Layers, [Rotary], ["Rotary(x, weight, bias, cos) -> (result) ×2"]),
        (Encoders, ["ls.*.encode"], ["Encoder_encode(x, ls.0.fc.weight, ls.0.fc.bias) -> (result) ×2"]),
        (Encoders, [Encoder], ["Encoder(x, fc.weight, fc.bias) -> (result) ×1"]),
        (Layers, ["layers"], ["normed(x, ls.0.weight, ls.0.bias, ls.0.cos) -> (result) ×2"]),
    ],
)
def test_functions(model, targets, expected, grad):
    torch.manual_seed(0)
    model, x = model().eval(), torch.randn(2, 4)
    with torch.set_grad_enabled(grad):
        tr = st.trace(model, (x,))
        assert functions(tr, targets) == expected
        state = {name: t.clone() for name, t in model.state_dict().items()}
        out, after = tr.outline(*targets)(x), {name: t.clone() for name, t in model.state_dict().items()}
        model.load_state_dict(state)
        torch.testing.assert_close(out, model(x))
        torch.testing.assert_close(after, dict(model.state_dict()))


def test_a_scope_without_ops_is_no_target():
    with pytest.raises(st.errors.OutlineError, match="'nothing' is no call of this trace"):
        st.trace(Layers(), (torch.randn(2, 4),)).outline("nothing")


def test_calls_and_order_are_those_of_modules():
    tr = st.trace(Layers(), (torch.randn(2, 4),))
    assert [(call.position, call.fqn, call.parent and call.parent.fqn) for call in tr.calls] == [
        (0, "", None),
        (1, "ls.0", ""),
        (2, "ls.1", ""),
    ]
    assert tr.order.module_forward_order == ["", "ls.0", "ls.1"]
    assert [row.fqn for row in tr.memory().rows] == ["", "ls.0", "ls.1"]
    assert str(tr.scope_of(tr.calls[1].nodes[-1])) == "Layers/normed/scale/Rotary[ls.0]/rotary"


def test_a_method_of_another_module_is_a_scope():
    model = Encoders()
    tr = st.trace(model, (torch.randn(2, 4),))
    assert "\n".join(map(str, tr.scope.walk())) == (
        """\
Encoders
Encoders/ls.0.encode
Encoders/ls.0.encode/Linear[ls.0.fc]
Encoders/ls.1.encode
Encoders/ls.1.encode/Linear[ls.1.fc]
Encoders/Encoder[ls.1]
Encoders/Encoder[ls.1]/Linear[fc]
Encoders/named"""
    )
    assert 'scope("ls.0.encode")' in str(tr.summary())
    assert not any("encode" in vars(encoder) for encoder in model.ls)


def test_the_methods_that_a_trace_puts_into_modules_are_not_seen():
    class Asks(Encoders):
        def forward(self, x):
            names = [*vars(self.ls[0])]
            return x * ("encode" in self.ls[0].__dict__) + len(names) + ("encode" in names)

    model, x = Asks(), torch.randn(2, 4)
    torch.testing.assert_close(st.trace(model, (x,))(x), model(x))


def test_scopes_stay_calls_after_an_edit_and_in_a_file(tmp_path):
    tr = st.trace(Layers(), (torch.randn(2, 4),))
    before = functions(tr, ["rotary"])
    tr.save(tmp_path / "layers.st")
    assert functions(st.load(tmp_path / "layers.st"), ["rotary"]) == before
    graph = tr.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
        node.target = torch.ops.aten.sub.Tensor
    assert functions(tr, ["rotary"]) == before


def test_onnx_functions():
    pytest.importorskip("onnxruntime")
    with torch.no_grad():
        tr = st.trace(Gates(), (torch.randn(2, 4),))
        model = tr.to_onnx(functions="repeated", verify=True)
    assert [node.op_type for node in model.graph] == ["gated"] * 3
    [function] = model.functions.values()
    assert [x.name for x in function.inputs] == ["x", "w", "b"]
