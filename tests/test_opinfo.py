"""In-place and out= forms of torch's own list of ops, on torch's own samples, against eager.

What is refused is listed here with the message. A listed case that starts to work fails its test: take it off the list.
"""

import functools
import sys

import pytest
import torch
from compare import assert_like_eager, outcome, tensors
from purity import assert_pure
from torch.utils import _pytree as pytree

import scopetrace as st
from scopetrace.program.check import copy_inputs

# `empty` and its kind: the values are not defined. `unsafe_*`: not to be written to.
UNDEFINED = ("empty", "new_empty", "unsafe_")
DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool)
SAMPLES = 2
FORMS = ("in-place", "out", "view")

NO_SHAPE = "torch cannot tell the shape of what an op returns"
RESIZE = "resize_ of a tensor that is not contiguous"
REFUSED = {
    ("normal.in_place", "in-place"): "one seed would give other random numbers",
    ("resize_", "in-place"): RESIZE,
    ("resize_as_", "in-place"): RESIZE,
    ("addbmm", "in-place"): "doesn't match the broadcast shape",  # torch's shape function; eager takes it
    ("masked_select", "out"): NO_SHAPE,
    ("nonzero", "out"): NO_SHAPE,
    ("linalg.lstsq", "out"): NO_SHAPE,
    ("unfold", "view"): "elements that share memory",
}


def in_place(op, sample):
    """The op on every second element of an input: gives the part that it wrote, and all."""
    run = op.inplace_variant
    x = sample.input
    if not callable(run) or not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
        return None

    def fn(base, *rest):
        args, kwargs = rebuild(sample, rest)
        return run(base.select(-1, 1), *args, **kwargs), base

    return fn, (torch.stack([x, x], -1), *others(sample))


def out(op, sample):
    """The op into a fresh tensor, and, where there is one result, into a part of an input."""
    result = op.supports_out and op(sample.input, *sample.args, **sample.kwargs)
    results = tensors(result)
    if not results or not isinstance(result, (torch.Tensor, tuple)):
        return None

    def fn(base, *rest):
        (x, *args), kwargs = rebuild(sample, rest, with_input=True)
        made = pytree.tree_map(lambda t: torch.empty(t.shape, dtype=t.dtype), result)
        op(x, *args, **kwargs, out=made)
        if len(results) == 1:
            op(x, *args, **kwargs, out=base.select(0, 1))
        return made, base

    given = tensors((sample.input, *sample.args, sample.kwargs))
    return fn, (torch.zeros((2, *results[0].shape), dtype=results[0].dtype), *given)


def view(op, sample):
    """A write into the view of an input that the op gives."""
    x = sample.input
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
        return None
    x = x.clone()
    made = tensors(op(x, *sample.args, **sample.kwargs))
    if not made or made[-1].untyped_storage()._cdata != x.untyped_storage()._cdata:
        return None

    def fn(x, *rest):
        args, kwargs = rebuild(sample, rest)
        v = tensors(op(x, *args, **kwargs))[-1]
        return v.logical_not_() if v.dtype is torch.bool else v.add_(1), x

    return fn, (x, *others(sample))


MAKE = dict(zip(FORMS, (in_place, out, view), strict=True))


def others(sample):
    return tensors((sample.args, sample.kwargs))


def rebuild(sample, given, with_input=False):
    """The arguments of a sample with other tensors in the place of its own, as they come."""
    args = (sample.input, *sample.args) if with_input else sample.args
    left = iter(given)
    return pytree.tree_map(lambda a: next(left) if isinstance(a, torch.Tensor) else a, (tuple(args), sample.kwargs))


def samples(op):
    """The first samples, in the first dtype that counts."""
    dtype = next((d for d in DTYPES if d in op.supported_dtypes("cpu")), None)
    torch.manual_seed(1)
    found = op.sample_inputs("cpu", dtype, requires_grad=False) if dtype is not None else ()
    return [s for s, _ in zip(found, range(SAMPLES), strict=False)]


def cases(op, form):
    """The cases that eager takes, and on which it gives the same twice."""
    for sample in samples(op):
        try:
            case = MAKE[form](op, sample)
            if case is None:
                continue
            torch.testing.assert_close(outcome(*case), outcome(*case), equal_nan=True)
        except (RuntimeError, TypeError, NotImplementedError, AssertionError, ValueError, IndexError):
            continue
        yield case


def name(op):
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


@functools.cache
def ops():
    from torch.testing._internal.common_methods_invocations import op_db  # takes long to import

    return [op for op in op_db if not op.name.startswith(UNDEFINED)]


@pytest.fixture(autouse=True)
def seeded_outside(monkeypatch):
    """Random ops of the list seed the generator inside of the op, which no graph can hold."""
    ops()
    for path, module in list(sys.modules.items()):
        if path.startswith("torch.testing._internal") and hasattr(module, "wrapper_set_seed"):
            monkeypatch.setattr(module, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs))


def problems(op, form):
    """What goes wrong, by case."""
    for fn, args in cases(op, form):
        try:
            tr = st.trace(fn, copy_inputs(args))
            assert_pure(tr.graph_module)
            for seed in (0, 1):
                assert_like_eager(fn, tr, args, seed)
        except Exception as error:
            yield f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("every", [56, pytest.param(7, marks=pytest.mark.slow)])
def test_ops_do_what_eager_does(every, form):
    """Each so manyth op of the list, for time."""
    found = {}
    for op in ops()[::every]:
        if (name(op), form) not in REFUSED:
            found |= {name(op): problem for problem in problems(op, form)}
    assert not found


@pytest.mark.parametrize(("op", "form"), REFUSED)
def test_what_is_listed_is_still_refused(op, form):
    (info,) = (o for o in ops() if name(o) == op)
    found = list(problems(info, form))
    assert found and all(REFUSED[op, form] in problem for problem in found)
