"""Compares a program with eager: all that a caller can see of a call."""

import torch
from torch.utils import _pytree as pytree

from scopetrace.program.check import copy_inputs


def assert_like_eager(fn, program, args, seed=0):
    """Both on copies of `args`, from one seed: values, effects, dtypes, strides, shared memory and identity."""
    expected, actual = outcome(fn, args, seed), outcome(program, args, seed)
    torch.testing.assert_close(actual, expected, equal_nan=True)
    assert layouts(actual) == layouts(expected)
    assert sharing(actual) == sharing(expected)


def assert_same_gradients(fn, program, args):
    """The sum of either's result, differentiated by the arguments that require grad."""
    grads = []
    for run in (fn, program):
        given = copy_inputs(args)
        run(*given).sum().backward()
        grads.append([a.grad for a in given])
    torch.testing.assert_close(grads[1], grads[0])


def outcome(fn, args, seed=0):
    """The arguments after the call, and the result."""
    given = copy_inputs(args)
    torch.manual_seed(seed)
    return given, fn(*given)


def layouts(x):
    """The strides that count: of dimensions of more than one element, in tensors with elements.

    Those of the others are not the same in torch's kernels and in its shape functions.
    """
    strided = [t for t in tensors(x) if t.layout is torch.strided]
    return [[s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] if t.numel() else [] for t in strided]


def sharing(*x):
    """For each tensor the first with its memory, and the first that is the same object."""
    flat = tensors(x)
    memory = [t.untyped_storage()._cdata if t.layout is torch.strided else id(t) for t in flat]
    return [memory.index(m) for m in memory], [[id(t) for t in flat].index(id(t)) for t in flat]


def tensors(x):
    """The tensors of a structure."""
    return [t for t in pytree.tree_leaves(x) if isinstance(t, torch.Tensor)]
