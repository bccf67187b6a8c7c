"""`ExecutionOrder`: which modules run and which parameters their ops use, in order.

Data flow:
    CallUsage of each module call: the parameters that its ops use, the calls that it makes -> steps, depth first
    steps -> first and last uses, unused parameters, uses outside a parameter's module, text
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from scopetrace.formatting import Printed, columns
from scopetrace.ir.registered import Registered, inside


class ParamUsageInfo(NamedTuple):
    """Parameters that one op uses, or one module call."""

    module: str | None
    """The user: the module itself for one of its ops, or a module that it called, for all uses in that call."""
    params: tuple[str, ...]
    """Their fqns from the root, in the order of use."""


class ParamUse(NamedTuple):
    """One use of a parameter."""

    step: int
    """Index into `ExecutionOrder.steps`."""
    call: int
    """Index into `ExecutionOrder.calls`."""
    module: str | None
    """The fqn of that call's module."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallUsage:
    """One module call: the parameters that its ops use, and the calls that it makes."""

    fqn: str | None
    """The module's name, `""` for the root; None for a module outside the model's tree."""
    index: int
    """0 for the first call of this module, 1 for its second."""
    type_name: str
    parent: int | None
    """Index of the call that made this one; None for the root."""
    steps: tuple[tuple[str, ...] | int, ...] = ()
    """In order: the parameters that one op uses, or the index of a call that this one makes."""
    direct: bool = False
    """Whether `module.forward(...)` was called in place of the module, so that no hook ran."""
    raised: bool = False
    """Whether it ended with an exception, which an outer module caught."""
    param_arguments: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """The parameters among its arguments, which its caller has read."""
    replaced: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """The module's parameters that other tensors replaced, as in `torch.func.functional_call`."""
    in_op: bool = dataclasses.field(default=False, compare=False)
    """Whether it is a call in the body of a higher-order op (`torch.cond`)."""
    writes_input: bool = dataclasses.field(default=False, compare=False)
    """Whether it changes an argument in place that requires grad."""

    @property
    def hooked(self) -> bool:
        """Whether all hooks of the module run, before and after it."""
        return not (self.direct or self.raised or self.in_op)


class Step(NamedTuple):
    """One thing that happens: a call begins, a call ends, or an op uses parameters."""

    kind: str
    """`call`, `return` or `use`."""
    call: int
    params: tuple[str, ...] = ()


class GradientStep(NamedTuple):
    """One thing that happens to a module call while the forward differentiates."""

    kind: str
    """`result`: the gradient of one of its results is known. `arguments`: those of its arguments are.
    `again`: it runs again, in a region under `torch.utils.checkpoint`."""
    call: int
    """Index into `ExecutionOrder.calls`."""
    ops: int
    """How many ops of the traced program run before it."""


@dataclasses.dataclass(frozen=True)
class OrderDifference:
    """The first step in which two orders differ."""

    step: int
    here: str
    there: str
    after: str
    """The last step before it, which both orders have."""

    def __str__(self) -> str:
        return f"step {self.step}, after {self.after}: {self.here}, in the other {self.there}"


@dataclasses.dataclass(frozen=True, repr=False)
class ExecutionOrder(Printed):
    """In which order modules ran and parameters were used, by fqns from the root.

        tr.order.module_forward_order  # ["", "0", "1", "2"]

    Equal where calls and uses are equal. It is plain data: pickle it, hash it, compare it between ranks.
    """

    calls: tuple[CallUsage, ...]
    """Every module call in forward order, the root first."""
    registered: Registered = dataclasses.field(compare=False)
    """The model's modules and parameters in the order of registration, with all their names and sizes."""
    written_params: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """The parameters that the forward changes in place."""
    backwards: tuple[tuple[GradientStep, ...], ...] = dataclasses.field(default=(), compare=False)
    """For each `backward()` of a training step, what happens in it, in order."""

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """Begins and ends of calls and uses of parameters, in order."""
        return tuple(self._steps_of(0))

    def _steps_of(self, call: int) -> Iterator[Step]:
        yield Step("call", call)
        for step in self.calls[call].steps:
            if isinstance(step, int):
                yield from self._steps_of(step)
            else:
                yield Step("use", call, step)
        yield Step("return", call)

    # ---------------------------------------------------------------- orders

    @property
    def module_forward_order(self) -> list[str]:
        """The modules in the order in which their calls begin, with repeats, the root (`""`) first."""
        return [call.fqn for call in self.calls if call.fqn is not None]

    @functools.cached_property
    def param_forward_order(self) -> list[str]:
        """The parameters in the order of their first use. A shared one has the first of its names, and counts once."""
        return list(self.param_first_use)

    @functools.cached_property
    def param_first_use(self) -> dict[str, ParamUse]:
        """By used parameter, its first use; in the order of first uses."""
        first: dict[str, ParamUse] = {}
        for param, use in self._uses():
            first.setdefault(param, use)
        return first

    @functools.cached_property
    def param_last_use(self) -> dict[str, ParamUse]:
        """By used parameter, its last use, after which it can be freed; in the order of last uses."""
        last = dict(self._uses())
        return dict(sorted(last.items(), key=lambda item: item[1].step))

    def _uses(self) -> Iterator[tuple[str, ParamUse]]:
        for i, step in enumerate(self.steps):
            for param in step.params:
                yield param, ParamUse(i, step.call, self.calls[step.call].fqn)

    # ---------------------------------------------------------------- by module

    def param_usage_infos(self, call: int) -> list[ParamUsageInfo]:
        """The parameters that `calls[call]` used, in order: an entry for each op, and one for each call that it made.

        The entry of an op has the name of the call's own module; the entry of a call has the name of the called module
        and all parameters used in that call. Entries without parameters are left out.
        """
        steps = self.calls[call].steps
        users = [(step, self.used_in(step)) if isinstance(step, int) else (call, step) for step in steps]
        return [ParamUsageInfo(self.calls[user].fqn, params) for user, params in users if params]

    @functools.cached_property
    def module_to_param_usage_infos(self) -> dict[str, list[ParamUsageInfo]]:
        """By module, `param_usage_infos` of its calls in order, without those equal to that of an earlier call."""
        per_module: dict[str, dict[tuple[ParamUsageInfo, ...], None]] = {}
        for number, call in enumerate(self.calls):
            if call.fqn is not None:
                per_module.setdefault(call.fqn, {})[tuple(self.param_usage_infos(number))] = None
        return {fqn: list(itertools.chain.from_iterable(calls)) for fqn, calls in per_module.items()}

    def used_in(self, call: int) -> tuple[str, ...]:
        """The parameters used in a call and in the calls inside it, in the order of first use."""
        return self._used[call]

    @functools.cached_property
    def _used(self) -> list[tuple[str, ...]]:
        used: list[tuple[str, ...]] = [()] * len(self.calls)
        for number in reversed(range(len(self.calls))):  # a call comes before those that it makes
            steps = self.calls[number].steps
            parts = [used[step] if isinstance(step, int) else step for step in steps]
            used[number] = tuple(dict.fromkeys(param for part in parts for param in part))
        return used

    # ---------------------------------------------------------------- what is odd

    @property
    def unused_params(self) -> list[str]:
        """The parameters that no op uses, in the order of registration."""
        return [name for name in self.registered.params if name not in self.param_first_use]

    @property
    def uncalled_modules(self) -> list[str]:
        """The modules that are never called, in registration order; without those that have no forward."""
        called = {self.registered.module(c.fqn) for c in self.calls}
        return [name for name, m in self.registered.modules.items() if m.has_forward and name not in called]

    @property
    def shared_params(self) -> dict[str, tuple[str, ...]]:
        """By first name, all names of each parameter with several: tied weights."""
        return {first: p.names for first, p in self.registered.params.items() if len(p.names) > 1}

    @functools.cached_property
    def outside_uses(self) -> dict[str, list[ParamUse]]:
        """Uses of parameters by modules that do not hold them: `F.linear(x, self.child.weight)`."""
        uses: dict[str, list[ParamUse]] = {}
        for param, use in self._uses():
            if self.registered.module(use.module) not in map(self.registered.module, self.registered.owners(param)):
                uses.setdefault(param, []).append(use)
        return uses

    def without(self, params: Collection[str]) -> ExecutionOrder:
        """The order without these parameters."""

        def name(param: str) -> str | None:
            return None if param in params else param

        return dataclasses.replace(
            self,
            calls=tuple(_renamed(call, name) for call in self.calls),
            registered=self.registered.without(params),
            written_params=_names(self.written_params, name),
        )

    def of_call(self, number: int) -> ExecutionOrder:
        """The order in `calls[number]` alone, by names from its module, whose parameters alone count."""
        prefix = self.calls[number].fqn or ""
        registered = self.registered
        inner = [c.parent is not None and c.parent >= number for c in self.calls[number + 1 :]]
        stop = number + 1 + (inner.index(False) if False in inner else len(inner))

        def name(param: str) -> str | None:
            return next(inside(registered.params[param].names, prefix), None)

        def module(fqn: str | None) -> str | None:
            first = registered.module(fqn)
            return fqn if first is None else next(inside(registered.modules[first].names, prefix), None)

        calls = [_renamed(c, name, number, fqn=module(c.fqn)) for c in self.calls[number:stop]]
        inside_call = ([s for s in steps if number <= s.call < stop] for steps in self.backwards)
        backwards = tuple(tuple(s._replace(call=s.call - number) for s in steps) for steps in inside_call if steps)
        return ExecutionOrder(tuple(calls), registered.within(prefix), _names(self.written_params, name), backwards)

    # ---------------------------------------------------------------- comparison

    @functools.cached_property
    def digest(self) -> str:
        """A SHA-256 of all calls and uses, in hex; equal in every process and on every machine."""
        plain = [[c.fqn, c.index, c.type_name, c.parent, c.direct, c.raised, c.steps] for c in self.calls]
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()

    def __hash__(self) -> int:
        return int(self.digest[:15], 16)

    def first_difference(self, other: ExecutionOrder) -> OrderDifference | None:
        """The first step in which two orders differ; None where they are equal."""
        after = "the start"
        lines = itertools.zip_longest(map(self._line, self.steps), map(other._line, other.steps), fillvalue="the end")
        for i, (here, there) in enumerate(lines):
            if here != there:
                return OrderDifference(i, here, there, after)
            after = here
        return None

    def _line(self, step: Step) -> str:
        call = self.calls[step.call]
        who = f"{call.type_name}[{call.fqn}]" if call.fqn else call.type_name
        if step.kind == "use":
            return f"{who} uses {', '.join(step.params)}"
        how = f"{who}.forward" if call.direct else who
        end = ", raised" if step.kind == "return" and call.raised else ""
        return f"{step.kind} of {how}{end}"

    def __str__(self) -> str:
        """A table of the parameters in the order of first use, with their place in the order of registration.

        Below it: tied weights, uses outside a parameter's module, unused parameters, modules that are never called.
        """
        known = {name: i for i, name in enumerate(self.registered.params)}
        rows = [("order", "registered", "parameter", "shape", "first used by", "last used by")]
        for i, (name, first) in enumerate(self.param_first_use.items()):
            shape = "x".join(map(str, self.registered.params[name].shape)) or "scalar"
            users = _by(self, first), _by(self, self.param_last_use[name])
            rows.append((str(i), str(known[name]), name, shape, *users))
        total = f"{len(self.calls)} module calls, {len(rows) - 1} of {len(known)} parameters used"
        outside = [
            f"{name} by {', '.join(dict.fromkeys(_by(self, use) for use in uses))}"
            for name, uses in self.outside_uses.items()
        ]
        lines = {
            "shared": [" = ".join(names) for names in self.shared_params.values()],
            "used outside their module": outside,
            "never used": _folded(self.unused_params),
            "never called": _folded(self.uncalled_modules),
        }
        odd = [f"{what}: {'; '.join(texts)}" for what, texts in lines.items() if texts]
        return "\n".join([columns(rows), "", total, *odd])

    def __repr__(self) -> str:
        root = self.calls[0].type_name
        return f"<ExecutionOrder of {root}: {len(self.calls)} calls, {len(self.param_first_use)} parameters used>"


class OrderBuilder:
    """An ExecutionOrder in the making: calls are begun, and steps added to them, in the order in which they run."""

    def __init__(self, registered: Registered) -> None:
        self.registered = registered
        self.calls: list[CallUsage] = []
        self.steps: list[list[tuple[str, ...] | int]] = []
        """For each call, its steps."""
        self._counts: collections.Counter[Hashable] = collections.Counter()

    def begin(self, module: Hashable, call: CallUsage) -> int:
        """Add a call, whose index is set here; returns its number. `module` is equal for calls of one module."""
        self.calls.append(dataclasses.replace(call, index=self._counts[module]))
        self._counts[module] += 1
        self.steps.append([])
        number = len(self.steps) - 1
        if call.parent is not None:
            self.steps[call.parent].append(number)
        return number

    def order(
        self, written_params: tuple[str, ...] = (), backwards: tuple[tuple[GradientStep, ...], ...] = ()
    ) -> ExecutionOrder:
        """The order of all calls and steps so far."""
        calls = zip(self.calls, self.steps, strict=True)
        usages = tuple(dataclasses.replace(call, steps=tuple(steps)) for call, steps in calls)
        return ExecutionOrder(usages, self.registered, written_params, backwards)


def _names(params: Iterable[str], name: Callable[[str], str | None]) -> tuple[str, ...]:
    return tuple(new for new in map(name, params) if new is not None)


def _renamed(call: CallUsage, name: Callable[[str], str | None], first: int = 0, **changed: Any) -> CallUsage:
    """A call with other names of parameters, without those that have none, where the call `first` is the root."""
    steps = (step - first if isinstance(step, int) else _names(step, name) for step in call.steps)
    return dataclasses.replace(
        call,
        parent=None if call.parent is None or call.parent < first else call.parent - first,
        steps=tuple(step for step in steps if step != ()),
        param_arguments=_names(call.param_arguments, name),
        replaced=_names(call.replaced, name),
        **changed,
    )


def _by(order: ExecutionOrder, use: ParamUse) -> str:
    index = order.calls[use.call].index
    name = "(root)" if use.module == "" else use.module or "(outside)"
    return f"{name}#{index}" if index else name


def _folded(names: list[str]) -> list[str]:
    """Names that differ in numbers only, as one: `layers.*.norm (12 times)`."""
    by_pattern: dict[str, list[str]] = {}
    for name in names:
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        by_pattern.setdefault(pattern, []).append(name)
    return [f"{key} ({len(same)} times)" if len(same) > 1 else same[0] for key, same in by_pattern.items()]
