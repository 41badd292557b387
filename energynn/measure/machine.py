"""The machine that runs are measured on, and the file runs/<system>/system.toml that describes
it.
"""

import difflib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from energynn.host.files import IS_CHECKOUT, REPOSITORY, default_runs_dir, shipped_path
from energynn.host.launchers import PYTHON_VARIABLE, python_command_of_ranks
from energynn.host.reading import read_toml
from energynn.measure import kernel, sensors
from energynn.measure.energy import THRESHOLDS

# Used only where a host has no CPU sensor. The watts are an assumption, not a reading of any
# machine: 280 W is the vendor's thermal design power of the AMD EPYC 9354 (32 cores), the CPU of
# the paper's H100 nodes; about a third of full power at idle is what servers of this kind usually
# draw. Change them in system.toml for your own machine.
SYSTEM_TOML_TEMPLATE = """# left_out = ["dram"]  # is not read; here, above the first table
# Used only where the CPU has no energy sensor: `estimated` energy. Edit it.
[cpu_model]
name = "idle-to-full-per-core"
idle_W_per_core = 3.0
full_W_per_core = 8.75
source = "assumption: 280 W / 32 cores at full load (thermal design power, AMD EPYC 9354), about a \
third at idle"
"""
DEFAULT_CPU_MODEL = tomllib.loads(SYSTEM_TOML_TEMPLATE)["cpu_model"]
COMMIT = REPOSITORY / "build" / "commit"
REPORTED_PACKAGES = (
    "torch torchvision perun mpi4py mpich openmpi numpy xarray papermill pillow".split()
)
SLURM_JOB_VARIABLES = (
    "SLURM_JOB_ID SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_JOB_NODELIST SLURM_JOB_PARTITION"
    " SLURM_JOB_ACCOUNT SLURM_JOB_QOS SLURM_NNODES"
).split()


def describe_machine() -> dict:
    """Return hostname, CPU, cores, sockets and GPUs of this host.

    The cores are those that this process may use, which can be fewer than the machine has.
    """
    return {
        "hostname": platform.node(),
        "cpu": kernel.cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "sockets": kernel.count_cpu_sockets(),
        "gpus": list_gpus(),
    }


def describe_batch_job() -> dict:
    """Return what Slurm tells of the job that this process belongs to; empty outside of one.

    ``is_exclusive``: whether no other job may use its nodes; absent where Slurm does not say so.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return {}
    facts: dict = {
        name.removeprefix("SLURM_").lower(): os.environ[name]
        for name in SLURM_JOB_VARIABLES
        if name in os.environ
    }
    command = ["scontrol", "show", "job", "-o", facts["job_id"]]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        )
        if sharing := re.search(r"OverSubscribe=(\w+)", done.stdout):
            facts["is_exclusive"] = sharing[1].startswith("NO")
    return facts


def list_gpus() -> list[dict]:
    """List number, name, UUID, driver and power limit of the GPUs of this job, as far as told.

    ``fault``: why a run cannot use one. Empty without NVML.
    """
    try:
        notes = sensors.list_nvml_gpus()
    except Exception:  # no library, no driver, no permission
        return []
    visible, _ = sensors.parse_visible_devices(
        notes, os.environ.get("CUDA_VISIBLE_DEVICES")
    )
    return [{"index": index} | notes[index] for index in visible]


def package_versions() -> dict[str, str]:
    """Return versions of Python and of the packages that matter, without importing any of them.

    Of ranks in a container it tells the words that start their Python: its image holds the rest.
    """
    if PYTHON_VARIABLE in os.environ:
        return {"container": " ".join(python_command_of_ranks())}
    releases = {"python": platform.python_version()}
    for package in REPORTED_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            releases[package] = importlib.metadata.version(package)
    return releases


def call_git(*words: str) -> str:
    """Return what git prints of this checkout; "" without git or before the first commit."""
    if not (IS_CHECKOUT and shutil.which("git")):
        return ""
    command = ["git", "-C", str(REPOSITORY), *words]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def git_state() -> tuple[str, bool]:
    """Return the commit of this checkout, and whether files outside runs/ and build/ differ.

    Where git does not say it, build/commit does (`make gpu-carry`); ("", False) without that, too.
    """
    if commit := call_git("rev-parse", "--verify", "HEAD"):
        return commit, bool(
            call_git("status", "--porcelain", "--", ".", ":!runs", ":!build")
        )
    return tuple(json.loads(COMMIT.read_text())) if COMMIT.is_file() else ("", False)


PowerWatts = Annotated[float, Meta(ge=0, lt=10_000)]


class CpuPowerModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold the watts of the estimate for a CPU without a counter, and where they are from."""

    idle_W_per_core: PowerWatts
    full_W_per_core: PowerWatts
    name: str = ""
    source: str = ""


class SystemDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what the instrument reads of a system, all of which may be missing.

    left_out: devices and sensors that are not read, by the names of
    ``sensors.drop_left_out_sensors``
    """

    cpu_model: CpuPowerModel = msgspec.convert(DEFAULT_CPU_MODEL, CpuPowerModel)
    thresholds: dict[
        Literal[tuple(THRESHOLDS)],  # type: ignore[valid-type]
        Annotated[float, Meta(ge=0, le=10_000)],
    ] = {}
    left_out: list[str] = []


def system_file(runs_dir: Path | None = None, system: str = "local") -> Path:
    """Say which file describes a system; measured commands and windows have that of ``local``."""
    if system == "measured":
        runs_dir = None
        system = "local"
    return (runs_dir or default_runs_dir()).absolute() / system / "system.toml"


def read_system_table(path: Path) -> dict:
    """Read the fields of a system: those of this machine's own file go before those of systems/.

    Raises ValueError where a file cannot be read.
    """
    known = shipped_path("systems") / f"{path.parent.name}.toml"
    fields = read_toml(known) if known.exists() else {}
    if not path.exists():
        return fields
    own = read_toml(path)
    if not own:
        raise ValueError("it is empty")
    return fields | own


def load_system(path: Path) -> dict:
    """Return CPU model, thresholds and what is left out of a system, by its files or as usual.

    Raises ValueError where one cannot be read.
    """
    try:
        table = read_system_table(path)
        ours = SystemDescription.__struct_fields__
        for name in table.keys() - {*ours}:
            if name in THRESHOLDS or difflib.get_close_matches(
                name.lower(), ours, cutoff=0.7
            ):
                raise ValueError(f"{name} is no table; one of {', '.join(ours)} is")
        return msgspec.to_builtins(msgspec.convert(table, SystemDescription))
    except ValueError as error:
        raise ValueError(
            f"{path}: cannot be read ({error}); mend or delete it"
        ) from error


def system_file_remedy(reasons: Iterable[str], path: Path) -> list[str]:
    """Say what in a system's file overrules such reasons, where that is how the machine is.

    Returns one sentence, or none where nothing would. Reasons name thresholds and, as
    ``energy.left_out_remedy`` writes it, what can be left out.
    """
    text = "; ".join(reasons)
    named = [name for name in THRESHOLDS if re.search(rf"\b{name}\b", text)]
    words = [f"{', '.join(named)} in [thresholds]"] if named else []
    if left_out := re.findall(r'left_out = \["([^"]+)"\]', text):
        names = dict.fromkeys(load_system(path)["left_out"] + left_out)
        words.append(f"left_out = {json.dumps([*names])} above the first table")
    file = path if path.exists() else f"{path}, a new file"
    said = f"if this machine is so: set {' and '.join(words)} of {file}; measure again"
    return [said] if words else []
