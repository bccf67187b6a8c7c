"""Tensors that a forward puts in the place of others in dicts and objects, as averages: `ema[name] = ema[name] * 0.9`.

Each is an AttributeWrite, and the constant that the program read there a tensor which a call takes from the same place.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence, Set
from typing import Any

import torch

from scopetrace._compat.tensors import is_symbolic
from scopetrace.containers.contents import Change, short
from scopetrace.ir.guards import Asked
from scopetrace.ir.tape import AttributeWrite, Op, Tape
from scopetrace.record.values import ValueTable
from scopetrace.watch.settle import leave_out


class Entries(torch.nn.Module):
    """A dict, or the attributes of an object, as a module: its attributes are the entries."""

    _parameters = _buffers = _modules = dict[str, Any]()  # noqa: RUF012

    def __init__(self, table: dict[str, Any]) -> None:
        object.__setattr__(self, "__dict__", table)


_TABLES = (dict, collections.defaultdict, collections.OrderedDict)


def bind_entries(values: ValueTable, changes: Sequence[Change], first: Tape | None) -> Set[tuple[int, Any]]:
    """Put on the tape where the forward leaves other tensors in dicts and objects; gives the ids of these places.

    None are taken of a table in which the program cannot follow one, and only those of a `first` tape, if given.
    """
    holders, tables = dict[int, Entries](), dict[int, list[Change]]()
    among = {(id(vars(w.module)), w.name) for w in getattr(first, "attribute_writes", ()) if w.module is not None}
    for change in changes:
        owner = change.place.owner
        table: Any = owner if isinstance(owner, dict) else getattr(owner, "__dict__", None)
        is_new = first is not None and (id(table), change.place.key) not in among
        if type(change.old) is torch.Tensor and type(table) in _TABLES and not is_new:
            holders.setdefault(id(table), Entries(table))
            tables.setdefault(id(table), []).append(change)
    if not tables:
        return frozenset()
    tape, held = values.builder.tape, collections.Counter(id(t) for _, t in values.model.contents.tensors)
    held.update(id(x) for g in tape.guards if isinstance(g.source, Asked) for x in g.source.args[:1])  # as for its data
    held.update(id(t) for saved in values.model.saved_modules for table in saved.tables[1:3] for t in table.values())
    reads = {id(op.result.real): op for op in tape.ops if op.kind == "get_attr"}
    names, taken, renamed = {*values.model.tensor_names, *tape.attributes}, list[Change](), dict[Op, Op]()
    for key, of_table in tables.items():
        paths = {f"{_name_of_table(change)}.{change.place.key}" for change in of_table}
        is_known = all(held[id(change.old)] == 1 and _is_followed(change, values) for change in of_table)
        if not is_known or not names.isdisjoint(paths):
            continue
        names, taken, holder = names | paths, [*taken, *of_table], holders[key]
        for change in of_table:
            write = AttributeWrite(holder, _name_of_table(change), change.place.key, values.value_of(change.new))
            tape.attribute_writes.append(write)
            if (op := reads.get(id(change.old))) is not None:
                renamed[op] = op.replace(target=write.path).take_values()
                tape.owners[write.path] = holder, write.name
    by_name = {old.name: new.name for old, new in renamed.items()}
    leave_out(tape, taken)
    tape.ops[:] = [renamed.get(op, op) for op in tape.ops]
    tape.attributes = {by_name.get(name, name): t for name, t in tape.attributes.items()}
    return {change.place.id for change in taken}


def _is_followed(change: Change, values: ValueTable) -> bool:
    """Whether a call can put the new tensor there, and the next one finds one like that which was there."""
    old, new, key = change.old, change.new, change.place.key
    value = values.bound_value(new) if isinstance(new, torch.Tensor) else None
    of_module_or_tensor = change.attribute and isinstance(change.holder, (torch.nn.Module, torch.Tensor))
    if value is None or of_module_or_tensor or values.model.owner(old) or values.is_state(old):
        return False
    is_name = type(key) is str and re.fullmatch(r"\w+(\.\w+)*", key) is not None
    return is_name and are_alike(old, value.fake) and not (old.requires_grad or value.requires_grad)


def _name_of_table(change: Change) -> str:
    """That of a dict or object, as of a module: `self.averages` is `averages`."""
    outer = change.name.removesuffix(f"[{short(change.place.key)}]").removesuffix(f".{change.attribute}")
    return re.sub(r"\W+", "_", outer.removeprefix("self.")).strip("_")


def are_alike(old: Any, new: torch.Tensor) -> bool:
    """Whether what Python sees of two tensors, while no op takes the first, is equal."""
    if not isinstance(old, torch.Tensor) or is_symbolic(new):
        return False
    return (old.dtype, old.shape, old.device) == (new.dtype, new.shape, new.device)
