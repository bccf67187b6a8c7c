"""What an outlined function takes and gives, and how that is read off the arguments and results of its calls."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from scopetrace.containers.structure import is_object, leaves, leaves_with_path, open_container
from scopetrace.ir.tape import BodyTape, Call, FunctionalTape, Tape, Template, Value, bind


@dataclasses.dataclass(frozen=True)
class FunctionInput:
    """One input of a function, in the order of its signature."""

    name: str
    """The path of an argument (`past[0]`), the name of a parameter or buffer in its module (`fc.weight`), or the name
    that a lifted value has in the program."""
    kind: str
    """`argument`; `absent` (None was passed: no operand stands for it); `parameter`; `buffer`; `lifted` (read by the
    body and not passed, as constants are); `size` (a symbolic number)."""


@dataclasses.dataclass(frozen=True)
class FunctionOutput:
    """One output of a function, in the order of its signature."""

    name: str
    """The path in what forward returns (`[0]`, `.logits`; empty for the result itself), or the name of what changed."""
    kind: str
    """`result`; `mutated` (the new value of an argument or buffer); `captured` (made in the call and read outside of
    it, though forward does not return it)."""


@dataclasses.dataclass(eq=False)
class FunctionSignature:
    """What a function of an outlined program is called, takes and gives."""

    name: str
    """The name of the modules' class; `Name_2` for the second distinct function of the class."""
    domain: str
    """The module path of the class."""
    module_type: type | None
    """The class of the modules; None for a function that was traced as the root."""
    identifier: str
    """The second argument of its `invoke_subgraph` nodes: the name and a hash of the content."""
    inputs: tuple[FunctionInput, ...]
    """Forward's arguments, then the module's parameters and buffers, then lifted values.

    All but those of kind `absent` are placeholders of the body, in this order.
    """
    outputs: tuple[FunctionOutput, ...]
    """The tensors that forward returns, then new values of what it changes, then other values read outside."""

    def __str__(self) -> str:
        inputs = ", ".join(f"{x.name}=None" if x.kind == "absent" else x.name for x in self.inputs)
        outputs = ", ".join(x.name.lstrip(".") or "result" for x in self.outputs)
        return f"{self.domain}::{self.name}({inputs}) -> ({outputs})"


@dataclasses.dataclass(eq=False)
class OutlinedBody(FunctionSignature):
    """A function of an outlined program, before it has a graph."""

    tape: BodyTape
    calls: list[Call]
    """Its calls, in the outlined program and in bodies inside it."""
    key: tuple[Any, ...]
    """Equal for the bodies of equal calls."""
    label: Any = None
    """What the caller of the outlining said of its calls; calls of which it said different things share no function."""


# Arguments and results -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ArgumentLeaf:
    """A leaf of forward's arguments, or of its result."""

    place: str
    """Its path, in a form that is the same in all equal calls."""
    name: str
    """Its path in this call: `mask`, `past_key_values.layers[2].keys`."""
    leaf: Any

    @property
    def is_absent(self) -> bool:
        """Whether it is an argument that is None."""
        return self.leaf is None and self.place.isidentifier()


def argument_leaves(named: Mapping[str, Template], used: set[Value]) -> list[ArgumentLeaf]:
    """The leaves of arguments in order. `used` are the values that the call reads.

    Of a container that holds other tensors too, such as the cache of all layers, only the used ones; their place is
    their number among these, so that the calls of all layers are equal.
    """
    return [leaf for name, x in named.items() for leaf in _leaves(name, x, used, may_be_partial=True)]


def result_leaves(result: Template, produced: set[Value]) -> Iterator[ArgumentLeaf]:
    """The leaves of a result in order; of an object that holds tensors, those that the call makes."""
    return _leaves("", result, produced)


def _leaves(path: str, x: Any, used: set[Value], *, may_be_partial: bool = False) -> Iterator[ArgumentLeaf]:
    children = open_container(x)
    if children is None:
        yield ArgumentLeaf(path, path, x)
    elif is_object(x) or (may_be_partial and not used.issuperset(leaves(x, Value))):
        values = [(p, v) for p, v in leaves_with_path(x, path) if isinstance(v, Value) and v in used]
        yield from (ArgumentLeaf(f"{path}[{i}]", p, v) for i, (p, v) in enumerate(values))
    else:
        for key, item in children:
            yield from _leaves(path + key, item, used, may_be_partial=may_be_partial)


def new_values(call: Call, forward: Any) -> list[tuple[str, Value]]:
    """On a functional tape: argument path or buffer name, and the value after a call, of what it changed.

    `forward` is the function that the call ran.
    """
    if call.mutated is None:
        return []
    args, kwargs, held = call.mutated
    return [*values_with_path(bind(forward, args, kwargs)), *held.items()]


def written_values(call: Call, forward: Any, tape: Tape) -> dict[str, Value]:
    """For a recorded tape, as `new_values`: from the last op in the call that writes each storage."""
    last = {v.storage: op for op in tape.ops[call.start : call.stop] for v in op.writes}
    values = dict(values_with_path(bind(forward, call.args, call.kwargs)))
    prefix = call.prefix
    for name, value in tape.attribute_reads():
        if call.module is not None and name.startswith(prefix):
            values.setdefault(name.removeprefix(prefix), value)
    writers = {name: last[v.storage] for name, v in values.items() if v.storage in last}
    return {name: op.values()[0] for name, op in writers.items() if op.values()}


def values_with_path(arguments: dict[str, Template]) -> list[tuple[str, Value]]:
    """The values among the arguments of a call, each with its path, `past[0]`."""
    leaves = [leaf for name, arg in arguments.items() for leaf in leaves_with_path(arg, name)]
    return [(path, v) for path, v in leaves if isinstance(v, Value)]


# Names of what is not passed -----------------------------------------------------------------------------------------


def own_tensors(tape: FunctionalTape, call: Call) -> dict[int, tuple[int, str, str]]:
    """By id of a tensor of the call's module: its position among these, `parameter` or `buffer`, and its name."""
    if call.module is not None:
        named = [*call.module.named_parameters(), *call.module.named_buffers()]
    else:  # in a loaded trace or of nodes of a graph, which have no modules
        params = tape.registered.params
        held = [(params[n].names if n in params else (n,), t) for n, t in tape.attributes.items() if n in tape.owners]
        named = [(n.removeprefix(call.prefix), t) for names, t in held for n in names if n.startswith(call.prefix)]
    tensors: dict[int, tuple[int, str, str]] = {}
    for i, (name, t) in enumerate(named):
        tensors.setdefault(id(t), (i, "parameter" if isinstance(t, torch.nn.Parameter) else "buffer", name))
    return tensors


def unique_names(first: int = 1, taken: Iterable[str] = ()) -> Callable[[str], str]:
    """Makes names unique: a second `x` becomes `x_1`, with the number `first`, a third `x_2`."""
    names, counters = set(taken), dict[str, Iterator[int]]()

    def unique(wanted: str) -> str:
        name = wanted
        while name in names:
            name = f"{wanted}_{next(counters.setdefault(wanted, itertools.count(first)))}"
        names.add(name)
        return name

    return unique
