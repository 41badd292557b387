"""A third workload, tests/thumbnails.py, by the notebook that runs ours: a module on PYTHONPATH."""

import json
import os
import subprocess
import sys

import pytest

from energynn import config, records
from energynn.analysis import results
from energynn.files import REPOSITORY

WORKLOAD = REPOSITORY / "tests" / "thumbnails.py"


@pytest.mark.slow
def test_a_module_of_ones_own_makes_a_valid_record(tmp_path):
    assert len(WORKLOAD.read_text().splitlines()) <= 100
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"
    }
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(WORKLOAD.parent), environment.get("PYTHONPATH", "")]
    )
    parameters = dict(
        workload="thumbnails",
        devices=2,
        hidden=512,
        epochs=40,
        sampling_period_s=0.02,
        runs_dir=str(tmp_path / "runs"),
    )
    command = [
        sys.executable,
        "-m",
        "papermill",
        "--no-progress-bar",
        "--cwd",
        str(REPOSITORY),
        str(REPOSITORY / "notebooks" / "run_training.ipynb"),
        str(tmp_path / "out.ipynb"),
        "--parameters_yaml",
        json.dumps(parameters),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = (path.parent for path in tmp_path.glob("runs/local/*/record.json"))
    record = records.read(run_dir)
    assert (
        record["valid"] and record["workload"] == "thumbnails" and record["config"]["hidden"] == 512
    )
    assert (
        record["samples_trained"] == record["optimizer_steps"] * 32 and record["energy_total_J"] > 0
    )
    assert record["metrics"]["top1_error"] < 0.5  # of ten classes
    assert len(record["history"]) == 40 and "perun_time_s" in record
    assert records.check(tmp_path / "runs") == []  # without the module, as on another machine
    runs = results.load(tmp_path / "runs")
    assert not runs.attrs["excluded"]
    assert runs["workload"].values.tolist() == ["thumbnails"] and runs["top1_error"].item() < 0.5


def test_a_workload_that_is_no_module_or_has_no_configuration_is_refused():
    for name in ("no_such_workload", "json", "..x", ""):
        with pytest.raises(
            ValueError,
            match="workload: .* is not known .*choose one of resnet50, fourcastnet, or a m",
        ):
            config.make(name)


def test_a_module_of_ones_own_has_typed_parameters_too(monkeypatch):
    monkeypatch.syspath_prepend(WORKLOAD.parent)
    made = config.make("thumbnails", devices=2, hidden=32)
    assert (made.local_batch_size, made.global_batch_size, made.hidden) == (16, 32, 32)
    assert config.from_dict(config.to_dict(made)) == made
    assert config.run_id(made).startswith("thumbnails-photographs-n2-lbs16-gbs32-")
    with pytest.raises(ValueError, match="hidden: must have type integer"):
        config.make("thumbnails", hidden="many")
    with pytest.raises(ValueError, match="layers: not a parameter of Config"):
        config.make("thumbnails", layers=3)
