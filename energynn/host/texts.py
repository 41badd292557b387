"""Texts of others on their way out: to a file, a terminal, the script of a page, a spreadsheet."""

import json
import re
from collections import defaultdict
from collections.abc import Callable

# half characters that stand for no byte
LONE_SURROGATE_PATTERN = re.compile("[\ud800-\udc7f\udd00-\udfff]")
FORMULA_STARTS = tuple("=+-@＝＋－＠")  # how what a spreadsheet computes begins


def map_texts(value, change: Callable[[str], str]):
    """Change every text of a JSON value, names too."""
    match value:
        case str():
            return change(value)
        case dict():
            return {
                map_texts(key, change): map_texts(one, change)
                for key, one in value.items()
            }
        case list():
            return [map_texts(one, change) for one in value]
    return value


def escape_non_text_bytes(text: str) -> str:
    r"""Write what every program can read: bytes that are no text, as names have, as ``\xf6``."""
    return (
        LONE_SURROGATE_PATTERN.sub("?", text)
        .encode(errors="surrogateescape")
        .decode(errors="backslashreplace")
    )


def escape_controls(text: str, kept: str = "") -> str:
    r"""Write as ``\x1b`` what moves a cursor, ends a line, or turns the direction of writing."""
    return "".join(
        each if each.isprintable() or each in kept else ascii(each)[1:-1]
        for each in text
    )


class ScriptEncoder(json.JSONEncoder):
    """JSON that may stand in a page's script: no text in it ends the script, or begins another."""

    def encode(self, value) -> str:
        return super().encode(value).replace("<", "\\u003c")


def spreadsheet_cell(value):
    """Write a text that a spreadsheet would take for a formula, or a further row, as one text of a
    cell.

    Numbers are as they are.
    """
    if not isinstance(value, str):
        return value
    shown = escape_controls(value)
    try:
        float(shown)
    except ValueError:
        return f"'{shown}" if shown.startswith(FORMULA_STARTS) else shown
    return shown


def group_by_reason(reasons: dict[str, str], shown: int = 1) -> list[str]:
    """Tell each reason once, by how many names have it, and so many of them first."""
    names = defaultdict(list)
    for name, reason in reasons.items():
        names[reason].append(name)
    return [
        f"{len(these)} {reason}: {', '.join(these[:shown])}"
        for reason, these in names.items()
    ]
