"""The next run by its worth: how far the intervals of an answer reach after one run more.

It follows from how the run's outcome depends on the parameters, not from the outcome, and so is
known before.
"""

import dataclasses
import functools
import math

import msgspec
import numpy as np
import pandas as pd

from energynn.experiment import config
from energynn.experiment.config import RunConfig
from energynn.forecast import fits, plan
from energynn.forecast.fits import Fit
from energynn.forecast.model import POWER_PARAMETERS
from energynn.forecast.runs import Observation
from energynn.measure.energy import SECOND_PER_HOUR

MAX_RUN_MINUTES = 5.0  # that a run takes at most
STARTUP_S = 15.0  # of a run, before and after its training
MIN_TRAINING_TIME_S = 5.0  # of a training that tells of a long one
MIN_BATCHES = 6  # batches of a device in an epoch, at least
SHORT_RUN_SHARES = (1e-4, 1e-3, 1e-2, 0.1, 0.3)  # of the whole training
SMALL_BATCH_DIVISOR = 4  # of the local batch, for a further size
MIN_NARROWING = 0.1  # part of the intervals that a run must take away
SUFFICIENT_SHARE = 0.8  # of what any run takes away
SHORT_OVERRIDES = {
    "accumulation_steps": 1,
    "global_batch_size": None,
    "save_weights": False,
    "sampling_period_s": 0.02,
}
HALF_WIDTH_COLUMNS = ["hours", "kWh"]


def updated_fit(fit: Fit, made: RunConfig) -> Fit:
    """Foretell the fit when a run has been made as well.

    Its parameters and errors stay; its covariance is that to come.
    """
    taken = [*fit.runs.taken, Observation(config.asdict(made), 1.0)]
    runs = msgspec.structs.replace(fit.runs, taken=taken)
    # it may be the first on several nodes
    outcomes = functools.partial(
        fits.log_times_and_powers, fit.names, work=runs.work[-1:]
    )
    logs, slopes = fits.value_and_slopes(outcomes, fit.point)
    slopes = slopes[:, 0]
    # a power leaves the parameters of time, as in a fit
    slopes[1, ~np.isin(fit.names, [*POWER_PARAMETERS, "exchange"])] = 0.0
    covariance = fit.covariance
    # a run tells nothing of powers where none are fitted
    for row in range(1 + fit.has_power):
        gain = covariance @ slopes[row]
        variance = fit.errors[row] ** 2 + slopes[row] @ gain
        covariance = covariance - np.outer(gain, gain) / variance
    taken[-1] = Observation(config.asdict(made), float(np.exp(logs[0, 0])))
    return dataclasses.replace(fit, runs=runs, covariance=covariance)


def interval_half_widths_percent(fit: Fit, work: np.ndarray) -> np.ndarray:
    """Compute half of the intervals of time and energy in % of the value, (2,), medians."""
    told = fits.forecast_outcomes(fit, work)
    value, low, high = np.array([told["time_s"], told["energy_J"]]).T
    return np.median(50 * (high - low) / value, axis=0)


def worth_of_runs(
    fit: Fit, asked: list[RunConfig], minutes: float = MAX_RUN_MINUTES
) -> pd.DataFrame:
    """Foretell what short runs are worth for the forecast of those that are asked, a row each.

    The first row is now, without a run. gpu_hours: with the start. hours, kWh: half-widths then in
    %. minutes: that a run takes at most, by the high end of its own interval.
    """
    candidates = list_candidate_runs(fit, asked)
    work = fit.runs.work_of(candidates)
    question = fit.runs.work_of(asked)
    train_s, _, longest_s = fits.forecast_outcomes(fit, work)["time_s"].T
    able = (train_s >= MIN_TRAINING_TIME_S) & (longest_s + STARTUP_S <= 60 * minutes)
    able &= ~np.isin(work, fit.runs.work)
    hours = (train_s + STARTUP_S) * work["devices"] / SECOND_PER_HOUR
    rows = [(None, 0.0, *interval_half_widths_percent(fit, question))]
    for at in np.flatnonzero(able):
        then = interval_half_widths_percent(updated_fit(fit, candidates[at]), question)
        rows.append((candidates[at], hours[at], *then))
    return pd.DataFrame(rows, columns=["run", "gpu_hours", *HALF_WIDTH_COLUMNS])


def best_candidate(table: pd.DataFrame) -> pd.Series:
    """Choose the cheapest run of those that narrow the most; the row of now if none is worth it."""
    taken = 1 - (table[HALF_WIDTH_COLUMNS] / table[HALF_WIDTH_COLUMNS].iloc[0]).mean(
        axis="columns"
    )
    enough = SUFFICIENT_SHARE * taken.max() if taken.max() >= MIN_NARROWING else 0.0
    return table[taken >= enough].sort_values("gpu_hours").iloc[0]


def advise_next_run(fit: Fit, asked: list[RunConfig]) -> dict:
    """Say which run to make next, its cost and the half-widths then, or to stop."""
    table = worth_of_runs(fit, asked)
    now = table.iloc[0]
    then = best_candidate(table)
    words = f"none of {MAX_RUN_MINUTES:g} minutes narrows these intervals by a tenth"
    if run := then["run"]:
        samples = fit.runs.epoch(run).training_samples
        words = f"{run.devices} device(s), {run.epochs} x {samples:,} samples"
        if run.local_batch_size:
            words += f", local batch {run.local_batch_size}"
        words += f": {then['gpu_hours']:.2g} GPU hours"
    for name in now[HALF_WIDTH_COLUMNS].dropna().index:
        words += f"; {name} +-{now[name]:.2g} -> {then[name]:.2g} %"
    return {
        "now": now.dropna().to_dict(),
        "then": then.dropna().to_dict(),
        "in_words": f"next run: {words}",
    }


# ------------------------------------------------------------------------- runs one could make


def make_short_run(run: RunConfig, part: float = 0.0) -> RunConfig:
    """Make a run that trains on a part of the samples, in fewer epochs or a part of one.

    Of ERA5 it has a year.
    """
    epochs = part * run.epochs
    step = max(1, run.local_batch_size) * run.devices
    samples = run.epoch().training_samples
    batches = max(MIN_BATCHES, int(min(epochs, 1) * samples / step))
    if samples:
        batches = min(batches, max(1, samples // step))
    plain = config.asdict(run) | SHORT_OVERRIDES | {"epochs": max(1, math.ceil(epochs))}
    cut = {"training_samples": batches * step, "validation_samples": step}
    for name in plain:
        if name in cut:
            plain[name] = cut[name]
        elif name.endswith("_years"):
            plain[name] = plain[name][:4]
    return config.make(**plain)


def list_candidate_runs(fit: Fit, asked: list[RunConfig]) -> list[RunConfig]:
    """List short runs on as many devices and fewer, of two local batches and several lengths."""
    numbers = {run.devices for run in asked}
    last = asked[-1]
    candidates = []
    for size in (last.local_batch_size, last.local_batch_size // SMALL_BATCH_DIVISOR):
        for run in plan.configuration_grid(fit, last, size, max(numbers)):
            if run.devices.bit_count() == 1 or run.devices in numbers:
                candidates += [make_short_run(run, part) for part in SHORT_RUN_SHARES]
    return list(dict.fromkeys(candidates))
