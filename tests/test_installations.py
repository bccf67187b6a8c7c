"""A trace is the same wherever its model's package is installed: in a folder on PYTHONPATH, in an environment that
takes its packages from another one, as an editable copy.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytest.importorskip("transformers")

SOURCE, PACKAGES = Path(__file__).parents[1] / "src", Path(sysconfig.get_path("purelib"))

MODELS = """
import copy
import torch
from scopetrace.cli.targets import declare_missing_ops

library = declare_missing_ops()  # where torchvision beside this torch has none
import scopetrace as st
import transformers
from transformers.models.bert import modeling_bert as bert
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.models.llama import modeling_llama as llama

small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
ids = torch.arange(6).view(1, 6)


def tensors(x):
    leaves = torch.utils._pytree.tree_leaves(x)
    caches = [t for t in leaves if isinstance(t, transformers.DynamicCache)]
    held = [(layer.keys, layer.values) for cache in caches for layer in cache.layers]
    return [*held, *(t for t in leaves if isinstance(t, torch.Tensor))]


def verdict(name, model, args, kwargs, change):
    twin = copy.deepcopy(model)
    try:
        trace = st.trace(model, args, kwargs)
        for step in range(3):
            (a, k), (b, l) = change(step), change(step)
            ours, eager = trace(*a, **k), twin(*b, **l)
            torch.testing.assert_close(tensors(ours), tensors(eager))
        print(name, "right", len(trace.side_effects))
    except Exception as error:
        print(name, type(error).__name__, str(error).splitlines()[0])


def tokens(step):
    return (ids + step,), {}


def cached(step):
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        decoder(ids + step, past_key_values=cache)
    return (ids[:, :1] + step,), {"past_key_values": cache}


torch.manual_seed(0)
with torch.no_grad():
    model = bert.BertModel(transformers.BertConfig(**small)).eval()
    verdict("BERT", model, *tokens(0), tokens)
    model = gpt2.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2)).eval()
    verdict("GPT-2", model, *tokens(0), tokens)
    config = transformers.LlamaConfig(**small, num_key_value_heads=2)
    decoder = llama.LlamaForCausalLM(config).eval()
    verdict("Llama with cache", decoder, *cached(0), cached)


class Step:
    def __init__(self, model):
        self.model = model

    def __call__(self, ids, labels):
        self.model.zero_grad()
        loss = self.model(ids, labels=labels).loss
        loss.backward()
        return loss.detach(), self.model.classifier.weight.grad.clone()


model = bert.BertForSequenceClassification(transformers.BertConfig(**small)).eval()
labels = torch.tensor([1])
verdict("a step with labels", Step(model), (ids, labels), {}, lambda step: ((ids + step, labels), {}))
"""
RIGHT = ["BERT right", "GPT-2 right", "Llama with cache right", "a step with labels right"]


def verdicts(python, *path, options=()):
    """What the models' traces are, with packages in these folders."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL"))}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, (SOURCE, *path))), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([python, *options, "-c", MODELS], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.fixture(scope="module")
def usual():
    return verdicts(sys.executable)


@pytest.mark.slow
def test_as_usual(usual):
    assert [line.rpartition(" ")[0] for line in usual] == RIGHT


@pytest.mark.slow
def test_in_a_folder_on_the_path(usual, tmp_path):
    for package in PACKAGES.iterdir():
        if package.suffix != ".pth":
            (tmp_path / package.name).symlink_to(package)
    assert verdicts(sys.executable, tmp_path, options=["-S"]) == usual  # -S: site-packages is no part of the path


@pytest.mark.slow
def test_in_an_environment_with_the_packages_of_another(usual, tmp_path):
    venv.create(tmp_path, system_site_packages=True)
    (site,) = tmp_path.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{PACKAGES}\n")
    assert verdicts(tmp_path / "bin" / "python") == usual


@pytest.mark.slow
def test_as_an_editable_copy(usual, tmp_path):
    shutil.copytree(PACKAGES / "transformers", tmp_path / "transformers", ignore=shutil.ignore_patterns("__pycache__"))
    assert verdicts(sys.executable, tmp_path) == usual
