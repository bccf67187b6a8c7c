"""Whole models as the text of their traces, in tests/snapshots/; `--graph-snapshot-update` writes them anew.

A difference is one that users see too: read it, then update. The models have the sizes of real ones, on meta.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import scopetrace as st


class Attention(nn.Module):
    """Attention over a cache of keys and values, as decoders have it."""

    def __init__(self, width, heads, length):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("keys", torch.zeros(1, heads, length, width // heads))
        self.register_buffer("values", torch.zeros(1, heads, length, width // heads))

    def forward(self, x, pos):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        self.keys.index_copy_(2, pos, k)
        self.values.index_copy_(2, pos, v)
        mask = torch.arange(self.keys.size(2), device=x.device) <= pos[:, None]
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, layers=12, width=768):
        super().__init__()
        self.embed = nn.Embedding(50257, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(width), "attention": Attention(width, 12, 1024)}) for _ in range(layers)
        )

    def forward(self, tokens, pos):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer["attention"](layer["norm"](x), pos)
        return F.linear(x[:, -1], self.embed.weight)


@torch.no_grad()
@pytest.mark.graph_snapshot(one_graph=True, max_functions=2)
def test_a_step_of_a_decoder_with_its_cache(graph_snapshot):
    with torch.device("meta"):
        graph_snapshot(Decoder(), (torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, dtype=torch.long)))


@torch.no_grad()
@pytest.mark.graph_snapshot(one_graph=True, pure=True, max_functions=1)
def test_an_encoder(graph_snapshot):
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True)
        tr = graph_snapshot(nn.TransformerEncoder(layer, 12).eval(), (torch.zeros(1, 128, 768),))
        graph_snapshot(tr.outline("layers"), name="outlined")


def conv(a, b, stride):
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


def test_a_training_step_of_a_network_of_convolutions(graph_snapshot):
    with torch.device("meta"):
        model = nn.Sequential(
            conv(3, 64, 2), conv(64, 128, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def step(x, target):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), target)
            loss.backward()
            optimizer.step()
            return loss.detach()

        graph_snapshot(step, (torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.long)))


def test_a_branch_on_data(graph_snapshot):
    def forward(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: -x, (x,))

    graph_snapshot(forward, (torch.zeros(2),), name="cond")
    graph_snapshot(lambda x: x + 1 if x.sum() > 0 else x, (torch.ones(2),), name="specialized", specialize=True)


@pytest.mark.parametrize("ignored", [((torch.zeros(2, 2),), {}), (torch.zeros(2, 2), {}), ((), {"specialize": True})])
def test_a_trace_takes_no_arguments_of_its_model(graph_snapshot, ignored):
    args, options = ignored
    with pytest.raises(pytest.fail.Exception, match="a trace, which takes no arguments"):
        graph_snapshot.trace(st.trace(nn.Linear(2, 2), (torch.zeros(2, 2),)), args, **options)
