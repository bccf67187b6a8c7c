"""A `torch.autograd.Function` under autograd: one op, `autograd_function_apply`, with forward and backward as bodies.

Data flow:
    arguments -> forward runs on new tensors without autograd, with a `ctx` of ours -> body of the forward
    a gradient for each result -> backward runs with that `ctx` -> body of the backward
    what backward reads and does not make -> saved: more results of the forward, and operands of the backward

The op is torch's own: a call of the trace makes a Function of both bodies and applies it. Where autograd does not see
the call, the ops of the forward are recorded in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils import _pytree as pytree

from scopetrace._compat.tensors import base_of, requires_grad_of, run_fake
from scopetrace.errors import UnsupportedOpError
from scopetrace.guards.reach import names_of
from scopetrace.ir.segment import TapeSegment, body_tape, captured
from scopetrace.ir.tape import BodyTape, Value
from scopetrace.ops.higher_order import written_inputs
from scopetrace.ops.history import NO_GRADIENT, ONCE_DIFFERENTIABLE
from scopetrace.record.builder import Retrace, TapeBuilder
from scopetrace.record.higher_order import BodyRecorder
from scopetrace.record.values import ValueTable

_CLONE = torch.ops.aten.clone.default
_apply = torch.ops.higher_order.autograd_function_apply
_ONCE = once_differentiable(lambda *_: None).__code__
"""The code of each `backward` that torch wraps so that it cannot be differentiated."""


class FunctionRecorder(BodyRecorder):
    """Records one application of `cls`, a `torch.autograd.Function`, to `arguments`."""

    def __init__(
        self, cls: Any, arguments: tuple[Any, ...], values: ValueTable, recorded: Callable[[Any, Any], Any]
    ) -> None:
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        super().__init__(values, _apply, (None, None, *tensors), recorded)
        self.name, self._path = cls.__name__, f"{cls.__module__}.{cls.__qualname__}"
        self._arguments = arguments
        has_setup = cls.setup_context is not torch.autograd.Function.setup_context
        self._forward = functools.partial(_in_two, cls) if has_setup else cls.forward
        self._backward = cls.backward if cls.vjp is torch.autograd.Function.vjp else cls.vjp
        self._ctx = _Context(tuple(isinstance(a, torch.Tensor) and requires_grad_of(a) for a in arguments))
        self._results: tuple[Any, ...] = ()
        self._is_one = False
        self._changed: dict[int, torch.Tensor] = {}
        """What forward has written to, by the position of the operand; those that it returns, or further results."""

    def run(self) -> Any:
        """What the function returns to the model."""
        with torch.no_grad():
            forward, results = self._cut(self._run_forward, "forward", "fwd_body")
            returned = self._results
            results += self._write_to_copies(forward)
            self._refuse_absent_gradients()
            *failed, backward = self._cut_backward()
        saved = captured([backward])
        marked = {self.values.value_of(t) for t in self._ctx.saved_tensors if isinstance(t, torch.Tensor)}
        kwargs = {
            "non_differentiable_idx": [i for i, t in enumerate(results) if not self._is_differentiable(t)],
            "saved_for_backward_idx": [i for i, x in enumerate(saved) if isinstance(x, Value) and x in marked],
        }
        forward.outputs = [tuple(forward.outputs), tuple(saved)]
        operands = captured([forward])
        backward.outputs += [None for _ in operands]
        body, of_gradients = (body_tape(self.builder.tape, s, x) for s, x in ((forward, operands), (backward, saved)))
        self._forget([forward, *failed, backward], operands)
        late = len(of_gradients.inputs) - len(saved)  # backward may write to the gradients that it gets
        if written_inputs(body) or any(i >= late for i in written_inputs(of_gradients)):
            self._defer("writes to a tensor from outside", "clone() it first")
        out = self._give_out(body, [*self.operands, *operands], kwargs["non_differentiable_idx"])
        self._append_op((body, of_gradients, *self.operands, *operands), kwargs, tuple(out))
        self._write_back(results, out)
        left = iter(out)
        new = [next(left) if isinstance(x, torch.Tensor) else x for x in returned]
        return new[0] if self._is_one else tuple(new)

    # ---------------------------------------------------------------- what forward writes to

    def _write_to_copies(self, forward: TapeSegment) -> list[torch.Tensor]:
        """Have the body write to copies of the operands, as it writes to none. Gives its further results.

        Without `mark_dirty`, what is written is another tensor for autograd than what is returned.
        """
        written = {v.storage for op in forward.ops for v in op.writes}
        placeholders = [op for op in forward.ops if op.kind == "placeholder"]
        copies = []
        for i, op in enumerate(placeholders):
            value = op.outputs
            if isinstance(value, Value) and value.storage in written:
                value.op = None  # type: ignore[assignment]  # that of the copy: what the body reads is there
                new = self.values.new_result(self._like(value.fake))
                forward.ops[i] = op.replace(outputs=new)
                copies.append(op.replace(kind="call_function", target=_CLONE, args=(new,), outputs=value))
                self._changed[i] = value.fake
        forward.ops[len(placeholders) : len(placeholders)] = copies
        for call in forward.calls:
            call.start, call.stop = call.start + len(copies), call.stop + len(copies)
        dirty = set(map(id, self._ctx.dirty_tensors))
        more = [t for t in self._changed.values() if id(t) not in dirty]
        changed = {self.values.value_of(t).storage for t in self._changed.values()}
        others = [v for v in forward.outputs if isinstance(v, Value) and id(v.fake) not in dirty]
        outside = [x.storage for x in (*self.operands, *captured([forward])) if isinstance(x, Value)]
        shared = any(outside.count(self.operands[i].storage) > 1 for i in self._changed)
        if shared or any(v.storage in changed for v in others) or len(self._changed) < len(dirty):
            self._refuse("writes to a tensor from outside", "clone() it first")
        forward.outputs += map(self.values.value_of, more)
        self._results += tuple(more)
        return more

    def _write_back(self, results: list[torch.Tensor], out: list[torch.Tensor]) -> None:
        """Write the new data to the operands: with the history of the result for what forward has marked as dirty."""
        for i, t in self._changed.items():
            k = next(k for k, result in enumerate(results) if result is t)
            is_dirty = any(t is x for x in self._ctx.dirty_tensors)
            operand = self.grouped_operands[i][0]
            with torch.set_grad_enabled(is_dirty):
                self.recorded(operand.copy_, (out[k],))
            if is_dirty:
                out[k] = operand

    # ---------------------------------------------------------------- running both parts

    def _refuse_absent_gradients(self) -> None:
        """Which results have gradients is known when backward runs, and the op's one backward gets zeros for others."""
        count = sum(isinstance(t, torch.Tensor) and self._is_differentiable(t) for t in self._results)
        if count > 1 and not self._ctx.materialize_grads:
            problem = f"has {count} differentiable results, and asks for None in place of gradients that are zero"
            self._defer(problem, "trace the step with its backward(), leave out ctx.set_materialize_grads(False)")

    def _defer(self, problem: str, hint: str) -> None:
        """A forward that differentiates gets recorded again, and torch then applies the function."""
        self.builder.deferred.append(_error(self._path, problem, hint, self.builder))

    def _run_forward(self) -> tuple[list[Any], list[torch.Tensor]]:
        placeholders = iter([self._placeholder(i, x, group) for i, (x, group) in enumerate(self.grouped_operands)])
        inside = [next(placeholders) if isinstance(a, torch.Tensor) else a for a in self._arguments]
        returned = self.recorded(self._forward, (self._ctx, *inside))
        self._is_one = not isinstance(returned, tuple)
        self._results = (returned,) if self._is_one else returned
        self._count = len(self._results)
        results = [t for t in self._results if isinstance(t, torch.Tensor)]
        inner = [x for x in self._results if not isinstance(x, torch.Tensor)]
        if any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(inner)):
            self._refuse("returns tensors inside of a container", "return a tuple of tensors")
        return [self.values.value_of(t) for t in results], results

    def _is_differentiable(self, t: torch.Tensor) -> bool:
        floating = t.is_floating_point() or t.is_complex()
        constant = *self._ctx.non_differentiable, *self._results[self._count :]
        return floating and all(t is not other for other in constant)

    def _cut_backward(self) -> list[TapeSegment]:
        """The body of the backward, last; before it what was recorded of one that is refused.

        A trace of the forward is right without that backward: in its place is an op that raises in a call.
        """
        failed, error = self._cut(self._run_backward_if_possible, "backward", "bwd_body")
        if error is None:
            return [failed]
        reason = "it differentiates by itself; trace the step" if isinstance(error, Retrace) else error
        why = f"a trace of a forward has no gradient through {self._path}, as no graph has its backward: {reason}"

        def run() -> tuple[list[Any], None]:
            needed = zip(self._arguments, self._ctx.needs_input_grad, strict=True)
            tensors = [(a, is_needed) for a, is_needed in needed if isinstance(a, torch.Tensor)]
            gradients = [self.recorded(NO_GRADIENT, (a, why)) if is_needed else None for a, is_needed in tensors]
            return [x if x is None else self.values.value_of(x) for x in gradients], None

        return [failed, self._cut(run, "backward", "bwd_body")[0]]

    def _run_backward_if_possible(self) -> tuple[list[Any], BaseException | None]:
        deferred = len(self.builder.deferred)
        try:
            return self._run_backward(), None
        except (Exception, Retrace) as error:
            if isinstance(error, Retrace) and not error.needed.get("differentiates"):
                raise
            del self.builder.deferred[deferred:]
            return [], error

    def _run_backward(self) -> list[Any]:
        grads: list[Any] = [None for _ in self._results]
        for i, t in enumerate(self._results):
            if not isinstance(t, torch.Tensor):
                continue
            grad = self._like(self.values.value_of(t).fake)
            self.values.append_body_input(f"grad_{i}", grad)
            if self._is_differentiable(t) or self._ctx.materialize_grads:
                grads[i] = grad
        gradients = self.recorded(self._backward, (self._ctx, *grads[: self._count]))
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        count = len(self._arguments)
        if len(gradients) < count or any(x is not None for x in gradients[count:]):
            self._refuse(f"returns {len(gradients)} gradients for {count} arguments", "return one for each")
        needed = zip(gradients[:count], self._ctx.needs_input_grad, self._arguments, strict=True)
        results = [grad if is_needed else None for grad, is_needed, a in needed if isinstance(a, torch.Tensor)]
        if getattr(self._backward, "__code__", None) is _ONCE:
            taken = [grad for grad in grads if grad is not None]
            results = [x if x is None else self.recorded(ONCE_DIFFERENTIABLE, (x, taken)) for x in results]
        return [x if x is None else self.values.value_of(x) for x in results]

    def _refuse(self, problem: str, hint: str) -> NoReturn:
        raise _error(self._path, problem, hint, self.builder)

    # ---------------------------------------------------------------- the op

    def _give_out(self, forward: BodyTape, operands: list[Any], constant: list[int]) -> list[torch.Tensor]:
        """The results: new tensors, or aliases of operands where forward returns a view."""
        placeholders = [op.outputs for op in forward.ops if op.kind == "placeholder"]
        sources = {v.storage: (v, x) for v, x in zip(placeholders, operands, strict=True) if isinstance(v, Value)}
        outputs: list[torch.Tensor] = []
        taken: set[int] = set()
        for i, v in enumerate(forward.outputs[0]):
            if v.storage not in sources:
                if v.storage in taken:
                    self._refuse("returns two results that share memory", "clone() one of them")
                taken.add(v.storage)
                outputs.append(self._like(v.fake))
            else:
                outputs.append(self._alias(v, *sources[v.storage]))
            if i not in constant:
                self._give_grad(outputs[-1:])
        return outputs

    def _alias(self, v: Value, placeholder: Value, operand: Value) -> torch.Tensor:
        if v.fake.dtype != operand.fake.dtype:
            self._refuse("returns a view of another dtype", "clone() it")
        offset = operand.offset + v.offset - placeholder.offset
        mode, base = self.factory.mode, operand.fake
        alias = run_fake(mode, torch.ops.aten.detach.default, (base,), {})
        args = (alias, list(v.fake.size()), list(v.fake.stride()), offset)
        view: torch.Tensor = run_fake(mode, torch.ops.aten.as_strided.default, args, {}, grad=True)
        return view


def _error(path: str, problem: str, hint: str, builder: TapeBuilder) -> UnsupportedOpError:
    hint += ", trace under torch.no_grad(), name the module in leaf_modules=, or make it a torch.library.custom_op"
    return builder.refusal(f"{path} is a torch.autograd.Function that {problem}", op=path, hint=hint)


def refuse_dirty_view(cls: Any, tensors: Sequence[torch.Tensor], builder: TapeBuilder) -> None:
    """Raise where torch runs a function that may write to a view: autograd does not show it in the view's history."""
    names = [names_of(f.__code__).all for f in (cls.forward, cls.setup_context) if isinstance(f, FunctionType)]
    if any("mark_dirty" in of_method for of_method in names) and any(base_of(t) is not None for t in tensors):
        path = f"{cls.__module__}.{cls.__qualname__}"
        raise _error(path, "writes to its arguments (mark_dirty), one of which is a view", "clone() it first", builder)


class _Context(FunctionCtx):
    """The `ctx` of a `torch.autograd.Function` whose forward and backward run without autograd."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.to_save: tuple[Any, ...] = ()
        self.dirty_tensors: tuple[torch.Tensor, ...] = ()
        self.non_differentiable: tuple[torch.Tensor, ...] = ()
        self.materialize_grads = True

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """What the forward gave to `save_for_backward`."""
        return tuple(self.to_save)


def _in_two(cls: Any, ctx: Any, *args: Any) -> Any:
    """The forward of a `torch.autograd.Function` that has a `setup_context`, with `ctx` as first argument."""
    out = cls.forward(*args)
    cls.setup_context(ctx, args, out)
    return out
