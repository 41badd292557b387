"""What people are told of their runs, from files and a Slurm that answers or does not."""

import json
import re

import pytest

from energynn import cli
from energynn.cluster import slurm, status
from energynn.files import lock, write_json
from tests.conftest import minimal_record


def submitted(runs_dir, name, job, **texts):
    """A run that was submitted, and its other files: start={...} is job/start-1.json."""
    folder = runs_dir / "slurm" / name
    (folder / "job").mkdir(parents=True)
    write_json(folder / "job" / "submission.json", {"submitted_at": "t", "job_id": job})
    places = {
        "start": "job/start-1.json",
        "record": "record.json",
        "run": "run.json",
    }
    for key, value in texts.items():
        write_json(folder / places[key], value)
    return folder


@pytest.fixture
def queue(monkeypatch):
    """Slurm as squeue answers; without a queue nobody answers."""
    states = {}

    def answer(command, *words):
        if command == "squeue" and None not in states:
            return "".join(
                f"{job}|{state}|{reason}\n" for job, (state, reason) in states.items()
            )
        raise ValueError(f"{command}: no")

    monkeypatch.setattr(slurm, "call", answer)
    return states


def states_of(runs_dir):
    rows, notes = status.rows(status.folders(runs_dir, []))
    return {row["run_id"]: (row["state"], row["reason"]) for row in rows}, notes


def test_a_run_has_one_state_and_the_reason_for_it(tmp_path, queue, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    queue |= {
        "1_0": ("RUNNING", "None"),
        "2_0": ("PENDING", "Resources"),
        "3_0": ("SUSPENDED", "None"),
    }
    queue |= {
        "4_0": ("PENDING", "Dependency"),
        "5_0": ("PENDING", "BeginTime"),
        "9_0": ("RUNNING", "None"),
    }
    bad = {
        "valid": False,
        "status": "failed",
        "status_reason": "rank 1 ended",
        "invalid_reasons": [],
    }
    stopped = {"submission": "t", "ended_at": "u", "outcome": "asked to stop"}
    marks = {"t_mono_ns": 1, "t_wall_ns": 1, "event": "epoch"}
    told = json.dumps(marks | {"epoch": 3, "epochs": 9})
    (submitted(tmp_path, "running", "1_0") / "events-rank0.jsonl").write_text(told)
    submitted(tmp_path, "queued", "2_0")
    submitted(tmp_path, "suspended", "3_0")
    submitted(tmp_path, "waits", "4_0")
    submitted(tmp_path, "again", "5_0", start=stopped)
    submitted(tmp_path, "stopped", "6_0", start=stopped)
    submitted(
        tmp_path,
        "failed",
        "7_0",
        start=stopped | {"outcome": "failed: rank 1 ended"},
        record=minimal_record(**bad),
    )
    submitted(tmp_path, "finished", "9_0", record=minimal_record(valid=True))
    submitted(
        tmp_path,
        "lost",
        "76_0",
        start={"submission": "an earlier one", "outcome": "failed: x"},
    )
    submitted(tmp_path, "died", "", run={})
    found, notes = states_of(tmp_path)
    assert not notes and found == {
        "running": ("running", "3 of 9 epochs done"),
        "queued": ("queued", "Resources"),
        "suspended": ("running", "no epoch reported"),
        "waits": ("queued", "Dependency"),
        "again": ("queued", "BeginTime"),
        "stopped": ("stopped", "asked to stop"),
        "failed": ("failed", "rank 1 ended"),
        "finished": ("finished", ""),
        "lost": (
            "stopped",
            "its job is gone; `sacct -j 76_0` and job/log.txt say more",
        ),
        "died": ("failed", "its launcher died; `energynn check --recover` says more"),
    }
    shown = status.text(*status.rows(status.folders(tmp_path, [])))
    assert re.search(r"running +running +3 of 9 epochs done; job 1_0\n", shown)
    assert all(len(line) <= 100 for line in shown.splitlines()) and shown.splitlines()[
        -1
    ].startswith("runs: 10; ")
    with lock(tmp_path / "slurm" / "died" / "run.json"):  # its launcher lives
        assert states_of(tmp_path)[0]["died"][0] == "running"


def test_without_an_answer_the_files_tell_what_they_can(tmp_path, queue):
    queue[None] = None
    submitted(tmp_path, "unknown", "1_0", start={"submission": "t"})
    submitted(tmp_path, "finished", "3_0", record=minimal_record(valid=True))
    submitted(
        tmp_path,
        "failed",
        "4_0",
        start={"submission": "t", "ended_at": "u", "outcome": "failed: x"},
    )
    found, notes = states_of(tmp_path)
    assert {name: state for name, (state, _) in found.items()} == {
        name: name for name in found
    } and len(found) == 3
    assert notes == [
        "the queue is unknown, the rest is from the runs' files: squeue: no"
    ]


@pytest.mark.parametrize(
    "job", ["x_0", "0_0", "77", "77_0,x_0", "²_0", "77_0\n", "9" * 20 + "_0", None]
)
def test_an_ill_typed_file_concerns_its_own_run_alone(tmp_path, queue, job):
    """Slurm refuses a question with a wrong number, and runs in the queue would be made again."""
    queue["1_0"] = ("RUNNING", "None")
    submitted(tmp_path, "good", "1_0")
    submitted(tmp_path, "bad", job)
    submitted(tmp_path, "worse", "1_1", start={"exit_status": "many"})
    found, notes = states_of(tmp_path)
    assert {name: state for name, (state, _) in found.items()} == {
        "good": "running"
    } and [note.partition(":")[0] for note in notes] == [
        "bad",
        "worse",
    ]


def test_slurms_own_refusal_is_no_answer(monkeypatch):
    def refuse(*command):
        raise ValueError("squeue: error: Invalid user: x")

    monkeypatch.setattr(slurm, "call", refuse)
    with pytest.raises(ValueError, match="Invalid user"):
        slurm.queue(["77_0"])
    assert slurm.queue([""]) == {}
    with pytest.raises(ValueError, match="not found; submit from a login node"):
        monkeypatch.undo()
        slurm.call("no-such-command")


def test_a_measured_command_has_ended_even_where_it_was_too_short(tmp_path, capsys):
    """It is not made again, as a training would be; that it is no evidence is said beside it."""
    record = minimal_record(
        valid=False, status="finished", status_reason="", workload="command"
    )
    record |= {"invalid_reasons": ["3 power samples in the training, 60 needed"]}
    folder = tmp_path / "measured" / "a"
    folder.mkdir(parents=True)
    for name, value in (("run", {"workload": "command"}), ("record", record)):
        write_json(folder / f"{name}.json", value)
    assert cli.main(["status", "--runs-dir", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "not valid" in shown and "60 needed" in shown
    assert shown.endswith("runs: 1; 1 not valid; 0 Wh")


def test_cancel_asks_which(tmp_path, capsys):
    assert (
        cli.main(["cancel", "--runs-dir", str(tmp_path)]) == 2
        and "or --all" in capsys.readouterr().err
    )
