"""Passes over a tape: a tape in, another tape out; the input is left as it was."""
