"""`run_decompositions` that keeps the signatures of module calls.

torch finds the arguments and results of a module call in the decomposed graph by the name of the last node that an old
node became. That is wrong for a piece of a result (`unbind`, `max`), which has no node of its own there, for an op
that is dropped (a cast to the same dtype), and for one whose last node is not its result.

Data flow:
    program -> `aten.alias` behind each value that a signature names, for the time of the run: torch keeps it as it is
         -> torch's run_decompositions -> the same without these ops, signatures naming what they took
         -> without the copies into changed inputs, as torch has it for buffers
"""

from __future__ import annotations

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
        guards, aliases = guards_of(self), _add_aliases(self)
        added = {alias.name for alias in aliases}
        try:
            with outside_modes(), without_guards(self):  # a FakeTensorMode of the user is not that of the program
                result = super().run_decompositions(*args, **kwargs)
        finally:
            _remove_aliases(self, aliases)
        new = [n for n in result.graph.find_nodes(op="call_function", target=_ALIAS) if _origin(n) in added]
        _remove_aliases(result, new)
        _remove_copies(result)
        result.__class__ = TracedExportedProgram
        set_guards(result, [*guards_of(result), *guards])
        return result


def _origin(node: torch.fx.Node) -> str | None:
    """The name of the node of the program before that it came from."""
    history = node.meta.get("from_node")
    return history[-1].name if history else None


def _add_aliases(program: ExportedProgram) -> list[torch.fx.Node]:
    """Put an alias behind each value that a module signature names; returns the aliases."""
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
