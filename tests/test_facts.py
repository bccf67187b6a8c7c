"""What Python asks of a tensor, and of torch: a call of the trace answers as eager does, or is refused.

if z.is_contiguous(): ...      # `z` may be an input, a result, or a view of either
"""

import copy
import linecache
import math
import operator
import weakref

import numpy as np
import pytest
import torch

import scopetrace as st
from scopetrace.watch import questions

QUESTIONS = """
x.dtype==torch.float32  x.dtype is torch.float32  x.dtype.is_floating_point  x.is_floating_point()
torch.is_floating_point(z)  z.is_complex()  z.dtype.itemsize  z.itemsize  torch.finfo(z.dtype).max>1
torch.finfo(z.dtype).eps  str(z.dtype)=='torch.float32'  z.device.type=='cpu'  z.device==torch.device('cpu')
str(z.device)=='cpu'  z.device.index is None  z.is_cuda  z.is_cpu  z.is_meta  z.is_sparse  z.is_quantized  z.is_mkldnn
z.is_mps  z.layout==torch.strided  z.is_nested  z.is_leaf  z.requires_grad  z.grad is None  z.grad_fn is None
z.retains_grad  z._version  z._version+(z.add_(0)._version)  z._backward_hooks is None  z.is_contiguous()
z.is_contiguous(memory_format=torch.channels_last)  z.stride(0)  z.stride()[-1]  z.storage_offset()  z.element_size()
z.nbytes  z.numel()  z.ndim  z.is_inference()  z.is_conj()  z.is_neg()  z.is_signed()  z.is_shared()  z.is_pinned()
z.is_distributed()  z.is_same_size(x)  z.is_set_to(z)  z is z  z is x  id(z)==id(z)  hash(z)==hash(z)
z.data_ptr()==z.data_ptr()  z.data_ptr()==x.data_ptr()  z.untyped_storage().data_ptr()==x.untyped_storage().data_ptr()
z.untyped_storage().nbytes()  z.storage().size()  z.untyped_storage() is z.untyped_storage()
z.untyped_storage()==x.untyped_storage()  z._cdata==z._cdata  z._base is None  z._base is x  z._is_view()
isinstance(z,torch.Tensor)  isinstance(z,torch.nn.Parameter)
isinstance(z,torch.FloatTensor)  isinstance(z,(list,tuple))  torch.is_tensor(z)  z.type()=='torch.FloatTensor'
z.type(torch.float64).dtype==torch.float64  torch.overrides.is_tensor_like(z)  torch.is_storage(z)  hasattr(z,'foo')
getattr(z,'foo',3.)  hasattr(z,'grad')  hasattr(z,'numpy')  callable(z)  z==None  z is None  z!=None  len(z)
len(z.shape)  bool(z.numel())  bool(z.sum()>0)  z.sum().item()  z.tolist()[0][0]  list(z)[0].sum()
next(iter(z)).sum()  list(reversed(z))[0].sum()  sum(z).sum()  max(z.shape)  min(1,z.dim())  [*z][0].sum()
(lambda a,b:a)(*z).sum()  z in [z]  any(z is t for t in [x,z])  [x,z].index(z)  {z:1.}[z]  {id(z):1.}[id(z)]
weakref.ref(z)() is z  copy.copy(z).sum()  z.__len__()  z.__array__().sum()  np.asarray(z.detach()).sum()
z.detach().numpy().sum()  float(z.sum())  int(z.sum())  complex(z.sum()).real  round(z.sum().item(),1)
math.isnan(z.sum())  math.floor(z.sum())  format(z.sum().item(),'.1f')=='1.0'  '%.1f'%z.sum()=='1.0'
repr(z)[:6]=='tensor'  str(z)[0]=='t'  z.equal(x)  torch.equal(z,x)  torch.allclose(z,x)  z.eq(x).all().item()
(z==x).all()  not (z==x).all()  torch.isnan(z).any().item()  torch.isfinite(z).all()  z.abs().max().item()>1
z.argmax().item()  int(z.argmax())  z.any().item()  z.all().item()  z.nonzero().shape[0]  z.count_nonzero().item()
z.unique().shape[0]  z.T.is_contiguous()  z.mT.stride(0)  z.t().contiguous().stride(0)  z.expand(2,*z.shape).stride(0)
z.view(-1).stride(0)  z[0].storage_offset()  z[1].storage_offset()  z.data.requires_grad  z.detach().requires_grad
z.detach()._version  (z+1).is_leaf  (z+1).requires_grad  (z+1)._version  (z+1).add_(1)._version  z.clone().is_leaf
torch.is_grad_enabled()  torch.is_inference_mode_enabled()  torch.is_autocast_enabled()
torch.is_autocast_enabled('cpu')  torch.get_autocast_dtype('cpu')==torch.bfloat16
torch.get_default_dtype()==torch.float32  torch.get_default_device()==torch.device('cpu')  torch.get_num_threads()
torch.are_deterministic_algorithms_enabled()  torch.is_deterministic_algorithms_warn_only_enabled()
torch.is_warn_always_enabled()  torch.backends.cudnn.enabled  torch.backends.mkldnn.is_available()
torch.backends.mha.get_fastpath_enabled()  torch.cuda.is_available()  torch.cuda.device_count()
torch.get_float32_matmul_precision()=='highest'  torch.is_anomaly_enabled()  torch.jit.is_tracing()
torch.jit.is_scripting()  torch.onnx.is_in_onnx_export()  torch.result_type(z,1)==torch.float32
torch.promote_types(z.dtype,torch.float64)==torch.float64  torch.can_cast(z.dtype,torch.int32)  z.dim_order()[0]
z.is_coalesced  torch.get_device(z)  z.get_device()  z.device.type in ('cuda','mps')
z.dtype in (torch.float16,torch.bfloat16)  z.ndimension()  z.nelement()  z.size()==x.size()  z.shape is x.shape
z.is_nonzero if z.numel()>1 else 2.  z.imag if z.is_complex() else 2.  z.real.sum()  isinstance(z.sum().item(),float)
isinstance(z.tolist(),list)  isinstance(z.shape,torch.Size)  torch.utils.data.get_worker_info() is None
torch.distributed.is_initialized()  torch.distributed.is_available()  torch.version.cuda is None
z.new_tensor([1.]).dtype==z.dtype  z.new_empty(2).device.type=='cpu'  torch.empty_like(z).stride(0)
torch.zeros_like(z,requires_grad=True).is_leaf  torch.tensor(1.).dtype==torch.float32
torch.ones(1).device.type=='cpu'  z.to(torch.float32) is z  z.to(z.device) is z  z.float() is z  z.cpu() is z
z.view(z.shape) is z  z.reshape(z.shape) is z  z.expand_as(z) is z  z.type_as(z) is z  z.detach() is z
z.requires_grad_(z.requires_grad) is z  z.add_(0) is z  z.squeeze() is z  z.data is z  F.dropout(z,0.5,False) is z
F.relu(z,inplace=False) is z  torch.nn.Identity()(z) is z  torch.atleast_1d(z) is z
torch.broadcast_tensors(z,z)[0] is z  torch.as_tensor(z) is z  torch.squeeze(z) is z
z.contiguous().data_ptr()==z.data_ptr()  z.to(torch.float32).data_ptr()==z.data_ptr()
z.reshape(-1).data_ptr()==z.data_ptr()  z.T.reshape(-1).data_ptr()==z.data_ptr()  z.to(torch.float32,copy=True) is z
"""
"""Parted by two spaces or a line's end. `z.contiguous() is z` is not among them: another layout of an input gives a
call no other identity."""

MODULES = {m.__name__: m for m in (copy, math, operator, torch, weakref)} | {"np": np, "F": torch.nn.functional}
TENSORS = {
    "x": "an input",
    "(x * 2)": "a result",
    "x.t()": "a view",
    "x[1:]": "a part",
}
INPUTS = {
    "the same": lambda: torch.arange(6.0).view(2, 3) - 2,
    "other values": lambda: torch.arange(6.0).view(2, 3) + 2,
    "with gradients": lambda: (torch.arange(6.0).view(2, 3) - 1).requires_grad_(),
    "transposed": lambda: (torch.arange(6.0).view(3, 2) - 1).t(),
    "a part of more": lambda: torch.arange(9.0)[3:].view(2, 3),
}


def function_of(tensor, question, before="pass"):
    """`forward(x)` with a source that errors can show."""
    code = f"def forward(x):\n    {before}\n    z = {tensor}\n    return x * ({question})\n"
    name = f"<{before} {tensor} {question}>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    found = dict(MODULES)
    exec(compile(code, name, "exec"), found)
    return found["forward"]


def outcome(run, *args):
    """The result, or the class of Python's error; None where it is refused."""
    try:
        return run(*args)
    except st.errors.ScopetraceError:
        return None
    except Exception as error:
        return type(error)


@pytest.mark.sample(5)
@pytest.mark.parametrize("question", [q for line in QUESTIONS.splitlines() for q in line.split("  ") if q])
@pytest.mark.filterwarnings("ignore")
def test_a_question_is_answered_as_in_eager_or_refused(question):
    for tensor in TENSORS:
        forward = function_of(tensor, question)
        trace = outcome(st.trace, forward, (INPUTS["the same"](),))
        if isinstance(trace, type):
            assert isinstance(outcome(forward, INPUTS["the same"]()), type), (tensor, trace)
        elif trace is not None:
            for kind, make in INPUTS.items():
                wanted, found = outcome(forward, make()), outcome(trace, make())
                if isinstance(wanted, torch.Tensor) and found is not None:
                    assert isinstance(found, torch.Tensor), (tensor, kind, found)
                    assert found.requires_grad == wanted.requires_grad, (tensor, kind)
                    torch.testing.assert_close(found.detach(), wanted.detach(), msg=f"{tensor}, {kind}")


def test_a_question_with_a_keyword_is_asked_again_at_the_call():
    last = torch.channels_last
    trace = st.trace(lambda x: x * 2 if x.is_contiguous(memory_format=last) else x, (torch.ones(1, 2, 3, 4),))
    assert torch.equal(trace(torch.ones(1, 2, 3, 4)), torch.ones(1, 2, 3, 4))
    with pytest.raises(st.errors.InputMismatchError, match="is_contiguous"):
        trace(torch.ones(1, 2, 3, 4).to(memory_format=last))


def test_such_a_question_is_in_files(tmp_path):
    trace = st.trace(lambda x: x.is_contiguous(memory_format=torch.channels_last) + x, (torch.ones(1, 2, 3, 4),))
    trace.save(tmp_path / "saved.st")
    assert torch.equal(st.load(tmp_path / "saved.st")(torch.ones(1, 2, 3, 4)), torch.ones(1, 2, 3, 4))


def test_what_scopetrace_asks_of_storages_takes_no_look_at_who_asks(monkeypatch):
    asked = []
    monkeypatch.setenv("SCOPETRACE_CHECK", "0")  # checks ask as anybody does
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True)).eval()
    st.trace(model, torch.ones(2, 4))  # torch's cache of fake results asks when it meets an op first
    monkeypatch.setattr(questions, "asked_by_model", lambda *way: asked.append(way))
    assert st.trace(model, torch.ones(2, 4)).graph_module is not None
    assert asked == []


def sparse(coalesced):
    t = torch.sparse_coo_tensor(torch.tensor([[0, 1, 1]]), torch.tensor([1.0, 2.0, 3.0]), (4,))
    return t.coalesce() if coalesced else t


class Held(torch.nn.Module):
    def __init__(self, coalesced):
        super().__init__()
        self.register_buffer("weights", sparse(coalesced))

    def forward(self, x):
        return x * 2 if self.weights.is_coalesced() else x * 3


@pytest.mark.parametrize("traced", [False, True])
def test_whether_a_sparse_tensor_is_coalesced(traced):
    def asked(x):
        return x * 2 if x.is_coalesced() else x * 3

    def asked_of_a_result(x):
        return x * 2 if (x * 1).is_coalesced() else x * 3

    trace = st.trace(asked, (sparse(traced),))
    assert torch.equal(trace(sparse(traced)).to_dense(), asked(sparse(traced)).to_dense())
    with pytest.raises(st.errors.InputMismatchError, match=r"x\.is_coalesced\(\).*and (True|False) now"):
        trace(sparse(not traced))
    with pytest.raises(st.errors.UnsupportedOpError, match="a sparse tensor that it has made is coalesced"):
        st.trace(asked_of_a_result, (sparse(traced),))
    assert st.trace(lambda x: x.coalesce() * int(x.coalesce().is_coalesced()), (sparse(traced),)) is not None
    net = Held(traced)
    trace = st.trace(net, (torch.ones(2),))
    assert torch.equal(trace(torch.ones(2)), net(torch.ones(2)))
    net.weights = sparse(not traced)
    with pytest.raises(st.errors.StateMismatchError, match=r"weights\.is_coalesced\(\)"):
        trace(torch.ones(2))
