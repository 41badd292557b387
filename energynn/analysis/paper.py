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

    Raises ValueError if there are no numbers, or one is missing that the manuscript names, or a figure.
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
    # The build folder may lie anywhere, so the root is "/"; the template gets the folder as an input.
    output, inputs = build_dir / "paper.pdf", {"build": str(build_dir)}
    typst.compile(PAPER / "energynn.typ", output=output, root="/", ignore_system_fonts=True, sys_inputs=inputs)
    return output


def figures(manuscript: str) -> list[str]:
    """Names of the figures that a manuscript shows, in order."""
    return re.findall(r'#?drawing\("(\w+)"', manuscript)
