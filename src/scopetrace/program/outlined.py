"""A TracedProgram with chosen module calls as calls of shared functions.

Data flow:
    targets -> the calls that they name -> outline: main tape and function bodies -> TracedProgram and one Function each

This is what torch.onnx's `export_modules_as_functions` did, and not for ONNX alone: a call of a function is a
`torch.ops.higher_order.invoke_subgraph` node, as torch itself makes for repeated regions.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.fx

from scopetrace._compat.ops import building, in_large_stack
from scopetrace.containers.structure import Removed, leaves
from scopetrace.errors import OutlineError, TargetWarning
from scopetrace.ir.selection import Target, is_named, target_text
from scopetrace.ir.tape import Call, FunctionalTape
from scopetrace.outline.cut import Outlining
from scopetrace.outline.interface import Interfaces
from scopetrace.outline.signature import FunctionSignature, OutlinedBody
from scopetrace.program.edits import Reading
from scopetrace.program.graph import FxLowering
from scopetrace.program.selection import near_calls
from scopetrace.program.traced import ModuleCall, TracedProgram

OutlineTarget = Target | bool
"""What names module calls, or one of the following."""
REPEATED = "repeated"
"""Every class of which at least two calls are equal."""
OUTERMOST = "layers"
"""The same, but no call inside another one."""
EVERY = True
"""Every call of a module inside the model that can be a function."""
GENERAL: tuple[OutlineTarget, ...] = (REPEATED, OUTERMOST, EVERY)
"""The targets that name calls by a rule."""


class Function(FunctionSignature):
    """A function of an outlined program, which all equal module calls share."""

    def __init__(self, body: OutlinedBody, program: OutlinedTrace, calls: list[ModuleCall]) -> None:
        super().__init__(body.name, body.domain, body.module_type, body.identifier, body.inputs, body.outputs)
        self._tape, self._program, self.key, self.label = body.tape, program, body.key, body.label
        self.calls = calls
        """The module calls that became calls of it, in order; of calls inside functions, those of the first body."""

    @functools.cached_property
    def lowering(self) -> FxLowering:
        """The body's graph, and the node of each of its values: the first lowering of several."""
        return next(part for part in self._program.lowering.walk() if part.tape is self._tape)

    @functools.cached_property
    def graph_module(self) -> torch.fx.GraphModule:
        """The body as a GraphModule; it returns a tuple."""
        return self.lowering.graph_module()

    @property
    def graph(self) -> torch.fx.Graph:
        """The body's graph."""
        return self.lowering.graph

    def __repr__(self) -> str:
        return f"<Function {self.domain}::{self.name}: {len(self.calls)} calls>"


class OutlinedTrace(TracedProgram):
    """A program in which chosen module calls are `invoke_subgraph` calls of functions.

    Attributes:
        source: the program that it was made from, in which all calls are inline.
        chosen: the calls of `source` that became calls of functions.
    """

    def __init__(
        self, source: TracedProgram, tape: FunctionalTape, bodies: list[OutlinedBody], chosen: list[Call]
    ) -> None:
        super().__init__(source.recorded, tape, source.model)
        self.source = source
        self.chosen = chosen
        self._bodies = bodies

    @functools.cached_property
    def functions(self) -> tuple[Function, ...]:
        """The functions, callees before their callers."""
        calls = {id(call.record): call for call in self.all_calls}
        return tuple(
            Function(body, self, [calls[id(c)] for c in body.calls if id(c) in calls]) for body in self._bodies
        )

    def _with_reading(self, reading: Reading) -> TracedProgram:
        assert isinstance(reading.new, FunctionalTape)
        bodies = [
            dataclasses.replace(b, tape=reading.replacements[b.tape], calls=[reading.calls[c] for c in b.calls])
            for b in self._bodies
            if b.tape in reading.replacements
        ]
        return OutlinedTrace(self.source, reading.new, bodies, self.chosen)

    def run(self, graph: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As a call of `source`, with its graph, or another one that does what the graph of this program does."""
        program, is_unchanged = self.current, graph is self.graph_module
        # torch has no eager backward of calls of functions: they run inline
        if program.tape.edited:
            return super().run(program.without_regions().graph_module if is_unchanged else graph, *args, **kwargs)
        return self.source(*args, **kwargs) if is_unchanged else self.run_compiled(graph, *args, **kwargs)

    def run_compiled(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As `run`, with a function that does what the graph did when this program was made."""
        if self.tape.edited:
            return super().run(run, *args, **kwargs)
        self.boundary.state.refresh()
        if torch.is_grad_enabled() != self.tape.grad:
            # refuses bodies of functions that switch autograd: in the source, where they are inline, no node may do so
            self.in_other_grad_mode(run)
        return self.source.run(run, *args, **kwargs)


def outline_calls(
    source: TracedProgram,
    targets: Iterable[OutlineTarget | Call],
    label: Callable[[ModuleCall], Any] | None = None,
    *,
    nested: bool = True,
) -> OutlinedTrace:
    """Make functions of the calls that `targets` are or name; see `Trace.outline`. Raises OutlineError.

    Calls with different values of `label` share no function; `Function.label` is that of its calls. Without `nested`,
    calls inside a function are part of its body.
    """
    with building():
        return in_large_stack(_outlined, source.without_regions(), list(targets), label, nested)


def function_of_call(call: ModuleCall) -> Function:
    """The function that a call becomes where it alone does. Raises OutlineError."""
    program, place = call.program, (call.scope.path, call.index)
    source = program.source if isinstance(program, OutlinedTrace) else program
    functions = outline_calls(source, [lambda c: (c.scope.path, c.index) == place]).functions
    if not functions:
        raise OutlineError(f"{call.scope} is a leaf, or raised: it can be no function")
    return functions[0]


def warn_of_rules(source: TracedProgram, targets: Iterable[Any], stacklevel: int) -> None:
    """Warn of targets that name calls by a rule and that are names of calls as well."""
    rules = [target for target in targets if isinstance(target, str) and target in GENERAL]
    for call in source.calls if rules else ():
        if call.fqn in rules and call.index == 0:
            warnings.warn(
                f"{call.fqn!r} is the rule that takes equal layers, not the module call of that name: for this one, "
                f"give the module, or its scope path {call.scope.path!r}",
                TargetWarning,
                stacklevel=stacklevel,
            )


def _outlined(
    source: TracedProgram, wanted: list[Any], label: Callable[[ModuleCall], Any] | None, nested: bool
) -> OutlinedTrace:
    tape = source.tape
    if any(op.writes for op in tape.ops):
        raise OutlineError("the trace has ops that write: a function of it would have effects; use functional=True")
    if not isinstance(tape, FunctionalTape):
        tape = FunctionalTape.of(tape)
    interfaces = Interfaces(tape, source.forward)
    named, kept = _named(source, wanted, interfaces)
    if EVERY not in wanted:
        kept = (_layers if OUTERMOST in wanted else _repeated)(kept, named, interfaces)
    chosen = set(kept)
    if not nested:
        kept = [call for call in kept if chosen.isdisjoint(_around(call))]
    labels = {} if label is None else {c.record: label(c) for c in source.all_calls if c.record in chosen}
    outlining = Outlining(interfaces, interfaces.numbered(kept, labels), labels)
    return OutlinedTrace(source, outlining.run(), outlining.functions, kept)


def _repeated(kept: list[Call], named: set[Call], interfaces: Interfaces) -> list[Call]:
    """The calls that are named, or of a class of which two are equal."""
    numbers = interfaces.numbered(kept)
    count = Counter(numbers.values())
    groups = {c.group for c in kept if count[numbers[c]] > 1}
    return [c for c in kept if c in named or c.group in groups]


def _layers(kept: list[Call], named: set[Call], interfaces: Interfaces) -> list[Call]:
    """As `_repeated`, without calls inside of others, or around ones of their own class.

    The latter are as an `nn.Sequential` of layers that have such inside.
    """
    outer = {around for call in kept for around in _around(call) if around.group == call.group}
    by_class: dict[type | str | None, list[Call]] = {}
    for call in sorted(kept, key=lambda c: c.start - c.stop):  # the longest first: what is inside is not looked at
        by_class.setdefault(call.group, []).append(call)
    left = named | (set(kept) - outer)
    for calls in by_class.values():
        again = {c for c in calls if c in left and c not in outer}
        if len({interfaces.of(c).number for c in again}) < len(again):
            left = {c for c in left if c in named or again.isdisjoint(_around(c))}
    return _repeated([c for c in kept if c in left], named, interfaces)


def _around(call: Call) -> Iterator[Call]:
    return itertools.islice(call.ancestors(), 1, None)


def _named(source: TracedProgram, targets: list[Any], interfaces: Interfaces) -> tuple[set[Call], list[Call]]:
    """The calls that the targets name; these and, where a target names no class or module, all that could be functions.

    Raises OutlineError for a target that names no call, or one that cannot be a function.
    """
    outermost = set(source.tape.calls)  # a body of a higher-order op may not run, so calls in it stay inline
    all_calls = [call for call in source.all_calls if call.record in outermost]
    calls = [call for call in all_calls if call.record.is_module]
    records = {target for target in targets if isinstance(target, Call)}
    matches = {call for call in all_calls if call.record in records}
    for target in targets:
        if isinstance(target, Call):
            continue
        if target in GENERAL:
            if not tells_calls(source):
                raise OutlineError(
                    f"{target!r} names calls of modules, and nothing tells which there were: the trace is of a "
                    "function that calls none, or of a graph whose nodes have no nn_module_stack, as those under "
                    "no_grad after run_decompositions(): trace the model, or the program before, and decompose() that"
                )
            continue
        matched = [call for call in calls if is_named(call, target)]
        if not matched and isinstance(target, str):  # no module has the name: user scopes and regions
            matched = [call for call in all_calls if call.record.start < call.record.stop and is_named(call, target)]
        if not matched and any(is_named(call, target) for call in source.calls):
            raise OutlineError(
                f"{target_text(target)} is called only in bodies of torch.cond and its kind, whose calls stay inline; "
                "leave it out of the targets"
            )
        if not matched:
            near = near_calls(target, source.calls, (REPEATED, OUTERMOST))
            raise OutlineError(f"{target_text(target)} is no call of this trace; {near}")
        matches.update(matched)
    calls = [call for call in all_calls if not call.is_leaf and call.raised is None]
    named = [call.record for call in calls if call in matches]
    for record in named:
        obstacle = _obstacle(record, interfaces)
        if obstacle is not None:
            raise OutlineError(f"{record.scope}: {obstacle}")
    by_rule = _possible(calls, interfaces, EVERY in targets) if any(t in GENERAL for t in targets) else []
    return set(named), list(dict.fromkeys([*named, *by_rule]))


def tells_calls(source: TracedProgram) -> bool:
    """Whether the trace has module calls, or is of a module that calls none.

    torch's `run_decompositions` forgets the modules of ops in a block under no_grad, which it runs as generated code.
    """
    root, text = source.calls[0].record, 'File "<eval_with_key>'
    if any(op.call is root and isinstance(op.frames, str) and op.frames.startswith(text) for op in source.tape.ops):
        return max(Counter(call.record.group for call in source.all_calls).values()) > 1
    is_model = root.module_type is not None and not root.module_type.__qualname__.startswith("GraphModule")
    return is_model or len(source.all_calls) > 1


def _possible(calls: list[ModuleCall], interfaces: Interfaces, once: bool) -> Iterator[Call]:
    """The calls inside the model that can be functions; those of a class that is called `once`, or of others only."""
    records = [call.record for call in calls if call.record.parent is not None]
    records = [record for record in records if record.is_region or record.module_type is not None]
    times = Counter(record.group for record in records)
    for record in records:
        if (once or times[record.group] > 1) and _obstacle(record, interfaces) is None:
            yield record


def _obstacle(call: Call, interfaces: Interfaces) -> str | None:
    """Why a call cannot be a function, and what to do; None where it can."""
    if leaves((call.args, call.kwargs, call.outputs), Removed):
        return "an edit of the graph removed what this call took or gave; leave it out of the targets"
    for number in interfaces.lost_numbers(call):
        return (
            f"{number}, a number that is made in this call, is used outside, though no result has it as a size; "
            f"leave {call.scope.type_name or call.scope.name} out of the targets"
        )
    return None
