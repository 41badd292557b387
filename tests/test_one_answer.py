"""Fields of one name mean one thing, whichever command is asked of a run."""

import shutil

import numpy as np
import pandas as pd
import pytest

import energynn
from energynn.host.files import REPOSITORY
from energynn.launch import perun_import
from tests.perun_files import write_run
from tests.processes import answer, told

KEPT = REPOSITORY / "runs" / "large-batch"


@pytest.fixture
def three_runs(tmp_path):
    """Two of the committed runs, of other batch sizes, and one of two GPUs that perun measured,
    below a folder of their own.
    """
    runs_dir = tmp_path / "runs"
    folders = [next(KEPT.glob(f"*-gbs{size}-s0-*")) for size in (16, 240)]
    for folder in folders:
        shutil.copytree(folder, runs_dir / KEPT.name / folder.name)
    watts = np.random.default_rng(0).uniform(200, 300, (3, 81)).astype("float32")
    names = ("cpu", "cpu_0"), ("gpu", "CUDA:0_POWER"), ("gpu", "CUDA:1_POWER")
    sensors = [(*name, "W", 1.0, one) for name, one in zip(names, watts, strict=True)]
    seconds = np.linspace(0, 20, 81)
    path = write_run(tmp_path / "perun.hdf5", sensors, seconds=seconds)
    folders += perun_import.import_perun_file(path, runs_dir)[0]
    return runs_dir, [folder.name for folder in folders]


def leaves(value: dict):
    """Yield name and value of every field of today; files are called by their own names."""
    for name, inner in value.items():
        if isinstance(inner, dict) and name not in ("files", "was"):
            yield from leaves(inner)
        elif not isinstance(inner, dict | list):
            yield name, inner


def answers(runs_dir, names, tmp_path):
    """Map source -> run -> what this source says of the run."""
    place = "--runs-dir", runs_dir
    rows = told("status", *place)["runs"]
    beside = pd.DataFrame(told("compare", *names, *place)["rows"])
    answer(f"export --csv {tmp_path}/all.csv", *place)
    answer(f"export --csv {tmp_path}/own.csv --own", *place)
    exported = pd.read_csv(tmp_path / "all.csv").set_index("run").loc[names]
    own = pd.read_csv(tmp_path / "own.csv").set_index("run_id")
    return {
        "show": {run: told(f"show {run}", *place) for run in names},
        "status": {row["run_id"]: row for row in rows},
        "compare": beside.set_index("quantity")[names].to_dict(),
        "export": exported.to_dict("index"),
        "export --own": own.to_dict("index"),
        "table": energynn.table(runs_dir).set_index("run_id").to_dict("index"),
    }


def test_fields_of_one_name_have_one_value(three_runs, tmp_path):
    runs_dir, names = three_runs
    found = answers(runs_dir, names, tmp_path)
    compared, differ = set(), []
    for run in names:
        values = {}
        for source, of_runs in found.items():
            for name, value in leaves(of_runs[run]):
                if value != "" and pd.notna(value):
                    values.setdefault(name, []).append((source, value))
        for name, each in values.items():
            (_, first), *others = each
            is_number = isinstance(first, int | float)
            same = pytest.approx(first, rel=1e-9) if is_number else first
            compared |= {name} if others else set()
            differ += [(name, each) for _, value in others if value != same]
    assert not differ
    assert len(compared) > 30, compared
