"""A TracedProgram with chosen module calls as calls of shared functions.

Data flow:
    targets -> the calls that they name -> outline: main tape and function bodies -> TracedProgram and one Function each

This is what torch.onnx's `export_modules_as_functions` did, and not for ONNX alone: a call of a function is a
`torch.ops.higher_order.invoke_subgraph` node, as torch itself makes for repeated regions.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.fx

from scopetrace.errors import OutlineError
from scopetrace.ir.tape import Call, FunctionalTape
from scopetrace.outline import FunctionInput, FunctionOutput, Numbers, OutlinedBody, outline
from scopetrace.program.graph import FxLowering
from scopetrace.program.traced import ModuleCall, TracedProgram

Target = type | torch.nn.Module | str | Callable[[ModuleCall], bool]
REPEATED = "repeated"


class Function:
    """A function of an outlined program, which all equal module calls share."""

    def __init__(self, body: OutlinedBody, lowering: FxLowering, calls: list[ModuleCall]) -> None:
        self._body = body
        self.lowering = lowering
        """The body's graph, and the node of each of its values."""
        self.calls = calls
        """The module calls that became calls of it, in order; of calls inside functions, those of the first body."""

    @property
    def name(self) -> str:
        """The name of the modules' class; `Name_2` for the second distinct function of the class."""
        return self._body.name

    @property
    def domain(self) -> str:
        """The module path of the class."""
        return self._body.domain

    @property
    def module_type(self) -> type | None:
        """The class of the modules."""
        return self._body.module_type

    @property
    def identifier(self) -> str:
        """The second argument of its `invoke_subgraph` nodes: the name and a hash of the content."""
        return self._body.identifier

    @property
    def inputs(self) -> tuple[FunctionInput, ...]:
        """The signature: forward's arguments, then the module's parameters and buffers, then lifted values.

        All but those of kind `absent` are placeholders of the body, in this order.
        """
        return tuple(self._body.inputs)

    @property
    def outputs(self) -> tuple[FunctionOutput, ...]:
        """The tensors that forward returns, then new values of what it changes, then other values read outside."""
        return tuple(self._body.outputs)

    @functools.cached_property
    def graph_module(self) -> torch.fx.GraphModule:
        """The body as a GraphModule; it returns a tuple."""
        return self.lowering.graph_module()

    @property
    def graph(self) -> torch.fx.Graph:
        """The body's graph."""
        return self.lowering.graph

    def __str__(self) -> str:
        taken = ", ".join(f"{x.name}=None" if x.kind == "absent" else x.name for x in self.inputs)
        given = ", ".join(x.name.lstrip(".") or "result" for x in self.outputs)
        return f"{self.domain}::{self.name}({taken}) -> ({given})"

    def __repr__(self) -> str:
        return f"<Function {self}: {len(self.calls)} calls>"


@dataclasses.dataclass
class OutlinedFunctions:
    """A program in which chosen module calls are `invoke_subgraph` calls of functions."""

    source: TracedProgram
    """The program that it was made from, in which all calls are inline."""
    program: TracedProgram
    """The main program, with calls of the functions."""
    bodies: Sequence[OutlinedBody]
    chosen: Sequence[Call]
    """The calls of `source` that became calls of functions."""

    @functools.cached_property
    def functions(self) -> tuple[Function, ...]:
        """The functions, callees before their callers."""
        lowerings = {p.tape: p for p in reversed(list(self.program.lowering.walk()))}
        calls = {id(call.record): call for call in self.program.calls}
        return tuple(
            Function(body, lowerings[body.tape], [calls[id(c)] for c in body.calls if id(c) in calls])
            for body in self.bodies
        )

    def function_of(self, node: torch.fx.Node) -> Function:
        """The function that an `invoke_subgraph` node calls. Raises OutlineError for other nodes."""
        found = next((f for f in self.functions if f.identifier == node.args[1]), None)
        if node.target is not torch.ops.higher_order.invoke_subgraph or found is None:
            raise OutlineError(f"{node.name} does not call a function of this program")
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph with its functions, then the write-back. Raises what a call of `source` raises."""
        return self.source.run(self._run_graph, *args, **kwargs)

    def _run_graph(self, *inputs: Any) -> Any:
        graph = self.program.graph_module
        self.program.boundary.state.refresh()
        tensors = [x for x in (*inputs, *graph.parameters()) if isinstance(x, torch.Tensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return self.source.graph_module(*inputs)  # torch has no eager backward of invoke_subgraph
        return graph(*inputs)


def outline_calls(source: TracedProgram, targets: Iterable[Target]) -> OutlinedFunctions:
    """Make functions of the calls that `targets` name; see `Trace.outline`. Raises OutlineError."""
    tape = source.tape
    if any(op.writes for op in tape.ops):
        raise OutlineError("the trace has ops that write: a function of it would have effects; use functional=True")
    if not isinstance(tape, FunctionalTape):
        tape = FunctionalTape.of(tape)
    numbers = Numbers(tape)
    named, repeated = _named(source, list(targets), numbers)
    chosen = list(dict.fromkeys([*named, *repeated]))
    outlined, bodies = outline(tape, chosen, source.forward)
    twice = {body.module_type for body in bodies if len(body.calls) > 1}
    kept = [call for call in chosen if call in named or call.module_type in twice]
    if kept != chosen:
        outlined, bodies = outline(tape, kept, source.forward)
    return OutlinedFunctions(source, source.with_tape(outlined), bodies, kept)


def _named(source: TracedProgram, targets: list[Any], numbers: Numbers) -> tuple[dict[Call, None], list[Call]]:
    """The calls that the targets name, and the candidates for the target "repeated".

    Raises OutlineError for a target that names no call, or one that cannot be a function.
    """
    found: dict[Call, None] = {}
    calls = _outside_bodies(source)
    for target in targets:
        if isinstance(target, str) and target == REPEATED:
            continue
        matched = [call for call in calls if is_named(call, target)]
        if not matched and any(is_named(call, target) for call in source.calls):
            raise OutlineError(
                f"{_said(target)} is called only in bodies of torch.cond and its kind, whose calls stay inline; "
                "leave it out of the targets"
            )
        if not matched:
            raise OutlineError(f"{_said(target)} is no call of this trace; it has {_some(source.calls)}")
        found |= dict.fromkeys(call.record for call in matched if not call.is_leaf and call.raised is None)
    for call in found:
        for number in numbers.lost(call):
            raise OutlineError(
                f"{call.scope}: {number}, a number that is made in this call, is used outside, though no result has "
                f"it as a size; leave {call.scope.type_name} out of the targets"
            )
    return found, _perhaps_repeated(source, numbers) if any(
        isinstance(t, str) and t == REPEATED for t in targets
    ) else []


def _outside_bodies(source: TracedProgram) -> list[ModuleCall]:
    """The calls outside of bodies of higher-order ops: a body may not run, so calls in it stay inline."""
    own = set(source.tape.calls)
    return [call for call in source.calls if call.record in own]


def _perhaps_repeated(source: TracedProgram, numbers: Numbers) -> list[Call]:
    """The calls of classes that are called several times, without calls that cannot be functions."""
    calls = [call for call in _outside_bodies(source) if call.module_type is not None and call.parent]
    calls = [call for call in calls if not call.is_leaf and call.raised is None and not numbers.lost(call.record)]
    times = Counter(call.module_type for call in calls)
    return [call.record for call in calls if times[call.module_type] > 1]


def is_named(call: ModuleCall, target: Any) -> bool:
    """Whether a class, module, fqn pattern or predicate names a call. Raises OutlineError for other targets."""
    if isinstance(target, type):
        own = call.module_type if call.module is None else type(call.module)
        return own is not None and issubclass(own, target)
    if isinstance(target, torch.nn.Module):
        return call.module is target
    if isinstance(target, str):
        return call.fqn is not None and fnmatch.fnmatchcase(call.fqn, target)
    if callable(target):
        return bool(target(call))
    raise OutlineError(
        f"{target!r} is a {type(target).__name__}; give a module class, a module of the model, a pattern of names "
        "such as 'layers.*.attn', a predicate on a ModuleCall, or \"repeated\""
    )


def _said(target: Any) -> str:
    if isinstance(target, torch.nn.Module):
        return f"this {type(target).__name__}"
    return target.__name__ if isinstance(target, type) else repr(target)


def _some(calls: list[ModuleCall]) -> str:
    names = [call.fqn for call in calls if call.fqn]
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "") if names else "no module calls but the root"
