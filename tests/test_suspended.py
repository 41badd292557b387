"""Real runs whose processes are all stopped for a while, as by `scontrol suspend`: they stay valid, and go on."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from energynn import files, records
from energynn.files import REPOSITORY
from energynn.launch import supervise
from energynn.measure import perun_adapter
from energynn.measure.samples import events_of_kind, read_events
from tests.powercap import constant_power
from tests.processes import processes_of, wait_until

pytestmark = pytest.mark.slow
POWER_W = 200.0
PACED = dict(workload="fourcastnet", embed_dim=32, depth=1, epochs=60, sampling_period_s=0.02, step_period_s=0.05)
PACED |= dict(devices=2, save_weights=True)


@pytest.fixture
def started(tmp_path, monkeypatch):
    """A function that starts a run, whose machine has a counter of known power; and what it has started."""
    writer, running = constant_power(tmp_path / "powercap", POWER_W), []
    monkeypatch.setenv(perun_adapter.POWERCAP_VARIABLE, str(tmp_path / "powercap"))

    def start(name, **more):
        program = "from energynn import config\nfrom energynn.launch import start\n"
        program += f"start.run(config.make(**{PACED | more!r}), {str(tmp_path / name)!r})"
        with open(tmp_path / f"{name}.txt", "w") as output:
            words = [sys.executable, "-c", program]
            running.append(subprocess.Popen(words, stdout=output, stderr=output, cwd=REPOSITORY))
        return tmp_path / name, running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()
    writer.kill()
    writer.wait()


def folder_of(runs_dir):
    return next((path.parent for path in runs_dir.glob("local/*/run.json")), runs_dir)


def epochs_done(runs_dir):
    return len(events_of_kind(read_events(folder_of(runs_dir)), "epoch"))


def rank_1(runs_dir):
    starts = events_of_kind(read_events(folder_of(runs_dir)), "rank_start")
    return psutil.Process(next(event["pid"] for event in starts if event["rank"] == 1))


def suspend(processes, seconds):
    """Stop processes; those that were started meanwhile are no part of a training that has begun."""
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in processes:
            process.send_signal(number)
        time.sleep(seconds if number == signal.SIGSTOP else 0.0)


def ended(started, runs_dir):
    assert started.wait(timeout=300) == 0, (runs_dir.parent / f"{runs_dir.name}.txt").read_text()[-3000:]
    assert records.check(runs_dir) == []
    return records.read(folder_of(runs_dir))


def test_a_run_that_was_suspended_twice_is_valid_and_has_the_weights_of_an_unbroken_one(started):
    runs_dir, process = started("broken")
    for after, seconds in ((5, 6.0), (25, 3.0)):
        wait_until(lambda after=after: epochs_done(runs_dir) >= after)
        suspend([*processes_of(runs_dir), psutil.Process(process.pid)], seconds)
    record = ended(process, runs_dir)
    unbroken_dir, process = started("unbroken")
    unbroken = ended(process, unbroken_dir)
    assert record["valid"] and len(record["segments"]) == 3, record["invalid_reasons"]
    gaps_s = [segment["gap_before_s"] for segment in record["segments"][1:]]
    assert gaps_s == pytest.approx([6.0, 3.0], abs=0.3)
    marks = {event["event"]: event["t_mono_ns"] for event in read_events(folder_of(runs_dir)) if event["rank"] == 0}
    marked_s = (marks["training_end"] - marks["training_start"]) / 1e9
    assert record["training_time_s"] == pytest.approx(marked_s - sum(gaps_s), abs=0.1)
    true_J = POWER_W * record["training_time_s"]
    assert record["energy_cpu_J"] == pytest.approx(true_J, abs=2 * record["energy_cpu_statistical_J"])
    assert sum("the run stood still for" in flag for flag in record["flags"]) == 2
    assert unbroken["valid"] and len(unbroken["segments"]) == 1 and not unbroken["flags"]
    weights = [files.sha256(folder_of(path) / "weights.pt") for path in (runs_dir, unbroken_dir)]
    assert weights[0] == weights[1]


def test_a_suspension_that_is_longer_than_ranks_wait_begins_a_segment_at_once(started):
    runs_dir, process = started("long", collective_timeout_s=3, checkpoint_period_s=1)
    wait_until(lambda: epochs_done(runs_dir) >= 20)
    late = rank_1(runs_dir)
    others = [other for other in processes_of(runs_dir) if other != late]
    late.suspend()
    time.sleep(0.5)  # rank 0 waits for it now; where nobody waits, the run goes on as after a short suspension
    suspend([*others, psutil.Process(process.pid)], 12.0)
    time.sleep(0.05)  # rank 0 looks at its clock first
    late.resume()
    record = ended(process, runs_dir)
    assert record["valid"], record["invalid_reasons"]
    assert len(record["segments"]) == 2 and (folder_of(runs_dir) / "segment-2").is_dir()
    before = json.loads((folder_of(runs_dir) / "record-after-segment-1.json").read_text())
    assert before["status"] == "interrupted" and before["status_reason"].startswith(supervise.STOOD_STILL)
    true_J = POWER_W * record["training_time_s"]
    assert record["energy_cpu_J"] == pytest.approx(true_J, abs=2 * record["energy_cpu_statistical_J"])


def test_a_sampler_that_alone_is_stopped_makes_a_run_no_evidence(started):
    runs_dir, process = started("lying")
    wait_until(lambda: epochs_done(runs_dir) >= 5)
    (samples,) = folder_of(runs_dir).glob("samples-*.jsonl")
    sampler = psutil.Process(json.loads(samples.read_text().splitlines()[0])["pid"])
    suspend([sampler], 6.0)
    process.wait(timeout=300)
    record = records.read(folder_of(runs_dir))
    assert not record["valid"] and record["coverage"] < 0.9 and len(record["segments"]) == 1
