"""What two programs, or the texts of two, do differently, by scope.

Data flow:
    two module calls -> the bodies of the functions that they would be; their keys say whether that is one function
    two Trees of sections, or of the lines of texts
    -> the items of both roots aligned by what they call, and again inside each pair of sections
    aligned ops -> one number for both their nodes -> their lines compared with numbers in place of names -> Difference
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import html
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.fx

from scopetrace.containers.structure import leaves
from scopetrace.program.graph import named, node_value, type_text, typed
from scopetrace.program.outlined import Function, function_of_call
from scopetrace.program.traced import ModuleCall, TracedProgram
from scopetrace.view.boxes import boxes
from scopetrace.view.html import comparison, page
from scopetrace.view.text import op_line
from scopetrace.view.tree import Namer, Op, Section, Tree, op_text, target_text, value_text, values_text

VERSION = 1
"""Of the form of `Diff.to_dict()`: raised where a key goes or changes its meaning."""

Kind = Literal["added", "removed", "changed"]
What = Literal["op", "call", "input", "output", "attribute"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """One thing that differs."""

    kind: Kind
    what: What
    """`attribute`: a parameter, buffer or constant; `output`: the result, or what a call changes after the graph."""
    scope: str
    """The path of the scope that it is in."""
    before: str | None
    """Its text in the first program; None where it was added."""
    after: str | None
    """Its text in the second program; None where it was removed."""

    def lines(self) -> list[str]:
        """A line that begins with `-` for what was, and one with `+` for what is."""
        return [f"{sign} {text}" for sign, text in (("-", self.before), ("+", self.after)) if text is not None]


class Diff:
    """The differences of two programs, in the order of execution. False where there are none.

    Attributes:
        differences: each with its scope.
    """

    def __init__(self, differences: list[Difference], programs: Sequence[TracedProgram] = ()) -> None:
        """`programs` are those that were compared, which pages draw."""
        self.differences, self._programs = differences, programs

    def __bool__(self) -> bool:
        return bool(self.differences)

    def __len__(self) -> int:
        return len(self.differences)

    def __iter__(self) -> Iterator[Difference]:
        return iter(self.differences)

    def to_dict(self) -> dict[str, Any]:
        """The differences as plain data, for JSON; view/assets/diff.schema.json is the schema."""
        return {"version": VERSION, "differences": [dataclasses.asdict(d) for d in self.differences]}

    def to_json(self) -> str:
        """`to_dict()` as JSON text."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

    def __str__(self) -> str:
        lines = []
        for scope, differences in itertools.groupby(self.differences, lambda d: d.scope):
            lines += [scope, *(f"  {line}" for difference in differences for line in difference.lines())]
        return "\n".join([*lines, self._counts()])

    def _counts(self) -> str:
        counts = Counter(d.kind for d in self.differences)
        return ", ".join(f"{n:,} {kind}" for kind, n in sorted(counts.items())) if counts else "no differences"

    def __repr__(self) -> str:
        return f"<Diff: {self._counts()}>"

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The differences as one HTML file, to be opened in a browser; written to `path` if one is given.

        Above stands the text; below, both programs as `Trace.to_html` draws them, side by side, with what differs in
        colour. What is opened in one opens in the other, and a line of the text leads to its place in both.

        Raises OSError where the file cannot be written.
        """
        pages = [page(boxes(program)) for program in self._programs]
        text = comparison(self._repr_html_(), pages, [dataclasses.asdict(d) for d in self.differences])
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _repr_html_(self) -> str:  # for notebooks
        colours = {"+": "#dafbe1", "-": "#ffebe9"}
        rows = []
        for line in str(self).splitlines():
            colour = colours.get(line.strip()[:1]) if line.startswith("  ") else None
            style = f" style='background:{colour};color:#1f2328'" if colour else ""
            rows.append(f"<div{style}>{html.escape(line)}</div>")
        return f"<div style='font-family:monospace;white-space:pre-wrap'>{''.join(rows)}</div>"


def compare(before: TracedProgram | str, after: TracedProgram | str) -> Diff:
    """The differences of two programs, or of two texts of programs."""
    a, b = (_TextSide(x) if isinstance(x, str) else _Side(x) for x in (before, after))
    programs = [x for x in (before, after) if not isinstance(x, str)]
    return Diff(_Comparison(a, b).differences, programs)


def compare_calls(before: ModuleCall, after: ModuleCall) -> Diff:
    """Why two module calls are not one function; empty where they are. Raises OutlineError."""
    one, other = function_of_call(before), function_of_call(after)
    if one.key == other.key:
        return Diff([])
    path, kinds = after.scope.path, [f"{f.domain}.{f.module_type and f.module_type.__qualname__}" for f in (one, other)]
    if one.module_type is not other.module_type:
        return Diff([Difference("changed", "call", path, *kinds)])
    differences = _Comparison(_FunctionSide(one), _FunctionSide(other)).differences
    if not differences:  # device, layout, autograd mode, which operands are one tensor
        items = next((a, b) for a, b in itertools.zip_longest(one.key, other.key) if a != b)
        differences = [Difference("changed", "call", path, *map(str, items))]
    return Diff(differences)


class _Side:
    """One program, with texts of its parts in which nodes have numbers that do not depend on the graph's names.

    Attributes:
        inputs: of each input of the graph, its text, and the same without its name where that may differ.
        effects: the steps after the graph, by position.
    """

    def __init__(self, program: TracedProgram) -> None:
        self.program, self.root = program, Tree(program).root
        placeholders = program.lowering.graph.find_nodes(op="placeholder")
        self.inputs: dict[Any, tuple[str, str]] = {i: (typed(node),) * 2 for i, node in enumerate(placeholders)}
        self.effects = dict(enumerate(str(program.tape.write_back or "").splitlines()))
        self._numbers = {node: f"input {position}" for position, node in enumerate(placeholders)}

    def set_number(self, item: Any, number: int) -> None:
        """Number the nodes of what an op gives or a call returns."""
        if isinstance(item, Op):
            nodes = [*dict.fromkeys([item.node, *item.results])]
        else:
            nodes = leaves(item.outputs, torch.fx.Node)
        self._numbers |= {node: f"#{number}.{slot}" for slot, node in enumerate(nodes)}

    def _number(self, node: torch.fx.Node) -> str:
        return self._numbers.get(node) or named(node)

    def attributes(self) -> dict[str, str]:
        """By name, the text of each parameter, buffer and constant that the graph reads; of constants with values."""
        constants, texts = self.program.tape.constants, {}
        for node in self.program.lowering.graph.find_nodes(op="get_attr"):
            name = str(node.target)
            if node_value(node) is not None:
                texts[name] = typed(node) + (f" = {_content(constants[name])}" if name in constants else "")
        return texts

    def texts(self, item: Any) -> tuple[str, str]:
        """An op or a section with its arguments, and the same with numbers in place of names."""
        if isinstance(item, Op):
            return op_line(item, named), f"{type_text(node_value(item.node))} = {op_text(item.node, self._number)}"
        by_name, by_number = self.result(item)
        if item.kind == "body":
            return f"{item.name} -> {by_name}", by_number
        if item.kind != "call":
            return item.label, ""
        return f"{_taken(item, named)} -> {by_name}", f"{_taken(item, self._number)} -> {by_number}"

    def result(self, section: Section) -> tuple[str, str]:
        """The result of a section, and the same with numbers in place of names."""
        return value_text(section.outputs, named), value_text(section.outputs, self._number)


class _FunctionSide(_Side):
    """The body of a function. Its parameters and buffers are inputs, known by their names; others by their numbers."""

    def __init__(self, function: Function) -> None:
        self.program = function.calls[0].program
        self.root = next(s for s in Tree(self.program).root.walk() if s.lowering is function.lowering)
        self.inputs, self.effects, self._numbers = {}, {}, {}
        placeholders = iter(function.graph.find_nodes(op="placeholder"))
        for i in function.inputs:
            count = len(self.inputs) if i.kind in ("argument", "absent") else f"other {len(self.inputs)}"
            key = i.name if i.kind in ("parameter", "buffer") else count
            if i.kind == "absent":
                self.inputs[key] = (f"{i.name}=None", "")
                continue
            node = next(placeholders)
            self.inputs[key], self._numbers[node] = (typed(node), type_text(node_value(node))), f"input {key}"

    def attributes(self) -> dict[str, str]:
        return {}


@dataclasses.dataclass(eq=False)
class _Line:
    """A line of the text of a program, with the lines that are indented below it."""

    label: str
    """What it calls, or the name of the call."""
    text: str
    path: str
    items: list[_Line] = dataclasses.field(default_factory=list)

    @property
    def is_op(self) -> bool:
        return self.text.startswith("%")

    @property
    def op_count(self) -> int:
        return sum(line.is_op + line.op_count for line in self.items)


_Item = Op | Section | _Line
_NAME, _END_OF_LABEL = re.compile(r"%\w+"), re.compile(r"\(| as | -> |: ")


class _TextSide(_Side):
    """One program, of which there is only the text: parameters are in the lines of the ops that take them."""

    def __init__(self, text: str) -> None:
        root = _Line("", "", "")
        around = [root]
        for line in filter(str.strip, text.splitlines()):
            content = line.lstrip()
            del around[(len(line) - len(content)) // 2 + 1 :]
            label = _END_OF_LABEL.split(content.partition(" = ")[2] if content.startswith("%") else content)[0]
            around.append(_Line(label, content, "/".join([*(part.label for part in around[1:]), label])))
            around[-2].items.append(around[-1])
        root.path = next((line.label for line in root.items if line.items), "")
        self.root: Any = root
        self.inputs, self.effects = {}, {}
        headers = [name for line in root.items if line.items for name in _NAME.findall(line.text.partition(" -> ")[0])]
        self._names = {name: f"input {i}" for i, name in enumerate(dict.fromkeys(headers))}

    def set_number(self, item: Any, number: int) -> None:
        """Number the names of what a line gives."""
        results = item.text.partition(" = ")[0] if item.is_op else item.text.rpartition(" -> ")[2]
        self._names |= {name: f"#{number}.{slot}" for slot, name in enumerate(_NAME.findall(results))}

    def attributes(self) -> dict[str, str]:
        return {}

    def texts(self, item: Any) -> tuple[str, str]:
        results, equals, rest = item.text.partition(" = ") if item.is_op else ("", "", item.text)
        numbered = _NAME.sub(lambda name: self._names.get(name[0], name[0]), rest)
        return item.text, _NAME.sub("", results) + equals + numbered

    def result(self, section: Any) -> tuple[str, str]:
        return "", ""


def _taken(call: Section, name: Namer) -> str:
    return f"{call.label}({', '.join(f'{key}={value_text(x, name)}' for key, x in call.inputs.items())})"


class _Comparison:
    """Compares two programs in the order of execution: operands get their numbers before the ops that read them."""

    def __init__(self, a: _Side, b: _Side) -> None:
        self._a, self._b = a, b
        self._numbers = itertools.count()
        self.differences: list[Difference] = []
        for key in dict.fromkeys([*a.inputs, *b.inputs]):
            (before, one), (after, other) = a.inputs.get(key, (None, None)), b.inputs.get(key, (None, None))
            if one != other:
                self._note("input", b.root.path, before, after)
        self._tables("attribute", a.attributes(), b.attributes())
        self._sections(a.root, b.root)
        old, new = a.result(a.root), b.result(b.root)
        if old[0] != new[0]:
            self._texts("output", b.root.path, old, new)
        self._tables("output", a.effects, b.effects)

    def _tables(self, what: What, before: dict[Any, str], after: dict[Any, str]) -> None:
        for key in dict.fromkeys([*before, *after]):
            if before.get(key) != after.get(key):
                self._note(what, self._b.root.path, before.get(key), after.get(key))

    def _texts(self, what: What, scope: str, before: tuple[str, str], after: tuple[str, str]) -> None:
        """Note a change where two parts differ with numbers in place of names."""
        if before[1] != after[1]:
            self._note(what, scope, before[0], after[0])

    def _note(self, what: What, scope: str, before: str | None, after: str | None) -> None:
        kind: Kind = "added" if before is None else "removed" if after is None else "changed"
        self.differences.append(Difference(kind, what, scope, before, after))

    def _sections(self, before: Section | _Line, after: Section | _Line) -> None:
        old, new = (
            [target_text(item.node) if isinstance(item, Op) else item.label for item in section.items]
            for section in (before, after)
        )
        for tag, i, stop, j, end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            if tag == "equal":
                for a, b in zip(before.items[i:stop], after.items[j:end], strict=True):
                    self._pair(a, b, after.path)
            else:
                self._block(before.items[i:stop], after.items[j:end], before.path, after.path)

    def _block(self, old: Sequence[_Item], new: Sequence[_Item], old_scope: str, new_scope: str) -> None:
        """Items that have no counterpart; an op in the place of a single other one has changed."""
        is_one = len(old) == len(new) == 1
        if is_one and _what(old[0]) == _what(new[0]) == "op":
            self._pair(old[0], new[0], new_scope)
            return
        for item in old:
            self._note(_what(item), old_scope, _line(self._a, item), None)
        for item in new:
            self._note(_what(item), new_scope, None, _line(self._b, item))
        if is_one:  # what reads the new one in place of the old has not changed for it
            self._number(old[0], new[0])

    def _pair(self, a: _Item, b: _Item, scope: str) -> None:
        if isinstance(a, Op) and isinstance(b, Op):
            texts = self._a.texts(a), self._b.texts(b)
            self._number(a, b)
            self._texts("op", scope, *texts)
            for one, other in zip(a.bodies, b.bodies, strict=False):
                self._pair(one, other, scope)
        elif not (isinstance(a, Op) or isinstance(b, Op)):
            self._sections(a, b)
            if isinstance(a, _Line) and (a.is_op or not a.items):  # the results of a call have numbers from its ops
                self._number(a, b)
            self._texts(_what(a), scope, self._a.texts(a), self._b.texts(b))

    def _number(self, a: _Item, b: _Item) -> None:
        number = next(self._numbers)
        self._a.set_number(a, number)
        self._b.set_number(b, number)


def _what(item: _Item) -> What:
    return "op" if isinstance(item, Op) or (isinstance(item, _Line) and item.is_op) else "call"


def _line(side: _Side, item: _Item) -> str:
    text, _ = side.texts(item)
    if isinstance(item, Op) or not item.op_count:
        return text
    return f"{text}  # {item.op_count} op{'s' * (item.op_count != 1)}"


def _content(constant: torch.Tensor) -> str:
    """The values of a small constant, of others a hash of them."""
    if constant.is_meta or constant.layout is not torch.strided:
        return "…"
    data = constant.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return values_text(constant) or f"sha256 {hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]}"


def digest(program: TracedProgram) -> str:
    """A SHA-256 of what a program does: inputs, ops with arguments, types and scopes, calls, constants, effects."""
    side, numbers = _Side(program), itertools.count()
    lines = [*(text for text, _ in side.inputs.values()), *side.attributes().values()]

    def add(section: Section) -> None:
        for item in section.items:
            if isinstance(item, Op):
                lines.append(f"{section.path}: {side.texts(item)[1]}")
                side.set_number(item, next(numbers))
                for body in item.bodies:
                    add(body)
                    lines.append(side.texts(body)[1])
            else:
                add(item)
                lines.append(f"{section.path}: {side.texts(item)[1]}")

    add(side.root)
    lines += [side.result(side.root)[1], *side.effects.values()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
