"""Random small models whose layers differ in one thing that Python holds.

seed -> a Program: layers of one class, which hold a value of one kind somewhere (`state_kinds`), read or unread;
    one layer has another value at first, or gets it in the forward, or after the trace
its trace -> is a call as in eager?
its trace, and the model changed after it -> is a call as in eager, or refused?

python tests/state_programs.py --draw 1000 --seed 910000
"""

import argparse
import contextlib
import decimal
import functools
import logging
import os
import random
import sys
import types
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import scopetrace as st
from scopetrace.api.runnable import program_of

_SOURCE = Path(__file__).with_name("state_kinds.py")
_CODE = compile(_SOURCE.read_text(), str(_SOURCE), "exec")
_CHANGES = ("", "before", "before", "between", "between in place", "inside", "inside in place")


_PLACES = (
    "ClassText, Dispatch, Filters, InFunction, InMeta, InSlotOfModule, InTag, MatmulPrecision, OfDescriptor, "
    "OfGetattr, Locked, LogByName, LogEnabled, LogLevel, LogOfRoot, MemoCounts, OfWeakDescriptor, Precision, "
    "PrecisionOfDivision, RandomState, Recursion, Registry, RegistryOfInstance, ReplacesCode, Subclasses"
)
_KINDS_OF_VALUES = (
    "C, abstract, array flags, array of objects, default factory, deque length, dict and slots, dir, dispatch, "
    "enum attribute, event, exception, frozenset, function attribute, function closure, function default, hash, "
    "lock, logger, memo counts, memoryview, method of list, module, partial attribute, set, set of True, sub float, "
    "sub int, sub partial, sub set, sub str, template, text file, torch generator, data as dict, formatted, members"
)
UNSEEN = frozenset(f"{_PLACES}, {_KINDS_OF_VALUES}".split(", "))
"""What a trace does not see change, or code tells apart in one: docs/limits.md has those that a model may have."""


def kinds() -> Any:
    """The module `state_kinds`, run anew, so that what programs write into its classes and globals is gone."""
    module = sys.modules["state_kinds"] = types.ModuleType("state_kinds")
    module.__file__ = str(_SOURCE)
    exec(_CODE, vars(module))
    return module


_KINDS = kinds()
HOLDERS = [name for name in _KINDS.HOLDERS if name not in UNSEEN]
VALUES = {name: made[2] is not None for name, made in _KINDS.VALUES.items() if name not in UNSEEN}
"""The kinds of values that are drawn, with whether they can be changed in place."""
_CHOICES = list(VALUES)


class State(NamedTuple):
    """Of which kind a part of each layer is."""

    holder: str
    value: str
    reads: bool
    when: str
    """When the value of one layer is another one, beside after the trace."""


class Program(NamedTuple):
    """What a model is made of."""

    states: tuple[State, ...]
    layers: int
    odd: int
    late: int
    """The layer that is changed after the trace."""
    late_in_place: bool
    shape: str
    """`layers`, `row` or `function`: what is traced."""
    repeats: bool
    """Whether the layers run twice."""
    twist: str


def drawn(seed: int) -> Program:
    """The program of a seed."""
    draw = random.Random(seed)
    states = tuple(_state(draw) for _ in range(draw.choice((1, 1, 1, 2))))
    layers = draw.randint(2, 4)
    odd, late = draw.randrange(layers), draw.randrange(layers)
    shape = draw.choice(("layers", "layers", "row", "function"))
    twist = draw.choice(("", "", "", *_TWISTS))
    return Program(states, layers, odd, late, draw.random() < 0.5, shape, draw.random() < 0.2, twist)


def _state(draw: random.Random) -> State:
    value = draw.choice(_CHOICES) if draw.random() < 0.8 else "number"
    holder = draw.choice(HOLDERS) if draw.random() < 0.7 else "InAttribute"
    when = draw.choice(_CHANGES)
    if issubclass(_KINDS.HOLDERS[holder], _KINDS.OfProcess):
        value = "number"
    elif not VALUES[value]:
        when = when.removesuffix(" in place")
    return State(holder, value, draw.random() < 0.75, when)


class Layer(nn.Module):
    """A layer of some parts."""

    def __init__(self, parts):
        super().__init__()
        self.parts, self.out = nn.ModuleList(parts), nn.Linear(4, 4)

    def forward(self, x):
        """Run it."""
        for part in self.parts:
            x = part(x)
        return self.out(x)


class Net(nn.Module):
    """Layers in a row; before the layer `odd`, `between` is run."""

    def __init__(self, layers, between, odd, repeats):
        super().__init__()
        self.layers, self.between, self.odd, self.repeats = nn.ModuleList(layers), between, odd, repeats

    def forward(self, x):
        """Run it."""
        for _ in range(1 + self.repeats):
            for i, layer in enumerate(self.layers):
                if i == self.odd:
                    self.between(layer)
                x = layer(x)
        return x


def _hook_later(layers, odd):
    layers[odd].parts[0].register_forward_hook(lambda module, args, out: out * 2)


_TWISTS = {
    "share": lambda layers, odd: layers.__setitem__(odd, layers[0]),
    "share part": lambda layers, odd: layers[odd].parts.__setitem__(0, layers[0].parts[0]),
    "tie": lambda layers, odd: setattr(layers[odd].out, "weight", layers[0].out.weight),
    "hook": _hook_later,
    "eval": lambda layers, odd: layers[odd].eval(),
    "freeze": lambda layers, odd: layers[odd].requires_grad_(False),
}


class Built:
    """The model of a program, made anew."""

    def __init__(self, program: Program) -> None:
        _reset()
        torch.manual_seed(0)
        self.program, self.kinds = program, kinds()
        self.layers = [self._layer(i) for i in range(program.layers)]
        _TWISTS.get(program.twist, lambda layers, odd: None)(self.layers, program.odd)
        model = self.model = self._net()
        self.fn = (lambda x: model(x) + 1) if program.shape == "function" else model
        for i, part in (found for layer in self.layers for found in enumerate(layer.parts)):
            if "around" in part.__dict__:
                part.around[0], part.slot = model, f"held{i}"
                part.put(part.pending)
        torch.manual_seed(0)
        self.args = (torch.randn(3, 4),)
        for layer in self.layers:
            torch.nn.init.eye_(layer.out.weight)

    def _net(self):
        program = self.program
        between = [s.when.endswith("in place") if s.when.startswith("between") else None for s in program.states]
        if program.shape == "row" and set(between) == {None}:
            return nn.Sequential(*self.layers)

        def change(layer):
            for part, in_place in zip(layer.parts, between, strict=True):
                if in_place is not None:
                    part.change(3, in_place)

        return Net(self.layers, change, program.odd, program.repeats)

    def _layer(self, i):
        made = []
        for state in self.program.states:
            number = 3 if state.when == "before" and i == self.program.odd else 2
            writes = state.when.removeprefix("inside").strip() or "anew" if state.when.startswith("inside") else ""
            made.append(self.kinds.HOLDERS[state.holder](state.value, number, state.reads, writes))
        return Layer(made)

    def change(self):
        """Change a layer after the trace."""
        for state, part in zip(self.program.states, self.layers[self.program.late].parts, strict=True):
            part.change(3, self.program.late_in_place and self.kinds.VALUES[state.value][2] is not None)


def _reset():
    os.environ.pop("STATE_SIZE", None)
    logging.getLogger("state_programs").setLevel(2)
    logging.disable(0)
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float32)
    decimal.getcontext().prec = 28
    sys.setrecursionlimit(1000)
    torch.set_float32_matmul_precision("highest")
    random.seed(0)
    np.random.seed(0)


def _traced(program):
    built = Built(program)
    return built, _called(functools.partial(st.trace, built.fn), (built.args,))


def _called(run, args):
    torch.manual_seed(1)
    try:
        return run(*args)
    except Exception as error:
        return error


def _equal(got, want):
    """Whether a call of a trace is refused, or did what eager does."""
    if isinstance(got, st.ScopetraceError):
        return True
    if isinstance(got, Exception) or isinstance(want, Exception):
        return isinstance(got, Exception) and isinstance(want, Exception)
    return torch.allclose(got, want, equal_nan=True)


def faults(program: Program) -> list[str]:
    """What is wrong with the trace of a program."""
    with _as_at_first():
        built, trace = _traced(program)
        if isinstance(trace, Exception):
            return []
        got = _called(trace, built.args)
        built = Built(program)
        found = [] if _equal(got, _called(built.fn, built.args)) else ["call"]
        return found + faults_of_changes(program)


def faults_of_changes(program: Program) -> list[str]:
    """What is wrong with a call after a layer has changed; nothing where the trace is right for one call only."""
    with _as_at_first():
        built, trace = _traced(program)
        if isinstance(trace, Exception) or any(effect.baked_in for effect in program_of(trace).tape.side_effects):
            return []
        built.change()
        got = _called(trace, built.args)
        built = Built(program)
        _called(built.fn, built.args)  # as the trace did
        built.change()
        return [] if _equal(got, _called(built.fn, built.args)) else ["late call"]


@contextlib.contextmanager
def _as_at_first():
    """Without autograd, and afterwards all that programs change in the process is as it was."""
    try:
        with torch.no_grad():
            yield
    finally:
        _reset()


def main(argv: list[str] | None = None) -> int:
    """Draw programs and print those with a fault; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draw", type=int, metavar="N", default=100, help="N random programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others have those after it")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    wrong = 0
    for seed in range(options.seed, options.seed + options.draw):
        program = drawn(seed)
        found = faults(program)
        wrong += bool(found)
        if found:
            print(f"# {seed}: {program}: {[x[:300] for x in found]}", flush=True)
    print(f"{options.draw} programs: {wrong} with a fault")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
