"""What the forward does with autograd, told by the patches of torch.

Data flow:
    a `torch.autograd.Function` is applied -> an op with its own backward, or torch applies it
    hooks, `grad_fn`, `requires_grad`, `detach_()` -> noted, refused, or recorded again with autograd's own history
    a region under checkpointing begins and ends -> `CheckpointedRegion`
    derivatives, `grad`, optimizers -> `GradientRecorder`
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from scopetrace._compat.gradients import BackwardHookFunction, next_sequence_number, node_number, saving_by
from scopetrace._compat.ops import paused, unwrapped
from scopetrace._compat.tensors import FakeTensor, is_known_leaf, requires_grad_of
from scopetrace.autograd.checkpoints import CheckpointedRegion
from scopetrace.autograd.flags import FlagRecorder
from scopetrace.autograd.functions import FunctionRecorder, refuse_dirty_view
from scopetrace.autograd.gradients import GradientRecorder
from scopetrace.autograd.history import BOUND_APPLY
from scopetrace.errors import UnsupportedOpError
from scopetrace.ir.guards import OfInput
from scopetrace.ir.segment import CHECKPOINT
from scopetrace.ir.tape import Phase, Value
from scopetrace.ops.functional_variants import is_factory
from scopetrace.ops.history import can_require_grad, is_view
from scopetrace.record.ops import OpRecorder
from scopetrace.watch.questions import refuse_flag


class AutogradRecorder:
    """Records what one forward does with autograd; `_compat.patches` tells it of that."""

    def __init__(self, ops: OpRecorder) -> None:
        self._ops, self._builder, self._reads = ops, ops.builder, ops.reads
        self._values, self._model = ops.values, ops.values.model
        self._checkpointed: list[CheckpointedRegion] = []  # the hooks of autograd's graph do not hold them
        self._open_regions: list[CheckpointedRegion] = []
        self.mark = self._builder.mark
        """Gives a place in the program."""

    def finish(self) -> None:
        """Put on the tape what autograd's side of the forward has left, where it ends."""
        for part in self._used():
            part.finish()

    @functools.cached_property
    def gradients(self) -> GradientRecorder:
        """Records derivatives, and the `grad` of tensors."""
        return GradientRecorder(self._values, self._reads, self._flags)

    @functools.cached_property
    def _flags(self) -> FlagRecorder:
        return FlagRecorder(self._values, self._reads)

    def _used(self) -> list[GradientRecorder | FlagRecorder]:
        return [self.__dict__[name] for name in ("gradients", "_flags") if name in self.__dict__]

    def close(self) -> None:
        """Put back what the forward has set that is not its result."""
        for part in self._used():
            part.close()

    def on_forward_ad(self) -> None:
        """The forward makes a tensor with a tangent, on which no op of a graph acts."""
        problem = "the forward differentiates in forward mode (torch.autograd.forward_ad, torch.func.linearize)"
        hint = "use torch.func.jvp, or differentiate outside of the forward"
        raise self._builder.refusal(problem, op="torch.autograd.forward_ad.make_dual", hint=hint)

    def on_custom_function(self, cls: type, args: Any, *, is_seen: bool) -> Any:
        """A function with a backward of its own is applied. Returns what it gives; NotImplemented: torch applies it.

        Where its `apply` was not seen, torch has made a node for it and hangs that on what it gives.
        """
        if cls is BackwardHookFunction and torch.is_grad_enabled() and any(requires_grad_of(t) for t in args):
            number = next_sequence_number()
            self._on_hook("a backward hook of a module", "nn.Module.register_full_backward_hook", number)
        tensors, call = [t for t in args if isinstance(t, torch.Tensor)], self._builder.call
        for t in tensors:
            self._reads.on_gradient(t)
        if not any(map(requires_grad_of, tensors)):
            return NotImplemented
        if not torch.is_grad_enabled():
            # torch detaches a result that autograd takes for no view
            self._builder.expect_history("a torch.autograd.Function runs under no_grad")
            return NotImplemented
        if self._builder.differentiates and not is_seen:
            if any(self.on_applied(t) is not t for t in tensors):  # torch has the others already
                raise self._bound_apply(cls)
            self._reads.on_gradients_of_inputs()
            return NotImplemented
        if self._builder.differentiates:
            refuse_dirty_view(cls, tensors, self._builder)
            phase = Phase("backward", 0 if call is None else call.position, self._builder.state.current_scope)
            self._builder.made_nodes.append((next_sequence_number(), phase))
            return NotImplemented
        with paused():
            out = FunctionRecorder(cls, args, self._values, self._ops.run_callable).run()
        if not is_seen and any(x is t for x in pytree.tree_leaves(out) for t in tensors):
            raise self._bound_apply(cls)
        return out

    def _bound_apply(self, cls: type) -> UnsupportedOpError:
        return self._builder.refusal(BOUND_APPLY[0], op=cls.__qualname__, hint=BOUND_APPLY[1])

    def on_applied(self, t: torch.Tensor) -> torch.Tensor:
        """Torch applies a function: where the forward differentiates, to the fake tensors of parameters."""
        return self.gradients.differentiated(t) if self._builder.differentiates else t

    @contextlib.contextmanager
    def on_reentrant(self, tensors: list[torch.Tensor]) -> Iterator[None]:
        """A context in which a reentrant checkpoint runs: its results require grad only if one of `tensors` does."""
        for t in tensors:
            self._reads.on_requires_grad(t)
        runs_again = torch.is_grad_enabled() and any(map(requires_grad_of, tensors))
        outer = self._builder.reentrant
        if runs_again and outer is None:
            self._builder.reentrant = len(self._builder.tape.ops)
        try:
            yield
        finally:
            self._builder.reentrant = outer

    def on_hook(self, t: torch.Tensor, method: str) -> None:
        """The forward hangs a hook on a tensor. On a tensor that does not require grad, torch raises itself.

        A leaf from outside keeps its gradient anyway. A view made in inference mode requires grad where its base does.
        """
        self._reads.refuse_in_reentrant(t, f"Tensor.{method}")
        required = t.requires_grad or any(v.ever_requires_grad for v in self._values.sharing(t))
        outside = self._values.is_outside(t)
        keeps_it_anyway = method == "retain_grad" and outside and t.requires_grad and t.is_leaf
        if required and not keeps_it_anyway:
            self._on_hook("a hook on the gradient of a tensor", f"Tensor.{method}", None if outside else node_number(t))

    def on_graph(self, t: torch.Tensor) -> None:
        """The forward asks for the history of a tensor, which results that were made from metadata do not have."""
        if not self._values.is_outside(t):
            self._builder.expect_history("the forward reads autograd's history of a tensor")

    def on_grad_fn(self, t: torch.Tensor, *, to_hook: bool) -> None:
        """The forward gets a node of autograd's graph, from where it may go on to others; torch hangs a hook there."""
        outside = not to_hook or self._values.is_outside(t)
        self._on_hook("a node of autograd's graph", "Tensor.grad_fn", None if outside else node_number(t))

    def _on_hook(self, what: str, op: str, number: int | None) -> None:
        """The forward makes a hook on a node of autograd's graph; `number` is None for one that it has not made."""
        error = self._hook_error(what, op)
        if number is None:
            raise error
        self._builder.expect_backward("the forward makes a hook")
        self._builder.hooked[number] = error

    def on_requires_grad(self, t: torch.Tensor, required: bool) -> None:
        """The forward sets `requires_grad`.

        Of an input that did not require grad: where no op took it before, as if it had; else its gradients stay inside.
        """
        if unwrapped(t) is not t:
            return  # a transform such as torch.func.grad sets it, of the tensor that it made of its argument
        if not isinstance(t, FakeTensor):
            self._flags.set(t, required)
            return
        plain = [v for v, real in self._values.examples.items() if v.fake is t and not real.requires_grad]
        if plain and can_require_grad(plain[0]) and (not required or self._is_untouched(plain[0])):
            plain[0].requires_grad, plain[0].key = required, None  # as if it did before: a call begins with that
        if self._values.is_outside(t) and not (required and not requires_grad_of(t)):
            if not required and next((v.requires_grad for v in self._builder.tape.inputs if v.fake is t), True):
                refuse_flag(self._builder, "sets requires_grad of an input to False", "requires_grad")
            self._reads.on_requires_grad(t)  # in another call it may change something
        if not required:
            if requires_grad_of(t) and any(v.autograd_placeholder for v in self._values.names_of(t)):
                refuse_flag(self._builder, "sets requires_grad of a tensor that it computed to False", "requires_grad")
            self._leave_history(t)
        elif not self._values.is_outside(t):
            self._values.new_tensors.append(t)
            if requires_grad_of(t) or not (torch.is_grad_enabled() or self._builder.tape.grad):
                self._reads.on_gradient(t)  # in another grad mode it becomes a leaf here, or what depends on it has one
            else:
                self._reads.on_requires_grad(t)  # what depends on this leaf must have a gradient from outside too

    def _is_untouched(self, v: Value) -> bool:
        """Whether an input shares no memory with another, and no op has taken it, nor anybody asked for its flag."""
        inputs = self._builder.tape.inputs
        used = [i for op in self._builder.tape.ops if not is_factory(op) for i in op.inputs()]
        shares = any(i.storage == v.storage for i in (*used, *inputs) if i is not v) or v in used
        return not (shares or self._reads.was_asked(OfInput(inputs.index(v), "requires_grad", ())))

    def on_detach(self, t: torch.Tensor) -> bool:
        """The forward detaches a tensor in place. One from outside that does not require grad stays as it is.

        So do all in inference mode, where autograd does not see the op.
        """
        if torch.is_inference_mode_enabled():
            return False
        if self._values.is_given(t):
            self._reads.on_requires_grad(t)
            value = self._values.value_of(t)
            if value.storage in self._builder.tape.written_storages():  # by which it may require grad in other calls
                self._reads.on_gradients_of_inputs()
            if not requires_grad_of(value.fake):
                return False
            refuse_flag(self._builder, "detaches a tensor of the model, or an input, in place", "detach_")
        if id(t) in self._builder.accumulated:
            return False
        if requires_grad_of(t) and any(map(is_view, self._values.sharing(t))):
            refuse_flag(self._builder, "detaches in place a view, which torch forbids, or what has views", "detach_")
        self._leave_history(t)
        return True

    def _leave_history(self, t: torch.Tensor) -> None:
        """A leaf of the forward no longer requires grad; what was computed from it before still does."""
        names = self._values.names_of(t)
        if requires_grad_of(t) and is_known_leaf(t) and not any(v.autograd_placeholder for v in names):
            self._builder.former_leaves += names

    @contextlib.contextmanager
    def checkpointed(
        self, arguments: Iterable[Any], context_fn: Any = None, *, grad: bool, early_stop: bool, keeps_rng: bool
    ) -> Iterator[None]:
        """A region under checkpointing runs inside.

        Args:
            arguments: what it is called with: tensors may not be written before backward runs it again.
            context_fn: chooses what it keeps; None for nothing.
            grad: whether autograd saves tensors in it.
            early_stop: whether backward runs it only until it has what it needs.
            keeps_rng: whether backward runs it from the same state of the random number generators.
        """
        mark = self._builder.mark()
        with contextlib.ExitStack() as stack:
            if grad and self._builder.tape.exact_autograd:  # backward may be a part of the program
                outer = self._open_regions[-1] if self._open_regions else None
                tensors = [t for t in arguments if isinstance(t, torch.Tensor)]
                parts = self._values, self._ops.record, outer, tensors
                region = CheckpointedRegion(*parts, early_stop=early_stop, context_fn=context_fn)
                self._checkpointed.append(region)
                self._open_regions.append(region)
                stack.callback(lambda: self._open_regions.pop().end())
                stack.enter_context(saving_by(*region.hooks()))
            yield
        known = ((name, self._values.by_id.get(id(t))) for name, t in self._model.bound_tensors())
        attributes = {name: value for name, value in known if value is not None}
        self._builder.end_region(CHECKPOINT, mark, context_fn=context_fn, keeps_rng=keeps_rng, attributes=attributes)

    def leave_saved_tensors_hooks(self, mark: tuple[int, int]) -> None:
        """The forward leaves `saved_tensors_hooks`, which act on the ops that autograd records."""
        ops = self._builder.tape.ops[mark[0] :]
        seen = (v for op in ops if op.grad and op.kind == "call_function" for v in (*op.values(), *op.writes))
        if any(v.fake.requires_grad for v in seen):
            raise self._hook_error("hooks on what autograd saves for backward", "saved_tensors_hooks")
        for v in [v for op in ops for v in op.values() if can_require_grad(v)][:1]:
            self._reads.on_gradient(v.fake)

    def _hook_error(self, what: str, op: str) -> UnsupportedOpError:
        return self._builder.refusal(
            f"the forward makes or uses {what}, which a graph of ops does not have",
            op=op,
            hint="trace under torch.no_grad(); or make hooks outside of the forward, on parameters and inputs, which "
            "act in a trace too; or make a torch.library.custom_op whose backward does what the hook does; to ask "
            "whether a tensor has a gradient, read requires_grad",
        )
