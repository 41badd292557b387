"""Numbers for the manuscript, as the tables of the notebooks: none is typed there."""

import os
import platform
import re
from importlib import metadata
from pathlib import Path

import pandas as pd

from energynn.host.files import write_json
from energynn.host.reading import read_json
from energynn.measure import energy, machine

# derived: from published numbers by a stated step; exact: counted, or chosen by us
PROVENANCES = (*energy.PROVENANCES, "published by others", "derived", "exact")
PACKAGES_OF_COLOPHON = (
    "altair",
    "numpy",
    "pandas",
    "statsmodels",
    "typst",
    "vl-convert-python",
    "xarray",
)
# Columns in which each row of a table says what its values are.
PROVENANCE_COLUMNS = ("unit", "source", "provenance", "holds_for")


def save_tables(notebook: str, tables: dict, build_dir: str | Path, **common) -> None:
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
            rows = [dict(row) for row in table.values()]
            table = pd.DataFrame(rows, [*table], dtype=object)
        table = table.rename(index=str)
        for column, usual in common.items():
            table[column] = table[column].fillna(usual) if column in table else usual
        place = f"{notebook}, table {name}"
        for column in PROVENANCE_COLUMNS:
            if column not in table or table[column].isna().any():
                raise ValueError(f"{place}: a row has no {column}; add the column")
        if unknown := ", ".join(set(table["provenance"]) - set(PROVENANCES)):
            raise ValueError(
                f"{place}: provenance {unknown} is unknown; give one of {PROVENANCES}"
            )
        table = table.assign(notebook=notebook).astype(object)
        written[name] = table.where(table.notna(), None).to_dict("index")
    write_json(Path(build_dir, "numbers", f"{notebook}.json"), written)


def weakest_provenance(provenances) -> str:
    """Return the least certain of the provenances of several runs: simulated, then estimated, else
    measured; of times and metrics those that ``observations.provenance_of_quantity`` tells.
    """
    return max(set(provenances), key=energy.PROVENANCES.index, default="measured")


def source_run_names(table) -> str:
    """Name the rows that a number rests on: series and GPUs of published runs, the run's
    name for own ones.
    """
    names = table["series"] + " n=" + table["devices"].astype(str)
    names = names.where(table["origin"] == "published", table["run"])
    return ", ".join(names.unique())


def fill_sentence(sentence: str, tables: dict) -> str:
    """Fill a sentence with numbers, each named as in "{slope[R4][value]:.3f} kW"."""
    return re.sub(r"(?<!\w)-(?=\d)", "\N{MINUS SIGN}", sentence.format_map(tables))


def merge_tables(build_dir: Path) -> None:
    """Join the tables of all notebooks into numbers.json: table -> row -> column -> value.

    Raises ValueError if two notebooks give one name.
    """
    merged = {}
    for path in sorted(build_dir.glob("numbers/*.json")):
        for name, table in read_json(path).items():
            if name in merged:
                raise ValueError(f"{path}: {name} is another's table; rename one")
            merged[name] = table
    write_json(build_dir / "numbers.json", dict(sorted(merged.items())))


def write_colophon(build_dir: Path) -> None:
    """Write what made the paper as a table of its own: git commit and its date, machine,
    versions.

    The day of the build is left out, so that two builds of one commit on one machine give the
    same numbers.
    """
    commit, changed = machine.git_state()
    facts = {
        "git_commit": commit[:12] or None,
        "git_date": machine.call_git("show", "-s", "--format=%cs", "HEAD") or None,
        "git_state": "with uncommitted changes"
        if changed
        else "without uncommitted changes",
        "build_cpu": machine.describe_machine()["cpu"],
        "build_cores": os.cpu_count(),
        "build_system": f"{platform.system()} {platform.machine()}",
        "build_python": platform.python_version(),
    }
    for package in PACKAGES_OF_COLOPHON:
        facts["version_" + package.replace("-", "_")] = metadata.version(package)
    save_tables(
        "colophon",
        {"colophon": {"build": facts}},
        build_dir,
        unit="",
        source="git, platform and importlib.metadata",
        provenance="exact",
        holds_for="this build",
    )
