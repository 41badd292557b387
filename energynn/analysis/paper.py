"""The manuscript and its supplement: compiled offline from paper/, build/numbers.json and
build/figures.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import typst

from energynn.files import shipped
from energynn.reading import json_table

PAPER = shipped("paper")
MANUSCRIPTS = {
    "paper.pdf": PAPER / "energynn.typ",
    "supplement.pdf": PAPER / "supplement.typ",
}

# What a manuscript asks of the numbers: a table's cell, or the interval of a row.
ASKED = r'\b(num|value|range)\("([^"]+)", "([^"]+)"(?:, "([^"]+)")?'


def compile(build_dir: str | Path = "build") -> list[Path]:
    """Compile paper and supplement into ``build_dir`` with the fonts that typst carries; returns
    their paths.

    Raises ValueError if there are no numbers, or one is missing that the manuscript names, or a
    figure.
    """
    build_dir = Path(build_dir).resolve()
    require(build_dir, ["numbers.json"])
    manuscript = "".join(path.read_text() for path in MANUSCRIPTS.values())
    known = json_table(build_dir / "numbers.json")
    missing = set()
    for call, table, row, column in re.findall(ASKED, manuscript):
        cells = known.get(table, {}).get(row, {})
        columns = [column] if call != "range" else ["low", "high"]
        missing |= {f"{table}, {row}, {name}" for name in columns if name not in cells}
    files = ["claims.json", "artifact.json", "excluded.json"]
    files += [f"figures/{name}.pdf" for name in figures(manuscript)]
    require(build_dir, files, sorted(missing))
    for name, path in MANUSCRIPTS.items():
        typst.compile(path, output=build_dir / name, **_options(build_dir))
    return [build_dir / name for name in MANUSCRIPTS]


def _options(build_dir: Path) -> dict:
    """Options of typst: the build folder, an input of the template, may lie anywhere below "/"."""
    inputs = {"build": str(build_dir.resolve())}
    return {"root": "/", "ignore_system_fonts": True, "sys_inputs": inputs}


def require(build_dir: Path, files: list[str], missing: list[str] = ()) -> None:
    """Raise ValueError for files that notebooks write, or other names, that are missing."""
    missing = [*missing, *(name for name in files if not (build_dir / name).is_file())]
    if missing:
        raise ValueError(
            f"{build_dir}: {', '.join(missing)} is missing; run the notebooks first"
        )


def figures(manuscript: str) -> list[str]:
    """List the figures that a manuscript shows, in order."""
    return re.findall(r'drawing\("(\w+)"', manuscript)


def captions(build_dir: Path) -> dict[str, str]:
    """Read the captions of the paper's figures as plain text, by the figure's name."""
    options = _options(build_dir) | {"field": "value"}
    found = []
    for path in MANUSCRIPTS.values():
        found += json.loads(typst.query(path, "<drawing>", **options))
    return {figure["name"]: " ".join(figure["caption"].split()) for figure in found}
