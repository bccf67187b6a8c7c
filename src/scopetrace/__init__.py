"""scopetrace: traces of PyTorch models that still know their modules.

import scopetrace as st

tr = st.trace(model, args, kwargs)
print(tr)
"""

from scopetrace import distributed as distributed
from scopetrace.api.functional import Functionalized as Functionalized
from scopetrace.api.functional import functional_backend as functional_backend
from scopetrace.api.functional import functionalize as functionalize
from scopetrace.api.trace import OutlinedProgram as OutlinedProgram
from scopetrace.api.trace import Trace as Trace
from scopetrace.api.trace import load as load
from scopetrace.api.trace import trace as trace
from scopetrace.errors import CheckError as CheckError
from scopetrace.errors import CompiledGraphError as CompiledGraphError
from scopetrace.errors import ControlFlowError as ControlFlowError
from scopetrace.errors import DataDependentError as DataDependentError
from scopetrace.errors import DynamicShapeError as DynamicShapeError
from scopetrace.errors import ExportError as ExportError
from scopetrace.errors import ForeignTensorError as ForeignTensorError
from scopetrace.errors import FunctionalizationError as FunctionalizationError
from scopetrace.errors import InputMismatchError as InputMismatchError
from scopetrace.errors import LeafPatternError as LeafPatternError
from scopetrace.errors import LintError as LintError
from scopetrace.errors import OnnxDependencyError as OnnxDependencyError
from scopetrace.errors import OnnxExportError as OnnxExportError
from scopetrace.errors import OnnxOpError as OnnxOpError
from scopetrace.errors import OnnxOptionError as OnnxOptionError
from scopetrace.errors import OnnxVerificationError as OnnxVerificationError
from scopetrace.errors import OpaqueOutputError as OpaqueOutputError
from scopetrace.errors import OrderMismatchError as OrderMismatchError
from scopetrace.errors import OutlineError as OutlineError
from scopetrace.errors import PlanError as PlanError
from scopetrace.errors import RandomStateError as RandomStateError
from scopetrace.errors import ScopeError as ScopeError
from scopetrace.errors import ScopetraceError as ScopetraceError
from scopetrace.errors import TraceError as TraceError
from scopetrace.errors import UnsupportedOpError as UnsupportedOpError
from scopetrace.functionalization.report import Alias as Alias
from scopetrace.functionalization.report import Mutation as Mutation
from scopetrace.ir.scopes import Scope as Scope
from scopetrace.ir.scopes import TracingState as TracingState
from scopetrace.ir.scopes import scope as scope
from scopetrace.ir.scopes import tracing_state as tracing_state
from scopetrace.ir.write_back import WriteBack as WriteBack
from scopetrace.order.execution import ExecutionOrder as ExecutionOrder
from scopetrace.order.symbolic import ExecOrderTracer as ExecOrderTracer
from scopetrace.order.symbolic import TracingConfig as TracingConfig
from scopetrace.program.outlined import Function as Function
from scopetrace.program.traced import ModuleCall as ModuleCall
from scopetrace.record.specialize import Specialization as Specialization

__version__ = "0.1.0"

Outlined = OutlinedProgram
