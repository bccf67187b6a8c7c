"""The cutting of calls out of a functional tape, innermost first.

Data flow:
    ops of a chosen call -> a block of its own -> what it takes and gives -> its key -> a function, new or known
    the block around it -> one `invoke_subgraph` op in place of those ops
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from scopetrace._compat.symbols import Symbolic, to_expr
from scopetrace.containers.structure import leaves
from scopetrace.ir.segment import TapeSegment, body_tape, free_symbols, own_values
from scopetrace.ir.tape import (
    BodyTape,
    Call,
    FunctionalTape,
    Op,
    Value,
    bind,
    checks_enabled,
    forward_of,
    is_grad_on,
    renamed,
)
from scopetrace.ir.verify import verify
from scopetrace.outline.key import call_key, content_hash
from scopetrace.outline.ranges import Range, Ranges
from scopetrace.outline.readers import Bound, Captured, Place
from scopetrace.outline.signature import (
    ArgumentLeaf,
    FunctionInput,
    FunctionOutput,
    OutlinedBody,
    argument_leaves,
    new_values,
    unique_name,
    values_with_path,
    without_unused,
)

_aten = torch.ops.aten
_invoke_subgraph = torch.ops.higher_order.invoke_subgraph


def outline(ranges: Ranges, chosen: list[Call]) -> Outlining:
    """The chosen calls of a tape, of which `ranges` are, as calls of functions."""
    wanted: dict[Call, dict[Place, Bound]] = {}
    while True:
        outlining = Outlining(ranges, chosen, wanted)
        missing = outlining.captured.missing()
        if not missing:
            return outlining
        wanted |= missing


@dataclasses.dataclass
class _Block:
    """The ops so far of the main program, or of a call that is being cut out."""

    owner: Call | None
    """That call; None for the main program."""
    ops: list[Op] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)
    renames: dict[Value, Value] = dataclasses.field(default_factory=dict)
    """By value of the old tape: the output of a function that stands for it from here on."""
    same: dict[Value, Value] = dataclasses.field(default_factory=dict)
    """By value that is used outside of the call: the first value that is the same tensor."""


@dataclasses.dataclass
class _Result:
    name: str
    kind: str
    old: Value
    """The value of the old tape."""
    inside: Value
    """The value in the function."""
    is_captured: bool = False
    bound: Bound = None
    """The name and kind of a captured value, where it is bound to an attribute."""
    is_copy: bool = False
    """Whether `inside` is a clone that is made at the end of the function."""


class _Invocation(NamedTuple):
    """A call of a function in the place of a module call."""

    function: OutlinedBody
    operands: list[Any]
    results: list[tuple[Value, bool]]
    """Values of the old tape, each with whether it is itself what the function gives."""
    same: list[tuple[Value, Value]]
    """As `_Block.same`."""
    grad: bool


class _Cut(NamedTuple):
    """A call that was cut out, for those that repeat it."""

    call: Call
    range: Range
    invocation: _Invocation
    positions: list[int]
    """Of the operands, in what `_key_in` gives."""


class Outlining:
    """A tape of which chosen calls are functions, and the program that calls these. `wanted`: see `Captured`."""

    def __init__(self, ranges: Ranges, chosen: list[Call], wanted: dict[Call, dict[Place, Bound]]) -> None:
        self.old = tape = ranges.tape
        self._functions: dict[Any, OutlinedBody] = {}
        self._taken: set[tuple[str, str]] = set()  # domains and names
        self._names: dict[BodyTape, str] = {}  # of the functions' bodies
        self._orders: dict[Any, list[str]] = {}  # of arguments, by class and what is passed
        self._readers, self._ranges = ranges.readers, ranges
        self._cuts: dict[Any, _Cut] = {}
        self._plain: dict[Call, tuple[OutlinedBody, dict[Call, dict[Place, Bound]]]] = {}
        """The calls that were cut out and capture nothing: their functions, and where is noted what equal ones capture.
        """
        self.captured = Captured(tape, self._readers, wanted)
        storages = (v.storage for op in tape.ops for v in op.values())
        # A copy of what a call returns keeps its history, wherever autograd is on in the program.
        self._grad = is_grad_on(tape.ops)
        self._storages = itertools.count(min(storages, default=0) - 1, -1)
        self._copies: dict[Call, Call] = {}
        self._chosen = set(chosen)
        self._main = _Block(None)
        self._fill(self._main, None, 0, len(tape.ops))

    @property
    def functions(self) -> list[OutlinedBody]:
        """The functions, callees first."""
        return list(self._functions.values())

    def program(self) -> FunctionalTape:
        """The main program, with ops and values of its own."""
        main = self._main
        outlined = dataclasses.replace(
            self.old,
            ops=main.ops,
            calls=main.calls,
            outputs=renamed(self.old.outputs, main.renames),
            returned=renamed(self.old.returned, main.renames),
            attribute_writes=[
                dataclasses.replace(w, value=main.renames.get(w.value, w.value)) for w in self.old.attribute_writes
            ],
        )
        program = own_values(outlined)
        if checks_enabled():
            verify(program, "outlining")
        return program

    # ---------------------------------------------------------------- blocks

    def _fill(self, block: _Block, around: Call | None, start: int, stop: int) -> None:
        """Append the ops from `start` to `stop`, which `around` made: chosen calls in it become calls of functions."""
        for old in self._ranges.children.get(around, ()):
            self._copy_ops(block, start, old.start)
            start = old.stop
            if old in self._chosen:
                self._cut(block, old)
                continue
            call = self._copy(old)
            call.start = len(block.ops)
            call.args, call.kwargs = renamed((old.args, old.kwargs), block.renames)
            block.calls.append(call)
            self._fill(block, old, old.start, old.stop)
            call.outputs, call.mutated = renamed((old.outputs, old.mutated), block.renames)
            call.stop = len(block.ops)
        self._copy_ops(block, start, stop)

    def _copy_ops(self, block: _Block, start: int, stop: int) -> None:
        for op in self.old.ops[start:stop]:
            if op.kind in ("placeholder", "get_attr"):  # read by the main program, and passed on
                self._main.ops.append(op.replace(call=self._visible(op.call, self._main)))
                continue
            args, kwargs = renamed((op.args, op.kwargs), block.renames)
            block.ops.append(op.replace(args=args, kwargs=kwargs, call=self._visible(op.call, block)))

    def _visible(self, call: Call | None, block: _Block) -> Call | None:
        """The copy of a call, or of the innermost one around it that is in the block itself."""
        while call is not None and call.parent is not None and self._owner(call) is not block.owner:
            call = call.parent
        return None if call is None else self._copy(call)

    def _owner(self, call: Call | None) -> Call | None:
        """The innermost chosen call around `call`, or `call` itself; None in the main program."""
        return next((c for c in call.ancestors() if c in self._chosen), None) if call is not None else None

    def _copy(self, call: Call) -> Call:
        if call not in self._copies:
            parent = None if call.parent is None else self._copy(call.parent)
            self._copies[call] = call.replace(parent=parent)
        return self._copies[call]

    # ---------------------------------------------------------------- one call

    def _cut(self, block: _Block, old: Call) -> None:
        """Cut out a call: its ops become a function, of which a call is appended to `block`."""
        ops = self._ranges.of(old)
        if ops is None or self.captured.wants(old, *ops.inner):
            self._cut_anew(block, old)
            return
        key, taken = self._key_in(block, old, ops)
        if key in self._cuts:
            self._repeat(block, old, ops, taken, self._cuts[key])
            return
        invocation = self._cut_anew(block, old)
        if all(c in self._plain for c in (old, *ops.inner) if c in self._chosen):
            self._cuts[key] = _Cut(old, ops, invocation, [*map(taken.index, invocation.operands)])

    def _key_in(self, block: _Block, old: Call, ops: Range) -> tuple[Any, list[Value]]:
        """A key, equal for calls that are cut out alike, and what a call takes: values of the block that it is in."""
        tensors = self._ranges.own_tensors(old)
        numbers: dict[Value, int] = {}
        parts: list[Any] = []
        for v in ops.outside:
            present = block.renames.get(v, v)
            real = self.old.attributes.get(present.op.name) if present.op.kind == "get_attr" else None
            parts += (numbers.setdefault(present, len(numbers)), tensors.get(id(real)))
        chosen = [c in self._chosen for c in ops.inner]
        return (ops.number, *parts, *chosen), list(numbers)

    def _repeat(self, block: _Block, old: Call, ops: Range, taken: list[Value], first: _Cut) -> None:
        """As `_cut`, of a call that is as `first` was."""
        call = self._copy(old)
        call.args, call.kwargs = renamed((old.args, old.kwargs), block.renames)
        self._main.ops += [op.replace(call=self._visible(op.call, self._main)) for op in ops.reads]
        for one, other in zip((first.call, *first.range.inner), (old, *ops.inner), strict=True):
            if one in self._plain:
                function, captured = self._plain[other] = self._plain[one]
                captured[other] = {}
                if other is not old:
                    function.calls.append(self._copy(other))
        value = dict(zip(first.range.values, ops.values, strict=True)).__getitem__
        results = [(value(v), is_itself) for v, is_itself in first.invocation.results]
        same = [(value(v), value(other)) for v, other in first.invocation.same]
        operands = [taken[i] for i in first.positions]
        self._append(block, old, first.invocation._replace(operands=operands, results=results, same=same))

    def _cut_anew(self, block: _Block, old: Call) -> _Invocation:
        """As `_cut`. Gives the call of the function in `block`."""
        call = self._copy(old)
        call.args, call.kwargs = renamed((old.args, old.kwargs), block.renames)
        named = bind(forward_of(old, self._ranges.forward), call.args, call.kwargs)
        inner = _Block(old, renames=dict(block.renames))
        self._fill(inner, old, old.start, old.stop)
        seen = {v for op in inner.ops for v in (*op.inputs(), *op.values())}
        for each in inner.calls:
            each.args, each.kwargs, each.outputs = without_unused((each.args, each.kwargs, each.outputs), seen)
        passed = self._in_order(old, argument_leaves(named, seen))
        results = self._results(inner, old)
        inputs, operands = self._operands(inner, old, passed)

        def key_of(ops: list[Op], results: list[_Result]) -> Any:
            return call_key(old.module_type, passed, operands, ops, [r.inside for r in results], self._names)

        key = key_of(inner.ops, results)
        function = self._functions.get(key)
        if function is None:
            function = self._functions[key] = self._function(inner, old, inputs, operands, results, key)
            self._names[function.tape] = function.identifier
        same = [(v, first) for v, first in inner.same.items() if v is not first]
        grad = is_grad_on(inner.ops or self.old.ops)
        invocation = _Invocation(function, operands, [(r.old, r.inside is r.old) for r in results], same, grad)
        self._append(block, old, invocation)
        last = [r for r in results if r.is_captured]  # captured values and their clones come last
        if last:
            ops = inner.ops[: len(inner.ops) - sum(r.is_copy for r in last)]
            key = key_of(ops, results[: len(results) - len(last)])
        captured = self.captured.note(key, old, {r.old: r.bound for r in last})
        if not last:
            self._plain[old] = function, captured
        return invocation

    def _in_order(self, old: Call, passed: list[ArgumentLeaf]) -> list[ArgumentLeaf]:
        """The arguments in the order of the first call that has the same ones: keywords may come in any order."""
        places = [g.place for g in passed]
        order = self._orders.setdefault((old.module_type, frozenset(places)), places)
        return passed if order == places else sorted(passed, key=lambda g: order.index(g.place))

    def _results(self, inner: _Block, old: Call) -> list[_Result]:
        """The outputs of the function, each in a storage of its own, as `invoke_subgraph` requires."""
        inside = {v for v in leaves(old.outputs, Value) if self._readers.makes(old, v)}
        wanted = [
            _Result(leaf.name, "result", leaf.leaf, leaf.leaf)
            for leaf in argument_leaves({"": old.outputs}, inside)
            if isinstance(leaf.leaf, Value)
        ]
        known = {r.old for r in wanted}
        produced = {v for op in inner.ops for v in op.values()}
        for name, v in new_values(old, forward_of(old, self._ranges.forward)):
            if v not in known and inner.renames.get(v, v) in produced:
                known.add(v)
                wanted.append(_Result(name, "mutated", v, v))
        captured: list[Value] = []
        for v in [*(v for op in inner.ops for v in op.values()), *inner.renames]:
            if v not in known and self._readers.leaves(v, old):
                first = self._same_tensor(v, old)
                inner.same[v] = first
                if first not in known and self._readers.makes(old, first):
                    captured.append(first)
        for v, bound in self.captured.of(old, captured).items():
            name, kind = bound or (f"captured_{len(wanted)}", "captured")
            wanted.append(_Result(name, kind, v, v, is_captured=True, bound=bound))
        taken = {v.storage for op in inner.ops for v in op.inputs() if v not in produced}
        for r in wanted:
            r.inside = inner.renames.get(r.old, r.old)
            if r.inside not in produced or r.inside.storage in taken:
                r.inside, r.is_copy = self._clone(inner, r.inside, old), True
            taken.add(r.inside.storage)
        return wanted

    def _same_tensor(self, v: Value, old: Call) -> Value:
        """The first value in the call, or operand of it, that is the same tensor object, as `x.to(x.dtype)` is x."""
        while self._readers.makes(old, v):
            operand = next((u for u in v.op.inputs() if u.fake is v.fake and u is not v), None)
            if operand is None:
                break
            v = operand
        return v

    def _clone(self, inner: _Block, v: Value, old: Call) -> Value:
        clone = Value(v.fake, 0, next(self._storages), None)
        place = old.scope, self._copy(old), old.frames
        inner.ops.append(Op("call_function", _aten.clone.default, (v,), {}, clone, *place, self._grad))
        return clone

    # ---------------------------------------------------------------- what it takes

    def _operands(self, inner: _Block, old: Call, passed: list[ArgumentLeaf]) -> tuple[list[FunctionInput], list[Any]]:
        operands = [x.leaf for x in passed if isinstance(x.leaf, (Value, *Symbolic))]
        taken = [x for x in passed if x.is_absent or isinstance(x.leaf, (Value, *Symbolic))]
        inputs = [FunctionInput(x.name, "absent" if x.is_absent else "argument") for x in taken]
        for declared, value in self._free(inner, old, operands, {x.name for x in passed}):
            inputs.append(declared)
            operands.append(value)
        segment = TapeSegment("", old.scope, None, 0, inner.ops, inner.calls, [])
        known = {to_expr(x) for x in operands if isinstance(x, Symbolic)}
        for number in free_symbols(segment, operands) if self._ranges.has_symbols else ():
            if to_expr(number) not in known:
                known.add(to_expr(number))
                inputs.append(FunctionInput(str(number), "size"))
                operands.append(number)
        return inputs, operands

    def _free(
        self, inner: _Block, old: Call, operands: list[Any], taken: set[str]
    ) -> Iterator[tuple[FunctionInput, Value]]:
        """What is read and not passed: the module's own tensors in its order, then others."""
        known = {v for op in inner.ops for v in op.values()} | {v for v in operands if isinstance(v, Value)}
        read = dict.fromkeys(v for op in inner.ops for v in op.inputs() if v not in known)
        for call in inner.calls:  # their arguments and results, also those that no op reads
            used = leaves((call.args, call.kwargs, call.outputs, call.mutated), Value)
            read |= dict.fromkeys(v for v in used if v not in known)
        tensors = self._ranges.own_tensors(old)
        taken = taken | {name for _, _, name in tensors.values()}
        ranked = []
        for i, v in enumerate(read, len(tensors)):
            real = self.old.attributes.get(v.op.name) if v.op.kind == "get_attr" else None
            ranked.append((*(tensors.get(id(real)) or (i, "lifted", unique_name(self._name_of(v, old), taken))), v))
        for _, kind, name, v in sorted(ranked, key=lambda r: r[0]):
            yield FunctionInput(name, kind), v

    def _name_of(self, v: Value, old: Call) -> str:
        """The name of a value outside of a call: of an attribute or input, or of an argument of a call around it."""
        if v.op.kind in ("get_attr", "placeholder"):
            around = old.parent.prefix if old.parent is not None else ""
            return str(v.op.target).removeprefix(around).removeprefix("_")
        for outer in [*old.ancestors()][1:]:
            copy = self._copy(outer)
            for path, leaf in values_with_path(bind(forward_of(outer, self._ranges.forward), copy.args, copy.kwargs)):
                if leaf is v:
                    return path
        return "captured"

    # ---------------------------------------------------------------- the function and its call

    def _function(
        self,
        inner: _Block,
        old: Call,
        inputs: list[FunctionInput],
        operands: list[Any],
        results: list[_Result],
        key: Any,
    ) -> OutlinedBody:
        cls = old.module_type
        domain = cls.__module__ if cls is not None else "torch"
        base = cls.__name__ if cls is not None else old.scope.type_name
        name, count = base, 1
        while (domain, name) in self._taken:  # another class may have this name
            count += 1
            name = f"{base}_{count}"
        self._taken.add((domain, name))
        outputs = [r.inside for r in results]
        segment = TapeSegment(name, old.scope, self._copy(old), 0, inner.ops, inner.calls, outputs)
        tape = body_tape(self.old, segment, operands, [x.name for x in inputs if x.kind != "absent"])
        returned = tuple(FunctionOutput(r.name, r.kind) for r in results)
        return OutlinedBody(name, domain, cls, f"{name}_{content_hash(key)}", tuple(inputs), returned, tape, [])

    def _append(self, block: _Block, old: Call, invocation: _Invocation) -> None:
        function, operands, results, same, grad = invocation
        call, outputs = self._copy(old), list[Value]()
        for i, (v, is_itself) in enumerate(results):
            if not is_itself:
                block.renames[v] = Value(v.fake, i, v.storage, None)
            outputs.append(v if is_itself else block.renames[v])
        for v, first in same:
            block.renames[v] = block.renames.get(first, first)
        args, place = (function.tape, function.identifier, *operands), (call.scope, call, call.frames, grad)
        call.start, call.stop = len(block.ops), len(block.ops) + 1
        block.ops.append(Op("call_function", _invoke_subgraph, args, {}, tuple(outputs), *place))
        block.calls.append(call)
        function.calls.append(call)
        call.outputs, call.mutated = renamed((old.outputs, old.mutated), block.renames)
