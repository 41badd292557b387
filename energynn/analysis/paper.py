"""The manuscript and its supplement: compiled offline from paper/, build/numbers.json and
build/figures.
"""

import json
from pathlib import Path

import typst

from energynn.host.files import shipped_path

PAPER_FOLDER = shipped_path("paper")
MANUSCRIPT_SOURCES = {
    "paper.pdf": PAPER_FOLDER / "energynn.typ",
    "supplement.pdf": PAPER_FOLDER / "supplement.typ",
}


def compile_manuscripts(build_dir: Path) -> list[Path]:
    """Compile paper and supplement into ``build_dir`` with the fonts that typst carries; returns
    their paths.

    Raises ValueError if there are no numbers, or one is missing that the manuscript asks for, or
    a figure.
    """
    for name, path in MANUSCRIPT_SOURCES.items():
        try:
            typst.compile(path, output=build_dir / name, **_typst_options(build_dir))
        except typst.TypstError as error:  # the template says what is missing
            raise ValueError(f"{path}: {error}") from None
    return [build_dir / name for name in MANUSCRIPT_SOURCES]


def _typst_options(build_dir: Path) -> dict:
    """Return typst's options: the build folder, a template's input, may lie anywhere below "/"."""
    return {
        "root": "/",
        "ignore_system_fonts": True,
        "sys_inputs": {"build": str(build_dir.resolve())},
    }


def read_captions(build_dir: Path) -> dict[str, str]:
    """Read the captions of the paper's figures as plain text, by the figure's name, numbered."""
    captions = {}
    for file, path in MANUSCRIPT_SOURCES.items():
        drawn = typst.query(
            path, "<drawing>", field="value", **_typst_options(build_dir)
        )
        where = "Figure" if file == "paper.pdf" else "Supplement, figure"
        for number, figure in enumerate(json.loads(drawn), start=1):
            caption = " ".join(figure["caption"].split())
            captions[figure["name"]] = f"{where} {number}: {caption}"
    return captions
