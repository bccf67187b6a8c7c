"""What a new user writes first and wrong: each gives one line that says what to write."""

import copy
import itertools
import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import scopetrace as st


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x, *, scale=1.0):
        for layer in self.layers:
            x = layer(x)
        return self.fc(x) * scale


NET, X = Net(), torch.randn(2, 4)


def call_after(change, model):
    """A call of a trace, after a change of its model."""
    tr = st.trace(model, (X,))
    change(model)
    tr(X)


MISTAKES = {
    "a class for a module": (lambda tr: st.trace(Net, (X,)), "is the class Net: make one"),
    "a name for a module": (lambda tr: st.trace("resnet18", (X,)), "must be a module"),
    "no arguments": (lambda tr: st.trace(NET), "Net takes (x, *, scale=1.0): missing a required argument: 'x'; "),
    "a shape for arguments": (lambda tr: st.trace(NET, (2, 4)), "positional arguments are args=(…,)"),
    "arguments one by one": (lambda tr: st.trace(NET, X, X), "several positional arguments are one tuple, args=(a, b)"),
    "a dict for args": (lambda tr: st.trace(NET, {"x": X}), "pass keyword arguments as kwargs={...}"),
    "a wrong keyword": (lambda tr: st.trace(NET, (X,), {"sclae": 2.0}), "Net takes (x, *, scale=1.0)"),
    "another size": (lambda tr: tr(torch.randn(3, 4)), "trace again for this size, or with dynamic_shapes="),
    "another dtype": (lambda tr: tr(X.double()), "convert it, or trace again"),
    "another device": (lambda tr: tr(X.to("meta")), "convert it, or trace again"),
    "data for shapes": (
        lambda tr: st.trace(copy.deepcopy(NET).to("meta"), (X.to("meta"),))(X),
        "device was meta when traced and is cpu now; tensors there have no data: trace a model with weights",
    ),
    "an argument of the model": (
        lambda tr: st.trace(NET, (X,), scale=2.0),
        "st.trace has no argument scale=: the model's own arguments are given as args=(x, …) and kwargs=",
    ),
    "another mode": (
        lambda tr: call_after(nn.Module.eval, nn.Dropout()),
        "when traced and False now; trace again, or put it back; the trace is of training mode: call train()",
    ),
    "another whole number": (
        lambda tr: st.trace(torch.mul, (X, 2))(X, 3),
        "or pass it as a tensor, or as Dim.DYNAMIC in dynamic_shapes=",
    ),
    "another number": (lambda tr: tr(X, scale=3.0), "trace again with this one, or pass it as a tensor"),
    "no input": (lambda tr: tr(), "pass the same arguments in the same way"),
    "a name of no call": (lambda tr: tr.call("layers.2"), "similar names: 'layers.1', 'layers.0'"),
    "a misspelt class": (lambda tr: tr.outline("Linaer"), "'Linaer' is no call of this trace; similar names: 'Linear'"),
    "a misspelt class of ONNX": (
        lambda tr: tr.to_onnx(functions="linear"),
        "is no call of this trace; similar names: 'Linear'",
    ),
    "a misspelt leaf": (
        lambda tr: st.trace(NET, (X,), leaf_modules="Linaer"),
        "no module is named 'Linaer'; similar names: 'Linear'",
    ),
    "a container": (lambda tr: tr.call("layers"), "similar names: 'layers.1', 'layers.0'"),
    "a pattern of no call": (lambda tr: tr.calls["layer.*"], "similar names: 'layers.1', 'layers.0'"),
    "a class of no call": (lambda tr: tr.outline("Liner"), "similar names: 'Linear', 'layers', 'layers.1'"),
    "an attribute that is not there": (
        lambda tr: tr.to_onnx(functions=nn.Linear, attributes=["in_feature"]),
        "attributes: no called module has 'in_feature'; similar names: 'in_features'",
    ),
    "a name for an op": (
        lambda tr: tr.to_onnx(custom_translation_table={"aten::relu": print}),
        "custom_translation_table has 'aten::relu': write an op, torch.ops.aten.relu.default",
    ),
    "a class that is not there": (
        lambda tr: tr.to_onnx(functions=nn.Conv2d),
        "Conv2d is no call of this trace; there are 'Linear'",
    ),
    "a leaf of another class": (
        lambda tr: st.trace(NET, (X,), leaf_modules=nn.LSTM),
        "the model has no LSTM; there are 'Linear', 'ModuleList', 'Net'",
    ),
    "a misspelt rule": (lambda tr: tr.outline("repeatd"), "similar names: 'repeated'"),
    "a leaf that is not there": (
        lambda tr: st.trace(NET, (X,), leaf_modules="fcc"),
        "no module is named 'fcc'; similar names: 'fc'",
    ),
    "no file": (lambda tr: st.load("no.st"), "No such file or directory: 'no.st'"),
    "no folder": (lambda tr: tr.save("no/net.st"), "No such file or directory: 'no'"),
    "a model for a trace": (lambda tr: st.diff(NET, tr), "st.trace and st.load give traces"),
    "a picture of another kind": (lambda tr: tr.to_svg("net.gif"), "ends in .svg, .png or .pdf"),
    "a name for a depth": (lambda tr: tr.summary("fc"), "give a number of levels"),
    "a name for a node": (lambda tr: tr.scope_of("fc"), "Trace.calls have the scopes"),
    "a model for a graph": (lambda tr: st.functionalize(NET, [X]), "st.trace takes a model"),
    "a trace for an order": (lambda tr: st.distributed.plan(NET, tr, classes=[nn.Linear]), "trace(model, ...).order"),
    "a misspelt class of a plan": (
        lambda tr: st.distributed.plan(NET, tr.order, classes=["Liner"]),
        "no module of the model is 'Liner'; similar names: 'Linear'",
    ),
    "a number for a class": (
        lambda tr: st.distributed.plan(NET, tr.order, classes=2),
        "is a int; give a module class",
    ),
    "what the model gives": (lambda tr: st.trace(NET(X), (X,)), "is a Tensor; write st.trace(model, args)"),
    "a path first": (lambda tr: st.save("net.st", tr), "not str: write tr.save(path)"),
    "a model in a file": (lambda tr: st.save(NET, "net.st"), "write tr.save(path)"),
    "the class of a trace": (lambda tr: st.Trace(NET), "st.trace(model, args)"),
    "a summary of a model": (lambda tr: st.summary(NET, X), "write st.trace(model, args).summary"),
    "an ONNX file of a model": (lambda tr: st.to_onnx(NET, X), "write st.trace(model, args).to_onnx"),
    "the FLOPs": (lambda tr: tr.flops, "write tr.summary().rows[0]"),
    "a model for its stages": (lambda tr: st.distributed.split_points(NET, 2), "takes a trace, st.trace(model, args)"),
    "one stage": (lambda tr: st.distributed.split_points(tr, 1), "write 2 or more"),
    "the graph": (lambda tr: tr.graph, "Trace has no 'graph': write tr.graph_module.graph"),
    "the code": (lambda tr: tr.code, "Trace has no 'code': write tr.graph_module.code"),
    "the parameters": (lambda tr: tr.parameters(), "write tr.to_module()"),
    "a device": (lambda tr: tr.to("cpu"), "write tr.to_module()"),
    "the inputs of a call": (lambda tr: tr.calls[1].inputs, "write call.arguments"),
    "the name of a call": (lambda tr: tr.calls[1].name, "write call.fqn"),
}


@pytest.fixture(scope="module")
def tr():
    return st.trace(NET, (X,))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_says_what_to_write(tr, mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    use, said = MISTAKES[mistake]
    with pytest.raises((st.ScopetraceError, OSError, AttributeError)) as caught:
        use(tr)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_inputs_that_are_not_on_the_models_device():
    with pytest.raises(st.errors.OpError, match=r"(?s)module: Net/Linear\[layers.0\].*instead: move the inputs to"):
        st.trace(copy.deepcopy(NET).to("meta"), (X,))


def test_an_error_inside_a_forward_is_the_models_own():
    class Raises(nn.Module):
        def forward(self, x):
            raise TypeError("mine")

    with pytest.raises(TypeError, match=r"^mine"):
        st.trace(Raises(), (X,))


def test_an_error_inside_of_a_property_keeps_its_words(tr, monkeypatch):
    monkeypatch.setattr(type(tr), "mutations", property(lambda self: self.scope.missing))
    with pytest.raises(AttributeError, match="'Scope' object has no attribute 'missing'"):
        _ = tr.mutations


# Ops of one dtype ----------------------------------------------------------------------------------------------------

OF_ONE_DTYPE = {
    "linear": (F.linear, (2, 4), (3, 4), (3,)),
    "matmul": (torch.matmul, (5, 2, 4), (4, 3)),
    "mm": (torch.mm, (2, 4), (4, 3)),
    "bmm": (torch.bmm, (2, 3, 4), (2, 4, 3)),
    "addmm": (torch.addmm, (3,), (2, 4), (4, 3)),
    "addbmm": (torch.addbmm, (3, 3), (2, 3, 4), (2, 4, 3)),
    "baddbmm": (torch.baddbmm, (2, 3, 3), (2, 3, 4), (2, 4, 3)),
    "mv": (torch.mv, (2, 4), (4,)),
    "addmv": (torch.addmv, (2,), (2, 4), (4,)),
    "dot": (torch.dot, (4,), (4,)),
    "vdot": (torch.vdot, (4,), (4,)),
    "conv1d": (F.conv1d, (1, 2, 5), (3, 2, 3)),
    "conv2d": (F.conv2d, (1, 2, 5, 5), (3, 2, 3, 3), (3,)),
    "conv3d": (F.conv3d, (1, 2, 5, 5, 5), (3, 2, 3, 3, 3)),
    "conv_transpose1d": (F.conv_transpose1d, (1, 2, 5), (2, 3, 3)),
    "conv_transpose2d": (F.conv_transpose2d, (1, 2, 5, 5), (2, 3, 3, 3)),
}


def error_of(run, *args):
    try:
        run(*args)
    except Exception as error:
        return error
    return None


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", OF_ONE_DTYPE)
def test_tensors_of_several_dtypes_are_refused_where_eager_refuses_them(name):
    function, *sizes = OF_ONE_DTYPE[name]
    for dtypes in itertools.product((torch.float32, torch.float64, torch.bfloat16, torch.int64), repeat=len(sizes)):
        args = tuple(torch.ones(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True))
        found, expected = error_of(st.trace, function, args), error_of(function, *args)
        assert (found is None) == (expected is None), (dtypes, found, expected)


def test_an_input_of_another_dtype_than_the_model():
    with pytest.raises(RuntimeError, match=r"of one dtype, and is given torch\.float64 and torch\.float32") as error:
        st.trace(nn.Sequential(nn.Linear(4, 4)), (torch.randn(2, 4, dtype=torch.float64),))
    assert "  module: Sequential/Linear[0]" in str(error.value)
    assert "return F.linear(input, self.weight, self.bias)" in str(error.value)


MISFITS = {
    "Linear": (
        nn.Linear(3, 4),
        (torch.ones(2, 5),),
        "Linear(in_features=3, out_features=4, bias=True) was called with",
    ),
    "Conv2d": (nn.Conv2d(3, 4, 3), (torch.ones(2, 5, 7, 7),), "input: float32 [2, 5, 7, 7]"),
    "Embedding": (nn.Embedding(3, 3), (torch.ones(3),), "Embedding(3, 3) was called with input: float32 [3]"),
    "cat": (
        lambda a, b: torch.cat([a, b]),
        (torch.ones(2, 5), torch.ones(2, 4)),
        "a: float32 [2, 5], b: float32 [2, 4]",
    ),
    "view": (lambda x: x.view(3, 3), (torch.ones(2, 5),), "shape '[3, 3]' is invalid for input of size 10"),
}


@pytest.mark.parametrize("op", MISFITS)
def test_operands_that_an_op_does_not_take(op, capfd):
    """One message: the module with its settings and arguments, the line, torch's text; torch logs nothing."""
    model, args, expected = MISFITS[op]
    with pytest.raises(RuntimeError) as eager:
        model(*args)
    with pytest.raises(type(eager.value)) as error:
        st.trace(nn.Sequential(model) if isinstance(model, nn.Module) else model, args)
    assert isinstance(error.value, st.errors.OpError)
    assert expected in str(error.value) and error.value.source is not None and "  torch: " in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_text_of_torch_in_several_lines():
    @torch.library.custom_op("scopetrace_test::strict", mutates_args=())
    def strict(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @strict.register_fake
    def _(x):
        raise ValueError("sizes differ:\n  x has 3")

    with pytest.raises(st.errors.OpError, match="torch: sizes differ:\n  x has 3"):
        st.trace(lambda x: strict(x), (torch.ones(3),))


def test_the_log_of_torch_is_as_before():
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = list(log.filters)
    with pytest.raises(st.errors.OpError):
        st.trace(nn.Linear(3, 4), (torch.ones(2, 5),))
    assert log.filters == before


KEYWORDS = {
    "an argument of the model": (lambda: st.trace(NET, x=X), "given as args=(x, …) and kwargs={'mask': …}"),
    "example_inputs": (lambda: st.trace(NET, example_inputs=(X,)), "write args=, a tuple of the positional arguments"),
    "dynamic_axes": (lambda: st.trace(NET, (X,), dynamic_axes={}), "write dynamic_shapes="),
    "a misspelt one": (lambda: st.trace(NET, (X,), dynamic_shape={}), "write dynamic_shapes="),
    "opset": (lambda: st.trace(NET, (X,)).to_onnx(opset=18), "write opset_version="),
    "dynamic_axes of a file": (lambda: st.trace(NET, (X,)).to_onnx(dynamic_axes={}), r"st.trace(..., dynamic_shapes=)"),
}


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_keywords_of_other_libraries(keyword):
    call, hint = KEYWORDS[keyword]
    with pytest.raises(TypeError, match=re.escape(hint)) as error:
        call()
    assert isinstance(error.value, st.errors.ArgumentTypeError)


@pytest.mark.parametrize("name", ["class", 'a"b', "a\nb", "a\\b"])
def test_names_that_no_graph_can_write(name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleDict({name: nn.Linear(2, 2)})

        def forward(self, x):
            return self.heads[name](x)

    tr = st.trace(Model(), torch.ones(1, 2))
    with pytest.raises(st.TraceError, match="it is a Python keyword, or has quotes, backslashes or line breaks"):
        tr.graph_module  # noqa: B018


@pytest.mark.parametrize("name", ["class", 'a"b', "a b", ""])
def test_keywords_that_no_graph_can_write(name):
    class Leaf(nn.Module):
        def forward(self, x, **more):
            return x + sum(more.values())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.leaf = Leaf()

        def forward(self, x):
            return self.leaf(x, **{name: x})

    tr = st.trace(Model(), torch.ones(1, 2), leaf_modules=Leaf)
    with pytest.raises(st.TraceError, match="cannot pass the keyword argument"):
        tr.graph_module  # noqa: B018
