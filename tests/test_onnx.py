"""ONNX files with modules as functions: what they look like, and that they compute what the model computes.

`text` prints a model: each function with its signature and calls, then the main program, one node a line.
"""

import itertools
import re

import pytest
import torch
from nets import Gate
from torch import nn
from torch.export import Dim

import scopetrace as st

onnxruntime = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")
onnxscript = pytest.importorskip("onnxscript")
ir = pytest.importorskip("onnx_ir")

F = nn.functional


def text(model):
    """The model as text; domains of functions are left out."""
    lines = []
    for function in model.functions.values():
        taken, given = (", ".join(v.name for v in values) for values in (function.inputs, function.outputs))
        lines.append(f"{function.name}({taken}) -> ({given}): {' '.join(n.op_type for n in function)}")
    for node in model.graph:
        taken = ", ".join("''" if v is None else v.name for v in node.inputs)
        lines.append(f"{', '.join(v.name for v in node.outputs)} = {node.op_type}({taken})")
    given = ", ".join(v.name for v in model.graph.outputs)
    return "\n".join([*lines, f"return {given}"])


def shape(value):
    return [d if isinstance(d, int) else d.value for d in value.shape]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, mask=None, bias=None):
        y = torch.relu(self.fc(x))
        y = y if mask is None else y * mask
        return y if bias is None else y + bias


def blocks(count):
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(count)])


X = torch.randn(2, 4)


def test_equal_calls_share_one_function():
    model = st.trace(blocks(3), (X,)).to_onnx(functions=Block, verify=True)
    assert text(model) == (
        "Block(x, mask, bias, fc.weight, fc.bias) -> (output): Gemm Relu\n"
        "Block_0 = Block(input, '', '', 0.fc.weight, 0.fc.bias)\n"
        "Block_1 = Block(Block, '', '', 1.fc.weight, 1.fc.bias)\n"
        "output = Block(Block_1, '', '', 2.fc.weight, 2.fc.bias)\n"
        "return output"
    ).replace("Block_0 =", "Block =")
    (function,) = model.functions.values()
    assert (function.domain, model.ir_version) == (Block.__module__, 10)
    assert sorted(model.graph.initializers) == sorted(f"{i}.fc.{kind}" for i in range(3) for kind in ("weight", "bias"))


def test_without_functions_the_file_is_flat():
    model = st.trace(blocks(2), (X,)).to_onnx(verify=True)
    assert text(model) == (
        "linear = Gemm(input, 0.fc.weight, 0.fc.bias)\n"
        "relu = Relu(linear)\n"
        "linear_1 = Gemm(relu, 1.fc.weight, 1.fc.bias)\n"
        "output = Relu(linear_1)\n"
        "return output"
    )


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x, bias):
        return self.block(x, None, bias)


def test_an_absent_operand_in_the_middle_is_empty():
    model = st.trace(Attend(), (X, X + 1)).to_onnx(functions=Block, verify=True)
    assert "output = Block(x, '', bias, block.fc.weight, block.fc.bias)" in text(model)


def test_functions_nest():
    model = st.trace(blocks(2), (X,)).to_onnx(functions=[Block, nn.Linear], verify=True)
    assert text(model).splitlines()[:2] == [
        "Linear(input, weight, bias) -> (output): Gemm",
        "Block(x, mask, bias, fc.weight, fc.bias) -> (output): Linear Relu",
    ]
    block = model.functions[Block.__module__, "Block", ""]
    assert set(block.opset_imports) == {"", nn.Linear.__module__}
    assert {*block.opset_imports, Block.__module__} == set(model.opset_imports)


def test_targets_are_those_of_outline():
    trace = st.trace(blocks(3), (X,))
    for target in ("repeated", "?", lambda call: call.fqn in ("0", "1", "2")):
        assert text(trace.to_onnx(functions=target)).count("= Block(") == 3
    with pytest.raises(st.OutlineError, match=r"nothing\.\*"):
        trace.to_onnx(functions="nothing.*")


def test_names_of_functions_inputs_and_outputs():
    trace = st.trace(blocks(2), (X,))
    model = trace.to_onnx(
        functions={Block: "my.ops::Cell"}, input_names=["pixels"], output_names=["scores"], verify=True
    )
    assert text(model).endswith("scores = Cell(Cell, '', '', 1.fc.weight, 1.fc.bias)\nreturn scores")
    assert [v.name for v in model.graph.inputs] == ["pixels"]
    assert [f.domain for f in model.functions.values()] == ["my.ops"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"functions": {Block: "Cell"}}, "write 'my.domain::Block'"),
        ({"functions": {"layers": "a::B"}}, "'layers' names calls by a rule; a dict names classes"),
        ({"functions": {0: "a::B"}}, "0 is no target; a dict names classes"),
        ({"functions": {Block: "ai.onnx::Gemm"}}, "a domain of ops that runtimes have"),
        ({"input_names": ["0.fc.weight"]}, "input_names: 0.fc.weight is a tensor of the model"),
        ({"input_names": ["a", "b"]}, "input_names has 2 names for 1: input"),
        ({"output_names": ["input"]}, "output_names has 'input', which is an input"),
        ({"output_names": "abc"}, "output_names has 3 names for 1"),
        ({"attributes": "eps"}, r"write attributes=\['eps'\]"),
    ],
)
def test_arguments_that_do_not_fit(options, message):
    with pytest.raises(st.OnnxOptionError, match=message):
        st.trace(blocks(1), (X,)).to_onnx(**options)


class Shaped(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow, self.to_expr = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.to_expr(self.narrow(self.wide(x)))


def test_bodies_of_other_sizes_that_translate_to_the_same_are_one_function():
    model = st.trace(Shaped(), (X,)).to_onnx(functions=nn.Linear, verify=True)
    assert [f.name for f in model.functions.values()] == ["Linear", "Linear_2"]
    shared, own = model.functions.values()
    assert [v.shape for n in shared for v in n.outputs] == [None]
    assert [shape(v) for n in own for v in n.outputs][-1] == [2, 4]


class Passing(nn.Module):
    class Inner(nn.Module):
        def forward(self, x, unused):
            return x, x, x * 2, x - 1

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        first = self.inner(x, x + 1)
        return self.inner(first[0], x)[2]


def test_outputs_that_are_inputs_and_outputs_that_nobody_reads():
    model = st.trace(Passing(), (X,)).to_onnx(functions=Passing.Inner, verify=True)
    (inner,) = model.functions.values()
    assert [v.name for v in inner.inputs] == ["x", "unused"]
    assert [n.op_type for n in inner].count("Identity") == 2
    calls = [n for n in model.graph if n.op_type == "Inner"]
    assert [len(call.outputs) for call in calls] == [4, 4]


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count += 1
        return x + self.count


def test_state_comes_in_as_an_input_with_a_default_and_goes_out():
    shared = Counter()
    model = st.trace(nn.Sequential(shared, shared), (X,)).to_onnx(functions=Counter, verify=True)
    assert text(model) == (
        "Counter(x, count) -> (output, count_updated): Constant Add Add\n"
        "Counter, Counter_1 = Counter(input, 0.count)\n"
        "output, 0.count_updated = Counter(Counter, Counter_1)\n"
        "return output, 0.count_updated"
    )
    assert [v.name for v in model.graph.inputs] == ["input", "0.count"]
    assert "0.count" in model.graph.initializers
    assert shared.count == 0


class Writes(nn.Module):
    def forward(self, x, cache):
        cache[:, 1] = x
        x.mul_(2)
        return {"view": cache[0], "same": x, "sum": x + 1}


def test_changed_inputs_come_after_the_results():
    model = st.trace(Writes(), (torch.randn(2, 4), torch.randn(2, 3, 4))).to_onnx(verify=True)
    assert [v.name for v in model.graph.outputs] == ["view", "same", "sum", "x_updated", "cache_updated"]


def test_a_trace_with_mutation_gives_the_same_file():
    args = (torch.randn(2, 4), torch.randn(2, 3, 4))
    mutable, pure = (st.trace(Writes(), args, functional=f).to_onnx(verify=True) for f in (False, True))
    assert [n.op_type for n in mutable.graph] == [n.op_type for n in pure.graph]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def test_tied_weights_are_stored_once():
    model = st.trace(Tied(), (torch.tensor([[1, 2]]),)).to_onnx(functions=[nn.Embedding, nn.Linear], verify=True)
    assert list(model.graph.initializers) == ["embed.weight"]
    assert "Linear(Embedding, embed.weight)" in text(model)


def test_dynamic_sizes_keep_their_names():
    batch, length = Dim("batch"), Dim("length", min=2)
    trace = st.trace(blocks(2), (torch.randn(3, 5, 4),), dynamic_shapes={"input": {0: batch, 1: length}})
    model = trace.to_onnx(functions=Block, verify=True)
    assert shape(model.graph.inputs[0]) == ["batch", "length", 4]
    assert shape(model.graph.outputs[0]) == ["batch", "length", 4]
    assert len(model.functions) == 1


class Cached(nn.Module):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.key = nn.Linear(4, 4)

        def forward(self, x, past):
            keys = torch.cat([past, self.key(x)], 1)
            return x + torch.softmax(x @ keys.transpose(1, 2), -1) @ keys, keys

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(), self.Layer()])

    def forward(self, x, past):
        new = []
        for layer, p in zip(self.layers, past, strict=True):
            x, keys = layer(x, p)
            new.append(keys)
        return x, new


def test_a_cache_of_plain_tensors_with_a_growing_length():
    past = [torch.randn(2, 5, 4), torch.randn(2, 5, 4)]
    length = Dim("past_length")
    trace = st.trace(Cached(), (torch.randn(2, 1, 4), past), dynamic_shapes={"x": None, "past": [{1: length}] * 2})
    model = trace.to_onnx(functions=Cached.Layer, verify=True)
    assert len(model.functions) == 1
    assert shape(model.graph.outputs[1]) == [2, "past_length + 1", 4]


class Cache:
    """Keys of all layers, as transformers has them: it computes with what it is made of."""

    def __init__(self, keys):
        self.keys = [key.contiguous() for key in keys]

    def update(self, layer, key):
        self.keys[layer] = torch.cat([self.keys[layer], key], 1)
        return self.keys[layer]


def open_cache(cache):
    assert all(isinstance(key, torch.Tensor) for key in cache.keys)
    return list(cache.keys), None


torch.utils._pytree.register_pytree_node(
    Cache,
    open_cache,
    lambda keys, _: Cache(keys),
    serialized_type_name="test_onnx.Cache",
    flatten_with_keys_fn=lambda c: ([(torch.utils._pytree.SequenceKey(i), k) for i, k in enumerate(c.keys)], None),
)


class CachedByObject(nn.Module):
    class Layer(nn.Module):
        def __init__(self, index):
            super().__init__()
            self.index, self.key = index, nn.Linear(4, 4)

        def forward(self, x, cache):
            keys = cache.update(self.index, self.key(x))
            return x + torch.softmax(x @ keys.transpose(1, 2), -1) @ keys

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(i) for i in range(3)])

    def forward(self, x, cache):
        for layer in self.layers:
            x = layer(x, cache)
        return x, cache


def test_layers_that_share_a_cache_object_share_a_function():
    length = Dim("length")
    args = (torch.randn(2, 1, 4), Cache([torch.randn(2, 5, 4) for _ in range(3)]))
    trace = st.trace(CachedByObject(), args, dynamic_shapes=({}, [{1: length}] * 3))
    model = trace.to_onnx(functions=CachedByObject.Layer, verify=True)
    (function,) = model.functions.values()
    assert [v.name for v in function.inputs] == ["x", "cache[0]", "key.weight", "key.bias"]
    assert [shape(v) for v in model.graph.outputs] == [[2, 1, 4], *[[2, "length + 1", 4]] * 3]
    calls = [n for n in model.graph if n.op_type == "Layer"]
    assert [call.inputs[1].name for call in calls] == ["cache_0", "cache_1", "cache_2"]


class Sized(nn.Module):
    class Flat(nn.Module):
        def forward(self, x):
            return x.reshape(x.shape[0] * x.shape[1], 4).sum(0) / x.shape[1]

    def __init__(self):
        super().__init__()
        self.flat = self.Flat()

    def forward(self, x, y):
        return self.flat(x) + self.flat(y)


def test_bodies_compute_sizes_from_their_own_inputs():
    one, other = {0: Dim("a"), 1: Dim("b")}, {0: Dim("c"), 1: Dim("d")}
    args = (torch.randn(2, 3, 4), torch.randn(5, 4, 4))
    trace = st.trace(Sized(), args, dynamic_shapes={"x": one, "y": other})
    model = trace.to_onnx(functions=Sized.Flat, verify=True)
    assert [len(model.functions), len(model.graph)] == [1, 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype, tmp_path):
    model = blocks(2).to(dtype)
    made = st.trace(model, (X.to(dtype),)).to_onnx(
        tmp_path / "model.onnx", functions=Block, verify=dtype != torch.bfloat16
    )
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
    weight = made.graph.initializers["0.fc.weight"].const_value
    assert weight.tobytes() == model[0].fc.weight.detach().view(torch.uint8).numpy().tobytes()


def test_a_model_without_data_has_its_weights_as_inputs(tmp_path):
    with torch.device("meta"):
        model, x = blocks(2), torch.empty(2, 4)
    made = st.trace(model, (x,)).to_onnx(tmp_path / "model.onnx", functions=Block)
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
    assert not made.graph.initializers
    assert [v.name for v in made.graph.inputs][:2] == ["input", "0.fc.weight"]
    with pytest.raises(st.OnnxVerificationError, match="meta device"):
        st.trace(model, (x,)).to_onnx(verify=True)


SMALL = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz]


@pytest.mark.parametrize("dtype", SMALL)
def test_verify_with_dtypes_that_numpy_or_torch_know_in_part(dtype):
    trace = st.trace(lambda x: ((x.float() * 2).to(dtype), x.clone()), (torch.arange(4).to(dtype),))
    trace.to_onnx(verify=True)


def test_a_program_without_tensors_has_no_onnx_model():
    with pytest.raises(st.errors.OnnxExportError, match="the program has no tensors"):
        st.trace(lambda n: n + 1, (2,)).to_onnx()


@pytest.mark.parametrize("result", [None, 5, (None, None), {}])
def test_a_program_that_returns_no_tensor_is_not_verified(result):
    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            self.linear(x)
            return result

    trace = st.trace(Silent(), (torch.randn(2, 4),))
    assert not trace.to_onnx().graph.outputs
    with pytest.raises(st.errors.OnnxVerificationError, match=r"returns no tensor and writes to none: .* verify=False"):
        trace.to_onnx(verify=True)


def test_where_the_optimizer_of_onnxscript_fails():
    """It takes no split of a size that is not known (0.7)."""
    trace = st.trace(lambda x: x.chunk(3), (torch.randn(8, 4),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    with pytest.raises(st.errors.OnnxExportError, match=r"(?s)optimizer failed: .*Split.* write optimize=False"):
        trace.to_onnx()
    trace.to_onnx(optimize=False, verify=True)


class Detached(nn.Module):
    def forward(self, z):
        return z.detach()


class Rotation(nn.Module):
    """A product with complex constants, of which torch detaches those that a forward makes."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.turn = Detached(), Detached(), nn.Parameter(torch.tensor([1j, 2]))

    def forward(self, x):
        z = self.first(torch.view_as_complex(x)) * torch.tensor([1 + 2j, 3]) * self.turn.detach()
        return torch.view_as_real(self.second(z))


@pytest.mark.parametrize("functions", [(), Detached])
def test_complex_tensors_may_be_detached(functions):
    st.trace(Rotation(), (torch.randn(2, 2),)).to_onnx(functions=functions, verify=True)


def test_verify_in_bfloat16_says_that_the_runtime_has_no_kernels():
    trace = st.trace(blocks(2).bfloat16(), (X.bfloat16(),))
    with pytest.raises(st.OnnxVerificationError, match=r"NOT_IMPLEMENTED.*verify a float32 copy"):
        trace.to_onnx(functions=Block, verify=True)


class Scaled(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps, self.names, self.sizes, self.fn = eps, "plain", [1, 2], torch.relu

    def forward(self, x):
        return x + 1


def test_plugins_have_no_body_and_attributes_say_what_they_need(tmp_path):
    trace = st.trace(nn.Sequential(Scaled(0.5), Scaled(2.0), Block()), (X,))
    path = tmp_path / "model.onnx"
    trace.to_onnx(path, functions=Block, plugins={Scaled: "trt::Scale"}, attributes=["eps", "sizes", "fn"], verify=True)
    model = onnx.load(path)
    assert [f.name for f in model.functions] == ["Block"]
    first, second, _ = model.graph.node
    assert [(n.domain, n.op_type) for n in (first, second)] == [("trt", "Scale")] * 2
    found = [{a.name: onnx.helper.get_attribute_value(a) for a in n.attribute} for n in (first, second)]
    assert found == [{"eps": 0.5, "sizes": [1, 2]}, {"eps": 2.0, "sizes": [1, 2]}]


@torch.library.custom_op("scopetrace_tests::without_form", mutates_args=())
def without_form(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, x.sum()


@without_form.register_fake
def _(x):
    return torch.empty_like(x), x.new_empty(())


class Foreign(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k

    def forward(self, x):
        doubled, total = without_form(x)
        return doubled * self.k, total


class Foreigners(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Foreign(1.0), Foreign(1.0), Foreign(2.0)

    def forward(self, x):
        for layer in (self.a, self.b, self.c):
            x, total = layer(x)
        return x, total


def test_plugins_around_ops_that_have_no_onnx_form():
    trace = st.trace(Foreigners(), (X,))
    model = trace.to_onnx(plugins={Foreign: "trt::Foreign"})
    assert [(n.domain, n.op_type, len(n.outputs)) for n in model.graph] == [
        ("trt", "Foreign", 2),
        ("trt", "Foreign", 2),
        ("trt", "Foreign_2", 2),
    ]
    assert not model.functions
    with pytest.raises(st.OnnxVerificationError, match=r"the plugins Foreign, Foreign_2 have no ONNX form"):
        trace.to_onnx(plugins=Foreign, verify=True)
    with pytest.raises(st.OnnxOpError, match=r"Foreign\[b\]"):
        trace.to_onnx(plugins="a")


BLOCKS = blocks(3)
FUNCTIONS_AND_PLUGINS = {
    "one of several equal layers": ("layers", "1", "Block Block_2 Block", "Block"),
    "it alone": ((), "1", "Gemm Relu Block Gemm Relu", ""),
    "a dict of patterns": ({"[01]": "a::First"}, {"2": "a::Last"}, "First First Last", "First"),
    "a dict of modules": ({BLOCKS[0]: "a::First"}, {BLOCKS[2]: "a::Last"}, "First Gemm Relu Last", "First"),
    "a dict of predicates": ({lambda call: call.fqn == "1": "a::Middle"}, (), "Gemm Relu Middle Gemm Relu", "Middle"),
    "another name for one": ({"[02]": "a::Even", "1": "a::Odd"}, (), "Even Odd Even", "Even Odd"),
    "plugins by a rule": ("[01]", "layers", "Block Block Block_2", "Block"),
    "inside of one": (Block, "1.fc", "Block Block_2 Block", "Block Block_2"),
}


@pytest.mark.parametrize("case", FUNCTIONS_AND_PLUGINS)
def test_what_functions_and_plugins_say_of_equal_layers(case):
    functions, plugins, nodes, bodies = FUNCTIONS_AND_PLUGINS[case]
    model = st.trace(BLOCKS, (X,)).to_onnx(functions=functions, plugins=plugins, verify=True)
    assert [node.op_type for node in model.graph] == nodes.split()
    assert [function.name for function in model.functions.values()] == bodies.split()


NAMED_TWICE = {
    "a class and a name": (
        (Block, "1"),
        r"Block\[1\] is named by functions=Block and by plugins='1': leave it out of one",
    ),
    "two patterns": (("[01]", "[12]"), r"Block\[1\] is named by functions='\[01\]' and by plugins='\[12\]'"),
    "two rules": (("layers", True), "both name calls by a rule"),
    "two names": (({Block: "a::B", "1": "a::C"}, ()), r"Block\[1\] has the names 'a::B' by Block and 'a::C' by '1'"),
    "one name for both": (({"0": "a::B"}, {"1": "a::B"}), "both give the name 'a::B'"),
}


@pytest.mark.parametrize("case", NAMED_TWICE)
def test_a_call_that_is_named_twice_is_an_error(case):
    (functions, plugins), message = NAMED_TWICE[case]
    with pytest.raises(st.OnnxOptionError, match=message):
        st.trace(BLOCKS, (X,)).to_onnx(functions=functions, plugins=plugins)


def test_nodes_carry_scope_and_source():
    model = st.trace(blocks(2), (X,)).to_onnx(functions=Block)
    call = model.graph[1]
    assert call.name == "Sequential/Block[1]"
    assert call.metadata_props["scopetrace.scope"] == "Sequential/Block[1]"
    (function,) = model.functions.values()
    gemm = function[0]
    assert gemm.name == "Block/Linear[fc]/Gemm"
    assert gemm.metadata_props["namespace"].startswith(
        f": {Block.__module__}.Block/fc: torch.nn.modules.linear.Linear/"
    )
    assert "self.fc(x)" in gemm.metadata_props["pkg.torch.onnx.stack_trace"]


@pytest.mark.parametrize("version", ["18", 18.0, True])
def test_an_opset_is_a_number(version):
    with pytest.raises(st.ArgumentTypeError, match=f"opset_version={version!r}: write a number, as opset_version=18"):
        st.trace(blocks(1), (X,)).to_onnx(opset_version=version)


def test_the_opset_is_the_one_asked_for():
    trace = st.trace(blocks(1), (X,))
    for version in (18, 20, 23):
        model = trace.to_onnx(functions=Block, opset_version=version, verify=True)
        assert model.opset_imports[""] == version


class Odd(nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x) + torch.special.bessel_y1(x)


def test_ops_without_an_onnx_form_are_listed_together():
    with pytest.raises(st.OnnxOpError) as info:
        st.trace(nn.Sequential(Block(), Odd()), (X,)).to_onnx(functions=Block)
    ops, modules, sources = zip(*info.value.ops, strict=True)
    assert ops == ("aten.special_bessel_j0.default", "aten.special_bessel_y1.default")
    assert set(modules) == {"Sequential/Odd[1]"}
    assert "torch.special.bessel_j0(x)" in sources[0]


def test_a_model_without_ops():
    model = st.trace(nn.Identity(), (X,)).to_onnx(verify=True)
    assert [n.op_type for n in model.graph] == ["Identity"]


class Nothing(nn.Module):
    def forward(self, x):
        return None


def test_a_model_without_results_imports_the_standard_ops():
    onnx.checker.check_model(ir.to_proto(st.trace(Nothing(), (X,)).to_onnx()))


class Strided(nn.Module):
    """Ops on memory that is not row-major: what ONNX knows of a tensor are its elements."""

    def forward(self, x):
        x.mul_(2)
        return (x + 1).as_strided((3,), (2,), 1), x.t().as_strided((2, 2), (1, 3), 1), x.as_strided((2,), (1,))


@pytest.mark.parametrize("functions", [(), Strided])
def test_as_strided_reads_memory_of_another_order(functions):
    model = nn.Sequential(Strided())
    x = torch.arange(12.0).reshape(3, 4).t()
    found = st.trace(model, (x.clone(),)).to_onnx(functions=functions, verify=True)
    session = pytest.importorskip("onnxruntime").InferenceSession(ir.to_proto(found).SerializeToString())
    for got, want in zip(session.run(None, {"input": x.contiguous().numpy()}), model(x), strict=False):
        torch.testing.assert_close(torch.from_numpy(got), want)


def test_as_strided_beside_its_base_is_refused():
    class Beside(nn.Module):
        def forward(self, x):
            return x[1].as_strided((2, 2), (4, 1), 0)

    with pytest.raises(st.OnnxExportError, match="memory that its base does not fill"):
        st.trace(Beside(), (torch.ones(3, 4),)).to_onnx()


def test_a_view_of_a_changed_input_of_a_dynamic_size():
    class Shorter(nn.Module):
        def forward(self, x):
            x.add_(1)
            return x[: x.shape[0] - 1]

    trace = st.trace(Shorter(), (torch.ones(4, 3),), dynamic_shapes={"x": {0: torch.export.Dim("n", min=3)}})
    trace.to_onnx(verify=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("layer", [nn.GRU(4, 3), nn.LSTM(4, 3), nn.GRU(4, 3, 2, batch_first=True, bidirectional=True)])
def test_recurrent_layers_of_any_length(layer):
    trace = st.trace(layer, (torch.randn(5, 2, 4),), dynamic_shapes=({0: "a", 1: "b"},))
    model = trace.to_onnx(verify=True)  # also on other sizes
    assert [str(n) for n in model.graph.outputs[0].shape][:2] == ["a", "b"]


def test_what_torch_onnx_writes_for_one_length_is_refused():
    trace = st.trace(nn.RNN(4, 3), (torch.randn(5, 2, 4),), dynamic_shapes=({0: "a", 1: "b"},))
    with pytest.raises(st.errors.OnnxExportError, match=r"for the sizes of the example: its input of .* became one of"):
        trace.to_onnx()


@pytest.mark.parametrize("is_given", [False, True])
def test_verify_runs_a_model_that_differentiates(is_given):
    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 1)

        def forward(self, x):
            x = x if is_given else x.detach().requires_grad_()
            energy = self.fc(x).tanh().sum()
            return energy, -torch.autograd.grad(energy, x)[0]

    st.trace(Forces(), (torch.randn(5, 3, requires_grad=is_given),)).to_onnx(verify=True)


BATCH = ({0: torch.export.Dim("batch")},)


@pytest.mark.parametrize(
    ("dynamic", "functions"),
    [
        (None, ()),
        (BATCH, nn.BatchNorm1d),
        pytest.param(None, nn.BatchNorm1d, marks=pytest.mark.slow),
        pytest.param(BATCH, (), marks=pytest.mark.slow),
    ],
)
def test_batch_norm_in_training_uses_and_updates_statistics(dynamic, functions):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))  # torch.onnx has the form of eval mode
    model = st.trace(net, (X,), dynamic_shapes=dynamic).to_onnx(functions=functions, verify=True)
    assert [v.name for v in model.graph.outputs][1:4] == [
        "1.num_batches_tracked_updated",
        "1.running_mean_updated",
        "1.running_var_updated",
    ]
    assert len(model.functions) == bool(functions)


@pytest.mark.parametrize("functions", [(), "0"])
def test_parameters_that_the_forward_changes_come_out(functions):
    net = nn.Sequential(nn.Embedding(5, 4, max_norm=0.5), nn.Linear(4, 4))
    model = st.trace(net, (torch.tensor([[1, 2], [0, 2]]),)).to_onnx(functions=functions, verify=True)
    assert [v.name for v in model.graph.outputs] == ["output", "0.weight_updated"]


class Cast(nn.Module):
    def forward(self, x):
        return x.long() + 1


class Casts(nn.Module):
    def __init__(self):
        super().__init__()
        self.cast = Cast()

    def forward(self, x):
        return self.cast(x), self.cast(x > 0), self.cast(x[0]), self.cast(x[:1])


def test_functions_are_of_one_dtype_and_one_rank():
    model = st.trace(Casts(), (X,)).to_onnx(functions=Cast, verify=True)
    assert [n.op_type for n in model.graph if n.op_type.startswith("Cast")] == ["Cast", "Cast_2", "Cast_3", "Cast"]


class Pick(nn.Module):
    def forward(self, x):
        return x + x[x[:, 0] > 0].sum(0)


def test_sizes_that_depend_on_data_are_of_one_call():
    model = st.trace(nn.Sequential(Pick(), Pick()), (X,)).to_onnx(functions=Pick, verify=True)
    (function,) = model.functions.values()
    shapes = {node.op_type: node.outputs[0].shape for node in function}
    assert [getattr(size, "value", size) for size in shapes["GatherND"]] == [None, 4]


def test_custom_translation_table():
    onnxscript = pytest.importorskip("onnxscript")
    op = onnxscript.opset20

    def zero(self):
        return op.Sub(self, self)

    table = {torch.ops.aten.special_bessel_j0.default: zero, torch.ops.aten.special_bessel_y1.default: zero}
    model = st.trace(Odd(), (X,)).to_onnx(opset_version=20, custom_translation_table=table)
    assert [n.op_type for n in model.graph] == ["Sub", "Add"]


def test_verify_finds_a_wrong_translation():
    onnxscript = pytest.importorskip("onnxscript")
    table = {torch.ops.aten.relu.default: lambda self: onnxscript.opset20.Neg(self)}
    with pytest.raises(st.OnnxVerificationError, match="inputs 1: output differs"):
        st.trace(blocks(1), (X,)).to_onnx(opset_version=20, custom_translation_table=table, verify=True)


def test_an_edited_trace_is_compared_with_itself():
    traced = st.trace(blocks(1), (X,))
    [relu] = traced.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    relu.target = torch.ops.aten.sigmoid.default
    traced.graph_module.recompile()
    traced.to_onnx(verify=True)


@pytest.mark.parametrize("hides", [True, False])
def test_masks_of_verify_hide_something_and_not_all(hides):
    """A row of which nothing is left is NaN in one of ONNX Runtime and torch, and 0 in the other."""

    def attend(x, mask):
        bias = torch.zeros(mask.shape).masked_fill(mask if hides else ~mask, float("-inf"))
        return nn.functional.scaled_dot_product_attention(x, x, x, bias)

    st.trace(attend, (torch.randn(2, 2, 2, 4), torch.ones(2, 1, 1, 2).bool())).to_onnx(verify=True)


@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_verify_looks_at_small_outputs_too(scale):
    onnxscript = pytest.importorskip("onnxscript")

    class Small(nn.Module):
        def forward(self, x):
            return torch.sin(x) * scale

    traced = st.trace(Small(), (X,))
    traced.to_onnx(verify=True)
    table = {torch.ops.aten.sin.default: lambda self: onnxscript.opset20.Cos(self)}
    with pytest.raises(st.OnnxVerificationError, match="differs"):
        traced.to_onnx(opset_version=20, custom_translation_table=table, verify=True)


def test_verify_lets_rounding_errors_be_where_values_cancel():
    class Cancelling(nn.Module):
        def forward(self, x):
            x = x.sin()
            return (x - x.mean(-1, keepdim=True)).mean(-1) * 1e-3

    st.trace(Cancelling(), (X,)).to_onnx(verify=True)


class Guarded(nn.Module):
    """Two ways, of which neither computes anything on the first."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def forward(self, x):
        return x.tanh() if x.sum() > self.limit else x


def test_a_layer_of_which_only_a_decision_is_left():
    net = nn.Sequential(Guarded(1e6), nn.Linear(4, 4))
    model = st.trace(net, (X,), specialize=True).to_onnx(functions=[Guarded], verify=True)
    assert [(f.name, [n.op_type for n in f]) for f in model.functions.values()] == [("Guarded", ["Identity"])]


def test_verify_skips_inputs_that_go_another_way():
    always, never = (X * 0 + sign for sign in (1.0, -1e7))
    st.trace(Guarded(0.0), (always,), specialize=True).to_onnx(verify=True)  # some sums are above 0, some below
    traced = st.trace(Guarded(-1e6), (never,), specialize=True)
    with pytest.raises(st.OnnxVerificationError, match=r"no random inputs.*was (True|False).*verify=False"):
        traced.to_onnx(verify=True)


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4, dtype=torch.float16)

    def forward(self, x):
        return self.fc(x.half()).float()


def test_verify_expects_of_float16_inside_what_float16_can_do():
    st.trace(nn.Sequential(*[Half() for _ in range(6)]), (X,)).to_onnx(functions=Half, verify=True)


def test_verify_says_that_a_model_draws_random_numbers():
    with pytest.raises(st.OnnxVerificationError, match="draws random numbers"):
        st.trace(nn.Dropout(0.5).train(), (X,)).to_onnx(verify=True)


def test_external_data(tmp_path):
    path = tmp_path / "model.onnx"
    st.trace(nn.Linear(64, 64), (torch.randn(2, 64),)).to_onnx(path, functions=nn.Linear, external_data=True)
    assert (tmp_path / "model.onnx.data").stat().st_size >= 64 * 64 * 4
    assert path.stat().st_size < 4096
    onnx.checker.check_model(str(path), full_check=True)


def test_one_file_of_weights_for_several_models(tmp_path):
    """Equal bytes are there once; a model that is written anew leaves the others as they are."""
    head, body, x = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.randn(2, 64)
    data, size = tmp_path / "shared.data", 64 * 64 * 4  # of weights; biases are in the models
    models = {"whole": nn.Sequential(body, head), "body": body, "head": head}

    def write(name):
        st.trace(models[name], (x,)).to_onnx(tmp_path / f"{name}.onnx", external_data="shared.data")
        return data.stat().st_size

    def run(name):
        session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / f"{name}.onnx")
        return torch.from_numpy(session.run(None, {"input": x.numpy()})[0])

    assert [write("whole"), write("body"), write("head")] == [2 * size] * 3
    wanted = {name: model(x).detach() for name, model in models.items()}
    with torch.no_grad():
        head.weight.add_(1)
    assert write("head") == 3 * size
    wanted["head"] = head(x).detach()
    for name, value in wanted.items():
        torch.testing.assert_close(run(name), value)
        onnx.checker.check_model(str(tmp_path / f"{name}.onnx"), full_check=True)
    with pytest.raises(st.OnnxOptionError, match=r"shared\.data has weights of other models"):
        st.write_onnx_weights(tmp_path / "head.onnx", head.state_dict())
    for name in ("whole", "body"):
        (tmp_path / f"{name}.onnx").unlink()
    assert write("head") == size  # nobody reads the rest
    torch.testing.assert_close(run("head"), wanted["head"])


def test_weights_that_do_not_fit_into_a_file_go_beside_it(tmp_path, monkeypatch):
    """The limit of the format is 2 GiB."""
    from scopetrace.lower.onnx import weights

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    x, path = torch.randn(2, 64), tmp_path / "model.onnx"
    for limit, names in ((2 * 65 * 64 * 4, ["model.onnx"]), (2 * 65 * 64 * 4 - 1, ["model.onnx", "model.onnx.data"])):
        monkeypatch.setattr(weights, "PROTO_LIMIT", limit)
        st.trace(model, (x,)).to_onnx(path, functions=nn.Linear)
        assert sorted(p.name for p in tmp_path.iterdir()) == names
        session = pytest.importorskip("onnxruntime").InferenceSession(path)
        (found,) = session.run(None, {"input": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), model(x).detach())


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x.relu() * 2, lambda x: x - 1, (self.block(x),))


def test_control_flow_stays_in_the_graph():
    model = st.trace(Branching(), (X,)).to_onnx(functions=Block, verify=True)
    assert "If" in [n.op_type for n in model.graph]


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        pytest.param(Gate, ["Gate"], marks=pytest.mark.slow),
        pytest.param(nn.Linear, ["Linear"], marks=pytest.mark.slow),
        ([Gate, nn.Linear], ["Gate", "Linear"]),
        ("repeated", ["Gate", "Linear"]),
    ],
)
def test_calls_in_a_branch_stay_inline(targets, names):
    net = nn.Sequential(Gate(), Gate(), nn.Linear(4, 4), nn.Linear(4, 4))
    model = st.trace(net, (X,)).to_onnx(functions=targets, verify=True)
    assert [f.name for f in model.functions.values()] == names
    called = [n.op_type for n in ir.traversal.RecursiveGraphIterator(model.graph)]
    assert [called.count(name) for name in names] == [2] * len(names)


def test_a_target_that_is_called_in_a_branch_only_is_refused():
    with pytest.raises(st.OutlineError, match="Linear is called only in bodies"):
        st.trace(Gate(), (X,)).to_onnx(functions=nn.Linear)


def test_the_model_stays_as_it_was():
    model = blocks(2).train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    st.trace(model, (X,)).to_onnx(functions=Block, verify=True)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not model[0]._forward_hooks


def test_a_loaded_trace_gives_the_same_file(tmp_path):
    trace = st.trace(blocks(2), (X,))
    trace.save(tmp_path / "trace")
    loaded = st.load(tmp_path / "trace").to_onnx(functions=Block, verify=True)
    assert text(loaded) == text(trace.to_onnx(functions=Block))


def test_progress():
    said = []
    st.trace(blocks(1), (X,)).to_onnx(functions=Block, progress=said.append)
    assert said[0] == "outlining"
    assert said[-1] == "assembling"


def test_command_line(tmp_path, monkeypatch):
    from click.testing import CliRunner

    from scopetrace.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *__import__("sys").path])
    (tmp_path / "onnx_models.py").write_text(
        "from torch import nn\nmodel = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)])\n"
    )
    arguments = [
        "onnx",
        "onnx_models:model",
        "--input",
        "0=2x4",
        "-f",
        "Linear",
        "-f",
        "?",
        "-o",
        "out.onnx",
        "--verify",
    ]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    table, _, last = result.stdout.rpartition("\nout.onnx: ")
    assert [line.split() for line in table.splitlines()] == [
        ["function", "calls", "nodes"],
        ["torch.nn.modules.linear::Linear", "3", "1"],
        ["torch.nn.modules.container::Sequential", "3", "2"],
        ["main", "program", "3"],
    ]
    assert "largest error" in last
    assert sorted(p.name for p in tmp_path.glob("*.onnx")) == ["out.onnx"]
    wrong = CliRunner().invoke(main, [*arguments, "-f", "Conv*"])
    assert wrong.exit_code == 2  # as for any wrong argument
    assert "'Conv*' is no call of this trace" in wrong.stderr


class Normed(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-9) * 1.000001


def test_numbers_near_0_and_1_stay():
    """torch.onnx.export writes no Add here: its optimizer takes 1e-9 for 0, and a row of zeros gives nan."""
    trace = st.trace(Normed(), (X,))
    model = trace.to_onnx(verify=True)
    assert [n.op_type for n in model.graph] == ["Pow", "ReduceMean", "Add", "Sqrt", "Reciprocal", "Mul", "Mul"]
    plain = st.trace(lambda x: (x + 0.0) * 1.0 - 0.0, (X,)).to_onnx()
    assert [n.op_type for n in plain.graph] == ["Identity"]


class Padded(nn.Module):
    def forward(self, x):
        return F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 2)


def test_verify_says_where_the_runtime_is_wrong():
    """ONNX Runtime moves the padding, zeros, into MaxPool, where it is minus infinity."""
    with pytest.raises(st.OnnxVerificationError, match=r"the file is right.*ORT_DISABLE_ALL"):
        st.trace(Padded(), (-torch.rand(1, 1, 2, 2),)).to_onnx(verify=True)


class Chosen(nn.Module):
    """As the experts of a mixture: how many rows one gets depends on data."""

    class Sum(nn.Module):
        def forward(self, x, sizes):
            return torch.stack([part.sum(0) for part in x.split(sizes)])

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.sum = Chosen.Sum()

        def forward(self, x):
            positive = (x[:, 0] > 0).sum()
            sizes = torch.stack([positive, x.shape[0] - positive]).tolist()
            return x + self.sum(x, sizes).sum(0)

    def __init__(self):
        super().__init__()
        self.a, self.b = self.Layer(), self.Layer()

    def forward(self, x):
        return self.b(self.a(x))


def test_numbers_that_depend_on_data_are_operands():
    model = st.trace(Chosen(), (X,)).to_onnx(functions="repeated", verify=True)
    inner, layer = model.functions.values()
    assert [v.name for v in inner.inputs] == ["x", "sizes[0]", "sizes[1]"]
    assert [v.name for v in layer.inputs] == ["x"]


def test_a_squeeze_of_another_size_than_1_gives_its_input():
    """torch.onnx.export writes a Squeeze that ONNX Runtime does not load."""
    model = st.trace(lambda x: (x.squeeze(0) + 1, x.squeeze()), (X,)).to_onnx(verify=True)
    assert [n.op_type for n in model.graph] == ["Add", "Identity"]


class Inverted(nn.Module):
    def forward(self, mask):
        return 1.0 - mask


def test_sizes_of_float_ranges_and_of_copies_are_those_of_torch():
    class Ranges(nn.Module):
        def forward(self, x, low):
            falling, none, one = torch.arange(5.1, 0.1, -1.0), torch.arange(1.5, 1.5), torch.linspace(low, 9, 1)
            return torch.arange(0.1, 1.1), falling, none, one, torch.zeros(2, 4, dtype=torch.int64).copy_(x[0])

    model = st.trace(Ranges(), (X * 4, torch.tensor(2.0))).to_onnx(verify=True)
    assert [shape(value) for value in model.graph.outputs] == [[1], [5], [0], [1], [2, 4]]


def test_a_stable_sort():
    class Sort(nn.Module):
        def forward(self, x):
            return *torch.sort(x, stable=True, dim=0), torch.argsort(x, descending=True, stable=True)

    st.trace(Sort(), (torch.randint(3, (40, 50)),)).to_onnx(verify=True)


@pytest.mark.parametrize(
    ("x", "dim", "dtype"),
    [
        (torch.randn(3, 4, 5), 1, None),
        (torch.randn(3, 4), -2, torch.float64),
        (torch.randint(-3, 4, (3, 4), dtype=torch.int32), 0, None),
        (torch.tensor([True, False, True]), 0, None),
        (torch.tensor(2.0), 0, None),
        (torch.randn(3, 0), 0, None),
    ],
)
def test_a_cumulative_product(x, dim, dtype):
    class Product(nn.Module):
        def forward(self, x):
            return torch.cumprod(x, dim, dtype=dtype)

    st.trace(Product(), (x,)).to_onnx(verify=True)
    if x.numel() > 3:
        st.trace(Product(), (x,), dynamic_shapes=({0: "n", 1: "m"},)).to_onnx(functions=True, verify=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("offset", "dims"), [(0, (0, 1)), (1, (-1, -2)), (-2, (0, 2)), (2, (0, 1))])
def test_a_write_to_a_diagonal(offset, dims, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")

    class Write(nn.Module):
        def forward(self, x):
            return [self.written(x.to(kind)) for kind in (torch.int64, torch.bool, torch.float32)]  # the last is x

        def written(self, y):
            diagonal = y.diagonal(offset, *dims)
            diagonal.copy_(torch.arange(diagonal.numel()).view(diagonal.shape) + 10)
            return y

    trace = st.trace(Write(), (torch.zeros(3, 4, 5),), dynamic_shapes=({0: "a", 1: "b", 2: "c"},))
    trace.to_onnx(tmp_path / "write.onnx", verify=True)
    session = onnxruntime.InferenceSession(tmp_path / "write.onnx")
    for shape in ((3, 4, 5), (4, 3, 7), (6, 5, 2)):
        x = torch.zeros(shape)
        *found, changed = map(torch.tensor, session.run(None, {"x": x.numpy()}))
        expected = Write()(x)
        assert all(map(torch.equal, [*found, changed], [*expected, x]))


class Experts(nn.Module):
    """Rows in the order of the experts that they belong to, and what each expert multiplies them by."""

    def __init__(self, product):
        super().__init__()
        self.weight, self.product = nn.Parameter(torch.randn(4, 8, 16)), product

    def forward(self, x, ends):
        """Run it."""
        return self.product(x, self.weight, ends).relu()


@pytest.mark.parametrize("ends", [[2, 2, 7, 9], [0, 0, 0, 9], [9, 9, 9, 9], [1, 2, 3, 7], [0, 0, 0, 0]])
def test_a_product_with_the_weights_of_experts(ends, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("transformers.integrations.moe")
    model = Experts(torch.ops.transformers.grouped_mm_fallback)
    x, offs = torch.randn(9, 8), torch.tensor(ends, dtype=torch.int32)
    with torch.no_grad():
        made = st.trace(model, (x, torch.tensor([3, 5, 6, 9], dtype=torch.int32))).to_onnx(tmp_path / "experts.onnx")
        session = onnxruntime.InferenceSession(tmp_path / "experts.onnx")
        given = {i.name: t.numpy() for i, t in zip(session.get_inputs(), (x, offs), strict=True)}
        torch.testing.assert_close(torch.tensor(session.run(None, given)[0]), model(x, offs))
    assert [node.op_type for node in made.graph].count("Loop") == 1


def test_a_histogram_of_integers():
    """It has a kernel on GPUs alone: for an input of the meta device the op is traced."""
    onnxruntime = pytest.importorskip("onnxruntime")

    class Counts(nn.Module):
        def forward(self, x):
            return torch.histc(x, bins=8, min=0, max=7)

    made = st.trace(Counts(), (torch.zeros(50, dtype=torch.int32, device="meta"),)).to_onnx()
    session, x = onnxruntime.InferenceSession(ir.to_proto(made).SerializeToString()), torch.arange(50) ** 2 % 8
    (found,) = session.run(None, {session.get_inputs()[0].name: x.int().numpy()})
    assert found.tolist() == x.bincount(minlength=8).tolist()


def test_torchs_own_grouped_product():
    model = Experts(lambda x, weight, ends: torch._grouped_mm(x, weight, offs=ends)).bfloat16()
    ends = torch.tensor([8, 8, 16, 16], dtype=torch.int32)
    made = st.trace(model, (torch.randn(16, 8).bfloat16(), ends)).to_onnx()
    assert [node.op_type for node in made.graph].count("Loop") == 1
    model.product = lambda x, weight, ends: torch._grouped_mm(x, x.t(), offs=ends)
    with pytest.raises(st.errors.OnnxExportError, match="rows that belong to experts"):
        st.trace(model, (torch.randn(16, 16).bfloat16(), ends)).to_onnx()


def test_the_fast_path_of_the_transformer_layer():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True), 2).eval()
    with torch.no_grad():
        tr = st.trace(encoder, (torch.randn(3, 5, 8),))
    flat = tr.to_onnx(verify=True)
    assert [node.op_type for node in flat.graph].count("Softmax") == 2
    model = tr.to_onnx(functions=nn.TransformerEncoderLayer, verify=True)
    assert [node.op_type for node in model.graph if node.domain] == ["TransformerEncoderLayer"] * 2


def test_other_failures_of_torch_name_module_and_source():
    """torch.onnx has no `number - tensor of whole numbers`."""
    with pytest.raises(st.OnnxExportError, match=r"torch\.onnx failed: RuntimeError") as raised:
        st.trace(nn.Sequential(Inverted()), (torch.tensor([0, 1]),)).to_onnx()
    assert raised.value.module == "Sequential/Inverted[0]"
    assert re.fullmatch(r".+test_onnx\.py:\d+, in .+: return 1\.0 - mask", raised.value.source)


def test_the_weights_are_those_that_the_model_has_now():
    model = blocks(2)
    trace = st.trace(model, (X,))
    model.load_state_dict({name: t + 1 for name, t in model.state_dict().items()}, assign=True)
    for functions in ((), Block):
        made = trace.to_onnx(functions=functions, verify=True)
        assert sorted(made.graph.initializers) == sorted(dict(model.named_parameters()))


def test_leaf_modules_are_refused():
    trace = st.trace(nn.Sequential(Block(), Scaled(1.0)), (X,), leaf_modules=Scaled)
    with pytest.raises(st.OnnxExportError, match=r"a leaf module (.|\n)* plugins=") as raised:
        trace.to_onnx()
    assert (raised.value.op, raised.value.module) == ("1", "Sequential/Scaled[1]")


class Weighted(nn.Module):
    def forward(self, x):
        return torch.bincount(x.long(), weights=x, minlength=4)


def test_ops_that_torch_refuses_are_named_with_module_and_source():
    """torch.onnx has `bincount` without weights only."""
    with pytest.raises(st.OnnxExportError, match=r"at bincount: .*with weights is not supported") as raised:
        st.trace(nn.Sequential(Weighted()), (torch.rand(5),)).to_onnx()
    assert raised.value.module == "Sequential/Weighted[0]"
    assert re.fullmatch(r".+test_onnx\.py:\d+, in .+: return torch\.bincount.*", raised.value.source)


# ---------------------------------------------------------------- which modules


class Wrapped(nn.Module):
    """Two equal layers with equal parts, and such a part outside of them."""

    def __init__(self):
        super().__init__()
        self.layers, self.fc = blocks(2), nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(self.layers(x))


@pytest.mark.parametrize(
    ("functions", "names"),
    [
        ("repeated", ["Linear", "Block"]),
        ("layers", ["Block"]),
        (["layers", nn.Sequential], ["Block", "Sequential"]),
        (True, ["Linear", "Block", "Sequential"]),
        (False, []),
    ],
)
def test_targets_by_a_rule(functions, names):
    model = st.trace(Wrapped(), (X,)).to_onnx(functions=functions, verify=True)
    assert [f.name for f in model.functions.values()] == names


def test_a_class_with_the_name_of_an_op():
    class Add(nn.Module):
        def forward(self, x):
            return x + 1

    trace = st.trace(nn.Sequential(Add(), Add()), (X,))
    model = trace.to_onnx(functions=True, verify=True)  # ONNX Runtime would abort
    assert [f.name for f in model.functions.values()] == ["AddModule"]
    with pytest.raises(st.errors.OnnxOptionError, match="'my::AddModule'"):
        trace.to_onnx(functions={Add: "my::Add"})


# ---------------------------------------------------------------- bodies of control flow


class Branches(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: (x + 1, torch.ones(2, 4)), lambda x: (x - 1, torch.zeros(2, 4)), (x,))


def test_a_branch_that_returns_a_constant_in_a_function():
    model = st.trace(nn.Sequential(Branches()), (X,)).to_onnx(functions=True, verify=True)
    assert [n.op_type for n in model.graph] == ["Branches"]


class Counts(nn.Module):
    def forward(self, x):
        def body(i, x):
            torch._check(i >= 0)
            torch._check(i < x.shape[0])
            y = x.clone()
            y[i] += i
            return i + 1, y

        return torch.ops.higher_order.while_loop(lambda i, x: i < x.shape[0], body, (0, x), ())[1]


@pytest.mark.parametrize("functions", [(), True])
def test_assertions_in_the_body_of_a_loop(functions):
    model = st.trace(nn.Sequential(Counts()), (X,)).to_onnx(functions=functions, verify=True)
    assert ("Counts" if functions else "Loop") in [n.op_type for n in model.graph]


def test_packed_numbers():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.zeros(3, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))

        def forward(self, x):
            return self.codes, x

    for functions in ((), True):
        model = st.trace(nn.Sequential(Packed()), (X,)).to_onnx(functions=functions)
        codes = [v for v in model.graph.initializers.values() if v.dtype == ir.DataType.FLOAT4E2M1]
        assert [shape(v) for v in (*codes, model.graph.outputs[0])] == [[3, 4], [3, 4]]


# ---------------------------------------------------------------- flat files


class ConvBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        return torch.relu(x + self.norm(self.conv(x)))


def test_flat_files_fold_what_depends_on_weights_alone():
    net, x = nn.Sequential(*[ConvBlock() for _ in range(3)]).eval(), torch.randn(1, 4, 8, 8)
    model = st.trace(net, (x,)).to_onnx(verify=True)
    torchs = torch.onnx.export(net, (x,), dynamo=True, verbose=False).model
    assert [n.op_type for n in model.graph] == [n.op_type for n in torchs.graph] == ["Conv", "Add", "Relu"] * 3


def _no_norm(x, weight, bias, mean, var, training, momentum, eps, cudnn_enabled):
    return onnxscript.opset18.Identity(x)


@pytest.mark.parametrize(
    ("options", "inputs", "ops"),
    [
        ({}, ["x", "conv.weight_folded", "conv.weight_bias"], ["Conv", "Add", "Relu"]),
        ({"optimize": False}, 7, ["Conv", "BatchNormalization", "Add", "Relu"]),
        ({"weight_inputs": "*.conv.weight"}, 7, ["Conv", "BatchNormalization", "Add", "Relu"]),
        ({"custom_translation_table": {torch.ops.aten.batch_norm.default: _no_norm}, "verify": False}, 7, None),
        ({"functions": (), "plugins": ConvBlock, "verify": False}, 7, None),
        ({"functions": [ConvBlock, nn.Conv2d]}, 7, ["Conv2d", "BatchNormalization", "Add", "Relu"]),
    ],
)
def test_functions_have_batch_norms_folded_into_convolutions(options, inputs, ops):
    net, x = nn.Sequential(*[ConvBlock() for _ in range(2)]).eval(), torch.randn(1, 4, 8, 8)
    model = st.trace(net, (x,)).to_onnx(**{"functions": ConvBlock, "verify": True, **options})
    taken = [v.name for v in model.graph[0].inputs] if ops is None else None
    for function in model.functions.values():
        if function.name == "ConvBlock":
            taken = [v.name for v in function.inputs]
            assert ops is None or [n.op_type for n in function if n.op_type in ops] == ops
    assert taken == inputs or len(taken) == inputs


def test_nodes_of_flat_files_have_the_scopes_of_their_layers():
    net = Wrapped()
    model = st.trace(net, (X,)).to_onnx()
    scopes = [n.metadata_props["scopetrace.scope"] for n in model.graph]
    layer = "Wrapped/Sequential[layers]/Block[{}]"
    assert scopes[:2] == [layer.format(0) + "/Linear[fc]", layer.format(0)]
    assert scopes[2:] == [layer.format(1) + "/Linear[fc]", layer.format(1), "Wrapped/Linear[fc]"]
    stacks = [n.metadata_props["pkg.torch.onnx.name_scopes"] for n in model.graph]
    assert stacks[0].startswith("['', 'layers', 'layers.0', 'layers.0.fc',")
    assert stacks[2].startswith("['', 'layers', 'layers.1', 'layers.1.fc',")
    assert model.graph[2].name == layer.format(1) + "/Linear[fc]/Gemm"


def test_equal_parameters_keep_their_names_in_flat_files():
    class Norms(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.LayerNorm(4), nn.LayerNorm(4)

        def forward(self, x):
            return self.b(self.a(x).relu())

    net = Norms()
    model = st.trace(net, (X,)).to_onnx(verify=True)
    assert set(dict(net.named_parameters())) <= set(model.graph.initializers)


# ---------------------------------------------------------------- names


def test_names_by_a_dict_or_a_function():
    trace = st.trace(Block(), (X, X))
    model = trace.to_onnx(input_names={"mask": "keep"}, output_names=str.upper, verify=True)
    assert [v.name for v in model.graph.inputs] == ["x", "keep"]
    assert [v.name for v in model.graph.outputs] == ["OUTPUT"]
    with pytest.raises(st.errors.OnnxOptionError, match="input_names names 'masks'; the model has x, mask"):
        trace.to_onnx(input_names={"masks": "keep"})
    with pytest.raises(st.errors.OnnxOptionError, match="a name twice"):
        trace.to_onnx(input_names=lambda name: "same")
    with pytest.raises(st.errors.OnnxOptionError, match="None, which is no name"):
        trace.to_onnx(output_names=lambda name: None)


class TwoTensors:
    def __init__(self):
        self.layers = [torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)]


class WithCache(nn.Module):
    def forward(self, x, past):
        for t in past.layers:
            t[:, 0] = x
        return past.layers[0] + 1, past


def test_a_changed_cache_that_is_returned_is_listed_once():
    model = st.trace(WithCache(), (X, TwoTensors())).to_onnx(verify=True)
    assert [v.name for v in model.graph.outputs] == ["output_0", "past_layers_0_updated", "past_layers_1_updated"]
    assert "Identity" not in [n.op_type for n in model.graph]


@pytest.mark.parametrize(
    ("name", "taken", "given"),
    [
        ("past_key_values_layers_0_keys", "past_key_values.0.key", "present.0.key"),
        ("past_layers_11_values_updated", "past.11.value", "present.11.value"),
        ("past_self_attention_cache_layers_2_keys", "past.2.decoder.key", "present.2.decoder.key"),
        ("past_cross_attention_cache_layers_2_keys", "past.2.encoder.key", "present.2.encoder.key"),
        ("past_layers_1_cumulative_length", "past.1.cumulative_length", "present.1.cumulative_length"),
        ("layers_1_weight", "layers_1_weight", "layers_1_weight"),
        ("logits", "logits", "logits"),
    ],
)
def test_names_that_pair_past_and_present(name, taken, given):
    from scopetrace.lower.onnx.export import paired

    assert (paired([name]), paired([name], "present")) == ([taken], [given])


def test_a_file_without_metadata():
    model = st.trace(blocks(2), (X,)).to_onnx(functions=Block, metadata=False)
    parts = (model.graph, *model.functions.values())
    assert all(n.name and not n.metadata_props for part in parts for n in part)
    assert (model.producer_name, model.producer_version) == ("scopetrace", st.__version__)


# ---------------------------------------------------------------- attributes that bodies read


def test_calls_with_other_attributes_share_a_function_that_reads_them():
    net = nn.Sequential(nn.CELU(1.0), nn.CELU(2.0), nn.LayerNorm(4, eps=0.5), nn.LayerNorm(4, eps=0.25))
    trace = st.trace(net, (X,))
    assert len(trace.to_onnx(functions=True).functions) == 4
    model = trace.to_onnx(functions=True, attributes=["alpha", "eps"], verify=True)
    assert [f.name for f in model.functions.values()] == ["CELU", "LayerNorm"]
    assert [next(iter(n.attributes.values())).value for n in model.graph] == [1.0, 2.0, 0.5, 0.25]
    (celu, _) = model.functions.values()
    assert [a.ref_attr_name for a in celu[0].attributes.values()] == ["alpha"]


def test_functions_inside_functions_get_the_attributes_that_they_read():
    class Pair(nn.Module):
        def __init__(self, alpha):
            super().__init__()
            self.first, self.second = nn.CELU(alpha), nn.CELU(1.0)

        def forward(self, x):
            return self.second(self.first(x))

    trace = st.trace(nn.Sequential(Pair(2.0), Pair(3.0), Pair(2.0)), (X,))
    model = trace.to_onnx(functions=True, attributes=["alpha"], verify=True)
    assert sorted(f.name for f in model.functions.values()) == ["CELU", "Pair", "Pair_2"]


class Loss(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, x, target):
        return F.cross_entropy(x, target, **self.options)


def test_cross_entropy_with_all_its_arguments(tmp_path):
    """torch.onnx leaves the smoothing of labels out."""
    onnxruntime = pytest.importorskip("onnxruntime")
    labels, shares = torch.tensor([0, 3, 1]), torch.rand(3, 4)
    for target, options in ((labels, {"label_smoothing": 0.1, "weight": torch.arange(1.0, 5)}), (shares, {})):
        model, x = Loss(**options), torch.randn(3, 4)
        st.trace(model, (x, target)).to_onnx(tmp_path / "loss.onnx")
        session = onnxruntime.InferenceSession(tmp_path / "loss.onnx")
        (found,) = session.run(None, {"x": x.numpy(), "target": target.numpy()})
        torch.testing.assert_close(torch.tensor(found), model(x, target))


def test_an_op_without_a_form_whose_size_depends_on_data():
    with pytest.raises(st.OnnxExportError, match=r"aten\.masked_select\.default"):
        st.trace(lambda x: torch.masked_select(x, x > 0), (X,)).to_onnx()


class HeadsFirst(nn.Module):
    """Attention of tensors without a batch, (heads, length, size)."""

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize("functions", [(), "repeated"])
@pytest.mark.parametrize("shape", [(2, 5, 4), (5, 4)])
def test_attention_without_a_batch(shape, functions):
    length = Dim("length", min=2, max=64)
    sizes = ({len(shape) - 2: length},)
    trace = st.trace(nn.Sequential(HeadsFirst(), HeadsFirst()), (torch.randn(shape),), dynamic_shapes=sizes)
    assert len(trace.to_onnx(functions=functions, verify=True).functions) == len(functions[:1])


# Ops that torch.onnx translates to something else than torch computes -----------------------------------------------

HALF = {
    "sum": lambda x: x.sum(),
    "sum of a dimension": lambda x: x.sum(1, keepdim=True) * x,
    "sum with a dtype": lambda x: x.sum(dtype=torch.float32),
    "prod": lambda x: x.prod(),
    "prod of a dimension": lambda x: x.prod(-1) + 1,
    "mean": lambda x: x.mean((2, 3)),
    "cumsum": lambda x: x.cumsum(1),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear") * x.sum(),
    "bilinear, aligned": lambda x: F.interpolate(x * 2, size=(5, 7), mode="bilinear", align_corners=True),
    "softmax": lambda x: x.softmax(-1),
    "norm": lambda x: x.norm(dim=1),
    "var": lambda x: x.var(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "std_mean": lambda x: torch.std_mean(x, 1)[0],
    "amax": lambda x: x.amax(1),
    "count": lambda x: x.count_nonzero(),
    "comparison": lambda x: x > x.sum(),
    "int sum": lambda x: x.to(torch.int32).sum(),
    "bool sum": lambda x: (x > 0).sum(0),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", HALF)
def test_results_have_the_element_type_of_the_trace(name, tmp_path):
    x = torch.randn(1, 2, 3, 4).half()
    try:
        st.trace(HALF[name], (x,)).to_onnx(tmp_path / "half.onnx")
    except st.errors.OnnxExportError as error:
        assert "torch.onnx gives FLOAT for FLOAT16" in str(error)
        assert name not in ("sum", "prod", "bilinear")
        return
    session = onnxruntime.InferenceSession(tmp_path / "half.onnx")
    found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    torch.testing.assert_close(found, HALF[name](x), rtol=2e-2, atol=2e-2)


def test_a_result_of_another_element_type_is_refused(tmp_path):
    def doubled(self, dim, dtype=-1):
        return onnxscript.opset18.Cast(self, to=11)

    table = {torch.ops.aten.cumsum.default: doubled}
    with pytest.raises(st.errors.OnnxExportError, match=r"(?s)torch.onnx gives DOUBLE for FLOAT of the model.*cumsum"):
        st.trace(lambda x: x.cumsum(0), (torch.ones(3),)).to_onnx(tmp_path / "a.onnx", custom_translation_table=table)


SHORT = torch.tensor([0, 2, 2], dtype=torch.int32)
INDEXED = {
    "read": lambda x: x[SHORT],
    "columns": lambda x: x[:, SHORT],
    "elements": lambda x: x[SHORT, SHORT + 1],
    "of data": lambda x: x[(x[:, 0] > 0).int()],
    "written": lambda x: x.index_put((SHORT,), x[:3] * 2),
    "added": lambda x: x.index_put((SHORT, SHORT), torch.ones(3), accumulate=True),
    "istft": lambda x: torch.istft(torch.view_as_complex(x[:3].view(1, 3, 2, 2)), 4, window=torch.ones(4)),
}


@pytest.mark.parametrize("name", INDEXED)
def test_indices_of_32_bits(name, tmp_path):
    tr = st.trace(INDEXED[name], (torch.randn(4, 4),))
    tr.to_onnx(tmp_path / "indexed.onnx", verify=True)


@pytest.mark.parametrize("options", [{"size": (3, 3), "align_corners": True}, {"scale_factor": 1.3}])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiased_scaling_that_torch_onnx_does_otherwise_is_refused(mode, options):
    def forward(x, **options):
        return F.interpolate(x, mode=mode, antialias=True, **options)

    x = torch.randn(1, 1, 5, 5)
    st.trace(lambda x: forward(x, size=(3, 3)), (x,)).to_onnx(verify=True)
    with pytest.raises(st.errors.OnnxExportError, match=r"(?s)by the ratio of the sizes.*give size= in place"):
        st.trace(lambda x: forward(x, **options), (x,)).to_onnx()


SCATTERED = {
    "floats": (torch.zeros(4), torch.tensor([0, 0, 1, 0]), torch.tensor([1.0, 2.0, 3.0, 5.0])),
    "integers": (torch.tensor([0, -3, 0, 5]), torch.tensor([0, 0, 1, 0]), torch.tensor([-1, -2, 3, -5])),
    "one": (torch.tensor(3.0), torch.tensor(0), torch.tensor(8.0)),
    "rows": (torch.randn(3, 4), torch.tensor([[0, 0, 1], [3, 3, 3]]), torch.randn(3, 5)),
}


REDUCTIONS = list(itertools.product(("mean", "sum", "prod", "amax", "amin"), (True, False)))
"""With whether the old value counts."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SCATTERED)
def test_scatter_reduce_with_indices_that_are_there_twice(name, tmp_path):
    args = SCATTERED[name]

    def forward(x, index, src):
        return [x.scatter_reduce(-1, index, src, reduce, include_self=old) for reduce, old in REDUCTIONS]

    st.trace(forward, args).to_onnx(tmp_path / "scatter.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "scatter.onnx")
    inputs = {i.name: x.numpy() for i, x in zip(session.get_inputs(), args, strict=True)}
    for how, found, expected in zip(REDUCTIONS, session.run(None, inputs), forward(*args), strict=True):
        torch.testing.assert_close(torch.from_numpy(found), expected, msg=lambda text, how=how: f"{how}: {text}")


def test_an_addition_to_every_row_is_no_assignment(tmp_path):
    add = torch.randn(2, 3)
    tr = st.trace(lambda x: x.index_add(0, torch.tensor([0, 1]), add), (torch.randn(2, 3),))
    tr.to_onnx(tmp_path / "add.onnx", verify=True)


def test_an_attribute_that_is_an_input_has_what_is_written_to_it(tmp_path):
    class Net(nn.Module):
        def forward(self, x):
            self.seen = x
            return x.mul_(2) + 1

    st.trace(Net(), (torch.randn(2),)).to_onnx(tmp_path / "seen.onnx", verify=True)


CHANGES_OF_SHAPE = [
    lambda x: x.transpose_(0, 1),
    lambda x: x.squeeze_(0),
    lambda x: x.squeeze_(),
    lambda x: x.t_(),
    lambda x: x.unsqueeze_(1),
]


@pytest.mark.parametrize("change", CHANGES_OF_SHAPE)
def test_an_input_that_changes_its_shape_in_place(change, tmp_path):
    tr = st.trace(lambda x: change(x) * 2, (torch.randn(1, 3),))
    tr.to_onnx(tmp_path / "shape.onnx", verify=True)


ATTENDED = {
    "two": ((5, 8), (7, 8), (5, 7)),
    "three": ((2, 5, 8), (2, 7, 8), (2, 5, 7)),
    "three, one mask": ((2, 5, 8), (2, 7, 8), (5, 7)),
    "four": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 1, 5, 7)),
    "five": ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (5, 7)),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ATTENDED)
def test_attention_of_any_number_of_dimensions(name, tmp_path):
    of_query, of_key, of_mask = ATTENDED[name]

    def forward(query, key, mask):
        """Of an input and of what is computed, without a mask and with one."""
        queries = query, query * 2
        masks = None, mask
        return [F.scaled_dot_product_attention(q, key, key, m) + 1 for q in queries for m in masks]

    args = torch.randn(of_query), torch.randn(of_key), torch.randn(of_mask)
    st.trace(forward, args).to_onnx(tmp_path / "attention.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "attention.onnx")
    inputs = {i.name: x.numpy() for i, x in zip(session.get_inputs(), args, strict=True)}
    for found, expected in zip(session.run(None, inputs), forward(*args), strict=True):
        torch.testing.assert_close(torch.from_numpy(found), expected)


def test_a_model_that_takes_no_random_numbers():
    """Columns of a table, some of which are numbers of rows: `x` has both, as floats."""
    table = nn.Embedding(3, 2)
    tr = st.trace(lambda x: table(x[:, 0].long()) * x[:, 1:], (torch.tensor([[2.0, 0.5]] * 16),))
    with pytest.raises(st.errors.OnnxVerificationError, match="raises on all random inputs: index out of range"):
        tr.to_onnx(verify=True)
