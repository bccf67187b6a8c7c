"""Hooks of autograd: where a forward makes one, and where it asks for the graph that hooks hang on.

Data flow:
    `y.register_hook(f)`, `y.retain_grad()`, `with saved_tensors_hooks(...)`, `y.grad_fn`, replaced -> a HookListener
    `p.requires_grad = False`, `p.grad = None`, replaced                                            -> the same

Backward hooks of modules are functions of autograd, which `_compat.patches` reports.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.autograd.graph
import torch.utils.checkpoint
from torch.nn.modules._functions import BackwardHookFunction

from scopetrace._compat.dispatch import is_recording
from scopetrace._compat.sources import NOT_THE_MODEL, SCOPETRACE, TORCH_DIRECTORY, prefixes
from scopetrace._compat.tensors import is_view

Mine = Callable[[], bool]
Replace = Callable[[Any, str, Any], None]
_saved_tensors_hooks = torch.autograd.graph.saved_tensors_hooks
_METHODS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")
_HANGS_HOOKS = prefixes(TORCH_DIRECTORY, "autograd/graph.py", "nn/modules/module.py")
_REPORTING = ("_compat/questions.py", "_compat/hooks.py")


class HookListener(Protocol):
    """Who is told of hooks."""

    def on_hook(self, t: torch.Tensor, method: str) -> None:
        """A method of `_METHODS` is called."""

    def on_graph(self, t: torch.Tensor) -> None:
        """The forward reads `grad_fn` or `is_leaf`: it wants autograd's history of `t`."""

    def on_grad_fn(self) -> None:
        """The forward gets a node of autograd's graph."""

    def on_requires_grad(self, t: torch.Tensor, required: bool) -> None:
        """The forward sets `requires_grad` of a tensor."""

    def on_detach(self, t: torch.Tensor) -> None:
        """The forward detaches a tensor in place."""

    def on_grad(self, t: torch.Tensor) -> None:
        """The forward reads or sets `grad` of a tensor."""

    def mark(self) -> int:
        """A mark of this place in the program."""

    def leave_saved_tensors_hooks(self, mark: int) -> None:
        """The forward leaves `saved_tensors_hooks` that it entered at `mark`."""

    def on_recomputed(self, mark: int) -> None:
        """A checkpointed region that began at `mark` ends."""


def is_module_hook(cls: Any) -> bool:
    """Whether a `torch.autograd.Function` is the one by which modules call their backward hooks."""
    return cls is BackwardHookFunction


def acts_on_gradients(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of these tensors has a hook on its gradient, or is a view that counts as a leaf."""
    unseen = (is_view(t) and t.is_leaf and t.requires_grad for t in tensors)
    return any(unseen) or any(t._backward_hooks or t.retains_grad for t in tensors)


def report_hooks(replace: Replace, listener: HookListener, mine: Mine) -> None:
    """Replace what makes hooks by functions that tell `listener` first."""
    for name in _METHODS:
        replace(torch.Tensor, name, _method(name, listener, mine))
    for name in ("grad_fn", "is_leaf"):
        replace(torch.Tensor, name, _property(name, listener, mine))
    _report_flags(replace, listener, lambda: is_recording() and mine())
    _report_saved_tensors_hooks(replace, listener, mine)


def _method(name: str, listener: HookListener, mine: Mine) -> Callable[..., Any]:
    run = getattr(torch.Tensor, name)

    @functools.wraps(run)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if mine():
            listener.on_hook(self, name)
        return run(self, *args, **kwargs)

    return method


def _property(name: str, listener: HookListener, mine: Mine) -> property:
    own = getattr(torch.Tensor, name)

    def get(self: torch.Tensor) -> Any:
        asker = _asker() if is_recording() and mine() else ""
        asked = bool(asker) and not asker.startswith(SCOPETRACE)  # a trace inside this one
        if asked and self.requires_grad:
            listener.on_graph(self)
        found = own.__get__(self)
        if asked and name == "grad_fn" and found is not None and _takes_graph(asker):
            listener.on_grad_fn()
        return found

    return property(get, getattr(own, "__set__", None))


def _report_flags(replace: Replace, listener: HookListener, mine: Mine) -> None:
    """What a leaf has beside its data: `requires_grad`, and `grad`."""
    required, grad = (getattr(torch.Tensor, name) for name in ("requires_grad", "grad"))
    require, detach = torch.Tensor.requires_grad_, torch.Tensor.detach_

    def told(t: torch.Tensor, flag: bool) -> torch.Tensor:
        if mine():
            listener.on_requires_grad(t, flag)
        return t

    def detach_(self: torch.Tensor) -> torch.Tensor:
        if mine():
            listener.on_detach(self)
        return detach(self)

    def get_grad(self: torch.Tensor) -> Any:
        if mine() and not _asker().startswith(NOT_THE_MODEL):
            listener.on_grad(self)
        return grad.__get__(self)

    def set_grad(self: torch.Tensor, new: Any) -> None:
        if mine():
            listener.on_grad(self)
        grad.__set__(self, new)

    replace(
        torch.Tensor, "requires_grad_", lambda t, requires_grad=True: require(told(t, requires_grad), requires_grad)
    )
    replace(torch.Tensor, "detach_", detach_)
    set_required = property(required.__get__, lambda t, flag: required.__set__(told(t, flag), flag))
    replace(torch.Tensor, "requires_grad", set_required)
    replace(torch.Tensor, "grad", property(get_grad, set_grad, grad.__delete__))


def _asker() -> str:
    """The file that reads a property, past others that report it."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(_REPORTING):
        frame = frame.f_back
    return frame.f_code.co_filename


def _takes_graph(file: str) -> bool:
    """Whether the code in a file that reads `grad_fn` may hang hooks there."""
    return file.startswith(_HANGS_HOOKS) or not file.startswith(NOT_THE_MODEL)


def _report_saved_tensors_hooks(replace: Replace, listener: HookListener, mine: Mine) -> None:
    """Those of torch itself (checkpointing, `save_on_cpu`) leave values and gradients as they are."""
    enter, leave = _saved_tensors_hooks.__enter__, _saved_tensors_hooks.__exit__
    marks: dict[int, int] = {}

    def __enter__(self: Any) -> None:
        if mine() and (_is_users(self) or type(self).__module__ == torch.utils.checkpoint.__name__):
            marks[id(self)] = listener.mark()
        if id(self) not in marks or not _is_users(self):
            enter(self)

    def __exit__(self: Any, *error: Any) -> None:
        mark = marks.pop(id(self), None)
        if mark is None or not _is_users(self):
            leave(self, *error)
        if mark is not None and error == (None, None, None):
            (listener.leave_saved_tensors_hooks if _is_users(self) else listener.on_recomputed)(mark)

    replace(_saved_tensors_hooks, "__enter__", __enter__)
    replace(_saved_tensors_hooks, "__exit__", __exit__)


def _is_users(hooks: Any) -> bool:
    return type(hooks) is _saved_tensors_hooks or not type(hooks).__module__.startswith("torch.")
