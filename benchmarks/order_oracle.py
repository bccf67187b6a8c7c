"""An independent recording of execution order: hooks on modules and a TorchFunctionMode in one eager run.

Nothing of scopetrace is used for the recording. What reads only a parameter's shape, dtype or device is no use of it.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

METADATA = {"shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "is_meta"}
METADATA |= {"is_cuda", "size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex"}
METADATA |= {"is_contiguous", "storage_offset", "get_device", "is_nested", "is_sparse", "is_quantized", "names"}
METADATA |= {"is_inference", "_version", "grad_fn", "__len__", "__repr__", "__format__", "type", "__hash__"}


@dataclasses.dataclass
class Seen:
    """One module call: its module and, in order, the parameters that its own functions took."""

    fqn: str
    params: list[str] = dataclasses.field(default_factory=list)


class Recorder(TorchFunctionMode):
    """What ran, in order."""

    def __init__(self, model: torch.nn.Module) -> None:
        """For one run of `model`."""
        super().__init__()
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.calls: list[Seen] = []
        self.open: list[Seen] = []
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the parameters among the arguments, at any depth."""
        name = getattr(getattr(func, "__self__", None), "__name__", "") if func.__name__ == "__get__" else func.__name__
        if name not in METADATA and self.open:
            for leaf in pytree.tree_leaves((args, kwargs)):
                self.note(leaf)
        return func(*args, **(kwargs or {}))

    def note(self, leaf: Any) -> None:
        """A use, if this is a parameter."""
        name = self.names.get(id(leaf))
        if name is not None:
            call = self.open[-1]
            if name not in call.params:
                call.params.append(name)
            number = next(i for i in reversed(range(len(self.calls))) if self.calls[i] is call)
            self.first.setdefault(name, number)
            self.last[name] = number


@contextlib.contextmanager
def hooked(model: torch.nn.Module, recorder: Recorder) -> Iterator[None]:
    """Hooks on every module, also for calls that raise."""
    handles = []
    for fqn, module in model.named_modules():

        def before(module: Any, args: Any, fqn: str = fqn) -> None:
            recorder.calls.append(Seen(fqn))
            recorder.open.append(recorder.calls[-1])

        def after(module: Any, args: Any, out: Any) -> None:
            recorder.open.pop()

        if not isinstance(module, torch.jit.ScriptModule):
            handles.append(module.register_forward_pre_hook(before, prepend=True))
            handles.append(module.register_forward_hook(after, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def record(model: torch.nn.Module, args: Any, kwargs: Any, run: Callable[..., Any] | None = None) -> Recorder:
    """One run of the model with the recorder on."""
    recorder = Recorder(model)
    with hooked(model, recorder), recorder:
        out = (run or model)(*args, **kwargs)
    recorder.open.append(recorder.calls[0])
    for leaf in pytree.tree_leaves(out):
        recorder.note(leaf)
    return recorder


def differences(order: Any, truth: Recorder) -> list[str]:
    """How an `ExecutionOrder` differs from what was seen; nothing where it is equal.

    Direct calls of `module.forward` cannot be seen by hooks: their uses belong to the call around them. Nor are views
    of a parameter: an order may have more uses in calls after that in which the view was made.
    """
    seen_by = {}
    for number, call in enumerate(order.calls):
        seen_by[number] = seen_by[call.parent] if call.direct or call.fqn is None else number
    shown = [n for n in seen_by if seen_by[n] == n]
    mine = [order.registered.module(order.calls[n].fqn) for n in shown]
    theirs = [call.fqn for call in truth.calls]
    if mine != theirs:
        first = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), "end")
        return [f"modules differ at call {first}: {len(mine)} and {len(theirs)} calls"]
    own: dict[int, dict[str, None]] = {n: {} for n in shown}
    for step in order.steps:
        if step.kind == "use":
            call = seen_by[step.call]
            own[call] |= dict.fromkeys(step.params)
    found = [
        f"{call.fqn}: {[*uses]} and {call.params}"
        for uses, call in zip(own.values(), truth.calls, strict=True)
        if [name for name in uses if name in call.params] != call.params
    ]
    made = {number: set(uses) - set(truth.calls[i].params) for i, (number, uses) in enumerate(own.items())}
    found += [
        f"{name} in call {n}" for n, names in made.items() for name in names if shown.index(n) < truth.first[name]
    ]
    if order.param_forward_order != list(truth.first):
        found.append("param_forward_order")
    last = {name: shown.index(seen_by[use.call]) for name, use in order.param_last_use.items()}
    found += [f"last use of {name}" for name, at in truth.last.items() if last.get(name, -1) < at]
    return found
