"""For `SCOPETRACE_CHECK=1` in the tests: an inferred result that was compared with torch's is not compared again.

op, metadata of its tensors, other arguments, modes, inferred results -> torch's results are asked for once in a process
"""

import functools
import types

import torch

from scopetrace._compat import tensors as of
from scopetrace._compat.questions import default_dtype, grad_enabled, inference_mode_enabled
from scopetrace.ir.tape import Value


def once(compare):
    """As `compare`, of `scopetrace.infer.inference`, for what is asked for the first time, or has symbolic sizes."""
    known = set()

    @functools.wraps(compare)
    def compare_once(maker, func, args, kwargs, inputs, container, tensors):
        with (
            of.without_dispatch(),
            torch._C.DisableTorchFunction(),
        ):  # no question of the model
            facts = _facts(func, (args, kwargs), inputs, container, tensors)
        if facts not in known:
            compare(maker, func, args, kwargs, inputs, container, tensors)
            if facts is not None:
                known.add(facts)

    for function in (compare_once, _facts, _add):  # in a trace the code of a file elsewhere would be the model's
        function.__code__ = _in_file(function.__code__, compare.__code__.co_filename)
    return compare_once


def _in_file(code, file):
    consts = [_in_file(x, file) if isinstance(x, types.CodeType) else x for x in code.co_consts]
    return code.replace(co_filename=file, co_consts=tuple(consts))


def _facts(func, arguments, inputs, container, tensors):
    """All that `compare` asks for; None where some of it is symbolic."""
    fakes = [v.fake for v in inputs]
    facts = [func, grad_enabled(), inference_mode_enabled(), default_dtype(), container, *[f() for f in _BACKENDS]]
    facts += torch._C._get_sdp_priority_order()
    if not _add(arguments, {id(v): i for i, v in enumerate(inputs)}, facts):
        return None
    memory = [of.storage_id(t) for t in fakes]
    for t in (*fakes, *tensors):
        if t is None:
            facts.append(None)
        elif of.is_symbolic(t) or type(nbytes := of.nbytes_of(t.untyped_storage())) is not int:
            return None
        else:
            here = of.storage_id(t)
            facts += (type(t), t.size(), of.stride_of(t), of.offset_of(t), nbytes, t.dtype, t.device, t.layout)
            facts += (of.requires_grad_of(t), of.is_conj_of(t), of.is_neg_of(t))
            facts += [(x is t, there == here) for x, there in zip(fakes, memory, strict=True)]
    return tuple(facts)


_BACKENDS = [
    getattr(torch._C, f"_get_{name}")
    for name in (
        *("cudnn_enabled", "mkldnn_enabled", "deterministic_algorithms"),
        *("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled"),
    )
]


def _add(x, given, facts):
    """Append what an argument is; False where that is symbolic or of another kind than numbers and the like."""
    facts.append(type(x))
    if isinstance(x, Value):
        facts.append(given[id(x)])
    elif isinstance(x, dict):
        facts.append(tuple(x))
        return all([_add(v, given, facts) for v in x.values()])
    elif isinstance(x, (list, tuple)):
        facts.append(len(x))
        return all([_add(v, given, facts) for v in x])
    elif type(x) in _PLAIN:
        facts.append(repr(x) if type(x) is float else x)
    else:
        return False
    return True


_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
