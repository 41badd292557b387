"""The clusters that runs can be submitted to: one file systems/NAME.toml each."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path

from energynn.files import REPOSITORY

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
