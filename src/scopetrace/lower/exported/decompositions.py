"""`run_decompositions` that keeps the signatures of module calls.

torch finds the arguments and results of a module call in the decomposed graph by the name of the last node that an old
node became. That is wrong for a piece of a result (`unbind`, `max`), which has no node of its own there, for an op
that is dropped (a cast to the same dtype), and for one whose last node is not its result.

Data flow:
    program -> a copy with `aten.alias` behind each value that a signature names: an op that torch keeps as it is
    copy -> torch's run_decompositions -> the same without these ops, signatures naming what they took
         -> without the copies into changed inputs, as torch has it for buffers
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument

from scopetrace._compat.export import guards_of, set_guards, without_guards
from scopetrace._compat.ops import outside_modes
from scopetrace.program.graph import node_value

_ALIAS, _COPY = torch.ops.aten.alias.default, torch.ops.aten.copy.default


class TracedExportedProgram(ExportedProgram):
    """An ExportedProgram of a trace. Those that `torch.export.load` returns are torch's own."""

    def run_decompositions(self, *args: Any, **kwargs: Any) -> ExportedProgram:
        """As torch's, with the module signatures naming the same values as before."""
        guards = guards_of(self)
        with outside_modes(), without_guards(self):  # a FakeTensorMode of the user is not that of the program
            if next(_tensors_of_calls(self), None) is None:  # clients put what no verifier takes into such a program
                result = decomposed = super().run_decompositions(*args, **kwargs)
            else:
                program = _copied(self, ExportedProgram)
                added = _add_aliases(program)
                decomposed = program.run_decompositions(*args, **kwargs)
                _remove_aliases(decomposed, added)
                result = _copied(decomposed, TracedExportedProgram)
        _remove_copies(result)
        set_guards(result, [*guards_of(decomposed), *guards])
        return result


def _copied(program: ExportedProgram, kind: type[ExportedProgram]) -> ExportedProgram:
    """A program with a graph and signatures of its own, and the same tensors; its graph is verified."""
    graph = copy.deepcopy(program.graph)
    for old, new in zip(program.graph.nodes, graph.nodes, strict=True):
        new.name = old.name  # torch.fx names none like a function of Python, such as `input`
    return kind(
        program.graph_module,
        graph,
        copy.deepcopy(program.graph_signature),
        state_dict=program.state_dict,
        range_constraints=dict(program.range_constraints),
        module_call_graph=copy.deepcopy(program.module_call_graph),
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def _add_aliases(program: ExportedProgram) -> set[str]:
    """Put an alias behind each value that a module signature names; returns the names of the aliases."""
    named = {x.name for x in _tensors_of_calls(program)}
    renamed: dict[str, str] = {}
    for node in list(program.graph.nodes):
        if node.name in named and node.op == "call_function" and isinstance(node_value(node), torch.Tensor):
            with program.graph.inserting_after(node):
                alias = program.graph.call_function(_ALIAS, (node,))
            alias.meta = dict(node.meta)
            node.replace_all_uses_with(alias, delete_user_cb=lambda user, alias=alias: user is not alias)
            renamed[node.name] = alias.name
    _rename(program, renamed)
    return set(renamed.values())


def _remove_aliases(program: ExportedProgram, added: set[str]) -> None:
    renamed: dict[str, str] = {}
    for alias in program.graph.find_nodes(op="call_function", target=_ALIAS):
        history = alias.meta.get("from_node")
        if history and history[-1].name in added:
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
