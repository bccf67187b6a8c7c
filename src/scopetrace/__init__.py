"""scopetrace: traces of PyTorch models whose graphs still know the modules.

import scopetrace as st

tr = st.trace(model, args, kwargs)
print(tr)
"""

from scopetrace import distributed, errors
from scopetrace.api.functional import Functionalized, functional_backend, functionalize
from scopetrace.api.trace import OutlinedProgram, Trace, diff, load, save, trace, write_onnx_weights
from scopetrace.errors import ArgumentError, ScopetraceError, TraceError, VerificationError
from scopetrace.functionalization.report import Alias as Alias
from scopetrace.functionalization.report import Mutation as Mutation
from scopetrace.ir.conditions import Specialization as Specialization
from scopetrace.ir.scopes import Scope, scope, tracing_state
from scopetrace.ir.scopes import TracingState as TracingState
from scopetrace.ir.write_back import WriteBack as WriteBack
from scopetrace.order.execution import ExecutionOrder
from scopetrace.order.symbolic import ExecOrderTracer, TracingConfig
from scopetrace.program.outlined import Function as Function
from scopetrace.program.traced import ModuleCall

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ExecOrderTracer",
    "ExecutionOrder",
    "Functionalized",
    "ModuleCall",
    "OutlinedProgram",
    "Scope",
    "ScopetraceError",
    "Trace",
    "TraceError",
    "TracingConfig",
    "VerificationError",
    "diff",
    "distributed",
    "errors",
    "functional_backend",
    "functionalize",
    "load",
    "save",
    "scope",
    "trace",
    "tracing_state",
    "write_onnx_weights",
]
"""What `dir` shows. Classes of objects that people get from others, and earlier names, can be imported as well."""

Outlined = OutlinedProgram  # its earlier name


def __getattr__(name: str) -> type[ScopetraceError]:
    """The other classes of `errors`, which stood here earlier."""
    found = getattr(errors, name, None)
    if isinstance(found, type) and issubclass(found, ScopetraceError):
        return found
    is_method = not name.startswith("_") and hasattr(Trace, name)
    write = f": write st.trace(model, args).{name}" if is_method else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{write}")


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"]
