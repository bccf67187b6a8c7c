"""`trace`, and the objects that it gives: `Trace`, `OutlinedProgram`.

Data flow:
    model + example inputs -> record -> RecordedTape -> functionalize -> TracedProgram, held by a Trace
    a Trace asks the rooms below for graph, calls, order, text, ExportedProgram, ONNX when somebody asks it
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.export
import torch.fx

from scopetrace.api.checkpoints import CheckpointPlan, checkpoint_plan
from scopetrace.api.module import to_module
from scopetrace.api.runnable import ONNX_WORDS, TRACE_WORDS, Shown, knows_others, program_of
from scopetrace.errors import (
    ArgumentError,
    ArgumentTypeError,
    DynamicShapeError,
    EditError,
    ExportError,
    ScopetraceError,
    SideEffectWarning,
)
from scopetrace.ir.conditions import Specialization, Specializations
from scopetrace.ir.guards import warn_of_numbers
from scopetrace.ir.selection import Selection, several
from scopetrace.ir.side_effects import SideEffect, refusal
from scopetrace.lower.exported.program import explain, to_exported_program
from scopetrace.lower.onnx import CallAttributes, ExternalData, Names, Targets, WeightNames, require_packages
from scopetrace.lower.split import Partition, SplitProgram, split_backward
from scopetrace.order.execution import ExecutionOrder
from scopetrace.order.recorded import execution_order
from scopetrace.program.check import compare_with_model
from scopetrace.program.outlined import Function, OutlinedTrace, OutlineTarget, outline_calls, warn_of_rules
from scopetrace.program.traced import TracedProgram, functional_tape
from scopetrace.record.calls import Progress
from scopetrace.session import record
from scopetrace.view.text import render

if TYPE_CHECKING:
    import onnx_ir

    from scopetrace.api.compiled import CompiledTrace


class Trace(Shown):
    """A traced model. `tr(*args, **kwargs)` does what `model(*args, **kwargs)` does.

        tr = st.trace(model, (x,))
        assert torch.equal(tr(x), model(x))
        tr.call("0").arguments  # {"input": <the node x>}

    The graph, the scopes and the calls are made from the recording when they are first asked for. Afterwards the graph
    is the program: an edit of `graph_module` reaches calls, text, files and all other forms.
    """

    def __init__(self, program: TracedProgram) -> None:
        if not isinstance(program, TracedProgram):
            raise ArgumentTypeError("a Trace is made by st.trace(model, args) or st.load(path)")
        super().__init__(program)
        self._order: tuple[TracedProgram, ExecutionOrder] | None = None  # and the program that it is of

    @property
    def model(self) -> Callable[..., Any] | None:
        """The module or function that was traced; None for a loaded trace."""
        return self._held.model

    def with_graph(self, graph_module: torch.fx.GraphModule) -> Trace:
        """A trace with the graph that a pass made from this one's, and the same inputs, results and effects.

        Nodes may be added, replaced, fused, erased or put into submodules (`split_module`), and may call ATen ops,
        functions, methods and modules: in the new trace they are ATen ops with the metadata that torch infers. A node
        that the trace had, under its name, stays in its module call; a new one is in the call of those that it
        replaces, else in the innermost call around what it reads and feeds. A call whose nodes are gone has none in
        `ModuleCall.nodes`, and asking for arguments and results that are gone is an EditError.

        Parameters and buffers are the model's where `graph_module` holds them or equal copies; others are its own.

        Raises EditError, which names the node: other placeholders, another number of outputs, outputs of another shape
        where the write-back needs the old one, a mutating op in a functional graph, and ops without a shape function.
        """
        return Trace(self._program.with_graph(graph_module))

    def decompose(self, table: Mapping[Any, Callable[..., Any]] | None = None) -> Trace:
        """The same trace with ops replaced by their decompositions, and the ops of these by theirs, and so on.

        An op of a decomposition is in the module call and scope of the op that it stands for. Composite ops that return
        a view or their argument on some inputs (`reshape`, `to`, `dropout`) are taken apart whatever the table is.

        Args:
            table: by op, the function that does what the op does; one that returns NotImplemented leaves it. None is
                core ATen, as in `ExportedProgram.run_decompositions()`.

        Raises DecompositionError, which names the op, for a function whose results have other shapes or dtypes, that
        needs values which depend on data, or that mutates its arguments; DynamicShapeError where it fixes a size.
        """
        return Trace(self._program.decomposed(table))

    def to_module(self) -> torch.nn.Module:
        """The program as an `nn.Module`, to be called, trained, deep-copied, pickled and wrapped as the model is.

        It has the parameters and buffers of the model under their names, so that `state_dict` is that of the model, and
        shares their memory: training it trains the model. `copy.deepcopy` gives one with memory of its own. Of a
        function, and of a loaded trace, it has the tensors that the graph reads. `train()` and `eval()` are ModeErrors
        where the mode is not that of the trace, `to()` where dtype or device are others.

        Raises ModeError for a trace with leaf modules, which hold their tensors themselves.
        """
        return to_module(self._program)

    def without_model(self) -> Trace:
        """A trace whose calls compare what those of a loaded one do: nothing of the model's Python.

        For a model that is patched only while it is traced. It shares the parameters and buffers.
        """
        return Trace(self._program.without_model())

    def outline(self, *targets: OutlineTarget) -> OutlinedProgram:
        """The same program with chosen module calls as calls of shared functions.

        Args:
            targets: classes, modules, patterns (`"layers.*.attn"`) or predicates, as for `Trace.calls`; or
                `"repeated"`: every class of which two or more calls are equal; `"layers"`: of these the outermost calls
                only; True: every call inside the model.

        Raises:
            OutlineError: a target matches no call, the trace is not functional, or a call cannot be a function.

        Warns with TargetWarning where a call is named `"layers"` or `"repeated"` and the target is that word.
        """
        warn_of_rules(self._program, targets, stacklevel=3)
        return OutlinedProgram(self, outline_calls(self._program, targets))

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        *,
        functions: OutlineTarget | Sequence[OutlineTarget] = "layers",
        mode: str | None = None,
        options: dict[str, Any] | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> CompiledTrace:
        """The program compiled, each distinct function once; to be called in the model's place.

        Equal layers share one compiled function, so that compiling takes as long for 80 layers as for one. Gradients
        are the model's: each function is compiled with a backward of its own. There are no guards but the checks that
        a call of the trace makes. An edit of the graph made afterwards does not reach what was compiled.

        Args:
            backend: as for torch.compile; also a function from a GraphModule and example inputs to a callable.
            functions: one or several targets of `outline`; () compiles the program as a whole.
            mode: as for torch.compile.
            options: as for torch.compile.
            progress: called with what is being compiled.

        Raises:
            CompileError: the backend failed; the error names the function.
            OutlineError: a target matches no call, the trace is not functional, or a call cannot be a function.
            ArgumentError: torch.compile does not know the backend, the mode or an option.
        """
        from scopetrace.api.compiled import compile_program  # imports Dynamo

        return compile_program(self._program, several(functions), backend, mode, options, progress)

    def split_backward(self, partition_fn: Partition | None = None) -> SplitProgram:
        """The program as two graphs, forward and backward, with the tensors that backward keeps of the forward.

        Of a forward, `backward` gives the gradients of the parameters and inputs that require grad from those of the
        results. Of a training step, it is all that comes from the first `backward()` on, the optimizer included. Nodes
        of both graphs have scope and call in `node.meta`; `scope_of` and `phase_of` of this trace take them.

        Args:
            partition_fn: chooses what is kept: `functorch.compile.default_partition` (None is that), which keeps what
                eager keeps, `min_cut_rematerialization_partition`, which computes cheap ops again, or another function
                that torch's `aot_function` takes.

        Raises ModeError for a trace in which nothing requires grad, DynamicShapeError for sizes that depend on data,
        UnsupportedOpError for ops that have no derivative in a graph, such as `autograd_function_apply`.
        """
        return split_backward(self._program, partition_fn)

    def checkpoint_plan(self, budget_bytes: int) -> CheckpointPlan:
        """Which module calls to checkpoint, so that a traced training step needs at most `budget_bytes` at one time.

        What a checkpointed call saves for backward is freed, and computed again in backward. Calls are chosen one by
        one, at each peak the one that frees most bytes for a FLOP computed twice. `CheckpointPlan.apply(model)` wraps
        the modules in torch's CheckpointWrapper.

        Args:
            budget_bytes: the limit for `Memory.peak_bytes`, besides parameters, buffers and inputs.

        Raises ArgumentError for a trace without a backward, and for a budget that checkpoints do not reach; it says
        how far they get.
        """
        return checkpoint_plan(self._program, budget_bytes)

    @knows_others("Trace.to_onnx", ONNX_WORDS)
    def to_onnx(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        functions: Targets = (),
        plugins: Targets = (),
        opset_version: int | None = None,
        input_names: Names | None = None,
        output_names: Names | None = None,
        pair_caches: bool = False,
        optimize: bool = True,
        external_data: ExternalData = None,
        export_params: bool = True,
        weight_inputs: WeightNames = (),
        retain_weights: bool = False,
        attributes: CallAttributes = False,
        custom_translation_table: Mapping[Any, Callable[..., Any]] | None = None,
        metadata: bool = True,
        verify: bool = False,
        progress: Callable[[str], None] | None = None,
    ) -> onnx_ir.Model:
        """An ONNX model, with chosen module calls as calls of ONNX functions; written to `path` if one is given.

        Ops are translated and optimized by torch.onnx. Needs `scopetrace[onnx]`. docs/onnx.md has the signatures.

        Args:
            path: the file to write, or None.
            functions: one or several targets of `outline`, or a dict `{Block: "my.domain::Block"}` that names them, by
                class, module, pattern or predicate.
            plugins: as `functions`, for calls of custom ops: their bodies are left out of the file. A rule among
                `functions`, as `"layers"`, takes what `plugins` leaves; other targets may not name one call in both.
            opset_version: this and `optimize` and `custom_translation_table` as for torch.onnx.export.
            input_names: names for the first inputs, in order; or a dict or function from their own names to others.
            output_names: likewise.
            pair_caches: name the tensors of caches `past_key_values.0.key` as inputs, `present.0.key` as outputs.
            external_data: put the weights into a file beside `path`, or into several of at most this number of bytes;
                None does so above 2 GB. Models whose file has one name, "shared.data", share what is equal in it.
            export_params: if False, write only references to such files, for `st.write_onnx_weights`.
            weight_inputs: patterns of names of parameters and buffers that are inputs of the model, as `"**lora**"`.
            retain_weights: make them outputs, too, for runtimes that keep their state between runs.
            attributes: names of plain module attributes that become ONNX attributes of the calls, True for all, or a
                function from a ModuleCall to a dict of its attributes.
            metadata: write scopes and source lines to the nodes.
            verify: check the file with onnx.checker, and run it in ONNX Runtime beside the model, or beside the trace
                where its graph was edited.
            progress: called with what is being done.

        Raises:
            OnnxDependencyError: a package is missing.
            OnnxOptionError, OutlineError: an argument does not fit.
            ArgumentTypeError: opset_version is no number.
            OnnxOpError: ops have no ONNX form; the error has all of them, with module and source line.
            OnnxExportError: the trace has no form as an ONNX model for another reason.
            OnnxVerificationError: with verify=True.

        Warns as `to_exported_program` and `outline`.
        """
        require_packages()
        from scopetrace.lower.onnx.export import Options, write

        self._warn_of_a_form("the ONNX model")
        warn_of_rules(self._program, [*several(functions), *several(plugins)], stacklevel=4)
        options = Options(
            functions=functions,
            plugins=plugins,
            opset_version=opset_version,
            input_names=input_names,
            output_names=output_names,
            optimize=optimize,
            attributes=attributes,
            custom_translation_table=custom_translation_table,
            pair_caches=pair_caches,
            metadata=metadata,
            weight_inputs=weight_inputs,
            retain_weights=retain_weights,
            export_params=export_params,
        )
        return write(self._program.without_argument_mutation(), path, options, external_data, verify, progress).model

    @property
    def order(self) -> ExecutionOrder:
        """In which order modules run and parameters are used."""
        program = self._program
        if self._order is None or self._order[0] is not program:
            self._order = program, execution_order(program.as_run)
        return self._order[1]

    @property
    def specializations(self) -> Specializations:
        """What Python read during tracing and the trace is fixed to: a call in which it differs is refused.

        In this order: values that depend on data (`specialize=True`), numbers in objects among the arguments, such as a
        cache's `cumulative_length`, and what else the model's code read: facts of inputs (`x.stride(0)`), attributes,
        globals, variables of enclosing functions, environment, state of torch. `print` shows those of equal layers in
        one line; after them, by kind, it names all else that a call is checked for: code, classes, hooks, what torch's
        code read.
        """
        tape = self._program.tape
        root, fqns = tape.root.path, {call.scope.path: call.of_module.fqn for call in tape.calls}
        numbers = [Specialization(n.name, n.value, "argument", root, "", None) for n in tape.argument_numbers]
        reads = [
            Specialization(r.name, r.value, r.source.kind, r.module, fqns.get(r.module), r.line)
            for r in tape.guards
            if r.is_of_model
        ]
        others = [(r.source.kind, name) for r in tape.guards if not r.is_of_model for name in r.labels()]
        return Specializations([*tape.specializations, *numbers, *reads], others)

    @property
    def side_effects(self) -> list[SideEffect]:
        """What the forward did that the graph does not carry, in the trace; the model is as it was before.

        Writes to Python objects (`self.n += 1`, `self.hist.append(y)`), globals and closures; draws of `random` and
        `numpy.random`, clocks, `print` and `open`. docs/side_effects.md says which, and what it means for calls.
        """
        return list(self._program.tape.side_effects)

    @property
    def range_constraints(self) -> dict[Any, Any]:
        """By sympy symbol of a dynamic size, the `ValueRanges` that a call may have; as ExportedProgram has it."""
        sizes = self._program.tape.sizes
        return {} if sizes is None else sizes.range_constraints()

    def to_exported_program(
        self,
        *,
        preserve_module_call_signature: Sequence[str] = (),
        prefer_deferred_runtime_asserts_over_guards: bool = False,
        mode_regions: bool = False,
    ) -> torch.export.ExportedProgram:
        """The program as torch.export gives it, without tracing again; it shares the model's parameters and buffers.

        Changes of inputs, parameters and buffers are mutations in the graph signature. Results are values: an
        ExportedProgram cannot express that a result is an input or shares its memory. Nor does it keep a tensor that
        forward assigns to an attribute which it does not read. `dialect` is "TRAINING", and "ATEN" after
        `decompose()`, as torch.export has it before and after `run_decompositions`.

        Args:
            preserve_module_call_signature: fqns, or patterns of them, of the module calls whose signatures are in
                `module_call_graph`, so that `torch.export.unflatten` gives modules which are called as the model's;
                `("*",)` is all. Some clients, such as executorch, cannot read signatures.
            prefer_deferred_runtime_asserts_over_guards: whether the graph asserts what tracing assumed of the sizes
                (`_assert_scalar`), so that every backend checks it; else `ExportedProgram.module()` does.
            mode_regions: whether each block under `torch.no_grad()`, `torch.enable_grad()` and `torch.autocast` is a
                subgraph, as in a program of torch.export (`wrap_with_set_grad_enabled`, `wrap_with_autocast`); else
                the casts of autocast are ops, and blocks are subgraphs only where gradients could show them.

        Raises ArgumentError for a pattern that matches no module call and flags that are no bools, ExportError for what
        cannot be expressed: changes of an input's shape or storage, changes of tensors that are neither parameters nor
        buffers, leaf modules.

        Warns where the program cannot check what a call of the trace does: FixedValueWarning for numbers in objects
        among the arguments, SideEffectWarning where it depends on Python state that forward writes, or forward leaves
        tensors in Python objects.
        """
        deferred = prefer_deferred_runtime_asserts_over_guards
        for flag in (mode_regions, deferred):
            if not isinstance(flag, bool):
                raise ArgumentTypeError(
                    f"mode_regions= and prefer_deferred_runtime_asserts_over_guards= are True or False, not {flag!r}"
                )
        self._warn_of_a_form("the ExportedProgram")
        for effect in self.side_effects:
            if effect.leaves_tensors and not effect.baked_in:
                text = f"the ExportedProgram does not do what the forward did here: {effect}. Return the tensor"
                warnings.warn(text, SideEffectWarning, stacklevel=2)
        program = self._program.without_argument_mutation().with_real_classes()
        return to_exported_program(program, preserve_module_call_signature, deferred=deferred, modes=mode_regions)

    def _warn_of_a_form(self, what: str) -> None:
        tape = self._program.tape
        if tape.cleared or any(write.of is not None for write in tape.attribute_writes):
            raise ExportError(
                f"{what} cannot hold what the forward does to gradients (`x.grad`)",
                module=tape.root.path,
                hint="return the gradients: torch.autograd.grad(loss, list(model.parameters()))",
            )
        warn_of_numbers(tape.argument_numbers, what)
        baked_in = [effect for effect in tape.side_effects if effect.baked_in]
        if baked_in:
            warnings.warn(str(refusal(baked_in, f"{what} is right for one call only")), SideEffectWarning, stacklevel=3)

    def check(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> str:
        """Run the model and the trace on copies of the same inputs from the same random state, and compare.

        Compares results, changed inputs and changed buffers: of tensors shape, dtype, device, strides, `requires_grad`
        and values; numbers and texts; with which inputs, tensors of the model and other results each result shares
        memory, and which of them it is. Tolerances are those of `torch.testing.assert_close`, the absolute one times
        the largest value of the tensor where that is below 1. Of objects that hold no tensors only the types are
        compared. Both start from the model's present state, which is restored. Returns what was compared, in words.

        Raises CheckError with all differences; for a specialized trace, with the first specialization that does not
        hold on these inputs. Raises ScopetraceError for a loaded trace, which has no model.
        """
        return compare_with_model(self._program, *_arguments(args, kwargs))

    def save(self, path: str | os.PathLike[str], *, external_data: str | None = None) -> None:
        """Write the trace to a file, with the parameters and buffers that it reads, without the model's code.

        The file is data: `load` runs nothing in it. It has the names of classes of modules, arguments and results.

        Args:
            path: the file.
            external_data: the name of a file beside it for parameters and buffers. Traces that name one file share what
                is equal in it. It only grows: delete it with its traces.

        Raises TraceFileError for what is no data: leaf modules, packed weights of quantized layers, tensors of other
        classes, objects of kinds such as arrays among the arguments; for another file in the place of `external_data`.
        OSError where a file cannot be written.
        """
        self._program.save(Path(path), external_data)

    def __reduce__(self) -> Any:
        return Trace, (self._program,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Trace:
        return Trace(self._program.with_tape(self._program.tape))

    def __repr__(self) -> str:
        tapes = list(self._held.tape.walk())
        ops = sum(op.kind in ("call_function", "call_module") for tape in tapes for op in tape.ops)
        calls = sum(call.is_module for tape in tapes for call in tape.calls)
        return f"<Trace of {self.scope.path}: {ops} ops, {calls} module calls>"

    def __eq__(self, other: object) -> bool:
        """Whether two traces do the same: whether their digests are equal. `st.diff` tells what differs."""
        return self is other or (self.digest == other.digest if isinstance(other, Trace) else NotImplemented)

    def __hash__(self) -> int:
        return hash(self.scope.path)  # an edit changes the digest


class OutlinedProgram(Shown):
    """A traced program in which chosen module calls are calls of shared functions. It runs and prints.

        outlined = st.trace(model, (x,)).outline(torch.nn.Linear)
        outlined.functions  # one for both layers

    `Trace.outline` makes it.
    """

    def __init__(self, source: Trace, program: OutlinedTrace) -> None:
        super().__init__(program)
        self._source = source

    @property
    def functions(self) -> tuple[Function, ...]:
        """The functions, callees before their callers."""
        program = self._program
        assert isinstance(program, OutlinedTrace)
        return program.functions

    def inline(self) -> Trace:
        """The flat program: the trace that this one was made from. Raises EditError for a graph edited since."""
        if self._program.tape.edited and not program_of(self._source).tape.edited:
            raise EditError(
                "the graph of this outlined program was edited, and the trace that it was made from was not",
                module=self._program.tape.root.path,
                hint="edit the trace, and outline it then",
            )
        return self._source

    def __str__(self) -> str:
        functions = [f"{f}  # {len(f.calls)} call{'s' * (len(f.calls) != 1)}" for f in self.functions]
        return "\n".join([*functions, render(self._program)])

    def __repr__(self) -> str:
        count = len(self.functions)
        return f"<OutlinedProgram of {self.scope.path}: {count} function{'s' * (count != 1)}>"


@knows_others("st.trace", TRACE_WORDS)
def trace(
    model: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    functional: bool = True,
    leaf_modules: Selection | None = None,
    specialize: bool = False,
    side_effects: Literal["warn", "refuse"] | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Trace a module, or any callable, into a graph that knows its modules.

        tr = st.trace(model, (x,))
        print(tr)  # the program by modules; equal layers once
        tr.graph_module  # the torch.fx.GraphModule

    One pass of Python over the model with fake tensors: no weight is read or copied, and the model is as it was
    afterwards. Autograd, autocast, eval and training mode are those at the call.

    Args:
        model: an `nn.Module`, a function, or a bound method of a module.
        args: a tuple of the positional arguments of the model, or a single tensor; tensors on any device, the meta
            device too. A function may take modules and an optimizer, as `step(model, optimizer, x, y)`; a call of the
            trace is given the same ones.
        kwargs: a dict of its keyword arguments.
        dynamic_shapes: which sizes may differ from call to call, in any of torch.export's forms: a dict by argument
            name or a tuple, of dicts or lists of `Dim`, derived dims, `Dim.AUTO`, `Dim.DYNAMIC`, numbers or None. All
            other sizes are those of the arguments. A call checks its sizes against what was captured.
        functional: True gives a graph in which no op writes, and `Trace.write_back` beside it; False keeps the ops as
            they ran.
        leaf_modules: modules whose calls are one `call_module` node each, which runs the module: classes, modules,
            patterns (`"layers.*.attn"`) or predicates, as for `Trace.calls`.
        specialize: where Python needs a value that depends on data (`if x.sum() > 0`, `int(t)`, `range(n.item())`), the
            example inputs decide. Each decision is in `Trace.specializations` and an assertion in the graph: a call
            with inputs that decide otherwise is refused. Of the model, only the ops that such a value comes from run
            for real, on copies. Sizes and numbers that Python does not look at stay symbols.
        side_effects: for a forward that writes into Python objects, or asks for what differs from call to call; all
            that it did is in `Trace.side_effects`. None: a second call of the trace is refused where the program
            depends on it. "warn": a SideEffectWarning here, and at such a call in place of the error. "refuse":
            SideEffectError here.
        progress: called with (scope path, number of ops so far) at each module call.

    Raises:
        LeafPatternError: an entry of leaf_modules matches no module of the model.
        DynamicShapeError: dynamic_shapes does not fit the arguments, or the model fixes a size that it names.
        FunctionalizationError: a mutation has no functional form with the same meaning (with functional=True).
        DataDependentError: Python needs a value that depends on the inputs (`if x.sum() > 0`); with specialize=True,
            one that depends on tensors without data (on the meta device).
        SideEffectError: the forward has side effects, and side_effects="refuse".
        TraceError: for other things that cannot be recorded; it has one subclass for each.
        ArgumentError: side_effects= is none of its values.
        ArgumentTypeError: model is a class or not callable, args is no tuple, kwargs is no dict, or specialize= is no
            bool.
        Exception: what the model itself raises.
    """
    if not isinstance(specialize, bool):
        raise ArgumentTypeError(f"specialize={specialize!r}: it must be True or False")
    if side_effects not in (None, "warn", "refuse"):
        raise ArgumentError(f"side_effects={side_effects!r}: it must be 'warn', 'refuse' or None")
    if isinstance(model, type) or not callable(model):
        what = f"the class {model.__name__}: make one" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ArgumentTypeError(f"model must be a module or a function, and is {what}; write st.trace(model, args)")
    arguments, named = _arguments(args, kwargs)
    try:
        tape = record(
            model,
            arguments,
            named,
            dynamic_shapes=dynamic_shapes,
            leaf_modules=() if leaf_modules is None else leaf_modules,
            specialize=specialize,
            progress=progress,
        )
    except DynamicShapeError as misfit:
        explain(misfit, model, arguments, named, dynamic_shapes)
        raise
    except TypeError as raised:
        unbound = None if isinstance(raised, ScopetraceError) else _unbound(model, arguments, named)
        if unbound is None:
            raise
        raise unbound from raised
    if tape.side_effects and side_effects is not None:
        error = refusal(tape.side_effects, "the forward has a side effect, which no graph carries")
        if side_effects == "refuse":
            raise error
        warnings.warn(str(error), SideEffectWarning, stacklevel=2)
        tape.warns_of_effects = True
    return Trace(TracedProgram(tape, functional_tape(tape) if functional else tape, model))


def _unbound(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArgumentTypeError | None:
    """The error for arguments that the signature of a model does not take; None where it takes them."""
    try:
        signature = inspect.signature(getattr(model, "forward", model))
    except (TypeError, ValueError):  # built-in callables
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(model, "__qualname__", type(model).__name__)
        hint = "positional arguments are args=(…,), keyword arguments kwargs={…}"
        return ArgumentTypeError(f"{name} takes {signature}: {error}; {hint}")
    return None


def _arguments(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a model, as `trace` and `Trace.check` take them."""
    if isinstance(args, torch.Tensor):
        args = (args,)
    if isinstance(args, Mapping):
        raise ArgumentTypeError(
            "args must be a tuple of positional arguments, not dict: pass keyword arguments as kwargs={...}, "
            "or args=({...},) for a model that takes the dict itself"
        )
    if isinstance(args, str | torch.nn.Module) or not isinstance(args, Iterable):
        raise ArgumentTypeError(f"args must be a tuple of positional arguments, not {type(args).__name__}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ArgumentTypeError(
            f"kwargs must be a dict of keyword arguments, not {type(kwargs).__name__}; "
            "several positional arguments are one tuple, args=(a, b)"
        )
    return tuple(args), dict(kwargs or {})
