"""What the ONNX model gives: the model's results, then the new values of what the model changes.

The write-back program of the trace in terms of values: a result that is an input is that value, a view of another value
is made anew, and where an input was changed before, it is the changed one that is viewed.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from scopetrace._compat.schema import schema_of
from scopetrace._compat.symbols import Symbolic
from scopetrace.containers.objects import tensor_holders
from scopetrace.containers.structure import leaves_with_path
from scopetrace.errors import OnnxExportError
from scopetrace.ir import meta
from scopetrace.ir.tape import ProgramTape, Value
from scopetrace.ir.write_back import (
    ChangeShape,
    FromGraph,
    GraphInput,
    SameAs,
    Source,
    StateRef,
    StridedStep,
    Update,
    ViewOf,
    ViewStep,
    WriteBack,
)
from scopetrace.lower.onnx.naming import result_name


class Results:
    """The outputs of a program."""

    def __init__(self, tape: ProgramTape, program: WriteBack | None) -> None:
        self._tape, self._program = tape, program

    @property
    def _changed(self) -> list[GraphInput | StateRef]:
        updates = [] if self._program is None else self._program.updates
        return list(dict.fromkeys(update.target for update in updates))

    def names(self) -> list[str]:
        """Names of the outputs, made of the keys of the result: `logits`, `output_0`; `fc.count_updated` for state."""
        found = [
            result_name(path)
            for path, leaf in leaves_with_path(self._tape.outputs)
            if isinstance(leaf, (Value, *Symbolic))
        ]
        changed = [target.name for target in self._changed]
        changed += [f"{w.fqn}.{w.name}" if w.fqn else w.name for w in self._tape.attribute_writes]
        return [*found, *(f"{name}_updated" for name in changed)]

    def state(self) -> set[str]:
        """The names of the model's tensors that it changes in place."""
        return {target.name for target in self._changed if isinstance(target, StateRef)}

    def of_run(self, result: Any, inputs: Sequence[torch.Tensor], held: Callable[[str], torch.Tensor]) -> list[Any]:
        """The values of the outputs after a run of the model: from its result, its inputs, and its own tensors."""
        given = dict(leaves_with_path(result, "", tensor_holders(result)))
        kept = [p for p, leaf in leaves_with_path(self._tape.outputs) if isinstance(leaf, (Value, *Symbolic))]
        changed = [inputs[t.index] if isinstance(t, GraphInput) else held(t.name) for t in self._changed]
        bound = [getattr(w.module, w.name) for w in self._tape.attribute_writes]
        return [*(given[path] for path in kept), *changed, *bound]

    def values(self, values: Sequence[Any], inputs: Sequence[Any], held: Callable[[str], Any]) -> list[Any]:
        """The outputs, from what the graph gives, its inputs, and a way to the tensors that it holds.

        Adds ops to the graph for views. All are nodes, or plain numbers.
        """
        if self._program is None:
            return list(values)
        count = len(values) - len(self._tape.attribute_writes)
        machine = _Machine(values[:count], inputs, held)
        for update in self._program.updates:
            machine.now[update.target] = machine.updated(update)
        for source in self._program.results:
            machine.results.append(machine.get(source))
        return [*machine.results, *(machine.now[t] for t in self._changed), *values[count:]]


class _Machine:
    def __init__(self, values: Sequence[Any], inputs: Sequence[Any], held: Callable[[str], Any]) -> None:
        self._values, self._inputs, self._held = values, inputs, held
        self.now: dict[GraphInput | StateRef, Any] = {}
        self.results: list[Any] = []

    def get(self, source: Source) -> Any:
        if isinstance(source, FromGraph):
            return self._values[source.index]
        if isinstance(source, SameAs):
            return self.results[source.index]
        if isinstance(source, ViewOf):
            view = self.get(source.base)
            for step in source.steps:
                view = self._view(view, step)
            return view
        if source in self.now:
            return self.now[source]
        return self._inputs[source.index] if isinstance(source, GraphInput) else self._held(source.name)

    def _view(self, base: torch.fx.Node, step: ViewStep | StridedStep) -> torch.fx.Node:
        if isinstance(step, ViewStep):
            out = _call(base, step.op, step.args, step.kwargs)
            return out if step.slot is None else _call(out, operator.getitem, (step.slot,), {})
        return _call(base, torch.ops.aten.as_strided.default, (step.size, step.stride, step.shift), {})

    def updated(self, update: Update) -> Any:
        """The value of an input after an update."""
        if not isinstance(update, ChangeShape):
            return self.get(update.value)
        op = update.step.op
        name = schema_of(op).op_name
        twin = getattr(torch.ops.aten, name.removesuffix("_"), None)
        if twin is None or "resize" in name:
            raise OnnxExportError(
                f"the model changes {update.target} with {op}, which has no ONNX form: change a copy of it instead"
            )
        return _call(self.get(update.target), twin.default, update.step.args, update.step.kwargs)


def _call(base: torch.fx.Node, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.fx.Node:
    """An op on a value, at the end of the graph."""
    node = base.graph.call_function(op, (base, *args), kwargs)
    value = meta.value(base)
    mode = value.fake_mode if isinstance(value, torch.Tensor) else contextlib.nullcontext()  # type: ignore[attr-defined]
    with mode, torch.no_grad():
        meta.set_value(node, op(value, *args, **kwargs))
    return node
