"""Forecast configurations with 90 % intervals and causes, and mark what lies outside the fit."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from energynn.experiment import config, studies, systems
from energynn.experiment.config import RunConfig
from energynn.experiment.systems import Site
from energynn.forecast import command, fits, model, power_limit, runs
from energynn.forecast.fits import Fit
from energynn.forecast.runs import ObservedRuns
from energynn.measure.energy import JOULE_PER_KWH, SECOND_PER_HOUR

UNITS = {"time_h": "h", "gpu_hours": "GPU hours", "energy_kWh": "kWh"}
PRICED_QUANTITIES = {
    "gpu_hours": "GPU hours",
    "charged_hours": "charged hours",
    "energy_kWh": "kWh",
}
# what repeats and configurations add up to
ADDITIVE_QUANTITIES = PRICED_QUANTITIES | {
    "energy_centre_kWh": "kWh of the centre",
    "CO2_g": "g CO2",
    "price": "price",
}
INTERVAL_FIELDS = ("value", "low", "high")
# of what divides: the least quotient is by the high end
DIVISOR_ENDS = [0, 2, 1]
PARAMETER_DRAWS = 2000  # of parameters, for the shares of causes
RUN_FIELDS = ("system", "devices", "local_batch_size", "global_batch_size", "epochs")
# published runs reach so far; beyond, nothing tells of latency and storage
MAX_DEVICES = 256
MAX_NODES = 64


class Conversion(NamedTuple):
    """What follows from a quantity ``of`` a forecast: factor and PUE times it adds to ``made``."""

    made: str
    factor: float | None
    pue: float
    of: str


def forecast_quantities(
    fit: Fit, work: np.ndarray, power_share: float = 1.0, factors: list[Conversion] = ()
) -> dict[str, np.ndarray]:
    """Forecast hours and energies: value, low and high at 90 %, (configurations, 3); NaN: unknown.

    Energies of CPUs and memory are parts of the whole, with its interval. power_share: power limit
    of the GPUs, of the greatest. factors: of ``conversion_factors``, which add CO2_g and price.
    """
    site = fit.runs.site
    devices = work["devices"][:, None]
    of_node = work["devices_of_node"][:, None]
    of_device = fits.forecast_outcomes(fit, work)
    power_W = of_device["power_W"][:, :1]
    time_h = of_device["time_s"] / SECOND_PER_HOUR
    energy_kWh = of_device["energy_J"] * devices / JOULE_PER_KWH
    home = fit.runs.where_made.site
    for here_W, there_W in (site.cpu_W, home.cpu_W), (site.ram_W, home.ram_W):
        if here_W and there_W:  # of a node unlike those that the runs were made on
            more_W = (here_W - there_W) / of_node
            energy_kWh = energy_kWh * (1 + more_W / power_W)
            power_W = power_W + more_W
    result = {
        "time_h": time_h,
        "gpu_hours": time_h * devices,
        "energy_kWh": energy_kWh,
        "charged_hours": time_h * site.devices_per_node * work["nodes"][:, None],
    }
    threads_W = site.cpu_thread_W * (work["workers"][:, None] + 1)
    cpu_W = (site.cpu_W or np.nan) / of_node + threads_W
    ram_W = (site.ram_W or np.nan) / of_node
    gpu_W = power_W - cpu_W - ram_W
    if fit.runs.scope == "gpu":
        cpu_W = np.nan
        ram_W = np.nan
        gpu_W = power_W
    elif np.isfinite(fit.runs.power_gpu_W).any():  # runs tell more than a file
        gpu_W = model.predict_times_and_powers(fit.values, work)[2][:, None]
        ram_W = np.minimum(ram_W, power_W - gpu_W)
        cpu_W = power_W - gpu_W - np.nan_to_num(ram_W)
    # a file whose node draws more than the whole tells of no part
    share = np.where(gpu_W > 0, 1 / power_W, np.nan)
    for part, part_W in {"cpu": cpu_W, "ram": ram_W, "gpu": gpu_W}.items():
        result[f"energy_{part}_kWh"] = energy_kWh * part_W * share
    if power_share != 1:
        result = power_limit.apply_power_limit(result, power_share)
    add_conversions(result, factors)
    return result


def add_conversions(quantities: dict, factors: list[Conversion]) -> None:
    """Add what follows from quantities, such as their CO2_g."""
    for made, factor, pue, of in factors:
        quantities[made] = quantities.get(made, 0) + factor * pue * quantities[of]


def conversion_factors(
    gco2_per_kwh: float | None,
    price_per_kwh: float | None,
    price_per_gpu_hour: float | None = None,
    pue: float = 1.0,
) -> list[Conversion]:
    """List the conversions whose factors were given.

    They have no default, as they differ by grid, contract and year.
    """
    factors = [
        Conversion("energy_centre_kWh", 1.0 if pue > 1 else None, pue, "energy_kWh"),
        Conversion("CO2_g", gco2_per_kwh, pue, "energy_kWh"),
        Conversion("price", price_per_kwh, pue, "energy_kWh"),
        Conversion("price", price_per_gpu_hour, 1.0, "charged_hours"),
    ]
    return [each for each in factors if each.factor is not None]


# ----------------------------------------------------------------------------- what is asked for


def runs_of_studies(
    site: Site, names: list[str], parameters: dict
) -> tuple[list[RunConfig], str]:
    """Make the runs of studies, with parameters that change them.

    Returns also what is left out, as ``systems.select_runs_that_fit`` does.
    """
    planned = studies.list_runs_of_studies(names, site.name)
    made = [change_run(run, parameters) for run in planned]
    # parameters may have made some alike
    return systems.select_runs_that_fit(site, list(dict.fromkeys(made)))


def longest_run_changed(fit: Fit, parameters: dict) -> RunConfig:
    """Make the fitted run with the most samples, on one device, with parameters that change it."""
    run = config.replace(fit.runs.longest_run, devices=1, accumulation_steps=1)
    if "preset" in parameters:  # it gives all that is not given
        run = config.make(run.workload, **{"system": fit.runs.site.name} | parameters)
    return change_run(run, parameters)


def change_run(run: RunConfig, parameters: dict) -> RunConfig:
    """Set parameters; the sizes, and the number of devices, make the global batch anew."""
    anew = {"global_batch_size": None} if parameters else {}
    if "global_batch_size" in parameters:
        anew = {"local_batch_size": None, "accumulation_steps": None}
    return config.make(**config.asdict(run) | anew | parameters)


def max_devices_of_site(site: Site) -> int:
    """Count the devices that a system has, as far as forecasts are validated."""
    nodes = min(site.nodes or MAX_NODES, MAX_NODES)
    return min(MAX_DEVICES, nodes * site.devices_per_node)


def require_devices(site: Site, asked: int) -> None:
    """Raise ValueError for more devices than a system has, or than forecasts are validated for."""
    if asked > (most := max_devices_of_site(site)):
        remedy = f"a fit with another --system FILE has up to {MAX_DEVICES}"
        if not site.gpu:
            remedy = "cores tell nothing of GPUs: measure on one, and fit with its --system FILE"
        raise ValueError(
            f"devices: {asked} asked; on {site.name} choose at most {most}; {remedy}"
        )


def plan_devices(fit: Fit, run: RunConfig) -> tuple[int, str]:
    """Count the devices of a plan: all; or as many as ran, where the all-reduce of all is unknown.

    Says also without what it is unknown, else "".
    """
    most = max_devices_of_site(fit.runs.site)
    whole = config.replace(run, devices=most)
    work = fit.runs.work_of([whole])
    if not fits.has_unknown_exchange(fit, work)[0]:
        return most, ""
    ran = int(fit.runs.work["devices"].max())
    return min(most, ran), _missing_exchange_text(fit, whole, work)


def _missing_exchange_text(fit: Fit, run: RunConfig, work: np.ndarray) -> str:
    """Say without which values the model has no time of an all-reduce; "" where it has one."""
    site = fit.runs.site
    link = "link_GB_per_s" if work["nodes"][0] > 1 else "gpu_link_GB_per_s"
    parts = {
        "the local batch (`measure --local-batch-size N`)": run.local_batch_size,
        "the bytes of the gradients (`measure --weights N`, gradient_bytes of a workload's "
        "epoch())": fit.runs.epoch(run).gradient_bytes,
        f"{link} of the system (write it into {site.file}; a fit of yours is made again)": getattr(
            site, link
        ),
    }
    missing = [words for words, value in parts.items() if not value]
    is_missed = run.devices > 1 and missing
    return f"without {' and '.join(missing)}" if is_missed else ""


# ------------------------------------------------------------------------------------ the answer


def forecast_all_runs(
    asked: list[RunConfig],
    fit: Fit | None,
    system: str,
    power_share: float,
    factors: list[Conversion],
) -> list[dict]:
    """Forecast runs as ``forecasts`` does, without a fit by what is published on the system."""
    result = []
    for workload in dict.fromkeys(run.workload for run in asked):
        of_it = [run for run in asked if run.workload == workload]
        made = fit or fits.published(workload, system)
        result += forecasts(made, of_it, power_share, factors)
    return result


def total_of_rows(rows: list[dict]) -> dict[str, float | None]:
    """Add up what all runs take, repeats too: each quantity that is additive, where it is known."""
    sums = {}
    for name in filter(rows[0].get, ADDITIVE_QUANTITIES):
        values = [row[name]["value"] for row in rows]
        counts = [row["runs"] for row in rows]
        sums[name] = None if None in values else float(np.dot(values, counts))
    return sums


def forecasts(
    fit: Fit,
    asked: list[RunConfig],
    power_share: float = 1.0,
    factors: list[Conversion] = (),
) -> list[dict]:
    """Forecast each configuration, ``runs`` times asked for, as ``predict --json`` shows it.

    power_share and factors: as ``forecast_quantities`` takes them.
    Raises ValueError for another workload, too many devices, or too few samples for an update.
    """
    if others := {run.workload for run in asked} - {fit.runs.longest_run.workload}:
        raise ValueError(
            f"workload: the fit is of {fit.runs.workload}; fit {others.pop()}"
        )
    same = {"seed": 0, "repeat": 0, "system": fit.runs.site.name}
    made = f"{len(fit.runs)} {fit.runs.provenance} runs"
    if fit.runs.provenance == "published":
        made += f" on {fit.runs.site.published_as}"
    provenance = f"estimated by a model fitted to {made}{runs.SCOPES[fit.runs.scope]}"
    if power_share != 1:
        time, energy = power_limit.limit_factors(power_share)
        provenance += power_limit.LIMIT_EFFECT_TEXT.format(
            share=power_share, time=time, energy=energy
        )
    result = []
    counts = Counter(config.replace(run, **same) for run in asked)
    require_devices(fit.runs.site, max(run.devices for run in counts))
    works = fit.runs.work_of(list(counts))
    told = forecast_quantities(fit, works, power_share, factors)
    for at, (run, number) in enumerate(counts.items()):
        work = works[at : at + 1]
        if run.local_batch_size and not work["updates"][0]:
            raise ValueError(
                "local_batch_size: a device has fewer samples than one update takes; choose a "
                "smaller one"
            )
        row = {"runs": number} | {name: getattr(run, name) for name in RUN_FIELDS}
        row |= {"workload": fit.runs.workload, "run_id": config.run_id(run)}
        samples = fit.runs.epoch(run).training_samples
        row |= {"samples": samples, "provenance": provenance}
        for name, values in told.items():
            known = np.where(np.isfinite(values[at]), values[at], None)
            row[name] = dict(zip(INTERVAL_FIELDS, known, strict=True))
        times_s = draw_times_by_cause(fit, work)
        shares = 100 * times_s.div(times_s.sum(axis="columns"), axis="index")
        row["time_share_percent"] = share_intervals(shares).to_dict("index")
        row["outside"] = extrapolation_remarks(fit, run, work)
        result.append(row)
    return result


def extrapolation_remarks(fit: Fit, run: RunConfig, work: np.ndarray) -> list[str]:
    """Say in words what of one configuration lies beyond the fitted runs."""
    lines = []
    seen = fit.runs.work
    names = ["devices", "nodes", "local_batch_size", "trained"]
    if isinstance(run, command.Config):  # its epochs may each begin and end with more
        names.append("epochs")
    for name in names:
        value = work[name][0]
        least = seen[name].min()
        most = seen[name].max()
        # Time is linear in samples, which tell as far again as they differ.
        far = 1.01 * most / least if name == "trained" else 1
        if not least / far <= value <= most * far:
            words = name.replace("trained", "samples of a device")
            known = f"{least:g} to {most:g}" if least < most else f"{least:g}"
            lines.append(f"{words} beyond {known}: nothing measured")
    plain = config.asdict(run)
    for name in sorted(runs.recipe_of_fit(plain)):
        had = {getattr(one, name, None) for one in fit.runs.configs}
        if plain[name] not in had:
            lines.append(
                f"{name} {plain[name]}: no fitted run had it, its effect is not known"
            )
    site = fit.runs.site
    if site.gpu not in site.published_as:
        lines.append(
            f"{site.gpu}: {site.file} calls them so; these runs are of {site.published_as}"
        )
    if missing := _missing_exchange_text(fit, run, work):
        words = "causes: the all-reduce's share is not known"
        if fits.has_unknown_exchange(fit, work)[0]:
            words = "what an all-reduce takes is not known"
        lines.append(f"{words} {missing}")
    thresholds = studies.large_batch_thresholds(run)
    batches = {one.global_batch_size for one in fit.runs.configs}
    if not thresholds and run.global_batch_size not in batches:
        lines.append("no fitted run had this global batch: same epochs assumed")
    for free, where in thresholds.items():
        if run.global_batch_size > free:
            lines.append(f"global batch size: beyond {free} accuracy may fall, {where}")
    return lines


def draw_times_by_cause(fit: Fit, work: np.ndarray) -> pd.DataFrame:
    """Draw seconds of one configuration by cause: the best parameters first, then by chance."""
    points = np.random.default_rng(0).multivariate_normal(
        fit.point, fit.conditional_covariance, PARAMETER_DRAWS
    )
    points[:, fit.open_terms] = 0.0
    values = fits.parameter_values(fit.names, np.vstack([fit.point, points]))
    return pd.DataFrame(model.times_by_cause_s(values, work))


def share_intervals(shares: pd.DataFrame) -> pd.DataFrame:
    """Take the first draw of each share as its value, and 90 % of the others as low and high."""
    low, high = shares[1:].quantile([0.05, 0.95]).to_numpy()
    return pd.DataFrame({"value": shares.iloc[0], "low": low, "high": high})


# ------------------------------------------------------------------------------- beside the fact


def compare_held_out_runs(
    runs_dir: Path, site: Site, most: int = 1, named: str = ""
) -> tuple[list[dict], pd.DataFrame]:
    """Set own runs on more than ``most`` devices beside the forecast of those on at most so many.

    One row a configuration, of each recipe whose few runs tell the parameters; of the workload
    ``named`` alone, if given. Then these few, each from the others, as
    ``fits.leave_one_out_errors`` has it. Raises ValueError where there is none.
    """
    recipes = defaultdict(list)
    rows = []
    each = []
    for record in runs.valid_records(runs_dir, site):
        workload = runs.workload_name(record)
        if named in ("", workload):
            recipes[workload, runs.recipe_of_record(record)].append(record)
    for (workload, _), of_recipe in recipes.items():
        seen = runs.own_runs(of_recipe, workload, site, named)
        few = seen.work["devices"] <= most
        if few.any() and not few.all() and fits.has_varied_runs(seen.subset(few)):
            made = fits.fit_runs(seen.subset(few))
            rows += compare_with_many_runs(made, seen.subset(~few))
            each.append(fits.leave_one_out_errors(made))
    if not rows:
        raise ValueError(
            f"{runs_dir}: no recipe has valid runs that vary on {most} device(s), and runs on "
            f"more on {site.name}; make some, as `energynn study run smoke` does here"
        )
    return rows, pd.concat(each)


def compare_with_many_runs(fit: Fit, many: ObservedRuns) -> list[dict]:
    """Set forecasts by the fit to a few runs beside what many others took, a row each."""
    facts = pd.DataFrame({"time_h": many.time_s / SECOND_PER_HOUR})
    facts["gpu_hours"] = facts["time_h"] * many.work["devices"]
    facts["energy_kWh"] = facts["gpu_hours"] * many.power_W / 1000
    result = forecasts(fit, many.configs)
    for row, of_row in zip(result, facts.to_dict("records"), strict=True):
        row["fact_is"] = many.provenance + runs.SCOPES[many.scope]
        for name, fact in of_row.items():
            if row[name]["low"] and np.isfinite(fact):
                is_inside = row[name]["low"] <= fact <= row[name]["high"]
                row[name] |= {"fact": fact, "is_inside": is_inside}
    return result
