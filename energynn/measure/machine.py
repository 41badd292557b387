"""The machine that runs are measured on, and the file runs/<system>/system.toml that describes it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import re
import subprocess
from pathlib import Path

from energynn import processes
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
    """Return hostname, CPU, cores, sockets, memory, GPUs, kernel and boot of this host."""
    return describe_host() | {"gpus": gpus()}


def describe_host() -> dict:
    """Return the same without its GPUs."""
    return {
        "hostname": platform.node(),
        "cpu": cpu_name(),
        "cores": len(
            os.sched_getaffinity(0)
        ),  # that this process may use, which can be fewer than the machine has
        "sockets": len(set(re.findall(r"physical id\s*:\s*(\d+)", _cpu_info()))) or 1,
        "memory_B": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.platform(),
        "boot_id": processes.boot_id(),
    }


def cpu_name() -> str:
    """Return the model of the processor, as the kernel names it."""
    model = re.search(r"model name\s*:\s*(.+)", _cpu_info())
    return model[1].strip() if model else platform.processor() or platform.machine()


def _cpu_info() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def facts_of_run(described: dict, on_gpu: bool) -> dict:
    """What run.json tells of the machine and its software; ``described`` as ``describe_machine`` gives it."""
    gpus, job = described["gpus"], batch_job()
    of_job = {"job": job} if job else {}
    return of_job | {
        "boot_id": described["boot_id"],
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
    """List number, name, driver and power limit (None if unknown) of the GPUs of this job.

    ``is_split`` stands with one that is split into parts (MIG). Empty without NVML.
    """
    try:
        pynvml, notes = sensors.list_gpus()
    except (
        Exception
    ):  # no library, no driver, no permission: this host has no GPU that we could use
        return []
    described = []
    uuids = [gpu.get("uuid", "") for gpu in notes]
    for index in sensors.visible_devices(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))[0]:
        gpu = {
            "index": index,
            "name": notes[index].get("name", "unknown GPU"),
            "driver": notes[index].get("driver", ""),
            "power_limit_W": notes[index].get("limit_W"),
        }
        with contextlib.suppress(Exception):  # a GPU without such a mode raises
            if pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByIndex(index))[0]:
                gpu["is_split"] = True
        described.append(gpu)
    return described


def fault_of_split(gpu: dict) -> str:
    """Say what is wrong with a GPU as ``gpus`` describes it where it is split; "" elsewhere."""
    if not gpu.get("is_split"):
        return ""
    remedy = f"`sudo nvidia-smi -i {gpu['index']} -mig 0` makes it whole again"
    return f"GPU {gpu['index']} is split into parts (MIG), which have no energy each; {remedy}"


def pin_to_gpu(uuid: str) -> None:
    """Keep this process and those that it starts on the cores beside its GPU, as NVML tells them; else as it is."""
    with contextlib.suppress(
        Exception
    ):  # no NVML, or no such facts; another NUMA node is slower, no fault
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(
            uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        )
        words = pynvml.nvmlDeviceGetCpuAffinity(handle, math.ceil((os.cpu_count() or 1) / 64))
        beside = {core for core in range(64 * len(words)) if words[core // 64] >> core % 64 & 1}
        if usable := beside & os.sched_getaffinity(0):
            os.sched_setaffinity(0, usable)


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


def load(runs_dir: Path, system: str, described: dict) -> dict:
    """The description of a system; if there is none yet, this machine's own, as ``describe_machine`` gives it.

    Raises ValueError where the file cannot be read.
    """
    path = runs_dir / system / "system.toml"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_toml(system, described))
    try:
        values = toml_table(path)
        for name in ("idle_W_per_core", "full_W_per_core"):
            if not 0 <= float(values["cpu_model"][name]) < 10_000:
                raise ValueError(f"{name} must be 0 to 10,000 W, got {values['cpu_model'][name]!r}")
        for name, value in thresholds_of(values).get("thresholds", {}).items():
            if not 0 <= value <= max(1e4, THRESHOLDS[name]):
                raise ValueError(f"{name} must be 0 to 10,000, got {value!r}")
        return values
    except Exception as error:
        raise ValueError(f"{path}: cannot be read ({error}); mend or delete it") from error


def thresholds_of(system: dict) -> dict:
    """Return what run.json says of the tests of sensors: nothing, or a system's own thresholds."""
    return {"thresholds": system["thresholds"]} if "thresholds" in system else {}


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
