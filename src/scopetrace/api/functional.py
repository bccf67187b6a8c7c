"""Graphs without mutation for compilers: `functionalize` for any GraphModule, `functional_backend` for torch.compile.

Data flow:
    GraphModule -> trace at ATen level, or at torch level -> pure GraphModule + write-back program
    inputs -> checked -> pure graph, run by whatever compiler -> write-back -> results and effects of the original
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
import torch.fx

from scopetrace.errors import ScopetraceError
from scopetrace.functionalization.report import Alias, Mutation, aliases, mutations
from scopetrace.ir.write_back import WriteBack
from scopetrace.lower.scatters import Form, lower_scatters
from scopetrace.program.traced import TracedProgram
from scopetrace.torch_level import aten_tapes, torch_level_tapes
from scopetrace.torch_level.names import name_torch_functions
from scopetrace.torch_level.purity import assert_pure as assert_pure

Level = Literal["aten", "torch"]
Compiler = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]


class Functionalized:
    """A program without mutation and what follows it. Calling it does what the original does: results and effects."""

    def __init__(self, program: TracedProgram, level: Level, lower_scatter: Form | None) -> None:
        self._program = program
        self.level = level
        self.graph_module: torch.fx.GraphModule = program.graph_module
        """The pure graph: the tensors of the inputs in order as placeholders, a tuple of tensors as output."""
        tape = program.tape
        if lower_scatter is not None:
            lower_scatters(self.graph_module, lower_scatter, tape.fake_mode)
        if level == "torch":
            name_torch_functions(self.graph_module, tape)
        assert_pure(self.graph_module)

    @property
    def write_back(self) -> WriteBack | None:
        """What follows the graph so that the whole does what the original does; None where nothing has to."""
        return self._program.write_back

    @property
    def mutations(self) -> list[Mutation]:
        """What the original changes in its inputs, parameters and buffers, in the order of the program."""
        return mutations(self._program.recorded)

    @property
    def aliases(self) -> list[Alias]:
        """For each tensor of the result: is it fresh, an input itself, or a view of an input or earlier result?"""
        return aliases(self._program.recorded)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph, then the write-back.

        Raises InputMismatchError for inputs that differ from the example inputs in shape, dtype or shared memory.
        """
        return self.run(self.graph_module, *args, **kwargs)

    def run(self, graph: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As a call, with `graph` in the place of the graph: what a compiler made of it.

        It gets the tensors among the inputs and returns the values of the graph's output node, as list or tuple. In
        which memory and with which strides does not matter: what is not as in the graph is copied, or viewed again.

        Raises CompiledGraphError for values of other shapes or dtypes than the graph's.
        """
        return self._program.run(graph, *args, **kwargs)

    @property
    def uses_absolute_offset(self) -> bool:
        """Whether the program counts from the start of an input's memory, as `as_strided` with an offset does."""
        tape = self._program.tape
        return any(v.storage in tape.uses_absolute_offset for v in tape.inputs)

    def tensors(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """The inputs of the graph among the arguments of the original."""
        return self._program.boundary.enter(args, {})

    def __repr__(self) -> str:
        return f"<Functionalized at {self.level} level: {len(self.graph_module.graph.nodes)} nodes>"


def functionalize(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    level: Level = "aten",
    lower_scatter: Form | None = None,
) -> Functionalized:
    """A graph that does what `gm` does and mutates nothing, and the write-backs that make the whole equal.

    Works for graphs from Dynamo, `fx.symbolic_trace`, `make_fx` and `ExportedProgram.module()`. Sizes, and Python
    values among the inputs, are those of the example inputs. `gm` itself is not changed.

    Args:
        gm: the graph. Its parameters and buffers stay its own; write-backs go into them.
        example_inputs: its positional arguments; tensors on any device, or fake tensors with concrete sizes.
        level: the vocabulary of the result. `"aten"`: ATen ops. `"torch"`: the functions and methods of `gm` where they
            do not mutate, their pure twins where they do; what no torch function says is an ATen op.
        lower_scatter: the form of writes into a part of a tensor, for compilers that do not know all:
            `"slice_scatter"`,
            `"index_put"`, `"where"` or `"cat"`. None leaves each as it is.

    Raises:
        FunctionalizationError: a mutation has no pure form with the same meaning.
    """
    if level not in get_args(Level):
        raise ScopetraceError(f"level={level!r}: must be one of {', '.join(map(repr, get_args(Level)))}")
    if lower_scatter is not None and lower_scatter not in get_args(Form):
        raise ScopetraceError(f"lower_scatter={lower_scatter!r}: must be one of {', '.join(map(repr, get_args(Form)))}")
    args = tuple(example_inputs)
    recorded, pure = aten_tapes(gm, args) if level == "aten" else torch_level_tapes(gm, args)
    return Functionalized(TracedProgram(recorded, pure, gm), level, lower_scatter)


def functional_backend(
    compiler: Compiler, *, level: Level = "aten", lower_scatter: Form | None = None
) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A backend for `torch.compile` that shows `compiler` graphs without mutation only.

    `torch.compile(model, backend=functional_backend(compiler))`. The compiler gets a pure graph, where parameters and
    buffers that Dynamo lifted are inputs, and real example inputs; what it returns is called with those inputs and
    gives the values of the graph's output. Write-backs into inputs, parameters and buffers happen outside of it. It can
    also be the `fw_compiler` of `aot_autograd`; without that, the pure graph is differentiable as it stands.

    The compiler runs at the first call, and again for inputs of other sizes, dtypes, strides or sharing, or with
    gradients on or off: each graph has concrete sizes, also under `dynamic=True`.

    Args:
        compiler: called with the pure GraphModule and a list of example inputs.
        level: as for `functionalize`.
        lower_scatter: as for `functionalize`.
    """

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return _Compiled(gm, functools.partial(functionalize, level=level, lower_scatter=lower_scatter), compiler)

    return backend


class _Compiled:
    """One subgraph of a compiled model: a compiled program for each kind of inputs that it met."""

    def __init__(self, gm: torch.fx.GraphModule, make: Callable[..., Functionalized], compiler: Compiler) -> None:
        self._gm, self._make, self._compiler = gm, make, compiler
        self._programs: dict[Any, tuple[Functionalized, Callable[..., Any]]] = {}
        self._anchored = False

    def __call__(self, *args: Any) -> Any:
        found = self._programs.get(_kind_of(args, self._anchored))
        if found is None:
            found = self._compile(args)
            self._anchored = self._anchored or found[0].uses_absolute_offset
            self._programs[_kind_of(args, self._anchored)] = found
        program, run = found
        return program.run(run, *args)

    def _compile(self, args: tuple[Any, ...]) -> tuple[Functionalized, Callable[..., Any]]:
        program = self._make(self._gm, args)
        return program, self._compiler(program.graph_module, program.tensors(args))


def _kind_of(args: tuple[Any, ...], uses_absolute_offset: bool) -> Any:
    """Equal for inputs for which the same program is right.

    Where a tensor begins in its memory counts beside another one in that memory, and where a program is `anchored`.
    """
    strided = [a for a in args if isinstance(a, torch.Tensor) and a.layout is torch.strided]
    count = collections.Counter(a.untyped_storage()._cdata for a in strided)
    memory: dict[int, int] = {}
    return (torch.is_grad_enabled(), *(_kind(a, memory, count if not uses_absolute_offset else None) for a in args))


def _kind(a: Any, memory: dict[int, int], count: collections.Counter[int] | None) -> Any:
    if not isinstance(a, torch.Tensor):
        return type(a), int(a) if isinstance(a, torch.SymInt) else a
    if a.layout is not torch.strided:
        return type(a), tuple(a.shape), a.dtype, a.device, a.layout, a.requires_grad
    place = memory.setdefault(a.untyped_storage()._cdata, len(memory))
    offset = a.storage_offset() if count is None or count[a.untyped_storage()._cdata] > 1 else None
    return tuple(a.shape), a.stride(), offset, a.dtype, a.device, a.requires_grad, a.is_leaf, place
