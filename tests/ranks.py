"""What each of two ranks runs in tests/test_distributed.py: models sharded by plan beside the same in one process.

    torchrun --nproc-per-node 2 tests/ranks.py JOB [MODEL ...]      (or processes.on_two_ranks)

Prints one line of JSON on rank 0.
"""

import contextlib
import copy
import json
import sys

import torch
import torch.distributed as dist
from processes import join_ranks, leave_ranks
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as engine

import scopetrace as st

F = nn.functional


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(width), Attention(width, 2)
        self.norm2, self.mlp = nn.RMSNorm(width), SwiGLU(width)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Embedding, layers, norm and head, as in Llama; `order` says which layers run in which order."""

    def __init__(self, order=(0, 1, 2, 3), tied=False, width=16, words=32):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(max(order) + 1))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)
        self.run_order = order
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for i in self.run_order:
            x = self.layers[i](x)
        return self.head(self.norm(x))


class Borrowed(nn.Module):
    """Uses the weight of a layer without calling it, before it calls another one."""

    def __init__(self):
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, ids):
        x = self.a(self.embed(ids))
        return self.head(F.linear(torch.tanh(x), self.b.weight, self.b.bias) + x)


class Given(nn.Module):
    """Gives a weight of one module to another one."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), Head()

    def forward(self, ids):
        return self.head(self.embed(ids), self.embed.weight)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x, weight):
        return F.linear(self.fc(x), weight)


class Swapped(nn.Module):
    """Calls a layer with a weight of its own in the place of the layer's."""

    def __init__(self):
        super().__init__()
        self.embed, self.a, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)
        self.weight = nn.Parameter(torch.rand(16, 16))

    def forward(self, ids):
        return self.head(torch.func.functional_call(self.a, {"weight": self.weight}, self.embed(ids)))


class Branches(nn.Module):
    """Two layers in the branches of a `torch.cond`."""

    def __init__(self):
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(torch.cond(x.sum() < 1e9, self.a, self.b, (x,)))


class Blocks(nn.Module):
    """Four linear blocks between embedding and head; `run` says how they run."""

    def __init__(self, run):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.run = run

    def forward(self, ids):
        return self.head(self.run(*self.blocks, self.embed(ids)))


class Block(nn.Module):
    """Gives its result, and one that is ready before its second layer runs."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.skip = SwiGLU(16), nn.Linear(16, 16), nn.Identity()

    def forward(self, x):
        early = self.up(x)
        return x + self.down(torch.relu(early)), early


def parallel(a, b, c, d, x):
    left, right = a(x)[0], b(x)[0]
    return d(c(left)[0] * right)[0]


def without_gradient(a, b, c, d, x):
    """The second block's result is detached, the third's is not used, and the fourth runs under no_grad."""
    y = a(x)[0]
    c(y)
    with torch.no_grad():
        z = d(y)[0]
    return y + b(y)[0].detach() + z


def two_results(a, b, c, d, x):
    early = []
    for block in (a, b, c, d):
        x, other = block(x)
        early.append(other)
    return x + sum(early)


def early_result(a, b, c, d, x):
    for block in (a, b, c, d):
        x = block(x)[1]
    return x


def together(a, b, c, d, x):
    def run(x):
        return c(b(a(x)[0])[0])[0]

    return d(torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False))[0]


def apart(a, b, c, d, x):
    for block in (a, b, c, d):
        x = torch.utils.checkpoint.checkpoint(lambda x, block=block: block(x)[0], x, use_reentrant=False)
    return x


def called_twice(a, b, c, d, x):
    """The second call of the first block has no part in the result."""
    y = c(b(a(x)[0])[0])[0]
    a(y)
    return d(y)[0]


MODELS = {
    "llama": (Llama, dict(classes=Layer)),
    "llama, two ahead": (Llama, dict(classes=Layer, prefetch=2)),
    "llama, by bytes": (Llama, dict(target_bytes=8_000)),
    "llama, without prefetch": (Llama, dict(classes=Layer, prefetch=0)),
    "tied": (lambda: Llama(tied=True), dict(classes=Layer)),
    "tied, by bytes": (lambda: Llama(tied=True), dict(target_bytes=8_000)),
    "called twice": (lambda: Llama(order=(3, 1, 0, 1, 2)), dict(classes=Layer)),
    "called twice, two ahead": (lambda: Llama(order=(3, 1, 0, 1, 2)), dict(classes=Layer, prefetch=2)),
    "nested": (Llama, dict(classes=(Layer, SwiGLU))),
    "borrowed": (Borrowed, dict(classes=nn.Linear)),
    "given": (Given, dict(classes=(nn.Embedding, Head))),
    "swapped": (Swapped, dict(classes=nn.Linear)),
    "branches": (Branches, dict(target_bytes=2200)),
}
STEPS = {
    "llama": MODELS["llama, two ahead"],
    "llama, by bytes": MODELS["llama, by bytes"],
    "called twice": MODELS["called twice"],
    "nested": MODELS["nested"],
    "tied": MODELS["tied"],
    **{
        f"{run.__name__}, {what}": (lambda run=run: Blocks(run), options)
        for run in (parallel, without_gradient, two_results, early_result, together, apart, called_twice)
        for what, options in {
            "blocks": dict(classes=Block, prefetch=2),
            "nested": dict(classes=(Block, SwiGLU)),
            "layers": dict(classes=(SwiGLU, nn.Linear), prefetch=2),
            "without prefetch": dict(classes=(Block, SwiGLU), prefetch=0),
        }.items()
    },
}
"""What is planned from a trace of a training step."""
MODELS |= {f"step of {name}": found for name, found in STEPS.items()}


def loss_of(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@contextlib.contextmanager
def gathers_noted(into):
    """Every all-gather that FSDP2 issues, by the parameters' group."""
    issue = engine.FSDPParamGroup.unshard

    def unshard(group, *args, **kwargs):
        before = group._all_gather_result
        issue(group, *args, **kwargs)
        if group._all_gather_result is not before:
            into.append(group._module_fqn)

    engine.FSDPParamGroup.unshard = unshard
    try:
        yield
    finally:
        engine.FSDPParamGroup.unshard = issue


def order_of(make, is_step):
    """The order of a forward on the meta device, or of a training step."""

    def step(ids):
        loss = loss_of(traced, ids)
        loss.backward()
        return loss

    with torch.device("meta"):
        traced = make()
        args = (torch.empty(2, 9 if is_step else 8, dtype=torch.int64),)
    return st.trace(step if is_step else traced, args).order


def traced_again(model, ids):
    """What a trace of a sharded model says."""
    try:
        st.trace(model, (ids,))
    except st.UnsupportedOpError as error:
        return str(error)


def train(name, mesh):
    """Three steps by plan and in one process: the largest differences, and the all-gathers."""
    make, options = MODELS[name]
    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model)
    ids = torch.randint(32, (3, 4, 9))
    mine = ids.chunk(2, dim=1)[dist.get_rank()]
    plan = st.distributed.plan(model, order_of(make, is_step=name.startswith("step of")), **options)
    plan.apply(mesh)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, alone)]
    result = {"loss": 0.0, "grad": 0.0, "gathers": [], "traced": traced_again(model, mine[0][:, :-1])}
    for step in range(3):
        seen = []
        with gathers_noted(seen):
            loss = loss_of(model, mine[step])
            seen.append("|")
            loss.backward()
        expected = loss_of(alone, ids[step])
        expected.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        result["loss"] = max(result["loss"], float((total / 2 - expected).detach().abs()))
        for (_, p), (_, q) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
            grad = torch.zeros_like(q) if p.grad is None else p.grad.full_tensor()
            other = torch.zeros_like(q) if q.grad is None else q.grad
            result["grad"] = max(result["grad"], float((grad - other).abs().max()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        result["gathers"].append(seen)
    names = {g.modules: ", ".join(n for n, _ in model.named_modules() if n in g.modules) for g in plan.groups}
    result["planned"] = [names[g] for g in plan.forward_gathers] + ["|"] + [names[g] for g in plan.backward_gathers]
    return result


def pipeline(make, balance):
    """Two stages, two micro-batches: the largest difference to the model in one process, and where it was cut."""
    torch.manual_seed(0)
    model = make()
    ids = torch.randint(32, (4, 8))
    micro = ids.chunk(2)[0]
    points = st.distributed.split_points(st.trace(model, (micro,)), 2, balance)
    expected = model(ids)
    stages = pipelining.pipeline(model, (micro,), split_spec=points)
    stage = stages.build_stage(dist.get_rank(), torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, 2)
    out = schedule.step(ids) if dist.get_rank() == 0 else schedule.step()
    error = [None if out is None else float((out - expected).detach().abs().max())]
    dist.broadcast_object_list(error, src=1)
    return {"error": error[0], "stages": stages.num_stages, "cuts": list(points), "crossing": points.crossing_bytes}


def disagree():
    """Rank 1 runs its layers the other way around."""
    model = Llama(order=(0, 1) if dist.get_rank() == 0 else (1, 0))
    order = st.trace(model, (torch.zeros(1, 4, dtype=torch.int64),)).order
    st.distributed.plan(model, order, classes=Layer).apply(dist.device_mesh.init_device_mesh("cpu", (2,)))


def plans():
    """Rank 1 makes another plan of the same order."""
    model = Llama()
    order = st.trace(model, (torch.zeros(1, 4, dtype=torch.int64),)).order
    options = dict(classes=Layer, prefetch=0) if dist.get_rank() == 0 else dict(target_bytes=2200, prefetch=0)
    st.distributed.plan(model, order, **options).apply()


def twice(mesh):
    """A layer that is sharded already."""
    model = Llama()
    order = st.trace(model, (torch.zeros(1, 4, dtype=torch.int64),)).order
    planned = st.distributed.plan(model, order, classes=Layer)
    fully_shard(model.layers[0], mesh=mesh)
    planned.apply(mesh)


def fail(mesh):
    """Rank 1 raises in the second layer, while rank 0 waits for it in an all-gather."""
    model = Llama()
    order = st.trace(model, (torch.zeros(1, 4, dtype=torch.int64),)).order
    st.distributed.plan(model, order, classes=Layer).apply(mesh)
    if dist.get_rank() == 1:
        model.layers[1].register_forward_pre_hook(lambda module, args: 1 / 0)
    model(torch.zeros(1, 4, dtype=torch.int64))


def run(job, *names):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    if job == "train":
        return {name: train(name, mesh) for name in names}
    if job == "pipeline":
        models = {
            "llama": Llama,
            "tied": lambda: Llama(tied=True).requires_grad_(False),
            "three layers": lambda: Llama(order=(0, 1, 2)),
        }
        return {
            f"{name}, {b}": pipeline(make, b) for name, make in models.items() for b in ("params", "flops", "bytes")
        }
    return {"disagree": disagree, "plans": plans, "twice": lambda: twice(mesh), "fail": lambda: fail(mesh)}[job]()


if __name__ == "__main__":
    join_ranks()
    torch.set_num_threads(1)
    found = run(*sys.argv[1:])
    if dist.get_rank() == 0:
        print(json.dumps(found))
    leave_ranks()
