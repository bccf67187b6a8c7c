"""The graph that people hold is the program: an edit of it reaches every form of a trace.

Each edit is made on the graph of one model, with mutation, buffers and dynamic sizes, and each form of the edited trace
is compared with a call of it, which runs the edited graph.
"""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from compare import assert_like_eager
from nets import Gate, Net
from torch import nn
from torch.fx import subgraph_rewriter
from torch.fx.passes.split_module import split_module

import scopetrace as st
from scopetrace.errors import EditError, OutlineError

aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return torch.relu(self.bn(self.fc(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = Block()
        self.b = Block()
        self.head = nn.Linear(4, 3)

    def forward(self, x, y):
        x = self.b(self.a(x))
        y.add_(1)
        return self.head(x) * 2, x[:, 0], y


def inputs():
    torch.manual_seed(0)
    return torch.randn(5, 4), torch.randn(5, 3)


# Edits ---------------------------------------------------------------------------------------------------------------


def nodes(gm, target):
    return [n for n in gm.graph.nodes if n.target is target]


def replace_with(gm, node, make):
    """`make(graph, node)` gives what takes the place of a node."""
    with gm.graph.inserting_after(node):
        new = make(gm.graph, node)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    if not node.users:
        gm.graph.erase_node(node)


def each_relu(make):
    def edit(gm):
        for node in nodes(gm, aten.relu.default):
            replace_with(gm, node, lambda graph, n: make(gm, graph, n))

    return edit


def change_target(gm):
    for node in nodes(gm, aten.relu.default):
        node.target = aten.sigmoid.default


def change_argument(gm):
    for node in nodes(gm, aten.mul.Tensor):
        node.args = (node.args[0], 5)


def erase(gm):
    for node in nodes(gm, aten.relu.default):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)


def replace_output(gm):
    output = next(iter(reversed(gm.graph.nodes)))
    values = list(output.args[0])
    i = next(i for i, v in enumerate(values) if v.target is aten.mul.Tensor)
    values[i] = values[i].args[0]
    output.args = (tuple(values),)


def other_weight(gm):
    gm.head.weight = nn.Parameter(gm.head.weight.detach() * 2)


def new_module(gm, graph, node):
    if not hasattr(gm, "extra"):
        torch.manual_seed(1)
        gm.add_submodule("extra", nn.Linear(4, 4))
    return graph.call_module("extra", (node,))


def new_buffer(gm, graph, node):
    gm.register_buffer("scale", torch.full((4,), 0.5))
    with graph.inserting_before(node):
        scale = graph.get_attr("scale")
    return graph.call_function(aten.mul.Tensor, (node, scale))


def rewrite(gm):
    def pattern(x, w, b):
        return aten.linear.default(x, w, b)

    def matmul(x, w, b):
        return aten.add.Tensor(aten.matmul.default(x, aten.t.default(w)), b)

    assert subgraph_rewriter.replace_pattern(gm, pattern, matmul)


def dead_code(gm):
    replace_output(gm)
    gm.graph.eliminate_dead_code()


def fold_constants(gm):
    """A view of a weight becomes a tensor of its own, as constant folding does."""
    gm.folded = nn.Parameter(gm.head.weight.detach() + 1)
    node = next(n for n in gm.graph.nodes if n.target == "head.weight")
    node.target = "folded"


def fuse_batch_norm(gm):
    """Linear and batch norm in eval mode become one linear, as torch.fx's optimization passes do for convolutions."""
    for norm in nodes(gm, aten.batch_norm.default):
        linear, weight, bias, mean, var = norm.args[:5]
        x, w, b = linear.args
        names = [n.target for n in (weight, bias, mean, var, w, b)]
        gamma, beta, mean, var, w, b = (attribute(gm, name).detach() for name in names)
        scale = gamma / torch.sqrt(var + norm.args[7])
        prefix = names[4].split(".")[0]
        setattr(gm, f"fused_{prefix}_w", nn.Parameter(w * scale[:, None]))
        setattr(gm, f"fused_{prefix}_b", nn.Parameter((b - mean) * scale + beta))
        with gm.graph.inserting_before(norm):
            new = [gm.graph.get_attr(f"fused_{prefix}_{part}") for part in "wb"]
            fused = gm.graph.call_function(aten.linear.default, (x, *new))
        norm.replace_all_uses_with(fused)
        gm.graph.erase_node(norm)
    gm.graph.eliminate_dead_code()


def attribute(gm, name):
    for part in name.split("."):
        gm = getattr(gm, part)
    return gm


EDITS = {
    "target": change_target,
    "argument": change_argument,
    "erase": erase,
    "output": replace_output,
    "weight": other_weight,
    "insert": each_relu(lambda gm, graph, n: graph.call_function(aten.mul.Tensor, (n, 3.0))),
    "replace": each_relu(lambda gm, graph, n: graph.call_function(aten.gelu.default, (n.args[0],))),
    "function": each_relu(lambda gm, graph, n: graph.call_function(F.gelu, (n.args[0],))),
    "method": each_relu(lambda gm, graph, n: graph.call_method("clamp", (n.args[0],), {"min": 0.1})),
    "module": each_relu(new_module),
    "buffer": each_relu(new_buffer),
    "rewriter": rewrite,
    "dead code": dead_code,
    "fold": fold_constants,
}
ONLY_STATIC = {
    "quantize": each_relu(
        lambda gm, graph, n: graph.call_function(aten.fake_quantize_per_tensor_affine.default, (n, 0.1, 0, -128, 127))
    ),
    "fuse": fuse_batch_norm,
}

# Forms ---------------------------------------------------------------------------------------------------------------


def loaded(trace, tmp_path):
    trace.save(tmp_path / "trace")
    return st.load(tmp_path / "trace")


FORMS = {
    "call": lambda trace, tmp_path: trace,
    "save": loaded,
    "save twice": lambda trace, tmp_path: loaded(loaded(trace, tmp_path), tmp_path),
    "pickle": lambda trace, tmp_path: pickle.loads(pickle.dumps(trace)),
    "deepcopy": lambda trace, tmp_path: copy.deepcopy(trace),
    "exported": lambda trace, tmp_path: trace.to_exported_program().module(),
    "outline": lambda trace, tmp_path: trace.outline(Block),
    "outline parts": lambda trace, tmp_path: trace.outline(nn.Linear),
    "the same graph": lambda trace, tmp_path: trace.with_graph(trace.graph_module),
    "a copy of the graph": lambda trace, tmp_path: trace.with_graph(copy.deepcopy(trace.graph_module)),
}


def edited(edit, *, mode="eval", functional=True, dynamic=False):
    torch.manual_seed(0)
    model = Model().train(mode == "train")
    sizes = ({0: torch.export.Dim("batch", min=2)},) * 2 if dynamic else None
    trace = st.trace(model, inputs(), functional=functional, dynamic_shapes=sizes)
    edit(trace.graph_module)
    trace.graph_module.graph.lint()
    trace.graph_module.recompile()
    return model, trace


def run(model, program):
    """The results, the arguments after the call and the model's state after it."""
    before = copy.deepcopy(model.state_dict())
    args = inputs()
    torch.manual_seed(1)
    results = [t.detach().clone() for t in program(*args)]
    state = {name: t.clone() for name, t in model.state_dict().items()}
    model.load_state_dict(before)
    return [*results, *args], state


KINDS = {
    "eval": {},
    "train": {"mode": "train"},
    "dynamic": {"dynamic": True},
    "as they ran": {"functional": False, "mode": "train"},
}
IN_EVERY_KIND = ("replace", "buffer")
"""The edits that `make test` makes in traces of every kind, the others in training mode; `make test-all` makes all."""


def cases():
    """Each edit in each kind of trace; batch norm is fused in eval mode only, some ops have static sizes only."""
    for name, kind in itertools.product(EDITS | ONLY_STATIC, KINDS):
        if not (name in ONLY_STATIC and kind == "dynamic") and not (name == "fuse" and kind != "eval"):
            is_fast = name == "fuse" or kind == "train" or name in IN_EVERY_KIND
            yield pytest.param(name, kind, marks=() if is_fast else pytest.mark.slow)


@pytest.mark.parametrize(("name", "kind"), [*cases()])
def test_every_form_has_the_edit(name, kind, tmp_path):
    model, trace = edited((EDITS | ONLY_STATIC)[name], **KINDS[kind])
    results, state = run(model, trace)
    trace.lint()
    for form, make in FORMS.items():
        if form.startswith("outline") and (kind == "as they ran" or (form, name) == ("outline parts", "fuse")):
            continue  # OutlineError: a graph with mutation, and calls whose results are gone
        made = make(trace, tmp_path)
        found, changed = run(model, made)
        torch.testing.assert_close(found, results, msg=lambda text, form=form: f"{form}: {text}")
        if form in ("deepcopy", "outline", "the same graph", "a copy of the graph"):
            torch.testing.assert_close(changed, state, msg=lambda text, form=form: f"{form}: {text}")


def test_text_calls_and_order_have_the_edit():
    _, trace = edited(EDITS["replace"])
    assert "relu" not in str(trace)
    gelu = nodes(trace.graph_module, aten.gelu.default)[0]
    assert gelu in trace.calls[1].nodes
    assert trace.calls[1].outputs is gelu
    assert gelu.meta["val"].shape == (5, 4)
    assert trace.scope_of(gelu).path == "Model/Block[a]"

    _, trace = edited(fuse_batch_norm)
    assert [len(c.nodes) for c in trace.calls if c.fqn in ("a.fc", "a.bn")] == [0, 0]
    assert trace.order.param_forward_order == ["head.weight", "head.bias"]


def test_a_call_whose_nodes_are_gone_says_so():
    _, trace = edited(fuse_batch_norm)
    linear, norm = (next(c for c in trace.calls if c.fqn == fqn) for fqn in ("a.fc", "a.bn"))
    with pytest.raises(EditError, match="removed linear, which this call took or gave"):
        _ = linear.outputs
    with pytest.raises(EditError, match=r"removed aten\.linear\.default, which this call took or gave"):
        _ = norm.outputs  # what stands in the place of its result is made outside, after it
    assert repr(norm.argument_templates["input"]) == "<removed: linear>"
    with pytest.raises(OutlineError, match=r"Linear\[fc\]: an edit of the graph removed"):
        trace.outline("a.fc")


def test_a_buffer_s_new_value_that_is_made_after_the_call_is_none_that_it_gave(tmp_path):
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("sum", torch.zeros(4))
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x):
            self.sum += x.sum(0)
            self.n += 1
            return x * 2

    x = torch.randn(2, 4)
    trace = st.trace(nn.Sequential(Sums(), nn.ReLU()), (x,))
    graph, (relu,) = trace.graph_module.graph, nodes(trace.graph_module, aten.relu.default)
    with graph.inserting_after(relu):
        total = graph.call_function(aten.sum.dim_IntList, (relu, [0]))
    new_sum, *others = graph.output_node().args[0]
    graph.output_node().args = ((total, *others),)
    graph.erase_node(new_sum)
    trace.graph_module.recompile()
    assert [[*call.mutated] for call in trace.calls] == [["0.sum", "0.n"], ["n"], []]
    trace.save(tmp_path / "edited.st")
    assert [[*call.mutated] for call in st.load(tmp_path / "edited.st").calls] == [["0.sum", "0.n"], ["n"], []]


def test_a_new_node_belongs_to_the_call_around_it():
    """Between two calls: to the call around both. What the next call takes is the new value."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    trace = st.trace(model, (torch.randn(2, 4),))
    relu = nodes(trace.graph_module, aten.relu.default)[0]
    replace_with(trace.graph_module, relu, lambda graph, n: graph.call_function(aten.mul.Tensor, (n, 2)))
    mul = nodes(trace.graph_module, aten.mul.Tensor)[0]
    assert trace.scope_of(mul).path == "Sequential"
    assert trace.calls[2].outputs is relu
    assert trace.calls[3].arguments == {"input": mul}
    assert str(trace.outline(nn.Linear).functions[0]) == (
        "torch.nn.modules.linear::Linear(input, weight, bias) -> (result)"
    )


def test_without_recompile_every_form_agrees_with_the_text():
    """torch.fx wants `recompile()` after an edit. A form that reads the edit generates the code again."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.randn(2, 4)
    trace = st.trace(model, (x,))
    trace(x)
    nodes(trace.graph_module, aten.relu.default)[0].target = aten.sigmoid.default
    want = torch.sigmoid(model[0](x))
    torch.testing.assert_close(copy.deepcopy(trace)(x), want)
    torch.testing.assert_close(trace(x), want)


def test_a_second_edit():
    model, trace = edited(EDITS["insert"])
    trace.lint()
    EDITS["target"](trace.graph_module)
    trace.graph_module.recompile()
    results, _ = run(model, trace)
    torch.testing.assert_close(run(model, copy.deepcopy(trace))[0], results)


def test_an_edited_training_step_keeps_its_phases():
    model = nn.Sequential(nn.LayerNorm(4), nn.ReLU())  # backward of a norm has several results

    def step(x):
        loss = model(x).sum()
        loss.backward()
        return loss

    trace = st.trace(step, (torch.randn(2, 4),))
    phases = [trace.phase_of(node) for node in trace.graph_module.graph.nodes]
    change_target(trace.graph_module)
    trace.lint()
    assert [trace.phase_of(node) for node in trace.graph_module.graph.nodes] == phases
    assert trace.calls[1].backward_nodes


def test_a_weight_replaced_in_the_graph_module_stays():
    """Each call binds the model's present tensors to the graph, but not in the place of what somebody put there."""
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    trace = st.trace(model, (x,))
    trace(x)
    trace.graph_module.weight = nn.Parameter(torch.zeros(4, 4))
    torch.testing.assert_close(trace(x), model.bias.expand(2, 4))
    model.bias = nn.Parameter(torch.ones(4))
    torch.testing.assert_close(trace(x), torch.ones(2, 4))
    torch.testing.assert_close(trace.to_exported_program().module()(x), torch.ones(2, 4))


# Graphs of passes ----------------------------------------------------------------------------------------------------


def test_split_module(tmp_path):
    model, trace = edited(lambda gm: None, mode="train")
    parts = iter(range(1000))
    split = split_module(trace.graph_module, None, lambda node: next(parts) // 4)
    assert split.graph.find_nodes(op="call_module", target="submod_0")
    found = trace.with_graph(split)
    found.lint()
    assert [c.fqn for c in found.calls] == [c.fqn for c in trace.calls]
    assert [len(c.nodes) for c in found.calls] == [len(c.nodes) for c in trace.calls]
    assert run(model, found)[1].keys() == model.state_dict().keys()
    torch.testing.assert_close(run(model, found), run(model, trace))
    torch.testing.assert_close(run(model, loaded(found, tmp_path))[0], run(model, trace)[0])
    torch.testing.assert_close(run(model, found.outline(Block)), run(model, trace))


def test_a_trace_of_a_copy_has_the_model_s_state():
    """Equal copies stand for the model's own tensors, others belong to the new trace."""
    model, trace = edited(lambda gm: None, mode="train")
    gm = copy.deepcopy(trace.graph_module)
    gm.head.weight = nn.Parameter(gm.head.weight.detach() * 2)
    found = trace.with_graph(gm)
    held = dict(found.graph_module.named_parameters())
    assert held["a.fc.weight"] is model.a.fc.weight
    assert held["head.weight"] is gm.head.weight
    before = model.a.count.clone()
    found(*inputs())
    assert model.a.count == before + 1


def test_the_trace_of_a_graph_has_a_graph_of_its_own():
    _, trace = edited(lambda gm: None)
    gm = copy.deepcopy(trace.graph_module)
    change_target(gm)
    assert "sigmoid" in str(trace.with_graph(gm))
    assert "sigmoid" not in str(trace)


# Bodies, functions, leaves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1, -1])
def test_a_body_of_cond(sign, tmp_path):
    model = nn.Sequential(Gate(), nn.ReLU())
    x = torch.ones(2, 4) * sign
    trace = st.trace(model, (x,))
    body = trace.graph_module.true_graph_0
    for node in nodes(body, aten.linear.default):
        replace_with(body, node, lambda graph, n: graph.call_function(aten.neg.default, (n,)))
    body.recompile()
    want = torch.relu(-model[0].fc(x) if sign > 0 else x * 2)
    trace.lint()
    assert "neg" in str(trace)
    for made in (trace, loaded(trace, tmp_path), copy.deepcopy(trace), trace.to_exported_program().module()):
        torch.testing.assert_close(made(x), want)


def test_branches_that_change_places():
    x = torch.ones(2, 4)
    trace = st.trace(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), (x,))
    (cond,) = nodes(trace.graph_module, torch.ops.higher_order.cond)
    pred, first, second, operands = cond.args
    cond.args = pred, second, first, operands
    trace.graph_module.recompile()
    for made in (trace, copy.deepcopy(trace)):
        torch.testing.assert_close([made(x), made(-x)], [torch.cos(x), torch.sin(-x)])


def test_what_a_cond_takes_stays_as_it_is():
    trace = st.trace(nn.Sequential(nn.ReLU(), Gate()), (torch.ones(2, 4),))
    (relu,) = nodes(trace.graph_module, aten.relu.default)
    replace_with(trace.graph_module, relu, lambda graph, n: graph.call_function(aten.detach.default, (n.args[0],)))
    trace.lint()
    (detach,) = nodes(trace.graph_module, aten.detach.default)
    replace_with(trace.graph_module, detach, lambda graph, n: graph.call_method("double", (n,)))
    with pytest.raises(EditError, match="node cond: its operands or body were changed"):
        trace.lint()


@pytest.mark.parametrize("grad", [True, False])
def test_an_outlined_program(grad):
    """An edit of a function is an edit of all its calls."""
    model, trace = edited(lambda gm: None)
    outlined = trace.outline(Block)
    assert len(outlined.functions) == 1
    change_target(outlined.functions[0].graph_module)
    outlined.functions[0].graph_module.recompile()
    other, flat = edited(change_target)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(run(model, outlined), run(other, flat))
    assert "sigmoid" in str(outlined.functions[0].graph_module.graph)
    outlined.lint()


def test_a_leaf_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.randn(2, 4)
    trace = st.trace(model, (x,), leaf_modules=nn.Linear)
    trace.graph_module.add_submodule("0", nn.Linear(4, 4))
    want = torch.relu(trace.graph_module.get_submodule("0")(x))
    torch.testing.assert_close(trace(x), want)
    torch.testing.assert_close(copy.deepcopy(trace)(x), want)


def test_a_function_of_torch_that_takes_numbers_alone_is_an_op():
    trace = st.trace(lambda x: x + 1, (torch.ones(3),))
    graph = trace.graph_module.graph
    (old,) = graph.output_node().args[0]
    with graph.inserting_before(graph.output_node()):
        noise = graph.call_function(torch.rand, (3,))
        new = graph.call_function(torch.add, (old, noise))
    graph.output_node().args = ((new,),)
    assert {"aten.rand.default", "aten.add.Tensor"} == {
        str(n.target) for n in trace.to_exported_program().graph.nodes if n.op == "call_function"
    }


def test_numbers_that_depend_on_data():
    def forward(self, x):
        return torch.relu(x[x > 0]).sum(), x.nonzero() * 2

    model = Net(forward)
    x = torch.randn(3, 4)
    trace = st.trace(model, (x,))
    change_target(trace.graph_module)
    trace.graph_module.recompile()
    want = [torch.sigmoid(x[x > 0]).sum(), x.nonzero() * 2]
    for made in (trace, copy.deepcopy(trace), trace.to_exported_program().module()):
        torch.testing.assert_close([*made(x)], want)


def test_results_that_are_views_and_inputs():
    def forward(self, x):
        y = torch.relu(x)
        x.mul_(2)
        return x, x[0], y[1:], y

    trace = st.trace(Net(forward), (torch.randn(3, 4),))
    change_target(trace.graph_module)

    def changed(x):
        y = torch.sigmoid(x)
        x.mul_(2)
        return x, x[0], y[1:], y

    assert_like_eager(changed, copy.deepcopy(trace), (torch.randn(3, 4),))


# What cannot be followed ---------------------------------------------------------------------------------------------


def add_placeholder(gm):
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.placeholder("more")


def drop_output(gm):
    output = next(iter(reversed(gm.graph.nodes)))
    output.args = (output.args[0][:-1],)


def write(gm):
    for node in nodes(gm, aten.relu.default):
        node.target = aten.relu_.default


def unknown_method(gm):
    for node in nodes(gm, aten.relu.default):
        replace_with(gm, node, lambda graph, n: graph.call_method("no_such_method", (n,)))


def other_shape(gm):
    for node in nodes(gm, aten.add.Tensor):
        if node.args[0].name == "y":
            replace_with(gm, node, lambda graph, n: graph.call_function(aten.sum.default, (n,)))


def missing_tensor(gm):
    for node in gm.graph.nodes:
        if node.target == "head.weight":
            node.target = "tail.weight"


@pytest.mark.parametrize("rows", [1, 2])
def test_an_output_without_its_tuple_is_that_value(rows):
    model, x = torch.nn.Linear(3, 4), torch.randn(rows, 3)
    trace = st.trace(model, (x,))
    output = trace.graph_module.graph.output_node()
    output.args = output.args[0]
    trace.graph_module.recompile()
    torch.testing.assert_close(trace(x), model(x))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (add_placeholder, r"has 3 placeholders \(more, x, y\), and the trace has 2 inputs"),
        (drop_output, r"node output: the edited graph returns \d+ values, and that of the trace \d+"),
        (write, r"node relu: aten.relu_.default writes to a tensor"),
        (unknown_method, r"node no_such_method: .*no_such_method"),
        (other_shape, r"node output: output \d is torch.float32 of shape \[\] and was .* y.copy_"),
        (missing_tensor, r"node head_weight: the graph module has no attribute tail.weight"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_refused(edit, message, tmp_path):
    model = Model()
    trace = st.trace(model, inputs())
    edit(trace.graph_module)
    with pytest.raises(EditError, match=message):
        trace.to_exported_program()
    with pytest.raises(EditError, match=message):
        trace.save(tmp_path / "trace")
    gm = copy.deepcopy(st.trace(model, inputs()).graph_module)
    edit(gm)
    with pytest.raises(EditError, match=message):
        st.trace(model, inputs()).with_graph(gm)


@pytest.mark.parametrize("edit", [drop_output, other_shape])
def test_a_call_is_refused_too(edit):
    trace = st.trace(Model(), inputs())
    edit(trace.graph_module)
    trace.graph_module.recompile()
    with pytest.raises(EditError, match=r"returns \d+ values|y\.copy_.*gives \[\] for \[5, 3\]"):
        trace(*inputs())


def test_the_text_of_an_edit_that_cannot_be_followed():
    trace = st.trace(nn.ReLU(), (torch.randn(2),))
    write(trace.graph_module)
    assert "aten.relu_(" in str(trace)
    assert repr(trace) == "<Trace of ReLU: 1 ops, 1 module calls>"


def test_a_compiled_form_of_an_edited_graph():
    """`run` compares what the compiled graph returns with the graph as it is now."""
    trace = st.trace(nn.ReLU(), (torch.randn(2, 3),))
    replace_with(
        trace.graph_module,
        nodes(trace.graph_module, aten.relu.default)[0],
        lambda graph, n: graph.call_function(aten.sum.dim_IntList, (n, [1])),
    )
    trace.graph_module.recompile()
    x = torch.randn(2, 3)
    torch.testing.assert_close(trace.run(lambda x: (torch.relu(x).sum(1),), x), torch.relu(x).sum(1))


def test_an_edited_outlined_program_has_no_flat_form():
    _, trace = edited(lambda gm: None)
    outlined = trace.outline(Block)
    assert outlined.inline() is trace
    change_target(outlined.functions[0].graph_module)
    with pytest.raises(EditError, match="edit the trace, and outline it then"):
        outlined.inline()


class Observer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("most", torch.zeros(()))

    def forward(self, x):
        self.most = torch.maximum(self.most, x.max())
        return x


def test_a_module_that_writes_its_attributes_is_no_part_of_a_graph():
    trace, observer = st.trace(nn.ReLU(), (torch.randn(2),)), Observer()
    gm = copy.deepcopy(trace.graph_module)
    gm.add_submodule("observer", observer)
    replace_with(gm, nodes(gm, aten.relu.default)[0], lambda graph, n: graph.call_module("observer", (n,)))
    gm.recompile()
    with pytest.raises(st.errors.EditError, match="node observer: the module writes its attribute most"):
        trace.with_graph(gm)
    assert type(observer.most) is torch.Tensor
    with pytest.raises(st.errors.ArgumentTypeError, match=r"takes a torch\.fx\.GraphModule, not ReLU"):
        trace.with_graph(nn.ReLU())


def test_a_call_of_a_graph_without_its_tensor_or_with_another_input():
    x, trace = torch.randn(2, 4), st.trace(nn.Linear(4, 3), (torch.randn(2, 4),))
    del trace.graph_module.weight
    for form in (lambda: trace(x), trace.to_exported_program, trace.to_module, lambda: str(trace.calls[0].outputs)):
        with pytest.raises(st.errors.EditError, match="node weight: the graph module has no attribute weight"):
            form()
    trace = st.trace(nn.Linear(4, 3), (x,))
    with trace.graph_module.graph.inserting_before(next(iter(trace.graph_module.graph.nodes))):
        trace.graph_module.graph.placeholder("mask")
    trace.graph_module.recompile()
    with pytest.raises(st.errors.EditError, match="2 placeholders"):
        trace(x)


def test_a_page_of_a_graph_whose_nodes_have_no_meta():
    trace = st.trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (torch.randn(2, 4),))
    for node in trace.graph_module.graph.nodes:
        node.meta.clear()
    assert "linear" in trace.to_html()


def test_the_arguments_of_the_root_call_of_a_transformed_graph():
    class Doubled(torch.fx.Transformer):
        def call_function(self, target, args, kwargs):
            found = super().call_function(target, args, kwargs)
            return found * 2 if target is aten.relu.default else found

    x = torch.randn(2, 4)
    trace = st.trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (x,))
    found = trace.with_graph(Doubled(trace.graph_module).transform())
    root = found.calls[0]
    assert root.arguments["input"].op == "placeholder" and found.calls[1].arguments["input"] is root.arguments["input"]
    torch.testing.assert_close(found(x), trace(x) * 2)


def test_a_graph_without_output_and_a_tensor_in_a_node_are_refused():
    trace = st.trace(nn.ReLU(), (torch.ones(2, 4),))
    trace.graph_module.graph.erase_node(trace.graph_module.graph.output_node())
    with pytest.raises(EditError, match="has no output"):
        trace.lint()
    trace = st.trace(nn.ReLU(), (torch.ones(2, 4),))
    (relu,) = nodes(trace.graph_module, aten.relu.default)
    relu.target, relu.args = aten.mul.Tensor, (relu.args[0], torch.tensor(2.0))
    with pytest.raises(EditError, match=r"a node takes a tensor.*\n.*graph\.get_attr"):
        trace.lint()
