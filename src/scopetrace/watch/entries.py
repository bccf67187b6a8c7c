"""Tensors that a forward puts in the place of others in dicts, objects, tuples and lists: `self.state = (h, c)`.

Each is an AttributeWrite, and the constant that the program read there a tensor which a call takes from the same place.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch.utils import _pytree as pytree

from scopetrace._compat.questions import MISSING
from scopetrace._compat.tensors import FakeTensor, is_symbolic
from scopetrace.containers.contents import Change, Contents, Place, same, short, snapshot
from scopetrace.ir.guards import Asked
from scopetrace.ir.tape import AttributeWrite, Op, Tape
from scopetrace.record.values import ValueTable
from scopetrace.watch.settle import leave_out


class Entries(torch.nn.Module):
    """A dict, or the attributes of an object, as a module: its attributes are the entries."""

    _parameters = _buffers = _modules = dict[str, Any]()  # noqa: RUF012

    def __init__(self, table: dict[str, Any]) -> None:
        object.__setattr__(self, "__dict__", table)


class Items(dict[str, Any]):
    """The leaves of a tuple, list, dict or deque that a place has now, by number; None where it is of another form."""

    def __init__(self, place: Place, *, is_kept: bool) -> None:
        """`is_kept`: whether the list that is there gets other items, in place of another one in its place."""
        self.place, self.is_kept, self.form = place, is_kept, _form(place.current())

    def __getitem__(self, name: str) -> Any:
        content = self.place.current()
        return pytree.tree_leaves(content)[int(name)] if same(self.form, _form(content)) else None

    get = __getitem__  # type: ignore[assignment]

    def __setitem__(self, name: str, x: Any) -> None:
        leaves, tree = pytree.tree_flatten(content := self.place.current())
        leaves[int(name)] = x
        (Place(content) if self.is_kept else self.place).put(pytree.tree_unflatten(leaves, tree))


def _form(content: Any) -> Any:
    """What does not change between calls: the kinds of containers, and leaves that are no tensors."""
    leaves, tree = pytree.tree_flatten(content)
    return [torch.Tensor if type(x) in (torch.Tensor, FakeTensor) else snapshot(x) for x in leaves], tree


def _slots(change: Change, contents: Contents) -> list[Change]:
    """A change for each tensor in a container that one place holds; none where it is of something else."""
    old, new, is_kept = change.old, change.new, change.place.key is MISSING
    places = contents.places_of(change.place.owner if is_kept else old)
    if len(places) != 1 or not isinstance(old, (tuple, list, dict, collections.deque)) or type(new) is not type(old):
        return []
    if not same(_form(old), _form(new)):
        return []
    items, pairs = Items(places[0], is_kept=is_kept), zip(pytree.tree_leaves(old), pytree.tree_leaves(new), strict=True)
    slots = [(str(i), x, y) for i, (x, y) in enumerate(pairs) if type(x) is torch.Tensor]
    return [Change(f"{change.name}[{short(n)}]", x, y, Place(items, n)) for n, x, y in slots]


def _id(table: Any) -> Any:
    return table.place.id if isinstance(table, Items) else id(table)


_TABLES = (dict, collections.defaultdict, collections.OrderedDict, Items)


def bind_entries(values: ValueTable, changes: Sequence[Change], first: Tape | None) -> Set[tuple[int, Any]]:
    """Put on the tape where the forward leaves other tensors in dicts and objects; gives the ids of these places.

    None are taken of a table in which the program cannot follow one, and only those of a `first` tape, if given.
    """
    holders, tables, wholes = dict[Any, Entries](), dict[Any, list[Change]](), dict[Any, Change]()
    among = {(_id(vars(w.module)), w.name) for w in getattr(first, "attribute_writes", ()) if w.module is not None}
    slots = [(whole, _slots(whole, values.model.contents) or [whole]) for whole in changes]
    for whole, change in [(x, slot) for x, of_x in slots for slot in of_x]:
        owner = change.place.owner
        table: Any = owner if isinstance(owner, dict) else getattr(owner, "__dict__", None)
        is_new = first is not None and (_id(table), change.place.key) not in among
        if type(change.old) is torch.Tensor and type(table) in _TABLES and not is_new:
            holders.setdefault(_id(table), Entries(table))
            tables.setdefault(_id(table), []).append(change)
            wholes[change.place.id] = whole
    if not tables:
        return frozenset()
    tape, held = values.builder.tape, collections.Counter(id(t) for _, t in values.model.contents.tensors)
    held.update(id(x) for g in tape.guards if isinstance(g.source, Asked) for x in g.source.args[:1])  # as for its data
    held.update(id(t) for saved in values.model.saved_modules for table in saved.tables[1:3] for t in table.values())
    known = [k for k, x in tables.items() if all([held[id(c.old)] == 1 and _is_followed(c, values) for c in x])]
    reads = {id(op.result.real): op for op in tape.ops if op.kind == "get_attr"}
    names, taken, renamed = {*values.model.tensor_names, *tape.attributes}, list[Change](), dict[Op, Op]()
    for key, of_table in [(key, tables[key]) for key in known]:
        paths = {f"{_name_of_table(change)}.{change.place.key}" for change in of_table}
        if not names.isdisjoint(paths):
            continue
        names, holder = names | paths, holders[key]
        taken += [wholes[change.place.id] for change in of_table]
        for change in of_table:
            write = AttributeWrite(holder, _name_of_table(change), change.place.key, values.value_of(change.new))
            tape.attribute_writes.append(write)
            if (op := reads.get(id(change.old))) is not None:
                renamed[op] = op.replace(target=write.path).take_values()
                tape.owners[write.path] = holder, write.name
    by_name = {old.name: new.name for old, new in renamed.items()}
    leave_out(tape, [*taken, *(change._replace(place=change.places[0]) for change in taken if change.places)])
    tape.ops[:] = [renamed.get(op, op) for op in tape.ops]
    tape.attributes = {by_name.get(name, name): t for name, t in tape.attributes.items()}
    return {change.place.id for change in taken}


def _is_followed(change: Change, values: ValueTable) -> bool:
    """Whether a call can put the new tensor there, and the next one finds one like that which was there."""
    old, new, key = change.old, change.new, change.place.key
    is_old = type(new) is torch.Tensor and isinstance(change.place.owner, Items)
    value = values.value_of(new) if is_old else values.bound_value(new) if isinstance(new, torch.Tensor) else None
    of_module_or_tensor = change.attribute and isinstance(change.holder, (torch.nn.Module, torch.Tensor))
    if value is None or of_module_or_tensor or values.model.owner(old) or values.is_state(old):
        return False
    is_name = type(key) is str and re.fullmatch(r"\w+(\.\w+)*", key) is not None
    has_history = (old.requires_grad or value.requires_grad) and not isinstance(change.place.owner, Items)
    return is_name and are_alike(old, value.fake) and not has_history


def _name_of_table(change: Change) -> str:
    """That of a dict or object, as of a module: `self.averages` is `averages`."""
    outer = change.name.removesuffix(f"[{short(change.place.key)}]").removesuffix(f".{change.attribute}")
    return re.sub(r"\W+", "_", outer.removeprefix("self.")).strip("_")


def are_alike(old: Any, new: torch.Tensor) -> bool:
    """Whether what Python sees of two tensors, while no op takes the first, is equal."""
    if not isinstance(old, torch.Tensor) or is_symbolic(new):
        return False
    return (old.dtype, old.shape, old.device) == (new.dtype, new.shape, new.device)
