"""Small forwards given as text, run as traces and in eager: right, or refused by an error of ours."""

import itertools
import linecache
import sys
import types

import torch
from torch.utils import _pytree as pytree

import scopetrace as st
from scopetrace.errors import ScopetraceError

HEAD = """
import abc, collections, contextlib, copy, dataclasses, decimal, enum, functools, io, itertools, math, operator
import threading, types, typing, unittest.mock, warnings
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
"""
_numbers = itertools.count()


def loaded(source):
    """The globals of a file with this text."""
    name = f"<forward {next(_numbers)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    sys.modules["small_forward"] = types.ModuleType("small_forward")  # for dataclasses
    found = {"__name__": "small_forward"}
    exec(compile(source, name, "exec"), found)
    return found


def process_state():
    """What of the process a forward may change."""
    return (
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        *(torch.get_default_dtype(), str(torch.get_default_device()), torch.is_anomaly_enabled()),
        *(torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
    )


def given(seed):
    """The arguments of a call."""
    return (torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)),)


def seen(run, seed, grad):
    """What a call gives: its result and the metadata of its tensors; or the error."""
    torch.manual_seed(seed)
    try:
        with torch.set_grad_enabled(grad):
            out = run(*given(seed))
    except Exception as error:
        return error
    tensors = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    facts = [(type(t), t.dtype, t.device, t.requires_grad, t.is_leaf) for t in tensors]
    plain = [t.detach().cpu().clone() for t in tensors if not t.is_meta]
    others = [repr(x) for x in pytree.tree_leaves(out) if not isinstance(x, torch.Tensor)]
    return str(pytree.tree_structure(out)), facts, plain, others  # as text: classes of two loads are not equal


def assert_right_or_refused(source, grad=True):
    """`make` of a file with this text gives a module; it is traced, and called twice with other inputs."""
    before = process_state()
    model, eager = loaded(source)["make"](), loaded(source)["make"]()
    first = seen(loaded(source)["make"](), 0, grad)
    torch.manual_seed(0)
    try:
        with torch.set_grad_enabled(grad):
            trace = st.trace(model, given(0))
    except ScopetraceError:
        trace = None
    except Exception as error:
        assert type(error) is type(first), (error, source)
        trace = None
    assert process_state() == before, source
    for seed in (1, 2) if trace is not None else ():
        wanted, found = seen(eager, seed, grad), seen(trace, seed, grad)
        if isinstance(found, ScopetraceError):
            return
        if isinstance(wanted, Exception) or isinstance(found, Exception):
            assert type(found) is type(wanted), (found, wanted, source)
            return
        assert (found[0], found[1], found[3]) == (wanted[0], wanted[1], wanted[3]), source
        torch.testing.assert_close(found[2], wanted[2], equal_nan=True, msg=source)
