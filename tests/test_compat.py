"""The manifest of torch's private names against the source and the installed torch, and what differs by version."""

import ast
import os
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from scopetrace._compat import manifest
from scopetrace._compat.sources import prefixes
from scopetrace._compat.versions import CURRENT, SUPPORTED, differences_of
from tests.test_layers import SOURCE, is_private, private_part, read_tree, torch_names

COMPAT = [module for module in read_tree(SOURCE) if module.layer == "_compat"]
TABLES = {**manifest.NAMES, **manifest.LATER, **manifest.ONNX}
LISTED = {f"{owner.replace(':', '.')}.{name}" for owner, names in TABLES.items() for name in names.split()}
OF_INSTANCES = {name for _, names in manifest.INSTANCES.values() for name in names.split()}
ATTRIBUTES = (
    {name.rpartition(".")[2] for name in LISTED}
    | OF_INSTANCES
    | set(manifest.SHAPE_ENV.split() + manifest.EXPORTED_PROGRAM.split())
)

ROOT = Path(__file__).parents[1]
FIRST, LAST = (".".join(map(str, find(SUPPORTED))) for find in (min, max))
"""The supported versions of torch, as text."""

# Not torch's: of Python, of onnxscript, ops, and what is set on objects that the package made.
NOT_TORCH = {
    "_getframe",
    "_DEFAULT_REWRITE_RULES",
    "_matcher",
    "_target_pattern",
    "_scopetrace_original",
    "_check_class",
    "_check_instance",
    "_sentinel",
    "_ProtocolMeta",
    "_get_protocol_attrs",
    "_is_protocol",
}
# Set on, or read from, an object that need not have it.
OPTIONAL = {"_dispatch_key", "_dynamo_marked_constant", "_initialize_hook", "_is_param", "_orig_mod"}


def test_the_installed_torch_has_every_name():
    absent = [*manifest.missing(TABLES), *manifest.missing_on(ShapeEnv(), manifest.SHAPE_ENV)]
    assert absent == []
    manifest.check()


def test_every_private_name_that_the_source_uses_is_in_the_manifest():
    used = {name for module in COMPAT for _, name in torch_names(module) if private_part(name)}
    owners = {part for owner in TABLES for part in parents(owner.replace(":", "."))}
    # `torch._C` is an owner; of `torch._ops.f.get`, `torch._ops.f` is listed and `get` belongs to what it returns.
    unlisted = {n for n in used if n not in LISTED and n not in owners and n.rpartition(".")[0] not in LISTED}
    assert unlisted == set()


def parents(name):
    """`a`, `a.b` and `a.b.c` of `a.b.c`."""
    parts = name.split(".")
    return {".".join(parts[: end + 1]) for end in range(len(parts))}


def test_every_private_attribute_that_the_source_reads_is_in_the_manifest():
    own = {name for module in COMPAT for name in defined_names(module.tree)}
    read = {
        node.attr
        for module in COMPAT
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and "torch.ops" not in ast.unparse(node)
    }
    assert read - own - ATTRIBUTES - NOT_TORCH - OPTIONAL - {"_dynamo"} == set()


def test_every_name_of_the_manifest_is_used():
    text = "\n".join(m.source for m in COMPAT if not m.path.endswith("manifest.py"))
    tokens = set("".join(c if c.isalnum() or c == "_" else " " for c in text).split())
    assert ATTRIBUTES - tokens == set()


def defined_names(tree):
    """Functions, classes, and attributes set on `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def test_missing_names_are_one_error_that_has_them_all():
    names = {"torch._C": "_set_grad_enabled _no_such_name", "torch._nowhere": "x", "torch:Tensor": "_version _gone"}
    absent = list(manifest.missing(names))
    assert absent == ["torch._C._no_such_name", "torch._nowhere", "torch.Tensor._gone"]
    assert manifest.missing_on(torch.nn.Module(), "_buffers _gone") == ["Module()._gone"]
    with pytest.raises(
        ImportError, match=rf"torch \S+ has no torch._C._no_such_name, torch._nowhere, .* {FIRST} to {LAST}: install"
    ):
        manifest.require(absent)


def test_a_version_has_its_differences():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert differences_of("2.13.0+cpu") is SUPPORTED[2, 13]
        assert differences_of("2.15.1a0+git1234") is SUPPORTED[2, 15]
    assert differences_of(torch.__version__) is CURRENT


@pytest.mark.parametrize(("version", "nearest"), [("2.12.1", min(SUPPORTED)), ("3.0.0", max(SUPPORTED))])
def test_another_version_is_a_warning(version, nearest):
    with pytest.warns(UserWarning, match=f"supports torch {FIRST} to {LAST}, and this is torch {version}"):
        assert differences_of(version) is SUPPORTED[nearest]


@pytest.mark.parametrize("file", ["README.md", "constraints.txt"])
def test_pages_name_the_supported_versions(file):
    assert f"torch {FIRST} to {LAST}" in (ROOT / file).read_text()


def test_pip_accepts_the_supported_versions():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    major, minor = max(SUPPORTED)
    assert f"torch>={FIRST},<{major}.{minor + 1}" in dependencies


PROGRAM = """
import torch, scopetrace as st
print(torch.__file__)
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.relu(x.expand(2, 2), inplace=True)
try:
    st.trace(Model(), (torch.ones(2),))
except st.errors.FunctionalizationError as error:
    print(error)
"""


def test_errors_point_at_the_model_in_a_linked_environment(tmp_path):
    """The frames of torch are left out by their paths, which go through the link there."""
    for package in ("torch", "sympy"):
        (tmp_path / package).symlink_to(Path(sys.modules[package].__file__).parent)
    (tmp_path / "scopetrace").symlink_to(SOURCE)
    (tmp_path / "model.py").write_text(PROGRAM)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    run = subprocess.run(
        [sys.executable, tmp_path / "model.py"], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert run.stdout.startswith(str(tmp_path / "torch")), run.stderr
    assert "model.py:6, in forward" in run.stdout and "functional.py" not in run.stdout


def test_prefixes_have_both_forms_of_a_linked_directory(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert prefixes(tmp_path / "link", "a.py", "b/") == (
        *(f"{tmp_path}/link/a.py", f"{tmp_path}/link/b/"),
        *(f"{tmp_path}/real/a.py", f"{tmp_path}/real/b/"),
    )
    assert prefixes(tmp_path / "real") == (f"{tmp_path}/real/",)
