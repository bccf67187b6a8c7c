"""`TracedProgram`: a recorded program and what is derived from it on demand.

Data flow:
    tape -> FxLowering (torch.fx graph) -> GraphModule
    tape's call records + graph -> one ModuleCall each
    tape + GraphModule -> CallBoundary: checks of a call's arguments, write-back of its effects

`api`, `lower`, `view` and outlining take this object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import starmap
from typing import IO, Any, TypeVar

import torch
import torch.fx

from scopetrace import files
from scopetrace._compat.compilers import constant_to_dynamo
from scopetrace._compat.gradients import copying_saved
from scopetrace._compat.graph_module import (
    TracedGraphModule,
    dumps,
    look_up,
    method_of,
    parts_that_switch_grad,
    without_grad_switches,
)
from scopetrace._compat.ops import garbage_collector_off, is_op
from scopetrace._compat.symbols import Symbolic
from scopetrace.containers.classes import with_imports
from scopetrace.containers.structure import leaves, without_argument_mutation
from scopetrace.errors import (
    ArgumentTypeError,
    DataDependentError,
    InputMismatchError,
    ScopetraceError,
    SideEffectWarning,
    StateMismatchError,
    TraceFileError,
)
from scopetrace.functionalization.functionalizer import Functionalizer
from scopetrace.ir.scopes import Scope, common_scope, source_of, walk_frames
from scopetrace.ir.side_effects import refusal
from scopetrace.ir.tape import (
    FunctionalTape,
    ProgramTape,
    RecordedTape,
    Value,
    checks_enabled,
)
from scopetrace.ir.verify import verify
from scopetrace.ir.write_back import WriteBack
from scopetrace.program.boundary import CallBoundary, without_autocast
from scopetrace.program.calls import CallGraphs, ModuleCall
from scopetrace.program.checks import other_strides
from scopetrace.program.compiled import GraphValues
from scopetrace.program.decompositions import decomposed
from scopetrace.program.dynamo import PlainCall
from scopetrace.program.edits import Reading
from scopetrace.program.graph import FxLowering, forward_place, scope_path
from scopetrace.program.inline import inlined
from scopetrace.program.regions import has_regions, without_regions
from scopetrace.program.state import HeldTensors, current_tensors
from scopetrace.record.uses import catches_errors

Program = TypeVar("Program", bound=ProgramTape)


def functional_tape(recorded: RecordedTape) -> FunctionalTape:
    """The same program without an op that writes.

    It shares the ops of `recorded` where none of them writes, and autograd has freed none of them.

    Raises FunctionalizationError for what no functional op says, DynamicShapeError where one fixes a dynamic size.
    """
    with garbage_collector_off():
        is_as_recorded = not (recorded.differentiated() or recorded.has_writes())
        tape = FunctionalTape.of(recorded) if is_as_recorded else Functionalizer(recorded).run()
    if tape.sizes is not None:
        tape.sizes.refuse_fixed()
    if checks_enabled():
        verify(tape, "functionalization")
    return tape


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
        self._without_switches: dict[str, Callable[..., Any]] = {}
        """By the code of the GraphModule, what runs it without the nodes that switch autograd."""

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
        graphs = _graphs(self.lowering, self.graph_module)
        return any(lowered.is_edited(graph) for lowered, graph in graphs) or self._is_refilled()

    def _is_refilled(self) -> bool:
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
        tape = reading.tape
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

    def with_real_classes(self) -> TracedProgram:
        """The same, where it was loaded with the real classes of arguments and results. Raises TraceFileError."""
        if self.model is not None:
            return self
        tape = self.tape
        return self.with_tape(
            dataclasses.replace(tape, args=with_imports(tape.args), outputs=with_imports(tape.outputs))
        )

    @functools.cached_property
    def lowering(self) -> FxLowering:
        """The torch.fx graph, and the node of each value of the tape."""
        with garbage_collector_off():
            return FxLowering(self.tape)

    @functools.cached_property
    def graph_module(self) -> TracedGraphModule:
        """The graph as a GraphModule that holds the model's own tensors; see `Trace.graph_module`."""
        with garbage_collector_off():
            return self.lowering.graph_module()

    @functools.cached_property
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
    def calls(self) -> list[ModuleCall]:
        """Every module call in forward order, the root first."""
        return CallGraphs(self.tape, self.forward, lambda: self.lowering).calls()

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
                return common_scope(scopes)
        return self.tape.root

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph, then the write-back; see `Trace.__call__`."""
        if torch.compiler.is_dynamo_compiling():
            problem = _prepare(self)
            if problem is not None:
                raise ScopetraceError(problem)
            return self.__dict__["plain_call"](args, kwargs)
        return self.run(self.graph_module, *args, **kwargs)

    def run(self, graph: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As a call, with `graph` in place of the GraphModule; see `Trace.run`."""
        self._check_side_effects()
        out = self.run_uncounted(graph, *args, **kwargs)
        self.was_called = True
        return out

    def _check_side_effects(self) -> None:
        """A program into which Python state of the example run is baked is right for one call."""
        baked_in = [e for e in self.tape.side_effects if e.baked_in] if self.was_called else []
        if not baked_in:
            return
        error = refusal(baked_in, "the trace is right for one call only, and this is another one")
        if not self.tape.warns_of_effects:
            raise error
        warnings.warn(str(error), SideEffectWarning, stacklevel=5)

    def run_uncounted(self, graph: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As `run`, for a comparison with the model: it does not count as a call."""
        inputs = self.boundary.enter(args, kwargs)
        if self.boundary.leaves_behind(inputs):
            if graph is self.graph_module and self._is_as_recorded():
                return self._with_writes.run_uncounted(self._with_writes.graph_module, *args, **kwargs)
            self.boundary.refuse_left_behind(inputs)
        grad = torch.is_grad_enabled()
        runnable = graph if grad == self.tape.grad else self.in_other_grad_mode(graph)
        written = self.boundary.written_unseen(inputs)
        try:
            with without_autocast(), copying_saved(written) if written else contextlib.nullcontext():
                values = runnable(*inputs)
        except Exception as error:
            explained = _explained(error, self.boundary, inputs)
            if explained is None:
                _ = self.current  # an EditError where the graph was edited and cannot be followed
                raise
            raise explained from error
        finally:
            if torch.is_grad_enabled() != grad:
                torch.set_grad_enabled(grad)  # a graph that raises half-way may have switched it
        if graph is not self.graph_module:
            values = (values,) if isinstance(values, torch.Tensor) else values
            values = self._graph_values.restored(inputs, values, self.boundary.state.held, self.boundary.number(inputs))
        return self.boundary.leave(inputs, values)

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
        parts = parts_that_switch_grad(self.graph_module)
        without: Callable[..., Any] | None = getattr(graph, "in_other_grad_mode", None)
        if not parts or without is not None:
            return without or graph
        if graph is not self.graph_module or parts != [self.graph_module]:
            raise StateMismatchError(
                f"torch.is_grad_enabled(): {self.tape.grad} when traced and {not self.tape.grad} now, and functions, "
                "branches or compiled code of the graph switch it; trace again in this state"
            )
        code = self.graph_module.code
        if code not in self._without_switches:
            run = method_of(without_grad_switches(self.graph_module.graph), self.graph_module)
            self._without_switches = {code: run}
        return self._without_switches[code]

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
        tape = self.functional().tape
        assert isinstance(tape, FunctionalTape)
        with without_autocast():
            return self.with_tape(decomposed(tape, table))

    def without_argument_mutation(self) -> TracedProgram:
        """`functional()`, for forms of programs that only return values.

        What forward puts into containers among its arguments is left out of the outputs. Raises ExportError where
        forward does not return it as well.
        """
        outputs = without_argument_mutation(self.recorded.outputs, Value)
        if outputs is self.recorded.outputs:
            return self.functional()
        if self.tape.edited:
            return self.with_tape(_without_effects(self.functional().tape))
        recorded = dataclasses.replace(self.recorded, outputs=outputs)
        return TracedProgram(recorded, recorded, self.model).functional()

    def write(self, file: IO[bytes], foreign: list[Any] | None = None) -> None:
        """Write both tapes, with the tensors that the model has now; see `files.write`."""
        recorded = _with_current_tensors(self.recorded)
        tape = recorded if self.tape is self.recorded else _with_current_tensors(self.tape)
        files.write(recorded, tape, file, foreign)

    def __reduce__(self) -> Any:
        file, foreign = io.BytesIO(), list[Any]()
        self.write(file, foreign)
        return _from_pickle, (file.getvalue(), dumps(foreign))

    @classmethod
    def read(cls, file: IO[bytes], foreign: Sequence[Any] = ()) -> TracedProgram:
        """What `write` wrote. Raises TraceFileError for anything else."""
        recorded, tape = files.read(file, foreign)
        if not isinstance(recorded, RecordedTape):
            raise TraceFileError("the file is damaged: it has no recording")
        program = cls(recorded, tape, None)
        with files.as_damage():
            _ = program.graph_module  # what a tape of a file lacks is said here, not when the graph is looked at
        return program


@constant_to_dynamo
def _prepare(program: TracedProgram) -> str | None:
    """Make what Dynamo cannot trace, and compare the state with that of the trace, while torch.compile compiles.

    Returns why the call cannot be traced: an error in here would be one of torch.compile.
    """
    try:
        program.boundary.state.refresh()
        program.boundary.check.run_state()
        program.__dict__["plain_call"] = PlainCall(program.boundary, program.graph_module)
    except ScopetraceError as error:
        return f"{type(error).__name__}: {error}"
    return None


def _from_pickle(data: bytes, foreign: bytes) -> TracedProgram:
    return TracedProgram.read(io.BytesIO(data), pickle.loads(foreign))


def _with_current_tensors(tape: Program) -> Program:
    return dataclasses.replace(tape, attributes=tape.attributes | current_tensors(tape))


def _graphs(lowering: FxLowering, graph_module: Any) -> Iterator[tuple[FxLowering, torch.fx.Graph | None]]:
    """Each graph of a program as it was made, and the one that its GraphModule has now."""
    yield lowering, getattr(graph_module, "graph", None)
    for name, body in lowering.bodies.items():
        yield from _graphs(body, getattr(graph_module, name, None))


def _without_effects(tape: ProgramTape) -> ProgramTape:
    """The program without what the forward puts into containers among its arguments, which comes after the result."""
    count = len(leaves(tape.result, (Value, *Symbolic)))
    write_back = tape.write_back and WriteBack(tape.write_back.updates, tape.write_back.results[:count])
    if isinstance(tape, FunctionalTape) and tape.write_back is None:
        return dataclasses.replace(tape, outputs=tape.result, returned=tape.graph_outputs()[:count])
    return dataclasses.replace(tape, outputs=tape.result, write_back=write_back)


def _explained(error: Exception, boundary: CallBoundary, inputs: Sequence[Any]) -> ScopetraceError | None:
    """InputMismatchError where a graph failed since a specialization or the strides of an input differ, else None.

    Where the forward may catch the error, a DataDependentError: the graph does not go on as the forward would.
    """
    tape = boundary.tape
    differs = next((s for s in tape.specializations if s.message in str(error)), None)  # an Interpreter says more
    if differs is not None:
        return InputMismatchError(differs.message)
    other = other_strides(tape, inputs, boundary.number(inputs))
    if other is not None:
        way_out = "give a copy in the strides of the trace, or trace again with such an input"
        return InputMismatchError(f"{other}, and an op of the program takes no others; {way_out}: {error}")
    ops = (op for op in tape.ops if op.kind == "call_function")
    caught = next((op for op in ops if any(starmap(catches_errors, walk_frames(op.frames)))), None)
    if caught is None:
        return None
    return DataDependentError(
        f"an op of the program fails, and the forward may go on, since it catches errors: {error}",
        op=str(caught.target),
        module=str(caught.scope),
        source=source_of(caught.frames),
        hint="ask for success by an op, as torch.linalg.cholesky_ex does, and pick with torch.where",
    )
