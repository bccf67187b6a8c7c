"""Where Python or torch answers otherwise on fake tensors than on real ones: right as in eager, or refused."""

import copy
import io
import itertools
import pickle
import types

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

import scopetrace as st
from scopetrace.errors import DataDependentError, RandomStateError, StateMismatchError, UnsupportedOpError

X = torch.randn(2, 4)
SEQUENCES = torch.randn(2, 5, 8)
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
LINEAR = nn.Linear(4, 4)
GRU = nn.GRU(8, 4, batch_first=True)


# The fast path of nn.TransformerEncoder ------------------------------------------------------------------------------


def encoder(**options):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=options.pop("first", False))
    return nn.TransformerEncoder(layer, 2, **options).eval()


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("mask_check", [True, False])
def test_an_encoder_that_computes_on_nested_tensors_is_refused(mask_check):
    model = encoder(mask_check=mask_check)
    with pytest.raises(UnsupportedOpError, match=r"nn\.TransformerEncoder with a padding mask") as error:
        st.trace(model, (SEQUENCES,), {"src_key_padding_mask": PADDING})
    assert "enable_nested_tensor=False" in error.value.hint
    whole = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval()
    with pytest.raises(UnsupportedOpError, match=r"nn\.TransformerEncoder"):
        st.trace(whole, (SEQUENCES, SEQUENCES), {"src_key_padding_mask": PADDING})


SAME_PATH = {
    "the way out": ({"enable_nested_tensor": False}, {}),
    "norm_first": ({"first": True}, {}),
    "training": ({}, {"train": True}),
    "gradients": ({}, {"grad": True}),
    "no padding": ({}, {"padding": None}),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", SAME_PATH)
def test_an_encoder_that_does_not_is_traced(name):
    options, state = SAME_PATH[name]
    model = encoder(**options).train(state.get("train", False))
    kwargs = {"src_key_padding_mask": state.get("padding", PADDING)}
    with torch.set_grad_enabled(state.get("grad", False)):
        tr = st.trace(model, (SEQUENCES,), kwargs)
        torch.testing.assert_close(tr(SEQUENCES, **kwargs), model(SEQUENCES, **kwargs))


PATHS = list(itertools.product((True, False), (True, False), (None, PADDING), (True, False)))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("batch_first", "bias", "padding", "grad"), PATHS)
def test_layers_and_attention_are_as_in_eager(batch_first, bias, padding, grad):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first, bias=bias).eval()
    attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, bias=bias).eval()
    x = SEQUENCES if batch_first else SEQUENCES.transpose(0, 1)
    with torch.set_grad_enabled(grad):
        tr = st.trace(layer, (x,), {"src_key_padding_mask": padding})
        torch.testing.assert_close(tr(x, src_key_padding_mask=padding), layer(x, src_key_padding_mask=padding))
        tr = st.trace(attention, (x, x, x), {"key_padding_mask": padding})
        torch.testing.assert_close(tr(x, x, x, key_padding_mask=padding), attention(x, x, x, key_padding_mask=padding))


def test_a_call_that_would_compute_on_nested_tensors_is_refused():
    """Of a trace that did not, since gradients were recorded or the fast path was switched off."""
    model, kwargs = encoder(), {"src_key_padding_mask": PADDING}
    tr = st.trace(model, (SEQUENCES,), kwargs)
    torch.testing.assert_close(tr(SEQUENCES, **kwargs), model(SEQUENCES, **kwargs))
    with torch.no_grad(), pytest.raises(StateMismatchError, match=r"is_grad_enabled\(\).*: True when traced and False"):
        tr(SEQUENCES, **kwargs)
    model.requires_grad_(False)
    with pytest.raises(StateMismatchError, match=r"requires_grad.*: True when traced and False now"):
        tr(SEQUENCES, **kwargs)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        tr = st.trace(model, (SEQUENCES,), kwargs)
        tr(SEQUENCES, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    with pytest.raises(StateMismatchError, match=r"get_fastpath_enabled\(\).*: False when traced and True now"):
        tr(SEQUENCES, **kwargs)


def test_a_call_with_gradients_that_would_not_take_the_fused_op_is_refused():
    """It has no derivative."""
    model = encoder().layers[0]
    with torch.no_grad():
        tr = st.trace(model, (SEQUENCES,))
        torch.testing.assert_close(tr(SEQUENCES), model(SEQUENCES))
    with pytest.raises(StateMismatchError, match=r"is_grad_enabled\(\).*: False when traced and True now"):
        tr(SEQUENCES)
    model.requires_grad_(False)
    tr = st.trace(model, (SEQUENCES,))
    torch.testing.assert_close(tr(SEQUENCES), model(SEQUENCES))
    model.requires_grad_(True)
    with pytest.raises(StateMismatchError, match=r"requires_grad.*: False when traced and True now"):
        tr(SEQUENCES)


# Tensors that a forward makes require grad ---------------------------------------------------------------------------


def requires_grad_in_place(x):
    return (x * 2).requires_grad_() * 3


def requires_grad_set(x):
    y = LINEAR(x).detach()
    y.requires_grad = True
    return y * 3


def made_requiring_grad(x):
    return x * torch.ones(4, requires_grad=True)


def constant_requiring_grad(x):
    return x * torch.tensor([1.0, 2, 3, 4], requires_grad=True)


def parameter_of_the_forward(x):
    return x * nn.Parameter(torch.ones(4))


LOST = [
    *(requires_grad_in_place, requires_grad_set, made_requiring_grad, constant_requiring_grad),
    parameter_of_the_forward,
]


@pytest.mark.parametrize("run", LOST)
def test_a_gradient_that_a_trace_would_lose_is_refused(run):
    with pytest.raises(UnsupportedOpError, match="itself makes a tensor require grad") as error:
        st.trace(run, (X.clone(),))
    assert f"in {run.__name__}: " in error.value.source
    assert "x.detach()" in error.value.hint


def forces(x):
    x.requires_grad_()
    return torch.autograd.grad(LINEAR(x).pow(2).sum(), x)[0]


def detached(x):
    return requires_grad_in_place(x).detach()


def with_a_parameter(x):
    y = LINEAR(x)
    return y + y.detach().requires_grad_(False)


def writes_to_a_parameter(x):
    with torch.no_grad():
        LINEAR.weight.add_(0)
    return LINEAR(x)


@pytest.mark.parametrize("run", [forces, detached, with_a_parameter, writes_to_a_parameter])
def test_where_no_result_loses_its_gradient_it_is_traced(run):
    tr, expected = st.trace(run, (X.clone(),)), run(X.clone())
    found = tr(X.clone())
    torch.testing.assert_close(found, expected)
    assert found.requires_grad == expected.requires_grad


# Data that fake tensors do not have ----------------------------------------------------------------------------------


def copied(x):
    return copy.copy(x).add_(1)


def deep_copied(x):
    return copy.deepcopy(x * 2)


def pickled(x):
    return pickle.loads(pickle.dumps(x)) * 2


def saved(x):
    torch.save(x, io.BytesIO())
    return x * 2


def packed(x):
    return GRU(rnn.pack_padded_sequence(x, [5, 3], batch_first=True))[1]


def opaque(x):
    return x.to_mkldnn().to_dense()


def pinned(x):
    return x + torch.arange(3.0).pin_memory()


def shared(x):
    return (x * 2).share_memory_()


def lazy(x):
    return nn.LazyLinear(3)(x)


REFUSED = [
    (copied, X, "copies or pickles", "clone"),
    (deep_copied, X, "copies or pickles", "clone"),
    (pickled, X, "copies or pickles", "clone"),
    (saved, X, "copies or pickles", "clone"),
    (packed, SEQUENCES, "packed sequence", "padded"),
    (pinned, X, r"^the forward pins a tensor \(pin_memory\(\)\).*\n  op: aten.pin_memory", "a DataLoader"),
    (shared, X, r"^the forward moves a tensor to shared memory \(share_memory_\(\)\)", "outside of the forward"),
    (lazy, X, "^the forward makes a lazy module", "__init__"),
]


@torch.no_grad()
def test_a_layout_that_fake_tensors_have_in_later_versions_of_torch():
    try:
        tr = st.trace(opaque, (X,))
    except UnsupportedOpError as error:
        assert "an MKL-DNN tensor has no fake tensor" in str(error)
    else:
        assert torch.equal(tr(X), X)


@torch.no_grad()
@pytest.mark.parametrize(("run", "x", "message", "hint"), REFUSED, ids=[run.__name__ for run, *_ in REFUSED])
def test_what_runs_no_op_is_refused(run, x, message, hint):
    with pytest.raises(UnsupportedOpError, match=message) as error:
        st.trace(run, (x,))
    assert hint in (error.value.hint or "")
    assert f"in {run.__name__}: " in (error.value.source or "")


def in_text(x):
    return x * len(f"{x.sum():.2f}")


def from_storage(x):
    return x * x.untyped_storage()[0]


def compared_by_testing(x):
    torch.testing.assert_close(x, x)
    return x


@pytest.mark.parametrize("run", [in_text, from_storage, compared_by_testing])
def test_data_that_python_reads_is_refused(run):
    with pytest.raises(DataDependentError):
        st.trace(run, (X,))


def same_view(x):
    return x * 2 if x.is_set_to(x.view(2, 4)) else x * 3


def test_a_question_about_memory_is_answered_as_in_eager():
    torch.testing.assert_close(st.trace(same_view, (X,))(X), same_view(X))


ARGUMENTS = {
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
    "_mkldnn": lambda: X.to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_that_no_fake_tensor_stands_for_are_refused(kind):
    with pytest.raises(UnsupportedOpError, match="the argument x is a") as error:
        st.trace(lambda x: x * 2, (ARGUMENTS[kind](),))
    assert "plain tensor" in error.value.hint


def test_a_lazy_module_has_to_run_first():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UnsupportedOpError, match="no parameters yet") as error:
        st.trace(model, (X,))
    assert error.value.module == "Sequential, 0"
    expected = model(X)
    torch.testing.assert_close(st.trace(model, (X,))(X), expected)


def seeds_the_default(x):
    torch.default_generator.manual_seed(3)
    return x + torch.rand(4)


def seeds_a_device(x):
    torch.cuda.manual_seed_all(3)
    return x


def sets_the_state(x):
    torch.set_rng_state(torch.Generator().manual_seed(3).get_state())
    return x + torch.rand(4)


def draws_from_its_own(x):
    return x + torch.rand(4, generator=torch.Generator())


@pytest.mark.parametrize("run", [seeds_the_default, seeds_a_device, sets_the_state, draws_from_its_own])
def test_generators_that_a_forward_sets_are_refused(run):
    before = torch.get_rng_state()
    with pytest.raises(RandomStateError):
        st.trace(run, (X,))
    assert torch.equal(torch.get_rng_state(), before)


SPARSE = "x.to_sparse()  x[None].to_sparse_csr()  (x.to_sparse() * 2)  x.to_sparse().coalesce()  self.eye"


@pytest.mark.sample(3)
@pytest.mark.parametrize("sparse", SPARSE.split("  "))
@pytest.mark.parametrize("question", ["{}._nnz()", "{}.values().shape[0]", "len({}.values())", "{}.values().sum()"])
@pytest.mark.filterwarnings("ignore")
def test_the_elements_of_a_sparse_tensor_are_not_known(sparse, question):
    self = types.SimpleNamespace(eye=torch.eye(3).to_sparse())
    run = eval(f"lambda x: x * {question.format(sparse)}", {"self": self})
    with pytest.raises(st.errors.DataDependentError, match="elements that a sparse tensor stores"):
        st.trace(run, (torch.ones(3),))


def test_the_elements_of_which_a_sparse_tensor_is_made_are_known():
    def run(x):
        sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), x[:2], (3,))
        return x * sparse._nnz(), sparse.to_dense(), x.to_sparse().to_dense()

    x = torch.tensor([1.0, 2.0, 0.0])
    torch.testing.assert_close(st.trace(run, (x,))(x + 1), run(x + 1))


class Copies(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("part", self.scale[1:])
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.run(x)


@torch.no_grad()
def test_a_deep_copy_of_a_buffer_is_a_tensor_of_its_own():
    net, x = Copies(), torch.randn(3, 4)
    net.run = lambda x: (copy.deepcopy(net.scale).add_(1) * x, net.scale * 1, copy.deepcopy(net.norm)(x))
    for found, wanted in zip(st.trace(net, (x,))(x + 1), net(x + 1), strict=True):
        torch.testing.assert_close(found, wanted)
    net.run = lambda x: copy.deepcopy([net.scale, net.part])[0] * x
    with pytest.raises(UnsupportedOpError):
        st.trace(net, (x,))


def test_a_shallow_copy_of_a_buffer_is_refused():
    net = Copies()
    net.run = lambda x: copy.copy(net.scale) * x
    with pytest.raises(UnsupportedOpError):
        st.trace(net, (torch.randn(3, 4),))
