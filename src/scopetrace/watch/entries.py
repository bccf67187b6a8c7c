"""Tensors that a forward puts in the place of others in dicts and objects, as averages: `ema[name] = ema[name] * 0.9`.

Data flow:
    changes of entries and attributes, each a tensor in the place of one like it -> an AttributeWrite each
    the constants that the program read there -> tensors of the model, which a call takes from the same place
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
from scopetrace.ir.tape import AttributeWrite
from scopetrace.record.values import ValueTable
from scopetrace.watch.settle import leave_out


class Entries(torch.nn.Module):
    """A dict, or the attributes of an object, as a module: its attributes are the entries."""

    _parameters = _buffers = _modules = dict[str, Any]()  # noqa: RUF012
    _non_persistent_buffers_set = set[str]()  # noqa: RUF012

    def __init__(self, table: dict[str, Any]) -> None:
        object.__setattr__(self, "__dict__", table)


_TABLES = (dict, collections.defaultdict, collections.OrderedDict)


def bind_entries(
    values: ValueTable, changes: Sequence[Change], among: Set[tuple[int, Any]] | None
) -> Set[tuple[int, Any]]:
    """Put on the tape where the forward leaves other tensors in dicts and objects; gives the ids of these places.

    None are taken of a table in which the program cannot follow one, and only those `among` them, if given.
    """
    tables: dict[int, list[Change]] = collections.defaultdict(list)
    for change in changes:
        of_module_or_tensor = change.attribute and isinstance(change.holder, (torch.nn.Module, torch.Tensor))
        is_new = among is not None and change.place.id not in among
        if isinstance(change.old, torch.Tensor) and not (of_module_or_tensor or is_new):
            tables[id(change.place.owner)].append(change)
    held = collections.Counter(id(t) for _, t in values.model.contents.tensors) if tables else {}
    tape, renamed, taken = values.builder.tape, dict[str, str](), list[Change]()
    reads = {id(op.result.real): op for op in tape.ops if tables and op.kind == "get_attr"}
    for of_table in tables.values():
        owner = of_table[0].place.owner
        table: Any = owner if isinstance(owner, dict) else getattr(owner, "__dict__", None)
        if type(table) not in _TABLES or not all(held[id(c.old)] == 1 and _is_followed(c, values) for c in of_table):
            continue
        holder, taken = Entries(table), [*taken, *of_table]
        for change in of_table:
            value, key = values.bound_value(change.new), change.place.key
            assert value is not None, "it is followed"
            tape.attribute_writes.append(write := AttributeWrite(holder, _name_of_table(change), key, value))
            if id(change.old) in reads:
                renamed[reads[id(change.old)].name] = write.path
                tape.owners[write.path] = holder, key
    if taken:
        leave_out(tape, taken)
        named = {old: reads[id(tape.attributes[old])].replace(target=new).take_values() for old, new in renamed.items()}
        tape.ops[:] = [named.get(op.name, op) if op.kind == "get_attr" else op for op in tape.ops]
        tape.attributes = {renamed.get(name, name): t for name, t in tape.attributes.items()}
    return {change.place.id for change in taken}


def _is_followed(change: Change, values: ValueTable) -> bool:
    """Whether a call can take a tensor from its place, and put the new one there.

    The program may know it by nothing else, nor its data, and the next call finds one like it.
    """
    old, new, key, tape = change.old, change.new, change.place.key, values.builder.tape
    value = values.bound_value(new) if isinstance(new, torch.Tensor) else None
    if value is None or values.model.owner(old) or values.is_state(old):
        return False
    name = f"{_name_of_table(change)}.{key}"
    is_name = type(key) is str and re.fullmatch(r"\w+(\.\w+)*", key)
    is_baked = any(isinstance(g.source, Asked) and any(x is old for x in g.source.args[:1]) for g in tape.guards)
    if not is_name or is_baked or name in values.model.tensor_names or name in tape.attributes:
        return False
    return are_alike(old, value.fake) and not (old.requires_grad or value.requires_grad)


def _name_of_table(change: Change) -> str:
    """That of a dict or object, as of a module: `self.averages` is `averages`."""
    outer = change.name.removesuffix(f"[{short(change.place.key)}]").removesuffix(f".{change.attribute}")
    return re.sub(r"\W+", "_", outer.removeprefix("self.")).strip("_")


def are_alike(old: Any, new: torch.Tensor) -> bool:
    """Whether what Python sees of two tensors, while no op takes the first, is equal."""
    if not isinstance(old, torch.Tensor) or is_symbolic(new):
        return False
    return (old.dtype, old.shape, old.device) == (new.dtype, new.shape, new.device)
