"""Graphs without mutation for compilers: `functionalize` for a GraphModule, `functional_backend` for torch.compile.

Data flow:
    GraphModule -> traced at ATen level or at torch level -> GraphModule without mutation + write-back program
    inputs -> checked -> that graph, perhaps compiled -> write-back -> results and effects of the original
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.fx

from scopetrace._compat.compilers import compiler_for
from scopetrace._compat.symbols import Symbolic
from scopetrace._compat.tensors import forget_real_tensors, storage_id
from scopetrace.api.runnable import Runnable, knows_others, program_of
from scopetrace.errors import ArgumentError, ArgumentTypeError
from scopetrace.ir.write_back import FromGraph, GraphInput, WriteBack
from scopetrace.lower.scatters import Form, lower_scatters
from scopetrace.lower.split import Partition, Rewrite, SplitProgram, split_backward
from scopetrace.program.compiled import GraphValues
from scopetrace.program.graph import node_value
from scopetrace.program.traced import TracedProgram
from scopetrace.torch_level.names import name_torch_functions
from scopetrace.torch_level.tapes import number_inputs, tapes_of, with_numbers

Level = Literal["aten", "torch"]
Writer = Literal["scopetrace", "compiler"]
Compiler = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]


class Functionalized(Runnable):
    """A graph without mutation and its write-back. A call has the results and effects of the original GraphModule.

        pure = st.functionalize(gm, (x,))
        pure.graph_module, pure.write_back

    `functionalize` makes it.
    """

    def __init__(self, program: TracedProgram, level: Level) -> None:
        super().__init__(program)
        self.level = level
        if level == "torch":
            name_torch_functions(self.graph_module, program.tape)

    @property
    def _program(self) -> TracedProgram:
        return self._held  # its graph is rewritten for the compiler, and its other forms are what goes around that

    def __repr__(self) -> str:
        return f"<Functionalized at {self.level} level: {len(self.graph_module.graph.nodes)} nodes>"


def functionalize(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    level: Level = "aten",
    lower_scatter: Form | None = None,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Functionalized:
    """Make a graph without mutation from `gm`, and a write-back program with its effects.

        pure = st.functionalize(torch.fx.symbolic_trace(model), (x,))
        assert torch.equal(pure(x), model(x))

    Works for graphs from Dynamo, `fx.symbolic_trace`, `make_fx` and `ExportedProgram.module()`. Sizes, and Python
    values among the inputs, are those of the example inputs. `gm` itself is not changed.

    Args:
        gm: the graph. The result shares its parameters and buffers, which write-backs change.
        example_inputs: its positional arguments; tensors on any device, or fake tensors with concrete sizes.
        level: the ops of the result. `"aten"`: ATen ops. `"torch"`: the functions and methods of `gm` where they do not
            mutate, their functional variants where they do, and ATen ops where torch has no such function.
        lower_scatter: the ops for writes into a part of a tensor, for compilers that support only some:
            `"slice_scatter"`, `"index_put"`, `"where"` or `"cat"`. None uses the scatter op of each view.
        decompositions: at ATen level, a table as for `Trace.decompose`, such as
            `torch.export.default_decompositions()`. None keeps the ops.

    Raises:
        FunctionalizationError: a mutation has no functional form with the same meaning.
        DecompositionError: as `Trace.decompose`.
        ArgumentError: `level` or `lower_scatter` is none of these, or there are `decompositions` at torch level.
        ArgumentTypeError: an example input is a symbolic number.
    """
    for i, kind in [(i, type(x).__name__) for i, x in enumerate(example_inputs) if isinstance(x, Symbolic)]:
        hint = "as a backend of torch.compile, st.functional_backend(compiler) follows sizes"
        raise ArgumentTypeError(f"example_inputs[{i}] is a {kind}: give the number that the result is for; {hint}")
    return _functionalized(gm, example_inputs, level, _rewriting(level, lower_scatter, decompositions), "scopetrace")


def _functionalized(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], level: Level, rewrite: Rewrite, write_back: Writer
) -> Functionalized:
    if not isinstance(gm, torch.fx.GraphModule):
        raise ArgumentTypeError(f"gm must be a torch.fx.GraphModule, not {type(gm).__name__}; st.trace takes a model")
    args = tuple(example_inputs)
    recorded, pure = tapes_of(gm, args, torch_level=level == "torch")
    program = rewrite(TracedProgram(recorded, pure, gm))
    tape = program.tape
    outputs, inputs = tape.graph_outputs(), tape.inputs
    steps = tape.write_back or WriteBack([], GraphValues(tape).sources)

    def has_history(target: GraphInput, value: FromGraph) -> bool:
        return bool(outputs[value.index].requires_grad or inputs[target.index].requires_grad)

    left = steps.left_to_compiler(has_history) if write_back == "compiler" else []
    if left:  # the program without the copies that the compiler does itself
        kept = [u for u in steps.updates if not any(u is one for one in left)]
        program = program.with_tape(dataclasses.replace(tape, write_back=dataclasses.replace(steps, updates=kept)))
    functionalized = Functionalized(program, level)
    functionalized.graph_module.meta["scopetrace"] = steps.rows(left)
    # Dynamo keeps what it compiled, also after a reset, and calls have inputs of their own
    for tape in (program.recorded, program.tape):
        tape.example_inputs = None
        forget_real_tensors(tape.fake_mode)
    return functionalized


@knows_others("functional_backend", {})
def functional_backend(
    compiler: Compiler | str,
    *,
    level: Level = "aten",
    lower_scatter: Form | None = None,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    backward_compiler: Compiler | str | None = None,
    partition_fn: Partition | None = None,
    write_back: Writer = "scopetrace",
) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A backend for `torch.compile` whose `compiler` gets only graphs without mutation.

        def compiler(gm, example_inputs):
            return gm.forward

        torch.compile(model, backend=st.functional_backend(compiler))(x)

    `torch.compile(model, backend=functional_backend(compiler))`. Parameters and buffers that Dynamo lifts are inputs of
    the graph. Write-backs into inputs, parameters and buffers happen outside of it. The backend can also be the
    `fw_compiler` and `bw_compiler` of `aot_autograd`. Without that and without a `backward_compiler`, autograd
    differentiates what `compiler` returns.

    The compiler runs at the first call, and again for inputs of other sizes, dtypes, strides or shared memory, or with
    autograd on or off: each graph has static sizes, also under `dynamic=True`.

    Args:
        compiler: called with the GraphModule and a list of real example inputs; returns a callable that takes such
            inputs and returns the values of the graph's output node. Or the name of a backend of torch.compile, such
            as `"inductor"`.
        level: as for `functionalize`.
        lower_scatter: as for `functionalize`.
        decompositions: as for `functionalize`.
        backward_compiler: as `compiler`, for the graph of the backward at its first run; then `compiler` gets the graph
            of the forward that goes with it. Both only where something requires grad, and at ATen level. Nodes have
            scopes in `node.meta`, as in `Trace.split_backward`.
        partition_fn: as for `Trace.split_backward`.
        write_back: who copies new values into inputs, after the graph. `"compiler"`: what `compiler` returns does it,
            into the tensors that it is called with, for a device that keeps its state; a value that only it copies may
            then be None. `gm.meta["scopetrace"]`, a tuple of WriteBackRow, says of each step whose it is: copies that
            autograd has to see stay scopetrace's.

    Raises ArgumentError as `functionalize`, whose other errors come out of the first call of the compiled model.
    """
    rewrite = _rewriting(level, lower_scatter, decompositions)
    if write_back not in get_args(Writer):
        raise ArgumentError(f"write_back={write_back!r}: must be one of {', '.join(map(repr, get_args(Writer)))}")
    make = functools.partial(_functionalized, level=level, rewrite=rewrite, write_back=write_back)
    compile_graph = compiler_for(compiler)
    compile_backward = None if backward_compiler is None else compiler_for(backward_compiler)
    if level != "aten" and backward_compiler is not None:
        raise ArgumentError('backward_compiler= takes graphs of ATen ops: give it with level="aten"')
    if write_back == "compiler" and backward_compiler is not None:
        raise ArgumentError('write_back="compiler" would write before what backward reads is kept: give one of the two')

    split = functools.partial(split_backward, partition_fn=partition_fn, rewrite=rewrite)

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return _Compiled(gm, make, compile_graph, compile_backward and (split, compile_backward))

    return backend


@knows_others('backend="scopetrace"', {"mode": 'write options={"compiler": ...} with a compiler of that mode'})
def compile_backend(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """`torch.compile(model, backend="scopetrace", options={...})`: the options are arguments of `functional_backend`.

    Its `compiler` is `"inductor"` where they name none.
    """
    return functional_backend(**{"compiler": "inductor", **(options or {})})(gm, example_inputs)


def _rewriting(level: Level, lower_scatter: Form | None, decompositions: Any) -> Rewrite:
    """What the options do with a program. Raises ArgumentError."""
    if decompositions is not None and level != "aten":
        raise ArgumentError('decompositions= are of ATen ops: give them with level="aten"')
    if level not in get_args(Level):
        raise ArgumentError(f"level={level!r}: must be one of {', '.join(map(repr, get_args(Level)))}")
    if lower_scatter is not None and lower_scatter not in get_args(Form):
        raise ArgumentError(f"lower_scatter={lower_scatter!r}: must be one of {', '.join(map(repr, get_args(Form)))}")

    def rewrite(program: TracedProgram) -> TracedProgram:
        program = program if decompositions is None else program.decomposed(decompositions)
        return program if lower_scatter is None else lower_scatters(program, lower_scatter)

    return rewrite


class _Compiled:
    """A subgraph of a compiled model, with a compiled program for each kind of inputs seen so far."""

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        make: Callable[..., Functionalized],
        compiler: Compiler,
        backward: tuple[Callable[[TracedProgram], SplitProgram], Compiler] | None,
    ) -> None:
        self._gm, self._make, self._compiler, self._backward = gm, make, compiler, backward
        self._programs: dict[Any, tuple[Functionalized, Callable[..., Any]]] = {}
        self._numbers = number_inputs(gm)
        self._uses_absolute_offset = False  # whether an op addresses an input from the start of its storage

    def __call__(self, *args: Any) -> Any:
        key = repr([args[i].item() for i in self._numbers])  # which tells 0.0 from -0.0
        compiled = self._programs.get((key, _kind_of(args, self._uses_absolute_offset)))
        if compiled is None:
            compiled = self._compile(args)
            self._programs[key, _kind_of(args, self._uses_absolute_offset)] = compiled
        functionalized, run = compiled
        return functionalized.run(run, *args)

    def _compile(self, args: tuple[Any, ...]) -> tuple[Functionalized, Callable[..., Any]]:
        functionalized = self._make(with_numbers(self._gm, {i: args[i] for i in self._numbers}), args)
        program = program_of(functionalized)
        self._uses_absolute_offset |= any(v.storage in program.tape.uses_absolute_offset for v in program.tape.inputs)
        inputs = program.boundary.enter(args, {})
        if self._backward is None or not torch.is_grad_enabled() or not _requires_grad(program):
            return functionalized, self._compiler(functionalized.graph_module, inputs)
        split, backward_compiler = self._backward
        parts = split(program)
        if len(parts.primals) == len(inputs) and parts.gradients:  # it takes and returns what that graph does
            parts.forward.meta["scopetrace"] = functionalized.graph_module.meta["scopetrace"]
        forward = self._compiler(parts.forward, parts.inputs_of_forward(inputs))
        return functionalized, parts.run_by(forward, _at_first_run(parts.backward, backward_compiler))


def _at_first_run(graph_module: torch.fx.GraphModule, compiler: Compiler) -> Callable[..., Any]:
    """A graph that is compiled when it is first run, for the inputs that it then gets."""
    compiled: Callable[..., Any] | None = None

    def run(*args: Any) -> Any:
        nonlocal compiled
        compiled = compiled or compiler(graph_module, list(args))
        return compiled(*args)

    return run


def _requires_grad(program: TracedProgram) -> bool:
    """Whether an input or attribute of the graph does."""
    states = [state for state in program.lowering.states if state.op in ("placeholder", "get_attr")]
    return any(getattr(node_value(state.node), "requires_grad", False) for state in states)


def _kind_of(args: tuple[Any, ...], uses_absolute_offset: bool) -> Any:
    """A key that is equal for inputs that the same program can take.

    It has the offset of a tensor from the first input in its storage, or from its start with `uses_absolute_offset`.
    """
    memory: dict[int, tuple[int, int]] = {}
    return (torch.is_grad_enabled(), *(_kind(a, memory, uses_absolute_offset) for a in args))


def _kind(a: Any, memory: dict[int, tuple[int, int]], uses_absolute_offset: bool) -> Any:
    if not isinstance(a, torch.Tensor):
        return type(a), int(a) if isinstance(a, torch.SymInt) else a
    if a.layout is not torch.strided:
        return type(a), tuple(a.shape), a.dtype, a.device, a.layout, a.requires_grad
    start = int(a.storage_offset()) * a.itemsize
    place, first = memory.setdefault(storage_id(a), (len(memory), start))
    offset = start if uses_absolute_offset else start - first
    return tuple(a.shape), a.stride(), offset, a.dtype, a.device, a.requires_grad, a.is_leaf, place
