"""`Trace.memory`: which call makes, keeps and frees which memory, and the peak, beside what eager needs."""

import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import scopetrace as st
from benchmarks.steps import LiveStorages, saved_by_autograd
from scopetrace.api import checkpoints
from scopetrace.api.runnable import program_of
from scopetrace.view.memory import storages_of


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.out(self.fc(self.norm(x)).relu())


def test_text():
    model = nn.Sequential(nn.Linear(25, 25), nn.ReLU(), nn.Linear(25, 1))
    with torch.no_grad():
        memory = st.trace(model, (torch.ones(10, 25),)).memory()
    assert str(memory).splitlines()[:4] == [
        "module       made     freed    saved  peak",
        "Sequential   2.04 kB  2.00 kB  -      2.00 kB",
        "  Linear[0]  1.00 kB  -        -      1.00 kB",
        "  ReLU[1]    1.00 kB  -        -      2.00 kB",
    ]
    assert repr(memory) == "<Memory: peak 2.00 kB, 4 calls>"


def test_writes_in_place_make_no_memory():
    """The graph has no op that writes; the memory is that of the ops as they ran."""

    def f(x):
        y = x * 2
        return y.add_(1).relu_()

    assert st.trace(f, (torch.ones(100),)).memory().peak_bytes == 400


def test_what_backward_reads_is_saved_until_then():
    weight = nn.Parameter(torch.ones(100))

    def step(x):
        (x.exp() * weight).sum().backward()

    memory = st.trace(step, (torch.ones(100),)).memory()
    assert memory.saved_bytes == 404  # the result of exp, and the sum, like which backward makes its first gradient
    assert memory.peak_bytes == 804  # that, the product, and the sum; in backward the gradient of weight


def test_what_a_branch_needs_is_in_use_while_it_runs():
    def f(x):
        return torch.cond(x.sum() > 0, lambda t: torch.cat([t] * 9).sin().sum(), lambda t: t.sum(), (x,))

    memory = st.trace(f, (torch.ones(100),)).memory()
    assert memory.timeline[-1] == memory.peak_bytes == 2 * 3600 + 1  # and the condition
    assert memory.peak_op == "cond"


def test_a_program_without_ops():
    memory = st.trace(lambda x: x, (torch.ones(3),)).memory()
    assert (memory.peak_bytes, memory.held_bytes, memory.peak_op) == (0, 12, "")


def test_data_and_depth():
    memory = st.trace(nn.Sequential(Block(4), Block(4)), (torch.ones(2, 4),)).memory(depth=1)
    data = json.loads(json.dumps(memory.to_dict()))
    assert [(row["fqn"], row["depth"]) for row in data["rows"]] == [("", 0), ("0", 1), ("1", 1)]
    assert data["peak_bytes"] == max(memory.timeline)
    assert "Block[1]" in memory._repr_html_()


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**14, 2**14), nn.ReLU())
        memory = st.trace(model, (torch.empty(2**14, 2**14),)).memory()
    assert memory.peak_bytes == 2 * 2**30


def test_sizes_that_are_dynamic_are_those_of_the_example():
    tr = st.trace(nn.ReLU(), (torch.ones(7, 10),), dynamic_shapes=({0: torch.export.Dim("n")},))
    assert tr.memory().peak_bytes == 280


@pytest.mark.parametrize("depth", [-1, "two", 1.5])
def test_a_depth_that_is_none(depth):
    with pytest.raises(st.ArgumentError, match="depth"):
        st.trace(nn.ReLU(), (torch.ones(1),)).memory(depth=depth)


# Beside eager --------------------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(8 * 49, 10)

    def forward(self, x):
        return self.head(self.conv(x).flatten(1))


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10)), (16, 32)),
    "blocks": (lambda: nn.Sequential(Block(32), Block(32), nn.Linear(32, 10)), (64, 32)),
    "convolutions": (Convolutions, (4, 3, 16, 16)),
    "attention": (lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), (4, 16, 32)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), None),
}


@pytest.mark.parametrize("name", MODELS)
def test_peak_and_saved_bytes_are_those_of_eager(name):
    make, shape = MODELS[name]
    model = make()
    x = torch.randn(shape) if shape else torch.randint(0, 10, (4, 8))

    def loss():
        return model(x).flatten(1).logsumexp(1).sum()

    def step():
        loss().backward()

    memory = st.trace(step, ()).memory()
    held = [x, *model.parameters(), *model.buffers()]
    scalars = 64  # such as the loss, and the ones that its gradient begins with
    assert abs(memory.saved_bytes - saved_by_autograd(loss, held)) <= scalars
    with LiveStorages(held) as live:
        step()
    assert memory.peak_bytes == pytest.approx(live.peak, rel=0.1)


@pytest.mark.parametrize(
    "run",
    [
        lambda x, w: F.cross_entropy(x @ w, torch.arange(64)),
        lambda x, w: F.scaled_dot_product_attention(x[None], x[None], x[None]),
        lambda x, w: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(64, 64).tril()),
        lambda x, w: torch.einsum("bi,ci,di->bcd", x, x, w[:64]),
        lambda x, w: F.dropout(x, 0.5) + F.alpha_dropout(x, 0.5),
        lambda x, w: x.view(4, 16, 64) @ w.t()[None, :64],
        lambda x, w: F.group_norm(x.view(4, 16, 64), 4),
        lambda x, w: F.linear(x, w.t()).softmax(-1).log_softmax(-1),
    ],
)
@torch.no_grad()
def test_what_parts_of_a_composite_op_make_for_each_other_counts_while_it_runs(run):
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    memory = st.trace(run, (x, w)).memory()
    with LiveStorages([x, w]) as live:
        run(x, w)
    assert memory.peak_bytes == pytest.approx(live.peak, rel=0.05)


def test_a_custom_op_does_not_run_again():
    runs = []
    with torch.library._scoped_library("scopetrace_memory", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: (runs.append(1), x * 2)[1], "CompositeImplicitAutograd")
        tr = st.trace(torch.ops.scopetrace_memory.twice, (torch.ones(3),))
        before = len(runs)
        assert tr.memory().peak_bytes == 12
        assert len(runs) == before


def test_attention_on_the_meta_device_has_no_matrix_of_scores():
    """There alone torch has no kernel without it."""
    q = torch.empty(1, 2, 256, 16, device="meta")
    memory = st.trace(lambda q: F.scaled_dot_product_attention(q, q, q), (q,)).memory()
    assert memory.peak_bytes == 4 * q.numel()


def test_the_calls_of_a_step():
    model = nn.Sequential(Block(8), Block(8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    rows = {row.fqn: row for row in st.trace(step, (torch.ones(4, 8), torch.ones(4, 8))).memory().rows}
    assert rows["model.0"].saved == rows["model.1"].saved > 0
    assert rows["model.0"].made >= rows["model.0"].saved + rows["model.0"].freed
    assert rows["model"].peak <= rows[""].peak


# Checkpoints ---------------------------------------------------------------------------------------------------------


def peak_of(model, x):
    def step():
        model(x).logsumexp(1).sum().backward()

    with LiveStorages([x, *model.parameters()]) as live:
        step()
    model.zero_grad()
    return live.peak


def blocks(count=6):
    return nn.Sequential(nn.Linear(32, 32), *(Block(32) for _ in range(count)), nn.Linear(32, 10))


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
def test_a_plan_s_peak_is_that_of_eager_with_its_checkpoints(share):
    model, x = blocks(), torch.randn(256, 32)

    def step():
        model(x).logsumexp(1).sum().backward()

    tr = st.trace(step, ())
    before = tr.memory().peak_bytes
    plan = tr.checkpoint_plan(int(before * share))
    assert plan.peak_bytes_before == before == pytest.approx(peak_of(model, x), rel=0.1)
    assert plan.peak_bytes <= before * share
    wanted = [p.clone() for p in model.state_dict().values()]
    plan.apply(model)
    assert peak_of(model, x) == pytest.approx(plan.peak_bytes, rel=0.1)
    assert all(map(torch.equal, model.state_dict().values(), wanted))
    assert list(model.state_dict())[2] == "1.norm.weight"


class Inside(nn.Module):
    """A container of containers: to checkpoint one of these makes all inside again at once."""

    def __init__(self, model):
        super().__init__()
        self.first, self.model = nn.Linear(32, 32), nn.Sequential(nn.Sequential(model))

    def forward(self, x):
        return self.model(self.first(x))


@pytest.mark.parametrize("make", [blocks, lambda: Inside(blocks()), lambda: Inside(Inside(blocks(3)))])
def test_a_plan_is_as_good_as_all_calls_of_a_class(make):
    model, x = make(), torch.randn(256, 32)
    tr = st.trace(lambda: model(x).logsumexp(1).sum().backward(), ())
    tape = program_of(tr).as_run
    _, storages = storages_of(tape)
    candidates = list(checkpoints._candidates(program_of(tr), tape, storages))
    for chain in checkpoints._by_class(candidates):
        by_hand = checkpoints._Search(tape, storages, 0).peak(chain)
        plan = tr.checkpoint_plan(by_hand)
        assert plan.peak_bytes <= by_hand
        assert plan.flops <= sum(c.flops for c in chain)


def test_the_lowest_peak_of_all_choices():
    """Of two blocks in a container, each choice of calls of which none is inside another is tried beside the plan."""
    model, x = Inside(nn.Sequential(Block(32), Block(32), nn.Linear(32, 10))), torch.randn(256, 32)
    tr = st.trace(lambda: model(x).logsumexp(1).sum().backward(), ())
    tape = program_of(tr).as_run
    _, storages = storages_of(tape)
    candidates = list(checkpoints._candidates(program_of(tr), tape, storages))
    assert len(candidates) < 14
    peaks = set()
    for chosen in itertools.product((False, True), repeat=len(candidates)):
        calls = list(itertools.compress(candidates, chosen))
        if not any(a is not b and a.is_in(b) for a in calls for b in calls):
            peaks.add(checkpoints._Search(tape, storages, 0).peak(calls))
    assert tr.checkpoint_plan(min(peaks)).peak_bytes == min(peaks)


class Checkpointed(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.body, self.p = nn.ModuleList(Block(32) for _ in range(6)), p

    def forward(self, x):
        for block in self.body:
            x = torch.utils.checkpoint.checkpoint(lambda x, b=block: F.dropout(b(x), self.p), x, use_reentrant=False)
        return x


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_the_memory_of_a_checkpointed_step_says_what_eager_needs(p):
    model, x = Checkpointed(p), torch.randn(256, 32)
    memory = st.trace(lambda: model(x).logsumexp(1).sum().backward(), ()).memory()
    assert memory.eager_peak_bytes == pytest.approx(peak_of(model, x), rel=0.05)
    assert (memory.eager_peak_bytes == memory.peak_bytes) == (p == 0)
    assert ("that is the trace's own peak; eager" in str(memory)) == (p > 0)


def test_a_step_that_fits_needs_no_checkpoints():
    model, x = blocks(1), torch.randn(4, 32)
    plan = st.trace(lambda x: model(x).sum().backward(), (x,)).checkpoint_plan(10**9)
    assert (plan.fqns, plan.flops) == ((), 0)


def test_text_of_a_plan():
    model = nn.Sequential(Block(32), Block(32))
    tr = st.trace(lambda x: model(x).sum().backward(), (torch.randn(256, 32),))
    assert str(tr.checkpoint_plan(550_000)) == ("peak 643 kB -> 478 kB, 4.19 MFLOP computed twice\n  model.0")


def test_budgets_that_are_not_reached():
    model = blocks(2)
    tr = st.trace(lambda x: model(x).sum().backward(), (torch.randn(8, 32),))
    with pytest.raises(st.ArgumentError, match="checkpoints bring the peak down to"):
        tr.checkpoint_plan(10)


def test_a_forward_has_no_plan():
    with pytest.raises(st.ArgumentError, match="trace a function that calls backward"):
        st.trace(nn.ReLU(), (torch.ones(1),)).checkpoint_plan(10)


def test_a_plan_of_another_model():
    model, x = blocks(4), torch.randn(256, 32)
    tr = st.trace(lambda x: model(x).sum().backward(), (x,))
    plan = tr.checkpoint_plan(int(tr.memory().peak_bytes * 0.9))
    with pytest.raises(st.ArgumentError, match="is no module of this model"):
        plan.apply(blocks(2))
