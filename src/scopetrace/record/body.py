"""From a stretch of the tape to a tape of its own, with all that it reads from outside as placeholders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from scopetrace._compat.symbols import Symbolic, stand_ins, symbols_of, to_expr
from scopetrace.containers.structure import identifier, leaves, map_structure
from scopetrace.ir.scopes import Scope
from scopetrace.ir.tape import BodyTape, Call, Op, Tape, Value, flat


@dataclasses.dataclass
class Stretch:
    """What one callable recorded: its placeholders, its ops and calls, and what it returned."""

    name: str
    scope: Scope
    call: Call | None
    """The call that it ran in."""
    start: int
    """Where on the tape it began."""
    ops: list[Op]
    calls: list[Call]
    outputs: list[Any]
    spec: Any
    """How torch's pytree puts the outputs together."""

    @property
    def is_condition(self) -> bool:
        """Whether it gives one value, that says if a loop goes on."""
        return self.name == "while_loop_cond_graph"

    def hoisted(self) -> list[Op]:
        """The reads of parameters, buffers and constants, which happen outside."""
        return [op for op in self.ops if op.kind == "get_attr"]

    def kept(self) -> list[Op]:
        """All other ops."""
        return [op for op in self.ops if op.kind != "get_attr"]


def body_tapes(tape: Tape, stretches: list[Stretch]) -> tuple[list[BodyTape], list[Any]]:
    """The stretches as tapes that take the same, and what they take beside their own placeholders.

    These are values of `tape` and symbolic sizes.
    """
    captured: dict[Any, Any] = {}
    for stretch in stretches:
        made = {v for op in stretch.kept() for v in op.values()}
        captured |= {v: v for v in _read(stretch) if v not in made}
    for stretch in stretches:
        for number in free_symbols(stretch, list(captured)):
            captured.setdefault(to_expr(number), number)
    taken = list(captured.values())
    return [body_tape(tape, stretch, taken) for stretch in stretches], taken


def _read(stretch: Stretch) -> Iterator[Value]:
    for op in stretch.kept():
        yield from op.inputs()
    for call in stretch.calls:
        yield from leaves((call.args, call.kwargs, call.outputs), Value)
    yield from leaves(stretch.outputs, Value)


def free_symbols(stretch: Stretch, captured: list[Any]) -> Iterator[Any]:
    """The symbols that the ops use, and that no size or number says which is known inside before."""
    known = _Known()
    known.learn(*captured)
    for op in stretch.kept():
        yield from known.lacks(flat((op.args, op.kwargs)))
        known.learn(*flat(op.outputs), *(op.unbacked or ()))
    yield from known.lacks(leaves([(call.args, call.kwargs, call.outputs) for call in stretch.calls], Symbolic))
    yield from known.lacks(stretch.outputs)


class _Known:
    """The sizes and numbers that are known at a place of a program."""

    def __init__(self) -> None:
        self._expressions: set[Any] = set()
        self._parts: dict[Any, Any] = {}

    def learn(self, *found: Any) -> None:
        """Values, of which the sizes are known, numbers and expressions."""
        sizes = [n for x in found if isinstance(x, Value) for n in x.fake.size() if isinstance(n, torch.SymInt)]
        new = {to_expr(x) for x in (*sizes, *found) if not isinstance(x, Value)} - self._expressions
        self._expressions |= new
        self._parts |= stand_ins(new)

    def lacks(self, used: Iterable[Any]) -> Iterator[Any]:
        """The symbols that it takes beside what is known."""
        for number in used:
            if isinstance(number, Symbolic) and to_expr(number) not in self._expressions:
                rest = to_expr(number).xreplace(self._parts).free_symbols
                yield from (s for s in symbols_of(number) if to_expr(s) in rest - self._expressions)


def body_tape(tape: Tape, stretch: Stretch, captured: list[Any], names: list[str] | None = None) -> BodyTape:
    """The stretch as a tape, whose placeholders are its own and then the captured values, with these names."""
    own = [op for op in stretch.ops if op.kind == "placeholder"]
    inside: dict[Value, Value] = {}
    names = names or [name_of(x, len(own) + i) for i, x in enumerate(captured)]
    taken = [_placeholder(name, x, stretch, inside) for name, x in zip(names, captured, strict=True)]
    used: set[str] = set()
    for op in (*own, *taken):
        op.target = identifier(op.target, used)

    def placed(x: Any) -> Any:
        return map_structure(lambda v: inside.get(v, v), x, Value)

    kept = [op for op in stretch.kept() if op.kind != "placeholder"]
    for op in kept:
        op.args, op.kwargs = _replaced(op.args, inside), _replaced(op.kwargs, inside)
        op.writes = tuple(inside.get(v, v) for v in op.writes)
        op.tracked = tuple(inside.get(v, v) for v in op.tracked)
    for call in stretch.calls:
        call.args, call.outputs = placed(call.args), placed(call.outputs)
        call.kwargs = placed(call.kwargs)
        call.start, call.stop = (_moved(stretch, i, len(own) + len(taken)) for i in (call.start, call.stop))
    outputs = placed(stretch.outputs)
    return BodyTape(
        stretch.scope,
        ops=[*own, *taken, *kept],
        calls=stretch.calls,
        inputs=[op.outputs for op in (*own, *taken) if isinstance(op.outputs, Value)],
        outputs=outputs[0] if stretch.is_condition else tuple(outputs),
        shape_env=tape.shape_env,
        fake_mode=tape.fake_mode,
        name=stretch.name,
        is_condition=stretch.is_condition,
    )


def _placeholder(name: str, x: Any, stretch: Stretch, inside: dict[Value, Value]) -> Op:
    grad = stretch.ops[0].grad if stretch.ops else torch.is_grad_enabled()
    op = Op("placeholder", name, (), {}, x, stretch.scope, stretch.call, (), grad)
    if isinstance(x, Value):
        op.outputs = Value(x.fake, op, 0, x.storage, x.key)
        op.outputs.offset = x.offset
        inside.setdefault(x, op.outputs)
    return op


def name_of(x: Any, number: int) -> str:
    """What a placeholder for `x` is called after: a parameter or input as it is outside."""
    if not isinstance(x, Value) or x.op.kind not in ("get_attr", "placeholder"):
        return f"arg{number}"
    return str(x.op.target)


def _moved(stretch: Stretch, i: int, placeholders: int) -> int:
    """Where a place of the recording is in the body, whose placeholders come first."""
    before = stretch.ops[: max(0, i - stretch.start)]
    return placeholders + sum(op.kind not in ("get_attr", "placeholder") for op in before)


def _replaced(x: Any, values: dict[Value, Value]) -> Any:
    if isinstance(x, Value):
        return values.get(x, x)
    if isinstance(x, (list, tuple)):
        return type(x)([_replaced(item, values) for item in x])
    if isinstance(x, dict):
        return {name: _replaced(item, values) for name, item in x.items()}
    return x
