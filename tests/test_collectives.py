"""Collectives of torch.distributed in a forward: functional ops in the trace, equal to eager on one rank and on two."""

import pytest
import torch
import torch.distributed as dist
from processes import on_two_ranks

import scopetrace as st
from tests.collectives import LINEAR, PROGRAMS, X, exported, forms_of
from tests.compare import assert_like_eager


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    file = tmp_path_factory.mktemp("ranks") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ops(tr):
    nodes = [n for n in tr.graph_module.graph.nodes if n.op == "call_function"]
    return [getattr(n.target, "__name__", str(n.target)).removesuffix(".default") for n in nodes]


def test_a_collective_is_its_functional_op_and_a_wait():
    #   y = x * 2; dist.all_reduce(y); return y + 1
    tr = st.trace(PROGRAMS["all_reduce"], (X,))
    assert ops(tr) == ["mul.Tensor", "all_reduce", "wait_tensor", "add.Tensor"]


def test_the_wait_is_where_the_model_waits():
    #   work = dist.all_reduce(y, async_op=True); z = x + 1; work.wait(); return y + z
    found = ops(st.trace(PROGRAMS["waited_for_later"], (X,)))
    assert found.index("all_reduce") < found.index("add.Tensor") < found.index("wait_tensor")


def test_a_result_that_nobody_reads_stays_for_the_other_ranks():
    tr = st.trace(PROGRAMS["result_that_nobody_reads"], (X,))
    tr.graph_module.graph.eliminate_dead_code()
    assert "all_reduce" in ops(tr)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_equal_to_eager_on_one_rank(name):
    run = PROGRAMS[name]
    tr = st.trace(run, (X.clone(),))
    for program in forms_of(tr).values():
        assert_like_eager(run, program, (X,))
    if name != "of_a_parameter":  # a parameter that a forward writes needs torch.no_grad() around an ExportedProgram
        torch.testing.assert_close(exported(tr)(X.clone()), run(X.clone()))


@pytest.mark.parametrize("use", [lambda m: st.trace(m, (X,)), lambda m: st.trace(lambda x, m=m: m(x).sum(), (X,))])
def test_a_model_with_dtensors_is_refused_with_what_to_do(use):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    parallelize_module(model, dist.device_mesh.init_device_mesh("cpu", (1,)), {"1": ColwiseParallel()})
    with pytest.raises(st.errors.UnsupportedOpError, match="has a DTensor") as refused:
        use(model)
    assert "trace it before it is distributed" in str(refused.value) and "1" in str(refused.value.module)


@pytest.mark.slow
def test_it_is_equal_to_eager_on_two_ranks(tmp_path):
    assert on_two_ranks(tmp_path, "collectives.py").count("equal") == 2


def test_gradients_pass_a_collective_as_in_eager():
    run, gradients = PROGRAMS["with_gradients"], []
    for program in (run, st.trace(run, (X,))):
        LINEAR.zero_grad()
        program(X).sum().backward()
        gradients.append(LINEAR.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def overwrites_saved(x):
    y = LINEAR(x).exp()  # its backward reads y
    dist.all_reduce(y)
    return y


def scales_first(x):
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(2.0))


def different_sizes(x):
    dist.all_gather([torch.empty(2), torch.empty(3)], x)


def any_source(x):
    dist.recv(x)


def objects(x):
    found = [None]
    dist.all_gather_object(found, 3)
    return x * found[0]


def list_of_objects(x):
    found = [3]
    dist.broadcast_object_list(found, 0)
    return x * found[0]


REFUSED = [
    (overwrites_saved, "autograd has saved for backward"),
    (scales_first, "PREMUL_SUM"),
    (different_sizes, "different sizes"),
    (any_source, "has no functional form"),
    (objects, "exchanges Python objects"),
    (list_of_objects, "exchanges Python objects"),
]


@pytest.mark.parametrize(("run", "message"), REFUSED, ids=[run.__name__ for run, _ in REFUSED])
def test_without_a_functional_form_it_is_refused_with_op_and_line(run, message):
    with pytest.raises(st.errors.UnsupportedOpError, match=message) as error:
        st.trace(run, (X.clone(),))
    assert f"in {run.__name__}: " in error.value.source
    assert error.value.op
    assert error.value.hint


def test_the_autograd_functions_of_torch_distributed_nn_are_refused():
    from torch.distributed.nn.functional import all_reduce

    with pytest.raises(st.errors.UnsupportedOpError, match=r"torch\.distributed\.nn\.functional\.all_reduce"):
        st.trace(lambda x: all_reduce(LINEAR(x)), (X,))


def test_onnx_has_no_collectives():
    pytest.importorskip("onnxscript")
    with pytest.raises(st.errors.OnnxExportError, match="all_reduce"):
        st.trace(PROGRAMS["all_reduce"], (X,)).to_onnx()


def test_a_value_that_needs_other_ranks_is_no_constant_and_no_example():
    def f(x):
        t = torch.ones(1)
        dist.all_reduce(t)
        return x * 2 if t > 0 else x

    with pytest.raises(st.errors.DataDependentError):
        st.trace(f, (X,))
    with pytest.raises(st.errors.DataDependentError, match="other processes"):
        st.trace(f, (X,), specialize=True)


def test_a_model_in_ddp_is_traced_by_its_module():
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    with pytest.raises(st.errors.UnsupportedOpError, match=r"instead: trace the module inside, ddp\.module"):
        st.trace(ddp, (X,))
    torch.testing.assert_close(st.trace(ddp.module, (X,))(X), ddp(X))
