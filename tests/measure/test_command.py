"""`energynn measure` as a person meets it: real commands, fake sensors whose energy is known."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import msgspec
import psutil
import pytest

import energynn
from energynn import records
from energynn.host import launchers
from energynn.host.reading import read_json
from energynn.launch import status
from energynn.measure import samples
from tests.processes import (
    ENERGYNN,
    answer,
    processes_of,
    refused,
    wait_until,
    wait_until_gone,
    with_gpus,
)
from tests.run_files import last_sample_ns, read_lines, rewrite, write_lines

STEADY = dict(high_W=300.0, update_s=0.02)


def start(folder, *command, options=(), env=None, before=(), **more):
    words = [*before, *ENERGYNN, "measure", "--out", str(folder)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | more
    return subprocess.Popen(
        [*words, *options, "--", *command], env=env or with_gpus([]), **pipes
    )


def measured(folder, *command, options=(), **more):
    started = start(folder, *command, options=["--json", *options], **more)
    output, errors = started.communicate(timeout=300)
    assert output, errors
    record = msgspec.json.decode(output, type=records.Record)
    return record, started.returncode, errors


def test_output_input_and_exit_status_are_passed_on(tmp_path):
    program = (
        "import os, sys; print(os.environ['CUDA_DEVICE_ORDER'], sys.stdin.read())\n"
    )
    program += "sys.exit(3)"
    started = start(
        tmp_path / "run", sys.executable, "-c", program, stdin=subprocess.PIPE
    )
    output, errors = started.communicate("its input", timeout=60)
    assert started.returncode == 3 and output.startswith("PCI_BUS_ID its input\n"), (
        errors
    )
    said = " ".join(output.split())
    assert "the command ended with status 3" in said and "estimated" in said
    assert errors.startswith("energynn measures 1 s of idle power, then: ")
    record = records.read_record_if_any(tmp_path / "run")
    assert record.exit_status == 3 and record.status == "failed"
    assert records.check(tmp_path) == []


def test_a_command_without_gpus_says_so(tmp_path):
    record, status, _ = measured(
        tmp_path / "run", "true", options=["--no-gpu"], env=with_gpus([STEADY])
    )
    assert (
        status == 0 and record.energy_gpu_J is None and record.device_kind == "cpu core"
    )
    assert read_json(tmp_path / "run" / "run.json")["uses_gpus"] is False


NETWORK = """
import energynn
from types import SimpleNamespace as Some
weight = Some(numel=lambda: 1000, element_size=lambda: 4, requires_grad=True)
energynn.window(model=Some(parameters=lambda: [weight], modules=list))
"""


EPOCHS = """
import time, energynn
for epoch in (1, 2):
    time.sleep(1)
    energynn.log_epoch(epoch, top1_error=0.5 / epoch, loss=1 / epoch, energy_J=0, elapsed_s=0)
"""


def test_what_epochs_of_a_command_reached_stands_beside_their_energy(
    tmp_path, monkeypatch
):
    words = [sys.executable, "-c", EPOCHS]
    record, _, _ = measured(tmp_path / "run", *words)
    own = {"energy_J": 0, "elapsed_s": 0}
    assert record.metrics == {"loss": 0.5, "top1_error": 0.25} | own
    assert energynn.table(tmp_path)["energy_J"].item() == record.energy_total_J
    table = energynn.epochs(tmp_path / "run")
    assert table["epoch"].to_list() == [1, 2] and table["loss"].to_list() == [1, 0.5]
    first, second = table["energy_so_far_J"]
    assert 0 < first < second <= 1.05 * record.energy_total_J
    assert "75% classified right" in answer(f"show {tmp_path}/run --details")
    assert records.check(tmp_path) == [] and not record.flags
    monkeypatch.setenv("ENERGYNN_MARK", str(tmp_path / "run"))
    energynn.log_epoch(2, validation_loss=3.0)
    again = records.save_record(tmp_path / "run", "finished", "")
    assert again.history[1] == record.history[1] | {"validation_loss": 3.0}
    assert not again.flags, "a training and its validation"
    energynn.log_epoch(1, top1_error=0.4)
    again = records.save_record(tmp_path / "run", "finished", "")
    assert "epochs were told more than once" in again.flags[0]
    # a start that is killed tells no end, and a further start what it has reached
    is_told = {"rank_start", "training_start", "epoch"}
    rewrite(tmp_path / "run/events-rank0.jsonl", lambda one: one["event"] in is_told)
    (tmp_path / "run" / "record.json").unlink()
    assert records.recover(tmp_path)[0].endswith("epoch 1 done")
    killed = records.read_record(tmp_path / "run")
    assert killed.metrics["loss"] == 0.5 and len(killed.history) == 2
    killed.config["epochs"] = 90
    each = f"{killed.energy_total_J / 7200:.3g} Wh an epoch"
    assert each in records.summary_text(killed)
    (tmp_path / "run" / "segment-2").mkdir()
    monkeypatch.setenv("ENERGYNN_MARK", str(tmp_path / "run" / "segment-2"))
    energynn.log_epoch(2.5, loss=0.1)
    again = records.save_record(tmp_path / "run", "killed", "")
    assert again.metrics["loss"] == 0.1 and again.history[-1]["epoch"] == 2.5
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ENERGYNN_MARK", str(tmp_path))
    energynn.log_epoch(3, loss=0.1)
    assert not [*tmp_path.glob("events-*")], "only the first rank tells"
    refused("could not convert", energynn.log_epoch, 3, loss="low")
    refused("rank is a name of ours", energynn.log_epoch, 3, rank=64)


def test_what_devices_exchange_is_told_and_seen(tmp_path):
    """By the number of weights, and by a window of the command."""
    sizes = "--local-batch-size 8 --weights 4.2e6 --gradient-bytes-per-weight 2"
    words = sys.executable, "-c", NETWORK
    record, _, _ = measured(tmp_path / "run", *words, options=sizes.split())
    assert record.config["gradient_bytes"] == 8_400_000
    assert record.metrics == {"gradient_bytes": 4000} and records.check(tmp_path) == []
    alone = answer("measure --weights 1e6 -- true", status=2)
    assert "give --local-batch-size, too" in alone


BUSY = "import sys, time\nwhile time.process_time() < float(sys.argv[1]): pass"


def test_the_work_of_others_is_told_in_answer_record_and_table(tmp_path):
    """A neighbour is busy for as long; nobody else's machine is as idle as this test needs."""
    word = [sys.executable, "-c", BUSY]
    neighbour = subprocess.Popen([*word, "99"])
    try:
        folder = tmp_path / "runs" / "measured" / "busy"
        told = start(folder, *word, "1.0", options=["--name", "busy"])
        output, errors = told.communicate(timeout=120)
    finally:
        neighbour.kill()
        neighbour.wait()
    (run,) = energynn.table(tmp_path / "runs").to_dict("records")
    # Linux counts this second in ticks of 10 ms, and a process needs some before and after.
    assert 0.9 < run["cpu_time_s"] < 1.8 and run["cpu_time_others_s"] > 0.3, errors
    part = run["cpu_time_others_s"] / (run["cpu_time_s"] + run["cpu_time_others_s"])
    assert f"others used {part:.0%} of the busy CPU time" in output
    assert "others used" in answer("check", tmp_path / "runs")


RANKS = """
import sys, time
from mpi4py import MPI
MPI.COMM_WORLD.barrier()
time.sleep(2 + MPI.COMM_WORLD.rank)
sys.exit(4 * MPI.COMM_WORLD.rank if "fail" in sys.argv else 0)
"""


@pytest.mark.slow
def test_ranks_of_one_host_share_its_lock_and_its_sampler(tmp_path):
    """The sampler continues until the last rank; a second start has one folder for all ranks."""
    words = [sys.executable, "-c", RANKS]
    for number in (1, 2):
        record, status, errors = measured(
            tmp_path / "run",
            *words,
            env=with_gpus([STEADY]),
            before=[launchers.find_mpirun(), "-n", "2"],
        )
        assert status == 0 and record.status == "finished", errors
        assert len(record.segments) == number
    assert record.devices == 2 and record.training_time_s > 2.9 * number
    assert record.mean_power_gpu_W == pytest.approx(300, rel=0.005)
    assert record.energy_gpu_provenance == "simulated"
    folder = samples.segment_dirs(tmp_path / "run")[-1]
    assert len(list(folder.glob("samples-*.jsonl"))) == 1
    assert len(list(folder.glob("events-rank*"))) == 2 and records.check(tmp_path) == []


@pytest.mark.slow
def test_one_rank_that_fails_is_named(tmp_path):
    words = [sys.executable, "-c", RANKS, "fail"]
    started = start(
        tmp_path / "run", *words, before=[launchers.find_mpirun(), "-n", "2"]
    )
    started.communicate(timeout=300)
    record = records.read_record_if_any(tmp_path / "run")
    assert started.returncode != 0
    assert (
        record is None
        or record.status_reason == "rank 1: the command ended with status 4"
    )
    records.recover(tmp_path)  # mpirun may end rank 0 before it has written the record
    assert records.read_record_if_any(tmp_path / "run").status in ("failed", "killed")


@pytest.mark.parametrize(
    "who, number, exit_status, status, begin",
    [
        ("measure", signal.SIGKILL, -9, "killed", ""),
        ("measure", signal.SIGTERM, 143, "interrupted", ""),
        ("measure", signal.SIGTERM, 143, "interrupted", "setsid "),
        ("command", signal.SIGKILL, 137, "killed", ""),
    ],
)
def test_a_kill_leaves_nothing_of_what_the_command_has_started(
    tmp_path, who, number, exit_status, status, begin
):
    """A shell and what it waits for, both deaf to SIGTERM, unless that is to end the shell.

    What outlives it may have a session of its own.
    """
    deaf = "" if number == signal.SIGTERM else "trap '' TERM; "
    (tmp_path / "own").touch()
    tail = f"{begin}tail -f {tmp_path}/own"
    words = ["sh", "-c", f"{deaf}(trap '' TERM; {tail} & wait); true"]
    started = start(tmp_path / "run", *words)

    def tails():
        found = []
        for each in processes_of(tmp_path):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [each] if each.name() == "tail" else []
        return found

    wait_until(tails)
    shell = tails()[0].parent().parent().pid
    killed_at = time.monotonic_ns()
    os.kill(shell if who == "command" else started.pid, number)
    wait_until(lambda: not tails(), 10)
    assert started.wait(60) == exit_status
    wait_until_gone(tmp_path)
    records.recover(tmp_path)
    assert (
        records.read_record_if_any(tmp_path / "run").status == status
        and records.check(tmp_path) == []
    )
    last_ns = last_sample_ns(tmp_path / "run")
    assert last_ns > killed_at - 0.2e9, "samples were lost"


SAVING = """import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
pathlib.Path("begun").touch()
try:
    time.sleep(60)
finally:
    time.sleep(3)
    pathlib.Path("saved").touch()
"""


@pytest.mark.parametrize("send, how", [(os.killpg, "exec"), (os.kill, "command")])
def test_a_command_is_asked_once_to_end_and_may_save_what_it_has(tmp_path, send, how):
    """As by Slurm or `timeout`, which ask all of a group, and as by a person, who asks measure."""
    (tmp_path / "train.py").write_text(SAVING)
    words = ["sh", "-c", f"{how} {sys.executable} train.py; true"]
    started = start(tmp_path / "run", *words, start_new_session=True, cwd=tmp_path)
    wait_until((tmp_path / "begun").exists)
    send(started.pid, signal.SIGTERM)
    assert started.wait(60) == 143 and (tmp_path / "saved").exists()


@pytest.mark.slow
def test_ctrl_c_interrupts_before_and_after_the_command_has_begun(tmp_path):
    program = f"import pathlib, time; pathlib.Path({str(tmp_path / 'begun')!r}).touch()"
    words = [sys.executable, "-c", f"{program}; time.sleep(60)"]
    for name, sign in (
        ("early", tmp_path / "early" / "run.json"),
        ("late", tmp_path / "begun"),
    ):
        started = start(tmp_path / name, *words, start_new_session=True)
        wait_until(sign.exists)
        os.killpg(started.pid, signal.SIGINT)  # as a terminal does
        _, errors = started.communicate(timeout=300)
        assert started.returncode == 130, errors
        record = records.read_record_if_any(tmp_path / name)
        assert record.status == "interrupted" and "SIGINT" in record.status_reason
    wait_until_gone(tmp_path)


def together(look):
    """Power in W and energy in J, as ``status.device_status_text`` tells them."""
    words = look.partition("together")[2].split()
    return float(words[0]), float(words[2])


def test_who_looks_sees_power_energy_and_what_is_left(run_dir):
    """A run of 120 W that has trained 320 of 640 samples after 10 of 20 s."""
    path = run_dir / "events-rank0.jsonl"
    events = read_lines(path)
    kept = events[:2]
    progress = {"event": "progress", "told": "320 of 640 samples, 10 s left"}
    t_ns = kept[-1]["t_mono_ns"] + 10**10
    kept.append({"t_mono_ns": t_ns, "t_wall_ns": t_ns} | progress)
    write_lines(path, kept)
    (run_dir / "events-rank1.jsonl").write_text("")
    file = next(run_dir.glob("samples-*.jsonl"))
    lines = file.read_text().splitlines(keepends=True)
    # a line that is just being written
    file.write_text("".join(lines[:112]) + lines[112][:7])
    power_W, energy_J = together(status.device_status_text(run_dir))
    assert energy_J == pytest.approx(120 * 10, rel=0.02)
    assert power_W == pytest.approx(120, rel=0.01)
    assert ": training\n" in status.device_status_text(run_dir)
    assert status.device_status_text(run_dir).endswith(
        "\n  320 of 640 samples, 10 s left"
    )
    answer("status --watch", run_dir.parent, status=2)
    write_lines(path, events)
    file.write_text("".join(lines))
    _, after = together(status.device_status_text(run_dir))
    assert after == pytest.approx(120 * 20, rel=0.02), "what comes after is no training"
