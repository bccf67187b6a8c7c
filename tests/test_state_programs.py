"""What Python holds, of many kinds and in many places: layers that differ in it, and a change after the trace."""

import pytest
import state_programs
from state_programs import Program, State

VALUES = sorted(state_programs.VALUES)
HOLDERS = sorted(state_programs.HOLDERS)


@pytest.mark.parametrize(
    "programs",
    [
        pytest.param(range(15), id="few"),
        pytest.param(range(1000, 1400), id="many", marks=pytest.mark.slow),
        pytest.param(range(2000, 7000), id="others", marks=pytest.mark.exhaustive),
    ],
)
def test_layers_that_differ_in_what_python_holds(programs):
    for seed in programs:
        found = state_programs.faults(state_programs.drawn(seed))
        assert not set(found) - {"late call"}, (seed, found)


def faults_of_late_changes(holder, value, late):
    """Of layers that hold a value so, of which one is changed after the trace."""
    program = Program((State(holder, value, True, ""),), 3, 1, late, False, "layers", False, "")
    yield from state_programs.faults(program)
    if state_programs.VALUES[value]:
        yield from state_programs.faults_of_changes(program._replace(late_in_place=True))


WHICH = [pytest.param(0, id="first", marks=pytest.mark.slow), pytest.param(2, id="last")]


@pytest.mark.sample(6)
@pytest.mark.parametrize("late", WHICH)
@pytest.mark.parametrize("value", VALUES)
def test_a_value_that_changes_after_the_trace_is_seen(value, late):
    assert not list(faults_of_late_changes("InAttribute", value, late))


@pytest.mark.sample(5)
@pytest.mark.parametrize("late", WHICH)
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_place_that_holds_something_else_after_the_trace_is_seen(holder, late):
    assert not list(faults_of_late_changes(holder, "number", late))
