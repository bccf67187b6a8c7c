"""An independent recording of a model's module calls, and its comparison with `tr.calls`.

One eager run with `torch.nn.Module._call_impl` patched on the class. Nothing of scopetrace is used for it.
"""

import contextlib
import dataclasses
import functools
import inspect
import unittest.mock
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx

from benchmarks.structure import Shape, describe, differences, raw_tensors

Fingerprint = torch.Tensor | None
"""A few numbers that change when a tensor's values do; None where they cannot be read."""


@dataclasses.dataclass(slots=True)
class SeenCall:
    """One call of a module, as eager Python made it."""

    names: frozenset[str]
    """Every name of the module in the model; empty for a module outside of it."""
    index: int
    """How often this instance was called before."""
    module: torch.nn.Module
    parent: int | None
    """Position of the enclosing call."""
    arguments: dict[str, Shape] | None = None
    """By parameter name of `forward`; None if `forward` has no signature that takes them."""
    outputs: Shape | None = None
    """None if the call raised."""
    values: list[Fingerprint] = dataclasses.field(default_factory=list)
    """Of the tensors in the arguments, then in the outputs."""


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Mean, mean of absolutes and up to 32 elements, as float64."""
    try:
        flat = tensor.detach().reshape(-1)
        if not flat.numel():
            return flat.new_zeros(0, dtype=torch.float64)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        some = flat[:: max(1, flat.numel() // 32)][:32].to(torch.float64)
        whole = flat.to(torch.float64)
        return torch.cat([whole.mean()[None], whole.abs().mean()[None], some])
    except (RuntimeError, NotImplementedError):
        return None


@contextlib.contextmanager
def exporting_flags(on: bool = True) -> Iterator[None]:
    """`torch.compiler.is_compiling()` and `is_exporting()` as a trace sets them: models take other paths then."""
    old = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = on
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = old


class _Recorder:
    """Appends a SeenCall at each entry of a module, so the list is in forward order."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.calls: list[SeenCall] = []
        self.stack: list[int] = []
        self.counts: Counter[int] = Counter()
        names: dict[int, set[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            names.setdefault(id(module), set()).add(name)
        self.names = {key: frozenset(value) for key, value in names.items()}

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SeenCall:
        parent = self.stack[-1] if self.stack else None
        call = SeenCall(self.names.get(id(module), frozenset()), self.counts[id(module)], module, parent)
        self.counts[id(module)] += 1
        self.stack.append(len(self.calls))
        self.calls.append(call)
        tensors: list[torch.Tensor] = []
        bound = bind(module, args, kwargs)
        if bound is not None:
            call.arguments = {name: describe(value, tensors) for name, value in bound.items()}
        call.values = [fingerprint(t) for t in tensors]
        return call

    def leave(self, call: SeenCall, result: Any) -> None:
        tensors: list[torch.Tensor] = []
        call.outputs = describe(result, tensors)
        call.values += [fingerprint(t) for t in tensors]


def bind(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call under the names of `forward`'s parameters, defaults applied."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    bound.apply_defaults()
    return dict(bound.arguments)


def record_calls(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[SeenCall]:
    """Run `model` eagerly and return every module call, in forward order."""
    recorder = _Recorder(model)
    original = torch.nn.Module._call_impl

    def call_impl(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = recorder.enter(self, args, kwargs)
        try:
            result = original(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            recorder.stack.pop()
        recorder.leave(call, result)
        return result

    torch.nn.Module._call_impl = call_impl  # type: ignore[method-assign]
    try:
        model(*args, **kwargs)
    finally:
        torch.nn.Module._call_impl = original  # type: ignore[method-assign]
    return recorder.calls


@dataclasses.dataclass(slots=True)
class Match:
    """The calls that eager made beside those of the trace."""

    pairs: list[tuple[SeenCall, Any]]
    extra: list[Any]
    """Calls of the trace that `_call_impl` never saw: right only where a model calls `module.forward` itself."""
    problem: str | None = None


def match_calls(seen: Sequence[SeenCall], got: Sequence[Any]) -> Match:
    """Put every call of eager beside one of the trace, in order, by module."""
    match, rest = Match([], []), iter(got)
    for a in seen:
        for b in rest:
            if _same_module(a, b):
                match.pairs.append((a, b))
                break
            match.extra.append(b)
    match.extra += rest
    if len(match.pairs) < len(seen):
        match.problem = _order_difference(seen, got)
    return match


def _same_module(a: SeenCall, b: Any) -> bool:
    """By identity; a module outside the model is made anew in each run, so by its class."""
    return b.module is a.module if a.names else b.fqn is None and b.module_type is type(a.module)


def _order_difference(seen: Sequence[SeenCall], got: Sequence[Any]) -> str:
    total = f"({len(seen)} and {len(got)} calls)"
    for i, (a, b) in enumerate(zip(seen, got, strict=False)):
        if not _same_module(a, b):
            return f"order: call {i} is {_label(a)} in eager, {b.fqn!r}#{b.index} in the trace {total}"
    return f"number: eager's {_label(seen[len(got)])} is missing in the trace {total}"


def compare_calls(match: Match, got: Sequence[Any]) -> list[str]:
    """Every way in which matched calls differ; empty if they agree."""
    found = [match.problem] if match.problem else []
    found += _index_differences(got)
    extra = {id(call) for call in match.extra}
    positions = {id(b): i for i, (_, b) in enumerate(match.pairs)}
    for a, b in match.pairs if not match.problem else ():
        found += _parent_differences(a, b, positions, extra)
        found += [f"{b.fqn or '<root>'}#{b.index} {line}" for line in _call_differences(a, b)]
    return found


def _parent_differences(a: SeenCall, b: Any, positions: dict[int, int], extra: set[int]) -> Iterator[str]:
    parent = b.parent
    while parent is not None and id(parent) in extra:
        parent = parent.parent
    position = None if parent is None else positions.get(id(parent), -1)
    if position != a.parent:
        yield f"{b.fqn or '<root>'}#{b.index} parent: call {a.parent} in eager, {position} in the trace"


def _index_differences(got: Sequence[Any]) -> Iterator[str]:
    counts: Counter[int] = Counter()
    for call in got:
        if call.index != counts[id(call.module)]:
            yield f"{call.fqn or '<root>'}: index {call.index} for call {counts[id(call.module)]} of this module"
        counts[id(call.module)] += 1


def forward_runs(
    model: torch.nn.Module, modules: Sequence[torch.nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Counter[int]:
    """How often `forward` of these modules runs in an eager run, by whichever way it is called; by id."""
    counts: Counter[int] = Counter()

    def counting(original: Any) -> Any:
        @functools.wraps(original)
        def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            counts[id(self)] += 1
            return original(self, *args, **kwargs)

        return forward

    with contextlib.ExitStack() as stack:
        for cls in {type(module) for module in modules}:
            stack.enter_context(unittest.mock.patch.object(cls, "forward", counting(cls.forward)))
        model(*args, **kwargs)
    return counts


def unproven_extras(match: Match, got: Sequence[Any], runs: Counter[int]) -> list[str]:
    """Calls of the trace that neither `_call_impl` nor a run of `forward` accounts for."""
    traced = Counter(id(call.module) for call in got)
    extra = {id(call.module): call for call in match.extra}
    return [
        f"{call.fqn}: {traced[key]} calls in the trace, forward ran {runs[key]} times"
        for key, call in extra.items()
        if traced[key] != runs[key]
    ]


def _label(call: SeenCall) -> str:
    return f"{min(call.names) if call.names else '<outside>'!r} {type(call.module).__name__}#{call.index}"


def _call_differences(a: SeenCall, b: Any) -> Iterator[str]:
    if a.names and b.fqn not in a.names:
        yield f"fqn: eager {sorted(a.names)}"
    if b.module_type is not type(a.module):
        yield f"type: eager {type(a.module)}, trace {b.module_type}"
    if a.arguments is not None:
        yield from _argument_differences(a.arguments, b.arguments)
    if a.outputs is not None:
        if raw_tensors(b.outputs):
            yield "outputs hold a tensor that is no node"
        yield from differences(a.outputs, describe(b.outputs), "outputs")


def _argument_differences(seen: dict[str, Shape], got: dict[str, Any]) -> Iterator[str]:
    if list(seen) != list(got):
        yield f"arguments: eager {list(seen)}, trace {list(got)}"
        return
    for name, value in got.items():
        if raw_tensors(value):
            yield f"argument {name} holds a tensor that is no node"
        yield from differences(seen[name], describe(value), f"argument {name}")


class _Values(torch.fx.Interpreter):
    """Runs the graph and keeps the fingerprint of the nodes asked for."""

    def __init__(self, gm: torch.fx.GraphModule, wanted: set[str]) -> None:
        super().__init__(gm)
        self.wanted = wanted
        self.found: dict[str, Fingerprint] = {}
        self.storage: dict[str, int] = {}
        self.written: set[int] = set()

    def run_node(self, n: torch.fx.Node) -> Any:
        for arg in _written_arguments(n):
            self.written.add(_storage(self.env.get(arg)))
        result = super().run_node(n)
        if n.name in self.wanted and isinstance(result, torch.Tensor):
            self.found[n.name] = fingerprint(result)
            self.storage[n.name] = _storage(result)
        return result


def _storage(value: Any) -> int:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else 0


def _written_arguments(n: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The operands that the op of this node writes to, by its schema."""
    if not isinstance(n.target, torch._ops.OpOverload):
        return
    for i, arg in enumerate(n.target._schema.arguments):
        if arg.alias_info is None or not arg.alias_info.is_write:
            continue
        value = n.args[i] if i < len(n.args) else n.kwargs.get(arg.name)
        yield from (v for v in torch.fx.node.map_arg([value], lambda v: v) if isinstance(v, torch.fx.Node))


def compare_values(
    pairs: Sequence[tuple[SeenCall, Any]], gm: torch.fx.GraphModule, inputs: Sequence[Any]
) -> tuple[list[str], int, int]:
    """Run the graph and compare the value of every call's tensors with eager's.

    Returns what differs, how many values were compared and how many were not: a node that shares storage with
    one that the graph writes to has no single value, and neither has one whose call eager left by an exception.
    """
    nodes = [_nodes_of(call) for _, call in pairs]
    run = _Values(gm, {n.name for ns in nodes for n in ns})
    run.run(*inputs)
    found: list[str] = []
    compared = skipped = 0
    for (a, b), ns in zip(pairs, nodes, strict=True):
        for value, n in zip(a.values, ns, strict=False):
            mine = run.found.get(n.name)
            if value is None or mine is None or run.storage[n.name] in run.written:
                skipped += 1
                continue
            compared += 1
            if value.shape != mine.shape or not torch.allclose(value, mine, rtol=1e-3, atol=1e-4, equal_nan=True):
                found.append(f"{b.fqn or '<root>'}#{b.index}: node {n.name} has another value than eager's tensor")
    return found, compared, skipped


def _nodes_of(call: Any) -> list[torch.fx.Node]:
    nodes: list[torch.fx.Node] = []
    for value in call.arguments.values():
        describe(value, nodes)
    describe(call.outputs, nodes)
    return nodes
