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
from energynn.measure.perun_adapter import energy_of_readings, read_guarded
from energynn.measure.samples import Samples, host_of_rank, read_events, read_hosts, segments

# What perun's method adds to our energy of the training.
AROUND_TRAINING = "before and after the training"
START_LAG = "start lag"
END = "end"
ZEROS = "failed readings taken as 0"
COUNTER_AS_POWER = "counter turned into power and integrated"
POWER_FOR_COUNTER = "power at perun's period instead of the counter"
UNUSED = "GPUs that the run does not use"
CAUSES = (AROUND_TRAINING, START_LAG, END, ZEROS, COUNTER_AS_POWER, POWER_FOR_COUNTER, UNUSED)


def against_perun(run_dir: Path) -> list[dict]:
    """For each component that perun read: ``ours_J``, ``perun_J``, and causes whose joules add up to the difference.

    perun_J is that of perun's file. Where the file was lost, ``perun_from`` says so, and perun_J is computed from the
    readings that perun took, as our samples file noted them.
    """
    compared: dict[str, dict] = {}
    for folder in segments(run_dir):
        reported = _reported_by_perun(folder)
        for component, causes in _causes(folder).items():
            empty = {"component": component, "ours_J": 0.0, "perun_J": 0.0, "perun_from": "perun's file", "causes": {}}
            entry = compared.setdefault(component, empty)
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
    return list(compared.values())


def _reported_by_perun(folder: Path) -> dict:
    """Energies in the perun files of one segment."""
    reported: dict = {}
    for path in sorted(folder.glob("perun/*.hdf5")):
        with contextlib.suppress(ValueError):  # cut off while perun wrote it
            reported |= read_guarded(path)
    return reported


def _causes(folder: Path) -> dict[str, dict[str, float]]:
    """Component -> our energy of the training, and what each difference of perun's method adds to it, in J."""
    events, hosts = read_events(folder), read_hosts(folder)
    leave_out_unused(events, hosts)
    where = host_of_rank(events)
    result: dict[str, dict[str, float]] = {}
    for samples in hosts:
        marks: dict[str, list[int]] = {}
        for event in events:
            if where.get(event["rank"]) == samples.host:
                marks.setdefault(event["event"], []).append(event["t_mono_ns"])
        if "training_start" in marks and "training_end" in marks and len(samples.perun) > 1:
            _add_causes_of_host(result, samples, marks)
    return {component: result[component] for component in COMPONENTS if component in result}


def _add_causes_of_host(result: dict[str, dict[str, float]], samples: Samples, marks: dict[str, list[int]]) -> None:
    """Add what the sensors that perun read on one host contribute; ``marks``: event -> when its ranks wrote it, ns."""
    training = min(marks["training_start"]), max(marks["training_end"])
    # perun's application begins when the sampler is ready, which is at our first sample.
    application = int(samples.t_ns[0]), max(max(times) for times in marks.values())
    times_ns = np.array([line["t"] for line in samples.perun])
    curves = {curve.sensor["id"]: curve for curve in energy.curves(samples)}
    for name in samples.perun[0]["perun"]:
        curve, read = _curve_of(name.removeprefix(f"{samples.host}_"), curves)
        values = np.array([float(line["perun"].get(name, 0)) for line in samples.perun])
        if curve is None and not re.search(r"CUDA:\d+_POWER$", name):
            continue
        component = curve.sensor["component"] if curve else "gpu"
        sums = result.setdefault(component, dict.fromkeys(("ours_J", *CAUSES), 0.0))
        if curve is None:  # a GPU that we have not even sampled
            sums[UNUSED] += energy_of_readings({"kind": "power", "to_SI": 1e-3}, times_ns, values)
        elif not curve.sensor.get("used", True):
            sums[UNUSED] += energy_of_readings(read.sensor, times_ns, values)
        else:
            for cause, joules in _split(curve, read, training, application, times_ns, values).items():
                sums[cause] += joules


def _curve_of(sensor_id: str, curves: dict[str, Curve]) -> tuple[Curve | None, Curve | None]:
    """Our primary curve of the device that a sensor of perun reads, and the curve of the very quantity it reads."""
    if sensor_id.startswith("CUDA:") and sensor_id.endswith("_POWER"):
        number = sensor_id.removeprefix("CUDA:").removesuffix("_POWER")
        read = curves.get(f"gpu_{number}_power")
        return curves.get(f"gpu_{number}_energy", read), read
    own = curves.get(sensor_id)
    if own and (own.sensor["primary"] or "used" in own.sensor):
        return own, own
    return None, None


def _split(
    curve: Curve,
    read: Curve,
    training: tuple[int, int],
    application: tuple[int, int],
    times_ns: np.ndarray,
    values: np.ndarray,
) -> dict[str, float]:
    """Our energy of the training, and each difference of perun's method, in J; windows in ns, values as perun read."""

    def energy_between(start_ns: int, end_ns: int) -> float:
        """Energy of a window, negative where its end comes before its start."""
        return float(np.diff(curve.at((start_ns, end_ns)))[0])

    first_ns, last_ns = int(times_ns[0]), int(times_ns[-1])
    good = values > 0
    by_perun_J = energy_of_readings(read.sensor, times_ns, values)
    without_zeros_J = 0.0
    if good.sum() > 1:
        without_zeros_J = energy_of_readings(read.sensor, times_ns[good], values[good])
    method = POWER_FOR_COUNTER if read.sensor["kind"] == "power" else COUNTER_AS_POWER
    return {
        "ours_J": energy_between(*training),
        AROUND_TRAINING: energy_between(*application) - energy_between(*training),
        START_LAG: energy_between(first_ns, application[0]),
        END: energy_between(application[1], last_ns),
        ZEROS: by_perun_J - without_zeros_J,
        method: without_zeros_J - energy_between(first_ns, last_ns),
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
