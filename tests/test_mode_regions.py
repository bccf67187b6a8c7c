"""Blocks under `torch.no_grad()` and `torch.autocast` as regions of an ExportedProgram, beside eager."""

import copy
import io

import pytest
import torch
from torch import nn

import scopetrace as st

_hops = torch.ops.higher_order


def _regions(gm):
    """The ops of the regions of a graph, nested as these."""
    found = []
    for node in gm.graph.nodes:
        if node.target in (_hops.wrap_with_autocast, _hops.wrap_with_set_grad_enabled):
            (body,) = (a for a in node.args if isinstance(a, torch.fx.Node) and a.op == "get_attr")
            state = [a for a in node.args if not isinstance(a, torch.fx.Node)]
            found.append((state[0], _regions(getattr(gm, body.target))))
        elif isinstance(node.target, torch._ops.OpOverload):
            found.append(node.target.overloadpacket.__name__)
    return [x for x in found if x != "_assert_tensor_metadata"]


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4, 4))

    def forward(self, x):
        a = x.sin()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            b = self.fc(a).relu_()
            c = torch.mm(b, b.float()) + 1
            with torch.no_grad():
                c = c + torch.mm(a, a)
        return b * c


def _same(program, model, x):
    eager, given = copy.deepcopy(model), x.clone().requires_grad_()
    here = x.clone().requires_grad_()
    expected, result = eager(given), program(here)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    expected.sum().backward()
    result.sum().backward()
    torch.testing.assert_close(here.grad, given.grad, rtol=0, atol=0)


@pytest.mark.parametrize("loaded", [False, True])
def test_blocks_are_regions(loaded, tmp_path):
    model, x = Mixed(), torch.randn(4, 4)
    tr = st.trace(model, (x.clone().requires_grad_(),))
    if loaded:
        tr.save(tmp_path / "a.st")
        tr = st.load(tmp_path / "a.st")
    ep = tr.to_exported_program(mode_regions=True)
    assert _regions(ep.graph_module) == [
        "sin",
        ("cpu", ["linear", "relu", "to", "mm", "add"]),
        (False, [("cpu", ["mm", "add"])]),
        "mul",
    ]
    _same(ep.module(), model, x)
    file = io.BytesIO()
    torch.export.save(ep, file)
    file.seek(0)
    _same(torch.export.load(file).module(), model, x)


@pytest.mark.parametrize("name", ["mode_regions", "prefer_deferred_runtime_asserts_over_guards"])
def test_flags_are_bools(name):
    tr = st.trace(nn.ReLU(), (torch.ones(2),))
    with pytest.raises(st.errors.ArgumentTypeError, match="True or False, not 'no_grad'"):
        tr.to_exported_program(**{name: "no_grad"})


def test_the_casts_are_ops_unless_asked_for():
    ep = st.trace(Mixed(), (torch.randn(4, 4),)).to_exported_program()
    assert not any(n.target is _hops.wrap_with_autocast for n in ep.graph.nodes)
    assert _regions(ep.graph_module)[:5] == ["sin", "to", "to", "to", "linear"]


def test_blocks_without_gradients_are_regions_where_none_could_show():
    class Net(nn.Module):
        def forward(self, x, y):
            with torch.enable_grad():
                x = x - y
            with torch.no_grad():
                x = x + y
            return x

    args = torch.tensor(10), torch.tensor(12)
    ep = st.trace(Net(), args).to_exported_program(mode_regions=True)
    assert _regions(ep.graph_module) == ["sub", (False, ["add"])]
    with torch.no_grad():
        ep = st.trace(Net(), args).to_exported_program(mode_regions=True)
    assert _regions(ep.graph_module) == [(True, ["sub"]), "add"]


def test_what_autocast_would_change_stays_outside():
    """`addmm_` is not cast by autocast, and `addmm` in its place would be."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.zeros(3, 3))

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                self.state.addmm_(x, x)
                return torch.mm(x, self.state) + self.state.to(torch.bfloat16)

    model, x = Net(), torch.randn(3, 3)
    ep = st.trace(copy.deepcopy(model), (x,)).to_exported_program(mode_regions=True)
    assert _regions(ep.graph_module) == ["addmm", ("cpu", ["mm", "to", "add"])]
    program = ep.module()
    for _ in range(2):
        torch.testing.assert_close(program(x), model(x), rtol=0, atol=0)
    torch.testing.assert_close(program.state, model.state, rtol=0, atol=0)


@pytest.mark.parametrize("inner", [torch.float16, None])
def test_blocks_in_blocks_and_other_dtypes(inner):
    class Net(nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = x @ x
                with torch.autocast("cpu", dtype=inner, enabled=inner is not None):
                    y = y.float() @ x
                return torch.cat([y @ x, x])

    model, x = Net(), torch.randn(3, 3)
    ep = st.trace(model, (x,)).to_exported_program(mode_regions=True)
    torch.testing.assert_close(ep.module()(x), model(x), rtol=0, atol=0)
    count = sum(n.target is _hops.wrap_with_autocast for n in ep.graph.nodes)
    assert count == (2 if inner is None else 3)


def test_a_branch_has_regions_of_its_own():
    class Net(nn.Module):
        def forward(self, x):
            def wide(x):
                return x @ x

            def narrow(x):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return (x @ x).float()

            return torch.cond(x.sum() > 0, narrow, wide, (x,))

    model = Net()
    ep = st.trace(model, (torch.ones(3, 3),)).to_exported_program(mode_regions=True)
    assert _regions(ep.graph_module.true_graph_0) == [("cpu", ["matmul", "to"])]
    for x in (torch.rand(3, 3), -torch.rand(3, 3)):
        torch.testing.assert_close(ep.module()(x), model(x), rtol=0, atol=0)


def test_a_program_with_regions_is_traced_again():
    model, x = Mixed(), torch.randn(4, 4)
    ep = st.trace(model, (x,)).to_exported_program(mode_regions=True)
    again = st.trace(ep.module(), (x,)).to_exported_program(mode_regions=True)
    assert _regions(again.graph_module) == _regions(ep.graph_module)
    assert _regions(ep.run_decompositions().graph_module)
