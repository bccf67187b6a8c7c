"""What Python holds, of many kinds and in many places: layers that differ in it, and a change after the trace."""

import pytest
import state_programs
from state_programs import Program, State

VALUES = sorted(state_programs.VALUES)
HOLDERS = sorted(state_programs.HOLDERS)


@pytest.mark.parametrize(
    "programs",
    [
        pytest.param(range(30), id="few"),
        pytest.param(range(1000, 1400), id="many", marks=pytest.mark.slow),
        pytest.param(range(2000, 7000), id="others", marks=pytest.mark.exhaustive),
    ],
)
def test_layers_that_differ_in_what_python_holds(programs):
    for seed in programs:
        found = state_programs.faults(state_programs.drawn(seed))
        assert not set(found) - {"late call"}, (seed, found)


def faults_of_late_changes(holder, value):
    """Of a layer that holds a value so, and is changed after the trace: the first one, or the last."""
    in_place = [False, True] if state_programs.VALUES[value] else [False]
    for way in in_place:
        for late in (0, 2):
            program = Program((State(holder, value, True, ""),), 3, 1, late, way, "layers", False, "")
            yield from state_programs.faults(program)


@pytest.mark.parametrize("value", VALUES)
def test_a_value_that_changes_after_the_trace_is_seen(value):
    assert not list(faults_of_late_changes("InAttribute", value))


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_place_that_holds_something_else_after_the_trace_is_seen(holder):
    assert not list(faults_of_late_changes(holder, "number"))
