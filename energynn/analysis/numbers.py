"""Numbers for the manuscript, as the tables of the notebooks: none is typed there."""

from __future__ import annotations

import math
import os
import platform
import re
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


# Columns in which each row of a table says what its values are.
ABOUT = ("unit", "source", "provenance", "holds_for")


def save_tables(
    notebook: str, tables: dict, build_dir: str | Path = "build", **common
) -> None:
    """Write the tables that a notebook hands over to build/numbers/<notebook>.json.

    A table is a data frame, or a mapping row -> column -> value. Its columns ``unit``, ``source``,
    ``provenance`` and ``holds_for``, the condition by which was selected what a row rests on, are
    given in the table, or here for the rows that lack them. NaN is written as null. Raises
    ValueError for a row that has none of them, and for an unknown provenance.
    """
    written = {}
    for name, table in tables.items():
        if isinstance(table, dict):
            # as objects: whole numbers stay whole
            rows = {
                row: pd.Series(dict(cells), dtype=object)
                for row, cells in table.items()
            }
            table = pd.DataFrame(rows).T
        table = table.rename(index=str)
        for column, usual in common.items():
            table[column] = table[column].fillna(usual) if column in table else usual
        for column in ABOUT:
            if column not in table or table[column].isna().any():
                raise ValueError(
                    f"{notebook}, table {name}: has no {column} in every row; add the column"
                )
        unknown = set(table["provenance"]) - set(PROVENANCES)
        if unknown:
            raise ValueError(
                f"{notebook}, table {name}: provenance {', '.join(unknown)} is not one of "
                f"{', '.join(PROVENANCES)}"
            )
        table = table.assign(notebook=notebook).astype(object)
        written[name] = table.where(table.notna(), None).to_dict("index")
    path = Path(build_dir, "numbers", f"{notebook}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, written)


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


def filled(sentence: str, tables: dict) -> str:
    """Fill a sentence with numbers, each named as in "{slope[R4][value]:.3f} kW"."""
    return re.sub(r"(?<!\w)-(?=\d)", "\N{MINUS SIGN}", sentence.format_map(tables))


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
    """Join the tables of all notebooks into numbers.json: table -> row -> column -> value.

    Raises ValueError if two notebooks give one name.
    """
    merged, places = {}, {}
    for path in sorted(Path(build_dir, "numbers").glob("*.json")):
        for name, table in json_table(path).items():
            if name in merged:
                raise ValueError(
                    f"{name}: in both {places[name]} and {path.stem}; rename one"
                )
            merged[name], places[name] = table, path.stem
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
