import time

import pytest
import torch

from energynn.measure.samples import read_phases
from energynn.train import phases
from energynn.train.phases import PhaseTimer
from tests.train.conftest import phase_times


class Clock:
    """A GPU and a CPU of which the program tells what time it is: events of the queue are
    recorded at ``gpu_ms``.
    """

    def __init__(self, monkeypatch):
        clock = self
        self.gpu_ms = self.cpu_ms = 0.0

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):  # an idle GPU comes to it at once
                self.at_ms = clock.gpu_ms = max(clock.gpu_ms, clock.cpu_ms)

            def elapsed_time(self, other):
                return other.at_ms - self.at_ms

        def synchronize():  # the CPU waits for the GPU
            self.cpu_ms = self.gpu_ms = max(self.cpu_ms, self.gpu_ms)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        monkeypatch.setattr(
            phases.time, "monotonic_ns", lambda: int((1e6 + self.cpu_ms) * 1e6)
        )


def test_on_a_gpu_each_instant_is_one_phase_s_whether_the_loader_or_the_gpu_is_waited_for(
    tmp_path, monkeypatch
):
    """Steps of 350 ms on the GPU whose launch takes the CPU 30 ms; the loader takes 560 ms, then
    10 ms.
    """
    clock = Clock(monkeypatch)
    busy_ms = {"host_to_device": 20, "forward": 100, "backward": 220, "optimizer": 10}
    for folder, loading_ms in ((tmp_path / "loader", 560), (tmp_path / "gpu", 10)):
        folder.mkdir()
        timer = PhaseTimer(torch.device("cuda"), folder, 0)

        def batches(loading_ms=loading_ms):
            for number in range(3):
                clock.cpu_ms += loading_ms
                yield number

        begun_ms = clock.cpu_ms
        for _ in timer.loading(batches()):
            for phase, milliseconds in busy_ms.items():
                with timer(phase):
                    clock.gpu_ms += milliseconds
            clock.cpu_ms += 30
        timer.write()
        found = phase_times(folder)[0]
        expected = {phase: 3 * each_ms / 1e3 for phase, each_ms in busy_ms.items()}
        expected["data_loading"] = 0.01
        if loading_ms == 560:
            expected["data_loading"] = 0.56 + 2 * (0.03 + 0.56 - 0.35)
        told = {phase: found[phase] for phase in expected}
        assert told == pytest.approx(expected, abs=1e-4), folder.name
        window_s = (max(clock.cpu_ms, clock.gpu_ms) - begun_ms) / 1e3
        assert sum(found.values()) == pytest.approx(window_s, abs=0.031)


def test_a_phase_that_is_broken_off_counts(tmp_path):
    timer = PhaseTimer(torch.device("cpu"), tmp_path, 0)
    with pytest.raises(KeyError), timer("evaluation"):
        time.sleep(0.01)
        raise KeyError
    timer.write()
    assert phase_times(tmp_path)[0]["evaluation"] >= 0.01


def test_every_phase_is_on_disk_with_its_instants(tmp_path):
    timer = PhaseTimer(torch.device("cpu"), tmp_path, 3)
    marks = []
    for phase in ("forward", "backward", "forward"):
        begun = time.monotonic_ns()
        with timer(phase):
            time.sleep(0.01)
        marks.append((phase, begun, time.monotonic_ns()))
        timer.write()
    kinds, begin_ns, end_ns, names = read_phases(tmp_path, [3])[3]
    assert names == list(phases.PHASE_NAMES)
    found = zip(kinds, begin_ns, end_ns, marks, strict=True)
    for kind, begin, end, (phase, earliest, latest) in found:
        assert names[kind] == phase
        assert earliest <= begin < end <= latest
        assert latest - earliest - (end - begin) < 5e6
    assert (begin_ns[1:] >= end_ns[:-1]).all()
