"""Functions of traces that are no methods: `diff`, `save`, `load`, `from_exported_program`, `save_onnx`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from scopetrace._compat.graph_module import holder_of
from scopetrace._compat.symbols import to_expr
from scopetrace._compat.tensors import storage_id
from scopetrace.api.runnable import Shown, program_of
from scopetrace.api.trace import Trace, trace
from scopetrace.errors import ArgumentError, ArgumentTypeError
from scopetrace.lower.onnx import ExternalData, require_packages
from scopetrace.program.traced import ModuleCall, TracedProgram
from scopetrace.record.nodes import MODULE_CALLS
from scopetrace.view.diff import Diff, compare, compare_calls

if TYPE_CHECKING:
    import onnx_ir


def diff(before: Shown | ModuleCall | str, after: Shown | ModuleCall | str) -> Diff:
    """What two traces do differently, by scope: inputs, parameters, ops, module calls, results, effects.

        print(st.diff(st.trace(model, (x,)), st.trace(model[:1], (x,))))

    Of two versions of a model, of a trace before and after a pass, or of two outlined programs. Prints as a list of
    lines with `-` and `+`; is false where there are no differences, that is, where the digests are equal.

    Of two module calls, of one trace or of two: why `outline` makes two functions of them; false where it makes one.
    Of the text that `str` gave of a trace, before or after, the lines are compared, without regard to the names of
    values; parameters, the values of constants and effects are not in it.

    Raises ArgumentTypeError for what is neither a Trace, an OutlinedProgram, the text of one nor a ModuleCall, and for
    one of these with a call; OutlineError for a call that can be no function.
    """
    if isinstance(before, ModuleCall) and isinstance(after, ModuleCall):
        return compare_calls(before, after)
    if isinstance(before, Shown) and isinstance(after, Shown):
        return compare(program_of(before), program_of(after))
    if all(isinstance(x, Shown) or (isinstance(x, str) and "\n" in x) for x in (before, after)):
        return compare(str(before), str(after))
    raise ArgumentTypeError(
        f"diff takes two traces or two module calls, not {type(before).__name__} and {type(after).__name__}; st.trace "
        "and st.load give traces, Trace.calls has their calls"
    )


def save(traced: Trace, path: str | os.PathLike[str], *, external_data: str | None = None) -> None:
    """Write a trace to a file; see `Trace.save`. Raises ArgumentTypeError for what is no trace."""
    if not isinstance(traced, Trace):
        raise ArgumentTypeError(f"save takes a trace, then a path, not {type(traced).__name__}: write tr.save(path)")
    traced.save(path, external_data=external_data)


def load(path: str | os.PathLike[str], *, plain_outputs: bool = False) -> Trace:
    """Read a trace that `Trace.save` wrote. Nothing in the file is run, and nothing is imported.

        tr.save("model.st")
        st.load("model.st")(x)

    `ModuleCall.module` is None in it, and `Trace.check` is not possible: the model is not in the file. Classes whose
    modules are imported are the real ones; for others there are classes of the same names. A call imports those of
    its arguments and results.

    Args:
        path: the file.
        plain_outputs: whether results of classes whose modules are not imported are plain objects, with their
            fields as attributes and as items (`out.logits`, `out["logits"]`). Then a call needs no code of the model.

    Raises TraceFileError for a file that is no trace, is damaged, is of a newer version, or uses an op that this torch
    does not have; OSError where it cannot be read.
    """
    with Path(path).open("rb") as file:
        program = TracedProgram.read(file, folder=Path(path).parent)
    return Trace(program.with_plain_outputs() if plain_outputs else program)


def from_exported_program(program: torch.export.ExportedProgram, *, functional: bool = True) -> Trace:
    """Trace `program.module()` with the program's example inputs and dynamic shapes.

        st.from_exported_program(torch.export.export(model, (x,))).calls

    Its module calls are those that the nodes were in the exported model, as for `trace` of any graph with
    `nn_module_stack`, and take and return what `preserve_module_call_signature=` of torch.export has kept. Of other
    calls, arguments are the tensors from outside that they read, in the order of their first use, named `arg0`, `arg1`
    where there are several; results are what is read outside. `ModuleCall.module` is None. What has left no node, as
    an `nn.Identity`, is no call.

    Args:
        program: as `torch.export.export` or `torch.export.load` gives it, decomposed or not.
        functional: as for `trace`.

    Raises ArgumentTypeError for what is no ExportedProgram, ArgumentError for one without example inputs, and what
    `trace` raises.
    """
    if not isinstance(program, torch.export.ExportedProgram):
        raise ArgumentTypeError(
            f"from_exported_program takes an ExportedProgram, not {type(program).__name__}; torch.export.load reads one"
        )
    if program.example_inputs is None:
        raise ArgumentError("the program has no example_inputs; write st.trace(program.module(), args, kwargs)")
    module = program.module()
    _tie(module, program.state_dict)
    module.meta[MODULE_CALLS] = program.module_call_graph
    args, kwargs = program.example_inputs
    positional, named = _dims(program)
    dims = inspect.signature(module.forward).bind(*positional, **named).arguments
    return trace(module, args, kwargs, dynamic_shapes=dims, functional=functional)


def _tie(module: torch.fx.GraphModule, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give a module one tensor under all its names: a strict export keeps one of them, a file a tensor for each."""
    names, first = module.state_dict(keep_vars=True), dict[Any, torch.Tensor]()
    for name, t in {**names, **tensors}.items():
        place = (t.storage_offset(), t.size(), t.stride()) if t.layout is torch.strided else ()
        same = first.setdefault((storage_id(t), *place, t.dtype, type(t)), t)
        if same is not names.get(name):
            holder, leaf = holder_of(module, name)
            is_parameter = isinstance(same, torch.nn.Parameter)
            (holder.register_parameter if is_parameter else holder.register_buffer)(leaf, same)


def _dims(program: torch.export.ExportedProgram) -> Any:
    """Arguments and keyword arguments of a program, with `dynamic_shapes` in the place of tensors and numbers."""
    names = {
        s: torch.export.Dim(str(s), min=max(int(r.lower), 0), max=int(r.upper) if r.upper.is_Integer else None)
        for s, r in program.range_constraints.items()
        if s.is_Symbol
    }
    inputs = {n.name: n.meta.get("val") for n in program.graph.find_nodes(op="placeholder")}

    def dims(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            sizes = {i: to_expr(size) for i, size in enumerate(x.size()) if isinstance(size, torch.SymInt)}
            return {i: names.get(size, torch.export.Dim.AUTO) for i, size in sizes.items()}
        return torch.export.Dim.DYNAMIC if isinstance(x, torch.SymInt) else None

    leaves = [dims(inputs.get(name)) for name in program.graph_signature.user_inputs]
    return pytree.tree_unflatten(leaves, program.call_spec.in_spec)


def save_onnx(model: onnx_ir.Model, path: str | os.PathLike[str], *, external_data: ExternalData = None) -> None:
    """Write a model that `Trace.to_onnx` gave, as `Trace.to_onnx(path)` does.

        st.save_onnx(tr.to_onnx(), "model.onnx", external_data="weights.data")

    Args:
        model: the model.
        path: the file.
        external_data: as for `Trace.to_onnx`: the name of a file of weights, which models of the folder may share.

    Raises OnnxDependencyError where a package is missing, OSError where the file cannot be written.
    """
    require_packages()
    from scopetrace.lower.onnx.weights import save as save_model

    save_model(model, path, external_data)


def write_onnx_weights(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the files of weights that a file of `Trace.to_onnx(path, export_params=False)` refers to.

        tr.to_onnx("model.onnx", export_params=False)  # of a model on the meta device, too
        st.write_onnx_weights("model.onnx", model.state_dict())

    Args:
        path: the ONNX file, which is only read.
        tensors: by name, the tensors that the file lacks, such as a state dict. It is asked for one at a time.

    Raises:
        OnnxDependencyError: a package is missing.
        OnnxOptionError: a tensor is missing, or has another dtype or shape than in the file. Nothing is written.
    """
    require_packages()
    from scopetrace.lower.onnx.weights import write_weights

    write_weights(path, tensors)
