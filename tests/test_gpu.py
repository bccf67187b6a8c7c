"""Models on a GPU, by fake tensors: what their traces have where GPUs have kernels of their own.

What these programs compute was compared with eager on a GPU. These tests need none, and a torch that is built for it:
`make test TORCH=2.15.0`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import scopetrace as st

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch is built without CUDA")


@pytest.fixture(autouse=True)
def fake_gpu():
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def ops(fn, *args):
    """The names of the ops of a trace."""
    nodes = st.trace(fn, args).graph_module.graph.nodes
    return [str(n.target).removeprefix("aten.") for n in nodes if isinstance(n.target, torch._ops.OpOverload)]


def tensor(*size, device="cuda:0", **options):
    return torch.empty(size, device=device, **options)


def test_dropout_in_place_draws_what_it_draws_in_eager():
    """`aten.dropout` has a kernel on a GPU that draws other numbers than the `bernoulli_` of `dropout_`."""
    found = ops(lambda x: F.dropout(x * 2, 0.3, inplace=True), tensor(3, 4))
    assert found == ["mul.Tensor", "empty_like.default", "bernoulli.p", "div.Scalar", "mul.Tensor"]
    assert ops(lambda x: F.dropout(x * 2, 0.3), tensor(3, 4)) == ["mul.Tensor", "dropout.default"]
    assert ops(lambda x: F.dropout(x * 2, 0.3, inplace=True), tensor(3, 4, device="cpu")) == [
        *("mul.Tensor", "dropout.default")
    ]
    assert ops(lambda x: F.dropout(x * 2, 0.3, training=False, inplace=True), tensor(3, 4)) == ["mul.Tensor"]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "dropout": 0.1}, {"bidirectional": True, "batch_first": True}]
)
def test_recurrent_layers(kind, options):
    """The kernels of cuDNN look into the memory of the weights, which fake tensors do not have."""
    with torch.device("cuda:0"):
        model = kind(4, 5, **options)
    *states, name = ops(lambda x: model(x)[0], tensor(3, 2, 4))
    assert set(states) == {"zeros.default"}
    assert name == {nn.LSTM: "lstm.input", nn.GRU: "gru.input", nn.RNN: "rnn_tanh.input"}[kind]
    given = tensor(3, 2, 4)
    (of_call,) = st.trace(model, (given,)).calls
    found = torch.utils._pytree.tree_leaves(of_call.outputs)
    on_cpu = torch.utils._pytree.tree_leaves(kind(4, 5, **options, device="cpu")(tensor(3, 2, 4, device="cpu")))
    assert [v.meta["val"].shape for v in found] == [t.shape for t in on_cpu]
    assert all(v.meta["val"].device.type == "cuda" for v in found)


def test_a_recurrent_layer_under_autocast_is_refused():
    with torch.device("cuda:0"):
        model = nn.LSTM(4, 5)
    torch.set_autocast_enabled("cuda", True)  # torch.autocast does so only where there is a GPU
    try:
        with pytest.raises(st.UnsupportedOpError, match=r"put it under torch\.autocast"):
            st.trace(model, (tensor(3, 2, 4),))
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ctc_loss(device, reduction):
    """Lengths may be on the CPU; torch divides by them on the GPU."""
    x, targets = tensor(8, 2, 6), tensor(2, 3, dtype=torch.long)
    lengths = [tensor(2, device=device, dtype=torch.long) for _ in range(2)]
    found = ops(lambda *args: F.ctc_loss(*args, reduction=reduction), x, targets, *lengths)
    assert found == ["to.dtype_layout"] * (2 if device == "cpu" else 0) + ["ctc_loss.Tensor"]
    assert ops(lambda x, t: F.ctc_loss(x, t, (8, 7), (2, 3), reduction=reduction), x, targets)[-1] == "ctc_loss.Tensor"


def test_flex_attention_with_a_mask_that_is_made_inside():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def forward(q, k, v):
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device=q.device)
        return flex_attention(q, k, v, block_mask=mask)

    q = tensor(1, 2, 128, 16, requires_grad=True)
    assert "flex_attention" in [str(n.target) for n in st.trace(forward, (q, q, q)).graph_module.graph.nodes]
