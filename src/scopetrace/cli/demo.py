"""`scopetrace demo`: a tour on a small model of our own, which needs nothing but torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import torch
from torch import nn

from scopetrace.api.trace import Trace, trace
from scopetrace.cli.run import FILE, print_text, quiet
from scopetrace.ir.scopes import scope


class Block(nn.Module):
    """A transformer layer with a cache of keys and values that each call writes to."""

    cache: torch.Tensor

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.register_buffer("cache", torch.zeros(2, 1, length, width))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """`x` is `f32[1, n, width]`, `position` the places of its n tokens, `i64[n]`."""
        with scope("attention"):
            q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
            self.cache[0, :, position] = k
            self.cache[1, :, position] = v
            y = x + self.out(nn.functional.scaled_dot_product_attention(q, self.cache[0], self.cache[1]))
        mlp: torch.Tensor = self.mlp(y)
        return y + mlp


class Decoder(nn.Module):
    """Token numbers to the scores of the next ones."""

    def __init__(self, layers: int = 3, width: int = 64, words: int = 100) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, 16) for _ in range(layers))

    def forward(self, ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """`ids` is `i64[1, n]`, `position` `i64[n]`; gives `f32[1, n, words]`."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, position)
        return x @ self.embed.weight.t()


@click.command()
@click.option("--output", "-o", type=FILE, help="Write the HTML page here.")
def demo(output: Path | None) -> None:
    """A tour: what scopetrace tells of a small decoder with a cache, which comes with the package.

    \b
        scopetrace demo
        scopetrace demo -o demo.html
    """
    with quiet(), torch.no_grad():
        args = (torch.zeros(1, 2, dtype=torch.int64), torch.arange(2))
        traced = trace(Decoder().eval(), args)
        traced.check(args)
        text = "\n".join(_tour(traced))
        if output is not None:
            traced.to_html(output)
    print_text(text)
    if output is not None:
        print_text(f"\nThe page is in {output}.")


def _tour(traced: Trace) -> Iterator[str]:
    yield "tr = st.trace(Decoder(), (ids, position)); print(tr)\n"
    yield str(traced)
    yield "\ntr.summary(depth=1)\n"
    yield str(traced.summary(depth=1))
    yield '\ntr.call("layers.1.mlp").arguments, .outputs: nodes of tr.graph_module\n'
    call = traced.call("layers.1.mlp")
    yield f"{call.arguments} -> {call.outputs}"
    yield "\ntr.mutations: the graph itself is pure, these are written after it\n"
    yield from map(str, traced.mutations)
    yield '\ntr.outline("layers").functions: the equal layers as one function, as in an ONNX file\n'
    yield from (f"{f}  # {len(f.calls)} calls" for f in traced.outline("layers").functions)
    yield "\ntr.order.parameters: in the order of first use, as FSDP2 needs them\n"
    yield "\n".join(str(traced.order).splitlines()[:8])
    yield "\nNext: scopetrace show --help; tr.to_html(), tr.to_onnx(), tr.to_exported_program(), st.diff(tr, other)."
