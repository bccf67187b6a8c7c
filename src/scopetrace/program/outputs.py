"""The results, write-back and attribute writes of an edited graph: those of its trace, position by position.

Data flow:
    values of the output node -> as many as the trace has, and of the metadata that the write-back needs
    -> `returned`, `outputs` and `attribute_writes` of the new tape
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from scopetrace._compat.symbols import Symbolic, to_expr
from scopetrace.containers.structure import leaves, map_structure
from scopetrace.errors import EditError
from scopetrace.ir.tape import FunctionalTape, ProgramTape, Value
from scopetrace.ir.write_back import (
    CopyInto,
    FromGraph,
    GraphInput,
    SameAs,
    StateRef,
    ValueSource,
    ViewOf,
    WriteBack,
    base_of,
)


def outputs_of_edit(old: ProgramTape, new: ProgramTape, values: list[Any], attribute: Callable[[str], Value]) -> None:
    """Give `new` the outputs of `old`, with the values that the edited graph gives in their place.

    `attribute` gives the value of a parameter, buffer or constant by its name. Raises EditError for another number of
    values, and for values that the write-back cannot use.
    """
    promised = [*old.graph_outputs(), *(w.value for w in old.attribute_writes)]
    if len(values) != len(promised):
        raise other_count(len(values), len(promised), old)
    for i, (was, value) in enumerate(zip(promised, values, strict=True)):
        if not isinstance(value, Value if isinstance(was, Value) else (int, float, bool, *Symbolic)):
            wanted = "a tensor" if isinstance(was, Value) else "a number"
            raise _refusal(f"output {i} of the edited graph is {value!r}, and must be {wanted}", old)
    results = values[: len(old.graph_outputs())]
    new.attribute_writes = [
        dataclasses.replace(write, value=value)
        for write, value in zip(old.attribute_writes, values[len(results) :], strict=True)
    ]
    if isinstance(new, FunctionalTape):
        assert isinstance(old, FunctionalTape)
        new.returned = None if old.returned is None else results
    if old.write_back is not None:

        def outside(source: ValueSource) -> Value:
            if isinstance(source, StateRef):
                return attribute(source.name)
            assert isinstance(source, GraphInput)
            return new.inputs[source.index]

        _check(old.write_back, promised, values, old)
        changed = {outside(u.target).storage for u in old.write_back.updates}
        new.write_back = _with_copies(old.write_back, values, changed)
        results = _results(new.write_back, values, outside)
    left = iter(results)
    new.outputs = map_structure(lambda _: next(left), old.outputs, (Value, *Symbolic))


def other_count(count: int, promised: int, old: ProgramTape) -> EditError:
    """The error for another number of outputs."""
    return _refusal(f"the edited graph returns {count} values, and that of the trace {promised}", old)


def _refusal(problem: str, old: ProgramTape) -> EditError:
    hint = "keep the outputs in number and order; trace a model that returns something else"
    return EditError(f"node output: {problem}", module=old.root.path, hint=hint)


def _check(write_back: WriteBack, promised: list[Any], values: list[Any], old: ProgramTape) -> None:
    """Refuse values of another shape or dtype where they are copied into inputs or state, or are viewed again."""
    used: list[tuple[ValueSource, str]] = [(u.value, str(u)) for u in write_back.updates if isinstance(u, CopyInto)]
    used += [(s, f"result {i} is {s}") for i, s in enumerate(write_back.results) if _needs_layout(s)]
    used += [(s, f"attribute {i} is {s}") for i, s in enumerate(write_back.bound) if s is not None and _needs_layout(s)]
    for source, why in used:
        base = base_of(source)
        if isinstance(base, FromGraph) and isinstance(promised[base.index], Value):
            traced, edited = (_text(v[base.index], is_view=isinstance(source, ViewOf)) for v in (promised, values))
            if traced != edited:
                problem = f"output {base.index} is {edited} and was {traced}, which the write-back needs: {why}"
                raise _refusal(problem, old)


def _needs_layout(source: ValueSource) -> bool:
    return isinstance(source, ViewOf) or (isinstance(source, FromGraph) and source.stride is not None)


def _text(value: Value, *, is_view: bool) -> str:
    t = value.fake
    strides = f" with strides {list(to_expr(t.stride()))}" if is_view and t.layout is torch.strided else ""
    return f"{t.dtype} of shape {list(to_expr(tuple(t.size())))}{strides}"


def _with_copies(write_back: WriteBack, values: list[Any], changed: set[int]) -> WriteBack:
    """The write-back, with a copy of each value that lies in a storage which an update changes."""

    def copied(source: Any) -> Any:
        if isinstance(source, FromGraph) and not source.copy and source.stride is None:
            value = values[source.index]
            if isinstance(value, Value) and value.storage in changed:
                return dataclasses.replace(source, copy=1)
        return source

    updates = [
        dataclasses.replace(u, value=copied(u.value)) if isinstance(u, CopyInto) else u for u in write_back.updates
    ]
    return WriteBack(updates, *([copied(source) for source in s] for s in (write_back.results, write_back.bound)))


def _results(write_back: WriteBack, values: list[Any], outside: Callable[[ValueSource], Value]) -> list[Any]:
    """A value of the tape for each result: that which it is, or is a view of."""
    results: list[Any] = []
    for source in write_back.results:
        base = base_of(source)
        assert base is not None
        if isinstance(base, FromGraph):
            results.append(values[base.index])
        else:
            results.append(results[base.index] if isinstance(base, SameAs) else outside(base))
    return results


def without_effects(tape: ProgramTape) -> ProgramTape:
    """The program without what the forward puts into containers among its arguments, which comes after the result."""
    count = len(leaves(tape.result, (Value, *Symbolic)))
    write_back = tape.write_back and WriteBack(tape.write_back.updates, tape.write_back.results[:count])
    if isinstance(tape, FunctionalTape) and tape.write_back is None:
        return dataclasses.replace(tape, outputs=tape.result, returned=tape.graph_outputs()[:count])
    return dataclasses.replace(tape, outputs=tape.result, write_back=write_back)
