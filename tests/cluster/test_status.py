"""What people are told of their runs, from files and a scheduler that answers, does not answer, or has forgotten."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from energynn import cli
from energynn.cluster import slurm, status, submit
from energynn.files import REPOSITORY, write_json

FACTS = {"studies": ["mine"], "system_file": "slurm", "scheduler": "slurm", "submitted_at": "t", "after": ""}


def submitted(runs_dir, name, job, **files):
    folder = runs_dir / "slurm" / name
    (folder / "job").mkdir(parents=True)
    write_json(folder / "job" / "submission.json", FACTS | {"job_id": job})
    for path, value in files.items():
        write_json(folder / path.replace("__", "/"), value)
    return folder


@pytest.fixture
def queue(monkeypatch):
    """Slurm as its two commands answer."""
    states = {}

    def answer(*command):
        if command[0] == "squeue":
            return "".join(f"{job}|{state}|{reason}\n" for job, (state, reason) in states.items())
        raise ValueError(f"{command[0]}: no")

    monkeypatch.setattr(slurm, "call", answer)
    return states


def state_of(folder):
    return status.rows([folder])[0][0]


def test_a_run_is_queued_running_finished_failed_stopped_or_cancelled(tmp_path, queue):
    live = {
        "epoch": 3,
        "epochs": 80,
        "samples_per_s": 9.5,
        "power_W": 1200.0,
        "energy_J": 1.8e6,
        "energy_before_J": 1.8e6,
        "time_left_s": 7200.0,
    }
    running = submitted(tmp_path, "a", "5_0", **{".state.json": live, "job__start-1.json": {"submission": "t"}})
    queue["5_0"] = "RUNNING", "None"
    row = state_of(running)
    assert row["state"] == "running" and row["energy_kWh"] == 1.0 and row["epoch"] == 3
    assert "3/80" in status.text([row], []) and "2:00:00" in status.text([row], [])

    waiting = submitted(tmp_path, "b", "5_1")
    queue["5_1"] = "PENDING", "Resources"
    assert state_of(waiting)["state"] == "queued" and state_of(waiting)["reason"] == "Resources"
    again = submitted(tmp_path, "c", "5_2", **{"job__start-1.json": {"submission": "t", "outcome": "asked to stop"}})
    queue["5_2"] = "PENDING", "BeginTime"
    assert state_of(again)["reason"] == "BeginTime, goes on: asked to stop"

    record = {"valid": False, "status": "failed", "status_reason": "rank 1: out of memory", "invalid_reasons": []}
    failed = submitted(tmp_path, "d", "6_0", **{"record.json": record})
    (failed / "job" / "log.txt").write_text("some line\nRuntimeError: out of memory\n\nslurmstepd: error: x\n")
    assert state_of(failed)["state"] == "failed" and state_of(failed)["reason"] == "rank 1: out of memory"
    assert state_of(failed)["log"] == "RuntimeError: out of memory"
    assert "rank 1: out of memory; RuntimeError" in " ".join(status.text([state_of(failed)], []).split())
    (failed / "job" / "log.txt").write_text("energynn: d: failed: rank 1: out of memory\n")
    assert status.text([state_of(failed)], []).count("out of memory") == 1
    (failed / "job" / "log.txt").write_text("no such module: conda\nenergynn: failed: module load conda\n")
    assert state_of(failed)["log"] == "no such module: conda; energynn: failed: module load conda"
    stopped = submitted(tmp_path, "e", "6_1", **{"record.json": record | {"status": "interrupted"}})
    assert state_of(stopped)["state"] == "stopped"
    lost = submitted(tmp_path, "f", "6_2")
    assert state_of(lost)["state"] == "failed" and "nobody remembers it" in state_of(lost)["reason"]
    earlier = {"job__start-1.json": {"submission": "an earlier one", "outcome": "failed: out of memory"}}
    anew = submitted(tmp_path, "h", "6_4", **earlier)
    assert "nobody remembers it" in state_of(anew)["reason"], "an earlier submission's outcome is not this one's"
    (submitted(tmp_path, "g", "6_3") / "job" / "cancelled").touch()
    assert state_of(tmp_path / "slurm" / "g")["state"] == "cancelled"


@pytest.mark.parametrize("job", ["x_0", "0_0", "77", "77_0,x_0", "-1_0", "²_0", "77_0\n", "9" * 20 + "_0"])
def test_a_job_that_is_none_costs_only_its_own_run(tmp_path, monkeypatch, job):
    """And a question that the scheduler refuses is no answer: the runs in its queue would be made again."""
    folders = [submitted(tmp_path, name, each) for name, each in (("a", "77_0"), ("b", "77_1"), ("c", job))]

    def answer(*command):
        if command[0] == "squeue" and command[1] == "--jobs=77":
            return "77_0|RUNNING|None\n77_1|PENDING|Resources\n"
        if command[0] == "squeue":
            raise ValueError(f"{command[0]}: error: Invalid job id: x")
        raise ValueError(f"{command[0]}: no")

    monkeypatch.setattr(slurm, "call", answer)
    rows, notes = status.rows(folders)
    assert sorted(row["state"] for row in rows[:2]) == ["queued", "running"] and not notes
    assert rows[2]["state"] == "failed" and rows[2]["job"] == ""
    site = SimpleNamespace(name="slurm", scheduler="slurm")
    assert submit.queued_runs(tmp_path, site) == {"a", "b"}
    with pytest.raises(ValueError, match="Invalid job id: x"):
        slurm.queue(["77_0", "x_0"])


def test_own_runs_stand_first_on_80_columns_and_say_what_they_are():
    name = "fourcastnet-finetune-era5_ensemble-n256-lbs1-gbs256-s0-r0-46b6d292"
    old = {"run_id": "a", "system": "large-batch", "state": "finished", "since": "2026-01-01", "time_s": 60.0}
    live = dict(epoch=3, epochs=80, samples_per_s=9.5, power_W=1200.0, energy_kWh=8.462e-05, time_left_s=7200.0)
    own = {"run_id": name, "system": "local", "state": "running", "since": "2026-02-01", **live, "job": "5_0"}
    command = {"run_id": "b", "system": "measured", "state": "finished", "since": "2026-03-01", "time_s": 3.0}
    command |= {"what": "command: sleep 3", "energy_kWh": 0.01, "provenance": "estimated"}
    told = status.text(status.newest_first([old, own, command]), []).splitlines()
    assert [line for line in told if line.endswith(":")] == ["measured:", "local:", "large-batch:"]
    assert max(map(len, told)) <= 80
    assert told[2].strip() == "command: sleep 3; 10 Wh estimated, in 3 s"
    assert "epoch 3/80, 9.5 samples/s, 1200 W, 0.0846 Wh, 2:00:00 left" in " ".join(told[5:7])


def test_a_job_that_left_the_queue_without_a_word_is_looked_up(tmp_path, queue, monkeypatch):
    lost = submitted(tmp_path, "a", "6_2")
    array = "JobId=8 ArrayJobId=6 ArrayTaskId=2 JobName=x UserId=me JobState=NODE_FAIL Reason=None\n"
    cases = (
        ("sacct", "6_0|COMPLETED\n6_2|OUT_OF_MEMORY\n", "OUT_OF_MEMORY"),
        ("scontrol", array, "NODE_FAIL"),
        ("sacct", "6_[1-3,7]|CANCELLED by 0\n", "CANCELLED by 0"),
        ("scontrol", array.replace("Id=2", "Id=0,2-4%1"), "NODE_FAIL"),
    )
    for command, answer, words in cases:

        def say(*words, command=command, answer=answer):
            if words[0] in (command, "squeue"):
                return answer if words[0] == command else ""
            raise ValueError("Slurm accounting storage is disabled")

        monkeypatch.setattr(slurm, "call", say)
        assert f"job 6_2 is gone ({words})" in state_of(lost)["reason"]


def test_without_an_answer_the_files_tell_what_they_can(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "call", lambda *words: (_ for _ in ()).throw(ValueError("squeue: no answer in 20 s")))
    live = {"submission": "t", "started_at": "x"}
    submitted(tmp_path, "a", "5_0", **{"job__start-1.json": live})
    submitted(
        tmp_path,
        "b",
        "5_1",
        **{"job__start-1.json": live | {"ended_at": "y", "outcome": "asked to stop", "exit_status": 75}},
    )
    submitted(tmp_path, "c", "5_2")
    submitted(
        tmp_path,
        "d",
        "5_3",
        **{"job__start-1.json": live | {"ended_at": "y", "outcome": "failed: three", "exit_status": 1}},
    )
    rows, notes = status.rows(status.folders(tmp_path, []))
    assert [row["state"] for row in rows] == ["running", "queued", "queued", "failed"] and "no answer" in notes[0]


def test_a_thousand_runs_in_a_second_and_no_torch(tmp_path):
    """1000 runs with records of real length, in a process of its own; CPU time, because other work goes on here."""
    history = [{"epoch": n, "training_loss": 0.1, "top1_error": 0.2, "learning_rate": 0.1} for n in range(100)]
    record = {
        "valid": True,
        "status": "finished",
        "status_reason": "",
        "invalid_reasons": [],
        "training_time_s": 60.0,
        "segments": [{}],
        "energy_total_J": 3.6e6,
        "energy_total_provenance": "measured",
        "history": history,
    }
    for number in range(1000):
        submitted(tmp_path, f"run-{number:04}", f"9_{number}", **({"record.json": record} if number % 2 else {}))
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "squeue"
    script.write_text('#!/bin/sh\ni=0; while [ $i -lt 1000 ]; do echo "9_$i|RUNNING|None"; i=$((i+2)); done\n')
    script.chmod(0o755)
    program = f"""
import sys, time
from energynn import cli
cli.main(["status", "--runs-dir", {str(tmp_path)!r}])
print(time.process_time(), sorted({{"torch", "pandas", "xarray"}} & set(sys.modules)))
"""
    best = []
    for _ in range(3):
        environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        seconds, _, loaded = done.stdout.splitlines()[-1].partition(" ")
        assert loaded == "[]" and "1000 runs: 500 finished, 500 running; 500 kWh" in done.stdout, done.stderr
        best.append(float(seconds))
    assert min(best) < 1


def test_watch_looks_again_until_nothing_is_queued_or_runs(tmp_path, queue, monkeypatch, capsys):
    folder = submitted(tmp_path, "a", "5_0", **{"job__start-1.json": {"submission": "t"}})
    queue["5_0"] = "PENDING", "Resources"
    slept = []
    wait = status.time.sleep

    def sleep(seconds):
        if threading.current_thread() is not threading.main_thread():  # what other tests have left waits, too
            return wait(seconds)
        slept.append(seconds)
        queue["5_0"] = "RUNNING", "None"
        if len(slept) == 2:
            queue.clear()
            write_json(folder / "record.json", {"valid": True, "training_time_s": 200.0, "segments": [{}]})

    monkeypatch.setattr(status.time, "sleep", sleep)
    assert cli.main(["status", "--watch", "3", "--runs-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert slept == [3.0, 3.0] and re.findall("1 runs: 1 ([a-z]+)", shown) == ["queued", "running", "finished"]
    assert cli.main(["status", "--json", "--runs-dir", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["time_s"] == 200.0


def test_a_run_whose_pre_training_failed_says_what_it_waits_for(tmp_path, queue):
    folder = submitted(tmp_path, "tuned", "5_1")
    write_json(folder / "job" / "submission.json", FACTS | {"job_id": "5_1", "after": "first"})
    queue["5_1"] = "PENDING", "DependencyNeverSatisfied"
    assert state_of(folder)["reason"] == "DependencyNeverSatisfied on first"


def test_watch_ends_where_a_run_waits_for_ever(tmp_path, queue, monkeypatch):
    submitted(tmp_path, "tuned", "5_1")
    queue["5_1"] = "PENDING", "DependencyNeverSatisfied"
    monkeypatch.setattr(status.time, "sleep", lambda _: pytest.fail("it would wait for ever"))
    assert cli.main(["status", "--watch", "3", "--runs-dir", str(tmp_path)]) == 0


def test_a_suspended_run_is_called_so_and_one_that_begins_gives_no_reason(tmp_path, queue):
    folder = submitted(tmp_path, "a", "5_0")
    queue["5_0"] = "SUSPENDED", "None"
    assert state_of(folder)["state"] == "suspended" and status.goes_on(state_of(folder))
    queue["5_0"] = "PENDING", "None"
    assert "None" not in status.text([state_of(folder)], [])


def test_a_cancelled_run_stays_cancelled_while_slurm_is_silent(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "call", lambda *words: (_ for _ in ()).throw(ValueError("squeue: no answer in 20 s")))
    folder = submitted(tmp_path, "a", "5_0")
    (folder / "job" / "cancelled").touch()
    assert state_of(folder)["state"] == "cancelled"


def test_of_a_long_log_only_the_end_is_read(tmp_path, queue):
    folder = submitted(tmp_path, "a", "5_0", **{"job__start-1.json": {"submission": "t", "outcome": "failed: x"}})
    with open(folder / "job" / "log.txt", "wb") as file:
        file.truncate(2**40)  # a terabyte of nothing
        file.seek(0, os.SEEK_END)
        file.write(b"\nthe last words\n")
    assert state_of(folder)["log"].endswith("the last words")


def test_cancel_asks_which(capsys):
    assert cli.main(["cancel"]) == 2 and "--all" in capsys.readouterr().err
    assert shutil.which("no-such-command") is None
    with pytest.raises(ValueError, match="no-such-command: not found; this is no login node"):
        slurm.call("no-such-command")


# ------------------------------------------------------------------------------------------------- without a scheduler






def test_a_measured_command_has_ended_even_where_it_was_too_short(tmp_path, capsys):
    """It is not made again, as a training would be; that it is no evidence is said beside it."""
    folder = tmp_path / "measured" / "a"
    folder.mkdir(parents=True)
    write_json(folder / "run.json", {"workload": "command"})
    record = {"valid": False, "status": "finished", "status_reason": "", "workload": "command", "segments": [{}]}
    record |= {"invalid_reasons": ["3 power samples in the training, 60 needed"], "training_time_s": 0.1}
    write_json(folder / "record.json", record)
    assert cli.main(["status", "--runs-dir", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 runs: 1 finished" in shown and "60 needed" in shown










# ------------------------------------------------------------------------------------------ Slurm's own energy

# As sacct 22.05 answered on a private Slurm with slurmdbd and the plugin pm_counters, with other numbers.
SACCT = """7|COMPLETED|130|2|{job}
7.batch|COMPLETED|130|1|90000
7.extern|COMPLETED|130|2|180000
7.0|COMPLETED|100|2|{step}
"""








