"""Plans for sharding and for pipelines, on paper here and run on two ranks by tests/ranks.py."""

import copy
import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import on_two_ranks
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import SplitPoint
from torch.utils.flop_counter import FlopCounterMode

import scopetrace as st
from tests.nets import Net, weight
from tests.ranks import (
    MODELS,
    Block,
    Blocks,
    Borrowed,
    Branches,
    Given,
    Head,
    Layer,
    Llama,
    Swapped,
    SwiGLU,
    called_twice,
    early_result,
    parallel,
    together,
    two_results,
    without_gradient,
)

F = nn.functional
IDS = torch.zeros(2, 8, dtype=torch.int64)
RANKS = Path(__file__).with_name("ranks.py")


def plan(model, *args, **options):
    return st.distributed.plan(model, st.trace(model, args or (IDS,)).order, **options)


def groups(found):
    return [" ".join(name or "(root)" for name in group.modules) for group in found.groups]


# FSDP2, on paper -----------------------------------------------------------------------------------------------------


def test_a_plan_by_classes_has_what_runs_between_them_too():
    assert (
        str(plan(Llama(), classes=Layer))
        == """\
group  modules     parameters  bytes    forward prefetch  backward prefetch
0      (root)      0           0 B      1                 -
1      embed       1           2.05 kB  2                 -
2      layers.0    9           10.4 kB  3                 1
3      layers.1    9           10.4 kB  4                 2
4      layers.2    9           10.4 kB  5                 3
5      layers.3    9           10.4 kB  6                 4
6      norm, head  2           2.11 kB  -                 5

all-gathers, forward: 1 2 3 4 5 6
all-gathers, backward: 6 5 4 3 2 1"""
    )


def test_a_plan_by_bytes_packs_what_runs_one_after_the_other():
    found = plan(Llama(order=(1, 0)), target_bytes=8_000)
    assert groups(found) == [
        "(root)",
        "embed layers.1.norm1 layers.1.attn layers.1.norm2",
        "layers.1.mlp layers.0.norm1",
        "layers.0.attn layers.0.norm2",
        "layers.0.mlp norm",
        "head",
    ]
    assert [group.nbytes <= 8_000 for group in found.groups] == [True] * 6


def test_one_module_that_is_too_large_is_a_group():
    assert groups(plan(Llama(order=(0,)), target_bytes=1))[:4] == [
        *("(root)", "embed", "layers.0.norm1", "layers.0.attn.q"),
    ]


def test_groups_lie_in_execution_order_and_their_parameters_in_both():
    model = Net(
        lambda m, x: m.a(m.b(x)), a=nn.Linear(6, 6), b=Net(lambda m, x: (x * m.g) @ m.w, w=weight(6, 6), g=weight(6))
    )
    found = plan(model, torch.ones(2, 6), target_bytes=10_000)
    assert groups(found) == ["(root)", "b a"]
    assert found.groups[1].params == ("b.w", "b.g", "a.weight", "a.bias")
    assert found.groups[1].params_by_use == ("b.g", "b.w", "a.weight", "a.bias")
    assert found.bucket_plan() == [["b", "a"]]
    assert found.bucket_plan("registration") == [["a", "b"]]


def test_groups_that_never_run_are_in_the_order_of_the_model_on_all_ranks():
    names = [f"layer{i}" for i in range(8)]
    model = Net(lambda m, x: m.first(x), first=nn.Linear(6, 6), **{name: nn.Linear(6, 6) for name in names})
    assert groups(plan(model, torch.ones(2, 6), classes=nn.Linear)) == ["(root)", "first", *names]


def test_bucket_plans_are_disjoint_and_name_all_that_can_be_named():
    nested = plan(Llama(order=(1, 0)), classes=(Layer, SwiGLU))
    assert nested.bucket_plan() == [
        ["embed"],
        ["layers.1.norm1", "layers.1.attn", "layers.1.norm2"],
        ["layers.1.mlp"],
        ["layers.0.norm1", "layers.0.attn", "layers.0.norm2"],
        ["layers.0.mlp"],
        ["norm", "head"],
    ]
    assert [names[0] for names in nested.bucket_plan("registration")] == [
        *("embed", "layers.0.norm1", "layers.0.mlp", "layers.1.norm1", "layers.1.mlp", "norm"),
    ]


def test_tied_weights_are_in_one_group():
    assert groups(plan(Llama(tied=True, order=(0,)), classes=Layer)) == ["(root)", "embed norm head", "layers.0"]
    # by bytes, the tied modules alone: they are gathered from the first to the last
    assert groups(plan(Llama(tied=True, order=(0,)), target_bytes=10**6)) == [
        *("(root)", "embed head", "layers.0 norm"),
    ]


def test_a_module_and_the_user_of_its_parameters_are_in_one_group():
    # the root uses b without calling it: b goes to the root
    assert groups(plan(Borrowed(), classes=nn.Linear)) == ["(root)", "embed", "a", "head"]
    neighbour = Net(
        lambda m, x: m.head(m.user(x)), head=nn.Linear(6, 6), user=Net(lambda m, x: F.linear(x, m.seen[0].weight))
    )
    neighbour.user.seen = (neighbour.head,)  # not registered there
    assert groups(plan(neighbour, torch.ones(2, 6), classes=(nn.Linear, Net))) == ["(root)", "user head"]


def test_attention_keeps_its_projection_though_linear_layers_are_apart():
    model = Net(lambda m, x: m.fc(m.attn(x, x, x)[0]), attn=nn.MultiheadAttention(6, 2), fc=nn.Linear(6, 6))
    found = plan(model, torch.ones(3, 6), classes=nn.Linear)
    assert groups(found) == ["(root)", "fc"]
    assert found.groups[0].params == (
        *("attn.out_proj.weight", "attn.out_proj.bias", "attn.in_proj_weight", "attn.in_proj_bias"),
    )


def test_a_module_that_runs_twice_prefetches_what_follows_each_time():
    found = plan(Llama(order=(3, 1, 0, 1, 2)), classes=Layer)
    lists = {group.modules[0]: [g[0] for g in group.forward_prefetch] for group in found.groups}
    assert lists == {
        "": ["embed"],
        "embed": ["layers.3"],
        "layers.3": ["layers.1"],
        "layers.1": [],  # layers.0 the first time, layers.2 the second
        "layers.0": ["layers.1"],
        "layers.2": ["norm"],
        "norm": [],
    }


def test_forward_called_without_hooks_leaves_the_parameters_to_the_group_around():
    model = Net(lambda m, x: m.b(m.a.forward(x)), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    found = plan(model, torch.ones(2, 6), classes=nn.Linear)
    assert groups(found) == ["(root)", "b"]
    assert found.groups[0].params == ("a.weight", "a.bias")


def test_a_parameter_that_is_an_argument_is_gathered_where_the_call_is_made():
    assert groups(plan(Given(), classes=(nn.Embedding, Head))) == ["(root)", "head"]


def test_parameters_that_others_take_the_place_of_are_the_root_s():
    """To gather is to put parameters in their place."""
    found = plan(Swapped(), classes=nn.Linear)
    assert groups(found) == ["(root)", "embed", "head"]
    assert found.groups[0].params == ("a.weight", "a.bias", "weight")


def test_layers_in_branches_belong_to_the_group_around():
    """Ranks may take different branches, and torch.cond compiles them, without FSDP2's hooks."""
    assert groups(plan(Branches(), classes=nn.Linear)) == ["(root)", "embed", "head"]


def test_a_module_that_changes_its_input_is_cut_open():
    """FSDP2 gives a module views of its inputs, which autograd does not let it change."""
    block = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))
    assert groups(plan(nn.Sequential(nn.Linear(8, 8), block), torch.ones(2, 8), target_bytes=300)) == [
        "(root)",
        "0",
        "1.1",
    ]


def raises_inside(m, x):
    try:
        m.bad(x)
    except ValueError:
        return m.good(x)


def bad(m, x):
    m.fc(x)
    raise ValueError


def keeps_its_weight(fc):
    net = Net(lambda m, x: x @ m.kept[0], fc=fc)
    net.kept = [fc.weight]
    return net


REFUSED = {
    "no class": (Llama, dict(), "give one of target_bytes= and classes="),
    "both": (Llama, dict(classes=Layer, target_bytes=1), "give one of target_bytes= and classes="),
    "negative": (Llama, dict(target_bytes=-1), "target_bytes=-1 must be positive"),
    "absent class": (
        Llama,
        dict(classes=nn.Conv2d),
        "no module of the model is Conv2d; there are 'Attention', 'Embedding'",
    ),
    "container": (Llama, dict(classes=nn.ModuleList), "ModuleList 'layers' has no forward"),
    "scalar": (
        lambda: Net(lambda m, x: x * m.s, s=weight()),
        dict(target_bytes=9),
        "give s the shape (1,), or name it in ignored_params=",
    ),
    "strides": (
        lambda: Net(lambda m, x: x @ m.w, w=nn.Parameter(torch.ones(3, 8).t())),
        dict(target_bytes=9),
        "w has the strides (1, 8)",
    ),
    "written": (
        lambda: Net(lambda m, x: x * m.w.detach().mul_(2), w=weight(1)),
        dict(target_bytes=9),
        "the forward changes w in place",
    ),
    "empty": (
        lambda: Net(lambda m, x: x + m.w.sum(), w=weight(0, 8)),
        dict(target_bytes=9),
        "FSDP2 reduces no empty gradients: name w, (0, 8), in ignored_params=",
    ),
    "two dtypes": (
        lambda: nn.Sequential(
            Net(lambda m, x: m.fc(x) * m.w.float(), fc=nn.Linear(8, 8), w=nn.Parameter(torch.ones(8).double()))
        ),
        dict(classes=Net),
        "in the group of 0 0.fc.weight is float32, 0.w is float64: name the class of the modules that differ",
    ),
    "kept in a list": (
        lambda: keeps_its_weight(nn.Linear(8, 8)),
        dict(target_bytes=9),
        "Net (root) keeps fc.weight in its attribute 'kept' too",
    ),
    "scripted": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(8, 8))),
        dict(target_bytes=9),
        "FSDP2 sets no hooks on scripted modules: '0' is one",
    ),
    "in place": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))),
        dict(classes=nn.Sequential),
        "Sequential '1' changes its input in place",
    ),
    "raises": (
        lambda: Net(raises_inside, bad=Net(bad, fc=nn.Identity(), w=weight(2)), good=nn.Linear(8, 8)),
        dict(classes=Net),
        "a call of Net 'bad' ends with an exception that its caller catches",
    ),
}


@pytest.mark.parametrize(("make", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_plans_that_would_fail_are_refused(make, options, message):
    model = make()
    x = IDS if isinstance(model, Llama) else torch.ones(2, 8)
    with pytest.raises(st.PlanError) as error:
        plan(model, x, **options)
    assert message in str(error.value)


def test_groups_are_of_one_dtype():
    """FSDP2 reduces the gradients of a group in one tensor."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8).bfloat16(), nn.Linear(8, 8))
    model[1].forward = lambda x: F.layer_norm(x.bfloat16(), (8,), model[1].weight).float()
    for options in dict(target_bytes=10**6), dict(classes=nn.LayerNorm):
        assert groups(plan(model, torch.ones(2, 8), **options)) == ["(root)", "0", "1", "2"]


def test_recurrent_modules_renew_the_list_of_their_parameters():
    model = Net(lambda m, x: m.lstm(x)[0], lstm=nn.LSTM(8, 8))
    assert groups(plan(model, torch.ones(2, 3, 8), classes=nn.LSTM)) == ["(root)", "lstm"]


def test_ignored_parameters_are_in_no_group():
    model = Net(lambda m, x: m.fc(x) * m.s, fc=nn.Linear(6, 6), s=weight())
    found = plan(model, torch.ones(2, 6), target_bytes=10**6, ignored_params={model.s})
    assert [group.params for group in found.groups] == [(), ("fc.weight", "fc.bias")]
    assert found.ignored == ("s",)


def test_the_order_of_another_model_is_refused():
    order = st.trace(Llama(), (IDS,)).order
    with pytest.raises(
        st.PlanError, match=r"the order is of another model: trace this one .module 'layers.1' is not in"
    ):
        st.distributed.plan(Llama(order=(0,)), order, classes=Layer)


def test_a_plan_of_the_meta_device_is_that_of_the_model():
    with torch.device("meta"):
        model = Llama()
        found = plan(model, IDS.to("meta"), classes=(Layer, SwiGLU))
    assert str(found) == str(plan(Llama(), classes=(Layer, SwiGLU)))


# Pipelines, on paper -------------------------------------------------------------------------------------------------


def test_stages_are_cut_where_the_fewest_bytes_cross():
    points = st.distributed.split_points(st.trace(Llama(order=range(6)), (IDS,)), 3)
    assert points == {"layers.2": SplitPoint.BEGINNING, "layers.4": SplitPoint.BEGINNING}
    assert (
        str(points)
        == """\
stage  begins with  params  bytes in  tensors in
0      (start)      5,696
1      layers.2     5,184   1,024     2x8x16
2      layers.4     5,712   1,024     2x8x16"""
    )


def skips(m, x):
    y = m.a(x)
    return m.d(m.c(m.b(y))) + y


def four():
    return {name: nn.Linear(6, 6) for name in "abcd"}


@pytest.mark.parametrize(("stages", "sent"), [(2, [96]), (3, [48, 96]), (4, [48, 48, 96])])
def test_a_stage_is_sent_what_pipelining_gives_it(stages, sent):
    """A skip connection passes the stages between by."""
    net, x = Net(skips, **four()), torch.ones(2, 6)
    points = st.distributed.split_points(st.trace(net, (x,)), stages)
    pipe = pipelining.pipeline(net, (x,), split_spec=points)
    inputs = [pipe.get_stage_module(i).graph.find_nodes(op="placeholder") for i in range(1, stages)]
    assert points.crossing_bytes == [sum(node.meta["val"].nbytes for node in nodes) for nodes in inputs] == sent


def test_inputs_go_to_the_first_stage_and_results_come_from_the_last():
    """torch.distributed.pipelining sends activations alone."""
    net = Net(lambda m, x: m.d(m.c(m.b(m.a(x)) + x)), **four())
    assert list(st.distributed.split_points(st.trace(net, (torch.ones(2, 6),)), 2)) == ["c"]
    net = Net(lambda m, x: (y := m.b(m.a(x)), m.d(m.c(y)))[::-1], **four())
    with pytest.raises(st.PlanError, match="a result is made before it, in b: end the forward with a clone"):
        st.distributed.split_points(st.trace(net, (torch.ones(2, 6),)), 3)


def test_narrow_places_are_preferred_within_the_tolerance():
    widths = [(64, 64), (64, 8), (8, 64), (64, 64)]
    model = nn.Sequential(*(nn.Linear(*w) for w in widths), nn.Linear(64, 64), nn.Linear(64, 64))
    tr = st.trace(model, (torch.ones(2, 64),))
    assert list(st.distributed.split_points(tr, 2, tolerance=0)) == ["4"]
    assert list(st.distributed.split_points(tr, 2, tolerance=0.6)) == ["2"]


def test_a_model_that_was_split_before():
    net, x = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)]), torch.ones(2, 2)
    points = st.distributed.split_points(st.trace(net, (x,)), 2)
    torch.distributed.pipelining.pipeline(net, mb_args=(x,), split_spec=points)
    with pytest.raises(st.errors.PlanError, match="has split this model before, at 2"):
        st.distributed.split_points(st.trace(net, (x,)), 2)


def test_flops_are_those_of_torch():
    model = Llama()
    points = st.distributed.split_points(st.trace(model, (IDS,)), 2, "flops")
    kernel = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)  # torch counts nothing of the CPU's own
    with kernel, FlopCounterMode(display=False) as counter:
        model(IDS)
    assert sum(points.weights) == counter.get_total_flops()


def test_bytes_are_parameters_and_results():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
    points = st.distributed.split_points(st.trace(model, (torch.ones(2, 4),)), 2, "bytes")
    assert points.weights == (4 * (4 * 8 + 8) + 4 * 2 * 8, 4 * (8 * 8 + 8) + 4 * 2 * 8)


def test_weights_that_are_tied_stay_in_one_stage():
    """torch gives each stage a copy of its own, which it trains."""
    tied = (
        r"embed\.weight is used in embed and head, and each stage would train a copy of it: .*requires_grad_\(False\)"
    )
    with pytest.raises(st.PlanError, match=tied):
        st.distributed.split_points(st.trace(Llama(tied=True), (IDS,)), 2)
    points = st.distributed.split_points(st.trace(Llama(tied=True).requires_grad_(False), (IDS,)), 2)
    assert points.shared == {"embed.weight": [0, 1]}
    assert "embed.weight is used in stages 0, 1" in str(points)


def test_tied_weights_in_the_middle_are_no_cut():
    net = Net(lambda m, x: m.d(m.c(m.b(m.a(x)))), **four())
    net.c.weight = net.b.weight
    for stages, cuts in ((2, (["b"], ["d"])), (3, (["b", "d"],))):
        assert list(st.distributed.split_points(st.trace(net, (torch.ones(2, 6),)), stages)) in cuts
    with pytest.raises(st.PlanError, match=r"b\.weight is used in b and c"):
        st.distributed.split_points(st.trace(net, (torch.ones(2, 6),)), 4)


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
@pytest.mark.parametrize("balance", ["params", "flops", "bytes"])
def test_cuts_stand_between_layers(stages, balance):
    """Also where stages would be more even otherwise: the embedding is as large as a layer."""
    points = st.distributed.split_points(st.trace(Llama(order=range(4)), (IDS,)), stages, balance)
    assert all(cut.depth == 1 or cut.module.count(".") == 1 for cut in points.cuts)
    assert all(name.startswith("layers.") or name in ("norm", "head") for name in points)


def test_cuts_in_layers_where_there_are_too_few_between():
    tr = st.trace(Llama(order=range(2)), (IDS,))
    points = st.distributed.split_points(tr, 6)
    assert any(name.count(".") > 1 for name in points)


def test_classes_say_with_which_modules_stages_begin():
    tr = st.trace(Llama(order=range(2)), (IDS,))
    assert all(name.endswith(".mlp") for name in st.distributed.split_points(tr, 3, classes=SwiGLU))
    assert list(st.distributed.split_points(tr, 2, classes=(Layer,))) == ["layers.1"]
    with pytest.raises(st.PlanError, match="3 stages need 2 cuts; there are 1 modules"):
        st.distributed.split_points(st.trace(Llama(order=(0,)), (IDS,)), 3, classes=Layer)
    for targets in ("Layer", "layers.*", ["layers.[1-9]"], lambda call: call.fqn == "layers.1", tr.model.layers[1]):
        assert list(st.distributed.split_points(tr, 2, classes=targets)) == ["layers.1"]
    assert all(name.endswith(".mlp") for name in st.distributed.split_points(tr, 3, classes="**.mlp"))
    for target, hint in ((nn.Conv2d, "named Conv2d; there are"), ("lay*", r"write 'lay\*\*'")):
        with pytest.raises(st.errors.CallNotFoundError, match=hint):
            st.distributed.split_points(tr, 2, classes=target)
    with pytest.raises(st.errors.ArgumentTypeError, match="3 is a int; give a module class"):
        st.distributed.split_points(tr, 2, classes=3)


@pytest.mark.parametrize("targets", ["Layer", "layers.*", ["layers.0", "layers.[!0]"]])
def test_a_plan_takes_the_targets_that_functions_take(targets):
    assert str(plan(Llama(), classes=targets)) == str(plan(Llama(), classes=Layer))


def test_what_passes_a_stage_by_is_said_at_the_cut():
    net, x = Net(skips, **four()), torch.ones(2, 6)
    points = st.distributed.split_points(st.trace(net, (x,)), 4)
    assert [cut.past for cut in points.cuts] == [(), (), ("a",)]
    assert "stage 3 reads what stages before the one before it make, in a: ScheduleGPipe" in str(points)
    assert [cut.past for cut in st.distributed.split_points(st.trace(net, (x,)), 2).cuts] == [()]


def test_modules_called_twice_are_no_cut():
    points = st.distributed.split_points(st.trace(Llama(order=(0, 1, 0, 2)), (IDS,)), 2)
    assert not any(name.startswith("layers.0") for name in points)


CANNOT_SPLIT = {
    "too many": (dict(stages=99), "99 stages need 98 cuts"),
    "one": (dict(stages=1), "stages=1: write 2 or more"),
    "balance": (dict(stages=2, balance="time"), "balance='time': write one of 'params', 'flops', 'bytes'"),
}


class Scaled(nn.Module):
    """Each layer's result is scaled by the second input."""

    def __init__(self, clone=False, first="x"):
        super().__init__()
        self.layers, self.clone, self.first = nn.ModuleList(four().values()), clone, first

    def forward(self, x, scale):
        if self.clone:
            x, scale = x.clone(), scale.clone()
        if self.first == "scale":
            scale = scale * 2
        for layer in self.layers:
            x = layer(x) * scale
        return x


def test_inputs_that_all_stages_read_are_sent_on_when_they_are_cloned():
    args = torch.ones(2, 6), torch.ones(2, 1)
    with pytest.raises(st.PlanError, match="scale is used later: begin the forward with x, scale = "):
        st.distributed.split_points(st.trace(Scaled(), args), 2)
    points = st.distributed.split_points(st.trace(Scaled(clone=True), args), 2)
    assert [cut.shapes for cut in points.cuts] == [((2, 6), (2, 1))]


def through_stages(model, args):
    """The model's result by two stages, each called with what torch's schedules give it."""
    points = {"layers.2": SplitPoint.BEGINNING}
    pipe = pipelining.pipeline(copy.deepcopy(model), args, split_spec=points)
    return pipe.get_stage_module(1)(*pipe.get_stage_module(0)(*args))


def test_inputs_that_are_read_in_another_order_are_refused():
    """torch gives the first stage its inputs in the order in which it reads them, mixed up."""
    args = torch.rand(2, 6), torch.rand(2, 6)
    with pytest.raises(st.PlanError, match=r"reads them, which here is scale, x: begin the forward with x, scale = "):
        st.distributed.split_points(st.trace(Scaled(first="scale"), args), 2)
    cloned = Scaled(clone=True, first="scale")
    torch.testing.assert_close(through_stages(cloned, args), cloned(*args))
    assert len(st.distributed.split_points(st.trace(cloned, args), 2)) == 1


@pytest.mark.parametrize(("options", "message"), CANNOT_SPLIT.values(), ids=CANNOT_SPLIT)
def test_splits_that_cannot_be_made(options, message):
    with pytest.raises(st.PlanError) as error:
        st.distributed.split_points(st.trace(Llama(), (IDS,)), **options)
    assert message in str(error.value)


def test_dynamic_sizes_have_no_bytes():
    tr = st.trace(Llama(), (IDS,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    with pytest.raises(st.PlanError, match="trace with the sizes of one micro-batch"):
        st.distributed.split_points(tr, 2)


# Many ranks, on paper ------------------------------------------------------------------------------------------------


def simulated(prefetch=1, ranks=4, **options):
    model = Llama()
    tr = st.trace(model, (IDS,))
    found = st.distributed.plan(model, tr.order, classes=Layer, prefetch=prefetch)
    options = {"bandwidth": 1e6, "flops": 1e8} | options
    return st.distributed.simulate(found, tr, ranks=ranks, **options)


def test_what_a_rank_holds():
    memory = simulated().memory
    total = sum(p.numel() for p in Llama().parameters())
    assert memory["sharded parameters"] == memory["sharded gradients"] == total  # 4 bytes, 4 ranks
    assert memory["optimizer"] == 2 * total
    layer = sum(p.numel() for p in Layer(16).parameters()) * 4
    assert memory["gathered parameters, at most"] == 2 * layer  # a layer, and the one ahead
    assert simulated(prefetch=0).memory["gathered parameters, at most"] == layer


def test_few_rows_on_many_ranks_are_padding():
    assert simulated().padding == 0
    assert simulated(ranks=24).padding == pytest.approx(1 / 3)  # 16 rows on 24 ranks, 32 on 48 places


def test_prefetching_hides_communication():
    none, one, two = (simulated(prefetch) for prefetch in (0, 1, 2))
    assert none.exposed_forward > one.exposed_forward >= two.exposed_forward > 0  # the first is always exposed
    assert none.compute == one.compute == two.compute
    assert simulated(flops=1e3).exposed_forward / simulated(flops=1e3).seconds < 0.01


def test_every_gather_is_on_the_link_in_the_order_of_the_plan():
    model = Llama()
    tr = st.trace(model, (IDS,))
    found = st.distributed.plan(model, tr.order, classes=Layer)
    link = st.distributed.simulate(found, tr, ranks=4, bandwidth=1e6, flops=1e8).transfers
    gathers = [t.group for t in link if t.kind == "all-gather"]
    assert gathers == found.forward_gathers + found.backward_gathers
    assert all(a.stop <= b.start for a, b in itertools.pairwise(link))
    assert [t.group for t in link if t.kind == "reduce-scatter"] == found.backward_gathers


def test_a_simulation_by_hand():
    """One layer of 8 x 8 without bias, on two ranks: 256 bytes, at 1,000 bytes in a second to each rank."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    tr = st.trace(model, (torch.ones(2, 8),))
    found = st.distributed.plan(model, tr.order, classes=nn.Linear)
    result = st.distributed.simulate(found, tr, ranks=2, bandwidth=1000, flops=256)
    half = 128 / 1000  # each rank has the other half already
    assert result.compute == pytest.approx(3 * 2 * 2 * 8 * 8 / 256)
    assert result.exposed_forward == pytest.approx(half)
    assert result.exposed_backward == pytest.approx(2 * half)  # gathered again, and reduced at the end
    assert [t.nbytes for t in result.transfers] == [256] * 3


# Training steps, on paper --------------------------------------------------------------------------------------------


def step_of(model, loss=lambda y: y.sum(), times=1):
    def step(x):
        for _ in range(times):
            found = loss(model(x))
            found.backward()
        return found

    return step


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, note, x):
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.note()
        return None, gradient


def noted_in_eager(model, loss, x):
    """What hooks on results, and functions at arguments, see in a backward: (kind, module)."""
    seen = []

    def enter(name, args):
        return tuple(Passed.apply(lambda: seen.append(("arguments", name)), a) if a.requires_grad else a for a in args)

    def leave(name, out):
        for t in out if isinstance(out, tuple) else (out,):
            if t.requires_grad:
                t.register_hook(lambda _: seen.append(("result", name)))

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda _, args, name=name: enter(name, args)))
        hooks.append(module.register_forward_hook(lambda _, args, out, name=name: leave(name, out)))
    loss(model(x)).backward()
    for hook in hooks:
        hook.remove()
    return seen


def passes_on(a, b, c, d, x):
    """A module gives its argument back."""
    return c.skip(d(a.skip(b(a(x)[0])[1]))[0])


RUNS = (parallel, without_gradient, two_results, early_result, called_twice, passes_on)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_the_steps_of_a_backward_are_those_of_eager(run):
    model, ids = Blocks(run), torch.zeros(1, 3, dtype=torch.int64)
    order = st.distributed.plan(model, st.trace(step_of(model), (ids,)).order, classes=nn.Linear).order
    found = [(step.kind, order.calls[step.call].fqn) for step in order.backwards[0]]
    assert found == noted_in_eager(model, torch.sum, ids)


def test_a_checkpointed_region_runs_again_before_its_first_gradient_that_needs_it():
    model, ids = Blocks(together), torch.zeros(1, 3, dtype=torch.int64)
    order = st.trace(step_of(model), (ids,)).order
    found = [(step.kind, order.calls[step.call].fqn) for step in order.backwards[0]]
    again = [i for i, (kind, _) in enumerate(found) if kind == "again"]
    assert again == list(range(again[0], again[0] + 18))  # three blocks of six modules
    assert found[again[0] - 1] == ("result", "model.blocks.2.down")
    assert found[again[-1] + 1] == ("arguments", "model.blocks.2.down")


def test_what_backward_does_not_reach_is_not_gathered_in_it():
    model, ids = Blocks(without_gradient), torch.zeros(1, 3, dtype=torch.int64)
    order = st.trace(step_of(model), (ids,)).order
    found = st.distributed.plan(model, order, classes=Block)
    assert [group[0] for group in found.backward_gathers] == ["head", "blocks.0", "embed"]
    assert [group.backward_prefetch for group in found.groups if group.modules == ("head",)] == [(("blocks.0",),)]
    mirrored = st.distributed.plan(model, st.trace(model, (ids,)).order, classes=Block)
    assert len(mirrored.backward_gathers) == 6
    assert found.forward_gathers == mirrored.forward_gathers


def simulated_step(model, classes, ids):
    """The plan and the simulation of a step, whose FLOPs are those that eager counts."""
    step = step_of(model)
    tr = st.trace(step, (ids,))
    found = st.distributed.plan(model, tr.order, classes=classes)
    result = st.distributed.simulate(found, tr, ranks=4, bandwidth=1e6, flops=1e8)
    with FlopCounterMode(display=False) as counter:
        step(ids)
    assert result.compute * 1e8 == pytest.approx(counter.get_total_flops())
    return found, result


def test_the_flops_of_a_step_are_those_of_its_ops():
    found, result = simulated_step(Llama(), Layer, IDS)
    link = [(t.kind, t.group) for t in result.transfers]
    assert [g for kind, g in link if kind == "all-gather"] == found.forward_gathers + found.backward_gathers
    assert [g for kind, g in link if kind == "reduce-scatter"] == found.backward_gathers


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam])
def test_an_optimizer_in_the_step_takes_no_flops(kind):
    model = Blocks(together)
    optimizer, step, ids = kind(model.parameters()), step_of(model), torch.zeros(1, 3, dtype=torch.int64)

    def whole(ids):
        step(ids)
        optimizer.step()
        optimizer.zero_grad()

    plain, tr = st.trace(step, (ids,)), st.trace(whole, (ids,))
    found = [
        st.distributed.simulate(
            st.distributed.plan(model, t.order, classes=Block), t, ranks=4, bandwidth=1e6, flops=1e8
        )
        for t in (plain, tr)
    ]
    assert found[0].compute == found[1].compute
    assert found[0].transfers == found[1].transfers


def test_a_step_of_dynamic_sizes_has_no_flops():
    model = nn.Sequential(nn.Linear(4, 4))
    tr = st.trace(step_of(model), (torch.ones(3, 4),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    found = st.distributed.plan(model, tr.order, classes=nn.Linear)
    with pytest.raises(st.errors.PlanError, match="FLOPs need sizes"):
        st.distributed.simulate(found, tr, ranks=4, bandwidth=1e6, flops=1e8)


def test_the_flops_of_what_runs_again_count():
    simulated_step(Blocks(together), Block, torch.zeros(1, 3, dtype=torch.int64))


def last_unused(a, b, c, d, x):
    y = a(x)[0]
    b(y)
    return d(c(y)[0])[0]


def uses_head(model):
    return lambda y: (y @ model.head.weight).sum()


CANNOT_PLAN = {
    "twice": (
        lambda model: step_of(model, times=2),
        dict(classes=Block),
        "calls a Blocks like this one 2 times: trace one with one call",
    ),
    "two backwards": (
        lambda model: step_of(model, lambda y: (y.sum().backward(retain_graph=True), y.mean())[1]),
        dict(classes=Block),
        "differentiates 2 times: trace one with one backward",
    ),
    "outside": (
        lambda model: step_of(model, uses_head(model)),
        dict(classes=Block),
        "head.weight is used outside of the call of model, where it is not gathered: use it inside",
    ),
    "not the last": (
        step_of,
        dict(target_bytes=20_000),
        "backward goes through blocks.0 and not through the last of its group embed, blocks.0, blocks.1",
    ),
}


@pytest.mark.parametrize(("make", "options", "message"), CANNOT_PLAN.values(), ids=CANNOT_PLAN)
def test_steps_of_which_no_plan_can_be_made(make, options, message):
    model = Blocks(last_unused)
    order = st.trace(make(model), (torch.zeros(1, 3, dtype=torch.int64),)).order
    with pytest.raises(st.PlanError) as error:
        st.distributed.plan(model, order, **options)
    assert message in str(error.value)


# Two ranks -----------------------------------------------------------------------------------------------------------


def torchrun(job):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", RANKS, job]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=600, cwd=RANKS.parents[1])


IN_TEST = ("llama, by bytes", "nested", "step of together, layers")
IN_TEST_ALL = tuple(name for name in MODELS if name not in IN_TEST)
"""The models that `make test` leaves out."""
TRAINED = [pytest.param(name, marks=pytest.mark.slow if name in IN_TEST_ALL else ()) for name in MODELS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What the ranks say of a model; those in `IN_TEST_ALL` are trained in one run, and the others in another."""

    @functools.cache
    def run(is_slow):
        names = [name for name in MODELS if (name in IN_TEST_ALL) is is_slow]
        return json.loads(on_two_ranks(tmp_path_factory.mktemp("train"), "ranks.py", "train", *names).splitlines()[-1])

    return lambda name: run(name in IN_TEST_ALL)[name]


@pytest.mark.parametrize("name", TRAINED)
def test_three_steps_by_plan_equal_one_process(trained, name):
    assert trained(name)["loss"] < 1e-5
    assert trained(name)["grad"] < 1e-5


@pytest.mark.parametrize("name", TRAINED)
def test_a_sharded_model_is_not_traced(trained, name):
    assert "the model is sharded by fully_shard" in trained(name)["traced"]
    assert "trace it before it is sharded" in trained(name)["traced"]


@pytest.mark.parametrize("name", TRAINED)
def test_the_all_gathers_are_those_of_the_plan(trained, name):
    assert trained(name)["gathers"] == [trained(name)["planned"]] * 3


@pytest.mark.slow
def test_two_pipeline_stages_equal_one_process(tmp_path):
    for name, result in json.loads(on_two_ranks(tmp_path, "ranks.py", "pipeline").splitlines()[-1]).items():
        assert result["error"] < 1e-5, name
        assert result["stages"] == 2, name


@pytest.mark.slow
def test_ranks_that_disagree_end_with_the_first_difference():
    ran = torchrun("disagree")
    assert ran.returncode != 0
    assert "ranks 0 and 1 run in different orders: step 4, after return of Embedding[embed]" in ran.stderr


@pytest.mark.slow
def test_ranks_with_different_plans_end_with_the_first_group_that_differs():
    ran = torchrun("plans")
    assert ran.returncode != 0
    assert "ranks 0 and 1 have different plans: group 1 is embed, in the other embed, layers.0.norm1" in ran.stderr


@pytest.mark.slow
def test_a_model_is_sharded_once():
    ran = torchrun("twice")
    assert ran.returncode != 0
    assert "PlanError: layers.0 is sharded already: plan, and apply once, before fully_shard" in ran.stderr


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_run_with_its_error():
    ran = torchrun("fail")
    assert ran.returncode != 0
    assert "ZeroDivisionError" in ran.stderr


def test_a_plan_takes_an_order_and_a_split_a_number():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tr = st.trace(model, (torch.ones(1, 2),))
    with pytest.raises(st.PlanError, match=r"order must be the order of a trace, trace\(model, ...\).order, not Trace"):
        st.distributed.plan(model, tr, target_bytes=1)
    with pytest.raises(st.PlanError, match="stages='0': write the number of stages, 2 or more"):
        st.distributed.split_points(tr, "0")
