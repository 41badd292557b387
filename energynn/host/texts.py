"""Texts of others on their way out: to a file, a terminal, the script of a page, a spreadsheet."""

import json
import re
from collections.abc import Callable

# half characters that stand for no byte
NO_BYTE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
FORMULA = tuple("=+-@＝＋－＠")  # how what a spreadsheet computes begins


def each(value, change: Callable[[str], str]):
    """Change every text of a JSON value, names too."""
    match value:
        case str():
            return change(value)
        case dict():
            return {each(key, change): each(one, change) for key, one in value.items()}
        case list():
            return [each(one, change) for one in value]
    return value


def unicode(text: str) -> str:
    r"""What every program can read: bytes that are no text, as names may have, as ``\xf6``."""
    return (
        NO_BYTE.sub("?", text)
        .encode(errors="surrogateescape")
        .decode(errors="backslashreplace")
    )


def printable(text: str, kept: str = "") -> str:
    r"""Write as ``\x1b`` what moves a cursor, ends a line, or turns the direction of writing."""
    return "".join(
        each if each.isprintable() or each in kept else ascii(each)[1:-1]
        for each in text
    )


class ForScript(json.JSONEncoder):
    """JSON that may stand in a page's script: no text in it ends the script, or begins another."""

    def encode(self, value) -> str:
        return super().encode(value).replace("<", "\\u003c")


def cell(value):
    """A text that a spreadsheet would take for a formula, or a further row, as one text of a cell.

    Numbers are as they are.
    """
    if not isinstance(value, str):
        return value
    shown = printable(value)
    try:
        float(shown)
    except ValueError:
        return f"'{shown}" if shown.startswith(FORMULA) else shown
    return shown
