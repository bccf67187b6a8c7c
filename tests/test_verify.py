"""Every rule of the verifier finds a tape that breaks it, and no stage leaves one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import scopetrace as st
from scopetrace import errors
from scopetrace.ir.tape import BodyTape, FunctionalTape, RecordedTape, Value
from scopetrace.ir.verify import verify
from scopetrace.ir.write_back import CopyInto, FromGraph, GraphInput, SameAs, StateRef, ViewOf
from scopetrace.program.traced import functional_tape
from scopetrace.session import record


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sin()


class Net(torch.nn.Module):
    """Placeholder x, then get_attr, mul and sin in each of two calls of `scale`, then add."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scale(self.scale(x))
        self.last = y
        return y + x


def recorded() -> RecordedTape:
    return record(Net(), (torch.randn(3),), {})


def branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def with_branches() -> RecordedTape:
    return record(branches, (torch.randn(3),), {})


def update(x: torch.Tensor) -> torch.Tensor:
    x[0].add_(1)
    return x


def functional() -> FunctionalTape:
    return functional_tape(record(update, (torch.randn(3),), {}))


def position(tape: RecordedTape, target: Any) -> int:
    return next(i for i, op in enumerate(tape.ops) if op.target is target)


MUL, SIN, ADD = (getattr(torch.ops.aten, name) for name in ("mul", "sin", "add"))


def change(tape: RecordedTape, target: Any, **fields: Any) -> None:
    """Replace fields of the first op of this target; the op's values then are those of the changed op."""
    i = position(tape, target)
    tape.ops[i] = dataclasses.replace(tape.ops[i], **fields)
    for value in tape.ops[i].values():
        value.op = tape.ops[i]


def reads_what_is_made_later(tape: RecordedTape) -> None:
    i = position(tape, MUL.Tensor)
    tape.ops[i], tape.ops[i + 1] = tape.ops[i + 1], tape.ops[i]


def names_another_op(tape: RecordedTape) -> None:
    tape.ops[position(tape, SIN.default)].outputs.op = tape.ops[0]


def makes_a_value_twice(tape: RecordedTape) -> None:
    tape.ops.append(tape.ops[-1])
    tape.calls[0].stop += 1


def writes_what_it_does_not_read(tape: RecordedTape) -> None:
    change(tape, SIN.default, writes=(tape.inputs[0],))


def placeholder_last(tape: RecordedTape) -> None:
    tape.ops.append(tape.ops.pop(0))


def no_inputs(tape: RecordedTape) -> None:
    tape.inputs.clear()


def more_paths(tape: RecordedTape) -> None:
    tape.input_paths.append("y")


def more_numbers(tape: RecordedTape) -> None:
    tape.numbers.append(2)


def no_parameters(tape: RecordedTape) -> None:
    tape.attributes.clear()


def shares_storage(tape: RecordedTape) -> None:
    tape.ops[position(tape, SIN.default)].outputs.storage = tape.inputs[0].storage


def range_too_long(tape: RecordedTape) -> None:
    tape.calls[1].stop = 100


def range_outside(tape: RecordedTape) -> None:
    tape.calls[0].stop = 3


def calls_out_of_order(tape: RecordedTape) -> None:
    tape.calls[1], tape.calls[2] = tape.calls[2], tape.calls[1]


def parent_elsewhere(tape: RecordedTape) -> None:
    tape.calls[1].parent = recorded().calls[0]


def op_of_the_outer_call(tape: RecordedTape) -> None:
    change(tape, SIN.default, call=tape.calls[0])


def op_of_another_tape(tape: RecordedTape) -> None:
    change(tape, SIN.default, call=recorded().calls[0])


def scope_of_the_root(tape: RecordedTape) -> None:
    change(tape, SIN.default, scope=tape.root)


def returns_another_value(tape: RecordedTape) -> None:
    tape.outputs = recorded().outputs


def binds_another_value(tape: RecordedTape) -> None:
    tape.attribute_writes[0].value = recorded().outputs


def call_gives_another_value(tape: RecordedTape) -> None:
    tape.calls[1].outputs = recorded().outputs


BROKEN = {
    reads_what_is_made_later: "producers: op .*aten.sin.default.* reads a value that no op before it makes",
    names_another_op: "producers: op .*aten.sin.default.* names another op",
    makes_a_value_twice: "producers: op .*aten.add.Tensor.* makes a value that another op makes too",
    writes_what_it_does_not_read: "producers: op .*aten.sin.default.* writes to a value that is none of its operands",
    placeholder_last: "placeholders: a placeholder stands after another op",
    no_inputs: "placeholders: the tensors of the placeholders are not its inputs",
    more_paths: "placeholders: 1 inputs have 2 paths",
    more_numbers: "placeholders: 1 placeholders for 1 tensors and 1 numbers",
    no_parameters: "attributes: op .*scale.weight.* reads a tensor that the tape does not have",
    shares_storage: "storages: op .*aten.sin.default.* in the storage of a value that it does not read",
    range_too_long: "ranges of calls: the call of Net/Scale.scale. has ops . to 100 of",
    range_outside: "ranges of calls: the call of Net/Scale.scale. is not inside that of Net",
    calls_out_of_order: "ranges of calls: the calls are not in the order",
    parent_elsewhere: "ranges of calls: the call of Net/Scale.scale. is in a call that the tape does not have",
    op_of_the_outer_call: "calls of ops: op .*aten.sin.default.* another call than the innermost",
    op_of_another_tape: "calls of ops: op .*aten.sin.default.* names a call that the tape does not have",
    scope_of_the_root: "scopes: op .*aten.sin.default.* is not in Net/Scale.scale., the scope of its call",
    returns_another_value: "results: it returns a value that none of its ops makes",
    binds_another_value: "results: it binds a value",
    call_gives_another_value: "results: the call of Net/Scale.scale. takes or gives a value",
}


@pytest.mark.parametrize("break_it", BROKEN, ids=lambda f: f.__name__)
def test_a_broken_tape_is_found(break_it: Callable[[RecordedTape], None]) -> None:
    tape = recorded()
    verify(tape, "recording")
    break_it(tape)
    with pytest.raises(
        errors.InvalidTapeError, match=r"(?s)^recording left a tape of Net .*program, " + BROKEN[break_it]
    ):
        verify(tape, "recording")


def test_a_leaf_module_is_on_the_tape() -> None:
    tape = record(Net(), (torch.randn(3),), {}, leaf_modules=(Scale,))
    verify(tape, "recording")
    tape.modules.clear()
    with pytest.raises(errors.InvalidTapeError, match=r"op \d, scale .* calls a module that the tape does not have"):
        verify(tape, "recording")


def test_bodies_take_all_that_they_read() -> None:
    tape = with_branches()
    verify(tape, "recording")
    body = tape.bodies()[0]
    assert isinstance(body, BodyTape)
    body.attributes["table"] = torch.zeros(3)
    with pytest.raises(errors.InvalidTapeError, match="true_graph, attributes: the body holds tensors: table"):
        verify(tape, "recording")


def test_a_body_cannot_read_from_outside() -> None:
    tape = with_branches()
    body = tape.bodies()[0]
    body.ops[-1] = dataclasses.replace(body.ops[-1], args=(tape.inputs[0],))
    with pytest.raises(errors.InvalidTapeError, match=r"true_graph, producers: .* reads a value that no op before it"):
        verify(tape, "recording")


def test_a_functional_tape_has_no_writes() -> None:
    tape = FunctionalTape.of(record(update, (torch.randn(3),), {}))
    with pytest.raises(errors.InvalidTapeError, match=r"writes: op \d, aten.add_.Tensor in update writes"):
        verify(tape, "functionalization")


@pytest.mark.parametrize(
    "source",
    [GraphInput(1, "y"), FromGraph(9), SameAs(0), StateRef("weight"), ViewOf(GraphInput(1, "y"), ())],
    ids=lambda source: type(source).__name__,
)
def test_results_of_a_write_back_are_there(source: Any) -> None:
    tape = functional()
    assert tape.write_back is not None
    tape.write_back.results[0] = source
    with pytest.raises(errors.InvalidTapeError, match=r"write back: result 0 is .*, which is not there"):
        verify(tape, "functionalization")


def test_updates_of_a_write_back_are_there() -> None:
    tape = functional()
    assert tape.write_back is not None
    tape.write_back.updates.append(CopyInto(GraphInput(0, "x"), FromGraph(9), grad=False))
    with pytest.raises(errors.InvalidTapeError, match=r"write back: `x.copy_\(graph\[9\]\)` names what is not there"):
        verify(tape, "functionalization")


def test_checks_are_made_where_they_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = []
    monkeypatch.setattr("scopetrace.session.verify", lambda tape, stage: stages.append(stage))
    monkeypatch.setattr("scopetrace.program.traced.verify", lambda tape, stage: stages.append(stage))
    for switch, wanted in (("0", []), ("1", ["recording", "functionalization"])):
        monkeypatch.setenv("SCOPETRACE_CHECK", switch)
        st.trace(torch.nn.ReLU(), (torch.ones(2),))
        assert stages == wanted


def test_an_op_owns_the_values_that_it_is_made_with() -> None:
    tape = recorded()
    old = tape.ops[position(tape, SIN.default)]
    value = old.outputs.copy(storage=7)
    new = old.replace(outputs=value)
    assert isinstance(value, Value) and value.op is new and value.storage == 7
    copy = old.replace()
    names = [field.name for field in dataclasses.fields(old)]
    assert old.outputs.op is old and all(getattr(copy, name) is getattr(old, name) for name in names)
    assert copy.take_values() is old.outputs.op is copy


def test_an_op_does_not_change() -> None:
    op = recorded().ops[0]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'target'"):
        op.target = "y"  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword argument 'targets'"):
        op.replace(targets="y")
