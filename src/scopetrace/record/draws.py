"""What a forward asks of the process and that answers otherwise each time: random numbers, clocks, files, the screen.

Data flow:
    the functions of `_ASKED` that the forward names, and the globals that hold one -> replaced while it runs
    a call of one by the user's code -> a Draw: what was called, what it gave, and where

Draws from generators that are objects (`random.Random(0)`) are seen by their state: see `record.snapshot`.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import random
import secrets
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from scopetrace.ir.scopes import Frames
from scopetrace.record.builder import TapeBuilder
from scopetrace.record.reach import Reach, is_users

_RANDOM = (
    "random uniform triangular randint choice choices randrange sample shuffle normalvariate lognormvariate "
    "expovariate vonmisesvariate gammavariate gauss betavariate paretovariate weibullvariate getrandbits randbytes"
)
_NUMPY = (
    "rand randn random random_sample ranf sample randint uniform normal standard_normal choice permutation shuffle "
    "beta binomial exponential gamma geometric gumbel laplace logistic lognormal multinomial multivariate_normal "
    "poisson standard_exponential standard_gamma standard_t triangular vonmises wald weibull zipf bytes dirichlet"
)
_CLOCKS = "time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time process_time_ns localtime"
_ASKED: dict[str, tuple[types.ModuleType, str]] = {
    "random": (random, _RANDOM),
    "time": (time, _CLOCKS + " gmtime ctime strftime"),
    "uuid": (uuid, "uuid1 uuid4"),
    "secrets": (secrets, "token_bytes token_hex token_urlsafe randbelow choice randbits"),
    "os": (os, "urandom"),
    "": (builtins, "print open input"),
}
_ONLY_SHOWN = ("print", "open")
"""What gives the forward nothing that a program could have baked in, or nothing but files."""


class Draw(NamedTuple):
    """A call of one of the functions."""

    name: str
    """As in source: `random.random()`."""
    value: Any
    baked_in: bool
    """Whether the program may depend on the value."""
    module: str
    """The scope path in which it was called."""
    frames: Frames


class Draws:
    """Notes the draws of one forward."""

    def __init__(self, builder: TapeBuilder) -> None:
        self._builder = builder
        self.found: list[Draw] = []

    @contextlib.contextmanager
    def observing(self, reach: Reach) -> Iterator[None]:
        """Inside, draws of this thread by the functions in `reach` are noted."""
        thread = threading.get_ident()
        replaced: dict[Any, Callable[..., Any]] = {}
        places: list[tuple[dict[str, Any], str, Any]] = []
        for prefix, table, names in _reached(reach):
            for name in names & table.keys():
                replaced[table[name]] = self._noted(prefix + name, table[name], thread)
                places.append((table, name, table[name]))
        if replaced:
            places += [place for place in reach.looked_up.values() if _is_function(place[2]) and place[2] in replaced]
        try:
            for table, name, function in places:
                table[name] = replaced[function]
            yield
        finally:
            for table, name, function in places:
                table[name] = function

    def _noted(self, name: str, function: Callable[..., Any], thread: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            if threading.get_ident() == thread and is_users(sys._getframe(1).f_code.co_filename):
                module, frames = self._builder.state.current_scope.path, self._builder.frames()
                self.found.append(Draw(f"{name}()", value, name not in _ONLY_SHOWN, module, frames))
            return value

        return functools.update_wrapper(call, function)


def _reached(reach: Reach) -> Iterator[tuple[str, dict[str, Any], frozenset[str]]]:
    """Of each module, the prefix of its functions in source, its table, and the names that the forward may call."""
    numpy = sys.modules.get("numpy")
    modules = [(prefix, module, names) for prefix, (module, names) in _ASKED.items()]
    if numpy is not None:
        modules.append(("numpy.random", numpy.random, _NUMPY))
    for prefix, module, names in modules:
        named = frozenset(name for name in names.split() if name in reach.names)
        if named:
            yield f"{prefix}." if prefix else "", vars(module), named


def _is_function(x: Any) -> bool:
    return isinstance(x, (types.BuiltinFunctionType, types.FunctionType, types.MethodType))
