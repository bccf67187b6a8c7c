"""What a function is, before it has a graph: its body as a tape, and what it takes and gives."""

from __future__ import annotations

import dataclasses

from scopetrace.ir.tape import BodyTape, Call


@dataclasses.dataclass(frozen=True)
class FunctionInput:
    """One input of a function, in the order of its signature."""

    name: str
    """The argument's path (`past[0]`), the parameter's or buffer's name in its module (`fc.weight`), or what a lifted
    value is called in the program around."""
    kind: str
    """`argument`; `absent` (None was passed: no operand stands for it); `parameter`; `buffer`; `lifted` (what the body
    reads and nobody passed, constants too); `size`."""


@dataclasses.dataclass(frozen=True)
class FunctionOutput:
    """One output of a function, in the order of its signature."""

    name: str
    """The path in what forward returns (`[0]`, `.logits`; empty when it is the result), or what was changed."""
    kind: str
    """`result`; `mutated` (the new value of an argument or buffer); `captured` (made inside and read outside, though
    forward does not return it)."""


@dataclasses.dataclass(eq=False)
class OutlinedBody:
    """A function of an outlined program."""

    name: str
    """The class's name; `Name_2` for the second distinct body of it."""
    domain: str
    """The class's module path."""
    module_type: type | None
    identifier: str
    """Of `invoke_subgraph`: the name, and a hash of the content."""
    inputs: list[FunctionInput]
    outputs: list[FunctionOutput]
    tape: BodyTape
    calls: list[Call]
    """Of the outlined program, and of bodies inside it."""
