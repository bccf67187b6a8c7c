"""What a recording assumes, and the exception that ends it where that does not hold."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What is taken for granted while the model's Python runs."""

    exact_autograd: bool = False
    """Whether torch runs every op, so that results have autograd's own history."""
    composites_apart: bool = False
    """Whether composite ops are recorded as their parts, so that the tensors that autograd saves in them are known."""
    object_types: frozenset[type] = frozenset()
    """The classes, unknown to pytree, whose instances hold tensors in their attributes."""

    def corrected(self, failed: Retrace) -> Assumptions:
        """The assumptions for the next run."""
        return Assumptions(
            self.exact_autograd or failed.exact_autograd,
            self.composites_apart or failed.composites_apart,
            self.object_types | failed.object_types,
        )


class Retrace(BaseException):
    """The forward has to run again, under other assumptions. Users never see it.

    It is no Exception, so that a forward that catches its own errors does not swallow it.
    """

    def __init__(
        self,
        why: str,
        *,
        exact_autograd: bool = False,
        composites_apart: bool = False,
        object_types: frozenset[type] = frozenset(),
    ) -> None:
        super().__init__(why)
        self.exact_autograd = exact_autograd
        self.composites_apart = composites_apart
        self.object_types = object_types
