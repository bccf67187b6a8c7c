"""Graphs whose nodes know their modules: of torch.export, of Dynamo, of `symbolic_trace`, or of a trace.

Data flow:
    `nn_module_stack` of the nodes -> `NodeRange`s: consecutive nodes that were one call of a module
    what the nodes of a range read from before it, and later ones of it -> arguments and results of the call, in the
    order of `module_call_graph` where that has them
    node.meta of a node -> stack trace and `Op.meta` of the ops that it runs
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import itertools
import operator
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.fx
from torch.utils import _pytree as pytree

from scopetrace._compat.export import is_guard
from scopetrace._compat.tensors import FakeTensor
from scopetrace.containers.classes import class_of_name
from scopetrace.containers.structure import leaves
from scopetrace.ir.scopes import Scope
from scopetrace.ir.tape import GIVEN_META, signature_of
from scopetrace.record.builder import TapeBuilder

_hops = torch.ops.higher_order

MODULE_CALLS = "module_call_graph"
"""The key in the `meta` of a GraphModule of that of its ExportedProgram."""


class Entry(NamedTuple):
    """One of an `nn_module_stack`."""

    key: str
    """That of the call: `@1` is at the end of the second one."""
    fqn: str
    kind: type | str
    """The module's class, or its name."""

    @property
    def called(self) -> str:
        """The name in `module_call_graph`."""
        return self.fqn + "".join(self.key.rpartition("@")[1:]) if "@" in self.key else self.fqn


@dataclasses.dataclass(eq=False)
class NodeRange:
    """Consecutive nodes that were one call of a module, or those of the whole graph."""

    entry: Entry
    start: int
    """The position of its first node."""
    stop: int
    inner: list[NodeRange] = dataclasses.field(default_factory=list)


class NodeRunner(torch.fx.Interpreter):
    """Runs a graph; the ops of each node have its place, in the calls that its nodes were."""

    def __init__(self, gm: torch.fx.GraphModule, builder: TapeBuilder) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.extra_traceback = False
        self.builder = builder
        self._nodes = list(self.graph.nodes)
        self._position = {n: i for i, n in enumerate(self._nodes)}
        self._by_name = {n.name: n for n in self._nodes}
        self._kept = {entry.fqn: entry.signature for entry in gm.meta.get(MODULE_CALLS, ())}
        self._times = collections.Counter[Entry]()
        self._results: dict[Any, set[int]] = {}
        """Of calls of a class with equal targets, the positions in them of the nodes of which one is read outside."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the GraphModule returns for these arguments."""
        bound = inspect.signature(self.module.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        return self.run(*bound.args, *bound.kwargs.values())

    def run(self, *args: Any, **_: Any) -> Any:
        """What the graph returns for the values of its placeholders."""
        self.args_iter = iter(self.graph.process_inputs(*args))
        self.env = {}
        around = self.builder.call.ancestors() if self.builder.call is not None else ()
        whole = _ranges(self._nodes, [call.fqn for call in around if call.fqn][::-1])
        self._times = collections.Counter(r.entry for r in _walk(whole))
        self._results = collections.defaultdict(set)
        for of in _walk(whole):
            nodes = self._computing(of)
            used = {i for i, n in enumerate(nodes) if any(self._position[user] >= of.stop for user in n.users)}
            self._results[_kind_of(of, nodes)] |= used
        self._run_range(whole)
        return self.graph.process_outputs(self.env[self._nodes[-1]])

    def _run_range(self, of: NodeRange) -> None:
        inner = {r.start: r for r in of.inner}
        i = of.start
        while i < of.stop:
            if i in inner:
                self._run_call(inner[i])
                i = inner[i].stop
            else:
                self.env[self._nodes[i]] = self.run_node(self._nodes[i])
                i += 1

    def run_node(self, n: torch.fx.Node) -> Any:
        """Its op is recorded at the stack trace of the node."""
        kept = {key: n.meta[key] for key in GIVEN_META if n.meta.get(key)}
        with self.builder.from_node(n.stack_trace, kept, self.scope_of_forward(n)):
            return super().run_node(n)

    def scope_of_forward(self, n: torch.fx.Node) -> Scope | None:
        """The scope of a node of backward, which is in no call: that of the op of the forward to which it belongs."""
        entries = [entry for entry in _entries(n, "fwd_nn_module_stack") if entry.fqn]
        if not entries or n.meta.get("nn_module_stack"):
            return None
        scope = self.builder.state.current_scope
        for outer, entry in zip(["", *(entry.fqn for entry in entries)], entries, strict=False):
            scope = scope.child(entry.fqn.removeprefix(f"{outer}."), class_of_text(entry.kind).__name__)
        return scope

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What a node that calls a module gives; the checks of an exported program are no module call."""
        module = self.fetch_attr(target)
        return module.forward(*args, **kwargs) if is_guard(module) else super().call_module(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What an op gives; that of a region without autograd asks for the mode to put it back, as a block does not."""
        if target is not _hops.wrap_with_set_grad_enabled:
            return super().call_function(target, args, kwargs)
        enabled, body, *operands = args
        with torch.set_grad_enabled(enabled):
            return body(*operands)

    # ---------------------------------------------------------------- calls

    def _run_call(self, of: NodeRange) -> None:
        nodes = self._computing(of)
        read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes)
        taken = [n for n in read if self._position[n] < of.start and not _is_state(n, self.env[n])]
        returned = [nodes[i] for i in sorted(self._results[_kind_of(of, nodes)])]
        signature = self._kept.get(of.entry.called) if self._times[of.entry] == 1 else None
        passed = None if signature is None else self._in_tree(signature.inputs, signature.in_spec)
        args, kwargs = passed or (tuple(self._tensors(taken)), {})

        def run() -> Any:
            self._run_range(of)
            tree = None if signature is None else self._in_tree(signature.outputs, signature.out_spec)
            if tree is not None:
                return tree
            results = self._tensors(returned)
            return results[0] if len(results) == 1 else tuple(results) or None

        self.builder.state.listener.on_nodes(of.entry.fqn, of.entry.kind, args, kwargs, passed is not None, run)

    def _computing(self, of: NodeRange) -> list[torch.fx.Node]:
        return [n for n in self._nodes[of.start : of.stop] if n.op != "get_attr"]

    def _tensors(self, nodes: Iterable[torch.fx.Node]) -> list[Any]:
        """What nodes give, where there are tensors in it."""
        return [x for x in map(self.env.__getitem__, nodes) if leaves(x, torch.Tensor)]

    def _in_tree(self, arguments: Sequence[Any], spec: pytree.TreeSpec) -> Any:
        """What a call takes or gives as torch.export has kept it; None where nodes of it are not there any more."""
        try:
            values = [x.value if hasattr(x, "value") else self.env[self._by_name[x.name]] for x in arguments]
        except KeyError:
            return None
        return pytree.tree_unflatten(values, spec)


def _is_state(n: torch.fx.Node, value: Any) -> bool:
    """Whether a node is a tensor of the model, which a region takes as an argument: no tensor of the run is real."""
    return n.op == "get_attr" or (isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor))


def _ranges(nodes: list[torch.fx.Node], around: list[str]) -> NodeRange:
    """The calls in a graph, which runs inside of modules of these names. A module entered again is another call."""
    whole = NodeRange(Entry("", "", ""), 0, len(nodes))
    running = [whole]
    for i, stack in enumerate(_stacks(nodes, around)):
        while [r.entry for r in running[1:]] != stack[: len(running) - 1]:
            running.pop().stop = i
        for entry in stack[len(running) - 1 :]:
            running.append(NodeRange(entry, i, len(nodes)))
            running[-2].inner.append(running[-1])
    return whole


def says_root(nodes: Iterable[torch.fx.Node]) -> bool:
    """Whether stacks begin with the model. Then a node without one is of a pass; in `symbolic_trace`, of the model."""
    return any(stack and not stack[0].fqn for stack in map(_module_stack, nodes))


_REGIONS = (_hops.wrap_with_set_grad_enabled, _hops.wrap_with_autocast)


def _place(n: torch.fx.Node) -> list[Entry] | None:
    """The stack of a node; None where that says nothing. Of a region of a mode, what those of its nodes have in common.

    What torch.export writes at the region itself is the stack of some node near it.
    """
    if n.op in ("placeholder", "get_attr", "output") or n.target == "_guards_fn":
        return None
    if n.target is operator.getitem and n.all_input_nodes[0].target in _REGIONS:
        return _place(n.all_input_nodes[0])
    if n.target not in _REGIONS:
        return _module_stack(n)
    bodies = [getattr(n.graph.owning_module, str(x.target), None) for x in n.all_input_nodes]
    inside = [_place(x) for body in bodies if isinstance(body, torch.fx.GraphModule) for x in body.graph.nodes]
    return functools.reduce(_common, [stack for stack in inside if stack]) if any(inside) else None


def _common(a: list[Entry], b: list[Entry]) -> list[Entry]:
    return [x for x, _ in itertools.takewhile(lambda xy: xy[0] == xy[1], zip(a, b, strict=False))]


def _stacks(nodes: list[torch.fx.Node], around: list[str]) -> list[list[Entry]]:
    """The calls around each node, the outermost first.

    A node that a pass has put there without saying where has those which are around the nodes before and after it.
    """
    known = [_place(n) for n in nodes]
    is_said = says_root(nodes)
    stacks: list[list[Entry] | None] = []
    for stack in known:
        inner = [entry for entry in stack or () if entry.fqn]
        for fqn in around:
            inner = inner[1:] if inner and inner[0].fqn == fqn else inner
        stacks.append(inner if stack or (stack is not None and not is_said) else None)
    before, after = list[list[Entry]](), list[list[Entry]]()
    for filled, one_way in ((before, stacks), (after, stacks[::-1])):
        last: list[Entry] = []
        for stack in one_way:
            last = last if stack is None else stack
            filled.append(last)
    return list(map(_common, before, after[::-1]))


def _entries(node: torch.fx.Node, name: str) -> list[Entry]:
    stack: dict[str, Any] = node.meta.get(name) or {}
    return [Entry(key, _fqn(path), kind) for key, (path, kind) in stack.items() if key != _UNKNOWN]


def _module_stack(node: torch.fx.Node) -> list[Entry]:
    """What `nn_module_stack` says of a node; a node that calls a module is not inside of that yet."""
    entries = _entries(node, "nn_module_stack")
    return entries[:-1] if node.op == "call_module" and entries and entries[-1].fqn == node.target else entries


_UNKNOWN = "_empty_nn_module_stack_from_metadata_hook"
"""What `run_decompositions` writes where a node has none."""


def _fqn(path: str) -> str:
    """Of `L['self'].layers[0]` of Dynamo, `_export_root.layers.0` of bodies of ops, and `layers.0` of torch.export."""
    plain = re.sub(r"^(L\[['\"]\w+['\"]\])?\.?(_export_root\b)?", "", path)
    return re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", plain).lstrip(".")


def _kind_of(of: NodeRange, nodes: list[torch.fx.Node]) -> Any:
    return of.entry.kind, tuple([n.target for n in nodes])


def _walk(of: NodeRange) -> Iterator[NodeRange]:
    for inner in of.inner:
        yield inner
        yield from _walk(inner)


def knows_origins(module: Any) -> TypeGuard[torch.fx.GraphModule]:
    """Whether it is a GraphModule with nodes of which is known where they come from."""
    return isinstance(module, torch.fx.GraphModule) and any(
        n.stack_trace or "nn_module_stack" in n.meta for n in module.graph.nodes
    )


def root_class(module: Any) -> type:
    """Of a graph, the class of the module that it came from, where its nodes have it."""
    stacks = (_module_stack(n) or _entries(n, "fwd_nn_module_stack") for n in module.graph.nodes)
    return next((class_of_text(entry.kind) for stack in stacks for entry in stack if not entry.fqn), type(module))


def class_of_text(kind: type | str) -> type:
    """The class of this qualified name; where its module is not imported, one that stands for it."""
    if isinstance(kind, type):
        return kind
    parts = kind.split(".")
    homes = (i for i in range(len(parts) - 1, 0, -1) if ".".join(parts[:i]) in sys.modules)
    home = next(homes, len(parts) - 1)
    return class_of_name(".".join(parts[:home]), ".".join(parts[home:]), (torch.nn.Module,))


def signature_of_nodes(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_kept: bool) -> Any:
    """The signature of a call of nodes; None for that of the class, where it is known which argument is which."""
    forward: Any = getattr(kind, "forward", None)
    try:
        parameters = [*signature_of(forward).parameters.values()][1:]
    except (TypeError, ValueError):
        parameters = []
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if forward is not torch.nn.Module.forward and (is_kept or len(needed) == len(args) == 1):
        return None
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs]
    positional = [inspect.Parameter(f"arg{i}", inspect.Parameter.POSITIONAL_OR_KEYWORD) for i in range(len(args))]
    return inspect.Signature([*positional, *named])
