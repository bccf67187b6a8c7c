"""What of the process differs inside a forward that is traced from before: few names, and none that others see."""

from __future__ import annotations

import builtins
import gc
import inspect
import math
import pkgutil
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import scopetrace as st
from scopetrace._compat.replaced import REPLACED

LIMIT = 75
"""How many names of torch and the standard library may differ."""

_MISSING = object()
Place = tuple[Any, str]
"""A module or class, and a name in it."""


def owners() -> Iterator[tuple[str, Any]]:
    """The modules of the process and the classes in them, each once, by what to call them.

    The class of a class is asked of `type` itself: a deprecated object of torch warns where it is asked.
    """
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and not name.startswith("hypothesis"):  # it times the garbage collector
            for path, owner in ((name, module), *_classes(name, module)):
                if id(owner) not in seen:
                    seen.add(id(owner))
                    yield path, owner


def _classes(name: str, module: types.ModuleType) -> list[tuple[str, type]]:
    return [(f"{name}.{key}", x) for key, x in list(vars(module).items()) if issubclass(type(x), type)]


def everything() -> dict[str, tuple[Any, dict[str, Any]]]:
    """By the path of each owner, itself and what it has.

    What Dynamo has put into modules for compiled code of other tests goes with that, at any time: now.
    """
    gc.collect()
    return {path: (owner, dict(vars(owner))) for path, owner in owners()}


Table = dict[str, tuple[Any, dict[str, Any]]]


def changed(before: Table, after: Table) -> dict[str, Place]:
    """The names of what differs; modules that were imported meanwhile count for nothing."""
    found: dict[str, Place] = {}
    for path, (owner, now) in after.items():
        if path not in before or before[path][0] is not owner:
            continue
        old = before[path][1]
        for key in {*old, *now}:
            pair = old.get(key, _MISSING), now.get(key, _MISSING)
            if pair[0] is not pair[1] and not _is_kept(key, *pair):
                found[f"{path}.{key}"] = owner, key
    return found


def _is_kept(key: str, old: Any, now: Any) -> bool:
    """Whether Python or torch itself keeps something there: the warnings that were shown, a counter."""
    return key in ("__warningregistry__", "__annotations__") or (type(old) is int and type(now) is int)


class Looks(nn.Module):
    """Calls what is in STORE in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sys.modules[STORE].look()
        return self.linear(x) * self.scale


STORE = "scopetrace_test_store"
"""A module outside of what a trace follows, so that a forward may keep large tables there."""


def inside(look: Any) -> None:
    """Trace a module that calls `look` inside, for the second time: torch imports and keeps much in the first."""
    store = sys.modules[STORE] = types.ModuleType(STORE)
    try:
        for each in (lambda: None, look):
            store.look = each
            st.trace(Looks(), (torch.randn(3, 2),))
    finally:
        del sys.modules[STORE]


@pytest.fixture(scope="module")
def names() -> dict[str, Place]:
    """What differs inside of a forward, by name."""
    now: Table = {}
    inside(lambda: None)
    before = everything()
    inside(lambda: now.update(everything()))
    found = changed(before, now)
    print(len(found), "replaced:", *sorted(found), sep="\n  ")
    return found


def test_few_names_are_replaced(names: dict[str, Place]) -> None:
    assert len(names) <= LIMIT, sorted(names)


def test_each_is_in_the_table(names: dict[str, Place]) -> None:
    paths = [path.rpartition(".") for text in REPLACED.values() for path in text.split()]
    assert len(paths) == len(set(paths)) <= LIMIT
    known = [(pkgutil.resolve_name(owner), name) for owner, _, name in paths if not owner.startswith(_LATER)]
    known += [(sys.modules[owner], name) for owner, _, name in paths if owner in sys.modules]
    assert [path for path, place in names.items() if place not in known] == []


_LATER = ("torch._dynamo.", "torch.distributed._composable.")
"""Modules that are not imported with torch."""


def test_nothing_is_replaced_that_everybody_uses(names: dict[str, Place]) -> None:
    owners = (builtins, math, inspect, torch.Tensor, torch._C.TensorBase)
    assert [name for name, (owner, _) in names.items() if owner in owners] == []
    # Python 3.13 stops to remember the methods of a class, and of its subclasses, that changed a thousand times
    modules = [name for name, (owner, _) in names.items() if isinstance(owner, type) and issubclass(owner, nn.Module)]
    assert modules == []


def test_no_class_or_global_of_users_is_replaced(names: dict[str, Place]) -> None:
    assert [name for name, (owner, _) in names.items() if _module_of(owner).startswith(("tests", __name__))] == []


def _module_of(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, types.ModuleType) else str(owner.__module__)


def test_another_thread_gets_what_it_got_before() -> None:
    """What stays replaced hands on: answers, tensors, gradients, seeds, contexts and module calls are as before."""
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.randn(3, 2)
    expected = _used(model, x)
    got: list[Any] = []

    def look() -> None:
        thread = threading.Thread(target=lambda: got.append(_used(model, x)))
        thread.start()
        thread.join()

    inside(look)
    assert len(got) == 1
    _same(got[0], expected)


def _used(model: nn.Module, x: torch.Tensor) -> list[Any]:
    """What a thread gets from much of what a trace may replace."""
    model.zero_grad()
    out = model(x)
    out.sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.step()
    with torch.no_grad(), torch.autocast("cpu"):
        flags = [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()]
    hooked: list[float] = []
    y = x.clone().requires_grad_()
    y.register_hook(lambda g: hooked.append(g.sum().item()))
    (y * 2).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        (grad,) = torch.autograd.grad((y * y).sum(), y)
    text = [repr(x), f"{x.sum():.3f}", str(x.numpy()), x.tolist(), x.data.tolist()]
    text += [torch.compiler.is_exporting(), torch.compiler.is_compiling(), max(1, 2), min(1, 2), math.pow(2, 3)]
    text += [isinstance(x, nn.Parameter), type(x), [name for name, _ in model.named_parameters()], x.stride()]
    text += [torch.utils.checkpoint.checkpoint(torch.sin, y, use_reentrant=False), model.forward(x)]
    return [out, [p.grad for p in model.parameters()], flags, hooked, grad, text]


def _same(a: Any, b: Any) -> None:
    if isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            _same(x, y)
    elif isinstance(a, torch.Tensor):
        assert type(a) is type(b) and torch.equal(a, b)
    else:
        assert a == b


def test_all_is_put_back() -> None:
    inside(lambda: None)
    before = everything()
    inside(lambda: None)
    assert sorted(changed(before, everything())) == []


def test_all_is_put_back_after_an_exception() -> None:
    def fail() -> None:
        raise KeyError("of the model")

    with pytest.raises(KeyError):
        inside(fail)
    before = everything()
    with pytest.raises(KeyError):
        inside(fail)
    assert sorted(changed(before, everything())) == []
