"""A functional tape in terms of other ops, by a table of decompositions.

Data flow:
    an op of the table -> its decomposition runs on the fake tensors of the operands -> the ops that it calls: a body,
        made functional where it writes, and kept for equal calls of the op
    body -> its ops in the place of the op, in the scope and call of it
    all other ops -> copied, on the new operands
    results of the op -> in the strides and memory that they had
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from scopetrace._compat.decompositions import RuleOf
from scopetrace._compat.ops import building, is_op, schema_of
from scopetrace._compat.symbols import to_expr
from scopetrace._compat.tensors import DATA_DEPENDENT, run_fake
from scopetrace.errors import DecompositionError, ScopetraceError
from scopetrace.functionalization.copier import as_laid_out
from scopetrace.functionalization.emitter import Emitter, TapeRewriter
from scopetrace.functionalization.functionalizer import Functionalizer
from scopetrace.ir.scopes import source_of
from scopetrace.ir.tape import BodyTape, FunctionalTape, Op, Value, checks_enabled, renamed, values_in
from scopetrace.ir.verify import verify
from scopetrace.ops.functional_variants import drops_between_layers, functional_variant
from scopetrace.program.fake_run import FakeRun, append_op, makes_numbers
from scopetrace.program.graph import live_ops

_aten = torch.ops.aten
_HINT = "give the op a decomposition of ATen ops on tensors, or leave it out of the table"
_ZERO_GRADIENT = (_aten.fill.Scalar, _aten.fill.Tensor, _aten.zero.default)
"""Ops that have a gradient, of zeros for what they fill, and of which what they decompose into has none."""
_BY_STATISTICS = (
    _aten.native_layer_norm_backward.default,
    _aten.native_batch_norm_backward.default,
    _aten.cudnn_batch_norm_backward.default,
    _aten.miopen_batch_norm_backward.default,
)
"""Ops that read mean and deviation, through which gradients of their results go; what they decompose into has none."""
_KEPT_BESIDE_TORCHS = (_aten._scaled_dot_product_flash_attention_for_cpu.default,)
"""Ops of which torch's decomposition gives another second result than the one that the backward takes."""


def decomposed(tape: FunctionalTape, rule_of: RuleOf) -> FunctionalTape:
    """The program with ops replaced by what `rule_of` gives for them, and so on in these.

    Raises DecompositionError for a decomposition that does not do what its op does, as far as metadata say,
    DynamicShapeError for one that fixes a dynamic size.
    """
    sizes = tape.sizes
    with contextlib.nullcontext() if sizes is None else sizes.env.unchanged(where_it_raises=True):
        # with MKL-DNN on, torch decomposes an lstm on a CPU into its kernel, which is no core ATen op
        with building(), torch.backends.mkldnn.flags(enabled=False):
            old = dataclasses.replace(tape, decomposed=True)
            program: FunctionalTape = _TapeDecomposer(old, None, rule_of).run()
        if sizes is not None:
            sizes.refuse_fixed()
    if checks_enabled():
        verify(program, "decomposition")
    return program


class _TapeDecomposer(TapeRewriter):
    def __init__(self, old: FunctionalTape | BodyTape, around: _TapeDecomposer | None, rule_of: RuleOf) -> None:
        super().__init__(old, around)
        self.rule_of = rule_of
        self.known: dict[Any, BodyTape | None] = {} if around is None else around.known
        """The decompositions so far, by op and metadata of the operands."""
        has_grad = any(op.grad for op in old.ops if op.kind != "get_attr")
        self.emitter = Emitter(self.new, self.storages, has_grad=has_grad, calls=self.calls)

    def inner(self, body: BodyTape) -> TapeRewriter:
        return _TapeDecomposer(body, self, self.rule_of)

    def step(self, op: Op) -> None:
        has_gradient = op.target in (*_ZERO_GRADIENT, *_BY_STATISTICS) and any(v.requires_grad for v in op.values())
        # a detach may keep a gradient out, in a call with gradients of a trace made without too
        may_cut = op.target is _aten.detach.default and (
            op.grad or not (self.old.outer_grad or op.tensor(0).op.target is _aten.lift_fresh_copy.default)
        )
        stays = bool(op.unbacked) or has_gradient or may_cut
        rule = self.rule_of(op.target) if is_op(op.target) and not stays else None
        is_torchs = _is_torchs(rule)
        if is_torchs and op.target in _KEPT_BESIDE_TORCHS:
            rule = None
        if is_torchs and drops_between_layers(op.target, op.args):
            hint = "trace the model in eval mode, or make a module for each layer with nn.Dropout between them"
            raise _error(op, "leaves the dropout between its layers out", hint)
        if rule is None or not self._decompose(op, rule):
            self.copy(op)

    # ---------------------------------------------------------------- an op of the table

    def _decompose(self, op: Op, rule: Any) -> bool:
        """Put the ops of a decomposition in the place of an op; False where it says that the op stays."""
        body = self._body(op, rule)
        if body is None:
            return False
        inside = dict(zip(body.inputs, self._operands(op), strict=True))
        live = live_ops(body)
        for step in body.ops:
            if step.kind == "get_attr":
                inside[step.result] = self.emitter.constant(op, body.attributes[step.name])
            elif step.kind == "call_function" and id(step) in live:
                origin = step.replace(scope=op.scope, call=op.call, frames=op.frames, phase=op.phase)
                args, kwargs = renamed((step.args, step.kwargs), inside)
                results = self.emitter.run(origin, step.target, args, kwargs)
                inside.update(zip(step.values(), values_in(results), strict=True))
        for old, result in zip(op.values(), body.outputs, strict=True):
            self.replacements[old] = self._as_before(op, old, inside[result])
        return True

    def _body(self, op: Op, rule: Any) -> BodyTape | None:
        """The decomposition; that of an earlier op where the operands of both have equal metadata."""
        args, kwargs = renamed((op.args, op.kwargs), self.replacements)
        arguments, operands = values_in((args, kwargs)), self._operands(op)
        key = self.emitter.inference.key_of_call(op.target, args, kwargs) if is_op(op.target) else None
        whole = None if key is None else (key, op.grad, *map(operands.index, arguments))
        if whole not in self.known:
            body = _Body(self, op, operands).run(rule, args, kwargs)
            if whole is None:
                return body
            self.known[whole] = body
        return self.known[whole]

    def _operands(self, op: Op) -> list[Value]:
        return list(dict.fromkeys(self.replacements[v] for v in op.inputs()))

    def _as_before(self, op: Op, old: Value, new: Value) -> Value:
        """A result, in memory of its own where that of the op was; the operand that the op gave, as dropout may."""
        if itself := [v for v in op.inputs() if v.fake is old.fake]:
            return self.replacements[itself[0]]
        operands = {v.storage: self.replacements[v].storage for v in op.inputs()}
        if new.storage in operands.values():
            if old.storage in operands:
                return new
            new = self.emitter.run(op, _aten.clone.default, (new,), {})
        new = as_laid_out(self.emitter.bound(op), new, old.fake)
        new.fake, new.key, new.requires_grad = old.fake, old.key, old.requires_grad  # what reads it is copied as it is
        new.autograd_placeholder = old.autograd_placeholder
        return new


def _is_torchs(rule: Any) -> bool:
    return getattr(rule, "__module__", "").startswith("torch._decomp")


class _Body:
    """The decomposition of one op as a tape, whose inputs are the operands of the op, each once."""

    def __init__(self, around: _TapeDecomposer, op: Op, operands: list[Value]) -> None:
        self.op, self.rule_of = op, around.rule_of
        self.tape = BodyTape(op.scope, name="decomposition", inference=around.emitter.inference)
        self.tape.fake_mode, self.tape.shape_env = around.old.fake_mode, around.old.shape_env
        self.emitter = Emitter(self.tape, around.storages, has_grad=op.grad)
        self.fakes = FakeRun(self.tape.fake_mode, lambda t: self.emitter.constant(self._origin(), t))
        self.inputs = {v: self._add_input(i, v) for i, v in enumerate(operands)}
        self.fakes.register(self.inputs.values())

    def _add_input(self, i: int, operand: Value) -> Value:
        value = operand.copy(operand.storage)
        if not self.op.grad and value.fake.requires_grad:  # nothing needs a form that can be differentiated
            value.fake, value.key = self._alias(value.fake), None
        self.tape.ops.append(self._origin().replace(kind="placeholder", target=f"arg{i}", outputs=value))
        self.tape.inputs.append(value)
        return value

    def run(self, rule: Any, args: Any, kwargs: Any) -> BodyTape | None:
        """The tape; None where the rule gives NotImplemented, or torch's asks for data and core ATen has the op.

        Raises DecompositionError.
        """
        args, kwargs = renamed((args, kwargs), self.inputs)
        try:
            out = self.fakes.run(rule, args, kwargs, self.op.grad, self._on_op, self._refuse)
        except ScopetraceError:
            raise
        except Exception as error:
            is_core = torch.Tag.core in getattr(self.op.target, "tags", ())
            if is_core and _is_torchs(rule) and isinstance(error, DATA_DEPENDENT):
                return None
            first = (str(error).splitlines() or [""])[0]
            self._refuse(f"raises {type(error).__name__}: {first}", error)
        if out is NotImplemented:
            return None
        self.tape.outputs = tuple(values_in(out))
        self._check()
        return Functionalizer(self.tape).run_body([]) if self.tape.has_writes() else self.tape

    def _on_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        rule = self.rule_of(func)
        if rule is not None and not (func is _aten.detach.default and torch.is_grad_enabled()):
            out = self.fakes.call(rule, args, kwargs)
            if out is not NotImplemented:
                return out
        if func is _aten.lift_fresh.default:
            func = _aten.lift_fresh_copy.default
        if torch.Tag.inplace_view in func.tags:
            return self._reshape(func, args, kwargs)
        out = append_op(self.emitter, self._origin(torch.is_grad_enabled()), func, args, kwargs)
        op = self.tape.ops[-1]
        if not op.writes and not op.values() and schema_of(func).returns:  # a question about metadata
            del self.tape.ops[-1]
        return out

    def _reshape(self, func: Any, args: Any, kwargs: Any) -> Value:
        """`squeeze_` and its kind: from here on, the tensor is a view of what it was."""
        before, variant = args[0], functional_variant(func)
        if variant is None or before in self.tape.inputs:
            self._refuse(f"calls {func}, which changes the shape of a tensor in place")
        changed = self.fakes.tensors_of(before)
        for value in [v for op in self.tape.ops for v in op.values() if any(v.fake is t for t in changed)]:
            value.fake = self._alias(value.fake)
        after: Value = self._on_op(variant.op, args, kwargs)
        for t in changed:
            run_fake(self.fakes.mode, func, (t, *args[1:]), kwargs)
            self.fakes.register([after], t)
        after.fake = changed[0]
        return after

    def _alias(self, fake: torch.Tensor) -> torch.Tensor:
        return run_fake(self.fakes.mode, _aten.detach.default, (fake,), {})

    def _origin(self, grad: bool = True) -> Op:
        return Op("call_function", self.op.target, (), {}, None, self.op.scope, None, self.op.frames, grad)

    def _check(self) -> None:
        """Refuse results of other shapes or dtypes than those of the op, and writes to its arguments."""
        results, wanted = _described(self.tape.outputs), _described(self.op.values())
        if results != wanted:
            self._refuse(f"gives {results or 'no tensor'}, and the op {wanted}")
        taken = {v.storage for v in self.tape.inputs}
        if any(v.storage in taken for op in self.tape.ops for v in op.writes):
            self._refuse("writes to an argument of the op")
        if makes_numbers(self.tape.shape_env):
            self._refuse("makes a size that depends on data")

    def _refuse(self, problem: str, error: BaseException | None = None) -> NoReturn:
        raise _error(self.op, problem) from error


def _error(op: Op, problem: str, hint: str = _HINT) -> DecompositionError:
    place = {"op": str(op.target), "module": op.scope.path, "source": source_of(op.frames)}
    return DecompositionError(f"the decomposition {problem}", **place, hint=hint)


def _described(values: Iterable[Value]) -> str:
    return ", ".join(f"{v.fake.dtype} of shape {list(to_expr(tuple(v.fake.size())))}" for v in values)
