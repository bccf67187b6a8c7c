"""What each call of a tape takes and gives, with a key by which equal calls are known before anything is cut out.

Data flow:
    how often each value is read in the program, and in a call -> what other code reads of what the call makes
    arguments, ops and results of a call -> inputs, outputs, and the values that these are in the call -> Interface
    values numbered in the order in which they are met -> a key; in equal calls, values of one number correspond
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from scopetrace._compat.symbols import Symbolic, to_expr
from scopetrace.containers.structure import leaves
from scopetrace.ir.segment import TapeSegment, free_symbols, has_symbols, used_by
from scopetrace.ir.tape import Call, FunctionalTape, Op, Value, bind, forward_of
from scopetrace.outline.key import KeyBuilder
from scopetrace.outline.signature import (
    ArgumentLeaf,
    FunctionInput,
    FunctionOutput,
    argument_leaves,
    new_values,
    own_tensors,
    result_leaves,
    unique_names,
    values_with_path,
)


@dataclasses.dataclass(eq=False, slots=True)
class Interface:
    """What a call takes and gives, in values of its tape."""

    inputs: list[FunctionInput]
    operands: list[Any]
    """The value or symbolic number of each input that is not absent."""
    outputs: list[FunctionOutput]
    """What forward returns, and the new values of what it changes."""
    results: list[Value]
    """The value of each output."""
    number: int
    """Equal for calls of equal ops that take and give the same."""
    values: list[Value]
    """Those that it takes and makes; in calls of one number, they correspond."""
    captured: dict[int, FunctionOutput | None]
    """The positions in `values` of what it makes and other code reads, though forward does not return it; with the
    output that this is where it is bound to an attribute of the module."""
    same: dict[Value, Value]
    """By value that is read outside: the first value that is the same tensor, where that is another one."""
    inner: dict[Call, tuple[int, int]]
    """The calls in it, with their ranges among its ops without reads of parameters, buffers and constants."""


class Interfaces:
    """Those of the calls of one tape, each made once.

    Attributes:
        tape: that tape.
        children: the calls right inside of each call.
        keys: by number of an `Interface`, its key.
    """

    def __init__(self, tape: FunctionalTape, forward: Any) -> None:
        """`forward` is what the root call ran."""
        self.tape = tape
        self._symbols = {symbol for op in tape.ops for symbol in op.unbacked or ()}
        results = [*tape.graph_outputs(), *(w.value for w in tape.attribute_writes)]
        self._uses = collections.Counter([*self._used_by(tape.ops, tape.calls), *self._symbols_in(results)])
        self._uses.update(leaves(results, Value))
        self.keys: list[tuple[Any, ...]] = []
        self.children: dict[Call | None, list[Call]] = collections.defaultdict(list)
        for call in tape.calls:
            self.children[call.parent].append(call)
        self._forward, self._has_symbols = forward, has_symbols(tape)
        self._bound = {w.value: w.path for w in tape.attribute_writes}
        self._orders: dict[Any, list[str]] = {}  # of arguments, by class and what is passed
        self._numbers: dict[tuple[Any, ...], int] = {}
        self.of = functools.cache(self._make)

    def numbered(self, chosen: Iterable[Call], labels: Mapping[Call, Any] | None = None) -> dict[Call, int]:
        """By call, a number: those share a function with equal labels, equal ops, and equal chosen calls among them."""
        interfaces = {call: self.of(call) for call in sorted(chosen, key=lambda c: c.position)}
        numbers: dict[Call, int] = {}
        known: dict[Any, int] = {}
        for call, interface in reversed(interfaces.items()):  # inner calls first
            inner = [(numbers[c], place) for c, place in interface.inner.items() if c in interfaces]
            numbers[call] = known.setdefault((interface.number, (labels or {}).get(call), *inner), len(known))
        return numbers

    def lost_numbers(self, call: Call) -> list[Any]:
        """The symbols that a call makes and that are used outside of it, though they are no sizes of its results."""
        used = self._left_by(call) & self._symbols if self._symbols else ()
        sizes = {to_expr(n) for v in leaves(call.outputs, Value) for n in v.fake.size()} if used else ()
        return [symbol for symbol in used if symbol not in sizes]

    def _left_by(self, call: Call) -> set[Any]:
        """The values and symbols that a call makes and that are used outside of it."""
        ops = self.tape.ops[call.start : call.stop]
        inside = collections.Counter(self._used_by(ops, [call, *self._inside(call)]))
        return {x for op in ops for x in (*op.values(), *(op.unbacked or ())) if self._uses[x] > inside[x]}

    def _used_by(self, ops: Sequence[Op], calls: Sequence[Call]) -> Iterator[Any]:
        """The values that ops read, and calls take and give; and of numbers the symbols that an op makes from data."""
        yield from used_by(ops, calls)
        for op in ops if self._symbols else ():
            yield from self._symbols_in((op.args, op.kwargs))
        for call in calls if self._symbols else ():
            yield from self._symbols_in((call.args, call.kwargs, call.outputs, call.mutated))

    def _symbols_in(self, x: Any) -> set[Any]:
        return {symbol for n in leaves(x, Symbolic) for symbol in to_expr(n).free_symbols} & self._symbols

    def _make(self, call: Call) -> Interface:
        ops, steps = list[Op](), [0]
        for op in self.tape.ops[call.start : call.stop]:
            ops += [] if op.kind in ("placeholder", "get_attr") else [op]
            steps.append(len(ops))
        inner = {c: (steps[c.start - call.start], steps[c.stop - call.start]) for c in self._inside(call)}
        here = {v for op in self.tape.ops[call.start : call.stop] for v in op.values()}
        produced = dict.fromkeys(v for op in ops for v in op.values())
        outputs = list(self._outputs(call, produced, here))
        read = dict.fromkeys([*(v for op in ops for v in op.inputs()), *(v for _, v in outputs)])
        used = produced.keys() | read.keys()
        for each in inner:  # their arguments and results, also those that no op reads
            if not used.issuperset(leaves((each.args, each.kwargs, each.outputs), Value)):
                taken = {str(i): x for i, x in enumerate(each.args)} | each.kwargs
                parts = [*argument_leaves(taken, used), *result_leaves(each.outputs, used)]
                read |= dict.fromkeys(leaves([part.leaf for part in parts], Value))
        passed = argument_leaves(self._arguments(call), used)
        places = [leaf.place for leaf in passed]  # in the order of the first call that has these: keywords come in any
        order = self._orders.setdefault((call.group, frozenset(places)), places)
        passed = passed if order == places else sorted(passed, key=lambda leaf: order.index(leaf.place))
        inputs, operands = self._inputs(call, passed, [v for v in read if v not in produced])
        if self._has_symbols:
            segment = TapeSegment("", call.scope, None, 0, ops, list(inner), [])
            known = {to_expr(x) for x in operands if isinstance(x, Symbolic)}
            numbers = {to_expr(n): n for n in free_symbols(segment, operands) if to_expr(n) not in known}
            inputs += [FunctionInput(str(number), "size") for number in numbers.values()]
            operands += numbers.values()
        key = KeyBuilder()
        key.items += (call.group, len(passed), len(operands))
        for x in operands:
            key.add_operand(x)
        for argument in passed:  # whatever containers hold them
            key.items.append(argument.place)
            key.add(argument.leaf)
        key.add_ops(ops)
        key.add([v for _, v in outputs])
        number = self._numbers.setdefault(tuple(key.items), len(self.keys))
        if number == len(self.keys):
            self.keys.append(tuple(key.items))
        captured, same = self._captured(call, produced, here, {v for _, v in outputs})
        return Interface(
            inputs,
            operands,
            [output for output, _ in outputs],
            [v for _, v in outputs],
            number,
            list(key.numbers),
            {key.numbers[v]: output for v, output in captured.items()},
            same,
            inner,
        )

    def _inside(self, call: Call) -> Iterator[Call]:
        for child in self.children.get(call, ()):
            yield child
            yield from self._inside(child)

    def _arguments(self, call: Call) -> dict[str, Any]:
        return bind(forward_of(call, self._forward), call.args, call.kwargs)

    # ---------------------------------------------------------------- what it takes

    def _inputs(
        self, call: Call, passed: list[ArgumentLeaf], read: list[Value]
    ) -> tuple[list[FunctionInput], list[Any]]:
        """The tensors and numbers among the arguments, and what is read beside them."""
        taken = [x for x in passed if x.is_absent or isinstance(x.leaf, (Value, *Symbolic))]
        inputs = [FunctionInput(x.name, "absent" if x.is_absent else "argument") for x in taken]
        operands = [x.leaf for x in taken if not x.is_absent]
        known = {x for x in operands if isinstance(x, Value)}
        lifted = self._lifted(call, [v for v in read if v not in known], {x.name for x in passed})
        return [*inputs, *(declared for declared, _ in lifted)], [*operands, *(v for _, v in lifted)]

    def _lifted(self, call: Call, read: list[Value], taken: set[str]) -> list[tuple[FunctionInput, Value]]:
        """What is read and not passed: the module's own tensors in its order, then others."""
        has_own = call.is_module and any(v.op.kind == "get_attr" for v in read)
        tensors = own_tensors(self.tape, call) if has_own else {}
        unique = unique_names(taken=taken | {name for _, _, name in tensors.values()})
        ranked = []
        for i, v in enumerate(read, len(tensors)):
            real = self.tape.attributes.get(v.op.name) if v.op.kind == "get_attr" else None
            ranked.append((*(tensors.get(id(real)) or (i, "lifted", unique(self._name_of(v, call)))), v))
        return [(FunctionInput(name, kind), v) for _, kind, name, v in sorted(ranked, key=lambda r: r[0])]

    def _name_of(self, v: Value, call: Call) -> str:
        """The name of a value outside of a call: of an attribute or input, or of an argument of a call around it."""
        if v.op.kind in ("get_attr", "placeholder"):
            around = call.parent.prefix if call.parent is not None else ""
            return str(v.op.target).removeprefix(call.prefix).removeprefix(around).removeprefix("_")
        for outer in [*call.ancestors()][1:]:
            for path, value in values_with_path(self._arguments(outer)):
                if value is v:
                    return path
        return "captured"

    # ---------------------------------------------------------------- what it gives

    def _outputs(
        self, call: Call, produced: Collection[Value], here: set[Value]
    ) -> Iterator[tuple[FunctionOutput, Value]]:
        known = set()
        for leaf in result_leaves(call.outputs, here):
            if isinstance(leaf.leaf, Value):
                known.add(leaf.leaf)
                yield FunctionOutput(leaf.name, "result"), leaf.leaf
        for name, v in new_values(call, forward_of(call, self._forward)):
            if v in produced and v not in known:
                known.add(v)
                yield FunctionOutput(name, "mutated"), v

    def _captured(
        self, call: Call, produced: Collection[Value], here: set[Value], returned: set[Value]
    ) -> tuple[dict[Value, FunctionOutput | None], dict[Value, Value]]:
        captured: dict[Value, FunctionOutput | None] = {}
        same: dict[Value, Value] = {}
        left = self._left_by(call)
        for v in produced:
            if v not in returned and v in left:
                first = _same_tensor(v, here)
                if first is not v:
                    same[v] = first
                if first in produced and first not in returned:
                    name = self._bound.get(first, "")  # of the attribute of a module in the call that it is bound to
                    kind = "mutated" if name in self.tape.attributes else "captured"
                    is_inside = bool(name) and name.startswith(call.prefix)
                    captured[first] = FunctionOutput(name.removeprefix(call.prefix), kind) if is_inside else None
        return captured, same


def _same_tensor(v: Value, here: set[Value]) -> Value:
    """The first of the values `here` in a call, or operand of it, that is the same tensor: `x.to(x.dtype)` is x."""
    while v in here:
        operand = next((u for u in v.op.inputs() if u.fake is v.fake and u is not v), None)
        if operand is None:
            break
        v = operand
    return v
