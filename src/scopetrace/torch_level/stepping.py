"""The recording of a torch-level graph at ATen level, with the ops that each of its nodes made.

Data flow:
    GraphModule -> run node by node under the recorder -> RecordedTape, and a NodeRecord for each node
    node that mutates -> its pure form, run on trial just before it -> Trial, whose ops are taken off the tape
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
from scopetrace.torch_level.pure_calls import pure_call
from scopetrace.torch_level.step import NodeCall, OpTemplate, Trial


@dataclasses.dataclass
class NodeRecord(NodeCall):
    """A node of the graph, and the ops that it made: `tape.ops[start:stop]`."""

    _: dataclasses.KW_ONLY
    node: torch.fx.Node
    scope: Scope
    """The module scope that the node carries."""
    grad: bool
    """Whether autograd was on."""
    known: bool
    """Whether its arguments and outputs hold all its tensors, and no transform or autocast changes what it does."""
    trial: Trial | None = None
    """Of a known node that mutates and has a pure form."""
    start: int = 0
    stop: int = 0


def record_steps(
    gm: torch.fx.GraphModule, args: tuple[Any, ...], *, with_trials: bool
) -> tuple[RecordedTape, list[NodeRecord]]:
    """The ATen tape of `gm(*args)`, and its nodes. Raises what recording raises.

    Its ops have the scopes and the stack traces of the nodes. With trials, each node that has a
    pure form knows what that does.
    """

    def attempt(assumptions: Assumptions) -> tuple[RecordedTape, list[NodeRecord]]:
        recording = Recording(Model(gm), root_scope(gm), assumptions)
        stepper = _Stepper(gm, recording, with_trials=with_trials)
        return recording.run(stepper.run, gm, args, {}).tape, stepper.nodes

    return retraced(attempt)


class _Stepper(torch.fx.Interpreter):
    """Runs the graph and notes what each node did."""

    def __init__(self, gm: torch.fx.GraphModule, recording: Recording, *, with_trials: bool) -> None:
        super().__init__(gm)
        self.builder = recording.builder
        self.values = recording.values
        self.with_trials = with_trials
        self.nodes: list[NodeRecord] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        operands = [_plain(x) for x in self.fetch_args_kwargs_from_env(n)]
        step = OpTemplate(n.op, self.fetch_attr(str(n.target)) if n.op == "call_module" else n.target)
        tape, grad = self.builder.tape, torch.is_grad_enabled()
        known = not in_transform() and not autocast_enabled()
        record = NodeRecord(step, (), {}, node=n, scope=scope_of_node(n, tape.root), grad=grad, known=known)
        self.nodes.append(record)
        if record.known:
            record.args, record.kwargs = self._values(operands)
            record.known = not _hides_tensors((record.args, record.kwargs))
        if record.known and self.with_trials:
            record.trial = self._try(step, *operands)
        record.start = len(tape.ops)
        with self.builder.from_node(tape.root, record.scope, n.stack_trace):
            out = step(*operands[0], **operands[1])
        record.stop = len(tape.ops)
        if record.known and not in_transform():
            record.outputs = self._values(out)
        record.known = record.known and not in_transform() and not _hides_tensors(record.outputs)
        if record.known and record.trial is not None:
            record.trial.after = self._values(list(record.trial.written))
        return out

    def _values(self, x: Any) -> Any:
        return map_structure(self.values.value_of, x, torch.Tensor)

    def _try(self, step: OpTemplate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trial | None:
        """Run the pure form, as far as there is one, and take what it did off the tape."""
        trial = pure_call(step, args, kwargs)
        if trial is None:
            return None
        trial.before = self._values(list(trial.written))
        tape = self.builder.tape
        mark, calls = len(tape.ops), len(tape.calls)
        try:
            trial.outputs = self._values(trial.step(*trial.args, **trial.kwargs))
            trial.args, trial.kwargs = self._values((trial.args, trial.kwargs))
            trial.ops = [op for op in tape.ops[mark:] if op.kind != "get_attr"]
            return trial
        except Exception:  # not callable like this, so not the pure form
            return None
        finally:
            tape.ops[mark:] = [op for op in tape.ops[mark:] if op.kind == "get_attr"]
            del tape.calls[calls:]


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
