"""Random programs of views, in-place ops and results that are aliases do what they do in eager, and write nothing.

A program is a list of steps over a pool of tensors, the inputs first. Numbers in a step are taken modulo what there is,
so that any step fits any pool. One that eager refuses, or whose result depends on the order in which elements are
visited, is left out before the program runs.
"""

import dataclasses

import pytest
import torch
from compare import assert_like_eager, tensors
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as some
from purity import assert_pure
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import scopetrace as st
from scopetrace.program.check import copy_inputs

F = nn.functional
MOST = 200  # elements of a tensor

# t is the tensor of the step, u one of the same shape and dtype (maybe t itself), d a dimension of t, n its size there,
# i an index into that dimension and k a number from 0 to 5.
VIEWS = {
    "select": lambda t, d, n, i, k: t.select(d, i),
    "slice": lambda t, d, n, i, k: t.narrow(d, i, 1 + k % (n - i)),
    "step": lambda t, d, n, i, k: t[(slice(None),) * d + (slice(i, None, 1 + k % 2),)],
    "transpose": lambda t, d, n, i, k: t.transpose(d, k % t.dim()),
    "movedim": lambda t, d, n, i, k: t.movedim(d, k % t.dim()),
    "unsqueeze": lambda t, d, n, i, k: t.unsqueeze(d),
    "squeeze": lambda t, d, n, i, k: t.squeeze(d) if k % 2 else t.squeeze(),
    "view": lambda t, d, n, i, k: t.view(-1),
    "reshape": lambda t, d, n, i, k: t.reshape(n, -1),
    "flatten": lambda t, d, n, i, k: t.flatten(),
    "unflatten": lambda t, d, n, i, k: t.unflatten(d, (-1, 2)),
    "chunk": lambda t, d, n, i, k: t.chunk(2, d)[-1],
    "split": lambda t, d, n, i, k: t.split(1 + i, d)[0],
    "unbind": lambda t, d, n, i, k: t.unbind(d)[i],
    "diagonal": lambda t, d, n, i, k: t.diagonal(k % 3 - 1),
    "expand": lambda t, d, n, i, k: t.expand(2, *t.shape),
    "unfold": lambda t, d, n, i, k: t.unfold(d, 1 + i, 1 + k % 2),
    "view_as": lambda t, d, n, i, k: t.view_as(t),
    "detach": lambda t, d, n, i, k: t.detach(),
    "to": lambda t, d, n, i, k: t.to(torch.float32),
    "contiguous": lambda t, d, n, i, k: t.contiguous(),
    "itself": lambda t, d, n, i, k: t,
    "bits": lambda t, d, n, i, k: t.view(torch.int32),
    "as_strided": lambda t, d, n, i, k: whole(t).as_strided((2, 2), (1 + k % 2, 1), i % 2),
}
FRESH = {
    "clone": lambda t, u, k: t.clone(),
    "add": lambda t, u, k: t + u,
    "mul": lambda t, u, k: t * 2,
    "where": lambda t, u, k: torch.where(t > 0, t, u),
    "cat": lambda t, u, k: torch.cat([t, u]),
    "sum": lambda t, u, k: t.sum(0),
    "full_like": lambda t, u, k: torch.full_like(t, k),
    "zeros": lambda t, u, k: torch.zeros(2, 1 + k),
}
IN_PLACE = {
    "add_": lambda t, u, d, i, k: t.add_(u),
    "sub_": lambda t, u, d, i, k: t.sub_(k),
    "mul_": lambda t, u, d, i, k: t.mul_(u),
    "relu_": lambda t, u, d, i, k: F.relu(t, inplace=True),
    "hardtanh": lambda t, u, d, i, k: F.hardtanh(t, -1, k, True),
    "zero_": lambda t, u, d, i, k: t.zero_(),
    "fill_": lambda t, u, d, i, k: t.fill_(k),
    "copy_": lambda t, u, d, i, k: t.copy_(u),
    "broadcast": lambda t, u, d, i, k: t.copy_(u.clone()[0]),
    "cast": lambda t, u, d, i, k: t.copy_(u.double()),
    "clamp_": lambda t, u, d, i, k: t.clamp_(-k, k),
    "neg_": lambda t, u, d, i, k: t.neg_(),
    "triu_": lambda t, u, d, i, k: t.triu_(),
    "cumsum_": lambda t, u, d, i, k: t.cumsum_(d),
    "lerp_": lambda t, u, d, i, k: t.lerp_(u, 0.5),
    "addcmul_": lambda t, u, d, i, k: t.addcmul_(u, u, value=2),
    "masked_fill_": lambda t, u, d, i, k: t.masked_fill_(u > 0, k),
    "masked_scatter_": lambda t, u, d, i, k: t.masked_scatter_(u > 0, u.clone()),
    "index_fill_": lambda t, u, d, i, k: t.index_fill_(d, torch.tensor([i]), k),
    "index_add_": lambda t, u, d, i, k: t.index_add_(d, torch.arange(t.size(d)), u.clone()),
    "index_copy_": lambda t, u, d, i, k: t.index_copy_(d, torch.arange(t.size(d) - 1, -1, -1), u.clone()),
    "index_put_": lambda t, u, d, i, k: t.index_put_((torch.tensor([0, 0]),), t.new_full((), k), k % 2 == 1),
    "scatter_": lambda t, u, d, i, k: t.scatter_(d, torch.zeros([1] * t.dim(), dtype=torch.long), k),
    "setitem": lambda t, u, d, i, k: t.__setitem__((..., k % t.size(-1)), k),
    "set_slice": lambda t, u, d, i, k: t.__setitem__(slice(i, None), u[i:] * 2),
    "set_where": lambda t, u, d, i, k: t.__setitem__(t > 0, -k),
    "set_index": lambda t, u, d, i, k: t.__setitem__(torch.tensor([0, t.size(0) - 1]), k),
    "iadd": lambda t, u, d, i, k: t.__iadd__(u),
    "foreach": lambda t, u, d, i, k: torch._foreach_mul_([t], 2),
    "data": lambda t, u, d, i, k: t.data.add_(k),
    "out": lambda t, u, d, i, k: torch.add(t, u, out=t),
    "out_part": lambda t, u, d, i, k: torch.exp(u[:1], out=t[:1]),
    "cumsum_out": lambda t, u, d, i, k: torch.cumsum(u, d, out=t),
    "transpose_": lambda t, u, d, i, k: t.transpose_(d, k % t.dim()),
    "unsqueeze_": lambda t, u, d, i, k: t.unsqueeze_(0),
    "squeeze_": lambda t, u, d, i, k: t.squeeze_(),
}
OPS = [*VIEWS, *VIEWS, *FRESH, *IN_PLACE, *IN_PLACE]


@dataclasses.dataclass(frozen=True)
class Step:
    """One op on the `on`-th tensor of the pool, modulo its length; `other` picks the second tensor."""

    op: str
    on: int
    other: int
    d: int
    i: int
    k: int

    def apply(self, pool):
        """Run it; what it makes joins the pool."""
        t = pool[self.on % len(pool)]
        fit = [u for u in pool if u.shape == t.shape and u.dtype == t.dtype]
        u = fit[self.other % len(fit)]
        if self.op in FRESH:
            pool.append(FRESH[self.op](t, u, self.k))
            return
        d = self.d % t.dim()
        i = self.i % t.size(d)
        if self.op in VIEWS:
            pool.append(VIEWS[self.op](t, d, t.size(d), i, self.k))
            return
        IN_PLACE[self.op](t, u, d, i, self.k)

    def is_defined(self, pool):
        """Whether the memory that it writes has each element once, and nothing in part that it reads."""
        if self.op not in IN_PLACE:
            return True
        t = pool[self.on % len(pool)]
        fit = [u for u in pool if u.shape == t.shape and u.dtype == t.dtype]
        u = fit[self.other % len(fit)]
        apart = places(t).isdisjoint(places(u)) or (t.stride(), t.storage_offset()) == (u.stride(), u.storage_offset())
        return len(places(t)) == t.numel() and (apart or t.untyped_storage()._cdata != u.untyped_storage()._cdata)


def places(t):
    """Where the elements of a tensor lie in its memory."""
    size = t.untyped_storage().nbytes() // t.element_size()
    return set(torch.arange(size).as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist())


def whole(t):
    """A tensor, if it has all of its memory in order: as_strided reaches what no tensor has otherwise."""
    if not t.is_contiguous() or t.numel() * t.element_size() != t.untyped_storage().nbytes():
        raise ValueError("not the whole of its memory")
    return t


@dataclasses.dataclass(frozen=True)
class Program:
    """Called with the inputs, it runs the steps and returns some of the pool."""

    steps: tuple[Step, ...]
    returned: tuple[int, ...]

    def __call__(self, *inputs):
        pool = list(inputs)
        for step in self.steps:
            step.apply(pool)
        return [pool[r % len(pool)] for r in self.returned]

    def valid(self, inputs):
        """The program without the steps that eager refuses, or that have no defined result."""
        kept = ()
        for step in self.steps:
            pool = list(copy_inputs(inputs))
            for earlier in kept:
                earlier.apply(pool)
            try:
                if not step.is_defined(pool):
                    continue
                step.apply(pool)
            except (RuntimeError, IndexError, ValueError, ZeroDivisionError):
                continue
            if 0 < pool[-1].numel() <= MOST and pool[-1].dim() < 6:
                kept += (step,)
        return Program(kept, self.returned)


def inputs(kinds, seed):
    """Two to four tensors, some strided, some views of an earlier one."""
    made = []
    generator = torch.Generator().manual_seed(seed)
    for kind in kinds:
        x = torch.randint(-8, 9, (4, 6), generator=generator) / 4
        made.append(KINDS[kind](x, made[0] if made else x))
    return tuple(made)


KINDS = {
    "rows": lambda x, first: x[:3, :4].clone(),
    "turned": lambda x, first: x[:4, :3].t(),
    "holes": lambda x, first: x[:3, ::2],
    "cube": lambda x, first: x.view(2, 3, 4),
    "vector": lambda x, first: x[1],
    "double": lambda x, first: x[:3, :4].double(),
    "whole": lambda x, first: (x * 4).long()[:3, :4].clone(),
    "first": lambda x, first: first,
    "part": lambda x, first: first[1:],
    "turned_first": lambda x, first: first.transpose(0, -1),
}

number = some.integers(0, 5)
step = some.builds(Step, some.sampled_from(OPS), *[some.integers(0, 11)] * 2, number, number, number)
programs = some.builds(
    Program,
    some.lists(step, min_size=4, max_size=12).map(tuple),
    some.lists(some.integers(0, 15), min_size=1, max_size=5).map(tuple),
)
kinds = some.lists(some.sampled_from(sorted(KINDS)), min_size=2, max_size=4)
options = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


def check(program, kinds, make):
    args = inputs(kinds, 0)
    program = program.valid(args)
    note(f"{program} on {kinds}")
    made = make(program, args)
    assert_pure(made.graph_module)
    for seed in (0, 1):
        assert_like_eager(program, made, inputs(kinds, seed))


@settings(max_examples=30, **options)
@given(programs, kinds)
def test_traces_do_what_eager_does(program, kinds):
    check(program, kinds, lambda fn, args: st.trace(fn, copy_inputs(args)))


@pytest.mark.parametrize("level", ["aten", "torch"])
@settings(max_examples=12, **options)
@given(programs, kinds)
def test_functionalized_graphs_do_what_eager_does(level, program, kinds):
    def make(fn, args):
        gm = make_fx(fn)(*copy_inputs(args))
        return st.functionalize(gm, copy_inputs(args), level=level)

    check(program, kinds, make)


def leaves(given):
    """Copies that share no memory, those of real numbers as leaves of a graph of gradients."""
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in given]


def gradients(run, leaves):
    """Of what the program returns and of what it changed, each element with another weight; None if nothing has any."""
    torch.manual_seed(0)
    results = [t for t in tensors(run(*leaves)) if t.requires_grad]
    if not results:
        return None
    weighted = sum((t * torch.arange(1.0, t.numel() + 1).view(t.shape).cos()).sum() for t in results)
    return torch.autograd.grad(
        weighted, [t for t in leaves if t.requires_grad], allow_unused=True, materialize_grads=True
    )


@settings(max_examples=60, **options)
@given(programs, kinds)
def test_gradients_are_those_of_eager(program, kinds):
    program = program.valid(inputs(kinds, 0))
    note(f"{program} on {kinds}")

    def run(*given):
        args = [t * 1 for t in given]
        return program(*args), args

    try:
        expected = gradients(run, leaves(inputs(kinds, 1)))
    except RuntimeError:  # it overwrites what the backward pass needs
        assume(False)
    traced = st.trace(run, tuple(leaves(inputs(kinds, 0))))
    torch.testing.assert_close(gradients(traced, leaves(inputs(kinds, 1))), expected, equal_nan=True)
