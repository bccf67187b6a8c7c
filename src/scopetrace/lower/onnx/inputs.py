"""Example inputs for a comparison, made from what a trace knows of its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from scopetrace._compat.shape_env import evaluated
from scopetrace._compat.symbols import Symbolic, example, to_expr
from scopetrace.containers.structure import instantiate
from scopetrace.errors import InputMismatchError
from scopetrace.ir.tape import ProgramTape, Value

Size = Callable[[Any], int]
"""Gives the value of a size, symbolic or not."""


@dataclasses.dataclass
class Example:
    """Inputs of a trace."""

    tape: ProgramTape
    size: Size
    tensors: list[torch.Tensor]

    @property
    def numbers(self) -> list[int]:
        """The whole numbers that are dynamic."""
        return [self.size(n) for n in self.tape.numbers]

    @property
    def feed(self) -> list[torch.Tensor]:
        """All inputs in order, numbers as tensors."""
        return [*self.tensors, *map(torch.tensor, self.numbers)]

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the model."""
        table = dict(zip(self.tape.inputs, self.tensors, strict=True))
        args, kwargs = instantiate(
            lambda x: table[x] if isinstance(x, Value) else self.size(x), self.tape.args, (Value, *Symbolic)
        )
        return args, kwargs


def examples(tape: ProgramTape, seeds: int) -> Iterator[Example]:
    """Random inputs: `seeds` times of the traced sizes, and once of others where sizes are dynamic.

    Whole numbers are 0 and 1, which are valid as indices, masks and positions alike, and 1 where the last dimension
    begins: a mask that hides everything is one that attention has no defined result for.
    """
    for seed in range(seeds):
        yield _example(tape, seed, example)
    other = _other_sizes(tape)
    if other is not None:
        yield _example(tape, seeds, other)


def _other_sizes(tape: ProgramTape) -> Size | None:
    """The first of some changes of all dynamic sizes that the trace takes."""
    if tape.sizes is None:
        return None
    changes: list[Callable[[int], int]] = [lambda n: n + 1, lambda n: 2 * n, lambda n: n - 1, lambda n: 3 * n]
    for change in changes:
        values = {s: change(int(tape.sizes.env.backed_var_to_val[s])) for s in tape.sizes.specs}
        size = _sizes(values)
        try:
            made = _example(tape, 0, size)
            tape.sizes.check(made.tensors, made.numbers)
        except (InputMismatchError, RuntimeError):
            continue
        return size
    return None


def _sizes(values: dict[Any, int]) -> Size:
    return lambda n: int(evaluated(to_expr(n), values)) if isinstance(n, Symbolic) else n


def _example(tape: ProgramTape, seed: int, size: Size) -> Example:
    """Inputs that share memory do so as when they were traced."""
    random = torch.Generator().manual_seed(seed)
    memory: dict[int, torch.Tensor] = {}
    tensors = []
    for value in tape.inputs:
        fake = value.fake
        shape, stride = ([size(n) for n in numbers] for numbers in (fake.size(), fake.stride()))
        if [v.storage for v in tape.inputs].count(value.storage) == 1:
            tensors.append(_tensor(fake, shape, random))
            continue
        if value.storage not in memory:
            length = max(_extent(v, size) for v in tape.inputs if v.storage == value.storage)
            memory[value.storage] = _tensor(fake, [length], random)
        tensors.append(memory[value.storage].as_strided(shape, stride, int(value.offset)))
    return Example(tape, size, tensors)


def _extent(value: Value, size: Size) -> int:
    """How many elements of its memory a tensor reaches over."""
    pairs = zip(value.fake.size(), value.fake.stride(), strict=True)
    return int(value.offset) + 1 + sum((size(n) - 1) * size(s) for n, s in pairs)


def _tensor(fake: torch.Tensor, shape: list[int], random: torch.Generator) -> torch.Tensor:
    if fake.dtype.is_floating_point or fake.dtype.is_complex:
        made = torch.randn(shape, generator=random, dtype=torch.complex64 if fake.dtype.is_complex else torch.float32)
    else:
        made = torch.randint(0, 2, shape, generator=random)
        if made.dim():
            made[..., :1] = 1
    return made.to(fake.dtype).to(fake.device)
