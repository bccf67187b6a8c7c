"""The rewrite rules of alias sets, each alone: over all small cases the result is equal, and is the one that is meant.

The values here have real tensors, so that what a rule leaves can be run.
"""

import dataclasses
import itertools

import pytest
import torch

from scopetrace.functionalization.rewrites import part_of, simplified
from scopetrace.ir.scopes import Scope
from scopetrace.ir.tape import Op, Value

aten = torch.ops.aten
SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
# Of five elements: all slices with bounds from the front and from the end, and all elements.
SLICES = [(aten.slice.Tensor, (0, *bounds)) for bounds in itertools.product((0, 1, 3, -2), (2, 4, -1, 9), (1, 2, 3))]
ELEMENTS = [(aten.select.int, (0, index)) for index in range(-5, 5)]
LINE = [(func, args) for func, args in SLICES + ELEMENTS if func(torch.zeros(5), *args).numel()]
# Of three by three: one of each kind in each dimension.
MATRIX = [
    *((aten.slice.Tensor, (dim, start, 3)) for dim in (0, -1) for start in (0, 1)),
    *((aten.select.int, (dim, index)) for dim in (0, 1) for index in (0, -1)),
    *((aten.diagonal.default, (offset,)) for offset in (-1, 0, 1)),
    (aten.diagonal.default, (0, 1, 0)),
]
PAIRS = [(5,), LINE], [(3, 3), MATRIX]


def pairs():
    """Two parts of a tensor, and its size."""
    return [(size, first, second) for size, parts in PAIRS for first, second in itertools.product(parts, repeat=2)]


def value(tensor):
    made = Value(tensor, 0, 0, None)
    Op("placeholder", "x", (), {}, made, Scope("", ""), None, ())
    return made


def numbers(size, start=1):
    count = torch.Size(size).numel()
    return value(torch.arange(float(start), start + count).view(size))


def run(func, *args):
    """The op on a tape, with what it gives."""
    made = Value(func(*[a.fake if isinstance(a, Value) else a for a in args]), 0, 0, None)
    made.requires_grad = any(a.requires_grad for a in args if isinstance(a, Value))
    Op("call_function", func, args, {}, made, Scope("", ""), None, ())
    return made


def assert_equal(found, func, *args):
    """What a rule gave is equal to the op itself."""
    result = found if isinstance(found, Value) else run(found[0], *found[1])
    expected = run(func, *args)
    assert torch.equal(result.fake, expected.fake)
    assert result.requires_grad == expected.requires_grad


def scatter_into(base, view, args, start=100):
    """A new value of a part, and the base with it."""
    new = numbers(view(base.fake, *args).shape, start)
    return new, run(SCATTERS[view], base, new, *args)


def elements(size, view, args):
    """Which elements of a tensor of this size a view op takes, in order."""
    return view(torch.arange(torch.Size(size).numel()).view(size), *args).flatten().tolist()


@pytest.mark.parametrize(("size", "parts"), PAIRS, ids=["line", "matrix"])
def test_a_part_that_was_written_is_read(size, parts):
    for view, args in parts:
        new, scattered = scatter_into(numbers(size), view, args)
        assert simplified(view, (scattered, *args), None) is new


def test_reading_after_a_write():
    """view(scatter(b, v)) is v for the same part, view(b) for one without a common element, and else what it was."""
    seen = set()
    for size, (view, args), (other, other_args) in pairs():
        base = numbers(size)
        new, scattered = scatter_into(base, view, args)
        found = simplified(other, (scattered, *other_args), None)
        assert_equal(found, other, scattered, *other_args)
        common = set(elements(size, view, args)) & set(elements(size, other, other_args))
        kind = "new" if found is new else "before" if found[1][0] is base else "kept"
        assert kind != "new" or elements(size, view, args) == elements(size, other, other_args)
        assert kind != "before" or not common
        # In one dimension neighbours and strides are told apart: what is kept has elements in common.
        if view is other is aten.select.int and args[0] % len(size) == other_args[0] % len(size):
            assert kind == ("new" if common else "before")
        seen.add(kind)
    assert seen == {"new", "before", "kept"}


def test_writing_after_a_write():
    """scatter(scatter(b, v), w) is scatter(b, w) for the same part, and else what it was."""
    seen = set()
    for size, (view, args), (other, other_args) in pairs():
        base = numbers(size)
        _, scattered = scatter_into(base, view, args)
        again = numbers(other(base.fake, *other_args).shape, 200)
        func, found = simplified(SCATTERS[other], (scattered, again, *other_args), None)
        assert_equal((func, found), SCATTERS[other], scattered, again, *other_args)
        assert (found[0] is base) or found[0] is scattered
        if found[0] is base:
            assert set(elements(size, view, args)) <= set(elements(size, other, other_args))
        seen.add(found[0] is base)
    assert seen == {True, False}


def test_writing_what_is_there():
    """scatter(b, view(b)) is b, for the same part alone."""
    for size, (view, args), (other, other_args) in pairs():
        base = numbers(size)
        read = run(view, base, *args)
        if read.fake.shape != other(base.fake, *other_args).shape:
            continue
        found = simplified(SCATTERS[other], (base, read, *other_args), None)
        assert_equal(found, SCATTERS[other], base, read, *other_args)
        if elements(size, view, args) != elements(size, other, other_args):
            assert found is not base
        elif (view, args) == (other, other_args):
            assert found is base


def test_writing_twice_the_same():
    """scatter(scatter(b, v), v) is scatter(b, v)."""
    for size, parts in PAIRS:
        for view, args in parts:
            new, scattered = scatter_into(numbers(size), view, args)
            assert simplified(SCATTERS[view], (scattered, new, *args), None) is scattered


def test_reading_past_many_writes():
    """The view moves past all writes that it has no element in common with."""
    base = numbers((6,))
    written = base
    first = None
    for index in range(5):
        new, written = scatter_into(written, aten.select.int, (0, index), 100 + index)
        first = first or new
    assert simplified(aten.select.int, (written, 0, 0), None) is first
    assert simplified(aten.select.int, (written, 0, 5), None) == (aten.select.int, (base, 0, 5))


def test_reshapes():
    x = numbers((2, 6))
    for middle, last in itertools.product([(12,), (3, 4), (2, 6), (1, 12)], repeat=2):
        inner = run(aten.reshape.default, x, list(middle))
        found = simplified(aten.reshape.default, (inner, list(last)), None)
        assert_equal(found, aten.reshape.default, inner, list(last))
        assert found is x if last == (2, 6) else found[1][0] is x


def test_permutes():
    x = numbers((2, 3, 4))
    for first, second in itertools.product(itertools.permutations(range(3)), repeat=2):
        inner = run(aten.permute.default, x, list(first))
        found = simplified(aten.permute.default, (inner, list(second)), None)
        assert_equal(found, aten.permute.default, inner, list(second))
        assert (found is x) == ([first[d] for d in second] == [0, 1, 2])
        assert found is x or found[1][0] is x


def test_rules_keep_whether_a_result_requires_grad():
    for base_grad, new_grad in itertools.product((False, True), repeat=2):
        base = value(torch.arange(5.0).requires_grad_(base_grad))
        new = value(torch.arange(2.0).requires_grad_(new_grad))
        scattered = run(aten.slice_scatter.default, base, new, 0, 1, 3, 1)
        for start in (1, 2, 3):
            assert_equal(
                simplified(aten.slice.Tensor, (scattered, 0, start, start + 2), None),
                *(aten.slice.Tensor, scattered, 0, start, start + 2),
            )
        for again_grad in (False, True):
            again = value(torch.arange(2.0).requires_grad_(again_grad))
            args = (scattered, again, 0, 1, 3, 1)
            assert_equal(simplified(aten.slice_scatter.default, args, None), aten.slice_scatter.default, *args)


def test_ops_of_another_call_are_not_looked_through():
    new, scattered = scatter_into(numbers((5,)), aten.select.int, (0, 1))
    scattered.op = dataclasses.replace(scattered.op, call=object())
    assert simplified(aten.select.int, (scattered, 0, 1), None) == (aten.select.int, (scattered, 0, 1))
    assert simplified(aten.select.int, (scattered, 0, 1), scattered.op.call) is new


def test_equal_parts_are_those_with_the_same_elements():
    for size, parts in PAIRS:
        base = torch.zeros(size)
        for (view, args), (other, other_args) in itertools.product(parts, repeat=2):
            first, second = part_of(view, base, args), part_of(other, base, other_args)
            mine, theirs = elements(size, view, args), elements(size, other, other_args)
            assert first != second or mine == theirs
            assert not first.is_disjoint(second) or set(mine).isdisjoint(theirs)
            if len(size) == 1 and view is other:  # then the numbers decide
                assert first.is_disjoint(second) == second.is_disjoint(first)
