"""A tape under construction: ops are put on it one by one, with the results that fake tensors give."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch

from scopetrace._compat.tensors import storage_id
from scopetrace.infer.repeat import FakeRuns
from scopetrace.ir.tape import BodyTape, FunctionalTape, Op, Value, flat


class Emitter:
    """Appends to `tape`. Each op is put on for the sake of an op of the old tape, whose place (scope, call) it gets."""

    def __init__(self, tape: FunctionalTape | BodyTape) -> None:
        self.tape = tape
        self._fakes = FakeRuns(tape.fake_mode)
        self._storages = itertools.count(-1, -1)  # of values whose fake was borrowed from the old tape
        self._constants: dict[int, Value] = {}
        self._count = sum(name.startswith("_tensor_constant") for name in tape.attributes)

    def run(self, origin: Op, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put `func` on the tape; returns its result with values in place of tensors."""
        args, kwargs = self._lift(origin, args), self._lift(origin, kwargs)
        out = self._fakes.run(func, args, kwargs)
        op = self._append(origin, func, args, kwargs)
        carries = origin.grad and any(v.requires_grad for v in op.inputs())
        storages = {id(v.fake): v.storage for v in op.inputs()}
        known = {storage_id(v.fake): v.storage for v in op.inputs()}

        def value(t: Any, slot: int) -> Any:
            if not isinstance(t, torch.Tensor):
                return t
            storage = storages.get(id(t), known.get(storage_id(t)))
            if carries and t.is_floating_point() and not t.requires_grad and t.is_leaf and storage is None:
                t.requires_grad_()  # stands for the history that the real run has
            return Value(t, op, slot, next(self._storages) if storage is None else storage, None)

        if isinstance(out, (list, tuple)):
            op.outputs = type(out)(
                [
                    [value(u, s) for s, u in enumerate(t)] if isinstance(t, list) else value(t, s)
                    for s, t in enumerate(out)
                ]
            )
        else:
            op.outputs = value(out, 0)
        return op.outputs

    def bound(self, origin: Op) -> Callable[..., Any]:
        """`run` for one origin, called with positional arguments."""
        return lambda func, *args: self.run(origin, func, args, {})

    def again(self, old: Op, args: tuple[Any, ...], kwargs: dict[str, Any], storages: dict[int, int]) -> Any:
        """Put `old` on the tape with other arguments of the same metadata; its results have the metadata that it had.

        `storages` gives the new storage of each old one among the arguments.
        """
        op = self._append(old, old.target, args, kwargs)
        op.kind = old.kind

        def value(v: Any) -> Any:
            if not isinstance(v, Value):
                return v
            if v.storage not in storages:
                storages[v.storage] = next(self._storages)
            new = Value(v.fake, op, v.slot, storages[v.storage], v.key)
            new.offset, new.requires_grad = v.offset, v.requires_grad
            return new

        outs = old.outputs
        op.outputs = type(outs)([value(v) for v in outs]) if isinstance(outs, (list, tuple)) else value(outs)
        return op.outputs

    def more_results(self, op: Op, likes: list[Value]) -> list[Value]:
        """More results of the last op, each a new tensor as one of `likes`."""
        made = []
        for slot, like in enumerate(likes, len(op.outputs)):
            made.append(Value(self._fakes.like(like.fake), op, slot, next(self._storages), None))
        op.outputs = (*op.outputs, *made)
        return made

    def _append(self, origin: Op, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op:
        op = origin.moved_to(origin.call)
        op.kind, op.target, op.args, op.kwargs, op.outputs, op.writes = "call_function", func, args, kwargs, None, ()
        if func is not origin.target:
            op.unbacked = None
        self.tape.ops.append(op)
        return op

    def _lift(self, origin: Op, x: Any) -> Any:
        """Constants among the arguments become attributes."""
        if isinstance(x, torch.Tensor):
            return self.constant(origin, x)
        if isinstance(x, (list, tuple)):
            return type(x)([self._lift(origin, item) for item in x])
        if isinstance(x, dict):
            return {name: self._lift(origin, item) for name, item in x.items()}
        return x

    def constant(self, origin: Op, real: torch.Tensor) -> Value:
        """A tensor as an attribute."""
        found = self._constants.get(id(real))
        if found is None:
            name = f"_tensor_constant{self._count}"
            self._count += 1
            self.tape.attributes[name] = real
            op = dataclasses.replace(origin, kind="get_attr", target=name, args=(), kwargs={}, outputs=None, writes=())
            assert self.tape.fake_mode is not None
            fake = self.tape.fake_mode.from_tensor(real, static_shapes=True)
            found = op.outputs = Value(fake, op, 0, next(self._storages), None)
            found.real = real
            self.tape.ops.append(op)
            self._constants[id(real)] = found
        return found


__all__ = ["Emitter", "flat"]
