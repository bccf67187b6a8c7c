"""The program as text: an indented tree of module calls, user scopes and ops.

    Net: 3 ops, 5 module calls, 6 parameters (162 elements)
    Net(x=%x: f32[1, 8]) -> %linear_2: f32[1, 2]
      Sequential[body](input=%x: f32[1, 8]) -> %linear_1: f32[1, 8]
        Linear[0](input=%x: f32[1, 8]) -> %linear: f32[1, 8]
          %linear: f32[1, 8] = aten.linear(%x, self.weight, self.bias)
        Linear[1] as Linear[0] -> %linear_1: f32[1, 8]
      Linear[head](input=%linear_1: f32[1, 8]) -> %linear_2: f32[1, 2]
        %linear_2: f32[1, 2] = aten.linear(%linear_1, self.weight, self.bias)

A parameter of the module whose call uses it is `self.weight`; any other has its full name. Arguments equal to the
defaults of `forward` are left out. A call "as" another one has the same structure, with its own weights. A line with
`×n` stands for n calls; its `->` gives the result of the last if each call takes the result of the one before, else
all results.

Data flow:
    TracedProgram -> Tree of sections -> runs of equal neighbours -> lines
    module calls -> those chosen by scope path and depth -> the sections that are shown
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
import torch.fx

from scopetrace.errors import CallNotFoundError
from scopetrace.formatting import columns
from scopetrace.ir.scopes import Scope
from scopetrace.ir.selection import Selection, crossing, is_named, is_scope_named, several, target_text
from scopetrace.ir.tape import signature_of
from scopetrace.program.graph import named, node_value, typed
from scopetrace.program.traced import ModuleCall, TracedProgram
from scopetrace.view.tree import (
    BACKWARD,
    RECOMPUTED,
    Namer,
    OpItem,
    Section,
    Tree,
    index_of,
    module_prefix,
    op_text,
    tensors_of,
    value_text,
)

_INDENT = "  "
_LIMIT = 8  # items of a container that a header or a cell shows


def render(program: TracedProgram, depth: int | None = None, scope: Selection | None = None) -> str:
    """The program as text, without a newline at the end; see `Trace.print_readable`."""
    return "\n".join(_Writer(program, depth).lines(scope))


class _Writer:
    def __init__(self, program: TracedProgram, depth: int | None) -> None:
        self._depth = depth
        self._tree = Tree(program)
        self._program, self._tape = program, program.tape

    def lines(self, selection: Selection | None) -> Iterator[str]:
        root = self._tree.root
        parameters = [t for t in tensors_of(self._program, root) if isinstance(t, torch.nn.Parameter)]
        counts = (root.op_count, "op"), (len(self._tree.calls), "module call"), (len(parameters), "parameter")
        elements = f" ({sum(t.numel() for t in parameters):,} elements)" if parameters else ""
        yield f"{root.path}: {', '.join(_count(*each) for each in counts)}{elements}"
        if selection is None:
            yield from self._section(root, "", 0, root.label)
            specializations = self._tape.specializations
            if specializations:
                yield f"specialized on {_count(len(specializations), 'value')} of the example inputs:"
                yield from (f"{_INDENT}{s}" for s in specializations)
            return
        refuse_unnamed(root.call.scope, self._tree.calls, selection)
        items = [*outermost(root, selection)]
        yield from self._items(items, "", 0, lambda s: s.path if s.name else s.path + index_of(s.call), named)

    # ---------------------------------------------------------------- sections

    def _section(self, section: Section, indent: str, depth: int, label: str) -> Iterator[str]:
        ops = _count(section.op_count, "op")
        if section.kind == "backward":
            is_closed = self._depth is not None and depth > self._depth
            yield f"{indent}{label}" + (f"  # {ops}" if is_closed else "")
            if is_closed:
                return
            depth += section.name not in (BACKWARD, RECOMPUTED)
        elif section.kind == "scope":
            yield f'{indent}scope("{label}")'
        elif section.kind == "body":
            yield f"{indent}{label}({', '.join(map(typed, section.inputs))}) -> {value_text(section.outputs, typed)}"
        elif self._is_closed(section, depth):
            yield indent + _header(section, label, *([] if section.call.is_leaf else [ops]))
            return
        else:
            yield indent + _header(section, label)
            depth += 1
        name = functools.partial(_in_place, prefix=module_prefix(section), constants=self._tape.constants)
        yield from self._items(section.items, indent + _INDENT, depth, operator.attrgetter("label"), name)

    def _items(
        self, items: Sequence[Section], indent: str, depth: int, label: Callable[[Section], str], name: Namer
    ) -> Iterator[str]:
        shown: dict[int, str] = {}  # by signature, the label of the section that is shown in full
        for item in self._tree.runs(items):
            if not isinstance(item, OpItem):
                yield from self._run(item, indent, depth, label, shown)
                continue
            yield indent + op_line(item, name)
            for body in item.items:
                yield from self._section(body, indent + _INDENT, depth, body.label)

    def _is_closed(self, section: Section, depth: int) -> bool:
        return section.call.is_leaf or (self._depth is not None and depth > self._depth)

    def _run(
        self, run: Section, indent: str, depth: int, label: Callable[[Section], str], shown: dict[int, str]
    ) -> Iterator[str]:
        """The first section of a run, and one line for the others."""
        first = run.items[0]
        names = [label(member) for member in run.items]
        like = shown.setdefault(first.signature, names[0])
        if like == names[0] or first.kind == "scope" or first.op_count <= 1 or self._is_closed(first, depth):
            like = names[0]
            yield from self._section(first, indent, depth, like)
        else:
            yield indent + _header(first, names[0], f"as {like}")
        if len(names) > 1:
            yield f"{indent}{counted(names[1:])} as {like}{self._fold_values(run)}"

    def _fold_values(self, run: Section) -> str:
        """Arguments that differ from member to member, and results: the last of a chain, else all."""
        if run.items[0].kind == "backward":
            return ""
        calls = [member.call for member in run.items[1:]]
        parts = [
            f"{key}={_listed([value_text(call.argument_templates[key], named) for call in calls])}"
            for key in self._tree.differing(run)
        ]
        arguments = f"({', '.join(parts)})" if parts else ""
        results = [value_text(call.output_template, typed, _LIMIT) for call in (calls[-1:] if run.is_chain else calls)]
        return f"{arguments} -> {_listed(results)}"


def _header(section: Section, label: str, *notes: str) -> str:
    if section.kind == "backward":
        return " ".join([label, *notes])
    call, defaults = section.call, _defaults(getattr(section.call.module_type, "forward", None))
    passed = call.argument_templates.items()
    shown = [(key, x) for key, x in passed if key not in defaults or not _same(x, defaults[key])]
    arguments = ", ".join(f"{key}={value_text(x, typed, _LIMIT)}" for key, x in shown)
    result = "" if call.raised is not None else f" -> {value_text(call.output_template, typed, _LIMIT)}"
    comment = ", ".join([*_notes(call), *notes])
    return f"{label}({arguments}){result}" + (f"  # {comment}" if comment else "")


# -------------------------------------------------------------------- choosing by path and depth


def outermost(section: Section, selection: Selection) -> Iterator[Section]:
    """The calls and user scopes that a selection names and that are not inside another one of them.

    Patterns alone name user scopes; bodies of ops have no names.
    """
    if section.kind == "call":
        is_selected = is_named(section.call, selection)
    else:
        is_selected = section.kind != "body" and is_scope_named(section.scope, selection)
    if is_selected:
        yield section
        return
    for inner in section.sections():
        yield from outermost(inner, selection)


def refuse_unnamed(root: Scope, calls: Sequence[ModuleCall], selection: Selection) -> None:
    """Raise CallNotFoundError for a pattern, class or module that names neither a call nor a scope."""
    for target in several(selection):
        if isinstance(target, str) and any(is_scope_named(scope, target) for scope in root.walk()):
            continue
        if not any(is_named(call, target) for call in calls):
            paths = [scope.path for scope in root.walk()]
            some = " and ".join(map(repr, [p for p in paths[1:] if p.count("/") <= 2][:2] or paths[:1]))
            names = [*paths, *(call.fqn or "" for call in calls)]
            problem = f"no scope matches {target_text(target)}"
            raise CallNotFoundError(f"{problem}; {crossing(target, names)}paths are such as {some}")


def calls_table(calls: list[ModuleCall]) -> str:
    """A table with a line for each call: position, fqn, index, class, arguments, outputs."""
    rows = [("call", "fqn", "index", "class", "arguments", "outputs"), *map(_row, calls)]
    return columns(rows, widest=80)  # so that one long cell does not move all outputs to the right


def _row(call: ModuleCall) -> tuple[str, ...]:
    cls = call.module_type.__name__ if call.module_type is not None else "function"
    arguments = ", ".join(f"{name}={value_text(x, typed, _LIMIT)}" for name, x in call.argument_templates.items())
    result = value_text(call.output_template, typed, _LIMIT)
    if call.raised is not None:
        result = f"raised {type(call.raised).__name__}"
    fqn = "-" if call.fqn is None else call.fqn or '""'
    return str(call.position), fqn, str(call.index), cls, arguments, result


# -------------------------------------------------------------------- parts of lines


def op_line(op: OpItem, name: Namer) -> str:
    """`%linear: f32[1, 16] = aten.linear(%x, self.weight)`, or the right side alone for an op without results."""
    value = node_value(op.node)
    text = op_text(op.node, name)
    if op.parts:
        slots = range(len(value)) if isinstance(value, (list, tuple)) else sorted(op.parts)
        results = [typed(op.parts[slot]) if slot in op.parts else "_" for slot in slots]
        return f"{', '.join(results)}{',' if len(results) == 1 else ''} = {text}"
    return text if value is None and not op.node.users else f"{typed(op.node)} = {text}"


def _in_place(node: torch.fx.Node, prefix: str | None, constants: Container[str]) -> str:
    """A node as an argument: `self.weight` for an attribute whose name begins with the module's `prefix`."""
    target = str(node.target)
    if (
        node.op != "get_attr"
        or prefix is None
        or node_value(node) is None
        or not target.startswith(prefix)
        or target in constants
    ):
        return named(node)
    return f"self.{target.removeprefix(prefix)}"


def counted(labels: list[str]) -> str:
    """The labels of a run as one, with their number: `BertLayer[layer.1 … layer.11] ×11`; one label as it is."""
    return f"{_joined(labels)} ×{len(labels)}" if len(labels) > 1 else labels[0]


def _joined(labels: list[str]) -> str:
    first, last = labels[0], labels[-1]
    if first == last:
        return first
    between = ", " if len(labels) == 2 else " … "
    if first.endswith("]") and last.endswith("]"):
        head, _, tail = first.rpartition("[")
        other, _, end = last.rpartition("[")
        if head == other:
            return f"{head}[{tail[:-1]}{between}{end}"
    head, number_sign, _ = first.rpartition("#")
    if number_sign and last.startswith(f"{head}#"):
        last = last.removeprefix(head)
    return f"{first}{between}{last}"


def _listed(texts: list[str]) -> str:
    """Texts with commas, equal ones once; of more than four the first two and the last."""
    if len(set(texts)) == 1:
        return texts[0]
    return ", ".join(texts if len(texts) <= 4 else [*texts[:2], "…", texts[-1]])


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _notes(call: ModuleCall) -> Iterator[str]:
    if call.is_leaf:
        yield "leaf"
    if call.fqn is None:
        yield "not a submodule of the model"
    if call.raised is not None:
        message = str(call.raised).splitlines()
        yield f"raised {type(call.raised).__name__}" + (f": {message[0]}" if message else "")


def _defaults(forward: Any) -> dict[str, Any]:
    """By parameter, its default; nothing for `*args` and `**kwargs`."""
    try:
        parameters = signature_of(forward).parameters.values()
    except (TypeError, ValueError):  # functions have no forward; scripted and built-in callables no signature
        return {}
    nothing: dict[Any, Any] = {inspect.Parameter.VAR_POSITIONAL: (), inspect.Parameter.VAR_KEYWORD: {}}
    return {p.name: nothing.get(p.kind, p.default) for p in parameters}


def _same(value: Any, default: Any) -> bool:
    if value is default:
        return True
    return type(value) is type(default) and type(value) in (int, float, bool, str, tuple, dict) and value == default
