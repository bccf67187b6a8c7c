"""Names, classes, modules and predicates choose the same module calls wherever a caller names some."""

import json
import re
import warnings

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import scopetrace as st
from scopetrace.api.runnable import program_of
from scopetrace.cli import main
from scopetrace.view.boxes import boxes, outermost_boxes


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(4, 4)

    def forward(self, x):
        with st.scope("heads"):
            return self.q(x).relu()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.GELU())

    def forward(self, x):
        return self.mlp(self.attn(x) + x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


MODEL, X = Net().eval(), torch.ones(2, 4)
ATTENTIONS = ["layers.0.attn", "layers.1.attn", "layers.2.attn"]

FORMS = {
    "pattern of names": ("layers.*.attn", ATTENTIONS),
    "set of characters": ("layers.[02].attn", ["layers.0.attn", "layers.2.attn"]),
    "name": ("layers.1.mlp", ["layers.1.mlp"]),
    "scope path": ("Net/Block[layers.1]/Attention[attn]", ["layers.1.attn"]),
    "pattern of scope paths": ("**/Attention[attn]", ATTENTIONS),
    "class name": ("Attention", ATTENTIONS),
    "pattern of class names": ("Att*", ATTENTIONS),
    "class": (Attention, ATTENTIONS),
    "base class": (nn.Sequential, ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"]),
    "module": (MODEL.layers[2].attn, ["layers.2.attn"]),
    "predicate on a call": (lambda call: call.fqn is not None and call.fqn.endswith("attn"), ATTENTIONS),
    "predicate with a default": (lambda call, end="0.attn": (call.fqn or "").endswith(end), ["layers.0.attn"]),
    "predicate on module and name": (
        lambda module, fqn: isinstance(module, Attention) and "1" not in fqn,
        [*ATTENTIONS[::2]],
    ),
    "list": (["layers.0.attn", nn.Sequential], ["layers.0.attn", "layers.0.mlp", "layers.1.mlp", "layers.2.mlp"]),
    "tuple": (("layers.0.attn", MODEL.layers[1].mlp), ["layers.0.attn", "layers.1.mlp"]),
}


@pytest.fixture(scope="module")
def tr():
    with torch.no_grad():
        return st.trace(MODEL, (X,))


def leaf_modules(tr, target):
    with torch.no_grad():
        return [call.fqn for call in st.trace(MODEL, (X,), leaf_modules=target).calls if call.is_leaf]


def outline(tr, target):
    return sorted(call.fqn for function in tr.outline(target).functions for call in function.calls)


def calls(tr, target):
    return [call.fqn for call in tr.calls[target]]


def activations(tr, target):
    with torch.no_grad():
        return list(tr.activations(X, of=target))


def print_readable(tr, target):
    return tr.print_readable(scope=target, print_output=False)


def to_svg(tr, target):
    return [box.call.fqn for box in outermost_boxes(boxes(program_of(tr)), target)]


PLACES = [leaf_modules, outline, calls, activations, to_svg]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_names_the_same_calls_everywhere(tr, form, place):
    target, expected = FORMS[form]
    assert sorted(place(tr, target)) == expected


@pytest.mark.parametrize("form", FORMS)
def test_text_of_chosen_calls(tr, form):
    target, expected = FORMS[form]
    text = print_readable(tr, target)
    shown = [line for line in text.splitlines()[1:] if not line.startswith(" ")]
    folded = sum(int(n) for n in re.findall(r"×(\d+) as", "\n".join(shown)))
    assert sum("×" not in line for line in shown) + folded == len(expected)


def run(*args):
    return CliRunner().invoke(main, [str(a) for a in args])


PATTERNS = {name: form for name, form in FORMS.items() if isinstance(form[0], str)}


@pytest.fixture(scope="module")
def saved(tr, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "net.st"
    tr.save(path)
    return path


def outermost(names):
    return [name for name in names if not any(name.startswith(f"{around}.") for around in names)]


@pytest.mark.parametrize("form", PATTERNS)
def test_scope_of_commands(saved, form):
    pattern, expected = PATTERNS[form]
    table = run("show", saved, "--calls", "--depth", "0", "--scope", pattern)
    assert outermost([line.split()[1] for line in table.stdout.splitlines()[1:]]) == expected
    found = json.loads(run("show", saved, "--json", "--depth", "0", "--scope", pattern).stdout)["boxes"]
    inside = {i for box in found for i in box["children"]}
    assert [box["name"] for i, box in enumerate(found) if i not in inside] == expected


def test_several_scopes_of_a_command(saved):
    table = run("show", saved, "--calls", "--depth", "0", "--scope", "layers.0.attn", "--scope", "GELU").stdout
    assert outermost([line.split()[1] for line in table.splitlines()[1:]]) == [
        "layers.0.attn",
        *(f"layers.{i}.mlp.1" for i in range(3)),
    ]


def test_user_scopes_are_named_by_name_and_path(tr):
    for pattern in ("heads", "**/heads", "Net/Block[layers.0]/*/heads"):
        assert (
            tr.print_readable(scope=pattern, print_output=False)
            .splitlines()[1]
            .startswith('scope("Net/Block[layers.0]')
        )
        assert outermost_boxes(boxes(program_of(tr)), pattern)[0].label == "heads"


class Stages(nn.Module):
    """Twelve layers, lists in a list, and names with characters that patterns have."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ReLU() for _ in range(12))
        self.stages = nn.ModuleList(nn.ModuleList(Attention() for _ in range(2)) for _ in range(2))
        self.experts = nn.ModuleDict({name: nn.ReLU() for name in ("a-b", "x/y", "q[0]", "s*", "s*t")})
        self.attn = Attention()

    def forward(self, x):
        for layer in [*self.layers, *self.stages[0], *self.stages[1], *self.experts.values(), self.attn]:
            x = layer(x)
        return x


STAGES = ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
NESTED = {
    "layers.1": ["layers.1"],
    "layers.1?": ["layers.10", "layers.11"],
    "layers.*": [f"layers.{i}" for i in range(12)],
    "layers.**": [f"layers.{i}" for i in range(12)],
    "stages.*.*": STAGES,
    "stages.*.[!1]": ["stages.0.0", "stages.1.0"],
    "stages.**.q": [f"{name}.q" for name in STAGES],
    "stages.*.*.**": [f"{name}.q" for name in STAGES],
    "st**.1.q": ["stages.0.1.q", "stages.1.1.q"],
    "*.q": ["attn.q"],
    "**.q": [*(f"{name}.q" for name in STAGES), "attn.q"],
    "**.attn": ["attn"],
    "*/Attention[*]": ["attn"],
    "*/Attention[stages.1.*]": ["stages.1.0", "stages.1.1"],
    "*/Attention[stages.**]": STAGES,
    "Stages/Attention[**]": [*STAGES, "attn"],
    "Stages/*/*/Linear[q]": [*(f"{name}.q" for name in STAGES), "attn.q"],
    "Stages/**/Linear[q]": [*(f"{name}.q" for name in STAGES), "attn.q"],
    "**/heads/*": [*(f"{name}.q" for name in STAGES), "attn.q"],
    "experts.x/y": ["experts.x/y"],
    "experts.q[0]": ["experts.q[0]"],
    "experts.s*": ["experts.s*", "experts.s*t"],
    "Stages/ReLU[experts.x/y]": ["experts.x/y"],
}


@pytest.fixture(scope="module")
def stages():
    with torch.no_grad():
        return st.trace(Stages(), (X,))


@pytest.mark.parametrize("pattern", NESTED)
def test_a_star_stops_at_dots_and_slashes_and_two_cross_them(stages, pattern):
    assert calls(stages, pattern) == NESTED[pattern]


def test_each_name_and_path_names_its_call_alone(stages):
    for call in stages.calls[lambda call: call.fqn and not call.fqn.endswith("*")]:
        assert stages.calls[call.scope.path] == stages.calls[call.fqn] == [call]


def test_a_pattern_that_needs_two_stars_says_so(stages):
    for pattern, wider in {"stages.*": "'stages.**'", "*/Linear[q]": "'**/Linear[q]'", "*.*.q": "'**.**.q'"}.items():
        message = re.escape(f"** crosses them: write {wider}")
        with torch.no_grad():
            uses = [
                lambda p: stages.calls[p],
                lambda p: stages.outline(p),
                lambda p: print_readable(stages, p),
                lambda p: st.trace(stages.model, (X,), leaf_modules=p),
            ]
            for use in uses:
                with pytest.raises(st.ArgumentError, match=message):
                    use(pattern)


class Preset(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.layers(x)


def test_a_rule_that_is_the_name_of_a_call_too_says_which_one_is_meant():
    with torch.no_grad():
        tr = st.trace(Preset(), (X,))
    with pytest.warns(st.errors.TargetWarning, match=r"not the module call.*'Preset/Sequential\[layers\]'"):
        assert outline(tr, "layers") == ["layers.0", "layers.1"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert outline(tr, "Preset/Sequential[layers]") == outline(tr, tr.model.layers) == ["layers"]


UNNAMED = re.compile("no module call is named|no scope matches")
NOTHING = ["layers.9", "*/Conv[0]", "Conv*", nn.Conv2d, nn.Linear(1, 1), ["layers.0", "layers.9"]]


@pytest.mark.parametrize("target", NOTHING, ids=str)
def test_a_target_that_names_nothing_is_an_error(tr, target):
    with pytest.raises(st.ArgumentError, match=UNNAMED):
        tr.calls[target]
    for use in (print_readable, lambda tr, target: tr.to_svg(scope=target), activations):
        with pytest.raises(st.ArgumentError, match=UNNAMED):
            use(tr, target)
    with pytest.raises(st.errors.OutlineError, match="is no call of this trace"):
        tr.outline(*target) if isinstance(target, list) else tr.outline(target)
    if not isinstance(target, nn.Module):
        with pytest.raises(st.errors.LeafPatternError, match=r"no module is named|the model has no Conv2d"):
            leaf_modules(tr, target)


@pytest.mark.parametrize("target", [3, None, 2.5, torch.ops.aten.relu.default], ids=str)
def test_what_is_no_target(tr, target):
    uses = [lambda: tr.calls["layers.0", target], lambda: tr.outline(target), lambda: leaf_modules(tr, [target])]
    for use in [*uses, lambda: tr.print_readable(scope=[target])]:
        with pytest.raises(st.ArgumentError, match="give a module class"):
            use()
