"""What holds for every test: one thread, one seed, and nothing left behind in the process."""

import gc
import importlib.metadata
import logging
import os
import random
import sys
import time
import types
import typing
from pathlib import Path

# Before torch is imported, and for the processes that tests start: results and times do not depend on the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Every stage checks the tape that it leaves, which adds about 3 % to a trace.
os.environ.setdefault("SCOPETRACE_CHECK", "1")

import compared
import numpy
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import scopetrace as st
from scopetrace.infer import inference

# Where scopetrace is not installed, or was before it had a plugin for pytest.
if not importlib.metadata.entry_points(group="pytest11", name="scopetrace"):
    pytest_plugins = ["scopetrace.integrations.pytest"]

torch.set_num_threads(1)
inference.compare = compared.once(inference.compare)
# Each `manual_seed` formats the stack for the GPU that may be used later, which takes longer than a call of a program.
for _devices in (torch.cuda, torch.xpu, torch.mtia):
    _devices.traceback = types.SimpleNamespace(format_stack=list)
# pytest attaches itself anew for each phase of each test to each logger that does not propagate, as all of torch's.
for _log in logging.root.manager.loggerDict.values():
    _log.propagate = True
# Each export registers thousands of kernels, whose annotations are made anew, a fifth of the time; these are kept.
torch._ops.Callable = typing.Callable


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What imports and collection make stays: the garbage collector need not look at it, then or in each test.

    It looks at all that tests and later imports leave ten times more seldom than it would by itself.
    """
    gc.set_threshold(*gc.get_threshold()[:2], 100)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the cases of a test with the marker `sample(n)` one in n is fast, with each value of each parameter in some.

    Cases of two parameters are a table, of which one diagonal in n is taken.
    """
    for item in items:
        if sample := item.get_closest_marker("sample"):
            number, places = next(iter(item.callspec.indices.values())), 0  # that of the case among all
            for mark in reversed([*item.iter_markers("parametrize")]):
                number, place = divmod(number, len(mark.args[1]))
                places += place
            if places % sample.args[0]:
                item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item):
    """CI gives tests until a time, in seconds since 1970; those that have not begun by then are reported as skipped."""
    until = os.environ.get("SCOPETRACE_TESTS_UNTIL")
    if until and time.time() > float(until):
        pytest.skip("no time is left")


@pytest.fixture(autouse=True, scope="module")
def kept_apart():
    """What the tests of other files have left, as imports, is not looked at by the garbage collector in these."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers in whichever order tests run."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """A test fails that leaves a setting, hook, patch or registration of the process other than it found it."""
    before, modules, registered = process_state(), set(sys.modules), set(pytree.SUPPORTED_NODES)
    yield
    after = process_state()
    changed = {name: (value, after[name]) for name, value in before.items() if after[name] != value}
    assert not changed, f"left behind: {changed}"
    # A library may register its own classes when it is imported.
    added = {cls for cls in set(pytree.SUPPORTED_NODES) - registered if getattr(cls, "__module__", "") in modules}
    caches = {cls for cls in added if cls.__module__ == "transformers.cache_utils"}
    for cls in caches:  # an export of transformers registers them for good
        del pytree.SUPPORTED_NODES[cls]
    added -= caches
    assert not added, f"left in pytree's registry: {added}"


def process_state():
    """Everything in the process that a trace changes while it runs, or that changes what a trace does."""
    module = nn.modules.module
    return {
        "trace in progress": st.tracing_state() is not None,
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "exporting": (torch.compiler.is_exporting(), torch.compiler.is_compiling()),
        "dispatch modes": [str(m) for m in torch.utils._python_dispatch._get_current_dispatch_mode_stack()],
        "function modes": torch._C._len_torch_function_stack(),
        "pre-dispatch mode": torch._ops._get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY),
        "patches of nn.Module": (
            nn.Module._call_impl,
            nn.Module.__call__,
            nn.Module.__getattr__,
            nn.Module.__setattr__,
        ),
        "global hooks": [
            len(hooks)
            for hooks in (
                module._global_forward_hooks,
                module._global_forward_pre_hooks,
                module._global_backward_hooks,
                module._global_module_registration_hooks,
            )
        ],
        "stance of torch.compile": torch._dynamo.eval_frame._stance,
        "error on a nested trace": torch._dynamo.config.error_on_nested_fx_trace,
        "garbage collector": gc.isenabled(),
        "working directory": Path.cwd(),
    }
