"""A simulated week with faults at seeded instants: each joule is inside its interval, or the run says that it is not.

Sensors, their true energy and the clocks are made up. What writes, reads, accounts and records is the package itself:
each start of the run is a process of its own with a real sampler, which a real SIGKILL ends. Samples are 2 s apart, so
that a week takes minutes.
"""

import math
import multiprocessing
import os
import random
import resource
import signal
import socket
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from energynn import records
from energynn.files import write_json
from energynn.measure import accounting, samples, sensors
from tests.conftest import minimal_record
from tests.measure.test_lying_sensors import wrong
from tests.measure.worlds import GOLDEN, Load

PERIOD_S, T0_S, WALL_S = 2.0, 1e5, 1.8e9
DAY_S = 24 * 3600.0
CHUNK = 2048  # readings that are worked out at once
COUNTERS, POWERS = ("gpu_0_energy", "cpu_0_package"), ("gpu_0_power", "gpu_1_power")
LOADS = {
    "gpu_0": Load("sine", 150.0, 450.0, 611.0),
    "gpu_1": Load("sine", 120.0, 400.0, 347.0),
    "cpu_0": Load("sine", 60.0, 180.0, 941.0),
}
MOST_GROWTH_B = 3e6  # lines that wait for an hour while the disk is full have 0.3 MB


@dataclass
class Fault:
    """What goes wrong from begin_s to end_s of the simulated time; ``of`` is a sensor or, of the wall clock, a step."""

    kind: str
    begin_s: float
    end_s: float
    of: str | float = ""


@dataclass
class Segment:
    """One start of the run. killed: whether a kill ended it."""

    folder: Path
    begin_s: float
    end_s: float
    killed: bool
    faults: list[Fault] = field(default_factory=list)


def faults_of(days: float, drawn: random.Random) -> list[Fault]:
    """Kills, stalls, lies, full disks and wall clocks that are set, some of each a day, each at a random instant."""
    found = []
    lengths_s = {"stall": 4000, "stuck": 3600, "zero": 1800, "frozen": 3600, "unreadable": 1200, "full": 3600}
    for kind, number_a_day in (("kill", 5), ("stall", 2), ("clock", 2), ("full", 2), ("jump", 1), ("stuck", 1),
                               ("zero", 1), ("frozen", 1), ("unreadable", 1)):  # fmt: skip
        for _ in range(math.ceil(number_a_day * days)):
            begin_s = drawn.uniform(0, days * DAY_S)
            of = {
                "clock": drawn.choice([-1, 1]) * 10 ** drawn.uniform(-1, 3.5),
                "jump": drawn.choice(COUNTERS),
                "stuck": drawn.choice(COUNTERS),
                "zero": drawn.choice(POWERS),
                "frozen": drawn.choice(POWERS),
                "unreadable": drawn.choice(COUNTERS + POWERS),
            }.get(kind, "")
            end_s = begin_s + drawn.uniform(0.01, 1.0) * lengths_s.get(kind, 0.0)
            found.append(Fault(kind, begin_s, end_s, of))
    return sorted(found, key=lambda fault: fault.begin_s)


# ----------------------------------------------------------------------------------------------------------- the world


def reading(sensor: sensors.Sensor, t, faults: list[Fault]):
    """What a sensor shows at some instants, in its unit; NaN where it cannot be read."""
    load = LOADS[sensor.id[:5]]
    own = [fault for fault in faults if fault.of == sensor.id]
    if sensor.kind == "energy":
        shown_s = np.floor(t * 10) / 10 if sensor.component == "gpu" else t
        values = load.energy_J(shown_s)
        for fault in own:
            if fault.kind == "stuck":
                stood_s = np.clip(shown_s, fault.begin_s, fault.end_s)
                values = values - (load.energy_J(stood_s) - load.energy_J(fault.begin_s))
            elif fault.kind == "jump":
                values = values + 50_000.0 * (t > fault.begin_s)
        values = np.floor(values / sensor.to_SI)
        if sensor.wraps_at:
            values = values % sensor.wraps_at
    else:
        noise = np.random.default_rng(zlib.crc32(f"{sensor.id} {t[0]}".encode())).normal(0, 2.0, len(t))
        values = np.round((load.power_W(t) + noise) / sensor.to_SI)
    for fault in own:
        inside = (t >= fault.begin_s) & (t < fault.end_s)
        if fault.kind == "zero":
            values = np.where(inside, 0.0, values)
        elif fault.kind == "frozen":
            values = np.where(inside, np.round(load.power_W(fault.begin_s) / sensor.to_SI), values)
        elif fault.kind == "unreadable":
            values = np.where(inside, np.nan, values)
    return values


class World:
    """The machine as one start of the run sees it: its clocks, and sensors that show what ``reading`` says."""

    def __init__(self, faults: list[Fault]):
        self.now_s, self.faults, self.index = 0.0, faults, 0
        self.columns: dict[str, np.ndarray] = {}
        limit = {"limit_W": 700.0}
        every = [
            ("gpu_0_energy", "gpu", "0", "energy", {"to_SI": 1e-3, "update_s": 0.1, "notes": limit}),
            ("gpu_0_power", "gpu", "0", "power", {"to_SI": 1e-3, "primary": False, "checks": "gpu_0_energy"}),
            ("gpu_1_power", "gpu", "1", "power", {"to_SI": 1e-3, "notes": limit}),
            ("cpu_0_package", "cpu", "0", "energy", {"to_SI": 1e-6, "update_s": 0.001, "wraps_at": 262143328850.0}),
        ]
        self.sensors = []
        for name, component, device, kind, more in every:
            about = {"provenance": "simulated", "read": lambda name=name: self.read(name), **more}
            self.sensors.append(sensors.Sensor(name, component, device, kind, **about))

    def prepare(self, t: np.ndarray) -> None:
        self.columns = {sensor.id: reading(sensor, t, self.faults) for sensor in self.sensors}

    def read(self, name: str) -> float:
        value = float(self.columns[name][self.index])
        if math.isnan(value):
            raise OSError("the driver does not answer")
        return int(value)

    # What the package asks the module ``time`` for.

    def monotonic_ns(self) -> int:
        return int((T0_S + self.now_s) * 1e9)

    def time_ns(self) -> int:
        set_s = sum(fault.of for fault in self.faults if fault.kind == "clock" and fault.begin_s <= self.now_s)
        return int((WALL_S + self.now_s + set_s) * 1e9)

    def monotonic(self) -> float:
        return T0_S + self.now_s

    sleep, thread_time, process_time = time.sleep, time.thread_time, time.process_time


# ------------------------------------------------------------------------------------------------------------- writing


def sample_until_killed(segment: Segment, memory_file: Path, seed: int) -> None:
    """One start of the run, in a process of its own: idle, training, samples all the while, and its end."""
    drawn, world = np.random.default_rng(seed), World(segment.faults)
    samples.Lines.AGAIN_S = 0.01  # a real pause, and the world's time goes 10,000 times faster
    sensors.time = samples.time = world
    world.now_s = segment.begin_s
    mark = samples.Events(segment.folder, 0).mark
    path = segment.folder / "samples-soak.jsonl"
    sampler = sensors.Sampler(path, world.sensors, PERIOD_S, wall_ns=world.time_ns)
    mark("rank_start", rank=0, host=socket.gethostname(), pid=os.getpid())
    begun, full, number = False, False, 0
    for t in instants_s(segment, drawn):
        world.prepare(t)
        for world.index, at_s in enumerate(t.tolist()):
            world.now_s = at_s
            now = [fault.kind for fault in segment.faults if fault.begin_s <= at_s < fault.end_s]
            if ("full" in now) != full:
                full = fill_disk(sampler, path, "full" in now, drawn)
            if not begun and at_s > segment.begin_s + 10:
                mark("training_start")
                begun = True
            if "stall" not in now:
                sampler.sample()
                number += 1
            if number % sampler.STATUS_EVERY == 0:
                sampler.lines.add({"status": sampler._status()})
        with open(memory_file, "a") as file:
            file.write(f"{world.now_s} {resident_B()}\n")
    if segment.killed:
        if not full:
            sampler.lines.flush(60)  # a busy machine's thread may be milliseconds late, which are minutes of the world
        os.kill(os.getpid(), signal.SIGKILL)
    fill_disk(sampler, path, False, drawn)
    world.now_s = segment.end_s - 10
    mark("training_end", exit_status=0)
    mark("rank_end", status="finished", exit_status=0)
    sampler.lines.flush(60)


def instants_s(segment: Segment, drawn):
    """When a sampler reads, each instant a little off its deadline, in portions."""
    for begin_s in np.arange(segment.begin_s, segment.end_s, CHUNK * PERIOD_S):
        t = begin_s + PERIOD_S * (np.arange(CHUNK) + ((np.arange(CHUNK) * GOLDEN) % 1 - 0.5) / 2)
        t += 0.5 * PERIOD_S + drawn.exponential(1e-3, CHUNK)
        if t[0] < segment.end_s:
            yield t[t < segment.end_s]


def resident_B() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def fill_disk(sampler, path: Path, full: bool, drawn) -> bool:
    """Let no file grow any more, in the middle of a line, as on a full disk; or let them grow again."""
    _, most_B = resource.getrlimit(resource.RLIMIT_FSIZE)
    if full:
        sampler.lines.flush(60)
    limit_B = path.stat().st_size + int(drawn.integers(0, 150)) if full else most_B
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_B, most_B))
    if not full:
        sampler.lines.flush(60)  # in the world's time it has an hour for it
    return full


def soak(folder: Path, days: float, seed: int) -> tuple[list[Segment], Path]:
    """Make the whole run; returns its segments and the file with the memory of the samplers over time."""
    drawn, until_s = random.Random(seed), days * DAY_S
    faults = faults_of(days, drawn)
    run_dir, begin_s, made = folder / "measured" / "soak", 0.0, []
    run_dir.mkdir(parents=True)
    for kill in [*(fault for fault in faults if fault.kind == "kill"), Fault("end", until_s, until_s)]:
        if kill.begin_s < begin_s + 60:
            continue  # it hits while nothing runs
        part = run_dir / f"segment-{len(made) + 1}" if made else run_dir
        part.mkdir(exist_ok=True)
        others = [fault for fault in faults if fault.kind != "kill"]
        segment = Segment(part, begin_s, kill.begin_s, kill.kind == "kill", others)
        arguments = segment, folder / "memory", seed + len(made)
        writer = multiprocessing.get_context("fork").Process(target=sample_until_killed, args=arguments)
        writer.start()
        writer.join()
        assert writer.exitcode == (-signal.SIGKILL if segment.killed else 0)
        path = next(part.glob("samples-*.jsonl"))
        if segment.killed and drawn.random() < 0.5:  # a node was lost, and what its disk had not got
            os.truncate(path, path.stat().st_size - drawn.randrange(1, 400))
        made.append(segment)
        begin_s = kill.begin_s + drawn.uniform(5, 600)
        for fault in faults:
            if fault.kind == "full" and fault.begin_s < begin_s + 20 < fault.end_s + 20:
                begin_s = fault.end_s + 1  # `energynn run` refuses to start on a full disk
    return made, folder / "memory"


# ------------------------------------------------------------------------------------------------------------- judging


def account_of(segment: Segment, folder: Path) -> dict:
    """What would be recorded of one segment alone, as of a run that finished: its energies, flags and reasons."""
    alone = folder / f"alone-{segment.folder.name}"
    alone.mkdir()
    for path in segment.folder.glob("*.jsonl"):
        os.link(path, alone / path.name)
    record = {"status": "finished", "workload": "command", **accounting.account(alone)}
    return record | {"reasons": records.reasons_against(record)}


def window_s(segment: Segment) -> tuple[float, float]:
    """Training of a segment, from its marks and the last line of its samples that is whole."""
    events = samples.read_events(segment.folder)
    marks = {event["event"]: event["t_mono_ns"] / 1e9 - T0_S for event in events}
    read = samples.read_samples(next(segment.folder.glob("samples-*.jsonl")))
    return marks["training_start"], marks.get("training_end", read.t_ns[-1] / 1e9 - T0_S)


def lost_samples(segment: Segment) -> float:
    """Samples that are missing, without those of stalls, and of a full disk if the kill came before there was room."""
    until_s = segment.end_s
    for fault in reversed(segment.faults):
        if segment.killed and fault.kind == "full" and fault.begin_s < until_s <= fault.end_s:
            until_s = fault.begin_s
    wanted_s = until_s - segment.begin_s
    for fault in segment.faults:
        if fault.kind == "stall":
            wanted_s -= max(0.0, min(fault.end_s, until_s) - max(fault.begin_s, segment.begin_s))
    read = samples.read_samples(next(segment.folder.glob("samples-*.jsonl")))
    return wanted_s / PERIOD_S - len(read.t_ns)


def truth_J(begin_s: float, end_s: float) -> dict[str, float]:
    joules = {"gpu": 0.0, "cpu": 0.0}
    for name, load in LOADS.items():
        joules[name[:3]] += float(load.energy_J(end_s) - load.energy_J(begin_s))
    return joules


def errors_of_undoubted(record: dict, begin_s: float, end_s: float) -> list[float]:
    """Errors, in 95 % intervals, of the sensors that count and of which the record says nothing."""
    errors = []
    for sensor in record["sensors"]:
        if sensor["primary"] and not any(sensor["id"] in flag for flag in record["flags"]):
            load = LOADS[sensor["id"][:5]]
            true_J = float(load.energy_J(end_s) - load.energy_J(begin_s))
            errors.append((sensor["energy_J"] - true_J) / sensor["statistical_J"])
    return errors


def judge(folder: Path, days: float, seed: int) -> None:
    """Make the run, and compare what is said of it with the truth."""
    made, memory_file = soak(folder, days, seed)
    sums, windows, valid, undoubted = {"gpu": 0.0, "cpu": 0.0}, [], [], []
    for segment in made:
        begin_s, end_s = window_s(segment)
        windows.append((begin_s, end_s))
        assert lost_samples(segment) < 10, "more is lost than the lines that were cut"
        record, truth = account_of(segment, folder), truth_J(begin_s, end_s)
        sums = {component: sums[component] + joules for component, joules in truth.items()}
        off = wrong(record, truth)
        print(f"{segment.folder.name}: {end_s - begin_s:.0f} s, {record['reasons']}, {record['flags']}, {off}")
        assert not off or record["reasons"], f"{segment.folder.name}: valid and wrong: {off}"
        valid.append(not record["reasons"])
        undoubted += errors_of_undoubted(record, begin_s, end_s)
    held = sum(abs(error) < 1 for error in undoubted)
    print(f"{sum(valid)} of {len(valid)} segments are valid; {held} of {len(undoubted)} undoubted intervals hold")
    assert sum(valid) > len(valid) / 4, "nearly all is doubted"
    assert held > 0.9 * len(undoubted) - 3 and max(map(abs, undoubted)) < 3
    run_dir = made[0].folder
    intent = {"run_id": run_dir.name, "workload": "command", "system": "measured", "machine": {"sockets": 1}}
    write_json(run_dir / "run.json", minimal_record(**intent, devices=1, config={"command": "soak"}))
    record = records.build(run_dir, "finished", "")
    assert records.check(folder / "measured") == []
    assert record["energy_gpu_provenance"] == "simulated" and len(record["segments"]) == len(made)
    assert not wrong(record, sums) or not record["valid"]
    for said, (begin_s, end_s) in zip(record["segments"], windows, strict=True):
        assert said["training_time_s"] == pytest.approx(end_s - begin_s)
    growth_B = max(growth(segment, np.loadtxt(memory_file)) for segment in made)
    print(f"memory grew by at most {growth_B / 1e6:.2f} MB between a fifth of a sampler's time and its end")
    assert growth_B < MOST_GROWTH_B


def growth(segment: Segment, memory: np.ndarray) -> float:
    """By how many bytes the memory of a sampler grew between a fifth of its time and its end."""
    fifth_s = segment.begin_s + (segment.end_s - segment.begin_s) / 5
    later_B = memory[(memory[:, 0] >= fifth_s) & (memory[:, 0] <= segment.end_s), 1]
    return later_B[-1] - later_B[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_day_with_faults_is_right_or_says_that_it_is_not(tmp_path):
    judge(tmp_path, 1.0, seed=0)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_week_with_faults_is_right_or_says_that_it_is_not(tmp_path):
    judge(tmp_path, 7.0, seed=1)
