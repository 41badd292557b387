"""Our energies against what perun's own method gives for the same run, and where each joule of the difference is."""

from __future__ import annotations

import contextlib
import datetime
import re
from pathlib import Path

import numpy as np

from energynn.measure import energy
from energynn.measure.accounting import leave_out_unused
from energynn.measure.energy import COMPONENTS, Curve
from energynn.measure.perun_adapter import energy_of_readings, read_hdf5
from energynn.measure.samples import read_events, read_hosts, segments


def against_perun(run_dir: Path) -> list[dict]:
    """For each component that perun read: ``ours_J``, ``perun_J``, and causes whose joules add up to the difference.

    perun_J is that of perun's file; where that was lost, ``perun_from`` says so, and it is computed from the readings
    that perun took, as our samples file noted them.
    """
    found: dict[str, dict] = {}
    for folder in segments(run_dir):
        reported: dict = {}
        for path in sorted(folder.glob("perun/*.hdf5")):
            with contextlib.suppress(ValueError):  # cut off while perun wrote it
                reported |= read_hdf5(path)
        for component, causes in _causes(folder).items():
            entry = found.setdefault(component, {"component": component, "ours_J": 0.0, "perun_J": 0.0,
                                                 "perun_from": "perun's file", "causes": {}})  # fmt: skip
            ours_J = causes.pop("ours_J")
            by_readings_J = ours_J + sum(causes.values())
            perun_J = reported.get(f"energy_perun_{component}_J")
            if perun_J is None:
                perun_J, entry["perun_from"] = by_readings_J, "the readings that perun took; its file was lost"
            causes["rounding in perun's file"] = perun_J - by_readings_J
            entry["ours_J"] += ours_J
            entry["perun_J"] += perun_J
            for cause, joules in causes.items():
                entry["causes"][cause] = entry["causes"].get(cause, 0.0) + joules
    return list(found.values())


def _causes(folder: Path) -> dict[str, dict[str, float]]:
    """Component -> our energy of the training, and what each difference of perun's method adds to it, in J."""
    events = read_events(folder)
    host_of_rank = {event["rank"]: event["host"] for event in events if event["event"] == "rank_start"}
    result: dict[str, dict[str, float]] = {}
    hosts = read_hosts(folder)
    leave_out_unused(events, hosts)
    for samples in hosts:
        marks = {}
        for event in events:
            if host_of_rank.get(event["rank"]) == samples.host:
                marks.setdefault(event["event"], []).append(event["t_mono_ns"])
        notes = [line for line in samples.perun]
        if "training_start" not in marks or "training_end" not in marks or len(notes) < 2:
            continue
        training = min(marks["training_start"]), max(marks["training_end"])
        # perun's application begins when the sampler is ready, which is at our first sample.
        whole = int(samples.t_ns[0]), max(max(times) for times in marks.values())
        times_ns = np.array([line["t"] for line in notes])
        curves = {curve.sensor["id"]: curve for curve in energy.curves(samples)}
        for name in notes[0]["perun"]:
            curve, read = _curve_of(name.removeprefix(f"{samples.host}_"), curves)
            values = np.array([float(line["perun"].get(name, 0)) for line in notes])
            if curve is None and re.search(r"CUDA:\d+_POWER$", name):  # we have not even sampled it
                into = result.setdefault("gpu", dict.fromkeys(("ours_J", *CAUSES), 0.0))
                into[UNUSED] += energy_of_readings({"kind": "power", "to_SI": 1e-3}, times_ns, values)
            if curve is None:
                continue
            into = result.setdefault(curve.sensor["component"], dict.fromkeys(("ours_J", *CAUSES), 0.0))
            if not curve.sensor.get("used", True):
                into[UNUSED] += energy_of_readings(read.sensor, times_ns, values)
                continue
            joules = _split(curve, read, training, whole, times_ns, values)
            for cause, value in joules.items():
                into[cause] += value
    return {component: result[component] for component in COMPONENTS if component in result}


UNUSED = "GPUs that the run does not use"
CAUSES = (
    "before and after the training", "start lag", "end", "failed readings taken as 0",
    "counter turned into power and integrated", "power at perun's period instead of the counter", UNUSED,
)  # fmt: skip


def _curve_of(sensor_id: str, curves: dict[str, Curve]) -> tuple[Curve | None, Curve | None]:
    """Our primary curve of the device that a sensor of perun reads, and the curve of the very quantity it reads."""
    if sensor_id.startswith("CUDA:") and sensor_id.endswith("_POWER"):
        number = sensor_id.removeprefix("CUDA:").removesuffix("_POWER")
        read = curves.get(f"gpu_{number}_power")
        return curves.get(f"gpu_{number}_energy", read), read
    own = curves.get(sensor_id)
    return (own, own) if own and (own.sensor["primary"] or "used" in own.sensor) else (None, None)


def _split(curve: Curve, read: Curve, training, whole, times_ns: np.ndarray, values: np.ndarray) -> dict[str, float]:
    first, last = int(times_ns[0]), int(times_ns[-1])
    between = lambda start, end: curve.between(start, end)[0]  # noqa: E731
    sensor = read.sensor
    good = values > 0
    by_perun_J = energy_of_readings(sensor, times_ns, values)
    without_zeros_J = energy_of_readings(sensor, times_ns[good], values[good]) if good.sum() > 1 else 0.0
    method = CAUSES[5] if sensor["kind"] == "power" else CAUSES[4]
    return {
        "ours_J": between(*training),
        CAUSES[0]: between(*whole) - between(*training),
        CAUSES[1]: between(first, whole[0]) if first < whole[0] else -between(whole[0], first),
        CAUSES[2]: between(whole[1], last) if last > whole[1] else -between(last, whole[1]),
        CAUSES[3]: by_perun_J - without_zeros_J,
        method: without_zeros_J - between(first, last),
    }


def footprint(energy_J: float, carbon: float | None, price: float | None, source: str | None, date: str | None) -> dict:
    """CO2 equivalents in g and cost of an energy, by a factor per kWh whose source and date are given.

    Raises ValueError if a factor comes without them: factors differ by grid and year, and drift.
    """
    if carbon is None and price is None:
        return {}
    if not source or not date:
        raise ValueError("source, date: say where the factor comes from and of which day it is (--source, --date)")
    try:
        datetime.date.fromisoformat(date)
    except ValueError as error:
        raise ValueError(f"date: must be YYYY-MM-DD, got {date!r}") from error
    kWh = energy_J / energy.JOULE_PER_KWH
    result: dict = {"factor_source": source, "factor_date": date}
    if carbon is not None:
        result |= {"carbon_g_per_kWh": carbon, "carbon_g": carbon * kWh}
    if price is not None:
        result |= {"price_per_kWh": price, "price": price * kWh}
    return result
