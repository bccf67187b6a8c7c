"""Programs whose repeated module calls are calls of shared functions.

The successor of torch.onnx's `export_modules_as_functions`, for every consumer of graphs: calls are the
`torch.ops.higher_order.invoke_subgraph` nodes that torch itself uses for repeated regions.
"""

from __future__ import annotations

import fnmatch
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from scopetrace.errors import OutlineError
from scopetrace.ir.tape import Call
from scopetrace.ir.write_back import WriteBack
from scopetrace.outline import FunctionInput, FunctionOutput, Numbers, OutlinedBody, outline
from scopetrace.program.calls import ModuleCall
from scopetrace.program.graph import FxLowering

if TYPE_CHECKING:
    from scopetrace.api.trace import Trace

Target = type | torch.nn.Module | str | Callable[[ModuleCall], bool]
REPEATED = "repeated"


class Function:
    """One function of an outlined program: equal module calls have one."""

    def __init__(self, body: OutlinedBody, program: FxLowering, calls: list[ModuleCall]) -> None:
        self._body = body
        self._program = program
        self.calls = calls
        """The module calls that it stands for, in order; nested ones in the first body that makes them."""

    @property
    def name(self) -> str:
        """The class's name, and `Name_2` for the second distinct function of the class."""
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
        """The second argument of the `invoke_subgraph` nodes: equal where the bodies are."""
        return self._body.identifier

    @property
    def inputs(self) -> tuple[FunctionInput, ...]:
        """The signature: forward's arguments in order, the module's parameters and buffers in order, what else is read.

        All but the absent ones are placeholders of the body, in this order.
        """
        return tuple(self._body.inputs)

    @property
    def outputs(self) -> tuple[FunctionOutput, ...]:
        """The tensors that forward returns, in order, then new values of what it changed, then others read outside."""
        return tuple(self._body.outputs)

    @functools.cached_property
    def graph_module(self) -> torch.fx.GraphModule:
        """The body. It returns a tuple."""
        return self._program.graph_module()

    @property
    def graph(self) -> torch.fx.Graph:
        """The body's graph, whose nodes have scopes."""
        return self._program.graph

    @property
    def program(self) -> FxLowering:
        """The body's graph, and the node of each of its values."""
        return self._program

    def __str__(self) -> str:
        taken = ", ".join(f"{x.name}=None" if x.kind == "absent" else x.name for x in self.inputs)
        given = ", ".join(x.name.lstrip(".") or "result" for x in self.outputs)
        return f"{self.domain}::{self.name}({taken}) -> ({given})"

    def __repr__(self) -> str:
        return f"<Function {self}: {len(self.calls)} calls>"


class OutlinedProgram:
    """The program of a trace with chosen module calls as functions. It runs and prints."""

    def __init__(self, source: Trace, traced: Trace, bodies: Sequence[OutlinedBody], chosen: Sequence[Call]) -> None:
        self._source = source
        self._traced = traced
        self._bodies = bodies
        self.chosen = chosen
        """The calls of the source that became calls of functions."""

    @classmethod
    def of(cls, source: Trace, targets: Iterable[Target]) -> OutlinedProgram:
        """See `Trace.outline`."""
        tape = source.tape
        if any(op.writes for op in tape.ops):
            raise OutlineError("the trace has ops that write: a function of it would have effects; use functional=True")
        numbers, forward = Numbers(tape), source.root_function
        named, repeated = _named(source, list(targets), numbers)
        chosen = list(dict.fromkeys([*named, *repeated]))
        outlined, bodies = outline(tape, chosen, forward)
        twice = {body.module_type for body in bodies if len(body.calls) > 1}
        kept = [call for call in chosen if call in named or call.module_type in twice]
        if kept != chosen:
            outlined, bodies = outline(tape, kept, forward)
        return cls(source, source.with_tape(outlined), bodies, kept)

    @functools.cached_property
    def functions(self) -> tuple[Function, ...]:
        """The functions, callees before those that call them."""
        program = self._traced.program
        programs = {p.tape: p for p in reversed(list(program.walk()))}
        calls = {id(call.record): call for call in self._traced.calls}
        return tuple(
            Function(body, programs[body.tape], [calls[id(c)] for c in body.calls if id(c) in calls])
            for body in self._bodies
        )

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The main program, with an `invoke_subgraph` node for each call; equal calls share the submodule."""
        return self._traced.graph_module

    def function_of(self, node: torch.fx.Node) -> Function:
        """The function that an `invoke_subgraph` node of this program, or of a body, calls."""
        found = next((f for f in self.functions if f.identifier == node.args[1]), None)
        if node.target is not torch.ops.higher_order.invoke_subgraph or found is None:
            raise OutlineError(f"{node.name} does not call a function of this program")
        return found

    @property
    def calls(self) -> list[ModuleCall]:
        """The module calls of the main program and of each body, once."""
        return self._traced.calls

    @property
    def write_back(self) -> WriteBack | None:
        """As of the trace."""
        return self._source.write_back

    @property
    def traced(self) -> Trace:
        """The main program as a trace."""
        return self._traced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it: same results and same effects as the model. Raises InputMismatchError as the trace does."""
        return self._source.run(self._run_graph, *args, **kwargs)

    def _run_graph(self, *inputs: Any) -> Any:
        graph = self.graph_module
        self._traced.boundary.state.refresh()
        tensors = [x for x in (*inputs, *graph.parameters()) if isinstance(x, torch.Tensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return self._source.graph_module(*inputs)  # torch has no eager backward of invoke_subgraph
        return graph(*inputs)

    def inline(self) -> Trace:
        """The flat program: the trace that this one was made from."""
        return self._source

    def lint(self) -> None:
        """Check that graphs, scopes, calls and functions agree. Raises LintError with all that is wrong."""
        self._traced.lint()

    def print_readable(self, print_output: bool = True) -> str:
        """Print the functions and the main program as text, and return it."""
        text = str(self)
        if print_output:
            print(text)
        return text

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for function in self.functions:
            count = len(function.calls)
            yield f"{function}  # {count} call{'s' * (count != 1)}"
        yield str(self._traced)

    def __repr__(self) -> str:
        return f"<Outlined {self._traced.scope.path}: {len(self._bodies)} functions>"


def _named(source: Trace, targets: list[Any], numbers: Numbers) -> tuple[dict[Call, None], list[Call]]:
    """The calls that the targets name, and those that "repeated" asks about.

    Raises OutlineError for a target that names none, or that names one that cannot be a function.
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


def _outside_bodies(source: Trace) -> list[ModuleCall]:
    """The calls of the program itself. A body of `torch.cond` runs or not, and calls in it stay inline."""
    own = set(source.tape.calls)
    return [call for call in source.calls if call.record in own]


def _perhaps_repeated(source: Trace, numbers: Numbers) -> list[Call]:
    """The calls of classes with several calls, without those that cannot be functions."""
    calls = [call for call in _outside_bodies(source) if call.module_type is not None and call.parent]
    calls = [call for call in calls if not call.is_leaf and call.raised is None and not numbers.lost(call.record)]
    times = Counter(call.module_type for call in calls)
    return [call.record for call in calls if times[call.module_type] > 1]


def is_named(call: ModuleCall, target: Any) -> bool:
    """Whether a class, module, pattern or predicate names a call. Raises OutlineError for a target of another kind."""
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
