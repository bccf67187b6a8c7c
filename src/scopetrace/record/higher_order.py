"""Higher-order ops: `torch.cond`, `while_loop`, `scan`, `map`. Their callables are recorded as tapes of their own.

Data flow:
    op with callables and operands -> each callable runs once, on new tensors, and its ops go to the end of the tape
    these ops -> cut off as a TapeSegment -> a body tape: what it reads from outside becomes one more operand
    bodies -> the op's own shape function -> an Op with tapes among its arguments
    `flex_attention`: its functions of scores and of the mask run on numbers of no dimension; what each reads from
        outside is one more operand for it, a "buffer" in torch's words

A body has placeholders for the operands in order, then for what all bodies of the op captured: values, parameters,
sizes. Constants and parameters are read outside, so that a body holds no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from scopetrace._compat.ops import fake_results, in_transform, indexing_as_op
from scopetrace._compat.tensors import run_fake
from scopetrace.errors import ControlFlowError
from scopetrace.ir.segment import TapeSegment, body_tape, captured, name_of
from scopetrace.ir.tape import BodyTape, Value, map_argument, values_in
from scopetrace.ops.functional_variants import is_metadata_only
from scopetrace.ops.higher_order import FORMS, written_inputs
from scopetrace.record.values import ValueTable, body_error

_hops = torch.ops.higher_order


class BodyRecorder:
    """Records one call of a higher-order op. `recorded` runs a callable and records its ops."""

    def __init__(
        self, values: ValueTable, hop: Any, args: tuple[Any, ...], recorded: Callable[[Any, Any], Any]
    ) -> None:
        self.builder, self.values, self.factory = values.builder, values, values.factory
        self._like = values.inference.like
        self.hop = hop
        self.name = str(hop)
        """What the scopes of its bodies are in."""
        self.form = FORMS[hop]
        self.recorded = recorded
        self.args = self.form.gathered(args)
        self.grouped_operands = [(x, i) for i in self.form.operands for x in self.args[i]]
        """The operands as Python gave them, each with the position of its group in the arguments."""
        self.operands = [self._lifted(x) for x, _ in self.grouped_operands]

    def _lifted(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return (list if isinstance(x, list) else tuple)([self._lifted(item) for item in x])
        return self.values.value_of(x) if isinstance(x, torch.Tensor) else x

    def run(self) -> Any:
        """What the op returns to the model."""
        self._refuse_transforms()
        recorded = [self._segment(*body) for body in self.form.bodies]
        segments = [segment for segment, _ in recorded]
        if len({str(spec) for segment, spec in recorded if not segment.is_condition}) > 1:
            self._refuse("the branches return different structures", "return the same structure from each")
        taken = captured(segments)
        bodies = [body_tape(self.builder.tape, segment, taken, torch.is_grad_enabled()) for segment in segments]
        inputs = [*self.operands, *taken]
        self._forget(segments, taken)
        for body in bodies:
            self._check_results(body)
        written = self._written(bodies, inputs)
        return self._append(bodies, recorded[-1][1], taken, tuple(written))

    def _refuse_transforms(self) -> None:
        if in_transform():
            problem = "a higher-order op inside of torch.vmap, grad or another transform"
            hint = "call it outside, or compute both sides and pick with torch.where"
            raise self.builder.refusal(problem, op=str(self.hop), hint=hint)

    def _segment(self, position: int, parameter: str, graph: str) -> tuple[TapeSegment, Any]:
        """Run a callable and take what it recorded off the tape; also, how pytree puts its results together."""

        def run() -> tuple[list[Any], Any]:
            placeholders = [self._placeholder(i, x, group) for i, (x, group) in enumerate(self.grouped_operands)]
            flat, spec = pytree.tree_flatten(self.recorded(self.args[position], placeholders))
            return [self._output(leaf, parameter) for leaf in flat], spec

        return self._cut(run, parameter, graph)

    def _cut(self, run: Callable[[], tuple[list[Any], Any]], parameter: str, graph: str) -> tuple[TapeSegment, Any]:
        """Call `run`, which returns what the body gives and more, and take what it records off the tape."""
        builder, tape = self.builder, self.builder.tape
        start, first_call = len(tape.ops), len(tape.calls)
        scope = builder.state.current_scope.child(self.name).child(parameter)
        mark = builder.state.enter_module(scope)
        raising = True
        try:
            outputs, spec = run()
            raising = False
        except Exception:  # noted and passed on: the forward may catch it, and the tape would lack the body
            builder.deferred.append(body_error("an exception left a body, and was caught", tape.root.path))
            raise
        finally:
            builder.state.leave_module(mark, raising=raising)
        segment = TapeSegment(graph, scope, builder.call, start, tape.ops[start:], tape.calls[first_call:], outputs)
        del tape.ops[start:], tape.calls[first_call:]
        builder.regions = [region for region in builder.regions if region.stop <= start]  # others are part of the body
        if any(op.kind == "call_module" for op in segment.ops):
            self._refuse("a leaf module is called in a body", "do not name it in leaf_modules=")
        for op in segment.hoisted():
            builder.append(op.kind, op.target, op.args, op.kwargs, op.outputs).take_values()
        return segment, spec

    def _placeholder(self, number: int, x: Any, group: int) -> Any:
        """What a callable gets for an operand: another tensor of the same kind, which is a placeholder of the body."""
        factory, operand = self.factory, self.operands[number]
        differs = group in (self.form.carried, self.form.sliced)  # from the operand itself
        name = name_of(None if differs else operand, number)
        if not isinstance(x, torch.Tensor):
            if group == self.form.carried and isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool):
                with factory.shape_env.ignore_fresh_unbacked_symbols():  # of unknown value, which no op makes
                    x = factory.shape_env.create_unbacked_symint()
            self.values.append_body_input(name, x)
            return x
        fake = operand.fake
        if group == self.form.sliced:
            fake = run_fake(factory.mode, torch.ops.aten.select_copy.int, (fake, 0, 0), {})
        new = self._like(fake)
        if operand.fake.requires_grad:
            new.requires_grad_()
            if not operand.fake.is_leaf or group == self.form.sliced:
                factory.give_history(new)
        self.values.append_body_input(name, new)
        return new

    def _output(self, leaf: Any, parameter: str) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.values.value_of(leaf)
        is_condition = parameter == "cond_fn" and isinstance(leaf, (bool, torch.SymBool))
        is_number = isinstance(leaf, (int, torch.SymInt)) and not isinstance(leaf, bool)
        if is_condition or is_number or (leaf is None and self.hop is _hops.invoke_subgraph):
            return leaf
        self._refuse(f"a body returns a {type(leaf).__name__}", "return tensors, or whole numbers")

    def _forget(self, segments: list[TapeSegment], taken: list[Any]) -> None:
        """What the segments made is unknown outside. `taken` is what they read from there."""
        body_values = {v for segment in segments for op in segment.kept() for v in op.values()}
        outside = {v.storage for v in (*self.operands, *taken) if isinstance(v, Value)}
        self.values.forget(body_values, {v.storage for v in body_values} - outside)

    def _check_results(self, body: BodyTape) -> None:
        seen = {op.outputs.storage for op in body.ops if op.kind == "placeholder" and isinstance(op.outputs, Value)}
        for value in values_in(body.outputs):
            if value.storage in seen:
                self._refuse("a result of a body shares memory with an operand or another result", "clone() it")
            seen.add(value.storage)

    def _written(self, bodies: list[BodyTape], inputs: list[Any]) -> list[Value]:
        indices = dict.fromkeys(i for body in bodies for i in written_inputs(body))
        written: list[Value] = [inputs[i] for i in sorted(indices)]
        if not written:
            return []
        if not self.form.runs_once:
            self._refuse("a body that runs several times writes to a tensor from outside", "clone() it first")
        if torch.is_grad_enabled():
            self._refuse("a body writes to a tensor from outside while autograd is on", "clone() it first")
        storages = [v.storage for v in inputs if isinstance(v, Value)]
        outside = [({v.storage for v in body.inputs}, op) for body in bodies for op in body.ops if not op.bodies()]
        changing = [op for inputs, op in outside if any(v.storage in inputs for v in op.writes)]
        if any(is_metadata_only(op.target) for op in changing):
            self._refuse("a body changes the shape or memory of a tensor from outside", "clone() it first")
        if any(storages.count(v.storage) > 1 for v in written):
            self._refuse("a body writes to memory that several of its operands share", "clone() it first")
        return written

    def _refuse(self, problem: str, hint: str) -> NoReturn:
        raise ControlFlowError(f"{self.hop}: {problem}", op=str(self.hop), hint=hint, **self.builder.where())

    def _append(self, bodies: list[BodyTape], spec: Any, more: list[Any], written: tuple[Value, ...]) -> Any:
        args, last = [self._lifted(a) for a in self.args], self.form.operands[-1]
        args[last] = type(args[last])([*args[last], *more])
        fakes = fakes_of(args)
        for (position, _, _), body in zip(self.form.bodies, bodies, strict=True):
            args[position], fakes[position] = body, self._results_of(body)
        out = tuple(fake_results(self.factory.mode, self.hop, self.form.spread(fakes)))
        unbacked = self.factory.unbacked_bindings(out)
        taken = self.form.spread(args)
        if torch.is_grad_enabled() and any(v.fake.requires_grad for v in values_in(taken)):
            self._give_grad(out)
        self._append_op(taken, {}, out, written, unbacked)
        return pytree.tree_unflatten(list(out), spec)

    def _append_op(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *rest: Any) -> None:
        """Put the op on the tape, with these results; `rest` are the further fields of Op."""
        outputs = self.values.new_results(out)
        for value in values_in(outputs):
            value.autograd_placeholder = value.fake.requires_grad
        self.builder.append("call_function", self.hop, args, kwargs, outputs, *rest)

    def _give_grad(self, out: Any) -> None:
        """Results that require grad; where autograd sees every op, with a history that it cannot go back through."""
        for t in out:
            if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex()):
                t.requires_grad_()
                if self.builder.tape.exact_autograd:
                    self.factory.give_history(t)
                    self.builder.opaque_to_autograd = str(self.hop)

    def _results_of(self, body: BodyTape) -> Callable[..., Any]:
        """For the shape function: the body as a callable, whose results are those recorded, with new memory."""
        return lambda *_: tuple([self._like(v.fake) if isinstance(v, Value) else v for v in body.outputs])


def fakes_of(x: Any) -> Any:
    """An op's arguments with fake tensors in place of values."""
    return map_argument(lambda leaf: leaf.fake if isinstance(leaf, Value) else leaf, x)


# flex_attention ------------------------------------------------------------------------------------------------------

_INDICES = ("b", "h", "q_idx", "kv_idx")
_SCORE_BUFFERS, _MASK_BUFFERS = 7, 8
"""The arguments that hold what the bodies capture."""


class FlexRecorder(BodyRecorder):
    """Records one call of `flex_attention`."""

    def run(self) -> Any:
        """What the op returns to the model."""
        self._refuse_transforms()
        query, key, value, score_mod, (*mask, mask_mod), scale, options, *_ = self.args
        score, score_buffers = self._body(score_mod, "score_mod", "sdpa_score", ("score", *_INDICES), _SCORE_BUFFERS)
        chosen, mask_buffers = self._body(mask_mod, "mask_mod", "sdpa_mask", _INDICES, _MASK_BUFFERS)
        tensors = tuple(map(self._lifted, (query, key, value)))
        block_mask = (*map(self._lifted, mask), chosen)
        args = (*tensors, score, block_mask, scale, options, score_buffers, mask_buffers)
        # torch's shape function gives views, which no op outside of it makes
        out = tuple(map(self._like, fake_results(self.factory.mode, self.hop, fakes_of(args))))
        if torch.is_grad_enabled() and any(v.fake.requires_grad for v in values_in((tensors, score_buffers))):
            self._give_grad(out[:2])
        self._append_op(args, {}, out)
        return out

    def _body(
        self, function: Any, parameter: str, graph: str, names: tuple[str, ...], group: int
    ) -> tuple[BodyTape, tuple[Any, ...]]:
        def run() -> tuple[list[Any], None]:
            numbers = [self._number(name) for name in names]
            placeholders = [self._placeholder(i, x, g) for i, (x, g) in enumerate(self.grouped_operands) if g == group]
            with indexing_as_op():
                result = self.recorded(function, (*numbers, *placeholders))
            return [self.values.value_of(result)], None

        segment, _ = self._cut(run, parameter, graph)
        free_values = captured([segment])
        body = body_tape(self.builder.tape, segment, free_values)
        self._forget([segment], free_values)
        if written_inputs(body):
            self._refuse(f"{parameter} writes to a tensor", "give it a tensor that does not change")
        if any(op.bodies() for op in body.ops):  # a table that requires grad is indexed by a torch.autograd.Function
            self._refuse(f"{parameter} indexes a tensor that requires grad", "detach() it, or trace under no_grad()")
        return body, (*(self.operands[i] for i, (_, g) in enumerate(self.grouped_operands) if g == group), *free_values)

    def _number(self, name: str) -> torch.Tensor:
        query = self._lifted(self.args[0]).fake
        dtype = query.dtype if name == "score" else torch.int32
        number = self.factory.fresh((), (), dtype, query.device, name == "score" and query.requires_grad)
        self.values.append_body_input(name, number)
        return number
