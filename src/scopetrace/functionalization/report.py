"""What a model changes, and what its results share memory with: read off the recorded tape."""

from __future__ import annotations

import dataclasses

import torch

from scopetrace._compat.ops import is_op, schema_of
from scopetrace.containers.structure import leaves_with_path
from scopetrace.ir.scopes import source_of
from scopetrace.ir.tape import Op, ProgramTape, Value
from scopetrace.ops.view_inverses import spans_meet


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One write of the model to an input, parameter, buffer, or tensor from outside."""

    name: str
    """The argument's path (`"cache[0]"`), or the dotted name of the parameter or buffer."""
    kind: str
    """`input`, `parameter`, `buffer`, `constant`, or `gradient` (the `grad` of an input or parameter)."""
    what: str
    """`data`, `metadata` (sizes and strides), `storage` (other memory), `binding` (`self.n = ...`), or `sum` (what
    `backward()` adds to a `grad`)."""
    op: str
    """The op that writes, `"aten.add_.Tensor"`."""
    module: str
    """The scope path of the module call in which it runs, `"Net/Linear[fc]"`."""
    source: str | None
    """The user's line, `"model.py:12, in forward: self.n += 1"`; None where it is not known."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.what} by {self.op} in {self.module}" + (
            f", at {self.source}" if self.source else ""
        )


@dataclasses.dataclass(frozen=True)
class Alias:
    """What a tensor of the model's result shares memory with."""

    path: str
    """Where it stands in the result, as `"[0]"` or `".logits"`; empty when it is the result."""
    kind: str
    """`fresh`, `same` (it is that very tensor) or `view`."""
    of: str | None
    """The input, parameter, buffer or earlier result; None when fresh."""

    def __str__(self) -> str:
        return f"result{self.path}: {self.kind}" + (f" of {self.of}" if self.of else "")


def mutations(tape: ProgramTape) -> list[Mutation]:
    """The writes to what came from outside, in the order of the program."""
    outside = _outside(tape)
    writes: list[Mutation] = []
    for op in [op for op in tape.ops if op.writes]:
        seen, what = set[str](), "data"
        if is_op(op.target) and torch.Tag.inplace_view in op.target.tags:
            what = "metadata"
        elif is_op(op.target) and schema_of(op.target).name in ("aten::set_", "aten::resize_", "aten::resize_as_"):
            what = "storage"
        for value in op.writes:
            for name, kind, owner in outside.get(value.storage, ()):
                if name not in seen and spans_meet(owner, value):
                    seen.add(name)
                    writes.append(_mutation(name, kind, what, op))
    for write in tape.attribute_writes:
        kind, what = ("buffer", "binding") if write.of is None else ("gradient", "sum" if write.adds else "binding")
        writes.append(_mutation(write.path, kind, what, write.value.op))
    root = tape.root.path
    writes += [Mutation(f"{of.name}.grad", "gradient", "binding", "zero_grad", root, None) for of in tape.cleared]
    return writes


def _mutation(name: str, kind: str, what: str, op: Op) -> Mutation:
    return Mutation(name, kind, what, str(op.target), str(op.scope), source_of(op.frames))


def _outside(tape: ProgramTape) -> dict[int, list[tuple[str, str, Value]]]:
    outside: dict[int, list[tuple[str, str, Value]]] = {}
    for path, value in zip(tape.input_paths, tape.inputs, strict=True):
        outside.setdefault(value.storage, []).append((path, "input", value))
    for name, value in tape.attribute_reads():
        kind = "parameter" if isinstance(tape.attributes[name], torch.nn.Parameter) else "buffer"
        outside.setdefault(value.storage, []).append((name, kind if name in tape.owners else "constant", value))
    return outside


def aliases(tape: ProgramTape) -> list[Alias]:
    """One entry for each tensor of the result."""
    by_storage, entries = _outside(tape), list[Alias]()
    first: dict[int, int] = {}  # by the id of a fake tensor that `transpose_` and its kind left: that of the first one
    for op in tape.ops:
        if op.writes and torch.Tag.inplace_view in getattr(op.target, "tags", ()) and isinstance(op.outputs, Value):
            before = id(op.writes[0].fake)
            first.setdefault(id(op.outputs.fake), first.get(before, before))
    for path, leaf in leaves_with_path(tape.result):
        if isinstance(leaf, Value):
            known = by_storage.setdefault(leaf.storage, [])
            itself = first.get(id(leaf.fake), id(leaf.fake))
            same = next((name for name, _, v in known if first.get(id(v.fake), id(v.fake)) == itself), None)
            view = known[0][0] if known else None
            kind = "same" if same is not None else "view" if view is not None else "fresh"
            entries.append(Alias(path, kind, same if same is not None else view))
            known.append((f"result{path}", "result", leaf))
    return entries
