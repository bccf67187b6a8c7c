"""The cutting of calls out of a functional tape.

Data flow:
    chosen calls -> their interfaces -> which of them share a function, and what each has to give
    ops of the first call of a function -> a body of its own -> the function
    the program, or the body, around each -> one `invoke_subgraph` op in place of its ops
"""

from __future__ import annotations

import collections
import hashlib
from typing import Any

import torch

from scopetrace.containers.structure import identifier, map_structure
from scopetrace.functionalization.emitter import TapeRewriter
from scopetrace.ir.segment import is_grad_on, placeholder, with_values
from scopetrace.ir.tape import BodyTape, Call, FunctionalTape, Op, Value, checks_enabled, renamed
from scopetrace.ir.verify import verify
from scopetrace.outline.interface import Interface, Interfaces
from scopetrace.outline.signature import FunctionOutput, OutlinedBody, unique_names

_aten = torch.ops.aten
_invoke_subgraph = torch.ops.higher_order.invoke_subgraph


class Outlining(TapeRewriter):
    """Makes functions of chosen calls of a tape, and the program that calls these.

    `new` and `replacements` are those of the program, or while a function is made, of its body.

    `numbers` are those of the chosen calls, by their `labels`: see `Interfaces.numbered`.
    """

    def __init__(self, interfaces: Interfaces, numbers: dict[Call, int], labels: dict[Call, Any]) -> None:
        super().__init__(interfaces.tape)
        self._interfaces, self._numbers, self._labels = interfaces, numbers, labels
        self._functions: dict[int, OutlinedBody] = {}  # by number of the calls
        self._unique = unique_names(first=2)  # of `domain::Name`: another class may have the name
        # A copy of what a call returns keeps its history, wherever autograd is on in the program.
        self._grad = is_grad_on(self.old.ops)
        self._around: list[tuple[Any, dict[Any, Any]]] = []  # of each open function, the outermost first
        self._skipped: Call | None = None  # the call that the next op is in, of a function that is made already
        self._captured: dict[int, dict[int, FunctionOutput | None]] = collections.defaultdict(dict)
        """By number of calls, what each has to give beside its outputs, since other code reads that of one of them."""
        for call, number in numbers.items():
            captured = self._captured[number]
            captured |= {i: captured.get(i) or output for i, output in interfaces.of(call).captured.items()}

    @property
    def functions(self) -> list[OutlinedBody]:
        """The functions, callees first."""
        return list(self._functions.values())

    def run(self) -> FunctionalTape:
        """The main program, with ops and values of its own."""
        self.append(self.old, self.old.calls)
        program: FunctionalTape = with_values(self.new, self.replacements)
        inputs = [op.outputs for op in program.ops if op.kind == "placeholder" and isinstance(op.outputs, Value)]
        program.inputs = inputs  # which a function may give back: another value stands for each of them from there on
        program.args = renamed(self.old.args, dict(zip(self.old.inputs, inputs, strict=True)))
        if checks_enabled():
            verify(program, "outlining")
        return program

    def step(self, op: Op) -> None:
        """Tensors from outside are read by the main program, and passed on."""
        if op.kind not in ("placeholder", "get_attr"):
            if self._skipped is None:
                self.new.ops.append(op.copied(self.replacements, calls=self.calls))
            return
        program, values = self._around[0] if self._around else (self.new, self.replacements)
        read = op.copied(values, calls=self.calls)
        chosen = [c for c in op.call.ancestors() if c in self._numbers] if op.call is not None else []
        if chosen:
            read = read.replace(call=self.calls[chosen[-1].parent or chosen[-1]]).take_values()
        program.ops.append(read)

    def begin(self, call: Call) -> None:
        """A chosen call is a function, which is made where there is none yet."""
        number = self._numbers.get(call)
        if self._skipped is not None:
            if number is not None:
                self._functions[number].calls.append(self.calls[call])
            return
        super().begin(call)
        new = self.calls[call]
        new.args, new.kwargs = self._present((call.args, call.kwargs))
        if number is not None:
            if number in self._functions:
                self._skipped = call
            else:
                self._open(call)

    def end(self, call: Call) -> None:
        """Append a call of the function of a chosen call."""
        if self._skipped not in (None, call):
            return
        if call in self._numbers:
            interface, number = self._interfaces.of(call), self._numbers[call]
            extra = sorted(self._captured[number].items())
            results = [*interface.results, *(interface.values[i] for i, _ in extra)]
            if self._skipped is None:
                names = (
                    output or FunctionOutput(f"captured_{i}", "captured")
                    for i, (_, output) in enumerate(extra, len(interface.results))
                )
                self._functions[number] = self._close(call, interface, (*interface.outputs, *names), results)
            self._skipped = None
            self._invoke(call, interface, self._functions[number], results)
        super().end(call)
        new = self.calls[call]
        new.outputs, new.mutated = self._present(call.outputs), renamed(call.mutated, self.replacements)

    def _present(self, x: Any) -> Any:
        """Arguments or results of a call, with None for what the program, or body, does not have."""
        return map_structure(self.replacements.get, x, Value)

    # ---------------------------------------------------------------- one call

    def _open(self, call: Call) -> None:
        """From here on, ops go into the body of the function of a call."""
        old, interface = self.old, self._interfaces.of(call)
        self._around.append((self.new, self.replacements))
        self.replacements, used = {}, set[str]()
        names = (identifier(x.name, used) for x in interface.inputs if x.kind != "absent")
        ops = [
            placeholder(name, x, call.scope, self.calls[call], self.replacements, grad=True)
            for name, x in zip(names, interface.operands, strict=True)
        ]
        inputs = [op.outputs for op in ops if isinstance(op.outputs, Value)]
        known = {"shape_env": old.shape_env, "fake_mode": old.fake_mode, "inference": old.inference}
        self.new = BodyTape(call.scope, ops, inputs=inputs, **known)

    def _close(
        self, call: Call, interface: Interface, outputs: tuple[FunctionOutput, ...], results: list[Value]
    ) -> OutlinedBody:
        tape, count = self.new, len(interface.operands)
        tape.outputs = tuple(self._returned(call, results))
        grad = is_grad_on(tape.ops[count:]) if tape.ops[count:] else torch.is_grad_enabled()
        tape.ops[:count] = [op.replace(grad=grad).take_values() for op in tape.ops[:count]]
        self.new, self.replacements = self._around.pop()
        cls, around = call.module_type, call.of_module.module_type
        domain = around.__module__ if around is not None else "torch"
        base = (
            cls.__name__
            if cls is not None
            else identifier(call.method or call.scope.type_name or call.scope.name, set())
        )
        tape.name = name = self._unique(f"{domain}::{base}").removeprefix(f"{domain}::")
        called = [self._functions[self._numbers[c]].identifier for c in interface.inner if c in self._numbers]
        key, label = self._interfaces.keys[interface.number], self._labels.get(call)
        unique = f"{name}_{hashlib.sha256(repr((key, called, outputs)).encode()).hexdigest()[:16]}"  # in every process
        return OutlinedBody(name, domain, cls, unique, tuple(interface.inputs), outputs, tape, [], key, label)

    def _returned(self, call: Call, results: list[Value]) -> list[Value]:
        """What stands for results in the function, each in a storage of its own, as `invoke_subgraph` requires."""
        taken = {v.storage for v in self.new.inputs}
        returned: list[Value] = []
        for v in map(self.replacements.__getitem__, results):
            if v.storage in taken:
                source, v = v, Value(v.fake, 0, next(self.storages), None)
                place = call.scope, self.calls[call], call.frames
                self.new.ops.append(Op("call_function", _aten.clone.default, (source,), {}, v, *place, self._grad))
            taken.add(v.storage)
            returned.append(v)
        return returned

    def _invoke(self, call: Call, interface: Interface, function: OutlinedBody, results: list[Value]) -> None:
        new, values = self.calls[call], self.replacements
        args = (function.tape, function.identifier, *renamed(interface.operands, values))
        outputs = tuple([Value(v.fake, i, v.storage, None) for i, v in enumerate(results)])
        values |= zip(results, outputs, strict=True)
        values |= {v: values[first] for v, first in interface.same.items() if first in values}
        new.start = len(self.new.ops)
        grad = is_grad_on(self.old.ops[call.start : call.stop] or self.old.ops)
        place = call.scope, new, call.frames, grad
        self.new.ops.append(Op("call_function", _invoke_subgraph, args, {}, outputs, *place))
        function.calls.append(new)
