"""`torch.export.ExportedProgram` from a functional tape, without tracing again.

Data flow:
    tape -> a graph of its own, with a no-op check in module calls without ops (calls.py: with_marks)
    blocks under `torch.no_grad()`, `torch.enable_grad()` and `torch.autocast`, by choice -> ops read what autocast has
    cast, since it casts it again -> switches of modes where the ops of another block begin -> a subgraph for each block
    `get_attr` nodes and Python values among the arguments -> placeholders in torch.export's order (inputs.py)
    write-back program -> outputs: new values of parameters, buffers and inputs, then the results (outputs.py)
    module calls -> `module_call_graph` (calls.py)
    both -> TracedExportedProgram, whose `run_decompositions` keeps the signatures of module calls
    a DynamicShapeError of ours -> torch.export of the same model -> ours, which ends with torch's text (`explain`)
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx
from torch.export import Dim, ExportedProgram, ModuleCallEntry, ModuleCallSignature, export
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind, TensorArgument
from torch.utils._pytree import tree_map

from scopetrace._compat import export as compat
from scopetrace._compat.ops import building, is_op, outside_modes, schema_of
from scopetrace._compat.shape_env import source_of_input, source_of_size
from scopetrace._compat.symbols import python_text
from scopetrace.containers.structure import identifier, instantiate
from scopetrace.errors import ArgumentError, DynamicShapeError, ExportError
from scopetrace.ir.conditions import DynamicInput, SizeRules
from scopetrace.ir.selection import matches, near_text
from scopetrace.ir.tape import BodyTape, FunctionalTape, Op, ProgramTape, Value, flat, renamed
from scopetrace.lower.exported.calls import ModuleCallFrame, ModuleCalls, frames_of, is_cast, place_nodes, with_marks
from scopetrace.lower.exported.inputs import Lifted, flat_arguments, states
from scopetrace.lower.exported.outputs import Outputs
from scopetrace.outline.key import tape_key
from scopetrace.program.graph import FxLowering, leave_custom_to_users, node_value, refuse_names
from scopetrace.program.traced import TracedProgram
from scopetrace.record.model import argument_names


def to_exported_program(
    program: TracedProgram, signed: Sequence[str], *, deferred: bool, modes: bool
) -> ExportedProgram:
    """The ExportedProgram of a functional program; see `Trace.to_exported_program`, whose options these are."""
    with building(), outside_modes():
        assert isinstance(program.tape, FunctionalTape)
        refuse_narrowed(program.tape, program.model)
        tape = _without_casts(program.tape) if modes else program.tape
        exported = _build(tape, program.forward, signed, deferred, modes)
        if program.tape.argument_numbers:
            numbers = {n.name: n.value for n in program.tape.argument_numbers}
            exported.graph_module.meta["scopetrace.fixed_numbers"] = numbers
        if isinstance(program.model, torch.fx.GraphModule) and "custom" in program.model.meta:
            exported.graph_module.meta["custom"] = dict(program.model.meta["custom"])
        return exported


def _build(
    tape: FunctionalTape, forward: Callable[..., Any] | None, signed: Sequence[str], deferred: bool, modes: bool
) -> ExportedProgram:
    _refuse(tape)
    frames = frames_of(tape)
    chosen = _chosen(frames.values(), signed, _module_names(tape))
    marked = with_marks(tape, frames, chosen)
    program = FxLowering(marked, tape.sizes.assumptions() if deferred and tape.sizes else (), modes=modes)
    names = argument_names(forward, len(tape.args[0]))
    arguments, in_spec = flat_arguments(marked, names)
    tensors = states(tape, frames, program.graph, arguments)
    refuse_names([n for n, s in tensors.items() if s.kind is not InputKind.USER_INPUT], tape.root.path)
    lifted = Lifted(program, marked, tensors, arguments)
    outputs = Outputs(program, marked, lifted)
    _share_regions(program)
    for lowered in program.walk():
        _sort_operands(lowered)
        _finish_nodes(lowered.graph, tape.shape_env)
    place = place_nodes(program.graph, frames)
    framed = [f for c, f in frames.items() if f.call is c]
    calls = ModuleCalls(place, framed, chosen, lifted.lower, outputs.buffers)
    for lowered in program.walk():
        leave_custom_to_users(lowered.graph)
    signature = ExportGraphSignature(lifted.specs, outputs.specs)
    bodies: dict[str, torch.fx.GraphModule] = {name: body.graph_module() for name, body in program.bodies.items()}
    with torch.set_grad_enabled(tape.outer_grad):
        holder, graph, signature, renamed = compat.with_mode_regions(bodies, program.graph, signature)
    held = [state for state, _ in lifted.state.values() if state.kind is not InputKind.USER_INPUT]
    taken: set[str] = set()
    argument_identifiers = [*(identifier(name, taken) for name in names), *tape.args[1]]
    root = ModuleCallSignature([], [], in_spec, outputs.spec, argument_identifiers)
    exported = TracedExportedProgram(
        holder,
        graph,
        signature,
        state_dict={name: s.tensor for s in held if s.in_state_dict for name in (s.fqn, *s.aliases)},
        range_constraints=compat.symbol_ranges(tape.shape_env) | (tape.sizes.range_constraints() if tape.sizes else {}),
        module_call_graph=[ModuleCallEntry("", root), *calls.entries(_module_names(tape), renamed)],
        example_inputs=_example_inputs(tape),
        constants={name: s.tensor for s in held if not s.in_state_dict for name in (s.fqn, *s.aliases)},
        verifiers=[compat.Verifier if tape.decomposed else compat.TrainingIRVerifier],  # the dialects ATEN and TRAINING
    )
    of_sizes = size_guards(tape.sizes) if tape.sizes else []
    said = list(map(_checked_guard, [*lifted.guards, *_one_tensor_guards(tape), *of_sizes]))
    compat.set_guards(exported, said if deferred else [*compat.guards_of(exported), *said])
    return exported


def _checked_guard(guard: str) -> str:
    """A guard that calls nothing but `size()`: torch runs guards as code, and a path may be one that a file has."""
    try:
        nodes = [*ast.walk(ast.parse(guard, mode="eval"))]
    except SyntaxError:
        nodes = []
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    if not nodes or any(not isinstance(call, ast.Attribute) or call.attr != "size" for call in calls):
        raise ExportError(f"an input has a path that no guard can name: {guard}")
    return guard


def _one_tensor_guards(tape: FunctionalTape) -> list[str]:
    """A guard for each input that was the same tensor as an earlier one: the graph reads the earlier one for both."""
    first: dict[int, str] = {}
    pairs = [(first.setdefault(id(v.fake), path), path) for path, v in zip(tape.input_paths, tape.inputs, strict=True)]
    return [f"{source_of_input(path)} is {source_of_input(same)}" for same, path in pairs if path != same]


def _chosen(frames: Iterable[ModuleCallFrame], signed: Sequence[str], modules: list[str]) -> set[ModuleCallFrame]:
    """The module calls that get signatures. Raises ArgumentError for a pattern that matches no module.

    A module that is not called has no signature.
    """
    inner = {f for f in frames if f.parent is not None}
    for pattern in signed:
        names = [*modules, *(f.fqn for f in inner)]
        if pattern != "*" and not any(matches(name, pattern) for name in names):
            raise ArgumentError(
                f"preserve_module_call_signature: {pattern!r} matches no module call; {near_text(pattern, names)}; "
                '"*" is all of them'
            )
    return inner if "*" in signed else {f for f in inner if any(matches(f.fqn, pattern) for pattern in signed)}


def _refuse(tape: FunctionalTape) -> None:
    for op in tape.ops:
        problem = hint = None
        if op.kind == "call_module":
            problem, hint = "a leaf module is no op of an ExportedProgram", "trace without leaf_modules="
        elif any(isinstance(x, torch.ScriptObject) for x in flat(op.args)):
            problem = "an op takes an object that is no tensor, such as packed weights"
            hint = "trace the model before it is quantized"
        if problem is not None:
            raise ExportError(problem, op=str(op.target), module=op.scope.path, hint=hint)


def _finish_nodes(graph: torch.fx.Graph, env: Any) -> None:
    """Give the nodes what torch.export gives them beside what lowering does.

    That is `val` of arithmetic of symbolic sizes; `tensor_meta`; `torch_fn`, by which quantizers find the nodes of one
    call of a function; and no `unbacked_bindings` of symbols that equal a number or another symbol. Parts of results
    that nobody reads are erased: some clients know the first part only.
    """
    count: collections.Counter[str] = collections.Counter()
    for node in list(graph.nodes):
        if node.target is operator.getitem and not node.users:
            graph.erase_node(node)
            continue
        if node.op == "call_function" and "val" not in node.meta:
            args = torch.fx.map_arg(node.args, node_value)
            is_assertion = node.target is torch.ops.aten._assert_scalar.default
            node.meta["val"] = node.target(*args) if callable(node.target) and not is_assertion else None
        if node.op != "output":
            compat.set_tensor_meta(node)
        bindings = node.meta.pop("unbacked_bindings", {})
        if kept := {s: path for s, path in bindings.items() if s not in env.replacements}:
            node.meta["unbacked_bindings"] = kept
        if is_op(node.target):
            name = schema_of(node.target).op_name
            count[name] += 1
            # torch has the kind of what was called there, of which an op tells the name alone; `len` is a built-in one
            function = getattr(torch.nn.functional, name, getattr(torch.Tensor, name, len))
            node.meta["torch_fn"] = f"{name}_{count[name]}", f"{type(function).__name__}.{name}"


def _sort_operands(lowered: FxLowering) -> None:
    """Give the operands of `torch.cond` in the order of their names, as torch.export does."""
    for node in lowered.graph.find_nodes(op="call_function", target=torch.ops.higher_order.cond):
        pred, *branches, operands = node.args
        if all(isinstance(x, torch.fx.Node) for x in operands):
            order = sorted(range(len(operands)), key=lambda i: operands[i].name)
            node.args = (pred, *branches, tuple([operands[i] for i in order]))
            for branch in branches:
                graph = lowered.bodies[branch.target].graph
                placeholders = graph.find_nodes(op="placeholder")
                for i in reversed(order):
                    next(iter(graph.nodes)).prepend(placeholders[i])


def _module_names(tape: FunctionalTape) -> list[str]:
    root = tape.calls[0].module
    if root is not None:
        return [name for name, _ in root.named_modules(remove_duplicate=False)]
    return list(dict.fromkeys(call.fqn for call in tape.calls if call.fqn))


def _example_inputs(tape: FunctionalTape) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those of the trace; of a loaded one zeros of the same shapes and dtypes."""
    if tape.example_inputs is not None:
        return tape.example_inputs
    args, kwargs = instantiate(
        lambda x: compat.example_of(x.fake if isinstance(x, Value) else x),
        tape.args,
        (Value, torch.Tensor, torch.SymInt),
    )
    return args, kwargs


def _share_regions(program: FxLowering) -> None:
    """Let equal calls under `nested_compile_region` share a body and its identifier, as in graphs of Dynamo."""
    known: dict[Any, tuple[str, Any]] = {}
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        held, identifier, *operands = node.args
        tape = program.bodies[held.target].tape
        assert isinstance(tape, BodyTape)
        name, identifier = known.setdefault(tape_key(tape), (held.target, identifier))
        if name != held.target:
            del program.bodies[held.target]
            held.target = name
        node.args = (held, identifier, *operands)


# Blocks of a mode -----------------------------------------------------------------------------------------------------

_T = TypeVar("_T", FunctionalTape, BodyTape)


def _without_casts(tape: _T) -> _T:
    """The tape, and its bodies, with ops reading what autocast has cast for them."""
    source = {op.result: op.tensor(0) for op in tape.ops if _is_autocasts(op)}
    ops: list[Op] = []
    for op in tape.ops:
        new: dict[Any, Any] = {body: _without_casts(body) for body in op.bodies()}
        if op.autocast is not None and op.autocast.casts and not _is_autocasts(op):
            new |= {v: source[v] for v in op.inputs() if v in source}
        ops.append(op.replace(args=renamed(op.args, new), kwargs=renamed(op.kwargs, new)) if new else op)
    read = {v for op in ops for v in op.inputs()} | {v for v in tape.graph_outputs() if isinstance(v, Value)}
    return dataclasses.replace(tape, ops=[op for op in ops if not _is_autocasts(op) or op.result in read])


def _is_autocasts(op: Op) -> bool:
    return op.autocast is not None and op.autocast.casts and is_cast(op)


_ALIAS, _COPY = torch.ops.aten.alias.default, torch.ops.aten.copy.default


class TracedExportedProgram(ExportedProgram):
    """An ExportedProgram of a trace. Those that `torch.export.load` returns are torch's own.

    In torch's `run_decompositions`, the arguments and results of a module call are found in the decomposed graph by the
    name of the last node that an old node became. That is wrong for a piece of a result (`unbind`, `max`), which has no
    node of its own there, for an op that is dropped (a cast to the same dtype), and for one whose last node is not its
    result. So an `aten.alias`, which torch keeps as it is, stands behind each value that a signature names for the time
    of the run. The copies into changed inputs are taken out, as torch has it for buffers.
    """

    def run_decompositions(self, *args: Any, **kwargs: Any) -> ExportedProgram:
        """As torch's, with the module signatures naming the same values as before."""
        guards, aliases = compat.guards_of(self), _add_aliases(self)
        added = {alias.name for alias in aliases}
        try:
            # a FakeTensorMode of the user is not the program's; a size that a decomposition fixes is not the trace's
            with outside_modes(), compat.without_guards(self), compat.in_another_environment(self):
                result = super().run_decompositions(*args, **kwargs)
        finally:
            _remove_aliases(self, aliases)
        new = result.graph.find_nodes(op="call_function", target=_ALIAS)
        ours = [n for n in new if any(old.name in added for old in n.meta.get("from_node", [])[-1:])]
        _remove_aliases(result, ours)
        _remove_copies(result)
        result.__class__ = TracedExportedProgram
        compat.set_guards(result, [*compat.guards_of(result), *guards])
        return result


def _add_aliases(program: ExportedProgram) -> list[torch.fx.Node]:
    named = {x.name for x in _tensors_of_calls(program)}
    aliases: dict[str, torch.fx.Node] = {}
    for node in list(program.graph.nodes):
        if node.name in named and node.op == "call_function" and isinstance(node_value(node), torch.Tensor):
            with program.graph.inserting_after(node):
                alias = aliases[node.name] = program.graph.call_function(_ALIAS, (node,))
            alias.meta = dict(node.meta)
            node.replace_all_uses_with(alias, delete_user_cb=lambda user, alias=alias: user is not alias)
    _rename(program, {name: alias.name for name, alias in aliases.items()})
    return list(aliases.values())


def _remove_aliases(program: ExportedProgram, aliases: list[torch.fx.Node]) -> None:
    renamed: dict[str, str] = {}
    for alias in aliases:
        (node,) = alias.all_input_nodes
        renamed[alias.name] = node.name
        alias.replace_all_uses_with(node)
        program.graph.erase_node(alias)
    _rename(program, renamed)


def _remove_copies(program: ExportedProgram) -> None:
    """Let the new value of an input be what torch copies into it: `unflatten` fails at a copy that is in no module."""
    renamed: dict[str, str] = {}
    output = program.graph.output_node()
    nodes: Any = output.args[0]
    for spec, node in zip(program.graph_signature.output_specs, nodes, strict=True):
        if spec.kind is OutputKind.USER_INPUT_MUTATION and node.target is _COPY:
            value = node.args[1]
            if value.op == "call_function" and output not in value.users:
                renamed[node.name] = value.name
                node.replace_all_uses_with(value)
                program.graph.erase_node(node)
    _rename(program, renamed)


def _tensors_of_calls(program: ExportedProgram) -> Iterator[TensorArgument]:
    for entry in program.module_call_graph:
        if entry.signature is not None:
            for x in (*entry.signature.inputs, *entry.signature.outputs):
                if isinstance(x, TensorArgument):
                    yield x


def _rename(program: ExportedProgram, names: dict[str, str]) -> None:
    for x in (*_tensors_of_calls(program), *(spec.arg for spec in program.graph_signature.output_specs)):
        x.name = names.get(x.name, x.name)
    program.graph_module.recompile()


# Dynamic shapes in the words of torch.export --------------------------------------------------------------------------


def size_guards(sizes: SizeRules) -> list[str]:
    """Guards for what ranges do not say of derived Dims: the size that is the root itself, and which sizes are whole.

    Where no size is the root, torch writes the guard between two sizes that are derived from it.
    """
    plain = {d.expr: _symbol_of(d) for d in reversed(sizes.dynamic) if d.expr.is_Symbol}
    guards = []
    for d, root in sizes.derived():
        factor, offset = d.expr.diff(root), d.expr.subs(root, 0)
        size = _symbol_of(d)
        if root not in plain:
            guards.append(sympy.Eq(sympy.Mod(size - offset, factor), 0))
        elif factor == 1:
            guards.append(sympy.Eq(plain[root], size - offset))
        else:
            guards.append(sympy.Eq(factor * plain[root] + offset, size))
    return [python_text(condition) for condition in guards if condition is not sympy.true]


def _symbol_of(size: DynamicInput) -> sympy.Symbol:
    return sympy.Symbol(source_of_size(size.path, size.dim), integer=True)


def refuse_narrowed(tape: ProgramTape, model: Callable[..., Any] | None) -> None:
    """Raise DynamicShapeError where the model holds for a part of the range of a named Dim only.

    A trace says so in `range_constraints` and checks its calls; torch.export refuses, and says which Dim to write.
    """
    narrowed = tape.sizes.narrowed() if tape.sizes is not None else []
    if narrowed and tape.example_inputs is not None and tape.sizes is not None:
        error = DynamicShapeError(narrowed[0], hint="give the Dim this range, or write Dim.AUTO")
        explain(error, model, *tape.example_inputs, tape.sizes.dynamic_shapes)
        raise error


def explain(error: DynamicShapeError, model: Any, args: Any, kwargs: Any, dynamic_shapes: Any) -> None:
    """Add what torch.export says of the same model and arguments to an error of ours, and its class.

    Code that was written for torch.export goes on catching it, and `refine_dynamic_shapes_from_suggested_fixes` reads
    it. That runs the model again, under torch.export.
    """
    if not isinstance(model, torch.nn.Module):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            named = tree_map(lambda d: Dim(d) if isinstance(d, str) else d, dynamic_shapes)  # those of torch.onnx
            export(model, args, kwargs, dynamic_shapes=named)
        except Exception as theirs:
            if "torch" in type(theirs).__module__ or isinstance(theirs, (ValueError, RuntimeError)):
                error.stands_for(theirs, str(theirs).partition("\n\nThe error above occurred")[0])
