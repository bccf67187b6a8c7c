"""The GraphModule of a trace: compiled when it first runs, with scopes that pickling and re-tracing keep."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import preserve_node_meta

from scopetrace._compat import pickling

_PICKLED_META = ("val", "nn_module_stack", "stack_trace", "custom")


class TracedGraphModule(_LazyGraphModule):
    """A `torch.fx.GraphModule` whose Python code is made when it is first needed.

    Under make_fx it runs node by node, so that the new nodes inherit what re-tracing inherits (`custom`,
    `nn_module_stack`). A pickle of it has its nodes with their names and meta; torch's has only the Python code.
    """

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() and get_proxy_mode() is not None and not kwargs:
            with preserve_node_meta():
                return torch.fx.Interpreter(self).run(*args)
        return super()._call_impl(*args, **kwargs)

    @property
    def _initialize_hook(self) -> Any:
        """No hook: torch.compile asks for one before it begins, which is when the code has to be there."""
        self._real_recompile()
        raise AttributeError("_initialize_hook")

    def __reduce__(self) -> Any:
        used = {n.target for n in self.graph.nodes if n.op in ("get_attr", "call_module")}
        held = {name: _look_up(self, name) for name in used}
        is_body = isinstance(self, BodyGraphModule)
        return _unpickle, (held, pickling.dumps(_records(self.graph)), self._get_name(), self.training, is_body)


class BodyGraphModule(TracedGraphModule):
    """The body of a higher-order op. Its code is made at once: torch.compile cannot make it when it comes to the op."""

    def recompile(self) -> Any:  # type: ignore[override]
        """Make the Python code."""
        return self._real_recompile()


def make_graph_module(
    attributes: dict[str, Any], graph: torch.fx.Graph, name: str, *, is_body: bool = False
) -> TracedGraphModule:
    """A GraphModule that holds `attributes` (tensors and modules by dotted path) and runs `graph`."""
    kind = BodyGraphModule if is_body else TracedGraphModule
    return kind(attributes, graph, class_name=name)


class _Ref:
    """A node, by its place in the graph."""

    def __init__(self, index: int) -> None:
        self.index = index


def _records(graph: torch.fx.Graph) -> list[tuple[Any, ...]]:
    order: dict[torch.fx.Node, Any] = {node: _Ref(i) for i, node in enumerate(graph.nodes)}
    records: list[tuple[Any, ...]] = []
    for n in graph.nodes:
        args, kwargs = torch.fx.node.map_aggregate(
            (n.args, n.kwargs), lambda a: order[a] if isinstance(a, torch.fx.Node) else a
        )
        meta = {key: n.meta[key] for key in _PICKLED_META if key in n.meta}
        records.append((n.op, n.name, n.target, _plain(args), _plain(kwargs), meta))
    return records


def _plain(x: Any) -> Any:
    """fx's immutable containers as Python's."""
    if isinstance(x, dict):
        return {key: _plain(item) for key, item in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(i) for i in x] if isinstance(x, list) else tuple(_plain(i) for i in x)
    return x


def _unpickle(held: dict[str, Any], data: bytes, name: str, training: bool, is_body: bool) -> TracedGraphModule:
    graph = torch.fx.Graph()
    nodes: list[torch.fx.Node] = []

    def restore(x: Any) -> Any:
        if isinstance(x, _Ref):
            return nodes[x.index]
        if isinstance(x, dict):
            return {key: restore(item) for key, item in x.items()}
        if isinstance(x, (list, tuple)):
            return [restore(i) for i in x] if isinstance(x, list) else tuple(restore(i) for i in x)
        return x

    for op, node_name, target, args, kwargs, meta in pickling.loads(data):
        node = graph.create_node(op, target, restore(args), restore(kwargs), name=node_name)
        node.meta.update(meta)
        nodes.append(node)
    module = make_graph_module(held, graph, name, is_body=is_body)
    return module.train(training)


def _look_up(module: torch.nn.Module, name: str) -> Any:
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), leaf)


set_grad_enabled = torch._C._set_grad_enabled
