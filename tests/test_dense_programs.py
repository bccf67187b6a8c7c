"""Small dense programs of views and writes do in a trace what they do in eager.

One of eight programs of two views and two writes runs under the marker `slow`, as do larger samples of the other kinds.
The other seven run under `exhaustive`.
"""

import re

import pytest
from dense_programs import Line, Program, Verdict, drawn_program, minimal, run_all, small_programs, verdict

WAYS = {"static": {}, "gradients": {"grad": "derived"}, "leaves": {"grad": "leaf"}, "dynamic": {"dynamic": True}}


def assert_none_wrong(programs, most_refused):
    """At most the given part is refused."""
    counts, others = run_all(programs)
    for program, found in others:
        assert found.kind not in ("wrong", "fails"), f"{found.why}\n{minimal(program).source}"
    assert counts["refused"] <= most_refused * counts.total(), counts


def larger(way, number):
    """A sample that takes long."""
    return pytest.param(way, number, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("way", "every"),
    [
        *(("static", 480), ("gradients", 1200), ("leaves", 2000), ("dynamic", 3200)),
        *(larger("static", 120), larger("gradients", 150), larger("leaves", 500), larger("dynamic", 400)),
    ],
)
def test_small_programs(way, every):
    """Each so manyth of two views and two writes."""
    assert_none_wrong(small_programs(**WAYS[way], every=every), 0.02)


@pytest.mark.parametrize(
    ("way", "number"),
    [
        *(("static", 25), ("gradients", 10), ("leaves", 10), ("dynamic", 4)),
        *(larger("static", 300), larger("gradients", 100), larger("leaves", 40), larger("dynamic", 40)),
    ],
)
def test_drawn_programs(way, number):
    assert_none_wrong((drawn_program(0, n, **WAYS[way]) for n in range(number)), 0.04)


@pytest.mark.parametrize(
    "part", [pytest.param(i, marks=pytest.mark.exhaustive if i else pytest.mark.slow) for i in range(8)]
)
def test_all_programs_of_two_views_and_two_writes(part):
    assert_none_wrong(small_programs(first=part, every=8), 0.02)


def program(inputs, *lines, returned=("a", "b"), **way):
    return Program(inputs, tuple(map(line, lines)), returned, **way)


def line(text):
    name = re.match(r"\w+", text).group()
    return Line(text, makes=name) if text.startswith(f"{name} = ") else Line(text, target=name)


def test_two_writes_to_a_view_of_a_view():
    assert verdict(program("one", "a = x[0]", "b = a[1:]", "a.add_(1)", "b[::2] *= 0.5")) == Verdict("right")


@pytest.mark.parametrize("write", ["x.add_(1)", "b.add_(1)", "p = x * 2"])
@pytest.mark.parametrize("view", ["{}.real", "{}.contiguous()", "{}.to({}.dtype)"])
def test_an_op_that_gives_data_back_gives_that_very_tensor(view, write):
    lines = "a = x.data", f"b = {view.format('a', 'a')}", f"c = {view.format('x.data', 'x.data')}", write
    assert verdict(program("one", *lines, returned=("x", "a", "b", "c"))) == Verdict("right")


@pytest.mark.parametrize("write", ["x.data[0] = 1", "x.detach().data[0] = 1", "a.detach().data[0] = 1"])
@pytest.mark.parametrize("inputs", ["one", "complex"])
def test_a_write_through_data_leaves_other_views_as_they_are_for_autograd(inputs, write):
    lines = "a = x.chunk(2)[1]", write, "b = a.view_as(a)"
    assert verdict(program(inputs, *lines, returned=("x", "a", "b"), grad="leaf")) == Verdict("right")


def test_a_copy_that_the_present_layout_does_not_need_is_a_copy_for_its_views_too():
    lines = "with torch.no_grad(): x[0] = 1", "a = x.contiguous()", "b = a.view(torch.uint8)"
    assert verdict(program("strided", *lines, returned=("x", "a", "b"), grad="derived")) == Verdict("right")


def test_data_of_one_of_two_views_whose_sizes_a_write_makes_equal():
    lines = "a = x.contiguous()", "b = a.data", "y += x.clone()"
    assert verdict(program("overlap", *lines, returned=("b",), dynamic=True)) == Verdict("right")


@pytest.mark.parametrize("write", ["x.add_(1)", "a.add_(1)", "a[0] = 1", "y = x * 2"])
@pytest.mark.parametrize("form", ["x.as_strided((2, 2), (2, 1))", "x[1:].as_strided((3,), (2,))"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_as_strided_reaches_memory_between_the_elements_of_its_argument(form, write, dynamic):
    for lines in ((f"a = {form}", write, "b = a * 2"), ("b = x[0]", "b.neg_()", f"a = {form}", write)):
        assert verdict(program("strided", *lines, returned=("x", "a", "b"), dynamic=dynamic)) == Verdict("right")
