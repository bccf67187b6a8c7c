"""The tape under construction, and what the recording takes for granted.

Data flow:
    an op with its outputs -> TapeBuilder.append -> an Op with scope, call and source frames, at the end of the tape
    an assumption that does not hold -> Retrace -> another recording, with other Assumptions
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.fx import traceback

from scopetrace._compat.questions import grad_enabled
from scopetrace.errors import TraceError, UnsupportedOpError
from scopetrace.ir.scopes import Frame, Frames, Ran, Scope, TracingState, capture_frames, source_of
from scopetrace.ir.segment import Region
from scopetrace.ir.tape import Autocast, Call, Op, Phase, RecordedTape, Value


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What is known of the forward before it runs. The defaults are what is taken for granted at first."""

    exact_autograd: bool = False
    """Whether torch runs every op, so that results have autograd's own history."""
    differentiates: bool | None = None
    """Whether the forward differentiates: as with `exact_autograd`, and composite ops are recorded as their parts, so
    that the tensors that autograd saves in them are known, and torch applies each `torch.autograd.Function`, so that
    backward runs its own. None where the names in its code decide."""
    object_types: frozenset[type] = frozenset()
    """The classes, unknown to pytree, whose instances hold tensors in their attributes."""
    gradients_shared: bool = False
    """Whether the forward takes the memory of a `grad` by another tensor, so that it is added to where eager does."""


class Retrace(BaseException):
    """The forward has to run again, with these fields of Assumptions. No Exception, which a forward may catch."""

    def __init__(self, why: str, **needed: Any) -> None:
        super().__init__(why)
        self.needed = needed


T = TypeVar("T")


class TapeBuilder:
    """Appends ops to `tape`, each with the scope, the module call and the Python frames in which it ran."""

    def __init__(self, tape: RecordedTape, assumptions: Assumptions) -> None:
        self.tape, self.assumptions = tape, assumptions
        self.state = TracingState(tape.root)
        self.call: Call | None = None
        """The innermost module call that is running."""
        self.running: Any = None
        """The op that torch is running now; None between ops."""
        self._retrace: Retrace | None = None
        self.raised: list[tuple[BaseException, Any]] = []
        """Errors that the forward may have caught and that eager may not have, each with the op, if one raised it."""
        self.deferred: list[TraceError] = []
        """Errors that the forward may have caught, but after which the tape is not the program."""
        self.texts: set[str] = set()
        """Texts that the forward has made of what has no value in a trace, such as `"u0"`."""
        self.optimizer: torch.optim.Optimizer | None = None
        """That which is taking a step."""
        self.first_states: list[Any] = []
        """What optimizers have put into their state in their first steps."""
        self.opaque_to_autograd: str | None = None
        """A higher-order op on the tape of which autograd has no history, though it sees every op."""
        self.regions: list[Region] = []
        """The regions that have ended, in the order of their ends."""
        self.phase: Callable[[Any, Any], Phase | None] | None = None
        """Gives the phase of an op by its arguments and outputs; None while there is only a forward."""
        self.made_nodes: list[tuple[int, Op | Phase]] = []
        """The ops that made nodes of autograd's graph, and the number of the first one; of a function of autograd, the
        phase of its backward. Of a recording in which torch runs every op."""
        self.run_again: set[tuple[int, int]] = set()
        """Of the checkpointed regions that a backward of the forward has run again, where they start and stop."""
        self.saving: set[int] = set()
        """Of a recording in which torch runs every op, the numbers of the nodes that save tensors in checkpointed
        regions."""
        self.differentiated: set[int] = set()
        """The numbers of the nodes through which the forward itself has differentiated."""
        self.loses_device: UnsupportedOpError | None = None
        """Of an op whose derivative is of no device, an error for results that come from it."""
        self.former_leaves: list[Value] = []
        """What the forward has made require grad, and no longer requires it."""
        self.accumulated: set[int] = set()
        """By id, the tensors without history that `backward()` has put into `grad`: in eager they are no views."""
        self.reentrant: int | None = None
        """In a region under reentrant checkpointing that runs again in backward, the number of ops before it."""
        self.hooked: dict[int, UnsupportedOpError] = {}
        """The numbers of the nodes on which the forward has hung hooks, each with the error where it may not."""
        self.differentiates = bool(assumptions.differentiates)
        """Whether the forward is recorded as one that differentiates."""
        self.autocast: Autocast | None = None
        """That of the op that runs now."""
        self.op_frames: Frames | None = None
        """The frames of the op that is on its way to the tape; the attributes that it reads get the same."""
        self.ran: Ran = {}
        """The code of functions in which ops and calls were."""
        self._last_frames: tuple[Frames, tuple[Frame, ...]] = ((), ())  # those of ops in one line are one object
        self._origin: tuple[str | None, dict[str, Any] | None, Scope | None] | None = None

    def append(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: Any,
        writes: tuple[Value, ...] = (),
        unbacked: Any = None,
        tracked: tuple[Value, ...] = (),
    ) -> Op:
        """Put an op at the end of the tape; it is complete and does not change any more. The fields are those of Op."""
        scope = self.state.current_scope
        frames = self.frames() if self.op_frames is None else self.op_frames
        meta = None
        if self._origin is not None:
            stack_trace, meta, inner = self._origin
            scope, frames = inner or scope, stack_trace or frames
        if "custom" in traceback.current_meta:
            meta = {**(meta or {}), "custom": dict(traceback.current_meta["custom"])}
        place = scope, self.call, frames, grad_enabled()
        phase = None if self.phase is None else self.phase(args, outputs)
        op = Op(kind, target, args, kwargs, outputs, *place, writes, unbacked, tracked, meta, self.autocast, phase)
        self.tape.ops.append(op)
        return op

    def frames(self) -> Frames:
        """The Python frames of what runs now, up to those of the traced callable."""
        outer, ran = (self.call.of_module.frames, self.ran) if self.call else ((), {})  # else no forward runs
        captured = capture_frames(outer, TapeBuilder.in_call.__code__, ran)
        last = self._last_frames
        if captured[0] is last[0] and captured[1] == last[1]:
            return last
        self._last_frames = captured
        return captured

    def op_that_raised(self, error: BaseException) -> Any:
        """The op that has raised an error; None where none has."""
        return next((op for raised, op in reversed(self.raised) if raised is error), None)

    def expect_history(self, why: str) -> None:
        """Start again where results have no history of autograd, and need one."""
        if not self.tape.exact_autograd:
            self._retrace = Retrace(why, exact_autograd=True)
            raise self._retrace

    def expect_backward(self, why: str) -> None:
        """Start again where the forward was not recorded as one that differentiates."""
        if not self.differentiates:
            raise Retrace(why, differentiates=True)

    def mark(self) -> tuple[int, int]:
        """The number of ops and of calls so far."""
        return len(self.tape.ops), len(self.tape.calls)

    def end_region(self, hop: Any, mark: tuple[int, int], **of_region: Any) -> None:
        """A region that began at `mark` ends here; `of_region` are fields of `Region`."""
        start, calls = mark[0], self.tape.calls[mark[1] :]
        place = self.call, self.state.current_scope, self.frames()
        self.regions.append(Region(hop, start, len(self.tape.ops), calls, *place, **of_region))

    def where(self) -> dict[str, str | None]:
        """`module` and `source` for an error that is raised now."""
        return {"module": str(self.state.current_scope), "source": source_of(self.frames())}

    def refusal(self, problem: str, *, op: str, hint: str) -> UnsupportedOpError:
        """The error for what the forward does now."""
        return UnsupportedOpError(problem, op=op, hint=hint, **self.where())

    def in_call(self, call: Call, run: Callable[[], T]) -> T:
        """What `run` returns; what it does belongs to `call`, which ends with it."""
        outer, self.call = self.call, call
        mark = self.state.enter_module(call.scope)
        try:
            return run()
        except BaseException as error:
            call.raised = error
            if self._retrace is not None:
                raise self._retrace from None  # TorchScript has raised another error in its place
            raise
        finally:
            call.stop = len(self.tape.ops)
            try:
                self.state.leave_module(mark, raising=call.raised is not None)
            finally:
                self.call = outer

    @contextlib.contextmanager
    def run_by_torch(self, op: Any) -> Iterator[None]:
        """Inside, torch runs `op`; what Python it calls is not the model's."""
        outer, self.running = self.running, op
        try:
            yield
        except BaseException as error:
            self.raised.append((error, op))
            raise
        finally:
            self.running = outer

    @contextlib.contextmanager
    def from_node(
        self, stack_trace: str | None, meta: dict[str, Any] | None = None, scope: Scope | None = None
    ) -> Iterator[None]:
        """Ops appended inside come from a node of a graph, at its stack trace; in `scope`, if it is that of no call."""
        outer, self._origin = self._origin, (stack_trace, meta, scope)
        try:
            yield
        finally:
            self._origin = outer


def place_of(op: Op) -> dict[str, str | None]:
    """`op`, `module` and `source` for an error about an op."""
    return {"op": str(op.target), "module": str(op.scope), "source": source_of(op.frames)}
