"""Which values stand for those of the recorded tape as they are: with them, an op is copied and nothing else is asked.

a value of the recorded tape -> its present value, if that has the same layout
                                and lies in the one memory that stands for the memory of the recorded one
"""

from __future__ import annotations

from collections.abc import Iterable

from scopetrace._compat.symbols import to_expr
from scopetrace._compat.tensors import is_symbolic, stride_of
from scopetrace.ir.tape import Value


class AsRecorded:
    """Holds them. Of memory that is written, only until the next write."""

    def __init__(self) -> None:
        self.now: dict[Value, Value] = {}
        """The present values, by those of the recorded tape."""
        self.storages: dict[int, int] = {}
        """The storages that they are in, by those of the recorded tape."""

    def enter(self, old: Value, new: Value) -> bool:
        """Have `new` stand for `old`. Returns whether it does: not in another layout, nor in memory of its own."""
        if not alike(old, new) or self.storages.setdefault(old.storage, new.storage) != new.storage:
            return False
        self.now[old] = new
        return True

    def leave(self, values: Iterable[Value]) -> None:
        """Forget what stands for values of one storage."""
        for v in values:
            self.now.pop(v, None)
            self.storages.pop(v.storage, None)


def alike(old: Value, new: Value) -> bool:
    """Whether two values have the same dtype, sizes and strides."""
    a, b = old.fake, new.fake
    if a is b:
        return True
    if is_symbolic(a) or is_symbolic(b):
        return bool(a.dtype == b.dtype and to_expr((a.size(), a.stride())) == to_expr((b.size(), b.stride())))
    return bool(a.dtype == b.dtype and a.size() == b.size() and stride_of(a) == stride_of(b))
