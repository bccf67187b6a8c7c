"""The GraphModule of a trace, compiled when it first runs, and pickles of what torch cannot pickle."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import keyword
import operator
import pickle
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import preserve_node_meta

from scopetrace._compat.compilers import constant_to_dynamo
from scopetrace._compat.ops import find_higher_order, find_op, is_random
from scopetrace._compat.questions import dispatch_modes, function_modes

set_grad_enabled = torch._C._set_grad_enabled
"""The function that torch.export uses as a node target where autograd is switched on or off."""

enter_autocast: Callable[..., Any] = torch.amp.autocast_mode._enter_autocast
exit_autocast: Callable[..., Any] = torch.amp.autocast_mode._exit_autocast

was_erased: Callable[[torch.fx.Node], bool] = operator.attrgetter("_erased")
"""Whether a node was removed from its graph."""

set_arguments: Callable[[torch.fx.Node, tuple[Any, ...], dict[str, Any]], None] = torch.fx.Node._update_args_kwargs
"""Give a node its arguments. Assigning `node.args` also takes it out of the table of `find_nodes`, and puts it back."""

is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler is active in this thread, `emit_nvtx` and `emit_itt` among them."""


def module_shown_as(name: str) -> torch.nn.Module:
    """A module that calls a function with its arguments, and is shown by a profiler with stacks as of a class so named.

    Such a profiler shows calls of `nn.Module.__call__` alone. No hooks run.
    """
    call = {"_compiled_call_impl": staticmethod(lambda function, *args: function(*args))}
    module: torch.nn.Module = type(name, (torch.nn.Module,), call)()
    return module


_PICKLED_META = ("nn_module_stack", "stack_trace", "custom")


class TracedGraphModule(_LazyGraphModule):
    """A `torch.fx.GraphModule` whose Python code is generated when it first runs.

    Under make_fx it is interpreted node by node, so that the new nodes get the `custom` and `nn_module_stack` of the
    old ones. A pickle has the nodes with their names, stacks and `custom`; one of torch's class has only Python code.
    """

    has_regions = True
    made_of: Any = None
    """The `forward` beside which `forward_with_regions` was made."""
    calls_functions: bool
    forward_with_regions: Callable[..., Any]

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            _make_code(self)
            if self.calls_functions:
                return self.forward_with_regions(*args)
        elif get_proxy_mode() is not None and not kwargs:
            with preserve_node_meta():
                return torch.fx.Interpreter(self).run(*args)
        if not has_hooks(self):
            return self.forward(*args, **kwargs)  # hooks of all modules are those of the model's, and are in the graph
        return super()._call_impl(*args, **kwargs)

    def __reduce__(self) -> Any:
        used = dict.fromkeys(n.target for n in self.graph.nodes if n.op in ("get_attr", "call_module"))
        held = {name: look_up(self, name) for name in used}
        is_body = isinstance(self, BodyGraphModule)
        return _unpickle, (held, dumps([self.graph, *self.graph.nodes]), self._get_name(), self.training, is_body)


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks are registered on a module itself."""
    return bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )


class _Held:
    """Has what a module holds, read from it once: Python takes it from here in a tenth of the time."""

    def __init__(self, module: torch.nn.Module, entries: tuple[list[Any], ...]) -> None:
        vars(self)[""] = module, entries

    def __getattr__(self, name: str) -> Any:
        module, entries = vars(self)[""]
        value = getattr(module, name)
        tables = (module.__dict__, module._parameters, module._buffers, module._modules)
        table = next((table for table in tables if name in table), None)
        if table is not None:
            for column, part in zip(entries, (table, name, value), strict=True):
                column.append(part)
            value = vars(self)[name] = _Held(value, entries) if type(value) is torch.nn.Module else value
        return value


def unwrapped(module: TracedGraphModule) -> Callable[[], Callable[..., Any]]:
    """A function that gives what runs the code of a GraphModule as a call of it does, in less time.

    It gives the GraphModule itself where a call does more than that.
    """
    hooks = [module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks]
    kind, attributes = type(module), module.__dict__
    forward: Any = None
    entries: tuple[list[dict[str, Any]], list[str], list[Any]] = ([], [], [])
    run: Callable[..., Any] = module

    def current() -> Callable[..., Any]:
        nonlocal forward, entries, run
        if function_modes() or dispatch_modes() or any(hooks) or not _INSTEAD.isdisjoint(attributes):
            return module
        if kind.forward is forward:
            tables, names, values = entries
            try:
                if all(map(operator.is_, map(operator.getitem, tables, names), values)):
                    return run
            except KeyError:
                pass
        module.real_recompile()
        forward, entries = kind.forward, ([], [], [])
        run = types.MethodType(forward, _Held(module, entries))
        return run

    return current


_INSTEAD = frozenset({"forward", "_call_impl", "_compiled_call_impl"})
"""What people set on a GraphModule to let a call do something else."""


@constant_to_dynamo
def _make_code(graph_module: TracedGraphModule) -> None:
    """Generate the Python code of a graph, while torch.compile compiles.

    Dynamo refuses `invoke_subgraph` in code, and makes it of a call of a region (`nested_compile_region`).
    """
    graph_module.real_recompile()
    if graph_module.made_of is type(graph_module).forward:
        return  # Dynamo, which may start over, has to meet the same code again
    graph_module.made_of = type(graph_module).forward
    if parts_that_switch_grad(graph_module):
        for module in graph_module.modules():
            if isinstance(module, TracedGraphModule):
                module.has_regions = False  # Dynamo takes one region for calls with autograd on and off
    call = torch.ops.higher_order.invoke_subgraph
    graph_module.calls_functions = bool(graph_module.graph.find_nodes(op="call_function", target=call))
    if graph_module.calls_functions:
        graph = copy.deepcopy(graph_module.graph)
        for node in graph.find_nodes(op="call_function", target=call):
            node.target = call_region if graph_module.has_regions else call_inline
        graph_module.forward_with_regions = method_of(graph, graph_module)


def call_region(body: torch.nn.Module, _: str, *operands: Any) -> Any:
    """What Dynamo makes an `invoke_subgraph` of: a call of a `torch.compiler.nested_compile_region`."""
    from torch._higher_order_ops.invoke_subgraph import invoke_subgraph_placeholder

    return invoke_subgraph_placeholder(body, *operands)


def call_inline(body: torch.nn.Module, _: str, *operands: Any) -> Any:
    """The ops of the body in place of a call."""
    return body(*operands)


class BodyGraphModule(TracedGraphModule):
    """The body of a higher-order op. Its code is generated at once, as torch.compile cannot do that inside the op.

    Where a checkpointed region draws random numbers, backward draws the same ones: the op itself leaves that to a
    compiler, and takes from `meta` in which contexts to run the body.
    """

    has_regions = False  # Inductor has no regions inside of regions

    def recompile(self) -> Any:  # type: ignore[override]
        """Generate the Python code."""
        return self._real_recompile()


class _RegionRun(contextlib.ExitStack):
    """The context of one run of a checkpointed region, which may be entered again.

    Where there are `states`, it draws the random numbers of the first run that has the same ones.
    """

    ac_graph_id: Any = None
    """The op writes it."""

    def __init__(self, context: Any, states: list[Any] | None) -> None:
        super().__init__()
        self._context, self._states = context, states

    def __enter__(self) -> _RegionRun:
        if self._context is not None:
            self._context.ac_graph_id = self.ac_graph_id
            self.enter_context(self._context)
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        if self._states:
            self.enter_context(torch.random.fork_rng(devices))
            torch.set_rng_state(self._states[0])
            for i, state in zip(devices, self._states[1], strict=False):
                torch.cuda.set_rng_state(state, i)
        elif self._states is not None:
            self._states += torch.get_rng_state(), [torch.cuda.get_rng_state(i) for i in devices]
        return self


def _region_runs(context_fn: Callable[[], Any] | None, *, is_random: bool) -> tuple[_RegionRun, _RegionRun]:
    forward, again = (None, None) if context_fn is None else context_fn()
    states: list[Any] | None = [] if is_random else None
    return _RegionRun(forward, states), _RegionRun(again, states)


def switches_grad(graph_module: torch.fx.GraphModule) -> bool:
    """Whether a node switches autograd on or off."""
    return bool(graph_module.graph.find_nodes(op="call_function", target=set_grad_enabled))


def parts_that_switch_grad(module: torch.nn.Module) -> list[torch.fx.GraphModule]:
    """The graphs in a module, such as those of functions and branches, of which a node switches autograd on or off."""
    return [m for m in module.modules() if isinstance(m, torch.fx.GraphModule) and switches_grad(m)]


def without_grad_switches(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy of a graph, without the nodes that switch autograd on or off."""
    graph = copy.deepcopy(graph)
    for node in graph.find_nodes(op="call_function", target=set_grad_enabled):
        graph.erase_node(node)
    return graph


def method_of(graph: torch.fx.Graph, graph_module: torch.fx.GraphModule) -> Callable[..., Any]:
    """A function that runs a graph on the tensors of a GraphModule."""
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(code.src, namespace)
    return types.MethodType(namespace["forward"], graph_module)


def make_graph_module(
    attributes: dict[str, Any], graph: torch.fx.Graph, name: str, *, is_body: bool = False, context_fn: Any = None
) -> TracedGraphModule:
    """A GraphModule that holds `attributes` (tensors and modules by dotted path) and runs `graph`, which reads all.

    `context_fn` is that of `torch.utils.checkpoint`, for the body of a region.
    """
    if not is_body:
        # given the attributes, torch's __init__ goes along each path from the root, for each get_attr node
        module = TracedGraphModule({}, torch.fx.Graph(), class_name=name)
        _hold(module, attributes)
        module.graph = graph
        return module
    body = BodyGraphModule(attributes, graph, class_name=name)
    graphs = [m.graph for m in body.modules() if isinstance(m, torch.fx.GraphModule)] if name == "wrap_body" else []
    targets = [node.target for graph in graphs for node in graph.nodes]
    draws = any(map(is_random, targets))
    calls_functions = any(isinstance(target, HigherOrderOperator) for target in targets)  # torch's context has no rule
    if draws or calls_functions or context_fn is not None:
        body.meta["_checkpoint_context_fn"] = functools.partial(_region_runs, context_fn, is_random=draws)
    return body


def _hold(root: torch.nn.Module, attributes: dict[str, Any]) -> None:
    """Put tensors and modules under their paths, those of short paths first, in modules that are made for them."""
    for name in sorted(attributes, key=lambda name: name.count(".")):
        (module, field), x = holder_of(root, name), attributes[name]
        if isinstance(x, torch.nn.Parameter):  # as `register_parameter` does, which takes four times as long
            module._parameters[field] = x
        elif isinstance(x, torch.Tensor):
            module._buffers[field] = x
        else:
            setattr(module, field, x)


def holder_of(
    root: torch.nn.Module, name: str, make: Callable[[], torch.nn.Module] = torch.nn.Module
) -> tuple[Any, str]:
    """The submodule for what has this dotted name, and the name in it. `make` makes those that are not there."""
    *path, leaf = name.split(".")
    for part in path:
        if root._modules.get(part) is None:
            root._modules[part] = make()
        root = root._modules[part]  # type: ignore[assignment]
    return root, leaf


def is_writable(path: str, *, keywords: bool = False) -> bool:
    """Whether torch.fx can write a dotted path as Python code; `keywords`: also where a part is a keyword.

    It writes what is no identifier between quotes, as it is.
    """
    return all(
        (keywords or not keyword.iskeyword(part)) and part.isprintable() and not {'"', "\\"} & set(part)
        for part in path.split(".")
    )


@functools.cache
def reserved_names() -> frozenset[str]:
    """The attributes that a GraphModule has of its own, such as `code` and `graph`."""
    return frozenset({*dir(torch.fx.GraphModule({}, torch.fx.Graph())), *dir(TracedGraphModule)})


def _unpickle(held: dict[str, Any], data: bytes, name: str, training: bool, is_body: bool) -> TracedGraphModule:
    graph, *_ = pickle.loads(data)
    return make_graph_module(held, graph, name, is_body=is_body).train(training)


def _node(graph: torch.fx.Graph, meta: dict[str, Any], *parts: Any) -> torch.fx.Node:
    node = graph.create_node(*parts)
    node.meta.update(meta)
    return node


def look_up(module: torch.nn.Module, name: str) -> Any:
    """What a GraphModule holds under a dotted path. Raises AttributeError."""
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), leaf)


# Pickles -------------------------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.fx.Graph):
            return torch.fx.Graph, ()
        if isinstance(obj, torch.fx.Node):  # the nodes that it reads are in the pickle before it
            meta = {key: obj.meta[key] for key in _PICKLED_META if key in obj.meta}
            return _node, (obj.graph, meta, obj.op, obj.target, obj.args, obj.kwargs, obj.name)
        if isinstance(obj, OpOverload):
            return find_op, (obj._schema.name, obj._overloadname)
        if isinstance(obj, HigherOrderOperator):
            return find_higher_order, (obj.name(),)
        return NotImplemented


def dumps(x: Any) -> bytes:
    """Pickle `x`, which `pickle.loads` reads.

    Raises pickle.PicklingError for what pickle refuses, such as instances of local classes.
    """
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(x)
    except (AttributeError, TypeError, ValueError) as error:  # pickle's own are of three classes, by Python version
        raise pickle.PicklingError(str(error)) from error
    return file.getvalue()


# Under torch.compile -------------------------------------------------------------------------------------------------


class CompiledSeparately:
    """A callable object in place of which torch.compile takes a function that calls `call`.

    All callable objects of a process share one code object under torch.compile, which it compiles eight times at most.
    The function has a code object of its own.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        forward.__code__ = forward.__code__.replace()
        self.__dict__.update(_torchdynamo_orig_callable=forward, _torchdynamo_wrapper_id=id(self))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_torchdynamo")}
