"""Compare what the default study gave with the committed reference: PASS or FAIL for each band."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from energynn import config, records, studies
from energynn.analysis import results
from energynn.files import shipped
from energynn.reading import json_table

REFERENCE = shipped("paper") / "reference.json"


def compare(runs_dir: Path = Path("runs"), build_dir: Path = Path("build")) -> tuple[list[str], bool]:
    """One line for each band of paper/reference.json, and what to open; the second value is whether all passed.

    Each band has a quantity (of ``study_quantities``, or a name in numbers.json), the lowest and the highest value
    that count as the same, and why. Raises ValueError if the paper was not built yet.
    """
    numbers_path = build_dir / "numbers.json"
    if not numbers_path.is_file():
        raise ValueError(f"{numbers_path} is missing; `make paper` writes it")
    found = {name: entry["value"] for name, entry in json_table(numbers_path).items()}
    found |= study_quantities(runs_dir)
    lines, passed = ["", "Compared with the committed reference (paper/reference.json):"], 0
    bands = json.loads(REFERENCE.read_text())
    for band in bands:
        value = found.get(band["quantity"])
        good = value is not None and band["low"] <= value <= band["high"]
        passed += good
        shown = "absent" if value is None else f"{value:.4g}"
        verdict = "PASS" if good else "FAIL"
        interval = f"[{band['low']:g}, {band['high']:g}]"
        lines.append(f"  {verdict}  {band['quantity']:38} {shown:>9}  {interval}\n        {band['why']}")
    lines.append(f"{passed} of {len(bands)} bands passed.")
    pdf, figures = build_dir / "paper.pdf", build_dir / "figures"
    lines.append(f"\nOpen {pdf} and {figures}; `make lab` explores; runs are in {runs_dir}.")
    return lines, passed == len(bands)


def study_quantities(runs_dir: Path) -> dict[str, float]:
    """What a default study gives, by name; a quantity whose runs are missing is absent."""
    ids = [config.run_id(run) for run in studies.smoke()]
    runs = results.load(runs_dir)
    runs = runs.isel(run=np.isin(runs["run_id"].values.astype(str), ids))
    table = runs.to_dataframe()
    found: dict[str, float] = {"study_runs": len(table), "study_runs_wanted": len(ids)}
    found["study_faults"] = len(records.check(Path(runs_dir)))
    if not len(table):
        return found
    found["samples_in_training_fewest"] = float(table["samples_in_training"].min())
    found["coverage_least"] = float(table["coverage"].min())
    expected = table["optimizer_steps"] * table["global_batch_size"]
    found["samples_per_step_mismatch"] = float((table["samples_trained"] - expected).abs().max())
    image = table[(table["workload"] == "resnet50")]
    if len(image):
        found["resnet50_top1_error_highest"] = float(image["top1_error"].max())
        same = image[(image["devices"] == 1)]
        found["resnet50_repeats_differ_in_error"] = float(same["top1_error"].max() - same["top1_error"].min())
    for stage, lead_h in (("pretrain", 12), ("finetune", 24)):
        part = table[(table["workload"] == "fourcastnet") & (table["stage"] == stage)]
        if len(part):
            ratio = part[f"z500_rmse_{lead_h}h_m"] / part[f"z500_rmse_{lead_h}h_persistence_m"]
            found[f"fourcastnet_{stage}_rmse_over_persistence"] = float(ratio.max())
    return found
