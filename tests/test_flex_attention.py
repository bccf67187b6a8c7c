"""`flex_attention` in a model: one op, with the functions of scores and of the mask as bodies."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn.attention import flex_attention as flex

import scopetrace as st

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
BIAS = torch.linspace(-1, 1, 4)
TABLE = torch.linspace(-1, 1, 256).view(16, 16)
LENGTHS = torch.tensor([9, 16])


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def make(batch=2, length=16, kv_heads=4, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(batch, h, length, 8, dtype=dtype) for h in (4, kv_heads, kv_heads)]


def mask(mask_mod, batch=None):
    return flex.create_block_mask(mask_mod, batch, None, 16, 16, device="cpu")


CAUSAL = mask(causal)
PADDED = mask(lambda b, h, i, j: j < LENGTHS[b], 2)
PROGRAMS = {
    "plain": lambda q, k, v: flex.flex_attention(q, k, v),
    "a bias by head": lambda q, k, v: flex.flex_attention(
        q, k, v, score_mod=lambda s, b, h, i, j: s + BIAS[h] * (i - j)
    ),
    "a table": lambda q, k, v: flex.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + TABLE[i, j]),
    "a softcap": lambda q, k, v: flex.flex_attention(q, k, v, score_mod=lambda s, *_: 20 * torch.tanh(s / 20)),
    "causal": lambda q, k, v: flex.flex_attention(q, k, v, block_mask=CAUSAL),
    "padded": lambda q, k, v: flex.flex_attention(q, k, v, block_mask=PADDED),
    "both": lambda q, k, v: flex.flex_attention(q, k, v, lambda s, b, h, i, j: s + BIAS[h], CAUSAL, scale=0.5),
    "a mask made inside": lambda q, k, v: flex.flex_attention(q, k, v, block_mask=mask(causal)),
    "a mask of a mask": lambda q, k, v: flex.flex_attention(
        q, k, v, block_mask=mask(flex.and_masks(causal, lambda b, h, i, j: i - j < 4))
    ),
    "of what was computed": lambda q, k, v: (
        lambda slope: flex.flex_attention(q * 2, k, v, lambda s, b, h, i, j: s + slope[h] * (i - j))
    )(q.mean((0, 2, 3))),
    "more results": lambda q, k, v: flex.flex_attention(q, k, v, return_aux=flex.AuxRequest(lse=True)),
    "two calls": lambda q, k, v: flex.flex_attention(flex.flex_attention(q, k, v, block_mask=CAUSAL), k, v),
    "written afterwards": lambda q, k, v: flex.flex_attention(q, k, v, block_mask=CAUSAL).mul_(2),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_those_of_eager(name, functional):
    f = PROGRAMS[name]
    tr = st.trace(f, tuple(make()), functional=functional)
    tr.lint()
    given = [t * 2 for t in make()]
    torch.testing.assert_close(tr(*given), f(*given))


@pytest.mark.parametrize("name", ["a bias by head", "causal", "both", "a softcap", "a mask made inside"])
def test_gradients(name, monkeypatch):
    """torch refuses gradients on the CPU, for the sake of its compiled kernel; the op itself has them."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    f = PROGRAMS[name]
    found = []
    tr = st.trace(f, tuple(t.requires_grad_() for t in make()))
    for run in (f, tr):
        given = [t.requires_grad_() for t in make()]
        found.append(torch.autograd.grad(run(*given).square().sum(), given))
    torch.testing.assert_close(found[1], found[0])


def test_a_table_that_requires_grad_is_refused(monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    with pytest.raises(st.errors.ControlFlowError, match="score_mod indexes a tensor that requires grad"):
        st.trace(PROGRAMS["of what was computed"], tuple(t.requires_grad_() for t in make()))


def test_where_torch_refuses_gradients_so_do_we():
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        st.trace(PROGRAMS["plain"], tuple(t.requires_grad_() for t in make()))


def test_grouped_heads_and_other_dtypes():
    def f(q, k, v):
        return flex.flex_attention(q, k, v, block_mask=CAUSAL, enable_gqa=True)

    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        given = tuple(make(kv_heads=2, dtype=dtype))
        torch.testing.assert_close(st.trace(f, given)(*given), f(*given))


def test_the_text_has_both_bodies():
    text = str(st.trace(PROGRAMS["both"], tuple(make()))).splitlines()
    assert text[3:] == [
        "    sdpa_score_0(%score: f32[], %b: i32[], %h: i32[], %q_idx: i32[], %kv_idx: i32[], "
        "%tensor_constant0: f32[4]) -> %add: f32[]",
        "      %index: f32[] = aten.index.Tensor(%tensor_constant0, [%h])",
        "      %add: f32[] = aten.add.Tensor(%score, %index)",
        "    sdpa_mask_0(%b: i32[], %h: i32[], %q_idx: i32[], %kv_idx: i32[]) -> %ge: b8[]",
        "      %ge: b8[] = aten.ge.Tensor(%q_idx, %kv_idx)",
    ]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x, block_mask=None):
        q, k, v = self.qkv(x).view(x.shape[0], x.shape[1], 3, 4, 8).permute(2, 0, 3, 1, 4).unbind()
        y = flex.flex_attention(q, k, v, lambda s, b, h, i, j: s + self.bias[h] * (i - j), block_mask)
        return y.transpose(1, 2).flatten(2)


@torch.no_grad()
def test_a_dynamic_batch_and_length():
    model = Attention()
    tr = st.trace(model, (torch.randn(2, 16, 32),), dynamic_shapes=({0: Dim("b"), 1: Dim("n", min=2)},))
    tr.lint()
    for shape in ((1, 16, 32), (3, 7, 32), (2, 40, 32)):
        tr.check((torch.randn(shape),))


@torch.no_grad()
def test_a_block_mask_among_the_arguments():
    model = Attention()
    x = torch.randn(2, 16, 32)
    tr = st.trace(model, (x, CAUSAL))
    torch.testing.assert_close(tr(x, CAUSAL), model(x, CAUSAL))
    torch.testing.assert_close(tr(x, mask(causal)), model(x, CAUSAL))
    with pytest.raises(st.errors.InputMismatchError, match="mask_mod was causal"):
        tr(x, PADDED)


@torch.no_grad()
def test_files_programs_and_traces_of_traces(tmp_path):
    model = nn.Sequential(Attention(), Attention())
    x = torch.randn(2, 16, 32)
    tr = st.trace(model, (x,))
    tr.save(tmp_path / "attention.st")
    program = tr.to_exported_program()
    outlined = tr.outline(Attention)
    assert len(outlined.functions) == 1
    others = [
        st.load(tmp_path / "attention.st"),
        copy.deepcopy(tr),
        tr.decompose(),
        program.module(),
        outlined,
        st.trace(tr.graph_module, (x,)),
    ]
    for other in others:
        found = other(x)
        torch.testing.assert_close(found[0] if isinstance(found, tuple) else found, model(x))


def test_what_is_refused():
    def writes(q, k, v):
        return flex.flex_attention(q, k, v, score_mod=lambda s, *_: s + TABLE.add_(0)[0, 0])

    with pytest.raises(st.errors.ControlFlowError, match="score_mod writes to a tensor"):
        st.trace(writes, tuple(make()))
    with pytest.raises(st.errors.UnsupportedOpError, match="transform"):
        st.trace(
            lambda q, k, v: torch.vmap(lambda q, k, v: flex.flex_attention(q, k, v))(q, k, v),
            tuple(t[None] for t in make()),
        )


class Causal(nn.Module):
    def forward(self, q, k, v):
        return flex.flex_attention(q, k, v, block_mask=mask(causal)) + 1


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = Causal()

    def forward(self, q, k, v):
        return self.attend(q, k, v) * 2


@pytest.mark.parametrize("functions", [(), True])
def test_onnx_has_no_form_of_it(functions):
    with torch.no_grad():
        tr = st.trace(Around(), tuple(make()))
    with pytest.raises(st.errors.OnnxOpError, match=r"no ONNX form here:\n  flex_attention, Around/Causal\[attend\], "):
        tr.to_onnx(functions=functions)
    assert next(node.op_type for node in tr.to_onnx(plugins=Causal).graph) == "Causal"
