"""The files of a run: a writer that delays nobody, and readers that skip what was cut."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energynn.measure.samples import read_events, read_pieces
from tests.measure.worlds import sensor
from tests.run_files import write_lines

HEADER = {
    "header": "energynn-samples/1",
    "host": "h",
    "period_s": 0.1,
    "sensors": [sensor("a", "power"), sensor("b", "power")],
}
LINES = [
    b'{"t":1,"w":5,"v":[1.5,2]}',
    b'{"t":2,"w":6,"d":1,"v":[null,-3e2]}',
    b'{"t":3,"w":7,"v":[1764000000123456789,9007199254740992]}',
]


def write(path, lines):
    path.write_bytes(
        b"".join(line + b"\n" for line in [json.dumps(HEADER).encode(), *lines])
    )
    return path


def test_samples_are_read_and_a_failed_reading_is_no_number(tmp_path):
    lines = [*LINES, b'{"problem":"a cannot be read"}', b'{"t":4,"perun":{}}']
    path = write(tmp_path / "s", lines)
    found = next(read_pieces(path))
    assert found.t_ns.tolist() == [1, 2, 3]
    assert np.array_equal(
        found.readings[:2], [[1.5, 2], [np.nan, -300]], equal_nan=True
    )
    assert found.readings[2].tolist() == [1764000000123456789.0, 9007199254740992.0]
    assert found.problems == ["a cannot be read"]
    end = next(read_pieces(path, path.stat().st_size - 130))  # within a line
    assert end.t_ns.tolist() == [3]
    path.write_text("")
    assert not list(read_pieces(path))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.one_of(
        st.binary(),
        st.text().map(str.encode),
        st.from_regex(rb'\A\{"[tvw]":[^\n]*\}\Z'),
    ),
    st.integers(0, 3),
)
def test_a_damaged_line_is_counted_and_costs_no_other(tmp_path_factory, damaged, place):
    folder = tmp_path_factory.mktemp("s")
    lines = [*LINES[:place], damaged.replace(b"\n", b""), *LINES[place:]]
    found = next(read_pieces(write(folder / "s", lines)))
    assert set(found.t_ns.tolist()) >= {1, 2, 3} and found.readings.shape == (
        len(found.t_ns),
        2,
    )


@pytest.mark.parametrize(
    "line",
    [
        '{"t":9,"v":[1]}',
        '{"t":"1","v":[1,2]}',
        '{"t":1e40,"v":[1,2]}',
        '{"t":9,"v":["1",2]}',
    ],
)
def test_readings_of_other_sensors_or_types_are_no_samples(tmp_path, line):
    found = next(read_pieces(write(tmp_path / "s", [*LINES, line.encode()])))
    assert len(found.t_ns) == 3


def test_events_follow_the_monotonic_clock_and_infinity_is_none(tmp_path):
    """A wall clock that is set back meanwhile does not change their order."""
    for rank in range(2):
        lines = [
            {"event": "e0", "t_mono_ns": 0, "t_wall_ns": 10, "loss": float("inf")},
            {"event": "e1", "t_mono_ns": 1, "t_wall_ns": 3, "loss": float("inf")},
        ]
        path = tmp_path / f"events-rank{rank}.jsonl"
        write_lines(path, [*lines, ["cut"]])
        path.write_text(path.read_text() + '{"event": "cu')
    found = read_events(tmp_path)
    order = [(event["rank"], event["event"]) for event in found]
    assert order == [(0, "e0"), (0, "e1"), (1, "e0"), (1, "e1")]
    assert {event["loss"] for event in found} == {None}
