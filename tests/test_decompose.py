"""`Trace.decompose`: ops in terms of others, with scopes, calls and write-back kept; beside torch.export and eager."""

import collections
import copy

import pytest
import torch
import torch.nn.functional as F
from compare import assert_like_eager
from torch import nn

import scopetrace as st

aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.fc, self.ln = nn.Linear(4, 4), nn.LayerNorm(4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        x = self.norm(self.conv(x)).relu_()
        x = self.ln(self.fc(x.flatten(2).transpose(1, 2)))
        with st.scope("attention"):
            y = nn.functional.scaled_dot_product_attention(x, x, x)
        return nn.functional.dropout(y, 0.5, self.training) + x, y.transpose(0, 1)


def ops(graph):
    return [n.target for n in graph.nodes if n.op == "call_function" and n.target.__name__ not in ("getitem",)]


def traced(model, *args, **options):
    with torch.no_grad():
        return st.trace(model, args, **options)


def test_the_text_of_a_decomposed_trace():
    model = nn.Sequential(nn.Linear(3, 4), nn.SiLU())
    assert str(traced(model, torch.randn(2, 3)).decompose()) == (
        "Sequential: 4 ops, 3 module calls, 2 parameters (16 elements)\n"
        "Sequential(input=%input_1: f32[2, 3]) -> %mul: f32[2, 4]\n"
        "  Linear[0](input=%input_1: f32[2, 3]) -> %addmm: f32[2, 4]\n"
        "    %permute: f32[3, 4] = aten.permute(self.weight, [1, 0])\n"
        "    %addmm: f32[2, 4] = aten.addmm(self.bias, %input_1, %permute)\n"
        "  SiLU[1](input=%addmm: f32[2, 4]) -> %mul: f32[2, 4]\n"
        "    %sigmoid: f32[2, 4] = aten.sigmoid(%addmm)\n"
        "    %mul: f32[2, 4] = aten.mul.Tensor(%addmm, %sigmoid)\n"
    ).rstrip("\n")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("table", [None, {}], ids=["core", "empty"])
def test_the_ops_of_run_decompositions(training, table):
    model, x = Block().train(training), torch.randn(2, 2, 4, 4)
    with torch.no_grad():
        expected = torch.export.export(model, (x,)).run_decompositions(table)
    tr = traced(model, x).decompose(table)
    found, theirs = (collections.Counter(map(str, ops(graph))) for graph in (tr.graph_module.graph, expected.graph))
    # In eval mode, dropout leaves its operand as it is; torch copies it before 2.14.
    assert theirs - found <= collections.Counter({"aten.clone.default": int(not training)})
    # Results keep the strides of eager: on some versions of torch, attention takes a copy for that.
    assert found - theirs <= collections.Counter({"aten.permute.default": 2, "aten.clone.default": 1})
    tr.lint()


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_become_core_aten(layer):
    model, x = layer(3, 4, bidirectional=True), torch.randn(2, 1, 3)
    with torch.no_grad():
        theirs = torch.export.export(model, (x,)).run_decompositions()
    tr = traced(model, x).decompose()
    assert collections.Counter(ops(tr.graph_module.graph)) == collections.Counter(ops(theirs.graph))
    with torch.no_grad():
        torch.testing.assert_close(tr(x), model(x))
    assert torch.backends.mkldnn.enabled


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_decomposed_trace_does_what_the_model_does(training, grad):
    model, x = Block().train(training), torch.randn(2, 2, 4, 4)
    with torch.set_grad_enabled(grad):
        tr = st.trace(model, (x,)).decompose()
        if not training:  # dropout draws in another way
            tr.check(x)
        assert str(tr.write_back).startswith("self.steps.copy_(graph[0])")
        a, _ = tr(x)
        assert a.requires_grad is grad
        if grad:
            a.sum().backward()
            assert model.conv.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[1:], lambda x: x.view(-1)])
def test_a_result_that_eval_mode_leaves_as_it_is_still_shares_memory(view):
    def run(x):
        return view(nn.functional.dropout(x, 0.5, False))

    assert_like_eager(run, st.trace(run, (torch.randn(2, 3),)).decompose(), (torch.randn(2, 3),))


def test_calls_and_scopes_are_kept():
    x = torch.randn(2, 2, 4, 4)
    tr = traced(Block().eval(), x)
    core = tr.decompose()
    assert [(c.fqn, list(c.arguments)) for c in core.calls] == [(c.fqn, list(c.arguments)) for c in tr.calls]
    linear = next(c for c in core.calls if c.fqn == "fc")
    assert [str(n.target) for n in linear.nodes][-3:] == ["aten.bmm.default", "aten.view.default", "aten.add.Tensor"]
    assert linear.outputs is linear.nodes[-1]
    assert {str(core.scope_of(n)) for n in core.graph_module.graph.nodes if n.target is aten._softmax.default} == {
        "Block/attention"
    }
    assert core.calls[0].mutated.keys() == {"steps"}


def test_dynamic_sizes():
    model, x = Block().eval(), torch.randn(2, 2, 4, 4)
    dim = torch.export.Dim("b", min=2, max=9)
    tr = traced(model, x, dynamic_shapes=({0: dim},)).decompose()
    tr.check(torch.randn(5, 2, 4, 4))
    with pytest.raises(st.errors.InputMismatchError, match="at most 9"):
        tr(torch.randn(10, 2, 4, 4))

    fixing = {aten.relu.default: lambda x: torch.clamp(x, min=0) if x.shape[0] == 3 else x}
    with pytest.raises(st.errors.DynamicShapeError, match="fixes it at 3"):
        st.trace(nn.ReLU(), (torch.randn(3),), dynamic_shapes=({0: torch.export.Dim("n")},)).decompose(fixing)


def test_a_size_that_depends_on_data():
    def padded(x):
        return nn.functional.pad(x.nonzero(), (0, 0, 0, -x.nonzero().shape[0] % 4)).view(-1, 4, 2)

    tr = traced(padded, torch.randn(8, 4), dynamic_shapes=({0: torch.export.Dim("n")},)).decompose()
    assert torch.equal(tr(torch.eye(8, 4)), padded(torch.eye(8, 4)))
    assert torch.equal(tr(torch.eye(5, 4)), padded(torch.eye(5, 4)))


def test_bodies_of_higher_order_ops():
    def f(x, p):
        return torch.cond(p, lambda x: nn.functional.dropout(x, 0.5, False) @ x, lambda x: x.reshape(3, 3) + 1, (x,))

    x = torch.randn(3, 3)
    tr = traced(f, x, torch.tensor(True)).decompose()
    assert "aten.mm" in str(tr) and "aten.view" in str(tr) and "aten.matmul" not in str(tr)
    for value in (True, False):
        tr.check((x, torch.tensor(value)))


# What a decomposition may do --------------------------------------------------------------------------------------


class Strange(nn.Module):
    def forward(self, x):
        return nn.functional.gelu(x)


def with_gelu(rule, x=None):
    return traced(Strange(), torch.randn(2, 3) if x is None else x).decompose({aten.gelu.default: rule})


def test_a_table_of_ones_own():
    def gelu(x, approximate="none"):
        return x * torch.sigmoid(1.702 * x)

    tr = with_gelu(gelu)
    assert [str(t) for t in ops(tr.graph_module.graph)] == [
        "aten.mul.Tensor",
        "aten.sigmoid.default",
        "aten.mul.Tensor",
    ]
    assert with_gelu(lambda x, **_: NotImplemented).graph_module.graph.find_nodes(
        op="call_function", target=aten.gelu.default
    )


def test_writes_in_a_decomposition_become_functional():
    def gelu(x, approximate="none"):
        out = torch.zeros_like(x)
        out[0] = x[0]
        out.unsqueeze_(0)
        return out.squeeze_(0).add_(torch.tensor([1.0, 2.0, 3.0]))

    x = torch.randn(2, 3)
    tr = with_gelu(gelu, x)
    torch.testing.assert_close(tr(x), gelu(x))
    assert not any(t._schema.is_mutable for t in ops(tr.graph_module.graph))


@pytest.mark.parametrize(
    "rule, message",
    [
        (lambda x, **_: x.double(), "gives torch.float64 of shape [2, 3], and the op torch.float32 of shape [2, 3]"),
        (lambda x, **_: x[0], "gives torch.float32 of shape [3]"),
        (lambda x, **_: x.add_(1), "writes to an argument of the op"),
        (lambda x, **_: x.t_(), "changes the shape of a tensor in place"),
        (lambda x, **_: aten.gelu.default(x), "raises RecursionError"),
        (lambda x, **_: x if x.sum() > 0 else -x, "raises GuardOnDataDependentSymNode"),
        (lambda x, **_: 1 / 0, "raises ZeroDivisionError: division by zero"),
        (lambda x, **_: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), "calls cond"),
    ],
)
def test_refusals(rule, message):
    with pytest.raises(st.errors.DecompositionError) as raised:
        with_gelu(rule)
    assert message in str(raised.value)
    assert "op: aten.gelu.default" in str(raised.value) and "module: Strange" in str(raised.value)


def test_results_keep_memory_and_strides():
    x = torch.randn(3, 2).t()
    tr = with_gelu(lambda x, **_: x.contiguous() * 2, x)
    assert tr(x).stride() == (1, 2)
    tr = with_gelu(lambda x, **_: x, x)  # the op gives a new tensor
    assert tr(x) is not x and tr(x).data_ptr() != x.data_ptr()


def test_an_op_that_reads_by_strides():
    def f(x):
        return torch.as_strided(nn.functional.gelu(x), (4,), (1,), 1)

    x = torch.randn(3, 2).t()
    tr = traced(f, x).decompose({aten.gelu.default: lambda x, **_: x.contiguous() * 1.0})
    torch.testing.assert_close(tr(x), torch.as_strided(x, (4,), (1,), 1))


# Other forms --------------------------------------------------------------------------------------------------------


def test_files_edits_functions_and_programs(tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval(), torch.randn(2, 4)
    core = traced(model, x).decompose()
    core.save(tmp_path / "core.st")
    with torch.no_grad():
        expected = model(x)
        loaded = st.load(tmp_path / "core.st")
        assert str(loaded) == str(core)
        table = {aten.addmm.default: lambda b, x, w: x @ w + b}
        both = loaded.decompose(table)
        assert aten.addmm.default not in ops(both.graph_module.graph)
        for form in (loaded, both, core.to_exported_program().module(), core.outline(nn.Linear), core.to_module()):
            torch.testing.assert_close(form(x), expected)
        torch.testing.assert_close(torch.export.unflatten(core.to_exported_program())(x), expected)
    node = core.graph_module.graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    node.target = aten.silu.default
    core.graph_module.recompile()
    assert aten.silu.default not in ops(
        core.decompose({aten.silu.default: lambda x: x * x.sigmoid()}).graph_module.graph
    )


def test_a_trace_with_its_mutations_becomes_functional():
    x = torch.randn(2, 2, 4, 4)
    core = traced(Block().eval(), x, functional=False).decompose()
    assert not any("relu_" in str(t) for t in ops(core.graph_module.graph))


def test_a_backend_gets_decomposed_graphs():
    seen = []

    def compiler(gm, example_inputs):
        seen.extend(ops(gm.graph))
        return gm

    x = torch.randn(2, 3)
    model = nn.Sequential(nn.Linear(3, 3), nn.GELU())
    table = {**torch.export.default_decompositions()}
    compiled = torch.compile(model, backend=st.functional_backend(compiler, decompositions=table))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert aten.addmm.default in seen and aten.linear.default not in seen
    with pytest.raises(st.ArgumentError, match="level"):
        st.functional_backend(compiler, level="torch", decompositions=table)


OPS = (
    "addcmul baddbmm cdist cumprod diag_embed diff einsum kron logaddexp2 nanquantile nn.functional.batch_norm "
    "nn.functional.group_norm nn.functional.interpolate nn.functional.pad nn.functional.unfold outer stft "
    "unflatten var_mean"
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", OPS.split())
def test_the_values_of_torchs_samples(name):
    from torch.testing._internal.common_methods_invocations import op_db  # takes long to import

    op = next(op for op in op_db if op.name == name)
    sample = next(iter(op.sample_inputs("cpu", torch.float32)))
    leaves, spec = torch.utils._pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]

    def f(*tensors):
        left = iter(tensors)
        new = [next(left) if isinstance(x, torch.Tensor) else x for x in leaves]
        x, args, kwargs = torch.utils._pytree.tree_unflatten(new, spec)
        return op(x, *args, **kwargs)

    tr = traced(f, *tensors).decompose()
    tr.check(tuple(tensors))
    table = torch.export.default_decompositions()
    assert not [t for t in ops(tr.graph_module.graph) if t in table]


def test_a_table_that_is_none_is_refused():
    with pytest.raises(st.errors.ArgumentTypeError, match="give a dict from ops to functions"):
        traced(nn.Linear(3, 4), torch.randn(2, 3)).decompose([torch.ops.aten.silu.default])


def test_a_decomposition_without_a_tensor_is_refused():
    with pytest.raises(st.errors.DecompositionError, match="gives no tensor, and the op"):
        traced(nn.SiLU(), torch.randn(2, 3)).decompose({torch.ops.aten.silu.default: lambda x: 3})


@pytest.mark.parametrize("mask", [None, "causal", "padding", "both"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fused_transformer_layer(norm_first, mask):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first, activation="gelu").eval()
    masks = {"src_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)} if mask in ("causal", "both") else {}
    if mask in ("padding", "both"):
        masks["src_key_padding_mask"] = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        tr = st.trace(layer, (x,), masks)
        fused = torch.ops.aten._transformer_encoder_layer_fwd.default
        assert fused in {n.target for n in tr.graph_module.graph.nodes}
        found = tr.decompose()
        assert fused not in {n.target for n in found.graph_module.graph.nodes}
        torch.testing.assert_close(found(x, **masks), layer(x, **masks))


def test_ops_whose_gradient_is_zero_keep_it():
    def f(x):
        return torch.fill(x, 2.0) + (x * 3).zero_()

    x = torch.randn(3, requires_grad=True)
    found = st.trace(f, (x,)).decompose()
    (gradient,) = torch.autograd.grad(found(x).sum(), x)
    assert found(x).equal(f(x)) and gradient.equal(torch.zeros(3))
    assert aten.fill.Scalar not in ops(traced(f, x.detach()).decompose().graph_module.graph)


@pytest.mark.parametrize("kind", [bool, float])
def test_attention_with_a_row_that_is_masked_as_a_whole(kind):
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    mask = mask if kind is bool else torch.zeros(3, 3).masked_fill(~mask, -torch.inf)
    x = torch.randn(2, 3, 4, requires_grad=True)

    def f(x):
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    found = st.trace(f, (x,)).decompose()
    torch.testing.assert_close(found(x), f(x))
    gradients = [torch.autograd.grad(run(x).square().sum(), x) for run in (found, f)]
    torch.testing.assert_close(*gradients)


def test_gradients_where_a_row_is_overwritten():
    def f(x, value):
        y = x * 2
        y[0] = 0
        y[1] = value
        return y

    given = torch.randn(3, 2, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    found = st.trace(f, given).decompose()
    gradients = [torch.autograd.grad(run(*given).sum(), given) for run in (found, f)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.BatchNorm1d(4, track_running_stats=False), nn.GroupNorm(2, 4)])
@pytest.mark.parametrize("by_func", [False, True])
def test_gradients_of_gradients_go_through_mean_and_deviation(norm, by_func):
    def energy(x):
        return norm(x).pow(3).sum()

    def f(x):
        return torch.func.grad(energy)(x) if by_func else torch.autograd.grad(energy(x), x, create_graph=True)[0]

    norm, x = copy.deepcopy(norm), torch.randn(3, 4, requires_grad=True)
    given = (x, *norm.parameters())
    found = st.trace(f, (x,)).decompose()
    gradients, wanted = (torch.autograd.grad(run(x).square().sum(), given, allow_unused=True) for run in (found, f))
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_detach_keeps_gradients_out(requires_grad, grad):
    """Also in calls with gradients of a trace made without; that of a number is none."""

    def f(x):
        return x * x.detach() * torch.tensor(2.0)

    x = torch.randn(3, requires_grad=True)
    with torch.set_grad_enabled(grad):
        found = st.trace(f, (x.detach().requires_grad_(requires_grad),)).decompose()
    (gradient,) = torch.autograd.grad(found(x).sum(), x)
    assert gradient.equal(x.detach() * 2)
    assert ops(found.graph_module.graph).count(aten.detach.default) == 1 + grad


@pytest.mark.parametrize("shape", [(1, 1, 5), (1, 1, 3, 4)])
def test_gradients_of_what_a_decomposition_reads_where_it_has_written(shape):
    def f(x):
        return F.pad(x, (1, 1) * (x.dim() - 2), mode="circular") ** 2

    x = torch.randn(shape, requires_grad=True)
    found = st.trace(f, (x,)).decompose()
    gradients = [torch.autograd.grad(run(x).square().sum(), x) for run in (found, f)]
    torch.testing.assert_close(*gradients)


def test_a_table_has_ops():
    for wrong in ("gelu", aten.gelu):
        with pytest.raises(st.errors.ArgumentTypeError, match="write ops with overloads"):
            traced(torch.nn.GELU(), torch.ones(2)).decompose({wrong: torch.relu})


def test_a_loaded_trace_of_dynamic_sizes(tmp_path):
    model, sizes = nn.Conv1d(8, 8, 3, padding=1), {0: torch.export.Dim("b"), 2: torch.export.Dim("l")}
    st.trace(model, (torch.randn(2, 8, 6),), dynamic_shapes=(sizes,)).save(tmp_path / "conv.st")
    loaded = st.load(tmp_path / "conv.st")
    x = torch.randn(3, 8, 7)
    torch.testing.assert_close(loaded.decompose()(x), model(x))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_training_step_with_attention(is_causal):
    """The backward takes the logsumexp of the op, which torch's decomposition does not give."""
    model = nn.Linear(4, 12)

    def step(x):
        q, k, v = model(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        loss = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal).square().sum()
        loss.backward()
        return loss

    x = torch.randn(2, 6, 4)
    found = st.trace(step, (x,)).decompose()
    results = {}
    for name, run in (("eager", step), ("decomposed", found)):
        model.zero_grad()
        results[name] = run(x).detach(), model.weight.grad, model.bias.grad
    torch.testing.assert_close(results["decomposed"], results["eager"])
    assert aten._scaled_dot_product_flash_attention_for_cpu.default in ops(found.graph_module.graph)


def test_a_decomposed_program_that_fills_a_cache_is_exported_decomposed():
    def grow(x, cache):
        cache["k"] = torch.cat([cache["k"], F.linear(x, x)])
        return cache["k"]

    program = st.trace(grow, (torch.eye(2), {"k": torch.zeros(1, 2)})).decompose().to_exported_program()
    assert ops(program.graph) == [aten.permute.default, aten.mm.default, aten.cat.default]
    assert program.module()(torch.eye(2), {"k": torch.zeros(1, 2)}).tolist() == [[0, 0], [1, 0], [0, 1]]
