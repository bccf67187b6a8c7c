"""Results of ops that passes put on a tape: made again, they are what the op itself gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import scopetrace as st
from scopetrace._compat.tensors import FakeFactory, run_fake, storage_id
from scopetrace.infer import repeat
from scopetrace.ir.scopes import Scope
from scopetrace.ir.tape import Op, Value

aten = torch.ops.aten


class Counting:
    """A runner of fake tensors, and how many ops it let torch run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.factory = FakeFactory()
        self._op = Op("placeholder", "x", (), {}, None, Scope("", ""), None, ())
        self.runner = repeat.FakeRuns(self.factory.mode)
        self.count = 0
        monkeypatch.setattr(repeat, "run_fake", self._run_fake)

    def _run_fake(self, *args: Any) -> Any:
        self.count += 1
        return run_fake(*args)

    def value(self, real: torch.Tensor) -> Value:
        fake = self.factory.from_real(real)
        return Value(fake, self._op, 0, storage_id(fake), None)

    def torchs(self, func: Any, args: tuple[Any, ...]) -> Any:
        """What torch itself gives."""
        return run_fake(self.factory.mode, func, tuple(a.fake if isinstance(a, Value) else a for a in args), {})


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(monkeypatch)


def facts(out: Any, inputs: list[torch.Tensor]) -> Any:
    """All that a later op could see of a result."""
    if isinstance(out, (list, tuple)):
        return type(out), [facts(t, inputs) for t in out]
    shared = [out.untyped_storage()._cdata == t.untyped_storage()._cdata for t in inputs]
    place = out.storage_offset(), out.untyped_storage().nbytes()
    kind = out.dtype, out.device, out.requires_grad, out.is_leaf, type(out)
    return tuple(out.size()), out.stride(), place, kind, shared, [out is t for t in inputs]


CALLS = {
    "relu": (aten.relu.default, lambda x: (x,)),
    "promotion": (aten.add.Tensor, lambda x: (x.to(torch.int32), 1)),
    "two layouts": (aten.add.Tensor, lambda x: (x, torch.randn(6, 4).t())),
    "slice": (aten.slice.Tensor, lambda x: (x, 1, 1, 5, 2)),
    "select of a view": (aten.select.int, lambda x: (x[1:], 0, 1)),
    "split": (aten.split.Tensor, lambda x: (x, 2)),
    "reshape that copies": (aten.reshape.default, lambda x: (x.t(), [-1])),
    "reshape that is a view": (aten.reshape.default, lambda x: (x, [-1])),
    "another dtype": (aten.view.dtype, lambda x: (x, torch.int32)),
    "itself": (aten.contiguous.default, lambda x: (x,)),
    "scatter": (aten.slice_scatter.default, lambda x: (x, torch.randn(4, 2), 1, 0, 2)),
    "no tensor": (aten.scalar_tensor.default, lambda x: (1.5,)),
    "several": (aten.max.dim, lambda x: (x, 1)),
    "gradient": (aten.mul.Tensor, lambda x: (x.requires_grad_(), 2.0)),
    "view with gradient": (aten.select.int, lambda x: (x.requires_grad_(), 0, 1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_made_again_as_run(fakes: Counting, name: str) -> None:
    func, make = CALLS[name]
    for _ in range(3):
        args = tuple(fakes.value(a) if isinstance(a, torch.Tensor) else a for a in make(torch.randn(4, 6)))
        inputs = [a.fake for a in args if isinstance(a, Value)]
        expected = fakes.torchs(func, args)
        assert facts(fakes.runner.run(func, args, {}), inputs) == facts(expected, inputs)


def test_calls_of_equal_metadata_run_once(fakes: Counting) -> None:
    for _ in range(5):
        fakes.runner.run(aten.cumsum.default, (fakes.value(torch.randn(4, 6)), 1), {})
    assert fakes.count == 1


def test_calls_that_differ_run_each(fakes: Counting) -> None:
    x, i = fakes.value(torch.randn(4, 3)), fakes.value(torch.arange(3))
    for args in [(i, 1), (i, 1.0), (i, True), (x, i), (i, x)]:
        out = fakes.runner.run(aten.add.Tensor, args, {})
        assert out.dtype == fakes.torchs(aten.add.Tensor, args).dtype
    assert fakes.count == 5


def test_what_a_rule_knows_is_not_run(fakes: Counting) -> None:
    x = fakes.value(torch.randn(4, 6))
    for func, args in [(aten.relu.default, (x,)), (aten.add.Tensor, (x, x)), (aten.transpose.int, (x, 0, 1))]:
        out = fakes.runner.run(func, args, {})
        assert facts(out, [x.fake]) == facts(fakes.torchs(func, args), [x.fake])
    assert fakes.count == 0


def test_the_second_of_two_arguments_that_share_memory(fakes: Counting) -> None:
    """Which argument a result is a view of must not be learned where both are the same memory."""
    x, y = fakes.value(torch.randn(4)), fakes.value(torch.randn(4))
    fakes.runner.run(aten.view_as.default, (x, x), {})
    out = fakes.runner.run(aten.view_as.default, (x, y), {})
    assert out.untyped_storage()._cdata == x.fake.untyped_storage()._cdata
    out = fakes.runner.run(aten.view_as.default, (y, x), {})
    assert out.untyped_storage()._cdata == y.fake.untyped_storage()._cdata


def test_sizes_that_depend_on_data_are_symbols_of_their_own(fakes: Counting) -> None:
    found = [fakes.runner.run(aten.nonzero.default, (fakes.value(torch.ones(4)),), {}).shape[0] for _ in range(2)]
    assert str(found[0]) != str(found[1])


def test_layers_that_repeat_give_equal_results() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            y.relu_()
            y[:, 1:3] += x[:, :2]
            y.t().mul_(0.5)
            return y.add_(x)

    net = torch.nn.Sequential(*(Layer() for _ in range(4)))
    for grad in (True, False):
        x = torch.randn(4, 6, requires_grad=grad)
        tr = st.trace(net, (x,))
        tr.lint()
        tr.check((x,))
