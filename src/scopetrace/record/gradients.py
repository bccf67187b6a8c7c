"""What autograd does with the tensors of a forward that a graph of ops does not have, refused.

Data flow:
    inputs and attributes that require grad, and tensors that the forward makes require grad -> `History`: a bit each
    a result, or what an input or attribute becomes, with the second bit alone -> UnsupportedOpError
    a view made in inference mode and used outside; memory that a checkpointed region reads and that changes later
        -> UnsupportedOpError
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping

import torch

from scopetrace._compat.tensors import is_view, requires_grad_of
from scopetrace.errors import UnsupportedOpError
from scopetrace.ir.effects import SideEffect
from scopetrace.ir.scopes import source_of
from scopetrace.ir.tape import Op, RecordedTape, Value
from scopetrace.ops.history import DETACHED, History, can_require_grad

_KEPT, _MADE = 1, 2


def refuse_lost_gradients(tape: RecordedTape, results: Iterable[Value], examples: Mapping[Value, torch.Tensor]) -> None:
    """Raise UnsupportedOpError where a tensor requires grad only by `requires_grad_()` or the like in the forward.

    That is one of the results, an input, or a tensor of the model. `examples` are the inputs as they were given.
    """
    late = [v for op in tape.ops for v in op.values() if not v.requires_grad and requires_grad_of(v.fake)]
    made = [v for v in late if (not v.op.writes or v.op.target in DETACHED) and _is_leaf(v, examples)]
    if not made:
        return
    outside = [v for op in tape.ops if op.kind in ("placeholder", "get_attr") for v in op.values()]
    leaves = {v: _KEPT for v in outside if v.requires_grad} | dict.fromkeys(made, _MADE)
    history = History(tape.ops, leaves, _KEPT)
    bound = [w.value for w in tape.attribute_writes]
    for value in (*results, *bound, *(v for v in outside if v not in made)):
        if history.of(value) == _MADE:
            raise UnsupportedOpError(
                "the forward itself makes a tensor require grad (requires_grad_(), requires_grad=True, nn.Parameter), "
                "and a result depends on it, which a graph of ops does not have",
                **_place(value.op),
                hint="give the tensor as an argument that requires grad, or make it a parameter of the model; "
                "or return x.detach(); or trace under torch.no_grad()",
            )


def _is_leaf(v: Value, examples: Mapping[Value, torch.Tensor]) -> bool:
    """Whether the forward made this tensor require grad; inputs and attributes that did before are none."""
    if v.autograd_placeholder or not v.fake.requires_grad or is_view(v.fake) or not v.fake.is_leaf:
        return False
    real = v.real if v.real is not None else examples.get(v)
    return not real.requires_grad if real is not None else v.op.kind == "call_function"


def inputs_made_leaves(tape: RecordedTape, examples: Mapping[Value, torch.Tensor]) -> list[SideEffect]:
    """The inputs that the forward made require grad, which no call of the trace does."""
    names = [path for path, v in zip(tape.input_paths, tape.inputs, strict=True) if _is_leaf(v, examples)]
    return [SideEffect(f"{n}.requires_grad", "False", "True", tape.root.path, None, baked_in=False) for n in names]


def without_hidden_gradients(tape: RecordedTape) -> Iterator[tuple[Value, Op]]:
    """The inputs and parameters that do not require grad, where the program would differ if they did, each with the op.

    Such an op runs in another grad mode than that of the call, or writes to a detached tensor: the memory of others. In
    a trace without autograd, no tensor counts as one that requires grad.
    """
    other = [op for op in tape.ops if op.writes or (op.grad != tape.grad and op.kind == "call_function")]
    if not any(op.grad != tape.grad for op in other) and not (other and any(op.target in DETACHED for op in tape.ops)):
        return
    given = (v for op in tape.ops if op.kind in ("placeholder", "get_attr") for v in op.values())
    leaves = (v for v in given if v.op.kind == "placeholder" or isinstance(v.real, torch.nn.Parameter))
    plain = [v for v in leaves if can_require_grad(v) and not (v.requires_grad and tape.grad)]
    if not plain:
        return
    history = History(tape.ops, {v: 1 << i for i, v in enumerate(plain)}, assumed=True)
    sharing: dict[int, int] = collections.defaultdict(int)
    for v in [v for op in tape.ops for v in op.values()]:
        sharing[v.storage] |= history.of(v)
    for op in other:
        found = 0
        for v in op.inputs() if op.grad != tape.grad else ():
            found |= history.of(v)
        for v in op.writes:
            found |= sharing[v.storage] if op.grad != tape.grad or history.is_detached(v) else 0
        yield from ((leaf, op) for i, leaf in enumerate(plain) if found >> i & 1)


def refuse_inference_views(tape: RecordedTape, results: Iterable[Value]) -> None:
    """Raise UnsupportedOpError for a view that was made in inference mode and that autograd sees used outside."""
    views: set[Value] = set()
    for op in tape.ops if tape.grad else ():
        if not op.grad:
            tracked = {v.storage for v in op.inputs() if v.requires_grad or v in views}
            lacking = (v for v in op.values() if not v.requires_grad and can_require_grad(v))
            views.update(v for v in lacking if v.storage in tracked and op.target is not torch.ops.aten.detach.default)
        elif views and not views.isdisjoint(op.inputs()):
            _refuse_inference_view(op)
    for v in results if views else ():
        if v in views:
            _refuse_inference_view(v.op)


def _refuse_inference_view(op: Op) -> None:
    raise UnsupportedOpError(
        "a view of a tensor that requires grad is made under torch.inference_mode() and used outside, where autograd "
        "takes it for another tensor each time",
        **_place(op),
        hint="make the view outside of torch.inference_mode(), or under torch.no_grad()",
    )


def refuse_recomputed(tape: RecordedTape, regions: Iterable[range]) -> None:
    """Raise UnsupportedOpError where eager would compute a checkpointed region again from other data than before.

    `regions` are the ops of each region, as positions in `tape.ops`.
    """
    for region in regions:
        ops = tape.ops[region.start : region.stop]
        if not any(op.grad and v.requires_grad for op in ops for v in op.values()):
            continue
        made = {v.storage for op in ops if op.kind == "call_function" for v in op.values() if not _aliases(v, op)}
        read = {v.storage for op in ops for v in op.inputs()} - made
        for op in tape.ops[region.start :]:
            if any(v.storage in read for v in op.writes):
                raise UnsupportedOpError(
                    "a checkpointed region (torch.utils.checkpoint) reads a tensor that it or a later op writes, so "
                    "that eager computes gradients from the new data, or writes twice",
                    **_place(op),
                    hint="trace the model without checkpointing, which gives the same results; or write to the tensor "
                    "before the region",
                )


def _aliases(v: Value, op: Op) -> bool:
    return any(i.storage == v.storage for i in op.inputs())


def _place(op: Op) -> dict[str, str | None]:
    return {"op": str(op.target), "module": str(op.scope), "source": source_of(op.frames)}
