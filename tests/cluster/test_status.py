"""What people are told of their runs, from files and a scheduler that answers, does not answer, or has forgotten."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from energynn import cli, records
from energynn.cluster import background, pbs, slurm, status, submit
from energynn.files import REPOSITORY, write_json
from tests.conftest import minimal_record

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


@pytest.mark.parametrize("scheduler, whole", [("slurm", "77"), ("pbs", "77[]")])
@pytest.mark.parametrize("job", ["x_0", "0_0", "77", "77_0,x_0", "-1_0", "²_0", "77_0\n", "9" * 20 + "_0"])
def test_a_job_that_is_none_costs_only_its_own_run(tmp_path, monkeypatch, scheduler, whole, job):
    """And a question that the scheduler refuses is no answer: the runs in its queue would be made again."""
    folders = [submitted(tmp_path, name, each) for name, each in (("a", f"{whole}_0"), ("b", f"{whole}_1"), ("c", job))]
    for folder in folders:
        rewritten = json.loads((folder / "job" / "submission.json").read_text()) | {"scheduler": scheduler}
        write_json(folder / "job" / "submission.json", rewritten)

    def answer(*command):
        if command[0] == "squeue" and command[1] == "--jobs=77":
            return "77_0|RUNNING|None\n77_1|PENDING|Resources\n"
        if command[0] == "qstat" and command[-1] == "77[]":
            return json.dumps({"Jobs": {f"77[{task}].host": {"job_state": "QR"[task]} for task in (0, 1)}})
        if command[0] in ("squeue", "qstat"):
            raise ValueError(f"{command[0]}: error: Invalid job id: x")
        raise ValueError(f"{command[0]}: no")

    for module in (slurm, pbs):
        monkeypatch.setattr(module, "call", answer)
    rows, notes = status.rows(folders)
    assert sorted(row["state"] for row in rows[:2]) == ["queued", "running"] and not notes
    assert rows[2]["state"] == "failed" and rows[2]["job"] == ""
    site = SimpleNamespace(name="slurm", scheduler=scheduler)
    assert submit.queued_runs(tmp_path, site) == {"a", "b"}
    with pytest.raises(ValueError, match="Invalid job id: x"):
        status.EXECUTORS[scheduler].queue([f"{whole}_0", "x_0"])


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


def content(path):
    """What a file holds; nothing of one that was written meanwhile, and has got its name."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


@pytest.mark.slow
def test_the_local_executor_behaves_as_a_cluster_does(tmp_path):
    """Submit, status, cancel, resubmit, finish: the same commands, one measured run at a time, in the background."""
    study = tmp_path / "mine.py"
    study.write_text(
        "from energynn import config\n"
        "def study(system):\n"
        "    tiny = dict(system=system, device='cpu', embed_dim=32, depth=1, step_period_s=0.03)\n"
        "    tiny |= dict(sampling_period_s=0.02)\n"
        "    return [config.make('fourcastnet', epochs=n, **tiny) for n in (40, 10)]\n"
    )

    def energynn(*words):
        command = [sys.executable, "-m", "energynn.cli", *map(str, words), "--runs-dir", str(tmp_path / "runs")]
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        environment["A_SECRET_TOKEN"] = "hush-hush"
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPOSITORY)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def wait(condition, what):
        """Look in this process: `energynn status` would start Python twice a second and slow the run down."""
        deadline = time.monotonic() + 250
        while not condition(found := status.rows(status.folders(tmp_path / "runs", []))[0]):
            assert time.monotonic() < deadline, f"{what}: {found}"
            time.sleep(0.2)
        return found

    energynn("submit", study, "--system", "local")
    wait(lambda found: any("epoch" in row for row in found), "a run in its epochs")
    first = json.loads(energynn("status", "--json"))["runs"]
    assert sorted(row["state"] for row in first) == ["queued", "running"]
    assert "2 of 2 runs are made or queued" in energynn("submit", study, "--system", "local")
    (running,) = [row["run_id"] for row in first if row["state"] == "running"]
    assert "1 jobs cancelled" in energynn("cancel", running)
    found = wait(lambda found: all(row["state"] not in ("queued", "running") for row in found), "the end")
    assert {row["run_id"] == running: row["state"] for row in found} == {True: "cancelled", False: "finished"}
    record = records.read(tmp_path / "runs" / "local" / running)
    assert record["status"] == "interrupted" and "it can go on" in record["status_reason"]
    assert "no run has failed" in energynn("resubmit", "--failed"), "what was cancelled is not made again unasked"
    energynn("submit", study, "--system", "local")
    wait(lambda found: all(row["state"] == "finished" for row in found), "the run that goes on")
    assert len(records.read(tmp_path / "runs" / "local" / running)["segments"]) == 2
    assert records.check(tmp_path / "runs") == []
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.is_file() and b"hush-hush" in content(path)]


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


def test_in_the_background_runs_wait_for_all_before_them(tmp_path, monkeypatch):
    """And to cancel one that waits leaves the one that goes on alone."""
    alive, waited = {11, 12}, []

    def sleep(seconds):
        waited.append(sorted(alive))
        alive.remove(min(alive))

    monkeypatch.setattr(background.time, "sleep", sleep)
    monkeypatch.setattr(background.psutil, "pid_exists", lambda pid: pid in alive)
    background.work(tmp_path / "job.sh", 0, [11, 12])
    assert waited == [[11, 12], [12]]

    write_json(tmp_path / "current.json", {"task": 0, "pid": 99})
    monkeypatch.setattr(background, "_workers", lambda: {7: (tmp_path / "job.sh", 2)})
    killed = []
    child = SimpleNamespace(pid=99, terminate=lambda: killed.append(99))
    monkeypatch.setattr(background.psutil, "Process", {7: SimpleNamespace(children=lambda: [child])}.get)
    monkeypatch.setattr(background.os, "kill", lambda pid, number: killed.append(pid))
    background.cancel(["7_1"])
    assert killed == [] and (tmp_path / "cancelled-1").exists()
    background.cancel(["7_0"])
    assert killed == [99]


ILL_CURRENT = [{"task": task, "pid": 99} for task in ("x", None, [0], 0.0, False, 10**400)]
ILL_CURRENT += [{"task": 0, "pid": pid} for pid in (-1, 0, 1, -99, "x", None, 99.0, True)]
ILL_CURRENT += [{"task": 0}, {"pid": 99}, [], "x"]


@pytest.mark.parametrize("told", ILL_CURRENT)
def test_an_ill_typed_file_of_the_run_that_goes_on_ends_nothing(tmp_path, monkeypatch, capsys, told):
    """To signal -1 would end every process of the user."""
    folder = submitted(tmp_path / "runs", "a", "7_0")
    write_json(folder / "job" / "submission.json", FACTS | {"scheduler": "local", "job_id": "7_0"})
    write_json(tmp_path / "current.json", told)
    monkeypatch.setattr(background, "_workers", lambda: {7: (tmp_path / "job.sh", 2)})
    killed = []
    child = SimpleNamespace(pid=99, terminate=lambda: killed.append(99))
    monkeypatch.setattr(background.psutil, "Process", {7: SimpleNamespace(children=lambda: [child])}.get)
    monkeypatch.setattr(background.os, "kill", lambda pid, number: killed.append(pid))
    assert cli.main(["status", "--runs-dir", str(tmp_path / "runs")]) == 0
    assert "1 runs: 1 queued" in capsys.readouterr().out
    assert cli.main(["cancel", "--all", "--runs-dir", str(tmp_path / "runs")]) == 0
    assert killed == [] and (tmp_path / "cancelled-0").exists()


def test_only_a_job_of_its_own_process_is_cancelled(tmp_path, monkeypatch):
    """Whatever number stands in the file, and however soon the job has ended."""
    monkeypatch.setattr(background, "_workers", lambda: {os.getpid(): (tmp_path / "job.sh", 2)})
    sent = []
    monkeypatch.setattr(background.os, "kill", lambda pid, number: sent.append((pid, number)))
    child = subprocess.Popen(["sleep", "60"])
    try:
        for pid, expected in ((child.pid, [(child.pid, signal.SIGTERM)]), (os.getppid(), []), (10**400, [])):
            sent.clear()
            write_json(tmp_path / "current.json", {"task": 0, "pid": pid})
            background.cancel([f"{os.getpid()}_0"])
            assert sent == expected
    finally:
        monkeypatch.undo()
        child.kill()
        child.wait()


# ------------------------------------------------------------------------------------------ Slurm's own energy

# As sacct 22.05 answered on a private Slurm with slurmdbd and the plugin pm_counters, with other numbers.
SACCT = """7|COMPLETED|130|2|{job}
7.batch|COMPLETED|130|1|90000
7.extern|COMPLETED|130|2|180000
7.0|COMPLETED|100|2|{step}
"""


@pytest.fixture
def in_a_job(tmp_path, monkeypatch):
    """A finished run of 100 kJ, of which its CPUs took 40 kJ; call with what the first step's energy is."""
    folder = tmp_path / "slurm" / "run"
    folder.mkdir(parents=True)
    energies = dict(energy_total_J=1e5, energy_cpu_J=4e4, energy_total_provenance="measured")
    facts = dict(status="finished", valid=True, training_time_s=90.0, job={"scheduler": "slurm", "job_id": "7"})
    write_json(folder / "record.json", minimal_record(**facts, **energies, segments=[{}]))
    asked = []

    def begin(step, plugin="ipmi", state="COMPLETED", job="", read_every_s=1):
        def call(*command):
            asked.append(command[0])
            if command[0] == "scontrol":
                every = f"AcctGatherNodeFreq      = {read_every_s} sec\n"
                return f"AcctGatherEnergyType    = acct_gather_energy/{plugin}\n{every}"
            return SACCT.format(step=step, job=job).replace("COMPLETED", state)

        (folder / "job" / "site_energy.json").unlink(missing_ok=True)
        monkeypatch.setattr(slurm, "call", call)
        return state_of(folder).get("site_energy", "")

    begin.asked, begin.folder = asked, folder
    return begin


def test_slurms_own_energy_stands_beside_ours_and_more_than_the_nodes_had_is_said(in_a_job):
    assert in_a_job(160_000) == "Slurm: 0.0444 kWh of whole nodes, starts and ends included; ours is 62%"
    assert in_a_job(90_000).endswith("ours is 111%, MORE than they had: one of the two is wrong")
    assert (
        in_a_job(50_000, plugin="rapl") == "Slurm: 0.0139 kWh of all cpu and ram, starts and ends included; ours is 80%"
    )
    told = json.loads((in_a_job.folder / "job" / "site_energy.json").read_text())
    assert told["provenance"] == "reported by Slurm" and told["energy_J"] == 50_000 and len(told["steps"]) == 4
    assert records.hash_files(in_a_job.folder) == {}  # no part of the record
    number = len(in_a_job.asked)
    assert "ours is" in state_of(in_a_job.folder)["site_energy"] and len(in_a_job.asked) == number  # asked once


@pytest.mark.parametrize("step", ["", "0", "18446744073709551614", "18446744073709439536"])
def test_what_no_plugin_has_measured_is_not_measured(in_a_job, step):
    """The last is what a real Slurm wrote where its plugin had once read an empty file: a negative energy."""
    assert in_a_job(step, plugin="none", job=step) == ""
    assert json.loads((in_a_job.folder / "job" / "site_energy.json").read_text())["provenance"] == "not measured"


def test_slurm_is_asked_again_while_the_job_goes_on_or_where_it_does_not_answer(in_a_job, monkeypatch):
    assert in_a_job(160_000, state="RUNNING") == "" and not (in_a_job.folder / "job" / "site_energy.json").exists()

    def silent(*command):
        raise ValueError("sacct: Slurm accounting storage is disabled")

    monkeypatch.setattr(slurm, "call", silent)
    assert state_of(in_a_job.folder)["state"] == "finished"
    assert in_a_job(160_000).startswith("Slurm: ")
