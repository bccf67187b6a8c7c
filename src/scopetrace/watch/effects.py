"""What a forward may change of Python's state: copied before it runs, put back after it; and what it leaves changed.

Data flow:
    the modules, functions, variables, classes and arguments of a forward -> their contents, before it runs
    after it -> everything as it was, and a Change for each value that differs; those are judged in `watch.settle`
    leaves of the result -> what they refer to, and so on -> a tensor that no container shows, as in a closure: an error
"""

from __future__ import annotations

import enum
import functools
import gc
import itertools
import random
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Set, ValuesView
from typing import Any

import torch

from scopetrace._compat.gradients import hooks_of
from scopetrace._compat.symbols import Symbolic
from scopetrace._compat.tensors import FakeTensor, parameters_of, tags_of
from scopetrace.containers.contents import (
    ATTRIBUTES,
    Change,
    Contents,
    Place,
    changed_attributes,
    form_of,
    is_another_object,
    same,
    same_entries,
    snapshot,
)
from scopetrace.containers.stand_ins import plain
from scopetrace.containers.structure import leaves_with_path, object_classes, parts_of, walk
from scopetrace.errors import OpaqueOutputError, UnsupportedOpError
from scopetrace.guards.reach import Reach
from scopetrace.ir.guards import MODULE_TABLES, NO_CALL, At, Guard
from scopetrace.ir.side_effects import SideEffect
from scopetrace.ir.tape import Value
from scopetrace.record.builder import place_of
from scopetrace.record.model import Model

_NO_TAGS: dict[str, Any] = {}


class EffectWatch:
    """What a forward may write to, saved: made before it runs."""

    def __init__(
        self,
        fn: Any,
        model: Model,
        arguments: list[tuple[str, Any]],
        object_types: Collection[type],
        inputs: list[tuple[str, torch.Tensor]],
    ) -> None:
        """`inputs` are the tensors among the arguments, with their names, as the forward gets them."""
        self._model = model
        self._contents = model.contents
        self.reach = Reach(self._contents.add, ("forward",))
        self.objects: list[tuple[str, Any]] = []
        """Objects with attributes among the arguments, with their names."""
        for name, argument in arguments:
            for path, leaf in leaves_with_path(argument, name, object_types):
                self._contents.add(path, leaf)
                if form_of(type(leaf)) is ATTRIBUTES:
                    self.objects.append((path, leaf))
            for kind in object_classes(argument, object_types):
                self.reach.add_class(kind, is_named=False)
        numpy = getattr(sys.modules.get("numpy"), "random", None)
        for name, module in (("random", random), ("numpy.random", numpy)):
            if module is not None:
                self._contents.add(name, getattr(module.random, "__self__", None))  # somebody may replace it
        tensors = [*inputs, *((fqn, t) for (fqn, *_), t in zip(model.owners, model.tensors, strict=True))]
        self._holders: list[tuple[str, Any, dict[str, Any]]] = [
            (name, t, tags_of(t) if vars(t) else _NO_TAGS) for name, t in tensors
        ]
        """Tensors, classes and functions, with their names and the attributes that users have set on them."""
        for path, t, tags in self._holders:
            for name, x in tags.items():
                self._contents.add(f"{path}.{name}", x, t)
        self._follow(fn)
        if not self.reach.names.isdisjoint(("backward", "grad")):  # then hooks on gradients may run in the forward
            self._follow_hooks()
        self._containers = [
            (name + "".join(path), x)
            for name, argument in arguments
            for path, x, inside in walk(argument, object_types)
            if inside is not None and self._contents.name_of(x)
        ]
        """The containers among the arguments that the model holds too: a trace has copies of them."""
        named = [(_in_words(name, place), place) for name, place, _ in self.reach.variables.values()]
        self._variables = [(name, place, place.current()) for name, place in named if name]
        self._holders += [(kind.__name__, kind, dict(vars(kind))) for kind in self.reach.bases]
        functions = self.reach.functions.values()
        self._holders += [(f.__name__, f, dict(tags) if (tags := vars(f)) else _NO_TAGS) for f in functions]

    def _follow(self, fn: Any) -> None:
        """Everything that `fn` and the model's modules may run, and the objects that they may write to."""
        if not isinstance(fn, functools.partial):
            self._contents.add("self", fn.__self__ if isinstance(fn, types.MethodType) else fn)
        self.reach.add(fn)
        for module in {type(module): module for module in self._model.modules}.values():
            self.reach.add(module)
        self.reach.follow(self._held)

    def _follow_hooks(self) -> None:
        """What hooks on the gradients of tensors from outside may run, and the objects that they may write to."""
        inside = [p for s in self._model.saved_modules for p in parameters_of(s.module).values() if p is not None]
        of_objects = [t for _, t in self._contents.tensors]
        for t in {id(t): t for t in (*self._model.tensors, *of_objects, *inside)}.values():
            for hook in hooks_of(t)[0]:
                self._contents.add("a hook on a gradient", hook)
        self.reach.follow(self._held)

    def _held(self) -> list[Any]:
        """The functions to which contents lead, and an object of each class."""
        contents = self._contents
        instances, contents.instances = contents.instances, {}
        functions, contents.functions = contents.functions, []
        modules, contents.modules = contents.modules, []
        instances |= {type(m): m for name, module in modules for m in self._model.save_outside(name, module)}
        return [*instances.values(), *functions]

    def refuse_held(self, changed: Collection[int], guards: Iterable[Guard] | None = None) -> None:
        """Raise UnsupportedOpError where a container among the arguments changes that the model reads elsewhere too.

        `changed` are the ids of what changes, and `guards` say what was read; None where that is not known.
        """
        for path, x in [(path, x) for path, x in self._containers if id(x) in changed]:
            read = self._contents if guards is None else Contents()
            for guard in guards or ():
                if isinstance(guard.source, At):
                    read.add(guard.name, guard.source.current(NO_CALL))
            if name := read.name_of(x):
                raise UnsupportedOpError(
                    f"the argument {path} is {name} too, and the forward changes it: a trace would have two of it",
                    module=self._model.type_name,
                    hint="trace with a copy of it; or let forward use the argument alone, or the other alone",
                )

    def restore(self) -> list[Change]:
        """Put all back as it was, and say what had changed: by value, or to another object that equals the old one."""
        of_modules = self._model.restore()
        variables = [Change(name, old, place.current(), place) for name, place, old in self._variables]
        changes = [*of_modules, *(c for c in variables if c.new is not c.old), *self._of_attributes()]
        for change in changes:
            change.place.put(change.old)
        return [*self._contents.restore(), *filter(is_change, changes)]

    def _of_attributes(self) -> Iterator[Change]:
        for name, holder, before in self._holders:
            current = vars(holder)
            if current and isinstance(holder, torch.Tensor):
                current = tags_of(holder)
            if (before or current) and not same_entries(before, current):
                is_class = isinstance(holder, type)
                changes = changed_attributes(name, holder, before, current, holder if is_class else vars(holder))
                yield from (change for change in changes if not (is_class and change.attribute[:2] == "__"))


def _in_words(name: str, place: Place) -> str:
    """What a variable is called; nothing for the attribute of a function, which is saved with that."""
    if isinstance(place.owner, types.CellType):
        return f"closure {name}"
    return f"globals()[{place.key!r}]" if "__name__" in place.owner else ""


def is_change(change: Change) -> bool:
    """Whether what was there and what is now differ by value, or are two objects with attributes."""
    old, new = plain(change.old), plain(change.new)
    return is_another_object(old, new) or not same(snapshot(old), snapshot(new))


def refuse_tags(results: Iterable[Value]) -> None:
    """Raise UnsupportedOpError where a result that the forward made has an attribute of users."""
    for v in results:
        if tags_of(v.fake) and v.op.kind == "call_function":
            raise UnsupportedOpError(
                f"the forward sets the attribute {next(iter(tags_of(v.fake)))!r} of its result, which results of a "
                "graph do not have",
                **place_of(v.op),
                hint="return the value beside the tensor, or set it outside of the forward",
            )


def settings_left(before: dict[str, Any], after: dict[str, Any], root: str) -> list[SideEffect]:
    """The settings of the process, by name, that the forward leaves changed; a call of the trace does not."""
    changed = [name for name in before if after[name] != before[name]]
    return [SideEffect(n, repr(before[n]), repr(after[n]), root, None, baked_in=True) for n in changed]


# Tensors of a trace in arguments and results, where no container shows them ------------------------------------------

_MOST = 10_000
"""So many objects behind a result are looked at."""
_NO_LEAVES = (type, types.ModuleType, types.CodeType, types.FrameType, enum.Enum, torch.dtype, torch.device)


def refuse_leak(x: Any, path: str, *, is_result: bool) -> None:
    """Raise OpaqueOutputError where a leaf holds a tensor of the trace that no container shows.

    Of arguments, only attributes of objects count. A result may be no iterator either.
    """
    kind = type(x)
    what = f"{path} is a {kind.__name__}"
    if is_result and isinstance(x, Iterator):
        raise OpaqueOutputError(
            f"{what}, which can be gone through once and computes later", hint="return a list or tuple of what it gives"
        )
    leak = _leak(x, _referents) if is_result and not isinstance(x, torch.Tensor) else None
    attributes = {} if isinstance(x, (torch.nn.Module, type)) else getattr(x, "__dict__", {})
    name = next((name for name, value in attributes.items() if _leak(value, parts_of) is not None), None)
    if leak is not None and isinstance(x, (Set, ValuesView)):
        problem = f"{what} with tensors in it, which has no order or keys that a trace could keep"
        hint = "return a list, tuple or dict"
    elif name is not None and isinstance(x, torch.Tensor):
        problem = f"{what}, a tensor subclass, whose parts (.{name}) a trace does not follow"
        hint = "pass and return the tensors in it"
    elif name is not None:
        problem = f"{path} is a {kind.__module__}.{kind.__qualname__} with tensors in it (.{name}), "
        problem += "and scopetrace cannot see inside objects of this type"
        hint = "make it a dataclass, or register it with torch.utils._pytree.register_pytree_node"
    elif leak is not None:
        held = "a tensor" if isinstance(leak, torch.Tensor) else "the storage of a tensor"
        problem = f"{what} that holds {held}, which no call of a trace can make again"
        hint = "return the tensors that are in it"
    else:
        return
    raise OpaqueOutputError(problem, hint=hint)


def refuse_hidden(x: Any, path: str) -> None:
    """Raise OpaqueOutputError where a leaf of the arguments is a container, as a set, with tensors in it."""
    is_mapping = isinstance(x, (dict, types.MappingProxyType))
    items = x.values() if is_mapping else x if isinstance(x, (list, tuple, Set, ValuesView)) else ()
    if any(isinstance(item, torch.Tensor) for item in items):
        raise OpaqueOutputError(
            f"the argument {path} is a {type(x).__name__} with tensors in it, which a trace cannot open",
            hint="pass a list, tuple or dict, or register its class with torch.utils._pytree.register_pytree_node",
        )


def _leak(x: Any, parts: Callable[[Any], Iterable[Any]]) -> Any:
    """A tensor of the trace, or its storage, to which an object leads; `parts` are what one refers to."""
    pending, seen = [x], {id(x): x}
    for reached in itertools.islice(pending, _MOST):  # which grows meanwhile
        if isinstance(reached, (FakeTensor, torch.UntypedStorage, torch.TypedStorage)):
            return reached
        new = {id(part): part for part in parts(reached) if id(part) not in seen}
        seen |= new
        pending += new.values()
    return None


def _referents(x: Any) -> Iterable[Any]:
    if isinstance(x, (*_NO_LEAVES, *Symbolic, torch.Tensor)):
        return ()
    if isinstance(x, types.FunctionType):  # without its globals
        return *(x.__closure__ or ()), *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), vars(x)
    if isinstance(x, torch.nn.Module):  # what attributes of the model's hold is real again after the trace
        return [member for table in MODULE_TABLES for member in vars(x).get(table, {}).values()]
    if isinstance(x, weakref.ref):
        return (x(),)
    return gc.get_referents(x)
