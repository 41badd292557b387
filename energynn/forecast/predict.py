"""Forecasts of configurations with 90 % intervals, their causes, and what lies outside the fit."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pandas as pd

from energynn import config, records, studies
from energynn.cluster.systems import Site
from energynn.config import RunConfig
from energynn.forecast import accuracy, model, runs
from energynn.forecast import fit as fits
from energynn.forecast.fit import Fit
from energynn.forecast.model import Work
from energynn.forecast.runs import Runs
from energynn.measure.energy import JOULE_PER_KWH, SECOND_PER_HOUR
from energynn.reading import json_table, one_fault

JUDGED = {"time_h": "h", "gpu_hours": "GPU hours", "energy_kWh": "kWh"}
QUANTITIES = (*JUDGED, "energy_gpu_kWh", "energy_cpu_kWh", "energy_ram_kWh")
# The published runs reach so far. Beyond, nothing tells of latency and of shared storage.
MOST_DEVICES, MOST_NODES = 256, 64
# Relative spread of the power of memory by the study's two reports; of CPUs assumed.
SPREADS = {"cpu": 0.05, "ram": 0.09}
NORMAL_90 = 1.645
# Fields that a forecast takes into account, or that change neither time nor power.
ACCOUNTED = {"workload", "preset", "system", "device", "devices", "local_batch_size"}
ACCOUNTED |= {"global_batch_size", "accumulation_steps", "epochs", "seed", "repeat", "initial_run"}
ACCOUNTED |= {"learning_rate", "training_samples", "validation_samples", "evaluate_training_set"}
ACCOUNTED |= {"training_years", "validation_years", "test_years", "warmup_epochs", "save_weights"}
ACCOUNTED |= {"plateau_patience", "on_bad_image", "sampling_period_s", "perun_sampling_period_s"}
ACCOUNTED |= {"idle_baseline_s", "idle_ready_s", "collective_timeout_s", "setup_timeout_s"}
# How the effect of others is assumed; of the rest it is not known.
ASSUMED = {
    "gradient_compression": "the all-reduce is taken as proportional to its bytes, at most",
    "gradient_noise_steps": "what it takes is left out",
    "checkpoint_period_s": "what checkpoints take is left out",
    "persistent_workers": "all of a start is taken as saved, which is the most",
    "loader_workers": "taken as if they loaded as fast, though they start differently",
}


def quantities(fit: Fit, work: Work, workers: int) -> dict[str, np.ndarray]:
    """Of each of QUANTITIES value, low and high at 90 %, (configurations, 3); NaN: not known.

    workers: of the loader.
    """
    logs = fits.forecast(fit, work)
    ends = np.array([0.0, -1.0, 1.0])
    per_device = {"time_h": np.exp(logs["time_s"][0]) / SECOND_PER_HOUR}
    time_half = logs["time_s"][1]
    time_h = np.exp(logs["time_s"][0][:, None] + ends * time_half[:, None]) / SECOND_PER_HOUR
    result = {name: np.full(time_h.shape, np.nan) for name in QUANTITIES}
    result |= {"time_h": time_h, "gpu_hours": time_h * work.devices[:, None]}
    if fit.has_power:
        middle, half = logs["energy_J"]
        energy_J = np.exp(middle[:, None] + ends * half[:, None]) * work.devices[:, None]
        result["energy_kWh"] = energy_J / JOULE_PER_KWH
        power_W = np.exp(logs["power_W"][0])
        watts = host_powers_W(fit, work, workers)
        relative = {part: NORMAL_90 * spread for part, spread in SPREADS.items()}
        spread_W = [power_W * logs["power_W"][1], *(relative[part] * watts[part] for part in watts)]
        watts["gpu"] = power_W - sum(watts.values())
        relative["gpu"] = np.sqrt(np.square(spread_W).sum(axis=0)) / watts["gpu"]
        for part, of in watts.items():
            kWh = per_device["time_h"] * work.devices * of / 1000
            half = np.hypot(time_half, relative[part])
            result[f"energy_{part}_kWh"] = kWh[:, None] * np.exp(ends * half[:, None])
    beyond = (work.devices > MOST_DEVICES) | (work.nodes > MOST_NODES)
    for values in result.values():
        values[beyond, 1:] = np.nan
    return result


def host_powers_W(fit: Fit, work: Work, workers: int) -> dict[str, np.ndarray]:
    """Power of CPUs and of memory for each GPU in W, (configurations,); NaN where nothing tells."""
    site, watts, of_node = fit.runs.site, fit.runs.watts, work.devices_of_node
    if watts:
        return {part: watts.get(part, np.nan) / of_node for part in SPREADS}
    cpu_W = site.cpu_W / of_node + site.cpu_thread_W * (workers + 1)
    known = {"cpu": cpu_W, "ram": site.ram_W / of_node}
    has = {"cpu": site.cpu_W, "ram": site.ram_W}
    return {part: of if has[part] else np.full(len(work), np.nan) for part, of in known.items()}


# ----------------------------------------------------------------------------- what is asked for


def asked(fit: Fit, what: str | None, parameters: dict) -> list[RunConfig]:
    """The configurations that a person means: a study's, a run's, or parameters.

    Parameters change those of the study or run, else the fitted run with the most samples.
    Raises ValueError with the remedy for what is none of them.
    """
    folder = Path(what) if what else None
    if folder and (folder / "run.json").is_file():
        with one_fault(f"{folder / 'run.json'}: tells of no training; give another folder"):
            plain = [config.to_dict(runs.as_made(json_table(folder / "run.json")))]
    elif folder and folder.is_dir():
        raise ValueError(f"{folder}: there is no run.json; give a run's folder, or a study")
    elif what:
        of_studies = studies.find([what], fit.runs.site.name).values()
        plain = [config.to_dict(run) for run in itertools.chain(*of_studies)]
    elif parameters:
        plain = [config.to_dict(fit.runs.longest) | {"devices": 1, "accumulation_steps": 1}]
    else:
        raise ValueError(
            "predict: say what: a study, a run's folder, or parameters (-p devices=64)"
        )
    if not parameters:
        return [config.from_dict(each) for each in plain]
    # The sizes that are given, and the number of devices, make the global batch anew.
    anew = {"global_batch_size": None}
    if "global_batch_size" in parameters:
        anew |= {"local_batch_size": None, "accumulation_steps": None}
    return [config.make(**each | anew | parameters) for each in plain]


def checked_work(fit: Fit, run: RunConfig) -> Work:
    """What one GPU does in a run; ValueError for another workload, and for what cannot run."""
    seen = fit.runs
    if run.workload != seen.workload:
        of = f"the fit is of {seen.workload}, the run of {run.workload}"
        raise ValueError(f"workload: {of}; fit {run.workload}")
    check_devices(seen.site, run.devices)
    work = runs.work(seen.site, run, seen.samples, seen.workers)
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
    site = fit.runs.site
    same = {"seed": 0, "repeat": 0, "system": site.name}
    result = []
    for run in dict.fromkeys(config.replace(run, **same) for run in asked):
        work = checked_work(fit, run)
        values = quantities(fit, work, runs.loading_workers(run))
        times = model.times_s(fit.values, work)
        row = {"run_id": config.run_id(run), "workload": run.workload, "system": site.name}
        row |= sizes(fit, run) | {name: interval(values[name][0]) for name in QUANTITIES}
        row["time_causes_h"] = {of: float(s[0]) / SECOND_PER_HOUR for of, s in times.items()}
        if fit.has_power:
            powers = model.powers_W(fit.values, work, times)
            row["power_causes_W"] = {of: float(watts[0]) for of, watts in powers.items()}
        row |= {"outside": outside(fit, run, work, most), "provenance": provenance(fit)}
        result.append(row)
    return result


def sizes(fit: Fit, run: RunConfig) -> dict[str, int]:
    """Of which training a forecast is."""
    names = ("devices", "local_batch_size", "global_batch_size", "epochs")
    samples = runs.epoch_of(run, fit.runs.samples).training_samples
    return {name: getattr(run, name) for name in names} | {"dataset_samples": samples}


def provenance(fit: Fit) -> str:
    return f"estimated by a model fitted to {len(fit.runs)} {fit.runs.provenance} runs"


def interval(values: np.ndarray) -> dict[str, float | None]:
    """A value with its 90 % interval; None where nothing can be said."""
    known = [float(value) if np.isfinite(value) else None for value in values]
    return dict(zip(("value", "low", "high"), known, strict=True))


def outside(fit: Fit, run: RunConfig, work: Work, most: int | None = None) -> list[str]:
    """What of one configuration lies beyond the fitted runs, in words; ``most`` as in ``rows``."""
    lines, site = [], fit.runs.site
    if work.devices[0] > MOST_DEVICES or work.nodes[0] > MOST_NODES:
        lines.append(
            f"more than {MOST_DEVICES} devices or {MOST_NODES} nodes: an extrapolation "
            "without an interval"
        )
    values = {"devices": work.devices, "nodes": work.nodes, "samples of a device": work.trained}
    values |= {"local_batch_size": work.local_batch_size}
    values |= {"accumulation_steps": [run.accumulation_steps]}
    ranges = fit.runs.ranges()
    for name, of in values.items():
        low, high = ranges[name]
        if not low * 0.99 <= of[0] <= high * 1.01:
            lines.append(f"{name} {of[0]:g}: fitted {low:g} to {high:g}")
    if ranges["nodes"][1] == 1 and work.nodes[0] > 1:
        lines.append("no fitted run had several nodes: neither network nor storage is measured")
    plain = config.asdict(run)
    for name in plain.keys() - ACCOUNTED:
        had = {getattr(one, name, None) for one in fit.runs.configs}
        if plain[name] not in had:
            effect = ASSUMED.get(name, "its effect is not known")
            lines.append(f"{name} {plain[name]}: fitted {', '.join(map(str, had))}; {effect}")
    size = int(work.devices[0] * work.local_batch_size[0]) * run.accumulation_steps
    lines += accuracy.beyond(run, size, most)
    bandwidth = site.link_GB_per_s if work.nodes[0] > 1 else site.gpu_link_GB_per_s
    if work.devices[0] > 1 and not (bandwidth and work.allreduce_s[0]):
        lines.append("the all-reduce is left out: bandwidth or size of gradients is not known")
    return lines


def loss_by_cause(fit: Fit, few: Work, many: Work, draws: int = 2000) -> dict[str, dict]:
    """What makes GPU hours grow from one configuration to another: shares with intervals.

    fixed: starts and fill together. Causes that shrink have a negative share.
    """
    shares = defaultdict(list)
    points = np.random.default_rng(0).multivariate_normal(fit.point, fit.covariance, draws)
    for point in [fit.point, *points]:
        values = fits.to_values(fit.priors, point)
        before, after = model.times_s(values, few), model.times_s(values, many)
        grown = {of: (many.devices * after[of] - few.devices * before[of]).item() for of in before}
        whole = sum(grown.values())
        grown["fixed"] = grown["starts"] + grown["fill"]
        for name, hours in grown.items():
            shares[name].append(hours / whole)
    result = {}
    for name, values in shares.items():
        low, high = np.quantile(values[1:], [0.05, 0.95])
        result[name] = {"value": values[0], "low": float(low), "high": float(high)}
    return result


# ------------------------------------------------------------------------------- beside the fact


def held_out(runs_dir: Path, site: Site, workload: str = "", most: int = 1) -> list[dict]:
    """Own runs on more than ``most`` devices beside the forecast of those on at most so many.

    One row a configuration, of each recipe (workload, stage, data, ...) that has both; a recipe
    whose few runs do not tell the parameters has one row that says so (``cannot``). Raises
    ValueError where there is none.
    """
    recipes = defaultdict(set)
    for record in records.read_all(runs_dir):
        is_ours = record["system"] == site.name and workload in ("", record["workload"])
        if record["valid"] and is_ours and "training_time_s" in record and record["config"]:
            plain = record["config"]
            kept = {name: of for name, of in plain.items() if name not in ACCOUNTED}
            device = record.get("device_name")
            recipes[record["workload"], config.digest([device, kept])].add(record["run_id"])
    found = []
    for (of_workload, _), run_ids in recipes.items():
        seen = runs.own(runs_dir, of_workload, site, run_ids=run_ids)
        few = seen.work.devices <= most
        if few.any() and not few.all():
            found += _beside_facts(seen.only(few), seen.only(~few))
    if not found:
        both = f"on {most} device(s) and on more"
        raise ValueError(f"{runs_dir}: no recipe has valid runs on {site.name} {both}")
    return found


def _beside_facts(few: Runs, many: Runs) -> list[dict]:
    stage = getattr(few.configs[0], "stage", "")
    known = {"workload": few.workload, "stage": stage, "fitted_to_runs": len(few)}
    known |= {"notes": few.notes, "provenance": few.provenance}
    try:
        fits.check(few)
    except ValueError as error:
        return [known | {"cannot": str(error)}]
    fit, result = fits.make(few), []
    told = quantities(fit, many.work, many.workers)
    hours = many.time_s / SECOND_PER_HOUR
    facts = {"time_h": hours, "gpu_hours": hours * many.work.devices}
    facts["energy_kWh"] = facts["gpu_hours"] * many.power_W / 1000
    for index, run in enumerate(many.configs):
        row = known | sizes(fit, run)
        for name, fact in facts.items():
            of = interval(told[name][index])
            if of["low"] is not None and np.isfinite(fact[index]):
                is_inside = bool(of["low"] <= fact[index] <= of["high"])
                row[name] = of | {"fact": float(fact[index]), "is_inside": is_inside}
        result.append(row)
    return result


# --------------------------------------------------------------------------------------- as text


def table(rows: list[dict]) -> list[str]:
    """Lines of a table with one configuration each; * marks what lies outside."""
    plain = []
    for row in rows:
        line = {"devices": row["devices"], "LBS": row["local_batch_size"]}
        line |= {"GBS": row["global_batch_size"]}
        spans = {unit: span(row[name]) for name, unit in JUDGED.items()}
        plain.append(line | spans | {" ": "*" if row["outside"] else ""})
    return pd.DataFrame(plain).to_string(index=False).splitlines()


def span(of: dict[str, float | None]) -> str:
    """A value with its interval, in 19 columns at most."""
    if of["value"] is None:
        return "not known"
    if None in (of["low"], of["high"]):
        return _digits(of["value"])
    return f"{_digits(of['value'])} ({_digits(of['low'])}-{_digits(of['high'])})"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:#.{3 if value >= 0.1 else 2}g}"


def notes(rows: list[dict]) -> list[str]:
    """What lies outside, each once with the number of configurations, and of which training."""
    kinds = Counter(words for row in rows for words in dict.fromkeys(row["outside"]))
    lines = [f"* {kind}" + (f" ({n} configurations)" if n > 1 else "") for kind, n in kinds.items()]
    words = []
    for name in ("epochs", "dataset_samples"):
        low, high = min(row[name] for row in rows), max(row[name] for row in rows)
        words.append(f"{low:,} to {high:,}" if low < high else f"{low:,}")
    return [*lines, f"of {words[0]} epochs of {words[1]} samples"]


def text(rows: list[dict]) -> str:
    """The forecasts for people: what takes most of the time, then what lies outside."""
    lines = table(rows)
    lines += ["", "share of each cause in the time in %"]
    causes = pd.DataFrame([row["time_causes_h"] for row in rows])
    causes = 100 * causes.div(causes.sum(axis="columns"), axis="index")
    causes.insert(0, "devices", [row["devices"] for row in rows])
    lines.append(causes.round().astype(int).to_string(index=False))
    return "\n".join([*lines, "", *notes(rows), f"{rows[0]['provenance']}, intervals at 90 %"])


def held_out_text(rows: list[dict]) -> str:
    """The forecasts beside the facts for people, simulated ones by that name."""
    plain, lines = [], []
    for row in rows:
        name = " ".join(filter(None, [row["workload"], row["stage"]]))
        for words in filter(None, [row.get("cannot"), *row["notes"]]):
            lines.append(f"{name}: {words}")
        for quantity, unit in JUDGED.items():
            if of := row.get(quantity):
                fact = "fact" if row["provenance"] == "measured" else row["provenance"]
                line = {"": name, "devices": row["devices"], "LBS": row["local_batch_size"]}
                line |= {"forecast (90 %)": f"{span(of)} {unit}", fact: f"{of['fact']:.3g}"}
                line["off"] = f"{100 * (of['value'] / of['fact'] - 1):+.0f} %"
                plain.append(line | {"inside": "yes" if of["is_inside"] else "no"})
    shown = [pd.DataFrame(plain).to_string(index=False)] if plain else []
    return "\n".join([*shown, *dict.fromkeys(lines)])
