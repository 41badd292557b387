"""The clusters that runs can be submitted to: one file systems/NAME.toml each."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

from energynn.config import suggestion
from energynn.files import shipped
from energynn.measure.samples import LIMITS_S, limit_variable
from energynn.reading import toml_table

# What may stand in a batch script without quotes: an option, a module, a folder that may begin with a variable.
OPTION = re.compile(r"(?!.*\.\.)--[a-z][a-z-]*(=[\w.,:@/+*()&|=\[\]-]+)?|-[a-zA-Z] ?[\w.,:@/+=-]*")
LINE = re.compile(r"[ -~]*\S[ -~]*")  # of a shell: what it does is the site's own affair
MODULE = re.compile(r"(?!.*\.\.)\w[\w.+/-]*")
FOLDER = re.compile(r"((\$[A-Z_]+|/[\w+-][\w.+-]*)(/[\w+-][\w.+-]*)*)?")
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}")
GPU = re.compile(r"[\w -]+")
VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]*")
SCHEDULERS = ("slurm", "local")
KINDS = {"str": str, "int": int, "float": (int, float), "dict[str, str]": dict}  # all other fields are lists of texts


@dataclass(frozen=True, kw_only=True)
class Site:
    """A system that runs can be submitted to: one file systems/NAME.toml, whose comments explain the fields."""

    # Of the file, unless it has another: a file that is renamed keeps its runs.
    name: str = field(metadata={"form": NAME})
    file: str
    scheduler: str
    gpu: str = field(default="A100", metadata={"form": GPU})
    devices_per_node: int
    sockets_per_node: int = 1
    max_hours: float = 24.0
    default_hours: float = 1.0  # of a run for which nothing published tells how long it takes
    ask_above_gpu_hours: float = 100.0
    sbatch: list[str] = field(default_factory=list, metadata={"form": OPTION})
    srun: list[str] | None = field(default=None, metadata={"form": OPTION})
    python: str = field(default="", metadata={"form": LINE})  # how srun calls it, where it is in a container
    runs_at_once: int = 0  # of one job array; 0: as many as Slurm starts
    modules: list[str] = field(default_factory=list, metadata={"form": MODULE})
    setup: list[str] = field(default_factory=list, metadata={"form": LINE})
    environment: dict[str, str] = field(default_factory=dict, metadata={"form": VARIABLE})
    stage_to: str = field(default="", metadata={"form": FOLDER})
    silence_limit_s: float = LIMITS_S["silence_limit_s"]
    first_sample_limit_s: float = LIMITS_S["first_sample_limit_s"]
    ready_limit_s: float = LIMITS_S["ready_limit_s"]
    rank_limit_s: float = LIMITS_S["rank_limit_s"]
    # What a forecast needs (energynn/forecast/); 0: not known.
    nodes: int = 0
    link_GB_per_s: float = 0.0  # of one node to the others
    gpu_link_GB_per_s: float = 0.0  # between the GPUs of a node
    cpu_W: float = 0.0  # all sockets of a node, without a busy thread
    cpu_thread_W: float = 0.0
    ram_W: float = 0.0  # of a node
    gpu_idle_W: float = 0.0
    published_as: str = field(default="", metadata={"form": GPU})  # device_name of the published runs made here

    def limits(self) -> dict[str, str]:
        """The environment variables that tell a run its limits, which are no part of what it is."""
        return {limit_variable(name): str(getattr(self, name)) for name in LIMITS_S}


def site(name: str) -> Site:
    """Read systems/NAME.toml, or a file of one's own (.toml). Raises ValueError with the remedy for what is wrong.

    Nothing in the file can become a command: options, modules and folders must have their form, values are quoted.
    """
    folder = shipped("systems")
    path = Path(name) if name.endswith(".toml") else folder / f"{name}.toml"
    if not NAME.fullmatch(path.stem) or not os.path.isfile(path):
        known = sorted(path.stem for path in folder.glob("*.toml"))
        near, names = suggestion(name, known), ", ".join(known)
        raise ValueError(f"system: {name!r} is not known{near}; choose one of {names}, or write a file (.toml)")
    try:
        values = toml_table(path)
        _check(values)
        return Site(**{"name": path.stem} | values, file=str(path.resolve()))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}; mend it") from error


def from_dict(values: dict) -> Site:
    """A site from what ``dataclasses.asdict`` made of it; raises ValueError for ill-typed values.

    Fields of another version are left out, and what says nothing need not have its form.
    """
    plain = vars(Site(name="", file="", scheduler="", devices_per_node=0, gpu=""))
    known = {name: value for name, value in values.items() if name in plain}
    needed = {"name", "scheduler", "devices_per_node"}
    _check({name: value for name, value in known.items() if name in needed or value != plain[name]})
    return Site(**known)


def _check(values: dict) -> None:
    """Raise ValueError for a value of a system's file that is unknown, of another type or not of its form."""
    known = {each.name: each for each in fields(Site) if each.name != "file"}
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"{key}: not known; known are {', '.join(known)}")
        _check_type(key, value, known[key].type)
        if form := known[key].metadata.get("form"):
            require_form(key, form, [value] if isinstance(value, str) else value)
    if values.get("scheduler") not in SCHEDULERS:
        raise ValueError(f"scheduler: must be {', '.join(SCHEDULERS)}, got {values.get('scheduler')!r}")


def require_form(key: str, form: re.Pattern, texts: Iterable[str]) -> None:
    """Raise ValueError for a text that has not this form."""
    for text in texts:
        if not form.fullmatch(text):
            raise ValueError(f"{key}: {text!r} is not of the form that a batch script can hold")


def _check_type(key: str, value, annotation: str) -> None:
    kind = KINDS.get(annotation, list)
    members = []
    if isinstance(value, dict):
        members = value.values()
    elif isinstance(value, list):
        members = value
    has_kind = isinstance(value, kind) and not isinstance(value, bool)
    if not has_kind or any(type(member) is not str for member in members):
        raise ValueError(f"{key}: must be of type {annotation}, got {value!r:.60}")
    if isinstance(value, int | float) and not 0 < value < 1e6:
        raise ValueError(f"{key}: must be more than 0, got {value!r:.60}")


def known() -> str:
    """The systems that there are, each with the first line of its file."""
    files = sorted(shipped("systems").glob("*.toml"))
    lines = []
    for path in files:
        words = f"{path.stem:15} {path.read_text().splitlines()[0].lstrip('# ')}"
        lines.append(textwrap.fill(words, 79, subsequent_indent=" " * 16, break_on_hyphens=False))
    return "\n".join(lines)
