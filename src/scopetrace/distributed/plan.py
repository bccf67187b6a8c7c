"""FSDP2 from an execution order: groups, prefetch lists and bucket plans.

Data flow:
    model and order -> groups of modules (groups.py)
    groups -> simulated as FSDP2 runs them (schedule.py); a use of a freed parameter merges groups, or is refused
    groups in execution order -> prefetch lists for forward and backward -> Plan, which applies them
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from scopetrace.distributed.agreement import check_groups, check_order
from scopetrace.distributed.groups import ROOT, Group, Grouping, contains, disjoint, first_call
from scopetrace.distributed.schedule import BackwardEvent, Pass, Schedule, backward_events, backward_gathers
from scopetrace.errors import PlanError
from scopetrace.formatting import Printed, amount, columns
from scopetrace.ir.registered import Registered
from scopetrace.order.execution import ExecutionOrder
from scopetrace.record.model import Model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclasses.dataclass(frozen=True)
class ShardGroup:
    """Modules whose parameters are gathered in one collective."""

    modules: Group
    """The fqns of the modules in execution order; `("",)` is the root."""
    params: tuple[str, ...]
    """The fqns of the parameters in registration order, which is their order in FSDP2's buffers."""
    params_by_use: tuple[str, ...]
    """The fqns of the used parameters in execution order."""
    nbytes: int
    """Unsharded bytes of the parameters in their own dtypes."""
    forward_prefetch: tuple[Group, ...] = ()
    """The groups to gather when this one begins its forward."""
    backward_prefetch: tuple[Group, ...] = ()
    """The groups to gather when this one begins its backward."""

    @property
    def prefetch(self) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
        """Both lists, forward and backward."""
        return self.forward_prefetch, self.backward_prefetch


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Printed):
    """How to shard a model with FSDP2: `print(plan)`, then `plan.apply(mesh)`."""

    groups: tuple[ShardGroup, ...]
    """The groups in the order of their first forward pass, the root first."""
    order: ExecutionOrder
    model: torch.nn.Module
    ignored: tuple[str, ...] = ()
    """The fqns of parameters that are not sharded."""

    @functools.cached_property
    def _grouping(self) -> Grouping:
        rest = [g.modules for g in self.groups if g.modules != ROOT]
        return Grouping((*rest, ROOT), self.order.registered)

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The simulation of one forward under this plan."""
        return Schedule(self.order, self._grouping, {g.modules: g.forward_prefetch for g in self.groups})

    @functools.cached_property
    def passes(self) -> list[Pass]:
        """The forward passes of groups with parameters, in the order in which they end."""
        holding = {g.modules for g in self.groups if g.params}
        return [p for p in self.schedule.passes if p.group in holding]

    @functools.cached_property
    def backward_events(self) -> list[BackwardEvent]:
        """What the hooks of FSDP2 see in a backward, in order."""
        return backward_events(self.order, self._grouping, self.passes)

    @functools.cached_property
    def gathers(self) -> tuple[list[tuple[Group, int]], list[tuple[Group, int]]]:
        """The all-gathers of a forward and its backward, in order: (group, step of the order that issues it).

        Groups without parameters are left out. For backward it is `BackwardEvent.at` in place of the step.
        """
        holding = {g.modules for g in self.groups if g.params}
        lists = ({g.modules: g.prefetch[i] for g in self.groups} for i in range(2))
        backward = backward_gathers(self.backward_events, self.passes, *lists)
        return [(g, at) for g, at in self.schedule.gathers if g in holding], backward

    @property
    def forward_gathers(self) -> list[Group]:
        """The groups in the order of a forward's all-gathers."""
        return [group for group, _ in self.gathers[0]]

    @property
    def backward_gathers(self) -> list[Group]:
        """The groups in the order of a backward's all-gathers."""
        return [group for group, _ in self.gathers[1]]

    def bucket_plan(self, order: Literal["execution", "registration"] = "execution") -> list[list[str]]:
        """The fqns of each group's modules, as `module_bucket_plans` of torch.compile's manual bucketing takes them.

        They are disjoint: a module with another group inside is replaced by its other children. Parameters directly in
        the root or in such a module are in no bucket. `order` is the order of the groups, and of the modules in each.
        """
        registered = {name: i for i, name in enumerate(self.order.registered.modules)}
        rank = first_call(self.order) if order == "execution" else registered
        parts = disjoint(self._grouping)
        buckets = [sorted(parts[g.modules], key=lambda name: (rank[name], registered[name])) for g in self.groups]
        return sorted(filter(None, buckets), key=lambda names: (rank[names[0]], registered[names[0]]))

    def apply(self, mesh: DeviceMesh | None = None, **fully_shard_kwargs: Any) -> torch.nn.Module:
        """Call `fully_shard` for each group, innermost first, and set the prefetch lists. Returns the model.

        Args:
            mesh: as for `torch.distributed.fsdp.fully_shard`, to which all other arguments are passed as they are.

        Every rank of the mesh must call it.

        Raises PlanError when the model's modules or parameters are no longer those of the plan, or are sharded already;
        OrderMismatchError on all ranks when two of them have different orders or different plans.
        """
        from torch.distributed.fsdp import fully_shard

        refuse_sharded(self.model)
        refuse_another_model(
            self.model, self.order, self.ignored, "the model has changed since the plan was made: plan again"
        )
        for group in [None] if mesh is None else mesh.get_all_groups():
            check_order(self.order, group)
            check_groups([(g.modules, g.params, g.prefetch) for g in self.groups], group)
        if self.ignored:
            fully_shard_kwargs["ignored_params"] = {self.model.get_parameter(name) for name in self.ignored}
        registered = self.order.registered
        depth = {g.modules: sum(contains(registered, m, g.modules[0]) for m in registered.modules) for g in self.groups}
        for entry in sorted(self.groups, key=lambda g: -depth[g.modules]):
            modules = [self.model.get_submodule(name) for name in entry.modules]
            fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh, **fully_shard_kwargs)
        for entry in self.groups:
            sharded: Any = self._module(entry.modules)
            if entry.forward_prefetch:
                sharded.set_modules_to_forward_prefetch([self._module(g) for g in entry.forward_prefetch])
            if entry.backward_prefetch:
                sharded.set_modules_to_backward_prefetch([self._module(g) for g in entry.backward_prefetch])
        return self.model

    def _module(self, group: Group) -> torch.nn.Module:
        return self.model.get_submodule(group[0])

    def __str__(self) -> str:
        numbers = {g.modules: str(i) for i, g in enumerate(self.groups)}
        rows = [("group", "modules", "parameters", "bytes", "forward prefetch", "backward prefetch")]
        for i, group in enumerate(self.groups):
            ahead, back = (" ".join(map(numbers.__getitem__, groups)) or "-" for groups in group.prefetch)
            rows.append((str(i), _text(group.modules), str(len(group.params)), amount(group.nbytes, "B"), ahead, back))
        lines = [
            f"all-gathers, {when}: {' '.join(numbers[group] for group, _ in gathers) or 'none'}"
            for when, gathers in zip(("forward", "backward"), self.gathers, strict=True)
        ]
        return "\n".join([columns(rows), "", *lines])

    def __repr__(self) -> str:
        return f"<Plan for {type(self.model).__name__}: {len(self.groups)} groups>"


def _text(group: Group) -> str:
    names = [name or "(root)" for name in group]
    return ", ".join(names if len(names) <= 4 else [*names[:2], f"… {len(names) - 3} more", names[-1]])


def order_of(model: torch.nn.Module, order: ExecutionOrder) -> ExecutionOrder:
    """The order of a model alone, where a function was traced that calls it, as a training step does.

    Raises PlanError for a function that calls it several times or uses its parameters itself, and for several
    backwards.
    """
    number = call_of(model, order)
    if number:
        _refuse_use_outside(order, number)
        order = order.of_call(number)
    if len(order.backwards) > 1:
        raise PlanError(f"the traced function differentiates {len(order.backwards)} times: trace one with one backward")
    return order


def call_of(model: torch.nn.Module, order: ExecutionOrder) -> int:
    """The index of the one call of a model; 0 where the model itself was traced, or another one. Raises PlanError."""
    names = _names(Model(model).registered())
    kind = type(model).__name__
    calls = [(i, call.fqn) for i, call in enumerate(order.calls) if call.fqn and call.type_name == kind]
    equal = [i for i, fqn in calls if _names(order.registered.within(fqn)) == names]
    if len(equal) > 1:
        raise PlanError(f"the traced function calls a {kind} like this one {len(equal)} times: trace one with one call")
    return equal[0] if equal and _names(order.registered) != names else 0


def _names(registered: Registered) -> list[list[tuple[str, ...]]]:
    return [[x.names for x in entries.values()] for entries in (registered.modules, registered.params)]


def _refuse_use_outside(order: ExecutionOrder, number: int) -> None:
    fqn = order.calls[number].fqn or ""
    params = order.registered.inside(fqn)
    inside = range(number, number + len(order.of_call(number).calls))
    for step in order.steps:
        used = [name for name in step.params if name in params]
        if used and step.call not in inside:
            raise PlanError(f"{used[0]} is used outside of the call of {fqn}, where it is not gathered: use it inside")


def refuse_sharded(model: torch.nn.Module) -> None:
    """Raise PlanError for a model of which a part is sharded already."""
    from torch.distributed.fsdp import FSDPModule

    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise PlanError(f"{name or 'the model'} is sharded already: plan, and apply once, before fully_shard")


def refuse_another_model(model: torch.nn.Module, order: ExecutionOrder, ignored: Sequence[str], what: str) -> None:
    """Raise PlanError for a model whose modules or parameters, ignored ones aside, are not those of an order."""
    current = Model(model).registered().without(ignored)
    for kind in ("module", "parameter"):
        attribute = "modules" if kind == "module" else "params"
        traced, present = getattr(order.registered, attribute), getattr(current, attribute)
        if [entry.names for entry in traced.values()] != [entry.names for entry in present.values()]:
            other = sorted(set(traced) ^ set(present))
            raise PlanError(f"{what} ({kind} {other[0]!r} is not in both)" if other else f"{what} ({kind}s differ)")
