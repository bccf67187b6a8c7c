"""What an import of the package loads: the rest of it, and of torch, is loaded where it is used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import scopetrace as st

HEAVY = """
    IPython functorch numpy.testing onnx onnx_ir onnxruntime onnxscript rich sympy torch._dynamo torch._export
    torch._inductor torch._numpy torch.distributed.fsdp torch.distributed.tensor torch.fx.experimental.symbolic_shapes
    torch.onnx torchvision transformers
"""
"""What takes long to import, and what torch's import does not load."""

LOADED = "import sys; print([name for name in {heavy} if name in sys.modules and name not in {known}])"


def loaded(code, *, beside=()):
    """Which heavy modules a new process has loaded after this code."""
    line = LOADED.format(heavy=HEAVY.split(), known=list(beside))
    out = subprocess.run([sys.executable, "-c", f"{code}\n{line}"], capture_output=True, text=True, check=True).stdout
    return ast.literal_eval(out.splitlines()[-1])


@pytest.fixture(scope="module", name="torch_alone")
def _torch_alone():
    return loaded("import torch")


@pytest.mark.parametrize(
    "code",
    [
        "import scopetrace as st; st.errors.TraceError; dir(st); st.__version__",
        "from scopetrace.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
    ],
)
def test_an_import_loads_nothing_heavy(code, torch_alone):
    assert loaded(code, beside=torch_alone) == []


def test_an_import_does_not_load_torch():
    code = """import sys, scopetrace; assert not {"click", "rich", "onnx", "onnxruntime", "torch"} & {*sys.modules}
import scopetrace.cli; assert "torch" not in sys.modules"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_names_for_tracing_load_sympy_and_not_compilers():
    late = loaded("import scopetrace as st; st.trace, st.load, st.functionalize, st.functional_backend, st.distributed")
    assert {name.partition(".")[0] for name in late} <= {"sympy", "torch"}
    assert not set(late) & {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.onnx"}


def test_type_checkers_see_the_names_that_are_loaded_late():
    tree = ast.parse(Path(st.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    names = {
        (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name != "distributed"
    }
    assert names == {(f"scopetrace.{home}", name) for home, names in st._HOMES.items() for name in names.split()}


def test_a_forward_may_be_the_first_to_use_a_public_name():
    code = """
import torch, scopetrace as st
class Model(torch.nn.Module):
    def forward(self, x):
        with st.scope("part"):
            y = x + 1
        return y if st.tracing_state() is None else y * 1
model, x = Model(), torch.ones(2)
tr = st.trace(model, x)
assert tr.side_effects == []
assert torch.equal(tr(x), model(x)) and torch.equal(tr(x), model(x))
assert 'scope("part")' in str(tr)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
