"""Which modules FSDP2 shards together.

Data flow:
    classes or a number of bytes -> groups of modules in execution order, those between chosen modules included
    tied weights, parameters used outside their module -> merged groups, found by simulating the schedule
    groups -> for each parameter, the group that manages it

FSDP2 takes lists of modules for one group, and lets the root have what no other group has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator

import torch

from scopetrace.errors import PlanError
from scopetrace.ir.registered import Registered, inside, modules_around
from scopetrace.order.execution import ExecutionOrder

Group = tuple[str, ...]
"""Modules that are sharded together, by the first of their names; `("",)` is the root."""
ROOT: Group = ("",)


@dataclasses.dataclass(frozen=True)
class Grouping:
    """Groups of modules, the root last, and the group that manages each parameter."""

    groups: tuple[Group, ...]
    registered: Registered

    def group_of(self) -> dict[str | None, Group]:
        """By module, its group."""
        return {module: group for group in self.groups for module in group}

    def managers(self, param: str) -> list[Group]:
        """The groups whose modules have a parameter; several for tied weights."""
        group_of = self.group_of()
        around = (map(self.registered.module, modules_around(name)) for name in self.registered.params[param].names)
        return list(dict.fromkeys(next(group_of[m] for m in modules if m in group_of) for modules in around))

    def merged(self, one: Group, other: Group) -> Grouping:
        """The same with two groups merged, in the place of the later one."""
        both = dict.fromkeys([*one, *other])
        joined = tuple(m for m in both if not any(contains(self.registered, x, m) for x in both if x != m))
        kept = [g for g in self.groups if g not in (one, other)]
        at = max(self.groups.index(one), self.groups.index(other)) - 1
        return Grouping((*kept[:at], joined, *kept[at:]), self.registered)


def contains(registered: Registered, outer: str, inner: str) -> bool:
    """Whether a module is inside another one under any of their names."""
    names = registered.modules[inner].names
    return any(any(inside(names, name)) for name in registered.modules[outer].names)


def without_ties(grouping: Grouping) -> Grouping:
    """Merge groups that have a parameter in common, since FSDP2 takes a parameter in one group only."""
    for param, entry in grouping.registered.params.items():
        if len(entry.names) > 1:
            while len(managers := grouping.managers(param)) > 1:
                grouping = grouping.merged(*managers[:2])
    return grouping


def by_classes(order: ExecutionOrder, units: Collection[str]) -> Grouping:
    """A group for each of the chosen modules, `units`, and groups of the modules called between them.

    Modules outside of chosen ones (embeddings, norms, heads) are grouped by where they run: before the first chosen
    module, between two, after the last. Parameters of the root and of modules that are never called are in the root's.
    """
    registered, chosen = order.registered, set(units)
    _refuse_uncallable(order, units)
    dtypes = _dtypes(registered)

    def is_whole(name: str) -> bool:
        return len(dtypes[name]) == 1 and not any(contains(registered, name, unit) for unit in units)

    rest = [m for m in _cut(order, is_whole) if m not in chosen and not any(contains(registered, u, m) for u in units)]
    return _in_runs(order, [(m,) for m in (*units, *rest)], lambda group: chosen.isdisjoint(group))


def _refuse_uncallable(order: ExecutionOrder, units: Collection[str]) -> None:
    """Raise PlanError for modules whose hooks do not run: FSDP2 gathers and frees in hooks around a module's call."""
    for name in units:
        kind = order.registered.modules[name].type_name
        if not order.registered.modules[name].has_forward:
            raise PlanError(f"{kind} {name!r} has no forward, so that no hook gathers it: name the class of its items")
    for call in order.calls:
        if order.registered.module(call.fqn) not in units:
            continue
        if call.writes_input:
            raise PlanError(
                f"{call.type_name} {call.fqn!r} changes its input in place; FSDP2 gives it a view, which autograd does "
                "not let it change: use the op that is not in place (inplace=False), or name a class around it or "
                "inside it"
            )
        if call.raised:
            raise PlanError(
                f"a call of {call.type_name} {call.fqn!r} ends with an exception that its caller catches; FSDP2 would "
                "not free its parameters, and the next call fails: name a class around it or inside it"
            )


def by_bytes(order: ExecutionOrder, target_bytes: int) -> Grouping:
    """Groups of about `target_bytes` of parameters each, in execution order.

    The largest modules that fit are grouped as they run. A module that does not fit is divided into its children; one
    without children is a group.
    """
    registered = order.registered
    sizes = {name: sum(registered.params[p].nbytes for p in registered.inside(name)) for name in registered.modules}
    dtypes = _dtypes(registered)
    fits = [(name,) for name in _cut(order, lambda m: sizes[m] <= target_bytes and len(dtypes[m]) == 1)]
    parts = without_ties(Grouping((*fits, ROOT), registered)).groups[:-1]
    tied = {module for part in parts for module in part if len(part) > 1}
    # Tied ones stay alone, so that they do not hold others from their first module to their last.
    return _in_runs(order, parts, lambda group: tied.isdisjoint(group) and sum(sizes[m] for m in group) <= target_bytes)


def _in_runs(order: ExecutionOrder, parts: Iterable[Group], is_group: Callable[[Group], bool]) -> Grouping:
    """Parts in execution order, each in the group before it where both have one dtype and are a group together."""
    first, dtypes = first_call(order), _dtypes(order.registered)
    groups: list[Group] = []
    for part in sorted(parts, key=lambda part: first[part[0]]):
        if groups and dtypes[groups[-1][0]] == dtypes[part[0]] and is_group((*groups[-1], *part)):
            groups[-1] += part
        else:
            groups.append(part)
    return Grouping((*groups, ROOT), order.registered)


def _cut(order: ExecutionOrder, whole: Callable[[str], bool]) -> list[str]:
    """The outermost modules below the root that have parameters, are called with hooks, and fit."""
    registered = order.registered
    calls = [(registered.module(c.fqn), c.hooked and not c.writes_input) for c in order.calls]
    called = {name for name, _ in calls if name} - {name for name, all_hooks_run in calls if not all_hooks_run}
    children = _children(registered)

    def parts(name: str) -> Iterator[str]:
        below = [m for m in children.get(name, ()) if registered.inside(m)]
        if name in called and (whole(name) or not below):
            yield name
        else:
            for child in below:
                yield from parts(child)

    return list(parts(""))


def _children(registered: Registered) -> dict[str, list[str]]:
    children: dict[str, list[str]] = {}
    for name in filter(None, registered.modules):
        children.setdefault(str(registered.module(name.rpartition(".")[0])), []).append(name)
    return children


def disjoint(grouping: Grouping) -> dict[Group, list[str]]:
    """By group, disjoint modules with its parameters: of a module with another group inside, its other children.

    Parameters that such a module has directly belong to none of them.
    """
    registered, children = grouping.registered, _children(grouping.registered)
    taken = set(grouping.group_of())

    def parts(name: str) -> Iterator[str]:
        if any(contains(registered, name, other) for other in taken if other):
            for child in children.get(name, ()):
                if child not in taken:
                    yield from parts(child)
        elif name and registered.inside(name):
            yield name

    return {group: [part for name in group for part in parts(name)] for group in grouping.groups}


def _dtypes(registered: Registered) -> dict[str, set[torch.dtype]]:
    """By module, the dtypes of its parameters: FSDP2 reduces the gradients of a group as one tensor."""
    return {name: {registered.params[p].dtype for p in registered.inside(name)} for name in registered.modules}


def first_call(order: ExecutionOrder) -> dict[str, int]:
    """By module, the position of its first call; after all calls for modules that are never called."""
    first = {order.registered.module(call.fqn): i for i, call in reversed([*enumerate(order.calls)])}
    return {name: first.get(name, len(order.calls)) for name in order.registered.modules}
