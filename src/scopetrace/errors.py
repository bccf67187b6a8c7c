"""One exception class for each kind of mistake; every message says what to do instead.

`TraceError` and its subclasses carry where the problem is: `op`, `module` and `source`.
"""

from __future__ import annotations


class ScopetraceError(Exception):
    """The base of all errors that scopetrace itself raises."""


class TraceError(ScopetraceError):
    """A model cannot be traced.

    Attributes:
        op: the op that could not be recorded, as `"aten.item.default"`, or None.
        module: the scope path in which it happened, as `"Net/Linear[fc]"`.
        source: the user's line, as `'model.py:12, in forward: if x.sum() > 0:'`.
        hint: what to write instead.
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


class DataDependentError(TraceError):
    """Python needs the value of a tensor (`if x.sum() > 0`) that depends on the inputs."""


class ForeignTensorError(TraceError):
    """A tensor of another trace, thread or fake mode reached this trace, which did not see it made."""


class OpaqueOutputError(TraceError):
    """A model takes or returns tensors inside an object of a type that pytree does not know."""


class RandomStateError(TraceError):
    """The forward seeds a random generator, which no graph can repeat."""


class UnsupportedOpError(TraceError):
    """An op that recording does not know how to handle."""


class ControlFlowError(TraceError):
    """A body of `torch.cond`, `while_loop`, `scan` or `map` does what torch does not allow there."""


class FunctionalizationError(TraceError):
    """A mutation that cannot be turned into pure ops with the same meaning."""


class ExportError(TraceError):
    """A trace does what an ExportedProgram cannot say."""


class LeafPatternError(ScopetraceError, ValueError):
    """An entry of `leaves=` is of the wrong kind, or matches no module of the model."""


class ScopeError(ScopetraceError):
    """A user scope was left open, closed twice, or has a name that cannot stand in a path."""


class InputMismatchError(ScopetraceError, ValueError):
    """A trace was called with inputs that differ from those that it was recorded with."""


class CompiledGraphError(ScopetraceError):
    """What a compiler made of a graph returns values of other shapes or dtypes than the graph."""


class OutlineError(ScopetraceError, ValueError):
    """A module call cannot be made a function, or no call is what was asked for."""


class LintError(ScopetraceError):
    """The graph, the scopes and the calls of a trace disagree."""


class CheckError(ScopetraceError, AssertionError):
    """The trace and the model gave different results on the same inputs."""


class UsageError(ScopetraceError):
    """A wrong argument on the command line; the message is one line that says what to write."""


class DynamicShapeError(TraceError):
    """`dynamic_shapes` does not fit the arguments, or the model fixes a size that was said to be dynamic."""


class PlanError(ScopetraceError, ValueError):
    """A plan for sharding or splitting a model that cannot be made, or that would fail when it runs."""


class OrderMismatchError(ScopetraceError):
    """Ranks, or iterations, that run modules or use parameters in different orders."""


class OnnxDependencyError(ScopetraceError, ImportError):
    """A package that ONNX export needs is not installed."""


class OnnxOptionError(ScopetraceError, ValueError):
    """An argument of `Trace.to_onnx` that does not fit the model or the other arguments."""


class OnnxExportError(ScopetraceError):
    """A trace that has no form as an ONNX model; the message says what in it, where, and what to do."""


class OnnxOpError(OnnxExportError):
    """Ops without an ONNX form.

    Attributes:
        ops: (op, module, source) of each: `("aten.erfcx.default", "Net/Head[head]", 'File "net.py", line 9 …')`; module
            and source are None where they are not known.
    """

    def __init__(self, ops: list[tuple[str, str | None, str | None]]) -> None:
        self.ops = ops
        rows = ["  " + ", ".join(part for part in found if part) for found in ops]
        super().__init__(
            "these ops have no ONNX form here:\n"
            + "\n".join(dict.fromkeys(rows))
            + "\n  instead: give their form in custom_translation_table, name a module around them in plugins=, "
            "or take a higher opset_version"
        )


class OnnxVerificationError(ScopetraceError, AssertionError):
    """The ONNX model is not valid, or does not compute what the model computes."""
