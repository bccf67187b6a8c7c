"""A graph of fake tensors as a `torch.export.ExportedProgram`, which is what `torch.onnx.export` takes.

All placeholders are user inputs, all outputs user outputs: weights are put back when the ONNX pieces are assembled.
"""

from __future__ import annotations

import torch
import torch.fx
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from scopetrace.ir import meta


def exported_program(root: torch.nn.Module, graph: torch.fx.Graph) -> ExportedProgram:
    """The program of a graph whose nodes have their values in `meta["val"]`."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    outputs = next(n for n in graph.nodes if n.op == "output").args[0]
    ins, outs = [_argument(n) for n in inputs], [_argument(n) for n in outputs]
    for node in graph.nodes:
        if node.op != "placeholder":
            meta.set_value(node, None)  # torch derives the values anew, with symbols of its own
            meta.set_unbacked_bindings(node, {})
            node.meta.setdefault("nn_module_stack", {})
            node.meta.setdefault("stack_trace", "")
    signature = ExportGraphSignature(
        [InputSpec(InputKind.USER_INPUT, a, None) for a in ins],
        [OutputSpec(OutputKind.USER_OUTPUT, a, None) for a in outs],
    )
    in_spec = pytree.tree_structure(((0,) * len(ins), {}))
    call = ModuleCallSignature([], [], in_spec, pytree.tree_structure((0,) * len(outs)))
    return ExportedProgram(root, graph, signature, {}, {}, [ModuleCallEntry("", call)])


def _argument(node: torch.fx.Node) -> TensorArgument | SymIntArgument:
    if isinstance(meta.value(node), torch.Tensor):
        return TensorArgument(name=node.name)
    return SymIntArgument(name=node.name)
