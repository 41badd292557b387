"""A sampler is watched by process and heartbeat; its lines wait in memory while the disk does not answer."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from energynn import processes
from energynn.measure import samples
from energynn.measure.samples import ENDED, Heartbeat, Lines, Silence
from tests.processes import wait_until

HOST = os.uname().nodename
SAMPLER = """
import json, os, sys, time
from energynn.measure.samples import Heartbeat
heartbeat = Heartbeat()
with open(sys.argv[1], "w") as file:
    file.write(json.dumps({"header": 1, "pid": os.getpid(), "heartbeat": heartbeat.file}) + chr(10))
print("ready", flush=True)
while True:
    heartbeat.beat()
    time.sleep(0.01)
"""


@pytest.fixture
def silence(tmp_path, monkeypatch):
    monkeypatch.setattr(Silence, "LOOK_S", 0.02)
    monkeypatch.setattr(Silence, "NOTICED_S", 0.2)
    monkeypatch.setattr(Silence, "EVALUATION_S", 0.3)
    monkeypatch.setenv("ENERGYNN_SILENCE_LIMIT_S", "0.6")
    monkeypatch.setenv("ENERGYNN_FIRST_SAMPLE_LIMIT_S", "0.3")
    return Silence(tmp_path)


@pytest.fixture
def sampler(tmp_path):
    command = [sys.executable, "-c", SAMPLER, str(tmp_path / f"samples-{HOST}.jsonl")]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    started.stdout.readline()
    yield started
    started.kill()
    started.wait()


def look(silence, seconds=0.0):
    """What it says after so many seconds of looking all the time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        silence()
        time.sleep(0.01)
    time.sleep(0.03)
    return silence()


def test_a_dead_sampler_is_known_at_once_whatever_its_file_does(tmp_path, silence, sampler):
    path = tmp_path / f"samples-{HOST}.jsonl"
    assert look(silence, 0.9) == "" and not silence.notice(), "its file does not grow, and that does not matter"
    with open(path, "a") as file:
        file.write("more\n")  # as an orphan or a file system that is late may
    sampler.kill()
    assert look(silence, 0.05) == f"the sampler is dead on {HOST}"


def test_a_silent_sampler_is_noticed_first_and_then_said(silence, sampler):
    assert look(silence) == ""
    sampler.send_signal(signal.SIGSTOP)
    assert look(silence, 0.3) == "" and silence.notice()
    assert look(silence, 0.5) == f"no sample for 1 s on {HOST}"
    sampler.send_signal(signal.SIGCONT)
    assert look(silence, 0.1) == "" and not silence.notice()


def test_time_in_which_all_was_stopped_is_no_silence(silence, sampler):
    """As a laptop that slept, or a job that was suspended: whoever looks was stopped, too."""
    assert look(silence) == ""
    sampler.send_signal(signal.SIGSTOP)
    time.sleep(1)
    assert silence() == "" and not silence.notice()


def test_no_first_sample_and_a_sampler_of_another_host_only(tmp_path, silence):
    assert look(silence) == ""
    assert look(silence, 0.4) == "no sample in the first 0 s"
    (tmp_path / "samples-another.jsonl").write_text("")
    assert look(silence) == "", "the ranks run elsewhere"


def test_a_sampler_that_has_ended_leaves_time_for_peruns_evaluation(tmp_path, silence):
    heartbeat = Heartbeat()
    header = {"header": 1, "pid": os.getpid(), "heartbeat": heartbeat.file}
    (tmp_path / f"samples-{HOST}.jsonl").write_text(json.dumps(header) + "\n")
    heartbeat.beat(ENDED)
    assert look(silence, 0.1) == ""
    assert look(silence, 0.4).startswith("perun's evaluation takes longer")


def read_some(pipe, wanted):
    text = b""
    while text.count(b"\n") < wanted:
        text += os.read(pipe, 2**16)
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def stalled(tmp_path, monkeypatch):
    """A pipe that nobody reads: a write to it waits, as one to a file system that stands still."""
    monkeypatch.setattr(Lines, "AGAIN_S", 0.02)
    monkeypatch.setattr(Lines, "FORCE_S", 0.02)
    os.mkfifo(tmp_path / "file")
    reader = os.open(tmp_path / "file", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    yield Lines(tmp_path / "file"), reader
    os.close(reader)


def test_who_adds_a_line_never_waits_and_none_is_lost(stalled):
    lines, reader = stalled
    longest_s = 0.0
    for number in range(3000):
        begun = time.monotonic()
        lines.add({"number": number, "filler": "x" * 80})
        longest_s = max(longest_s, time.monotonic() - begun)
    assert not lines.flush(0.2), "the pipe holds 64 KiB only"
    assert [line["number"] for line in read_some(reader, 3000)] == list(range(3000))
    assert lines.flush(5) and longest_s < 1


def test_memory_is_bounded_and_what_was_lost_is_said(stalled, monkeypatch):
    monkeypatch.setattr(Lines, "MOST_B", 100_000)
    lines, reader = stalled
    for number in range(3000):
        lines.add({"number": number, "filler": "x" * 80})
    kept = lines.taken_B
    assert kept < 200_000
    read = 0
    while read < kept:
        read += len(os.read(reader, 2**16))
    lines.add({"number": -1})
    problem, last = read_some(reader, 2)
    assert "lines were lost" in problem["problem"] and last == {"number": -1}


def test_a_full_disk_is_said_once_and_written_to_when_there_is_room(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Lines, "AGAIN_S", 0.02)
    full, write = [True], os.write

    def write_where_there_is_room(file, data):
        if full and file == lines.file:
            raise OSError(28, "No space left on device")
        return write(file, data[:7])  # a part only, as at the edge of what is free

    lines = Lines(tmp_path / "file")
    monkeypatch.setattr(samples.os, "write", write_where_there_is_room)
    for number in range(5):
        lines.add({"number": number})
    assert not lines.flush(0.2)
    full.clear()
    wait_until(lambda: lines.flush(1), 10)
    assert capsys.readouterr().err.count("No space left on device; free some space") == 1
    assert [json.loads(line)["number"] for line in (tmp_path / "file").read_text().splitlines()] == list(range(5))


def test_a_cut_line_of_an_earlier_writer_does_not_swallow_the_first_one(tmp_path):
    (tmp_path / "file").write_text('{"v": [1, 2')
    lines = Lines(tmp_path / "file")
    lines.add({"header": 1})
    assert lines.flush(5)
    assert (tmp_path / "file").read_text() == '{"v": [1, 2\n{"header":1}\n'


@pytest.mark.parametrize(
    "place, last_word, words",
    [
        ("", "", f"the sampler is dead on {HOST}"),
        ("", json.dumps({"status": {"ended": True}}, separators=(",", ":")), ""),  # perun's evaluation may go on
        ("another boot ", "", ""),  # a container's sampler, which this process cannot see
    ],
)
def test_a_sampler_that_is_killed_before_it_was_found_is_dead(tmp_path, silence, sampler, place, last_word, words):
    sampler.kill()
    sampler.wait()
    name = f"{place}{processes.name_of_this_process().rpartition(' ')[0]} {sampler.pid}"
    header = {"header": 1, "pid": sampler.pid, "process": name, "heartbeat": 3}
    (tmp_path / f"samples-{HOST}.jsonl").write_text(f"{json.dumps(header)}\n{last_word}\n")
    assert look(silence) == words
