"""The command line: what it prints, and what it says when something is wrong."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

import scopetrace
from scopetrace.cli import COMMANDS, main

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
        self.drop = nn.Dropout(0.5)

    def forward(self, x, ids=None, *, scale=None):
        print("printed by the model")
        y = self.drop(self.body(x))
        if ids is not None:
            y = y[ids]
        return y if scale is None else y * scale

model = Net()

class Parts:
    inner = nn.Linear(4, 2)

    @property
    def broken(self):
        raise RuntimeError("no model")

parts = Parts()

def build():
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(300)])

def build_sized(size):
    return nn.Linear(size, size)

def build_text():
    return "model"

def build_badly():
    raise RuntimeError("no weights here\\nsecond line")

def build_exit():
    raise SystemExit("no such file")

def build_with_package():
    import package_that_is_not_there

class Branch(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x

class Takes(nn.Module):
    def forward(self, batch, n, s):
        return getattr(torch, s)(batch["x"] * n + batch["more"]["y"])

class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.check(self.inner(x))

    def check(self, x):
        raise ValueError("x is not right\\nsecond line")

class Keywords(nn.Module):
    def forward(self, tokens, **kwargs):
        if kwargs:
            raise TypeError(f"unknown: {list(kwargs)}")
        return tokens * 2

class Many(nn.Module):
    def forward(self, x, *rest):
        return sum(rest, x)

class Declares(Net):
    dummy_inputs = {"x": torch.zeros(3, 4)}

class DeclaresByMethod(Net):
    def dummy_inputs(self):
        return torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64)

class Lightning(Net):
    example_input_array = torch.zeros(6, 4)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A current directory with models in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("cli_models", "cli_needs", "cli_fails", "cli_parts", "cli_parts.net"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    Path("cli_models.py").write_text(MODELS)
    Path("cli_needs.py").write_text("import package_that_is_not_there\n")
    Path("cli_fails.py").write_text("x = 1\nx.y\n")
    Path("cli_parts").mkdir()
    Path("cli_parts/__init__.py").write_text("")
    Path("cli_parts/net.py").write_text("from .missing import Net\n")
    importlib.invalidate_caches()
    yield tmp_path
    for name in ("cli_models", "cli_needs", "cli_fails", "cli_parts", "cli_parts.net"):
        sys.modules.pop(name, None)


def run(*args):
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def show(target, *args):
    return run("show", f"cli_models:{target}", *args)


def output(target, *args):
    result = show(target, *args)
    assert result.exit_code == 0, result.stderr
    return result.stdout


# Order and plan ------------------------------------------------------------------------------------------------------


def test_order():
    result = run("order", "cli_models:Net", "--input", "x=2x4")
    assert result.exit_code == 0, result.stderr
    table, digest = result.stdout.rsplit("digest: ", 1)
    assert table == textwrap.dedent(
        """\
        order  registered  parameter      shape  first used by  last used by
        0      0           body.0.weight  4x4    body.0         body.0
        1      1           body.0.bias    4      body.0         body.0
        2      2           body.2.weight  4x4    body.2         body.2
        3      3           body.2.bias    4      body.2         body.2

        7 module calls, 4 of 4 parameters used
        """
    )
    assert len(digest.strip()) == 64


def test_order_as_data_of_a_model_without_memory():
    result = run("order", "cli_models:Net", "--input", "x=2x4", "--json", "--meta")
    assert result.exit_code == 0, result.stderr
    steps = json.loads(result.stdout)["steps"]
    assert [(s["kind"], s["params"]) for s in steps[2:4]] == [("call", []), ("use", ["body.0.weight", "body.0.bias"])]


def test_plan():
    options = ("--ranks", 4, "--classes", "Linear", "--bandwidth", 1e-6, "--tflops", 1e-9)
    result = run("plan", "cli_models:Net", "--input", "x=2x4", *options)
    assert result.exit_code == 0, result.stderr
    # 80 bytes a group, of which 60 come from others, at 1,000 bytes in a second; 128 FLOPs forward, at 1,000. Exposed
    # are the first gather, the first one of the backward, and the reduction of the last gradients.
    assert result.stdout == textwrap.dedent(
        """\
        group  modules  parameters  bytes  forward prefetch  backward prefetch
        0      (root)   0           0 B    1                 -
        1      body.0   2           80 B   2                 -
        2      body.2   2           80 B   -                 1

        all-gathers, forward: 1 2
        all-gathers, backward: 2 1

        memory of a rank
        sharded parameters                     40 B
        sharded gradients                      40 B
        optimizer                              80 B
        gathered parameters, at most           160 B
        gradients of a group, at most          80 B
        results of ops, without recomputation  128 B
        in all                                 528 B

        6 collectives, 480 B for each of 4 ranks, 0.0% of it padding
        step 564 ms: computation 384 ms, exposed communication 180 ms (60 ms forward, 120 ms backward)

        prefetch  step    exposed forward  exposed backward  gathered at most
        0         624 ms  120 ms           120 ms            80 B
        1         564 ms  60 ms            120 ms            160 B
        2         564 ms  60 ms            120 ms            160 B
        """
    )


WRONG_PLANS = {
    "neither": ((), "write --classes NAME, once for each class, or --target-mb N", 2),
    "unknown class": (("--classes", "Conv2d"), "no module of the model is 'Conv2d'; similar names: 'body'", 2),
    "step": (("--target-mb", 1, "--step"), "leave out --step", 2),
    "nan": (("--target-mb", "nan"), "--target-mb nan: write a finite number", 2),
    "infinite": (("--target-mb", 1, "--bandwidth", "inf"), "--bandwidth inf: write a finite number", 2),
    "container": (("--classes", "ModuleList"), "no module of the model is 'ModuleList'", 2),
}


@pytest.mark.parametrize(("options", "message", "code"), WRONG_PLANS.values(), ids=WRONG_PLANS)
def test_plans_that_cannot_be_made(options, message, code):
    result = run("plan", "cli_models:Net", "--input", "x=2x4", "--ranks", 2, *options)
    assert result.exit_code == code
    assert message in result.stderr.splitlines()[-1]


# What it prints ------------------------------------------------------------------------------------------------------


def test_text():
    result = show("Net", "--input", "x=2x4")
    assert result.exit_code == 0
    assert result.stdout == textwrap.dedent(
        """\
        Net: 5 ops, 7 module calls, 4 parameters (40 elements)
        Net(x=%x: f32[2, 4]) -> %dropout: f32[2, 4]
          Sequential[body](input=%x: f32[2, 4]) -> %relu_1: f32[2, 4]
            Linear[0](input=%x: f32[2, 4]) -> %linear: f32[2, 4]
              %linear: f32[2, 4] = aten.linear(%x, self.weight, self.bias)
            ReLU[1](input=%linear: f32[2, 4]) -> %relu: f32[2, 4]
              %relu: f32[2, 4] = aten.relu(%linear)
            Linear[2](input=%relu: f32[2, 4]) -> %linear_1: f32[2, 4]
              %linear_1: f32[2, 4] = aten.linear(%relu, self.weight, self.bias)
            ReLU[3](input=%linear_1: f32[2, 4]) -> %relu_1: f32[2, 4]
              %relu_1: f32[2, 4] = aten.relu(%linear_1)
          Dropout[drop](input=%relu_1: f32[2, 4]) -> %dropout: f32[2, 4]
            %dropout: f32[2, 4] = aten.dropout(%relu_1, 0.5, False)
        """
    )


def test_depth_and_scope():
    folded = output("Net", "-i", "x=2x4", "--depth", 0)
    assert "  Sequential[body](input=%x: f32[2, 4]) -> %relu_1: f32[2, 4]  # 4 ops\n" in folded
    lines = output("Net", "-i", "x=2x4", "--scope", "Net/*/Linear[2]").splitlines()
    assert lines[1:] == [
        "Net/Sequential[body]/Linear[2](input=%relu: f32[2, 4]) -> %linear_1: f32[2, 4]",
        "  %linear_1: f32[2, 4] = aten.linear(%relu, self.weight, self.bias)",
    ]


def test_calls():
    lines = output("Net", "-i", "x=2x4", "--calls").splitlines()
    assert lines[:3] == [
        "call  fqn     index  class       arguments                              outputs",
        '0     ""      0      Net         x=%x: f32[2, 4], ids=None, scale=None  %dropout: f32[2, 4]',
        "1     body    0      Sequential  input=%x: f32[2, 4]                    %relu_1: f32[2, 4]",
    ]
    assert [line.split()[1] for line in lines[3:]] == ["body.0", "body.1", "body.2", "body.3", "drop"]
    assert len(output("Net", "-i", "x=2x4", "--calls", "--depth", 0).splitlines()) == 4
    assert len(output("Net", "-i", "x=2x4", "--calls", "--scope", "*body*").splitlines()) == 6


def test_json():
    data = json.loads(output("Net", "-i", "x=2x4", "-i", "ids=3:int64", "-i", "scale=scalar", "--json"))
    root, body, linear, op = data["boxes"][:4]
    assert (root["kind"], root["inputs"]) == ("call", [["x", "f32[2, 4]"], ["ids", "i64[3]"], ["scale", "f32[]"]])
    assert (body["name"], body["outputs"]) == ("body", [["output", "f32[2, 4]"]])
    assert ["class", "torch.nn.modules.container.Sequential"] in body["facts"]
    assert linear["children"] == [3]
    assert op["key"] == "Net/Sequential[body]/Linear[0]/%linear"
    assert op["text"] == "%linear: f32[2, 4] = aten.linear(%x, body.0.weight, body.0.bias)"
    assert op["parameters"] == [["body.0.weight", "f32[4, 4]"], ["body.0.bias", "f32[4]"]]
    assert all(len(edge) == 5 for box in data["boxes"] for edge in box["edges"])


def test_json_of_a_part():
    for depth, keys in {
        0: ["Linear[0]", "ReLU[1]", "Linear[2]", "ReLU[3]"],
        1: ["Linear[0]", "Linear[0]/%linear", "ReLU[1]", "ReLU[1]/%relu", "Linear[2]", "Linear[2]/%linear_1"],
    }.items():
        data = json.loads(output("Net", "-i", "x=2x4", "--json", "--scope", "*body*", "--depth", depth))
        path = "Net/Sequential[body]"
        assert [box["key"] for box in data["boxes"]][: len(keys) + 1] == [path, *(f"{path}/{key}" for key in keys)]


def test_train_and_grad():
    assert "aten.dropout(%relu_1, 0.5, True)" in output("Net", "-i", "x=2x4", "--train")
    assert "aten.dropout(%relu_1, 0.5, False)" in output("model", "-i", "x=2x4", "--grad")


@pytest.mark.parametrize("target", ["Net", "model", "Parts.inner", "build"])
def test_targets(target):
    assert output(target, "-i", "0=2x4")


INPUTS = {
    "x=2x4": "f32[2, 4]",
    "x=2,4": "f32[2, 4]",
    "x=2×4:bf16": "bf16[2, 4]",
    "x=1x4:float64": "f64[1, 4]",
    "x=4:f16": "f16[4]",
    "x=4:torch.int32": "i32[4]",
    "0=4:i64": "i64[4]",
    "x=2x0x4:bool": "b8[2, 0, 4]",
    "x=scalar:half": "f16[]",
    "x=": "f32[]",
    "x=:int64": "i64[]",
}


@pytest.mark.parametrize("given", INPUTS)
def test_inputs(given):
    assert f"Many(x=%x: {INPUTS[given]})" in output("Many", "--input", given)


def test_positions_beyond_the_named_arguments():
    assert "rest=(%rest_0: f32[4], %rest_1: f32[4])" in output("Many", "-i", "x=4", "-i", "2=4", "-i", "1=4")


def test_python_values():
    text = output("Net", "-i", "x=2x4", "-i", "scale=true", "-i", "ids=None")
    assert "Net(x=%x: f32[2, 4], scale=True)" in text


def test_version_and_help():
    assert run("--version").stdout == f"scopetrace {scopetrace.__version__}\n"
    for args in ([], ["--help"], ["show", "-h"]):
        result = run(*args)
        assert result.exit_code == 0
        assert result.stdout.startswith("Usage: scopetrace")


# Wrong arguments: one line and exit code 2 ---------------------------------------------------------------------------

WRONG = {
    "cli_models": "write package.module:name, timm:NAME, torchvision:NAME or hf:NAME",
    "cli_models.py:Net": "write the module as in an import, cli_models:Net",
    "no_such_module:Net": "there is no module 'no_such_module' here",
    "cli_models.sub:Net": "there is no module 'cli_models.sub' here",
    "cli_models:Nett": "the module cli_models has no 'Nett'; it has Net",
    "cli_models:Parts.outer": "the class Parts has no 'outer'; it has inner",
    "cli_models:Parts": "is a class, but no torch.nn.Module",
    "cli_models:MODELS": "the module cli_models has no 'MODELS'; it has Net, model, Parts, Branch, Takes",
    "cli_models:parts.broken": "broken raised RuntimeError: no model, at ",
    "cli_models:build_sized": "missing a required argument: 'size'; name a function without arguments",
    "cli_models:build_text": "returned the type str: it must return a torch.nn.Module",
    "cli_models:build_with_package": "pip install package_that_is_not_there",
    "cli_models:torch.float32": "has the type dtype: name a torch.nn.Module",
    "cli_needs:Net": "cli_needs needs package_that_is_not_there, which is not installed: pip install",
    "cli_parts.net:Net": "importing cli_parts.net raised ModuleNotFoundError: No module named 'cli_parts.missing', at ",
    "cli_fails:Net": "importing cli_fails raised AttributeError: 'int' object has no attribute 'y', at ",
}

WRONG_INPUTS = {
    ("x=2x4", "x"): "write NAME=SHAPE[:DTYPE], for example x=1x3x224x224",
    ("=2x4",): "write NAME=SHAPE[:DTYPE]",
    ("x..y=2x4",): "--input x..y=2x4: write NAME=SHAPE[:DTYPE]",
    ("x=2xfour",): "'four' is not a size; write sizes as in x=1x3x224x224 or x=1,3,224,224",
    ("x=-1x4",): "'-1' is not a size",
    ("x=2x",): "'' is not a size",
    ("x=2x4:flaot32",): "'flaot32' is no dtype; write one such as float32",
    ("x=2x4:int46",): "'int46' is no dtype; write one such as int64",
    ("x=99999999999x99999999999",): "no tensor of that size and dtype can be made",
    ("y=2x4",): "Net.forward: no argument 'y'; its arguments are x, ids, scale; write NAME=",
    ("scales=2x4",): "Net.forward: no argument 'scales'; its arguments are x, ids, scale; write NAME=",
    ("x=2x4", "x=2x4"): "an --input is given twice",
    ("x=2x4", "0=2x4"): "Net.forward: multiple values for argument 'x'; its arguments are x, ids, scale",
    ("x=2x4", "2=2x4"): "Net.forward: no argument '2'; its arguments are x, ids, scale; write NAME=",
    ("x=2x4", "²=2x4"): "Net.forward: no argument '²'; its arguments are x, ids, scale; write NAME=",
    ("ids=3:int64",): "Net.forward: missing a required argument: 'x'; its arguments are x, ids, scale; write NAME=",
    (): "Net.forward: missing a required argument: 'x'; its arguments are x, ids, scale; write NAME=",
}

WRONG_OPTIONS = {
    ("--depth", "-1"): "-1 is not in the range",
    ("--depth", "two"): "'two' is not a valid integer",
    ("--scope", "*/Conv*"): "no scope matches '*/Conv*'; paths are such as 'Sequential/Linear[0]' and ",
    ("--calls", "--json"): "write one of them",
    ("--colour",): "No such option",
    ("--optimizer", "adam"): "--loss and --optimizer are for training steps: add --step",
    ("--step", "--optimizer", "adma"): "'adma' is not one of 'adadelta'",
    ("--step", "--optimizer", "lbfgs"): "'lbfgs' is not one of 'adadelta', 'adafactor', 'adagrad', 'adam', 'adamax'",
    ("--step", "--loss", "logits"): "loss logits: the model's result has no such tensor; it is a tensor",
}


def refused(result, message):
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("scopetrace: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("target", WRONG)
def test_wrong_targets(target):
    refused(run("show", target, "-i", "x=2x4"), WRONG[target])


@pytest.mark.parametrize("given", WRONG_INPUTS, ids="+".join)
def test_wrong_inputs(given):
    refused(show("model", *[part for text in given for part in ("--input", text)]), WRONG_INPUTS[given])


@pytest.mark.parametrize("options", WRONG_OPTIONS, ids=" ".join)
def test_wrong_options(options):
    refused(show("build", "-i", "0=2x4", *options), WRONG_OPTIONS[options])


def test_an_optimizer_without_parameters():
    result = show("Branch", "-i", "x=4", "--step", "--optimizer", "sgd")
    refused(result, "optimizer sgd: the model has no parameters; leave it out")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["onnx", "-o", ""], "Is a directory: '.'"),
        (["view", "-o", ""], "path='.': a picture is a file that ends in .svg, .png or .pdf"),
        (["onnx", "-o", "x.onnx", "-f", ""], "'--functions' / '-f': the pattern is empty; name the class of the model"),
        (["show", "--scope", ""], "'--scope': the pattern is empty"),
    ],
)
def test_empty_names(command, message):
    """As of a variable of the shell that is not set."""
    refused(run(command[0], "cli_models:Parts.inner", "-i", "0=2x4", *command[1:]), message)


def test_a_wrong_command():
    refused(run("shwo"), "No such command 'shwo'")
    refused(run("show"), "Missing argument 'TARGET'")


def test_a_wrong_name_that_kwargs_took():
    refused(
        show("Keywords", "-i", "token=4"),
        "missing a required argument: 'tokens'; its arguments are tokens; write NAME=",
    )
    refused(show("Keywords", "-i", "tokens=4", "-i", "mask=4"), "no argument 'mask'; its arguments are tokens; ")


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_library_that_is_not_installed(library, monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    refused(run("show", f"{library}:resnet18"), f"{library} is not installed: pip install {library}")


# Models that fail: exit code 1 ---------------------------------------------------------------------------------------


def failed(result):
    assert result.exit_code == 1
    assert result.stdout == ""
    return result.stderr.splitlines()


def test_a_model_that_cannot_be_traced(here):
    lines = failed(show("Branch", "-i", "x=4"))
    assert lines[0].startswith("scopetrace: cannot trace Branch: Python needs the value of a tensor")
    said = dict(line.strip().split(": ", 1) for line in lines[1:])
    assert said["op"].startswith("aten.")
    assert said["module"] == "Branch"
    assert said["source"].startswith(f"{here / 'cli_models.py'}:")
    assert said["source"].endswith("in forward: if x.sum() > 0:")
    assert "torch.where" in said["instead"]


def test_a_model_that_raises(here):
    lines = failed(show("Raises", "-i", "x=4"))
    assert lines[0] == "scopetrace: Raises raised ValueError: x is not right"
    assert lines[1].startswith(f"  while tracing Raises, at {here / 'cli_models.py'}:")
    assert len(lines) == 2


def test_inputs_that_do_not_fit():
    lines = failed(show("Raises", "-i", "x=5"))
    called = "Linear(in_features=4, out_features=4, bias=True) was called with input: float32 [5]"
    assert lines[0] == f"scopetrace: cannot trace Raises: {called}"
    assert lines[2] == "  module: Raises/Linear[inner]"
    assert lines[-1].startswith("  torch: ")


def test_an_input_of_another_dtype(here):
    lines = failed(show("Raises", "-i", "x=4:int64"))
    assert lines[0].endswith("was called with input: int64 [4]")
    assert lines[2] == "  module: Raises/Linear[inner]"
    assert lines[-1].startswith("  torch: aten.linear.default takes tensors of one dtype")


def test_a_factory_that_raises(here):
    lines = failed(show("build_badly"))
    assert lines[0] == "scopetrace: making cli_models:build_badly raised RuntimeError: no weights here"
    assert lines[1].startswith(f"  at {here / 'cli_models.py'}:")
    assert len(lines) == 2


def test_a_factory_that_ends_the_program(here):
    lines = failed(show("build_exit"))
    assert lines[0] == "scopetrace: making cli_models:build_exit raised SystemExit: no such file"
    assert lines[1].startswith(f"  at {here / 'cli_models.py'}:")


# Libraries of models -------------------------------------------------------------------------------------------------

needs_timm = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")
needs_torchvision = pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="no torchvision")


@needs_timm
def test_timm():
    result = run("show", "timm:test_vit", "--depth", 0)
    assert result.exit_code == 0, result.stderr
    assert "VisionTransformer(x=%x: f32[1, 3, 160, 160])" in result.stdout
    assert "x=%x: f32[2, 3, 160, 160]" in run("show", "timm:test_vit", "-i", "x=2x3x160x160", "--depth", 0).stdout
    refused(run("show", "timm:test_vitt"), "timm has no model 'test_vitt': write timm:test_vit")


@needs_torchvision
def test_torchvision():
    result = run("show", "torchvision:squeezenet1_1", "--input", "x=1x3x64x64", "--depth", "1")
    assert result.exit_code == 0, result.stderr
    assert "Fire[3](x=%max_pool2d: f32[1, 64, 15, 15])" in result.stdout
    refused(run("show", "torchvision:squeezenet1_1"), "SqueezeNet.forward: missing a required argument: 'x'")
    refused(run("show", "torchvision:resnet19"), "torchvision has no model 'resnet19': write torchvision:resnet1")


# As a program --------------------------------------------------------------------------------------------------------


def command(*args):
    return [sys.executable, "-m", "scopetrace", *args]


def environment():
    source = str(Path(scopetrace.__file__).parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}


@pytest.mark.slow
def test_the_program():
    done = subprocess.run(
        command("show", "cli_models:Net", "--input", "x=2x5"), env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[1].startswith("scopetrace: cannot trace Net: Linear(")
    assert (
        len(done.stderr.splitlines()) == 6
    )  # what the model printed, the error: what, op, module, source, torch's text


@pytest.mark.slow
def test_a_reader_that_stops_early():
    process = subprocess.Popen(
        command("show", "cli_models:build", "--input", "0=2x4", "--json"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


def test_specialize():
    text = output("Branch", "-i", "x=2", "--specialize")
    assert (
        "specialized on 1 value of the example inputs:\n  Eq(u0, 1) was False (aten.is_nonzero.default) in Branch"
        in text
    )
    said = json.loads(output("Branch", "-i", "x=2", "--specialize", "--json"))["specializations"]
    assert [(s["expression"], s["value"], s["module"]) for s in said] == [("Eq(u0, 1)", False, "Branch")]


@needs_timm
def test_dynamic_sizes():
    result = run("show", "timm:test_vit", "--input", "x=2x3x160x160", "--dynamic", "x.0=batch:1:64", "--depth", "0")
    assert result.exit_code == 0
    assert "x=%x: f32[batch, 3, 160, 160]" in result.output


@needs_timm
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x=batch", "write NAME.DIM=SYMBOL"),
        ("x.7=batch", "dimension 7 of x, which has 4"),
        ("y.0=batch", "names 'y'; the arguments are x"),
    ],
)
def test_a_wrong_dynamic_size_is_one_line(text, message):
    result = run("show", "timm:test_vit", "--input", "x=2x3x160x160", "--dynamic", text)
    assert result.exit_code == 2
    assert message in result.output and len(result.output.splitlines()) == 1


# To look at ----------------------------------------------------------------------------------------------------------


def test_a_summary():
    out = run("summary", "cli_models:model", "-i", "x=2x4", "--depth", "1").stdout
    assert "Sequential[body]  f32[2, 4]  f32[2, 4]  40" in out
    assert "40 parameters, 160 B" in out
    data = json.loads(run("summary", "cli_models:model", "-i", "x=2x4", "--json").stdout)
    assert data["total"]["flops"] == 128


def test_memory_of_an_inference_and_of_a_training_step():
    out = run("memory", "cli_models:model", "-i", "x=2x4", "--depth", "1").stdout
    assert out.splitlines()[0].split() == ["module", "made", "freed", "saved", "peak"]
    data = json.loads(run("memory", "cli_models:model", "-i", "x=2x4", "--step", "--json").stdout)
    assert data["rows"][1]["fqn"] == "model"
    assert data["saved_bytes"] > 0


def test_a_training_step():
    out = output("model", "-i", "x=2x4", "--step", "--optimizer", "adamw", "--depth", "1")
    assert out.splitlines()[1].startswith("step(x=%x: f32[2, 4], ids=None, scale=None)")
    assert "  backward\n" in out
    assert 'scope("AdamW.step")' in out


def test_a_page_and_pictures_of_it(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    page = tmp_path / "net.html"
    assert run("view", "cli_models:model", "-i", "x=2x4", "-o", str(page)).stdout.strip() == str(page)
    assert "Sequential[body]" in page.read_text()
    assert not opened
    path = run("view", "cli_models:model", "-i", "x=2x4").stdout.strip()
    assert opened == [Path(path).as_uri()]
    missing = run("view", "cli_models:model", "-i", "x=2x4", "-o", tmp_path / "no" / "net.html")
    assert missing.exit_code == 2
    assert missing.stderr.splitlines()[-1].startswith("scopetrace: [Errno 2] No such file or directory")
    assert run("view", "cli_models:model", "-i", "x=2x4", "-o", "net.svg", "--scope", "bdy").exit_code == 2
    assert "ends in .svg, .png or .pdf" in run("view", "cli_models:model", "-i", "x=2x4", "-o", "net.jpg").stderr


def test_what_two_models_do_differently(tmp_path):
    same = run("diff", "cli_models:model", "cli_models:Net", "-i", "x=2x4")
    assert (same.exit_code, same.stdout.strip()) == (0, "no differences")
    html = tmp_path / "diff.html"
    other = run("diff", "cli_models:model", "cli_models:Parts.inner", "-i", "0=2x4", "--json", "--html", html)
    assert other.exit_code == 3
    assert json.loads(other.stdout)["version"] == 1
    assert html.read_text().startswith("<!doctype html>")


def test_a_size_with_two_names():
    twice = ("--dynamic", "x.0=batch", "--dynamic", "x.0=length")
    refused(show("Net", "-i", "x=2x4", *twice), "x.0 is batch already; give a size one symbol")


def test_a_saved_trace_is_a_target(tmp_path):
    path = str(tmp_path / "net.st")
    scopetrace.trace(torch.nn.Linear(4, 2), (torch.ones(1, 4),)).save(path)
    assert "aten.linear" in run("show", path).stdout
    assert "leave out the options" in run("show", path, "-i", "x=1x4").stderr
    assert "there is no file" in run("show", str(tmp_path / "other.st")).stderr
    refused(run("plan", path, "--ranks", 2, "--target-mb", 1), "is a saved trace, which has no model to plan for")


def test_the_demo(tmp_path):
    out = run("demo", "-o", str(tmp_path / "demo.html"))
    assert out.exit_code == 0
    assert "Block[layers.1, layers.2] ×2 as Block[layers.0]" in out.stdout
    assert (tmp_path / "demo.html").exists()


def test_models_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(
        '{"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 8, "num_attention_heads": 2,'
        ' "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 20}'
    )
    out = run("summary", f"hf:{tmp_path / 'config.json'}", "--depth", "1", "-i", "input_ids=1x4:int64").stdout
    assert "BertForMaskedLM" in out
    assert "i64[1, 4]" in out
    assert "i64[3, 5]" in run("show", "hf:bert", "--meta", "--depth", "0").stdout
    assert "hf:bert" in run("show", "hf:brt").stderr


def test_python_values_and_dicts_are_inputs():
    out = run(
        "show", "cli_models:Takes", "-i", "batch.x=2x3", "-i", "batch.more.y=2x3", "-i", "n=int:3", "-i", "s=str:sum"
    )
    assert (
        "Takes(batch={'x': %batch_x: f32[2, 3], 'more': {'y': %batch_more_y: f32[2, 3]}}, n=3, s='sum')" in out.stdout
    )
    assert "aten.sum" in out.stdout
    assert "'x' is no int" in run("show", "cli_models:Takes", "-i", "n=int:x").stderr
    assert "gives a part of it" in run("show", "cli_models:Takes", "-i", "batch=2", "-i", "batch.x=2").stderr


# The command line as a whole -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_the_sentence_of_a_command_is_that_of_its_help(name):
    _, command, _ = main.resolve_command(click.Context(main), [name])
    assert " ".join(command.help.split()).startswith(COMMANDS[name])
    assert command.name == name


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_help_has_examples(name):
    text = run(*filter(None, [name]), "--help").stdout
    assert f"    scopetrace {name or 'show'} " in text or f"    scopetrace {name}\n" in text


TEXTS = {
    "show": ["boxes", "sources", "specializations"],
    "summary": ["total", "unused_parameters", "rows"],
    "memory": ["peak_bytes", "saved_bytes", "rows"],
    "order": ["digest", "parameters", "calls", "steps"],
    "plan": ["groups", "forward_gathers", "backward_gathers", "simulations"],
    "diff": ["differences"],
    "onnx": ["path", "bytes", "functions", "nodes", "largest_error"],
    "view": ["path"],
}


@pytest.mark.parametrize("name", TEXTS)
def test_commands_that_print_data_print_it_as_json(name):
    files = {"onnx": ["-o", "net.onnx"], "view": ["-o", "net.html"]}
    more = {"plan": ["--ranks", "2", "-c", "Linear"], "diff": ["cli_models:Net"], **files}.get(name, [])
    if name == "onnx":
        pytest.importorskip("onnxruntime")
    result = run(name, "cli_models:model", *more, "-i", "x=2x4", "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert list(data)[:1] == ["version"]
    assert data["version"] == (2 if name == "show" else 1)
    assert set(TEXTS[name]) <= set(data)


@pytest.mark.parametrize(
    ("typed", "offered"), [("s", {"show", "summary"}), ("show --sc", {"--scope"}), ("view to", {"torchvision:"})]
)
def test_what_a_shell_offers(typed, offered):
    words = f"scopetrace {typed}"
    asked = {"_SCOPETRACE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    result = CliRunner().invoke(main, env=asked, prog_name="scopetrace")
    assert offered <= {line.partition(",")[2] for line in result.stdout.splitlines()}


@pytest.mark.parametrize(
    ("target", "text"), [("Declares", "3, 4"), ("DeclaresByMethod", "5, 4"), ("Lightning", "6, 4")]
)
def test_inputs_that_a_model_declares(target, text):
    assert f"x=%x: f32[{text}]" in output(target, "--depth", "0")
