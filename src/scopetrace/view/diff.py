"""What two programs, or the texts of two, do differently, by scope.

Data flow:
    two module calls -> the bodies of the functions that they would be; their keys say whether that is one function
    two programs, functions or texts -> a tree of lines each
    -> the lines of both roots aligned by what they call, and again inside each pair of lines
    aligned lines -> one number for what both give -> compared with numbers in place of names -> Difference
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

from scopetrace.program.graph import named, node_value, typed
from scopetrace.program.outlined import Function, function_of_call
from scopetrace.program.traced import ModuleCall, TracedProgram
from scopetrace.view.boxes import boxes
from scopetrace.view.html import comparison, page
from scopetrace.view.text import op_line
from scopetrace.view.tree import OpItem, Section, Tree, value_text, values_text

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
    a, b = (_of_text(x) if isinstance(x, str) else _of_program(x) for x in (before, after))
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
    differences = _Comparison(_of_function(one), _of_function(other)).differences
    if not differences:  # device, layout, autograd mode, which operands are one tensor
        items = next((a, b) for a, b in itertools.zip_longest(one.key, other.key) if a != b)
        differences = [Difference("changed", "call", path, *map(str, items))]
    return Diff(differences)


_NAME, _END_OF_LABEL = re.compile(r"%\w+"), re.compile(r"\(| as | -> |: ")


@dataclasses.dataclass(eq=False)
class _Line:
    """A line of the text of a program, with the lines inside it: of a call its ops, of an op its bodies."""

    what: What
    label: str
    """What it calls, or the name of the call."""
    text: str
    path: str
    items: list[_Line] = dataclasses.field(default_factory=list)

    @property
    def op_count(self) -> int:
        return sum((line.what == "op") + line.op_count for line in self.items)

    @property
    def whole(self) -> str:
        """Its text, with the number of ops inside of a call."""
        count = 0 if self.what == "op" else self.op_count
        return f"{self.text}  # {count} op{'s' * (count != 1)}" if count else self.text

    @property
    def parts(self) -> tuple[str, str]:
        """What it gives, and of an op what it computes; of a call its whole text."""
        if self.what != "op":
            return self.text.rpartition(" -> ")[2], self.text
        target, equals, computed = self.text.partition(" = ")
        return (target, computed) if equals else ("", target)


def _numbers_of(*lines: _Line) -> dict[str, str]:
    """By name, the numbers of the inputs of what begins with these lines."""
    names = [name for line in lines for name in _NAME.findall(line.text.partition(" -> ")[0])]
    return {name: f"input {i}" for i, name in enumerate(dict.fromkeys(names))}


@dataclasses.dataclass
class _Side:
    """One of two programs that are compared.

    Attributes:
        names: by name of a value, the number that stands for it where lines are compared; a body has its own.
        inputs: of each input of the graph, its text; in the key is what has to agree besides its type.
        attributes: by name, the text of each parameter, buffer and constant that the graph reads.
        effects: the steps after the graph, by position.
    """

    root: _Line
    names: dict[str, str]
    inputs: dict[Any, str] = dataclasses.field(default_factory=dict)
    attributes: dict[str, str] = dataclasses.field(default_factory=dict)
    effects: dict[int, str] = dataclasses.field(default_factory=dict)
    result: str = ""

    def numbered(self, line: _Line) -> str:
        """A line with numbers in the place of names, without the names of an op's results."""
        target, text = line.parts
        return (f"{_NAME.sub('', target)} = " if line.what == "op" else "") + self.with_numbers(text)

    def with_numbers(self, text: str) -> str:
        return _NAME.sub(lambda name: self.names.get(name[0], name[0]), text)

    def set_number(self, line: _Line, number: int) -> None:
        """Number the names that a line is the first to give."""
        for slot, name in enumerate(_NAME.findall(line.parts[0])):
            self.names.setdefault(name, f"#{number}.{slot}")


def _of_program(program: TracedProgram) -> _Side:
    root, graph, constants = Tree(program).root, program.lowering.graph, program.tape.constants
    placeholders = graph.find_nodes(op="placeholder")
    attributes = {}
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if node_value(node) is not None:
            attributes[name] = typed(node) + (f" = {_content(constants[name])}" if name in constants else "")
    return _Side(
        _line_of(root),
        {named(node): f"input {i}" for i, node in enumerate(placeholders)},
        {(i, node.name): typed(node) for i, node in enumerate(placeholders)},
        attributes,
        dict(enumerate(str(program.tape.write_back or "").splitlines())),
        value_text(root.outputs, named),
    )


def _of_function(function: Function) -> _Side:
    """The body of a function. Its parameters and buffers are inputs, known by their names; others by their numbers."""
    root = next(s for s in Tree(function.calls[0].program).root.walk() if s.lowering is function.lowering)
    side = _Side(_line_of(root), {}, result=value_text(root.outputs, named))
    placeholders = iter(function.graph.find_nodes(op="placeholder"))
    for i in function.inputs:
        count = len(side.inputs) if i.kind in ("argument", "absent") else f"other {len(side.inputs)}"
        key = i.name if i.kind in ("parameter", "buffer") else count
        if i.kind == "absent":
            side.inputs[key] = f"%{i.name}: None"
            continue
        node = next(placeholders)
        side.inputs[key], side.names[named(node)] = typed(node), f"input {key}"
    return side


def _line_of(item: Section) -> _Line:
    """The line of an op or section, with those inside."""
    if isinstance(item, OpItem):
        return _Line("op", item.label, op_line(item, named), "", list(map(_line_of, item.items)))
    text = item.label
    if item.kind in ("call", "body"):
        passed = item.inputs.items() if item.kind == "call" else ()
        inputs = [f"{key}={value_text(x, named)}" for key, x in passed] or map(named, item.inputs)
        text = f"{text}({', '.join(inputs)}) -> {value_text(item.outputs, named)}"
    return _Line("call", item.label, text, item.path, list(map(_line_of, item.items)))


def _of_text(text: str) -> _Side:
    """A program of which there is only the text: parameters are in the lines of the ops that take them."""
    root = _Line("call", "", "", "")
    around = [root]
    for line in filter(str.strip, text.splitlines()):
        content = line.lstrip()
        del around[(len(line) - len(content)) // 2 + 1 :]
        is_op = content.startswith("%")
        label = _END_OF_LABEL.split(content.partition(" = ")[2] if is_op else content)[0]
        path = "/".join([*(part.label for part in around[1:]), label])
        around.append(_Line("op" if is_op else "call", label, content, path))
        around[-2].items.append(around[-1])
    calls = [line for line in root.items if line.items]
    root.path = next((line.label for line in calls), "")
    return _Side(root, _numbers_of(*calls))


class _Comparison:
    """Compares two programs in the order of execution: operands get their numbers before the lines that read them.

    Attributes:
        compared: the texts of the second program, with numbers and in order.
    """

    def __init__(self, a: _Side, b: _Side) -> None:
        self._a, self._b = a, b
        self._numbers = itertools.count()
        self.differences: list[Difference] = []
        self.compared: list[str] = []
        self._tables("input", a.inputs, b.inputs)
        self._tables("attribute", a.attributes, b.attributes)
        self._lines(a.root, b.root)
        result = b.with_numbers(b.result)
        one = result if a.result == b.result else a.with_numbers(a.result)
        self._compare("output", b.root.path, a.result, b.result, one, result)
        self._tables("output", a.effects, b.effects)

    def _tables(self, what: What, before: dict[Any, str], after: dict[Any, str]) -> None:
        for key in dict.fromkeys([*before, *after]):
            pair = before.get(key), after.get(key)
            one, other = (text and f"{key}: {_NAME.sub('', text)}" for text in pair)
            self._compare(what, self._b.root.path, *pair, one, other)

    def _compare(
        self, what: What, scope: str, before: str | None, after: str | None, one: str | None, other: str | None
    ) -> None:
        """Note a difference where `one` and `other`, in which no names of values count, are not equal."""
        self.compared.append(f"{scope}: {other}")
        if one != other:
            kind: Kind = "added" if before is None else "removed" if after is None else "changed"
            self.differences.append(Difference(kind, what, scope, before, after))

    def _lines(self, before: _Line, after: _Line) -> None:
        old, new = ([line.label for line in around.items] for around in (before, after))
        blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        for tag, i, stop, j, end in blocks if old != new else [("equal", 0, len(old), 0, len(new))]:
            if tag == "equal":
                for a, b in zip(before.items[i:stop], after.items[j:end], strict=True):
                    self._pair(a, b, after.path)
            else:
                self._block(before.items[i:stop], after.items[j:end], before.path, after.path)

    def _block(self, old: list[_Line], new: list[_Line], old_scope: str, new_scope: str) -> None:
        """Lines that have no counterpart; an op in the place of a single other one has changed."""
        is_one = len(old) == len(new) == 1
        if is_one and old[0].what == new[0].what == "op":
            self._pair(old[0], new[0], new_scope)
            return
        for line in old:
            self._compare(line.what, old_scope, line.whole, None, line.whole, None)
        for line in new:
            self._compare(line.what, new_scope, None, line.whole, None, line.whole)
        if is_one:  # what reads the new one in place of the old has not changed for it
            self._number(old[0], new[0])

    def _pair(self, a: _Line, b: _Line, scope: str) -> None:
        is_op = a.what == b.what == "op"
        if not is_op:
            self._lines(a, b)
        self._number(a, b)
        self._compare(a.what, scope, a.text, b.text, self._a.numbered(a), self._b.numbered(b))
        for one, other in zip(a.items, b.items, strict=False) if is_op else ():  # bodies
            names = self._a.names, self._b.names
            self._a.names, self._b.names = _numbers_of(one), _numbers_of(other)
            self._pair(one, other, scope)
            self._a.names, self._b.names = names

    def _number(self, a: _Line, b: _Line) -> None:
        number = next(self._numbers)
        self._a.set_number(a, number)
        self._b.set_number(b, number)


def _content(constant: torch.Tensor) -> str:
    """The values of a small constant, of others a hash of them."""
    if constant.is_meta or constant.layout is not torch.strided:
        return "…"
    data = constant.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return values_text(constant) or f"sha256 {hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]}"


def digest(program: TracedProgram) -> str:
    """A SHA-256 of what a program does: inputs, ops with arguments, types and scopes, calls, constants, effects."""
    side = _of_program(program)
    return hashlib.sha256("\n".join(_Comparison(side, side).compared).encode()).hexdigest()
