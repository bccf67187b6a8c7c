"""`export` makes an ONNX model of a program, `write` verifies it and writes it to a file.

Data flow:
    arguments of `Trace.to_onnx` -> checked -> outlined program -> combine -> translate -> assemble -> Exported
    Exported -> verify (on request) -> file
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
import torch.fx

from scopetrace.errors import OnnxOpError, OnnxOptionError
from scopetrace.ir import meta
from scopetrace.ir.tape import garbage_collection_paused
from scopetrace.lower.onnx import Targets
from scopetrace.lower.onnx.assemble import Assembler, Exported, Parts, attach, save
from scopetrace.lower.onnx.combine import CallSite, CombinedGraph, Results, Subgraph
from scopetrace.lower.onnx.naming import FunctionNames, Labels, SizeNames
from scopetrace.lower.onnx.translate import Table, exported_program, translate
from scopetrace.lower.onnx.verify import verify
from scopetrace.program.outlined import Function, OutlinedTrace, Target, is_named, outline_calls
from scopetrace.program.traced import TracedProgram

_NAME = re.compile(r"[A-Za-z_][\w.\-]*::[A-Za-z_]\w*")

_OF_RUNTIMES = frozenset({"ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "com.microsoft"})


def read_targets(targets: Targets, where: str) -> tuple[list[Target], dict[type, str]]:
    """The targets for `Trace.outline`, and the names given to classes. Raises OnnxOptionError."""
    if isinstance(targets, Mapping):
        for cls, name in targets.items():
            if not isinstance(cls, type):
                raise OnnxOptionError(
                    f"{where}: {cls!r} is no class; a dict names classes, {{Block: 'my.domain::Block'}}"
                )
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise OnnxOptionError(f"{where}: {name!r} is no name of a function; write 'my.domain::{cls.__name__}'")
            if where == "functions" and name.partition("::")[0] in _OF_RUNTIMES:
                raise OnnxOptionError(
                    f"{where}: {name!r} is in a domain of ops that runtimes have, and these win over a function: "
                    f"write 'my.domain::{cls.__name__}', or name it in plugins="
                )
        return list(targets), dict(targets)
    if isinstance(targets, (list, tuple, set, frozenset)):
        return list(targets), {}
    single: Any = targets
    return [single], {}


def read_names(given: Sequence[str] | None, own: Sequence[str], where: str, taken: Container[str]) -> list[str]:
    """Names of inputs or outputs: `given` for the first ones, `own` for the rest.

    Raises OnnxOptionError for names that are `taken` by tensors of the model, as well.
    """
    if given is None:
        return list(own)
    if isinstance(given, str) or len(given) > len(own):
        raise OnnxOptionError(f"{where} has {len(given)} names for {len(own)}: {', '.join(own)}")
    if len(set(given)) != len(given):
        raise OnnxOptionError(f"{where} has a name twice; names of {where.split('_')[0]}s have to differ")
    for name in given:
        if name in taken:
            raise OnnxOptionError(f"{where}: {name} is a tensor of the model, which has that name in the file")
    return [*given, *own[len(given) :]]


def read_attributes(attributes: bool | Sequence[str]) -> Callable[[str], bool]:
    """A predicate: does the module attribute of this name become an ONNX attribute?"""
    if isinstance(attributes, bool):
        return lambda name: attributes
    if isinstance(attributes, str):
        raise OnnxOptionError(f"attributes={attributes!r}: write attributes=[{attributes!r}], or True for all")
    return set(attributes).__contains__


def is_onnx_attribute(value: Any) -> bool:
    """Whether ONNX attributes can hold the value: int, float, str, bool, or a list of one of them."""
    if isinstance(value, (list, tuple)):
        kinds = {type(item) for item in value}
        return len(kinds) == 1 and kinds <= {int, float, str, bool}
    return type(value) in (int, float, str, bool)


Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `Trace.to_onnx` that determine the model; see there."""

    functions: Targets = ()
    plugins: Targets = ()
    opset_version: int | None = None
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    optimize: bool = True
    attributes: bool | Sequence[str] = False
    custom_translation_table: Table | None = None


def export(program: TracedProgram, options: Options, say: Say) -> Exported:
    """The ONNX model of a functional program. `say` is called with progress texts. Raises as `Trace.to_onnx`."""
    functions, names = read_targets(options.functions, "functions")
    plugins, plugin_names = read_targets(options.plugins, "plugins")
    main, outlined = program, None
    if functions or plugins:
        say("outlining")
        main = outlined = outline_calls(program, [*functions, *plugins])
    results, held = Results(main.tape), main.tape.attributes
    lowering = results.lowering()
    input_names = read_names(options.input_names, _input_names(lowering.graph), "input_names", held)
    output_names = read_names(options.output_names, results.names(), "output_names", held)

    def convert(is_left_out: Callable[[Function], bool]) -> tuple[CombinedGraph, ir.Model, torch.fx.Graph]:
        combined = CombinedGraph(lowering, _function_of(outlined), is_left_out)
        say(f"translating {len(combined.graph.nodes):,} nodes")
        exported, table = exported_program(combined.root, combined.graph), options.custom_translation_table
        return combined, *translate(
            exported, opset_version=options.opset_version, optimize=options.optimize, table=table
        )

    def is_plugin(function: Function) -> bool:
        return _is_plugin(function, plugins)

    try:
        combined, translated, source = convert(lambda function: False)
    except OnnxOpError:
        if not plugins:
            raise
        combined, translated, source = convert(is_plugin)  # the ops without an ONNX form may be in their bodies
    say("assembling")
    sizes = SizeNames(main.tape.sizes)
    sizes.rename(translated.graph, combined.fakes.origins)
    parts = Parts(
        FunctionNames({**names, **plugin_names}),
        Labels(source),
        _Attributes(program, main, options.attributes).of,
        sizes,
        lambda function: not is_plugin(function),
    )
    assembler = Assembler(translated, combined, parts)
    model = assembler.model(input_names, output_names)
    attach(model.graph, {name: combined.main.tensor(name) for name in combined.main.held}, results.state())
    return Exported(
        model,
        list(dict.fromkeys(assembler.functions.values())),
        assembler.plugins,
        sorted({f.name for subgraph, f in assembler.functions.items() if subgraph.unknown}),
        {(f.domain, f.name): s.function.module_type for s, f in assembler.functions.items() if s.function is not None},
        results,
        Counter() if outlined is None else Counter(call.module_type for call in outlined.chosen),
    )


def _is_plugin(function: Function, plugins: Sequence[Target]) -> bool:
    """Whether `plugins=` names all calls of a function. Raises OnnxOptionError where it names only some."""
    named = [any(is_named(call, target) for target in plugins) for call in function.calls]
    if any(named) and not all(named):
        one, other = (function.calls[named.index(which)].fqn for which in (True, False))
        raise OnnxOptionError(
            f"{one} and {other} are equal layers with one function, and plugins= names the first alone: name both"
        )
    return any(named)


def _input_names(graph: torch.fx.Graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if n.op == "placeholder"]


def _function_of(outlined: OutlinedTrace | None) -> Callable[[torch.fx.Node], Function]:
    functions = () if outlined is None else outlined.functions
    known = {function.identifier: function for function in functions}
    return lambda node: known[node.args[1]]  # type: ignore[index]


class _Attributes:
    """The ONNX attributes of call nodes: plain Python attributes of the modules."""

    def __init__(self, flat: TracedProgram, main: TracedProgram, attributes: bool | Sequence[str]) -> None:
        self._flat, self._main = flat.calls, {call.position: call for call in main.calls}
        self._wanted = read_attributes(attributes)

    def of(self, subgraph: Subgraph, site: CallSite) -> dict[str, Any]:
        """The attributes for a call site. A site in a function's body has those that are equal in all its calls."""
        position = meta.call_position(site.node)
        assert position is not None
        call = self._main[position]
        found = {n: value for n, value in call.attributes.items() if self._wanted(n) and is_onnx_attribute(value)}
        if subgraph.function is not None:
            others = [c.attributes for c in self._flat if c.module_type is call.module_type] if found else []
            found = {n: value for n, value in found.items() if all(o.get(n) == value for o in others)}
        return found


@dataclasses.dataclass
class Written:
    """What `write` did."""

    exported: Exported
    error: float | None
    """The largest absolute error against the model, relative above 1; None where it was not verified."""

    @property
    def model(self) -> ir.Model:
        """The ONNX model."""
        return self.exported.model


def write(
    program: TracedProgram,
    path: str | os.PathLike[str] | None,
    options: Options,
    external_data: bool | None,
    verified: bool,
    progress: Callable[[str], None] | None,
) -> Written:
    """Export, verify on request, and write to `path` where one is given. For the arguments see `Trace.to_onnx`."""
    say = progress or (lambda text: None)
    with garbage_collection_paused():
        exported = export(program, options, say)
    error = verify(exported, program, say) if verified else None
    if path is not None:
        say(f"writing {os.fspath(path)}")
        save(exported.model, path, external_data)
    return Written(exported, error)
