"""A trace as an ONNX model: what `Trace.to_onnx` does before it writes and verifies."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
import torch.fx

from scopetrace.errors import OnnxOpError, OnnxOptionError
from scopetrace.ir import meta
from scopetrace.lower.onnx.assemble import Assembler, Parts
from scopetrace.lower.onnx.naming import FunctionNames, Labels
from scopetrace.lower.onnx.options import Targets, is_onnx_attribute, read_attributes, read_names, read_targets
from scopetrace.lower.onnx.pieces import CallSite, CombinedGraph, Subgraph
from scopetrace.lower.onnx.program import exported_program
from scopetrace.lower.onnx.results import Results
from scopetrace.lower.onnx.sizes import SizeNames
from scopetrace.lower.onnx.translate import Table, translate
from scopetrace.lower.onnx.weights import attach
from scopetrace.program.outlined import Function, OutlinedFunctions, is_named, outline_calls
from scopetrace.program.traced import TracedProgram

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `Trace.to_onnx` that decide what the model is; see there."""

    functions: Targets = ()
    plugins: Targets = ()
    opset_version: int | None = None
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    optimize: bool = True
    attributes: bool | Sequence[str] = False
    custom_translation_table: Table | None = None


@dataclasses.dataclass
class Exported:
    """An ONNX model, and what it was made from."""

    model: ir.Model
    functions: list[ir.Function]
    """All functions, callees first, with those whose bodies the model leaves out."""
    plugins: list[ir.Function]
    """Those whose bodies it leaves out."""
    without_form: list[str]
    """The names of those whose bodies are not known in ONNX at all."""
    classes: dict[tuple[str, str], type | None]
    """By domain and name, the class of the modules that a function stands for."""
    results: Results
    expected_calls: Counter[type | None]
    """How often the trace calls the modules of each class that became functions."""

    def calls_in_file(self) -> Counter[tuple[str, str]]:
        """By domain and name, how often a run of the file calls each function."""
        bodies = {(f.domain, f.name): f for f in self.functions}

        def count(graph: Any) -> Counter[tuple[str, str]]:
            found: Counter[tuple[str, str]] = Counter()
            for node in ir.traversal.RecursiveGraphIterator(graph):
                key = (node.domain, node.op_type)
                if key in bodies:
                    found += Counter({key: 1}) + count(bodies[key])
            return found

        return count(self.model.graph)


def export(program: TracedProgram, options: Options, say: Say) -> Exported:
    """Make the ONNX model of a program without mutation."""
    functions, names = read_targets(options.functions, "functions")
    plugins, plugin_names = read_targets(options.plugins, "plugins")
    outlined: OutlinedFunctions | None = None
    if functions or plugins:
        say("outlining")
        outlined = outline_calls(program, [*functions, *plugins])
    main = program if outlined is None else outlined.program
    results, held = Results(main.tape, main.write_back), main.tape.attributes
    input_names = read_names(options.input_names, _input_names(main.lowering.graph), "input_names", held)
    output_names = read_names(options.output_names, results.names(), "output_names", held)

    def convert(is_left_out: Callable[[Any], bool]) -> tuple[CombinedGraph, ir.Model, torch.fx.Graph]:
        whole = CombinedGraph(main.lowering, _function_of(outlined), results.values, is_left_out)
        say(f"translating {len(whole.graph.nodes):,} nodes")
        exported, table = exported_program(whole.root, whole.graph), options.custom_translation_table
        return whole, *translate(exported, opset_version=options.opset_version, optimize=options.optimize, table=table)

    def is_plugin(function: Function) -> bool:
        return _is_plugin(function, plugins)

    try:
        whole, translated, source = convert(lambda function: False)
    except OnnxOpError:
        if not plugins:
            raise
        whole, translated, source = convert(is_plugin)  # it may be their bodies that have no ONNX form
    say("assembling")
    sizes = SizeNames(main.tape.sizes)
    sizes.rename(translated.graph, whole.fakes.origins)
    parts = Parts(
        FunctionNames({**names, **plugin_names}),
        Labels(source),
        _Attributes(program, main, options.attributes).of,
        sizes,
        lambda piece: not is_plugin(piece.function),
    )
    assembler = Assembler(translated, whole, parts)
    model = assembler.model(input_names, output_names)
    attach(model.graph, {name: whole.main.tensor(name) for name in whole.main.held}, results.state())
    return Exported(
        model,
        list(dict.fromkeys(assembler.functions.values())),
        assembler.plugins,
        sorted({f.name for piece, f in assembler.functions.items() if piece.unknown}),
        {(f.domain, f.name): piece.function.module_type for piece, f in assembler.functions.items()},
        results,
        Counter() if outlined is None else Counter(call.module_type for call in outlined.chosen),
    )


def _is_plugin(function: Function, plugins: Sequence[Any]) -> bool:
    """Whether `plugins=` names the calls of a function. Raises OnnxOptionError where it names some of them."""
    named = [any(is_named(call, target) for target in plugins) for call in function.calls]
    if any(named) and not all(named):
        one, other = (function.calls[named.index(which)].fqn for which in (True, False))
        raise OnnxOptionError(
            f"{one} and {other} are equal layers with one function, and plugins= names the first alone: name both"
        )
    return any(named)


def _input_names(graph: torch.fx.Graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if n.op == "placeholder"]


def _function_of(outlined: OutlinedFunctions | None) -> Callable[[torch.fx.Node], Any]:
    if outlined is None:
        return lambda node: None
    known = {function.identifier: function for function in outlined.functions}
    return lambda node: known[node.args[1]]  # type: ignore[index]


class _Attributes:
    """The ONNX attributes of calls: plain attributes of the modules."""

    def __init__(self, flat: TracedProgram, main: TracedProgram, attributes: bool | Sequence[str]) -> None:
        self._flat, self._main = flat.calls, {call.position: call for call in main.calls}
        self._wanted = read_attributes(attributes)

    def of(self, piece: Subgraph, site: CallSite) -> dict[str, Any]:
        """Those of the call at a site. A site in a body stands for many calls, and has what is equal in all of them."""
        position = meta.call_position(site.node)
        assert position is not None
        call = self._main[position]
        found = {n: value for n, value in call.attributes.items() if self._wanted(n) and is_onnx_attribute(value)}
        if piece.function is not None:
            others = [c.attributes for c in self._flat if c.module_type is call.module_type] if found else []
            found = {n: value for n, value in found.items() if all(o.get(n) == value for o in others)}
        return found
