"""The op without mutation that computes what a mutable op writes: its functional variant.

    mutable op -> its signature: arguments and results as if nothing were written, as torchgen groups ops
               -> the op of the same base name and signature that writes nothing
               -> where among its results the returns and the new values of the mutable op are

torch's build generates variants by such groups (`torchgen.model.FunctionSchema.signature`) and keeps no table of them
at run time; tests/test_functional_variants.py compares with torchgen. An op without a variant has to be handled in
another way, or refused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx

from scopetrace._compat.ops import Argument, Schema, is_op, schema_of
from scopetrace._compat.tensors import RECURRENT
from scopetrace.ir.tape import Op, Value

_NAMESPACES = frozenset({"_c10d_functional", "aten", "mkldnn", "quantized", "symm_mem"})
"""Where names say which ops belong together. A custom `ours::scale` need not be the variant of `ours::scale_`."""

_OTHER_NAMES = {
    "adaptive_avg_pool3d_backward": "_adaptive_avg_pool3d_backward",
    "fused_moving_avg_obs_fake_quant": "_fused_moving_avg_obs_fq_helper_functional",
}
"""Variants under another name."""

_MORE_RESULTS = {"fused_moving_avg_obs_fake_quant": ("Tensor",)}
"""Types of results of the variant that the op does not return, between the returns and the new values."""

_CANONICAL = {"input": "self", "exponential_average_factor": "momentum", "epsilon": "eps"}
"""Arguments that an op and its variant name differently."""

_FACTORY_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})
"""The arguments of a factory that describe its result. With `out=` it takes them from `out`."""

_IN_DTYPE_OF_OUT = frozenset(
    f"aten::{name}" for name in ("cumprod", "cumsum", "mean", "nanmean", "nansum", "prod", "sum")
)
"""Ops that compute in the dtype of `out`, as they do in one that they are given as `dtype`."""

_NO_VALUES = frozenset(
    f"aten::{name}"
    for name in (
        *("requires_grad_", "retain_grad", "record_stream", "set_data", "_resize_output_", "_coalesced_"),
        "shallow_copy_data_",  # since torch 2.15
    )
)
"""Ops that change what the tensor is, to autograd or the allocator, and no element, without torch's tag for that."""

_LEGIT = ("_native_batch_norm_legit_functional", 3)
_STATISTICS: dict[str, tuple[str | None, tuple[str, int] | None]] = {
    "aten::batch_norm": ("training", _LEGIT),
    "aten::native_batch_norm": ("training", _LEGIT),
    "aten::_batch_norm_impl_index": ("training", None),
    "aten::cudnn_batch_norm": ("training", ("_batch_norm_with_update_functional", 4)),
    "aten::miopen_batch_norm": ("training", _LEGIT),
    "aten::instance_norm": ("use_input_stats", None),
    "aten::batch_norm_update_stats": (None, None),
    "aten::batch_norm_gather_stats": (None, None),
    "aten::batch_norm_gather_stats_with_counts": (None, None),
}
"""Ops that write their running statistics without a word in the schema: the argument that turns it on, and the variant
with the number of its results before the new statistics."""

_SKIP_EMPTY = frozenset({"aten::batch_norm", "aten::_batch_norm_impl_index"})
"""Those that leave the statistics alone for an empty input, which they look at before they choose a kernel."""

FIRST_HAS_GRADIENT = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        *("_native_batch_norm_legit_functional", "_batch_norm_with_update_functional", "rrelu_with_noise_functional"),
        "_fused_moving_avg_obs_fq_helper_functional",
    )
)
"""Functional variants of which autograd follows the first result alone: the others are statistics and noise."""

_UNDECLARED = {
    "aten::_cudnn_rnn_flatten_weight": "weight_arr",  # each weight becomes a view of the result
    "inductor::resize_storage_bytes_": "variable",
}
"""The other ops that do, and the argument that they always write."""

MAY_WRITE_UNDECLARED = _STATISTICS.keys() | _UNDECLARED.keys()
"""The names of the ops of which some calls have `undeclared_writes`."""


@dataclasses.dataclass(frozen=True)
class FunctionalVariant:
    """An op without mutation, and how its results are the returns and the new values of a mutable op."""

    op: Any
    """The `OpOverload`. That of an op which changes metadata, such as `transpose_`, returns a view."""

    new_values: tuple[tuple[str, int | None], ...]
    """For each written argument, in schema order, the result of the variant that is its new value.

    None: the variant has one result, a tensor or a list, and that is the new value.
    """

    results: tuple[int | str, ...]
    """For each return of the mutable op: a result of the variant, or the written argument that is returned."""


# Declared mutation ---------------------------------------------------------------------------------------------------


@functools.cache
def is_metadata_only(func: Any) -> bool:
    """Whether `func` changes only what a tensor is (its sizes, strides, storage, flags) and no element of a storage."""
    return torch.Tag.inplace_view in func.tags or schema_of(func).name in _NO_VALUES


@functools.cache
def functional_variant(func: Any) -> FunctionalVariant | None:
    """The op without mutation that computes what `func`, an `OpOverload`, returns and writes; None for no such."""
    schema = schema_of(func)
    if not any(a.is_written and a.is_tensor for a in schema.arguments):
        return None
    signature = _signature(schema)
    op = next((op for op in _candidates(schema) if _signature(schema_of(op)) == signature), None)
    return None if op is None else _describe(func, op)


def _candidates(schema: Schema) -> Iterator[Any]:
    """The overloads of the same base name that write nothing."""
    namespace, name = schema.name.partition("::")[0], schema.op_name
    base = name.removesuffix("_out") if name.endswith("_out") else name.removesuffix("_")
    names: tuple[str, ...] = base, f"{base}_functional"
    if name in _OTHER_NAMES:
        names = (_OTHER_NAMES[name],)
    elif name.endswith("__"):  # __iadd__, __lshift__
        names = (f"__{name[3:]}" if name.startswith("__i") else name,)
    for other in names if namespace in _NAMESPACES else ():
        packet = getattr(getattr(torch.ops, namespace), other, None)
        overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
        yield from (op for op in overloads if not schema_of(op).written)


def _signature(schema: Schema) -> tuple[frozenset[tuple[str, str]], tuple[str, ...]]:
    """Arguments by name and type, and types of results, of the functional variant that an op would have.

    As in torchgen, `out` and the options of factories are left out, and what is written is a result. Other than there,
    the order of arguments does not matter.
    """
    taken = (a for a in schema.arguments if not is_out_argument(a))
    # TorchScript has overloads of some ops that take lists without None, for which there is no variant
    optional, without = "List[Optional[Tensor]]", "List[Tensor]"
    arguments = frozenset((_canonical(a), a.type.replace(optional, without)) for a in taken)
    options = {(name, type) for name, type in arguments if name in _FACTORY_OPTIONS}
    if len(options) == len(_FACTORY_OPTIONS):
        arguments -= options
    returned = tuple(r.type for r in schema.returns) + _MORE_RESULTS.get(schema.op_name, ())
    return arguments, returned + tuple(a.type for a in _not_returned(schema))


def _not_returned(schema: Schema) -> list[Argument]:
    """The written arguments that are not returned, `out` first: their new values follow the returns in this order."""
    written = [a for a in schema.arguments if a.is_written and _returned_as(schema, a) is None]
    return sorted(written, key=lambda a: not is_out_argument(a))


def _returned_as(schema: Schema, argument: Argument) -> int | None:
    """The place among the returns of an argument that is written."""
    places = (i for i, r in enumerate(schema.returns) if r.is_written and r.aliases & argument.aliases)
    return next(places, None)


def _describe(func: Any, op: Any) -> FunctionalVariant:
    schema = schema_of(func)
    first = len(schema.returns) + len(_MORE_RESULTS.get(schema.op_name, ()))
    places = {a.name: first + i for i, a in enumerate(_not_returned(schema))}
    for a in schema.arguments:
        place = _returned_as(schema, a) if a.is_written else None
        if place is not None:
            places[a.name] = place
    returned = {place: name for name, place in places.items()}
    one = len(schema_of(op).returns) == 1
    return FunctionalVariant(
        op=op,
        new_values=tuple((name, None if one else places[name]) for name in schema.written),
        results=tuple(returned.get(i, i) for i in range(len(schema.returns))),
    )


# Undeclared mutation -------------------------------------------------------------------------------------------------


def undeclared_writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Names of arguments that this call writes although the schema of `func` does not say so.

    On CPU, the version counters of running statistics do not tell either, except for `instance_norm`.
    """
    name = schema_of(func).name
    if name not in MAY_WRITE_UNDECLARED:
        return ()
    if name in _UNDECLARED:
        return (_UNDECLARED[name],)
    arguments = by_name(func, args, kwargs)
    switch, _ = _STATISTICS[name]
    if switch is not None and not arguments[switch]:
        return ()
    if name in _SKIP_EMPTY and 0 in tensor_of(arguments["input"]).shape:
        return ()
    return tuple(n for n in ("running_mean", "running_var") if arguments.get(n) is not None)


def undeclared_variant(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> FunctionalVariant | None:
    """The functional variant of a call whose writes the schema does not declare.

    None if the call has no such writes, or if there is no such variant. Ask this before `functional_variant`: the `out`
    overloads of such ops have both kinds of writes.
    """
    if len(undeclared_writes(func, args, kwargs)) < 2:
        return None  # the variants take both statistics
    return _statistics_variant(func)


@functools.cache
def _statistics_variant(func: Any) -> FunctionalVariant | None:
    schema = schema_of(func)
    _, variant = _STATISTICS.get(schema.name, (None, None))
    if variant is None:
        return None
    name, count = variant
    op = getattr(torch.ops.aten, name).default
    new = [("running_mean", count), ("running_var", count + 1), *((out, i) for i, out in enumerate(schema.written))]
    results: tuple[int | str, ...] = schema.written or tuple(range(len(schema.returns)))
    return FunctionalVariant(op, tuple(new), results)


# Calls ---------------------------------------------------------------------------------------------------------------


def call_variant(
    variant: FunctionalVariant, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for `variant.op` that do what `func(*args, **kwargs)` does. Values pass through as they are.

    They may be tensors, tape values or nodes with `meta["val"]`. Trailing arguments that equal the variant's defaults
    are left out.
    """
    arguments = by_name(func, args, kwargs)
    arguments |= _options_of_out(func, arguments)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    needed = 0
    for arg, name in _sources(func, variant.op):
        if name not in arguments:
            positional.append(arg.default)
        elif arg.kwarg_only:
            keywords |= {} if _is_default(arg, arguments[name]) else {arg.name: arguments[name]}
        else:
            positional.append(arguments[name])
            needed = needed if _is_default(arg, arguments[name]) else len(positional)
    return tuple(positional[:needed]), keywords


@functools.cache
def _sources(func: Any, op: Any) -> list[tuple[Argument, str]]:
    """Each argument of `op`, with the name of the same argument of `func`, or its own where there is none."""
    names = {_canonical(a): a.name for a in schema_of(func).arguments if not is_out_argument(a)}
    return [(a, names.get(_canonical(a), a.name)) for a in schema_of(op).arguments]


def _options_of_out(func: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments in place of `out`, which no variant takes: what a factory makes, or the dtype to sum in."""
    out = next((tensor_of(arguments.get(a.name)) for a in schema_of(func).arguments if is_out_argument(a)), None)
    if not isinstance(out, torch.Tensor):
        return {}
    if "dtype" in arguments:
        sums_in_it = schema_of(func).name in _IN_DTYPE_OF_OUT and arguments["dtype"] is None
        return {"dtype": out.dtype} if sums_in_it else {}
    layout = {} if out.layout is torch.strided else {"layout": out.layout}
    return {"dtype": out.dtype, "device": out.device} | layout


def _is_default(arg: Argument, value: Any) -> bool:
    """Whether `value` is the default of `arg`. 1 and 1.0 are not the same: an op may promote by one of them."""
    is_plain = isinstance(value, (bool, int, float, str, list, tuple, type(None)))
    return arg.has_default and is_plain and repr(value) == repr(arg.default)


def by_name(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with the defaults of those that were not given."""
    arguments = _defaults(func).copy()
    arguments.update(zip(schema_of(func).names, args, strict=False), **kwargs)
    return arguments


@functools.cache
def _defaults(func: Any) -> dict[str, Any]:
    return {a.name: a.default for a in schema_of(func).arguments if a.has_default}


def tensor_of(value: Any) -> Any:
    """The tensor that `value` is, or the fake tensor of a tape value or node."""
    if isinstance(value, Value):
        return value.fake
    return value.meta["val"] if isinstance(value, torch.fx.Node) else value


def is_out_argument(arg: Argument) -> bool:
    """Whether an argument of a schema is one that the op fills."""
    # `is_out` holds for keyword-only ones; those of quantized ops are positional.
    return arg.is_out or (arg.name in ("out", "output") and arg.is_written)


def _canonical(arg: Argument) -> str:
    return _CANONICAL.get(arg.name, arg.name)


def is_factory(op: Op) -> bool:
    """Whether an op only takes sizes, dtype and device of its argument."""
    return is_op(op.target) and _is_factory(op.target)


@functools.cache
def _is_factory(func: Any) -> bool:
    name = schema_of(func).op_name
    return name.endswith("_like") or name.startswith("new_")


def drops_between_layers(op: Any, args: Sequence[Any]) -> bool:
    """Whether an op has dropout between its layers: its kernel has it, and torch's decomposition in Python lacks it."""
    if op not in RECURRENT:
        return False
    layers, dropout, train = args[5:8] if str(op).endswith(".data") else args[4:7]
    return bool(train and dropout and layers > 1)
