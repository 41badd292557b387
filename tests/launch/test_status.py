"""What people are told of their runs, from files and a Slurm that answers or does not."""

import os
import re

import pytest

from energynn.host.files import lock, write_json
from energynn.launch import status
from tests.conftest import minimal_record
from tests.processes import answer, told

START, RECORD = "job/start-1.json", "record.json"


def submitted(runs_dir, name, job, contents=None):
    """A run that was submitted, and its other files."""
    folder = runs_dir / "two-nodes" / name
    (folder / "job").mkdir(parents=True)
    submission = {"submitted_at": "t", "job_id": job}
    each = {"job/submission.json": submission} | (contents or {})
    for path, value in each.items():
        write_json(folder / path, value)
    return folder


def states_of(runs_dir):
    rows, notes = status.describe_runs(status.find_run_folders(runs_dir, []))
    return {row["run_id"]: (row["state"], row["reason"]) for row in rows}, notes


EPOCH = '{"t_mono_ns": 1, "t_wall_ns": 1, "event": "epoch", "epoch": 3, "epochs": 9}'
STOPPED = {START: {"submission": "t", "outcome": "asked to stop"}}
OF_ANOTHER = {START: {"submission": "an earlier one", "outcome": "failed: x"}}
FAILED = {START: {"submission": "t", "outcome": "failed: rank 1 ended"}}
GOES_ON = FAILED | {"job/start-2.json": {"submission": "t", "started_at": "v"}}
BEFORE = "a start before failed: rank 1 ended"
BAD = dict(valid=False, status="failed", status_reason="rank 1 ended")
BROKEN = FAILED | {RECORD: minimal_record(invalid_reasons=[], **BAD)}
CUT = dict(valid=False, status="interrupted", status_reason="asked to stop")
GAVE_UP = {START: {"submission": "t", "outcome": "failed: 3 starts in a row"}}
GAVE_UP |= {RECORD: minimal_record(invalid_reasons=[], **CUT)}
BY_HAND = GAVE_UP | {START: GAVE_UP[START] | {"ended_at": "1999"}}
FINISHED = {RECORD: minimal_record(valid=True)}
SHORT = {RECORD: minimal_record(valid=False, invalid_reasons=["60 needed"])}
GONE = "its job is gone; `sacct -j 77_0` and job/log.txt say more"
DIED = "its launcher died; `energynn check --recover` says more"
# state and reason of the job in the queue, files of the run, what is told of it
RUNS = {
    "running": ("RUNNING|None", {}, "running", "3 of 9 epochs done"),
    "queued": ("PENDING|Resources", {}, "queued", "Resources"),
    "suspended": ("SUSPENDED|None", {}, "running", "no epoch reported"),
    "again": ("PENDING|BeginTime", STOPPED, "queued", "BeginTime"),
    "stopped": ("", STOPPED, "stopped", "asked to stop"),
    "failed": ("", BROKEN, "failed", "rank 1 ended"),
    "finished": ("RUNNING|None", FINISHED, "finished", ""),
    "short": ("", SHORT, "not valid", "60 needed"),
    "lost": ("", OF_ANOTHER, "stopped", GONE),
    "died": ("", {"run.json": {}}, "failed", DIED),
    "waits": ("PENDING|BeginTime", FAILED, "queued", f"BeginTime; {BEFORE}"),
    "goes on": ("RUNNING|None", GOES_ON, "running", f"no epoch reported; {BEFORE}"),
    "gave up": ("", GAVE_UP, "failed", "3 starts in a row"),
    "set-up": ("", {}, "failed", "its set-up, module load x; job/log.txt says more"),
    "by hand": ("", BY_HAND, "stopped", "asked to stop"),
    "other": ("PENDING|Resources", OF_ANOTHER, "queued", "Resources"),
}


def test_a_run_has_one_state_and_the_reason_for_it(tmp_path, fake_slurm, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    for number, (name, (queued, contents, *_)) in enumerate(RUNS.items()):
        job = "" if name == "died" else f"{69 + number}_0"
        folder = submitted(tmp_path, name, job, contents)
        if queued:
            fake_slurm.queue[job] = queued.split("|")
        if name == "set-up":
            (folder / "job" / "log.txt").write_text(
                "x: no\nenergynn: failed: module load x\n"
            )
        if name == "running":
            (folder / "events-rank0.jsonl").write_text(EPOCH)
    found, notes = states_of(tmp_path)
    assert found == {name: (state, why) for name, (*_, state, why) in RUNS.items()}
    shown = answer("status --runs-dir", tmp_path)
    assert re.search(r"running +running +3 of 9 epochs done; job 69_0\n", shown)
    *table, last = shown.splitlines()
    assert all(len(line) <= 100 for line in table) and last.startswith("runs: 16; ")
    shown = told("status --failed --runs-dir", tmp_path)
    failed = {"failed", "gave up", "short", "died", "set-up"}
    assert {run["run_id"] for run in shown["runs"]} == failed
    assert DIED in answer("status --watch", tmp_path / "two-nodes" / "died")
    with lock(tmp_path / "two-nodes" / "died" / "run.json"):  # its launcher lives
        assert states_of(tmp_path)[0]["died"][0] == "running" and not notes


@pytest.mark.parametrize(
    "answer, said",
    [
        (None, "squeue --me: no"),
        ("1_0|\n", "squeue: '1_0|' is no line"),
        ("1_[0-3%2]|PENDING|None\n", "squeue: '1_[0-3%2]|PENDING|None' is no line"),
    ],
)
def test_without_an_answer_the_files_tell_what_they_can_and_nothing_is_submitted(
    tmp_path, fake_slurm, answer, said
):
    fake_slurm.submit()
    fake_slurm.answers["squeue"] = answer
    assert said in fake_slurm.submit(status=2)
    submitted(tmp_path, "unknown", "1_0", {START: {"submission": "t"}})
    submitted(tmp_path, "finished", "3_0", FINISHED)
    submitted(tmp_path, "failed", "4_0", FAILED)
    found, (note,) = states_of(tmp_path)
    assert [found[name][0] for name in found] == [*found] and len(found) == 3
    assert f"the queue is unknown, the rest is from the runs' files: {said}" in note


@pytest.mark.parametrize(
    "job",
    [
        "Welcome!\n41_0",
        "x_0",
        "0_0",
        "77",
        "77_0,x_0",
        "²_0",
        "77_0\n",
        "9" * 20 + "_0",
        None,
    ],
)
def test_an_ill_typed_file_concerns_its_own_run_alone_and_its_remedy_helps(
    fake_slurm, job
):
    """Slurm refuses a question with a wrong number, and runs in the queue would be made again."""
    fake_slurm.submit()
    good = fake_slurm.submission().parents[1].name
    bad = submitted(fake_slurm.runs_dir, "bad", job)
    submitted(fake_slurm.runs_dir, "worse", "1_1", {START: {"exit_status": "many"}})
    found, notes = states_of(fake_slurm.runs_dir)
    assert found == {good: ("queued", "")}
    assert [note.partition(":")[0] for note in notes] == ["bad", "worse"]
    said = fake_slurm.submit(status=2)
    said += fake_slurm.energynn("cancel --all", status=2)
    path = bad / "job" / "submission.json"
    assert said.count("\n") == said.count(f"{path}: is spoilt") == 2
    os.system(re.search("then `(rm .*)`", said)[1])
    assert "0 to make" in fake_slurm.submit()
