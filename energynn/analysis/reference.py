"""Compare what the default study gave with the committed reference: PASS or FAIL for each band."""

import json
import math
from pathlib import Path

from energynn import records
from energynn.analysis import results
from energynn.analysis.paper import PAPER_FOLDER
from energynn.experiment import config, studies
from energynn.host.reading import read_json

LEAST_OF_ANY_RUN = {
    "samples_in_training_fewest": "samples_in_training",
    "coverage_least": "coverage",
}
# of a run that a busy machine has kept from being sampled
REMEDY_TEXT = (
    "        of {0}, as on a busy machine; move it away (mv {0} /tmp), then "
    "`make reproduce` makes it anew"
)


def compare_with_reference(runs_dir: Path, build_dir: Path) -> tuple[list[str], bool]:
    """Return a line for each band of paper/reference.json, and whether all passed.

    Each band has a quantity (of ``study_quantities``, or "slope_" and a row of that table in
    numbers.json), the lowest and the highest value that count as the same, and why.
    """
    slopes = read_json(build_dir / "numbers.json").get("slope", {})
    values, run_of = study_quantities(runs_dir)
    values |= {f"slope_{row}": slope["value"] for row, slope in slopes.items()}
    lines = ["", "Compared with the committed reference (paper/reference.json):"]
    passed = 0
    bands = json.loads((PAPER_FOLDER / "reference.json").read_text())
    for band in bands:
        value = values.get(band["quantity"], math.nan)
        is_good = band["low"] <= value <= band["high"]
        passed += is_good
        verdict = "PASS" if is_good else "FAIL"
        lines.append(
            f"  {verdict}  {band['quantity']:38} {value:>9.4g}  "
            f"[{band['low']:g}, {band['high']:g}]"
        )
        lines.append(f"        {band['why']}")
        if not is_good and band["quantity"] in run_of:
            lines.append(REMEDY_TEXT.format(run_of[band["quantity"]]))
    lines.append(f"{passed} of {len(bands)} bands passed.")
    if missing := len(studies.smoke("local")) - values["study_runs"]:
        lines.append(
            f"{missing} runs of the default study are not there; `make reproduce` makes them"
        )
    return lines, passed == len(bands)


def study_quantities(runs_dir: Path) -> tuple[dict[str, float], dict[str, str]]:
    """Compute what a default study gives, by name; NaN where its runs are missing.

    Then the folder of the run that was measured worst, by the same names.
    """
    ids = [config.run_id(run) for run in studies.smoke("local")]
    table = results.load_records(runs_dir)
    table = table[table["run_id"].isin(ids)].set_index("run_dir")
    image = table[table["workload"] == "resnet50"]
    on_one = image[image["devices"] == 1]["top1_error"]
    expected = table["optimizer_steps"] * table["global_batch_size"]
    quantities = {
        "study_runs": len(table),
        "study_faults": len(records.check(Path(runs_dir))),
        "samples_per_step_mismatch": (table["samples_trained"] - expected).abs().max(),
        "resnet50_top1_error_highest": image["top1_error"].max(),
        "resnet50_repeats_differ_in_error": on_one.max() - on_one.min(),
    }
    ratio = table["z500_rmse_m"] / table["persistence_m"]
    for stage in ("pretrain", "finetune"):
        highest = ratio[table["stage"] == stage].max()
        quantities[f"fourcastnet_{stage}_rmse_over_persistence"] = highest
    worst = {}
    for name, column in LEAST_OF_ANY_RUN.items():
        quantities[name] = table[column].min()
        if len(table):
            worst[name] = table[column].idxmin()
    return quantities, worst
