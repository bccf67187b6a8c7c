"""What a forward did that no graph carries.

Data flow:
    objects, globals and closures before and after the forward; draws, clocks and files -> SideEffects on the tape
    `SideEffect.baked_in`: the program depends on it -> it is right for one call, and a second one is refused
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from scopetrace.errors import SideEffectError


@dataclasses.dataclass(frozen=True)
class SideEffect:
    """Something that the forward did in the trace, and calls do not do, but for `x.requires_grad_()` at the start."""

    name: str
    """What was written or asked: `self.n`, `globals()['N']`, `closure n`, `random.random()`, `print()`."""
    old: str
    """What was there before the forward, as short text; empty for what was asked, such as a clock."""
    new: str
    """What the forward left or got, as short text."""
    module: str
    """The scope path of the module call that did it: `Net/Linear[fc]`; that of the root where it is not known."""
    source: str | None
    """The user's line: `model.py:12, in forward: self.n += 1`; None where it is not known."""
    baked_in: bool
    """Whether the program may depend on it: the forward reads what it writes here, or drew the number from outside."""

    @property
    def change(self) -> str:
        """What happened: `self.n was 0 and became 1`."""
        return f"{self.name} was {self.old} and became {self.new}" if self.old else f"{self.name} gave {self.new}"

    @property
    def leaves_tensors(self) -> bool:
        """Whether tensors that the forward computed were left in Python objects."""
        return "a tensor [" in self.new

    def __str__(self) -> str:
        return f"{self.change}, in {self.module}" + (f", at {self.source}" if self.source else "")


def refusal(effects: Sequence[SideEffect], problem: str) -> SideEffectError:
    """The error that says which `effects` are the problem: the first of them, and how many others there are."""
    first, *others = effects
    more = f"; and {len(others)} more, in Trace.side_effects" if others else ""
    of_tensors = first.old.startswith("a tensor") and first.new.startswith("a tensor")
    hint = f"{_WITH_TORCH if first.name in _GENERATORS else _IN_PLACE if of_tensors else ''}{_WAYS_OUT}"
    return SideEffectError(f"{problem}: {first.change}{more}", module=first.module, source=first.source, hint=hint)


_IN_PLACE = "write into the tensor that is there, as in `shadow[name].copy_(new)`, in place of keeping another one; or "
_GENERATORS = ("random", "numpy.random")
_WITH_TORCH = "draw with torch, as torch.rand(()) or torch.randperm(n), which each call draws anew; or "

_WAYS_OUT = (
    "run the model once before st.trace, if it sets itself up at its first run; keep such state in a buffer "
    "(register_buffer) that forward writes, take it as an argument, or do it outside the model; "
    "st.trace(..., side_effects='warn') warns in place of this error"
)
