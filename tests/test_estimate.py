"""`st.estimate`: what a model needs, beside what eager needs where a dispatch mode counts the storages that live."""

import json

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from test_memory import Block, Convolutions
from torch import nn

import scopetrace as st
from benchmarks.steps import LiveStorages, storage_key
from scopetrace.cli import main


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.unused = nn.Embedding(99, 32), nn.Linear(32, 99, bias=False), nn.Linear(50, 50)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(32) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x


def frozen():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    return model


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10)), (512, 32)),
    "wide, small batch": (lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))), (1, 256)),
    "blocks": (lambda: nn.Sequential(Block(32), Block(32), nn.Linear(32, 10)), (256, 32)),
    "convolutions": (Convolutions, (4, 3, 16, 16)),
    "in place": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Dropout(0.1)), (4, 3, 16, 16)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (4, 16, 32)),
    "fused attention": (Attention, (2, 128, 64)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 1000)), None),
    "tied, and one not used": (Tied, None),
    "frozen": (frozen, (32, 64)),
    "checkpointed": (Checkpointed, (128, 32)),
}
OPTIMIZERS = {"sgd": torch.optim.SGD, "AdamW": torch.optim.AdamW, "adagrad": torch.optim.Adagrad}


def bytes_of(tensors):
    return sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())


def measured(model, x, optimizer=None, *, step=True):
    """The peak of the second step in eager, parameters and all that is there before included."""

    def run():
        if not step:
            with torch.no_grad():
                model(x)
            return
        model(x).float().sum().backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()

    run()
    state = [] if optimizer is None else [t for entries in optimizer.state.values() for t in entries.values()]
    held = [x, *model.parameters(), *model.buffers(), *state]
    with LiveStorages(held) as live:
        run()
    return live.peak + bytes_of(held)


def example(name):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    return make(), torch.randn(shape) if shape else torch.randint(0, 99, (2, 8))


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*((name, "AdamW") for name in MODELS), ("linear", None), ("wide, small batch", "sgd"), ("blocks", "adagrad")],
)
def test_the_peak_of_a_step_is_that_of_eager(name, optimizer):
    model, x = example(name)
    estimated = st.estimate(model, (x,), optimizer=optimizer)
    eager = None if optimizer is None else OPTIMIZERS[optimizer](model.parameters())
    assert estimated.peak_bytes == pytest.approx(measured(model, x, eager), rel=0.05)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["blocks", "wide, small batch"])
def test_in_another_dtype_and_with_the_optimizer_of_a_gpu(name):
    model, x = example(name)
    before = {key: t.clone() for key, t in model.state_dict().items()}
    estimated = st.estimate(model, x, dtype=torch.bfloat16, optimizer="adamw", gpu_bytes=10**9)
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())
    model.to(torch.bfloat16)
    eager = torch.optim.AdamW(model.parameters(), foreach=True)
    assert estimated.peak_bytes == pytest.approx(measured(model, x.bfloat16(), eager), rel=0.05)
    assert estimated.fits
    assert estimated.optimizer_bytes == pytest.approx(2 * estimated.parameter_bytes, rel=0.01)


@pytest.mark.parametrize("name", ["linear", "convolutions", "tied, and one not used"])
def test_the_peak_of_an_inference_is_that_of_eager(name):
    model, x = example(name)
    estimated = st.estimate(model.eval(), (x,), step=False)
    assert estimated.peak_bytes == pytest.approx(measured(model, x, step=False), rel=0.05)
    assert estimated.gradient_bytes == estimated.optimizer_bytes == estimated.saved_bytes == 0


def test_a_meta_model_needs_what_a_real_one_needs():
    model, x = example("fused attention")
    wanted = st.estimate(model, (x,), optimizer="adamw")
    assert st.estimate(model.to("meta"), (x.to("meta"),), optimizer="adamw") == wanted


def test_a_model_larger_than_any_machine():
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(2**16, 2**16, bias=False) for _ in range(8))), torch.empty(1, 2**16)
    estimated = st.estimate(model, (x,), optimizer="adam")
    assert estimated.parameter_bytes == estimated.gradient_bytes == 8 * 4 * 2**32
    assert estimated.flops == 8 * 3 * 2 * 2**32 - 2 * 2**32  # of the input there is no gradient


def test_text():
    model, x = example("wide, small batch")
    estimated = st.estimate(model, (x,), optimizer="adamw", gpu_bytes=2_500_000)
    assert str(estimated).splitlines()[:-1] == [
        "module       parameters  saved    peak     FLOPs",
        "Sequential   790 kB      2.05 kB  3.16 MB  1.05 M",
        "  Linear[0]  263 kB      1.02 kB  3.16 MB  262 k",
        "  Linear[1]  263 kB      1.02 kB  2.90 MB  393 k",
        "  Linear[2]  263 kB      -        2.63 MB  393 k",
        "",
        "parameters 790 kB, inputs 1.02 kB, optimizer state 1.58 MB, gradients 790 kB, saved for backward 2.05 kB",
        "peak 3.95 MB with all of these, in the step of the optimizer; 1.05 MFLOP",
        "does not fit into 2.50 MB",
        "would fit: FSDP2 over 2 ranks: 2.37 MB on each",
    ]
    assert str(estimated).splitlines()[-1].startswith("not counted, of a GPU: the CUDA context, what the caching")


def blocks():
    return nn.Sequential(nn.Linear(32, 32), *(Block(32) for _ in range(6)), nn.Linear(32, 10))


def test_checkpoints_that_make_it_fit():
    model, x = blocks(), torch.randn(256, 32)
    needs = st.estimate(model, (x,)).peak_bytes
    (remedy, *_) = st.estimate(model, (x,), gpu_bytes=int(needs * 0.7)).remedies
    assert remedy.ranks == 1
    for name in remedy.checkpoints:
        parent, _, leaf = name.rpartition(".")
        block = torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper(
            model.get_submodule(name)
        )
        setattr(model.get_submodule(parent), leaf, block)
    assert measured(model, x) == pytest.approx(remedy.peak_bytes, rel=0.05)


def test_ranks_that_make_it_fit():
    model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(40))), torch.randn(1, 256)
    estimated = st.estimate(model, (x,), optimizer="adamw", gpu_bytes=12_000_000)
    assert not estimated.fits
    (remedy,) = estimated.remedies
    assert remedy.ranks == 8
    assert 40 * 2**18 * 4 / 8 < remedy.peak_bytes < 12_000_000


def test_both_that_make_it_fit():
    model, x = nn.Sequential(*(Block(64) for _ in range(8))), torch.randn(1024, 64)
    (remedy,) = st.estimate(model, (x,), optimizer="adamw", gpu_bytes=8_000_000).remedies
    assert remedy.ranks > 1
    assert remedy.checkpoints
    assert remedy.peak_bytes <= 8_000_000


def test_nothing_makes_it_fit():
    model, x = example("convolutions")
    estimated = st.estimate(model, (x,), gpu_bytes=1000)
    assert estimated.remedies == ()
    assert "neither checkpoints nor FSDP2 over 1024 ranks make it fit: take smaller inputs" in str(estimated)


def test_a_loss_is_a_name_or_a_function():
    model, x = example("linear")
    target = torch.zeros(512, dtype=torch.int64)
    with_loss = st.estimate(model, (x,), loss=lambda out: F.cross_entropy(out, target))
    assert with_loss.saved_bytes > st.estimate(model, (x,)).saved_bytes
    with pytest.raises(st.ArgumentError, match="loss nll: the model's result has no such tensor"):
        st.estimate(model, (x,), loss="nll")


WRONG = {
    "no optimizer of a step": ({"optimizer": "lbfgs"}, r"optimizer lbfgs: give one of .*, adamw, "),
    "an optimizer of the model": (
        {"optimizer": torch.optim.AdamW(nn.Linear(2, 2).parameters())},
        r"optimizer= makes one: write lambda params: AdamW\(params, ...\)",
    ),
    "a step that reads values": ({"optimizer": "asgd"}, "ASGD takes no step on meta tensors: .*item"),
    "a step with a closure": ({"optimizer": torch.optim.LBFGS}, "LBFGS takes no step on meta tensors: .*closure"),
    "no optimizer": ({"optimizer": list}, "list takes no step on meta tensors"),
    "of a step": ({"step": False, "optimizer": "sgd"}, "of a training step"),
    "a loss of many": ({"loss": lambda out: out}, "the loss is not one float that requires grad: name one"),
    "a loss without history": ({"loss": lambda out: out.detach().sum()}, "the loss is not one float"),
    "nothing to train": ({"model": nn.ReLU()}, "the loss is not one float"),
    "no loss": ({"loss": lambda out: None}, "the loss is not one float"),
    "a dtype by name": ({"dtype": "bf16"}, "dtype='bf16': give one of floating point, such as torch.bfloat16"),
    "a dtype of integers": ({"dtype": torch.int8}, "dtype=torch.int8: give one of floating point"),
    "bytes as text": ({"gpu_bytes": "80GB"}, r"gpu_bytes='80GB': give a number, such as 80 \* 10\*\*9"),
    "a misspelt argument": ({"optimiser": "sgd"}, "st.estimate has no argument optimiser=: write optimizer="),
    "a lazy module": ({"model": nn.LazyBatchNorm1d()}, "a lazy module has no parameters yet"),
    "no module": ({"model": torch.relu}, "takes a torch.nn.Module, not builtin_function_or_method"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_do_not_fit(name):
    options, message = WRONG[name]
    with pytest.raises(st.ScopetraceError, match=message):
        st.estimate(**{"model": nn.Linear(4, 2), "args": torch.ones(3, 4), **options})


def test_an_optimizer_of_ones_own():
    model, x = example("linear")
    estimated = st.estimate(model, (x,), optimizer=lambda params: torch.optim.SGD(params, momentum=0.9))
    assert estimated.optimizer_bytes == estimated.parameter_bytes


def run(*arguments):
    return CliRunner().invoke(main, ["estimate", "torch.nn:ReLU", "-i", "0=4x4", *arguments])


def test_the_command():
    assert "fits into 1.07 GB" in run("--inference", "--gpu", "1GiB").stdout
    assert json.loads(run("--inference", "--json", "--dtype", "bf16").stdout)["peak_bytes"] == 64
    assert run("--gpu", "1 elephant").exit_code == 2
    assert run("--inference", "--optimizer", "sgd").exit_code == 2
