"""A compiler that cannot take mutation behind torch.compile: TVM, through `scopetrace.functional_backend`.

    pip install -c constraints.txt '.[tvm]'
    python examples/tvm_backend.py

`compile_torch_functions` is for level="torch": graphs of torch's functions and methods, read by TVM's `from_fx`.
`compile_aten` is for level="aten": graphs of ATen ops, read by TVM's `from_exported_program`, which knows more ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import tvm
from torch import nn
from torch._inductor.compile_fx import compile_fx
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program, from_fx

import scopetrace as st

Run = Callable[..., list[torch.Tensor]]


def compile_torch_functions(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Run:
    """A graph of torch functions, as machine code."""
    return build(from_fx(gm, [(tuple(t.shape), str(t.dtype)) for t in example_inputs]))


def compile_aten(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Run:
    """A graph of ATen ops, as machine code."""
    return build(from_exported_program(torch.export.export(gm, tuple(example_inputs))))


def build(module: tvm.IRModule) -> Run:
    """Machine code for this CPU. TVM wants its inputs dense, and may return one of them as a result: that we copy."""
    machine = relax.VirtualMachine(relax.build(module, target="llvm"), tvm.cpu())

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        dense = [t.detach().contiguous() for t in inputs]
        theirs = {t.data_ptr() for t in dense}
        results = [torch.utils.dlpack.from_dlpack(t) for t in machine["main"](*dense)]
        return [t.clone() if t.data_ptr() in theirs else t for t in results]

    return run


def compile_inductor(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
    """Inductor needs no help with mutation; any compiler of torch.compile can be wrapped."""
    return compile_fx(gm, example_inputs)


tvm_torch = st.functional_backend(compile_torch_functions, level="torch", lower_scatter="slice_scatter")
tvm_aten = st.functional_backend(compile_aten, level="aten", lower_scatter="slice_scatter")


class Decoder(nn.Module):
    """One step of a decoder: an activation in place, and a row of the cache overwritten."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        nn.functional.relu(y, inplace=True)
        self.cache[1:2].copy_(x)
        return y + self.cache.sum(0)


@torch.no_grad()
def compare(backend: Any) -> str:
    """Two steps of the decoder, compiled and eager: are the results right, is the cache?"""
    torch.compiler.reset()
    eager, model = Decoder(), Decoder()
    compiled = torch.compile(model, backend=backend)
    steps = torch.tensor([[[-1.0, 0.5, 2.0]], [[3.0, -4.0, 1.0]]])
    results = all([torch.allclose(compiled(x), eager(x)) for x in steps])
    cache = torch.equal(model.cache, eager.cache)
    return f"results {'right' if results else 'WRONG'}, cache {'right' if cache else 'WRONG'}"


if __name__ == "__main__":
    print("TVM, torch functions         ", compare(compile_torch_functions))
    print("TVM, torch functions, wrapped", compare(tvm_torch))
    print("TVM, ATen ops                ", compare(compile_aten))
    print("TVM, ATen ops, wrapped       ", compare(tvm_aten))
    print("Inductor                     ", compare("inductor"))
    print("Inductor, wrapped            ", compare(st.functional_backend(compile_inductor)))
