"""Recording a torch-level graph at ATen level, and which stretch of the tape each of its nodes made."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.fx

from scopetrace._compat.dispatch import autocast_enabled, in_transform
from scopetrace.containers.structure import leaves, map_structure
from scopetrace.ir.scopes import Scope
from scopetrace.ir.tape import Op, RecordedTape, Value
from scopetrace.record import Recording, retraced
from scopetrace.record.model import Model
from scopetrace.record.retrace import Assumptions
from scopetrace.torch_level.places import root_scope, scope_of_node
from scopetrace.torch_level.twins import PureCall, pure_call


@dataclasses.dataclass
class Trial:
    """What the pure form of a node did: the ops that it put on the tape, which have been taken off again."""

    call: PureCall
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ops: list[Op]
    outputs: Any
    before: list[Value]
    """The tensors that the node is to write, before it did."""
    after: list[Value]
    """The same, afterwards."""


@dataclasses.dataclass
class Stretch:
    """A node of the graph, and the ops that it made: `tape.ops[start:stop]`."""

    node: torch.fx.Node
    target: Any
    """As the node's, but a module itself for its name."""
    start: int
    stop: int = -1
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: Any = None
    known: bool = False
    """Whether arguments and outputs are those of the node, and nothing around it changes what it does."""
    grad: bool = True
    trial: Trial | None = None
    scope: Scope | None = None
    """Where the node comes from."""


def record_steps(
    gm: torch.fx.GraphModule, args: tuple[Any, ...], *, with_trials: bool
) -> tuple[RecordedTape, list[Stretch]]:
    """The ATen tape of `gm(*args)`, and its nodes. Raises what recording raises.

    Its ops have the scopes and the stack traces of the nodes. With trials, each node that has a
    pure form knows what that does.
    """
    return retraced(lambda assumptions: _record(gm, args, assumptions, with_trials))


def _record(
    gm: torch.fx.GraphModule, args: tuple[Any, ...], assumptions: Assumptions, with_trials: bool
) -> tuple[RecordedTape, list[Stretch]]:
    stepped = _Stepped(gm)

    def run_body(body: torch.fx.GraphModule, args: Any) -> Any:
        return _Body(body, recording).run(*args)

    recording = Recording(Model(stepped), root_scope(gm), assumptions, run_graph=run_body)
    stepper = stepped.stepper = _Stepper(gm, recording, with_trials=with_trials)
    return recording.run(stepped, gm, args, {}), stepper.stretches


class _Stepped(torch.nn.Module):
    """The modules and tensors of a graph module, the very same, run node by node."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        super().__init__()
        own = {name: t for name, t in gm.__dict__.items() if isinstance(t, torch.Tensor)}
        tables = {name: gm.__dict__[name] for name in ("_parameters", "_buffers", "_modules")}
        self.__dict__.update(own | tables)
        self.training = gm.training
        self.stepper: _Stepper | None = None

    def forward(self, *args: Any) -> Any:
        assert self.stepper is not None
        return self.stepper.run(*args)


class _Stepper(torch.fx.Interpreter):
    """Runs the graph and notes what each node did."""

    def __init__(self, gm: torch.fx.GraphModule, recording: Recording, *, with_trials: bool) -> None:
        super().__init__(gm)
        self.builder = recording.builder
        self.values = recording.values
        self.with_trials = with_trials
        self.stretches: list[Stretch] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        args, kwargs = tuple(_plain(a) for a in args), {name: _plain(a) for name, a in kwargs.items()}
        target: Any = self.fetch_attr(str(n.target)) if n.op == "call_module" else n.target
        stretch = Stretch(n, target, 0, grad=torch.is_grad_enabled())
        stretch.known = not in_transform() and not autocast_enabled() and self._learn(stretch, args, kwargs)
        if stretch.known and self.with_trials:
            stretch.trial = self._try(n.op, target, args, kwargs)
        tape = self.builder.tape
        stretch.scope, stretch.start = scope_of_node(n, tape.root), len(tape.ops)
        with self.builder.from_node(tape.root, stretch.scope, n.stack_trace):
            out = _run(n.op, target, args, kwargs)
        stretch.stop = len(tape.ops)
        stretch.known = stretch.known and not in_transform()
        if stretch.known:
            stretch.outputs = self._values(out)
            stretch.known = not _hides_tensors(stretch.outputs)
            if stretch.trial is not None:
                stretch.trial.after = [self.values.value_of(t) for t in stretch.trial.call.written]
        self.stretches.append(stretch)
        return out

    def _learn(self, stretch: Stretch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        stretch.args, stretch.kwargs = self._values(args), self._values(kwargs)
        return not _hides_tensors((stretch.args, stretch.kwargs))

    def _values(self, x: Any) -> Any:
        return map_structure(self.values.value_of, x, torch.Tensor)

    def _try(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trial | None:
        """Run the pure form, as far as there is one, and take what it did off the tape."""
        call = pure_call(kind, target, args, kwargs)
        if call is None:
            return None
        before = [self.values.value_of(t) for t in call.written]
        tape = self.builder.tape
        mark, calls = len(tape.ops), len(tape.calls)
        try:
            out = _run(call.kind, call.target, call.args, call.kwargs)
            args, kwargs = self._values(call.args), self._values(call.kwargs)
            return Trial(call, args, kwargs, _own(tape.ops[mark:]), self._values(out), before, [])
        except Exception:  # not callable like this, so not the pure form
            return None
        finally:
            tape.ops[mark:] = [op for op in tape.ops[mark:] if op.kind == "get_attr"]
            del tape.calls[calls:]


class _Body(torch.fx.Interpreter):
    """Runs a graph inside of the graph."""

    def __init__(self, gm: torch.fx.GraphModule, recording: Recording) -> None:
        super().__init__(gm)
        self.builder = recording.builder

    def run_node(self, n: torch.fx.Node) -> Any:
        root = self.builder.state.current_scope
        with self.builder.from_node(root, scope_of_node(n, root), n.stack_trace):
            return super().run_node(n)


def _run(kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kind == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def _own(ops: list[Op]) -> list[Op]:
    return [op for op in ops if op.kind != "get_attr"]


def _plain(x: Any) -> Any:
    """torch.fx's immutable containers as Python's."""
    if isinstance(x, list):
        return [_plain(item) for item in x]
    if isinstance(x, dict):
        return {key: _plain(item) for key, item in x.items()}
    return tuple(_plain(item) for item in x) if type(x) is tuple else x


def _hides_tensors(x: Any) -> bool:
    """Whether tensors, or objects that are no values, are where a tape op cannot have them."""
    if isinstance(x, (list, tuple)):
        return any(map(_hides_tensors, x))
    if isinstance(x, dict):
        return any(map(_hides_tensors, x.values()))
    if isinstance(x, slice):
        return bool(leaves([x.start, x.stop, x.step], (Value, torch.Tensor)))
    atoms = (int, float, complex, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
    return not (x is None or x is Ellipsis or isinstance(x, (Value, *atoms)))
