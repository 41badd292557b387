"""Runs on storage that shows late what is written, or stands still: none ends for that, and no sample is lost."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from energynn import records
from energynn.files import REPOSITORY
from energynn.measure.samples import read_samples
from tests.processes import wait_until
from tests.test_launch import TINY, only_run, python_run

STALL_S = 60


class SlowDisk:
    """A folder on tests/slow_disk.py."""

    def __init__(self, place):
        self.folder, self.counts_file = place / "slow", place / "counts.json"
        for folder in (place / "backing", self.folder):
            folder.mkdir()
        words = [str(place / "backing"), str(self.folder), str(self.counts_file)]
        script = REPOSITORY / "tests" / "slow_disk.py"
        self.server = subprocess.Popen([sys.executable, str(script), *words], stderr=subprocess.PIPE, text=True)
        wait_until(lambda: self.server.poll() is not None or self.counts_file.exists(), 20)
        if self.server.poll() is not None:
            pytest.skip(f"needs the right to mount FUSE: {self.server.stderr.read().splitlines()[-1]}")

    def requests(self) -> int:
        """Requests so far, without what is appended to open files, which a client keeps and answers by itself."""
        return sum(number for kind, number in json.loads(self.counts_file.read_text()).items() if kind != "write")

    def close(self):
        self.server.send_signal(signal.SIGCONT)
        subprocess.run(["umount", "-l", str(self.folder)], check=True)
        self.server.wait(30)


@pytest.fixture
def slow_disk(tmp_path):
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs /dev/fuse")
    with contextlib.closing(SlowDisk(tmp_path)) as disk:
        yield disk


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_on_a_client_that_caches_writes_asks_little_and_survives_a_stall(tmp_path, slow_disk):
    """Appended lines reach the storage after 30 s, if nobody forces them; then it answers nothing for a minute."""
    runs_dir = slow_disk.folder / "runs"
    started = python_run(runs_dir, TINY | {"devices": 2, "epochs": 70, "step_period_s": 0.12})  # for 84 s
    while "epoch" not in (line := started.stdout.readline()):  # its events are not to be seen yet
        assert line, "it ended before it trained"
    time.sleep(2)
    before, begun = slow_disk.requests(), time.monotonic()
    time.sleep(10)
    per_s = (slow_disk.requests() - before) / (time.monotonic() - begun)
    run_dir = only_run(tmp_path / "backing" / "runs")
    written = next(run_dir.glob("samples-*.jsonl")).stat().st_size
    assert written > 10_000, "samples were forced to disk meanwhile"
    stalled_at = time.time_ns()
    slow_disk.server.send_signal(signal.SIGSTOP)
    time.sleep(STALL_S)
    assert started.poll() is None, started.stdout.read()
    slow_disk.server.send_signal(signal.SIGCONT)
    went_on_at = time.time_ns()
    output = started.communicate(timeout=300)[0]
    assert started.returncode == 0, output
    record = records.read(run_dir)
    assert record["status"] == "finished" and record["valid"], record["invalid_reasons"]
    assert records.check(tmp_path / "backing" / "runs") == []
    samples = read_samples(next(run_dir.glob("samples-*.jsonl")))
    during = samples.wall_ns[(samples.wall_ns > stalled_at) & (samples.wall_ns < went_on_at)]
    assert len(during) > 0.8 * STALL_S / TINY["sampling_period_s"], "samples were lost in the stall"
    assert per_s <= 5, f"{per_s:.1f} requests a second"
    print(f"{per_s:.1f} requests a second, {len(during)} samples in {STALL_S} s of stall")
