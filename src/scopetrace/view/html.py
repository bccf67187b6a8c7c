"""A program as one HTML file: boxes that open, fold and are searched, without a network.

Data flow:
    Box -> a list of plain records -> JSON inside the page, beside the script that draws it and dagre, which lays it out
                                   -> `scopetrace show --json`

What comes from the model (names, strings, source lines) is only in the JSON, and the script writes it as text.
"""

from __future__ import annotations

import html
import importlib.resources
import json
import re
from collections.abc import Sequence
from typing import Any

from scopetrace.formatting import amount
from scopetrace.program.graph import named
from scopetrace.view.boxes import Box
from scopetrace.view.measures import share
from scopetrace.view.tree import value_text

_LONGEST = 300  # characters of an attribute that are shown


def page(root: Box) -> str:
    """The HTML of a program. It opens at the box whose key is the fragment of the URL: `#Net/Block[layers.3]`."""
    parts = {
        "title": html.escape(root.label),
        "style": _asset("page.css"),
        "program": _data(document([root])),
        "layout": _asset("dagre.min.js"),
        "script": _asset("page.js"),
    }
    return _filled("page.html", parts)


def comparison(text: str, pages: list[str], differences: list[dict[str, Any]]) -> str:
    """The HTML of two pages side by side, below the HTML of what they do differently."""
    return _filled("diff.html", {"text": text, "data": _data({"pages": pages, "differences": differences})})


def _filled(name: str, parts: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset(name))


def _data(x: Any) -> str:
    """As JSON in which no text of the model ends the script element."""
    data = json.dumps(x, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return data.replace("<", "\\u003c")


def document(roots: Sequence[Box]) -> dict[str, Any]:
    """Boxes and all inside them as plain records, outer before inner, with `children` as positions in the list."""

    whole = {box: root for root in roots for box in root.walk()}
    positions = {box: position for position, box in enumerate(whole)}
    sources: dict[str, int] = {}
    records = []
    for box, root in whole.items():
        record: dict[str, Any] = {
            "key": box.key,
            "label": box.label,
            "kind": box.kind,
            "text": box.text,
            "name": box.call.fqn if box.kind == "call" else "",
            "notes": list(box.notes()),
            "facts": facts_of(box),
            "inputs": [[port.name, port.type] for port in box.inputs],
            "outputs": [[port.name, port.type] for port in box.outputs],
            "edges": box.edges,
            "children": [positions[child] for child in box.children],
        }
        if box.kind == "call":
            texts = [(name, value_text(x, named)) for name, x in box.call.attributes.items()]
            record["attributes"] = [[n, t if len(t) <= _LONGEST else f"{t[:_LONGEST]}…"] for n, t in texts]
        if box.kind == "op":
            record["parameters"] = [[port.name, port.type] for port in box.parameters]
        else:
            record["share"] = round(share(box.cost, root.cost), 3)
        if box.source:
            record["source"] = sources.setdefault(box.source, len(sources))
        records.append(record)
    return {"version": 2, "boxes": records, "sources": list(sources)}


def facts_of(box: Box) -> list[list[str]]:
    """What a box is and costs: names and texts."""
    cost, rows = box.cost, []
    if box.kind == "call" and box.call.module_type is not None:
        rows.append(["class", f"{box.call.module_type.__module__}.{box.call.module_type.__qualname__}"])
    if box.kind == "call" and box.call.fqn:
        rows.append(["name", box.call.fqn])
    if box.kind != "op":
        rows.append(["ops", f"{cost.ops:,}"])
    if cost.parameters:
        rows.append(["parameters", f"{cost.parameters:,} ({amount(cost.parameter_bytes, 'B')})"])
        if cost.trainable != cost.parameters:
            rows.append(["trainable", f"{cost.trainable:,}"])
    if cost.flops:
        rows.append(["FLOPs", amount(cost.flops, "")])
    if cost.activation_bytes:
        rows.append(["activations", amount(cost.activation_bytes, "B")])
    return rows


def _asset(name: str) -> str:
    return (importlib.resources.files("scopetrace.view") / "assets" / name).read_text(encoding="utf-8")
