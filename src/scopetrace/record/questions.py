"""What the forward asks torch where no op runs, as a trace hears it: flags, facts of tensors, blocks that switch modes.

Data flow:
    `x.stride(0)`, `x.requires_grad`, by the mode of `function_mode` -> torch's answer, and `ReadRecorder` is told of it
    `torch.is_grad_enabled()`, replaced                              -> the same

Only questions of the model and of torch's Python on its way count: while the recorder handles an op its mode is off,
and contexts such as `torch.no_grad` ask only to restore what was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from scopetrace._compat import questions
from scopetrace._compat.function_mode import Handler, On
from scopetrace._compat.ops import is_recording
from scopetrace._compat.questions import Mine, Replace
from scopetrace._compat.sources import SCOPETRACE, TORCH_DIRECTORY, asked_by_model, asking_frame, prefixes
from scopetrace.record.reads import ReadRecorder

# Code that asks to restore what was, or to choose between kernels that compute the same.
_KEEPING_STATE = (
    *SCOPETRACE,
    *prefixes(
        TORCH_DIRECTORY,
        *("autograd/grad_mode.py", "amp/autocast_mode.py", "utils/checkpoint.py", "utils/_device.py", "_tensor.py"),
        *("utils/_contextlib.py", "_dynamo/", "_compile.py", "fx/", "_subclasses/", "_library/", "_ops.py"),
        "_functorch/eager_transforms.py",
        *("nn/modules/module.py", "nn/modules/transformer.py", "nn/modules/activation.py", "nn/functional.py"),
    ),
)
_FAKE_TENSORS = prefixes(TORCH_DIRECTORY, "_subclasses/")
_TORCH = prefixes(TORCH_DIRECTORY)


def report_questions(replace: Replace, on: On, reads: ReadRecorder, mine: Mine) -> None:
    """Let what answers questions tell `reads`, too."""

    def asked() -> bool:
        if not (is_recording() and mine()):
            return False
        frame = asking_frame()
        if frame is not None and frame.f_code.co_filename.startswith(_KEEPING_STATE):
            return False
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            if frame.f_code.co_filename.startswith(_FAKE_TENSORS):
                return False  # a fake tensor that is made without an op, as for `x.data`
            frame = frame.f_back
        return True

    for path, ask in questions.flags.items():
        replace(torch, path.rpartition(".")[2], _flag(path, ask, reads, asked))
    for path, ask in questions.PROCESS_GROUP.items():
        replace(torch.distributed, path.rpartition(".")[2], _flag(path, ask, reads, asked))
    for name, get in (*questions.methods.items(), *questions.properties.items()):
        on(get, _fact(name, reads, asked))
    questions.report_members(replace, mine, reads.on_member, reads.on_question)
    _report_parameters(replace, reads, mine)
    _report_backends(replace, reads, mine)
    _report_switches(replace, on, reads, mine)


def _flag(name: str, ask: Callable[..., Any], reads: ReadRecorder, asked: Mine) -> Callable[..., Any]:
    @functools.wraps(ask)
    def answered(*args: Any, **kwargs: Any) -> Any:
        answer = ask(*args, **kwargs)
        arguments = tuple([a for a in (*args, *kwargs.values()) if a is not None])
        if asked() and not (arguments and name in questions.PROCESS_GROUP):
            reads.on_flag(name, arguments, answer)
        return answer

    return answered


def _fact(name: str, reads: ReadRecorder, asked: Mine) -> Handler:
    def answered(ask: Callable[..., Any], t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            answer = ask(t, *args, **kwargs)
        except Exception as error:
            reads.on_failed(error)
            raise
        if asked():
            args = () if name in questions.properties else (*args, *kwargs.values())
            reads.on_fact(t, name, args, answer is not None if name == "grad_fn" else answer)
        return answer

    return answered


def _report_parameters(replace: Replace, reads: ReadRecorder, mine: Mine) -> None:
    """`isinstance(x, nn.Parameter)`."""
    meta: Any = type(torch.nn.Parameter)
    ask = meta.__instancecheck__

    def __instancecheck__(cls: Any, x: Any) -> bool:
        is_parameter: bool = ask(cls, x)
        if isinstance(x, torch.Tensor) and mine() and asked_by_model(()):
            reads.on_fact(x, "is_parameter", (), is_parameter)
        return is_parameter

    replace(meta, "__instancecheck__", __instancecheck__)


def _report_backends(replace: Replace, reads: ReadRecorder, mine: Mine) -> None:
    """`torch.backends.cudnn.enabled` and its kind, where code outside of torch asks."""
    ask: Any = torch.backends.ContextProp.__get__

    def __get__(self: Any, module: Any, cls: type) -> Any:
        answer = ask(self, module, cls)
        if mine() and asked_by_model(()):
            name = next((key for key, x in vars(type(module)).items() if x is self), "")
            reads.on_flag(f"{module.__name__}.{name}", None, answer)
        return answer

    replace(torch.backends.ContextProp, "__get__", __get__)


def _report_switches(replace: Replace, on: On, reads: ReadRecorder, mine: Mine) -> None:
    """What switches autograd or autocast on or off."""

    def set_grad_enabled(switch: Callable[..., None], enabled: bool) -> None:
        frame = asking_frame()
        if is_recording() and frame is not None and mine():
            _tell_grad_mode(reads, enabled, frame)
        switch(enabled)

    def on_inference(mode: Any) -> None:
        reads.on_grad_mode(not mode.mode)  # `inference_mode(False)` switches autograd on

    on(questions.switch_grad, set_grad_enabled)
    _report_block(replace, torch.inference_mode, on_inference, reads.on_grad_block_end, mine)
    autocast = torch.amp.autocast_mode.autocast
    _report_block(replace, autocast, lambda _: reads.on_autocast(True), lambda: reads.on_autocast(False), mine)


def _tell_grad_mode(reads: ReadRecorder, enabled: bool, frame: FrameType) -> None:
    """Tell of a switch of autograd in `frame`, from which a mode of the model may have got it."""
    while frame.f_code.co_name == "__init__" and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_code.co_name == "__exit__":
        reads.on_grad_block_end()
    else:
        reads.on_grad_mode(enabled)


def _report_block(
    replace: Replace, cls: Any, entered: Callable[[Any], None], left: Callable[[], None], mine: Mine
) -> None:
    """Tell before a block of a context manager begins and ends."""
    enter, leave = cls.__enter__, cls.__exit__

    def __enter__(self: Any) -> Any:
        if mine():
            entered(self)
        return enter(self)

    def __exit__(self: Any, *error: Any) -> Any:
        if mine():
            left()
        return leave(self, *error)

    replace(cls, "__enter__", __enter__)
    replace(cls, "__exit__", __exit__)
