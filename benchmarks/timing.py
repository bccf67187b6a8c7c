"""How one thing is timed."""

import gc
import time
from collections.abc import Callable
from typing import Any


def seconds(fn: Callable[[], Any]) -> float:
    """Seconds that `fn` takes, without the garbage of what ran before."""
    gc.collect()
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def best_in_turn(table: dict[str, Callable[[], Any]], rounds: int) -> tuple[dict[str, float], dict[str, str]]:
    """The best seconds of each after a first run that does not count, all in turn; and why the others failed."""
    best: dict[str, float] = {}
    failed: dict[str, str] = {}
    for i in range(rounds + 1):
        for name in table.keys() - failed.keys():
            try:
                took = seconds(table[name])
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {str(error).strip()[:150]}"
                continue
            if i:
                best[name] = min(took, best.get(name, took))
    return {name: best[name] for name in table if name in best and name not in failed}, failed
