"""The manuscript has no typed number, and names only what the notebooks make."""

import re

import pytest

from energynn.analysis import paper
from energynn.files import REPOSITORY

MANUSCRIPT = "".join(path.read_text() for path in paper.MANUSCRIPTS.values())
TEMPLATE = (paper.PAPER / "template.typ").read_text()
# Names that contain digits, and the level of the intervals, which the fits share.
ALLOWED = r"ResNet50|ImageNet-2012|FourCastNet|Z500|A100|H100|ERA5|\b[RFT][1-6]\b|top-1|500 hPa|95 per\s+cent"

# Numbers in words, too, would stay as they are when the data change; one, two and half are left to the language.
WORDS = r"\b(three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|(twen|thir|for|fif|six|seven|eigh|nine)ty"
WORDS += r"|dozens?|hundreds?|thousands?|millions?|thirds?|quarters?)\b"


def prose(manuscript: str) -> str:
    """The text without comments, code that takes numbers, figures and references, labels, and allowed names."""
    text = re.sub(r"//.*", "", manuscript)
    text = re.sub(r'#import "[^)]*\)', "", text)
    text = re.sub(r'\b(num|range|value|drawing|bibliography|made-by)\(("[^"]*"(, )?)+[^)]*\)', "", text)
    text = re.sub(r"@[\w-]+|<[\w-]+>|R\^2|`[^`]*`|(==|>) [01]\b", "", text)
    return re.sub(ALLOWED, "", text)


def typed(manuscript: str) -> list[str]:
    return [line.strip() for line in prose(manuscript).splitlines() if re.search(rf"\d|(?i:{WORDS})", line)]


def test_no_number_is_typed():
    assert not typed(MANUSCRIPT)
    captions = re.findall(r"caption: \[(.*?)\],\n", TEMPLATE, flags=re.DOTALL)
    assert len(captions) >= 3 and not typed("\n".join(captions).replace("HC3", ""))


def test_a_typed_number_would_be_found():
    assert typed('The slope is 0.27 kW, not #num("slope_R4").')
    assert typed("Of F1, three of seven are known, at sixty-four times as many GPUs.") and typed("A quarter less.")
    assert not typed('The slope of ResNet50 is #num("slope_R4"), see @fig-1; each of the two has one half.')


def test_the_tables_take_their_rows_from_the_numbers():
    assert 'value("fits_keys")' in TEMPLATE and 'value("table1_rows")' in TEMPLATE
    named = re.findall(r'num\("(\w+)"[,)]', TEMPLATE)
    assert {"hc3_freedom", "git_commit"} == set(named)  # a key typed here would be a row typed here


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
