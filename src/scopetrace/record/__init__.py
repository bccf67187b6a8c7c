"""Running the callable once, under fake tensors: ops, values and module calls."""
