"""The manuscript has no typed number and names only what the notebooks make."""

import re

from energynn.analysis import paper
from tests.processes import refused

MANUSCRIPT = "".join(path.read_text() for path in paper.MANUSCRIPT_SOURCES.values())
TEMPLATE = (paper.PAPER_FOLDER / "template.typ").read_text()
# Names that contain digits, and the level of the intervals, which the fits share.
ALLOWED = (
    r"ResNet50|ImageNet-2012|FourCastNet|Z500|A100|H[12]00|[PV]100|A40|RTX6000|ERA5|"
)
ALLOWED += r"\b[RFT][1-6]\b|top-1|500 hPa|95 per\s+cent"

# Numbers in words, too, would stay as they are when the data change; one, two and half are left
# to the language.
WORDS = r"\b(three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|"
WORDS += r"(twen|thir|for|fif|six|seven|eigh|nine)ty"
WORDS += r"|dozens?|hundreds?|thousands?|millions?|thirds?|quarters?)\b"


def prose(manuscript: str) -> str:
    """The text without comments, code that takes numbers, figures and references, labels, and
    allowed names.
    """
    text = re.sub(r"//.*", "", manuscript)
    text = re.sub(r'#import "[^)]*\)', "", text)
    text = re.sub(
        r'\b(num|range|value|judged|cited|drawing|bibliography|made-by|statements-table)\(\s*("[^"]*",?\s*)+[^)]*\)',
        "",
        text,
    )
    text = re.sub(r"@[\w-]+|<[\w-]+>|R\^2|`[^`]*`|(==|>) [01]\b", "", text)
    return re.sub(ALLOWED, "", text)


def typed(manuscript: str) -> list[str]:
    return [
        line.strip()
        for line in prose(manuscript).splitlines()
        if re.search(rf"\d|(?i:{WORDS})", line)
    ]


def test_no_number_is_typed():
    assert not typed(MANUSCRIPT)
    captions = re.findall(r"caption: \[(.*?)\],\n", TEMPLATE, flags=re.DOTALL)
    assert len(captions) >= 3 and not typed("\n".join(captions).replace("HC3", ""))


def test_missing_numbers_and_figures_are_named(tmp_path):
    refused("energynn.typ: .*numbers.json", paper.compile_manuscripts, tmp_path)
    for name in ("numbers.json", "claims.json", "artifact.json", "excluded.json"):
        (tmp_path / name).write_text("{}")
    refused(
        "energynn.typ: .*no table .*notebooks first",
        paper.compile_manuscripts,
        tmp_path,
    )
