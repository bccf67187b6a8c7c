"""Views as pairs of functions, one by one, on real tensors: the inverse does what a write to the view does in eager."""

import contextlib
import itertools

import pytest
import torch

from scopetrace.ops import view_inverses
from scopetrace.ops.view_inverses import (
    Geometry,
    by_geometry,
    by_op,
    index_in,
    strided,
)

aten = torch.ops.aten

# Of 24 elements, or fewer: dense, transposed, with gaps, with an offset, of other ranks, without elements.
BASES = {
    "matrix": lambda: torch.arange(24.0).view(4, 6),
    "transposed": lambda: torch.arange(24.0).view(6, 4).t(),
    "gaps": lambda: torch.arange(48.0).view(4, 12)[:, 1::2],
    "cube": lambda: torch.arange(24.0).view(2, 3, 4),
    "turned cube": lambda: torch.arange(24.0).view(4, 3, 2).permute(2, 1, 0),
    "row": lambda: torch.arange(24.0)[3:],
    "ones": lambda: torch.arange(4.0).view(1, 4, 1),
    "empty": lambda: torch.zeros(0, 3),
}
VIEWS = {
    aten.select.int: [(0, 0), (0, -1), (-1, 1)],
    aten.slice.Tensor: [(0, 1), (0, 0, 2**63 - 1, 2), (-1, -2), (-1, 0, -1), (0, 1, 3, 2)],
    aten.transpose.int: [(0, -1), (0, 0)],
    aten.permute.default: [((1, 0),), ((2, 0, 1),)],
    aten.t.default: [()],
    aten.unsqueeze.default: [(0,), (-1,)],
    aten.squeeze.default: [()],
    aten.squeeze.dim: [(0,)],
    aten.view.default: [((-1,),), ((2, -1),), ((1, -1, 1),)],
    aten.unflatten.int: [(0, (2, -1)), (-1, (-1, 2))],
    aten.split.Tensor: [(2, 0), (3, -1)],
    aten.unbind.int: [(0,), (-1,)],
    aten.diagonal.default: [(), (1,), (-1, 1, 0)],
    aten.unfold.default: [(0, 2, 2), (-1, 1, 2)],
    aten.detach.default: [()],
    aten.alias.default: [()],
}


class Eager(torch.Tensor):
    """A tensor that is also what stands for it on a tape: `value.fake` is itself."""

    @property
    def fake(self):
        return self.as_subclass(torch.Tensor)


def emit(func, *args, **kwargs):
    """Runs an op in place of appending it to a tape."""
    return func(*args, **kwargs).as_subclass(Eager)


def views_of(name):
    """Each view of a base of its own: the op, its arguments, which of its results, the base and the view."""
    for func, forms in VIEWS.items():
        for args in forms:
            try:
                made = func(BASES[name](), *args)
            except (RuntimeError, IndexError):
                continue  # not of this rank, or not of these strides
            for slot in range(len(made)) if isinstance(made, (list, tuple)) else [None]:
                base = BASES[name]()
                made = func(base, *args)
                yield func, args, slot, base, made if slot is None else made[slot]


@contextlib.contextmanager
def noted(*case):
    """The error says of which case it is."""
    try:
        yield
    except Exception as error:
        error.add_note(f"of {case}")
        raise


def assert_lens(function, base, view):
    """`function` reads `view` from `base`, and gives the base that a write to `view` leaves."""
    before = base.clone().as_subclass(Eager)
    torch.testing.assert_close(function.forward(emit, before).fake, view)
    new = -1 - torch.arange(float(view.numel())).view(view.shape)
    written = function.inverse(emit, before, new.as_subclass(Eager))
    view.copy_(new)
    torch.testing.assert_close(written.fake, base)
    torch.testing.assert_close(function.forward(emit, written).fake, new)
    torch.testing.assert_close(function.inverse(emit, before, function.forward(emit, before)).fake, before.fake)


@pytest.mark.parametrize("name", BASES)
def test_by_where_the_elements_are(name):
    for func, args, slot, base, view in views_of(name):
        with noted(func, args, slot):
            function = by_geometry(Geometry.of(base, base.storage_offset()), Geometry.of(view, view.storage_offset()))
            assert_lens(function, base, view)


@pytest.mark.parametrize("name", BASES)
def test_by_op_and_arguments(name):
    for func, args, slot, base, view in views_of(name):
        with noted(func, args, slot):
            function = view_inverses.by_own_inverse(func, args, base) or by_op(func, args, slot, base, view)
            # the empty one is never written; see `strided` for the other
            assert function or name == "empty" or func is aten.unfold.default
            if function:
                assert_lens(function, base, view)


@pytest.mark.parametrize(("size", "stride", "shift"), [((2, 2), (2, 1), 1), ((3,), (4,), 0), ((2, 3), (1, 7), 5)])
def test_as_strided_of_a_row_major_base(size, stride, shift):
    base = BASES["row"]()
    view = base.as_strided(size, stride, base.storage_offset() + shift)
    assert_lens(strided(base.shape, size, stride, shift), base, view)


def test_a_view_of_a_view_is_related_to_the_first_base():
    for start, step, dim, index in itertools.product((0, 1), (1, 2), (0, 1), (0, 1)):
        base = BASES["matrix"]()
        view = base[start::step].t().select(dim, index)
        function = by_geometry(Geometry.of(base, 0), Geometry.of(view, view.storage_offset()))
        assert_lens(function, base, view)


@pytest.mark.parametrize(
    ("view_op", "args", "ops"),
    [
        (aten.view.default, ([-1],), [aten.reshape.default]),
        (aten.t.default, (), [aten.permute.default]),
        (aten.slice.Tensor, (0, 1), [aten.slice.Tensor]),
        (aten.select.int, (1, 1), [aten.select.int]),
    ],
)
def test_the_simplest_function_is_taken(view_op, args, ops):
    base, emitted = BASES["matrix"](), []

    def emit_and_note(func, *args):
        emitted.append(func)
        return emit(func, *args)

    by_op(view_op, args, None, base, view_op(base, *args)).forward(emit_and_note, base)
    assert emitted == ops


def test_a_view_that_reaches_outside_of_its_base_has_no_function():
    base = torch.arange(24.0).view(4, 6)[:, :3]
    view = base.as_strided((6,), (1,))
    assert by_geometry(Geometry.of(base, 0), Geometry.of(view, 0)) is None


# Bits that are read as other numbers ---------------------------------------------------------------------------------

COMPLEX = torch.complex(torch.arange(6.0), torch.arange(6.0) - 3).view(2, 3)
REINTERPRETED = [
    (aten.real.default, (), COMPLEX),
    (aten.imag.default, (), COMPLEX),
    (aten.view_as_real.default, (), COMPLEX),
    (aten.view_as_complex.default, (), torch.arange(12.0).view(3, 2, 2)),
    (aten.view.dtype, (torch.int32,), torch.arange(6.0).view(2, 3)),
    (aten.view.dtype, (torch.int16,), torch.arange(6.0).view(2, 3)),
    (aten.view.dtype, (torch.float64,), torch.arange(8.0).view(2, 4)),
]


@pytest.mark.parametrize(("func", "args", "base"), REINTERPRETED, ids=str)
def test_bits_that_are_read_as_other_numbers(func, args, base):
    base = base.clone()
    view = func(base, *args)
    before = base.clone().as_subclass(Eager)
    new = (view + 1).contiguous()
    written = view_inverses.by_own_inverse(func, args, base).inverse(emit, before, new.as_subclass(Eager))
    view.copy_(new)
    assert torch.equal(written.fake, base)


# Where the elements of a tensor are ----------------------------------------------------------------------------------


def strided_tensors(sizes=(1, 2, 3), strides=(0, 1, 2, 3, 6)):
    """All tensors of two dimensions with these sizes and strides, and one element before them."""
    for size, stride in itertools.product(itertools.product(sizes, repeat=2), itertools.product(strides, repeat=2)):
        yield torch.arange(40).as_strided(size, stride, 1)


def test_positions_are_those_of_the_elements():
    for t in strided_tensors():
        geometry = Geometry.of(t, t.storage_offset())
        assert geometry.positions().tolist() == t.flatten().tolist()  # of `arange`, each element is its position
        assert geometry.numel == t.numel()
        assert geometry.span() == (t.min(), t.max())


def test_a_tensor_without_elements():
    geometry = Geometry.of(torch.zeros(0, 3), 0)
    assert (geometry.numel, geometry.span(), geometry.overlaps_itself()) == (0, (0, -1), False)


def test_overlaps_are_never_missed():
    for t in strided_tensors():
        distinct = t.unique().numel() == t.numel()
        geometry = Geometry.of(t, 1)
        assert distinct or geometry.overlaps_itself()


def test_index_in():
    base = torch.tensor([7, 3, 3, 5])
    assert index_in(base, torch.tensor([5, 3, 7])).tolist() == [3, 1, 0]
    assert index_in(base, torch.tensor([3, 4])) is None
    assert index_in(base[:0], torch.tensor([3])) is None
    assert index_in(base[:0], base[:0]).tolist() == []
