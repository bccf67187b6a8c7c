"""The names that people see: those of the package, those of a Trace, and earlier ones that go on working."""

import inspect
import re
import sys
import textwrap
from types import ModuleType

import pytest
import torch
from torch import nn

import scopetrace as st

EARLIER = """
    Alias CheckError CompiledGraphError ControlFlowError DataDependentError DynamicShapeError ExecOrderTracer
    ExecutionOrder ExportError ForeignTensorError Function FunctionalizationError Functionalized InputMismatchError
    LeafPatternError LintError ModuleCall Mutation OnnxDependencyError OnnxExportError OnnxOpError OnnxOptionError
    OnnxVerificationError OpaqueOutputError OrderMismatchError OutlineError Outlined PlanError RandomStateError
    Scope ScopeError ScopetraceError Specialization Trace TraceError TracingConfig TracingState UnsupportedOpError
    WriteBack __version__ distributed errors from_exported_program functional_backend functionalize load scope
    trace tracing_state
"""

OF_A_TRACE = """
    activations aliases call calls check checkpoint_plan compile decompose digest graph_module is_recomputed lint memory
    model mutations order outline phase_of print_readable range_constraints run save scope scope_of side_effects
    specializations split_backward summary to_chrome_trace to_exported_program to_html to_model_explorer to_module
    to_onnx to_svg with_graph without_model write_back
"""


@pytest.mark.parametrize("name", EARLIER.split())
def test_an_earlier_name_can_be_imported(name):
    found = {}
    exec(f"from scopetrace import {name}", found)
    assert found[name] is getattr(st, name)


def test_few_names_are_listed_and_no_module_among_them_but_two():
    assert len(dir(st)) <= 30
    assert set(st.__all__) <= set(dir(st))
    assert all(hasattr(st, name) for name in dir(st))
    assert [name for name in dir(st) if isinstance(getattr(st, name), ModuleType)] == ["distributed", "errors"]


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'Tracer'"):
        st.Tracer  # noqa: B018


def test_a_trace_shows_what_people_use():
    assert [name for name in dir(st.Trace) if not name.startswith("_")] == OF_A_TRACE.split()


def test_every_error_has_a_listed_base():
    bases = (st.TraceError, st.ArgumentError, st.VerificationError)
    classes = [c for c in vars(st.errors).values() if isinstance(c, type)]
    warnings = [c for c in classes if issubclass(c, st.errors.ScopetraceWarning)]
    classes = [c for c in classes if c not in warnings]
    assert all(issubclass(c, UserWarning) and c.__doc__ for c in warnings)
    assert all(issubclass(c, st.ScopetraceError) for c in classes)
    other = {c.__name__ for c in classes if not issubclass(c, bases)}
    dependencies = {f"{of}DependencyError" for of in ("Integration", "Onnx", "View")}
    assert other == {"ScopetraceError", "ScopeError", "TraceFileError", *dependencies}
    assert all(c.__doc__ for c in classes)


def test_the_earlier_name_of_leaf_modules():
    with pytest.raises(TypeError, match="write leaf_modules="):
        st.trace(nn.Linear(2, 2), (torch.randn(1, 2),), leaves=nn.Linear)


@pytest.mark.parametrize("name", sorted({*st.__all__} - {"errors"}))
def test_each_name_has_an_example_that_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), torch.randn(1, 2)
    names = {"torch": torch, "st": st, "model": model, "x": x, "tr": st.trace(model, (x,)), "tracer": torch.fx.Tracer()}
    names |= {"gm": torch.fx.symbolic_trace(model), "rotate": torch.neg, "q": x, "k": x}
    exec(textwrap.dedent(re.search(r"\n\n((?:    .*\n?|\n)+)", inspect.getdoc(getattr(st, name)))[1]), names)


def test_save_and_load_are_a_pair(tmp_path):
    x = torch.randn(1, 2)
    tr = st.trace(nn.Linear(2, 2), (x,))
    st.save(tr, tmp_path / "linear.st")
    torch.testing.assert_close(st.load(tmp_path / "linear.st")(x), tr(x))


def test_a_trace_whose_classes_are_not_there(tmp_path, monkeypatch):
    module = ModuleType("gone")
    exec("import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x + 1", vars(module))
    monkeypatch.setitem(sys.modules, "gone", module)
    st.trace(module.Net(), (torch.zeros(2),)).save(tmp_path / "net.st")
    assert st.load(tmp_path / "net.st").calls[0].module_type is module.Net
    del module.Net
    for _ in range(2):
        loaded = st.load(tmp_path / "net.st")
        assert (loaded.calls[0].module_type.__module__, loaded.calls[0].module_type.__name__) == ("gone", "Net")
        assert list(loaded.calls[0].arguments) == ["x"]
        assert loaded(torch.zeros(2)).tolist() == [1, 1]
        monkeypatch.delitem(sys.modules, "gone", raising=False)


@pytest.mark.parametrize("args", [3, None, "x", {"input": torch.ones(1, 2)}])
def test_positional_arguments_of_another_form(args):
    with pytest.raises(TypeError, match=f"args must be a tuple of positional arguments, not {type(args).__name__}"):
        st.trace(nn.Linear(2, 2), args)


def test_keyword_arguments_of_another_form():
    with pytest.raises(TypeError, match="kwargs must be a dict of keyword arguments, not Tensor"):
        st.trace(nn.Linear(2, 2), (), torch.ones(1, 2))


def test_a_check_takes_arguments_as_a_trace_does():
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    tr = st.trace(model, x)
    tr.check(x)
    tr.check((x,))
    with pytest.raises(st.errors.ArgumentTypeError, match="args must be a tuple of positional arguments, not Linear"):
        tr.check(model, (x,))


@pytest.mark.parametrize("given", ["yes", 1, None])
def test_specialize_is_true_or_false(given):
    with pytest.raises(st.ArgumentTypeError, match=f"specialize={given!r}: it must be True or False"):
        st.trace(nn.Linear(2, 2), (torch.ones(1, 2),), specialize=given)


@pytest.mark.parametrize("node", ["linear", None, torch.ones(1)])
def test_the_scope_of_what_is_no_node(node):
    tr = st.trace(nn.Linear(2, 2), (torch.ones(1, 2),))
    with pytest.raises(st.errors.ArgumentTypeError, match=f"takes a torch.fx.Node .*, not {type(node).__name__}"):
        tr.scope_of(node)


@pytest.mark.parametrize("options", [{"level": "core"}, {"lower_scatter": "scatter"}])
def test_a_backend_refuses_wrong_options_before_anything_is_compiled(options):
    with pytest.raises(st.ArgumentError, match="must be one of"):
        st.functional_backend(lambda gm, inputs: gm, **options)
