"""The files in examples/ do what docs/own.md says of them."""

import importlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from energynn import config, records
from energynn.analysis import results
from energynn.data import describe, manifests
from energynn.files import REPOSITORY

EXAMPLES = REPOSITORY / "examples"


@pytest.fixture
def trackers(monkeypatch):
    """examples/trackers.py on windows of 3 J in 2 s."""
    monkeypatch.syspath_prepend(EXAMPLES)
    module = importlib.import_module("trackers")

    class Window(SimpleNamespace):
        def __enter__(self):
            return self

        def __exit__(self, *_error):
            self.energies = {"energy_total_provenance": "measured"}
            self.energy_J, self.time_s = 3.0, 2.0

    monkeypatch.setattr(
        module, "energynn", SimpleNamespace(window=lambda name: Window(name=name))
    )
    return module


def test_trackers_get_energy_power_and_time_of_each_epoch(trackers):
    told = []
    writer = SimpleNamespace(
        add_scalar=lambda name, value, step: told.append((name, value, step))
    )
    mlflow = SimpleNamespace(
        log_metric=lambda name, value, step: told.append((name, value, step))
    )
    run = SimpleNamespace(
        log=lambda values: told.append(
            (*list(values.items())[0], values["energynn/epoch"])
        )
    )
    for log in (
        trackers.to_tensorboard(writer),
        trackers.to_mlflow(mlflow),
        trackers.to_wandb(run),
    ):
        told.clear()
        assert list(trackers.with_energy(["a", "b"], log)) == ["a", "b"]
        assert told[:3] == [
            ("energynn/energy_measured_J", 3.0, 0),
            ("energynn/mean_power_measured_W", 1.5, 0),
            ("energynn/epoch_time_s", 2.0, 0),
        ]
        assert len(told) == 6 and told[3][2] == 1


@pytest.fixture
def my_points(tmp_path, monkeypatch):
    """Points on a line, described as docs/own.md says, in a folder of their own."""
    folder = tmp_path / "data" / "my-points"
    folder.mkdir(parents=True)
    x = np.linspace(-1, 1, 100)
    np.savetxt(folder / "points.csv", np.column_stack([x, 3 * x]), delimiter=",")
    for module in (manifests, config):
        monkeypatch.setattr(module, "DATA_MANIFESTS", tmp_path / "manifests")
    monkeypatch.setattr(manifests, "GENERATED", tmp_path / "data")
    return folder


def test_data_of_ones_own_are_described_and_verified(my_points):
    describe.build("my-points")
    assert manifests.verify("my-points") == my_points
    (my_points / "points.csv").write_text("1,2\n")
    with pytest.raises(ValueError, match="my-points: .*points.csv differs"):
        manifests.verify("my-points")
    with pytest.raises(ValueError, match="no-such-data: .*put its files into"):
        describe.build("no-such-data")


def test_a_workload_that_is_no_module_or_has_no_configuration_is_refused():
    for name in ("no_such_workload", "json", "..x", ""):
        with pytest.raises(
            ValueError, match="workload: .* is not known .*choose one of resnet50"
        ):
            config.make(name)


def test_a_workload_of_ones_own_has_typed_parameters_too(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    made = config.make("straight_line", devices=2)
    assert (made.local_batch_size, made.global_batch_size) == (10, 20)
    assert config.from_dict(config.to_dict(made)) == made
    assert config.run_id(made).startswith("straight_line-my-points-n2-lbs10-gbs20-")
    with pytest.raises(ValueError, match="epochs: must have type integer"):
        config.make("straight_line", epochs="many")
    with pytest.raises(ValueError, match="layers: not a parameter of Config"):
        config.make("straight_line", layers=3)


def test_the_example_of_a_workload_is_short():
    code = (
        (EXAMPLES / "straight_line.py")
        .read_text()
        .partition("class Config")[2]
        .splitlines()
    )
    assert len([line for line in code if line.strip()]) <= 35


@pytest.mark.slow
def test_the_example_learns_the_line_and_leaves_a_valid_record(tmp_path):
    """As a person would: data below build/data, a manifest, a run."""
    here = tmp_path / "checkout"
    here.mkdir()
    for name in ("energynn", "examples", "systems", "notebooks", "runs"):
        os.symlink(REPOSITORY / name, here / name)
    (here / "data_manifests").mkdir()
    os.symlink(
        REPOSITORY / "data_manifests" / "descriptions.json",
        here / "data_manifests" / "descriptions.json",
    )
    (here / "energynn").unlink()
    subprocess.run(["cp", "-r", REPOSITORY / "energynn", here / "energynn"], check=True)
    data = here / "build" / "data" / "my-points"
    data.mkdir(parents=True)
    x = np.linspace(-1, 1, 1000)
    np.savetxt(data / "points.csv", np.column_stack([x, 3 * x]), delimiter=",")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(here), str(here / "examples")])
    }
    energynn = [sys.executable, "-m", "energynn.cli"]
    for words in (
        ["data", "describe", "my-points"],
        [
            "run",
            "workload=straight_line",
            "epochs=200",
            "devices=2",
            "--runs-dir",
            str(tmp_path / "runs"),
        ],
    ):
        done = subprocess.run(
            [*energynn, *words],
            env=environment,
            cwd=here,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("runs/local/*/record.json")
    record = json.loads(path.read_text())
    assert record["valid"], record["invalid_reasons"]
    assert record["metrics"]["slope"] == pytest.approx(3, abs=0.01)
    assert (
        len(record["history"]) == 200 and record["optimizer_steps"] * 20 == 200 * 1000
    )
    # without the module, as on another machine
    assert records.check(tmp_path / "runs") == []
    runs = results.load(tmp_path / "runs")
    assert not runs.attrs["excluded"] and runs["workload"].values.tolist() == [
        "straight_line"
    ]
