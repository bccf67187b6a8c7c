"""The callbacks of training runs, with the real packages: what they log, and that the run is the same."""

import csv
import importlib
import sys

import pytest
import torch
from torch import nn

import scopetrace as st
from scopetrace.cli.targets import declare_missing_ops
from scopetrace.integrations.first_call import log_first_call

KEPT = declare_missing_ops()  # parts of transformers import torchvision

NUMBERS = ["scopetrace/parameters", "scopetrace/flops", "scopetrace/peak_bytes", "scopetrace/saved_bytes"]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1))


def files(folder):
    return {path.name for path in folder.rglob("scopetrace.*")} - {"scopetrace.svg"}  # which needs Graphviz


def test_the_first_call_alone_is_logged(tmp_path):
    logged, model, plain, x = [], net(), net(), torch.ones(2, 4)
    log_first_call(model, tmp_path, None, lambda *report: logged.append(report))
    torch.manual_seed(1)
    ours = [model(x), model(x)]
    torch.manual_seed(1)
    torch.testing.assert_close(ours, [plain(x), plain(x)], rtol=0, atol=0)
    [(numbers, text)] = logged
    assert list(numbers) == NUMBERS
    assert numbers["scopetrace/parameters"] == 49
    step = st.trace(lambda: model(x).sum().backward()).memory()
    assert (numbers["scopetrace/peak_bytes"], numbers["scopetrace/saved_bytes"]) == (step.peak_bytes, step.saved_bytes)
    assert text == (tmp_path / "scopetrace.txt").read_text()
    assert text.splitlines()[1].startswith("Sequential") and "saved for backward" in text
    assert files(tmp_path) == {"scopetrace.txt", "scopetrace.html"}
    assert all(p.grad is None for p in model.parameters()) and not model._forward_pre_hooks


def test_a_model_that_cannot_be_traced_is_a_warning(tmp_path, caplog):
    class Branch(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    model = Branch()
    log_first_call(model, tmp_path, None, pytest.fail)
    assert model(-torch.ones(2)).tolist() == [1, 1]
    assert "scopetrace cannot trace Branch: DataDependentError: Python needs the value of a tensor" in caplog.text
    assert files(tmp_path) == set()


@pytest.mark.parametrize("tool", ["lightning", "trainer"])
def test_a_missing_package_is_an_error_that_names_the_extra(tool, monkeypatch):
    monkeypatch.delitem(sys.modules, f"scopetrace.integrations.{tool}", raising=False)
    for name in ("lightning.pytorch", "transformers.trainer_callback"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"pip install 'scopetrace\[{tool}\]'") as caught:
        importlib.import_module(f"scopetrace.integrations.{tool}")
    assert isinstance(caught.value, st.errors.IntegrationDependencyError)


# The packages ---------------------------------------------------------------------------------------------------------


def lightning_run(folder, *callbacks, direct=True):
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger

    class Regression(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch):
            return (self if direct else self.net)(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    model = Regression()
    trainer = pl.Trainer(
        max_steps=3,
        accelerator="cpu",
        logger=CSVLogger(folder),
        callbacks=[*callbacks],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(1)
    trainer.fit(model, torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2, shuffle=True))
    return [p.detach() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "direct"), [("", True), ("net", True), ("net", False)])
def test_lightning(tmp_path, module, direct):
    pytest.importorskip("lightning")
    from scopetrace.integrations.lightning import ModelReport

    expected = lightning_run(tmp_path / "plain", direct=direct)
    actual = lightning_run(tmp_path / "ours", ModelReport(module), direct=direct)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert files(tmp_path / "ours") == {"scopetrace.txt", "scopetrace.html"}
    with next((tmp_path / "ours").rglob("metrics.csv")).open() as file:
        [row] = csv.DictReader(file)
    assert (float(row["scopetrace/parameters"]), row["step"]) == (49, "0")


@pytest.mark.filterwarnings("ignore")
def test_lightning_with_a_module_that_is_not_called(tmp_path, caplog):
    pytest.importorskip("lightning")
    from scopetrace.integrations.lightning import ModelReport

    lightning_run(tmp_path, ModelReport(), direct=False)
    assert "training_step never called the LightningModule itself" in caplog.text


def trainer_run(folder, *callbacks):
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.BertForSequenceClassification(config)
    data = [{"input_ids": torch.arange(i, i + 8), "labels": torch.tensor(i % 2)} for i in range(8)]
    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_steps=2
    )
    trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[*callbacks])
    trainer.train()
    return [p.detach() for p in model.parameters()], trainer


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from scopetrace.integrations.trainer import ModelReport

    expected, _ = trainer_run(tmp_path / "plain")
    actual, trainer = trainer_run(tmp_path / "ours", ModelReport())
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert files(tmp_path / "ours") == {"scopetrace.txt", "scopetrace.html"}
    assert "BertForSequenceClassification" in (tmp_path / "ours" / "scopetrace.txt").read_text()
    [row] = [row for row in trainer.state.log_history if NUMBERS[0] in row]
    assert (row["step"], sorted(row)) == (0, sorted([*NUMBERS, "step"]))
    assert NUMBERS[2] in (tmp_path / "ours" / "checkpoint-2" / "trainer_state.json").read_text()
