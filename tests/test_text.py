"""A trace as text: small models, and what `str(tr)` says of them."""

import io
import re
import sys
import textwrap

import pytest
import torch
from torch import nn

import scopetrace as st
from scopetrace.cli.run import print_text

X = torch.zeros(2, 4)


def trace(model, *args, **options):
    kwargs = options.pop("kwargs", None)
    model = model.eval() if isinstance(model, nn.Module) else model
    with torch.no_grad():
        return st.trace(model, args, kwargs, **options)


def check(text, expected):
    assert str(text).rstrip() == textwrap.dedent(expected).strip()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, scale=1.0, mask=None):
        return self.fc(x).relu() * scale


class Layers(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=2.0, mask=None)
        return x


# What a program looks like -------------------------------------------------------------------------------------------


def test_calls_ops_and_types():
    check(
        trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), X),
        """
        Sequential: 2 ops, 3 module calls, 2 parameters (15 elements)
        Sequential(input=%input_1: f32[2, 4]) -> %relu: f32[2, 3]
          Linear[0](input=%input_1: f32[2, 4]) -> %linear: f32[2, 3]
            %linear: f32[2, 3] = aten.linear(%input_1, self.weight, self.bias)
          ReLU[1](input=%linear: f32[2, 3]) -> %relu: f32[2, 3]
            %relu: f32[2, 3] = aten.relu(%linear)
        """,
    )


def test_equal_layers_are_one_line_with_their_count():
    check(
        trace(Layers(12), X),
        """
        Layers: 36 ops, 25 module calls, 24 parameters (240 elements)
        Layers(x=%x: f32[2, 4]) -> %mul_11: f32[2, 4]
          Block[layers.0](x=%x: f32[2, 4], scale=2.0) -> %mul: f32[2, 4]
            Linear[fc](input=%x: f32[2, 4]) -> %linear: f32[2, 4]
              %linear: f32[2, 4] = aten.linear(%x, self.weight, self.bias)
            %relu: f32[2, 4] = aten.relu(%linear)
            %mul: f32[2, 4] = aten.mul.Tensor(%relu, 2.0)
          Block[layers.1 … layers.11] ×11 as Block[layers.0] -> %mul_11: f32[2, 4]
        """,
    )


def test_depth():
    tr = trace(nn.Sequential(Layers(2), nn.Identity()), X)
    check(
        tr.print_readable(depth=0, print_output=False),
        """
        Sequential: 6 ops, 7 module calls, 4 parameters (40 elements)
        Sequential(input=%input_1: f32[2, 4]) -> %mul_1: f32[2, 4]
          Layers[0](x=%input_1: f32[2, 4]) -> %mul_1: f32[2, 4]  # 6 ops
          Identity[1](input=%mul_1: f32[2, 4]) -> %mul_1: f32[2, 4]  # 0 ops
        """,
    )
    check(
        tr.print_readable(depth=1, print_output=False),
        """
        Sequential: 6 ops, 7 module calls, 4 parameters (40 elements)
        Sequential(input=%input_1: f32[2, 4]) -> %mul_1: f32[2, 4]
          Layers[0](x=%input_1: f32[2, 4]) -> %mul_1: f32[2, 4]
            Block[layers.0](x=%input_1: f32[2, 4], scale=2.0) -> %mul: f32[2, 4]  # 3 ops
            Block[layers.1] as Block[layers.0] -> %mul_1: f32[2, 4]
          Identity[1](input=%mul_1: f32[2, 4]) -> %mul_1: f32[2, 4]
        """,
    )
    assert tr.print_readable(depth=9, print_output=False) == str(tr)


class Rotary(nn.Module):
    def forward(self, x):
        with st.scope("rotary"):
            a, b = x.split(2, dim=-1)
            with st.scope("halves"):
                x = torch.cat([-b, a], -1)
        values, _ = x.sort()
        return {"values": values, "pair": (x, None)}


def test_user_scopes_and_several_results():
    check(
        trace(Rotary(), X),
        """
        Rotary: 4 ops, 1 module call, 0 parameters
        Rotary(x=%x: f32[2, 4]) -> {'values': %getitem_2: f32[2, 4], 'pair': (%cat: f32[2, 4], None)}
          scope("rotary")
            %getitem: f32[2, 2], %getitem_1: f32[2, 2] = aten.split.Tensor(%x, 2, -1)
            scope("halves")
              %neg: f32[2, 2] = aten.neg(%getitem_1)
              %cat: f32[2, 4] = aten.cat([%neg, %getitem], -1)
          %getitem_2: f32[2, 4], %getitem_3: i64[2, 4] = aten.sort(%cat)
        """,
    )


class Failing(nn.Module):
    def forward(self, x):
        x = x.sin()
        raise ValueError("not today\nsecond line")


class Odd(nn.Module):
    """A call that raises, a leaf, a module called twice, one that is not in the tree, a tied weight."""

    def __init__(self):
        super().__init__()
        self.failing = Failing()
        self.leaf = Block()
        self.emb = nn.Embedding(3, 4)
        self.other = [nn.ReLU()]

    def forward(self, x, ids):
        try:
            self.failing(x)
        except ValueError:
            x = self.leaf(x)
        x = self.other[0](x)
        return self.emb(ids) @ x.T, self.emb(ids), nn.functional.linear(x, self.emb.weight)


def test_calls_that_are_special():
    check(
        trace(Odd(), X, torch.zeros(1, dtype=torch.int64), leaf_modules=["leaf"]),
        """
        Odd: 7 ops, 6 module calls, 3 parameters (32 elements)
        Odd(x=%x: f32[2, 4], ids=%ids: i64[1]) -> (%matmul: f32[1, 2], %embedding_1: f32[1, 4], %linear: f32[2, 3])
          Failing[failing](x=%x: f32[2, 4])  # raised ValueError: not today
          Block[leaf](x=%x: f32[2, 4]) -> %leaf: f32[2, 4]  # leaf
          ReLU(input=%leaf: f32[2, 4]) -> %relu: f32[2, 4]  # not a submodule of the model
            %relu: f32[2, 4] = aten.relu(%leaf)
          Embedding[emb](input=%ids: i64[1]) -> %embedding: f32[1, 4]
            %embedding: f32[1, 4] = aten.embedding(self.weight, %ids)
          %numpy_T: f32[4, 2] = aten.numpy_T(%relu)
          %matmul: f32[1, 2] = aten.matmul(%embedding, %numpy_T)
          Embedding[emb]#1(input=%ids: i64[1]) -> %embedding_1: f32[1, 4]
            %embedding_1: f32[1, 4] = aten.embedding(self.weight, %ids)
          %linear: f32[2, 3] = aten.linear(%relu, self.emb.weight)
        """,
    )


class Head(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(3, 4)
        self.head = Head(self.emb.weight)

    def forward(self, ids):
        return self.head(self.emb(ids))


def test_a_weight_of_another_module_is_written_in_full():
    assert "aten.linear(%embedding, emb.weight)" in str(trace(Tied(), torch.zeros(2, dtype=torch.int64)))


class Switches(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        with torch.enable_grad():
            z = self.fc(x)
        return y, z


def test_autograd_switches_stand_where_they_act():
    check(
        trace(Switches(), X),
        """
        Switches: 4 ops, 3 module calls, 2 parameters (20 elements)
        Switches(x=%x: f32[2, 4]) -> (%linear: f32[2, 4], %linear_1: f32[2, 4])
          Linear[fc](input=%x: f32[2, 4]) -> %linear: f32[2, 4]
            %linear: f32[2, 4] = aten.linear(%x, self.weight, self.bias)
          Linear[fc]#1(input=%x: f32[2, 4]) -> %linear_1: f32[2, 4]
            torch._C._set_grad_enabled(True)
            %linear_1: f32[2, 4] = aten.linear(%x, self.weight, self.bias)
          torch._C._set_grad_enabled(False)
        """,
    )


def test_a_function_and_a_program_without_ops():
    def double(x):
        return x * 2

    check(
        trace(double, X.bool()),
        """
        double: 1 op, 1 module call, 0 parameters
        double(x=%x: b8[2, 4]) -> %mul: i64[2, 4]
          %mul: i64[2, 4] = aten.mul.Tensor(%x, 2)
        """,
    )
    check(
        trace(nn.Identity(), torch.zeros((), dtype=torch.bfloat16)),
        """
        Identity: 0 ops, 1 module call, 0 parameters
        Identity(input=%input_1: bf16[]) -> %input_1: bf16[]
        """,
    )


def test_sizes_that_depend_on_data_are_written_as_expressions():
    assert re.search(r"%nonzero: i64\[u0, 2\] = aten\.nonzero\(%x\)", str(trace(lambda x: x.nonzero(), X)))


class Config:
    """An object whose repr has an address."""


class Takes(nn.Module):
    def forward(self, x, config, dtype, many, none=3, *rest, flag=True, default=1, **extra):
        return x.to(dtype)


def test_python_values():
    given = (X, Config(), torch.float16, list(range(20)), None, "a")
    header = str(trace(Takes(), *given, kwargs={"flag": False, "k": {"v": 1.5}})).splitlines()[1]
    assert header == (
        "Takes(x=%x: f32[2, 4], config=<Config>, dtype=torch.float16, many=[0, 1, 2, 3, 4, 5, 6, 7, … 12 more], "
        "none=None, rest=('a',), flag=False, extra={'k': {'v': 1.5}}) -> %to: f16[2, 4]"
    )


# What is folded, and what is not -------------------------------------------------------------------------------------


def lines_with(text, word):
    return [line.strip() for line in str(text).splitlines() if word in line]


class Parallel(nn.Module):
    """Calls side by side on one input."""

    def __init__(self, make, count):
        super().__init__()
        self.heads = nn.ModuleList(make() for _ in range(count))

    def forward(self, x):
        return torch.stack([head(x) for head in self.heads])


def test_calls_side_by_side_show_their_results():
    assert lines_with(trace(Parallel(Block, 6), X), "×") == [
        "Block[heads.1 … heads.5] ×5 as Block[heads.0] -> %mul_1: f32[2, 4], %mul_2: f32[2, 4], …, %mul_5: f32[2, 4]"
    ]


def test_single_ops_side_by_side_are_all_shown():
    text = trace(Parallel(lambda: nn.Linear(4, 4), 3), X)
    assert not lines_with(text, "×")
    assert len(lines_with(text, "aten.linear")) == 3


def test_a_chain_of_single_ops_is_folded():
    text = trace(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), X)
    assert lines_with(text, "×") == ["Linear[1, 2] ×2 as Linear[0] -> %linear_2: f32[2, 4]"]


def test_one_module_called_again_and_again():
    def forward(model, x):
        for _ in range(4):
            x = model(x)
        return x

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return forward(self.block, x)

    assert lines_with(trace(Loop(), X), "×") == ["Block[block]#1 … #3 ×3 as Block[block] -> %mul_3: f32[2, 4]"]


def test_inputs_of_their_own_are_shown():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Bilinear(4, 4, 4) for _ in range(3))

        def forward(self, x, skips):
            for layer, skip in zip(self.layers, skips, strict=True):
                x = layer(x, skip)
            return x

    assert lines_with(trace(Skips(), X, [X.clone() for _ in range(3)]), "×") == [
        "Bilinear[layers.1, layers.2] ×2 as Bilinear[layers.0](input2=%skips_1, %skips_2) -> %bilinear_2: f32[2, 4]"
    ]


class Scaled(nn.Module):
    def __init__(self, scale, shift=None):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = scale
        self.shift = shift

    def forward(self, x):
        x = self.fc(x) * self.scale
        return x if self.shift is None else x + torch.tensor([self.shift])


DIFFERENT = {
    "constants": [Scaled(1.0), Scaled(2.0)],
    "kinds of constants": [Scaled(1.0), Scaled(1)],
    "constant tensors": [Scaled(1.0, 3.0), Scaled(1.0, 4.0)],
    "ops": [nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), nn.Sequential(nn.GELU(), nn.Linear(4, 4))],
    "shapes": [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))],
    "classes": [Block(), Scaled(1.0)],
}


@pytest.mark.parametrize("layers", DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_is_not_folded(layers):
    assert not lines_with(trace(nn.Sequential(*layers), X).print_readable(depth=0, print_output=False), " as ")


def test_equal_constant_tensors_are_folded():
    assert lines_with(trace(nn.Sequential(Scaled(1.0, 3.0), Scaled(1.0, 3.0)), X), "Scaled[1] as Scaled[0]")


class Crossed(nn.Module):
    """Two equal calls whose inputs change places."""

    def __init__(self, swap):
        super().__init__()
        self.layers = nn.ModuleList(nn.Bilinear(4, 4, 4) for _ in range(3))
        self.swap = swap

    def forward(self, x, y):
        a, b = self.layers[0], self.layers[1]
        x = a(x, y)
        x = b(y, x) if self.swap else b(x, y)
        return self.layers[2](x, y)


def test_wiring_counts():
    assert len(lines_with(trace(Crossed(False), X, X.clone()), "×2 as")) == 1
    assert not lines_with(trace(Crossed(True), X, X.clone()), "×2 as")


class Alternating(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() if i % 2 else Scaled(1.0) for i in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_call_equal_to_an_earlier_one_is_one_line():
    assert lines_with(trace(Alternating(), X), " as ") == [
        "Scaled[layers.2](x=%mul_1: f32[2, 4]) -> %mul_2: f32[2, 4]  # as Scaled[layers.0]",
        "Block[layers.3](x=%mul_2: f32[2, 4]) -> %mul_3: f32[2, 4]  # as Block[layers.1]",
        "Scaled[layers.4](x=%mul_3: f32[2, 4]) -> %mul_4: f32[2, 4]  # as Scaled[layers.0]",
        "Block[layers.5](x=%mul_4: f32[2, 4]) -> %mul_5: f32[2, 4]  # as Block[layers.1]",
    ]


def test_folding_costs_the_same_for_each_layer():
    class Numbered(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.layers = nn.ModuleList(Scaled(float(i)) for i in range(count))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def calls_made(count):
        tr = trace(Numbered(count), X)
        tr.print_readable(print_output=False)  # makes what a trace makes once
        made = 0

        def count_call(frame, event, arg):
            nonlocal made
            made += event == "call"

        sys.setprofile(count_call)
        try:
            str(tr)
        finally:
            sys.setprofile(None)
        return made

    few, many = calls_made(20), calls_made(200)
    assert many < few * 11


# A part of a program -------------------------------------------------------------------------------------------------


def test_scope_pattern():
    tr = trace(nn.Sequential(Layers(2), Rotary()), X)
    check(
        tr.print_readable(scope="**/Block[layers.1]", print_output=False),
        """
        Sequential: 10 ops, 7 module calls, 4 parameters (40 elements)
        Sequential/Layers[0]/Block[layers.1](x=%mul: f32[2, 4], scale=2.0) -> %mul_1: f32[2, 4]
          Linear[fc](input=%mul: f32[2, 4]) -> %linear_1: f32[2, 4]
            %linear_1: f32[2, 4] = aten.linear(%mul, self.weight, self.bias)
          %relu_1: f32[2, 4] = aten.relu(%linear_1)
          %mul_1: f32[2, 4] = aten.mul.Tensor(%relu_1, 2.0)
        """,
    )
    assert lines_with(tr.print_readable(scope="*rotary", print_output=False), "scope(") == [
        'scope("Sequential/Rotary[1]/rotary")',
        'scope("halves")',
    ]
    with pytest.raises(st.ArgumentError) as caught:
        tr.print_readable(scope="*/Conv*", print_output=False)
    assert str(caught.value) == (
        "no scope matches '*/Conv*'; paths are such as 'Sequential/Layers[0]' and "
        "'Sequential/Layers[0]/Block[layers.0]'"
    )


# Where it is printed -------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def test_colour_on_a_terminal_and_the_same_words(terminal):
    text = str(trace(nn.Sequential(Layers(3), Rotary()), X))
    print_text(text, terminal)
    coloured = terminal.getvalue()
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == text + "\n"


def test_plain_in_a_file(capsys, tmp_path):
    tr = trace(Block(), X)
    returned = tr.print_readable()
    assert capsys.readouterr().out == returned + "\n" == f"{tr}\n"
    with (tmp_path / "trace.txt").open("w+", encoding="utf-8") as file:
        print_text(returned, file)
        file.seek(0)
        assert file.read() == returned + "\n"
