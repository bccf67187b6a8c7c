"""`Trace.compile`: each distinct function compiled once, with the results, effects and gradients of eager."""

import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.export import Dim

import scopetrace as st
from tests.steps import step_with


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        return x + self.fc(self.norm(x)).relu()


class Net(nn.Module):
    """Three equal layers between an embedding and a head."""

    def __init__(self, layers=3):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(8, 10)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Counting:
    """A backend that runs the graph as it is, and keeps which graphs it was given and which of its functions ran."""

    def __init__(self):
        self.given, self.ran = [], []

    def __call__(self, graph_module, example_inputs):
        name = graph_module._get_name()
        self.given.append(name)

        def run(*args):
            self.ran.append(name)
            return graph_module(*args)

        return run


def gradients(output, model):
    return torch.autograd.grad(output.sum(), list(model.parameters()))


def assert_same(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


TOKENS = torch.arange(6).view(2, 3)


def test_equal_layers_are_compiled_once():
    backend = Counting()
    compiled = st.trace(Net(), (TOKENS,)).compile(backend)
    assert backend.given == ["between", "Block_0", "between"]
    compiled(TOKENS)
    assert backend.ran == ["between", "Block_0", "Block_0", "Block_0", "between"]
    assert [(p.name, p.calls) for p in compiled.pieces] == [("between", 1), ("Block_0", 3), ("between", 1)]


class Between(nn.Module):
    """Blocks, and between them modules that are called often and do next to nothing."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.acts = nn.ModuleList(nn.Sequential(nn.ReLU(), nn.Dropout(), nn.Identity()) for _ in range(2))
        self.flat = nn.ModuleList(nn.Flatten(0, 1) for _ in range(2))

    def forward(self, x):
        for block, act, flat in zip(self.blocks, self.acts, self.flat, strict=True):
            x = flat(act(block(x)).unsqueeze(0))
        return x, self.acts[0][2](x)


@pytest.mark.parametrize(
    ("functions", "given"),
    [
        ("layers", ["Block_0", "between", "between"]),
        (nn.ReLU, ["between", "ReLU_0", "between", "between"]),
    ],
)
def test_functions_of_one_op_are_compiled_with_what_is_around_them(functions, given):
    backend = Counting()
    model = Between().eval()
    x = torch.randn(3, 8)
    compiled = st.trace(model, (x,)).compile(backend, functions=functions)
    assert backend.given == given
    found, wanted = compiled(x), model(x)
    assert_same(found, wanted)
    assert found[0] is found[1]
    assert_same(gradients(found[0], model), gradients(wanted[0], model))


@pytest.mark.sample(2)
@pytest.mark.parametrize("functions", ["repeated", True, (Block, nn.Linear)])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_calls_inside_a_function_are_compiled_with_it(functions, backend):
    model = nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(3)))
    x = torch.randn(3, 8, requires_grad=True)
    trace = st.trace(model, (x,))
    nested = trace.outline(*(functions if isinstance(functions, tuple) else [functions])).functions
    assert any(node.target is torch.ops.higher_order.invoke_subgraph for f in nested for node in f.graph.nodes)
    compiled = trace.compile(backend, functions=functions)
    found, wanted = compiled(x), model(x)
    assert_same(found, wanted)
    assert_same(gradients(found, model), gradients(wanted, model))
    with torch.no_grad():
        assert_same(compiled(x), wanted)


def test_sizes_of_a_function_of_one_op():
    """The calls are of one function with two sizes, each in a stretch of its own."""

    class Sizes(nn.Module):
        def __init__(self):
            super().__init__()
            self.acts = nn.ModuleList(nn.ReLU() for _ in range(2))
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x, y):
            x, y = (act(z) for act, z in zip(self.acts, (x, y), strict=True))
            return self.blocks[0](x), self.blocks[1](y)

    model = Sizes()
    shapes = {0: Dim("n")}, {0: Dim("m")}
    compiled = st.trace(model, (torch.randn(3, 8), torch.randn(5, 8)), dynamic_shapes=shapes).compile("aot_eager")
    for n, m in ((3, 5), (4, 4), (7, 2)):
        given = torch.randn(n, 8), torch.randn(m, 8)
        assert_same(compiled(*given), model(*given))


@pytest.mark.parametrize(
    ("functions", "text"),
    [
        ("layers", "3 layers: 1 compiled, 2 shared; 2 pieces between"),
        ((), "1 piece between"),
    ],
)
def test_text(functions, text):
    compiled = st.trace(Net(), (TOKENS,)).compile("eager", functions=functions)
    assert repr(compiled) == f"<CompiledTrace of Net by eager: {text}>"


def test_results_and_gradients_through_aot_autograd():
    model = Net()
    compiled = st.trace(model, (TOKENS,)).compile("aot_eager")
    wanted = model(TOKENS)
    found = compiled(TOKENS)
    assert_same(found, wanted)
    assert_same(gradients(found, model), gradients(wanted, model))


@pytest.mark.slow
def test_results_and_gradients_through_inductor():
    model = Net()
    compiled = st.trace(model, (TOKENS,)).compile()
    wanted, found = model(TOKENS), compiled(TOKENS)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients(found, model), gradients(wanted, model))


_COUNT = """
import sys, torch, scopetrace
from torch import nn
from torch._dynamo.utils import counters

layers = int(sys.argv[1])
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(layers)))
scopetrace.trace(model, (torch.ones(2, 8),)).compile()(torch.ones(2, 8)).sum().backward()
print([counters["aot_autograd"][f"autograd_cache_{kind}"] for kind in ("miss", "hit")])
"""


@pytest.mark.slow
def test_another_process_finds_the_code_of_equal_functions_on_disk(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    for layers, counted in ((2, "[1, 0]"), (5, "[0, 1]")):
        command = [sys.executable, "-c", _COUNT, str(layers)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == counted


def test_layers_of_which_the_first_gets_no_gradient_are_one_piece_still():
    """The first layer's input requires no gradient, those of the others do: one form serves all."""
    backend = Counting()
    model = nn.Sequential(Block(), Block(), Block())
    compiled = st.trace(model, (torch.ones(2, 8),)).compile(backend)
    found, wanted = compiled(torch.ones(2, 8)), model(torch.ones(2, 8))
    assert_same(gradients(found, model), gradients(wanted, model))
    assert backend.given == ["Block_0"]


def test_without_gradients_there_is_another_form():
    backend = Counting()
    model = nn.Sequential(Block(), Block())
    compiled = st.trace(model, (torch.ones(2, 8),)).compile(backend)
    with torch.no_grad():
        compiled(torch.ones(2, 8))
    compiled(torch.ones(2, 8))
    assert backend.given == ["Block_0", "Block_0"]


def test_an_input_that_requires_grad_only_at_the_call_gets_its_gradient():
    with torch.no_grad():
        model = nn.Sequential(Block(), Block()).requires_grad_(False)
    compiled = st.trace(model, (torch.ones(2, 8),)).compile("aot_eager")
    x, y = (torch.ones(2, 8, requires_grad=True) for _ in range(2))
    compiled(x).sum().backward()
    model(y).sum().backward()
    assert_same(x.grad, y.grad)


def test_training_steps_are_those_of_eager():
    def steps(run, model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            run(torch.linspace(-1, 1, 32).view(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    def model():
        torch.manual_seed(0)
        block = lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())  # noqa: E731
        return nn.Sequential(block(), block(), nn.Dropout(0.0))

    eager, traced = model(), model()
    compiled = st.trace(traced, (torch.ones(4, 8),)).compile("aot_eager")
    assert_same(steps(compiled, traced), steps(eager, eager))


def test_a_step_with_its_backward_is_compiled_without_autograd():
    """It runs so in a call: neither `silu_backward` nor a fused optimizer has a derivative."""

    def steps(compiles):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.SiLU()) for _ in range(2)))
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)

        def step(x):
            loss = model(x).square().sum()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        backend = Counting()
        inputs = [torch.linspace(-1, 1, 32).view(4, 8) + i for i in range(3)]
        run = st.trace(step, (inputs[0],)).compile(compiles or backend) if compiles is not None else step
        given = len(backend.given)
        losses = [run(x) for x in inputs]
        assert len(backend.given) == given  # no piece is compiled again when it is called
        return losses, model.state_dict()

    assert_same(steps("aot_eager"), steps(None))
    assert_same(steps(""), steps(None))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.fc = nn.LSTM(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(self.rnn(x)[0]).relu()


SEQUENCE = torch.linspace(-1, 1, 48).view(2, 3, 8)


@pytest.mark.parametrize("repeats", [1, 2])
def test_an_lstm_whose_op_needs_autograd_runs_uncompiled(repeats):
    """MKL-DNN's gives its workspace only where autograd records it, which it does in no graph of AOTAutograd."""
    model = nn.Sequential(*(Recurrent() for _ in range(repeats)))
    compiled = st.trace(model, (SEQUENCE,)).compile("aot_eager")
    assert_same(gradients(compiled(SEQUENCE), model), gradients(model(SEQUENCE), model))


def test_torch_compile_of_a_trace_runs_an_lstm_uncompiled():
    model = Recurrent()
    compiled = torch.compile(st.trace(model, (SEQUENCE,)), backend="aot_eager")
    assert_same(gradients(compiled(SEQUENCE), model), gradients(model(SEQUENCE), model))


def test_a_step_with_an_lstm():
    model = Recurrent()

    def step(x):
        model.zero_grad()
        model(x).square().sum().backward()

    compiled = st.trace(step, (SEQUENCE,)).compile("aot_eager")
    found = []
    for run in (compiled, step):
        run(SEQUENCE)
        found.append([p.grad.clone() for p in model.parameters()])
    assert_same(*found)


def test_layers_that_share_a_batch_norm():
    """The statistics that one layer hands to the next get no gradient."""

    def model():
        torch.manual_seed(0)
        shared = nn.BatchNorm1d(8)
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), shared, nn.ReLU()) for _ in range(3)))

    eager, traced = model(), model()
    x = torch.linspace(-1, 1, 32).view(4, 8)
    compiled = st.trace(traced, (x,)).compile("aot_eager")
    assert_same(gradients(compiled(x), traced), gradients(eager(x), eager))
    assert_same(dict(traced.named_buffers()), dict(eager.named_buffers()))


def test_writes_to_inputs_and_views_as_results():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x, cache):
            for i, layer in enumerate(self.layers):
                x = layer(x)
                cache[i, 1:3] = x
            return x, cache[0], x.t()

    model = Cached().requires_grad_(False)
    compiled = st.trace(model, (torch.ones(2, 8), torch.zeros(2, 4, 8))).compile("aot_eager")
    caches = torch.zeros(2, 4, 8), torch.zeros(2, 4, 8)
    found, wanted = (run(torch.ones(2, 8), cache) for run, cache in zip((compiled, model), caches, strict=True))
    assert_same(found, wanted)
    assert_same(*caches)
    found[1].zero_()
    assert caches[0][0].sum() == 0  # the result is a view of the cache
    assert found[2]._base is not None or found[2].data_ptr() == found[0].data_ptr()


def test_blocks_without_gradients():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            with torch.no_grad():
                x = self.blocks[0](x)
            return self.blocks[2](self.blocks[1](x)) * x

    model = Half()
    compiled = st.trace(model, (torch.ones(2, 8),)).compile("aot_eager")
    found, wanted = compiled(torch.ones(2, 8)), model(torch.ones(2, 8))
    for run in (found, wanted):
        run.sum().backward()
    assert model.blocks[0].fc.weight.grad is None
    assert_same(found, wanted)


class Scaled(nn.Module):
    """A layer that begins with a block without gradients."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            scale = x.mean() * 2
        return self.fc(x) * scale


@pytest.mark.parametrize("functions", ["layers", Scaled, ()])
def test_a_function_that_begins_with_a_block_without_gradients(functions):
    model, x = nn.Sequential(Scaled(), Scaled()), torch.randn(2, 4)
    compiled = st.trace(model, (x,)).compile("aot_eager", functions=functions)
    torch.testing.assert_close(gradients(compiled(x), model), gradients(model(x), model))


class Passing(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return x, self.fc(x)


def test_a_function_that_returns_its_argument_traced_without_gradients():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Passing(), Passing()])

        def forward(self, x):
            for layer in self.layers:
                before, x = layer(x)
            return before * 2 + x

    model, x = Chain(), torch.randn(2, 4)
    with torch.no_grad():
        tr = st.trace(model, (x,))
    assert "set_grad_enabled" not in str(tr.outline("layers"))
    torch.testing.assert_close(gradients(tr.compile("aot_eager")(x), model), gradients(model(x), model))


class Rotated(nn.Module):
    """Computes what the layers take under no_grad, as the rotary embedding of Llama does."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        with torch.no_grad():
            angle = self.embed(x).sin() * 2
        for layer in self.layers:
            x = layer(x) + angle
        return x


def test_a_call_under_no_grad_of_a_forward_that_has_such_a_block():
    model = Rotated()
    x = torch.randn(3, 8)
    compiled = st.trace(model, (x,)).compile("aot_eager")
    with torch.no_grad():
        assert_same(compiled(x), model(x))
        assert not compiled(x).requires_grad
    found, wanted = compiled(x), model(x)
    assert_same(found, wanted)
    assert_same(gradients(found, model.layers), gradients(wanted, model.layers))


def test_a_call_under_no_grad_where_a_function_has_such_a_block():
    model = nn.Sequential(Rotated(), Rotated())
    compiled = st.trace(model, (torch.ones(3, 8),)).compile("eager")
    with torch.no_grad(), pytest.raises(st.errors.StateMismatchError, match="trace again in this state"):
        compiled(torch.ones(3, 8))


# Sizes and strides ---------------------------------------------------------------------------------------------------


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        y = x.reshape(x.size(0) * x.size(1), 8)
        for layer in self.layers:
            y = layer(y)
        a, b = (y + 1).chunk(2, -1)
        return (a * b).reshape(x.size(0), -1)[:, : x.size(1)], x.size(0) + 1


DYNAMIC = ({0: Dim("batch"), 1: Dim("length", min=1)},)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_sizes_that_are_dynamic(backend):
    model = Flat()
    compiled = st.trace(model, (torch.randn(2, 5, 8),), dynamic_shapes=DYNAMIC).compile(backend)
    for batch in (1, 2, 3, 8):
        for length in (1, 2, 3, 8):
            x = torch.randn(batch, length, 8)
            for given in (x, x.transpose(0, 1).contiguous().transpose(0, 1), x.flip(0)[:, :, :]):
                assert_same(compiled(given), model(given))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_stride_that_is_dynamic_where_no_size_is(backend):
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            return self.layers[1](self.layers[0](x[:, :8]))

    model = Part()
    compiled = st.trace(model, (torch.randn(3, 9),), dynamic_shapes=({1: Dim("width", min=9)},)).compile(backend)
    for width in (9, 12, 30):
        x = torch.randn(3, width)
        assert_same(compiled(x), model(x))


def test_a_size_of_zero():
    model = nn.Sequential(Block(), Block())
    compiled = st.trace(model, (torch.ones(4, 8),), dynamic_shapes=({0: Dim("n")},)).compile("aot_eager")
    assert compiled(torch.ones(0, 8)).shape == (0, 8)


def test_sizes_that_a_compiler_fixes_are_run_uncompiled():
    """A compiler may assume what the trace leaves open; what it assumed is checked at each call."""
    ran = []

    def even_only(graph_module, example_inputs):
        sizes = [n for x in example_inputs if isinstance(x, torch.Tensor) for n in x.size()]
        assumed = [n for n in sizes if not isinstance(n, int) and n % 2 == 0]  # each is a guard

        def run(*args):
            ran.append(len(assumed))
            return graph_module(*args)

        return run

    model = nn.Sequential(Block(), Block())
    compiled = st.trace(model, (torch.ones(4, 8),), dynamic_shapes=({0: Dim("n")},)).compile(even_only)
    for n, times in ((4, 2), (6, 2), (5, 0), (1, 0), (8, 2)):
        ran.clear()
        assert_same(compiled(torch.ones(n, 8)), model(torch.ones(n, 8)))
        assert len(ran) == times


def test_strides_that_the_code_is_not_made_for_are_run_uncompiled():
    backend = Counting()
    model = nn.Sequential(nn.ReLU(), nn.Tanh())
    compiled = st.trace(model, (torch.ones(3, 3),)).compile(backend)
    x = torch.randn(3, 3).t()
    assert_same(compiled(x), model(x))
    assert backend.ran == []


def test_results_whose_size_depends_on_data():
    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            x = self.layers[1](self.layers[0](x))
            return x[x.sum(-1) > 0] * 2

    model = Picks()
    compiled = st.trace(model, (torch.randn(5, 8),)).compile("aot_eager")
    for scale in (-1, 1, 3):
        x = torch.linspace(-scale, 2, 40).view(5, 8)
        assert_same(compiled(x), model(x))


# State, and mistakes -------------------------------------------------------------------------------------------------


def test_new_weights_are_seen():
    model = nn.Sequential(Block(), Block())
    compiled = st.trace(model, (torch.ones(2, 8),)).compile("aot_eager")
    model[0].fc.weight = nn.Parameter(torch.ones(8, 8))
    assert_same(compiled(torch.ones(2, 8)), model(torch.ones(2, 8)))


def test_a_program_compiled_as_a_whole():
    backend = Counting()
    st.trace(Net(), (TOKENS,)).compile(backend, functions=())
    assert backend.given == ["between"]


def test_progress():
    said = []
    st.trace(Net(), (TOKENS,)).compile("eager", progress=said.append)
    assert said == [
        "compiling between, called 1×, 1 of 3",
        "compiling Block_0, called 3×, 2 of 3",
        "compiling between, called 1×, 3 of 3",
    ]


def test_a_backend_that_fails():
    def broken(graph_module, example_inputs):
        raise ZeroDivisionError("no code for this")

    with pytest.raises(st.errors.CompileError) as error:
        st.trace(nn.Sequential(Block(), Block()), (torch.ones(2, 8),)).compile(broken)
    assert str(error.value) == (
        "the backend failed on Block_0, called 2×: ZeroDivisionError: no code for this\n"
        "  instead: leave it out with functions=, or compile with another backend"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"backend": "inductr"}, "Invalid backend: 'inductr'"),
        ({"mode": "fast"}, "Unrecognized mode=fast"),
        ({"options": {"max_autotun": True}}, "Unexpected optimization option max_autotun"),
        ({"mode": "default", "options": {}}, "Either mode or options can be specified"),
    ],
)
def test_mistakes(given, said):
    with pytest.raises(st.ArgumentError, match=said):
        st.trace(nn.ReLU(), (torch.ones(1),)).compile(**given)


def test_a_target_that_names_nothing():
    with pytest.raises(st.errors.OutlineError, match="'layer' is no call of this trace"):
        st.trace(Net(), (TOKENS,)).compile("eager", functions="layer")


FOLDED = {
    "matmul": lambda x: (x @ torch.ones(3, 4)).sum(-1) * x.flatten(1).sum(1)[:, None],
    "flatten": lambda x: x.flatten().cumsum(0).view(x.shape).sum(-1) * x.reshape(-1, 3).sin().view(x.shape).mean(-1),
    "numel": lambda x: x.flatten(0, 1)[::2].sum() + x.sum(-1) / x.numel(),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("sizes", [{0: Dim("rows")}, {0: Dim("rows"), 1: Dim("columns")}], ids=["one", "two"])
@pytest.mark.parametrize("forward", FOLDED.values(), ids=FOLDED)
def test_products_of_dynamic_sizes_that_a_gradient_has_too(forward, sizes):
    """A compiler knows a number by its object: those of the forward may not come from a gradient."""
    tr = st.trace(forward, (torch.randn(5, 4, 3, requires_grad=True),), dynamic_shapes=(sizes,))
    compiled = tr.compile(backend="aot_eager")
    for rows, columns in ((5, 4), (7, 4), (2, 6 if 1 in sizes else 4)):
        x = torch.randn(rows, columns, 3, requires_grad=True)
        found, expected = compiled(x), forward(x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*[torch.autograd.grad(y.square().sum(), x) for y in (found, expected)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": None}, "backend=None is neither a name"),
        ({"functions": None}, "None is a NoneType; give a module class, a module of the model, a pattern of names"),
        ({"functions": False}, "False is a bool; give a module class, a module of the model, a pattern of names"),
    ],
)
def test_arguments_of_another_kind(options, message):
    with pytest.raises(st.errors.ArgumentError, match=message):
        st.trace(nn.Linear(4, 4), (torch.ones(2, 4),)).compile(**{"backend": "eager", **options})


def test_a_compiled_trace_in_a_function_that_is_traced():
    """Its ops are recorded, as those of the trace; a step around it trains the model."""
    models = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))]
    models.append(copy.deepcopy(models[0]))
    x = torch.randn(2, 4)
    compiled = st.trace(models[0], (x,)).compile("aot_eager")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]

    tr = st.trace(step_with(compiled, optimizers[0]), (x,))
    eager = step_with(models[1], optimizers[1])
    for _ in range(3):
        assert torch.equal(tr(x), eager(x))
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_compiled_code_is_not_copied(take):
    compiled = st.trace(nn.Linear(4, 4), (torch.ones(2, 4),)).compile("eager")
    with pytest.raises(st.errors.CompileError, match="neither copied nor pickled"):
        take(compiled)


def test_torch_compile_says_why_a_call_that_gives_back_an_argument_is_not_traced_whole():
    trace = st.trace(lambda x, options: (x + 1, options), (torch.ones(2), {"scale": torch.ones(2)}))
    args = torch.ones(2), {"scale": torch.zeros(2)}
    with pytest.raises(torch._dynamo.exc.Unsupported, match="it returns objects among its arguments"):
        torch.compile(trace, fullgraph=True, backend="eager")(*args)
    assert torch.compile(trace, backend="eager")(*args)[1] is args[1]
