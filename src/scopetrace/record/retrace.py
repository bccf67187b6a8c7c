"""What a recording assumes, and the exception that ends it where that does not hold."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What is known of the forward before it runs. The defaults are what is taken for granted at first."""

    exact_autograd: bool = False
    """Whether torch runs every op, so that results have autograd's own history."""
    composites_apart: bool = False
    """Whether composite ops are recorded as their parts, so that the tensors that autograd saves in them are known."""
    object_types: frozenset[type] = frozenset()
    """The classes, unknown to pytree, whose instances hold tensors in their attributes."""

    def __or__(self, other: Assumptions) -> Assumptions:
        return Assumptions(
            self.exact_autograd or other.exact_autograd,
            self.composites_apart or other.composites_apart,
            self.object_types | other.object_types,
        )


class Retrace(BaseException):
    """The forward has to run again, with these assumptions too. Users never see it.

    It is no Exception, so that a forward that catches its own errors does not swallow it.
    """

    def __init__(self, why: str, needed: Assumptions) -> None:
        super().__init__(why)
        self.needed = needed
