"""What an error means that torch raises on fake tensors: the TraceError in its place, or a note with the place."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator

import torch

from scopetrace._compat.tensors import DATA_DEPENDENT, NO_SHAPE_RULE
from scopetrace.containers.structure import leaves_with_path
from scopetrace.errors import DataDependentError, OpError, ScopetraceError, TraceError, UnsupportedOpError, noted
from scopetrace.formatting import short_repr
from scopetrace.ir.scopes import user_line
from scopetrace.ir.tape import Call, Value
from scopetrace.record.builder import TapeBuilder
from scopetrace.record.data import NoRealValue
from scopetrace.record.model import named_arguments
from scopetrace.record.ops import OpRecorder


@contextlib.contextmanager
def errors_explained(builder: TapeBuilder, ops: OpRecorder) -> Iterator[None]:
    """Inside, an error of the forward becomes the TraceError that says what it means, or gets its place as a note.

    The TraceErrors that this thread makes are appended to `builder.raised`, each with None for no op.
    """
    before = noted.set(builder.raised)
    try:
        yield
    except ScopetraceError:
        raise
    except Exception as error:
        meant = explained(error, builder, ops) or _refused(error, builder)
        if meant is not None:
            paragraph, _, _ = str(error).partition(_CPP_STACK)[0].partition("\n\n")
            meant.stands_for(error, f"  torch: {paragraph}")
            raise meant from error
        place = _place(error, builder)
        error.add_note(f"scopetrace: while tracing {place['module']}, at {place['source']}")
        raise
    finally:
        noted.reset(before)


def explained(error: Exception, builder: TapeBuilder, ops: OpRecorder) -> TraceError | None:
    """The TraceError that says what an error of torch means; None for an error of the model."""
    place = _place(error, builder)
    running = builder.op_that_raised(error)
    chain = (error, error.__cause__)  # torch.testing wraps what it catches
    no_data = any(isinstance(e, DATA_DEPENDENT) or _NO_DATA.search(str(e)) for e in chain)
    if no_data and running is torch.ops.aten.embedding_backward.default and builder.optimizer is None:
        return sparse_gradient(str(running), **place)  # where its result is dense, no data is read
    if no_data:
        problem = "Python needs the value of a tensor that depends on the inputs or the model's state"
        hint = _way_out(error)
        if builder.optimizer is not None:
            problem = f"{type(builder.optimizer).__name__} branches in Python on the values of tensors"
            hint = "step it after a call of the trace, on the gradients that this leaves in `grad`"
        reader = ops.data.reader(getattr(error, "cond", None), running)
        return DataDependentError(problem, op=reader, hint=hint, **place)
    if isinstance(error, NoRealValue):
        problem = f"Python needs a value, and there is none: {error}"
        return DataDependentError(problem, op=ops.data.reader(None, running), **place)
    names = isinstance(error, (LookupError, AttributeError)) or str(error).startswith(_NO_NUMBER)
    if names and any(text in str(error) for text in builder.texts):
        return text_used("looks up", **place)
    op = None if running is None else str(running)
    for text, (problem, hint) in _NO_FAKE.items():
        if text in str(error):
            return UnsupportedOpError(problem or str(error), op=op, hint=hint, **place)
    if isinstance(error, NO_SHAPE_RULE) or "There was no fake impl registered for" in str(error):
        first, _, _ = str(error).partition("\n")
        return UnsupportedOpError(
            f"torch cannot tell the shape of what an op returns: {type(error).__name__}: {first}",
            op=op,
            hint="register a fake implementation with torch.library.register_fake, or name the module in leaf_modules=",
            **place,
        )
    return None


def _refused(error: Exception, builder: TapeBuilder) -> OpError | None:
    """The error of an op that does not take its operands, as in eager; None for one that the model raises."""
    op = builder.op_that_raised(error)
    if op is None:
        return None
    call, tape = _call(error, builder), builder.tape
    if call.module is None:
        name, arguments = call.scope.type_name, list(zip(tape.input_paths, tape.inputs, strict=True))
    else:
        name = type(call.module).__name__ if any(call.module.children()) else short_repr(call.module)
        arguments = named_arguments(call.module.forward, call.args, call.kwargs)
    tensors = [(path, v) for name, x in arguments for path, v in leaves_with_path(x, name) if isinstance(v, Value)]
    operands = (
        ", ".join(f"{path}: {str(v.fake.dtype).removeprefix('torch.')} {list(v.fake.shape)}" for path, v in tensors)
        or "no tensors"
    )
    hint = "move the inputs to the model's device, as by x.to('meta')" if "on the same device" in str(error) else None
    return OpError(f"{name} was called with {operands}", op=str(op), hint=hint, **_place(error, builder))


def text_used(what: str, *, module: str | None, source: str | None) -> DataDependentError:
    """The error for text that a forward makes of what has no value in a trace, and not only for people."""
    return DataDependentError(
        f"the forward {what} text of a tensor, of a number that depends on one or of a dynamic size; a graph makes no "
        "text",
        op="str",
        module=module,
        source=source,
        hint="make the text outside of the forward; or trace with specialize=True, which lets the example inputs "
        "decide and says so in Trace.specializations",
    )


def sparse_gradient(op: str, *, module: str | None, source: str | None) -> UnsupportedOpError:
    """The error for a gradient that eager would add to `grad` by rules of its own for sparse tensors."""
    problem = "the gradient of a parameter is sparse, as that of an embedding with sparse=True"
    hint = "make the embedding with sparse=False, and the optimizer one that takes dense gradients"
    return UnsupportedOpError(problem, op=op, module=module, source=source, hint=hint)


def _place(error: Exception, builder: TapeBuilder) -> dict[str, str | None]:
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return {"module": str(_call(error, builder).scope), "source": user_line(frames)}


def _call(error: Exception, builder: TapeBuilder) -> Call:
    """The innermost call that the exception ended."""
    return next((c for c in reversed(builder.tape.calls) if c.raised is error), builder.tape.calls[0])


_CPP_STACK = "\nException raised from"

_NO_DATA = re.compile(
    r"doesn't have storage|Cannot access data pointer|\.numpy\(\) is not supported|doesn't have data"
    "|data is not allocated yet|Cannot call numel|unallocated storage|Not available for 'meta' device type"
    "|GuardOnDataDependentSymNode"  # by the interpreter of TorchScript, which keeps the text alone
    r"|unsupported format string passed to FakeTensor|\bSym(Int|Float|Bool)\b"  # what symbolic numbers cannot do
)

_NO_NUMBER = ("could not convert string to", "invalid literal for")
_NO_FAKE = {
    "NYI: aten._pin_memory": (
        "the forward pins a tensor (pin_memory()), and tensors have no data while they are traced",
        "pin the inputs outside of the forward, as a DataLoader with pin_memory=True does; what the forward makes can "
        "be made pinned: torch.zeros(n, pin_memory=True)",
    ),
    "_share_fd_: only available on CPU": (
        "the forward moves a tensor to shared memory (share_memory_()), and tensors have no data while they are traced",
        "share the model's tensors and the inputs outside of the forward",
    ),
    "raw Tensor object is already associated": (
        "the forward makes a lazy module, or another parameter without data",
        "make modules in __init__, and run a lazy one once before st.trace",
    ),
    "_apply(): Couldn't swap": (
        "the forward casts or moves a module (half(), double(), to(...))",
        "cast or move modules before st.trace, or cast tensors: x.to(weight.dtype)",
    ),
    "OpaqueTensorImpl": ("an MKL-DNN tensor has no fake tensor", "leave out to_mkldnn(): torch chooses the kernels"),
    "Could not run 'quantized::": (
        "an op on quantized tensors has no shape function",
        "trace the model before torch.ao.quantization.convert, or name in leaf_modules= a module that quantizes, "
        "computes and dequantizes",
    ),
    "quantized nyi in meta tensors": ("a quantized tensor has no fake tensor", "dequantize() it before st.trace"),
    "Attempted to set the storage of a tensor on device": (
        "the forward gives a tensor the memory of another one on another device (set_(), copy.copy)",
        "write y = x.clone()",
    ),
    "tried to directly modify sizes for customized tensor": (
        "the forward gives a tensor with dynamic sizes a fixed size in place (resize_(2, 3))",
        "make a new tensor: x.new_empty(2, 3), or x.reshape(-1)[:6].view(2, 3)",
    ),
    "NYI: aten.": ("tensors have no data while they are traced, and this op needs it", "do it outside of the forward"),
    "modified by an inplace operation": (
        "the forward differentiates what it has written to since, and autograd needs the values from before",
        "write out of place, or clone() the tensor before the ops that use it",
    ),
    "torch.distributed.nn.functional": ("", "take the functions of torch.distributed itself"),
}
"""By what torch raises for a fake tensor: the problem ("" for torch's own words), and the way out."""

_SPECIALIZE = (
    "or trace with specialize=True, which lets the example inputs decide and refuses calls that would decide otherwise"
)
_BRANCH = (
    f"compute both sides and pick with torch.where, or write torch.cond; {_SPECIALIZE}; or make the value an argument "
    "that is a Python number; write torch.sym_min(n, 4) and torch.sym_max(n, 4) for min(n, 4) and max(n, 4); skip "
    "a check of values where torch.compiler.is_exporting(), as it is here"
)

_WAYS_OUT = {
    "_detect_is_causal_mask": "say whether the mask is a causal one, which nn.TransformerEncoder and its kind else "
    "look up in it: is_causal=True or False beside mask=, tgt_is_causal= beside tgt_mask=, src_is_causal= beside "
    "src_mask= of nn.Transformer; or trace with specialize=True, which lets the example decide",
    "torch.distributions": "make the distribution with validate_args=False, or call "
    "torch.distributions.Distribution.set_default_validate_args(False): it looks at its parameters and samples",
    "guard_float": "compute with the tensor, x * s in place of x * float(s), or with s.item(), which may be returned "
    f"too: `return loss.item()`, not `float(loss)`; {_SPECIALIZE}",
    "guard_int": "where it is a length, take the whole tensor and a mask, torch.arange(x.size(1)) < n[:, None], and "
    f"n.item() in place of int(n), which asks for the value; where it decides, {_BRANCH}",
}
"""By a function or package of torch that asks for data, what to do instead."""


def _way_out(error: BaseException) -> str:
    """What to write instead of a branch on data."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    asked_by = {frame.f_code.co_name for frame in frames} | {
        str(frame.f_globals.get("__name__")).rpartition(".")[0] for frame in frames
    }
    if "its data is not allocated yet" in str(error):
        return f"write torch.stack([x, y]) in place of torch.tensor([x, y]); {_SPECIALIZE}"
    if ".numpy() is not supported" in str(error):
        return f"write it with torch's functions, or as a torch.library.custom_op; {_SPECIALIZE}"
    return next((hint for name, hint in _WAYS_OUT.items() if name in asked_by), _BRANCH)
