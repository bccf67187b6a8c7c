"""The cutting of calls out of a functional tape, innermost first.

Data flow:
    chosen calls -> their interfaces -> which of them share a function, and what each has to give
    ops of the first call of a function -> a block of its own -> the function
    the block around each -> one `invoke_subgraph` op in place of its ops
"""

from __future__ import annotations

import collections
import dataclasses
import itertools

import torch

from scopetrace.ir.segment import TapeSegment, body_tape, own_values
from scopetrace.ir.tape import Call, FunctionalTape, Op, Value, checks_enabled, is_grad_on, renamed
from scopetrace.ir.verify import verify
from scopetrace.outline.interface import Interface, Interfaces
from scopetrace.outline.key import content_hash
from scopetrace.outline.signature import FunctionOutput, OutlinedBody, unique_names, without_unused

_aten = torch.ops.aten
_invoke_subgraph = torch.ops.higher_order.invoke_subgraph


@dataclasses.dataclass
class _Block:
    """The ops so far of the main program, or of a call that is being cut out."""

    owner: Call | None
    """That call; None for the main program."""
    ops: list[Op] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)
    renames: dict[Value, Value] = dataclasses.field(default_factory=dict)
    """By value of the old tape: the output of a function that stands for it from here on."""


class Outlining:
    """A tape of which chosen calls are functions, and the program that calls these.

    `numbers` are those of the chosen calls: see `Interfaces.numbered`.
    """

    def __init__(self, interfaces: Interfaces, numbers: dict[Call, int]) -> None:
        self.old, self._interfaces, self._numbers = interfaces.tape, interfaces, numbers
        self._functions: dict[int, OutlinedBody] = {}  # by number of the calls
        self._unique = unique_names(first=2)  # of `domain::Name`: another class may have the name
        storages = (v.storage for op in self.old.ops for v in op.values())
        # A copy of what a call returns keeps its history, wherever autograd is on in the program.
        self._grad = is_grad_on(self.old.ops)
        self._storages = itertools.count(min(storages, default=0) - 1, -1)
        self._copies: dict[Call, Call] = {}
        self._captured: dict[int, dict[int, FunctionOutput | None]] = collections.defaultdict(dict)
        """By number of calls, what each has to give beside its outputs, since other code reads that of one of them."""
        for call, number in numbers.items():
            captured = self._captured[number]
            captured |= {i: captured.get(i) or output for i, output in interfaces.of(call).captured.items()}
        self._main = _Block(None)
        self._fill(self._main, None, 0, len(self.old.ops))

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
        for old in self._interfaces.children.get(around, ()):
            self._copy_ops(block, start, old.start)
            start = old.stop
            if old in self._numbers:
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
        return next((c for c in call.ancestors() if c in self._numbers), None) if call is not None else None

    def _copy(self, call: Call) -> Call:
        if call not in self._copies:
            parent = None if call.parent is None else self._copy(call.parent)
            self._copies[call] = call.replace(parent=parent)
        return self._copies[call]

    # ---------------------------------------------------------------- one call

    def _cut(self, block: _Block, old: Call) -> None:
        """Cut out a call: its ops become a function, of which a call is appended to `block`."""
        interface, number = self._interfaces.of(old), self._numbers[old]
        extra = sorted(self._captured[number].items())
        results = [*interface.results, *(interface.values[i] for i, _ in extra)]
        function = self._functions.get(number)
        if function is None:
            names = (
                output or FunctionOutput(f"captured_{i}", "captured")
                for i, (_, output) in enumerate(extra, len(interface.results))
            )
            outputs = (*interface.outputs, *names)
            function = self._functions[number] = self._function(old, interface, outputs, results)
        else:  # what is in it is the same again
            reads = [op for op in self.old.ops[old.start : old.stop] if op.kind in ("placeholder", "get_attr")]
            self._main.ops += [op.replace(call=self._visible(op.call, self._main)) for op in reads]
            for call in interface.inner:
                if call in self._numbers:
                    self._functions[self._numbers[call]].calls.append(self._copy(call))
        self._append(block, old, function, results)

    def _function(
        self, old: Call, interface: Interface, outputs: tuple[FunctionOutput, ...], results: list[Value]
    ) -> OutlinedBody:
        inner = _Block(old)
        self._fill(inner, old, old.start, old.stop)
        used = {v for op in inner.ops for v in (*op.inputs(), *op.values())}
        for call in inner.calls:
            call.args, call.kwargs, call.outputs = without_unused((call.args, call.kwargs, call.outputs), used)
        cls = old.module_type
        domain = cls.__module__ if cls is not None else "torch"
        base = cls.__name__ if cls is not None else old.scope.type_name
        name = self._unique(f"{domain}::{base}").removeprefix(f"{domain}::")
        segment = TapeSegment(
            name, old.scope, self._copy(old), 0, inner.ops, inner.calls, self._returned(inner, old, results)
        )
        tape = body_tape(
            self.old, segment, interface.operands, [x.name for x in interface.inputs if x.kind != "absent"]
        )
        called = [self._functions[self._numbers[c]].identifier for c in interface.inner if c in self._numbers]
        key = (self._interfaces.keys[interface.number], called, outputs)
        return OutlinedBody(
            name, domain, cls, f"{name}_{content_hash(key)}", tuple(interface.inputs), outputs, tape, []
        )

    def _returned(self, inner: _Block, old: Call, results: list[Value]) -> list[Value]:
        """What stands for results in the function, each in a storage of its own, as `invoke_subgraph` requires."""
        returned: list[Value] = []
        produced = {v for op in inner.ops for v in op.values()}
        taken = {v.storage for op in inner.ops for v in op.inputs() if v not in produced}
        for result in results:
            v = inner.renames.get(result, result)
            if v not in produced or v.storage in taken:
                v = self._clone(inner, v, old)
            taken.add(v.storage)
            returned.append(v)
        return returned

    def _clone(self, inner: _Block, v: Value, old: Call) -> Value:
        clone = Value(v.fake, 0, next(self._storages), None)
        place = old.scope, self._copy(old), old.frames
        inner.ops.append(Op("call_function", _aten.clone.default, (v,), {}, clone, *place, self._grad))
        return clone

    def _append(self, block: _Block, old: Call, function: OutlinedBody, results: list[Value]) -> None:
        """Append a call of a function in the place of a module call."""
        call, interface, outputs = self._copy(old), self._interfaces.of(old), list[Value]()
        args = (function.tape, function.identifier, *renamed(interface.operands, block.renames))
        call.args, call.kwargs = renamed((old.args, old.kwargs), block.renames)
        for i, v in enumerate(results):
            block.renames[v] = Value(v.fake, i, v.storage, None)
            outputs.append(block.renames[v])
        for v, first in interface.same.items():
            block.renames[v] = block.renames.get(first, first)
        call.start, call.stop = len(block.ops), len(block.ops) + 1
        grad = is_grad_on(self.old.ops[old.start : old.stop] or self.old.ops)
        place = call.scope, call, call.frames, grad
        block.ops.append(Op("call_function", _invoke_subgraph, args, {}, tuple(outputs), *place))
        block.calls.append(call)
        function.calls.append(call)
        call.outputs, call.mutated = renamed((old.outputs, old.mutated), block.renames)
