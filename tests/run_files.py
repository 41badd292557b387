"""The files that a measured run leaves, written by hand: readings and marks of known truth."""

import contextlib
import json
from pathlib import Path

import numpy as np

from energynn.host.files import REPOSITORY
from energynn.measure.account import account_for_run
from energynn.measure.samples import (
    events_of_kind,
    read_events,
    read_events_of_segments,
    read_pieces,
    segment_dirs,
)

ZERO_NS = 10**15  # of the monotonic clock, at which the times of these files begin


def nanoseconds(t_s):
    return ZERO_NS + int(t_s * 1e9)


def text_of(name):
    """The text of a file of the repository."""
    return (REPOSITORY / name).read_text()


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def edit(path, **fields):
    """Change fields of a JSON file; returns what it had."""
    had = json.loads(path.read_text())
    path.write_text(json.dumps(had | fields))
    return had


def read_lines(path):
    return list(map(json.loads, path.read_text().splitlines()))


def rewrite(path, change):
    """Change the lines of a file, and leave out those for which the change returns False."""
    lines = read_lines(path)
    write_lines(path, [line for line in lines if change(line) is not False])


def write_samples(folder, t_s, columns, states=(), host="h", period_s=0.04, **header):
    """Write what the sampler of a host leaves.

    columns: each sensor's description and its readings in its unit; what cannot be true is a gap.
    states: (t_s, sensor, what its device tells).
    """
    first = {"header": "energynn-samples/1", "host": host, "period_s": period_s}
    first |= {"sensors": [about for about, _ in columns]} | header
    lines = [
        {"t": nanoseconds(t), "states": {sensor: told}} for t, sensor, told in states
    ]
    rows = np.stack([values for _, values in columns], axis=1).round(3)
    rows = np.where((rows >= 0) & (rows < np.inf), rows, None)
    for t, row in zip(t_s, rows.tolist(), strict=True):
        lines.append({"t": nanoseconds(t), "w": nanoseconds(t), "v": row})
    lines.sort(key=lambda line: line["t"])
    write_lines(folder / f"samples-{host}.jsonl", [first, *lines])


def write_marks(folder, marks, rank=0, host="h"):
    """Write the events of a rank: (event, t_s, what else it tells)."""
    events = []
    for event, t_s, more in marks:
        clocks = {"t_mono_ns": nanoseconds(t_s), "t_wall_ns": nanoseconds(t_s)}
        events.append({"event": event, "host": host} | clocks | more)
    write_lines(folder / f"events-rank{rank}.jsonl", events)


def write_training(folder, begin_s, end_s, rank=0, host="h", **told):
    """Write the events of a rank that trains, and what it tells at its start."""
    marks = [("rank_start", min(0.0, begin_s), told)]
    marks += [("training_start", begin_s, {}), ("training_end", end_s, {})]
    write_marks(folder, marks, rank, host)


def newest_start(runs_dir, ranks=2):
    """The newest segment and when its last rank began to train; None while not all have, or
    there is none.
    """
    with contextlib.suppress(
        FileNotFoundError
    ):  # a start killed before its first checkpoint is moved aside right now
        for run_json in Path(runs_dir).glob("local/*/run.json"):
            segment = segment_dirs(run_json.parent)[-1]
            begun = events_of_kind(read_events(segment), "training_start")
            if len(begun) == ranks:
                return segment, begun[-1]["t_mono_ns"]
    return None


def last_sample_ns(folder):
    """When the samplers of a start have read last."""
    pieces = map(next, map(read_pieces, folder.glob("samples-*.jsonl")))
    return max(piece.t_ns[-1] for piece in pieces)


def judged(folder, thresholds=None):
    """Account for a run."""
    return account_for_run(read_events_of_segments(folder), thresholds or {})


def letters(found):
    """The tests that doubt a run."""
    return {reason[0] for reason in found["doubts"]}
