"""How long building and checking many records, and long ones, takes: `python -m tests.bench_records 10000 320`.

The first number is one of records to check, copies of those in runs/large-batch under other repeats; the second of
host-hours of one run: 12 sensors at 25 Hz, four GPUs and two sockets a host, a host for each hour. Everything is made
in a temporary folder: 250 kB a record, 16 MB a host-hour. Times are those of a clock, and the processor's of all
processes.
"""

import json
import os
import resource
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from energynn import config, files, records
from energynn.files import REPOSITORY
from energynn.processes import on_all_cores

HOUR_S, RATE_Hz, PERIOD_S, MARGIN_S = 3600, 25, 0.04, 2
T0_NS = 5_000_000_000_000
GPUS, READING_us = 4, 850
IDLE_W, SWING_W = 80.0, 40.0


def copy_with_another_repeat(target: Path, source_and_repeat: tuple[Path, int]) -> None:
    """Copy a run's raw files as those of another repeat, and derive its record."""
    source, repeat = source_and_repeat
    intent = json.loads((source / "run.json").read_text())
    intent["config"]["repeat"] = repeat
    intent["config_digest"] = config.digest(intent["config"])
    (name,) = config.names_of_run(intent["config"], intent["data_digest"])
    intent["run_id"] = name
    folder = target / intent["system"] / name
    shutil.copytree(source, folder)
    files.write_json(folder / "run.json", intent)
    record = json.loads((source / "record.json").read_text())
    records.read_guarded = records.read_hdf5  # perun's files are whole
    records.build(folder, record["status"], record["status_reason"], record["ended_at"])


def make_records(target: Path, number: int) -> None:
    sources = sorted(path.parent for path in (REPOSITORY / "runs" / "large-batch").glob("*/record.json"))
    copies = [(sources[i % len(sources)], i // len(sources)) for i in range(number)]
    on_all_cores(partial(copy_with_another_repeat, target), copies, at_once=20)


def sensor(name: str, component: str, kind: str, to_SI: float) -> dict:
    return {
        "id": name,
        "component": component,
        "device": name.split("_")[1],
        "kind": kind,
        "provenance": "simulated",
        "to_SI": to_SI,
        "wraps_at": 2.6e11 if component != "gpu" else None,
        "primary": kind == "energy",
        "checks": name.replace("power", "energy") if kind == "power" else None,
        "model": None,
        "notes": {},
    }


def sensors_of_a_host() -> list[dict]:
    gpus = [sensor(f"gpu_{i}_{kind}", "gpu", kind, 1e-3) for i in range(GPUS) for kind in ("energy", "power")]
    sockets = [sensor(f"{part}_{i}", part, "energy", 1e-6) for part in ("cpu", "ram") for i in range(2)]
    return gpus + sockets


def lines_of_an_hour() -> str:
    """What every host reads: power that varies, and counters that follow it."""
    times_s = np.arange(-MARGIN_S, HOUR_S + MARGIN_S, PERIOD_S)
    values = []
    for place, about in enumerate(sensors_of_a_host()):
        power_W = (
            IDLE_W + SWING_W * np.sin(times_s / 7 + place) + np.random.default_rng(place).normal(0, 2, len(times_s))
        )
        joules = 100_000 + np.concatenate(([0.0], np.cumsum((power_W[1:] + power_W[:-1]) / 2 * PERIOD_S)))
        values.append(((power_W if about["kind"] == "power" else joules) / about["to_SI"]).astype(np.int64))
    clocks_ns = T0_NS + (times_s * 1e9).astype(np.int64)
    columns = zip(clocks_ns.tolist(), np.stack(values, axis=1).tolist(), strict=True)
    return "".join(
        json.dumps({"t": t, "w": t - T0_NS + 10**18, "d": READING_us, "v": readings}, separators=(",", ":")) + "\n"
        for t, readings in columns
    )


def make_long_run(target: Path, hosts: int) -> Path:
    """The raw files of a run of an hour on many hosts."""
    from tests.conftest import write_perun_hdf5  # imports pytest, which processes that check records do without

    (source, *_) = sorted((REPOSITORY / "runs" / "large-batch").glob("*/run.json"))
    intent = json.loads(source.read_text())
    devices = GPUS * hosts
    batch = intent["config"]["local_batch_size"]
    intent["devices"] = devices
    intent["config"] |= {"devices": devices, "global_batch_size": batch * devices, "device": "cuda"}
    intent["config"] |= {"sampling_period_s": PERIOD_S}
    intent["config_digest"] = config.digest(intent["config"])
    (intent["run_id"],) = config.names_of_run(intent["config"], intent["data_digest"])
    intent |= {"device_kind": "gpu", "device_name": "imagined"}
    folder = target / intent["system"] / intent["run_id"]
    folder.mkdir(parents=True)
    files.write_json(folder / "run.json", intent)
    text = lines_of_an_hour()
    header = {"header": "energynn-samples/1", "period_s": PERIOD_S, "sensors": sensors_of_a_host(), "problems": []}
    for host in range(hosts):
        first = json.dumps(header | {"host": f"host{host}"}) + "\n"
        (folder / f"samples-host{host}.jsonl").write_text(first + text)
    for rank in range(devices):
        write_events(folder, rank, devices, batch)
    write_perun_hdf5(folder / "perun" / "energynn.hdf5", IDLE_W, HOUR_S)
    return folder


def write_events(folder: Path, rank: int, devices: int, batch: int) -> None:
    counts = {"samples_trained": 10 * batch * devices, "samples_evaluated": 50, "optimizer_steps": 10}
    about = {
        "rank": rank,
        "world_size": devices,
        "host": f"host{rank // GPUS}",
        "pid": 1,
        "device": f"cuda:{rank % GPUS}",
    }
    events = [
        (-1.0, "rank_start", about),
        (0.0, "training_start", {"dataset_samples": 10 * batch * devices}),
        (HOUR_S, "training_end", counts | {"forward_backward_passes": 10, "metrics": {"top1_error": 0.25}}),
        (HOUR_S + 1.0, "rank_end", {"status": "finished"}),
    ]
    lines = [
        {"t_mono_ns": T0_NS + int(t_s * 1e9), "t_wall_ns": int(t_s * 1e9) + 10**18, "event": name} | fields
        for t_s, name, fields in events
    ]
    (folder / f"events-rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def processor_s() -> float:
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


def timed(words: str, function, number: int):
    """Call the function; print how long it took, in all and for each."""
    begun, begun_processor = time.perf_counter(), processor_s()
    made = function()
    took, processor = time.perf_counter() - begun, processor_s() - begun_processor
    largest_MB = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000
    each = f"{1000 * took / number:.2f} ms, {1000 * processor / number:.2f} ms of processor's time"
    print(
        f"{words}: {took:.1f} s, {processor:.1f} s of processor's time; each {each}; largest {largest_MB:.0f} MB",
        flush=True,
    )
    return made


def main() -> None:
    if len(sys.argv) != 3 or not all(word.isdecimal() for word in sys.argv[1:]):
        raise SystemExit("tests.bench_records: give two numbers, of records and of host-hours, such as 10000 320")
    number, hosts = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        if hosts:
            run_dir = make_long_run(Path(folder) / "long", hosts)
            size_MB = sum(path.stat().st_size for path in run_dir.glob("samples-*")) / 1e6
            print(f"{hosts} host-hours, {size_MB:.0f} MB of samples", flush=True)
            build = partial(records.build, run_dir, "finished", "")
            record = timed(f"building the record of {hosts} host-hours", build, hosts)
            print(f"  valid: {record['valid']} {record['invalid_reasons']}")
            faults = timed("checking it", partial(records.check, Path(folder) / "long"), hosts)
            print(f"  {len(faults)} faults {faults[:3]}")
            shutil.rmtree(run_dir)
        if number:
            timed(f"making {number} records", partial(make_records, Path(folder) / "many", number), number)
            os.sync()
            check = partial(records.check_and_count, Path(folder) / "many")
            faults, counts = timed(f"checking {number} records", check, number)
            print(f"  {len(faults)} faults {faults[:3]}, {dict(counts)}")


if __name__ == "__main__":
    main()
