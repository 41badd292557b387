import json
import math
import time

import pytest
import torch

from energynn.measure.samples import Events, read_phases
from energynn.train import phases
from energynn.train.phases import PhaseTimer, Progress, require_finite


def test_events_are_on_disk_at_once_and_never_lost(tmp_path):
    events = Events(tmp_path, 3)
    before = time.monotonic_ns()
    events.mark("training_start", dataset_samples=5)
    path = tmp_path / "events-rank3.jsonl"
    first = json.loads(path.read_text())  # read while the file is open
    assert first["event"] == "training_start" and first["dataset_samples"] == 5
    assert before <= first["t_mono_ns"] <= time.monotonic_ns()
    assert abs(first["t_wall_ns"] - time.time_ns()) < 5e9
    Events(tmp_path, 3).mark("rank_end", status="finished")
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["training_start", "rank_end"]


def test_phases_add_up_to_the_time_that_passed():
    timer = PhaseTimer(torch.device("cpu"))

    def slow_batches():
        for number in range(3):
            time.sleep(0.02)
            yield number

    received = []
    for batch in timer.loading(slow_batches()):
        received.append(batch)
        with timer("forward"):
            time.sleep(0.01)
    totals = timer.totals_s()
    assert received == [0, 1, 2]
    assert list(totals) == [f"{phase}_s" for phase in phases.PHASES]
    assert 0.06 <= totals["data_loading_s"] < 0.5 and 0.03 <= totals["forward_s"] < 0.5
    assert totals["backward_s"] == totals["evaluation_s"] == 0
    assert timer.totals_s() == totals


def test_every_phase_is_on_disk_with_its_instants(tmp_path):
    timer = PhaseTimer(torch.device("cpu"), tmp_path, 3)
    marks = []
    for phase in ("forward", "backward", "forward"):
        begun = time.monotonic_ns()
        with timer(phase):
            time.sleep(0.01)
        marks.append((phase, begun, time.monotonic_ns()))
        timer.totals_s()
    kinds, begin_ns, end_ns, names = read_phases(tmp_path)[3]
    assert names == list(phases.PHASES) and [names[kind] for kind in kinds] == [phase for phase, _, _ in marks]
    for begin, end, (_, earliest, latest) in zip(begin_ns, end_ns, marks, strict=True):
        assert earliest <= begin < end <= latest and latest - earliest - (end - begin) < 5e6
    assert (begin_ns[1:] >= end_ns[:-1]).all()


def test_progress_prints_at_most_every_two_seconds(monkeypatch, capsys, tmp_path):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = Progress("resnet50", epochs=2, steps=50, global_batch_size=8, events=Events(tmp_path, 0))
    for step in range(100):
        now = (step + 1) * 0.1
        progress.step(step // 50, step % 50, torch.tensor(0.5))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[0] == "resnet50: epoch 1/2, step 20/50, loss 0.5, 80.0 samples/s, 8 s left"
    progress.end({"top1_error": 0.25})
    assert capsys.readouterr().out == "resnet50: 2 epochs, 800 samples in 10.0 s (80.0 samples/s): top1_error 0.25\n"
    told = [json.loads(line) for line in (tmp_path / "events-rank0.jsonl").read_text().splitlines()]
    assert [event["samples_trained"] for event in told] == [160, 320, 480, 640, 800]
    assert {event["samples_to_train"] for event in told} == {800}
    Progress("resnet50", 1, 1, 1, events=None).end({})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_located(bad):
    require_finite([1.0, 2.0], epoch=0)
    with pytest.raises(ValueError, match="epoch 4, step 52.*learning_rate"):
        require_finite([1.0, bad, 1.0], epoch=3, first_step=50)
