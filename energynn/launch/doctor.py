"""`energynn doctor`: what a run on this machine would measure, how well, and what to do about the rest."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from energynn import launchers
from energynn.files import INSTALL, IS_CHECKOUT
from energynn.measure import machine, sensors
from energynn.measure.perun_adapter import PERUN_VERSION
from energynn.measure.perun_backends import backend_sensors

TO_TRAIN = INSTALL if IS_CHECKOUT else f"to train, {INSTALL}; to measure commands, nothing"
GOOD, WEAK, BAD = (
    "good",
    "weak",
    "bad",
)  # weak: something will be estimated or absent; bad: no run is possible
LOOK_S = 2.0  # how long all sensors are sampled
PERIOD_S = 0.05


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: its state, what was found, and the command or step that mends it."""

    subject: str
    state: str
    found: str
    remedy: str = ""


def examine(devices: int = 2, powercap: Path = sensors.POWERCAP) -> list[Finding]:
    """Look at sensors, permissions, GPUs, packages, and an MPI world of so many ranks; takes a few seconds."""
    findings = _sensor_findings(powercap)
    if not any(
        finding.state == BAD for finding in findings
    ):  # a silent driver would not answer here
        findings += _gpu_findings()
    findings += _package_findings()
    findings.append(_mpi_finding(devices))
    return findings


def exit_status(findings: list[Finding]) -> int:
    """0: all is measured; 1: something will be estimated or absent; 2: no run is possible."""
    severity = {GOOD: 0, WEAK: 1, BAD: 2}
    return max((severity[finding.state] for finding in findings), default=0)


def report(findings: list[Finding]) -> str:
    """The findings for a person, one or two lines each."""
    marks = {GOOD: "ok  ", WEAK: "WEAK", BAD: "BAD "}
    lines = []
    for finding in findings:
        name = f"{marks[finding.state]}  {finding.subject:14} "
        lines.append(_filled(name + finding.found, len(name)))
        if finding.remedy:
            lines.append(_filled(f"{'':{len(name)}} -> {finding.remedy}", len(name) + 4))
    return "\n".join(lines)


def _filled(text: str, indent: int) -> str:
    """Lines of 79 columns, all but the first indented."""
    facts = dict(subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return textwrap.fill(text, 79, **facts)


def as_json(findings: list[Finding]) -> dict:
    return {
        "exit_status": exit_status(findings),
        "findings": [asdict(finding) for finding in findings],
    }


def _sensor_findings(powercap: Path) -> list[Finding]:
    """Sample this host for a moment: which sensors would count, and what speaks against them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    inventory = sensors.find(machine.CPU_MODEL, powercap, visible, others=backend_sensors())
    with tempfile.TemporaryDirectory() as folder:
        sampler = sensors.Sampler(Path(folder) / "samples-doctor.jsonl", inventory, PERIOD_S)
        try:
            sampler.start()
        except TimeoutError as error:
            said, _, remedy = str(error).partition("; ")
            return [Finding("sensor", BAD, said, remedy)]
        time.sleep(LOOK_S)
        sampler.stop()
    findings = [_finding_of_sensor(sensor) for sensor in sampler.inventory.sensors]
    for fault in sampler.inventory.unaccounted:
        findings.append(Finding("sensor", WEAK, f"no record would be valid: {fault}"))
    for problem in sampler.inventory.problems:
        findings.append(Finding("sensor", WEAK, problem))
    if not any(sensor.component == "ram" for sensor in sampler.inventory.sensors):
        remedy = "say so where you compare totals"
        findings.append(Finding("RAM", WEAK, "no sensor; its energy will be absent", remedy))
    return findings


def _finding_of_sensor(sensor: sensors.Sensor) -> Finding:
    if sensor.kind == "busy":
        said = "no counter that works; its energy will be estimated from busy time"
        remedy = "none in a virtual machine; elsewhere sudo chmod a+r /sys/class/powercap/*/*"
        return Finding("CPU", WEAK, said, remedy)
    words = [sensor.kind, sensor.provenance, "counts" if sensor.primary else "cross-check"]
    if sensor.update_s:
        words.append(f"changes every {sensor.update_s * 1e3:.0f} ms")
    words += [sensor.notes["power"]] if "power" in sensor.notes else []
    state = GOOD if sensor.provenance == "measured" else WEAK
    return Finding(sensor.component.upper(), state, f"{sensor.id}: {', '.join(words)}")


def _gpu_findings() -> list[Finding]:
    gpus = machine.gpus()
    if not gpus:
        return [Finding("GPU", GOOD, "none to be seen; one CPU core will stand for one device")]
    import pynvml

    findings = []
    for gpu in gpus:
        index = gpu["index"]
        if fault := machine.fault_of_split(gpu):
            findings.append(Finding("GPU", BAD, *fault.split("; ")))
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        try:
            others = len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
        except Exception:  # some drivers refuse to say
            others = 0
        limit = "unknown" if gpu["power_limit_W"] is None else f"{gpu['power_limit_W']:.0f} W"
        said = f"{index}: {gpu['name']}, driver {gpu['driver']}, power limit {limit}"
        if others:
            said += f"; {others} processes use it: their energy counts too"
            findings.append(Finding("GPU", WEAK, said, "end them"))
        else:
            findings.append(Finding("GPU", GOOD, said))
    return findings


def _package_findings() -> list[Finding]:
    findings = []
    for package, wanted in (("torch", "2.7 or newer"), ("perun", PERUN_VERSION)):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(package, BAD, "is not installed", TO_TRAIN))
            continue
        fits = version == PERUN_VERSION if package == "perun" else _release(version) >= (2, 7)
        if fits:
            findings.append(Finding(package, GOOD, version))
        else:
            findings.append(Finding(package, BAD, version, f"install {wanted}: {TO_TRAIN}"))
    return findings


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def _mpi_finding(devices: int) -> Finding:
    """Whether mpirun and mpi4py's library make one world: a mismatch gives many worlds of one rank and no error."""
    try:
        mpirun, flavour = launchers.find_mpi()
    except ValueError as error:
        said, _, remedy = str(error).partition("; ")
        return Finding("MPI", BAD, said, remedy)
    # One write per rank, so that the ranks' lines do not mix.
    program = "import os; from mpi4py import MPI; v = MPI.Get_library_version().split()[0]"
    program += "; os.write(1, f'{MPI.COMM_WORLD.size} {v}\\n'.encode())"
    command = [*launchers.mpi_start(mpirun, flavour, devices), sys.executable, "-c", program]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=launchers.mpi_environment()
        )
    except subprocess.TimeoutExpired:
        return Finding(
            "MPI",
            BAD,
            f"{mpirun} -n {devices} did not end within 60 s",
            "look at your MPI installation",
        )
    lines = done.stdout.split("\n")
    sizes = [line.split()[0] for line in lines if line.strip()]
    if done.returncode or sizes != [str(devices)] * devices:
        said = f"{mpirun} -n {devices} gave worlds of {', '.join(sizes) or 'no'} ranks"
        remedy = (
            "mpi4py and mpirun belong to different MPIs: build mpi4py for the one you start with"
        )
        return Finding("MPI", BAD, said, remedy)
    return Finding("MPI", GOOD, f"{mpirun} ({lines[0].split()[1]}) makes a world of {devices}")
