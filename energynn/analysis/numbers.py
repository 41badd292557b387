"""Numbers for the manuscript: each with value, unit, digits, source and provenance; none is typed there."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from importlib import metadata
from pathlib import Path

from energynn.files import write_json
from energynn.measure import energy, machine

PROVENANCES = ("measured", "estimated", "simulated", "published", "exact")  # exact: counted, or chosen by us
PACKAGES = ("energynn", "altair", "numpy", "pandas", "statsmodels", "typst", "vl-convert-python", "xarray")


class Numbers:
    """The numbers of one notebook; ``save`` writes build/numbers/<notebook>.json."""

    def __init__(self, notebook: str, build_dir: str | Path = "build"):
        self.notebook = notebook
        self.path = Path(build_dir) / "numbers" / f"{notebook}.json"
        self.entries: dict[str, dict] = {}

    def add(
        self, name: str, value: float | int | str | None, unit: str = "", digits: int = 3, source: str = "",
        provenance: str = "exact", reason: str = "", decimals: int | None = None,
    ) -> None:  # fmt: skip
        """Add a number (``digits`` significant ones are printed, or so many ``decimals``; an int whole) or a text.

        None and NaN become "not available" with ``reason``. For a number that is read from records or published rows,
        ``source`` names them.

        Raises ValueError for a name that is taken or not made of letters, digits and _, an unknown provenance, or an
        infinite value.
        """
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r}: a number's name is letters, digits and _, and begins with a letter")
        if name in self.entries:
            raise ValueError(f"{name}: there is a number of that name already; choose another")
        if provenance not in PROVENANCES:
            raise ValueError(f"{name}: provenance {provenance!r} is not one of {', '.join(PROVENANCES)}")
        if hasattr(value, "item"):
            value = value.item()  # numpy's scalars
        if isinstance(value, float) and math.isnan(value):
            value = None
        if isinstance(value, float) and math.isinf(value):
            raise ValueError(f"{name}: is infinite; give None and a reason")
        entry = {"value": value, "unit": unit, "digits": digits, "text": text(value, digits, decimals)}
        entry |= {"source": source, "provenance": provenance, "notebook": self.notebook}
        if value is None:
            entry |= {"reason": reason or "the value could not be computed"}
        self.entries[name] = entry

    def save(self) -> Path:
        """Write the file atomically, in the order of names."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, dict(sorted(self.entries.items())))
        return self.path


def weakest(provenances, energies: bool = True) -> str:
    """The least certain of the provenances of several runs: simulated, then estimated, else measured.

    Without ``energies``, for times and metrics of the same runs: only an energy is estimated.
    """
    counted = set(provenances) - (set() if energies else {"estimated"})
    return max(counted, key=energy.PROVENANCES.index, default="measured")


def rows(table) -> str:
    """Names of the rows that a number rests on: series and GPUs of published runs, the identity of own ones."""
    named = (f"{one.series} n={one.devices}" if one.origin == "published" else one.run for one in table.itertuples())
    return ", ".join(dict.fromkeys(named))


def text(value: float | int | str | None, digits: int = 3, decimals: int | None = None) -> str:
    """A value as it is printed: floats with ``digits`` significant digits, or ``decimals``; never as a power of ten.

    >>> text(0.26583), text(0.27, 3), text(1034.2), text(18), text(None)
    ('0.266', '0.270', '1034', '18', 'not available')
    """
    if value is None:
        return "not available"
    if isinstance(value, str | int):
        return str(value)
    if decimals is None:
        if value == 0:
            return "0"
        rounded = float(f"{value:.{digits - 1}e}")  # 9.996 has one digit before the point, its text "10.0" two
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{value:.{decimals}f}".replace("-", "\N{MINUS SIGN}")


def merge(build_dir: str | Path = "build") -> dict[str, dict]:
    """Join the numbers of all notebooks into numbers.json.

    Raises ValueError if two notebooks give one name.
    """
    build_dir = Path(build_dir)
    merged: dict[str, dict] = {}
    for path in sorted((build_dir / "numbers").glob("*.json")):
        for name, entry in json.loads(path.read_text()).items():
            if name in merged:
                raise ValueError(f"{name}: in both {merged[name]['notebook']} and {entry['notebook']}; rename one")
            merged[name] = entry
    merged = dict(sorted(merged.items()))
    write_json(build_dir / "numbers.json", merged)
    return merged


def colophon(build_dir: str | Path = "build") -> None:
    """Write what made the paper as numbers of their own: git commit and its date, machine, versions.

    The day of the build is left out: two builds of one commit on one machine are to give the same numbers.
    """
    numbers = Numbers("colophon", build_dir)
    commit, changed = machine.git_state()
    numbers.add("git_commit", commit[:12] or None, source="git rev-parse HEAD", reason="not in a git repository")
    date = machine.git("show", "-s", "--format=%cs", "HEAD") or None
    numbers.add("git_date", date, source="git show", reason="no commit")
    state = "with uncommitted changes" if changed else "without uncommitted changes"
    numbers.add("git_state", state, source="git status")
    numbers.add("build_cpu", machine.describe_machine()["cpu"], source="/proc/cpuinfo, platform")
    numbers.add("build_cores", os.cpu_count(), source="os.cpu_count")
    numbers.add("build_system", f"{platform.system()} {platform.machine()}", source="platform")
    numbers.add("build_python", platform.python_version(), source="platform")
    for package in PACKAGES:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            version = None
        name = "version_" + package.replace("-", "_")
        numbers.add(name, version, source="importlib.metadata", reason="not installed as a package")
    numbers.save()
