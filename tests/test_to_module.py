"""A trace as an `nn.Module`: the model's parameters and buffers, trained, copied, saved and wrapped."""

import copy
import io
import pickle

import pytest
import torch
from nets import Net, weight
from torch import nn

import scopetrace as st
from scopetrace.errors import EditError, InputMismatchError, ModeError

aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.unused = weight(2)

    def forward(self, x, *, scale=2):
        self.count = self.count + 1
        return torch.relu(self.bn(self.fc(x))) * scale


def tied():
    """A model with a tied weight, in training mode."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[1].weight
    return model


def inputs():
    return torch.randn(5, 4)


def test_its_state_is_that_of_the_model():
    model = tied()
    module = st.trace(model, (inputs(),)).to_module()
    assert list(module.state_dict()) == list(model.state_dict())
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in model.named_parameters()]
    torch.testing.assert_close(module.state_dict(), model.state_dict())
    assert module.get_parameter("1.weight") is module.get_parameter("2.weight")
    assert module.get_parameter("1.weight").data_ptr() == model[1].weight.data_ptr()
    module.load_state_dict(tied().state_dict())


def test_it_trains_as_the_model_does():
    model, x = tied(), inputs()
    other = copy.deepcopy(model)
    module = st.trace(model, (x,)).to_module()
    for trained in (module, other):
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            trained(x).pow(2).sum().backward()
            optimizer.step()
    torch.testing.assert_close(module.state_dict(), other.state_dict())
    torch.testing.assert_close(model.state_dict()["1.weight"], other.state_dict()["1.weight"])
    assert model[0].count == 0  # a buffer that the forward binds anew is bound in the module alone


def test_its_arguments_are_those_of_the_model():
    model, x = Block().eval(), inputs()
    module = st.trace(model, (x,), {"scale": 3}).to_module()
    torch.testing.assert_close(module(x=x, scale=3), model(x, scale=3))
    with pytest.raises(InputMismatchError, match="scale"):
        module(x, scale=4)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": lambda module: saved(module),
}


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", COPIES)
def test_copies_have_memory_of_their_own(name):
    model, x = tied(), inputs()
    module = st.trace(model, (x,)).to_module()
    module(x)
    made = COPIES[name](module)
    assert list(made.state_dict()) == list(module.state_dict())
    assert made.get_parameter("1.weight") is made.get_parameter("2.weight")
    torch.testing.assert_close(made(x), copy.deepcopy(module)(x))
    with torch.no_grad():
        made.get_parameter("1.weight").zero_()
    assert module.get_parameter("1.weight").abs().sum() > 0
    assert "scratch" not in " ".join(made.state_dict())


def test_an_edited_and_a_loaded_trace(tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), inputs()
    trace = st.trace(model, (x,))
    for node in trace.graph_module.graph.find_nodes(op="call_function", target=aten.relu.default):
        node.target = aten.sigmoid.default
    trace.save(tmp_path / "trace")
    for made in (trace, st.load(tmp_path / "trace")):
        module = made.to_module()
        assert list(module.state_dict()) == ["0.weight", "0.bias"]
        torch.testing.assert_close(module(x), torch.sigmoid(model[0](x)))


def test_a_function_has_the_tensors_that_its_graph_reads():
    layer, x = nn.Linear(4, 4), inputs()
    module = st.trace(lambda x: layer(x) * 2, (x,)).to_module()
    assert list(module.state_dict()) == ["layer.weight", "layer.bias"]
    torch.testing.assert_close(module(x), layer(x) * 2)


def test_it_has_the_mode_and_dtype_of_the_trace():
    module = st.trace(tied().eval(), (inputs(),)).to_module()
    assert module.eval() is module
    assert not any(m.training for m in module.modules())
    assert module.to("cpu") is module
    assert module.float() is module
    with pytest.raises(
        ModeError, match=r"was traced in eval mode, and its program has no training mode: call model\.train"
    ):
        module.train()
    with pytest.raises(ModeError, match=r"traced with torch\.float32 and cannot run with torch\.float64"):
        module.double()
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_submodules_hold_tensors_alone():
    module = st.trace(nn.Sequential(nn.Linear(4, 4)), (inputs(),)).to_module()
    layer = module.get_submodule("0")
    for use in (layer, layer.register_forward_hook, layer.register_forward_pre_hook, layer.register_full_backward_hook):
        with pytest.raises(ModeError, match="one graph, which calls no submodule"):
            use(lambda *_: None)
    seen = []
    module.register_forward_hook(lambda *_: seen.append(1))
    module(inputs())
    assert seen


def test_leaf_modules_are_refused():
    trace = st.trace(nn.Sequential(nn.Linear(4, 4)), (inputs(),), leaf_modules=nn.Linear)
    with pytest.raises(ModeError, match="leaf modules, 0, which hold tensors of their own"):
        trace.to_module()


def test_dynamic_sizes_and_results_in_containers():
    model = Net(lambda self, x: {"y": self.fc(x), "size": x.shape[0]}, fc=nn.Linear(4, 4))
    module = st.trace(model, (inputs(),), dynamic_shapes=({0: torch.export.Dim("batch")},)).to_module()
    found = module(torch.ones(3, 4))
    assert found["size"] == 3
    torch.testing.assert_close(found["y"], model(torch.ones(3, 4))["y"])


def test_other_tools_take_it():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), inputs()
    module = st.trace(model, (x,)).to_module()
    torch.testing.assert_close(torch.compile(module, backend="eager")(x), model(x))
    torch.testing.assert_close(nn.Sequential(module, nn.ReLU())(x), model(x))
    torch.testing.assert_close(torch.func.functional_call(module, dict(model.named_parameters()), (x,)), model(x))


def test_an_edit_that_cannot_be_followed():
    trace = st.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (inputs(),))
    for node in trace.graph_module.graph.find_nodes(op="call_function", target=aten.relu.default):
        node.target = aten.relu_.default
    with pytest.raises(EditError, match=r"node relu: aten\.relu_\.default writes"):
        trace.to_module()


def test_torch_jit_traces_it():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), torch.randn(3, 4)
    with torch.no_grad():
        jitted = torch.jit.trace(st.trace(model, (x,)).to_module(), (x,))
        assert jitted(x).equal(model(x))
