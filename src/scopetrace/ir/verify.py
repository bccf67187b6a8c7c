"""Checks of scopetrace on itself, which are on in the tests and with `SCOPETRACE_CHECK=1`."""

from __future__ import annotations

import os

_VARIABLE = "SCOPETRACE_CHECK"


def checks_enabled() -> bool:
    """Whether the environment variable `SCOPETRACE_CHECK` is `1`. Read once per trace, not once per op."""
    return os.environ.get(_VARIABLE) == "1"
