import time

from energynn.host.progress import progress_meter


def test_progress_prints_at_most_every_two_seconds(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    # what was done before, in an earlier segment of a run, does not count for the rate
    advance = progress_meter("resnet50", 1200, "samples", done=400)
    told = []
    for step in range(1, 101):
        now = step * 0.1
        told += filter(None, [advance(8, lambda: ", loss 0.5")])
    lines = capsys.readouterr().out.splitlines()
    first = "560 of 1200 samples, 80 samples/s, 8 s left"
    assert len(lines) == len(told) == 5
    assert told[0] == first and lines[0] == f"resnet50: {first}, loss 0.5"
