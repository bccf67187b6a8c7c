"""What the arguments of a call must be, and what it gives: tables, and Python code made of them.

Data flow:
    arguments of the trace -> templates, and an ExpectedTensor for each tensor
    these, and what else a call compares -> one function, which says of most calls that all is as it was
    a call of which it does not -> the tables, row by row -> an error that names what is not
    entries of dicts and `**kwargs` in another order -> that of the trace, if the forward records one program with both
    template of the result -> one expression
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_structure

from scopetrace._compat.symbols import Symbolic
from scopetrace._compat.tensors import passes_its_class
from scopetrace.containers.structure import (
    Effect,
    Given,
    Returned,
    children_like,
    close_instance,
    map_structure,
    match,
    match_constant,
    open_container,
    with_given,
)
from scopetrace.errors import InputMismatchError, ScopetraceError
from scopetrace.ir.scopes import tracing_state
from scopetrace.ir.tape import ProgramTape, RecordedTape, Value
from scopetrace.session import Arguments, record
from scopetrace.watch.programs import is_same_program

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
MISMATCHES = (InputMismatchError, AttributeError, LookupError, TypeError, ValueError)
"""What code of a call raises where arguments or state are not as in the trace."""
_MOST_TERMS = 20
"""With more, Python takes longer to compile the code than many calls of it take less."""
_DICTS = (dict, collections.OrderedDict)


class TensorSlot:
    """Stands for a tensor in a template of arguments or results."""


class SizeSlot(int):
    """Stands for a dynamic number in a template of arguments or results; an int, as the items of a `torch.Size` are."""


SLOTS = (TensorSlot, SizeSlot)


def without_values(x: Any) -> Any:
    """A template with a TensorSlot for each value of the tape, and a SizeSlot for each symbolic number."""
    return map_structure(lambda v: TensorSlot() if isinstance(v, Value) else SizeSlot(), x, (Value, *Symbolic))


def output_template(tape: ProgramTape) -> Any:
    """The template of what a call gives, with a Given for each object among its arguments."""
    outputs = without_values(tape.outputs)
    if not isinstance(outputs, Returned):
        return with_given(outputs, tape.given, SLOTS)
    effects = [Effect(e.path, with_given(e.content, e.given, SLOTS)) for e in outputs.effects]
    return Returned(with_given(outputs.result, tape.given, SLOTS), effects)


@dataclasses.dataclass(frozen=True)
class ExpectedTensor:
    """What a call is compared with for an input tensor."""

    path: str
    shape: tuple[int | None, ...]  # None for a dynamic size
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout

    def check(self, tensor: torch.Tensor) -> None:
        """Raise InputMismatchError for a tensor of another kind."""
        shape = tensor.shape
        if len(shape) != len(self.shape):
            traced = ["any" if n is None else n for n in self.shape]
            raise InputMismatchError(f"{self.path}: traced with shape {traced}, called with {list(shape)}")
        for dim, (old, new) in enumerate(zip(self.shape, shape, strict=True)):
            if old is not None and old != new:
                raise InputMismatchError(
                    f"{self.path}: dimension {dim} was {old} when traced and is {new} now; "
                    "trace again for this size, or with dynamic_shapes= for sizes that differ from call to call"
                )
        if type(tensor) is not torch.Tensor and passes_its_class(tensor):
            raise InputMismatchError(
                f"{self.path} is a {type(tensor).__name__} now, and results of a trace are plain tensors; "
                "pass x.as_subclass(torch.Tensor)"
            )
        for what in ("dtype", "device", "layout"):
            if (was := getattr(self, what)) != (now := getattr(tensor, what)):
                meta = what == "device" and was.type == "meta"
                hint = (
                    "tensors there have no data: trace a model with weights" if meta else "convert it, or trace again"
                )
                raise InputMismatchError(f"{self.path}: {what} was {was} when traced and is {now} now; {hint}")


class ExpectedArguments:
    """The structure, Python values and tensors that the arguments of a call must have. It is plain data."""

    def __init__(self, tape: ProgramTape) -> None:
        args, kwargs = tape.args
        self.args: list[Any] = [without_values(x) for x in args]
        self.kwargs: dict[str, Any] = {name: without_values(x) for name, x in kwargs.items()}
        self.tensors = [
            ExpectedTensor(path, tuple([n if type(n) is int else None for n in t.shape]), t.dtype, t.device, t.layout)
            for path, t in zip(tape.input_paths, [v.fake for v in tape.inputs], strict=True)
        ]

    def match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """The tensors among the arguments, and the dynamic numbers.

        Raises InputMismatchError where structure, Python values, shapes, dtypes, devices or layouts differ.
        """
        if len(args) != len(self.args) or set(kwargs) != set(self.kwargs):
            raise InputMismatchError(
                f"traced with {_count(self.args, self.kwargs)}, called with {_count(args, kwargs)}: "
                "pass the same arguments in the same way"
            )
        matches: list[tuple[str, Any]] = []
        for i, (old, new) in enumerate(zip(self.args, args, strict=True)):
            match(old, new, TensorSlot, matches, f"argument {i}", SizeSlot)
        for name, old in self.kwargs.items():
            match(old, kwargs[name], TensorSlot, matches, name, SizeSlot)
        tensors = [x for _, x in matches if isinstance(x, torch.Tensor)]
        for expected, tensor in zip(self.tensors, tensors, strict=True):
            expected.check(tensor)
        return tensors, [x for _, x in matches if not isinstance(x, torch.Tensor)]


def _count(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    names = f" and {', '.join(sorted(kwargs))}" if kwargs else ""
    return f"{len(args)} positional{names}"


class CallCode:
    """Python code in which each object is a constant with a number for its name: no text of a user is in it."""

    def __init__(self) -> None:
        self.constants: dict[str, Any] = {}

    def constant(self, x: Any) -> str:
        """The name of an object."""
        name = f"k{len(self.constants)}"
        self.constants[name] = x
        return name

    def asking(self, probes: Sequence[tuple[tuple[Any, ...], Any]]) -> str:
        """That functions, each with its arguments, give these very objects: a loop in C where they are many."""
        if len(probes) <= _MOST_TERMS:
            names = [([*map(self.constant, question)], self.constant(answer)) for question, answer in probes]
            return " and ".join([f"{f}({', '.join(args)}) is {answer}" for (f, *args), answer in names]) or "True"
        call, starmap, same = map(self.constant, (operator.call, itertools.starmap, operator.is_))
        questions, answers = ([probe[i] for probe in probes] for i in (0, 1))
        return f"all(map({same}, {starmap}({call}, {self.constant(questions)}), {self.constant(answers)}))"

    def function(self, parameters: str, body: Sequence[str]) -> Callable[..., Any]:
        """A function of these parameters; `body` has its lines."""
        text = "\n    ".join([f"def call({parameters}):", *body])
        exec(compile(text, f"{__file__}, a call", "exec"), self.constants)
        return self.constants.pop("call")

    def terms(self, expected: ExpectedArguments) -> tuple[list[str], list[str], list[str]]:
        """What holds where `args` and `kwargs` are as expected, and the names that tensors and numbers have then.

        Elsewhere one is false, or raises one of MISMATCHES: the tables tell which it is.
        """
        tensors, numbers, sought = list[str](), list[str](), iter(expected.tensors)

        def inside(template: Any, x: str) -> Iterator[str]:
            children = open_container(template)
            if isinstance(template, SizeSlot):
                numbers.append(f"n{len(numbers)}")
                yield f"type({numbers[-1]} := {x}) is int"
            elif isinstance(template, TensorSlot):
                tensors.append(f"t{len(tensors)}")
                yield f"type({tensors[-1]} := {x}) in {self.constant(_TENSORS)}"
                yield from self._tensor_terms(next(sought), tensors[-1])
            elif children is None:
                old = self.constant(template)
                yield f"({x} is {old} or {self.constant(match_constant)}({old}, {x}, '') is None)"
            else:
                old, kind = self.constant(template), type(template)
                if kind in (tuple, list):
                    yield f"type(in_{old} := {x}) is {kind.__name__} and len(in_{old}) == {len(template)}"
                elif kind is dict:
                    same = f"all(map({self.constant(operator.is_)}, {x}, {old}))"
                    yield f"type({x}) is dict and len({x}) == {len(template)} and {same}"
                    yield f"(in_{old} := [*{x}.values()]) is not None"
                else:
                    yield f"(in_{old} := {self.constant(children_like)}({old}, {x}, '')) is not None"
                for i, (_, child) in enumerate(children):
                    yield from inside(child, f"in_{old}[{i}]")

        terms = [f"len(args) == {len(expected.args)} and len(kwargs) == {len(expected.kwargs)}"]
        for i, template in enumerate(expected.args):
            terms += inside(template, f"args[{i}]")
        for name, template in expected.kwargs.items():
            terms += inside(template, f"kwargs[{self.constant(name)}]")
        return terms, tensors, numbers

    def _tensor_terms(self, expected: ExpectedTensor, t: str) -> Iterator[str]:
        if None not in expected.shape:
            yield f"{t}.shape == {self.constant(expected.shape)}"
        else:
            yield f"len(s := {t}.shape) == {len(expected.shape)}"
            yield from [f"s[{i}] == {n}" for i, n in enumerate(expected.shape) if n is not None]
        yield f"{t}.dtype is {self.constant(expected.dtype)} and {t}.layout is {self.constant(expected.layout)}"
        yield f"{t}.device == {self.constant(expected.device)}"

    def result(self, template: Any) -> str:
        """An expression that puts `results` into a template, and for each Given what `objects` of the inputs has."""
        count = 0

        def expression(x: Any) -> str:
            nonlocal count
            if isinstance(x, SLOTS):
                count += 1
                return f"results[{count - 1}]"
            if type(x) is Given:
                count += x.leaves
                return f"inputs.objects[{self.constant(x.path)}]"
            children = open_container(x)
            if children is None:
                return self.constant(x)
            items = "".join([f"{expression(child)}, " for _, child in children])
            if type(x) in (tuple, list):
                return f"({items})" if type(x) is tuple else f"[{items}]"
            return f"{self.constant(close_instance)}({self.constant(x)}, [{items}])"

        return expression(template)


# Entries in another order ---------------------------------------------------------------------------------------------


class EntryOrder:
    """Puts entries of arguments into the order of the trace, where the forward computes the same in both."""

    def __init__(self, forward: Callable[..., Any] | None, expected: ExpectedArguments, more: list[str]) -> None:
        """`more` are the names in `**kwargs`, in the order of the trace."""
        self._forward, self._expected, self._more = forward, expected, more
        self._traced = self._sorted(tuple(expected.args), expected.kwargs)
        self._matters: dict[Any, bool] = {}
        """By the order of all entries, what was seen."""

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Those of a call as they are, where the order may matter. The first call in an order runs the forward twice.

        Of a trace from a file, and in a forward that is traced, it may. Raises InputMismatchError for `**kwargs`.
        """
        called = self._sorted(args, kwargs)
        ordered = _ordered(self._traced, called)
        order = tree_structure(called)
        if order != tree_structure(ordered) and self._forward is not None and tracing_state() is None:
            if order not in self._matters:
                self._matters[order] = self._is_another_program(ordered, called)
            if not self._matters[order]:
                return ordered
        more = [name for name in kwargs if name in self._more]
        if more != self._more and len(more) == len(self._more):
            orders = f"{self._more} when traced and {more} now"
            raise InputMismatchError(f"the order of **kwargs was {orders}; pass them in that of the trace")
        return args, kwargs

    def _sorted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """With keywords that are parameters by name, before those in `**kwargs`: their order never matters."""
        parameters = sorted(kwargs.keys() - self._more)
        return args, {name: kwargs[name] for name in (*parameters, *(name for name in kwargs if name in self._more))}

    def _is_another_program(self, ordered: Arguments, called: Arguments) -> bool:
        def recorded(form: Arguments) -> RecordedTape:
            def forward(*args: Any, **kwargs: Any) -> Any:
                args, kwargs = _ordered(form, (args, kwargs))
                return self._forward(*args, **kwargs)  # type: ignore[misc]

            return record(forward, *ordered)

        try:
            self._expected.match(*ordered)
            return not is_same_program(recorded(ordered), recorded(called))
        except ScopetraceError:  # the call says what does not fit
            return True


def _ordered(form: Any, x: Any) -> Any:
    """`x` with entries of dicts in the order that they have in `form`."""
    kind = type(form)
    if kind is type(x) and kind in _DICTS and form.keys() == x.keys():
        return kind({key: _ordered(form[key], x[key]) for key in form})
    if kind is type(x) and kind in (list, tuple) and len(form) == len(x):
        return kind([_ordered(*pair) for pair in zip(form, x, strict=True)])
    return x
