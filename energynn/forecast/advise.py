"""What would save most: each remedy that a configuration offers, with the range of time and energy that it may save."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from energynn import config
from energynn.config import RunConfig
from energynn.forecast import model, predict, runs
from energynn.forecast.calibrate import Fit
from energynn.forecast.calibration import Calibration
from energynn.forecast.model import READINGS, Work


@dataclass(frozen=True)
class Remedy:
    """A change, the causes of time that it acts on, and the run that would narrow what it saves.

    changes: fields with their values. is_modelled: the model forecasts the changed run; it saves that much, or as much
    as nothing where ``is_most``. Else it saves between nothing and ``part`` of the time of its causes.
    """

    name: str
    changes: dict
    causes: tuple[str, ...]
    probe: str
    is_modelled: bool = False
    is_most: bool = False
    part: float = 1.0


def remedies(run: RunConfig) -> list[Remedy]:
    """The remedies that a run's configuration has a field for, and that it does not use yet."""
    workers = runs.loading_workers(run)
    same = "the same short run with and without it"
    found = [
        Remedy("workers that persist", dict(persistent_workers=True), ("starts",), f"{same}, few samples", True, True),
        Remedy(
            "no second pass over the training set", dict(evaluate_training_set=False), ("images", "fill"), same, True
        ),
        Remedy("twice the workers", dict(loader_workers=2 * workers), ("images",), "a run without the loader", True),
        Remedy(
            "twice the local batch",
            dict(local_batch_size=2 * run.local_batch_size),
            ("updates", "allreduce"),
            same,
            True,
        ),
        Remedy("a prepared store", dict(image_loading="store"), ("images", "fill"), "a run without the loader"),
        Remedy("bfloat16", dict(precision="bfloat16"), ("images",), "a run without the loader", part=0.5),
        Remedy(
            "compressed gradients",
            dict(gradient_compression="bfloat16"),
            ("allreduce",),
            f"{same}, on two nodes",
            True,
            True,
        ),
    ]
    if not workers:
        found = [remedy for remedy in found if not remedy.changes.keys() & {"persistent_workers", "loader_workers"}]
    if run.devices == 1:
        found = [remedy for remedy in found if "gradient_compression" not in remedy.changes]
    plain = config.asdict(run)
    return [
        remedy
        for remedy in found
        if not remedy.changes.items() & plain.items() and remedy.changes.keys() <= plain.keys()
    ]


def rows(made: Calibration, run: RunConfig) -> list[dict]:
    """Every remedy that can be, with the savings of time and energy as ranges over the readings, the largest first.

    Raises ValueError for a run that cannot be.
    """
    before, found = predict.checked_work(made, run), []
    marks = predict.outside(made, run, before)
    for remedy in remedies(run):
        plain = config.to_dict(run) | remedy.changes | {"global_batch_size": None}  # which follows from the others
        try:
            changed = config.make(**plain)
            after = predict.checked_work(made, changed)
        except ValueError:  # twice as much is more than there is
            continue
        savings = np.array([_saving(fit, before, after, remedy) for fit in made.fits.values()])
        low, high = savings.min(axis=0), savings.max(axis=0)
        if remedy.is_most or not remedy.is_modelled:
            low = np.minimum(low, 0.0)
        row = {"remedy": remedy.name, "changes": remedy.changes, "causes": list(remedy.causes), "probe": remedy.probe}
        row["time_saving"] = {"low": float(low[0]), "high": float(high[0])}
        row["energy_saving"] = {"low": float(low[1]), "high": float(high[1])} if made.fit.has_power else None
        row["outside"] = list(dict.fromkeys([*marks, *predict.outside(made, changed, after)]))
        row["provenance"] = f"estimated by a model fitted to {made.provenance} runs"
        found.append(row)
    return sorted(found, key=lambda row: -row["time_saving"]["low"] - row["time_saving"]["high"])


def _saving(fit: Fit, before: Work, after: Work, remedy: Remedy) -> tuple[float, float]:
    """Parts of the time and of the energy that a remedy saves by one reading, at most where it is not modelled."""
    time_s, energy_J = _spent(fit, before)
    if not remedy.is_modelled:
        times = model.times_s(fit.values, before, READINGS[fit.reading])
        part = remedy.part * float(sum(times[cause] for cause in remedy.causes)[0]) / time_s
        return part, part
    after_s, after_J = _spent(fit, after)
    return 1 - after_s / time_s, 1 - after_J / energy_J if energy_J else 0.0


def _spent(fit: Fit, work: Work) -> tuple[float, float]:
    time_s, power_W = model.predict(fit.values, work, READINGS[fit.reading])
    return float(time_s[0]), float(time_s[0] * power_W[0])
