"""What ExportedPrograms need of torch.export's internals: regions of a mode, symbol ranges, serializable trees."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.fx
from torch._export.passes.replace_autocast_with_hop_pass import replace_autocast_with_hop_pass
from torch._export.passes.replace_set_grad_with_hop_pass import replace_set_grad_with_hop_pass
from torch._export.verifier import TrainingIRVerifier as TrainingIRVerifier
from torch._export.verifier import Verifier as Verifier
from torch._library.opaque_object import get_opaque_type_name, is_opaque_value_type
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.dynamic_shapes import AdditionalInputs, _IntWrapper
from torch.export.graph_signature import ExportGraphSignature
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils import _pytree as pytree

from scopetrace._compat.fake_mode import fake_mode_of
from scopetrace._compat.graph_module import enter_autocast, set_grad_enabled
from scopetrace._compat.shape_env import WatchedShapeEnv
from scopetrace._compat.symbols import example
from scopetrace._compat.tensors import FakeTensor, is_symbolic


def with_mode_regions(
    bodies: dict[str, torch.fx.GraphModule], graph: torch.fx.Graph, signature: ExportGraphSignature
) -> tuple[Any, torch.fx.Graph, ExportGraphSignature, dict[str, str]]:
    """Move the nodes between switches of a mode into `wrap_with_set_grad_enabled` and `wrap_with_autocast`.

    These are torch.export's passes, in its order.

    Args:
        bodies: the GraphModules that are attributes of the graph's module, by name.
        graph: the graph, with calls of `set_grad_enabled`, `_enter_autocast` and `_exit_autocast`.
        signature: that of the program.

    Returns the object that holds the GraphModules, the new graph, its signature, and the new names of nodes by the old.
    """
    inner = [m.graph for body in bodies.values() for m in body.modules() if isinstance(m, torch.fx.GraphModule)]
    if not any(node.target in (set_grad_enabled, enter_autocast) for g in (graph, *inner) for node in g.nodes):
        return bodies, graph, signature, {}
    for node in graph.nodes:
        node.meta["name"] = node.name
    gm, changed = replace_set_grad_with_hop_pass(torch.fx.GraphModule(bodies, graph), signature)
    gm, changed = replace_autocast_with_hop_pass(gm, changed)
    assert changed is not None
    renamed = {node.meta["name"]: node.name for node in gm.graph.nodes if "name" in node.meta}
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("name", None)
    return gm, gm.graph, changed, renamed


def can_be_saved(spec: pytree.TreeSpec) -> bool:
    """Whether `torch.export.save` can write the tree, which takes a serialized name for each type of node in it."""
    if spec.is_leaf():
        return True
    kind = pytree.SUPPORTED_SERIALIZED_TYPES.get(spec.type)
    has_name = kind is not None and kind.serialized_type_name != pytree.NO_SERIALIZED_TYPE_NAME_FOUND
    return has_name and all(map(can_be_saved, spec.children()))


def modules_as_containers(args: Any) -> contextlib.AbstractContextManager[None]:
    """A context in which pytree flattens the modules among (args, kwargs) into parameters and buffers, as torch.export.

    Its import loads `torch._dynamo`, which takes as long as that of torch.
    """
    from torch._export.non_strict_utils import _enable_graph_inputs_of_type_nn_module

    return _enable_graph_inputs_of_type_nn_module(args)


def symbol_ranges(env: WatchedShapeEnv | None) -> dict[Any, Any]:
    """The value range of each symbol that is not replaced by another expression."""
    return {} if env is None else {s: r for s, r in env.var_to_range.items() if s not in env.replacements}


def example_of(x: Any) -> Any:
    """A tensor of zeros like a fake tensor, or a number, with example values for what is symbolic."""
    if isinstance(x, torch.SymInt):
        return example(x)
    size, how = list(map(example, x.size())), {"dtype": x.dtype, "device": x.device}
    if x.layout is not torch.strided:
        return torch.zeros(size, layout=x.layout, **how)
    return torch.empty_strided(size, list(map(example, x.stride())), **how).zero_().requires_grad_(x.requires_grad)


def set_tensor_meta(node: torch.fx.Node) -> None:
    """Write `tensor_meta` of a node that gives a tensor, as torch.export does; it adds no guards."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        env = value.fake_mode.shape_env if is_symbolic(value) and isinstance(value, FakeTensor) else None
        with env.suppress_guards() if env is not None else contextlib.nullcontext():
            node.meta["tensor_meta"] = _extract_tensor_metadata(value)


def set_guards(program: Any, conditions: list[str]) -> None:
    """Let `program.module()` check these conditions on the inputs, written as torch's guards: `L['x'] is L['y']`."""
    program._guards_code = list(dict.fromkeys(conditions))


def guards_of(program: Any) -> list[str]:
    """The conditions on the inputs that `program.module()` checks."""
    return list(program._guards_code)


def without_guards(program: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside, `program.module()` checks nothing: torch would trace the checks, of what need not be a tensor."""
    return mock.patch.object(program, "_guards_code", [])


@contextlib.contextmanager
def in_another_environment(program: Any) -> Iterator[None]:
    """Inside, the inputs of a program have symbols of another environment: what becomes of them, others do not see."""
    nodes = {node: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    env = next((x.fake_mode.shape_env for x in nodes.values() if isinstance(x, FakeTensor) and is_symbolic(x)), None)
    if isinstance(env, WatchedShapeEnv):
        mode = fake_mode_of(env := env.copied())
        for node, x in nodes.items():
            node.meta["val"] = _moved(x, env, mode)
    try:
        yield
    finally:
        for node, x in nodes.items():
            node.meta["val"] = x


def _moved(x: Any, env: WatchedShapeEnv, mode: FakeTensorMode) -> Any:
    if isinstance(x, torch.SymInt):
        return env.create_symintnode(x.node.expr, hint=x.node.hint)
    if not isinstance(x, FakeTensor) or x.layout is not torch.strided:
        return x
    size, stride = ([_moved(n, env, mode) for n in numbers] for numbers in (x.size(), x.stride()))
    with mode:
        return torch.empty_strided(size, stride, dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)


def opaque_name(x: Any) -> str | None:
    """The name of torch's opaque type of a value, as an Enum is; None for other objects."""
    return get_opaque_type_name(type(x)) if is_opaque_value_type(type(x)) else None


def is_guard(module: Any) -> bool:
    """Whether it is the module by which the module of an ExportedProgram checks its inputs."""
    unlift = sys.modules.get("torch.export._unlift")  # which loads torch._dynamo; the module of a program has loaded it
    return unlift is not None and isinstance(module, unlift.GuardsFn)


def additional_inputs(dynamic_shapes: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The inputs, beside the example, of which an `AdditionalInputs` says that the program takes them."""
    if not isinstance(dynamic_shapes, AdditionalInputs):
        return []
    return [(args, kwargs or {}) for args, kwargs in dynamic_shapes._examples]


def without_wrappers(x: Any) -> Any:
    """A container of arguments with the numbers themselves, of which a `ShapesCollection` knows the wrappers."""
    if not any(isinstance(leaf, _IntWrapper) for leaf in pytree.tree_leaves(x)):
        return x
    return pytree.tree_map_only(_IntWrapper, lambda wrapper: wrapper.val, x)
