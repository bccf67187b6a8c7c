"""From a stretch of the tape to a tape of its own, with all that it reads from outside as placeholders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from scopetrace._compat.symbols import Symbolic, bare, symbols_of
from scopetrace.record.names import identifier
from scopetrace.record.structure import leaves, map_structure
from scopetrace.record.tape import Call, Op, Tape, Value, flat
from scopetrace.scopes import Scope


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


def body_tapes(tape: Tape, stretches: list[Stretch]) -> tuple[list[Tape], list[Any]]:
    """The stretches as tapes that take the same, and what they take beside their own placeholders.

    These are values of `tape` and symbolic sizes.
    """
    captured: dict[Any, Any] = {}
    for stretch in stretches:
        made = {v for op in stretch.kept() for v in op.values()}
        captured |= {v: v for v in _read(stretch) if v not in made}
    for stretch in stretches:
        for number in _free_symbols(stretch, list(captured)):
            captured.setdefault(bare(number), number)
    return [_body(tape, stretch, list(captured.values())) for stretch in stretches], list(captured.values())


def _read(stretch: Stretch) -> Iterator[Value]:
    for op in stretch.kept():
        yield from op.inputs()
    for call in stretch.calls:
        yield from leaves((call.args, call.kwargs, call.outputs), Value)
    yield from leaves(stretch.outputs, Value)


def _free_symbols(stretch: Stretch, captured: list[Any]) -> Iterator[Any]:
    """The symbols that the ops use, and that are no size or number inside."""
    ops = stretch.kept()
    values = [v for v in captured if isinstance(v, Value)] + [v for op in ops for v in op.values()]
    numbers = [n for op in ops for n in flat(op.outputs) if isinstance(n, Symbolic)]
    known = {bare(n) for n in numbers} | {bare(n) for v in values for n in v.fake.size() if isinstance(n, torch.SymInt)}
    known |= {symbol for op in ops for symbol in (op.unbacked or ())}
    used = [n for op in ops for n in flat((op.args, op.kwargs)) if isinstance(n, Symbolic)]
    used += leaves([(call.args, call.kwargs, call.outputs) for call in stretch.calls], Symbolic)
    used += [n for n in stretch.outputs if isinstance(n, Symbolic)]
    for number in used:
        if bare(number) not in known:
            yield from (s for s in symbols_of(number) if bare(s) not in known)


def _body(tape: Tape, stretch: Stretch, captured: list[Any]) -> Tape:
    own = [op for op in stretch.ops if op.kind == "placeholder"]
    inside: dict[Value, Value] = {}
    taken = [_placeholder(name_of(x, len(own) + i), x, stretch, inside) for i, x in enumerate(captured)]
    names: set[str] = set()
    for op in (*own, *taken):
        op.target = identifier(op.target, names)

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
    return Tape(
        stretch.scope,
        ops=[*own, *taken, *kept],
        calls=stretch.calls,
        inputs=[op.outputs for op in (*own, *taken) if isinstance(op.outputs, Value)],
        outputs=outputs[0] if stretch.is_condition else tuple(outputs),
        shape_env=tape.shape_env,
        fake_mode=tape.fake_mode,
        exact_autograd=tape.exact_autograd,
        name=stretch.name,
    )


def _placeholder(name: str, x: Any, stretch: Stretch, inside: dict[Value, Value]) -> Op:
    grad = stretch.ops[0].grad if stretch.ops else torch.is_grad_enabled()
    op = Op("placeholder", name, (), {}, x, stretch.scope, stretch.call, (), grad)
    if isinstance(x, Value):
        op.outputs = inside[x] = Value(x.fake, op, 0, x.storage, x.key)
        inside[x].offset = x.offset
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
