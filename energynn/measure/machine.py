"""The machine that runs are measured on, and the file runs/<system>/system.toml that describes it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from energynn.files import IS_CHECKOUT, REPOSITORY
from energynn.launchers import PYTHON_VARIABLE, python_of_ranks
from energynn.measure import sensors
from energynn.measure.energy import THRESHOLDS
from energynn.reading import toml_table

# Used only where a host has no CPU sensor. The watts are an assumption, not a reading of any machine: 280 W is the
# vendor's thermal design power of the AMD EPYC 9354 (32 cores), the CPU of the paper's H100 nodes; about a third
# of full power at idle is what servers of this kind usually draw. Change them in system.toml for your own machine.
CPU_MODEL = {
    "name": "idle-to-full-per-core",
    "idle_W_per_core": 3.0,
    "full_W_per_core": 8.75,
    "source": "assumption: 280 W / 32 cores at full load (thermal design power, AMD EPYC 9354), about a third at idle",
}
COMMIT = REPOSITORY / "build" / "commit"
PACKAGES = "torch torchvision perun mpi4py mpich openmpi numpy xarray papermill pillow".split()
# As Slurm's variables are called.
JOB_FACTS = (
    "job_id array_job_id array_task_id restart_count cluster_name job_nodelist nnodes ntasks "
    "job_cpus_per_node job_gpus job_partition job_account job_qos"
).split()


def describe_machine() -> dict:
    """Return hostname, CPU, cores, sockets, GPUs and kernel of this host.

    The cores are those that this process may use, which can be fewer than the machine has.
    """
    return {
        "hostname": platform.node(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "sockets": len(set(re.findall(r"physical id\s*:\s*(\d+)", _cpu_info()))) or 1,
        "kernel": platform.platform(),
        "gpus": gpus(),
    }


def cpu_name() -> str:
    """Return the model of the processor, as the kernel names it."""
    model = re.search(r"model name\s*:\s*(.+)", _cpu_info())
    return model[1].strip() if model else platform.processor() or platform.machine()


def _cpu_info() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def facts_of_run(described: dict, on_gpu: bool) -> dict:
    """Tell run.json of the machine, as ``describe_machine`` gives it, its job and its software."""
    gpus = described["gpus"]
    return {
        "job": batch_job(),
        "device_kind": "gpu" if on_gpu else "cpu core",
        "device_name": gpus[0]["name"] if on_gpu and gpus else described["cpu"],
        "versions": versions(),
        "machine": described,
    }


def job_of_process() -> dict:
    """Return what the environment tells of this process's batch job; empty outside of one."""
    names = {name: os.environ.get(f"SLURM_{name.upper()}") for name in JOB_FACTS}
    facts = {name: value for name, value in names.items() if value}
    return {"scheduler": "slurm"} | facts if "job_id" in facts else {}


def batch_job() -> dict:
    """Return what Slurm tells of the job that this process belongs to; empty outside of one.

    ``is_exclusive``: whether no other job may use its nodes; absent where Slurm does not say so.
    """
    facts = job_of_process()
    if not facts:
        return {}
    command = ["scontrol", "show", "job", "-o", facts["job_id"]]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        if sharing := re.search(r"OverSubscribe=(\w+)", done.stdout):
            facts["is_exclusive"] = sharing[1].startswith("NO")
    return facts


def gpus() -> list[dict]:
    """List number, name, UUID, driver and power limit of the GPUs of this job, as far as told.

    ``is_split`` tells whether one is split into parts (MIG). Empty without NVML.
    """
    try:
        _, notes = sensors.list_gpus()
    except Exception:  # no library, no driver, no permission
        return []
    uuids = [gpu.get("uuid", "") for gpu in notes]
    visible, _ = sensors.visible_devices(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return [{"index": index} | notes[index] for index in visible]


def fault_of_split(gpu: dict) -> str:
    """Say what is wrong with a GPU as ``gpus`` describes it where it is split; "" elsewhere."""
    if not gpu.get("is_split"):
        return ""
    remedy = f"`sudo nvidia-smi -i {gpu['index']} -mig 0` makes it whole again"
    return f"GPU {gpu['index']} is split into parts (MIG), which have no energy each; {remedy}"


def pin_to_gpu(uuid: str) -> None:
    """Keep this process and those that it starts on the cores beside its GPU, as NVML knows them.

    Without NVML, or where it does not know them, nothing changes: another NUMA node is slower.
    """
    with contextlib.suppress(Exception):
        pynvml, _ = sensors.list_gpus()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        pynvml.nvmlDeviceSetCpuAffinity(handle)


def versions() -> dict[str, str]:
    """Return versions of Python and of the packages that matter, without importing any of them.

    Of ranks in a container it tells the words that start their Python: its image holds the rest.
    """
    if PYTHON_VARIABLE in os.environ:
        return {"container": " ".join(python_of_ranks())}
    releases = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            releases[package] = importlib.metadata.version(package)
    return releases


def git(*words: str) -> str:
    """What git prints of this checkout; nothing of an installed package, without git, or before the first commit."""
    if not IS_CHECKOUT:
        return ""
    with contextlib.suppress(OSError):
        done = subprocess.run(
            ["git", "-C", str(REPOSITORY), *words], capture_output=True, text=True
        )
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def git_state() -> tuple[str, bool]:
    """Commit of this checkout and whether files differ from it outside runs/ and build/.

    Where git does not say it, the file that `write_commit` made where it does; ("", False) without that, too.
    """
    if commit := git("rev-parse", "HEAD"):
        return commit, bool(git("status", "--porcelain", "--", ".", ":!runs", ":!build"))
    if not COMMIT.is_file():
        return "", False
    commit, _, state = COMMIT.read_text().strip().partition(" ")
    return commit, state == "dirty"


def write_commit() -> None:
    """Write down commit and state of this checkout for a machine that gets its files without git."""
    commit, is_dirty = git_state()
    COMMIT.parent.mkdir(parents=True, exist_ok=True)
    COMMIT.write_text(f"{commit} {'dirty' if is_dirty else 'clean'}\n")


Watts = Annotated[float, Meta(ge=0, lt=10_000)]


class CpuModel(msgspec.Struct):
    """Watts of the estimate for a CPU without a counter."""

    idle_W_per_core: Watts
    full_W_per_core: Watts


class System(msgspec.Struct):
    """What must be right in a system.toml."""

    cpu_model: CpuModel
    thresholds: dict[Literal[tuple(THRESHOLDS)], Annotated[float, Meta(ge=0, le=10_000)]] = {}


def load(runs_dir: Path, system: str, described: dict) -> dict:
    """Return CPU model and thresholds of a system, by its system.toml.

    If there is none yet, this machine, as ``describe_machine`` gives it, gets one. Raises
    ValueError where it cannot be read.
    """
    path = runs_dir / system / "system.toml"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_toml(system, described))
    try:
        values = toml_table(path)
        msgspec.convert(values, System)
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read ({error}); mend or delete it") from error
    return {"cpu_model": values["cpu_model"], "thresholds": values.get("thresholds", {})}


def _toml(system: str, machine: dict) -> str:
    names = ", ".join(gpu["name"] for gpu in machine["gpus"]) or "none"
    return f"""# Described by energynn from the machine itself; edit what you know better.
name = "{system}"
cpu = "{machine["cpu"]}"
cores = {machine["cores"]}
sockets = {machine["sockets"]}
gpus = "{names}"

# Used only where the CPU has no energy sensor; such energy is labelled `estimated` everywhere.
[cpu_model]
name = "{CPU_MODEL["name"]}"
idle_W_per_core = {CPU_MODEL["idle_W_per_core"]}
full_W_per_core = {CPU_MODEL["full_W_per_core"]}
source = "{CPU_MODEL["source"]}"
"""
