"""The comparison with the reference names the run that was measured badly, and a remedy."""

import pandas as pd

from energynn.analysis import reference
from energynn.experiment import config, studies
from energynn.host.files import write_json


def compared(monkeypatch, tmp_path, coverages):
    """Compare a default study whose first runs have these coverages, and the others are missing."""
    names = [config.run_id(run) for run in studies.smoke("local")]
    runs = pd.DataFrame({"run_id": names[: len(coverages)], "coverage": coverages})
    ones = "optimizer_steps", "global_batch_size", "samples_trained", "devices"
    runs = runs.assign(**dict.fromkeys(ones, 1), samples_in_training=99)
    runs = runs.assign(top1_error=0.1, z500_rmse_m=1.0, persistence_m=1.2)
    runs = runs.assign(workload="resnet50", stage="")
    runs["run_dir"] = [str(tmp_path / "local" / name) for name in runs["run_id"]]
    monkeypatch.setattr(reference.results, "load_records", lambda _: runs)
    write_json(tmp_path / "numbers.json", {})
    lines, _ = reference.compare_with_reference(tmp_path, tmp_path)
    return runs, "\n".join(lines)


def test_the_run_that_was_sampled_worst_is_named_with_a_remedy(monkeypatch, tmp_path):
    number = len(studies.smoke("local"))
    _, text = compared(monkeypatch, tmp_path, [1.0] * number)
    assert "PASS  coverage_least" in text and "mv " not in text
    runs, text = compared(monkeypatch, tmp_path, [1.0] * (number - 2) + [0.9, 0.98])
    worst = runs["run_dir"].iloc[-2]
    assert "FAIL  coverage_least" in text and text.count(f"mv {worst} /tmp") == 1
    for left in (number - 2, 0):
        _, text = compared(monkeypatch, tmp_path, [1.0] * left)
        assert f"{number - left} runs of the default study are not there" in text
