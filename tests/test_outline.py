"""Module calls as calls of shared functions: which calls share one, what a function takes and gives."""

import copy
import functools

import pytest
import torch
from compare import assert_like_eager
from nets import Gate
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import scopetrace as st


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, mask=None):
        y = self.fc(x).relu()
        return x + y if mask is None else x + y * mask


def outlined(model, args, *targets, **options):
    """The outlined program, which is checked against eager in results, changed inputs and buffers."""
    found = st.trace(copy.deepcopy(model), args, **options).outline(*targets)
    found.lint()
    with torch.no_grad():
        eager, ours = copy.deepcopy(model), copy.deepcopy(model)
        run = st.trace(ours, args, **options).outline(*targets)

        def graph(*inputs):  # a call runs the flat program
            return run.graph_module(*inputs)

        for _ in range(2):
            assert_like_eager(eager, functools.partial(run.run, graph), args)
            torch.testing.assert_close(list(ours.buffers()), list(eager.buffers()))
    return found


def signatures(found):
    return [(str(f).split("::")[1], len(f.calls)) for f in found.functions]


def blocks(count=3):
    return nn.Sequential(*[Block() for _ in range(count)])


X = torch.linspace(-1, 1, 12).view(3, 4)


def test_equal_calls_share_one_function():
    found = outlined(blocks(), (X,), Block)
    text = str(found).replace(found.functions[0].identifier, "ID")
    assert (
        text
        == """\
test_outline::Block(x, mask=None, fc.weight, fc.bias) -> (result)  # 3 calls
Sequential: 6 ops, 5 module calls, 6 parameters (60 elements)
Sequential(input=%input_1: f32[3, 4]) -> %getitem_2: f32[3, 4]
  Block[0](x=%input_1: f32[3, 4]) -> %getitem: f32[3, 4]
    %getitem: f32[3, 4], = torch.ops.higher_order.invoke_subgraph(Block_0, 'ID', %input_1, self.fc.weight, self.fc.bias)
      Block_0(%x: f32[3, 4], %fc_weight: f32[4, 4], %fc_bias: f32[4]) -> (%add: f32[3, 4],)
        Linear[fc](input=%x: f32[3, 4]) -> %linear: f32[3, 4]
          %linear: f32[3, 4] = aten.linear(%x, %fc_weight, %fc_bias)
        %relu: f32[3, 4] = aten.relu(%linear)
        %add: f32[3, 4] = aten.add.Tensor(%x, %relu)
  Block[1, 2] ×2 as Block[0] -> %getitem_2: f32[3, 4]"""
    )


def test_equal_calls_share_the_submodule_of_the_graph():
    gm = outlined(blocks(), (X,), Block).graph_module
    calls = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
    assert len(calls) == 3 and len({n.args[0].target for n in calls}) == 1 and len({n.args[1] for n in calls}) == 1
    assert gm.code.count("invoke_subgraph(") == 3


def test_nested_targets_nest():
    found = outlined(blocks(), (X,), Block, nn.Linear)
    assert signatures(found) == [
        ("Linear(input, weight, bias) -> (result)", 1),
        ("Block(x, mask=None, fc.weight, fc.bias) -> (result)", 3),
    ]
    inner = found.functions[1].graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.invoke_subgraph
    )
    assert [node.args[1] for node in inner] == [found.functions[0].identifier]


def test_repeated_means_classes_with_equal_calls():
    model = nn.Sequential(Block(), nn.Tanh(), Block(), nn.LayerNorm(4))
    assert [f.name for f in outlined(model, (X,), "repeated").functions] == ["Linear", "Block"]


def test_targets_are_classes_patterns_and_predicates():
    for target in (Block, "[0-2]", lambda call: call.fqn == "1"):
        assert {f.name for f in outlined(blocks(), (X,), target).functions} == {"Block"}
    with pytest.raises(st.OutlineError, match=r"'layers\.\*' is no call of this trace; there are '0', '0.fc'"):
        st.trace(blocks(), (X,)).outline("layers.*")
    with pytest.raises(st.OutlineError, match=r"'1\.fd' is no call of this trace; similar names: '1\.fc', "):
        st.trace(blocks(), (X,)).outline("1.fd")
    with pytest.raises(st.OutlineError, match="functional=True"):
        st.trace(Relu(), (X,), functional=False).outline(Relu)


class Relu(nn.Module):
    def forward(self, x):
        return x.relu_()


def test_a_module_as_a_target_means_its_calls():
    model = blocks()
    tr = st.trace(model, (X,))
    assert [[call.fqn for call in f.calls] for f in tr.outline(model[1], model[2]).functions] == [["1", "2"]]
    with pytest.raises(st.OutlineError, match=r"this Block is no call of this trace; there are '0', '0\.fc'"):
        tr.outline(copy.deepcopy(model)[1])


def test_in_line_gives_the_flat_program():
    tr = st.trace(blocks(), (X,))
    assert tr.outline(Block).inline() is tr


@torch.no_grad()
def test_another_graph_runs_in_place_of_that_of_the_outlined_program():
    class Counting(nn.Sequential):
        def forward(self, x):
            x.add_(1)
            return x, super().forward(x)

    model = Counting(Block(), Block())
    found = st.trace(model, (X,)).outline(Block)
    assert [m.kind for m in found.mutations] == ["input"]
    mine, theirs = X.clone(), X.clone()
    model[0].fc.weight = nn.Parameter(torch.ones(4, 4))  # the graph has the parameters that the model has now
    given, result = found.run(torch.fx.Interpreter(found.graph_module).run, mine)
    assert given is mine
    torch.testing.assert_close((given, result), model(theirs))


# ------------------------------------------------------------------ what must not be shared


class Scaled(nn.Module):
    def forward(self, x, k, flag=True):
        return x * k if flag else x - k


class Calls(nn.Module):
    def __init__(self, inner, run):
        super().__init__()
        self.inner = inner
        self.run = run

    def forward(self, *args):
        return self.run(self.inner, *args)


def test_python_arguments_count():
    found = outlined(Calls(Scaled(), lambda f, x: f(x, 2.0) + f(x, 3.0) + f(x, 2.0, False) + f(x, 2.0)), (X,), Scaled)
    assert signatures(found) == [
        (f"{n}(x) -> (result)", c) for n, c in (("Scaled", 2), ("Scaled_2", 1), ("Scaled_3", 1))
    ]


def test_constants_of_the_class_count():
    model = nn.Sequential(nn.LayerNorm(4, eps=1e-4), nn.LayerNorm(4, eps=0.5), nn.LayerNorm(4, eps=1e-4))
    assert [len(f.calls) for f in outlined(model, (X,), nn.LayerNorm).functions] == [2, 1]


class Pair(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.u = nn.Parameter(torch.rand(4))
        self.v = self.u if tied else nn.Parameter(torch.rand(4))

    def forward(self, x):
        return x * self.u + self.v


def test_which_tensors_are_the_same_counts():
    found = outlined(nn.Sequential(Pair(True), Pair(False)), (X,), Pair)
    assert signatures(found) == [("Pair(x, u) -> (result)", 1), ("Pair_2(x, u, v) -> (result)", 1)]
    add = Calls(Add(), lambda f, x, y: f(x, x) * f(x, y) * f(y, y))
    assert [len(f.calls) for f in outlined(add, (X, X + 1), Add).functions] == [2, 1]


class Add(nn.Module):
    def forward(self, a, b):
        return a + b.sin()


def test_classes_of_one_name_count():
    def make(op):
        class Act(nn.Module):
            def forward(self, x):
                return op(x)

        return Act

    one, other = make(torch.sin), make(torch.cos)
    found = outlined(nn.Sequential(one(), other(), one()), (X,), one, other)
    assert signatures(found) == [("Act(x) -> (result)", 2), ("Act_2(x) -> (result)", 1)]


def test_parametrized_modules_share_a_function():
    """torch makes a class for each of them; the base and the parametrizations count."""
    normed = torch.nn.utils.parametrizations.weight_norm
    model = nn.Sequential(*(normed(nn.Linear(4, 4)) for _ in range(3)), nn.Linear(4, 4))
    first = "parametrizations.weight.original"
    signature = f"ParametrizedLinear(input, bias, {first}0, {first}1) -> (result)"
    assert (signature, 3) in signatures(outlined(model, (X,), "repeated"))
    assert signatures(outlined(model[:3], (X,), nn.Linear)) == [(signature, 3)]
    torch.nn.utils.parametrize.register_parametrization(model[1], "bias", nn.Identity())
    assert [len(f.calls) for f in outlined(model, (X,), nn.Linear).functions] == [2, 1, 1]


def test_sizes_count():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 8))
    assert [len(f.calls) for f in outlined(model, (X,), nn.Linear).functions] == [2, 1]


# ------------------------------------------------------------------ what a function takes and gives


class Order(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(4))
        self.register_buffer("b", torch.rand(4))

    def forward(self, a, unused, c):
        return (a - c) / (c.abs() + 1) * self.b + self.w


def test_arguments_come_in_the_order_of_forward_then_parameters_then_buffers():
    model = Calls(Order(), lambda f, x, y: f(y, x, c=x) + f(c=y, a=x, unused=y))
    assert signatures(outlined(model, (X, X + 1), Order)) == [("Order(a, unused, c, w, b) -> (result)", 2)]


class Nested(nn.Module):
    def forward(self, xs, d):
        return {"sum": xs[0] + xs[1], "list": [xs[0] * d["k"], xs[1]]}


def test_containers_are_flattened_and_results_that_are_inputs_are_copies():
    def run(f, x, y):
        one, two = f((x, y), {"k": y}), f([y, x], {"k": x})
        return one["sum"] + one["list"][0] + two["list"][1]

    found = outlined(Calls(Nested(), run), (X, X + 1), Nested)
    assert signatures(found) == [("Nested(xs[0], xs[1], d['k']) -> (['sum'], ['list'][0], ['list'][1])", 2)]
    assert "clone" in found.functions[0].graph_module.code


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(1))

    def forward(self, x):
        self.n.add_(1)
        return x * self.n


def test_new_values_of_buffers_are_outputs():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Counts(), Counts()

        def forward(self, x):
            return self.b(self.a(self.a(x)))

    found = outlined(Net(), (X,), Counts)
    assert signatures(found) == [("Counts(x, n) -> (result, n)", 3)]
    assert [o.kind for o in found.functions[0].outputs] == ["result", "mutated"]


class Writes(nn.Module):
    def forward(self, cache, new):
        cache[:, :1] = new
        return cache.sum(), cache


def test_caches_written_in_place_are_outputs():
    def run(f, cache, x):
        total, _ = f(cache, x[:, :1])
        return total + f(cache, x[:, 1:2])[0]

    found = outlined(Calls(Writes(), run), (X.clone(), X), Writes)
    assert signatures(found) == [("Writes(cache, new) -> ([0], [1])", 2)]


class Attends(nn.Module):
    """Writes into its part of a cache of all layers, and reads this part again."""

    def __init__(self):
        super().__init__()
        self.k = nn.Linear(4, 4)

    def forward(self, x, cache):
        cache[1:2] = self.k(x)
        return x + (x @ cache.T).softmax(-1) @ cache


@pytest.mark.parametrize("held", [False, True], ids=["argument", "buffer"])
def test_a_layer_that_writes_into_its_part_of_a_cache_does_not_take_the_whole(held):
    """The new value goes into the whole outside."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Attends() for _ in range(3)])
            self.register_buffer("kv", torch.rand(3, 5, 4))

        def forward(self, x, kv=None):
            for i, layer in enumerate(self.layers):
                x = layer(x, (self.kv if held else kv)[i])
            return x

    found = outlined(Net(), (X[:1],) if held else (X[:1], torch.rand(3, 5, 4)), Attends)
    assert signatures(found) == [("Attends(x, cache, k.weight, k.bias) -> (result, cache)", 3)]
    assert [n.target for n in found.graph_module.graph.nodes if "scatter" in n.name] == [
        torch.ops.aten.select_scatter.default
    ] * 3


class Remembers(nn.Module):
    def forward(self, x):
        self.last = x.exp()
        return self.last + 1


def test_what_is_read_outside_though_not_returned():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = Remembers()

        def forward(self, x):
            y = self.a(x) * self.a.last
            del self.a.last
            return y

    found = outlined(Net(), (X,), Remembers)
    assert [o.kind for o in found.functions[0].outputs] == ["result", "captured"]


class Shelf:
    """A cache of all layers, of a class that pytree does not know."""

    def __init__(self, rows):
        self.rows = rows

    def grow(self, i, x):
        self.rows[i] = x if self.rows[i] is None else torch.cat([self.rows[i], x])
        return self.rows[i]

    def write(self, i, x):
        self.rows[i][1:2] = x
        return self.rows[i]


class Shelved(nn.Module):
    class Layer(nn.Module):
        def __init__(self, i, method):
            super().__init__()
            self.i, self.method, self.k = i, method, nn.Linear(4, 4)

        def forward(self, x, shelf):
            return x + getattr(shelf, self.method)(self.i, self.k(x)).sum(0)

    def __init__(self, method):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(i, method) for i in range(3)])

    def forward(self, x, shelf):
        for layer in self.layers:
            x = layer(x, shelf)
        return x, shelf.rows


@pytest.mark.parametrize(
    ("method", "make_row", "signature"),
    [
        ("grow", lambda: torch.rand(3, 4), "x, shelf.rows[0], k.weight, k.bias) -> (result, captured_1)"),
        ("grow", lambda: None, "x, k.weight, k.bias) -> (result, captured_1)"),
        ("write", lambda: torch.rand(3, 4), "x, shelf.rows[0], k.weight, k.bias) -> (result, shelf.rows[0])"),
    ],
    ids=["filled", "empty", "static"],
)
def test_of_a_cache_of_all_layers_a_layer_takes_its_own(method, make_row, signature):
    """Also where pytree does not know the class of the cache."""
    args = (X[:1], Shelf([make_row() for _ in range(3)]))
    found = st.trace(Shelved(method), args).outline(Shelved.Layer)
    found.lint()
    assert signatures(found) == [(f"Layer({signature}", 3)]
    with torch.no_grad():
        mine, theirs = copy.deepcopy(args), copy.deepcopy(args)
        torch.testing.assert_close(found(*mine), found.inline()(*theirs))
        torch.testing.assert_close(mine[1].rows, theirs[1].rows)


class OfAll(nn.Module):
    """Reads its entry in a container of all layers' tensors, by itself or in a module inside."""

    def __init__(self, place, pick, inside):
        super().__init__()
        self.place, self.pick, self.fc = place, pick, nn.Linear(4, 4)
        self.inner = OfAll(place, pick, False) if inside else None

    def forward(self, x, held):
        if self.inner is not None:
            x = self.inner(x, held)
        return self.fc(x) * self.pick(held, self.place)


class Layers(nn.Module):
    def __init__(self, *layer):
        super().__init__()
        self.layers = nn.ModuleList([OfAll(i, *layer) for i in range(3)])

    def forward(self, x, held):
        for layer in self.layers:
            x = layer(x, held)
        return x


ROW = torch.linspace(1, 2, 4)
CONTAINERS = {
    "a list": (lambda held, i: held[i], [ROW, ROW + 1, ROW + 2], "held[0]"),
    "a dict": (lambda held, i: held[f"layer{i}"], {f"layer{i}": ROW + i for i in range(3)}, "held['layer0']"),
    "pairs": (lambda held, i: held[i][0] + held[i][1], [(ROW, ROW + i) for i in range(3)], "held[0][0], held[0][1]"),
    "two lists": (lambda held, i: held[0][i] + held[1][i], ([ROW] * 3, [ROW + i for i in range(3)]), None),
    "masks by kind": (lambda held, i: held["full"], {"full": ROW, "sliding": ROW + 1}, "held['full']"),
    "with numbers": (lambda held, i: held[i] * held[3], [ROW, ROW + 1, ROW + 2, 2.0], "held[0]"),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_of_a_container_of_all_layers_a_layer_takes_what_it_reads(kind, inside):
    pick, held, names = CONTAINERS[kind]
    held = pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, held)
    functions = outlined(Layers(pick, inside), (X, held), OfAll).functions
    assert [len(f.calls) for f in functions] == ([1, 3] if inside else [3])  # the inner one stands in the outer
    for function in functions:
        taken = ", ".join(x.name for x in function.inputs if x.kind == "argument" and x.name != "x")
        assert taken == (names or "held[0][0], held[1][0]")


def test_of_a_cache_that_a_layer_gives_back_it_gives_what_it_made():
    class Layer(Shelved.Layer):
        def forward(self, x, shelf):
            return super().forward(x, shelf), shelf

    def run(f, g, x, shelf):
        x, shelf = f(x, shelf)
        x, shelf = g(x, shelf)
        return x, shelf.rows

    model = nn.ModuleList([Layer(0, "grow"), Layer(1, "grow")])
    model.forward = lambda x, shelf: run(*model, x, shelf)
    found = st.trace(model, (X[:1], Shelf([X, X + 1]))).outline(Layer)
    assert signatures(found) == [("Layer(x, shelf.rows[0], k.weight, k.bias) -> ([0], [1].rows[0])", 2)]
    with torch.no_grad():
        torch.testing.assert_close(found(X[:1], Shelf([X, X + 1])), run(*model, X[:1], Shelf([X, X + 1])))


def test_keywords_and_keys_of_dicts_may_come_in_any_order():
    class Keyed(nn.Module):
        def forward(self, x, **kw):
            return x * kw["a"] - kw["b"]["c"] * kw["b"]["d"]

    def run(f, x, y):
        return f(x, a=y, b={"c": x, "d": y}) + f(x, b={"d": y, "c": x}, a=y)

    found = outlined(Calls(Keyed(), run), (X, X + 1), Keyed)
    assert signatures(found) == [("Keyed(x, kw['a'], kw['b']['c'], kw['b']['d']) -> (result)", 2)]


@pytest.mark.parametrize("reader", [0, 1, 2])
def test_who_reads_a_hidden_state_makes_no_other_function(reader):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(Remembers()) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            y = self.layers[reader][0].last
            for layer in self.layers:
                del layer[0].last
            return x, y

    found = outlined(Net(), (X,), Remembers)
    assert signatures(found) == [("Remembers(x) -> (result, captured_1)", 3)]
    found = outlined(Net(), (X,), Remembers, nn.Sequential)
    assert [(f.name, len(f.outputs)) for f in found.functions] == [("Remembers", 2), ("Sequential", 2)]


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.ones(1))

    def forward(self, x):
        self.n = self.n * 0.5
        return x * self.n


def test_a_buffer_that_is_bound_anew_is_an_output_of_its_name():
    model = Calls(Halves(), lambda f, x: f(f(x)))
    found = st.trace(model, (X,)).outline(Halves)
    assert signatures(found) == [("Halves(x, n) -> (result, n)", 2)]
    assert [o.kind for o in found.functions[0].outputs] == ["result", "mutated"]
    with torch.no_grad():
        torch.testing.assert_close(found(X), X * 0.5 * 0.25)
    assert model.inner.n == 0.25


def test_lifted_values_are_called_what_they_are_called_around():
    """A parameter or an argument of the module around, or `captured`."""

    class Inner(nn.Module):
        def __init__(self, box):
            super().__init__()
            self.box = box

        def forward(self, x):
            scale, shift, weight = self.box
            return x * scale + shift * weight

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.box = []
            self.inner, self.weight = Inner(self.box), nn.Parameter(torch.rand(4))

        def forward(self, x, scale):
            self.box[:] = scale, x.exp(), self.weight
            y = self.inner(x + 1)
            self.box.clear()
            return y

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Outer(), Outer()

        def forward(self, x, y):
            return self.b(self.a(x, y.sin()), y.cos())

    found = outlined(Net(), (X, X[0]), Inner)
    assert signatures(found) == [("Inner(x, scale, captured, weight) -> (result)", 2)]


def test_variants_do_not_take_the_name_of_another_class():
    class Block(Scaled):
        def forward(self, x):
            return super().forward(x, self.k)

    other = type("Block_2", (nn.Module,), {"forward": lambda self, x: x.cos(), "__module__": __name__})
    model = nn.Sequential(Block(), other(), Block())
    model[0].k, model[2].k = 1.0, 2.0
    assert [f.name for f in outlined(model, (X,), Block, other).functions] == ["Block", "Block_2", "Block_3"]


class Closure(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = [scale]

    def forward(self, x):
        return x * self.scale[0]() + torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_closures_and_constants_are_lifted():
    scale = nn.Parameter(torch.rand(4))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = scale
            self.a, self.b = (Closure(lambda: scale) for _ in range(2))

        def forward(self, x):
            return self.b(self.a(x)) + self.scale

    tr = st.trace(Net(), (X,))
    found = tr.outline(Closure)
    assert signatures(found) == [("Closure(x, scale, tensor_constant0) -> (result)", 2)]
    torch.testing.assert_close(found(X), tr(X))


def test_calls_that_give_back_their_input():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Identity(), nn.Dropout(0.5)).eval()
    found = outlined(model, (X,), nn.Dropout, nn.Identity)
    assert signatures(found) == [("Dropout(input) -> (result)", 2), ("Identity(input) -> (result)", 1)]
    calls = found.graph_module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
    assert all(n.users for n in calls)


def test_the_root_can_be_a_function():
    found = outlined(nn.Conv1d(3, 9, 3), (torch.ones(5, 3, 11),), nn.Conv1d)
    assert signatures(found) == [("Conv1d(input, weight, bias) -> (result)", 1)]


# ------------------------------------------------------------------ sizes, autograd, torch's own tools


class Rows(nn.Module):
    def forward(self, x):
        return x.reshape(x.shape[0], -1) * x.shape[0]


def test_symbolic_sizes():
    tr = st.trace(nn.Sequential(Rows(), Rows()), (X,), dynamic_shapes=({0: Dim("batch", max=64)},))
    found = tr.outline(Rows)
    assert signatures(found) == [("Rows(x) -> (result)", 2)]
    for n in (1, 2, 7):
        x = torch.rand(n, 4)
        torch.testing.assert_close(found(x), tr(x))


def test_sizes_that_no_tensor_of_the_call_has_are_inputs():
    class Scale(nn.Module):
        def forward(self, y, n):
            return y * n

    model = Calls(Scale(), lambda f, x, y: f(y, x.shape[0]) + f(y, x.shape[0]))
    tr = st.trace(model, (X, torch.rand(2)), dynamic_shapes={"args": ({0: Dim("rows", max=64)}, None)})
    found = tr.outline(Scale)
    assert signatures(found) == [("Scale(y, n) -> (result)", 2)]
    torch.testing.assert_close(found(torch.rand(9, 4), torch.ones(2)), torch.full((2,), 18.0))


def test_gradients():
    model = blocks()
    found = st.trace(model, (X,)).outline(Block)
    grads = []
    for run in (model, found):
        model.zero_grad()
        run(X).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*grads)


def test_loaded_traces_have_the_same_functions(tmp_path):
    tr = st.trace(blocks(), (X,))
    tr.save(tmp_path / "trace")
    found = st.load(tmp_path / "trace").outline("repeated")
    assert signatures(found) == signatures(tr.outline("repeated"))
    torch.testing.assert_close(found(X), tr(X))


@pytest.mark.slow
def test_inductor_and_export_take_the_graph():
    with torch.no_grad():
        gm = st.trace(blocks(), (X,)).outline(Block).graph_module
        exported = torch.export.export(gm, (X,))
        torch.testing.assert_close(exported.module()(X), gm(X))
        torch.testing.assert_close(torch._inductor.compile(gm, [X])(X), gm(X))


def test_identifiers_are_the_same_in_every_trace():
    one, other = (st.trace(blocks(), (X,)).outline("repeated") for _ in range(2))
    assert [f.identifier for f in one.functions] == [f.identifier for f in other.functions]


def test_functions_with_branches():
    tr = st.trace(nn.Sequential(Gate(), Gate(), Gate()), (X,))
    found = tr.outline(Gate)
    found.lint()
    assert signatures(found) == [("Gate(x, fc.weight, fc.bias) -> (result)", 3)]
    with torch.no_grad():
        for x in (X + 1, X - 1):
            torch.testing.assert_close(found(x), tr(x))


def test_new_statistics_come_in_one_order():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    for _ in range(3):
        found = st.trace(model, (X,)).outline("repeated")
        assert [o.name for o in found.functions[0].outputs] == [
            "",
            "num_batches_tracked",
            "running_mean",
            "running_var",
        ]
        assert len(found.functions) == 1
        with torch.no_grad():
            found(X)


def test_sizes_that_depend_on_data():
    class Positive(nn.Module):
        def forward(self, x):
            return x[x > 0]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Positive(), Positive()

        def forward(self, x):
            y = self.a(x)
            return y.sum() * y.shape[0], self.b(x + 1)

    found = outlined(Net(), (X.flatten(),), Positive)
    assert signatures(found) == [("Positive(x) -> (result)", 2)]


class Same(nn.Module):
    def forward(self, x):
        return (x * 2).type_as(x)


def test_a_tensor_that_several_calls_give_back_is_read_from_the_last():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Same(), Same()

        def forward(self, x):
            y = self.a(x)
            return self.b(y.to(torch.float32)) + y

    assert signatures(outlined(Net(), (X,), Same)) == [("Same(x) -> (result)", 2)]


class Counted(nn.Module):
    class Count(nn.Module):
        def forward(self, x):
            return (x > 0).sum().item()

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.count = Counted.Count()

        def forward(self, x):
            return x * self.count(x)

    def __init__(self):
        super().__init__()
        self.a, self.b = self.Layer(), self.Layer()

    def forward(self, x):
        return self.b(self.a(x))


def test_numbers_made_inside_and_used_outside_are_refused():
    message = r"Counted/Layer\[a\]/Count\[count\]: u0, a number that is made in this call.*leave Count out"
    with pytest.raises(st.OutlineError, match=message):
        st.trace(Counted(), (X,)).outline(Counted.Count)


def test_a_number_as_the_result_of_the_traced_function_is_refused():
    with pytest.raises(st.OutlineError, match=r"a number that is made in this call, is used outside.*leave Count out"):
        st.trace(Counted.Count(), (X,)).outline("*")


def test_repeated_leaves_out_calls_that_give_numbers():
    assert signatures(outlined(Counted(), (X,), "repeated")) == [("Layer(x) -> (result)", 2)]


@pytest.mark.parametrize("grad", [True, False])
def test_a_dynamic_number_among_the_arguments(grad):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, cache, n):
            cache[n : n + 1] = 1.0
            return self.fc(cache) * n, n + 1

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Scale(), Scale()

        def forward(self, cache, n):
            y, m = self.first(cache, n)
            return y + self.second(cache, m)[0]

    net = Twice()
    dynamic = {"cache": None, "n": Dim.DYNAMIC}
    found = st.trace(net, (torch.zeros(8, 4), 3), dynamic_shapes=dynamic).outline(Scale)
    with torch.set_grad_enabled(grad):
        assert_like_eager(net, found, (torch.zeros(8, 4), 5))


SIZES = [
    lambda x, skip: nn.functional.interpolate(x, size=skip.shape[-2:]) + skip,
    lambda x, skip: nn.functional.interpolate(x, size=(x.shape[-2] * 2, x.shape[-1] * 2)),
    lambda x, skip: x.view(-1, x.shape[-2] * x.shape[-1]),
    lambda x, skip: torch.arange(x.shape[-1] + 2 * skip.shape[-1]) + x.sum(),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("run", SIZES)
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_sizes_that_are_floor_divisions_are_read_off_the_operands(run, factor):
    class Up(nn.Module):
        def forward(self, x, skip):
            return run(x, skip)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = Up()

        def forward(self, x):
            half = nn.functional.max_pool2d(x, 2)
            return self.up(nn.functional.max_pool2d(half, 2), half)

    net = Net()
    sizes = {dim + 2: factor * Dim(name, min=8 // factor, max=64) for dim, name in enumerate("hw")}
    found = st.trace(net, (torch.randn(1, 2, 12, 16),), dynamic_shapes=(sizes,)).outline(Up)
    assert [x.name for x in found.functions[0].inputs] == ["x", "skip"]
    for size in ((20, 28), (36, 8)):
        assert_like_eager(net, found, (torch.randn(1, 2, *size),))


class Conjugated(nn.Module):
    """A layer with a buffer that torch has as a view of another one."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("by", torch.ones(4, dtype=torch.complex64).conj())

    def forward(self, x):
        """Run it."""
        return torch.real(self.fc(x) * self.by).exp()


class Switches(nn.Module):
    """Layers, of which some are run with autograd, whatever is around."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Conjugated() for _ in range(3))
        for layer in self.layers:
            layer.by = torch.ones(4)

    def forward(self, x):
        """Run it."""
        for i, layer in enumerate(self.layers):
            with torch.set_grad_enabled(i != 1):
                x = layer(x)
        return x


@pytest.mark.parametrize("make", [lambda: nn.Sequential(Conjugated(), Conjugated()), Switches])
def test_what_torch_has_no_eager_call_of_a_function_for(make):
    model, x = make(), torch.ones(2, 4)
    with torch.no_grad():
        outlined = st.trace(model, (x,)).outline("layers")
        out, wanted = outlined(x), model(x)
    assert torch.equal(out, wanted)
    assert out.requires_grad == wanted.requires_grad
    if out.requires_grad:
        weight = model.layers[2].fc.weight
        assert torch.equal(*(torch.autograd.grad(y.sum(), weight)[0] for y in (out, wanted)))


class Rotary(nn.Module):
    """Computes its angles under no_grad, from a buffer, so that the flat program needs no switch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("speed", torch.arange(4.0))

    def forward(self, x):
        """Run it."""
        with torch.no_grad():
            angle = torch.outer(torch.arange(x.shape[0]), self.speed)
        return x * angle.cos()


def test_a_call_under_no_grad_of_layers_with_such_a_block():
    model, x = nn.Sequential(nn.Linear(4, 4), Rotary(), Rotary(), nn.Linear(4, 4)), torch.randn(3, 4)
    trace = st.trace(model, (x,))
    outlined, compiled = trace.outline("layers"), trace.compile("eager", functions=Rotary)
    with torch.no_grad():
        assert torch.equal(outlined(x), model(x))
        assert not outlined(x).requires_grad
        with pytest.raises(st.errors.StateMismatchError, match="functions, branches or compiled code"):
            outlined.run(lambda *inputs: outlined.graph_module(*inputs), x)
        with pytest.raises(st.errors.StateMismatchError, match="functions, branches or compiled code"):
            compiled(x)
    assert outlined(x).requires_grad and compiled(x).requires_grad


class Squashed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x).tanh() + x


def test_the_text_of_an_outlined_step():
    model = nn.Sequential(*(Squashed() for _ in range(3)))

    def step(x):
        loss = model(x).sum()
        loss.backward()
        return loss

    trace = st.trace(step, (torch.randn(2, 4),))
    flat, outlined = ([line.strip() for line in str(t).splitlines()] for t in (trace, trace.outline("layers")))
    scopes = [
        [line for line in lines[lines.index("backward") :] if line.endswith("]") and "(" not in line]
        for lines in (flat, outlined)
    ]
    assert scopes[0] == scopes[1] and "Squashed[2]" in scopes[0]


class Mixed(nn.Module):
    """A layer that has an `nn.Sequential` inside, as those of many vision transformers."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x):
        """Run it."""
        return x + self.mlp(self.norm(x))


@pytest.mark.parametrize("stages", [1, 2])
def test_layers_in_an_outer_sequential(stages):
    """The class of what is around the layers is that of a part of each."""
    around = [nn.Sequential(*[Mixed() for _ in range(3)]) for _ in range(stages)]
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*around) if stages > 1 else around[0], nn.Linear(4, 2))
    x = torch.randn(2, 4)
    outline = st.trace(model, (x,)).outline("layers")
    assert [(f.name, len(f.calls)) for f in outline.functions] == [("Mixed", 3 * stages)]
    torch.testing.assert_close(outline(x), model(x))
