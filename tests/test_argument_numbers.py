"""Numbers that a forward reads from objects among its arguments: fixed, checked at a call, named by files."""

import dataclasses
import warnings

import pytest
import torch

import scopetrace as st

X = torch.arange(8.0).reshape(2, 4)


class Cache:
    """Holds tensors, and a number that is read."""

    def __init__(self):
        self.keys = torch.zeros(2, 4)
        self.seen = 3
        self.unread = 7

    def update(self, x):
        self.keys = self.keys + x
        self.seen += 1
        return self.keys * self.seen


class Settings:
    """Holds no tensors."""

    def __init__(self):
        self.scale = 2.0
        self.inner = Inner()
        self.unread = 7


class Inner:
    def __init__(self):
        self.shift = 1


@dataclasses.dataclass
class Options:
    scale: float = 2.0


@dataclasses.dataclass
class Registered:
    scale: float = 2.0


torch.export.register_dataclass(Registered)


def with_cache(x, cache):
    return cache.update(x)


def with_settings(x, settings):
    return x * settings.scale + settings.inner.shift


def named(tr):
    return {s.expression: s.value for s in tr.specializations if s.op == "argument"}


def test_they_are_specializations():
    assert named(st.trace(with_cache, (X, Cache()))) == {"cache.seen": 3}
    assert named(st.trace(with_settings, (X, Settings()))) == {"settings.scale": 2.0, "settings.inner.shift": 1}
    assert named(st.trace(lambda x, options: x * options.scale, (X, Options()))) == {"options.scale": 2.0}


def test_a_call_with_another_number_is_refused():
    cache = Cache()
    tr = st.trace(with_cache, (X, cache))
    torch.testing.assert_close(tr(X, cache), X * 4)
    with pytest.raises(st.errors.InputMismatchError, match=r"\.seen was 3 when traced and is 4 now"):
        tr(X, cache)


@pytest.mark.parametrize("name", ["scale", "shift"])
def test_a_number_in_the_same_object_is_read_again(name):
    settings = Settings()
    tr = st.trace(with_settings, (X, settings))
    torch.testing.assert_close(tr(X, settings), X * 2 + 1)
    setattr(settings if name == "scale" else settings.inner, name, 5)
    with pytest.raises(st.errors.InputMismatchError, match=rf"settings\..*{name} was .* when traced and is 5 now"):
        tr(X, settings)


def test_a_number_that_nobody_reads_may_differ():
    settings = Settings()
    tr = st.trace(with_settings, (X, settings))
    settings.unread = 8
    torch.testing.assert_close(tr(X, settings), X * 2 + 1)


def test_an_exported_program_names_them():
    tr = st.trace(lambda x, options: x * options.scale, (X, Registered()))
    with pytest.warns(st.errors.FixedValueWarning, match=r"options\.scale = 2\.0; keep such a number in a tensor"):
        exported = tr.to_exported_program()
    assert exported.graph_module.meta["scopetrace.fixed_numbers"] == {"options.scale": 2.0}


def test_an_onnx_model_names_them():
    pytest.importorskip("onnxscript")
    tr = st.trace(lambda x, options: x * options.scale, (X, Options()))
    with pytest.warns(st.errors.FixedValueWarning, match=r"the ONNX model .* options\.scale = 2\.0"):
        model = tr.to_onnx()
    assert model.metadata_props["scopetrace.fixed_numbers"] == '{"options.scale": 2.0}'


def test_an_onnx_model_of_a_number_that_the_forward_changes_is_refused():
    pytest.importorskip("onnxscript")
    with pytest.raises(st.errors.OnnxExportError, match=r"changes cache\.seen, which was 3 in the trace"):
        st.trace(lambda x, cache: (cache.update(x), cache), (X, Cache())).to_onnx()


def test_nothing_is_said_without_such_numbers():
    with warnings.catch_warnings():
        warnings.simplefilter("error", st.errors.ScopetraceWarning)
        st.trace(torch.nn.Linear(4, 4), (X,)).to_exported_program()


def test_a_program_that_depends_on_side_effects_is_warned_of():
    def f(x, seen=[]):  # noqa: B006
        seen.append(1)
        return x * len(seen)

    with pytest.warns(st.errors.SideEffectWarning, match="right for one call only"):
        st.trace(f, (X,)).to_exported_program()
