"""The mode of torch functions that hears of questions: on where code of the model runs, and torch goes its own way."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import scopetrace as st
from scopetrace._compat.replaced import FunctionMode


def is_on() -> bool:
    stack = torch.overrides._get_current_function_mode_stack()
    return any(isinstance(mode, FunctionMode) for mode in stack)


def targets(tr: st.Trace) -> list[str]:
    return [str(node.target) for node in tr.graph_module.graph.nodes if node.op == "call_function"]


class Passes(TorchFunctionMode):
    """Hands on each call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def asks(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.is_contiguous() else x - 1


@pytest.mark.parametrize("enter", [Passes, lambda: torch.device("cpu")])
@pytest.mark.parametrize("inside", [True, False])
def test_a_question_under_another_mode_is_seen(enter: Any, inside: bool) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with enter():
            return asks(x)

    x = torch.randn(2, 3)
    if inside:
        tr = st.trace(forward, (x,))
    else:
        with enter():
            tr = st.trace(asks, (x,))
    torch.testing.assert_close(tr(x), x + 1)
    with pytest.raises(st.errors.InputMismatchError, match="is_contiguous"):
        tr(torch.randn(3, 2).t())


def test_the_modes_are_as_before_after_the_trace() -> None:
    with Passes() as mode:
        st.trace(asks, (torch.randn(2),))
        assert torch.overrides._get_current_function_mode_stack() == [mode]
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_transformer_encoder_has_its_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    encoder, x = nn.TransformerEncoder(layer, 1).eval(), torch.randn(2, 3, 8)
    with torch.no_grad():
        tr = st.trace(encoder, (x,))
        torch.testing.assert_close(tr(x), encoder(x))
    assert "aten._transformer_encoder_layer_fwd.default" in targets(tr)


def test_a_scripted_child_runs() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.ReLU())), torch.randn(3, 2)
    torch.testing.assert_close(st.trace(model, (x,))(x), model(x))


SEEN: list[bool] = []
note = SEEN.append  # a trace puts back a list that it is led to


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        note(is_on())
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        note(is_on())
        return g * 2


def test_it_is_on_in_what_autograds_engine_calls() -> None:
    def noting(x: torch.Tensor) -> torch.Tensor:
        note(is_on())
        return x.sin()

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = Doubles.apply(x * w)
        y.register_hook(lambda g: note(is_on()))
        y = torch.utils.checkpoint.checkpoint(noting, y, use_reentrant=False)
        (grad,) = torch.autograd.grad(y.sum(), w)
        return grad

    SEEN.clear()
    x, w = torch.randn(3), torch.randn(3, requires_grad=True)
    tr = st.trace(step, (x, w))
    assert len(SEEN) >= 4 and all(SEEN)
    torch.testing.assert_close(tr(x, w), step(x, w))


def test_it_is_off_in_other_threads_and_afterwards() -> None:
    seen: list[bool] = []
    note = seen.append  # a trace puts back a list that it is led to

    def forward(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: note(is_on()))
        thread.start()
        thread.join()
        return x + 1

    st.trace(forward, (torch.randn(2),))
    assert seen == [False] and not is_on()
