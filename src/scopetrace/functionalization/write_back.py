"""The write-back program of a functional tape: what the graph has to give, and what is done with it.

Data flow:
    inputs and state that are written, results, assigned attributes -> updates and sources, of values of the graph
    ops that the program has differentiated once and for all -> results that autograd leads back to one of them
    such results -> marked: in a call they require grad, and `backward()` through them raises
    what other results, updates and attributes get -> the ops that lead to it run under autograd as before, others not
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from scopetrace._compat.ops import is_op, schema_of
from scopetrace._compat.symbols import Symbolic, has_unbacked, to_expr
from scopetrace.containers.structure import leaves, map_structure
from scopetrace.functionalization.alias_set import AliasSet, became, last_of
from scopetrace.functionalization.refusals import refusal
from scopetrace.ir.tape import FunctionalTape, Op, RecordedTape, Value
from scopetrace.ir.write_back import (
    ChangeShape,
    CopyInto,
    FromGraph,
    GraphInput,
    SameAs,
    SetTo,
    StateRef,
    StridedStep,
    Update,
    ValueSource,
    ViewOf,
    ViewStep,
    WriteBack,
    Written,
    base_of,
)
from scopetrace.ops.history import DETACHED, KEEP_MORE, OVERWRITE, History, can_require_grad, is_cut

_aten = torch.ops.aten


def attach(old: RecordedTape, new: FunctionalTape, sets: dict[int, AliasSet], read: Callable[[Value], Value]) -> None:
    """Give `new` its `returned` and `write_back`. `read` gives the final value of one of the old tape."""
    builder = _Builder(old, new, sets, read)
    new.returned = builder.returned
    new.write_back = WriteBack(builder.updates(), builder.results(), builder.bound())


class _Builder:
    def __init__(
        self, old: RecordedTape, new: FunctionalTape, sets: dict[int, AliasSet], read: Callable[[Value], Value]
    ) -> None:
        self.old, self.new, self.sets, self.read = old, new, sets, read
        self._last = functools.partial(last_of, sets)
        self.returned: list[Any] = []
        self._given: dict[int, int] = {}  # by the id of each of them its index
        self._outputs = leaves(old.outputs, (Value, *Symbolic))
        self._first: dict[int, int] = {}
        self._storages: dict[int, list[int]] = {}
        """By new storage of results, the old ones: each but the first gets a copy."""
        self.outside: dict[Value, Written] = {}
        for leaf in self._outputs:
            if isinstance(leaf, Value) and leaf.storage not in sets:  # not written: what has its value is the copy
                self._storages.setdefault(read(leaf).storage, [leaf.storage])
        for op in old.ops:
            if op.kind == "placeholder" and isinstance(op.outputs, Value):
                self.outside[op.outputs] = GraphInput(len(self.outside), op.name)
        self.outside |= {value: StateRef(name) for name, value in old.attribute_reads()}
        for root in [r for aliases in sets.values() for r in aliases.roots if r.op.target is _aten.as_strided.default]:
            for _, op in became(sets, root):
                raise refusal("a view that reaches memory outside of its tensor changes its shape in place", op)
            base = next(v for v in self.outside if v.storage == root.storage)
            step = StridedStep(tuple(root.fake.size()), tuple(root.fake.stride()), root.offset - base.offset)
            self.outside[root] = _view_of(self.outside[base], (step,))
        self._outside_storages = {v.storage for v in self.outside}
        self._objects = {id(self._last(v).fake): target for v, target in reversed(self.outside.items())}
        self._alone = self._count_objects()
        for before, after in zip(old.attribute_writes, new.attribute_writes, strict=True):
            if self._alone[before.value.storage] == 1:
                self._storages.setdefault(after.value.storage, [before.value.storage])
        self._final = {self._last(v): v for v in self.outside if self._last(v) is not v}

    # ---------------------------------------------------------------- updates

    def updates(self) -> list[Update]:
        """In the order of the inputs."""
        updates: list[Update] = []
        done: set[int] = set()
        for value, target in self.outside.items():
            last = self._last(value)
            if value.storage not in self.sets or id(last.fake) in done:
                continue
            done.add(id(last.fake))
            changes = self._changes(value)
            changed = [self._change(target, value, op, after) for op, after in changes]
            if any(_resizes(op) for op, _ in changes):
                updates += [*changed, *self._copies_into(target, last)]
            else:  # who else has its first memory sees what was written there
                updates += [*self._copies_into(target, value), *changed]
        return updates

    def _copies_into(self, target: Written, value: Value) -> list[CopyInto]:
        """What was written to the memory of a value, if anything was."""
        aliases = self.sets[value.storage]
        if not aliases.version:
            return []
        new = self.read(value)
        if self.old.grad:
            mode = None if aliases.is_seen else False
        else:
            mode = True if aliases.is_seen and new.requires_grad else None
        if mode is False and new.op.target is OVERWRITE:
            new = new.op.tensor(1)  # no gradient goes through the copy
        # in the memory of another input, which another update changes
        is_outside = new.storage in self._outside_storages and new.storage in self.sets
        is_overwritten = is_outside and new.storage != value.storage
        return [CopyInto(target, self._give(new, copy=int(is_overwritten)), mode)]

    def _change(self, target: Written, value: Value, op: Op, after: Value) -> ChangeShape | SetTo:
        if op.target is _aten.set_.source_Tensor:
            if after.fake.requires_grad and not value.requires_grad:
                raise refusal("a tensor to which a gradient flows gets other memory", op)
            return SetTo(target, self._source(op.tensor(1)))
        if after.fake.requires_grad and self._mode(op) is False:
            raise refusal("a tensor from outside that requires grad changes its shape in place under no_grad", op)
        if _resizes(op):
            sizes = self._numbers(list(after.fake.size()))
            return ChangeShape(target, ViewStep(_aten.resize_.default, (sizes,), {}, None, self._mode(op)))
        assert is_op(op.target)
        args, kwargs = self._numbers((op.args[1:], op.kwargs))
        return ChangeShape(target, ViewStep(op.target, args, kwargs, None, self._mode(op)))

    def _changes(self, value: Value) -> list[tuple[Op, Value]]:
        """The in-place changes of its shape or memory, and what each made of it; `set_` undoes those before it."""
        changes: list[tuple[Op, Value]] = []
        for after, op in became(self.sets, value):
            changes = [] if op.target is _aten.set_.source_Tensor else changes
            changes.append((op, after))
        return changes

    def _mode(self, op: Op) -> bool | None:
        return None if op.grad == self.old.grad else op.grad

    # ---------------------------------------------------------------- results

    def results(self) -> list[ValueSource]:
        """One source for each tensor and symbolic number of the model's result."""
        return [self._result(i, leaf) for i, leaf in enumerate(self._outputs)]

    def bound(self) -> list[ValueSource | None]:
        """What each attribute is bound to, where that shares memory, or has other strides than the graph's value."""
        values = enumerate((w.value for w in self.old.attribute_writes), len(self._outputs))
        sources = [
            self._result(i, v) if self._is_shared(v) or self._is_moved(v, self.read(v)) else None for i, v in values
        ]
        return sources if any(sources) else []

    def _is_shared(self, v: Value) -> bool:
        of_written_input = v.storage in self.sets and v.storage in self._outside_storages
        return self._alone[v.storage] > 1 or id(v.fake) in self._first or of_written_input

    def _count_objects(self) -> dict[int, int]:
        seen: dict[int, set[int]] = {}
        for leaf in (*self._outputs, *(w.value for w in self.old.attribute_writes)):
            if isinstance(leaf, Value):  # a tensor that an input was set to counts as one more
                seen.setdefault(leaf.storage, set()).add(id(leaf.fake))
        for value in self.outside:
            for op, _ in self._changes(value):
                if op.target is _aten.set_.source_Tensor:
                    seen.setdefault(op.tensor(1).storage, set()).add(id(op.tensor(1).fake))
        return {storage: len(objects) for storage, objects in seen.items()}

    def _result(self, i: int, leaf: Any) -> ValueSource:
        if not isinstance(leaf, Value):
            return self._give(leaf)
        if id(leaf.fake) in self._first:
            return SameAs(self._first[id(leaf.fake)])
        self._first[id(leaf.fake)] = i
        target = self._objects.get(id(leaf.fake))
        return self._source(leaf) if target is None else target

    def _source(self, leaf: Value) -> ValueSource:
        aliases = self.sets.get(leaf.storage)
        if aliases is None:
            owner = self._moved_owner(leaf)
            if owner is None:
                return self._alone_in_memory(leaf)
            size, stride = tuple(leaf.fake.size()), tuple(leaf.fake.stride())
            detached = owner.fake.requires_grad and not leaf.fake.requires_grad
            first = [ViewStep(_aten.detach.default, (), {}, None)] if detached else []
            mode = None
            if is_cut(leaf):  # a leaf, or made of one
                mode, first = leaf.op.grad, [ViewStep(_aten.alias.default, (), {}, None, grad=False)]
            step = StridedStep(size, stride, leaf.offset - owner.offset, mode)
            return ViewOf(self._from_graph(owner, owner), (*first, step))
        if self.outside.keys().isdisjoint(aliases.roots) and self._alone[leaf.storage] == 1:
            return self._alone_in_memory(leaf)
        root, steps = self._chain(aliases, leaf)
        if root in self.outside:  # or it got this memory
            return _view_of(self.outside[root], steps)
        return ViewOf(self._from_graph(root, self.read(root)), steps)

    def _alone_in_memory(self, leaf: Value) -> ValueSource:
        source = self._from_graph(leaf, self.read(leaf))
        if is_cut(leaf) and (source.copy or source.stride):
            modes = (False, leaf.op.grad)  # made under no_grad, as in eager, it is a leaf
            return ViewOf(source, tuple([ViewStep(_aten.alias.default, (), {}, None, mode) for mode in modes]))
        return source

    def _moved_owner(self, leaf: Value) -> Value | None:
        """The first tensor of the memory, if several results lie in it and the graph lays one of them out otherwise."""
        if self._alone.get(leaf.storage, 1) == 1 or leaf.fake.layout is not torch.strided:
            return None
        sharing = [v for v in self._outputs if isinstance(v, Value) and v.storage == leaf.storage]
        if all(to_expr(self.read(v).fake.stride()) == to_expr(v.fake.stride()) for v in sharing):
            return None
        owner = next(v for op in self.old.ops for v in op.values() if v.storage == leaf.storage)
        if any(v.fake.dtype != owner.fake.dtype for v in sharing):
            raise refusal(
                "results share memory as views of another dtype, in another layout than in the graph", leaf.op
            )
        return owner

    def _from_graph(self, old: Value, present: Value) -> FromGraph:
        new = self.read(old) if present is old else present
        stride = tuple(old.fake.stride()) if self._is_moved(old, new) else None
        owners = self._storages.setdefault(new.storage, [])
        if not owners and new.storage != old.storage and new.storage in self._outside_storages:
            owners.append(new.storage)
        if old.storage not in owners:
            owners.append(old.storage)
        return self._give(new, self._numbers(stride), owners.index(old.storage))

    @staticmethod
    def _is_moved(old: Value, new: Value) -> bool:
        """Whether the value in the graph has other strides than the tensor that it stands for."""
        if old.fake.layout is not torch.strided:
            return False
        return to_expr(new.fake.stride()) != to_expr(old.fake.stride()) and to_expr(new.fake.numel()) != 0

    def _numbers(self, x: Any) -> Any:
        """`x` with numbers that depend on data as given by the graph, which alone knows them."""
        return map_structure(lambda n: self._give(n) if has_unbacked(to_expr(n)) else n, x, Symbolic)

    def _chain(self, aliases: AliasSet, value: Value) -> tuple[Value, tuple[ViewStep | StridedStep, ...]]:
        steps: list[ViewStep | StridedStep] = []
        while (meta := aliases.views.get(value)) is not None and value not in self._final:
            if meta.func is _aten.as_strided.default and len(meta.args) == 3:
                size, stride, offset = meta.args
                layout = self._numbers((tuple(size), tuple(stride), offset - meta.parent.offset))
                steps.append(StridedStep(layout[0], layout[1], layout[2], self._mode(value.op)))
            elif self._is_independent(aliases, value):
                break
            elif meta.func is not None:
                args, kwargs = self._numbers((meta.args, meta.kwargs))
                steps.append(ViewStep(meta.func, args, kwargs, meta.slot, self._mode(value.op)))
            value = meta.parent
        root = self._final.get(value, value)
        last = self._last(root)
        if root in self.outside and value is not last and last is not root:
            if value.offset != last.offset or last.storage != root.storage:
                raise refusal("a result is a view of an input that got other memory", root.op)
            sizes, strides = self._numbers((list(value.fake.size()), list(value.fake.stride())))
            steps.append(ViewStep(_aten.as_strided.default, (sizes, strides), {}, None))
        return root, tuple(reversed(steps))

    def _is_independent(self, aliases: AliasSet, value: Value) -> bool:
        """Whether autograd takes a value for a tensor of its own, and nobody uses the memory otherwise."""
        if not aliases.is_detached(value):
            return False
        if value in aliases.with_grad and aliases.views[value].func in DETACHED:
            return True  # a gradient of its own
        results = [v for v in (*self._outputs, *(w.value for w in self.old.attribute_writes)) if isinstance(v, Value)]
        return (
            aliases.views[value].func not in DETACHED
            and not any(root in self.outside for root in aliases.roots)
            and all(value in aliases.above(v) for v in results if v.storage == value.storage)
        )

    def _give(self, value: Any, stride: tuple[int, ...] | None = None, copy: int = 0) -> FromGraph:
        index = self._given.setdefault(id(value), len(self.returned))
        if index == len(self.returned):
            self.returned.append(value)
        return FromGraph(index, stride, copy)


def _resizes(op: Op) -> bool:
    return schema_of(op.target).name.startswith("aten::resize")


def _view_of(base: Written, steps: tuple[ViewStep | StridedStep, ...]) -> ViewOf:
    return ViewOf(base.base, base.steps + steps) if isinstance(base, ViewOf) else ViewOf(base, steps)


# Of a program that differentiates -----------------------------------------------------------------------------------


def leave_out_freed_history(old: RecordedTape, new: FunctionalTape) -> None:
    """Mark the results of `new` whose history is freed, and switch autograd off for the ops that only they need.

    In eager, `loss.backward()` frees the activations that it has read. A call of the trace would keep all of them for
    as long as somebody holds the loss, since the ops of backward are ops of the graph and autograd knows nothing of
    them.
    """
    differentiated = {v: 1 for op in old.differentiated() for v in op.values()}
    write_back, returned = new.write_back, new.returned
    if not differentiated or write_back is None or returned is None:
        return
    outputs = leaves(old.outputs, (Value, *Symbolic))
    with_history = [v for v in outputs if isinstance(v, Value) and v.fake.requires_grad]
    if not differentiated.keys() >= set(with_history):  # it is one of them, where it is the loss alone
        history = History(old.ops, differentiated)
        with_history = [v for v in with_history if history.of(v)]
    freed = [isinstance(v, Value) and v in with_history for v in outputs]
    outside = dict(old.attribute_reads()) | {op.name: op.result for op in old.ops if op.outputs in old.inputs}

    def gets_history(update: CopyInto) -> bool:
        """Whether what is written, one of the tensors from outside, requires grad after it for what it got."""
        target = update.target
        return update.grad is not False and (isinstance(target, ViewOf) or outside[target.name].currently_requires_grad)

    sources: list[ValueSource | None] = [*write_back.bound]  # what the write-back takes, but for results that are freed
    sources += [u.value for u in write_back.updates if isinstance(u, SetTo)]
    sources += [u.value for u in write_back.updates if isinstance(u, CopyInto) and gets_history(u)]
    results = zip(write_back.results, freed, strict=True)
    sources += [s for s, is_freed in results if not (is_freed and isinstance(s, FromGraph))]
    kept = {base.index for base in map(base_of, sources) if isinstance(base, FromGraph)}
    for i, (source, is_freed) in enumerate(zip(write_back.results, freed, strict=True)):
        if is_freed and isinstance(source, FromGraph) and source.index not in kept:
            write_back.results[i] = dataclasses.replace(source, freed=True)
    live = [returned[i] for i in kept] + [w.value for w in new.attribute_writes]
    _switch_off(new, {v for v in live if isinstance(v, Value)})


def _switch_off(new: FunctionalTape, needed: set[Value]) -> None:
    """Switch autograd off for all ops but those of which the history of `needed` consists."""
    # not by the `requires_grad` of the trace: what torch.func gives has a history in a call that it does not see
    for i in reversed(range(len(new.ops))):
        op = new.ops[i]
        if not op.grad or op.kind != "call_function" or op.target in KEEP_MORE:
            continue
        if needed.isdisjoint(op.values()):
            new.ops[i] = op.replace(grad=False).take_values()
        elif op.target not in DETACHED:
            needed.update(filter(can_require_grad, op.inputs()))
