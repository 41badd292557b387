"""Fits, forecasts and plans for people: the answer first, then how it was found."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from energynn.forecast import calibration, fitting, predict
from energynn.forecast.calibration import Calibration
from energynn.forecast.held_out import QUANTITIES
from energynn.forecast.plan import UNITS, Plan, as_json
from energynn.measure.energy import SECOND_PER_HOUR

TIME_CAUSES = {"images": "samples", "starts": "loaders' starts", "fill": "fill", "allreduce": "all-reduce"}


def fit(made: Calibration, errors: dict, path: Path) -> str:
    """Errors beside those of the toys, parameters with intervals, and what the data do not tell."""
    runs = f"{made.number_of_runs} {made.provenance} runs of {made.workload} on {made.site.name}"
    lines = [f"Model fitted to {runs}: {path}", "", "errors in %, median / max      GPU hours             kWh"]
    for predictor, questions in errors.items():
        for question, of in questions.items():
            both = "  ".join(_errors(of[name]) for name in ("gpu_hours", "energy"))
            lines.append(f"  {predictor + ', ' + question:36}{both}")
    lines += ["", "parameter           value           90 % interval  told by the data"]
    for name, of in calibration.describe(made.fit).items():
        ends = f"{of['low']:.3g} to {of['high']:.3g} {of['unit']}"
        lines.append(f"  {name:13}{of['value']:10.4g}{ends:>24}{of['contraction']:18.0%}\n      {of['meaning']}")
    lines += ["", *fitting.flags(made.fit), *made.notes]
    others = ", ".join(list(made.fits)[1:])
    lines.append(f"read as {made.fit.reading}; {others} is kept beside it, and intervals cover both where they differ")
    return "\n".join(lines)


def _errors(of: dict | None) -> str:
    return f"{of['median']:5.1f} / {of['max']:5.1f}" if of else "not known    "


def predictions(rows: list[dict]) -> str:
    """A configuration with what takes most of its time, then what lies outside the calibrated runs."""
    lines = [_HEAD]
    for row in rows:
        causes = sorted(row["time_causes_h"].items(), key=lambda item: -item[1])[:3]
        whole = sum(row["time_causes_h"].values())
        words = ", ".join(f"{TIME_CAUSES.get(name, name)} {hours / whole:.0%}" for name, hours in causes)
        lines += [_line(row), f"{'':18}  most of the time: {words}"]
    lines += ["", *_outside(rows), _training(rows)]
    return "\n".join([*lines, f"{rows[0]['provenance']}, intervals at 90 %"])


def _training(rows: list[dict]) -> str:
    """Of which training the forecasts are."""
    words = []
    for name in ("epochs", "dataset_samples"):
        of = [row[name] for row in rows]
        words.append(f"{min(of):,} to {max(of):,}" if min(of) < max(of) else f"{min(of):,}")
    return f"of {words[0]} epochs of {words[1]} samples"


_HEAD = f"devices{'LBS':>5}{'GBS':>6}{'hours':>20}{'GPU hours':>20}{'kWh':>20}"


def _line(row: dict) -> str:
    sizes = f"{row['devices']:7}{row['local_batch_size']:5}{row['global_batch_size']:6}"
    spans = "".join(f" {_short_span(row[name]):>19}" for name in ("time_h", "gpu_hours", "energy_kWh"))
    return f"{sizes}{spans}{' *' if row['outside'] else ''}"


def _short_span(of: dict[str, float | None]) -> str:
    if of["value"] is None:
        return "not known"
    if None in (of["low"], of["high"]):
        return _digits(of["value"])
    return f"{_digits(of['value'])} ({_digits(of['low'])}-{_digits(of['high'])})"


def _digits(value: float) -> str:
    """Three digits, two of small numbers, without an exponent where it is large: lines are to fit 80 columns."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.{3 if value >= 0.1 else 2}g}"


def _span(of: dict[str, float | None]) -> str:
    if of["value"] is None:
        return "not known"
    ends = "no interval" if None in (of["low"], of["high"]) else f"{of['low']:.4g} to {of['high']:.4g}"
    return f"{of['value']:.4g} ({ends})"


def _outside(rows: list[dict]) -> list[str]:
    """What lies outside, each kind once, with how many configurations it concerns."""
    kinds = Counter(re.sub(r" [\d.e+]+:", ":", words) for row in rows for words in row["outside"])
    return [f"* {kind}" + (f" ({number} configurations)" if number > 1 else "") for kind, number in kinds.items()]


def plan(found: Plan, most: int = 12) -> str:
    """The three choices with their reasons, the Pareto set, and how it was found."""
    told = as_json(found)
    lines = [_HEAD]
    for name, row in told["choices"].items():
        lines += [_line(row), f"{'':9}{name}: {row['reason']}"]
    pareto = told["pareto"]
    shown = pareto[:: max(1, len(pareto) // most)]
    lines += ["", f"nothing beats these in time, {UNITS['energy_kWh']} and GPU hours ({len(shown)} of {len(pareto)}):"]
    lines += [_line(row) for row in shown]
    limits = ", ".join(f"{name} at most {value:g}" for name, value in found.limits.items()) or "none"
    distinct = {row["run_id"]: row for row in [*told["choices"].values(), *shown]}
    lines += ["", *_outside(list(distinct.values())), _training(told["pareto"])]
    lines.append(f"limits: {limits}; {told['configurations']} configurations; {told['provenance']}, intervals at 90 %")
    return "\n".join([*lines, *told["flags"], f"beyond {predict.MOST_DEVICES} devices nothing is claimed"])


def probes(answer: dict) -> str:
    """The forecasts beside the facts if the probes were made, then the probes with what each adds."""
    lines = []
    if told := answer["forecast"]:
        lines += [*_beside_facts(told), "", predictions(told["rows"]), ""]
    lines.append(
        f"{'devices':>8}{'LBS':>6}{'samples':>9}{'epochs':>8}{'seconds':>9}   relative spread of the forecasts after it"
    )
    for probe in answer["probes"]:
        sizes = f"{probe['devices']:8}{probe['local_batch_size']:6}{probe.get('training_samples', '-'):>9}"
        lines.append(f"{sizes}{probe['epochs']:8}{probe['expected_s']:9.0f}   {probe['relative_spread_after']:.1%}")
    return "\n".join([*lines, "seconds, with start, and spreads are expected, by what was known before each probe"])


def _beside_facts(told: dict) -> list[str]:
    """One line a configuration: forecast, fact and error of the time, then the median of the errors."""
    lines = [f"{'':38}{'samples':>8}{'epochs':>7}{'forecast in s (90 %)':>26}{'fact':>8}{'runs':>6}{'off':>7}   inside"]
    for row in told["rows"]:
        what = " ".join(filter(None, [row["workload"], row.get("stage", "")]))
        what += f", {row['devices']} device{'s' if row['devices'] > 1 else ''}, LBS {row['local_batch_size']}"
        seconds = {end: hours and hours * SECOND_PER_HOUR for end, hours in row["time_h"].items()}
        line = f"{what:38}{row.get('training_samples', '') or 'all':>8}{row['epochs']:7}{_span(seconds):>26}"
        lines.append(line + _fact(row))
    median, probed = told["median_error_percent"], f"the probes trained {told['training_s']:.0f} s in all"
    if median is None:
        return [*lines, "", f"no run to compare with is there; {probed}"]
    known = sum(row["measured_runs"] > 0 for row in told["rows"])
    return [*lines, "", f"median error of the {known} configurations that were made: {median:.1f} %; {probed}"]


def _fact(row: dict) -> str:
    if not row["measured_runs"]:
        return f"{'-':>8}"
    fact, ends = row["measured_time_h"], row["time_h"]
    inside = "yes" if (ends["low"] or 0) <= fact <= (ends["high"] or 0) else "no"
    return f"{fact * SECOND_PER_HOUR:8.4g}{row['measured_runs']:6}{row['error_percent']:+5.0f} %   {inside}"


def accuracy(answer: dict) -> str:
    """The critical batch size or that it is not identified, then what each batch size took."""
    of, size = f"{answer['metric']} of {answer['error']:g}", answer["critical_batch_size"]
    low, high = (f"{size[end]:.3g}" if size[end] is not None else "any size" for end in ("low", "high"))
    head = f"critical batch size: not identified; these {answer['runs']} runs agree with {low} to {high}"
    if answer["is_identified"]:
        head = f"critical batch size: {size['value']:.3g} ({low} to {high}) samples, by {answer['runs']} runs"
    lines = [f"{head}, for a {of} of {answer['workload']}"]
    if noise := answer["gradient_noise_scale_samples"]:
        lines.append(f"gradient noise scale: {noise['low']:.3g} to {noise['high']:.3g} samples in these runs")
    lines += ["", f"{'GBS':>7}{'runs':>6}{'reached it':>12}{'steps':>8}   samples over the least"]
    for row in answer["batch_sizes"]:
        steps = "-" if row["steps"] is None else f"{row['steps']:.0f}"
        more = _span(row["samples_over_least"]) if row["samples_over_least"] else "not known"
        lines.append(f"{row['global_batch_size']:7}{row['runs']:6}{row['reached']:12}{steps:>8}   {more}")
    lines += ["", "a GBS far below it costs no more samples; far above it, no fewer steps (McCandlish et al. 2018)"]
    return "\n".join([*lines, "holds where the learning rate suits each batch size; intervals at 90 %"])


def held_out(rows: list[dict]) -> str:
    """The forecasts beside the facts of each recipe, then what the few runs do not tell."""
    lines = [f"{'':16}{'forecast (90 %)':>32}{'fact':>12}{'off':>9}   inside"]
    for row in rows:
        name = " ".join(filter(None, [row["workload"], row["stage"]]))
        for of in row["forecasts"]:
            lines.append(f"{name}, {of['devices']} devices, LBS {of['local_batch_size']}")
            for quantity, unit in QUANTITIES.items():
                if told := of.get(quantity):
                    off, inside = 100 * (told["value"] / told["fact"] - 1), "yes" if told["is_inside"] else "no"
                    lines.append(f"  {unit:14}{_span(told):>32}{told['fact']:12.4g}{off:+7.0f} %   {inside}")
    for row in rows:
        name = " ".join(filter(None, [row["workload"], row["stage"]]))
        of = f"{row['fitted_to_runs']} configuration(s) on at most {row['most_devices']} device(s)"
        lines += ["", f"{name}: fitted to {of}"]
        lines += [f"  {words}" for words in [row.get("cannot", ""), *row["notes"], *row.get("flags", [])] if words]
    return "\n".join(lines)
