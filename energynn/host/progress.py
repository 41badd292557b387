"""Lines for a person: how far something long is, what a run took, how much energy that is."""

import shutil
import sys
import textwrap
import time
from collections.abc import Callable

from energynn.host.texts import escape_controls

PROGRESS_PERIOD_S = 2.0  # between two lines
# by data set
CLASSES_OF_DATASET = {"photographs": 10, "photographs_large": 10, "imagenet": 1000}


def format_entry(state: str, name: str, words: str) -> str:
    """A line, and below it what is to be said of it, on lines of 80 columns; paths stay whole."""
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
    """An energy in Wh, or from 1 kWh on in kWh, with three digits."""
    unit, size_J = ("kWh", 3.6e6) if abs(energy_J) >= 0.9995 * 3.6e6 else ("Wh", 3600)
    three_digits = float(f"{energy_J / size_J:.3g}")
    return f"{three_digits:,.12g} {unit}"


def accuracy_text(energy_J: float, wrong_J: float) -> str:
    """Say how wrong an energy may be at most, bound and band of its sensors together."""
    percent = 100 * wrong_J / energy_J
    return f"good to within {percent:.{0 if percent >= 1 else 2}f} %"


def summarize_record(record) -> str:
    """What a run took, how sure that is, in which time, and how well it learned."""
    parts = []
    if energy_J := record.energy_total_J:
        # a record of before has a statistical interval in place of the bound
        wrong_J = record.energy_total_bound_J or 0.0
        wrong_J += record.energy_total_systematic_J
        parts.append(energy_text(energy_J))
        # those that were told, else those of a run that made all
        epochs = len(record.history)
        if record.status == "finished":
            epochs = epochs or record.config.get("epochs") or 1
        if "command" in record.config and epochs > 1:
            parts.append(
                f"{energy_text(energy_J / epochs)} an epoch with start and end"
            )
        parts.append(record.energy_total_provenance)
        parts.append(accuracy_text(energy_J, wrong_J))
        if record.energy_gpu_provenance == "measured" != record.energy_total_provenance:
            parts.append(f"{energy_text(record.energy_gpu_J)} of it measured (GPU)")
    parts.append(f"in {record.training_time_s or 0.0:.3g} s")
    metrics = [each for each in record.metrics.items() if isinstance(each[1], float)]
    if metrics:
        name, value = metrics[0]
        share = f"{1 - value:.0%} of the images right"
        if classes := CLASSES_OF_DATASET.get(record.config.get("dataset")):
            share += f" (chance {100 / classes:.3g}%)"
        parts.append(share if name == "top1_error" else f"{name} {value:.4g}")
    return ", ".join(parts)


def progress_meter(
    label: str, total: int, unit: str, done: int = 0
) -> Callable[..., str]:
    """A function to call with each number done; at most every two seconds it tells how it goes,
    and returns that.

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
