"""Module calls: which module, with what, giving what, and which ops in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from scopetrace._compat.dispatch import eager, paused
from scopetrace.containers.structure import leaves_with_path, map_structure
from scopetrace.errors import RandomStateError, UnsupportedOpError
from scopetrace.ir.scopes import Scope
from scopetrace.ir.tape import Call, Value
from scopetrace.record.classes import Classes
from scopetrace.record.leaves import LeafRule
from scopetrace.record.recorder import Recorder
from scopetrace.record.retrace import Retrace

Progress = Callable[[str, int], None]


class CallObserver:
    """Puts module calls on the tape of `recorder`; an `Observer` of `_compat.patches`."""

    def __init__(self, recorder: Recorder, is_leaf: LeafRule, progress: Progress | None) -> None:
        self.recorder = recorder
        self.is_leaf = is_leaf
        self.progress = progress
        self.paused = False
        self._counts: dict[int, int] = {}
        self._classes = Classes()
        self._began: list[set[str]] = []  # of each open call, the entrances that belong to it and were passed
        recorder.boundary = CallObserver._run.__code__

    def run_root(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what is traced as the outermost call."""
        model = self.recorder.model
        call = self._open(model.root, "" if model.root is not None else None, self.recorder.tape.root, args, kwargs)
        call.fqn = ""
        return self._run(call, set(), fn, args, kwargs)

    def on_call(self, module: torch.nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module is called."""
        if self._enters(module, "call"):
            return run(module, *args, **kwargs)
        return self._record(module, run, args, kwargs, {"call"})

    def on_forward(self, module: torch.nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module's forward is called: by the call that is open, or by the user in place of a call."""
        if self._enters(module, "forward"):
            return run(module, *args, **kwargs)
        return self._record(module, run, args, kwargs, {"call", "forward"})

    def on_backward(self, *, accumulates: bool) -> None:
        """The forward differentiates."""
        if accumulates:
            raise UnsupportedOpError(
                "the forward calls backward(), which changes .grad of parameters",
                op="backward",
                **self.recorder.where(),
                hint="return the loss and call backward() outside, or use torch.autograd.grad",
            )
        if not self.recorder.exact:
            raise Retrace("the forward differentiates", exact_autograd=True)

    def on_custom_function(self, cls: type, args: Any) -> None:
        """A function with a backward of its own, which a graph of its forward would lose."""
        if torch.is_grad_enabled() and any(t.requires_grad for t in args if isinstance(t, torch.Tensor)):
            raise UnsupportedOpError(
                f"{cls.__qualname__} is a torch.autograd.Function, whose backward a graph of ops does not have",
                op=f"{cls.__module__}.{cls.__qualname__}",
                **self.recorder.where(),
                hint="trace under torch.no_grad(), name it in leaf_modules=, or make it a torch.library.custom_op",
            )

    def on_seed(self) -> None:
        """The forward seeds torch's generator."""
        raise RandomStateError(
            "the forward seeds torch's random generator, which no graph can repeat",
            **self.recorder.where(),
            hint="call torch.manual_seed outside the model",
        )

    def on_storage_resize(self, storage: torch.UntypedStorage, size: int) -> bool:
        """Recorded as the op that Dynamo writes for it."""
        return self.recorder.running is None and self.recorder.resize_storage(storage, size)

    def on_data(self, t: torch.Tensor, get: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The forward reads `t.data`, which is `get(t)`."""
        return self.recorder.data_alias(get(self.recorder.present(t)))

    def on_set_data(self, t: torch.Tensor, new: Any) -> bool:
        """Recorded as `t.set_(new)` for tensors from outside; for others their memory says it."""
        recorder = self.recorder
        if recorder.running is not None or not isinstance(new, torch.Tensor) or not recorder.is_outside(t):
            return False
        if self.paused or (t.dtype, t.device, t.layout) != (new.dtype, new.device, new.layout):
            raise UnsupportedOpError(
                "`.data = ...` of a tensor of the model, or an input, "
                + ("in a leaf module" if self.paused else f"that gives it {new.dtype} on {new.device}"),
                op="Tensor.data",
                **recorder.where(),
                hint="bind a new tensor (`self.name = ...`), or write to it with copy_",
            )
        if not recorder.are_one(t, new):
            with torch.no_grad():
                t.set_(new.detach())  # type: ignore[call-overload]
        return True

    def on_number(self, x: Any) -> Any:
        """A tensor with one element, or a symbolic number, becomes text or a key: perhaps the name of a module."""
        return self.recorder.number_of(x)

    def on_numpy(self, t: torch.Tensor) -> Any:
        """A tensor becomes an array of NumPy."""
        return self.recorder.data_of(t)

    def _enters(self, module: torch.nn.Module, entrance: str) -> bool:
        """Whether this is the open call on its way in, rather than a new call of the same module."""
        call = self.recorder.call
        if call is None or call.module is not module or entrance in self._began[-1]:
            return False
        self._began[-1].add(entrance)
        if entrance == "forward":
            self._began[-1].add("call")
        return True

    def _record(self, module: torch.nn.Module, run: Callable[..., Any], args: Any, kwargs: Any, began: set[str]) -> Any:
        fqn, scope = self._place(module)
        call = self._open(module, fqn, scope, args, kwargs)
        call.direct = "forward" in began
        if self.progress is not None:
            self.progress(str(scope), len(self.recorder.tape.ops))
        if self.is_leaf(module, fqn or ""):
            return self._run_leaf(call, run, args, kwargs)
        return self._run(call, began, run, (module, *args), kwargs)

    def _place(self, module: torch.nn.Module) -> tuple[str | None, Scope]:
        parent = self.recorder.call
        while parent is not None and parent.fqn is None:
            parent = parent.parent
        inside = (parent.fqn if parent is not None else "") or ""
        fqn = self.recorder.model.module_name(module, inside)
        name = (fqn or "").removeprefix(inside + ".") if inside else fqn or ""
        return fqn, self.recorder.state.current_scope.child(name, type(module).__name__)

    def _open(self, module: torch.nn.Module | None, fqn: str | None, scope: Scope, args: Any, kwargs: Any) -> Call:
        recorder = self.recorder
        index = self._counts.get(id(module), 0)
        self._counts[id(module)] = index + 1
        call = Call(
            module=module,
            fqn=fqn,
            index=index,
            parent=recorder.call,
            scope=scope,
            args=tuple([self._snapshot(a) for a in args]),
            kwargs={name: self._snapshot(a) for name, a in kwargs.items()},
            start=len(recorder.tape.ops),
            frames=recorder.frames() if recorder.call is not None else (),
            attributes=_plain_attributes(module) if module is not None else {},
            position=next(recorder.positions),
            module_type=self._classes.of(module) if module is not None else None,
            replaced=recorder.model.replaced(module) if module is not None else (),
        )
        recorder.tape.calls.append(call)
        return call

    def _snapshot(self, x: Any) -> Any:
        return map_structure(self.recorder.value_of, x, torch.Tensor, self.recorder.object_types)

    def _run(self, call: Call, began: set[str], run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        recorder = self.recorder
        outer, recorder.call = recorder.call, call
        mark = recorder.state.enter_module(call.scope)
        self._began.append(began)
        try:
            out = run(*args, **kwargs)
            if outer is None:
                map_structure(recorder.tell_apart, out, torch.Tensor, recorder.object_types)
            call.outputs = self._snapshot(out)
            return out
        except BaseException as error:
            call.raised = error
            raise
        finally:
            self._began.pop()
            recorder.call = outer
            call.stop = len(recorder.tape.ops)
            recorder.state.leave_module(mark, raising=call.raised is not None)

    def _run_leaf(self, call: Call, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One op for the whole call: torch runs the module on fake tensors, unseen."""
        recorder = self.recorder
        call.leaf = True
        mark = recorder.state.enter_module(call.scope)
        outer, recorder.call = recorder.call, call
        self.paused = True
        state = _LeafState(call.module)
        try:
            read = [
                t for _, t in leaves_with_path((args, kwargs), "", recorder.object_types) if isinstance(t, torch.Tensor)
            ]
            versions = [t._version for t in read]
            with paused():
                out = run(call.module, *args, **kwargs)
            name = call.fqn or f"_leaf_module{len(recorder.tape.modules)}"
            op = recorder.add_module_op(name, call)
            op.writes = tuple(recorder.value_of(t) for t, old in zip(read, versions, strict=True) if t._version != old)
            slots = iter(range(1 << 30))
            op.outputs = map_structure(
                lambda t: recorder.add_results(op, t, next(slots)), out, torch.Tensor, recorder.object_types
            )
            call.outputs = op.outputs
            return out
        except BaseException as error:
            call.raised = error
            raise
        finally:
            state.restore()
            self.paused = False
            recorder.call = outer
            call.stop = len(recorder.tape.ops)
            recorder.state.leave_module(mark, raising=call.raised is not None)


class _LeafState:
    """The buffers of a leaf, which running it on fake tensors may still change."""

    def __init__(self, module: torch.nn.Module | None) -> None:
        with eager():
            self._saved = [(b, b.clone()) for b in (module.buffers() if module is not None else ())]

    def restore(self) -> None:
        """Put the data back."""
        with eager():
            for buffer, before in self._saved:
                if buffer.device.type != "meta":
                    buffer.copy_(before)


def _plain_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """The attributes that are neither tensors, modules nor nn.Module's own bookkeeping."""
    return {
        name: value
        for name, value in module.__dict__.items()
        if name[0] != "_" and not isinstance(value, (torch.Tensor, torch.nn.Module, Value))
    }
