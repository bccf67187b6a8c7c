"""`export` makes an ONNX model of a program, `write` verifies it and writes it to a file.

Data flow:
    arguments of `Trace.to_onnx` -> checked -> outlined program -> combine -> translate -> assemble -> Exported
    a flat model: outlined by its layers, so that each distinct one is translated and optimized once; then weights are
    initializers, functions inlined, what depends on weights alone folded, and nodes named after the call they came from
    Exported -> verify (on request) -> file
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
import torch.fx
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, InlinePass, RemoveUnusedOpsetsPass

from scopetrace._compat.onnx import optimize
from scopetrace._compat.ops import building
from scopetrace.errors import ArgumentTypeError, FixedValueWarning, OnnxExportError, OnnxOpError, OnnxOptionError
from scopetrace.ir.selection import near_text
from scopetrace.lower.exported.program import refuse_narrowed
from scopetrace.lower.onnx import CallAttributes, ExternalData, Names, Table, Targets, WeightNames
from scopetrace.lower.onnx.assemble import Assembler, Attributes, Exported
from scopetrace.lower.onnx.combine import CallSite, CombinedGraph, Results, Subgraph
from scopetrace.lower.onnx.folding import FOLDED, fold_batch_norms
from scopetrace.lower.onnx.forms import OpFunctions
from scopetrace.lower.onnx.naming import SizeNames, label_nodes, name_values
from scopetrace.lower.onnx.targets import FunctionTargets, label, read_targets
from scopetrace.lower.onnx.translate import quiet, translate
from scopetrace.lower.onnx.verify import verify
from scopetrace.lower.onnx.weights import attach, chosen, identity, onnx_tensor, save
from scopetrace.program.graph import FxLowering, call_position
from scopetrace.program.outlined import OUTERMOST, Function, OutlinedTrace, outline_calls, tells_calls
from scopetrace.program.traced import ModuleCall, TracedProgram


def read_names(asked: Names | None, defaults: Sequence[str], where: str, taken: Container[str]) -> list[str]:
    """Names of inputs or outputs: those that the caller asked for, and default names for the rest.

    Raises OnnxOptionError for names that are `taken` by tensors of the model, as well.
    """
    if asked is None:
        return list(defaults)
    if isinstance(asked, Mapping):
        unknown = [name for name in asked if name not in defaults]
        if unknown:
            raise OnnxOptionError(f"{where} names {unknown[0]!r}; the model has {', '.join(defaults)}")
        names = [asked.get(name, name) for name in defaults]
    elif callable(asked):
        names = list(map(asked, defaults))
    elif isinstance(asked, str) or len(asked) > len(defaults):
        raise OnnxOptionError(f"{where} has {len(asked)} names for {len(defaults)}: {', '.join(defaults)}")
    else:
        names = [*asked, *defaults[len(asked) :]]
    if len(set(names)) != len(names):
        raise OnnxOptionError(f"{where} has a name twice; names of {where.split('_')[0]}s have to differ")
    for name in names:
        if not isinstance(name, str):
            raise OnnxOptionError(f"{where} has {name!r}, which is no name")
        if name in taken:
            raise OnnxOptionError(f"{where}: {name} is a tensor of the model, which has that name in the file")
    return names


_IN_CACHE = re.compile(r"(.+?)_(?:(self|cross)_attention_cache_)?layers_(\d+)_(\w+?)(_updated)?")
_REGISTERED = re.compile(r"(.+)_(key|value)_cache_(\d+)")
"""As transformers registers its caches with pytree."""
_SHORT = {"keys": "key", "values": "value", "self": ".decoder", "cross": ".encoder", None: ""}


def paired(names: Sequence[str], new: str | None = None) -> list[str]:
    """Names of inputs or outputs, those in caches as runtimes of decoders pair them: `past_key_values.0.key`.

    `new` is the name of the caches among the outputs.
    """

    def pair(name: str) -> str:
        match = _IN_CACHE.fullmatch(_REGISTERED.sub(r"\1_layers_\3_\2", name))
        if match is None:
            return name
        cache, side, layer, part, _ = match.groups()
        return f"{new or cache}.{layer}{_SHORT[side]}.{_SHORT.get(part, part)}"

    return list(map(pair, names))


def read_attributes(attributes: CallAttributes) -> Callable[[ModuleCall], dict[str, Any]]:
    """Gives the ONNX attributes of a module call: plain Python attributes of its module, or what a function says."""
    if isinstance(attributes, str):
        raise OnnxOptionError(f"attributes={attributes!r}: write attributes=[{attributes!r}], or True for all")

    def of(call: ModuleCall) -> dict[str, Any]:
        if not callable(attributes):
            plain = {n: v for n, v in call.attributes.items() if is_onnx_attribute(v)}
            return {n: v for n, v in plain.items() if attributes is True or n in (attributes or ())}
        said = dict(attributes(call))
        for name, value in said.items():
            if not isinstance(value, torch.Tensor) and not is_onnx_attribute(value):
                raise OnnxOptionError(
                    f"attributes gives {name}={value!r} for {call.fqn}: an ONNX attribute is an int, float, str, bool, "
                    "a list of one of these, or a tensor"
                )
        return said

    return of


def is_onnx_attribute(value: Any) -> bool:
    """Whether ONNX attributes can hold the value: int, float, str, bool, or a list of one of them."""
    kinds = {type(item) for item in value} if isinstance(value, (list, tuple)) else {type(value)}
    return len(kinds) == 1 and kinds <= {int, float, str, bool}


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `Trace.to_onnx` that determine the model; see there."""

    functions: Targets = ()
    plugins: Targets = ()
    opset_version: int | None = None
    input_names: Names | None = None
    output_names: Names | None = None
    optimize: bool = True
    attributes: CallAttributes = False
    custom_translation_table: Table | None = None
    pair_caches: bool = False
    metadata: bool = True
    weight_inputs: WeightNames = ()
    retain_weights: bool = False
    export_params: bool = True

    def __post_init__(self) -> None:
        if names := [op for op in self.custom_translation_table or () if isinstance(op, str)]:
            said = f"custom_translation_table has {names[0]!r}: write an op, torch.ops.aten.relu.default"
            raise OnnxOptionError(said)


def export(program: TracedProgram, options: Options, say: Callable[[str], None]) -> Exported:
    """The ONNX model of a functional program. `say` is called with progress texts. Raises as `Trace.to_onnx`."""
    program = program.without_regions()
    functions, plugins = read_targets(options.functions, options.plugins)
    ops = OpFunctions.of(functions.ops, plugins.ops, options.custom_translation_table)
    flat = not (functions.targets or plugins.targets)
    say("outlining")
    main, wanted = _outlined(program, functions, plugins, options)
    bodies = {function.identifier: function for function in main.functions}
    tensors, results = main.tape.attributes, Results(main.tape)
    lowering = results.lowering()

    def convert(is_left_out: Callable[[Function], bool]) -> tuple[CombinedGraph, torch.onnx.ONNXProgram]:
        combined = CombinedGraph(lowering, bodies, is_left_out)
        say(f"translating {len(combined.graph.nodes):,} nodes")
        return combined, translate(combined.root, combined.graph, options.opset_version, options.optimize, ops)

    try:
        combined, translated = convert(lambda function: False)
    except OnnxOpError:
        if not plugins.targets:
            raise
        combined, translated = convert(lambda f: f.label.is_plugin)  # ops without an ONNX form may be in their bodies
    say("assembling")
    sizes = SizeNames(main.tape.sizes)
    translated.rename_axes({new: sizes.name(symbol) for new, symbol in combined.fakes.origins.items()})
    assembler = Assembler(
        translated,
        combined,
        sizes,
        _attributes(program, main, options.attributes),
        [] if isinstance(options.attributes, bool) or callable(options.attributes) else options.attributes,
        flat,
    )
    weights, defaults, initializers = _split_held(combined, wanted, results.state(), options)
    retained = [name for name in weights if options.retain_weights and name not in results.state()]
    input_names, output_names = _names(lowering, results, options, retained, tensors)
    count = len(output_names) - len(retained)
    model = assembler.model(input_names, output_names[:count])
    if main.tape.argument_numbers:
        numbers = {n.name: n.value for n in main.tape.argument_numbers}
        model.metadata_props["scopetrace.fixed_numbers"] = json.dumps(numbers)
    held = list(combined.main.held)
    values = dict(zip(held, model.graph.inputs[len(model.graph.inputs) - len(held) :], strict=True))
    constants = {values[name]: tensors[name] for name in initializers}
    if options.export_params:
        attach(model.graph, constants, stay_inputs=False)
    if flat:
        _flatten(model, assembler, options.optimize, output_names[:count])
        assembler.functions.clear()
    if not options.export_params:
        attach(model.graph, constants, stay_inputs=False)
    attach(model.graph, {values[name]: tensors[name] for name in defaults}, stay_inputs=True)
    model.functions.update({f.identifier(): f for f in ops.functions})
    for held_name, name in zip(retained, output_names[count:], strict=True):  # a runtime keeps them
        model.graph.outputs.append(identity(model.graph, values[held_name], name))
    return Exported(
        model,
        list(dict.fromkeys(assembler.functions.values())),
        [*ops.functions, *ops.plugins],
        [*assembler.plugins, *ops.plugins],
        sorted({*ops.without_form, *(f.name for subgraph, f in assembler.functions.items() if subgraph.unknown)}),
        results,
        [tensors[name] for name in weights],
        [tensors[name] for name in retained],
        set() if options.export_params else _without_data(program, [*initializers, *defaults]),
    )


def _outlined(
    program: TracedProgram, functions: FunctionTargets, plugins: FunctionTargets, options: Options
) -> tuple[OutlinedTrace, set[str]]:
    """The program with the calls that are functions of the file, and those of its tensors that are inputs of it."""
    targets = [*functions.targets, *plugins.targets]
    labels = functools.partial(label, functions, plugins)
    main = outline_calls(program, targets or [OUTERMOST] * tells_calls(program), labels)
    wanted = chosen(main.tape.attributes, options.weight_inputs)
    named = {*functions.ops, *plugins.ops, *(options.custom_translation_table or ())}
    if targets and options.optimize and options.export_params and named.isdisjoint(FOLDED):
        main = fold_batch_norms(main, wanted | Results(main.tape).state(), labels)
    return main, wanted


def _flatten(model: ir.Model, assembler: Assembler, optimized: bool, outputs: Sequence[str]) -> None:
    names = set(model.graph.initializers)
    with quiet():
        InlinePass()(model)
        RemoveUnusedOpsetsPass()(model)
        if optimized:
            optimize(model, names)
    label_nodes(model.graph, assembler.combined.main, assembler.sources)
    name_values(model.graph, [str(v.name) for v in model.graph.inputs], outputs, names)


def _split_held(
    combined: CombinedGraph, wanted: set[str], changed: set[str], options: Options
) -> tuple[list[str], list[str], list[str]]:
    """Of the tensors of the main program, those that stay inputs, inputs with a default, and initializers."""
    names = list(combined.main.held)
    as_inputs = {combined.held_name(name) for name in wanted}
    if options.export_params:
        as_inputs |= {name for name in names if combined.main.tensor(name).device.type == "meta"}
    others = [name for name in names if name not in as_inputs]
    defaults = [name for name in others if name in changed]
    return [name for name in names if name in as_inputs], defaults, [name for name in others if name not in changed]


def _without_data(program: TracedProgram, names: Sequence[str]) -> set[str]:
    """The tensors that a state dict of the model has, or that have no data: others could not be written later."""
    state = program.model.state_dict() if isinstance(program.model, torch.nn.Module) else program.tape.owners
    tensors = program.tape.attributes
    return {name for name in names if name in state or tensors[name].device.type == "meta"}


def _names(
    lowering: FxLowering, results: Results, options: Options, retained: Sequence[str], taken: Container[str]
) -> tuple[list[str], list[str]]:
    arguments = [str(n.target) for n in lowering.graph.find_nodes(op="placeholder")]
    returned = [*results.names(), *(f"{name}_updated" for name in retained)]
    if options.pair_caches:
        arguments, returned = paired(arguments), paired(returned, "present")
    inputs = read_names(options.input_names, arguments, "input_names", taken)
    outputs = read_names(options.output_names, returned, "output_names", taken)
    for name, default in zip(outputs, returned, strict=True):
        if name != default and name in inputs:
            raise OnnxOptionError(f"output_names has {name!r}, which is an input")
    return inputs, outputs


def _attributes(flat: TracedProgram, main: TracedProgram, attributes: CallAttributes) -> Attributes:
    """Gives the ONNX attributes of a call: plain Python attributes of its module.

    A call in a function's body has those that are equal in all calls of modules of the class.
    """
    attributes_of = read_attributes(attributes)
    calls: dict[int | None, ModuleCall] = {call.record.position: call for call in main.all_calls}
    if attributes and attributes is not True and not callable(attributes):
        known = {name for call in main.all_calls for name in call.attributes}
        for name in attributes:
            if name not in known:
                raise OnnxOptionError(f"attributes: no called module has {name!r}; {near_text(name, sorted(known))}")

    def of(subgraph: Subgraph, site: CallSite, needed: Container[str]) -> dict[str, Any]:
        call = calls[call_position(site.node)]
        values = attributes_of(call)
        if subgraph.function is not None and values:
            others = [attributes_of(c) for c in flat.calls if c.module_type is call.module_type]
            values = {n: v for n, v in values.items() if n in needed or all(_is_equal(o.get(n), v) for o in others)}
        return {n: onnx_tensor(v) if isinstance(v, torch.Tensor) else v for n, v in values.items()}

    return of


def _is_equal(a: Any, b: Any) -> bool:
    is_tensor, other = isinstance(a, torch.Tensor), isinstance(b, torch.Tensor)
    return is_tensor == other and (torch.equal(a, b) if is_tensor else bool(a == b))


def refuse_changing_numbers(program: TracedProgram) -> None:
    """Raise OnnxExportError where the forward reads and changes a number in an object among the arguments.

    The next call would need another number, and the file has that of the trace.
    """
    changing = [n for n in program.tape.argument_numbers if n.changes]
    if changing:
        more = f", and {len(changing) - 1} more" if len(changing) > 1 else ""
        raise OnnxExportError(
            f"the forward changes {changing[0].name}, which was {changing[0].value} in the trace{more}: an ONNX model "
            "would be right for this one step",
            hint="keep it in a tensor; with transformers, give DynamicCache() without a config, which keeps all keys, "
            "or no cache for a file that reads the prompt only",
        )


def write(
    program: TracedProgram,
    path: str | os.PathLike[str] | None,
    options: Options,
    external_data: ExternalData,
    verified: bool,
    progress: Callable[[str], None] | None,
) -> Exported:
    """Export, verify on request, and write to `path` where one is given. For the arguments see `Trace.to_onnx`."""
    version: Any = options.opset_version
    if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
        raise ArgumentTypeError(f"opset_version={version!r}: write a number, as opset_version=18")
    left_out = not options.export_params
    if path is None and left_out:
        raise OnnxOptionError("export_params=False writes references to files beside the file: give a path")
    if isinstance(external_data, str):
        if external_data in ("", Path(path or "").name) or Path(external_data).name != external_data or left_out:
            raise OnnxOptionError(
                f"external_data={external_data!r}: write the name of a file of its own, which lies beside `path`; "
                "export_params=False names its own"
            )
    elif external_data is not None and not isinstance(external_data, bool) and external_data <= 0:
        raise OnnxOptionError(f"external_data={external_data}: write True, or the largest size of a file in bytes")
    if not any(op.values() for op in program.tape.ops):
        raise OnnxExportError("the program has no tensors: there is nothing for an ONNX model to compute")
    refuse_changing_numbers(program)
    refuse_narrowed(program.tape, program.model)
    relations = program.tape.sizes.inequalities() if program.tape.sizes is not None else []
    if relations:
        said = f"the ONNX model is right only for sizes with {' and '.join(relations)}, and cannot check that"
        warnings.warn(said, FixedValueWarning, stacklevel=3)
    say = progress or (lambda text: None)
    with building():
        exported = export(program, options, say)
        if not options.metadata:
            ClearMetadataAndDocStringPass()(exported.model)
    exported.error = verify(exported, program, say) if verified else None
    if path is not None:
        say(f"writing {os.fspath(path)}")
        save(exported.model, path, external_data, exported.without_data)
    return exported
