"""A training at a given pace, on one batch that stays where it is, after idling with all set up."""

import pytest

from tests.train.conftest import AFNO


def test_steps_keep_their_distance_and_use_one_batch(train, tmp_path):
    sizes = AFNO | dict(epochs=3, local_batch_size=4)
    pace = dict(
        step_period_s=0.2,
        idle_ready_s=0.4,
        states_on_device=True,
        loader_workers=2,
        learning_rate=0.0,
    )
    run = train(tmp_path / "run", "fourcastnet", **sizes, **pace)
    assert len(run.losses) > 3 and len(set(run.losses)) == 1, (
        "with a learning rate of 0, one batch has one loss"
    )
    by_name = {event["event"]: event["t_mono_ns"] / 1e9 for event in run.events()}
    training_s = by_name["training_end"] - by_name["training_start"]
    assert training_s >= 0.2 * (len(run.losses) - 1)
    idle = [event for event in run.events() if event["event"].startswith("idle")]
    assert [event["when"] for event in idle] == ["ready", "ready"]
    begin, end = (event["t_mono_ns"] / 1e9 for event in idle)
    assert end - begin >= 0.4 and end <= by_name["training_start"] <= end + 0.2
    told = run.of_kind("progress")[0]
    words = told["told"].split()  # 40 of 96 samples, 19.7 samples/s
    trained_s = told["t_mono_ns"] / 1e9 - by_name["training_start"]
    rate = pytest.approx(float(words[4]), rel=0.05)
    assert int(words[0]) / trained_s == rate, "without what was idle"
