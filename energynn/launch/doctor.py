"""`energynn doctor`: what a run on this machine would measure, how well, and what to do about
the rest.
"""

import importlib.metadata
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from energynn.host import launchers
from energynn.host.files import INSTALLATION
from energynn.host.progress import entry_text
from energynn.measure import energy, machine, sensors
from energynn.measure.perun_adapter import PERUN_VERSION
from energynn.measure.sampler_process import find_sensors
from energynn.measure.samples import read_pieces
from energynn.measure.stream import read_sensor_streams

# All is measured; something is not; no run is possible. The exit status is the place of the worst.
FINDING_STATES = GOOD, WEAK, BAD = "good", "weak", "bad"
SAMPLING_TIME_S = 3.0  # how long all sensors are sampled
SAMPLING_PERIOD_S = 0.04


class Finding(Struct):
    """One thing that was looked at: its state, what was found, and the command that mends it."""

    subject: str
    state: str
    found: str
    remedy: str = ""


def examine_machine() -> list[Finding]:
    """Look at sensors, GPUs, packages and MPI; takes a few seconds."""
    findings = _examine_sensors()
    if BAD not in [finding.state for finding in findings]:
        # a silent driver would not answer here
        findings += _examine_gpus()
    return [
        *findings,
        _examine_package("torch"),
        _examine_package("perun", PERUN_VERSION),
        _examine_mpi(),
    ]


def exit_status(findings: list[Finding]) -> int:
    return max(FINDING_STATES.index(finding.state) for finding in findings)


def findings_text(findings: list[Finding]) -> str:
    """Write the findings for a person, in lines of 79 columns."""
    lines = []
    for finding in findings:
        words = " -> ".join(filter(None, [finding.found, finding.remedy]))
        lines.append(entry_text(finding.state.upper(), finding.subject, words))
    return "\n".join(lines)


def _examine_sensors() -> list[Finding]:
    """Sample this host for a moment: which sensors would count, and what speaks against them."""
    path = machine.system_file()
    system = machine.load_system(path)
    inventory = find_sensors(system, os.environ.get("CUDA_VISIBLE_DEVICES"))
    with tempfile.TemporaryDirectory() as folder:
        sampler = sensors.Sampler(
            Path(folder) / "samples-doctor.jsonl", inventory, SAMPLING_PERIOD_S
        )
        try:
            sampler.start()
        except TimeoutError as error:
            return [Finding("sensor", BAD, *str(error).split("; "))]
        time.sleep(SAMPLING_TIME_S)
        sampler.stop()
        samples = next(read_pieces(sampler.path))
        window_s = samples.t_ns[[0, -1]] / 1e9
        streams, _ = read_sensor_streams(
            sampler.path, samples.header, {"look": window_s}
        )
    limits = energy.THRESHOLDS | system["thresholds"]
    evidence = [stream.evidence["look"] for stream in streams]
    doubts = energy.judge_sensors(evidence, inventory.unaccounted, limits)
    reasons = [f"no record would be valid: {doubt}" for doubt in doubts]
    reasons += machine.system_file_remedy(doubts, path) + inventory.problems
    findings = [_finding_of_sensor(sensor) for sensor in inventory.sensors]
    return findings + [Finding("sensor", WEAK, reason) for reason in reasons]


def _finding_of_sensor(sensor: sensors.Sensor) -> Finding:
    if sensor.kind == "busy":
        return Finding(
            "CPU",
            WEAK,
            "no counter that works; its energy will be estimated from busy time",
            sensor.notes["measured_by"],
        )
    use = "counts" if sensor.primary else "cross-check"
    facts = [f"{sensor.id}: {sensor.kind}", sensor.provenance, use]
    if sensor.kind == "power" and "power" in sensor.notes:
        facts.append(sensor.notes["power"])
    state = GOOD if sensor.provenance == "measured" else WEAK
    return Finding(sensor.component.upper(), state, ", ".join(facts))


def _examine_gpus() -> list[Finding]:
    findings = []
    gpus = machine.list_gpus()
    of_split = WEAK if any("fault" not in gpu for gpu in gpus) else BAD
    for gpu in gpus:
        fault = gpu.get("fault", "")
        said = f"{gpu['index']}: {gpu['name']}, power limit {gpu.get('limit_W')} W"
        findings.append(Finding("GPU", of_split if fault else GOOD, said, fault))
    said = "none to be seen; one CPU core will stand for one device"
    return findings or [Finding("GPU", GOOD, said)]


def _examine_package(package: str, needed: str = "") -> Finding:
    version = "is not installed"
    with suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version(package)
        if version.startswith(needed):
            return Finding(package, GOOD, version)
    return Finding(package, BAD, version, f"to train, {INSTALLATION}")


def _examine_mpi() -> Finding:
    try:
        return Finding("MPI", GOOD, launchers.find_mpirun())
    except ValueError as error:
        return Finding("MPI", BAD, *str(error).split("; ", 1))
