"""Planning: nothing beats what it shows, limits hold, and what cannot be had is said."""

import numpy as np
import pytest

from energynn import config
from energynn.forecast import accuracy, plan
from energynn.forecast import fit as fits


def planned(fit, limits, devices=256):
    run = plan.base_run(fit, {})
    return plan.make(fit, plan.grid(fit, run, devices), limits)


@pytest.mark.parametrize(
    "workload, system", [("resnet50", "horeka-a100"), ("fourcastnet", "horeka-h100")]
)
@pytest.mark.parametrize(
    "limits", [{}, {"global_batch_size": 32}, {"time_h": 30, "energy_kWh": 300}]
)
def test_the_pareto_set_is_that_of_every_pair(workload, system, limits):
    fit = fits.published(workload, system)
    found = planned(fit, limits, 64)
    costs = np.stack([found.values[name][:, 0] for name in plan.JUDGED], axis=1)
    bounds = {
        "global_batch_size": np.array([run.global_batch_size for run in found.runs])
    }
    bounds |= {name: of[:, 0] for name, of in found.values.items()}
    meets = np.all(
        [
            np.isfinite(costs[:, 0]),
            *(bounds[name] <= of for name, of in limits.items()),
        ],
        axis=0,
    )
    able = costs[meets]
    beats = [(able <= row).all(axis=1) & (able < row).any(axis=1) for row in able]
    expected = able[~np.any(beats, axis=1)]
    assert {tuple(row) for row in costs[found.pareto]} == {
        tuple(row) for row in expected
    }
    fastest, frugal = (found.choices[name][0] for name in ("fastest", "most frugal"))
    assert costs[fastest, 0] == able[:, 0].min()
    assert (
        found.values["energy_kWh"][frugal, 0]
        == found.values["energy_kWh"][meets, 0].min()
    )


def test_rows_are_configurations_with_their_marks(fitted):
    found = planned(fitted, {"time_h": 3.0, "energy_kWh": 29.0})
    answer = plan.as_json(found)
    for row, index in zip(answer["pareto"], found.pareto, strict=True):
        assert row["time_h"]["value"] == pytest.approx(found.values["time_h"][index, 0])
        assert row["time_h"]["value"] <= 3 and row["energy_kWh"]["value"] <= 29
        sizes = {name: row[name] for name in ("devices", "local_batch_size")}
        run = config.make(
            "resnet50", preset="paper", device="gpu", system="horeka-a100", **sizes
        )
        assert row["run_id"] == config.run_id(run)
        assert any("accuracy" in words for words in row["outside"]) == (
            row["global_batch_size"] > 8192
        )
        is_open = row["time_h"]["high"] > 3 or row["energy_kWh"]["high"] > 29
        assert any("about even odds" in words for words in row["outside"]) == is_open
    text = plan.text(planned(fitted, {}, 1))  # all choices are the same
    assert text.split("\n\n")[0].count("\n") == 1
    paper = config.make("fourcastnet", preset="paper")
    assert accuracy.threshold(paper) == 64 and len(accuracy.thresholds(paper)) == 3
    # the study tells nothing of other data
    assert accuracy.threshold(config.make("fourcastnet")) == 0


def test_an_impossible_wish_names_the_least_of_each(fitted):
    with pytest.raises(
        ValueError,
        match="nothing on at most 256 devices keeps --deadline-h 0.1; the least of each alone: --deadline-h",
    ):
        planned(fitted, {"time_h": 0.1})
    with pytest.raises(
        ValueError,
        match="least of each alone: --deadline-h [0-9.]+ or --gpu-hours [0-9.]+$",
    ):
        planned(fitted, {"time_h": 0.1, "gpu_hours": 1})


def test_what_a_plan_cannot_have_is_refused(fitted):
    with pytest.raises(
        ValueError, match="devices: a plan chooses it; limit it by --devices or"
    ):
        plan.base_run(fitted, {"devices": 64})
    with pytest.raises(
        ValueError, match="devices: 512 asked; on horeka-a100 choose at most 256"
    ):
        plan.grid(fitted, plan.base_run(fitted, {}), 512)
