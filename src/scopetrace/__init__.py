"""scopetrace: traces of PyTorch models whose graphs still know the modules.

import scopetrace as st

tr = st.trace(model, args, kwargs)
print(tr)
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from scopetrace import errors
from scopetrace.errors import ArgumentError as ArgumentError
from scopetrace.errors import ScopetraceError
from scopetrace.errors import TraceError as TraceError
from scopetrace.errors import VerificationError as VerificationError

if TYPE_CHECKING:
    from scopetrace import distributed
    from scopetrace.api.functional import Functionalized, functional_backend, functionalize
    from scopetrace.api.functions import diff, from_exported_program, load, save_onnx, write_onnx_weights
    from scopetrace.api.functions import save as save
    from scopetrace.api.trace import OutlinedProgram, Trace, trace
    from scopetrace.distributed.estimate import Estimate as Estimate
    from scopetrace.distributed.estimate import estimate
    from scopetrace.functionalization.report import Alias as Alias
    from scopetrace.functionalization.report import Mutation as Mutation
    from scopetrace.ir.conditions import Specialization as Specialization
    from scopetrace.ir.scopes import Scope, scope, tracing_state
    from scopetrace.ir.scopes import TracingState as TracingState
    from scopetrace.ir.write_back import WriteBack as WriteBack
    from scopetrace.ir.write_back import WriteBackRow as WriteBackRow
    from scopetrace.order.execution import ExecutionOrder
    from scopetrace.order.symbolic import ExecOrderTracer, TracingConfig
    from scopetrace.program.outlined import Function as Function
    from scopetrace.program.traced import ModuleCall

__version__ = "0.1.0"

__all__ = [
    "ExecOrderTracer",
    "ExecutionOrder",
    "Functionalized",
    "ModuleCall",
    "OutlinedProgram",
    "Scope",
    "ScopetraceError",
    "Trace",
    "TracingConfig",
    "diff",
    "distributed",
    "errors",
    "estimate",
    "from_exported_program",
    "functional_backend",
    "functionalize",
    "load",
    "save_onnx",
    "scope",
    "trace",
    "tracing_state",
    "write_onnx_weights",
]
"""What `dir` shows. Classes of objects that people get from others, and earlier names, can be imported as well."""

_HOMES = {
    "api.functional": "Functionalized functional_backend functionalize",
    "api.functions": "diff from_exported_program load save write_onnx_weights save_onnx",
    "api.trace": "OutlinedProgram Trace trace",
    "distributed.estimate": "Estimate estimate",
    "functionalization.report": "Alias Mutation",
    "ir.conditions": "Specialization",
    "ir.scopes": "Scope TracingState scope tracing_state",
    "ir.write_back": "WriteBack WriteBackRow",
    "order.execution": "ExecutionOrder",
    "order.symbolic": "ExecOrderTracer TracingConfig",
    "program.outlined": "Function",
    "program.traced": "ModuleCall",
}
"""Public names by the module that is imported when one of them is first asked for: all of them take twice as long to
import as torch. Type checkers read the same from above."""


def __getattr__(name: str) -> Any:
    """A public name at its first use, and the other classes of `errors`, which stood here earlier."""
    if name == "distributed":
        return importlib.import_module("scopetrace.distributed")
    home = next((home for home, names in _HOMES.items() if name in names.split()), None)
    if home is not None:
        value = getattr(importlib.import_module(f"scopetrace.{home}"), name)
    elif name == "Outlined":
        value = __getattr__("OutlinedProgram")
    else:
        value = _other(name)
    globals()[name] = value
    return value


def _other(name: str) -> type[ScopetraceError]:
    error = getattr(errors, name, None)
    if isinstance(error, type) and issubclass(error, ScopetraceError):
        return error
    # `from scopetrace import files` asks here too, while `api.trace` is being imported.
    asks = not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is None
    is_method = asks and hasattr(__getattr__("Trace"), name)
    write = f": write st.trace(model, args).{name}" if is_method else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{write}")


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"]
