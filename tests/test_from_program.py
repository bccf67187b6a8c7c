"""Graphs whose nodes know their modules: their module calls are those of the model that they came from."""

import io

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import scopetrace as st


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x, scale, *, shift=None):
        return x + self.fc(self.norm(x)) * scale + shift, scale


class Net(nn.Module):
    """A module that is called twice, tuples as results, a keyword, a nested container, shared weights."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
        self.head[1].weight = self.head[0][0].weight

    def forward(self, x):
        scale, shift = x.mean(), x + 1
        for block in [*self.blocks, self.blocks[0]]:
            x, scale = block(x, scale, shift=shift)
        return self.head(x)


X = torch.randn(2, 4)


def calls(tr):
    return [(call.fqn, call.index, call.module_type.__name__) for call in tr.calls[1:]]


def functions(tr):
    """Of each function of a layer: its name, how many tensors it takes, and which calls are of it."""
    return [(f.name, len(f.inputs), [call.fqn for call in f.calls]) for f in tr.outline("layers").functions]


def reloaded(ep):
    file = io.BytesIO()
    torch.export.save(ep, file)
    return torch.export.load(io.BytesIO(file.getvalue()))


def of_dynamo(model):
    graphs = []
    torch.compile(model, backend=lambda gm, inputs: graphs.append((gm, tuple(inputs))) or gm, fullgraph=True)(X)
    torch._dynamo.reset()
    return graphs[0]


def without_leaves(model):
    tracer = torch.fx.Tracer()
    tracer.is_leaf_module = lambda *_: False
    return torch.fx.GraphModule(model, tracer.trace(model)), (X,)


FORMS = {
    "export": lambda m: (torch.export.export(m, (X,)).module(), (X,)),
    "strict": lambda m: (torch.export.export(m, (X,), strict=True).module(), (X,)),
    "decomposed": lambda m: (torch.export.export(m, (X,)).run_decompositions().module(), (X,)),
    "saved": lambda m: (reloaded(torch.export.export(m, (X,))).module(), (X,)),
    "symbolic_trace": lambda m: (torch.fx.symbolic_trace(m), (X,)),
    "symbolic_trace without leaves": without_leaves,
    "dynamo": of_dynamo,
    "a trace": lambda m: (st.trace(m, (X,)).graph_module, (X,)),
    "a trace as a program": lambda m: (st.trace(m, (X,)).to_exported_program().module(), (X,)),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_calls_are_those_of_the_model(form):
    model = Net().eval()
    expected = st.trace(model, (X,))
    graph, args = FORMS[form](model)
    tr = st.trace(graph, args)
    tr.check(args)
    assert calls(tr) == calls(expected)
    assert functions(tr)[0][::2] == ("Block", ["blocks.0", "blocks.1", "blocks.0"])


def test_arguments_are_what_is_read_from_outside_and_results_what_is_read_outside():
    assert str(st.from_exported_program(torch.export.export(Net().eval(), (X,)))).startswith(
        """\
Net: 20 ops, 15 module calls, 11 parameters (80 elements)
Net(x=%x: f32[2, 4]) -> %linear_4: f32[2, 4]
  %mean: f32[] = aten.mean(%x)
  %add: f32[2, 4] = aten.add.Tensor(%x, 1)
  Block[blocks.0](arg0=%x: f32[2, 4], arg1=%mean: f32[], arg2=%add: f32[2, 4]) -> %add_2: f32[2, 4]
    LayerNorm[norm](input=%x: f32[2, 4]) -> %layer_norm: f32[2, 4]
      %layer_norm: f32[2, 4] = aten.layer_norm(%x, [4], self.weight, self.bias, 1e-05, False)
    Linear[fc](input=%layer_norm: f32[2, 4]) -> %linear: f32[2, 4]
      %linear: f32[2, 4] = aten.linear(%layer_norm, self.weight, self.bias)
    %mul: f32[2, 4] = aten.mul.Tensor(%linear, %mean)
    %add_1: f32[2, 4] = aten.add.Tensor(%x, %mul)
    %add_2: f32[2, 4] = aten.add.Tensor(%add_1, %add)
  Block[blocks.1], Block[blocks.0]#1 ×2 as Block[blocks.0] -> %add_6: f32[2, 4]
"""
    )


def test_the_signature_is_that_which_was_kept():
    ep = torch.export.export(Net().eval(), (X,), preserve_module_call_signature=("blocks.0", "blocks.1"))
    tr, expected = st.from_exported_program(reloaded(ep)), st.trace(Net().eval(), (X,))
    assert functions(tr)[0] == functions(expected)[0]
    for ours, theirs in zip(tr.calls["Block"], expected.calls["Block"], strict=True):
        assert str(ours.arguments) == str(theirs.arguments) and str(ours.outputs) == str(theirs.outputs)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.fc(x)


def tied(layers, change):
    model = nn.Sequential(*[Layer() for _ in range(layers)])
    change(model)
    return model.eval()


TIED = {
    "a layer registered twice": lambda: tied(3, lambda m: setattr(m, "2", m[0])),
    "a layer in two layers": lambda: tied(2, lambda m: setattr(m[1], "fc", m[0].fc)),
    "a weight of two layers": lambda: tied(2, lambda m: setattr(m[1].fc, "weight", m[0].fc.weight)),
    "all of two layers": lambda: tied(
        2, lambda m: (setattr(m[1].fc, "weight", m[0].fc.weight), setattr(m[1].fc, "bias", m[0].fc.bias))
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", TIED)
def test_tied_layers_are_those_of_the_model(name, strict):
    """Under the name by which forward called them; strict programs have one name of each tensor in their graph."""
    model = TIED[name]()
    expected, ep = st.trace(model, (X,)), torch.export.export(model, (X,), strict=strict)
    for program in (ep, ep.run_decompositions({}), reloaded(ep)):
        tr = st.from_exported_program(program)
        torch.testing.assert_close(tr(X), model(X))
        modules = [[model.get_submodule(call.fqn) for call in t.calls] for t in (tr, expected)]
        assert modules[0] == modules[1]
        assert [f[::2] for f in functions(tr)] == [("Layer", [str(i) for i in range(len(model))])]
        states = [t.to_exported_program().state_dict for t in (tr, expected)]
        assert sorted(states[0]) == sorted(states[1])
        assert len({t.data_ptr() for t in states[0].values()}) == len({*model.parameters()})


def test_a_program_with_a_sparse_buffer_that_it_does_not_read():
    model = Layer()
    model.register_buffer("eye", torch.eye(4).to_sparse())
    torch.testing.assert_close(st.from_exported_program(torch.export.export(model, (X,)))(X), model(X))


def test_sizes_are_dynamic_as_in_the_program():
    batch = torch.export.Dim("batch", min=2, max=8)
    tr = st.from_exported_program(torch.export.export(Net().eval(), (X,), dynamic_shapes=({0: batch},)))
    assert tr(torch.ones(5, 4)).shape == (5, 4)
    with pytest.raises(st.errors.InputMismatchError):
        tr(torch.ones(9, 4))


def test_a_node_of_a_pass_is_where_its_neighbours_are():
    """As quantization puts them: `quantize` and `dequantize` between ops."""
    gm = torch.export.export(Net().eval(), (X,)).module()
    linear = next(n for n in gm.graph.nodes if n.name == "linear")
    with gm.graph.inserting_before(linear):
        rounded = gm.graph.call_function(torch.ops.aten.round.default, (linear.args[0],))
    linear.args = (rounded, *linear.args[1:])
    gm.recompile()
    tr = st.trace(gm, (X,))
    tr.check((X,))
    assert calls(tr) == calls(st.trace(Net().eval(), (X,)))
    assert QUANTIZED in str(tr)


QUANTIZED = """\
    %round_1: f32[2, 4] = aten.round(%layer_norm)
    Linear[fc](input=%round_1: f32[2, 4]) -> %linear: f32[2, 4]
      %linear: f32[2, 4] = aten.linear(%round_1, self.weight, self.bias)
"""


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 4)


class Begins(Frozen):
    def forward(self, x):
        with torch.no_grad():
            y = self.fc(x).relu()
        return x + self.norm(y)


class Between(Frozen):
    def forward(self, x):
        x = self.norm(x)
        with torch.no_grad():
            y = self.fc(x)
        return x + y


class Whole(Frozen):
    @torch.no_grad()
    def forward(self, x):
        return self.fc(self.norm(x))


class Autocast(Frozen):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.fc(x)
        return self.norm(x) + y


@pytest.mark.parametrize("layer", [Begins, Between, Whole, Autocast])
def test_a_block_under_another_mode_is_in_the_module_that_its_ops_have_in_common(layer):
    model = nn.Sequential(layer(), layer())
    expected, tr = st.trace(model, (X,)), st.from_exported_program(torch.export.export(model, (X,)))
    tr.check((X,))
    assert calls(tr) == calls(expected)
    assert functions(tr) == functions(expected)
    assert [str(call.arguments) for call in tr.calls] == [str(call.arguments) for call in expected.calls]
    with torch.no_grad():
        torch.testing.assert_close(tr(X), expected(X))


def chosen():
    return torch.utils.checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.linear.default])


class Checkpointed(nn.Module):
    """Calls its layers in a region; strict exports of torch 2.13 fail on one without `context_fn=`."""

    def __init__(self, inside):
        super().__init__()
        self.layers, self.inside = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)), inside

    def part(self, x):
        return self.layers[1](self.layers[0](x)) if self.inside else self.layers[0][0](x)

    def forward(self, x):
        x = torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=False, context_fn=chosen)
        return x if self.inside else self.layers[1](self.layers[0](x))


@pytest.mark.parametrize("inside", [True, False])
def test_layers_in_a_region_of_a_strict_export(inside):
    model = nn.Sequential(Checkpointed(inside), nn.ReLU())
    expected, ep = st.trace(model, (X,)), torch.export.export(model, (X,), strict=True)
    for program in (ep, ep.run_decompositions({}), reloaded(ep)):
        tr = st.from_exported_program(program)
        torch.testing.assert_close(tr(X), model(X))
        assert calls(tr) == calls(expected)
        assert functions(tr) == functions(expected)


def test_a_module_that_is_entered_again_is_another_call():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    gm = torch.export.export(model, (X,)).module()
    first, _, second = [n for n in gm.graph.nodes if n.op == "call_function"]
    second.meta["nn_module_stack"] = first.meta["nn_module_stack"]
    tr = st.trace(gm, (X,))
    tr.check((X,))
    assert calls(tr) == [("0", 0, "Linear"), ("1", 0, "ReLU"), ("0", 1, "Linear")]


@pytest.mark.parametrize(
    "use", [lambda tr: tr.outline("layers"), lambda tr: tr.to_onnx(functions="layers")], ids=["outline", "to_onnx"]
)
def test_where_nothing_tells_calls_layers_are_an_error(use):
    tr = st.trace(make_fx(Net().eval())(X), (X,))
    assert calls(tr) == []
    with pytest.raises(st.errors.OutlineError, match="nothing tells which there were"):
        use(tr)


class WithoutGradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


def test_layers_in_a_block_without_gradients():
    """torch's `run_decompositions` forgets the modules of its ops, ours does not."""
    model = WithoutGradients()
    ep = torch.export.export(model, (X,))
    for tr in (st.trace(model, (X,)), st.from_exported_program(ep)):
        for form in (tr, tr.decompose()):
            assert [(f.name, len(f.calls)) for f in form.outline("layers").functions] == [("Sequential", 3)]
    tr = st.from_exported_program(ep.run_decompositions())
    assert calls(tr) == [("head", 0, "Linear")]
    for use in (tr.outline, lambda targets: tr.to_onnx(functions=targets)):
        with pytest.raises(st.errors.OutlineError, match=r"no_grad after run_decompositions\(\): trace the model"):
            use("layers")
    assert torch.equal(tr.compile("eager")(X), model(X))
    assert [f.name for f in tr.outline("head").functions] == ["Linear"]


def test_what_cannot_be_a_program():
    ep = torch.export.export(Net(), (X,))
    ep.example_inputs = None
    with pytest.raises(
        st.ArgumentError, match=r"no example_inputs; write st.trace\(program.module\(\), args, kwargs\)"
    ):
        st.from_exported_program(ep)
    with pytest.raises(st.errors.ArgumentTypeError, match="takes an ExportedProgram, not Net"):
        st.from_exported_program(Net())
