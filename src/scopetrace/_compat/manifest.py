"""Every private name of torch that this package uses, and the check that the installed torch has them.

The check runs when the package is imported, before any of the names is used, so that a torch without one of them is
told at once and in full. tests/test_compat.py compares the tables with the source of `_compat`.
"""

from __future__ import annotations

import pkgutil
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._ops import mode_stack_state_for_pre_dispatch
from torch.fx.experimental.sym_node import SymNode

from scopetrace._compat.versions import CURRENT, SUPPORTED

NAMES = {
    "torch": "_C _TorchCompileInductorWrapper _TorchCompileWrapper _debug_has_internal_overlap _ops _refs",
    "torch:Tensor": """
        _backward_hooks _base _cdata _has_symbolic_sizes_strides _is_view _make_subclass _post_accumulate_grad_hooks
        _version""",
    "torch:UntypedStorage": "_cdata",
    "torch._C": """
        DispatchKey DispatchKeySet TensorBase _DisableAutocast _DisableFuncTorch _DisablePythonDispatcher
        _DisableTorchDispatch _ExcludeDispatchKeyGuard _InferenceMode _autograd
        _dispatch_has_kernel _dispatch_has_kernel_for_dispatch_key
        _dispatch_get_registrations_for_dispatch_key _FunctionBase
        _dispatch_tls_is_dispatch_key_excluded _dispatch_tls_set_dispatch_key_included _functorch
        _current_autograd_node
        _get_cudnn_enabled _get_cudnn_sdp_enabled _get_deterministic_algorithms _get_flash_sdp_enabled
        _get_math_sdp_enabled _get_mem_efficient_sdp_enabled _get_overrideable_sdp_enabled _get_qengine
        _get_sdp_priority_order _get_mkldnn_enabled _get_tracing_state _is_any_autocast_enabled
        _len_torch_function_stack
        _get_function_stack_at _pop_torch_function_stack _push_on_torch_function_stack _set_grad_enabled
        _set_mkldnn_enabled _storage_id _VariableFunctions
        _set_throw_on_mutable_data_ptr""",
    "torch._C._VariableFunctions": "_make_dual",
    "torch._C._autograd": """
        _get_sequence_nr _pop_saved_tensors_default_hooks _push_saved_tensors_default_hooks
        _unsafe_set_version_counter""",
    "torch._C:DispatchKey": "AutocastCPU AutocastCUDA AutocastHPU AutocastMPS AutocastXPU PreDispatch Python",
    "torch._C:ScriptMethod": "_debug_flush_compilation_cache",
    "torch._C:ScriptModule": "_get_method _method_names",
    "torch._C:TensorBase": "data requires_grad storage_offset stride",
    "torch._C._functorch": "TransformType get_interpreter_stack get_unwrapped is_functorch_wrapped_tensor "
    "peek_interpreter_stack",
    "torch._dispatch.python": "enable_python_dispatcher",
    "torch._export.passes.replace_autocast_with_hop_pass": "replace_autocast_with_hop_pass",
    "torch._export.passes.replace_set_grad_with_hop_pass": "replace_set_grad_with_hop_pass",
    "torch._export.utils": "_collect_all_valid_cia_ops _is_cia_op _is_preservable_cia_op",
    "torch._export.verifier": "TrainingIRVerifier Verifier",
    "torch._functorch": "eager_transforms vmap",
    "torch._functorch.eager_transforms": "_wrap_tensor_for_grad",
    "torch._functorch.vmap": "_add_batch_dim",
    "torch._functorch.autograd_function": "custom_function_call",
    "torch._functorch.pyfunctorch": "dispatch_functorch",
    "torch._guards": "Source",
    "torch._guards:Source": "_name_template",
    "torch._higher_order_ops.utils": "_hop_compile_and_call registered_hop_fake_fns",
    "torch._library.custom_ops": "CustomOpDef",
    "torch._library.opaque_object": "get_opaque_type_name is_opaque_value_type",
    "torch._ops": """
        HigherOrderOperator OpOverload OpOverloadPacket _higher_order_ops _len_torch_dispatch_stack_pre_dispatch
        _pop_mode_from_pre_dispatch _set_mode_pre_dispatch mode_stack_state_for_pre_dispatch""",
    "torch._ops:OpOverload": "_can_decompose _get_dispatch decompose",
    "torch._prims_common": "check_contiguous_sizes_strides suggest_memory_format",
    "torch._refs": "expand tensor",
    "torch._subclasses.fake_tensor": """
        DataDependentOutputException DynamicOutputShapeException FakeTensor FakeTensorConverter FakeTensorMode
        UnsupportedOperatorException in_kernel_invocation_manager""",
    "torch._subclasses.fake_tensor:FakeTensorConverter": "from_real_tensor",
    "torch._subclasses.schema_check_mode": "SchemaCheckMode",
    "torch.amp:GradScaler": "_check_scale_growth_tracker _lazy_init_scale_growth_tracker _maybe_opt_step",
    "torch.amp.autocast_mode": "_enter_autocast _exit_autocast",
    "torch.autograd": "_engine_run_backward",
    "torch.autograd.function": "BackwardCFunction _SingleLevelFunction",
    "torch.autograd.graph": "_engine_run_backward",
    "torch.compiler": "_is_compiling_flag _is_exporting_flag",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": "apply_activation_checkpointing",
    "torch.export.dynamic_shapes": "_DerivedDim _DimHint _DimHintType _IntWrapper",
    "torch.export.dynamic_shapes:_DimHintType": "AUTO STATIC",
    "torch.fx:Graph": "_resolve_unbacked_binding",
    "torch.nn.modules.module": """
        _global_backward_hooks _global_backward_pre_hooks _global_forward_hooks _global_forward_pre_hooks""",
    "torch.fx:Node": "_erased _update_args_kwargs",
    "torch.fx._lazy_graph_module": "_LazyGraphModule",
    "torch.fx._lazy_graph_module:_LazyGraphModule": "_real_recompile",
    "torch.fx.experimental": "_config",
    "torch.fx.experimental._config": "backed_size_oblivious",
    "torch.fx.experimental.proxy_tensor": "get_proxy_mode make_fx",
    "torch.fx.experimental.sym_node": "_NO_HINT SymNode",
    "torch.fx.experimental.sym_node:SymNode": "expr has_hint hint",
    "torch.fx.experimental.symbolic_shapes": """
        CallMethodKey ConvertIntKey DimDynamic DivideByKey GuardOnDataDependentSymNode PendingUnbackedSymbolNotFound
        RuntimeAssert SLoc ShapeEnv ValueRangesSLoc
        ShapeGuard StrictMinMaxConstraint compute_unbacked_bindings""",
    "torch.fx.experimental.symbolic_shapes:DimDynamic": "DYNAMIC",
    "torch.fx.experimental.symbolic_shapes:ShapeEnv": """
        _get_user_frame _is_python_assert _set_replacement _suppress_guards_tls _update_version_counter
        create_symbol create_symintnode create_unbacked_symint create_unspecified_symbol evaluate_expr
        evaluate_sym_node guard_or_defer_runtime_assert ignore_fresh_unbacked_symbols""",
    "torch.fx.passes.shape_prop": "_extract_tensor_metadata",
    "torch.nn:Module": "_call_impl _get_name _wrapped_call_impl",
    "torch.nn.modules._functions": "BackwardHookFunction",
    "torch.nn.modules.batchnorm": "_BatchNorm",
    "torch.nn.modules.batchnorm:_BatchNorm": "_check_input_dim forward",
    "torch.optim:SGD": "_init_group",
    "torch.optim.lr_scheduler": "_enable_get_lr_call",
    "torch.optim.lr_scheduler:ReduceLROnPlateau": "_is_better",
    "torch.optim.optimizer": "_global_optimizer_post_hooks _global_optimizer_pre_hooks",
    "torch.testing": "_comparison",
    "torch.testing._comparison": "default_tolerances",
    "torch.utils._python_dispatch": "TorchDispatchMode _disable_current_modes",
    "torch.utils._sympy.functions": "FloatTrueDiv FloorDiv IntTrueDiv Max Min ToFloat",
    "torch.utils._sympy.interp": "_run_sympy_handler sympy_interp",
    "torch.utils._sympy.numbers": "int_oo",
    "torch.utils._sympy.printers": "PythonPrinter",
    "torch.utils._sympy.reference": "OptimizedPythonReferenceAnalysis PythonReferenceAnalysis",
    "torch.utils._sympy.solve": "try_solve",
    "torch.utils._sympy.symbol": "SymT symbol_is_type",
    "torch.utils._sympy.symbol:SymT": "UNBACKED_FLOAT UNBACKED_INT",
    "torch.utils._sympy.value_ranges": "ValueRanges bound_sympy",
    "torch.overrides": "_get_overridable_functions _get_tensor_methods",
    "torch.utils.checkpoint": CURRENT.checkpoint_generator,
}
"""Names by owner: a module, or a class as `module:Class`."""

INSTANCES: dict[str, tuple[Callable[[], Any], str]] = {
    "OpOverload": (lambda: torch.ops.aten.add.Tensor, "_op_dk _overloadname _schema is_view"),
    "HigherOrderOperator": (lambda: torch.ops.higher_order.cond, "python_key_table"),
    "_ModeStackStateForPreDispatch": (mode_stack_state_for_pre_dispatch, "_schema_check_mode"),
    "ScriptModule": (torch.jit.ScriptModule, "_c"),
    "SymNode": (lambda: SymNode(sympy.Integer(1), None, int, 1), "_expr"),
    "AdditionalInputs": (torch.export.AdditionalInputs, "_examples"),
    "GradScaler": (lambda: torch.amp.GradScaler("cpu"), "_per_optimizer_states"),
    "Optimizer": (
        lambda: types.SimpleNamespace(**torch.optim.Optimizer.__annotations__),  # to make one loads Dynamo
        "_optimizer_step_post_hooks _optimizer_step_pre_hooks",
    ),
    "Module": (
        torch.nn.Module,
        """_backward_hooks _backward_pre_hooks _buffers _compiled_call_impl _forward_hooks _forward_pre_hooks
        _modules _non_persistent_buffers_set _parameters""",
    ),
}
"""Attributes that only instances have, by class, with a way to make one."""

SHAPE_ENV = """
    _replacements_version_counter axioms backed_var_to_val deferred_runtime_asserts guards
    ignorable_fresh_unbacked_symbols pending_fresh_unbacked_symbols replacements unbacked_renamings var_to_range
    var_to_range_sloc"""
"""Attributes of ShapeEnvs, checked when the first is made, as that imports `torch._dynamo`."""

EXPORTED_PROGRAM = "_guards_code"
"""Attributes of ExportedPrograms, checked when one is made."""

LATER = {
    "torch._dynamo._trace_wrapped_higher_order_op": "TransformGetItemToIndex",
    "torch._dynamo.eval_frame": "_stance",
    "torch.distributed.distributed_c10d": "_get_object_coll_device",
    "torch._dynamo.config": "fake_tensor_cache_enabled",
    "torch._export.non_strict_utils": "_enable_graph_inputs_of_type_nn_module",
    "torch._higher_order_ops.invoke_subgraph": "invoke_subgraph_placeholder",
    "torch.export._unlift": "GuardsFn",
}
"""Of modules that are not imported with the package, as that takes seconds."""

ONNX = {
    "torch._decomp": "get_decompositions",
    "torch.onnx._internal.exporter._constants": "TORCHLIB_OPSET",
    "torch.export.decomp_utils": "_collect_all_valid_cia_ops",
    "torch.export.exported_program": "_collect_all_valid_cia_ops",
    "torch.onnx._internal.exporter._core": "TorchTensor _is_onnx_op _prepare_exported_program_for_export "
    "torch_dtype_to_onnx_dtype",
    "torch.onnx._internal.exporter._dispatching": "dispatch",
    "torch.onnx._internal.exporter._registration": "ONNXRegistry",
    "torch.onnx._internal.exporter._torchlib.ops.hop": "call_op",
}
"""What the ONNX exporter uses, checked when that is imported."""


def missing(names: Mapping[str, str]) -> Iterator[str]:
    """The dotted names that the installed torch does not have."""
    for owner, attributes in names.items():
        try:
            module_or_class = pkgutil.resolve_name(owner)
        except (ImportError, AttributeError):
            yield owner.replace(":", ".")
            continue
        for name in attributes.split():
            if not hasattr(module_or_class, name):
                yield f"{owner.replace(':', '.')}.{name}"


def missing_on(instance: Any, attributes: str) -> list[str]:
    """Those of the attributes that an object does not have."""
    return [f"{type(instance).__name__}().{name}" for name in attributes.split() if not hasattr(instance, name)]


def require(absent: list[str]) -> None:
    """Raise ImportError if names are absent, with all of them and the torch that lacks them."""
    if absent:
        (first, *_, last) = sorted(SUPPORTED)
        raise ImportError(
            f"torch {torch.__version__} has no {', '.join(absent)}, which scopetrace uses. It supports torch "
            f"{first[0]}.{first[1]} to {last[0]}.{last[1]}: install one of these, or a newer scopetrace."
        )


def check() -> None:
    """Raise ImportError if the installed torch lacks private names that this package uses."""
    require([*missing(NAMES), *(name for make, names in INSTANCES.values() for name in missing_on(make(), names))])
