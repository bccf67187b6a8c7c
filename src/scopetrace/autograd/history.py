"""What of autograd's history a graph of ops would lose: refused, or what a call of it is compared with.

Data flow:
    inputs and attributes that require grad, and tensors that the forward makes require grad -> `History`: a bit each
    a result, or what an input or attribute becomes, with the second bit alone -> UnsupportedOpError
    a block in another grad mode, or a write beside autograd -> the leaves that may not require grad in a call
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from scopetrace._compat.gradients import is_function, node_of, nodes_of, sequence_number
from scopetrace._compat.tensors import base_of, is_view, requires_grad_of
from scopetrace.errors import UnsupportedOpError
from scopetrace.ir.side_effects import SideEffect
from scopetrace.ir.tape import Op, RecordedTape, Value
from scopetrace.ops.history import DETACHED, NO_VIEWS, History, note_leaf, plain_leaves, root_of
from scopetrace.record.builder import TapeBuilder, place_of
from scopetrace.record.reads import ReadRecorder
from scopetrace.record.values import ValueTable

_KEPT, _MADE = 1, 2
_APPLIED = (
    "the forward differentiates, and has autograd_function_apply of tensors that require grad, through which gradients "
    "may go to a result too",
    "trace the forward alone, without torch.autograd.grad in it",
)
BOUND_APPLY = (
    "a torch.autograd.Function that gives its argument back, or to whose backward the forward comes, is called by an "
    "`apply` that was bound before the trace, which torch 2.14 and later do not show",
    "call Function.apply(...) itself, in a function where one is needed",
)


def refuse_lost_history(values: ValueTable, results: list[Value]) -> None:
    """Raise UnsupportedOpError where autograd knows more of the results of a recording than its ops do."""
    tape = values.builder.tape
    _refuse_lost_hooks(values.builder, results)
    _refuse_lost_gradients(values, results)
    for op, several in _writes_kept_apart(tape, values.examples):
        if (several and tape.grad) or (op.grad and op.tracked):
            problem = "memory is written that inputs share which autograd keeps apart, such as x and x.detach()"
            hint = "clone() one of the inputs, or trace under torch.no_grad()"
            raise UnsupportedOpError(problem, **place_of(op), hint=hint)


def _refuse_lost_gradients(values: ValueTable, results: list[Value]) -> None:
    """Raise where a result, an input or a tensor of the model requires grad only by `requires_grad_()` or the like."""
    builder, tape, former = values.builder, values.builder.tape, values.builder.former_leaves
    differentiated = builder.differentiated if builder.differentiates else None  # None: torch applied no function
    ops = tape.ops
    late = [v for op in ops for v in op.values() if not v.requires_grad and v.currently_requires_grad]
    function_results = [v for v in late if not v.op.grad and not v.op.writes and not is_view(v.fake)]
    if differentiated is not None:  # what such a function gives may be a view, also of what requires grad
        quiet = [op for op in ops if op.kind == "call_function" and not op.grad]
        function_results = [v for op in quiet for v in op.values() if v.currently_requires_grad]
    written = tape.written_storages()
    functions = ((v, node) for v in function_results for node in _functions(v, behind_writes=v.storage in written))
    if differentiated is None:
        unseen = next((v for v, _ in functions), None)
    else:
        numbered = [(v, sequence_number(node)) for v, node in functions]
        reached = _reached_from_outside(tape, results) if numbered else ()
        unseen = next((v for v, number in numbered if number in reached and number not in differentiated), None)
    if unseen is not None:
        problem, hint = BOUND_APPLY if differentiated is None else _APPLIED
        raise UnsupportedOpError(problem, **place_of(unseen.op), hint=hint)
    if not (late or former):
        return
    outside = [v for op in tape.ops if op.kind in ("placeholder", "get_attr") for v in op.values()]
    followed = [op for op in tape.ops if op.grad and op.tracked]
    tracked = {v.storage for op in followed for v in op.writes}  # what is outside is no leaf after that
    candidates = (v for v in late if v.storage not in tracked or v not in outside)
    new_leaves = [v for v in candidates if not v.op.writes or v.op.target in DETACHED]
    new_leaves = [v for v in new_leaves if _is_leaf(v, values.examples)]
    new_leaves += former
    if not new_leaves:
        return
    leaves = {v: _KEPT for v in outside if v.requires_grad} | dict.fromkeys(new_leaves, _MADE)
    history = History(tape.ops, leaves, _KEPT)
    bound = [w.value for w in tape.attribute_writes]
    for value in (*results, *bound, *(v for v in outside if v not in new_leaves)):
        if history.of(value) == _MADE and value not in former:
            raise UnsupportedOpError(
                "the forward itself makes a tensor require grad (requires_grad_(), requires_grad=True, nn.Parameter), "
                "and a result depends on it, which a graph of ops does not have",
                **place_of(value.op),
                hint="give the tensor as an argument that requires grad, or make it a parameter of the model, as by "
                "one run before st.trace; or return x.detach()"
                + ("; or trace under torch.no_grad()" if tape.grad else ""),
            )


def _reached_from_outside(tape: RecordedTape, results: Iterable[Value]) -> set[int]:
    """The numbers of the nodes to which a backward from what the forward leaves goes: results, attributes, writes."""
    written = tape.written_storages()
    outside = (v for op in tape.ops if op.kind in ("placeholder", "get_attr") for v in op.values())
    left = [*results, *(w.value for w in tape.attribute_writes), *(v for v in outside if v.storage in written)]
    return set(map(sequence_number, nodes_of([v.fake for v in left if requires_grad_of(v.fake)])))


def _refuse_lost_hooks(builder: TapeBuilder, results: list[Value]) -> None:
    """Raise where a backward from outside would run a hook of the forward, or put a `grad` that the forward keeps."""
    hooked = builder.hooked
    if hooked:
        bound = [w.value for w in builder.tape.attribute_writes]
        tensors = [v.fake for v in (*results, *bound) if requires_grad_of(v.fake)]
        numbers = [n for n in map(sequence_number, nodes_of(tensors)) if n not in builder.differentiated]
        for number in numbers:
            if number in hooked:
                raise hooked[number]
        if any(t.retains_grad for t in tensors):  # a write may have given it another node since
            raise next(iter(hooked.values()))


def _functions(v: Value, *, behind_writes: bool) -> Iterator[Any]:
    """The nodes of a `torch.autograd.Function` that made a tensor, or that are behind the writes to it."""
    nodes = [node_of(v.fake)]
    for node in nodes:
        if is_function(node):
            yield node
        elif behind_writes and node is not None:
            nodes += [n for n, _ in node.next_functions if n not in nodes]


def _is_leaf(v: Value, examples: Mapping[Value, torch.Tensor]) -> bool:
    """Whether the forward made this tensor require grad; inputs and attributes that did before are none."""
    if v.autograd_placeholder or not v.fake.requires_grad or is_view(v.fake) or not v.fake.is_leaf:
        return False
    real = v.real if v.real is not None else examples.get(v)
    return not real.requires_grad if real is not None else v.op.kind == "call_function"


def note_leaves(values: ValueTable, reads: ReadRecorder) -> None:
    """Let a call be compared with it that inputs and parameters do not require grad, where it matters.

    That the forward made an input require grad is a side effect, which a call has where no op took the input before.
    """
    tape = values.builder.tape
    for leaf, op in _without_hidden_gradients(tape):
        note_leaf(tape, leaf, op)
    for op, _ in () if tape.grad else _writes_kept_apart(tape, values.examples):
        note_leaf(tape, root_of(op.writes[0]), op)
    for t in values.made_leaves():  # what depends on it must have a gradient from outside too
        reads.on_requires_grad(t) if tape.grad else reads.on_gradient(t)
    names = [path for path, v in zip(tape.input_paths, tape.inputs, strict=True) if _is_leaf(v, values.examples)]
    effects = [SideEffect(f"{n}.requires_grad", "False", "True", tape.root.path, None, baked_in=False) for n in names]
    tape.side_effects += effects


def _without_hidden_gradients(tape: RecordedTape) -> Iterator[tuple[Value, Op]]:
    """The inputs and parameters that do not require grad, where the program would differ if they did.

    Each is given with the first such op of either grad mode. It runs in another grad mode than that of the call, or
    writes to a detached tensor: the memory of others.
    """
    other = [op for op in tape.ops if op.writes or (op.grad != tape.grad and op.kind == "call_function")]
    has_hidden = any(op.grad != tape.grad for op in other) or any(op.target in NO_VIEWS for op in tape.ops)
    bits = plain_leaves(tape) if other and has_hidden else {}
    if not bits:
        return
    history = History(tape.ops, bits, assumed=True)

    @functools.cache
    def sharing() -> dict[int, int]:
        by_storage: dict[int, int] = collections.defaultdict(int)
        for v in [v for op in tape.ops for v in op.values()]:
            by_storage[v.storage] |= history.of(v)
        return by_storage

    left = dict.fromkeys((False, True), (1 << len(bits)) - 1)
    for op in other:
        if not left[op.grad]:
            continue
        hidden = 0
        for v in op.inputs() if op.grad != tape.grad else ():
            hidden |= history.of(v)
        for v in op.writes:
            is_hidden = op.grad != tape.grad or history.is_detached(v) or op.target in DETACHED
            hidden |= sharing()[v.storage] if is_hidden else 0
        hidden &= left[op.grad]
        left[op.grad] &= ~hidden
        if hidden:
            yield from ((leaf, op) for leaf, bit in bits.items() if hidden & bit)


def _writes_kept_apart(tape: RecordedTape, examples: Mapping[Value, torch.Tensor]) -> Iterator[tuple[Op, bool]]:
    """The ops that write to memory of several inputs which autograd keeps apart, such as `x` and `x.detach()`.

    Each with whether several of these require grad, and not all are leaves, which are followed as two parameters are.
    """
    for op in tape.ops:
        for written in op.writes:
            sharing = [examples[v] for v in tape.inputs if v.storage == written.storage]
            apart = {id(t if (base := base_of(t)) is None else base): t.requires_grad for t in sharing}
            if len(apart) > 1:
                yield op, sum(apart.values()) > 1 and not all(t.is_leaf for t in sharing)
