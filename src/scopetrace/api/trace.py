"""`trace` and what it gives: a `Trace`."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.export
import torch.fx

from scopetrace._compat import pickling
from scopetrace._compat.graph_module import TracedGraphModule
from scopetrace.api.outlined import OutlinedProgram, Target
from scopetrace.containers.objects import without_argument_mutation
from scopetrace.errors import ScopetraceError
from scopetrace.functionalization.functionalizer import functionalize
from scopetrace.functionalization.report import Alias, Mutation, aliases, mutations
from scopetrace.ir import meta
from scopetrace.ir.scopes import Scope, common_scope
from scopetrace.ir.tape import Tape, Value
from scopetrace.ir.write_back import WriteBack
from scopetrace.lower.exported.exported_program import to_exported_program
from scopetrace.lower.onnx import require_packages
from scopetrace.order.execution import ExecutionOrder
from scopetrace.order.recorded import execution_order
from scopetrace.program.calls import CallTable, ModuleCall
from scopetrace.program.check import Decisions, compare_with_model
from scopetrace.program.graph import FxLowering, given
from scopetrace.program.inputs import CallBoundary, held_now, without_autocast
from scopetrace.program.lint import lint
from scopetrace.program.returned import as_the_graph_returns
from scopetrace.record import record
from scopetrace.record.observe import Progress
from scopetrace.record.specialize import Specialization, specialized
from scopetrace.view.terminal import print_text
from scopetrace.view.text import TextOptions, render

if TYPE_CHECKING:
    import onnx_ir


class Trace:
    """A traced model. `tr(*args, **kwargs)` does what `model(*args, **kwargs)` does.

    The graph, the scopes and the calls are made from the recording when they are first asked for.
    """

    def __init__(self, recorded: Tape, tape: Tape, model: Callable[..., Any] | None) -> None:
        self._recorded = recorded
        self._tape = tape
        self._model = model

    @property
    def tape(self) -> Tape:
        """What the trace is made from: the recording, or the same program without mutation."""
        return self._tape

    @property
    def model(self) -> Callable[..., Any] | None:
        """The module or function that was traced; None for a loaded trace."""
        return self._model

    @functools.cached_property
    def _program(self) -> FxLowering:
        return FxLowering(self._tape)

    @property
    def program(self) -> FxLowering:
        """The graph, and the node of each value of the tape."""
        return self._program

    def with_tape(self, tape: Tape) -> Trace:
        """The same trace with another program in the place of its own."""
        return Trace(self._recorded, tape, self._model)

    @functools.cached_property
    def _table(self) -> CallTable:
        return CallTable(self._tape, lambda: self._program, self._model)

    @functools.cached_property
    def graph_module(self) -> TracedGraphModule:
        """The flat ATen graph: the input tensors in order as placeholders, the result's tensors in order as outputs.

        Parameters, buffers and constants are `get_attr` nodes; the module holds the model's own tensors.
        """
        return self._program.graph_module()

    @functools.cached_property
    def boundary(self) -> CallBoundary:
        """What comes before the graph and after it in a call: the check of the arguments, and the write-back."""
        return CallBoundary(self._tape, self.graph_module, self.root_function)

    @property
    def root_function(self) -> Callable[..., Any] | None:
        """What was traced as a function: a module's forward. None for a loaded trace."""
        return self._model.forward if isinstance(self._model, torch.nn.Module) else self._model

    @property
    def scope(self) -> Scope:
        """The root scope, named after the model's class."""
        return self._tape.root

    @functools.cached_property
    def _scopes(self) -> dict[str, Scope]:
        return {s.path: s for s in self._tape.root.walk()}

    def scope_of(self, node: torch.fx.Node) -> Scope:
        """The scope of a node of this trace's graph, or of a graph made from it.

        A node that a pass made without copying `node.meta` gets the innermost scope around its users, or its inputs.
        """
        path = meta.scope_path(node)
        if path is not None and path in self._scopes:
            return self._scopes[path]
        for near in (list(node.users), node.all_input_nodes):
            found = [self._scopes[p] for n in near if (p := meta.scope_path(n)) in self._scopes and n.op != "output"]
            if found:
                return common_scope(found)
        return self._tape.root

    @property
    def calls(self) -> list[ModuleCall]:
        """Every module call in forward order, the root first."""
        return self._table.calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph: same results and same effects as the model.

        Raises InputMismatchError when the structure, shapes, dtypes, devices or Python values of the arguments are not
        those of the trace, tensors share memory in another way, or a value that the trace is specialized on differs.
        """
        inputs = self.boundary.enter(args, kwargs)
        with without_autocast(), specialized(self.specializations):
            values = self.graph_module(*inputs)
        return self.boundary.leave(inputs, values)

    def run(self, graph: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As a call, with `graph` in the place of the graph: what a compiler or a pass made of it.

        It gets the tensors among the inputs, then the dynamic numbers, and returns the values of the graph's output
        node, as list or tuple. In which memory and with which strides does not matter: what is not as in the graph is
        copied, or viewed again.

        Raises CompiledGraphError for values of other shapes or dtypes than the graph's.
        """
        tensors = self.boundary.enter(args, kwargs)
        with without_autocast():
            values = graph(*tensors)
        values = (values,) if isinstance(values, torch.Tensor) else tuple(values)
        if graph is not self.graph_module:
            promised = [*given(self._tape), *(w.value for w in self._tape.attribute_writes)]
            values = tuple(as_the_graph_returns(self._tape, promised, tensors, values))
        return self.boundary.leave(tensors, values)

    def outline(self, *targets: Target) -> OutlinedProgram:
        """The same program with chosen module calls as calls of shared functions.

        Args:
            targets: module classes, fqn patterns as fnmatch reads them (`"layers.*.attn"`), predicates on a ModuleCall,
                or `"repeated"`: every class of which at least two calls are equal.

        Raises:
            OutlineError: a target matches no call, the trace is not functional, or a call cannot be a function.
        """
        return OutlinedProgram.of(self, targets)

    def to_onnx(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        functions: Any = (),
        plugins: Any = (),
        opset_version: int | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        optimize: bool = True,
        external_data: bool | None = None,
        attributes: bool | Sequence[str] = False,
        custom_translation_table: Mapping[Any, Callable[..., Any]] | None = None,
        verify: bool = False,
        progress: Callable[[str], None] | None = None,
    ) -> onnx_ir.Model:
        """An ONNX model, with chosen module calls as calls of ONNX functions; written to `path` if one is given.

        Ops are translated and optimized by torch.onnx. Needs `scopetrace[onnx]`. docs/onnx.md has the signatures.

        Args:
            path: the file to write, or None.
            functions: one or several targets of `outline`, or a dict `{Block: "my.domain::Block"}` that names them.
            plugins: as `functions`, for calls of custom ops: their bodies are left out of the file.
            opset_version: this and `optimize` and `custom_translation_table` as for torch.onnx.export.
            input_names: names for the first inputs, in order; output_names likewise.
            external_data: put the weights into a file beside `path`; None does so above 2 GB.
            attributes: names of plain module attributes that become ONNX attributes of the calls, or True for all.
            verify: check the file with onnx.checker, and run it in ONNX Runtime beside the model.
            progress: called with what is being done.

        Raises:
            OnnxDependencyError: a package is missing.
            OnnxOptionError, OutlineError: an argument does not fit.
            OnnxOpError: ops have no ONNX form; the error has all of them, with module and source line.
            OnnxExportError: the trace has no form as an ONNX model for another reason.
            OnnxVerificationError: with verify=True.
        """
        require_packages()
        from scopetrace.lower.onnx.export import Options
        from scopetrace.lower.onnx.write import write

        names, table = (input_names, output_names), custom_translation_table
        options = Options(functions, plugins, opset_version, *names, optimize, attributes, table)
        return write(self.without_argument_mutation(), path, options, external_data, verify, progress).model

    def pure(self) -> Trace:
        """The same program without mutation, with the tensors that the model holds now."""
        tape = functionalize(self._recorded) if self._tape is self._recorded else self._tape
        return self.with_tape(dataclasses.replace(tape, attributes={**tape.attributes, **held_now(tape)}))

    def without_argument_mutation(self) -> Trace:
        """This trace without mutation and without what the forward puts into the containers of its arguments.

        Raises ExportError where the forward does not return what it puts there.
        """
        result = without_argument_mutation(self._recorded.outputs, Value)
        if result is self._recorded.outputs:
            return self.pure()
        recorded = dataclasses.replace(self._recorded, outputs=result)
        return Trace(recorded, recorded, self._model).pure()

    @functools.cached_property
    def order(self) -> ExecutionOrder:
        """In which order modules run and parameters are used."""
        return execution_order(self._recorded)

    @property
    def specializations(self) -> list[Specialization]:
        """What the example inputs decided, because Python looked at a value (`specialize=True`), in order."""
        return list(self._tape.specializations)

    @property
    def mutations(self) -> list[Mutation]:
        """What the model changes in its inputs, parameters and buffers, in the order of the program."""
        return mutations(self._recorded)

    @property
    def aliases(self) -> list[Alias]:
        """For each tensor of the result: is it fresh, an input itself, or a view of an input or earlier result?"""
        return aliases(self._recorded)

    @property
    def write_back(self) -> WriteBack | None:
        """What follows the graph so that the whole does what the model does; None where nothing has to."""
        program: WriteBack | None = self._tape.write_back
        return program

    @property
    def range_constraints(self) -> dict[Any, Any]:
        """By sympy symbol of a dynamic size, the `ValueRanges` that a call may have; as ExportedProgram has it."""
        sizes = self._tape.sizes
        return {} if sizes is None else sizes.range_constraints()

    def to_exported_program(self) -> torch.export.ExportedProgram:
        """The program as torch.export gives it, without tracing again; it shares the model's parameters and buffers.

        What the model changes in its inputs, parameters and buffers are mutations in the signature. `module_call_graph`
        has the signature of every module call, so that `torch.export.unflatten` gives modules that are called as the
        model's own. Results are values: an ExportedProgram cannot say that one is an input itself or shares its memory.
        Nor does it keep a tensor that the forward binds to an attribute which it does not read.

        Raises ExportError for what else it cannot say: changes of an input's shape or memory, changes of tensors of the
        model that are no parameters or buffers, leaf modules, one tensor given for two inputs.
        """
        return to_exported_program(self.without_argument_mutation().tape, self.root_function)

    def lint(self) -> None:
        """Check that the graph, the scopes and the calls agree. Raises LintError with all that is wrong."""
        lint(self._program, self.graph_module, self.calls, self._scopes)

    def check(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        """Run the model and the trace on copies of the same inputs from the same random state, and compare.

        Compares results, changed inputs and changed buffers. Both start from the model's state as it is, which is put
        back. Raises CheckError with all differences. Where these inputs decide otherwise than those that the trace is
        specialized on, the error says which of its decisions differ; those after the first are as on the traced path.
        """
        if self._model is None:
            raise ScopetraceError("a loaded trace has no model to check against; trace the model again")
        compare_with_model(self._model, self, self._tape, self._decided_otherwise, args, kwargs or {})

    def _decided_otherwise(self, *args: Any, **kwargs: Any) -> list[Specialization]:
        tensors = self.boundary.enter(args, kwargs)
        with without_autocast():
            return Decisions(self.graph_module, self.specializations).collect(tensors)

    def print_readable(self, depth: int | None = None, *, scope: str | None = None, print_output: bool = True) -> str:
        """Print the program as text, and return it; calls deeper than `depth` are one line each.

        `scope` is an fnmatch pattern of scope paths: only calls that match are shown.
        """
        text = render(self.calls, TextOptions(depth=depth, scope=scope))
        if print_output:
            print_text(text)
        return text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file, with the parameters and buffers that it uses, without the model.

        Raises pickle.PicklingError for objects among the arguments that pickle refuses.
        """
        Path(path).write_bytes(self._to_bytes())

    def _to_bytes(self) -> bytes:
        for tape in (self._tape, self._recorded):
            tape.attributes.update(held_now(tape))
        return pickling.dumps((self._tape, self._recorded))

    def __reduce__(self) -> Any:
        return from_bytes, (self._to_bytes(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Trace:
        return Trace(self._recorded, self._tape, self._model)

    def __str__(self) -> str:
        return render(self.calls, TextOptions())

    def __repr__(self) -> str:
        tapes = list(self._tape.walk())
        ops = sum(op.kind in ("call_function", "call_module") for tape in tapes for op in tape.ops)
        calls = sum(len(tape.calls) for tape in tapes)
        return f"<Trace of {self._tape.root.path}: {ops} ops, {calls} module calls>"

    def __iter__(self) -> Iterator[ModuleCall]:
        return iter(self.calls)


def from_bytes(data: bytes) -> Trace:
    """What `Trace.save` wrote. Raises TypeError for another pickle."""
    tapes = pickling.loads(data)
    if not (isinstance(tapes, tuple) and all(isinstance(t, Tape) for t in tapes)):
        raise TypeError("these are not the tapes of a trace")
    return Trace(tapes[1], tapes[0], None)


def trace(
    model: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    functional: bool = True,
    leaves: Any = (),
    specialize: bool = False,
    progress: Progress | None = None,
) -> Trace:
    """Trace a module, or any callable, into a graph that knows its modules.

    One pass of Python over the model with fake tensors: no weight is read or copied, and the model is as it was
    afterwards. Autograd, autocast, eval and training mode are those at the call.

    Args:
        model: an `nn.Module`, a function, or a bound method of a module.
        args: positional arguments, as for the model; tensors on any device, the meta device too.
        kwargs: keyword arguments.
        dynamic_shapes: which sizes may differ from call to call, in any of torch.export's forms: a dict by argument
            name or a tuple, of dicts or lists of `Dim`, derived dims, `Dim.AUTO`, `Dim.DYNAMIC`, numbers or None. All
            other sizes are those of the arguments. A call checks its sizes against what was captured.
        functional: True gives a graph in which no op writes, and `Trace.write_back` beside it; False keeps the ops as
            they ran.
        leaves: module classes, fqn patterns (`"layers.*.attn"`) and predicates `(module, fqn) -> bool`. A call of such
            a module is one `call_module` node that runs the module.
        specialize: where Python needs a value that depends on data (`if x.sum() > 0`, `int(t)`, `range(n.item())`), the
            example inputs decide. Each decision is in `Trace.specializations` and an assertion in the graph: a call
            with inputs that decide otherwise is refused. Of the model, only the ops that such a value comes from run
            for real, on copies. Sizes and numbers that Python does not look at stay symbols.
        progress: called with (scope path, number of ops so far) at each module call.

    Raises:
        DynamicShapeError: dynamic_shapes does not fit the arguments, or the model fixes a size that it names.
        FunctionalizationError: a mutation has no pure form (with functional=True).
        DataDependentError: Python needs a value that depends on the inputs (`if x.sum() > 0`); with specialize=True,
            one that depends on tensors without data (on the meta device).
        TraceError: for other things that cannot be recorded; it has one subclass for each.
        Exception: what the model itself raises.
    """
    arguments = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    tape = record(
        model,
        arguments,
        kwargs or {},
        dynamic_shapes=dynamic_shapes,
        leaves=leaves,
        specialize=specialize,
        progress=progress,
    )
    return Trace(tape, functionalize(tape) if functional else tape, model)
