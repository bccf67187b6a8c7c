"""Checks that all ranks have the same order and plan: otherwise their collectives do not match, and the job hangs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from scopetrace.errors import OrderMismatchError
from scopetrace.order.execution import ExecutionOrder


def check_order(order: ExecutionOrder, group: Any = None) -> None:
    """Compare the orders of all ranks of a process group. Every rank must call it.

    Args:
        order: this rank's order.
        group: a `torch.distributed` process group; None for the default one.

    Raises OrderMismatchError, on every rank, that names the first rank whose order differs from rank 0's and the step
    in which it does.
    """
    digests = _of_all_ranks(order.digest, group)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        orders = _of_all_ranks(order, group)
        difference = orders[0].first_difference(orders[other])
        raise OrderMismatchError(f"ranks 0 and {other} run in different orders: {difference}")


def check_groups(groups: Sequence[Any], group: Any = None) -> None:
    """Compare the groups of a plan on all ranks: modules, parameters and prefetch lists. As `check_order` otherwise."""
    plans = _of_all_ranks(list(groups), group)
    for rank, other in enumerate(plans):
        for i, pair in enumerate(itertools.zip_longest(plans[0], other)):
            if pair[0] != pair[1]:
                first, second = (", ".join(x[0]) or "the root's" if x else "missing" for x in pair)
                raise OrderMismatchError(
                    f"ranks 0 and {rank} have different plans: group {i} is {first}, in the other {second}"
                    + (" with other parameters or prefetch lists" if first == second else "")
                )


def _of_all_ranks(x: Any, group: Any) -> list[Any]:
    objects = [None] * dist.get_world_size(group)
    dist.all_gather_object(objects, x, group)
    return objects
