"""What autograd's graph keeps for backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from scopetrace._compat.tensors import storage_id


def saved_in_storage(results: list[torch.Tensor], storage: int) -> bool:
    """Whether an op that led to one of `results` has saved a tensor that lies in this storage."""
    seen: set[Any] = set()
    work = [t.grad_fn for t in results]
    while work:
        node = work.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(storage_id(t) == storage for t in _saved_by(node)):
            return True
        work += [found for found, _ in node.next_functions]
    return False


def _saved_by(node: Any) -> Iterator[torch.Tensor]:
    """The tensors that a node of autograd has saved, which its attributes `_saved_...` show."""
    for name in dir(node):
        if name.startswith("_saved_"):
            found = getattr(node, name)
            yield from (
                t for t in (found if isinstance(found, (list, tuple)) else [found]) if isinstance(t, torch.Tensor)
            )
