"""Functional variants are those of torchgen, each op has one or is on the list, and they compute what the op does."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from scopetrace._compat.ops import schema_of
from scopetrace.functionalization.refusals import draws_differ
from scopetrace.ops.functional_variants import (
    FunctionalVariant,
    call_variant,
    functional_variant,
    is_metadata_only,
    undeclared_variant,
    undeclared_writes,
)

aten = torch.ops.aten

# Mutable ops of ATen that write tensors and have no variant. `remove` and `sort` are those of TorchScript's lists.
NO_VARIANT = [
    "_cudnn_attention_forward_no_dropout_inplace.default",  # since torch 2.15
    "_cummax_helper.default",
    "_cummin_helper.default",
    "_fill_mem_eff_dropout_mask_.default",
    "_flash_attention_forward_no_dropout_inplace.default",
    "_no_grad_fill_.default",
    "_no_grad_normal_.default",
    "_no_grad_uniform_.default",
    "_no_grad_zero_.default",
    "_slow_conv2d_backward.grad_input",
    "_sobol_engine_ff_.default",
    "_sobol_engine_initialize_state_.default",
    "_sobol_engine_scramble_.default",
    "copy_.Tensor",
    "copy_.float",
    "copy_.int",
    "fbgemm_linear_fp16_weight.out",
    "fbgemm_linear_fp16_weight_fp32_activation.out",
    "fill_diagonal_.default",
    "record_stream.default",
    "remove.Tensor",
    "requires_grad_.default",
    "retain_grad.default",
    "set_.source_Tensor_storage_offset",
    "set_data.default",
    "shallow_copy_data_.default",  # since torch 2.15
    "sort.Tensor",
]


def mutable_ops(namespace: str) -> Iterator[Any]:
    """All ops of a namespace whose schema writes a tensor, or a list of them."""
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if space == namespace and any(str(a.type) in ("Tensor", "List[Tensor]") for a in written):
            yield getattr(getattr(getattr(torch.ops, space), name), schema.overload_name or "default")


def test_each_mutable_op_has_a_variant_or_is_on_the_list() -> None:
    every, without = [], set()
    for func in mutable_ops("aten"):
        every.append(str(func).removeprefix("aten."))
        variant = functional_variant(func)
        if variant is None:
            without.add(str(func).removeprefix("aten."))
            continue
        assert not variant.op._schema.is_mutable, func
        check_places(func, variant)
    assert without == {name for name in NO_VARIANT if name in every}


def check_places(func: Any, variant: FunctionalVariant) -> None:
    """Each written argument has a result of its own, and each return is one of them or another result."""
    assert tuple(name for name, _ in variant.new_values) == schema_of(func).written
    assert len(variant.results) == len(func._schema.returns)
    places = [place for _, place in variant.new_values] + [r for r in variant.results if isinstance(r, int)]
    assert len(set(places)) == len(places), func
    assert places == [None] or all(p in range(len(variant.op._schema.returns)) for p in places), func
    assert {r for r in variant.results if isinstance(r, str)} <= set(schema_of(func).written), func


# Variants that torchgen does not group with the op, as the names or the order of arguments differ.
NOT_GROUPED = {
    "adaptive_avg_pool3d_backward.grad_input": "_adaptive_avg_pool3d_backward.default",
    "alpha_dropout_.default": "alpha_dropout.default",
    "dropout_.default": "dropout.default",
    "feature_alpha_dropout_.default": "feature_alpha_dropout.default",
    "feature_dropout_.default": "feature_dropout.default",
    "fused_moving_avg_obs_fake_quant.default": "_fused_moving_avg_obs_fq_helper_functional.default",
    "polygamma_.default": "polygamma.default",
}


def test_variants_are_those_of_torchgen() -> None:
    """torchgen ships in torch's wheel, with the declarations of all ops of ATen."""
    pytest.importorskip("yaml")
    gen, model, groups = (
        importlib.import_module(f"torchgen.{m}") for m in ("gen", "model", "native_function_generation")
    )
    folder = Path(gen.__file__).parent / "packaged" / "ATen" / "native"
    declared = gen.parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml")).native_functions
    expected: dict[Any, Any] = {}
    for group in groups.pre_group_native_functions(declared).values():
        functional = group.pop(model.SchemaKind.functional, None)
        expected |= {overload(f): functional and overload(functional) for f in group.values()}
    found = {func: functional_variant(func) for func in expected}
    other = {str(func): str(v.op) for func, v in found.items() if v is not None and v.op is not expected[func]}
    assert other == {f"aten.{name}": f"aten.{variant}" for name, variant in NOT_GROUPED.items()}
    tensors = [func for func in mutable_ops("aten") if expected.get(func) is not None]
    assert len(tensors) > 1400 and all(found[func] is not None for func in tensors)


def overload(function: Any) -> Any:
    """The op of a declaration of torchgen."""
    name = function.func.name
    return getattr(getattr(aten, str(name.name)), name.overload_name or "default")


def test_an_op_that_writes_nothing_has_no_variant() -> None:
    assert functional_variant(aten.add.Tensor) is None
    assert functional_variant(aten.transpose.int) is None


def test_a_custom_op_has_no_variant() -> None:
    with torch.library._scoped_library("variants_test", "DEF") as library:
        library.define("prod(Tensor(a!) x) -> ()")
        assert functional_variant(torch.ops.variants_test.prod.default) is None
        library.define("poke_(Tensor(a!) x) -> Tensor(a!)")
        library.define("poke(Tensor x) -> Tensor")
        assert functional_variant(torch.ops.variants_test.poke_.default) is None


@pytest.mark.parametrize(
    ("func", "variant"),
    [
        (aten.add_.Tensor, aten.add.Tensor),
        (aten.add_.Scalar, aten.add.Scalar),
        (aten.__ilshift__.Scalar, aten.__lshift__.Scalar),
        (aten.div_.Tensor_mode, aten.div.Tensor_mode),
        (aten.bernoulli_.float, aten.bernoulli.p),
        (aten.sum.IntList_out, aten.sum.dim_IntList),
        (aten.sort.values_stable, aten.sort.stable),
        (aten.max.dim_max, aten.max.dim),
        (aten.normal_.default, aten.normal_functional.default),
        (aten.normal.out, aten.normal_functional.default),
        (aten.alpha_dropout_.default, aten.alpha_dropout.default),
        (aten.rrelu_with_noise_.default, aten.rrelu_with_noise_functional.default),
        (aten._native_batch_norm_legit.default, aten._native_batch_norm_legit_functional.default),
        (aten._batch_norm_with_update.out, aten._batch_norm_with_update_functional.default),
        (aten._index_put_impl_.hacked_twin, aten._index_put_impl.default),
        (aten.set_.source_Tensor, aten.set.source_Tensor),
        (aten.resize_.default, aten.resize.default),
        (aten.embedding_renorm_.default, aten.embedding_renorm.default),
        (aten.arange.start_out, aten.arange.start_step),
        (aten._fused_adam_.tensor_lr, aten._fused_adam.tensor_lr),
    ],
    ids=str,
)
def test_variant_by_name(func: Any, variant: Any) -> None:
    found = functional_variant(func)
    assert found is not None and found.op is variant


def test_metadata_only() -> None:
    for func in (aten.transpose_.default, aten.squeeze_.dim, aten.t_.default, aten.as_strided_.default):
        variant = functional_variant(func)
        assert variant is not None and variant.op.is_view and is_metadata_only(func)
    assert is_metadata_only(aten.set_.source_Tensor) and is_metadata_only(aten.requires_grad_.default)
    assert not is_metadata_only(aten.add_.Tensor) and not is_metadata_only(aten.add.out)


# --- What they compute. A case is an op and a function that makes its arguments; each run has the same seed.


def f(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def spd(n: int) -> torch.Tensor:
    a = torch.randn(n, n)
    return a @ a.T + n * torch.eye(n)


def e(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(0, dtype=dtype)


def call(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def optimizer(*lists: int, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Lists of two tensors each (0: an empty list), and the settings of a fused optimizer."""
    return tuple([torch.rand(3), torch.rand(2)] if n else [] for n in lists), kwargs


def steps() -> list[torch.Tensor]:
    return [torch.ones(()), torch.ones(())]


ADAM = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
SGD = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}

i64, i32, f64, bf16 = torch.int64, torch.int32, torch.float64, torch.bfloat16

CASES: list[tuple[Any, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]] = [
    # in place
    (aten.add_.Tensor, lambda: call(f(2, 3), f(3), alpha=2)),
    (aten.add_.Tensor, lambda: call(f(2, 3, dtype=bf16), f(3))),
    (aten.add_.Scalar, lambda: call(f(3), 2, 3)),
    (aten.mul_.Scalar, lambda: call(torch.arange(4), 3)),
    (aten.sub_.Tensor, lambda: call(self=f(3), other=f(3))),
    (aten.pow_.Scalar, lambda: call(f(3).abs(), 2)),
    (aten.lt_.Scalar, lambda: call(f(5), 0)),
    (aten.logical_not_.default, lambda: call(torch.arange(4))),
    (aten.__iand__.Scalar, lambda: call(torch.arange(9), 6)),
    (aten.__ilshift__.Tensor, lambda: call(torch.arange(9), torch.arange(9))),
    (aten.clamp_.default, lambda: call(f(9), max=0.5)),
    (aten.hardtanh_.default, lambda: call(f(9), -0.5)),
    (aten.celu_.default, lambda: call(f(9))),
    (aten.copy_.default, lambda: call(f(2, 3, dtype=f64), f(3))),
    (aten.fill_.Tensor, lambda: call(f(2, 3), torch.tensor(2, dtype=f64))),
    (aten.zero_.default, lambda: call(f(3))),
    (aten.cumsum_.default, lambda: call(torch.full((9,), 2**30, dtype=i32), 0)),
    (aten.cumprod_.default, lambda: call(torch.full((9,), 19, dtype=torch.uint8), 0)),
    (aten.index_put_.default, lambda: call(f(4, 3), [None, torch.tensor([0, 2])], f(4, 2), True)),
    (aten.index_add_.default, lambda: call(f(4, 3), 0, torch.tensor([0, 2]), f(2, 3), alpha=2)),
    (aten.index_copy_.default, lambda: call(f(4, 3), 0, torch.tensor([0, 2]), f(2, 3))),
    (aten.scatter_.value_reduce, lambda: call(f(4, 3), 0, torch.zeros(1, 3, dtype=i64), 2, reduce="add")),
    (aten.scatter_reduce_.two, lambda: call(f(4), 0, torch.tensor([0, 0]), f(2), "amax", include_self=False)),
    (aten.masked_fill_.Scalar, lambda: call(f(4), f(4) > 0, -1)),
    (aten.addmm_.default, lambda: call(f(2, 2), f(2, 3), f(3, 2), beta=0.5)),
    (aten.lerp_.Scalar, lambda: call(f(3), f(3), 0.3)),
    (aten.triu_.default, lambda: call(f(3, 3), 1)),
    (aten.renorm_.default, lambda: call(f(3, 3), 2, 0, 0.5)),
    (aten.embedding_renorm_.default, lambda: call(f(5, 3), torch.tensor([0, 2]), 0.1, 2.0)),
    (aten._amp_update_scale_.default, lambda: call(f(1), torch.zeros(1, dtype=i32), torch.ones(1), 2.0, 0.5, 2)),
    # out
    (aten.add.out, lambda: call(f(3), f(3), alpha=2, out=e())),
    (aten.add.out, lambda: call(f(3), f(3), out=e(f64))),
    (aten.sum.IntList_out, lambda: call(f(4, 3, dtype=bf16), [0], out=e())),
    (aten.sum.IntList_out, lambda: call(3 * f(40, 3), [0], True, out=e(i64))),
    (aten.mean.out, lambda: call(f(400, 3, dtype=bf16), 0, out=e(f64))),
    (aten.cumsum.out, lambda: call(3 * f(40), 0, out=e(i64))),
    (aten.prod.int_out, lambda: call(f(40, 2), 0, out=e(f64))),
    (aten.arange.out, lambda: call(5, out=e())),
    (aten.arange.start_out, lambda: call(1, 9, 2, out=e(i64))),
    (aten.linspace.out, lambda: call(0, 1, 7, out=e(f64))),
    (aten.full.out, lambda: call([2, 3], 2.5, out=e(i64))),
    (aten.zeros_like.out, lambda: call(f(2, 3), out=e(f64))),
    (aten.eye.m_out, lambda: call(2, 3, out=e(i32))),
    (aten.cat.out, lambda: call([f(2), f(3)], out=e())),
    (aten.bmm.out, lambda: call(f(2, 2, 3), f(2, 3, 2), out=e())),
    # several results
    (aten.sort.values, lambda: call(f(3, 4), descending=True, values=e(), indices=e(i64))),
    (aten.sort.values_stable, lambda: call(f(3, 4), stable=True, dim=0, values=e(), indices=e(i64))),
    (aten.max.dim_max, lambda: call(f(3, 4), 1, max=e(), max_values=e(i64))),
    (aten.topk.values, lambda: call(f(9), 3, values=e(), indices=e(i64))),
    (aten.linalg_eigh.eigvals, lambda: call(spd(3), eigvals=e(), eigvecs=e())),
    (aten.linalg_lu_factor_ex.out, lambda: call(spd(3), LU=e(), pivots=e(i32), info=e(i32))),
    (aten.frexp.Tensor_out, lambda: call(f(3), mantissa=e(), exponent=e(i32))),
    (aten.native_layer_norm.out, lambda: call(f(2, 3), [3], None, None, 1e-5, out0=e(), out1=e(), out2=e())),
    # lists
    (aten._foreach_add_.List, lambda: call([f(3), f(2)], [f(3), f(2)], alpha=2)),
    (aten._foreach_mul_.Scalar, lambda: call([f(3), f(2)], 3)),
    (aten._foreach_addcmul_.Scalar, lambda: call([f(3)], [f(3)], [f(3)], 0.5)),
    (aten._foreach_copy_.default, lambda: call([f(3)], [f(3, dtype=f64)])),
    (aten._foreach_zero_.default, lambda: call([f(3), f(2)])),
    (aten._foreach_add.Scalar_out, lambda: call([f(3), f(2)], 1, out=[f(3), f(2)])),
    (
        aten._amp_foreach_non_finite_check_and_unscale_.default,
        lambda: call([f(3), torch.tensor([torch.inf])], torch.zeros(1), torch.tensor([0.5])),
    ),
    (aten._fused_sgd_.default, lambda: optimizer(1, 1, 1, is_first_step=False, **SGD)),
    (aten._fused_adam_.default, lambda: call(*optimizer(1, 1, 1, 1, 0)[0], steps(), lr=0.1, **ADAM)),
    (aten._fused_adamw_.tensor_lr, lambda: call(*optimizer(1, 1, 1, 1, 0)[0], steps(), lr=torch.tensor(0.1), **ADAM)),
    (
        aten._fused_adagrad_.default,
        lambda: call(*optimizer(1, 1, 1)[0], steps(), lr=0.1, lr_decay=0.1, weight_decay=0.1, eps=1e-8, maximize=False),
    ),
    # random
    (aten.normal_.default, lambda: call(f(40), 1.0, 2.0)),
    (aten.normal_.default, lambda: call(f(6, 20).t())),
    (aten.uniform_.default, lambda: call(f(6, 20)[:, ::2], -1.0)),
    (aten.bernoulli_.float, lambda: call(f(40))),
    (aten.bernoulli_.Tensor, lambda: call(f(40, dtype=f64), torch.full((40,), 0.3))),
    (aten.exponential_.default, lambda: call(f(40))),
    (aten.log_normal_.default, lambda: call(f(40))),
    (aten.geometric_.default, lambda: call(f(40), 0.5)),
    (aten.random_.to, lambda: call(torch.zeros(40, dtype=i64), 9)),
    (aten.dropout_.default, lambda: call(f(40), 0.5, True)),
    (aten.alpha_dropout_.default, lambda: call(f(40), 0.5, True)),
    (aten.rrelu_.default, lambda: call(f(40), training=True)),
    (aten.rrelu_with_noise_.default, lambda: call(f(40), f(40), 0.1, 0.3, True)),
    (aten.rrelu_with_noise.default, lambda: call(f(40), f(40), training=True)),
    (aten.rrelu_with_noise.out, lambda: call(f(40), f(40), training=True, out=f(40))),
    (aten.randn.out, lambda: call([40], out=e(f64))),
    (aten.randint.low_out, lambda: call(3, 9, [40], out=e())),
    (aten.randperm.out, lambda: call(40, out=e(i32))),
    # statistics
    (
        aten._native_batch_norm_legit.default,
        lambda: call(f(4, 3), f(3), f(3), f(3), f(3).abs(), True, 0.1, 1e-5),
    ),
    (
        aten._native_batch_norm_legit.out,
        lambda: call(f(4, 3), None, None, f(3), f(3).abs(), True, 0.1, 1e-5, out=e(), save_mean=e(), save_invstd=e()),
    ),
    (aten._batch_norm_with_update.default, lambda: call(f(4, 3), f(3), f(3), f(3), f(3).abs(), 0.1, 1e-5)),
    (
        aten.fused_moving_avg_obs_fake_quant.default,
        lambda: call(
            f(4), *(torch.ones(1, dtype=i64),) * 2, f(1), f(1), f(1), torch.ones(1, dtype=i32), 0.1, 0, 255, 0
        ),
    ),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("func", "make"), CASES, ids=[f"{func}-{i}" for i, (func, _) in enumerate(CASES)])
def test_variant_computes_the_same(func: Any, make: Callable[[], Any]) -> None:
    variant = functional_variant(func)
    assert variant is not None
    check_same(variant, func, make)


def check_same(variant: FunctionalVariant, func: Any, make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    args, kwargs = make()
    theirs, their_kwargs = pytree.tree_map_only(torch.Tensor, clone, (args, kwargs))
    untouched = pytree.tree_map_only(torch.Tensor, clone, (args, kwargs))
    torch.manual_seed(1)
    returned = func(*theirs, **their_kwargs)
    torch.manual_seed(1)
    new_args, new_kwargs = call_variant(variant, func, args, kwargs)
    results = variant.op(*new_args, **new_kwargs)

    named = dict(zip([a.name for a in func._schema.arguments], theirs, strict=False)) | their_kwargs
    for name, place in variant.new_values:
        equal(named[name], results if place is None else results[place], name)
    returns = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
    assert len(returns) == len(variant.results)
    for got, source in zip(returns, variant.results, strict=True):
        if isinstance(source, str):
            assert got is named[source]
        else:
            equal(got, results[source] if isinstance(results, tuple) else results, source)
    equal(list(pytree.tree_leaves(untouched)), list(pytree.tree_leaves((args, kwargs))), "an argument of the variant")


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, holes too."""
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return new.copy_(tensor)


def equal(left: Any, right: Any, what: Any) -> None:
    lefts = left if isinstance(left, (list, tuple)) else [left]
    rights = right if isinstance(right, (list, tuple)) else [right]
    assert len(lefts) == len(rights), what
    for x, y in zip(lefts, rights, strict=True):
        if isinstance(
            x, torch.Tensor
        ):  # a written value keeps the dtype of what it replaces: that is the caller's part
            torch.testing.assert_close(x, y.to(x.dtype), rtol=0, atol=0, equal_nan=True, msg=f"{what}")


def test_call_leaves_defaults_out() -> None:
    variant = functional_variant(aten.add_.Tensor)
    assert variant is not None
    x, y = f(2), f(2)
    assert call_variant(variant, aten.add_.Tensor, (x, y), {"alpha": 1}) == ((x, y), {})
    assert call_variant(variant, aten.add_.Tensor, (x,), {"other": y, "alpha": 1.0}) == ((x, y), {"alpha": 1.0})


def test_call_takes_nodes() -> None:
    graph = torch.fx.Graph()
    n, out = graph.placeholder("n"), graph.placeholder("out")
    out.meta["val"] = torch.empty(3, dtype=f64)
    variant = functional_variant(aten.sum.IntList_out)
    assert variant is not None
    got = call_variant(variant, aten.sum.IntList_out, (n, [0]), {"out": out})
    assert got == ((n, [0]), {"dtype": f64})


# --- Writes that the schema does not declare.


def statistics(training: bool = True, n: int = 4) -> tuple[Any, ...]:
    return f(n, 3), f(3), f(3), f(3), f(3).abs(), training


HIDDEN = [
    (aten.batch_norm.default, lambda: call(*statistics(), 0.1, 1e-5, True)),
    (aten.batch_norm.default, lambda: call(*statistics(), momentum=0.3, eps=1e-3, cudnn_enabled=False)),
    (aten.native_batch_norm.default, lambda: call(*statistics(), 0.1, 1e-5)),
    (aten.native_batch_norm.out, lambda: call(*statistics(), 0.1, 1e-5, out=e(), save_mean=e(), save_invstd=e())),
]


@pytest.mark.parametrize(("func", "make"), HIDDEN, ids=[f"{func}-{i}" for i, (func, _) in enumerate(HIDDEN)])
def test_hidden_writes(func: Any, make: Callable[[], Any]) -> None:
    args, kwargs = make()
    assert undeclared_writes(func, args, kwargs) == ("running_mean", "running_var")
    variant = undeclared_variant(func, args, kwargs)
    assert variant is not None
    check_same(variant, func, make)


@pytest.mark.parametrize("func", [aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default], ids=str)
def test_hidden_writes_of_other_devices(func: Any) -> None:
    variant = undeclared_variant(func, statistics(), {"exponential_average_factor": 0.5, "epsilon": 1e-3})
    assert variant is not None
    assert [name for name, _ in variant.new_values] == ["running_mean", "running_var"]
    assert len(variant.results) == len(func._schema.returns)
    args, kwargs = call_variant(variant, func, statistics(), {"exponential_average_factor": 0.5, "epsilon": 1e-3})
    assert (args[-2:], kwargs) == ((0.5, 1e-3), {})
    variant.op(*args)


def test_no_hidden_writes() -> None:
    evaluated = (*statistics(training=False), 0.1, 1e-5, True)
    without = (f(4, 3), None, None, None, None, True, 0.1, 1e-5, True)
    empty = (*statistics(n=0), 0.1, 1e-5, True)
    for args in (evaluated, without, empty):
        assert undeclared_writes(aten.batch_norm.default, args, {}) == ()
        assert undeclared_variant(aten.batch_norm.default, args, {}) is None
        before = pytree.tree_map_only(torch.Tensor, clone, args)
        aten.batch_norm.default(*args)
        equal(args, before, "an argument")
    assert undeclared_writes(aten.add.Tensor, (f(3), f(3)), {}) == ()


def test_hidden_writes_without_a_variant() -> None:
    x, mean, var = f(2, 3, 4), f(3), f(3).abs()
    names = ("running_mean", "running_var")
    calls: list[tuple[Any, tuple[Any, ...], tuple[str, ...]]] = [
        (aten.instance_norm.default, (x, None, None, mean, var, True, 0.1, 1e-5, True), names),
        (aten._batch_norm_impl_index.default, (x, None, None, mean, var, True, 0.1, 1e-5, True), names),
        (aten.batch_norm_update_stats.default, (x, mean, var, 0.1), names),
    ]
    for func, args, written in calls:
        assert undeclared_writes(func, args, {}) == written
        assert undeclared_variant(func, args, {}) is None
        # By value: the batch norms do not count what they write in the version of the statistics.
        before = mean.clone(), var.clone()
        func(*args)
        changed = [name for name, old, new in zip(names, before, (mean, var), strict=True) if not torch.equal(old, new)]
        assert tuple(changed) == written


# --- Random numbers.


DRAWS = [
    (aten.normal_.default, (f(6, 20),), {}, False),
    (aten.normal_.default, (f(6, 20).t(),), {}, False),
    (aten.normal_.default, (f(6, 20)[:, :9],), {}, True),
    (aten.uniform_.default, (f(6, 20)[:, :9],), {}, False),
    (aten.bernoulli_.float, (f(6, 20).t(),), {}, True),
    (aten.bernoulli_.float, (f(6, 20),), {}, False),
    (aten.randn.out, ([6, 20],), {"out": f(20, 6).t()}, True),
    (aten.randn.out, ([6, 20],), {"out": f(0)}, False),
    (aten.normal.float_Tensor_out, (0.0, f(40).abs()), {"out": torch.empty(40, dtype=f64)}, True),
    (aten.add_.Tensor, (f(6, 20).t(), f(20, 6)), {}, False),
]


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "differ"), DRAWS, ids=[f"{func}-{i}" for i, (func, *_) in enumerate(DRAWS)]
)
def test_draws_differ(func: Any, args: Any, kwargs: Any, differ: bool) -> None:
    assert draws_differ(func, args, kwargs) == differ
    variant = functional_variant(func)
    assert variant is not None
    ours, our_kwargs = call_variant(variant, func, args, kwargs)
    torch.manual_seed(0)
    new = variant.op(*ours, **our_kwargs)
    torch.manual_seed(0)
    old = func(*args, **kwargs)
    if "add" not in str(func):
        assert torch.equal(new.to(old.dtype), old) != differ
