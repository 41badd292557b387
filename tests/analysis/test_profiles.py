"""Power profiles: what is in them, from own records and imported perun files, without losing
peaks.
"""

import json

import numpy as np
import pandas as pd
import pytest

from energynn import config
from energynn.analysis import profiles


def square_wave(
    period_s=10.0, low_W=50.0, high_W=300.0, share=0.7, seconds=600.0, step_s=0.5
):
    t_s = np.arange(0, seconds, step_s)
    power_W = np.where(t_s % period_s < share * period_s, high_W, low_W)
    return pd.DataFrame({"time_s": t_s, "device": "GPU-0", "power_W": power_W})


def test_a_square_wave_is_described_by_its_own_numbers():
    found = profiles.summary(square_wave())
    assert found["mean_W"] == pytest.approx(0.7 * 300 + 0.3 * 50)
    assert found["spread_W"] == pytest.approx(250 * (0.7 * 0.3) ** 0.5)
    assert found["baseline_W"] == 50 and found["near_baseline"] == pytest.approx(0.3)
    assert found["fallbacks_per_h"] == pytest.approx(360, rel=0.02)
    assert found["period_s"] == pytest.approx(10, rel=0.02)


def test_idle_power_is_the_baseline_where_it_was_measured():
    never_idle = square_wave(low_W=200.0)
    # relative to its own lowest
    assert profiles.summary(never_idle)["near_baseline"] == pytest.approx(0.3)
    found = profiles.summary(never_idle, idle_W=40.0)
    assert (
        found["baseline_W"] == 40
        and found["near_baseline"] == 0
        and found["fallbacks_per_h"] == 0
    )


def test_noise_has_no_period_and_a_constant_no_fall_back():
    flat = square_wave(low_W=300.0)
    noise = flat.assign(power_W=300 + np.random.default_rng(0).normal(0, 30, len(flat)))
    assert np.isnan(profiles.summary(noise)["period_s"])
    found = profiles.summary(flat)
    assert (
        found["near_baseline"] == 0
        and found["fallbacks_per_h"] == 0
        and np.isnan(found["period_s"])
    )
    assert profiles.summary(flat.iloc[:0]) == {}


def test_own_traces_lie_within_the_training(synthetic, tmp_path):
    run_dir = synthetic.write_run(
        tmp_path, config.make("resnet50", devices=2, local_batch_size=16)
    )
    profile = profiles.load(run_dir, "cpu", 0.5)
    length_s = json.loads((run_dir / "record.json").read_text())["training_time_s"]
    assert (
        0 < profile["time_s"].min()
        and length_s - 1 < profile["time_s"].max() < length_s
    )
    found = profiles.summary(profile)
    assert found["baseline_W"] == pytest.approx(5, abs=0.1) and found[
        "period_s"
    ] == pytest.approx(5, rel=0.1)
    assert profiles.load(run_dir, "gpu").empty


def test_segments_follow_one_another(synthetic, tmp_path):
    first = synthetic.write_run(tmp_path, config.make("resnet50"), time_s=30.0)
    second = first / "segment-2"
    second.mkdir()
    for path in [*first.glob("samples-*.jsonl"), *first.glob("events-*.jsonl")]:
        (second / path.name).write_text(path.read_text())
    record = json.loads((first / "record.json").read_text())
    record |= {
        "segments": [{"training_time_s": 30.0}, {"training_time_s": 30.0}],
        "training_time_s": 60.0,
    }
    (first / "record.json").write_text(json.dumps(record))
    profile = profiles.load(first, "cpu", 0.5)
    assert profile["time_s"].max() > 59 and profile["time_s"].is_monotonic_increasing


def test_available_names_what_has_a_trace(synthetic, tmp_path):
    with_trace = synthetic.write_run(tmp_path, config.make("resnet50"))
    synthetic.write_run(tmp_path, config.make("resnet50", seed=1), samples=False)
    (tmp_path / "local" / "broken").mkdir()
    (tmp_path / "local" / "broken" / "record.json").write_text("{")
    there = profiles.available(tmp_path)
    assert there["run_dir"].to_list() == [str(with_trace)] and there[
        "component"
    ].to_list() == ["cpu"]
    assert profiles.available(tmp_path / "nothing").empty
