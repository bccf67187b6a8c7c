"""`plan`: from a model and its execution order to a Plan; the data flow is described in plan.py."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Iterable, Sequence

import torch
from torch.utils import _pytree as pytree

from scopetrace.distributed.groups import (
    ROOT,
    Classes,
    Group,
    Grouping,
    by_bytes,
    by_classes,
    first_call,
    read_classes,
    without_ties,
)
from scopetrace.distributed.plan import Plan, ShardGroup, order_of, refuse_another_model, refuse_sharded
from scopetrace.distributed.schedule import Pass, Schedule, backward_events
from scopetrace.errors import PlanError
from scopetrace.order.execution import ExecutionOrder


def plan(
    model: torch.nn.Module,
    order: ExecutionOrder,
    *,
    target_bytes: int | None = None,
    classes: Classes | None = None,
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
        classes: one or several module classes: make a group of each of their modules, and groups of the modules that
            run between these (embeddings, norms, heads).
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
    refuse_sharded(model)
    ids = {id(p) for p in ignored_params}
    ignored = tuple(name for name, p in model.named_parameters() if id(p) in ids)
    order = order_of(model, order).without(ignored)
    refuse_another_model(model, order, ignored, "the order is of another model: trace this one")
    _refuse_params(model, order)
    if target_bytes is not None:
        grouping = by_bytes(order, target_bytes)
    else:
        grouping = by_classes(order, _chosen(model, classes or ()))
    groups = _groups(model, order, _joined(order, grouping), prefetch)
    _refuse_dtypes(model, groups)
    return Plan(groups, order, model, ignored)


def _chosen(model: torch.nn.Module, classes: Classes) -> set[str]:
    kinds = read_classes(classes)
    for kind in kinds:
        if not any(isinstance(module, kind) for module in model.modules()):
            present = sorted({type(module).__name__ for module in model.modules()})
            raise PlanError(f"no module of the model is a {kind.__name__}; there are: {', '.join(present)}")
    return {name for name, module in model.named_modules() if name and isinstance(module, kinds)}


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
        kept = [(attribute, known[id(t)]) for attribute, t in _held_plainly(module) if id(t) in known]
        for attribute, name in kept:
            raise PlanError(
                f"{type(module).__name__} {fqn or '(root)'} keeps {name} in its attribute {attribute!r} too; FSDP2 "
                "puts a sharded parameter in its place, and what is kept there would stay as it is: keep the module "
                "that has it, or its name"
            )


def _held_plainly(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """(attribute name, tensor) for tensors in plain attributes, neither parameters nor buffers."""
    for attribute, value in vars(module).items():
        # nn.RNNBase renews its list when a parameter is set
        is_renewed = attribute == "_flat_weights" and isinstance(module, torch.nn.RNNBase)
        if attribute not in ("_parameters", "_buffers", "_modules") and not is_renewed:
            yield from ((attribute, leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


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
    begun = [e for e in backward_events(order, grouping, schedule.passes) if e.kind == "result"]
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
