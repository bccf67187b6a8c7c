"""What the objects that people hold have in common: a program that runs, and what a Trace shows of it.

program -> graph_module, write_back, mutations, aliases; a call runs the graph, then the write-back
TracedProgram -> room `view` -> text, HTML, SVG, JSON
a keyword that a function does not take -> which one is meant
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.fx

from scopetrace._compat.graph_module import CompiledSeparately
from scopetrace._compat.ops import building
from scopetrace.errors import ArgumentError, ArgumentTypeError, EditError
from scopetrace.functionalization.report import Alias, Mutation, aliases, mutations
from scopetrace.ir.scopes import Scope
from scopetrace.ir.selection import Selection
from scopetrace.ir.write_back import WriteBack
from scopetrace.program.check import lint
from scopetrace.program.graph import is_recomputed, phase_of, scope_path
from scopetrace.program.selection import Calls, CallValues, activations
from scopetrace.program.traced import ModuleCall, TracedProgram
from scopetrace.view.boxes import boxes, outermost_boxes
from scopetrace.view.diff import digest
from scopetrace.view.memory import Memory
from scopetrace.view.summary import Summary
from scopetrace.view.text import render

P = ParamSpec("P")
T = TypeVar("T")


TRACE_WORDS = {
    "": "the model's own arguments are given as args=(x, …) and kwargs={'mask': …}",
    **dict.fromkeys(("example_inputs", "inputs", "sample_inputs"), "write args=, a tuple of the positional arguments"),
    **dict.fromkeys(("dynamic_axes", "dynamic"), "write dynamic_shapes=, as {'x': {0: torch.export.Dim('batch')}}"),
    "example_kwarg_inputs": "write kwargs=",
    "leaves": "write leaf_modules=",
    "strict": "there is one way of tracing, and it runs the model's Python",
}
ONNX_WORDS = {
    **dict.fromkeys(("dynamic_axes", "dynamic_shapes"), "sizes become dynamic by st.trace(..., dynamic_shapes=)"),
    "opset": "write opset_version=",
    "f": "write path=",
    "dynamo": "every export is one of torch.onnx's exporter with dynamo=True",
    "do_constant_folding": "write optimize=",
    "custom_opsets": "write custom_translation_table=",
    "keep_initializers_as_inputs": "write weight_inputs=",
}
"""Keywords of torch.export, torch.onnx and TorchScript: what to write in their place; "" is any other keyword."""


def knows_others(name: str, others: Mapping[str, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have a function raise ArgumentTypeError for a keyword that it does not take.

    Args:
        name: what users call the function.
        others: what to write, by keyword.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = [p for p in inspect.signature(function).parameters if p != "self"]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for wrong in kwargs.keys() - known:
                near = [f"{match}=" for match in difflib.get_close_matches(wrong, known, n=1, cutoff=0.7)]
                hint = others.get(wrong) or (f"write {near[0]}" if near else others.get("", ""))
                raise ArgumentTypeError(f"{name} has no argument {wrong}=" + (f": {hint}" if hint else ""))
            return function(*args, **kwargs)

        return checked

    return decorate


class Runnable(CompiledSeparately):
    """A graph and its write-back: what Trace, OutlinedProgram and Functionalized have in common."""

    def __init__(self, program: TracedProgram) -> None:
        super().__init__(program)
        self._held = program

    @property
    def _program(self) -> TracedProgram:
        """The program that the graph is now: an edit of `graph_module` is an edit of the program."""
        self._held = self._held.current
        return self._held

    @property
    def __wrapped__(self) -> Callable[..., Any] | None:
        """The module or function that was traced, as of a decorated function; None where it was not."""
        return self._held.model

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The graph: the input tensors in order as placeholders, the result's tensors in order as outputs.

        Parameters, buffers and constants are `get_attr` nodes; the module holds the model's own tensors. In an
        OutlinedProgram, equal module calls are `invoke_subgraph` nodes that share a submodule.
        """
        return self._held.graph_module

    @property
    def write_back(self) -> WriteBack | None:
        """The steps after the graph that change inputs and build results; None where its outputs are the result."""
        return self._program.tape.write_back

    @property
    def mutations(self) -> list[Mutation]:
        """What the original changes in its inputs, parameters and buffers, in the order of execution."""
        return mutations(self._program.reported)

    @property
    def aliases(self) -> list[Alias]:
        """For each tensor of the result: whether it is new, an input, or a view of an input or earlier result."""
        return aliases(self._program.reported)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph, then the write-back: same results and same effects as the original.

        Raises InputMismatchError when the structure, shapes, dtypes, devices or Python values of the arguments are not
        those of the trace, tensors share memory in another way, or a value that the trace is specialized on differs.
        Raises SideEffectError at a second call where the program depends on what forward wrote into Python objects.
        """
        return self._held(*args, **kwargs)

    def run(self, graph: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call that runs `graph`, such as a compiled form of `graph_module`, in its place.

        `graph` gets the tensors among the inputs, then the dynamic numbers, and returns the values of the output node
        of `graph_module`, as list or tuple. Values in other memory or with other strides than those of `graph_module`
        are copied or viewed again, so that the write-back is right.

        Raises InputMismatchError as a call does, CompiledGraphError for values of other shapes or dtypes.
        """
        return self._program.run(graph, *args, **kwargs)


def program_of(traced: Runnable) -> TracedProgram:
    """The program that a trace holds, for `distributed` and `cli`, which read tapes."""
    return traced._program


_ELSEWHERE = {
    "graph": "tr.graph_module.graph",
    "nodes": "tr.graph_module.graph.nodes",
    "code": "tr.graph_module.code",
    "forward": "tr(*args)",
    **dict.fromkeys(("parameters", "state_dict", "to", "cuda", "train", "eval"), "tr.to_module(), an nn.Module"),
    **dict.fromkeys(("modules", "children", "inputs", "outputs"), "tr.calls, of which the first is the model's own"),
    **dict.fromkeys(("flops", "macs", "params", "num_parameters"), "tr.summary().rows[0]"),
    **dict.fromkeys(("export", "onnx"), "tr.to_onnx(path) or tr.to_exported_program()"),
}


class Shown(Runnable):
    """What is for looking at a Trace or an OutlinedProgram."""

    if not TYPE_CHECKING:  # type checkers know what there is

        def __getattr__(self, name: str) -> Any:
            """What a name that a GraphModule or a module has is called here, in an AttributeError."""
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)  # a property, whose own AttributeError this is
            instead = _ELSEWHERE.get(name)
            raise AttributeError(f"{type(self).__name__} has no {name!r}" + (f": write {instead}" if instead else ""))

    @property
    def scope(self) -> Scope:
        """The root scope, named after the model's class."""
        return next(self._held.tape.scopes())

    def scope_of(self, node: torch.fx.Node) -> Scope:
        """The scope of a node of this trace's graph, or of a graph made from it.

        A node that a pass made without copying `node.meta` gets the innermost scope around its users, or its inputs.
        Raises ArgumentTypeError for what is no `torch.fx.Node`.
        """
        _refuse_other(node, "scope_of", "; Trace.scope.walk() and Trace.calls have the scopes and module calls by name")
        known = scope_path(node) is not None
        return (self._held if known else self._program).scope_of(node)

    def phase_of(self, node: torch.fx.Node) -> str:
        """What a node of this trace's graph does in a training step: `forward`, `backward` or `other`.

        `other` is a step of an optimizer, and what a function does between `backward()` and that, as clipping does. The
        scope of a node of `backward` is that of the op of the forward that it belongs to; its module call has it among
        `ModuleCall.backward_nodes`. Raises ArgumentTypeError for what is no `torch.fx.Node`.
        """
        _refuse_other(node, "phase_of")
        return phase_of(node)

    def is_recomputed(self, node: torch.fx.Node) -> bool:
        """Whether a node of `backward` is an op of the forward that runs again, under `torch.utils.checkpoint`.

        Its scope is that of the op, and the op's module call has it among `ModuleCall.backward_nodes`. Raises
        ArgumentTypeError for what is no `torch.fx.Node`.
        """
        _refuse_other(node, "is_recomputed")
        return is_recomputed(node)

    @property
    def calls(self) -> Calls:
        """Every module call in forward order, the root first.

        A list; besides, `tr.calls["layers.*.mlp"]`, `tr.calls[nn.Linear]`, `tr.calls[predicate]` and
        `tr.calls["embed", nn.Linear]` give the calls that patterns of names, classes, modules and predicates name.
        Raises CallNotFoundError for a pattern, class or module that names none.
        """
        return Calls(self._program.calls)

    def call(self, fqn: str, index: int = 0) -> ModuleCall:
        """The call of the module with this name, `"layers.0.mlp"`; `index` 1 is its second call.

        Raises CallNotFoundError, which names similar ones.
        """
        return self.calls.of(fqn, index)

    def activations(self, *args: Any, of: Selection = "*", **kwargs: Any) -> dict[str, CallValues]:
        """Call the trace, and give the values of the arguments and results of chosen module calls.

        By `"fqn"`, for a second call of a module `"fqn#1"`, in the order of execution. The call changes inputs and
        buffers as any call does. With autograd on, values have their gradients' history.

        Args:
            of: which calls, as for `Trace.calls`.

        Raises what a call does; CallNotFoundError where a target names no call, or one in a body of `torch.cond`.
        """
        return activations(self._program, self.calls[of], args, kwargs)

    def summary(self, depth: int | None = None) -> Summary:
        """Shapes, parameters, FLOPs and memory by module; prints as a table, `rows` and `to_dict()` have it as data.

        Args:
            depth: how many levels of calls below the root have rows; None for all.

        Raises ArgumentError for a depth that is no number of levels.
        """
        with building():
            return Summary(self._shown, _levels(depth, None))

    def memory(self, depth: int | None = None) -> Memory:
        """Which memory the program needs when, by module call: made, freed, saved for backward, and the peak, in bytes.

        Of a traced training step that is forward and backward; of a forward alone, what an inference needs. It prints
        as a table; `rows`, `timeline` and `to_dict()` have it as data. Tensors on the meta device count as any.

        Args:
            depth: how many levels of calls below the root have rows; None for all.

        Raises ArgumentError for a depth that is no number of levels.
        """
        with building():
            return Memory(self._shown, _levels(depth, None))

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The program as one HTML file, to be opened in a browser; written to `path` if one is given.

        Modules are boxes that open and close; it needs no network, and is searched by name. The fragment of the URL is
        the box that it opens: `model.html#Net/Block[layers.3]`. Of 14,000 ops it shows as many as are opened.

        Raises OSError where the file cannot be written.
        """
        from scopetrace.view.html import page

        with building():
            text = page(boxes(self._shown))
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def to_svg(
        self, path: str | os.PathLike[str] | None = None, *, depth: int = 1, scope: Selection | None = None
    ) -> bytes:
        """The program as a picture, drawn by Graphviz; written to `path` if one is given.

        Args:
            path: a file whose name ends in `.svg`, `.png` or `.pdf`; None gives SVG.
            depth: levels of calls below the root that are open; of equal neighbours, only the first is drawn.
            scope: what to draw, as for `Trace.calls`, or patterns of user scopes; None is the root.

        Raises ViewDependencyError without Graphviz or `scopetrace[view]`, CallNotFoundError, ArgumentError for another
        ending, OSError where the file cannot be written.
        """
        from scopetrace.view.dot import picture

        suffix = Path(path).suffix.lower() if path is not None else ".svg"
        if suffix not in (".svg", ".png", ".pdf"):
            raise ArgumentError(f"path={str(path)!r}: a picture is a file that ends in .svg, .png or .pdf")
        root = boxes(self._shown)
        roots = [root] if scope is None else outermost_boxes(root, scope)
        data = picture(roots, _levels(depth), suffix[1:])
        if path is not None:
            Path(path).write_bytes(data)
        return data

    def to_model_explorer(self, path: str | os.PathLike[str]) -> None:
        """Write the program as a file for Model Explorer (`model-explorer FILE.json`), with module calls as its layers.

        Raises OSError where the file cannot be written.
        """
        from scopetrace.view.viewers import graph_collection

        Path(path).write_text(json.dumps(graph_collection(boxes(self._shown))), encoding="utf-8")

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the order of execution as a timeline that Perfetto (ui.perfetto.dev) and chrome://tracing open.

        Module calls and ops, as they ran, are bars with FLOPs and bytes; an op takes a microsecond, since a trace has
        no times. A counter has the bytes in use, those of `memory().timeline`. Raises OSError where the file cannot be
        written.
        """
        from scopetrace.view.viewers import chrome_trace

        Path(path).write_text(json.dumps(chrome_trace(self._shown)), encoding="utf-8")

    def print_readable(
        self, depth: int | None = None, *, scope: Selection | None = None, print_output: bool = True
    ) -> str:
        """Print the program as text, and return it.

        Args:
            depth: how many levels of calls below the root are shown with their ops; deeper ones are a line each.
            scope: what to show, as for `Trace.calls`, or patterns of user scopes; None is all.
            print_output: False to return the text only.

        Raises ArgumentError for a depth that is no number of levels, CallNotFoundError.
        """
        is_all = depth is None and scope is None
        text = str(self) if is_all else render(self._shown, _levels(depth, None), scope)
        if print_output:
            print(text)
        return text

    def lint(self) -> None:
        """Check that graph, scopes, calls and functions agree. Raises LintError that lists all that is wrong."""
        lint(self._program)

    @property
    def digest(self) -> str:
        """A SHA-256 of what the trace does, in hexadecimal: equal in each run and process for equal programs.

        It covers inputs, ops with their arguments, types and scopes, module calls, constants, parameters by name and
        type, results and effects; not the values of parameters and buffers, names of nodes and source lines.
        """
        return digest(self._program)

    def __str__(self) -> str:
        return render(self._shown)

    @property
    def _shown(self) -> TracedProgram:
        """For text: an edit that cannot be followed is shown all the same, with the nodes as they are."""
        try:
            return self._program
        except EditError:
            return self._held

    def __iter__(self) -> Iterator[ModuleCall]:
        return iter(self.calls)

    def _repr_html_(self) -> str:
        return self.summary(depth=2).to_html()


def _refuse_other(node: Any, method: str, hint: str = "") -> None:
    if not isinstance(node, torch.fx.Node):
        raise ArgumentTypeError(
            f"{method} takes a torch.fx.Node of graph_module.graph, not {type(node).__name__}{hint}"
        )


def _levels(depth: Any, *others: None) -> Any:
    if depth not in others and (not isinstance(depth, int) or depth < 0):
        raise ArgumentError(f"depth={depth!r}: give a number of levels, 0 or more")
    return depth
