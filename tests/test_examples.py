"""The files in examples/ do what docs/own.md says of them."""

import contextlib
import importlib
import sys
from collections import Counter
from unittest.mock import Mock, call

import pytest

from energynn import records
from energynn.experiment import config
from energynn.host.files import REPOSITORY
from tests.processes import printed, refused, with_gpus

EXAMPLES = REPOSITORY / "examples"


def test_trackers_get_energy_power_and_time_of_each_epoch(monkeypatch):
    """examples/trackers.py on windows of 3 J in 2 s."""
    monkeypatch.syspath_prepend(EXAMPLES)
    trackers = importlib.import_module("trackers")
    measured = Mock(energy_J=3.0, time_s=2.0)
    measured.energies = {"energy_total_provenance": "measured", "doubts": []}
    energynn = Mock(window=lambda name: contextlib.nullcontext(measured))
    monkeypatch.setattr(trackers, "energynn", energynn)
    each = {
        "energynn/energy_measured_J": 3.0,
        "energynn/mean_power_measured_W": 1.5,
        "energynn/epoch_time_s": 2.0,
    }
    told = [(*one, epoch) for epoch in (0, 1) for one in each.items()]
    writer, mlflow, run = Mock(), Mock(), Mock()
    for log in (
        trackers.to_tensorboard(writer),
        trackers.to_mlflow(mlflow),
        trackers.to_wandb(run),
    ):
        assert list(trackers.with_energy(["a", "b"], log)) == ["a", "b"]
    assert writer.add_scalar.mock_calls == [call(*one) for one in told]
    assert mlflow.log_metric.mock_calls == [call(n, v, step=s) for n, v, s in told]
    logged = [call({n: v, "energynn/epoch": s}) for n, v, s in told]
    assert run.log.mock_calls == logged
    measured.energies["doubts"] = ["no sensor of a GPU"]
    told = []
    assert list(trackers.with_energy([5], lambda *one: told.append(one))) == [5]
    assert told[0] == ("energy_not_valid_J", 3.0, 5), (
        "at the epoch of a resumed training"
    )


@pytest.mark.nightly
@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_a_trainer_s_epochs_have_their_energy(tmp_path, monkeypatch, library):
    """examples/callbacks.py, where these are installed."""
    monkeypatch.syspath_prepend(EXAMPLES)
    torch, made = pytest.importorskip("torch"), pytest.importorskip(library)
    for_library = getattr(importlib.import_module("callbacks"), f"for_{library}")
    rows = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 8
    network = torch.nn.Linear(2, 1)

    def loss_of(_self, x, labels):
        return {"loss": ((torch.nn.Module.__call__(network, x) - labels) ** 2).mean()}

    if library == "transformers":
        model = type("Model", (torch.nn.Module,), {"forward": loss_of})()
        model.network = network
        given = made.TrainingArguments(
            tmp_path, num_train_epochs=2, report_to=[], logging_strategy="epoch"
        )
        told, logger = [], made.TrainerCallback()
        logger.on_log = lambda *_, logs, **more: told.append(logs)
        trainer = made.Trainer(model, given, train_dataset=rows, callbacks=[logger])
        trainer.add_callback(for_library(trainer))
        trainer.train()
        history = trainer.state.log_history
        for name in ("epoch_time_s", "loss"):
            assert len([each for each in history if name in each]) == 2
    else:
        logger, told = Mock(spec=made.pytorch.loggers.CSVLogger), []
        logger.log_metrics = lambda metrics, step: told.append(metrics)
        steps = {
            "training_step": lambda self, rows, _n: loss_of(self, **rows)["loss"],
            "configure_optimizers": lambda self: torch.optim.SGD(self.parameters()),
        }
        model = type("Model", (made.LightningModule,), steps)()
        model.network = network
        quiet = dict(enable_checkpointing=False, enable_progress_bar=False)
        trainer = made.Trainer(
            max_epochs=2,
            logger=logger,
            callbacks=[for_library()],
            accelerator="cpu",
            **quiet,
        )
        trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=4))
    epochs = [each for each in told if "epoch_time_s" in each]
    assert len(epochs) == 2
    for epoch in epochs:
        (energy_J,) = [epoch[name] for name in epoch if name.startswith("energy_")]
        assert energy_J > 0 and epoch["epoch_time_s"] > 0


def test_a_workload_that_is_no_module_or_has_no_configuration_is_refused():
    for name in ("alexnet", "json", "..x", ""):
        refused(
            "workload: .* is not known .*choose one of resnet50, fourcastnet, or a module",
            config.make,
            name,
        )


@pytest.mark.nightly
def test_minutes_of_an_imagined_gpu_are_records_with_its_power(tmp_path):
    """`make gpu-minutes` with seconds for minutes, on a GPU of 300 W."""
    gpus = [dict(high_W=300.0, update_s=0.1, averaged=True)]
    fakes = REPOSITORY / "tests/train/imagined"
    environment = with_gpus(gpus, fakes, ENERGYNN_RUNS=str(tmp_path))
    sizes = "image_size=32 wait_s=0.1 idle_ready_s=0"
    words = ["MINUTE_S=6", "WORK_SIZES=4", f"GPU_PYTHON={sys.executable}"]
    words.append(f"MINUTES_WITH={sizes}")
    printed("make", "gpu-minutes", *words, cwd=REPOSITORY, env=environment)
    made = records.read_all(tmp_path)
    kinds = [record.config["kind"] for record in made]
    assert Counter(kinds) == dict(idle=1, simulated_collective=1, starved=1, work=1)
    assert {record.system for record in made} == {"gpu-a-fake-h100"}
    for record in made:
        assert record.valid, record.invalid_reasons
        assert record.mean_power_gpu_W == pytest.approx(300, rel=0.03)
    assert records.check(tmp_path) == []


def test_a_collective_of_one_gpu_is_refused(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(EXAMPLES)
    alone = config.make("gpu_minutes", kind="collective")
    refused(
        "two GPUs or more; say devices=2",
        importlib.import_module("gpu_minutes").main,
        alone,
        tmp_path,
    )
    assert config.make("gpu_minutes", kind="collective", devices=2).devices == 2
