"""Forecasts of configurations with 90 % intervals, their causes, and what lies outside the fit."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pandas as pd

from energynn import config, studies
from energynn.cluster.systems import Site
from energynn.config import RunConfig
from energynn.forecast import accuracy, model, runs
from energynn.forecast import fit as fits
from energynn.forecast.fit import Fit
from energynn.forecast.model import Work
from energynn.forecast.runs import Runs
from energynn.measure.energy import JOULE_PER_KWH, SECOND_PER_HOUR
from energynn.reading import json_table, one_fault

UNITS = {"time_h": "h", "gpu_hours": "GPU hours", "energy_kWh": "kWh"}
QUANTITIES = (*UNITS, "energy_gpu_kWh", "energy_cpu_kWh", "energy_ram_kWh")
# The published runs reach so far. Beyond, nothing tells of latency and of shared storage.
MOST_DEVICES, MOST_NODES = 256, 64
# Fields of which a forecast takes account in another way, or that change neither time nor power.
ACCOUNTED = {"workload", "preset", "system", "device", "devices", "local_batch_size", "epochs"}
ACCOUNTED |= {"global_batch_size", "accumulation_steps", "seed", "repeat", "initial_run"}
ACCOUNTED |= {"learning_rate", "training_samples", "validation_samples", "evaluate_training_set"}
ACCOUNTED |= {"training_years", "validation_years", "test_years", "warmup_epochs", "save_weights"}
ACCOUNTED |= {"plateau_patience", "on_bad_image", "sampling_period_s", "perun_sampling_period_s"}
ACCOUNTED |= {"idle_baseline_s", "idle_ready_s", "collective_timeout_s", "setup_timeout_s"}


def quantities(fit: Fit, work: Work, workers: int) -> dict[str, np.ndarray]:
    """Of each of QUANTITIES value, low and high at 90 %, (configurations, 3); NaN: not known.

    workers: of the loader. Energies of CPUs and memory are parts of the whole, with its interval.
    """
    logs = fits.forecast(fit, work)
    of = {}
    for name, (middle, half) in logs.items():
        of[name] = np.exp(middle[:, None] + half[:, None] * [0, -1, 1]) * work.devices[:, None]
    hours = of["time_s"] / SECOND_PER_HOUR
    result = {"time_h": hours / work.devices[:, None], "gpu_hours": hours}
    unknown = np.full(hours.shape, np.nan)
    kWh = of["energy_J"] / JOULE_PER_KWH if fit.has_power else unknown
    result["energy_kWh"] = kWh
    watts = host_powers_W(fit, work, workers)
    power_W = np.exp(logs["power_W"][0]) if fit.has_power else np.nan
    watts["gpu"] = power_W - watts["cpu"] - watts["ram"]
    for part, part_W in watts.items():
        result[f"energy_{part}_kWh"] = kWh * (part_W / power_W)[:, None]
    beyond = (work.devices > MOST_DEVICES) | (work.nodes > MOST_NODES)
    for values in result.values():
        values[beyond, 1:] = np.nan
    return result


def host_powers_W(fit: Fit, work: Work, workers: int) -> dict[str, np.ndarray]:
    """Power of CPUs and of memory for each GPU in W, (configurations,); NaN where nothing tells."""
    site, watts, of_node = fit.runs.site, fit.runs.watts, work.devices_of_node
    if watts:
        return {part: watts.get(part, np.nan) / of_node for part in ("cpu", "ram")}
    cpu_W = site.cpu_W / of_node + site.cpu_thread_W * (workers + 1)
    unknown = np.full(len(work), np.nan)
    return {"cpu": cpu_W if site.cpu_W else unknown, "ram": (site.ram_W or np.nan) / of_node}


# ----------------------------------------------------------------------------- what is asked for


def asked(fit: Fit, what: str | None, parameters: dict) -> list[RunConfig]:
    """The configurations that a person means: a study's, a run's, or parameters.

    Parameters change those of the study or run, else the fitted run with the most samples.
    Raises ValueError with the remedy for what is none of them.
    """
    if what and (intent := Path(what) / "run.json").is_file():
        with one_fault(f"{intent}: tells of no training; give another folder, or a study"):
            plain = [config.to_dict(runs.as_made(json_table(intent)))]
    elif what:
        of_studies = studies.find([what], fit.runs.site.name).values()
        plain = [config.to_dict(run) for run in itertools.chain(*of_studies)]
    elif parameters:
        plain = [config.to_dict(fit.runs.longest) | {"devices": 1, "accumulation_steps": 1}]
    else:
        raise ValueError(
            "predict: say what: a study, a run's folder, or parameters (-p devices=64)"
        )
    # The sizes that are given, and the number of devices, make the global batch anew.
    anew = {"global_batch_size": None} if parameters else {}
    if "global_batch_size" in parameters:
        anew |= {"local_batch_size": None, "accumulation_steps": None}
    return [config.make(**each | anew | parameters) for each in plain]


def checked_work(fit: Fit, run: RunConfig) -> Work:
    """What one GPU does in a run; ValueError for another workload, and for what cannot run."""
    if run.workload != fit.runs.workload:
        raise ValueError(f"workload: the fit is of {fit.runs.workload}; fit {run.workload}")
    check_devices(fit.runs.site, run.devices)
    work = runs.work(fit.runs, run)
    if work.updates[0] < 1:
        few = "a device has fewer samples than one update takes"
        raise ValueError(f"local_batch_size: {few}; choose a smaller one")
    return work


def check_devices(site: Site, asked: int) -> None:
    """Raise ValueError for more devices than a system has, where that is known."""
    most = site.nodes * site.devices_per_node
    if most and asked > most:
        raise ValueError(f"devices: {asked} asked, {site.name} has {most}; choose at most {most}")


# ------------------------------------------------------------------------------------ the answer


def rows(fit: Fit, asked: list[RunConfig], most: int | None = None) -> list[dict]:
    """One forecast for each configuration, repeats once, as ``predict --json`` shows it.

    most: the global batch size up to which the user calls accuracy free. Raises ValueError for
    another workload, more devices than the system has, or too few samples for an update.
    """
    same = {"seed": 0, "repeat": 0, "system": fit.runs.site.name}
    result = []
    for run in dict.fromkeys(config.replace(run, **same) for run in asked):
        work = checked_work(fit, run)
        values = quantities(fit, work, runs.loading_workers(run))
        times = model.times_s(fit.values, work)
        powers = model.powers_W(fit.values, work, times)
        row = {"run_id": config.run_id(run), "workload": run.workload, "system": run.system}
        row |= row_of(fit, run, {name: of[0] for name, of in values.items()})
        row["time_causes_h"] = {of: float(s[0]) / SECOND_PER_HOUR for of, s in times.items()}
        row["power_causes_W"] = {of: float(W[0]) for of, W in powers.items() if fit.has_power}
        row["outside"] = outside(fit, run, work, most)
        result.append(row)
    return result


def row_of(fit: Fit, run: RunConfig, values: dict[str, np.ndarray]) -> dict:
    """Sizes of a training, its forecasts with their ends (None: not known), and their origin."""
    names = ("devices", "local_batch_size", "global_batch_size", "epochs")
    row = {name: getattr(run, name) for name in names}
    row["dataset_samples"] = runs.epoch_of(run, fit.runs.samples).training_samples
    for name, ends in values.items():
        known = [float(end) if np.isfinite(end) else None for end in ends]
        row[name] = dict(zip(("value", "low", "high"), known, strict=True))
    fitted = f"{len(fit.runs)} {fit.runs.provenance} runs"
    return row | {"provenance": f"estimated by a model fitted to {fitted}"}


def outside(fit: Fit, run: RunConfig, work: Work, most: int | None = None) -> list[str]:
    """What of one configuration lies beyond the fitted runs, in words; ``most`` as in ``rows``."""
    lines, site, seen = [], fit.runs.site, fit.runs.work
    if work.devices[0] > MOST_DEVICES or work.nodes[0] > MOST_NODES:
        lines.append(f"more than {MOST_DEVICES} devices or {MOST_NODES} nodes: no interval")
    for name in ("devices", "nodes", "local_batch_size", "trained"):
        at, of = getattr(work, name)[0], getattr(seen, name)
        if not of.min() * 0.99 <= at <= of.max() * 1.01:
            lines.append(f"{name}: beyond the fitted {of.min():g} to {of.max():g}")
    if seen.nodes.max() == 1 and work.nodes[0] > 1:
        lines.append("no fitted run had several nodes: neither network nor storage is measured")
    plain = config.asdict(run)
    for name in sorted(plain.keys() - ACCOUNTED | {"accumulation_steps"}):
        had = {getattr(one, name, None) for one in fit.runs.configs}
        if plain[name] not in had:
            had = ", ".join(map(str, had))
            lines.append(f"{name} {plain[name]}: fitted {had}; its effect is not known")
    size = int(work.devices[0] * work.local_batch_size[0]) * run.accumulation_steps
    lines += accuracy.beyond(run, size, most)
    bandwidth = site.link_GB_per_s if work.nodes[0] > 1 else site.gpu_link_GB_per_s
    if work.devices[0] > 1 and not (bandwidth and work.allreduce_s[0]):
        lines.append("the all-reduce is left out: bandwidth or size of gradients is not known")
    return lines


def loss_by_cause(fit: Fit, few: Work, many: Work, draws: int = 2000) -> pd.DataFrame:
    """What makes GPU hours grow from one configuration to another: shares with intervals.

    fixed: starts and fill together. Causes that shrink have a negative share.
    """
    points = np.random.default_rng(0).multivariate_normal(fit.point, fit.covariance, draws)
    shares = []
    for point in [fit.point, *points]:
        values = fits.to_values(fit.names, point)
        before, after = model.times_s(values, few), model.times_s(values, many)
        grown = {of: (many.devices * after[of] - few.devices * before[of])[0] for of in before}
        whole = sum(grown.values())
        grown["fixed"] = grown["starts"] + grown["fill"]
        shares.append({of: hours / whole for of, hours in grown.items()})
    shares = pd.DataFrame(shares)
    ends = shares[1:].quantile([0.05, 0.95])
    return pd.DataFrame({"value": shares.iloc[0], "low": ends.iloc[0], "high": ends.iloc[1]})


# ------------------------------------------------------------------------------- beside the fact


def held_out(runs_dir: Path, site: Site, workload: str = "", most: int = 1) -> list[dict]:
    """Own runs on more than ``most`` devices beside the forecast of those on at most so many.

    One row a configuration. A recipe whose few runs do not tell the parameters has one row that
    says so (``cannot``). Raises ValueError where no recipe has both.
    """
    recipes, found = defaultdict(list), []
    for record in runs.valid(runs_dir, site):
        if workload in ("", record["workload"]):
            recipes[runs.recipe(record)].append(record)
    for (of_workload, *_), of_recipe in recipes.items():
        seen = runs.own(of_recipe, of_workload, site)
        few = seen.work.devices <= most
        if few.any() and not few.all():
            found += beside_facts(seen.only(few), seen.only(~few))
    if not found:
        both = f"on {most} device(s) and on more"
        raise ValueError(f"{runs_dir}: no recipe has valid runs on {site.name} {both}")
    return found


def beside_facts(few: Runs, many: Runs) -> list[dict]:
    """Forecasts by the fit to few runs beside what many others took, a row each."""
    known = {"workload": few.workload, "stage": getattr(few.configs[0], "stage", "")}
    known |= {"fitted_to_runs": len(few), "fact_is": many.provenance, "notes": few.notes}
    try:
        fits.check(few)
    except ValueError as error:
        return [known | {"cannot": str(error)}]
    fit, result = fits.make(few), []
    told = quantities(fit, many.work, runs.loading_workers(few.configs[0]))
    hours = many.time_s * many.work.devices / SECOND_PER_HOUR
    facts = [many.time_s / SECOND_PER_HOUR, hours, hours * many.power_W / 1000]
    for index, run in enumerate(many.configs):
        row = known | row_of(fit, run, {name: told[name][index] for name in UNITS})
        for name, of in zip(UNITS, facts, strict=True):
            if row[name]["low"] and np.isfinite(fact := of[index]):
                is_inside = bool(row[name]["low"] <= fact <= row[name]["high"])
                row[name] |= {"fact": float(fact), "is_inside": is_inside}
        result.append(row)
    return result


# --------------------------------------------------------------------------------------- as text


def table(rows: list[dict]) -> str:
    """One configuration a line; * marks what lies outside."""
    plain = []
    for row in rows:
        line = {"devices": row["devices"], "LBS": row["local_batch_size"]}
        line |= {"GBS": row["global_batch_size"]}
        line |= {unit: span(row[name]) for name, unit in UNITS.items()}
        plain.append(line | {" ": "*" if row["outside"] else ""})
    return pd.DataFrame(plain).to_string(index=False)


def span(of: dict[str, float | None]) -> str:
    """A value with its interval, in 19 columns at most."""
    value, low, high = ("" if end is None else f"{end:#,.3g}".rstrip(".") for end in of.values())
    return f"{value} ({low}-{high})" if low else value or "not known"


def notes(rows: list[dict]) -> str:
    """What lies outside, each once with the number of configurations, and of which training."""
    kinds = Counter(words for row in rows for words in row["outside"])
    lines = [f"* {kind}" + (f" ({n} configurations)" if n > 1 else "") for kind, n in kinds.items()]
    spans = []
    for name in ("epochs", "dataset_samples"):
        values = sorted({row[name] for row in rows})
        spans.append(" to ".join(f"{value:,}" for value in dict.fromkeys([values[0], values[-1]])))
    lines.append(f"of {spans[0]} epochs of {spans[1]} samples")
    return "\n".join([*lines, f"{rows[0]['provenance']}, intervals at 90 %"])


def text(rows: list[dict]) -> str:
    """The forecasts for people: what takes most of the time, then what lies outside."""
    causes = pd.DataFrame([row["time_causes_h"] for row in rows], [row["devices"] for row in rows])
    causes = 100 * causes.div(causes.sum(axis="columns"), axis="index")
    shares = f"share of each cause in the time in %, by devices\n{causes.round().astype(int)}"
    return f"{table(rows)}\n\n{shares}\n\n{notes(rows)}"


def held_out_text(rows: list[dict]) -> str:
    """The forecasts beside the facts for people, simulated ones by that name."""
    plain, lines = [], []
    for row in rows:
        name = f"{row['workload']} {row['stage']}".strip()
        lines += [f"{name}: {words}" for words in [row.get("cannot"), *row["notes"]] if words]
        for quantity, unit in UNITS.items():
            of = dict(row.get(quantity, {}))
            if fact := of.pop("fact", None):
                is_inside = "yes" if of.pop("is_inside") else "no"
                line = {"": name, "devices": row["devices"], "LBS": row["local_batch_size"]}
                line |= {"forecast (90 %)": f"{span(of)} {unit}", row["fact_is"]: f"{fact:.3g}"}
                off = f"{100 * (of['value'] / fact - 1):+.0f} %"
                plain.append(line | {"off": off, "inside": is_inside})
    shown = [pd.DataFrame(plain).to_string(index=False)] if plain else []
    return "\n".join([*shown, *dict.fromkeys(lines)])
