"""A call of a trace under torch's profiler: a range for each module call and user scope, in backward too."""

import json

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import scopetrace as st
from scopetrace._compat.graph_module import is_profiling


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        with st.scope("twice"):
            x = x * 2
        return self.fc(x).relu()


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(self.block(x))


def profiled(run, tmp_path):
    """The result of `run` and what its ranges look like in the exported trace, as an indented list, root first."""
    with torch.profiler.profile() as profile:
        result = run()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ranges = [e for e in events if e.get("cat") == "user_annotation" and "#" not in e["name"]]
    open_until, lines = [], []
    for event in sorted(ranges, key=lambda e: (e["ts"], -e["dur"])):
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        assert not open_until or event["ts"] + event["dur"] <= open_until[-1]  # inside, never across
        lines.append("  " * len(open_until) + event["name"])
        open_until.append(event["ts"] + event["dur"])
    return result, lines


def test_the_ranges_of_a_step(tmp_path):
    model, x = nn.Sequential(Block(), nn.Linear(4, 1)), torch.randn(2, 4)

    def step(x):
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    tr = st.trace(step, (x,))
    wanted = tr(x)
    result, lines = profiled(lambda: tr(x), tmp_path)
    assert torch.equal(result, wanted)
    assert lines == [
        "step",
        "  step/Sequential[model]",
        "    step/Sequential[model]/Block[0]",
        "      step/Sequential[model]/Block[0]/twice",
        "      step/Sequential[model]/Block[0]/Linear[fc]",
        "    step/Sequential[model]/Linear[1]",
        "  step backward",
        "    step/Sequential[model] backward",
        "      step/Sequential[model]/Linear[1] backward",
        "      step/Sequential[model]/Block[0] backward",
        "        step/Sequential[model]/Block[0]/Linear[fc] backward",
    ]


def test_the_module_view_of_tensorboard(tmp_path):
    """It lists the events that have "Python module id", which a profiler with stacks makes of calls of modules."""
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 4)

    def step(x):
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    hooked = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: hooked.append(1))
    try:
        tr = st.trace(step, (x,))
        hooked.clear()
        with torch.profiler.profile(with_stack=True) as profile:
            tr(x)
            tr(x)
    finally:
        hook.remove()
    assert not hooked
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if "Python id" in str(e)]
    by_id = {e["args"]["Python id"]: e for e in events}

    def around(event):
        parent = by_id.get(event["args"].get("Python parent id"))
        return [] if parent is None else [*around(parent), *(parent["name"],) * ("Python module id" in parent["args"])]

    views = ["  " * len(around(e)) + e["name"] for e in events if "Python module id" in e["args"]]
    assert views == 2 * [
        "nn.Module: step_0",
        "  nn.Module: step/Sequential[model]_0",
        "    nn.Module: step/Sequential[model]/Block[0]_0",
        "      nn.Module: step/Sequential[model]/Block[0]/twice_0",
        "      nn.Module: step/Sequential[model]/Block[0]/Linear[fc]_0",
        "    nn.Module: step/Sequential[model]/Block[1]_0",
        "      nn.Module: step/Sequential[model]/Block[1]/twice_0",
        "      nn.Module: step/Sequential[model]/Block[1]/Linear[fc]_0",
        "  nn.Module: step backward_0",
        "    nn.Module: step/Sequential[model] backward_0",
        "      nn.Module: step/Sequential[model]/Block[1] backward_0",
        "        nn.Module: step/Sequential[model]/Block[1]/Linear[fc] backward_0",
        "        nn.Module: step/Sequential[model]/Block[1]/twice backward_0",
        "      nn.Module: step/Sequential[model]/Block[0] backward_0",
        "        nn.Module: step/Sequential[model]/Block[0]/Linear[fc] backward_0",
    ]


def test_two_calls_of_one_module_are_two_ranges(tmp_path):
    tr = st.trace(Repeated(), (torch.ones(1, 4),))
    inside = ["  Repeated/Block[block]", "    Repeated/Block[block]/twice", "    Repeated/Block[block]/Linear[fc]"]
    assert profiled(lambda: tr(torch.ones(1, 4)), tmp_path)[1] == ["Repeated", *inside, *inside]


def test_a_checkpointed_region_that_runs_again(tmp_path):
    block, x = Block(), torch.randn(2, 4)

    def step(x):
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()

    tr = st.trace(step, (x,))
    assert "      step/Block[block]/Linear[fc] recomputed" in profiled(lambda: tr(x), tmp_path)[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda tr: tr.decompose(),
        lambda tr: tr.outline("layers"),
        lambda tr: tr.to_module(),
        lambda tr: st.trace(tr.model, (torch.ones(2, 4),), functional=False),
        lambda tr: st.trace(tr.model, (torch.ones(2, 4),), leaf_modules=Block),
    ],
)
def test_other_forms_name_their_calls(make, tmp_path):
    tr = st.trace(nn.Sequential(Block(), Block()), (torch.ones(2, 4),))
    x = torch.randn(2, 4)
    form = make(tr)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            result, lines = profiled(lambda: form(x), tmp_path)
        assert torch.equal(result, tr.model(x))
        assert {"Sequential", "  Sequential/Block[0]", "  Sequential/Block[1]"} <= set(lines)


def test_other_modes_and_edits_and_saved_traces(tmp_path):
    def f(x):
        with torch.no_grad():
            y = block(x)
        return y + x

    block, x = Block(), torch.randn(2, 4)
    tr = st.trace(f, (x,))
    next(n for n in tr.graph_module.graph.nodes if n.target is torch.ops.aten.relu.default).target = torch.ops.aten.tanh
    tr.save(tmp_path / "f.st")
    for traced in (tr, st.load(tmp_path / "f.st")):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                result, lines = profiled(lambda traced=traced: traced(x), tmp_path)
                assert torch.equal(result, (block.fc(x * 2)).tanh() + x)
                assert lines == ["f", "  f/Block[block]", "    f/Block[block]/twice", "    f/Block[block]/Linear[fc]"]


def test_an_op_that_raises_leaves_no_range_open(tmp_path):
    def f(x):
        return block.fc(x[x > 0].reshape(1, 4))

    block = Block()
    tr = st.trace(f, (torch.ones(1, 4),))

    def run():
        with pytest.raises(RuntimeError):
            tr(torch.zeros(1, 4))
        with torch.profiler.record_function("after"):
            torch.ones(2)

    assert profiled(run, tmp_path)[1] == ["f", "after"]


def test_an_input_of_any_name(tmp_path):
    def f(ranges, ranges_, change):
        return ranges + ranges_ + change

    x = torch.ones(2)
    tr = st.trace(f, (x, x, x))
    assert torch.equal(profiled(lambda: tr(x, x, x), tmp_path)[0], 3 * x)


def test_without_a_profiler_the_graph_runs_as_it_is(monkeypatch):
    monkeypatch.setattr("scopetrace.program.traced.RangedRun", None)  # what runs it node by node
    tr = st.trace(Block(), (torch.ones(1, 4),))
    assert not is_profiling()
    tr(torch.ones(1, 4))


def test_hooks_of_the_graph_module_run_under_a_profiler_too(tmp_path):
    tr, seen = st.trace(Block(), (torch.ones(1, 4),)), []
    tr(torch.ones(1, 4))
    tr.graph_module.register_forward_hook(lambda *_: seen.append(1))
    profiled(lambda: tr(torch.ones(1, 4)), tmp_path)
    assert seen == [1]
