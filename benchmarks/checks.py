"""Check functions for one traced model. Each returns None if all is well, else the reason in one line."""

import dataclasses
import random
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks.structure import children, type_name

Reason = str | None


def first_line(error: BaseException) -> str:
    """`Class: first line`, short enough for a table."""
    return all_lines(error).partition(" / ")[0]


def all_lines(error: BaseException) -> str:
    """`Class: message` on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines)}"[:600]


def last_frames(error: BaseException, count: int = 4) -> list[str]:
    """The innermost frames of the error that it all began with, for a report."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)[-count:]
    return [f"{f.filename}:{f.lineno} in {f.name}: {f.line}" for f in frames]


def other_inputs(value: Any) -> Any:
    """The same structure with other random values in the floating tensors; integers stay as they are."""

    def fresh(t: torch.Tensor) -> torch.Tensor:
        return torch.randn_like(t) if t.is_floating_point() else t.clone()

    return torch.utils._pytree.tree_map_only(torch.Tensor, fresh, value)


def same_result(got: Any, expected: Any, path: str = "output") -> Reason:
    """Same types, same structure, values equal within `torch.testing.assert_close`'s own tolerance."""
    if isinstance(expected, torch.Tensor):
        return _same_tensor(got, expected, path)
    if type(got) is not type(expected):
        return f"{path}: {type_name(got)} in place of {type_name(expected)}"
    items = children(expected)
    if items is None:
        return None if _plain_equal(got, expected) else f"{path}: {got!r} in place of {expected!r}"
    mine = children(got) or []
    if [k for k, _ in mine] != [k for k, _ in items]:
        return f"{path}: keys {[k for k, _ in mine]} in place of {[k for k, _ in items]}"
    reasons = (same_result(a, b, f"{path}[{key!r}]") for (key, b), (_, a) in zip(items, mine, strict=True))
    return next((r for r in reasons if r), None)


def _same_tensor(got: Any, expected: torch.Tensor, path: str) -> Reason:
    if not isinstance(got, torch.Tensor):
        return f"{path}: {type_name(got)} in place of a tensor"
    try:
        torch.testing.assert_close(got, expected, equal_nan=True)
    except RuntimeError as error:  # a fake tensor that the trace left behind, for instance
        return f"{path}: {first_line(error)} ({type(got).__name__} and {type(expected).__name__})"
    except AssertionError as error:
        if got.shape == expected.shape and got.dtype == expected.dtype:
            worst = (got.double() - expected.double()).abs().nan_to_num().max().item()
            return f"{path}: values differ by up to {worst:.3g}"
        return f"{path}: {first_line(error)}"
    return None


def _plain_equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or a != a or "__eq__" not in vars(type(a))
    except Exception:
        return repr(a) == repr(b)


# -- the model and the process are left as they were ------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class State:
    """All of a model and of the process that tracing must leave alone."""

    tensors: dict[str, tuple[int, int, bool, torch.Tensor]]
    """Per parameter and buffer: id, version, requires_grad, and a copy."""
    modules: dict[str, dict[str, int]]
    """Per module: id of each entry of its `__dict__`, and of what the dicts, lists and sets in it hold."""
    rng: tuple[torch.Tensor, Any]
    process: dict[str, Any]


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _module_entries(module: torch.nn.Module) -> dict[str, int]:
    entries = {key: id(value) for key, value in vars(module).items()}
    entries["training"] = module.training
    for name, value in vars(module).items():
        if isinstance(value, (dict, list, set)):
            inside = value.items() if isinstance(value, dict) else enumerate(value)
            entries |= {f"{name}[{key!r}]": id(inner) for key, inner in inside}
    return entries


def _process_state() -> dict[str, Any]:
    return {
        "is_compiling": torch.compiler._is_compiling_flag,
        "is_exporting": torch.compiler._is_exporting_flag,
        "_call_impl": torch.nn.Module._call_impl,
        "__call__": torch.nn.Module.__call__,
        "__getattr__": torch.nn.Module.__getattr__,
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
    }


def snapshot(model: torch.nn.Module) -> State:
    """Take the state of model and process."""
    tensors = {n: (id(t), t._version, t.requires_grad, t.detach().clone()) for n, t in _named_tensors(model)}
    modules = {n: _module_entries(m) for n, m in model.named_modules(remove_duplicate=False)}
    return State(tensors, modules, (torch.get_rng_state(), random.getstate()), _process_state())


def state_changes(before: State, model: torch.nn.Module) -> list[str]:
    """What is not as it was at `before`."""
    found = [f"process: {k}" for k, v in _process_state().items() if before.process[k] != v]
    if not torch.equal(before.rng[0], torch.get_rng_state()) or before.rng[1] != random.getstate():
        found.append("random number generator moved")
    return found + model_changes(before, model)


def model_changes(before: State, model: torch.nn.Module) -> list[str]:
    """What of the model alone is not as it was at `before`."""
    found = []
    for name, module in model.named_modules(remove_duplicate=False):
        found += _entry_changes(name, before.modules.get(name, {}), _module_entries(module))
        found += [f"{name or '<root>'}.{key} holds a fake tensor" for key in _fakes(module)]
    now = dict(_named_tensors(model))
    if list(now) != list(before.tensors):
        found.append("other parameters or buffers")
    found += [line for n, t in now.items() if n in before.tensors for line in _tensor_changes(n, before.tensors[n], t)]
    return found


def _entry_changes(name: str, before: dict[str, int], now: dict[str, int]) -> list[str]:
    where = name or "<root>"
    return [f"{where}.{k} changed" for k in before.keys() | now.keys() if before.get(k) != now.get(k)]


def _tensor_changes(name: str, before: tuple[int, int, bool, torch.Tensor], now: torch.Tensor) -> list[str]:
    if id(now) != before[0]:
        return [f"{name} is another tensor"]
    if now._version != before[1] or now.requires_grad != before[2]:
        return [f"{name}: version or requires_grad changed"]
    same = torch.equal(_bytes(now.detach()), _bytes(before[3]))
    return [] if same else [f"{name}: values changed"]


def _bytes(t: torch.Tensor) -> torch.Tensor:
    flat = t.contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() and not t.is_meta else flat.new_zeros(0)


def _fakes(module: torch.nn.Module) -> list[str]:
    def has_fake(value: Any, depth: int = 3) -> bool:
        if isinstance(value, FakeTensor):
            return True
        return depth > 0 and any(has_fake(v, depth - 1) for _, v in children(value) or ())

    return [key for key, value in vars(module).items() if key != "_modules" and has_fake(value)]


# -- ops --------------------------------------------------------------------------------------------------------


def _target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return getattr(target, "__name__", None) or str(target)


def op_counts(gm: torch.fx.GraphModule) -> Counter[str]:
    """How often each function is called, in nested graphs too. Not those whose result nothing needs."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
    return Counter(_target_name(node.target) for graph in graphs for node in _live(graph) if node.op == "call_function")


def _live(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes that the outputs or an effect need: torch.export keeps dead ones, others need not.

    Its checks of a tensor's metadata count as no effect, or they would keep what they look at.
    """
    live: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        effect = node.is_impure() and "_assert_tensor_metadata" not in str(node.target)
        if node in live or node.op == "output" or effect:
            live |= {node, *node.all_input_nodes}
    return live
