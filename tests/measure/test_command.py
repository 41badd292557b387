"""`energynn measure` as a person meets it: real commands, perun running, fake sensors whose energy is known."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import psutil
import pytest

from energynn import cli, launchers, processes, records
from energynn.launch import command, watch
from energynn.measure import energy, perun_adapter, sampler_process, samples
from energynn.measure.samples import Events
from tests.processes import processes_of, wait_until

FAKES = Path(__file__).with_name("fake_sensors")
ALONE = {"PMI_RANK": "0", "PMI_SIZE": "1"}  # started by a launcher: our own sampler process, perun left out


def fake():
    """The fake NVML's own formulas."""
    found = {}
    exec((FAKES / "pynvml.py").read_text(), found)
    return found


def environment(gpus=(), **more):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "CUDA_", "ENERGYNN_"))}
    python = os.pathsep.join(filter(None, [str(FAKES), os.environ.get("PYTHONPATH")]))
    return clean | {"FAKE_GPUS": json.dumps(list(gpus)), "PYTHONPATH": python, "FAKE_T0": str(time.monotonic())} | more


def start(folder, *command, options=(), env=None, before=(), **more):
    words = [*before, sys.executable, "-m", "energynn.cli", "measure", "--perun", "--out", str(folder)]
    words += [*options, "--", *command]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env or environment(), **more
    )


def measured(folder, *command, **more):
    done = start(folder, *command, options=["--json"], **more)
    output, errors = done.communicate(timeout=300)
    assert output, errors
    return json.loads(output), done.returncode, errors


def has_begun(folder):
    path = folder / "events-rank0.jsonl"
    return path.exists() and "training_start" in path.read_text()


def test_a_first_start_renames_nothing_and_a_second_one_its_segment(tmp_path, monkeypatch):
    """gVisor refuses to give a folder the name that it has; `measure` began there with nothing but that error."""
    renamed, rename = [], Path.rename

    def as_gvisor(path, target):
        if path == target:
            raise OSError(39, "Directory not empty")
        renamed.append(target.name)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", as_gvisor)
    assert command._open_segment(tmp_path, None)[0] == tmp_path and not renamed
    (tmp_path / "samples-host.jsonl").touch()
    assert command._open_segment(tmp_path, None)[0] == tmp_path / "segment-2" and renamed == ["segment-2"]


@pytest.mark.slow
def test_energies_are_right_at_every_window_and_perun_read_the_same(tmp_path):
    """Nine GPUs: constant and varying power, counters that change every 20, 50 and 100 ms."""
    loads = [
        dict(shape="constant", high_W=300.0),
        dict(shape="sine", low_W=200.0, high_W=400.0, rhythm_s=7.3),
        dict(shape="sine", low_W=100.0, high_W=500.0, rhythm_s=2.9),
    ]
    gpus = [load | {"update_s": update_s, "noise_W": 2.0} for load in loads for update_s in (0.02, 0.05, 0.1)]
    record, status, _ = measured(tmp_path / "run", "sleep", "14", env=environment(gpus))
    assert status == 0 and record["status"] == "finished" and record["valid"], record["invalid_reasons"]
    assert record["energy_gpu_provenance"] == "simulated" and record["coverage"] == 1.0
    overhead = record["overhead"][0]
    assert overhead["missed_deadlines"] < 100 and 0 < overhead["thread_cpu_s"] < 0.05 * 20
    assert record["idle_power_gpu_before_W"] > 0 and "energy_net_gpu_J" in record

    events = samples.read_events(tmp_path / "run")
    start_ns, end_ns = (
        next(e["t_mono_ns"] for e in events if e["event"] == f"training_{mark}") for mark in ("start", "end")
    )
    (host,) = samples.read_hosts(tmp_path / "run")
    random, true_J = np.random.default_rng(0), fake()["energy_J"]
    for curve in energy.curves(host):
        if curve.sensor["kind"] != "energy":
            continue
        gpu = gpus[int(curve.sensor["device"])]
        worst = {}
        for seconds, limit in ((3.0, 0.005 if gpu["shape"] == "constant" else 0.01), (10.0, 0.005)):
            for _ in range(50):
                first = int(random.integers(start_ns, end_ns - int(seconds * 1e9)))
                last = first + int(seconds * 1e9)
                error = curve.between(first, last)[0] / (true_J(gpu, last / 1e9) - true_J(gpu, first / 1e9)) - 1
                worst[seconds] = max(worst.get(seconds, 0.0), abs(error))
            assert worst[seconds] < limit, (gpu, worst)

    with h5py.File(next((tmp_path / "run").glob("perun/*.hdf5"))) as file:
        in_perun = {}
        file.visititems(
            lambda path, item: (
                in_perun.__setitem__(path.split("/")[-3], item[:]) if path.endswith("POWER/raw_data/values") else None
            )
        )
    assert len(in_perun) == 9
    for name, values in in_perun.items():
        assert (
            np.array_equal(values, [line["perun"][f"{host.host}_{name}"] for line in host.perun]) and len(values) > 14
        )



@pytest.mark.slow
def test_outages_and_false_readings_are_gaps_bridged_by_counters_and_flagged(tmp_path):
    faults = dict(shape="sine", low_W=200.0, high_W=400.0, rhythm_s=6.0, fails_from_s=5.0, fails_to_s=7.0)
    gpus = [
        faults | {"update_s": 0.02},
        faults | {"update_s": None},
        faults | {"update_s": 0.05, "fault": "nan"},
        faults | {"update_s": 0.05, "fault": "negative"},
        faults | {"update_s": 0.02, "fault": "gone", "fails_from_s": 9.0, "fails_to_s": 1e9},
    ]
    record, status, errors = measured(tmp_path / "run", "sleep", "12", env=environment(gpus) | ALONE)
    assert status == 0
    events = samples.read_events(tmp_path / "run")
    window = [
        next(e["t_mono_ns"] for e in events if e["event"] == f"training_{mark}") / 1e9 for mark in ("start", "end")
    ]
    by_id = {entry["id"]: entry for entry in record["sensors"]}
    true_J = fake()["energy_J"](gpus[0], window[1]) - fake()["energy_J"](gpus[0], window[0])
    for number in (0, 2, 3):
        assert by_id[f"gpu_{number}_energy"]["energy_J"] == pytest.approx(true_J, rel=0.01)
    assert by_id["gpu_1_power"]["coverage"] < 0.9 and by_id["gpu_1_power"]["failed_reads"] > 30
    assert by_id["gpu_1_power"]["statistical_J"] > 5 * by_id["gpu_0_energy"]["statistical_J"]
    assert any("gpu_1_power" in flag and "in gaps" in flag for flag in record["flags"])
    assert not record["valid"] and any("cover" in reason for reason in record["invalid_reasons"])
    assert "gpu_4_energy cannot be read (GPU is lost)" in errors and by_id["gpu_4_energy"]["coverage"] < 0.8
    assert "it says nan" in errors and "it says -" in errors


@pytest.mark.slow
@pytest.mark.parametrize("way", ["perun", "own sampler"])
def test_the_commands_output_and_exit_status_are_passed_on(tmp_path, way):
    env = environment() | (ALONE if way == "own sampler" else {})
    program = "import sys; print('its line'); print(sys.stdin.read()); sys.exit(3)"
    words = [
        sys.executable,
        "-m",
        "energynn.cli",
        "measure",
        "--perun",
        "--out",
        str(tmp_path / "run"),
        "--",
        sys.executable,
        "-c",
    ]
    done = subprocess.run([*words, program], input="what it was given", capture_output=True, text=True, env=env)
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("its line\nwhat it was given\n") and "estimated" in done.stdout
    said = " ".join(done.stdout.split())
    assert "failed, the command ended with status 3" in said and re.search(r"GPU.* absent", said)
    assert done.stderr.startswith("energynn measures 1 s of idle power, then: ")
    record = records.read(tmp_path / "run")
    assert record["exit_status"] == 3 and record["status"] == "failed" and records.check(tmp_path) == []
    assert bool(list((tmp_path / "run").glob("perun/*.hdf5"))) == (way == "perun")


@pytest.mark.slow
def test_a_second_start_is_a_segment_and_the_gap_between_does_not_count(tmp_path):
    gpus = [dict(shape="constant", high_W=300.0, update_s=0.02)]
    first, _, _ = measured(tmp_path / "run", "sleep", "2", env=environment(gpus) | ALONE)
    time.sleep(2)
    other = start(tmp_path / "run", "sleep", "1", env=environment(gpus) | ALONE)
    assert other.wait() == 2 and "another command" in other.communicate()[1]
    both, status, _ = measured(tmp_path / "run", "sleep", "2", env=environment(gpus) | ALONE)
    assert status == 0 and len(first["segments"]) == 1 and len(both["segments"]) == 2
    assert both["training_time_s"] == pytest.approx(sum(s["training_time_s"] for s in both["segments"]))
    assert both["energy_gpu_J"] == pytest.approx(300 * both["training_time_s"], rel=0.005)
    assert both["energy_total_J"] == pytest.approx(sum(s["energy_total_J"] for s in both["segments"]))
    assert both["segments"][1]["gap_before_s"] > 4 and both["segments"][0]["gap_before_s"] is None
    assert records.check(tmp_path) == []


RANKS = textwrap.dedent("""
    import sys, time
    from mpi4py import MPI
    assert MPI.COMM_WORLD.size == 2
    MPI.COMM_WORLD.barrier()
    time.sleep(3)
    sys.exit(4 * MPI.COMM_WORLD.rank if "fail" in sys.argv else 0)
""")


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
def test_ranks_of_one_host_count_its_energy_once(tmp_path, inside):
    """mpirun within the measurement, and a measurement within each of mpirun's ranks: 300 W are 300 W."""
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    env = environment([dict(shape="constant", high_W=300.0, update_s=0.02)])
    ranks, words = [mpirun, "-n", "2"], [sys.executable, "-c", RANKS]
    if inside:
        record, status, errors = measured(tmp_path / "run", *ranks, *words, env=env)
    else:
        record, status, errors = measured(tmp_path / "run", *words, env=env, before=ranks)
        assert len(list((tmp_path / "run").glob("samples-*.jsonl"))) == 1 and record["devices"] == 2
    assert status == 0 and record["status"] == "finished", errors
    assert record["mean_power_gpu_W"] == pytest.approx(300, rel=0.005)


@pytest.mark.slow
def test_one_rank_that_fails_is_named(tmp_path):
    ranks = [str(Path(sys.executable).with_name("mpirun")), "-n", "2"]
    started = start(tmp_path / "run", sys.executable, "-c", RANKS, "fail", before=ranks)
    started.communicate(timeout=300)
    record = records.read(tmp_path / "run")
    assert started.returncode != 0
    assert record is None or record["status_reason"] == "rank 1: the command ended with status 4"
    records.recover(tmp_path)  # mpirun may end rank 0 before it has written the record
    assert records.read(tmp_path / "run")["status"] in ("failed", "killed")


@pytest.mark.slow
@pytest.mark.parametrize(
    "way, who, number",
    [
        ("perun", "measure", signal.SIGKILL),
        ("perun", "command", signal.SIGKILL),
        ("perun", "sampler", signal.SIGKILL),
        ("own sampler", "measure", signal.SIGTERM),
        ("own sampler", "measure", signal.SIGKILL),
        ("own sampler", "sampler", signal.SIGKILL),
        pytest.param("perun", "measure", signal.SIGTERM, marks=pytest.mark.nightly),
        pytest.param("own sampler", "command", signal.SIGKILL, marks=pytest.mark.nightly),
    ],
)
def test_whoever_is_killed_nothing_is_left_and_the_samples_are_whole(tmp_path, way, who, number):
    folder = tmp_path / "run"
    marker = f"import time; time.sleep({60 if who != 'sampler' else 6})  # {folder}"
    env = environment() | (ALONE if way == "own sampler" else {})
    started = start(folder, sys.executable, "-c", marker, env=env)
    wait_until(lambda: has_begun(folder))
    time.sleep(1.5)
    header = json.loads(next(folder.glob("samples-*.jsonl")).read_text().splitlines()[0])
    child = next(
        p
        for p in processes_of(folder)
        if marker in p.cmdline() and "energynn.cli" not in p.cmdline() and "perun" not in p.cmdline()
    )
    victim = {"measure": started.pid, "command": child.pid, "sampler": header["pid"]}[who]
    killed_at = time.time_ns()
    os.kill(victim, number)
    if who == "sampler":
        assert started.wait(timeout=300) == 0
    else:
        wait_until(lambda: not [p for p in processes_of(folder) if p.pid == child.pid], 5)
        if number == signal.SIGKILL and who == "measure":
            wait_until(lambda: not processes_of(folder), 5, f"for {processes_of(folder)} to end")
        assert started.wait(timeout=30) in (128 + number, -number)
    wait_until(lambda: not processes_of(folder), 5)
    records.recover(tmp_path)
    record = records.read(folder)
    found = samples.read_samples(next(folder.glob("samples-*.jsonl")))
    assert found.wall_ns[-1] > killed_at - 0.2e9, "samples were lost"
    assert record["energy_cpu_J"] > 0 and records.check(tmp_path) == []
    if who == "sampler":
        assert not record["valid"] and record["coverage"] < 0.99
    else:
        expected = {"measure": "killed", "command": "killed"} | ({"measure": "interrupted"} if number == 15 else {})
        assert record["status"] == expected[who], record["status_reason"]


@pytest.mark.parametrize(
    "way, who, number",
    [
        ("plain", "measure", signal.SIGKILL),
        ("plain", "measure", signal.SIGTERM),
        ("plain", "keeper", signal.SIGKILL),
        ("plain", "command", signal.SIGKILL),
        pytest.param("perun", "measure", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("perun", "measure", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("perun", "keeper", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("perun", "perun", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_kill_leaves_nothing_of_what_the_command_has_started(tmp_path, way, who, number):
    """A shell and what it waits for, both deaf to SIGTERM, unless that is to end the shell."""
    folder, deaf = tmp_path / "run", "" if number == signal.SIGTERM else "trap '' TERM; "
    words = ["sh", "-c", f"{deaf}(trap '' TERM; tail -f {tmp_path}/own & wait); true"]
    (tmp_path / "own").touch()
    measure = [sys.executable, "-m", "energynn.cli", "measure", *(["--perun"] if way == "perun" else [])]
    started = subprocess.Popen(
        [*measure, "--out", str(folder), "--", *words], env=environment(), stderr=subprocess.DEVNULL
    )

    def tails():
        found = []
        for each in processes_of(tmp_path):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [each] if each.name() == "tail" else []
        return found

    wait_until(tails)
    shell = tails()[0].parent().parent()
    above = {"command": shell, "keeper": shell.parent(), "perun": shell.parent().parent()}
    try:
        os.kill(above[who].pid if who in above else started.pid, number)
        wait_until(lambda: not tails(), 5)
        assert started.wait(60) == {"measure": {9: -9, 15: 143}[number]}.get(who, 137)
        wait_until(lambda: not processes_of(tmp_path), 5)
    finally:
        for each in processes_of(tmp_path):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    records.recover(tmp_path)
    assert records.read(folder)["status"] == ("killed" if number == signal.SIGKILL else "interrupted")
    assert records.check(tmp_path) == []


@pytest.mark.slow
def test_a_full_disk_is_said_and_the_command_goes_on(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        started = start(disk / "run", "sleep", "4", env=environment() | ALONE)
        wait_until(lambda: has_begun(disk / "run"))
        with open(disk / "filler", "wb", buffering=0) as filler, pytest.raises(OSError):
            while True:
                filler.write(b"\0" * 1024)
        _, errors = started.communicate(timeout=300)
        assert "No space left on device" in errors and "Traceback" not in errors, errors
        assert started.returncode != 0
        (disk / "filler").unlink()
        records.recover(disk)
        assert records.read(disk / "run")["energy_cpu_J"] > 0
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_an_nvml_that_does_not_start_is_said_and_the_command_runs(tmp_path):
    env = environment([dict(shape="constant")], FAKE_INIT_ERROR="Driver/library version mismatch") | ALONE
    record, status, errors = measured(tmp_path / "run", "sleep", "3", env=env)
    assert status == 0 and "energy_gpu_J" not in record and record["energy_cpu_provenance"] == "estimated"
    assert "version mismatch" in errors and any("version mismatch" in flag for flag in record["flags"])


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "no command"),
        (["--", "no-such-command"], "'no-such-command' is no command"),
        (["--period", "0", "--", "true"], "period: must be 0.01 to 60"),
        (["--out", "/proc/nothing", "--", "true"], "choose a folder you own"),
    ],
)
def test_bad_input_is_one_line_and_status_2(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["measure", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [None, "{}", "[1]", "not json", '{"workload": "resnet50", "config": {}}'])
def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path, capsys, content):
    (tmp_path / ("run.json" if content else "thesis.tex")).write_text(content or "years of work")
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    assert cli.main(["measure", "--out", str(tmp_path), "--", "true"]) == 2
    error = capsys.readouterr().err
    assert "choose a" in error and error.count("\n") == 1
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before


def test_the_status_of_the_last_start_counts(run_dir):
    folder = run_dir.parent / "again"
    shutil.copytree(run_dir, folder / "segment-2")
    (folder / "run.json").write_text((run_dir / "run.json").read_text())
    for part, status in ((folder, 3), (folder / "segment-2", -64)):
        event = {"t_mono_ns": 1, "t_wall_ns": 1, "event": "training_end", "exit_status": status}
        (part / "events-rank0.jsonl").write_text(json.dumps(event) + "\n")
        (part / "events-rank1.jsonl").unlink(missing_ok=True)
    assert records.derive(folder, json.loads((folder / "run.json").read_text()))["exit_status"] == 192
    assert command._signal_name(40) == "signal 40" and command._signal_name(15) == "SIGTERM"


@pytest.mark.parametrize(
    "statuses, status", [((0, -15), "interrupted"), ((-15, 0), "interrupted"), ((0, 0), "finished")]
)
def test_a_stopped_measurement_is_as_good_as_its_worst_rank(tmp_path, monkeypatch, statuses, status):
    """A signal stopped two ranks; a command may take it as its regular end."""

    def run(_command, folder, _rank, _children, stopped, _stdout):
        stopped.append(signal.SIGTERM)
        for rank, exit_status in enumerate(statuses):
            mark = samples.Events(folder, rank).mark
            mark("rank_start", rank=rank, host="h", pid=1)
            mark("training_start")
            mark("training_end", exit_status=exit_status)
            mark("rank_end", status="finished" if exit_status == 0 else "failed", exit_status=exit_status)

    monkeypatch.setattr(command, "_run", run)
    monkeypatch.setattr(command, "start_sampler", lambda *_: lambda: None)
    monkeypatch.setattr(command, "_pass_signals_on", lambda *_: None)
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    record, _ = command.measure(["true"], tmp_path / "runs" / "run", 0.04, quiet=True)
    assert record["status"] == status, record["status_reason"]
    assert records.check(tmp_path) == []


@pytest.mark.slow
def test_ctrl_c_interrupts_before_and_after_the_command_has_begun(tmp_path):
    program = f"import pathlib, time; pathlib.Path({str(tmp_path / 'begun')!r}).touch(); time.sleep(60)"
    for name, sign in (("early", tmp_path / "early" / "run.json"), ("late", tmp_path / "begun")):
        started = start(tmp_path / name, sys.executable, "-c", program, env=environment(), start_new_session=True)
        wait_until(sign.exists)
        os.killpg(started.pid, signal.SIGINT)  # as a terminal does
        output, errors = started.communicate(timeout=300)
        assert started.returncode == 130, errors
        record = records.read(tmp_path / name)
        assert record["status"] == "interrupted" and "SIGINT" in record["status_reason"], record["status_reason"]
    wait_until(lambda: not processes_of(tmp_path), 5)


@pytest.mark.slow
def test_a_measurement_that_goes_on_is_not_recovered_and_not_started_twice(tmp_path):
    started = start(tmp_path / "run%d", "sleep", "5")
    wait_until(lambda: has_begun(tmp_path / "run%d"))
    assert records.recover(tmp_path) == [] and records.check(tmp_path) == []
    second = start(tmp_path / "run%d", "sleep", "5")
    assert "this run goes on already" in second.communicate(timeout=300)[1] and second.returncode == 2
    assert started.wait(timeout=300) == 0
    record = records.read(tmp_path / "run%d")
    assert record["status"] == "finished" and list((tmp_path / "run%d").glob("perun/*.hdf5")), "a % in the path"


@pytest.mark.slow
def test_the_sampler_goes_on_until_the_last_rank_and_a_second_start_has_one_folder(tmp_path):
    """Rank 0, who owns the sampler, ends after 1 s, rank 1 after 5 s: all of it is measured."""
    mpirun = [str(Path(sys.executable).with_name("mpirun")), "-n", "2"]
    program = "import os, time; time.sleep(1 + 4 * int(os.environ['PMI_RANK']))"
    env = environment([dict(shape="constant", high_W=300.0, update_s=0.02)])
    for parts in (1, 2):
        record, status, errors = measured(tmp_path / "run", sys.executable, "-c", program, env=env, before=mpirun)
        assert status == 0 and record["status"] == "finished", errors
        assert record["training_time_s"] > 4.9 * parts and record["coverage"] > 0.99
        assert record["energy_gpu_J"] == pytest.approx(300 * record["training_time_s"], rel=0.01)
        assert len(record["segments"]) == parts
    folder = tmp_path / "run" / "segment-2"
    assert {path.name for path in folder.glob("events-rank*")} == {"events-rank0.jsonl", "events-rank1.jsonl"}


@pytest.mark.slow
def test_a_perun_that_does_not_start_costs_no_measurement(tmp_path):
    broken = tmp_path / "broken" / "mpi4py"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('cannot load MPI library')\n")
    env = environment()
    env["PYTHONPATH"] = f"{broken.parent}{os.pathsep}{env['PYTHONPATH']}"
    record, status, errors = measured(tmp_path / "run", "sleep", "3", env=env)
    assert status == 0 and record["status"] == "finished" and record["energy_cpu_J"] > 0, errors


def test_what_a_perun_that_failed_has_left_is_not_gone_on_with(tmp_path, monkeypatch):
    left = []
    names = ("samples-h.jsonl",)
    monkeypatch.setattr(
        perun_adapter, "command", lambda script, folder, ini: ["touch", *(str(folder / name) for name in names)]
    )
    monkeypatch.setattr(command, "start_sampler", lambda folder, *_: left.extend(os.listdir(folder)) or (lambda: None))
    monkeypatch.setattr(command, "_pass_signals_on", lambda *_: None)
    monkeypatch.setattr(command, "IDLE_S", 0.1)
    command.measure(["true"], tmp_path / "run", 0.04, quiet=True, perun=True)
    assert "perun.ini" in left and not {*left} & {*names}


@pytest.mark.parametrize(
    "left, folder",
    [
        ("perun.ini", "run"),
        ("samples-h.jsonl", "segment-2"),
        ("events-rank0.jsonl", "segment-2"),
    ],
)
def test_a_start_that_was_killed_keeps_its_folder_to_itself(tmp_path, left, folder):
    run_dir, _, held = command._prepare(["true"], tmp_path / "run", 0.04, 0, 1)
    (run_dir / left).touch()
    for file in held:
        file.close()
    _, second, held = command._prepare(["true"], run_dir, 0.04, 0, 1)
    assert second.name == folder
    for file in held:
        file.close()


@pytest.mark.slow
def test_a_start_killed_before_its_first_event_costs_the_next_one_no_perun(tmp_path):
    folder = tmp_path / "run"
    first = start(folder, "sleep", "3")
    wait_until(lambda: any('"header"' in path.read_text() for path in folder.glob("samples-*.jsonl")))
    first.kill()
    first.communicate(timeout=60)
    wait_until(lambda: not processes_of(folder))
    for events in folder.glob("events-rank*.jsonl"):  # it came a little late
        events.unlink()
    record, status, errors = measured(folder, "sleep", "3")
    assert status == 0 and list(folder.glob("segment-2/perun/*.hdf5")), errors
    assert len(record["segments"]) == 1
    assert list(folder.glob("samples-*.jsonl")) and records.check(tmp_path) == []


@pytest.mark.slow
def test_a_gpu_that_falls_silent_for_ever_stops_no_command(tmp_path):
    gpus = [
        dict(shape="constant", high_W=300.0, update_s=None, fails_from_s=25.0, fault="hang")
    ]  # late: perun starts slowly on a busy machine
    record, status, errors = measured(tmp_path / "run", "sleep", "30", env=environment(gpus))
    assert status == 0 and "no sample for 10 s" in errors and not record["valid"]
    assert any("does not answer" in flag or "in gaps" in flag for flag in record["flags"]), record["flags"]
    wait_until(lambda: not processes_of(tmp_path), 10)


def test_many_ranks_have_to_be_told_where(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    for name in ("PMI_RANK", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["measure", "--", "true"]) == 2
    assert "give --out DIR" in capsys.readouterr().err


def test_a_batch_script_is_no_rank_and_a_task_of_srun_is_one(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("PMI_", "OMPI_", "SLURM_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert launchers.rank_and_size() is None
    monkeypatch.setenv("SLURM_STEP_ID", "3")
    assert launchers.rank_and_size() == (0, 8)


def test_who_looks_sees_power_energy_and_what_is_left(run_dir, capsys):
    """A run of 120 W that has trained 320 of 640 samples after 10 of 20 s."""
    path = run_dir / "events-rank0.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [event for event in events if event["event"] in ("rank_start", "training_start")]
    t_ns = kept[-1]["t_mono_ns"] + 10**10
    kept.append(
        {"t_mono_ns": t_ns, "t_wall_ns": 10**10, "event": "progress", "samples_trained": 320, "samples_to_train": 640}
    )
    path.write_text("".join(json.dumps(event) + "\n" for event in kept))
    (run_dir / "events-rank1.jsonl").write_text("")
    file = next(run_dir.glob("samples-*.jsonl"))
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:60]) + lines[60][:7])  # a line that is just being written
    looker = watch.Watch(run_dir)
    early = looker.look()
    file.write_text("".join(lines[:112]))
    state = looker.look()
    assert early["energy_J"] == pytest.approx(120 * 4.8, rel=0.02) and early["status"] == "training"
    assert state["energy_J"] == pytest.approx(120 * 10, rel=0.02), "not counted twice"
    assert state["power_W"] == pytest.approx(120, rel=0.01)
    assert state["energy_per_sample_J"] == pytest.approx(1200 / 320, rel=0.02)
    assert state["age_s"] > 1e6 and "the last sample is" in watch.text(state)
    assert state["time_left_s"] == pytest.approx(10) and state["energy_left_J"] == pytest.approx(1200, rel=0.02)
    assert cli.main(["status", "--watch", str(run_dir), "--once"]) == 0
    assert "120.0 W" in capsys.readouterr().out
    assert cli.main(["status", "--watch", str(run_dir.parent), "--once"]) == 2
    kept[-2]["samples_done"] = 160  # of an earlier segment, which took its own joules
    path.write_text("".join(json.dumps(event) + "\n" for event in kept))
    assert watch.Watch(run_dir).look()["energy_per_sample_J"] == pytest.approx(1200 / 160, rel=0.02)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    file.write_text("".join(lines))
    assert watch.Watch(run_dir).look()["energy_J"] == pytest.approx(120 * 20, rel=0.02), (
        "what comes after is no training"
    )


def test_a_rank_reads_no_other_ranks_events_and_rank_0_those_of_all(tmp_path, monkeypatch):
    """Of 256 ranks each would open the files of all."""
    for rank in range(3):
        mark = Events(tmp_path, rank).mark
        mark("training_start")
        mark("training_end", exit_status=0)
        mark("rank_end", status="finished", exit_status=0)
    read, lines_of = [], samples._whole_lines
    monkeypatch.setattr(samples, "_whole_lines", lambda path: read.append(path.name) or lines_of(path))
    assert command._outcome(tmp_path, 1, []) == ("finished", "", 0) and read == ["events-rank1.jsonl"]
    assert command._first_bad_end(tmp_path, 3, 0.0) == ("finished", "") and len(read) == 4


def test_while_ranks_live_their_events_are_not_read_again_and_again(tmp_path, monkeypatch):
    looks = []

    def lives(path):
        looks.append(path)
        return len(looks) < 3

    (tmp_path / ".ranks-a").touch()
    Events(tmp_path, 0).mark("rank_end", status="failed", exit_status=3)
    read, lines_of = [], samples._whole_lines
    monkeypatch.setattr(samples, "_whole_lines", lambda path: read.append(path.name) or lines_of(path))
    monkeypatch.setattr(command, "is_locked", lives)
    monkeypatch.setattr(command.time, "sleep", lambda seconds: None)
    assert command._first_bad_end(tmp_path, 1, 0.0)[0] == "failed" and len(looks) == 3 and len(read) == 1


def test_who_waits_asks_the_shared_folder_ever_more_rarely(monkeypatch):
    now, asked = [0.0], []
    monkeypatch.setattr(sampler_process.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sampler_process.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    with pytest.raises(ValueError, match="waited 60 s for nothing"):
        sampler_process.until(lambda: asked.append(now[0]), "nothing")
    assert len(asked) < 50 and asked[3] < 0.5


@pytest.mark.parametrize("stopped_s, status", [(4.0, "failed"), (0.5, "finished")])
def test_a_command_that_ends_while_we_are_stopped_has_no_known_time(tmp_path, stopped_s, status):
    measure = [sys.executable, "-m", "energynn.cli", "measure", "--json", "--out", str(tmp_path / "run"), "--"]
    words = [*measure, "sh", "-c", f"touch {tmp_path}/runs; sleep 2"]
    started = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment())
    wait_until((tmp_path / "runs").exists)
    started.send_signal(signal.SIGSTOP)
    time.sleep(stopped_s)
    started.send_signal(signal.SIGCONT)
    record = json.loads(started.communicate(timeout=60)[0])
    assert record["status"] == status and started.returncode == 0
    assert ("in which the command ended: its time is not known" in record["status_reason"]) == (status == "failed")
    assert records.check(tmp_path) == []


def test_a_start_whose_end_was_seen_late_makes_later_ones_no_evidence(run_dir):
    """Their sum holds a time that nobody knows."""
    folder, of_command = run_dir.parent / "again", dict(workload="command", config={"command": "true"}, devices=1)
    shutil.copytree(run_dir, folder)
    intent = {
        name: value for name, value in json.loads((folder / "run.json").read_text()).items() if "digest" not in name
    }
    (folder / "run.json").write_text(json.dumps(intent | of_command | {"run_id": "again"}))
    (folder / "events-rank1.jsonl").unlink()
    (folder / "phases-rank1.jsonl").unlink()
    shutil.rmtree(folder / "perun")
    events = [json.loads(line) for line in (folder / "events-rank0.jsonl").read_text().splitlines()]
    shutil.copytree(folder, folder / "segment-2")
    (folder / "segment-2" / "run.json").unlink()
    for late, part in (({}, folder / "segment-2"), ({}, folder), ({"late_s": 4.0}, folder)):
        for event in events:
            event |= {"exit_status": 0} | late if event["event"] == "training_end" else {}
        (part / "events-rank0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        record = records.build(folder, "finished", "")
        assert record["valid"] != bool(late), record["invalid_reasons"]
    assert record["invalid_reasons"] == ["10% of the energy may be missing or false; the flags say why"]
    assert "for 4 s nobody saw whether the command had ended" in record["flags"] and records.check(folder) == []


TELLS_ITS_END = """
import os, sys, time
open(sys.argv[1] + "/pid", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + "/pid", sys.argv[1] + "/runs")
time.sleep(3)
open(sys.argv[1] + "/ended", "w").write(str(time.monotonic_ns()))
"""


@pytest.mark.parametrize("who, stopped_s", [("keeper", 3.0), ("measure", 0.95), ("both", 0.95)])
def test_the_time_of_a_command_is_right_where_one_of_us_was_stopped_over_its_end(tmp_path, who, stopped_s):
    words = [sys.executable, "-m", "energynn.cli", "measure", "--out", str(tmp_path / "run"), "--"]
    words += [sys.executable, "-c", TELLS_ITS_END, str(tmp_path)]
    started = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment())
    wait_until((tmp_path / "runs").exists)
    begun = time.monotonic()
    keeper = psutil.Process(int((tmp_path / "runs").read_text())).parent()
    stopped = {"keeper": [keeper], "measure": [psutil.Process(started.pid)]}
    stopped = stopped.get(who) or [keeper, psutil.Process(started.pid)]
    time.sleep(max(0.0, begun + 2.5 - time.monotonic()))
    for process in stopped:
        process.suspend()
    time.sleep(stopped_s)
    for process in stopped:
        process.resume()
    assert started.wait(60) == 0
    record = records.read(tmp_path / "run")
    (end,) = samples.events_of_kind(samples.read_events(tmp_path / "run"), "training_end")
    late_s = (end["t_mono_ns"] - int((tmp_path / "ended").read_text())) / 1e9
    assert records.check(tmp_path) == [] and record["status"] == "finished"
    if who == "both":
        assert not record["valid"] and any("nobody saw whether the command had ended" in x for x in record["flags"])
    else:
        assert 0 < late_s < 0.5, "it had ended when it had written that"
    if who == "keeper":
        assert record["valid"], record["invalid_reasons"]


def test_what_a_command_leaves_to_its_keeper_is_no_part_of_its_time(tmp_path):
    """It ends at once when it is asked to; what it has started is deaf, and is killed some seconds later."""
    script = f"trap 'date +%s.%N > {tmp_path}/ended; kill -9 $W; exit 0' TERM; (trap '' TERM; exec sleep 60) & "
    script += f"sleep 61 & W=$!; touch {tmp_path}/runs; wait"
    words = [sys.executable, "-m", "energynn.cli", "measure", "--out", str(tmp_path / "run"), "--", "sh", "-c", script]
    started = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment())
    wait_until((tmp_path / "runs").exists)
    time.sleep(0.5)
    started.terminate()
    assert started.wait(60) == 0 and not processes_of(tmp_path)
    (end,) = samples.events_of_kind(samples.read_events(tmp_path / "run"), "training_end")
    assert end["t_wall_ns"] / 1e9 - float((tmp_path / "ended").read_text()) < 1.0


@pytest.mark.parametrize("take", range(2, 6))
def test_what_a_command_starts_as_its_last_act_is_ended_too(tmp_path, take):
    """A process that is begun while we list all, by one that is gone when we come to it."""
    os.mkfifo(tmp_path / "never")
    script = f"exec 3<>{tmp_path}/never; trap '(tail -f {tmp_path}/runs & wait) & exit 0' TERM; "
    script += f"touch {tmp_path}/runs; while :; do read -r line <&3; done"
    words = [
        sys.executable,
        "-m",
        "energynn.cli",
        "measure",
        "--out",
        str(tmp_path / "run"),
        "--",
        "bash",
        "-c",
        script,
    ]
    started = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment())
    wait_until((tmp_path / "runs").exists)
    time.sleep(0.1 * take)
    started.kill()
    started.wait()
    wait_until(lambda: not processes_of(tmp_path), 5)


@pytest.mark.parametrize("late_s, first", [((5.0, 5.0), 0), ((5.0, 0.0), 0), ((0.0, 5.0), 1)])
def test_an_end_that_one_of_many_ranks_saw_late_makes_no_finished_record(tmp_path, monkeypatch, late_s, first):
    run_one, run_dir = command._run, tmp_path / "runs" / "run"

    def run(words, folder, _rank, _children, stopped, stdout):
        for rank in range(2):
            ended = (0, time.monotonic_ns(), late_s[rank])
            monkeypatch.setattr(command, "_to_its_end", lambda *_, ended=ended: ended)
            run_one(words, folder, rank, [], stopped, stdout)

    monkeypatch.setattr(command, "_run", run)
    monkeypatch.setattr(command, "IDLE_S", 0.1)
    monkeypatch.setattr(command, "start_sampler", lambda *_: lambda: None)
    monkeypatch.setattr(command, "_pass_signals_on", lambda *_: None)
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    record, _ = command.measure(["true"], run_dir, 0.04, quiet=True)
    said = f"rank {first}: the measurement stood still for 5 s, in which the command ended: its time is not known"
    assert (record["status"], record["status_reason"]) == ("failed", said) and records.check(tmp_path) == []
    records.build(run_dir, "finished", "")
    assert records.check(tmp_path) == ["run: status: is finished, but a rank told of no good end"]


def kept(*words):
    """A command below its keeper, and what the keeper tells."""
    reader, writer = os.pipe()
    as_child = partial(processes.keep, os.getpid(), writer)
    child = subprocess.Popen(words, preexec_fn=as_child, close_fds=False)
    os.close(writer)
    return child, open(reader, "rb", buffering=0)


def test_an_end_before_the_first_look_is_as_late_as_that_look():
    """Whoever is stopped between the command's start and the first look knows only when it was started."""
    child, told = kept("true")
    child.wait()
    assert command._wait_for_end(told, 5.0)[0] == 5.0
    told.close()


@pytest.mark.parametrize("kernel", ["has pidfd_open", "is older"])
def test_an_end_is_seen_at_once(monkeypatch, kernel):
    if kernel == "is older":
        monkeypatch.delattr(os, "pidfd_open")
    begun = time.monotonic()
    child, told = kept("sleep", "0.5")
    alive_s, ended_ns = command._wait_for_end(told, begun)
    assert 0 <= ended_ns / 1e9 - alive_s < 0.3 and 0.5 < ended_ns / 1e9 - begun < 0.9 and child.wait() == 0
    told.close()
