"""Signals whose handlers raise, such as Ctrl-C, wait while programs are built."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any


class _Interrupts:
    """Keeps a signal such as an interrupt (Ctrl-C) until `act`, or the end; at a second one the first acts at once.

    One may arrive at any line here: what each line leaves is right by itself. Where another signal has cut `__enter__`
    or `__exit__` short, the next one acts at once.
    """

    def __init__(self, *signals: int) -> None:
        self.pending = 0
        """The number of the signal that is kept; 0 for none."""
        self.acted = 0
        """How many have acted, which may have raised."""
        self._depth = 0
        self._outside: dict[int, Any] = dict.fromkeys(signals)
        """What handles the signals outside."""

    def __enter__(self) -> None:
        if self._depth == 0:
            self.pending = 0
            for number in self._outside:
                handler = signal.getsignal(number)
                self._outside[number] = self._outside[number] if handler == self._on_signal else handler
                if callable(self._outside[number]):
                    signal.signal(number, self._on_signal)
        self._depth += 1

    def _on_signal(self, number: int, _: Any) -> None:
        if not self._depth:  # in `__enter__` or `__exit__`
            self._restore()
        if self.pending or not self._depth:
            self.act(self.pending or number)
        self.pending = number

    def act(self, number: int = 0) -> None:
        """Do what a signal does outside, that which is kept, in the main thread: raise KeyboardInterrupt, as a rule."""
        if threading.current_thread() is threading.main_thread():
            number, self.pending, self.acted = number or self.pending, 0, self.acted + 1
            self._outside[number](number, sys._getframe())

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._restore()
            if self.pending:
                self.act()

    def _restore(self) -> None:
        for number, handler in reversed(self._outside.items()):  # the alarm last: it may come before the next line
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)


_ALARM = getattr(signal, "SIGALRM", signal.SIGTERM)  # Windows has none
interrupts = _Interrupts(_ALARM, signal.SIGTERM, signal.SIGINT)
"""The signals whose handlers raise, as those of time limits do. Only the main thread of the process gets them."""
