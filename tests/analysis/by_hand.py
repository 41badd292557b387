"""What an outsider gets from the files of others with csv and math, by the page's formulas."""

import csv
import math
import statistics

from energynn.host import files

FOLDER = files.DATA_MANIFESTS / "others"
# benchmark -> the most GPUs with the global batch of the fewest, which are 8
MOST = {"llama2_70b_lora": 64, "resnet": 64, "ssd": 64, "unet3d": 72}


def lines(name: str) -> list[dict]:
    with open(FOLDER / name, newline="") as file:
        return list(csv.DictReader(file))


def pairs() -> dict[str, tuple]:
    """Mean energy (J), GPU hours and work of a benchmark on the fewest GPUs, and on the most."""
    cells = {}
    for row in lines("mlperf_power.csv"):
        if row["submitter"] == "smc-ac-power":
            cell = row["benchmark"], int(row["accelerators"])
            of_run = [
                float(row[name]) for name in ("energy_J", "gpu_hours", "work_done")
            ]
            cells.setdefault(cell, []).append(of_run)
    mean = {
        cell: list(map(statistics.fmean, zip(*of_runs, strict=True)))
        for cell, of_runs in cells.items()
    }
    return {name: (mean[name, 8], mean[name, most]) for name, most in MOST.items()}


def exponents() -> list[float]:
    return [
        math.log(e2 / e1) / math.log(h2 / h1)
        for (e1, h1, _), (e2, h2, _) in pairs().values()
    ]
