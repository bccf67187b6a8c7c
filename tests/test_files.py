"""Traces as files: what a file has, what it does not run, and what is said of files that are none."""

import collections
import copy
import dataclasses
import enum
import functools
import importlib
import inspect
import json
import os
import pickle
import sys
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch
from processes import in_another_process
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import scopetrace as st
from scopetrace.errors import TraceFileError

X = torch.arange(12.0).reshape(3, 4)


def through_file(tr, tmp_path):
    tr.save(tmp_path / "trace")
    loaded = st.load(tmp_path / "trace")
    loaded.lint()
    assert str(loaded) == str(tr)
    return loaded


def rewritten(path, change):
    """The file with other JSON: `change` gets the program, and alters it in place."""
    with zipfile.ZipFile(path) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    program = json.loads(entries["scopetrace/program.json"])
    change(program)
    entries["scopetrace/program.json"] = json.dumps(program).encode()
    with zipfile.ZipFile(path, "w") as new:
        for name, data in entries.items():
            new.writestr(name, data)
    return path


# What a file has ------------------------------------------------------------------------------------------------------


def test_arguments_of_a_loaded_trace_are_passed_as_to_the_original(tmp_path):
    class Model(nn.Module):
        def forward(self, x, scale=2.0, *, y):
            return x * scale + y

    model = Model()
    for fn in (model, lambda x, scale=2.0, *, y: model(x, scale, y=y)):
        tr = st.trace(fn, (X,), {"y": X + 1})
        for loaded in (through_file(tr, tmp_path), through_file(through_file(tr, tmp_path), tmp_path)):
            assert loaded.calls[0].arguments.keys() == {"x", "scale", "y"}
            assert torch.equal(loaded(y=X, x=X * 3, scale=2.0), fn(X * 3, y=X))
            with pytest.raises(st.errors.InputMismatchError, match="scale"):
                loaded(X, 3.0, y=X)


class Point(collections.namedtuple("Point", "x y")):
    pass


@dataclasses.dataclass
class Boxes:
    corners: torch.Tensor
    scale: float = 2.0


class Kind(enum.Enum):
    BOX = 1


class Cache:
    """Unknown to pytree."""

    def __init__(self, keys):
        self.keys = keys


class Settings:
    def __init__(self):
        self.width = 3


class Pair:
    def __init__(self, first, second):
        self.first, self.second = first, second


pytree.register_pytree_node(
    Pair,
    lambda pair: ([pair.first, pair.second], None),
    lambda items, _: Pair(*items),
    serialized_type_name="test_files.Pair",
)


STRUCTURES = {
    "namedtuple": lambda x: Point(x + 1, [x]),
    "dataclass": lambda x: Boxes(x * 2, 3.0),
    "registered": lambda x: Pair(x + 1, {"k": x}),
    "object": lambda x: Cache(x * 2),
    "ordered": lambda x: collections.OrderedDict(a=x, b=(x + 1, None)),
    "default": lambda x: collections.defaultdict(list, a=x + 1),
    "constants": lambda x: {"x": x, "kind": Kind.BOX, "f": 1.5, "n": None, "inf": float("inf"), 3: (b"b", 2 + 1j)},
    "namespace": lambda x: types.SimpleNamespace(x=x + 1),
    "size": lambda x: (x + 1, x.size(), x.dtype, x.device),
}


def flat(x):
    """A structure as classes and values, for comparison."""
    if isinstance(x, torch.Tensor):
        return x.tolist()
    if isinstance(x, dict):
        return type(x), {key: flat(item) for key, item in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x), [flat(item) for item in x]
    return (type(x), flat(vars(x))) if isinstance(x, (Boxes, Cache, Pair, types.SimpleNamespace)) else x


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_as_results_and_arguments(name, tmp_path):
    make = STRUCTURES[name]
    results = through_file(st.trace(make, (X,)), tmp_path)
    assert flat(results(X)) == flat(make(X))

    def forward(structure, x):
        return x + 1

    takes = through_file(st.trace(forward, (make(X), X)), tmp_path)
    torch.testing.assert_close(takes(make(X), X), X + 1)
    again = through_file(takes, tmp_path)
    torch.testing.assert_close(again(make(X), X), X + 1)


def test_traces_share_a_file_of_weights(tmp_path):
    """Each of them loads as it was saved, also after the model has learned; equal weights are there once."""
    model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))
    trained = copy.deepcopy(model)
    nn.init.zeros_(trained[1].weight)
    wanted = {}
    for name, fn in (("all", model), ("first", model[0]), ("trained", trained)):
        tr = st.trace(fn, (X,))
        tr.save(tmp_path / name, external_data="weights")
        wanted[name] = tr(X)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all", "first", "trained", "weights"]
    for name, result in wanted.items():
        torch.testing.assert_close(st.load(tmp_path / name)(X), result)
        assert "scopetrace/storages/0" not in zipfile.ZipFile(tmp_path / name).namelist()
    sizes = [entry.file_size for entry in zipfile.ZipFile(tmp_path / "weights").infolist()]
    assert sizes == [4 * n for n in (256, 64, 256, 4, 256)]  # weight, bias of both, and the weight of the trained one
    (tmp_path / "weights").rename(tmp_path / "other")
    with pytest.raises(TraceFileError, match=r"the weights of the trace are in .*weights, which is not there"):
        st.load(tmp_path / "all")


@pytest.mark.parametrize("name", ["", "trace", "../weights", "/weights", True, "no_zip", "other.pt", "other_trace"])
def test_files_of_weights_that_are_refused(name, tmp_path):
    tr = st.trace(nn.Linear(4, 4), (X,))
    (tmp_path / "no_zip").write_bytes(b"of somebody else" * 4)
    torch.save(torch.ones(4), tmp_path / "other.pt")
    tr.save(tmp_path / "other_trace")
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(TraceFileError, match=r"the name of a file that lies beside|is no file of weights of traces"):
        tr.save(tmp_path / "trace", external_data=name)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_shared_and_tied_tensors_stay_shared(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(4, 4)
            self.head = nn.Linear(4, 4, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("part", self.embed.weight.detach()[1:])
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, i):
            self.count += 1
            return self.head(self.embed(i)) + self.part[0]

    model = Tied()
    loaded = through_file(st.trace(model, (torch.tensor([0, 2]),)), tmp_path)
    held = dict(loaded.graph_module.named_parameters()) | dict(loaded.graph_module.named_buffers())
    with zipfile.ZipFile(tmp_path / "trace") as file:
        assert sum("storages" in name for name in file.namelist()) == 2
    weight, part = held["embed.weight"], held["part"]
    assert weight.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
    assert isinstance(weight, nn.Parameter) and part.storage_offset() == 4
    loaded(torch.tensor([1, 3])), loaded(torch.tensor([1, 3]))
    assert held["count"] == 2 and model.count == 0


DTYPES = [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bool]
DTYPES += [torch.complex64, torch.uint16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype, tmp_path):
    state = torch.ones(4).to(dtype)
    loaded = through_file(st.trace(lambda x: x + state.to(x.dtype).real, (X,)), tmp_path)
    torch.testing.assert_close(loaded(X), X + 1)
    assert next(iter(loaded.graph_module.buffers())).dtype == dtype


def test_tensors_of_other_kinds(tmp_path):
    sparse = torch.eye(4).to_sparse()
    loaded = through_file(st.trace(lambda x: torch.sparse.mm(sparse, x.t()).to_dense(), (X,)), tmp_path)
    torch.testing.assert_close(loaded(X), X.t())
    conjugate = torch.tensor([1 + 1j] * 4).conj()
    loaded = through_file(st.trace(lambda x: x * conjugate, (X,)), tmp_path)
    torch.testing.assert_close(loaded(X), X * (1 - 1j))


def test_tensors_without_elements(tmp_path):
    tr = st.trace(lambda x: torch.cat([torch.tensor([]), x]), (torch.randn(3),))
    tr.save(tmp_path / "empty.trace")
    x = torch.randn(3)
    assert torch.equal(st.load(tmp_path / "empty.trace")(x), x)


def test_models_on_the_meta_device(tmp_path):
    model = nn.Linear(4, 10**9, device="meta")
    loaded = through_file(st.trace(model, (X.to("meta"),)), tmp_path)
    assert (tmp_path / "trace").stat().st_size < 20_000
    assert loaded(X.to("meta")).shape == (3, 10**9)


def test_dynamic_sizes_and_what_is_fixed(tmp_path):
    def forward(x, n):
        return torch.cat([x, x]).reshape(-1, 2)[: x.shape[0] // 2 + n]

    shapes = {"x": {0: Dim("rows", min=2, max=64)}, "n": Dim.DYNAMIC}
    tr = st.trace(forward, (X, 2), dynamic_shapes=shapes)
    loaded = through_file(through_file(tr, tmp_path), tmp_path)
    for rows, n in ((5, 1), (64, 3)):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(loaded(x, n), forward(x, n))
    with pytest.raises(st.InputMismatchError, match="is 65 and must be at most 64"):
        loaded(torch.randn(65, 4), 1)
    assert str(loaded.range_constraints) == str(tr.range_constraints)


def test_sizes_that_depend_on_data_and_control_flow(tmp_path):
    def forward(x):
        found = x[x > 3]
        return torch.cond(found.sum() > 10, lambda t: t * 2, lambda t: t - 1, (found,)), found.shape[0]

    loaded = through_file(st.trace(forward, (X,)), tmp_path)
    for x in (X, X / 2 - 1):
        torch.testing.assert_close(loaded(x), forward(x))

    def scanned(x):
        from torch._higher_order_ops.scan import scan

        return scan(lambda c, t: (c + t, c * t), x[0], x)

    torch.testing.assert_close(through_file(st.trace(scanned, (X,)), tmp_path)(X), scanned(X))


def test_specializations_write_back_and_attributes(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = torch.zeros(3, 4)

        def forward(self, x, store):
            x[0].mul_(2)
            self.last = x + 1
            store["y"] = x * 3
            return x.t()

    tr = st.trace(Net(), (X.clone(), {}))
    loaded = through_file(tr, tmp_path)
    x, y, store = X.clone(), X.clone(), {}
    Net()(y, {})
    assert loaded(x, store).tolist() == y.t().tolist()
    assert x.tolist() == y.tolist() and store["y"].tolist() == (y * 3).tolist()

    tr = st.trace(lambda x: x * 2 if x.sum() > 3 else x, (X,), specialize=True)
    loaded = through_file(tr, tmp_path)
    assert loaded.specializations == tr.specializations
    with pytest.raises(st.InputMismatchError, match="specialized"):
        loaded(X * 0)


def test_equal_traces_are_equal_files(tmp_path):
    model = nn.TransformerEncoderLayer(4, 2, 8)
    for name in ("a", "b"):
        st.trace(model, (X,)).save(tmp_path / name)
    st.load(tmp_path / "a").save(tmp_path / "c")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes()


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path):
    path = tmp_path / "trace"
    st.trace(nn.Linear(4, 4), (X,)).save(path)
    before = path.read_bytes()
    with pytest.raises(TraceFileError):
        st.trace(nn.Sequential(nn.Linear(4, 4)), (X,), leaf_modules="0").save(path)
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["trace"]


# The model's classes --------------------------------------------------------------------------------------------------

GONE = """\
import collections, dataclasses, torch
Pair = collections.namedtuple("Pair", "first second")
@dataclasses.dataclass
class Box:
    side: torch.Tensor
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
    def forward(self, pair, scale=2):
        return Box(self.fc(pair.first) * scale + pair.second)
"""


@pytest.fixture
def gone(tmp_path, monkeypatch):
    """Makes a module from its text; it can be imported in this process alone."""

    def module(text):
        (tmp_path / "gone.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "gone", raising=False)
        return importlib.import_module("gone")

    yield module
    del sys.modules["gone"]


SHOW = """\
tr = st.load(sys.argv[1]); print(tr)
call = tr.calls[0]
print(call.module_type.__module__, call.module_type.__qualname__, list(call.arguments), call.arguments["scale"])
assert "gone" not in sys.modules
try: tr((1, 2))
except st.errors.TraceFileError as error: print(error)
try: tr.outline(torch.nn.Linear)((1, 2))
except st.errors.TraceFileError as error: print("outlined too")
sys.path.insert(0, sys.argv[2]); tr = st.load(sys.argv[1]); assert "gone" not in sys.modules
import gone
print(type(tr(gone.Pair(torch.ones(2, 4), torch.ones(2, 4)))))
"""


@pytest.mark.slow
def test_the_model_s_classes_are_not_needed(tmp_path, gone):
    here = gone(GONE)
    tr = st.trace(here.Net(), (here.Pair(torch.ones(2, 4), torch.ones(2, 4)),))
    tr.save(tmp_path / "trace")
    shown = in_another_process(SHOW, tmp_path / "trace", tmp_path)
    assert shown == (
        f"{tr}\n"
        "gone Net ['pair', 'scale'] 2\n"
        "a call of this trace needs gone.Pair, which cannot be imported here: No module named 'gone'; "
        "make the module that defines it importable under the same name, or, of a result, take its fields: "
        "st.load(path, plain_outputs=True)\n"
        "outlined too\n"
        "<class 'gone.Box'>\n"
    )


RESULTS = """\
import dataclasses, torch
from typing import NamedTuple
class Two(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor
@dataclasses.dataclass
class Out:
    logits: torch.Tensor
    two: Two
    layers: list
class Keyed:
    def __init__(self, **parts): self.__dict__ = parts
torch.utils._pytree.register_pytree_node(Keyed, lambda k: (list(vars(k).values()), list(vars(k))),
    lambda items, names: Keyed(**dict(zip(names, items))))
class Net(torch.nn.Module):
    def forward(self, x):
        return Out(x + 1, Two(x * 2, x * 3), [Keyed(k=x * 4, v=x * 5)])
"""

FIELDS = """\
out = st.load(sys.argv[1], plain_outputs=True)(torch.ones(2))
two = [t.tolist() for t in out["two"][:]]
print(list(out), out.logits.tolist(), two, out.two.b.tolist(), out.layers[0]["1"].tolist(), "gone" in sys.modules)
tr = st.load(sys.argv[1], plain_outputs=True).decompose(); tr.save(sys.argv[1])
print(st.load(sys.argv[1])(torch.ones(2)).two.a.tolist())
"""


def test_results_of_classes_that_are_not_there_as_plain_fields(tmp_path, gone, request):
    here = gone(RESULTS)
    request.addfinalizer(lambda: torch.utils._pytree._deregister_pytree_node(here.Keyed))
    st.trace(here.Net(), (torch.ones(2),)).save(tmp_path / "trace")
    assert in_another_process(FIELDS, tmp_path / "trace") == (
        "['logits', 'two', 'layers'] [2.0, 2.0] [[2.0, 2.0], [3.0, 3.0]] [3.0, 3.0] [5.0, 5.0] False\n[2.0, 2.0]\n"
    )


def test_classes_of_functions(tmp_path):
    class Local(nn.Module):
        def forward(self, x):
            return x + 1

    loaded = through_file(st.trace(Local(), (X,)), tmp_path)
    assert loaded.calls[0].module_type.__qualname__ == "test_classes_of_functions.<locals>.Local"
    torch.testing.assert_close(loaded(X), X + 1)


# Pickles and copies ---------------------------------------------------------------------------------------------------


def test_scripted_modules(tmp_path):
    layers = [torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())) for _ in range(2)]
    model, x = nn.Sequential(*layers), torch.randn(2, 4)
    tr = st.trace(model, (x,))
    tr.save(tmp_path / "first.st")
    st.load(tmp_path / "first.st").save(tmp_path / "again.st")
    loaded = st.load(tmp_path / "again.st")
    assert loaded == tr and str(loaded) == str(tr)
    assert [list(call.arguments) for call in loaded.calls] == [list(call.arguments) for call in tr.calls]
    torch.testing.assert_close(loaded.outline(True)(x), model(x))


def test_pickles_keep_what_files_cannot_hold():
    leaf = st.trace(nn.Sequential(nn.Linear(4, 4)), (X,), leaf_modules="0")
    torch.testing.assert_close(pickle.loads(pickle.dumps(leaf))(X), leaf(X))
    array = st.trace(lambda a, x: x + float(a[0]), (numpy.ones(2), X))
    torch.testing.assert_close(pickle.loads(pickle.dumps(array))(numpy.ones(2), X), X + 1)
    torch.testing.assert_close(copy.deepcopy(leaf)(X), leaf(X))


def test_threads_load_at_the_same_time(tmp_path):
    tr = st.trace(lambda x: x.reshape(-1)[: x.shape[0]], (X,), dynamic_shapes=({0: Dim("n")},))
    tr.save(tmp_path / "trace")
    graph = pickle.dumps(tr.graph_module)

    def use(i):
        x = torch.randn(i + 2, 4)
        loaded = pickle.loads(graph) if i % 2 else st.load(tmp_path / "trace")
        return torch.equal(loaded(x)[0] if i % 2 else loaded(x), x.reshape(-1)[: i + 2])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(32)))


# Refused: what a file cannot hold -------------------------------------------------------------------------------------


def test_leaf_modules_are_refused(tmp_path):
    tr = st.trace(nn.Sequential(nn.Linear(4, 4)), (X,), leaf_modules="0")
    with pytest.raises(TraceFileError) as refused:
        tr.save(tmp_path / "trace")
    assert str(refused.value) == (
        "0 is a leaf module, a torch.nn.modules.linear.Linear, whose code cannot be in a file; "
        "trace without leaf_modules=, or pickle.dumps(trace) keeps it, where pickle can"
    )


def test_packed_weights_are_refused(tmp_path):
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)).eval(), {nn.Linear})
    with pytest.raises(TraceFileError, match=r"linear_dynamic.*ScriptObject, which is no data"):
        st.trace(model, (X,)).save(tmp_path / "trace")


def test_arguments_that_are_no_data_are_refused(tmp_path):
    with pytest.raises(TraceFileError, match=r"^argument 0\['a'\]\[1\] is a numpy.ndarray, which is no data"):
        st.trace(lambda d, x: x + 1, ({"a": [1, numpy.ones(2)]}, X)).save(tmp_path / "trace")
    with pytest.raises(TraceFileError, match=r"^the result\[1\] is a builtins.function"):
        st.trace(lambda x: (x + 1, lambda: 0), (X,)).save(tmp_path / "trace")


def test_objects_among_the_arguments_of_inner_calls_are_shown(tmp_path):
    class Inner(nn.Module):
        def forward(self, x, array, settings):
            return x + settings.width

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x, numpy.ones(2), Settings())

    loaded = through_file(st.trace(Outer(), (X,)), tmp_path)
    assert "Inner[inner](x=%x: f32[3, 4], array=array([1., 1.]), settings=<Settings>)" in str(loaded)


# Refused: files that are no traces ------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/tmp/scopetrace_ran_code",)


def refusal(path, data=None):
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(TraceFileError) as refused:
        st.load(path)
    assert not Path("/tmp/scopetrace_ran_code").exists()
    return str(refused.value)


def test_pickles_and_foreign_files(tmp_path):
    path = tmp_path / "file"
    assert "no trace, or damaged" in refusal(path, pickle.dumps(Evil()))
    assert "no trace, or damaged" in refusal(path, b"")
    assert "no trace, or damaged" in refusal(path, b"hello" * 100)
    torch.save({"a": X}, path)
    assert "this zip file is no trace" in refusal(path)
    torch.export.save(torch.export.export(nn.Linear(4, 4), (X,)), path)
    assert "this zip file is no trace" in refusal(path)
    with pytest.raises(FileNotFoundError):
        st.load(tmp_path / "absent")


def saved(tmp_path, fn=lambda x: (x + 1).relu()):
    st.trace(fn, (X,)).save(tmp_path / "trace")
    return tmp_path / "trace"


def test_versions(tmp_path):
    path = saved(tmp_path)
    with zipfile.ZipFile(path) as old:
        program = old.read("scopetrace/program.json")
        header = json.loads(old.read("scopetrace/header.json"))
    assert header == {
        **{"format": "scopetrace trace", "version": 3, "scopetrace": st.__version__},
        **{"torch": torch.__version__, "byteorder": sys.byteorder},
    }
    with zipfile.ZipFile(path, "w") as new:
        new.writestr("scopetrace/header.json", json.dumps({**header, "version": 4, "scopetrace": "9.1"}))
        new.writestr("scopetrace/program.json", program)
    assert refusal(path) == (
        "the trace was written by scopetrace 9.1 in version 4 of the format, and this one reads up to 3: "
        "install scopetrace 9.1 or newer"
    )


def test_ops_that_this_torch_does_not_have(tmp_path):
    def change(program):
        op = next(op for op in program["tables"]["ops"] if op["target"] == {"op": ["aten::relu", ""]})
        op["target"] = {"op": ["aten::relu_of_the_future", ""]}

    assert refusal(rewritten(saved(tmp_path), change)) == (
        f"the trace uses aten.relu_of_the_future.default, which torch {torch.__version__} does not have; "
        "import the library that registers it before the trace is loaded"
    )


class Noted:
    def __repr__(self):
        return "a note"


def annotated(x):
    with torch.fx.traceback.annotate({"part": "head", "at": [1, (2.5, None)], "note": Noted()}):
        return x * 2


def test_annotations(tmp_path):
    tr = st.trace(annotated, (X,))
    for found in (through_file(tr, tmp_path), through_file(st.trace(tr.graph_module, (X,)), tmp_path)):
        (node,) = found.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
        custom = node.meta["custom"]
        assert (custom["part"], custom["at"], str(custom["note"])) == ("head", [1, (2.5, None)], "a note")
        assert custom["scopetrace"]["call"] == 0


ASKED = []


def policy(context, op, *args, **kwargs):
    ASKED.append(op)
    save = torch.utils.checkpoint.CheckpointPolicy
    return save.MUST_SAVE if op is torch.ops.aten.sin.default else save.PREFER_RECOMPUTE


def selective(x):
    contexts = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, policy)
    return torch.utils.checkpoint.checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False, context_fn=contexts)


def test_policies_of_selective_checkpointing_are_code(tmp_path):
    tr = st.trace(selective, (X.clone().requires_grad_(),))
    with pytest.warns(st.errors.ScopetraceWarning, match="policy of selective checkpointing is not in the file"):
        tr.save(tmp_path / "trace")

    asked = []
    for found in (tr, pickle.loads(pickle.dumps(tr)), st.load(tmp_path / "trace")):
        x = X.clone().requires_grad_()
        ASKED.clear()
        (gradient,) = torch.autograd.grad(found(x).sum(), x)
        torch.testing.assert_close(gradient, x.sin().exp() * x.cos())
        asked.append(list(ASKED))
    assert asked[0] and asked == [asked[0], asked[0], []]

    def change(program):
        (region,) = [row for kind, row in program["tables"]["tapes"] if kind == "BodyTape"]
        region["context_fn"] = {"named": ["os", "abort", "x"]}

    assert "the policy of a region is code" in refusal(rewritten(tmp_path / "trace", change))


NOTHING = {
    "an import": {"named": ["antigravity", "fly_id", "x"]},
    "a call": {"op": ["load_library", "x"]},
    "an attribute of torch": {"layout": "load"},
    "a class of ours": {"record": ["Trace", {}]},
    "a power": {"expression": ["sympy.Pow", 9, ["sympy.Pow", 9, 9]]},
    "a large power": {"expression": ["sympy.Pow", {"s0": {}}, 10**9]},
    "a foreign object": {"foreign": 0},
    "deep": json.loads("[" * 500 + "]" * 500),
    "a loop": {"ops": 1},
}


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_in_a_file_is_run(name, tmp_path):
    def change(program):
        program["tables"]["ops"][1]["args"] = {"tuple": [NOTHING[name]]}

    path = rewritten(saved(tmp_path), change)
    before, limit = set(sys.modules), sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 300)  # with more, "deep" is a list like any other
    try:
        refusal(path)
    finally:
        sys.setrecursionlimit(limit)
    assert "antigravity" not in set(sys.modules) - before


def test_zip_bombs(tmp_path):
    path = tmp_path / "bomb"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("scopetrace/header.json", b"0" * 10**8)
    assert "is compressed" in refusal(path)


def test_tensors_larger_than_their_storage(tmp_path):
    state = torch.ones(4)
    path = saved(tmp_path, lambda x: x + state)

    def change(program):
        program["tables"]["tensors"][0]["size"] = [10**6]

    assert "larger than its storage" in refusal(rewritten(path, change))


class Rebinding(nn.Module):
    """A count and an average that forward binds anew, in a module that is held and called twice."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.average = torch.zeros(4)

    def forward(self, x):
        self.count = self.count + 1
        self.average = 0.5 * self.average + x.mean(0)
        return x * self.count - self.average


PROGRAMS = {
    "outline": lambda tr: tr.outline("layers"),
    "decompose": lambda tr: tr.decompose(),
    "compile": lambda tr: tr.compile(backend="eager"),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_attributes_that_calls_bind_are_those_of_all_programs_of_a_loaded_trace(kind, tmp_path):
    layer, x = Rebinding(), torch.arange(8.0).view(2, 4)
    model = nn.Sequential(layer, Rebinding(), layer)
    tr = st.trace(model, (x,))
    tr.save(tmp_path / "trace.st")
    loaded = st.load(tmp_path / "trace.st")
    program = PROGRAMS[kind](loaded)
    for run in (program, program, loaded, program):
        torch.testing.assert_close(run(x), model(x))
    loaded.save(tmp_path / "later.st")
    torch.testing.assert_close(st.load(tmp_path / "later.st")(x), model(x))
