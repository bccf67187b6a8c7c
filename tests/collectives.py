"""Programs with collectives, and the process that compares their traces with eager on several ranks."""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from processes import join_ranks, leave_ranks
from torch import nn

import scopetrace as st

PROGRAMS = {}
LINEAR = nn.Linear(4, 4)
X = torch.randn(4, 4)


def program(run):
    PROGRAMS[run.__name__] = run
    return run


@program
def all_reduce(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1


@program
def all_reduce_of_a_view(x):
    y = x * 2
    dist.all_reduce(y[0], op=dist.ReduceOp.MAX)
    return y


@program
def all_reduce_of_an_input(x):
    dist.all_reduce(x, op=dist.ReduceOp.PRODUCT)
    return x + 1


@program
def all_reduce_in_a_group(x):
    y = x * 2
    dist.all_reduce(y, group=dist.new_group(list(range(dist.get_world_size()))))
    return y


@program
def waited_for_later(x):
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    z = x + 1
    work.wait()
    return y + z


@program
def never_waited_for(x):
    y = x * 2
    dist.all_reduce(y, async_op=True)
    dist.barrier()
    return y


@program
def asked_until_complete(x):
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    while not work.is_completed():
        pass
    work.wait()
    return y


@program
def future(x):
    y = x * 2
    return dist.all_reduce(y, async_op=True).get_future().wait()[0] + 1


@program
def all_gather(x):
    into = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(into, x)
    return torch.cat(into)


@program
def all_gather_of_a_scalar(x):
    into = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(into, x.sum())
    return torch.stack(into)


@program
def all_gather_into_tensor(x):
    into = x.new_empty(dist.get_world_size() * 4, 4)
    dist.all_gather_into_tensor(into, x)
    return into


@program
def reduce_scatter(x):
    into = torch.empty_like(x)
    dist.reduce_scatter(into, [x + i for i in range(dist.get_world_size())])
    return into


@program
def reduce_scatter_tensor(x):
    into = torch.empty_like(x)
    dist.reduce_scatter_tensor(into, torch.cat([x] * dist.get_world_size()))
    return into


@program
def all_to_all_single(x):
    into = torch.empty_like(x)
    dist.all_to_all_single(into, x)
    return into


@program
def all_to_all_single_with_sizes(x):
    given = {1: [4], 2: [1, 3]}[dist.get_world_size()]
    received = {1: [4], 2: [1, 1] if dist.get_rank() == 0 else [3, 3]}[dist.get_world_size()]
    into = x.new_empty(sum(received), 4)
    dist.all_to_all_single(into, x, received, given)
    return into


@program
def broadcast(x):
    y = x * 2
    dist.broadcast(y, dist.get_world_size() - 1)
    return y


@program
def reduce(x):
    y = x * 2
    dist.reduce(y, 0)
    return y if dist.get_rank() == 0 else x


@program
def gather(x):
    into = [torch.empty_like(x) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(x, into, dst=0)
    return x if into is None else torch.cat(into)


@program
def scatter(x):
    into = torch.empty_like(x)
    dist.scatter(into, [x + i for i in range(dist.get_world_size())] if dist.get_rank() == 0 else None, src=0)
    return into


@program
def barrier(x):
    dist.barrier()
    return x * 2


@program
def coalesced(x):
    y, z = x * 2, x * 3
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(y)
        dist.all_reduce(z)
    manager.wait()
    return y + z


@program
def functional_all_reduce(x):
    return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1


@program
def view_of_a_functional_all_gather(x):
    return functional.all_gather_tensor(x * 2, 0, dist.group.WORLD).view(-1)[1:]


@program
def result_that_nobody_reads(x):
    dist.all_reduce(x * 2)
    return x + 1


@program
def number_of_a_reduced_constant(x):
    t = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(t)
    return x * t.item()


@program
def with_gradients(x):
    y = LINEAR(x)
    dist.all_reduce(y)
    return torch.relu(y)


@program
def of_a_parameter(x):
    dist.broadcast(LINEAR.weight.data, 0)
    return LINEAR(x)


def send_and_receive(x, other):
    y = torch.empty_like(x)
    if other:
        dist.send(x * 2, other)
        dist.recv(y, other)
    else:
        dist.recv(y, other)
        dist.send(x * 3, other)
    return y


def both_receive_first(x, other):
    y = torch.empty_like(x)
    receive, send = dist.irecv(y, other), dist.isend(x * 2, other)
    receive.wait()
    send.wait()
    return y + 1


def batch_of_sends(x, other):
    y = torch.empty_like(x)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, y, other), dist.P2POp(dist.isend, x * 2, other)]):
        work.wait()
    return y


TWO = {run.__name__: run for run in (send_and_receive, both_receive_first, batch_of_sends)}
"""Programs of two ranks, which take the other rank too."""


def forms_of(tr):
    """The trace, and what is made of it, as programs."""
    with tempfile.TemporaryDirectory() as folder:
        tr.save(Path(folder) / "trace")
        loaded = st.load(Path(folder) / "trace")
    return {"trace": tr, "loaded": loaded}


def exported(tr):
    return tr.to_exported_program().run_decompositions().module()


def main():
    """Every program, its trace on this rank, and its trace saved and loaded, compared with eager."""
    join_ranks()
    torch.manual_seed(dist.get_rank())
    x, other = torch.randn(4, 4), 1 - dist.get_rank()
    found = dict(PROGRAMS) | {name: lambda x, run=run: run(x, other) for name, run in TWO.items()}
    for name, run in found.items():
        expected = run(x.clone())
        for form, traced in forms_of(st.trace(run, (x.clone(),))).items():
            given = x.clone()
            torch.testing.assert_close(traced(given), expected, msg=lambda text, at=(name, form): f"{at}: {text}")
    print("equal", len(found), flush=True)
    leave_ranks()


if __name__ == "__main__":
    sys.exit(main())
