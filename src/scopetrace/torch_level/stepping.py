"""The recording of a torch-level graph at ATen level, with the ops that each of its nodes made.

Data flow:
    GraphModule -> run node by node under the recorder -> RecordedTape, and a NodeRecord for each node
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.fx

from scopetrace._compat.ops import in_transform
from scopetrace._compat.questions import autocast_enabled
from scopetrace.containers.structure import leaves, map_structure
from scopetrace.ir.scopes import Scope
from scopetrace.ir.tape import RecordedTape, Value
from scopetrace.record.builder import Assumptions
from scopetrace.record.calls import root_scope, scope_of_node
from scopetrace.record.model import Model
from scopetrace.session import Recording, retraced
from scopetrace.torch_level.target import TorchTarget


@dataclasses.dataclass
class NodeRecord:
    """A node of the graph, what it calls, with values of the tape for tensors, and its ops: `tape.ops[start:stop]`."""

    node: torch.fx.Node
    target: TorchTarget
    scope: Scope
    """The module scope that the node carries."""
    grad: bool
    """Whether autograd was on."""
    known: bool
    """Whether its arguments and outputs hold all its tensors, and no transform or autocast changes what it does."""
    start: int
    stop: int = 0
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: Any = None


def record_nodes(gm: torch.fx.GraphModule, args: tuple[Any, ...]) -> tuple[RecordedTape, list[NodeRecord]]:
    """The ATen tape of `gm(*args)`, and its nodes. Raises what recording raises.

    Its ops have the scopes and the stack traces of the nodes.
    """

    def attempt(assumptions: Assumptions) -> tuple[RecordedTape, list[NodeRecord]]:
        recording = Recording(Model(gm), root_scope(gm), assumptions)
        interpreter = _RecordingInterpreter(gm, recording)
        return recording.run(interpreter.run, args, {}).tape, interpreter.nodes

    return retraced(attempt)


class _RecordingInterpreter(torch.fx.Interpreter):
    """Runs the graph and notes what each node did."""

    def __init__(self, gm: torch.fx.GraphModule, recording: Recording) -> None:
        super().__init__(gm)
        self.builder = recording.builder
        self.values = recording.values
        self.nodes: list[NodeRecord] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        operands = [_plain(x) for x in self.fetch_args_kwargs_from_env(n)]
        target = TorchTarget(n.op, self.fetch_attr(str(n.target)) if n.op == "call_module" else n.target)
        tape, grad = self.builder.tape, torch.is_grad_enabled()
        known = not in_transform() and not autocast_enabled()
        record = NodeRecord(n, target, scope_of_node(n, tape.root), grad, known, len(tape.ops))
        self.nodes.append(record)
        if record.known:
            record.args, record.kwargs = self._values(operands)
            record.known = not _hides_tensors((record.args, record.kwargs))
        with self.builder.from_node(tape.root, record.scope, n.stack_trace):
            out = target(*operands[0], **operands[1])
        record.stop = len(tape.ops)
        if record.known and not in_transform():
            record.outputs = self._values(out)
        record.known = record.known and not in_transform() and not _hides_tensors(record.outputs)
        return out

    def _values(self, x: Any) -> Any:
        return map_structure(self.values.value_of, x, torch.Tensor)


def _plain(x: Any) -> Any:
    """The containers of torch.fx, which are immutable, as those of Python."""
    if isinstance(x, list):
        return [_plain(item) for item in x]
    if isinstance(x, dict):
        return {key: _plain(item) for key, item in x.items()}
    return tuple(_plain(item) for item in x) if type(x) is tuple else x


def _hides_tensors(x: Any) -> bool:
    """Whether an object or a slice, which an op of a tape cannot take, may hold tensors."""
    if isinstance(x, (list, tuple)):
        return any(map(_hides_tensors, x))
    if isinstance(x, dict):
        return any(map(_hides_tensors, x.values()))
    if isinstance(x, slice):
        return bool(leaves([x.start, x.stop, x.step], (Value, torch.Tensor)))
    atoms = (int, float, complex, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
    return not (x is None or x is Ellipsis or isinstance(x, (Value, *atoms)))
