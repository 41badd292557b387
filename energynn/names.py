"""Names that people type, and the known one that they probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def meant(name: str, known: Iterable[str]) -> str:
    """The known name that is nearest to a slip, or nothing where none is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return near[0] if near else ""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Words for the end of a message: "; did you mean X?", or nothing where no known name is near."""
    near = meant(name, known)
    return f"; did you mean {near}?" if near else ""
