"""Numbers for the manuscript: each with value, unit, digits, source and provenance; none is
typed there.
"""

from __future__ import annotations

import math
import os
import platform
from importlib import metadata
from pathlib import Path

import pandas as pd

from energynn.files import write_json
from energynn.measure import energy, machine
from energynn.reading import json_table

# derived: from published numbers by a stated step; exact: counted, or chosen by us
PROVENANCES = (*energy.PROVENANCES, "published by others", "derived", "exact")
PACKAGES = (
    "altair",
    "numpy",
    "pandas",
    "statsmodels",
    "typst",
    "vl-convert-python",
    "xarray",
)


class Numbers:
    """The numbers of one notebook; ``save`` writes build/numbers/<notebook>.json."""

    def __init__(self, notebook: str, build_dir: str | Path = "build"):
        self.notebook = notebook
        self.path = Path(build_dir) / "numbers" / f"{notebook}.json"
        self.entries: dict[str, dict] = {}

    def add(
        self,
        name: str,
        value: float | int | str | None,
        unit: str = "",
        digits: int = 3,
        source: str = "",
        provenance: str = "exact",
        reason: str = "",
        decimals: int | None = None,
    ) -> None:
        """Add a number or a text.

        A float is printed with ``digits`` significant digits, or with ``decimals``; an int whole.
        None and NaN become "not available" with ``reason``. ``source`` names the records or
        published rows that were read. Raises ValueError for a name that is taken and an unknown
        provenance.
        """
        if name in self.entries:
            raise ValueError(
                f"{name}: there is a number of that name already; choose another"
            )
        if provenance not in PROVENANCES:
            raise ValueError(
                f"{name}: provenance {provenance!r} is not one of {PROVENANCES}"
            )
        if hasattr(value, "item"):
            value = value.item()  # numpy's scalars
        if isinstance(value, float) and math.isnan(value):
            value = None
        entry = {
            "value": value,
            "unit": unit,
            "digits": digits,
            "text": text(value, digits, decimals),
            "source": source,
            "provenance": provenance,
            "notebook": self.notebook,
        }
        if value is None:
            entry["reason"] = reason or "the value could not be computed"
        self.entries[name] = entry

    def add_all(self, values: dict, unit: str = "", **about) -> None:
        """Add several numbers, name -> value, that share their unit and everything else that
        ``add`` takes.
        """
        for name, value in values.items():
            self.add(name, value, unit, **about)

    def add_table(
        self,
        frame: pd.DataFrame,
        unit: str,
        provenance: str = "exact",
        names: str = "{row}_{column}",
        **about,
    ) -> None:
        """Add a table's cells as numbers, named by ``names`` from the row's index and the
        column.

        The column "value" is left out of a name at its end. Columns "source" and "provenance",
        where there are any, hold those of each row; all else that ``add`` takes is common to the
        table.
        """
        common = {"provenance": provenance} | about
        of_row = frame[frame.columns.intersection(["source", "provenance"])]
        for column in frame.columns.difference(of_row.columns, sort=False):
            for row, value in frame[column].items():
                name = names.format(row=row, column=column).removesuffix("_value")
                self.add(name, value, unit, **common | of_row.loc[row].to_dict())

    def save(self) -> Path:
        """Write the file atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.entries)
        return self.path


def weakest(provenances) -> str:
    """The least certain of the provenances of several runs: simulated, then estimated, else
    measured; of times and metrics those that ``observations.provenance`` tells.
    """
    return max(set(provenances), key=energy.PROVENANCES.index, default="measured")


def rows(table) -> str:
    """Names of the rows that a number rests on: series and GPUs of published runs, the run's
    name for own ones.
    """
    names = []
    for row in table.itertuples():
        names.append(
            f"{row.series} n={row.devices}" if row.origin == "published" else row.run
        )
    return ", ".join(dict.fromkeys(names))


def text(
    value: float | int | str | None, digits: int = 3, decimals: int | None = None
) -> str:
    """A value as it is printed: a float with ``digits`` significant digits or so many
    ``decimals``, never as 1e-7.

    >>> text(0.26583), text(0.27, 3), text(1034.2), text(18), text(None)
    ('0.266', '0.270', '1034', '18', 'not available')
    """
    if value is None:
        return "not available"
    if isinstance(value, str | int):
        return str(value)
    if value == 0 and decimals is None:
        return "0"
    if decimals is None:
        exponent = f"{value:.{digits - 1}e}".partition("e")[2]  # of 9.996 that of 10.0
        decimals = max(0, digits - 1 - int(exponent))
    return f"{value:.{decimals}f}".replace("-", "\N{MINUS SIGN}")


def merge(build_dir: str | Path = "build") -> None:
    """Join the numbers of all notebooks into numbers.json.

    Raises ValueError if two notebooks give one name.
    """
    merged = {}
    for path in sorted(Path(build_dir, "numbers").glob("*.json")):
        entries = json_table(path)
        for name in entries.keys() & merged.keys():
            places = f"{merged[name]['notebook']} and {path.stem}"
            raise ValueError(f"{name}: in both {places}; rename one")
        merged |= entries
    write_json(Path(build_dir, "numbers.json"), dict(sorted(merged.items())))


def colophon(build_dir: str | Path = "build") -> None:
    """Write what made the paper as numbers of their own: git commit and its date, machine,
    versions.

    The day of the build is left out, so that two builds of one commit on one machine give the
    same numbers.
    """
    numbers = Numbers("colophon", build_dir)
    commit, changed = machine.git_state()
    facts = {
        "git_commit": commit[:12] or None,
        "git_date": machine.git("show", "-s", "--format=%cs", "HEAD") or None,
        "git_state": "with uncommitted changes"
        if changed
        else "without uncommitted changes",
        "build_cpu": machine.describe_machine()["cpu"],
        "build_cores": os.cpu_count(),
        "build_system": f"{platform.system()} {platform.machine()}",
        "build_python": platform.python_version(),
    }
    for package in PACKAGES:
        facts["version_" + package.replace("-", "_")] = metadata.version(package)
    numbers.add_all(
        facts,
        source="git, platform and importlib.metadata",
        reason="not in a git repository",
    )
    numbers.save()
