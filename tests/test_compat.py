"""The private names of torch that `_compat` uses, and what differs by version."""

import os
import pkgutil
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

from scopetrace._compat.versions import CURRENT, SUPPORTED, differences_of
from scopetrace.sources import prefixes
from tests.test_layers import SOURCE, Module, read_tree, torch_names

COMPAT = [module for module in read_tree(SOURCE) if module.layer == "_compat"]
ROOT = Path(__file__).parents[1]
FIRST, LAST = (".".join(map(str, end(SUPPORTED))) for end in (min, max))
"""The supported versions of torch, as text."""


def missing(module):
    """The names of torch in a module that the installed torch does not have."""
    return {name for _, name in torch_names(module) if name.partition(".")[0] == "torch" and not is_there(name)}


def is_there(name):
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("module", COMPAT, ids=lambda module: module.path)
def test_the_installed_torch_has_every_name(module):
    assert missing(module) == set()


def test_missing_names_are_seen():
    source = """
import torch
from torch import _C as c, fx
from torch._nowhere import x
def f(t: torch.Tensor = torch.Tensor._gone):
    return c._no_such_name(t).anything, c._set_grad_enabled, fx.Graph._lint, torch.fx.Graph.lint
"""
    absent = {"torch.Tensor._gone", "torch._C._no_such_name", "torch._nowhere.x", "torch.fx.Graph._lint"}
    assert missing(Module("_compat/a.py", source)) == absent


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
