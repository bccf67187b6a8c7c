"""Functions of tensors without elements, of which some of torch's functions of shapes are wrong."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import scopetrace as st

LABELS = torch.zeros(0, dtype=torch.long)

CASES = {
    **{
        f"{mode} of {len(size)} dimensions": (lambda x, mode=mode: F.interpolate(x, size=4, mode=mode), size)
        for mode, sizes in {
            "nearest": [(0, 2, 3), (0, 2, 3, 3), (0, 2, 3, 3, 3)],
            "nearest-exact": [(0, 2, 3), (0, 2, 3, 3), (0, 2, 3, 3, 3)],
            "linear": [(0, 2, 3)],
            "bilinear": [(0, 2, 3, 3)],
            "bicubic": [(0, 2, 3, 3)],
            "trilinear": [(0, 2, 3, 3, 3)],
            "area": [(0, 2, 3, 3)],
        }.items()
        for size in sizes
    },
    "nearest, twice the size": (lambda x: F.interpolate(x, scale_factor=2.0), (0, 2, 3)),
    "nn.Upsample": (nn.Upsample(scale_factor=2), (0, 2, 3, 3)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), (0, 2, 8, 8)),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 2), (0, 2, 8)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 2), (0, 2, 8, 8)),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, 2), (0, 2, 8, 8, 8)),
    "conv2d": (nn.Conv2d(2, 4, 3), (0, 2, 8, 8)),
    "conv_transpose1d": (nn.ConvTranspose1d(2, 4, 3), (0, 2, 8)),
    "pad": (lambda x: F.pad(x, (1, 1), "reflect"), (0, 2, 3)),
    "batch_norm": (nn.BatchNorm2d(2).eval(), (0, 2, 8, 8)),
    "group_norm": (nn.GroupNorm(1, 2), (0, 2, 8)),
    "layer_norm": (nn.LayerNorm(3), (2, 0, 3)),
    "softmax of no columns": (lambda x: F.softmax(x, -1), (2, 0)),
    "linear of no features": (nn.Linear(2, 3), (0, 2)),
    "embedding": (lambda x: F.embedding(LABELS, x), (5, 3)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), (2, 2, 0, 4)),
    "grid_sample": (lambda x: F.grid_sample(x, torch.zeros(0, 2, 2, 2), align_corners=False), (0, 2, 3, 3)),
    "unfold": (lambda x: F.unfold(x, 2), (0, 2, 4, 4)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), (0, 4, 3, 3)),
    "cross_entropy": (lambda x: F.cross_entropy(x, LABELS, reduction="sum"), (0, 3)),
    "cross_entropy, mean": (lambda x: F.cross_entropy(x, LABELS), (0, 3)),
    "mse_loss": (lambda x: F.mse_loss(x, x + 1), (0, 3)),
    "cdist": (lambda x: torch.cdist(x, x), (0, 3)),
    "matmul": (lambda x: x @ x.t(), (3, 0)),
    "sum": (lambda x: (x.sum(), x.mean(0), x.prod()), (0, 3)),
    "amax": (lambda x: x.amax(1), (0, 3)),
    "gru": (nn.GRU(3, 4), (2, 0, 3)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("specialize", [False, True])
@pytest.mark.parametrize("what", CASES)
def test_a_function_of_an_empty_tensor(what, specialize):
    fn, size = CASES[what]
    tr = st.trace(fn, (torch.ones(size),), specialize=specialize)
    tr.check((torch.ones(size),))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_gradients(mode):
    x = torch.ones(0, 2, 3, requires_grad=True)
    tr = st.trace(lambda x: F.interpolate(x, size=4, mode=mode), (x,))
    tr(x).sum().backward()
    assert x.grad.shape == x.shape


def test_nothing_is_logged_of_what_works(caplog):
    with caplog.at_level(logging.DEBUG):
        st.trace(lambda x: F.interpolate(x, size=4), (torch.ones(0, 2, 3),))
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


def test_an_error_of_torch_stays_one():
    with pytest.raises(RuntimeError, match="same reduction dim"):
        st.trace(lambda x: x @ torch.ones(4, 2), (torch.ones(0, 3),))


def test_a_custom_op_is_not_run_on_real_tensors():
    calls = []

    @torch.library.custom_op("empty_tensors::fails", mutates_args=())
    def fails(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.clone()

    @fails.register_fake
    def _(x):
        raise ValueError("no shape")

    with pytest.raises(ValueError, match="no shape"):
        st.trace(fails, (torch.ones(0),))
    assert calls == []
