"""The manuscript has no typed number, and names only what the notebooks make."""

import re

import pytest

from energynn.analysis import paper
from energynn.config import REPOSITORY

MANUSCRIPT = (paper.PAPER / "energynn.typ").read_text()
# Names that contain digits, and the level of the intervals, which the fits share.
ALLOWED = r"ResNet50|ImageNet-2012|FourCastNet|Z500|A100|H100|ERA5|\b[RF][1-6]\b|top-1|500 hPa|95 per\s+cent"


def prose(manuscript: str) -> str:
    """The text without comments, code that takes numbers, figures and references, labels, and allowed names."""
    text = re.sub(r"//.*", "", manuscript)
    text = re.sub(r'#import "[^)]*\)', "", text)
    text = re.sub(r'\b(num|range|value|drawing|bibliography|made-by|with-verdict)\(("[^"]*"(, )?)+[^)]*\)', "", text)
    text = re.sub(r"@[\w-]+|<[\w-]+>|R\^2|`[^`]*`|(==|>) 0", "", text)
    return re.sub(ALLOWED, "", text)


def test_no_number_is_typed():
    found = [line.strip() for line in prose(MANUSCRIPT).splitlines() if re.search(r"\d", line)]
    assert not found


def test_a_typed_number_would_be_found():
    assert re.search(r"\d", prose('The slope is 0.27 kW, not #num("slope_R4").'))
    assert not re.search(r"\d", prose('The slope of ResNet50 is #num("slope_R4"), see @fig-1.'))


def test_no_semicolon_is_swallowed():
    assert not re.search(r'"\);', MANUSCRIPT)  # after a call, typst takes ";" for the end of the expression


def test_every_figure_is_saved_by_the_notebook_it_names():
    shown = re.findall(r'drawing\("(\w+)", "(\w+)",', MANUSCRIPT)
    assert len(shown) >= 4
    for figure, notebook in shown:
        assert f'\\"{figure}\\"' in (REPOSITORY / "notebooks" / f"{notebook}.ipynb").read_text()


def test_missing_numbers_and_figures_are_named(tmp_path):
    with pytest.raises(ValueError, match="numbers.json is missing"):
        paper.compile(tmp_path)
    (tmp_path / "numbers.json").write_text("{}")
    with pytest.raises(ValueError, match="slope_ResNet50.*energy_against_gpu_hours"):
        paper.compile(tmp_path)
