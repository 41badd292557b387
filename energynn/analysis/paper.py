"""The manuscript and its supplement: compiled offline from paper/, build/numbers.json and build/figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import typst

from energynn.files import shipped

PAPER = shipped("paper")


MANUSCRIPTS = {"paper.pdf": PAPER / "energynn.typ", "supplement.pdf": PAPER / "supplement.typ"}


def compile(build_dir: str | Path = "build") -> list[Path]:
    """Compile paper and supplement into ``build_dir`` with the fonts that typst carries; returns their paths.

    Raises ValueError if there are no numbers, or one is missing that the manuscript names, or a figure.
    """
    build_dir = Path(build_dir).resolve()
    numbers = build_dir / "numbers.json"
    if not numbers.is_file():
        raise ValueError(
            f"{numbers} is missing; run the notebooks and energynn.analysis.numbers.merge first"
        )
    manuscript = "".join(path.read_text() for path in MANUSCRIPTS.values())
    known = json.loads(numbers.read_text())
    missing = sorted(set(re.findall(r'#?num\("(\w+)"', manuscript)) - known.keys())
    files = ["claims.json", "artifact.json", "excluded.json"]
    files += [f"figures/{name}.pdf" for name in figures(manuscript)]
    missing += [name for name in files if not (build_dir / name).is_file()]
    if missing:
        raise ValueError(
            f"the manuscript needs {', '.join(missing)} in {build_dir}; run the notebooks first"
        )
    # The build folder may lie anywhere, so the root is "/"; the template gets the folder as an input.
    inputs = {"build": str(build_dir)}
    for name, path in MANUSCRIPTS.items():
        typst.compile(
            path, output=build_dir / name, root="/", ignore_system_fonts=True, sys_inputs=inputs
        )
    return [build_dir / name for name in MANUSCRIPTS]


def figures(manuscript: str) -> list[str]:
    """List the figures that a manuscript shows, in order."""
    return re.findall(r'drawing\("(\w+)"', manuscript)


def captions(build_dir: str | Path = "build") -> dict[str, str]:
    """The captions of the paper's figures as plain text, by the figure's name; a reference is a title in quotes."""
    source = PAPER / "energynn.typ"
    inputs = {"build": str(Path(build_dir).resolve())}
    answer = typst.query(
        source, "<drawing>", field="value", root="/", ignore_system_fonts=True, sys_inputs=inputs
    )
    found = {figure["name"]: " ".join(figure["caption"].split()) for figure in json.loads(answer)}
    labels = re.findall(
        r'drawing\("(\w+)"(?:(?!drawing\().)*?<(fig-[\w-]+)>', source.read_text(), re.DOTALL
    )
    titles = {label: f"“{found[name].split('.')[0]}”" for name, label in labels if name in found}
    named = re.compile("«(.*?)»")
    return {
        name: named.sub(lambda label: titles.get(label[1], "the text"), words)
        for name, words in found.items()
    }
