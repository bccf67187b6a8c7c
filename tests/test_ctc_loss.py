"""The CTC loss, of which torch's fake tensors do not tell the shapes: in forwards, and in training steps."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import scopetrace as st

T, N, CLASSES = 7, 2, 5
LENGTHS = {
    "tensors": (torch.tensor([7, 6]), torch.tensor([3, 2])),
    "int32": (torch.tensor([7, 6], dtype=torch.int32), torch.tensor([3, 2], dtype=torch.int32)),
    "numbers": ((7, 6), (3, 2)),
}
TARGETS = {"padded": torch.tensor([[1, 2, 3], [4, 4, 0]]), "in a row": torch.tensor([1, 2, 3, 4, 4])}


class Speech(nn.Module):
    """Gives log-probabilities of (T, N, CLASSES)."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(x).log_softmax(-1)


def after(run, model, *args):
    """What a run gives, and the gradients that it leaves."""
    result = run(*args)
    found = result.detach().clone(), [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("lengths", "targets"), [*itertools.product(LENGTHS, TARGETS)])
def test_a_step(lengths, targets, reduction):
    model, x, targets = Speech(), torch.randn(T, N, 6), TARGETS[targets]
    given = LENGTHS[lengths]

    def step(x, targets, *lengths):
        loss = F.ctc_loss(model(x), targets, *(lengths or given), reduction=reduction, zero_infinity=True)
        loss.sum().backward()
        return loss

    args = (x, targets) if lengths == "numbers" else (x, targets, *given)
    tr = st.trace(step, args)
    for _ in range(2):
        torch.testing.assert_close(after(tr, model, *args), after(step, model, *args), rtol=0, atol=0)


def test_other_lengths_than_those_of_the_example():
    """The size of what backward reads follows the longest target of the call."""
    model, x = Speech(), torch.randn(T, N, 6)

    def step(x, targets, lengths, target_lengths):
        loss = F.ctc_loss(model(x), targets, lengths, target_lengths)
        loss.backward()
        return loss

    tr = st.trace(step, (x, TARGETS["padded"], *LENGTHS["tensors"]))
    for lengths in ([1, 2], [1, 1], [3, 3]):
        args = torch.randn(T, N, 6), TARGETS["padded"], LENGTHS["tensors"][0], torch.tensor(lengths)
        torch.testing.assert_close(after(tr, model, *args), after(step, model, *args), rtol=0, atol=0)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_forward(lengths, grad):
    """Under autograd, the op itself makes the history."""
    model, x, given = Speech(), torch.randn(T, N, 6), LENGTHS[lengths]

    def loss_of(x, *lengths):
        return nn.CTCLoss(blank=4)(model(x), TARGETS["padded"], *(lengths or given))

    args = (x,) if lengths == "numbers" else (x, *given)
    with torch.set_grad_enabled(grad):
        tr = st.trace(loss_of, args)
        assert torch.equal(tr(*args), loss_of(*args))
    if grad:
        runs = [lambda f=f: f(*args).backward() or torch.zeros(()) for f in (tr, loss_of)]
        assert str(after(runs[0], model)) == str(after(runs[1], model))


def test_one_sequence_and_dynamic_sizes():
    model = Speech()

    def step(x, targets, length, target_length):
        loss = F.ctc_loss(model(x), targets, length, target_length)
        loss.backward()
        return loss

    alone = torch.randn(T, 6), torch.tensor([1, 2]), torch.tensor(7), torch.tensor(2)
    tr = st.trace(step, alone)
    torch.testing.assert_close(after(tr, model, *alone), after(step, model, *alone), rtol=0, atol=0)
    args = torch.randn(T, N, 6), TARGETS["padded"], *LENGTHS["tensors"]
    tr = st.trace(step, args, dynamic_shapes=({0: Dim.DYNAMIC}, None, None, None))
    longer = torch.randn(T + 3, N, 6), *args[1:]
    torch.testing.assert_close(after(tr, model, *longer), after(step, model, *longer), rtol=0, atol=0)


def test_what_is_made_of_a_step(tmp_path):
    model, given = Speech(), (torch.randn(T, N, 6), TARGETS["padded"], *LENGTHS["tensors"])

    def step(x, targets, *lengths):
        loss = F.ctc_loss(model(x), targets, *lengths)
        loss.backward()
        return loss

    expected = after(step, model, *given)
    tr = st.trace(step, given)
    torch.testing.assert_close(after(tr.compile(backend="aot_eager"), model, *given), expected)
    tr.save(tmp_path / "step")
    assert str(st.load(tmp_path / "step")) == str(tr)
    torch.testing.assert_close(after(tr.split_backward(), model, *given), expected)


LOG_PROBS, (IN, OUT) = torch.randn(T, N, CLASSES).log_softmax(-1), LENGTHS["tensors"]
MISTAKES = {
    "too few lengths": (LOG_PROBS, TARGETS["padded"], IN[:1], OUT),
    "too many lengths of targets": (LOG_PROBS, TARGETS["padded"], IN, torch.tensor([3, 2, 1])),
    "lengths that are no integers": (LOG_PROBS, TARGETS["padded"], IN.float(), OUT),
    "targets of another batch": (LOG_PROBS, TARGETS["padded"][:1], IN, OUT),
    "targets of three dimensions": (LOG_PROBS, TARGETS["padded"][None], IN, OUT),
    "one dimension": (LOG_PROBS[0, 0], TARGETS["padded"], IN, OUT),
    "four dimensions": (LOG_PROBS[None], TARGETS["padded"], IN, OUT),
    "half precision": (LOG_PROBS.half(), TARGETS["padded"], IN, OUT),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_eager_refuses(mistake):
    with pytest.raises((RuntimeError, NotImplementedError)):
        F.ctc_loss(*MISTAKES[mistake])
    with pytest.raises(RuntimeError, match=r"ctc_loss was called with [^\0]*ctc_loss takes"):
        st.trace(F.ctc_loss, MISTAKES[mistake])


def test_lengths_that_are_dynamic_sizes():
    def loss_of(x):
        lengths = [x.shape[0]] * N
        return F.ctc_loss(x.log_softmax(-1), TARGETS["padded"], lengths, (3, 2)), lengths[0]

    tr = st.trace(loss_of, (torch.randn(T, N, CLASSES),), dynamic_shapes=({0: Dim("times")},))
    for times in (T, T + 5, T - 1):
        x = torch.randn(times, N, CLASSES)
        torch.testing.assert_close(tr(x), loss_of(x), rtol=0, atol=0)
