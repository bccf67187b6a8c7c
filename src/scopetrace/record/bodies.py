"""Higher-order ops: `torch.cond`, `while_loop`, `scan`, `map`. Their callables are recorded as tapes of their own.

Data flow:
    op with callables and operands -> each callable runs once, on operands made anew, onto the end of the tape
    that stretch of the tape -> cut off as a body: what it reads from outside becomes one more operand
    bodies -> the op's own shape function -> an Op with tapes among its arguments

A body is a whole program: placeholders for the operands in order, then for what all bodies of the op captured (values,
parameters, sizes). Constants and parameters are read outside, so that it holds no tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.fx
from torch.utils import _pytree as pytree

from scopetrace._compat.dispatch import fake_results, in_transform
from scopetrace._compat.tensors import first_slice, unbacked_symint, without_dispatch
from scopetrace.errors import ControlFlowError, UnsupportedOpError
from scopetrace.ir.tape import BodyTape, Op, Value, values_in
from scopetrace.ops.functional_variants import is_metadata_only
from scopetrace.record.body import Stretch, body_tapes, name_of
from scopetrace.record.writer import TapeWriter

_hops = torch.ops.higher_order


@dataclasses.dataclass(frozen=True)
class Form:
    """Where a higher-order op has its callables and what goes into them."""

    bodies: tuple[tuple[int, str, str], ...]
    """Of each callable: its position, the parameter's name, and what torch.export names its graph after."""
    operands: tuple[int, ...]
    """The arguments that hold the operands, in the order in which the callables take them. The last one takes more."""
    sliced: int | None = None
    """The one of them of whose tensors the callables get slices."""
    carried: int | None = None
    """The one whose tensors and numbers the callables get anew each time."""
    runs_once: bool = False
    """Whether a body runs at most once in a call, so that it may write to its operands."""
    has_rest: bool = False
    """Whether the operands are not one argument but all from there on."""

    def gathered(self, args: tuple[Any, ...]) -> list[Any]:
        """The arguments, the operands always in lists or tuples."""
        last = self.operands[-1]
        return [*args[:last], tuple(args[last:])] if self.has_rest else list(args)

    def spread(self, args: list[Any]) -> tuple[Any, ...]:
        """As the op takes them: the inverse of `gathered`."""
        return (*args[:-1], *args[-1]) if self.has_rest else tuple(args)


FORMS: dict[Any, Form] = {
    _hops.cond: Form(((1, "true_fn", "true_graph"), (2, "false_fn", "false_graph")), (3,), runs_once=True),
    _hops.while_loop: Form(
        ((0, "cond_fn", "while_loop_cond_graph"), (1, "body_fn", "while_loop_body_graph")), (2, 3), carried=2
    ),
    _hops.scan: Form(((0, "combine_fn", "scan_combine_graph"),), (1, 2, 3), sliced=2, carried=1),
    _hops.map_impl: Form(((0, "f", "body_graph"),), (1, 2), sliced=1),
    _hops.associative_scan: Form(((0, "combine_fn", "associative_scan_combine_graph"),), (1, 1, 2), sliced=1),
    _hops.invoke_subgraph: Form(((0, "subgraph", "repeated_subgraph"),), (2,), runs_once=True, has_rest=True),
}
"""The ops whose callables are recorded as bodies."""

INLINED = (_hops.tag_activation_checkpoint, _hops.wrap_activation_checkpoint)
"""The ops that call their callable and say how autograd is to keep its results. Their callable becomes part of the
program, as that of torch.utils.checkpoint does."""


class BodyRecorder:
    """One higher-order op on its way to the tape. `recorded` runs a callable with the recorder on."""

    def __init__(self, writer: TapeWriter, hop: Any, args: tuple[Any, ...], recorded: Callable[..., Any]) -> None:
        self.writer = writer
        self.hop = hop
        self.form = FORMS[hop]
        self.recorded = recorded
        self.args = self.form.gathered(args)
        self.operands = [x for i in self.form.operands for x in self.args[i]]
        self.values = [writer.value_of(x) if isinstance(x, torch.Tensor) else x for x in self.operands]

    def run(self) -> Any:
        """What the op returns to the model."""
        if in_transform():
            raise UnsupportedOpError(
                "a higher-order op inside of torch.vmap, grad or another transform",
                op=str(self.hop),
                hint="call it outside, or compute both sides and pick with torch.where",
                **self._where(),
            )
        stretches = [self._stretch(*body) for body in self.form.bodies]
        if len({str(s.spec) for s in stretches if not s.is_condition}) > 1:
            self._refuse("the branches return different structures", "return the same structure from each")
        bodies, captured = body_tapes(self.writer.tape, stretches)
        made = {v.storage for body in bodies for op in body.ops for v in op.values()}
        inputs = [*self.values, *captured]
        self.writer.forget({v for s in stretches for op in s.kept() for v in op.values()}, made - _storages(inputs))
        for body in bodies:
            self._check_results(body)
        written = self._written(bodies, inputs)
        return self._append(bodies, stretches[-1].spec, captured, tuple(written))

    # ---------------------------------------------------------------- running a callable

    def _stretch(self, position: int, parameter: str, graph: str) -> Stretch:
        """Run a callable and take what it recorded off the tape."""
        writer, tape = self.writer, self.writer.tape
        start, first_call = len(tape.ops), len(tape.calls)
        scope = writer.state.current_scope.child(str(self.hop)).child(parameter)
        mark = writer.state.enter_module(scope)
        before, writer.broken = writer.broken, "an exception left a body, and was caught"
        raising = True
        try:
            given = [self._given(i, x, group) for i, (x, group) in enumerate(self._grouped())]
            out = self.recorded(self.args[position], given)
            flat, spec = pytree.tree_flatten(out)
            outputs = [self._output(leaf, parameter) for leaf in flat]
            writer.broken, raising = before, False
        finally:
            writer.state.leave_module(mark, raising=raising)
        stretch = Stretch(graph, scope, writer.call, start, tape.ops[start:], tape.calls[first_call:], outputs, spec)
        del tape.ops[start:], tape.calls[first_call:]
        if any(op.kind == "call_module" for op in stretch.ops):
            self._refuse("a leaf module is called in a body", "do not name it in leaf_modules=")
        for op in stretch.hoisted():
            op.call, op.scope = writer.call, writer.state.current_scope
            tape.ops.append(op)
        return stretch

    def _grouped(self) -> list[tuple[Any, int]]:
        return [(x, i) for i in self.form.operands for x in self.args[i]]

    def _given(self, number: int, x: Any, group: int) -> Any:
        """What a callable gets for an operand: another tensor of the same kind, which is a placeholder of the body."""
        factory = self.writer.factory
        is_other = group in (self.form.carried, self.form.sliced)  # than the operand itself
        name = name_of(None if is_other else self.values[number], number)
        if not isinstance(x, torch.Tensor):
            if group == self.form.carried and isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool):
                x = unbacked_symint(factory.mode)
            self.writer.add_body_input(name, x)
            return x
        fake = self.values[number].fake
        if group == self.form.sliced:
            fake = first_slice(factory.mode, fake)
        new = self._like(fake)
        if self.values[number].fake.requires_grad:
            new.requires_grad_()
            if not self.values[number].fake.is_leaf or group == self.form.sliced:
                factory.give_history(new)
        self.writer.add_body_input(name, new)
        return new

    def _like(self, fake: torch.Tensor) -> torch.Tensor:
        with without_dispatch(), torch.no_grad():
            return self.writer.factory.fresh(fake.size(), fake.stride(), fake.dtype, fake.device, False)

    def _output(self, leaf: Any, parameter: str) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.writer.value_of(leaf)
        is_condition = parameter == "cond_fn" and isinstance(leaf, (bool, torch.SymBool))
        is_number = isinstance(leaf, (int, torch.SymInt)) and not isinstance(leaf, bool)
        if is_condition or is_number or (leaf is None and self.hop is _hops.invoke_subgraph):
            return leaf
        self._refuse(f"a body returns a {type(leaf).__name__}", "return tensors, or whole numbers")

    # ---------------------------------------------------------------- what torch does not allow

    def _check_results(self, body: BodyTape) -> None:
        """Results have memory of their own."""
        seen = {op.outputs.storage for op in body.ops if op.kind == "placeholder" and isinstance(op.outputs, Value)}
        for value in values_in(body.outputs):
            if value.storage in seen:
                self._refuse("a result of a body shares memory with an operand or another result", "clone() it")
            seen.add(value.storage)

    def _written(self, bodies: list[BodyTape], inputs: list[Any]) -> list[Value]:
        """The inputs that bodies write to."""
        indices = dict.fromkeys(i for body in bodies for i in written_inputs(body))
        found: list[Value] = [inputs[i] for i in sorted(indices)]
        if not found:
            return []
        if not self.form.runs_once:
            self._refuse("a body that runs several times writes to a tensor from outside", "clone() it first")
        if torch.is_grad_enabled():
            self._refuse("a body writes to a tensor from outside while autograd is on", "clone() it first")
        storages = [v.storage for v in inputs if isinstance(v, Value)]
        if any(is_metadata_only(op.target) for body in bodies for op in body.ops if _writes_to(op, body)):
            self._refuse("a body changes the shape or memory of a tensor from outside", "clone() it first")
        if any(storages.count(v.storage) > 1 for v in found):
            self._refuse("a body writes to memory that several of its operands share", "clone() it first")
        return found

    def _refuse(self, problem: str, hint: str) -> NoReturn:
        raise ControlFlowError(f"{self.hop}: {problem}", op=str(self.hop), hint=hint, **self._where())

    def _where(self) -> dict[str, str | None]:
        return self.writer.where()

    # ---------------------------------------------------------------- the op

    def _append(self, bodies: list[BodyTape], spec: Any, captured: list[Any], written: tuple[Value, ...]) -> Any:
        factory = self.writer.factory
        args, fakes = list(self.args), list(self.args)
        positions = [position for position, _, _ in self.form.bodies]
        for i, a in enumerate(args):
            if i in self.form.operands:
                kind = list if isinstance(a, list) else tuple
                args[i] = kind([self.writer.value_of(x) if isinstance(x, torch.Tensor) else x for x in a])
            elif isinstance(a, torch.Tensor):
                args[i] = self.writer.value_of(a)
        args = self.form.gathered(with_more_operands(self.hop, self.form.spread(args), captured))
        for i, a in enumerate(args):
            fakes[i] = type(a)([_fake(x) for x in a]) if i in self.form.operands else _fake(a)
        for position, body in zip(positions, bodies, strict=True):
            args[position], fakes[position] = body, self._results_of(body)
        out = fake_results(factory.mode, self.hop, self.form.spread(fakes))
        op = self.writer.append_op(self.hop, self.form.spread(args))
        op.writes = written
        op.unbacked = factory.unbacked_bindings(out)
        if op.grad and any(v.fake.requires_grad for v in op.inputs()):
            self._give_grad(out)
        op.outputs = self.writer.register(tuple(out), op)
        for value in op.values():
            value.autograd_placeholder = value.fake.requires_grad
        return pytree.tree_unflatten(list(out), spec)

    def _give_grad(self, out: Any) -> None:
        if self.writer.tape.exact_autograd:
            raise UnsupportedOpError(
                f"the forward differentiates, and has a {self.hop} of tensors that require grad",
                op=str(self.hop),
                **self._where(),
                hint="trace the forward alone, without torch.autograd.grad in it",
            )
        for t in out:
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                t.requires_grad_()

    def _results_of(self, body: BodyTape) -> Callable[..., Any]:
        """For the shape function: the body as a callable, whose results are those recorded, with new memory."""

        def results(*_: Any) -> Any:
            return tuple([self._like(v.fake) if isinstance(v, Value) else v for v in body.outputs])

        return results


def _fake(x: Any) -> Any:
    return x.fake if isinstance(x, Value) else x


def _storages(values: list[Any]) -> set[int]:
    return {v.storage for v in values if isinstance(v, Value)}


def _writes_to(op: Op, body: BodyTape) -> bool:
    """Whether an op writes to an input of the body."""
    return bool({v.storage for v in op.writes} & {v.storage for v in body.inputs}) and not op.bodies()


def written_inputs(body: BodyTape) -> list[int]:
    """The numbers of the placeholders that a body writes to."""
    written = {v.storage for op in body.ops for v in op.writes}
    placeholders = [op.outputs for op in body.ops if op.kind == "placeholder"]
    return [i for i, v in enumerate(placeholders) if isinstance(v, Value) and v.storage in written]


def operand_count(hop: Any, args: Any) -> int:
    """How many arguments the bodies of a call of a higher-order op take."""
    form = FORMS[hop]
    gathered = form.gathered(tuple(args))
    return sum(len(gathered[i]) for i in form.operands)


def with_more_operands(hop: Any, args: tuple[Any, ...], more: list[Any]) -> tuple[Any, ...]:
    """The arguments of a call of a higher-order op, with more operands for its bodies."""
    form = FORMS[hop]
    gathered = form.gathered(args)
    last = form.operands[-1]
    gathered[last] = type(gathered[last])([*gathered[last], *more])
    return form.spread(gathered)
