"""Context managers in a forward: what runs in them is as in eager, or refused.

Each manager is entered in each of the forms, around one of the bodies, which is another one for the next form.
`python tests/test_contexts.py` runs all of them.
"""

import itertools
import textwrap

import pytest
import torch
from forwards import HEAD, assert_right_or_refused
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import scopetrace as st

MODEL = """
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
class Plain:
    def __enter__(self):
        self.depth = 1
        return self
    def __exit__(self, *error):
        return False
class Swallow(Plain):
    def __exit__(self, kind, *error):
        return kind is ValueError
LEVEL = [0]
class Level:
    def __enter__(self):
        LEVEL[0] += 1
    def __exit__(self, *error):
        LEVEL[0] -= 1
@contextlib.contextmanager
def without_grad():
    with torch.no_grad():
        yield 3.0
@contextlib.contextmanager
def default_dtype(dtype):
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(old)
class OfFunctions(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.relu else out
class OfOps(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out + 1 if func is torch.ops.aten.relu.default else out
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.lin, self.drop, self.bn = nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.register_buffer("buf", torch.ones(4))
make = Net
"""

MANAGERS = """
torch.no_grad()  torch.enable_grad()  torch.set_grad_enabled(False)  torch.inference_mode()
torch.inference_mode(False)  torch.autocast('cpu', dtype=torch.bfloat16)  torch.autocast('cpu', enabled=False)
torch.amp.autocast('cpu', torch.float16)  torch.device('cpu')  torch.device('meta')  contextlib.nullcontext()
contextlib.suppress(ValueError)  Plain()  Swallow()  Level()  without_grad()  default_dtype(torch.float64)  OfOps()
torch.random.fork_rng()  torch.autograd.set_detect_anomaly(True)  torch.profiler.record_function('a')  OfFunctions()
torch.autograd.profiler.record_function('a')  torch.backends.cudnn.flags(enabled=False)  FlopCounterMode(display=False)
torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)  torch.backends.mkldnn.flags(enabled=False)
torch.autograd.graph.save_on_cpu()  warnings.catch_warnings()  threading.Lock()  contextlib.ExitStack()
contextlib.redirect_stdout(io.StringIO())  torch.autograd.forward_ad.dual_level()  nn.utils.parametrize.cached()
torch.sparse.check_sparse_tensor_invariants(True)  unittest.mock.patch.object(F, 'relu', torch.sigmoid)
unittest.mock.patch.object(torch, 'relu', torch.sigmoid)  decimal.localcontext()  np.errstate(all='ignore')
torch.autograd.graph.disable_saved_tensors_hooks('no')  torch.autograd.set_multithreading_enabled(False)
torch.compiler.set_stance('force_eager')  torch.set_grad_enabled(x.sum() is None)
unittest.mock.patch.object(self.drop, 'p', 0.25)  unittest.mock.patch.object(self, 'training', False)
torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)  torch._C.DisableTorchFunctionSubclass()
"""
BODIES = """
y = self.lin(x)  y = x * 2  y = torch.ones(3)  y = x.clone(); y.add_(1)  self.buf.add_(1); y = self.buf * 1
y = torch.arange(3) / 2  y = torch.rand(3)  y = x[0]  y = torch.tensor([1.5])  y = x @ x.T  y = torch.relu(x)
y = F.relu(x)  y = self.drop(x)  y = self.bn(x)  y = F.scaled_dot_product_attention(x[None], x[None], x[None])
y = torch.is_grad_enabled() * x  y = x.requires_grad * x  y = LEVEL[0] * x  y = self.lin.weight * 1
"""
FORMS = {
    "with": "with {manager}: {body}",
    "an error inside": "try:\n    with {manager}: {body}; raise ValueError\nexcept ValueError: y = y + 1",
    "a return inside": "with {manager}: {body}; return y, x * 1",
    "in a loop": "for _ in range(2):\n    with {manager}: {body}",
    "in a function": "def inner(x):\n    with {manager} as entered: {body}; return y\ny = inner(x)",
    "in a stack": "with contextlib.ExitStack() as stack: stack.enter_context({manager}); {body}",
    "by its methods": "c = {manager}\nc.__enter__()\ntry: {body}\nfinally: c.__exit__(None, None, None)",
    "around another": "with {manager}, torch.no_grad(): {body}",
    "inside of another": "with torch.no_grad(), {manager}: {body}",
}


def parted(text):
    """What is parted by two spaces or the end of a line."""
    return [part for line in text.splitlines() for part in line.split("  ") if part]


def source(manager, body, form):
    """A file with the model and its forward."""
    lines = FORMS[form].format(manager=manager, body=body) + "\nreturn y, self.lin(x) + torch.ones(4)\n"
    forward = "def forward(self, x):\n" + textwrap.indent(lines, "    ")
    return f"{HEAD}{MODEL}\n{forward}\nNet.forward = forward\n"


def programs():
    """Every manager in every form; the bodies in turn."""
    bodies = itertools.cycle(parted(BODIES))
    for manager in parted(MANAGERS):
        yield manager, [(next(bodies), form) for form in FORMS]


@pytest.mark.sample(11)
@pytest.mark.parametrize(("manager", "bodies"), [pytest.param(*p, id=p[0]) for p in programs()])
@pytest.mark.filterwarnings("ignore")
def test_what_runs_in_a_context_manager_is_right_or_refused(manager, bodies):
    for number, (body, form) in enumerate(bodies):
        assert_right_or_refused(source(manager, body, form), grad=number % 2 == 0)


def run_in(manager, body):
    """A forward as a function."""
    names = {"torch": torch}
    exec(f"{HEAD}{MODEL}\ndef run(x):\n    with {manager}:\n        {body}\n    return y", names)
    return names["run"]


@pytest.mark.parametrize("manager", ["OfOps()", "FlopCounterMode(display=False)"])
def test_a_mode_that_sees_ops_is_refused(manager):
    with pytest.raises(st.errors.UnsupportedOpError, match="a TorchDispatchMode"):
        st.trace(run_in(manager, "y = torch.relu(x)"), (torch.ones(2),))


def test_an_op_of_integers_that_gives_a_default_dtype_of_the_forward_is_refused():
    with pytest.raises(st.errors.UnsupportedOpError, match=r"has set the default dtype, torch\.float64"):
        st.trace(run_in("default_dtype(torch.float64)", "y = torch.arange(3) / 2"), (torch.ones(2),))
    run = run_in("default_dtype(torch.float64)", "y = torch.arange(3).to(torch.get_default_dtype()) / 2")
    assert torch.equal(st.trace(run, (torch.ones(2),))(torch.ones(2)), torch.tensor([0, 0.5, 1], dtype=torch.float64))


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("grad", [False, True])
def test_attention_under_a_choice_of_kernels_is_the_kernel_that_it_chooses(backend, grad):
    def forward(q):
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, q, q)

    q = torch.randn(2, 4, 64, 32, requires_grad=grad)
    tr = st.trace(forward, (q,))
    (name,) = [str(n.target) for n in tr.graph_module.graph.nodes if "attention" in str(n.target)]
    assert (
        name
        == {
            SDPBackend.MATH: "aten._scaled_dot_product_attention_math.default",
            SDPBackend.FLASH_ATTENTION: "aten._scaled_dot_product_flash_attention_for_cpu.default",
        }[backend]
    )
    assert torch.equal(tr(q), forward(q))
    if grad:
        of_trace, of_eager = (torch.autograd.grad(f(q).square().sum(), q) for f in (tr, forward))
        assert torch.equal(*of_trace, *of_eager)


def test_a_default_device_leaves_the_end_of_a_block_without_gradients_what_it_is():
    class Model(torch.nn.Module):
        def forward(self, x):
            with torch.no_grad():
                view = x.view(-1)
            return view.sin() * x.sum()

    x = torch.randn(2, 3, requires_grad=True)
    torch.set_default_device("cpu")
    try:
        tr = st.trace(Model(), (x,))
        with torch.no_grad():
            assert torch.equal(tr(x), Model()(x))
    finally:
        torch.set_default_device(None)


if __name__ == "__main__":
    for manager, body, form in itertools.product(parted(MANAGERS), parted(BODIES), FORMS):
        for grad in (True, False):
            try:
                assert_right_or_refused(source(manager, body, form), grad)
            except AssertionError as error:
                print(f"{manager}, {body}, {form}, {grad}: {str(error)[:200]}")
