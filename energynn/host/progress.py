"""Lines for a person: how far something long is, and how much an energy is."""

import shutil
import sys
import textwrap
import time
from collections.abc import Callable

from energynn.host.texts import escape_controls

PROGRESS_PERIOD_S = 2.0  # between two lines


def entry_text(state: str, name: str, words: str) -> str:
    """Write a line, and below it what is to be said of it, on lines of 80 columns; paths stay
    whole.
    """
    said = textwrap.fill(words, 68, break_on_hyphens=False, break_long_words=False)
    return f"{state:10} {name}\n{textwrap.indent(said, ' ' * 11)}"


def print_lines(text: str) -> None:
    """Print lines for a person at once; on a terminal none is wider than that."""
    text = escape_controls(text, kept="\n\t")
    if sys.stdout and sys.stdout.isatty():
        wrap = textwrap.TextWrapper(
            shutil.get_terminal_size().columns,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        text = "\n".join(map(wrap.fill, text.splitlines()))
    print(text, flush=True)


def energy_text(energy_J: float) -> str:
    """Write an energy in Wh, or from 1 kWh on in kWh, with three digits."""
    unit, size_J = ("kWh", 3.6e6) if abs(energy_J) >= 0.9995 * 3.6e6 else ("Wh", 3600)
    three_digits = float(f"{energy_J / size_J:.3g}")
    return f"{three_digits:,.12g} {unit}"


def accuracy_text(energy_J: float, wrong_J: float) -> str:
    """Say how wrong an energy may be at most, bound and band of its sensors together."""
    percent = 100 * wrong_J / energy_J
    return f"good to within {percent:.{0 if percent >= 1 else 2}f} %"


def progress_meter(
    label: str, total: int, unit: str, done: int = 0
) -> Callable[..., str]:
    """Make a function to call with each number done; at most every two seconds it tells how it
    goes, and returns that.

    done: before. What ``more`` returns is told, too; it is called only where a line is due.
    """
    begun_s = last_s = time.monotonic()
    done_before = done

    def advance_progress(number: int, more: Callable[[], str] = str) -> str:
        nonlocal done, last_s
        done += number
        now_s = time.monotonic()
        # Later lines are rarer, so that weeks have a few thousand of them.
        if now_s - last_s < max(PROGRESS_PERIOD_S, 0.005 * (now_s - begun_s)):
            return ""
        last_s = now_s
        rate = (done - done_before) / (now_s - begun_s)
        left_s = (total - done) / rate
        told = f"{done} of {total} {unit}, {rate:.3g} {unit}/s, {left_s:.0f} s left"
        print(f"{label}: {told}{more()}", flush=True)
        return told

    return advance_progress
