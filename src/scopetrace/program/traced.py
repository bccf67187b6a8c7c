"""`TracedProgram`: a recorded program and what is derived from it on demand.

Data flow:
    tape -> FxLowering (torch.fx graph) -> GraphModule
    tape's call records + graph -> one ModuleCall each
    tape + GraphModule -> CallBoundary: checks of a call's arguments, write-back of its effects

`api`, `lower`, `view` and outlining take this object. That a module call knows its arguments and outputs as graph
values is the idea of RFC-0015 in pytorch/rfcs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.fx

from scopetrace import files
from scopetrace._compat.decompositions import RuleOf, decomposition_rules
from scopetrace._compat.gradients import copying_saved
from scopetrace._compat.graph_module import (
    TracedGraphModule,
    dumps,
    has_hooks,
    is_profiling,
    look_up,
    method_of,
    parts_that_switch_grad,
    unwrapped,
    was_erased,
    without_grad_switches,
)
from scopetrace._compat.ops import building, is_op
from scopetrace._compat.questions import autocast_enabled
from scopetrace.containers.classes import with_fields, with_imports
from scopetrace.containers.structure import Removed, instantiate, leaves, leaves_with_path, without_argument_mutation
from scopetrace.errors import (
    ArgumentTypeError,
    EditError,
    ScopetraceError,
    SideEffectWarning,
    StateMismatchError,
    TraceFileError,
)
from scopetrace.formatting import html_table, short_repr
from scopetrace.functionalization.functionalizer import Functionalizer
from scopetrace.ir.guards import in_a_file
from scopetrace.ir.scopes import Scope, innermost_common, running_recorder
from scopetrace.ir.side_effects import refusal
from scopetrace.ir.tape import Call, FunctionalTape, ProgramTape, RecordedTape, Value, bind, checks_enabled, forward_of
from scopetrace.ir.verify import verify
from scopetrace.outline.signature import new_values, written_values
from scopetrace.program.boundary import CallBoundary, current_tensors, without_autocast
from scopetrace.program.compiled import GraphValues
from scopetrace.program.decompositions import decomposed
from scopetrace.program.dynamo import prepare
from scopetrace.program.edits import HeldTensors, Reading
from scopetrace.program.graph import FxLowering, call_position, forward_place, node_value, scope_path, typed
from scopetrace.program.inline import has_regions, inlined, without_regions
from scopetrace.program.mismatches import explained
from scopetrace.program.outputs import without_effects
from scopetrace.program.ranges import RangedRun

Program = TypeVar("Program", bound=ProgramTape)
Built = TypeVar("Built")


class _built(functools.cached_property[Built]):
    """A cached property of what graphs are made for, whose first access enters `building` before anything else.

    Up to Python 3.11 a cached property has one lock for all objects: a thread that holds it and waits for `building`
    would never get it from a thread that builds and asks for the same property. Where several threads ask at once,
    all get the first one's graph.
    """

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        with building():
            return super().__get__(instance, owner)


def functional_tape(recorded: RecordedTape) -> FunctionalTape:
    """The same program without an op that writes.

    It shares the ops of `recorded` where none of them writes, and autograd has freed none of them.

    Raises FunctionalizationError for what no functional op says, DynamicShapeError where one fixes a dynamic size.
    """
    with building():
        is_as_recorded = not (recorded.differentiated() or recorded.has_writes())
        tape = FunctionalTape.of(recorded) if is_as_recorded else Functionalizer(recorded).run()
    if tape.sizes is not None:
        tape.sizes.refuse_fixed()
    if checks_enabled():
        verify(tape, "functionalization")
    return tape


class Saved(NamedTuple):
    """A tensor that a module call keeps for its backward."""

    node: torch.fx.Node
    shape: tuple[int | torch.SymInt, ...]
    bytes: int | torch.SymInt

    @classmethod
    def among(cls, nodes: Iterable[torch.fx.Node]) -> list[Saved]:
        """Of each of the nodes whose value is a tensor."""
        tensors = [(n, t) for n in nodes if isinstance(t := node_value(n), torch.Tensor)]
        return [cls(n, tuple(t.shape), t.numel() * t.element_size()) for n, t in tensors]  # `nbytes` takes no symbols


class ModuleCall:
    """One call of a module in a trace. The first of `Trace.calls` is the call of the traced callable itself.

        for call in tr.calls:
            print(call.fqn, call.arguments, call.outputs)

    Tensors are nodes of the graph in these, everything else is the object itself. In `Function.calls` it may also be
    what a user scope or a function under `nested_compile_region` did.
    """

    def __init__(self, record: Call, program: TracedProgram, around: ModuleCall | None, position: int) -> None:
        self.program = program
        self.record = record
        """The record of the call on the tape."""
        self.fqn: str | None = record.fqn
        """The module's name, `"layers.0.attn"`; `""` for the root, None for a module outside the model's tree."""
        self.module: torch.nn.Module | None = record.module
        """The module itself; None for the root when a plain function was traced, and in a loaded trace."""
        self.module_type: type | None = record.module_type
        """The module's class; None for the root when a plain function was traced. torch makes a class for each
        parametrized module: those with the same base and parametrizations have one here."""
        self.index: int = record.index
        """0 for the first call of this module instance, 1 for its second."""
        self.scope: Scope = record.scope
        """The scope of the ops that run directly in this call."""
        self.is_leaf: bool = record.leaf
        """Whether the call was recorded as one op, because `leaf_modules=` named its module."""
        self.raised: BaseException | None = record.raised
        """The exception that ended this call and that an outer module caught; else None."""
        self.attributes: dict[str, Any] = record.attributes
        """The module's plain Python attributes when it was called (`eps`, `num_heads`, `training`)."""
        self.position = position
        """Where this call stands in `Trace.calls`."""
        self.parent = None if around is None else around.of_module
        """The call of a module in which this one was made; None for the root."""
        self.children: list[ModuleCall] = []
        """The calls of modules made directly in this one, in order."""
        self._inside: list[ModuleCall] = []
        if around is not None:
            around._inside.append(self)
        if self.parent is not None and record.is_module:
            self.parent.children.append(self)

    @property
    def of_module(self) -> ModuleCall:
        """This call, or for a user scope or region that of the module around it."""
        return self if self.record.is_module or self.parent is None else self.parent

    @property
    def _stop(self) -> int:
        return self._inside[-1]._stop if self._inside else self.record.position + 1

    @property
    def lowering(self) -> FxLowering:
        """The graph, or the subgraph of a higher-order op, that has the call's nodes; the outermost for a dead body."""
        return self.program.lowerings.get(self.record, self.program.lowering)

    @property
    def nodes(self) -> list[torch.fx.Node]:
        """The graph's nodes that this call and the calls inside it made, in order.

        For a call inside a body of `torch.cond` or another higher-order op, the nodes of the body's graph. A call that
        contains a cond has the cond's node, and not those of its bodies.
        """
        placed, positions = self.program.placed_nodes[self.lowering], range(self.record.position, self._stop)
        return [n for position, n in placed if position in positions and not was_erased(n)]

    @property
    def backward_nodes(self) -> list[torch.fx.Node]:
        """The graph's nodes of the backward of this call and of the calls inside it, in order."""
        places = ((forward_place(node), node) for node in self.lowering.graph.nodes)
        return [n for place, n in places if place is not None and self.record.position <= place[1] < self._stop]

    @property
    def saved(self) -> list[Saved]:
        """The tensors of the forward that the backward of this call and of the calls inside it reads, each once."""
        read = dict.fromkeys(n for node in self.backward_nodes for n in node.all_input_nodes)
        return Saved.among(n for n in read if forward_place(n) is None)

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """By parameter name of `forward`, what was passed, defaults included.

        Tensors and symbolic sizes are `torch.fx.Node`s; everything else is the Python object itself. `*args` and
        `**kwargs` are under their own names, a tuple and a dict.
        """
        return {name: self._with_objects(template) for name, template in self.argument_templates.items()}

    @functools.cached_property
    def argument_templates(self) -> dict[str, Any]:
        """As `arguments`, with an OpaqueContainer for each object that holds tensors and that pytree does not know."""
        lower = self.lowering.lower
        args = tuple(lower(a) for a in self.record.args)
        kwargs = {name: lower(a) for name, a in self.record.kwargs.items()}
        return bind(self._forward(), args, kwargs)

    @functools.cached_property
    def outputs(self) -> Any:
        """The returned structure, with `torch.fx.Node`s for tensors and symbolic sizes. None when the call raised."""
        return self._with_objects(self.output_template)

    def map_outputs(self, function: Callable[[torch.fx.Node], Any]) -> Any:
        """What it returned, in the model's own classes, with what `function` gives for each node in its place."""
        return instantiate(function, self.output_template, torch.fx.Node)

    @functools.cached_property
    def output_template(self) -> Any:
        """As `outputs`, with an OpaqueContainer for each object that holds tensors and that pytree does not know."""
        return self.lowering.lower(self.record.outputs)

    @functools.cached_property
    def mutated(self) -> dict[str, torch.fx.Node]:
        """By argument path or buffer name, the node of the new value of each tensor that the call changed in place."""
        forward, lowering = self._forward(), self.lowering
        if isinstance(self.program.tape, FunctionalTape):
            values = dict(new_values(self.record, forward))
        else:
            values = written_values(self.record, forward, lowering.tape)
        return {name: lowering.lower(value) for name, value in values.items()}

    def _with_objects(self, template: Any) -> Any:
        removed = leaves(template, Removed)
        if removed:
            names = ", ".join(r.name for r in removed)
            raise EditError(
                f"{self}: an edit of the graph removed {names}, which this call took or gave",
                module=self.scope.path,
                hint="ModuleCall.nodes has what is left of the call, argument_templates and output_template the rest",
            )
        return instantiate(lambda node: node, template, torch.fx.Node)

    def _forward(self) -> Callable[..., Any]:
        return forward_of(self.record, self.program.forward)

    if not TYPE_CHECKING:  # type checkers know what there is

        def __getattr__(self, name: str) -> Any:
            """What a name that people expect is called here, in an AttributeError."""
            instead = dict(name="fqn", path="scope.path", inputs="arguments", args="arguments", output="outputs")
            hint = f": write call.{instead[name]}" if name in instead else ""
            raise AttributeError(f"a ModuleCall has no {name!r}{hint}")

    def __repr__(self) -> str:
        index = f", index={self.index}" if self.index else ""
        other = "function" if self.record.is_module else self.scope.name
        name = self.module_type.__name__ if self.module_type else other
        return f"ModuleCall({self.fqn!r}, {name}{index})"

    def _repr_html_(self) -> str:  # for notebooks
        templates = [*self.argument_templates.items(), ("->", self.output_template), *self.attributes.items()]
        parts = [(name + path, leaf) for name, template in templates for path, leaf in leaves_with_path(template)]
        rows = [(name, typed(x) if isinstance(x, torch.fx.Node) else short_repr(x)) for name, x in parts]
        return html_table(rows, (repr(self), str(self.scope)))


class TracedProgram:
    """A program on a tape, with its graph, module calls, scopes and call boundary, each made when first used.

    Attributes:
        recorded: the ops as they ran, mutations included.
        tape: what the graph is made from: `recorded`, or the functional tape made from it.
        model: the traced module or function; None for a loaded program.
        was_called: whether this object was called.
    """

    def __init__(self, recorded: RecordedTape, tape: ProgramTape, model: Callable[..., Any] | None) -> None:
        self.recorded = recorded
        self.tape = tape
        self.model = model
        self.was_called = False
        self._without_switches: dict[str, Callable[..., Any]] = {}  # by code of the graph, the same in one grad mode

    @property
    def current(self) -> TracedProgram:
        """This program, or where its graph was edited, the program that the graph is now.

        That has the same GraphModule. Raises EditError for an edit that cannot be followed.
        """
        if "lowering" not in self.__dict__ or not self._is_edited():
            return self
        graph = inlined(self.graph_module)
        reading = Reading(self.lowering, self.graph_module, graph, self._held_tensors())
        program = self._with_reading(reading)
        if graph is self.graph_module.graph:
            reading.describe()
            program.__dict__.update(lowering=reading.lowering, graph_module=self.graph_module)
            for module in self.graph_module.modules():
                if isinstance(module, torch.fx.GraphModule):
                    module.recompile()
        return program

    def with_graph(self, graph_module: torch.fx.GraphModule) -> TracedProgram:
        """The program of a graph that a pass made from that of this one; see `Trace.with_graph`."""
        if not isinstance(graph_module, torch.fx.GraphModule):
            raise ArgumentTypeError(f"with_graph takes a torch.fx.GraphModule, not {type(graph_module).__name__}")
        return self._with_reading(Reading(self.lowering, graph_module, inlined(graph_module), self._held_tensors()))

    def _is_edited(self) -> bool:
        """Whether a graph is not as it was lowered, or the GraphModule holds other tensors or modules."""
        if self.lowering.is_edited(self.graph_module):
            return True
        held, tape = self._held_tensors(), self.tape
        known: tuple[Mapping[str, object], ...] = (tape.attributes, held.current, held.bound, tape.modules)
        names = {str(s.target) for s in self.lowering.states if s.op in ("get_attr", "call_module")}
        for name in names & {*tape.attributes, *tape.modules}:
            try:
                current = look_up(self.graph_module, name)
            except AttributeError:
                return True
            if all(current is not table.get(name) for table in known):
                return True
        return False

    def _held_tensors(self) -> HeldTensors:
        bound = self.boundary.state.bound if "boundary" in self.__dict__ else {}
        return HeldTensors(current_tensors(self.tape), bound)

    def _with_reading(self, reading: Reading) -> TracedProgram:
        tape = reading.new
        return TracedProgram(tape if isinstance(tape, RecordedTape) else self.recorded, tape, self.model)

    @property
    def reported(self) -> ProgramTape:
        """The tape whose writes and shared memory are those of a call."""
        return self.tape if self.tape.edited and self.tape.write_back is None else self.recorded

    @property
    def as_run(self) -> ProgramTape:
        """The ops as they ran, mutations included; of an edited graph, as they would run now."""
        return self.tape if self.tape.edited else self.recorded

    def with_tape(self, tape: ProgramTape) -> TracedProgram:
        """The same trace with another tape to make the graph from."""
        return TracedProgram(self.recorded, tape, self.model)

    def without_model(self) -> TracedProgram:
        """The same, which compares at a call what a loaded one does: no code, attributes or globals of the model."""
        tape = self.tape
        return self.with_tape(dataclasses.replace(tape, guards=in_a_file(tape.guards, tape.attributes.values())))

    def with_plain_outputs(self) -> TracedProgram:
        """The same, with `Fields` in place of results of classes that are not imported."""
        recorded = dataclasses.replace(self.recorded, outputs=with_fields(self.recorded.outputs))
        tape = dataclasses.replace(self.tape, outputs=with_fields(self.tape.outputs))
        return TracedProgram(recorded, tape, self.model)

    def with_real_classes(self) -> TracedProgram:
        """The same, where it was loaded with the real classes of arguments and results. Raises TraceFileError."""
        if self.model is not None:
            return self
        args, outputs = with_imports((self.tape.args, self.tape.outputs))
        return self.with_tape(dataclasses.replace(self.tape, args=args, outputs=outputs))

    @_built
    def lowering(self) -> FxLowering:
        """The torch.fx graph, and the node of each value of the tape."""
        return FxLowering(self.tape)

    @_built
    def graph_module(self) -> TracedGraphModule:
        """The graph as a GraphModule that holds the model's own tensors; see `Trace.graph_module`."""
        return self.lowering.graph_module()

    @_built
    def _unwrapped(self) -> Callable[[], Callable[..., Any]]:
        return unwrapped(self.graph_module)

    @_built
    def boundary(self) -> CallBoundary:
        """What a call does before and after the graph: the check of the arguments, and the write-back."""
        return CallBoundary(self.with_real_classes().tape, self.graph_module, self.forward)

    @functools.cached_property
    def _graph_values(self) -> GraphValues:
        return GraphValues(self.tape)

    @property
    def forward(self) -> Callable[..., Any] | None:
        """The function whose signature the program has: the module's `forward`. None for a loaded program."""
        return self.model.forward if isinstance(self.model, torch.nn.Module) else self.model

    @functools.cached_property
    def all_calls(self) -> list[ModuleCall]:
        """Every call on the tapes in forward order, the root first: of modules, user scopes and regions."""
        records = dict.fromkeys(record for tape in self.tape.walk() for record in tape.calls)
        at: dict[int, ModuleCall] = {}
        count = 0
        for record in sorted(records, key=lambda record: record.position):
            around = at[record.parent.position] if record.parent else None
            at[record.position] = ModuleCall(record, self, around, count)
            count += record.is_module
        return list(at.values())

    @functools.cached_property
    def calls(self) -> list[ModuleCall]:
        """Every module call in forward order, the root first."""
        return [call for call in self.all_calls if call.record.is_module]

    @_built
    def lowerings(self) -> dict[Call, FxLowering]:
        """By call, the graph or subgraph that holds its nodes."""
        lowerings = reversed([*self.lowering.walk()])  # several higher-order ops may share a body: the first one counts
        return {record: lowering for lowering in lowerings for record in lowering.tape.calls}

    @_built
    def placed_nodes(self) -> dict[FxLowering, list[tuple[int, torch.fx.Node]]]:
        """The nodes of each graph that a module call made, with the position of the innermost one."""
        positions: dict[FxLowering, list[tuple[int, torch.fx.Node]]] = {}
        for lowering in self.lowering.walk():
            nodes = [(call_position(n), n) for n in lowering.graph.nodes if n.op not in ("placeholder", "output")]
            positions[lowering] = [(position, n) for position, n in nodes if position is not None]
        return positions

    @functools.cached_property
    def scopes(self) -> dict[str, Scope]:
        """Every scope by its path."""
        return {s.path: s for s in self.tape.scopes()}

    def scope_of(self, node: torch.fx.Node) -> Scope:
        """See `Trace.scope_of`."""
        forward = forward_place(node)
        path = scope_path(node) if forward is None else forward[0]
        if path is not None and path in self.scopes:
            return self.scopes[path]
        for near in (list(node.users), node.all_input_nodes):
            scopes = [self.scopes[p] for n in near if (p := scope_path(n)) in self.scopes and n.op != "output"]
            if scopes:
                return innermost_common(scope.ancestors() for scope in scopes)
        return self.tape.root

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph, then the write-back; see `Trace.__call__`."""
        if torch.compiler.is_dynamo_compiling():
            problem = prepare(self)
            if problem is not None:
                raise ScopetraceError(problem)
            return self.__dict__["plain_call"](args, kwargs)
        is_recorded = running_recorder() is not None
        return self.run(self.graph_module, *args, **kwargs) if is_recorded else self._call(args, kwargs)

    @_built
    def _call(self) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        """A call, as a function of args and kwargs: `run`, or where a call is plain, what does it in less time."""
        module, boundary = self.graph_module, self.boundary

        def otherwise(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self.run(module, *args, **kwargs)

        is_plain = boundary.is_plain and not any(e.baked_in for e in self.tape.side_effects)
        if not is_plain or type(self) is not TracedProgram or parts_that_switch_grad(module):
            return otherwise
        module.real_recompile()
        probes = [
            ((autocast_enabled,), False),
            ((is_profiling,), False),
            ((getattr, type(module), "forward"), type(module).forward),
        ]
        return boundary.whole_call(probes, graph=self._unwrapped, explain=self._explain, otherwise=otherwise)

    def run(self, graph: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As a call, with `graph` in place of the GraphModule; see `Trace.run`."""
        if baked_in := [e for e in self.tape.side_effects if e.baked_in and self.was_called]:
            error = refusal(baked_in, "the trace is right for one call only, and this is another one")
            if not self.tape.warns_of_effects:
                raise error
            warnings.warn(str(error), SideEffectWarning, stacklevel=4)
        out = self.run_uncounted(graph, *args, **kwargs)
        self.was_called = True
        return out

    def run_uncounted(self, graph: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As `run`, for a comparison with the model: it does not count as a call."""
        inputs = self.boundary.enter(args, kwargs)
        if behind := self.boundary.left_behind(inputs):
            if graph is self.graph_module and self._is_as_recorded():
                return self._with_writes.run_uncounted(self._with_writes.graph_module, *args, **kwargs)
            self.boundary.refuse_left_behind(inputs, behind)
        grad = torch.is_grad_enabled()
        runnable = graph if grad == self.tape.grad else self.in_other_grad_mode(graph)
        if runnable is self.graph_module:
            runnable = self.runnable()
        written = self.boundary.written_unseen(inputs)
        try:
            if written or autocast_enabled():
                with without_autocast(), copying_saved(written) if written else contextlib.nullcontext():
                    values = runnable(*inputs)
            else:
                values = runnable(*inputs)
        except Exception as error:
            self._explain(error, inputs)
        finally:
            if torch.is_grad_enabled() != grad:
                torch.set_grad_enabled(grad)  # a graph that raises half-way may have switched it
        values = (values,) if isinstance(values, torch.Tensor) else values
        if graph is not self.graph_module:
            values = self._graph_values.restored(inputs, values, self.boundary.state.held, self.boundary.number(inputs))
        return self.boundary.leave(inputs, values)

    def _explain(self, error: Exception, inputs: list[Any]) -> NoReturn:
        """Raise what the graph raised, or in its place an error that tells why."""
        other = explained(error, self.tape, inputs, self.boundary.number(inputs))
        if other is None:
            _ = self.current  # an EditError where the graph was edited and cannot be followed
            raise error
        raise other from error

    def _is_as_recorded(self) -> bool:
        """Whether the recorded ops do what a call of this program does, on the same tensors of the model."""
        tape, recorded = self.tape, self.recorded
        is_other = tape.edited or (isinstance(tape, FunctionalTape) and tape.decomposed) or bool(recorded.backwards)
        return not is_other and tape.owners == recorded.owners and not self._is_edited()

    @functools.cached_property
    def _with_writes(self) -> TracedProgram:
        """The program with the ops as they ran, which write: for calls where autograd has to see that."""
        return self.with_tape(self.recorded)

    def in_other_grad_mode(self, graph: Callable[..., Any]) -> Callable[..., Any]:
        """What runs `graph` where autograd is on and was off when traced, or the other way round.

        The check at `enter` let the call pass, so each block of the forward sets the mode that the call has anyway.
        Raises StateMismatchError where the graph has such blocks, is not this program's own, and has no
        `in_other_grad_mode`, a function that does the same without them.
        """
        module = self.graph_module
        parts = parts_that_switch_grad(module)
        without: Callable[..., Any] | None = getattr(graph, "in_other_grad_mode", None)
        if not parts or without is not None:
            return without or graph
        if graph is not module or parts != [module]:
            raise StateMismatchError(
                f"torch.is_grad_enabled(): {self.tape.grad} when traced and {not self.tape.grad} now, and functions, "
                "branches or compiled code of the graph switch it; trace again in this state"
            )
        if is_profiling():
            return RangedRun(self.lowering, self.graph_module, switches=False)
        code = self.graph_module.code
        if code not in self._without_switches:
            run = method_of(without_grad_switches(self.graph_module.graph), self.graph_module)
            self._without_switches = {code: run}
        return self._without_switches[code]

    def runnable(self) -> Callable[..., Any]:
        """What runs the GraphModule in the least time, or where a profiler is active names the module calls to it."""
        if not is_profiling() or has_hooks(self.graph_module):
            return self._unwrapped()
        return RangedRun(self.lowering, self.graph_module, switches=True)

    def functional(self) -> TracedProgram:
        """The same program without mutation, holding the tensors that the model has now."""
        tape = self.tape if isinstance(self.tape, FunctionalTape) else functional_tape(self.recorded)
        return self.with_tape(_with_current_tensors(tape))

    def without_regions(self) -> TracedProgram:
        """The program with the ops of checkpointed and nested regions in their places, pure if it has some."""
        if not has_regions(self.tape):
            return self
        program = self.functional()
        assert isinstance(program.tape, FunctionalTape)
        return program.with_tape(without_regions(program.tape))

    def decomposed(self, table: Mapping[Any, Any] | None) -> TracedProgram:
        """`functional()` with the ops of `table` in terms of others; see `Trace.decompose`."""
        if not isinstance(table, Mapping | None):
            raise ArgumentTypeError(f"table={table!r}: give a dict from ops to functions, or None for core ATen")
        wrong = next((op for op in table or () if not is_op(op)), None)
        if wrong is not None:
            raise ArgumentTypeError(f"table has {wrong!r}: write ops with overloads, as torch.ops.aten.gelu.default")
        return self.with_rules(decomposition_rules(table))

    def with_rules(self, rule_of: RuleOf) -> TracedProgram:
        """`functional()` with what `rule_of` gives in the place of ops."""
        tape = self.functional().tape
        assert isinstance(tape, FunctionalTape)
        with without_autocast():
            return self.with_tape(decomposed(tape, rule_of))

    def without_argument_mutation(self) -> TracedProgram:
        """`functional()`, for forms of programs that only return values.

        What forward puts into containers among its arguments is left out of the outputs. Raises ExportError where
        forward does not return it as well.
        """
        has_effects = without_argument_mutation(self.recorded.outputs, Value) is not self.recorded.outputs
        program = self.functional()
        return program.with_tape(without_effects(program.tape)) if has_effects else program

    def save(self, path: Path, external_data: str | None) -> None:
        """Write a file; see `Trace.save`."""
        files.save(*self._current_tapes(), path, external_data)

    def _current_tapes(self) -> tuple[ProgramTape, ProgramTape]:
        """Both tapes, with the tensors that the model has now."""
        recorded = _with_current_tensors(self.recorded)
        return recorded, recorded if self.tape is self.recorded else _with_current_tensors(self.tape)

    def __reduce__(self) -> Any:
        file, foreign = io.BytesIO(), list[Any]()
        files.write(*self._current_tapes(), file, foreign)
        return _from_pickle, (file.getvalue(), dumps(foreign))

    @classmethod
    def read(cls, file: IO[bytes], foreign: Sequence[Any] = (), folder: Path = Path()) -> TracedProgram:
        """What `save` wrote into a folder. Raises TraceFileError for anything else."""
        recorded, tape = files.read(file, foreign, folder)
        if not isinstance(recorded, RecordedTape):
            raise TraceFileError("the file is damaged: it has no recording")
        program = cls(recorded, tape, None)
        with files.as_damage():
            _ = program.graph_module  # what a tape of a file lacks is said here, not when the graph is looked at
        return program


def _from_pickle(data: bytes, foreign: bytes) -> TracedProgram:
    return TracedProgram.read(io.BytesIO(data), pickle.loads(foreign))


def _with_current_tensors(tape: Program) -> Program:
    return dataclasses.replace(tape, attributes=tape.attributes | current_tensors(tape))
