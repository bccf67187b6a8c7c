"""Values and sizes that depend on data: small programs against eager, and against the ops that torch.export records."""

import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import sym_and

import scopetrace as st

EXAMPLE = torch.tensor([1.0, -1.0, 2.0, 0.0, 3.0]), torch.tensor(2)
OTHERS = [
    (torch.tensor([1.0, 2.0, 2.0, -1.0, 3.0]), torch.tensor(3)),
    (torch.tensor([2.0, 3.0, 3.0, 2.0, 4.0]), torch.tensor(0)),
    (torch.tensor([2.0, 1.0, -3.0, 2.0, 4.0]), torch.tensor(4)),
]


def upto(n, x):
    """A number from 0 to the length of x."""
    k = n.item()
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    return k


def at(n, x):
    """A place in x."""
    k = n.item()
    torch._check(k >= 0)
    torch._check(k < x.shape[0])
    return k


def returns_numbers(x, n):
    return n.item(), x.sum().item(), (x > 0).any().item()


def lists_numbers(x, n):
    a, b = torch.stack([n, n + 1]).tolist()
    return x * a + b


def truncates(x, n):
    half = x.sum().item() / 4
    return x * math.trunc(half), x * math.floor(half), x * math.ceil(-half)


def makes_tensors(x, n):
    k = upto(n, x)
    return torch.zeros(k, 2), torch.arange(k + 1), torch.full((k, 3), 1.5).sum(0), torch.tensor([k, 3])


def selects(x, n):
    k = at(n, x)
    return x[k], x.view(1, 5)[:, k], x.view(5, 1)[None, k, ..., -1], x[torch.tensor([0, 2])], x.topk(k)[0]


def indexes_by_tensors(x, n):
    table = x.view(5, 1) + x
    return x[n], table[n], table[:, n], table[n, n], table[..., n], table[n, None], table[[0, 1], n], x[x.argmax()]


def gathers_by_tensors_of_vmap(x, n):
    table, at = x.view(5, 1) + x, torch.stack([n, n - 1])
    gathered = torch.vmap(lambda k: table[k])(at), torch.vmap(lambda row, k: row[k])(table[:2], at)
    return *gathered, torch.vmap(lambda k: torch.func.grad(lambda t: t[k].sum())(table))(at)


def slices_by_tensors(x, n):
    return x[n:], x[: n + 1], x[n : n + 1]


def slices(x, n):
    k = upto(n, x)
    return x[:k] * 2, x[k:] + 1, x.narrow(0, 0, k).clone(), x[: torch.sym_min(k, 3)] * 1


def splits(x, n):
    k = upto(n, x)
    left, right = torch.split(x, [k, x.shape[0] - k])
    return left * 2, right + 1


def splits_at_a_tensor(x, n):
    return torch.tensor_split(x, n.reshape(1))


def narrows_from_a_tensor(x, n):
    return torch.narrow(x, 0, n, 1) * 2


def pads(x, n):
    return nn.functional.pad(x, (0, upto(n, x))), x[None].expand(upto(n, x), -1).clone()


def nonzeros(x, n):
    found = x.nonzero()
    return found, found.shape, torch.where(x > 0), torch.argwhere(x > 0)


def masks(x, n):
    return x[x > 0].sum(), torch.masked_select(x, x > 0) + 1, torch.cat([x[x > 0], x])


def counts(x, n):
    k = x.abs().long()
    return torch.bincount(k), torch.repeat_interleave(x, k), torch.repeat_interleave(k)


def uniques(x, n):
    return torch.unique(x), torch.unique(x, return_inverse=True, return_counts=True), torch.unique_consecutive(x)


def uses_sizes(x, n):
    y = x[x > 0]
    return y.sum() / y.numel(), y.new_zeros(y.shape[0] + 1), y.reshape(1, -1).repeat(2, 1), y.sort()[0]


def layers(x, n):
    return nn.functional.linear(x[x > 0].unsqueeze(1), torch.ones(3, 1)).relu()


def scatters(x, n):
    i = (x > 0).nonzero().squeeze(1)
    return torch.zeros(5).index_add(0, i, x[i])


READS = [
    returns_numbers,
    lists_numbers,
    truncates,
    makes_tensors,
    selects,
    indexes_by_tensors,
    gathers_by_tensors_of_vmap,
    slices_by_tensors,
    slices,
    splits,
    splits_at_a_tensor,
    narrows_from_a_tensor,
    pads,
    nonzeros,
    masks,
    counts,
    uniques,
    uses_sizes,
    layers,
    scatters,
]


def writes_a_mask(x, n):
    y = x.clone()
    y[y > 0] = y[y > 0] * 2
    x[x > 1] = 0
    return y


def writes_what_a_mask_took(x, n):
    y = x[x > 0]
    y.add_(1)
    y[0] += 1
    y[1:] *= 2
    y.view(-1, 1)[:, 0] *= 3
    return y, y[1:]


def writes_indices(x, n):
    i = x.nonzero()
    i[:, 0] += 1
    i.t().add_(1)
    return i


def writes_a_slice(x, n):
    k = upto(n, x)
    y = x.clone()
    y[:k] = 0
    x[k:] += 1
    return y


def returns_a_slice_that_it_wrote(x, n):
    k = upto(n, x)
    tail = x[k:]
    tail.add_(1)
    return tail, x[:k], x


def writes_a_place(x, n):
    k = at(n, x)
    row = x.view(5, 1)[k]
    row.add_(5)
    return row, x * 1


def writes_by_tensors(x, n):
    table = (x.view(5, 1) + x).clone()
    table[n] = 7
    table[:, n] = x
    table[n, n] += 1
    table[n, torch.tensor([0, 1])] = x[:2]
    table[0][n].mul_(2)
    table[n - 1, None] = x[None, None]
    x[n] = table[n, 1]
    return table, x + 0


def writes_pieces(x, n):
    k = upto(n, x)
    a, b = x.split([k, 5 - k])
    a.add_(1)
    b.mul_(2)
    return x.sum()


def writes_a_part_of_a_new_tensor(x, n):
    k = upto(n, x)
    y = torch.zeros(k + 1, 4)
    y[:, 1:3] = 1
    y[-1] = 5
    z = torch.zeros(5)
    z.narrow(0, 0, k).copy_(x[:k])
    return y, z


def writes_out(x, n):
    y = x[x > 0]
    z = torch.empty_like(y)
    torch.add(y, 1, out=z)
    torch._foreach_add_([y, z], 1)
    return y, z, torch.relu_(x[x < 2])


def writes_at_indices(x, n):
    i = (x > 0).nonzero().squeeze(1)
    x.index_put_((i,), torch.ones(()), accumulate=True)
    return torch.zeros(5).index_copy_(0, i, x[i])


def writes_a_diagonal(x, n):
    d = torch.diag_embed(x[x > 0])
    d.diagonal().zero_()
    return d


def fills_with_random_numbers(x, n):
    return x[x > 0].uniform_(), nn.functional.dropout(x[x > 0], 0.5)


WRITES = [
    writes_a_mask,
    writes_what_a_mask_took,
    writes_indices,
    writes_a_slice,
    returns_a_slice_that_it_wrote,
    writes_a_place,
    writes_by_tensors,
    writes_pieces,
    writes_a_part_of_a_new_tensor,
    writes_out,
    writes_at_indices,
    writes_a_diagonal,
    fills_with_random_numbers,
]


def named(f):
    return f.__name__


@pytest.mark.sample(3)
@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("program", READS + WRITES, ids=named)
def test_equal_to_eager_at_other_values(program, functional):
    tr = st.trace(program, tuple(t.clone() for t in EXAMPLE), functional=functional)
    tr.lint()
    fixed = [s.expression for s in tr.specializations]
    # eager has a gradient of zero for what random numbers are written over, and functional ops none
    assert fixed == (["x.requires_grad"] if functional and program is fills_with_random_numbers else [])
    for args in (EXAMPLE, *OTHERS):
        tr.check(args)


class Wrapped(nn.Module):
    def __init__(self, program):
        super().__init__()
        self.program = program

    def forward(self, x, n):
        return self.program(x, n)


def recorded_ops(graph_module):
    """The ops on tensors; torch.export also asserts what an op's own rule says of its sizes (`u0 >= 0`)."""
    ours = [n.target for n in graph_module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return Counter(str(op) for op in ours if not op._schema.name.startswith(("aten::_assert", "aten::sym_")))


DIFFERENT = {
    "splits_at_a_tensor": "torch.export keeps the op that reads the tensor, and loses the numbers that it reads",
    "makes_tensors": "torch.export keeps aten.promote_types, which is no op on data",
}


REFUSED = ["narrows_from_a_tensor", "indexes_by_tensors", "gathers_by_tensors_of_vmap", "writes_by_tensors"]
"""Which torch.export refuses, before torch 2.15 or at all."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("program", READS + WRITES, ids=named)
def test_the_ops_are_those_of_torch_export(program):
    with torch.no_grad():
        ours = recorded_ops(st.trace(program, tuple(t.clone() for t in EXAMPLE), functional=False).graph_module)
        try:
            theirs = recorded_ops(torch.export.export(Wrapped(program), tuple(t.clone() for t in EXAMPLE)).graph_module)
        except Exception:  # of any class: torch.export's refusal
            theirs = None
    if theirs is None:
        assert program.__name__ in REFUSED
    else:
        assert (ours == theirs) == (program.__name__ not in DIFFERENT)


def test_what_torch_check_says_is_asserted_where_the_number_is_read():
    def rows(x, n):
        k = n.item()
        torch._check(k >= 0)
        torch._check(k <= 3)
        return x[:k] * 2

    tr = st.trace(rows, EXAMPLE)
    code = tr.graph_module.code
    assert code.index("item =") < code.index("_assert_scalar") < code.index("slice")
    assert "Runtime assertion failed for expression u0 <= 3 on node 'le'" in code
    with pytest.raises(RuntimeError, match="u0 <= 3"):
        tr(EXAMPLE[0], torch.tensor(4))


WRONG = {"u0 >= 2": [1, 5], "u0 <= 8": [9, 5], "u1 >= 5": [3, 4], "u1 <= 5": [3, 6]}


@pytest.mark.parametrize("failed", WRONG)
def test_the_message_names_the_part_of_a_condition_that_failed(failed):
    def run(ns):
        n, m = ns.tolist()
        torch._check(sym_and(n >= 2, n <= 8, m == 5))
        return n + m

    ep = st.trace(run, (torch.tensor([3, 5]),)).to_exported_program()
    assert ep.module()(torch.tensor([4, 5])) == 9
    with pytest.raises(RuntimeError, match=f"expression {failed} on node"):
        ep.module()(torch.tensor(WRONG[failed]))


def test_what_torch_check_says_decides_branches():
    def run(x, n):
        k = n.item()
        torch._check(k > 1)
        return x * k if k > 0 else x

    tr = st.trace(run, EXAMPLE)
    tr.check((EXAMPLE[0], torch.tensor(7)))
    with pytest.raises(RuntimeError, match="1 < u0"):
        tr(EXAMPLE[0], torch.tensor(1))


class Gather(nn.Module):
    def forward(self, rows, count, scale=1):
        return rows[:count] * scale


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.gather = Gather()

    def forward(self, x, n):
        return self.gather(x[x > 0], upto(n, x), scale=n.item())


def test_module_calls_have_the_numbers_as_nodes():
    tr = st.trace(Head(), EXAMPLE)
    call = tr.calls[1]
    assert {name: a.name for name, a in call.arguments.items()} == {"rows": "index", "count": "item", "scale": "item"}
    assert str(call.arguments["count"].meta["val"]) == "u1"


@pytest.mark.parametrize(
    ("run", "op"),
    [
        (lambda x, n: x if x.sum() > 0 else -x, "aten.is_nonzero.default"),
        (lambda x, n: x if n.item() > 1 else -x, "aten.item.default"),
        (lambda x, n: x * int(n), "aten.item.default"),
        (lambda x, n: x if x.nonzero().shape[0] > 2 else -x, "aten.nonzero.default"),
        (lambda x, n: x if torch.equal(x, x + n) else -x, "aten.equal.default"),
        (lambda x, n: [x + i for i in range(n.item())][-1], "aten.item.default"),
    ],
)
def test_a_branch_on_one_is_an_error_with_op_module_line_and_way_out(run, op):
    with pytest.raises(st.DataDependentError) as info:
        st.trace(run, EXAMPLE)
    error = info.value
    assert (error.op, error.module) == (op, "function")
    assert "test_unbacked.py" in error.source and "lambda x, n:" in error.source
    assert "torch.where" in error.hint and "specialize=True" in error.hint


@pytest.mark.parametrize(
    "run",
    [
        lambda x, n: x * {2: 3.0}[n.item()],
        lambda x, n: x.clone().apply_(lambda item: item * 2),
        lambda x, n: x.clone().map_(x, lambda a, b: a + b),
    ],
)
def test_what_has_no_data_and_runs_no_op(run):
    with pytest.raises(st.DataDependentError, match="needs the value of a tensor"):
        st.trace(run, EXAMPLE)
    run(*EXAMPLE)


def test_a_size_of_the_input_is_no_number_of_its_own_as_an_index():
    tr = st.trace(lambda x: x[x.shape[0] - 1], (torch.randn(4, 2),), dynamic_shapes=({0: torch.export.Dim("n")},))
    for length in (2, 4, 9):
        tr.check((torch.randn(length, 2),))


ASSERTS = """
def run(x, n):
    assert n.item() < 4
    assert (x < 9).all()
    assert not torch.isnan(x).any()
    assert not (x.shape[0] > 5 or n.item() < -5)
    return x * 2
"""


def test_an_assert_of_python_is_one_of_the_graph():
    names = {"torch": torch}
    exec(ASSERTS, names)  # pytest rewrites the asserts of a test's own code
    tr = st.trace(names["run"], EXAMPLE)
    tr.check((EXAMPLE[0], torch.tensor(-1)))
    wrong = [(EXAMPLE[0], torch.tensor(4)), (EXAMPLE[0], torch.tensor(-9)), (EXAMPLE[0] + 9, torch.tensor(2))]
    for args in (*wrong, (EXAMPLE[0].where(EXAMPLE[0] != EXAMPLE[0][0], torch.nan), torch.tensor(2))):
        with pytest.raises(RuntimeError, match="Runtime assertion failed"):
            tr(*args)


@pytest.mark.parametrize("squeeze", [torch.squeeze, lambda y: y.squeeze(0), lambda y: y.squeeze((0, 1))])
def test_a_size_that_depends_on_data_is_not_1_where_an_op_squeezes_it(squeeze):
    def run(x):
        y = squeeze(x[x[:, 0] > 2])
        return y * 2 if y.dim() == 1 else y * 3

    x = torch.arange(8.0).view(4, 2)
    one, two = x - 2, x  # of so many rows the first element is above 2
    tr = st.trace(run, (two,))
    assert torch.equal(tr(two), run(two)) and torch.equal(tr(x + 2), run(x + 2))
    with pytest.raises(RuntimeError, match="Ne"):
        tr(one)
    for example, other in ((one, two), (two, one)):
        tr = st.trace(run, (example,), specialize=True)
        assert torch.equal(tr(example), run(example))
        with pytest.raises(st.InputMismatchError, match="specialized"):
            tr(other)
