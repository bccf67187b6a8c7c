"""Pictures by Graphviz: SVG and PNG.

Data flow:
    Box + depth -> clusters for open boxes, nodes for closed ones
    a closed box -> edges from the nodes that make its inputs; it makes its outputs
    DOT text -> Graphviz
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence

import torch.fx

from scopetrace.errors import ViewDependencyError
from scopetrace.view.boxes import Box, Port

_STYLE = """\
  graph [fontname="Helvetica", fontsize=11, style="rounded", nodesep=0.25, ranksep=0.35, labeljust=l]
  node [fontname="Helvetica", fontsize=10, shape=box, style="rounded,filled", color="#57606a", margin="0.12,0.05"]
  edge [fontname="Helvetica", fontsize=8, color="#57606a", fontcolor="#57606a", arrowsize=0.6]"""
_FILL = {"call": "#ddf4ff", "run": "#fff8c5", "scope": "#fbefff", "body": "#fbefff", "op": "#ffffff"}
_quoted = functools.partial(json.dumps, ensure_ascii=False)
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
        return bytes(graphviz.Source(dot_text(roots, depth)).pipe(format=file_format))
    except graphviz.ExecutableNotFound as error:
        raise ViewDependencyError(
            "pictures need Graphviz, whose program dot was not found: install it, as with apt install graphviz, "
            "or use to_html(), which needs nothing"
        ) from error


def dot_text(roots: Sequence[Box], depth: int) -> str:
    """Boxes in the DOT language.

    Args:
        roots: drawn open, each with its inputs and outputs.
        depth: levels of module calls below a root that are open too; of a run, its first member.
    """
    drawing = _Drawing()
    for root in roots:
        drawing.root(root, depth)
    return "\n".join(["digraph {", _STYLE, *drawing.lines, *drawing.edges, "}"]) + "\n"


class _Drawing:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.edges: list[str] = []
        self._ids = map("n{}".format, itertools.count())
        self._makers: dict[torch.fx.Node, str] = {}  # by value, the drawn node that gives it

    def root(self, box: Box, depth: int) -> None:
        """Draw a box with a node for each of its inputs and outputs."""
        self._makers = {port.node: self._value(port) for port in box.inputs}
        self._open(box, depth, 0)
        for port in box.outputs:
            self._connect([port], self._value(port))

    def _value(self, port: Port) -> str:
        return self._node(f'label={_quoted(port.name)}, shape=ellipse, style=filled, fillcolor="#eaeef2"')

    def _node(self, attributes: str) -> str:
        node = next(self._ids)
        self.lines.append(f"  {node} [{attributes}]")
        return node

    def _connect(self, inputs: list[Port], taker: str) -> None:
        for port in inputs:
            if port.node in self._makers:
                self.edges.append(f"  {self._makers[port.node]} -> {taker} [label={_quoted(' ' + port.type)}]")

    def _draw(self, box: Box, depth: int, level: int) -> str:
        """Returns the first node that is drawn for the box."""
        is_small = box.kind == "call" and len(box.children) == 1 and box.children[0].kind == "op"
        if box.children and not is_small and depth > 0:
            return self._open(box, depth - (box.kind == "call"), level)[0]
        notes = [text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…" for _, text in box.notes()]
        label = "\n".join([box.label, *notes])
        pen = ', color="#cf222e"' if box.writes else ""
        node = self._node(f'label={_quoted(label)}, fillcolor="{_FILL[box.kind]}"{pen}')
        self._connect(box.inputs, node)
        self._makers |= {port.node: node for port in box.outputs}
        return node

    def _open(self, box: Box, depth: int, level: int) -> list[str]:
        """A cluster with the children inside, of a run the first only; returns the first node of each."""
        self.lines.append(f"  subgraph cluster_{next(self._ids)} {{")
        border = "#cf222e" if box.writes else "#d0d7de"
        fill = _FILL["scope"] if box.kind == "scope" else _SHADES[level % 2]
        self.lines.append(f'  label={_quoted(box.label)}; bgcolor="{fill}"; color="{border}"')
        outside = self._makers.copy()
        children = box.children[:1] if box.kind == "run" else box.children
        drawn = [self._draw(child, depth, level + 1) for child in children]
        self.lines.append("  }")
        sources = [(port, port) for port in box.outputs]
        if box.kind == "run":  # what other members give is drawn as what the first gives
            sources = [pair for child in box.children for pair in zip(child.outputs, children[0].outputs, strict=False)]
        elif box.kind == "op":  # operands and results of the bodies are not those of the op one by one
            self._connect(box.inputs, drawn[0])
            results = [port for body in box.children for port in body.outputs if port.node in self._makers]
            sources = [(port, result) for port in box.outputs for result in results[:1]]
        outside |= {port.node: self._makers[s.node] for port, s in sources if s.node in self._makers}
        self._makers = outside
        return drawn
