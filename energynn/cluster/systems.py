"""What the machine is that runs are measured on, and the file runs/<system>/system.toml that describes it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path

from energynn.config import REPOSITORY
from energynn.measure import sensors

# Used only where a host has no CPU sensor. The watts are an assumption, not a reading of any machine: 280 W is the
# vendor's thermal design power of the AMD EPYC 9354 (32 cores), the CPU of the paper's H100 nodes; about a third
# of full power at idle is what servers of this kind usually draw. Change them in system.toml for your own machine.
CPU_MODEL = {
    "name": "idle-to-full-per-core",
    "idle_W_per_core": 3.0,
    "full_W_per_core": 8.75,
    "source": "assumption: 280 W / 32 cores at full load (thermal design power, AMD EPYC 9354), about a third at idle",
}
PACKAGES = ("torch", "torchvision", "perun", "mpi4py", "mpich", "openmpi", "numpy", "xarray", "papermill", "pillow")


# What may stand in a batch script without quotes: an option, a module, a folder that may begin with a variable.
OPTION = re.compile(r"(?!.*\.\.)--[a-z][a-z-]*(=[\w.,:@/+*()&|-]+)?|-[a-zA-Z][\w.,:@/+-]*")
MODULE = re.compile(r"(?!.*\.\.)\w[\w.+/-]*")
FOLDER = re.compile(r"(\$[A-Z_]+|/[\w+-][\w.+-]*)(/[\w+-][\w.+-]*)*")


@dataclass(frozen=True, kw_only=True)
class Site:
    """A system that runs can be submitted to: one file systems/NAME.toml, whose comments explain the fields."""

    name: str
    file: str
    scheduler: str
    gpu: str = "A100"
    devices_per_node: int
    sockets_per_node: int = 1
    max_hours: float = 24.0
    default_hours: float = 1.0  # of a run for which nothing published tells how long it takes
    ask_above_gpu_hours: float = 100.0
    sbatch: list[str] = field(default_factory=list)
    srun: list[str] | None = None
    modules: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    stage_to: str = ""


def site(name: str) -> Site:
    """Read systems/NAME.toml, or a file of one's own (.toml). Raises ValueError with the remedy for what is wrong.

    Nothing in the file can become a command: options, modules and folders must have their form, values are quoted.
    """
    folder = REPOSITORY / "systems"
    path = Path(name) if name.endswith(".toml") else folder / f"{name}.toml"
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", path.stem) or not os.path.isfile(path):
        known = ", ".join(sorted(path.stem for path in folder.glob("*.toml")))
        raise ValueError(f"system: {name!r} is not known; choose one of {known}, or write a file of your own (.toml)")
    try:
        values = tomllib.loads(path.read_text())
        types = {each.name: each.type for each in fields(Site) if each.name not in ("name", "file")}
        for key, value in values.items():
            if key not in types:
                raise ValueError(f"{key}: not known; known are {', '.join(types)}")
            kind = {"str": str, "int": int, "float": (int, float), "dict[str, str]": dict}.get(types[key], list)
            inside = value.values() if kind is dict else value if kind is list else ()
            if not isinstance(value, kind) or isinstance(value, bool) or any(type(one) is not str for one in inside):
                raise ValueError(f"{key}: must be of type {types[key]}, got {value!r}")
            if isinstance(value, int | float) and not 0 < value < 1e6:
                raise ValueError(f"{key}: must be more than 0, got {value}")
        forms = [("sbatch", OPTION, values.get("sbatch", [])), ("srun", OPTION, values.get("srun", [])),
                 ("modules", MODULE, values.get("modules", [])), ("stage_to", FOLDER, [values.get("stage_to") or "/t"]),
                 ("gpu", re.compile(r"[\w -]+"), [values.get("gpu", "A100")]),
                 ("environment", re.compile("[A-Za-z_][A-Za-z0-9_]*"), values.get("environment", {}))]  # fmt: skip
        for key, form, given in forms:
            for one in given:
                if not form.fullmatch(one):
                    raise ValueError(f"{key}: {one!r} is not of the form that a batch script can hold")
        if values.get("scheduler") not in ("slurm", "local"):
            raise ValueError(f"scheduler: must be slurm or local, got {values.get('scheduler')!r}")
        return Site(name=path.stem, file=str(path.resolve()), **values)
    except (OSError, tomllib.TOMLDecodeError, TypeError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path}: {error}; mend it") from error


def known() -> str:
    """The systems that there are, each with the first line of its file."""
    files = sorted((REPOSITORY / "systems").glob("*.toml"))
    return "\n".join(f"{path.stem:15} {path.read_text().splitlines()[0].lstrip('# ')}" for path in files)


def describe_machine() -> dict:
    """Hostname, CPU, cores, sockets, memory, GPUs, kernel and boot of this host."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*:\s*(.+)", info)
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {
        "hostname": platform.node(),
        "cpu": model[1].strip() if model else platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "sockets": len(set(re.findall(r"physical id\s*:\s*(\d+)", info))) or 1,
        "memory_B": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus(),
        "kernel": platform.platform(),
        "boot_id": boot.read_text().strip() if boot.exists() else "",
    }


def usable_cores() -> int:
    """Cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> list[dict]:
    """Number, name, driver and power limit of the NVIDIA GPUs that this job may use; empty without a working NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        names = [sensors.names_of_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        driver = sensors.text(pynvml.nvmlSystemGetDriverVersion())
        found = []
        for index in sensors.visible_devices(names, os.environ.get("CUDA_VISIBLE_DEVICES"))[0]:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            limit_W = pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1e3
            name = sensors.text(pynvml.nvmlDeviceGetName(handle))
            found.append({"index": index, "name": name, "driver": driver, "power_limit_W": limit_W})
        return found
    except Exception:  # no library, no driver, no permission: this host has no GPU that we could use
        return []


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter to a run, without importing any of them."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git(*words: str) -> str:
    """What git prints of this checkout; nothing outside of a repository, without git, or before the first commit."""
    try:
        done = subprocess.run(["git", "-C", str(REPOSITORY), *words], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def git_state() -> tuple[str, bool]:
    """Commit of this checkout and whether files differ from it outside runs/ and build/; ("", False) without git."""
    return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--", ".", ":!runs", ":!build"))


def load(runs_dir: Path, system: str) -> dict:
    """The description of a system; written for this machine if there is none yet.

    Raises ValueError where the file cannot be read or the folder cannot be written.
    """
    path = runs_dir / system / "system.toml"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_toml(system, describe_machine()))
        except OSError as error:
            raise ValueError(f"runs_dir: cannot write {path} ({error.strerror}); choose a folder you own") from error
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); mend or delete it") from error


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
