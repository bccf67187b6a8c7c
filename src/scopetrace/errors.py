"""One exception class for each kind of mistake; every message says what to do instead.

    ScopetraceError
      TraceError            the model does what cannot be captured, or what a target format cannot express
      ArgumentError         an argument does not fit the model, the trace or the other arguments
      VerificationError     two things that must agree do not: graph and calls, trace and model, ranks

Those that no base describes derive from `ScopetraceError` directly.
"""

from __future__ import annotations

import contextlib
import contextvars
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

noted: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("noted", default=None)


class ScopetraceError(Exception):
    """The base of all errors that scopetrace itself raises.

        try:
            st.trace(lambda x: x if x.sum() > 0 else -x, (x,))
        except st.ScopetraceError as error:
            print(error)  # what is wrong, the op, the module, the source line, what to write instead

    The classes are in `st.errors`.
    """

    __str__ = Exception.__str__  # KeyError, for which one may stand, would put quotes around the message


class TraceError(ScopetraceError):
    """A model, or a part of it, that cannot be captured or translated.

    Attributes:
        problem: what is wrong, the first line of the message.
        op: the op, as `"aten.item.default"`; None where no single op is the reason.
        module: the scope path of the module call, as `"Net/Linear[fc]"`; None where it is not known.
        source: the user's source line, as `'model.py:12, in forward: if x.sum() > 0:'`; None where it is not known.
        hint: what to write instead; None where `problem` says it.
    """

    def __init__(
        self,
        problem: str,
        *,
        op: str | None = None,
        module: str | None = None,
        source: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.problem, self.op, self.module, self.source, self.hint = problem, op, module, source, hint
        rows = [("op", op), ("module", module), ("source", source), ("instead", hint)]
        super().__init__("\n".join([problem, *(f"  {name}: {text}" for name, text in rows if text)]))
        raised = noted.get()
        if raised is not None:
            raised.append((self, None))

    def stands_for(self, theirs: Exception, text: str) -> None:
        """Become an instance of the class of torch's error too, and end with `text`, for code that catches that.

        Of a class with slots, such as AttributeError, no object of another class can become one.
        """
        self.__dict__ = {**vars(theirs), **vars(self)}
        both = type(type(self).__name__, (type(self), type(theirs)), {"__module__": type(self).__module__})
        with contextlib.suppress(TypeError):
            self.__class__ = both
        self.args = (f"{self.args[0]}\n{text}",)


class ArgumentError(ScopetraceError, ValueError):
    """An argument that does not fit the model, the trace or the other arguments."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of a kind that the function does not take, as a dict where it takes a tuple."""


class VerificationError(ScopetraceError, AssertionError):
    """Two things that must agree do not; the message lists every difference."""


# Tracing -------------------------------------------------------------------------------------------------------------


class DataDependentError(TraceError):
    """Python needs the value of a tensor that depends on the inputs (`if x.sum() > 0`)."""


class DynamicShapeError(TraceError):
    """`dynamic_shapes` does not fit the arguments, or the model fixes a size that it names."""


class ForeignTensorError(TraceError):
    """A tensor of another trace, thread or fake mode is used, whose origin this trace has not recorded."""


class OpaqueOutputError(TraceError):
    """A model takes or returns tensors inside an object of a class that pytree does not know."""


class RandomStateError(TraceError):
    """The forward seeds a random generator, which a graph cannot express."""


class SideEffectError(TraceError):
    """The forward writes into Python objects, or asks for what differs from call to call, and no graph carries that."""


class UnsupportedOpError(TraceError):
    """An op that recording does not know how to handle."""


class OpError(TraceError):
    """An op of the forward does not take its operands, in eager neither; of the class of torch's error, too."""


class ControlFlowError(TraceError):
    """A body of `torch.cond`, `while_loop`, `scan` or `map` does what torch does not allow there."""


class FunctionalizationError(TraceError):
    """A mutation that has no functional form with the same meaning."""


class DecompositionError(TraceError):
    """A decomposition that cannot stand in the place of its op."""


class EditError(TraceError):
    """An edited graph that is no program with the inputs, results and effects of its trace any more."""


class CompileError(TraceError, RuntimeError):
    """A backend of torch.compile failed on a part of a program; its own error is the cause."""


class ScopeError(ScopetraceError):
    """A user scope was left open, closed twice, or has a name that cannot stand in a scope path."""


class LeafPatternError(ArgumentError):
    """An entry of `leaf_modules=` is of the wrong kind, or matches no module of the model."""


# A trace in use ------------------------------------------------------------------------------------------------------


class InputMismatchError(ArgumentError):
    """A trace was called with inputs that differ from those that it was recorded with."""


class StateMismatchError(InputMismatchError):
    """A trace was called in another state than it was recorded in: a flag, attribute or global that the model read."""


class ModeError(ArgumentError):
    """A module of a trace was asked for a mode, dtype or device that is not that of the trace."""


class TraceFileError(ScopetraceError):
    """A file that is no trace, is damaged, or is of another version; or a trace that a file cannot hold."""


class CallNotFoundError(ArgumentError, LookupError):
    """A name, class or pattern that no module call of the trace has."""


class OutlineError(ArgumentError):
    """A target of `outline` matches no module call, or a call that cannot be a function."""


class CompiledGraphError(VerificationError):
    """A compiled graph returned other values than the graph that it was made from: kinds, shapes or dtypes."""


class InvalidTapeError(VerificationError):
    """A stage left a program that breaks a rule of its form: a defect of scopetrace, not of the model."""


class LintError(VerificationError):
    """The graph, the scopes and the calls of a trace disagree."""


class CheckError(VerificationError):
    """The trace and the model gave different results on the same inputs."""


class InferenceError(VerificationError):
    """With `SCOPETRACE_CHECK=1`: scopetrace inferred other results of an op than torch's fake tensors give."""


# Other forms of a trace ----------------------------------------------------------------------------------------------


class ExportError(TraceError, RuntimeError):
    """A trace that the target format, ExportedProgram or ONNX, cannot express. torch.export raises a RuntimeError."""


class OnnxExportError(ExportError):
    """A trace that has no form as an ONNX model; the message says what in it, where, and what to do."""


class OnnxOpError(OnnxExportError):
    """Ops without an ONNX form.

    Attributes:
        ops: (op, module, source) of each: `("aten.erfcx.default", "Net/Head[head]", 'File "net.py", line 9 …')`; module
            and source are None where they are not known.
    """

    def __init__(self, ops: list[tuple[str, str | None, str | None]]) -> None:
        self.ops = ops
        rows = dict.fromkeys("  " + ", ".join(part for part in op if part) for op in ops)
        super().__init__(
            "\n".join(["these ops have no ONNX form here:", *rows]),
            hint="give their form in custom_translation_table, name a module around them in plugins=, "
            "or take a higher opset_version",
        )


class OnnxOptionError(ArgumentError):
    """An argument of `Trace.to_onnx` that does not fit the model or the other arguments."""


class OnnxDependencyError(ScopetraceError, ImportError):
    """A package that ONNX export needs is not installed."""


class OnnxVerificationError(VerificationError):
    """The ONNX model is not valid, or does not compute what the model computes."""


class IntegrationDependencyError(ScopetraceError, ImportError):
    """The tool that a module of `scopetrace.integrations` is for is not installed; the message names the extra."""


class ViewDependencyError(ScopetraceError, ImportError):
    """A package or program that draws pictures is not installed; the message names the extra that brings it."""


# Warnings ------------------------------------------------------------------------------------------------------------


class ScopetraceWarning(UserWarning):
    """The base of all warnings that scopetrace itself gives."""


class SideEffectWarning(ScopetraceWarning):
    """The forward does what calls of the trace, or a file made from it, do not do or cannot repeat."""


class FixedValueWarning(ScopetraceWarning):
    """A file made from a trace has numbers baked in that a call of the trace checks, and the file cannot."""


class TargetWarning(ScopetraceWarning):
    """A target such as `"layers"` names calls by a rule, and a module call has that name too."""


# Training on several devices, command line ---------------------------------------------------------------------------


class PlanError(ArgumentError):
    """A plan for sharding or splitting a model that cannot be made, or that would fail when it runs."""


class OrderMismatchError(VerificationError):
    """Ranks, or iterations, that run modules or use parameters in different orders."""


class UsageError(ArgumentError):
    """A wrong argument on the command line; the message is one line that says what to write."""
