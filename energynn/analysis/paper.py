"""The manuscript: compiled offline from paper/, build/numbers.json and build/figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import typst

from energynn.files import shipped

PAPER = shipped("paper")


def compile(build_dir: str | Path = "build") -> Path:
    """Compile paper/energynn.typ to ``build_dir``/paper.pdf with the fonts that typst carries; returns the path.

    Raises ValueError if the numbers are missing, or a figure or a number that the manuscript names.
    """
    build_dir = Path(build_dir).resolve()
    numbers = build_dir / "numbers.json"
    if not numbers.is_file():
        raise ValueError(f"{numbers} is missing; run the notebooks and energynn.analysis.numbers.merge first")
    manuscript = (PAPER / "energynn.typ").read_text()
    known = json.loads(numbers.read_text())
    missing = sorted(set(re.findall(r'#?num\("(\w+)"', manuscript)) - known.keys())
    missing += [name for name in ("claims.json", "artifact.json", "excluded.json") if not (build_dir / name).is_file()]
    missing += [name for name in figures(manuscript) if not (build_dir / "figures" / f"{name}.pdf").is_file()]
    if missing:
        raise ValueError(f"the manuscript needs {', '.join(missing)} in {build_dir}; run the notebooks first")
    # Root "/" because the build folder may lie anywhere; the template gets its place as an input.
    typst.compile(
        PAPER / "energynn.typ", output=build_dir / "paper.pdf", root="/", ignore_system_fonts=True,
        sys_inputs={"build": str(build_dir)},
    )  # fmt: skip
    return build_dir / "paper.pdf"


def figures(manuscript: str) -> list[str]:
    """Names of the figures that a manuscript shows, in order."""
    return re.findall(r'#?drawing\("(\w+)"', manuscript)
