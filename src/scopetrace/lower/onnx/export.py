"""`export` makes an ONNX model of a program, `write` verifies it and writes it to a file.

Data flow:
    arguments of `Trace.to_onnx` -> checked -> outlined program -> combine -> translate -> assemble -> Exported
    Exported -> verify (on request) -> file
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from scopetrace.errors import OnnxOpError, OnnxOptionError
from scopetrace.ir import meta
from scopetrace.ir.tape import garbage_collection_paused
from scopetrace.lower.onnx import Targets
from scopetrace.lower.onnx.assemble import Assembler, Attributes, Exported, attach, save
from scopetrace.lower.onnx.combine import CallSite, CombinedGraph, Results, Subgraph
from scopetrace.lower.onnx.naming import TAKEN_FOR_OPS, FunctionNames, SizeNames
from scopetrace.lower.onnx.translate import Table, exported_program, translate
from scopetrace.lower.onnx.verify import verify
from scopetrace.program.outlined import Function, Target, is_named, outline_calls
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
            if where == "functions" and name.partition("::")[2] in TAKEN_FOR_OPS:
                raise OnnxOptionError(
                    f"{where}: ONNX Runtime takes {name!r} for the op of that name, and aborts: write '{name}Module'"
                )
        return list(targets), dict(targets)
    if isinstance(targets, (list, tuple, set, frozenset)):
        return list(targets), {}
    single: Any = targets
    return [] if targets is False else [single], {}


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
    placeholders = lowering.graph.find_nodes(op="placeholder")
    input_names = read_names(options.input_names, [str(n.target) for n in placeholders], "input_names", held)
    output_names = read_names(options.output_names, results.names(), "output_names", held)

    bodies = {} if outlined is None else {function.identifier: function for function in outlined.functions}

    def convert(is_left_out: Callable[[Function], bool]) -> tuple[CombinedGraph, torch.onnx.ONNXProgram]:
        combined = CombinedGraph(lowering, bodies, is_left_out)
        say(f"translating {len(combined.graph.nodes):,} nodes")
        exported = exported_program(combined.root, combined.graph)
        return combined, translate(exported, options.opset_version, options.optimize, options.custom_translation_table)

    def is_plugin(function: Function) -> bool:
        return _is_plugin(function, plugins)

    try:
        combined, translated = convert(lambda function: False)
    except OnnxOpError:
        if not plugins:
            raise
        combined, translated = convert(is_plugin)  # the ops without an ONNX form may be in their bodies
    say("assembling")
    sizes = SizeNames(main.tape.sizes)
    translated.rename_axes({new: sizes.name(symbol) for new, symbol in combined.fakes.origins.items()})
    assembler = Assembler(
        translated,
        combined,
        FunctionNames({**names, **plugin_names}),
        sizes,
        _attributes(program, main, options.attributes),
        is_plugin,
    )
    model = assembler.model(input_names, output_names)
    if main.tape.argument_numbers:
        model.metadata_props["scopetrace.fixed_numbers"] = json.dumps(
            {n.name: n.value for n in main.tape.argument_numbers}
        )
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


def _attributes(flat: TracedProgram, main: TracedProgram, attributes: bool | Sequence[str]) -> Attributes:
    """Gives the ONNX attributes of a call: plain Python attributes of its module.

    A call in a function's body has those that are equal in all calls of modules of the class.
    """
    is_wanted, calls = read_attributes(attributes), {call.position: call for call in main.calls}

    def of(subgraph: Subgraph, site: CallSite) -> dict[str, Any]:
        position = meta.call_position(site.node)
        assert position is not None
        call = calls[position]
        found = {n: value for n, value in call.attributes.items() if is_wanted(n) and is_onnx_attribute(value)}
        if subgraph.function is not None:
            others = [c.attributes for c in flat.calls if c.module_type is call.module_type] if found else []
            found = {n: value for n, value in found.items() if all(o.get(n) == value for o in others)}
        return found

    return of


def write(
    program: TracedProgram,
    path: str | os.PathLike[str] | None,
    options: Options,
    external_data: bool | None,
    verified: bool,
    progress: Callable[[str], None] | None,
) -> Exported:
    """Export, verify on request, and write to `path` where one is given. For the arguments see `Trace.to_onnx`."""
    say = progress or (lambda text: None)
    with garbage_collection_paused():
        exported = export(program, options, say)
    exported.error = verify(exported, program, say) if verified else None
    if path is not None:
        say(f"writing {os.fspath(path)}")
        save(exported.model, path, external_data)
    return exported
