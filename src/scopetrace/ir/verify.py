"""Checks of scopetrace on itself: the rules that every tape keeps.

    a stage of the pipeline -> its tape -> `verify`, where checks are enabled -> nothing, or InvalidTapeError

Checks are on in the tests, and with the environment variable `SCOPETRACE_CHECK=1`. The idea is LLVM's and MLIR's
verifier after each pass.
"""

from __future__ import annotations

from collections.abc import Iterator

from scopetrace._compat.ops import is_op, schema_of
from scopetrace.containers.structure import leaves
from scopetrace.errors import InvalidTapeError
from scopetrace.ir.scopes import Scope
from scopetrace.ir.tape import BodyTape, Call, FunctionalTape, Op, ProgramTape, Tape, Value
from scopetrace.ir.write_back import ChangeShape, FromGraph, GraphInput, StateRef, ValueSource, ViewOf


def verify(tape: Tape, stage: str) -> None:
    """Raise InvalidTapeError that lists all rules that a tape, or a body inside it, breaks, and where.

    `stage` names what made the tape, for the message.
    """
    problems = [
        f"{inner.name if isinstance(inner, BodyTape) else 'program'},{rule.__name__.replace('_', ' ')}: {problem}"
        for inner in tape.walk()
        for rule in (*_RULES, *(_FUNCTIONAL_RULES if isinstance(tape, FunctionalTape) else ()))
        for problem in rule(inner)
    ]
    if problems:
        raise InvalidTapeError(
            "\n  ".join([f"{stage} left a tape of {tape.root.path} that breaks its rules:", *problems])
        )


def _name(i: int, op: Op) -> str:
    return f"op {i}, {op.target} in {op.scope.path}"


# Ops and values ------------------------------------------------------------------------------------------------------


def _producers(tape: Tape) -> Iterator[str]:
    """Every value that an op reads is made by an op before it, and knows which."""
    known: set[Value] = set()
    for i, op in enumerate(tape.ops):
        operands = op.inputs()
        if any(v not in known for v in operands):
            yield f"{_name(i, op)} reads a value that no op before it makes"
        if any(v not in operands for v in (*op.writes, *op.tracked)):
            yield f"{_name(i, op)} writes to a value that is none of its operands"
        for v in op.values():
            if v in known:
                yield f"{_name(i, op)} makes a value that another op makes too"
            if v.op is not op:
                yield f"{_name(i, op)} makes a value that names another op as its own"
            known.add(v)


def _placeholders(tape: Tape) -> Iterator[str]:
    """Placeholders come first, and are the inputs of the tape."""
    placeholders = [op for op in tape.ops if op.kind == "placeholder"]
    if placeholders != tape.ops[: len(placeholders)]:
        yield "a placeholder stands after another op"
    if [op.outputs for op in placeholders if isinstance(op.outputs, Value)] != tape.inputs:
        yield "the tensors of the placeholders are not its inputs"
    if isinstance(tape, ProgramTape):
        tensors, numbers = len(tape.inputs), len(tape.numbers)
        if len(tape.input_paths) != tensors:
            yield f"{tensors} inputs have {len(tape.input_paths)} paths"
        if len(placeholders) != tensors + numbers:
            yield f"{len(placeholders)} placeholders for {tensors} tensors and {numbers} numbers"


def _attributes(tape: Tape) -> Iterator[str]:
    """A program has the tensors and modules that its ops name; a body takes all that it reads as operands."""
    if isinstance(tape, BodyTape) and tape.attributes:
        yield f"the body holds tensors: {', '.join(tape.attributes)}"
    modules = tape.modules if isinstance(tape, ProgramTape) else {}
    for i, op in enumerate(tape.ops):
        if op.kind == "get_attr" and op.target not in tape.attributes:
            yield f"{_name(i, op)} reads a tensor that the tape does not have"
        if op.kind == "call_module" and op.target not in modules:
            yield f"{_name(i, op)} calls a module that the tape does not have"


def _storages(tape: Tape) -> Iterator[str]:
    """The result of an op lies in the storage of an operand, or in a new one."""
    known: set[int] = set()
    for i, op in enumerate(tape.ops):
        storages = {v.storage for v in op.values()}
        if op.kind == "call_function" and storages & known - {v.storage for v in op.inputs()}:
            yield f"{_name(i, op)} makes a tensor in the storage of a value that it does not read"
        known |= storages


def _writes(tape: Tape) -> Iterator[str]:
    """No op of a functional tape writes."""
    for i, op in enumerate(tape.ops):
        if op.writes or (is_op(op.target) and schema_of(op.target).is_mutable):
            yield f"{_name(i, op)} writes"


# Calls and scopes ----------------------------------------------------------------------------------------------------


def _ranges_of_calls(tape: Tape) -> Iterator[str]:
    """The range of a call lies in that of its parent, in the order of the calls."""
    calls = set(tape.calls)
    if [c.position for c in tape.calls] != sorted(c.position for c in tape.calls):
        yield "the calls are not in the order in which they began"
    for call in tape.calls:
        if not 0 <= call.start <= call.stop <= len(tape.ops):
            yield f"the call of {call.scope.path} has ops {call.start} to {call.stop} of {len(tape.ops)}"
        parent = call.parent
        if parent in calls:
            if not parent.start <= call.start <= call.stop <= parent.stop:
                yield f"the call of {call.scope.path} is not inside that of {parent.scope.path}"
        elif isinstance(tape, ProgramTape) and call is not tape.calls[0]:
            yield f"the call of {call.scope.path} is in a call that the tape does not have"


def _calls_of_ops(tape: Tape) -> Iterator[str]:
    """An op names the innermost call around it. Tensors may be read from the model earlier than where they are used."""
    calls = set(tape.calls)
    innermost: list[Call | None] = [None] * len(tape.ops)
    for call in tape.calls:
        innermost[call.start : call.stop] = [call] * len(innermost[call.start : call.stop])
    for i, op in enumerate(tape.ops):
        named = op.call if op.call in calls else None
        if named is not op.call and isinstance(tape, ProgramTape):
            yield f"{_name(i, op)} names a call that the tape does not have"
        elif op.kind in ("call_function", "call_module") and innermost[i] is not named:
            yield f"{_name(i, op)} names another call than the innermost one around it"


def _scopes(tape: Tape) -> Iterator[str]:
    """The scope of an op is that of its call, or one inside it."""
    calls = set(tape.calls)
    for i, op in enumerate(tape.ops):
        around: Scope = op.call.scope if op.call is not None and op.call in calls else tape.root
        if all(scope is not around for scope in op.scope.ancestors()):
            yield f"{_name(i, op)} is not in {around.path}, the scope of its call"


# Results -------------------------------------------------------------------------------------------------------------


def _results(tape: Tape) -> Iterator[str]:
    """The results of the tape and what its calls take and give are values that its ops make."""
    values = {v for op in tape.ops for v in op.values()}
    if not values.issuperset(leaves((tape.outputs, tape.graph_outputs()), Value)):
        yield "it returns a value that none of its ops makes"
    if isinstance(tape, ProgramTape) and not values.issuperset(w.value for w in tape.attribute_writes):
        yield "it binds a value to an attribute that none of its ops makes"
    for call in tape.calls:
        if not values.issuperset(leaves((call.args, call.kwargs, call.outputs, call.mutated), Value)):
            yield f"the call of {call.scope.path} takes or gives a value that none of the ops makes"


def _write_back(tape: Tape) -> Iterator[str]:
    """The write-back names inputs, tensors, values of the graph and earlier results that are there."""
    program = tape.write_back if isinstance(tape, ProgramTape) else None
    if program is None:
        return
    inputs, values = len(tape.inputs), len(tape.graph_outputs())

    def exists(source: ValueSource, earlier: int) -> bool:
        if isinstance(source, ViewOf):
            return exists(source.base, earlier)
        if isinstance(source, StateRef):
            return source.name in tape.attributes
        limit = inputs if isinstance(source, GraphInput) else values if isinstance(source, FromGraph) else earlier
        return 0 <= source.index < limit

    for update in program.updates:
        sources = [update.target] if isinstance(update, ChangeShape) else [update.target, update.value]
        if not all(exists(source, 0) for source in sources):
            yield f"`{update}` names what is not there"
    for i, result in enumerate((*program.results, *program.bound)):
        if result is not None and not exists(result, i):
            yield f"result {i} is `{result}`, which is not there"


_RULES = (_producers, _placeholders, _attributes, _storages, _ranges_of_calls, _calls_of_ops, _scopes, _results)
_FUNCTIONAL_RULES = (_writes, _write_back)
