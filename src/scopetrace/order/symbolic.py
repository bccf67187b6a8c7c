"""The execution order of a symbolic trace, for any `torch.fx.Tracer`.

Names and results are those of `torch/distributed/fsdp/_trace_utils.py` where these are right. Right too, and not there:
parameters passed by keyword, in containers, to leaf modules, or only returned; placeholders named like a parameter;
second calls of a module; exceptions that a forward catches; parameters of a child that are not used.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.fx

from scopetrace._compat.tensors import parameters_of
from scopetrace.order.execution import CallUsage, ExecutionOrder, OrderBuilder, ParamUsageInfo
from scopetrace.record.model import Model

_METADATA = frozenset(
    {"shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "is_cuda"}
    | {"is_meta", "names", "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "get_device"}
    | {"element_size", "is_contiguous", "is_floating_point", "is_complex", "data_ptr"}
)
"""Attributes and methods of tensors that do not read their values."""


@dataclasses.dataclass
class TracingConfig:
    """How to trace a model with `torch.fx`.

        config = st.TracingConfig(tracer=torch.fx.Tracer())
        graph = config.tracer.trace(model, config.concrete_args)

    As `TracingConfig` there.
    """

    tracer: torch.fx.Tracer = dataclasses.field(default_factory=torch.fx.Tracer)
    """Says which modules are leaves and what a proxy is; any subclass."""
    concrete_args: dict[str, Any] | None = None
    """As for `torch.fx.Tracer.trace`: by argument name, values that replace proxies."""


class NamedParams(NamedTuple):
    """Parameters that one op uses, or one module call; `_ParamUsageInfo` in torch."""

    module: torch.nn.Module
    """The user: the module itself for one of its ops, or a module that it called, for all uses in that call."""
    named_params: list[tuple[str, torch.nn.Parameter]]
    """In the order of use; names as in `module.named_parameters()`, for parameters of other modules from the root."""


class ExecutionInfo:
    """The execution order of a symbolic trace so far, as modules and parameters in place of names.

    A leaf module's own parameters count as used by its call, in the order of registration.
    """

    def __init__(self, root_module: torch.nn.Module) -> None:
        self.registered = Model(root_module).registered()
        self._building = OrderBuilder(self.registered)
        self._modules = dict(root_module.named_modules())
        self._params = dict(root_module.named_parameters())
        self._module_names = {id(m): name for name, m in self._modules.items()}
        self._param_names = {id(p): name for name, p in self._params.items()}
        self._open: list[int] = []
        self._begin(root_module)

    @property
    def curr_module(self) -> torch.nn.Module | None:
        """The module that is being traced; None for one that is not in the root's tree."""
        fqn = self._building.calls[self._open[-1]].fqn
        return None if fqn is None else self._modules[fqn]

    @property
    def order(self) -> ExecutionOrder:
        """The order by names, as `Trace.order` gives it."""
        return self._building.order()

    @property
    def module_forward_order(self) -> list[torch.nn.Module]:
        """The modules in the order in which their calls begin, with repeats, the root first."""
        return [self._modules[fqn] for fqn in self.order.module_forward_order]

    @property
    def param_forward_order(self) -> list[torch.nn.Parameter]:
        """The parameters in the order of their first use."""
        return [self._params[name] for name in self.order.param_forward_order]

    @property
    def visited_params(self) -> set[torch.nn.Parameter]:
        """The used parameters as a set."""
        return set(self.param_forward_order)

    @property
    def module_to_param_usage_infos(self) -> dict[torch.nn.Module, list[NamedParams]]:
        """By module, the parameters of its ops and calls; see `ExecutionOrder.module_to_param_usage_infos`."""
        return {
            self._modules[fqn]: [self._named(info) for info in infos if info.module is not None]
            for fqn, infos in self.order.module_to_param_usage_infos.items()
        }

    def _named(self, info: ParamUsageInfo) -> NamedParams:
        prefixes = [f"{name}." if name else "" for name in self.registered.modules[info.module or ""].names]

        def relative(param: str) -> str:
            names = self.registered.params[param].names
            return next((n.removeprefix(p) for p in prefixes for n in names if n.startswith(p)), param)

        return NamedParams(self._modules[info.module or ""], [(relative(p), self._params[p]) for p in info.params])

    # ---------------------------------------------------------------- while a tracer works

    def _begin(self, module: torch.nn.Module) -> None:
        parent = self._open[-1] if self._open else None
        call = CallUsage(self._module_names.get(id(module)), 0, type(module).__name__, parent)
        self._open.append(self._building.begin(id(module), call))

    @contextlib.contextmanager
    def call(self, module: torch.nn.Module) -> Iterator[None]:
        """Around a call of a module by the tracer."""
        self._begin(module)
        call = self._open[-1]
        try:
            yield
        except BaseException:  # any exception is noted and passed on
            self._building.calls[call] = dataclasses.replace(self._building.calls[call], raised=True)
            raise
        finally:
            self._open.pop()

    def node(self, node: torch.fx.Node, root: torch.nn.Module) -> None:
        """Called for each new node; `root` is the module that the graph's attributes belong to."""
        asked = node.args[1] if node.target is getattr else node.target if node.op == "call_method" else None
        if asked in _METADATA:
            return
        read = [_parameter(root, n.target) for n in node.all_input_nodes if n.op == "get_attr"]
        if node.op == "call_module":
            read += root.get_submodule(str(node.target)).parameters()
        used = dict.fromkeys(self._param_names[id(p)] for p in read if id(p) in self._param_names)
        if used:
            self._building.steps[self._open[-1]].append(tuple(used))


def _parameter(root: torch.nn.Module, path: Any) -> torch.nn.Parameter | None:
    """A parameter by path, read without `getattr`, which gives a proxy during tracing."""
    owner, _, name = path.rpartition(".")
    return parameters_of(root.get_submodule(owner)).get(name)


class ExecOrderTracer:
    """Records the execution order of what a `torch.fx.Tracer` of any subclass traces.

        watcher = st.ExecOrderTracer()
        with watcher.patch_tracer(tracer, model):
            tracer.trace(model)
        watcher.exec_info.param_forward_order

    It names modules and parameters as torch/distributed/fsdp/_trace_utils.py does.
    """

    def __init__(self) -> None:
        self.exec_info: ExecutionInfo | None = None

    @contextlib.contextmanager
    def patch_tracer(self, tracer: torch.fx.Tracer, root_module: torch.nn.Module) -> Iterator[ExecutionInfo]:
        """Fill `exec_info` from what `tracer` does in the block; the tracer is restored at its end in any case."""
        self.exec_info = info = ExecutionInfo(root_module)
        call_module, create_node = tracer.call_module, tracer.create_node

        def watched_call(m: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with info.call(m):
                return call_module(m, forward, *args, **kwargs)

        def watched_node(*args: Any, **kwargs: Any) -> torch.fx.Node:
            node = create_node(*args, **kwargs)
            info.node(node, tracer.root)
            return node

        with mock.patch.multiple(tracer, call_module=watched_call, create_node=watched_node):
            yield info

    def trace(self, root_module: torch.nn.Module, config: TracingConfig | None = None) -> ExecutionInfo:
        """Trace a module and return its execution order. Raises what the tracer raises."""
        config = config or TracingConfig()
        with self.patch_tracer(config.tracer, root_module) as info:
            config.tracer.trace(root_module, config.concrete_args)
        return info
