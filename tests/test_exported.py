"""`Trace.to_exported_program`: what torch's tools make of it equals the model."""

import copy
import functools
import io
import shutil
import warnings

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.fx.passes.utils import source_matcher_utils
from torch.utils import _pytree as pytree

import scopetrace as st
from scopetrace.errors import InputMismatchError

pytestmark = pytest.mark.filterwarnings("ignore")

X = torch.arange(8.0).reshape(2, 4) / 8 - 0.4


def copied(x):
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, x)


def exported(model, *args, **kwargs):
    return st.trace(model, copied(args), copied(kwargs)).to_exported_program()


def signed(model, *args, **kwargs):
    """With the signature of every call."""
    tr = st.trace(model, copied(args), copied(kwargs))
    return tr.to_exported_program(preserve_module_call_signature=("*",))


def through_file(ep):
    file = io.BytesIO()
    torch.export.save(ep, file)
    file.seek(0)
    return torch.export.load(file)


ROUTES = {
    "module": lambda ep: ep.module(),
    "unflatten": torch.export.unflatten,
    "decomposed": lambda ep: ep.run_decompositions({}).module(),
    "decomposed to core ATen": lambda ep: ep.run_decompositions().module(),
    "saved": lambda ep: through_file(ep).module(),
}


def assert_equal_by(routes, model, *args, **kwargs):
    """Two calls of the model equal two calls of each form: results, changed arguments, changed buffers."""
    for name in routes:
        eager, traced = copy.deepcopy(model), copy.deepcopy(model)
        run = ROUTES[name](exported(traced, *args, **kwargs))
        for _ in range(2):
            mine, theirs = copied((args, kwargs)), copied((args, kwargs))
            got, want = run(*mine[0], **mine[1]), eager(*theirs[0], **theirs[1])
            for a, b in ((got, want), (mine, theirs)):
                assert pytree.tree_structure(a) == pytree.tree_structure(b), name
                torch.testing.assert_close(
                    pytree.tree_leaves(a), pytree.tree_leaves(b), msg=lambda m, n=name: f"{n}: {m}"
                )
        states = eager.state_dict(), run.state_dict()
        for key in states[1].keys() & states[0].keys():
            torch.testing.assert_close(states[1][key], states[0][key])


# The graph and its signature ------------------------------------------------------------------------------------------


class Counter(nn.Module):
    """State of all kinds."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("n", torch.zeros(4))
        self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)
        self.table = torch.ones(4)
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x, flag=True, *, more):
        self.n += 1
        return self.fc(x) * self.scale + self.table * torch.tensor([1.0, 2.0, 3.0, 4.0]) + more["y"] + self.n


def test_signature():
    ep = exported(Counter(), X, False, more={"y": X, "none": None})
    assert str(ep.graph_signature).split("\n") == [
        "",
        "# inputs",
        "p_unused: PARAMETER target='unused'",
        "p_fc_weight: PARAMETER target='fc.weight'",
        "p_fc_bias: PARAMETER target='fc.bias'",
        "b_n: BUFFER target='n' persistent=True",
        "b_scale: BUFFER target='scale' persistent=False",
        "c_lifted_tensor_0: CONSTANT_TENSOR target='lifted_tensor_0'",
        "c_table: CONSTANT_TENSOR target='table'",
        "x: USER_INPUT",
        "flag: USER_INPUT",
        "more_y: USER_INPUT",
        "more_none: USER_INPUT",
        "",
        "# outputs",
        "add: BUFFER_MUTATION target='n'",
        "add_3: USER_OUTPUT",
        "",
    ]
    assert set(ep.state_dict) == {"unused", "fc.weight", "fc.bias", "n"}
    assert set(ep.constants) == {"scale", "table", "lifted_tensor_0"}
    ep.validate()


def test_the_signature_is_that_of_torch_export():
    model = Counter().eval()
    ours = exported(model, X, False, more={"y": X, "none": None})
    theirs = torch.export.export(model, (X, False), {"more": {"y": X, "none": None}}).run_decompositions({})
    assert sorted(map(str, ours.graph_signature.input_specs)) == sorted(map(str, theirs.graph_signature.input_specs))
    assert ours.call_spec == theirs.call_spec
    assert ours.module_call_graph[0].signature == theirs.module_call_graph[0].signature


def test_parameters_are_the_models_own():
    model = Counter()
    ep = exported(model, X, more={"y": X})
    assert ep.state_dict["fc.weight"] is model.fc.weight and ep.state_dict["n"] is model.n
    assert torch.equal(model.n, torch.zeros(4))


def test_nodes_keep_scopes_and_module_stacks():
    ep = exported(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), X)
    linear = next(n for n in ep.graph.nodes if n.name == "linear")
    assert linear.meta["scopetrace"] == {"scope": "Sequential/Linear[0]", "call": 1} and "custom" not in linear.meta
    assert linear.meta["nn_module_stack"] == {
        "L__self__": ("", "torch.nn.modules.container.Sequential"),
        "L__self__0": ("0", "torch.nn.modules.linear.Linear"),
    }


# Equal to eager by every route ----------------------------------------------------------------------------------------


class Rebind(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(4))

    def forward(self, x):
        old = self.n
        self.n = self.n + 1
        return x + self.n, old * 2, self.n


class Swap(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.zeros(4))
        self.register_buffer("b", torch.ones(4))

    def forward(self, x):
        self.a, self.b = self.b, self.a
        return x + self.a


class SwapAndLook(Swap):
    """Views of buffers, which are bound to other tensors afterwards."""

    def forward(self, x):
        before = self.a[1:]
        self.a, self.b = self.b, self.a
        return before, self.a[1:], self.a, self.b * x


class FillBoth(Swap):
    def forward(self, x):
        self.a.copy_(x[0])
        self.b.copy_(x[0])
        return x * self.a


class ChangeInput(nn.Module):
    def forward(self, x):
        view = x.view(-1)[2:]
        x.add_(1)
        before = x.clone()
        x.mul_(2)
        return view, before, x


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i):
        return self.head(self.embed(i))


class HandOn(nn.Module):
    def forward(self, x, *, scale=None, extra=None):
        return x, {"scale": scale}


class Nested(nn.Module):
    """Calls with keywords and containers, a module called three times, modules that return an input."""

    def __init__(self):
        super().__init__()
        self.hand_on = HandOn()
        self.fc = nn.Linear(4, 4)
        self.seq = nn.Sequential(nn.Identity(), self.fc)

    def forward(self, x, *, pair):
        y, more = self.hand_on(self.seq(x), scale=pair[0], extra={"q": [pair[1], None]})
        return {"y": self.fc(y) + self.fc(more["scale"]), "list": [y, None, 3]}


class NoGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        with torch.no_grad():
            z = self.b(y).relu()
        return y * z


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.a(x).relu(), lambda x: x * 2, (x,))


class Keep(nn.Module):
    """Binds an attribute that it does not read: nothing that an ExportedProgram could keep."""

    def forward(self, x):
        self.last = x * 2
        return self.last + 1


class Table(nn.Module):
    """Makes a table where it has none for this size."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, x):
        if self.table.shape[0] != x.shape[1]:
            self.table = torch.arange(x.shape[1])
        return x + self.table


class Aside(nn.Module):
    """Values that pass beside arguments and results."""

    class Put(nn.Module):
        def __init__(self, box):
            super().__init__()
            self.box, self.fc = box, nn.Linear(4, 4)

        def forward(self, x):
            self.box.append(x * 2)
            return self.fc(x)

    class Take(nn.Module):
        def __init__(self, box):
            super().__init__()
            self.box, self.fc = box, nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x) + self.box.pop()

    def __init__(self):
        super().__init__()
        box = []
        self.put, self.take = self.Put(box), nn.Sequential(self.Take(box))

    def forward(self, x):
        return self.take(self.put(x))


BatchNorms = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


class Same(nn.Module):
    """Ops that return their argument."""

    def forward(self, x):
        return torch.ops.aten.positive(torch.ops.aten.resolve_neg(x.conj()))


DROPOUTS = (nn.Dropout(), nn.AlphaDropout(), nn.Dropout1d(0.3), nn.FeatureAlphaDropout())

MODELS = [
    (Counter(), (X,), {"more": {"y": X}}),
    (Rebind(), (X,), {}),
    (Swap(), (X,), {}),
    (SwapAndLook(), (X,), {}),
    (FillBoth(), (X,), {}),
    (ChangeInput(), (X,), {}),
    (Tied(), (torch.tensor([1, 2]),), {}),
    (Nested(), (X,), {"pair": (X, X + 1)}),
    (NoGrad(), (X,), {}),
    (Branch(), (X,), {}),
    (nn.Sequential(Branch(), nn.Identity()), (X,), {}),
    (Keep(), (X,), {}),
    (Table(), (X,), {}),
    (Aside(), (X,), {}),
    (BatchNorms, (X,), {}),
    (nn.Sequential(BatchNorms, BatchNorms), (X,), {}),
    (nn.LSTM(4, 3), (X.reshape(2, 1, 4),), {}),
    (nn.Sequential(Same(), nn.Linear(4, 4), Same()), (X,), {}),
    (nn.Sequential(*DROPOUTS, nn.Linear(4, 4), *DROPOUTS).eval(), (X,), {}),
    (nn.TransformerEncoderLayer(4, 2, batch_first=True).eval(), (X.reshape(1, 2, 4),), {}),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("model", "args", "kwargs"), MODELS, ids=lambda m: type(m).__name__)
def test_equal_to_eager(model, args, kwargs):
    assert_equal_by(["module", "unflatten", "decomposed", "saved"], model, *args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "args", "kwargs"), MODELS, ids=lambda m: type(m).__name__)
def test_equal_to_eager_in_core_aten(model, args, kwargs):
    assert_equal_by(["decomposed to core ATen"], model, *args, **kwargs)


def test_a_result_is_not_the_buffer_that_got_the_same_value():
    run = exported(Rebind(), X).module()
    first = run(X)[2]
    run(X)
    assert first.tolist() == [1, 1, 1, 1]


def test_a_strided_view_of_a_changed_input_has_the_strides_of_the_input():
    class Strided(nn.Module):
        def forward(self, x):
            x.add_(1)
            return x.as_strided((2, 2), (1, 2), 1)

    run = exported(Strided(), X.t()).module()
    torch.testing.assert_close(run(X.clone().t()), Strided()(X.clone().t()))


def test_a_view_whose_size_depends_on_data():
    class Head(nn.Module):
        def forward(self, x):
            n = (x > 0).sum().item()
            torch._check(n <= 4)
            x.add_(1)
            return x[0].narrow(0, 0, n)

    run = exported(Head(), torch.tensor([[1.0, -1.0, 2.0, -3.0]])).module()
    assert run(torch.tensor([[1.0, -1.0, -2.0, -3.0]])).tolist() == [2.0]


def test_gradients():
    model = NoGrad()
    run = exported(model, X).module()
    run(X).sum().backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model(X).sum().backward()
    want = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert got.keys() == want.keys() == {"a.weight", "a.bias"}
    torch.testing.assert_close(got, want)


def test_a_trace_with_mutation_is_made_pure_first():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    ep = st.trace(model, (X,), functional=False).to_exported_program()
    assert [n.name for n in ep.graph.nodes if n.op == "call_function"] == ["linear", "relu"]


def test_a_loaded_trace(tmp_path):
    model = Counter()
    st.trace(model, (X,), {"more": {"y": X + 1}}).save(tmp_path / "trace")
    ep = st.load(tmp_path / "trace").to_exported_program()
    run = ep.module()
    for _ in range(2):
        torch.testing.assert_close(run(X, more={"y": X}), model(X, more={"y": X}))
    assert [e.fqn for e in ep.module_call_graph] == ["", "fc"]


def test_a_model_on_the_meta_device():
    ep = exported(Nested().to("meta"), X.to("meta"), pair=(X.to("meta"), X.to("meta")))
    assert ep.module()(X.to("meta"), pair=(X.to("meta"), X.to("meta")))["y"].shape == (2, 4)


# Modules after unflatten ----------------------------------------------------------------------------------------------


def signatures(ep):
    """What goes in and out of each call, as text."""

    def text(arguments):
        return ", ".join(a.name or repr(a.value) for a in arguments)

    return {
        e.fqn: f"({text(e.signature.inputs)}) -> ({text(e.signature.outputs)})" if e.signature else None
        for e in ep.module_call_graph
    }


def test_signatures_of_the_calls_that_are_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4))
    tr = st.trace(model, (X,))
    plain = tr.to_exported_program()
    assert {e.fqn for e in plain.module_call_graph if e.signature} == {""}
    assert [n.name for n in plain.graph.nodes if n.op == "call_function"] == ["linear", "linear_1"]
    some = tr.to_exported_program(preserve_module_call_signature=("1", "2"))
    assert {e.fqn for e in some.module_call_graph if e.signature} == {"", "1", "2"}
    with pytest.raises(st.ArgumentError, match=r"'3' matches no module call; .*'0'"):
        tr.to_exported_program(preserve_module_call_signature=("3",))


def test_quantizers_find_functions_by_name():
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(2, 2, 1))
    ep = exported(model, torch.randn(1, 2, 3, 3))
    found = source_matcher_utils.get_source_partitions(ep.module().graph, ["conv2d", "relu"])
    assert {name: [str(p.output_nodes[0]) for p in parts] for name, parts in found.items()} == {
        "conv2d": ["conv2d", "conv2d_1"],
        "relu": ["relu"],
    }


def test_parts_of_results_that_nobody_reads_are_left_out():
    ep = st.trace(nn.LayerNorm(4), (X,)).decompose().to_exported_program()
    assert [n.name for n in ep.graph.nodes if n.op == "call_function"] == ["native_layer_norm", "getitem"]


def test_the_dialect_is_that_of_torch_export():
    tr = st.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (X,))
    assert tr.to_exported_program().dialect == "TRAINING"
    assert tr.decompose().to_exported_program().dialect == "ATEN"
    assert tr.to_exported_program().run_decompositions().dialect == "ATEN"


def test_module_calls():
    ep = signed(Nested(), X, pair=(X, X + 1))
    assert signatures(ep) == {
        "": "() -> ()",
        "hand_on": "(linear, pair_0, pair_1, None) -> (linear, pair_0)",
        "fc": "(linear) -> (linear_1)",
        "seq": "(x) -> (linear)",
        "seq.0": "(x) -> (x)",
        "seq.1": "(x) -> (linear)",
        "fc@1": "(pair_0) -> (linear_2)",
    }
    hand_on = ep.module_call_graph[1].signature
    assert hand_on.in_spec == pytree.tree_structure(((0,), {"scale": 0, "extra": {"q": [0, None]}}))
    assert hand_on.out_spec == pytree.tree_structure((0, {"scale": 0}))


def test_a_call_without_ops_has_a_mark():
    ep = signed(nn.Sequential(nn.Identity(), nn.Linear(4, 4)), X)
    mark, _ = (n for n in ep.graph.nodes if n.op == "call_function")
    assert mark.target is torch.ops.aten._assert_tensor_metadata.default and mark.meta["nn_module_stack"]["L__self__0"]
    assert torch.export.unflatten(ep.run_decompositions({}))._modules.keys() == {"0", "1"}


@pytest.mark.parametrize("grad", [False, True])
def test_a_mark_is_in_the_mode_of_the_trace(grad):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Identity(), nn.Linear(4, 4)))
    with torch.set_grad_enabled(grad):
        ep = signed(model, X)
        assert [n.target for n in ep.graph.nodes if n.op == "get_attr"] == []  # a subgraph of another mode
        torch.testing.assert_close(torch.export.unflatten(ep)(X), model(X))


def test_a_result_that_nobody_needs_stays():
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.mha = nn.MultiheadAttention(4, 2)

        def forward(self, x):
            return self.mha(x, x, x)[0]

    model = Attend()
    unflattened = torch.export.unflatten(signed(model, X).run_decompositions({}))
    torch.testing.assert_close(unflattened.mha(X, X, X), model.mha(X, X, X))


def test_a_size_among_the_arguments():
    x, size = torch.ones(2, 4), torch.Size([4, 2])
    assert st.trace(torch.reshape, (x, size)).to_exported_program().module()(x, size).shape == size


def test_values_that_pass_beside_arguments_take_the_signature_away():
    found = signatures(signed(Aside(), X))
    assert [name for name, text in found.items() if text is None] == ["put", "take", "take.0"]


CALLED = [m for m in MODELS if type(m[0]).__name__ not in ("Aside", "Counter", "NoGrad")]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("model", "args", "kwargs"), CALLED, ids=lambda m: type(m).__name__)
def test_unflattened_modules_equal_their_originals(model, args, kwargs):
    """Each module, called with what its original got, gives what that gave; of several calls, in their order."""
    model, seen = copy.deepcopy(model), []
    ep = signed(model, *args, **kwargs)
    unflattened = torch.export.unflatten(ep)
    names = {e.fqn.partition("@")[0] for e in ep.module_call_graph if e.fqn and e.signature is not None}

    def note(name, module, inputs, keywords, out):
        seen.append((name, copied(inputs), copied(keywords), copied(out)))

    for name in names:  # others may be in branches, which torch.cond compiles: hooks cannot write a list there
        model.get_submodule(name).register_forward_hook(functools.partial(note, name), with_kwargs=True)
    model(*copied(args), **copied(kwargs))
    for name, inputs, keywords, out in seen:
        got = unflattened.get_submodule(name)(*inputs, **keywords)
        torch.testing.assert_close(pytree.tree_leaves(got), pytree.tree_leaves(out))
    assert bool(seen) == bool(names)


class Norm(nn.Module):
    """Casts what may be float32 already, as normalizations do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = x.to(torch.float32)
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = Norm(), nn.Linear(4, 4)

    def forward(self, x):
        h = x * 2
        return h + self.fc(self.norm(h)), h


def test_a_cast_that_changes_nothing_leaves_the_signature():
    model = Residual()
    ep = signed(model, X)
    assert signatures(ep) == {"": "() -> ()", "norm": "(mul) -> (mul_2)", "fc": "(mul_2) -> (linear)"}
    for program in (ep, ep.run_decompositions({}), ep.run_decompositions()):
        unflattened = torch.export.unflatten(program)
        unflattened.set_submodule("norm", model.norm)
        torch.testing.assert_close(unflattened(X), model(X))


def test_the_dtype_of_what_is_cast_is_checked():
    def f(x):
        y = x.to(torch.float32)
        y.add_(1)
        return y * 2

    x = torch.ones(3, dtype=torch.float64)
    run = exported(f, torch.ones(3)).module()
    with pytest.raises(RuntimeError, match="dtype mismatch! Expected: Float, Got: double"):
        run(x)
    assert x.tolist() == [1, 1, 1]


class Pieces(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, x):
        return self.op(x)[:2]


class UsesPieces(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.pieces, self.fc, self.same = Pieces(op), nn.Linear(4, 4), nn.Identity()

    def forward(self, x):
        a, b = self.pieces(x + 1)
        c, d = self.pieces.op(x)[:2]
        return self.fc(a.float()) + self.same(b).sum(), self.same(d.float()), self.fc(c.float())


MANY = {
    "unbind": lambda x: x.unbind(0),
    "split": lambda x: x.split(1),
    "split_with_sizes": lambda x: x.split([1, 1]),
    "chunk": lambda x: x.chunk(2),
    "unsafe_chunk": lambda x: x.unsafe_chunk(2),
    "tensor_split": lambda x: x.tensor_split(2),
    "hsplit": lambda x: x.hsplit(2),
    "max": lambda x: x.max(0),
    "topk": lambda x: x.topk(1, 0),
    "sort": lambda x: x.sort(0),
    "median": lambda x: x.median(0),
    "aminmax": lambda x: x.aminmax(dim=0),
    "var_mean": lambda x: torch.var_mean(x, 0),
    "std_mean": lambda x: torch.std_mean(x, 0),
    "cummax": lambda x: x.cummax(0),
    "frexp": torch.frexp,
    "qr": torch.linalg.qr,
    "meshgrid": lambda x: torch.meshgrid(x[0, 0], x[0, 0], indexing="ij"),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x[:1]),
    "foreach": lambda x: torch._foreach_add([x, x], 1),
    "identities": lambda x: (x.to(torch.float32), x.positive()),
}


class UsesAll(nn.Module):
    """One `UsesPieces` for each op: a decomposition takes as long for all of them as for one."""

    def __init__(self):
        super().__init__()
        self.of = nn.ModuleDict({name: UsesPieces(op) for name, op in MANY.items()})

    def forward(self, x):
        return {name: uses(x) for name, uses in self.of.items()}


TABLES = [
    pytest.param(({}, None), id="none, then core ATen", marks=pytest.mark.slow),
    pytest.param(({}, {}), id="no decompositions", marks=pytest.mark.slow),
    pytest.param((None, None), id="core ATen", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("tables", TABLES)
def test_decompositions_keep_the_signatures_of_calls_that_take_pieces(tables):
    model, x = UsesAll(), torch.arange(32.0).reshape(2, 4, 4).sin()
    want = model(x)
    ep = signed(model, x)
    for table in tables:
        ep = ep.run_decompositions(table)
        signatures = {entry.fqn: entry.signature for entry in ep.module_call_graph}
        assert all(signatures[f"of.{name}.{part}"] for name in MANY for part in ("pieces", "fc", "same"))
        torch.testing.assert_close(ep.module()(x), want)
        unflattened = torch.export.unflatten(ep)
        torch.testing.assert_close(unflattened(x), want)
        for name, op in MANY.items():
            torch.testing.assert_close(unflattened.get_submodule(f"of.{name}.pieces")(x), tuple(op(x)[:2]), msg=name)
            unflattened.set_submodule(f"of.{name}.fc", model.of[name].fc)
        torch.testing.assert_close(unflattened(x), want)


# Sizes that differ ----------------------------------------------------------------------------------------------------


class Sized(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, *, ys, n=1):
        h = self.fc(x).reshape(-1)[: ys[0].shape[0]]
        if x.shape[0] * 2 > 5:
            h = h * 2
        return h + ys[0] + n


@pytest.mark.parametrize("route", ["module", "decomposed", "saved"])
def test_dynamic_sizes(route):
    model, batch = Sized(), Dim("batch", min=2, max=64)
    sizes = {"x": {0: batch}, "ys": [{0: 2 * batch}], "n": Dim.DYNAMIC}
    args, kwargs = (torch.randn(3, 4),), {"ys": [torch.randn(6)], "n": 5}
    ep = st.trace(model, args, kwargs, dynamic_shapes=sizes).to_exported_program()
    run = ROUTES[route](ep)
    for size in (3, 5, 9):
        x, y = torch.randn(size, 4), torch.randn(2 * size)
        torch.testing.assert_close(run(x, ys=[y], n=7), model(x, ys=[y], n=7))
    with pytest.raises(AssertionError, match=r"Guard failed: 2 ?\* ?x.size\(\)\[0\] > 5"):
        run(torch.randn(2, 4), ys=[torch.randn(4)], n=5)
    with pytest.raises(AssertionError, match="Guard failed"):
        run(torch.randn(65, 4), ys=[torch.randn(130)], n=5)


class Areas(nn.Module):
    def forward(self, x, y):
        return x.sum() * x.shape[0] + y.sum() * y.shape[0] + (1 if x.shape[0] * 3 < 40 else 2)


D = Dim("d", min=3, max=20)


@pytest.mark.sample(2)
@pytest.mark.parametrize("route", ["module", "decomposed", "saved"])
@pytest.mark.parametrize(
    ("shapes", "sizes", "right", "wrong"),
    [
        (({0: D}, {0: 2 * D}), (4, 8), [(5, 10), (3, 6)], [(5, 11), (2, 4), (21, 42)]),
        (({0: D - 1}, {0: 2 * D}), (4, 10), [(5, 12), (2, 6)], [(5, 10), (1, 4)]),
        (({0: 2 * D + 1}, {0: 3 * D}), (9, 12), [(7, 9)], [(8, 12), (5, 6), (8, 9)]),
        (({0: D}, {0: D + 1}), (4, 5), [(13, 14)], [(14, 15), (14, 14)]),
    ],
)
def test_derived_dims_are_guarded(route, shapes, sizes, right, wrong):
    tr = st.trace(Areas(), tuple(map(torch.ones, sizes)), dynamic_shapes=shapes)
    run = ROUTES[route](tr.to_exported_program())
    for n, m in (sizes, *right):
        args = torch.ones(n), torch.ones(m)
        torch.testing.assert_close(run(*args), Areas()(*args))
    for n, m in wrong:
        with pytest.raises(InputMismatchError):
            tr(torch.ones(n), torch.ones(m))
        with pytest.raises(AssertionError, match="Guard failed"):
            run(torch.ones(n), torch.ones(m))


def test_a_size_of_one_for_which_the_model_goes_another_way_is_guarded():
    tr = st.trace(lambda x: x * 2 if x.shape[0] == 1 else x * 3, (torch.ones(4),), dynamic_shapes=({0: Dim("n")},))
    with pytest.raises(AssertionError, match=r"Guard failed: x.size\(\)\[0\] != 1"):
        tr.to_exported_program().module()(torch.ones(1))


def test_sizes_that_depend_on_data():
    class Pick(nn.Module):
        def forward(self, x):
            i = x.nonzero()
            return i * 2, torch.ones(i.shape[0])

    for route in ("module", "unflatten", "decomposed", "saved"):
        run = ROUTES[route](exported(Pick(), torch.tensor([1.0, 0.0, 2.0])))
        assert [t.shape[0] for t in run(torch.tensor([1.0, 3.0, 2.0]))] == [3, 3]


# What an ExportedProgram cannot say -----------------------------------------------------------------------------------


class Two(nn.Module):
    def forward(self, a, b):
        return a * 2 + b


class Turn(nn.Module):
    def forward(self, x):
        x.t_()
        return x * 2


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = torch.ones(4)

    def forward(self, x):
        self.t = self.t + 1
        return x + self.t


class PlainInPlace(Plain):
    def forward(self, x):
        self.t += 1
        return x + self.t


class Grow(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("t", torch.ones(4))

    def forward(self, x):
        self.t = torch.cat([self.t, self.t])
        return x + self.t[:4]


class Sums(Plain):
    """As the metrics of torchmetrics do: what is summed up is not in the result of a call."""

    def forward(self, x):
        y = x * 2
        self.t = self.t.to(torch.float32) + y.sum(0)
        return y


class Starts(Grow):
    """As the neurons of snntorch do: a state that begins anew in each call, in a buffer without elements before."""

    def __init__(self):
        super().__init__()
        self.t = torch.zeros(0)

    def forward(self, x):
        self.t = torch.zeros_like(self.t)
        self.t = torch.zeros_like(x) if self.t.shape != x.shape else self.t
        self.t = self.t + x
        return self.t * 2


@pytest.mark.parametrize("model", [Sums(), Starts()], ids=lambda m: type(m).__name__)
def test_a_tensor_on_which_no_result_depends_is_left_as_it_is_with_a_warning(model):
    with pytest.warns(st.errors.SideEffectWarning, match=r"self\.t was assigned"):
        module = st.trace(model, (X,)).to_exported_program().module()
    for n in range(3):
        assert torch.equal(module(X + n), model(X + n))


class SumsIntoABuffer(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("all", torch.zeros(4))

    def forward(self, x):
        self.t = self.t + x.sum(0)
        self.all = self.all + self.t
        return x * 2


class GivesTheOld(Plain):
    def forward(self, x):
        old, self.t = self.t, self.t + x.sum(0)
        return old[1:]


class Opaque:
    pass


class TakesOpaque(nn.Module):
    def forward(self, x, how):
        return x + 1


@pytest.mark.parametrize(
    ("model", "args", "message", "hint"),
    [
        (Turn(), (X.clone(),), "`x.t_()` changes the shape or memory", "return a new tensor"),
        *(
            (m, (X,), "reads self.t and binds it to a new", "register_buffer")
            for m in (Plain(), SumsIntoABuffer(), GivesTheOld())
        ),
        (
            PlainInPlace(),
            (X,),
            "Constant t is changed by the forward, and is neither",
            "register_buffer",
        ),
        (Grow(), (X,), "binds the buffer t", "keeps its shape"),
        (TakesOpaque(), (X, Opaque()), "is a Opaque", "register_pytree_node"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
def test_refused(model, args, message, hint):
    trace = st.trace(model, args)
    with pytest.raises(st.ExportError) as found:
        trace.to_exported_program()
    assert message in str(found.value) and hint in found.value.hint
    assert type(model).__name__ in found.value.module


def test_leaf_modules_are_refused():
    with pytest.raises(st.ExportError, match="leaf module"):
        st.trace(nn.Sequential(nn.Linear(4, 4)), (X,), leaf_modules=[nn.Linear]).to_exported_program()


def test_two_equal_inputs_stay_two():
    run = exported(Two(), X, X).module()  # copied: two tensors
    torch.testing.assert_close(run(X, X + 1), X * 2 + X + 1)


# Other tools ----------------------------------------------------------------------------------------------------------


def test_torch_onnx_export():
    pytest.importorskip("onnxscript")
    found = torch.onnx.export(exported(nn.Sequential(nn.Identity(), nn.Linear(4, 4)), X), verbose=False)
    assert [node.op_type for node in found.model.graph] == ["Gemm"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_aot_inductor(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.ReLU())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ep = exported(model, X)
        package = torch._inductor.aoti_compile_and_package(ep, package_path=str(tmp_path / "model.pt2"))
        torch.testing.assert_close(torch._inductor.aoti_load_package(package)(X), model(X))


# Kinds of models ------------------------------------------------------------------------------------------------------


def test_a_parameter_that_is_not_the_models():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(4, 4)]  # a plain list, so that its layers are no submodules

        def forward(self, x):
            return self.layers[0](x)

    model = Listed()
    ep = exported(model, X)
    for program in (ep, ep.run_decompositions(), through_file(ep)):
        torch.testing.assert_close(program.module()(X), model(X))


def test_a_check_in_a_branch():
    def f(n, x):
        def some(n, x):
            k = n.item()
            torch._check(k >= 0)
            torch._check(k < 8)
            return x + x[k]

        return torch.cond(x.sum() > 0, some, lambda n, x: x * 1, (n, x))

    args = torch.tensor(3), torch.ones(10)
    torch.testing.assert_close(exported(f, *args).module()(*args), f(*args))


def test_a_size_divided_to_a_float():
    def f(x):
        return x * (x.shape[0] / 2)

    tr = st.trace(f, (torch.ones(4),), dynamic_shapes=({0: Dim("n")},))
    for run in (tr, tr.to_exported_program().module()):
        torch.testing.assert_close(run(torch.ones(5)), f(torch.ones(5)))


def test_scripted_modules():
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)))
    ep = exported(model, X)
    torch.testing.assert_close(ep.module()(X), model(X))
    assert list(ep.state_dict) == ["0.weight", "0.bias"]


def test_decompositions_of_a_program_into_which_a_client_put_functions():
    ep = exported(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), X)
    for node in ep.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
        node.target = lambda x: torch.sigmoid(x)
    ep.graph_module.recompile()
    decomposed = ep.run_decompositions({})
    assert [n for n in decomposed.graph.nodes if n.target is torch.ops.aten.sigmoid.default]
