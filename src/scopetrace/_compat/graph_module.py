"""The GraphModule of a trace: compiled when it first runs, with scopes that pickling and re-tracing keep."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import preserve_node_meta


class TracedGraphModule(_LazyGraphModule):
    """A `torch.fx.GraphModule` whose Python code is made when it is first needed.

    Under make_fx it runs node by node, so that the new nodes inherit what re-tracing inherits (`custom`,
    `nn_module_stack`).
    """

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        if get_proxy_mode() is not None and not kwargs:
            with preserve_node_meta():
                return torch.fx.Interpreter(self).run(*args)
        return super()._call_impl(*args, **kwargs)


def make_graph_module(attributes: dict[str, Any], graph: torch.fx.Graph, name: str) -> TracedGraphModule:
    """A GraphModule that holds `attributes` (tensors and modules by dotted path) and runs `graph`."""
    return TracedGraphModule(attributes, graph, class_name=name)


set_grad_enabled = torch._C._set_grad_enabled
