"""Functional tapes of GraphModules, in ATen ops or in the functions and methods that the graph itself calls.

Data flow:
    GraphModule -> RecordedTape of ATen ops, with the node behind each -> nodes as single ops again where that is right
    -> FunctionalTape
"""

from __future__ import annotations

from typing import Any

import torch.fx

from scopetrace.ir.tape import FunctionalTape, RecordedTape
from scopetrace.program.traced import functional_tape
from scopetrace.torch_level.lift import lifted
from scopetrace.torch_level.stepping import record_nodes


def aten_tapes(gm: torch.fx.GraphModule, args: tuple[Any, ...]) -> tuple[RecordedTape, FunctionalTape]:
    """The recorded and the functional tape of `gm(*args)`, in ATen ops; raises as `torch_level_tapes`."""
    tape, _ = record_nodes(gm, args)
    return tape, functional_tape(tape)


def torch_level_tapes(gm: torch.fx.GraphModule, args: tuple[Any, ...]) -> tuple[RecordedTape, FunctionalTape]:
    """The recorded tape of `gm(*args)` in ATen ops, and the functional one in `TorchTarget`s and ATen ops.

    Raises FunctionalizationError for a mutation without a functional form.
    """
    tape, nodes = record_nodes(gm, args)
    return tape, functional_tape(lifted(tape, nodes))
