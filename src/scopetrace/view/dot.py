"""Pictures by Graphviz: SVG and PNG.

Data flow:
    Box + depth -> clusters for open boxes, nodes for closed ones, edges from nodes that make values to their users
    DOT text -> Graphviz
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from scopetrace.errors import ViewDependencyError
from scopetrace.view.boxes import Box, End, Port

_STYLE = """\
  graph [fontname="Helvetica", fontsize=11, style="rounded", nodesep=0.25, ranksep=0.35, labeljust=l]
  node [fontname="Helvetica", fontsize=10, shape=box, style="rounded,filled", color="#57606a", margin="0.12,0.05"]
  edge [fontname="Helvetica", fontsize=8, color="#57606a", fontcolor="#57606a", arrowsize=0.6]"""
_FILL = {"call": "#ddf4ff", "run": "#fff8c5", "scope": "#fbefff", "body": "#fbefff", "op": "#ffffff"}
_LONGEST = 40  # characters of a line below a label
_SHADES = ("#f6f8fa", "#ffffff")  # of clusters in clusters, in turn


def picture(roots: Sequence[Box], depth: int, file_format: str) -> bytes:
    """Boxes as SVG or PNG. Raises ViewDependencyError where Graphviz is missing."""
    try:
        import graphviz
    except ImportError as error:
        raise ViewDependencyError(
            "pictures need the package graphviz: pip install 'scopetrace[view]'; they also need Graphviz itself"
        ) from error
    try:
        found: bytes = graphviz.Source(dot_text(roots, depth)).pipe(format=file_format)
    except graphviz.ExecutableNotFound as error:
        raise ViewDependencyError(
            "pictures need Graphviz, whose program dot was not found: install it, as with apt install graphviz, "
            "or use to_html(), which needs nothing"
        ) from error
    return found


def dot_text(roots: Sequence[Box], depth: int) -> str:
    """Boxes in the DOT language.

    Args:
        roots: drawn open, each with its inputs and outputs.
        depth: levels of module calls below a root that are open too; of a run, its first member.
    """
    drawing = _Drawing()
    for root in roots:
        drawing.root(root, depth)
    return "\n".join(["digraph {", _STYLE, *drawing.lines, "}"]) + "\n"


@dataclasses.dataclass
class _Ends:
    """The nodes of a drawn box that take its inputs and give its outputs."""

    takers: list[list[str]]
    """By input, the nodes that take it."""
    givers: list[str | int | None]
    """By output, the node that gives it; the number of the input that it is; None where nothing is known of it."""


class _Drawing:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._ids = map("n{}".format, itertools.count())

    def root(self, box: Box, depth: int) -> None:
        """Draw a box with a node for each of its inputs and outputs."""
        ends = self._open(box, depth, 0)
        given = [self._value(port) for port in box.inputs]
        for port, node, takers in zip(box.inputs, given, ends.takers, strict=True):
            for taker in takers:
                self._edge(node, taker, port.type)
        for port, giver in zip(box.outputs, ends.givers, strict=True):
            node = self._value(port)
            if giver is not None:
                self._edge(given[giver] if isinstance(giver, int) else giver, node, port.type)

    def _value(self, port: Port) -> str:
        node = next(self._ids)
        self.lines.append(f'  {node} [label={_quoted(port.name)}, shape=ellipse, style=filled, fillcolor="#eaeef2"]')
        return node

    def _edge(self, source: str, target: str, text: str) -> None:
        self.lines.append(f"  {source} -> {target} [label={_quoted(' ' + text)}]")

    def _draw(self, box: Box, depth: int, level: int) -> _Ends:
        is_small = box.kind == "call" and len(box.children) == 1 and box.children[0].kind == "op"
        if not box.children or is_small or depth <= 0:
            return self._closed(box)
        return self._open(box, depth - (box.kind == "call"), level)

    def _closed(self, box: Box) -> _Ends:
        node = next(self._ids)
        label = "\n".join([box.label, *(_short(text) for _, text in box.notes())])
        pen = ', color="#cf222e"' if box.writes else ""
        self.lines.append(f'  {node} [label={_quoted(label)}, fillcolor="{_FILL[box.kind]}"{pen}]')
        return _Ends([[node] for _ in box.inputs], [node for _ in box.outputs])

    def _open(self, box: Box, depth: int, level: int) -> _Ends:
        """A cluster with the children inside; of a run with its first member only."""
        self.lines.append(f"  subgraph cluster_{next(self._ids)} {{")
        border = "#cf222e" if box.writes else "#d0d7de"
        fill = _FILL["scope"] if box.kind == "scope" else _SHADES[level % 2]
        self.lines.append(f'  label={_quoted(box.label)}; bgcolor="{fill}"; color="{border}"')
        shown = box.children[:1] if box.kind == "run" else box.children
        drawn = [self._draw(child, depth, level + 1) for child in shown]
        self.lines.append("  }")
        if box.kind == "op":  # the bodies of a higher-order op, whose operands are not those of the op one by one
            return self._around(box, drawn)
        return self._connect(box, drawn)

    def _around(self, box: Box, bodies: list[_Ends]) -> _Ends:
        first = next((t for body in bodies for takers in body.takers for t in takers), None)
        last = next((g for body in bodies for g in body.givers if isinstance(g, str)), None)
        return _Ends([[first] if first else [] for _ in box.inputs], [last for _ in box.outputs])

    def _connect(self, box: Box, drawn: list[_Ends]) -> _Ends:
        """Draw the edges inside an open box."""
        found = _Ends([[] for _ in box.inputs], [None for _ in box.outputs])
        into: dict[End, str | int | None] = {}  # by end at which a value is used, what gives the value
        for source, target, text in _shown_edges(box, len(drawn)):
            giver = _giver(source, drawn, into)
            into[target] = giver
            if target.child is None:
                found.givers[target.port] = giver
                continue
            for taker in drawn[target.child].takers[target.port]:
                if isinstance(giver, int):
                    found.takers[giver].append(taker)
                elif giver is not None:
                    self._edge(giver, taker, text)
        return found


def _giver(source: End, drawn: list[_Ends], into: dict[End, str | int | None]) -> str | int | None:
    """The node that gives a value, or the number of the input of the box that it is."""
    if source.child is None:
        return source.port
    giver = drawn[source.child].givers[source.port]
    return into.get(End(source.child, giver)) if isinstance(giver, int) else giver


def _shown_edges(box: Box, shown: int) -> Iterator[tuple[End, End, str]]:
    """The edges between the children; of a run of which the first is `shown`, results are drawn as its own."""
    if len(box.children) == shown:
        yield from ((edge.source, edge.target, edge.type) for edge in box.edges)
        return
    for edge in box.edges:
        if edge.source.child is None and edge.target.child == 0:
            yield edge.source, edge.target, edge.type
        elif edge.target.child is None and edge.source.child is not None:
            yield End(0, edge.source.port), edge.target, edge.type


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
