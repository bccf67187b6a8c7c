"""FSDP2 from an execution order: groups, prefetch lists and bucket plans.

Data flow:
    model and order -> groups of modules (groups.py)
    groups -> simulated as FSDP2 runs them (schedule.py); a use of a freed parameter merges groups, or is refused
    groups in execution order -> prefetch lists for forward and backward -> Plan, which applies them
    orders and plans of all ranks -> compared: where two differ, collectives do not match, and the job would hang
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from scopetrace.distributed.groups import (
    ROOT,
    Group,
    Grouping,
    by_bytes,
    by_classes,
    contains,
    disjoint,
    first_call,
    without_ties,
)
from scopetrace.distributed.schedule import Event, Pass, Schedule, backward_events, gradients
from scopetrace.errors import OrderMismatchError, PlanError
from scopetrace.formatting import Printed, amount, columns
from scopetrace.ir.guards import MODULE_TABLES
from scopetrace.ir.registered import Registered
from scopetrace.ir.scopes import Scope
from scopetrace.ir.selection import Candidate, Selection, is_named, near_text, several, target_text
from scopetrace.order.execution import ExecutionOrder
from scopetrace.record.model import Model, lists_weights

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
    def events(self) -> tuple[list[Event], list[Event]]:
        """What happens to groups with parameters in a forward and in its backward, in order."""
        holding = {g.modules for g in self.groups if g.params}
        forward, backward = ({g.modules: g.prefetch[i] for g in self.groups} for i in range(2))
        schedule = Schedule(self.order, self._grouping, forward)
        passes = [p for p in schedule.passes if p.group in holding]
        hooks = gradients(self.order, self._grouping, passes)
        ahead = [e for e in schedule.events if e.group in holding]
        return ahead, list(backward_events(hooks, passes, forward, backward))

    @property
    def forward_gathers(self) -> list[Group]:
        """The groups in the order of a forward's all-gathers."""
        return [e.group for e in self.events[0] if e.kind == "all-gather"]

    @property
    def backward_gathers(self) -> list[Group]:
        """The groups in the order of a backward's all-gathers."""
        return [e.group for e in self.events[1] if e.kind == "all-gather"]

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

        _refuse_sharded(self.model)
        _refuse_another_model(
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
            f"all-gathers, {when}: {' '.join(map(numbers.__getitem__, gathers)) or 'none'}"
            for when, gathers in (("forward", self.forward_gathers), ("backward", self.backward_gathers))
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
        fqn, inner = order.calls[number].fqn or "", order.of_call(number)
        params, inside = order.registered.inside(fqn), range(number, number + len(inner.calls))
        for step in [step for step in order.steps if step.call not in inside]:
            for name in [name for name in step.params if name in params]:
                raise PlanError(f"{name} is used outside of the call of {fqn}, where it is not gathered: use it inside")
        order = inner
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


def _refuse_sharded(model: torch.nn.Module) -> None:
    """Raise PlanError for a model of which a part is sharded already."""
    from torch.distributed.fsdp import FSDPModule

    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise PlanError(f"{name or 'the model'} is sharded already: plan, and apply once, before fully_shard")


def _refuse_another_model(model: torch.nn.Module, order: ExecutionOrder, ignored: Sequence[str], what: str) -> None:
    """Raise PlanError for a model whose modules or parameters, ignored ones aside, are not those of an order."""
    current = Model(model).registered().without(ignored)
    for kind in ("module", "parameter"):
        attribute = "modules" if kind == "module" else "params"
        traced, present = getattr(order.registered, attribute), getattr(current, attribute)
        if [entry.names for entry in traced.values()] != [entry.names for entry in present.values()]:
            other = sorted(set(traced) ^ set(present))
            raise PlanError(f"{what} ({kind} {other[0]!r} is not in both)" if other else f"{what} ({kind}s differ)")


# ---------------------------------------------------------------- the making of a plan


def plan(
    model: torch.nn.Module,
    order: ExecutionOrder,
    *,
    target_bytes: int | None = None,
    classes: Selection | None = None,
    prefetch: int = 1,
    ignored_params: Collection[torch.nn.Parameter] = (),
) -> Plan:
    """Groups and prefetch lists for `torch.distributed.fsdp.fully_shard`, from the order in which the model runs.

    Tied weights are put in one group, and so are a module and another one that uses its parameters without calling it.
    A group that runs several times prefetches only groups that follow it every time; else FSDP2's own prefetch remains.

    Args:
        model: the model, not sharded yet; on the meta device too.
        order: `trace(model, …).order`, of a forward as in training; or that of a training step, a function that calls
            the model and `backward()`, whose real backward takes the place of the forward in reverse.
        target_bytes: make groups of about this many bytes of parameters, of modules that run one after the other.
        classes: one or several classes, modules, or patterns of their names, as `"layers.*"`: make a group of each of
            these modules, and groups of the modules that run between them (embeddings, norms, heads).
        prefetch: how many groups ahead to gather; 0 leaves prefetching to FSDP2.
        ignored_params: as for `fully_shard`: parameters that are not sharded, and whose gradients are not reduced.

    Raises PlanError for a plan that would fail when it runs: another model's order, classes without modules or without
    a forward, parameters that FSDP2 cannot shard, or that the forward changes in place; a training step that calls the
    model or `backward()` several times, or a group of which backward does not go through the last module.
    """
    if not isinstance(order, ExecutionOrder):
        raise PlanError(f"order must be the order of a trace, trace(model, ...).order, not {type(order).__name__}")
    if (target_bytes is None) == (classes is None):
        raise PlanError("give one of target_bytes= and classes=")
    if prefetch < 0:
        raise PlanError(f"prefetch={prefetch} must not be negative")
    if target_bytes is not None and target_bytes <= 0:
        raise PlanError(f"target_bytes={target_bytes} must be positive")
    _refuse_sharded(model)
    ids = {id(p) for p in ignored_params}
    ignored = tuple(name for name, p in model.named_parameters() if id(p) in ids)
    order = order_of(model, order).without(ignored)
    _refuse_another_model(model, order, ignored, "the order is of another model: trace this one")
    _refuse_params(model, order)
    grouping = by_classes(order, _chosen(model, classes)) if target_bytes is None else by_bytes(order, target_bytes)
    groups = _groups(model, order, _joined(order, grouping), prefetch)
    _refuse_dtypes(model, groups)
    return Plan(groups, order, model, ignored)


def _chosen(model: torch.nn.Module, selection: Any) -> list[str]:
    inner = {name: module for name, module in model.named_modules() if name}
    modules = [Candidate(m, type(m), name, Scope(name, type(m).__name__)) for name, m in inner.items()]
    for target in several(selection):
        if not any(is_named(module, target) for module in modules):
            near = near_text(target, inner, [type(m).__name__ for m in inner.values()])
            raise PlanError(f"no module of the model is {target_text(target)}; {near}")
    return [str(module.fqn) for module in modules if is_named(module, selection)]


def _refuse_params(model: torch.nn.Module, order: ExecutionOrder) -> None:
    if order.written_params:
        raise PlanError(
            f"the forward changes {', '.join(order.written_params)} in place; FSDP2 frees what it gathered, and the "
            "change with it: change parameters outside the forward, or make them buffers"
        )
    sharded = {name: p for name, p in model.named_parameters() if name in order.registered.params}
    for name, param in sharded.items():
        if not param.dim():
            raise PlanError(f"FSDP2 does not shard scalars: give {name} the shape (1,), or name it in ignored_params=")
        if not param.is_contiguous():
            raise PlanError(f"FSDP2 shards contiguous parameters only: {name} has the strides {param.stride()}")
        if not param.numel() and param.requires_grad:
            raise PlanError(f"FSDP2 reduces no empty gradients: name {name}, {tuple(param.shape)}, in ignored_params=")
    known = {id(param): name for name, param in sharded.items()}
    for fqn, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(id(p) in known for p in module.parameters()):
            raise PlanError(f"FSDP2 sets no hooks on scripted modules: {fqn!r} is one; script nothing that is sharded")
        plain = [(a, x) for a, x in vars(module).items() if not (a in MODULE_TABLES or lists_weights(module, a))]
        held = [(attribute, known.get(id(t))) for attribute, x in plain for t in pytree.tree_leaves(x)]
        for attribute, name in [(attribute, name) for attribute, name in held if name is not None]:
            raise PlanError(
                f"{type(module).__name__} {fqn or '(root)'} keeps {name} in its attribute {attribute!r} too; FSDP2 "
                "puts a sharded parameter in its place, and what is kept there would stay as it is: keep the module "
                "that has it, or its name"
            )


def _refuse_dtypes(model: torch.nn.Module, groups: Iterable[ShardGroup]) -> None:
    """Raise PlanError for a group with several dtypes: FSDP2 reduces its gradients as one tensor."""
    for group in groups:
        first: dict[torch.dtype, str] = {}
        for name in group.params:
            param = model.get_parameter(name)
            if param.requires_grad:
                first.setdefault(param.dtype, name)
        if len(first) > 1:
            dtypes = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in first.items())
            raise PlanError(
                f"FSDP2 shards parameters of one dtype together, but in the group of {group.modules[0] or 'the root'} "
                f"{dtypes}: name the class of the modules that differ in classes= too, or the parameters in "
                "ignored_params="
            )


def _joined(order: ExecutionOrder, grouping: Grouping) -> Grouping:
    """The grouping with groups merged whose parameters must be gathered together."""
    grouping = without_ties(grouping)
    while (missing := Schedule(order, grouping, {}).missing) is not None:
        grouping = without_ties(grouping.merged(*missing))
    first = first_call(order)
    return Grouping(tuple(tuple(sorted(g, key=first.__getitem__)) for g in grouping.groups), order.registered)


def _groups(model: torch.nn.Module, order: ExecutionOrder, grouping: Grouping, prefetch: int) -> tuple[ShardGroup, ...]:
    params = _payload(model, grouping)
    schedule = Schedule(order, grouping, {})
    by_start = [p.group for p in sorted(schedule.passes, key=lambda p: p.start) if params[p.group] or p.group == ROOT]
    begun = [e for e in gradients(order, grouping, schedule.passes) if e.kind == "result"]
    _refuse_ungathered(order, grouping, [p for i, p in enumerate(schedule.passes) if all(e.number != i for e in begun)])
    begun = [e for i, e in enumerate(begun) if i == 0 or e.number != begun[i - 1].number]
    by_gradient = [e.group for e in begun if params[e.group] or e.group == ROOT]
    forward, backward = (followers(sequence, prefetch) for sequence in (by_start, by_gradient))
    # FSDP2 goes through the list at each gradient of a result. Those of the root's may come early and late: in between,
    # what it gathered was used and freed, and would be gathered again for nothing.
    numbers = collections.Counter(e.number for e in begun)
    for group in {ROOT, *(e.group for e in begun if numbers[e.number] > 1)}:
        backward.pop(group, None)
    used = order.param_forward_order
    return tuple(
        ShardGroup(
            group,
            tuple(params[group]),
            tuple(name for name in used if name in set(params[group])),
            sum(order.registered.params[name].nbytes for name in params[group]),
            forward.get(group, ()),
            backward.get(group, ()),
        )
        for group in dict.fromkeys([ROOT, *by_start, *grouping.groups])
    )


def _refuse_ungathered(order: ExecutionOrder, grouping: Grouping, passes: Sequence[Pass]) -> None:
    """Raise PlanError where backward goes through a module in one of these passes, whose group it does not gather."""
    group_of = grouping.group_of()
    begins = {step.call: at for at, step in enumerate(order.steps) if step.kind == "call"}
    for call in (step.call for steps in order.backwards for step in steps if step.kind == "result"):
        module = order.registered.module(order.calls[call].fqn)
        for p in passes:
            if p.group == group_of.get(module) != ROOT and p.start <= begins[call] <= p.stop:
                raise PlanError(
                    f"backward goes through {module} and not through the last of its group {', '.join(p.group)}, at "
                    "whose results FSDP2 gathers it: give other classes= or target_bytes=, with groups that end there"
                )


def followers(sequence: Sequence[Group], count: int) -> dict[Group, tuple[Group, ...]]:
    """For each group, the next `count` groups; none where they differ from run to run."""
    runs: dict[Group, set[tuple[Group, ...]]] = {}
    for i, group in enumerate(sequence):
        ahead: dict[Group, None] = {}
        for other in sequence[i + 1 :]:
            if len(ahead) == count or other == group:
                break
            if other != ROOT:
                ahead[other] = None
        runs.setdefault(group, set()).add(tuple(ahead))
    return {group: next(iter(lists)) for group, lists in runs.items() if len(lists) == 1}


def _payload(model: torch.nn.Module, grouping: Grouping) -> dict[Group, list[str]]:
    """By group, its parameters in FSDP2's order: children before parents, else as registered."""
    names = {id(p): name for name, p in model.named_parameters()}
    params: dict[Group, dict[str, None]] = {group: {} for group in grouping.groups}
    visited: set[int] = set()

    def visit(module: torch.nn.Module) -> None:
        if id(module) in visited:
            return
        visited.add(id(module))
        for child in module.children():
            visit(child)
        for name in (names[id(p)] for p in module.parameters(recurse=False)):
            if name in grouping.registered.params:
                params[grouping.managers(name)[0]][name] = None

    for name in itertools.chain.from_iterable(grouping.groups):
        visit(model.get_submodule(name))
    return {group: list(names) for group, names in params.items()}


# ---------------------------------------------------------------- equal on all ranks


def check_order(order: ExecutionOrder, group: Any = None) -> None:
    """Compare the orders of all ranks of a process group. Every rank must call it.

    Args:
        order: this rank's order.
        group: a `torch.distributed` process group; None for the default one.

    Raises OrderMismatchError, on every rank, that names the first rank whose order differs from rank 0's and the step
    in which it does.
    """
    digests = _of_all_ranks(order.digest, group)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        orders = _of_all_ranks(order, group)
        difference = orders[0].first_difference(orders[other])
        raise OrderMismatchError(f"ranks 0 and {other} run in different orders: {difference}")


def check_groups(groups: Sequence[Any], group: Any = None) -> None:
    """Compare the groups of a plan on all ranks: modules, parameters and prefetch lists. As `check_order` otherwise."""
    plans = _of_all_ranks(list(groups), group)
    for rank, other in enumerate(plans):
        for i, pair in enumerate(itertools.zip_longest(plans[0], other)):
            if pair[0] != pair[1]:
                first, second = (", ".join(x[0]) or "the root's" if x else "missing" for x in pair)
                raise OrderMismatchError(
                    f"ranks 0 and {rank} have different plans: group {i} is {first}, in the other {second}"
                    + (" with other parameters or prefetch lists" if first == second else "")
                )


def _of_all_ranks(x: Any, group: Any) -> list[Any]:
    objects = [None] * dist.get_world_size(group)
    dist.all_gather_object(objects, x, group)
    return objects
