"""The pure op that computes what a mutable op writes: its functional twin.

torch has a twin for nearly every op that writes a tensor, but no table of them. The twins are found by schema: an
overload under one of a few names, with the same arguments by name and type, whose results are the returns and the new
values of the written arguments, in that order. No twin means that the caller must find another way, or refuse.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx

from scopetrace._compat.schema import schema_of
from scopetrace.ir.tape import Value

__all__ = [
    "UNDECLARED_WRITTEN",
    "FunctionalVariant",
    "by_name",
    "call_variant",
    "functional_variant",
    "is_metadata_only",
    "is_out_argument",
    "tensor_of",
    "undeclared_variant",
    "undeclared_writes",
    "written_arguments",
]

# Where a name says what an op does. A custom op `ours::scale` need not be the twin of `ours::scale_`.
_NAMESPACES = frozenset(
    {"aten", "prim", "prims", "quantized", "mkldnn", "onednn", "inductor", "symm_mem", "_c10d_functional"}
)

# Names that no rule gives.
_NAMES = {
    "normal_": ("normal_functional",),
    "adaptive_avg_pool3d_backward": ("_adaptive_avg_pool3d_backward",),
    "fused_moving_avg_obs_fake_quant": ("_fused_moving_avg_obs_fq_helper_functional",),
}

# The twin has results of its own, between the returns and the new values: the mask of the helper.
_MORE_RESULTS = {"aten::fused_moving_avg_obs_fake_quant": 1}

# A factory with `out=` makes what `out` is; without, it must be told.
_FACTORY = frozenset({"dtype", "layout", "device", "pin_memory"})

# With `out=` in another dtype they compute in that dtype, as they do if they are told one.
_IN_DTYPE_OF_OUT = frozenset(
    f"aten::{name}" for name in ("cumprod", "cumsum", "mean", "nanmean", "nansum", "prod", "sum")
)

# They change what the tensor is, to autograd or to the allocator, and no value; torch does not tag them.
_NO_VALUES = frozenset(
    f"aten::{name}"
    for name in (
        *("requires_grad_", "retain_grad", "record_stream", "set_data", "_resize_output_", "_coalesced_"),
        "shallow_copy_data_",  # since torch 2.15
    )
)

# Ops that take running statistics and write them, whatever their schema says, and the argument that turns this on.
_STATISTICS = {
    "aten::batch_norm": "training",
    "aten::native_batch_norm": "training",
    "aten::_batch_norm_impl_index": "training",
    "aten::cudnn_batch_norm": "training",
    "aten::miopen_batch_norm": "training",
    "aten::instance_norm": "use_input_stats",
    "aten::batch_norm_update_stats": None,
    "aten::batch_norm_gather_stats": None,
    "aten::batch_norm_gather_stats_with_counts": None,
}

# These two look at the input before they choose a kernel: an empty one leaves the statistics alone.
_SKIP_EMPTY = frozenset({"aten::batch_norm", "aten::_batch_norm_impl_index"})

# For each of them that has a twin: its name, and how many of its results come before the new statistics.
_STATISTICS_TWINS = {
    "aten::batch_norm": ("_native_batch_norm_legit_functional", 3),
    "aten::native_batch_norm": ("_native_batch_norm_legit_functional", 3),
    "aten::cudnn_batch_norm": ("_batch_norm_with_update_functional", 4),
    "aten::miopen_batch_norm": ("_native_batch_norm_legit_functional", 3),
}

# What other batch norms call the arguments of the twin.
_STATISTICS_RENAMED = {"momentum": "exponential_average_factor", "eps": "epsilon"}


@dataclasses.dataclass(frozen=True)
class FunctionalVariant:
    """A pure op, and how its results are the returns and the new values of a mutable op."""

    op: Any
    """The `OpOverload`. Its schema writes no argument; a twin of a view-type op returns a view."""

    dropped: tuple[str, ...]
    """Arguments of the mutable op that the twin does not take: `out`, and what only one backend wants."""

    new_values: tuple[tuple[str, int | None], ...]
    """For each written argument, in schema order, the result of the twin that is its new value.

    None: the twin has one result, a tensor or a list, and that is the new value.
    """

    results: tuple[int | str, ...]
    """For each return of the mutable op: a result of the twin, or the written argument that it is an alias of."""


@functools.cache
def written_arguments(func: Any) -> tuple[str, ...]:
    """Names of the arguments that the schema of `func` says it writes."""
    return schema_of(func).written


@functools.cache
def is_metadata_only(func: Any) -> bool:
    """Whether `func` changes only what a tensor is (its sizes, strides, storage, flags) and no element of a storage."""
    return torch.Tag.inplace_view in func.tags or schema_of(func).name in _NO_VALUES


@functools.cache
def functional_variant(func: Any) -> FunctionalVariant | None:
    """The pure op that computes what `func` returns and writes. None: there is none.

    Args:
        func: An `OpOverload`. The twin of a custom op, and of one whose schema is not mutable, is None.
    """
    if not any(a.is_written and "Tensor" in a.type for a in schema_of(func).arguments):
        return None
    best: tuple[int, FunctionalVariant] | None = None
    for op in _candidates(func):
        rank = _distance(func, op)
        twin = None if rank is None else _describe(func, op)
        if rank is not None and twin is not None and (best is None or rank < best[0]):
            best = rank, twin
    return None if best is None else best[1]


def call_variant(
    twin: FunctionalVariant, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for `twin.op` that do what `func(*args, **kwargs)` does. Values pass through as they are.

    They may be tensors or nodes with `meta["val"]`. Trailing arguments that are the twin's defaults are left out.
    """
    given = by_name(func, args, kwargs)
    if twin.dropped:
        given |= _as_out(func, twin, given)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    needed = 0
    for arg, source in _sources(func, twin.op):
        name = arg.name if source is None else source
        if name not in given:
            positional.append(arg.default)
        elif arg.kwarg_only:
            keywords |= {} if _is_default(arg, given[name]) else {arg.name: given[name]}
        else:
            positional.append(given[name])
            needed = needed if _is_default(arg, given[name]) else len(positional)
    return tuple(positional[:needed]), keywords


def undeclared_variant(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> FunctionalVariant | None:
    """The twin of an op whose schema hides that this call writes. None: it does not, or no one op is its twin.

    Ask this before `functional_twin`: the `out` overloads of such ops have both kinds of writes.
    """
    if len(undeclared_writes(func, args, kwargs)) < 2:
        return None  # the twins take both statistics
    return _statistics_twin(func)


UNDECLARED_WRITTEN = ("running_mean", "batches", "weight_arr", "variable")
"""Arguments by which ops are known that write more than their schema says."""


def undeclared_writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Names of arguments that this call writes although the schema of `func` does not say so.

    On CPU the version counters of running statistics do not tell either, those of `instance_norm` apart.
    """
    name = schema_of(func).name
    if name == "aten::_cudnn_rnn_flatten_weight":
        return ("weight_arr",)  # each weight becomes a view of the result
    if name == "inductor::resize_storage_bytes_":
        return ("variable",)
    if name not in _STATISTICS:
        return ()
    given = by_name(func, args, kwargs)
    switch = _STATISTICS[name]
    if switch is not None and not given[switch]:
        return ()
    if name in _SKIP_EMPTY and 0 in tensor_of(given["input"]).shape:
        return ()
    return tuple(n for n in ("running_mean", "running_var") if given.get(n) is not None)


@functools.cache
def _statistics_twin(func: Any) -> FunctionalVariant | None:
    known = _STATISTICS_TWINS.get(schema_of(func).name)
    if known is None:
        return None
    name, count = known
    op = getattr(torch.ops.aten, name).default
    taken = {source for _, source in _sources(func, op)}
    dropped = tuple(a.name for a in schema_of(func).arguments if a.name not in taken)
    outs = [a.name for a in schema_of(func).arguments if a.is_written]
    new = [("running_mean", count), ("running_var", count + 1), *((out, i) for i, out in enumerate(outs))]
    returned = range(len(schema_of(func).returns))
    return FunctionalVariant(op, dropped, tuple(new), tuple(outs[i] if outs else i for i in returned))


def _candidates(func: Any) -> Iterator[Any]:
    """Overloads that may be the twin, likely names first. None writes."""
    namespace, _, name = schema_of(func).name.partition("::")
    for other in dict.fromkeys(_names(name)) if namespace in _NAMESPACES else ():
        packet = getattr(getattr(torch.ops, namespace), other, None)
        for overload in packet.overloads() if packet is not None else ():
            op = getattr(packet, overload)
            if not written_arguments(op):
                yield op


def _names(name: str) -> Iterator[str]:
    yield from _NAMES.get(name, ())
    yield name
    if name.startswith("__i") and name.endswith("__"):
        yield "__" + name[3:]
    elif name.endswith("_"):
        yield name[:-1]
    if name.endswith("_out"):
        yield name[:-4]
    yield name.rstrip("_") + "_functional"


def _distance(func: Any, op: Any) -> int | None:
    """How far the arguments of `op` are from those of `func`: 0, the same; None, too far."""
    ours = {a.name: a for a in schema_of(func).arguments}
    sources = _sources(func, op)
    used = [source for _, source in sources if source is not None]
    if any(name not in used and not is_out_argument(a) for name, a in ours.items()):
        return None
    far = 0
    for arg, source in sources:
        if source is None:
            if arg.name not in _FACTORY or not any(is_out_argument(a) for a in ours.values()):
                return None
        elif arg.type != ours[source].type:
            if not _takes(arg, ours[source]):
                return None
            far += 1
        far += source != arg.name
    in_order = [name for name in ours if name in used]
    return far + (used != in_order)


def _takes(arg: Any, other: Any) -> bool:
    """Whether `arg` takes all that `other` takes: a tensor where there may be none."""
    return arg.type.replace("Optional[", "").replace("]", "") == other.type.replace("]", "")


def _describe(func: Any, op: Any) -> FunctionalVariant | None:
    """`op` as the twin of `func`. None if its results are not the values that `func` returns and writes."""
    schema = schema_of(func)
    returns = [_returned_argument(func, r) for r in schema.returns]
    written = sorted((a for a in schema.arguments if a.is_written), key=lambda a: not is_out_argument(a))
    # An argument that is returned has its new value there. The others follow the returns: `out` first, as in a list op.
    rest = [a for a in written if a.name not in returns]
    types = [r.type for r in schema.returns]
    own = _MORE_RESULTS.get(schema.name, 0)
    places = {name: i for i, name in enumerate(returns) if name is not None}
    places |= {a.name: len(returns) + own + i for i, a in enumerate(rest)}
    types = types + ["Tensor"] * own + [a.type for a in rest]
    if types != [r.type for r in schema_of(op).returns]:
        return None
    one = len(types) == 1
    taken = {source for _, source in _sources(func, op)}
    return FunctionalVariant(
        op=op,
        dropped=tuple(a.name for a in schema.arguments if a.name not in taken),
        new_values=tuple((name, None if one else places[name]) for name in written_arguments(func)),
        results=tuple(i if name is None else name for i, name in enumerate(returns)),
    )


def _returned_argument(func: Any, result: Any) -> str | None:
    """The written argument that is returned as `result`."""
    if not result.is_written:
        return None
    names = [a.name for a in schema_of(func).arguments if a.is_written and a.aliases & result.aliases]
    return names[0] if names else None


@functools.cache
def _sources(func: Any, op: Any) -> tuple[tuple[Any, str | None], ...]:
    """For each argument of `op`, the argument of `func` that it is. None: an argument that `func` does not have.

    Names decide. One argument that is left over on both sides is the same one: `alpha_dropout_(self, …)` has the twin
    `alpha_dropout(input, …)`.
    """
    ours = [a.name for a in schema_of(func).arguments if not is_out_argument(a)]
    found: dict[str, str | None] = {}
    for arg in schema_of(op).arguments:
        other = _STATISTICS_RENAMED.get(arg.name, arg.name)
        found[arg.name] = arg.name if arg.name in ours else other if other in ours else None
    theirs = [name for name, source in found.items() if source is None and name not in _FACTORY]
    left = [name for name in ours if name not in found.values()]
    if len(theirs) == len(left) == 1:
        found[theirs[0]] = left[0]
    return tuple((arg, found[arg.name]) for arg in schema_of(op).arguments)


def by_name(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with the defaults of those that were not given."""
    schema = schema_of(func).arguments
    given = {a.name: a.default for a in schema if a.has_default}
    given |= {a.name: value for a, value in zip(schema, args, strict=False)}
    return given | kwargs


def _as_out(func: Any, twin: FunctionalVariant, given: dict[str, Any]) -> dict[str, Any]:
    """What the twin must be told because it does not see `out`: what kind of tensor to make, in which dtype to sum."""
    out = tensor_of(given.get(twin.dropped[0]))
    if not isinstance(out, torch.Tensor):
        return {}
    if "dtype" in given:
        told = schema_of(func).name in _IN_DTYPE_OF_OUT and given["dtype"] is None
        return {"dtype": out.dtype} if told else {}
    told_layout = {} if out.layout is torch.strided else {"layout": out.layout}
    return {"dtype": out.dtype, "device": out.device} | told_layout


def _is_default(arg: Any, value: Any) -> bool:
    """Whether `value` is the default of `arg`. 1 and 1.0 are not the same: an op may promote by one of them."""
    return bool(arg.has_default and type(value) is type(arg.default) and _plain_equal(value, arg))


def _plain_equal(value: Any, arg: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(type(x) is int for x in value) and value == arg.default
    return value is None or (isinstance(value, (bool, int, float, str)) and value == arg.default)


def tensor_of(value: Any) -> Any:
    """The tensor that `value` is, or that its node stands for."""
    if isinstance(value, Value):
        return value.fake
    return value.meta["val"] if isinstance(value, torch.fx.Node) else value


def is_out_argument(arg: Any) -> bool:
    """Whether an argument of a schema is one that the op fills."""
    # `is_out` knows keyword-only ones; those of quantized ops are positional.
    return arg.is_out or (arg.name in ("out", "output") and arg.is_written)
