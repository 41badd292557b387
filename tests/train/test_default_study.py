"""The ResNet50 runs of the default study learn."""

import pytest
from scipy import stats

from energynn.experiment import config, studies

STUDY = studies.smoke("local") + studies.one_device("local")
RUNS = [run for run in STUDY if run.workload == "resnet50" and not run.repeat]


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=config.run_id)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))]
)
def test_each_run_learns(tmp_path, train, run, seed):
    """The lower end of a 95 % interval (Clopper and Pearson) is a share of 25 %."""
    made = train(tmp_path / "run", **config.asdict(run) | dict(seed=seed))
    images = run.validation_samples
    right = round((1 - made.of_kind("epoch")[-1]["top1_error"]) * images)
    assert stats.binomtest(right, images).proportion_ci().low >= 0.25
