"""Judge the study's statements (paper/claims.toml) on published values and on own runs, each in a column of its own.

An entry of the ledger selects configurations and names one of the tests below. A test gives effects: one for each
configuration, step, series or pair, with a 95 % interval. ``expect`` and the tolerance of the entry's ``word`` give the
range that agrees with the statement:

    each     the quantity of every configuration; with ``stated`` values, its relative distance from them
    change   relative change between two numbers of GPUs
    steps    relative change between neighbours
    spread   largest over smallest value, minus 1; with ``share``, of the closest such share of the configurations
    wider    spread of the quantity minus that of ``versus``
    lowest   next lowest value over that at ``at``, minus 1
    bend     exponent beyond ``at`` GPUs minus that before; ``against`` a regressor, slopes relative to the mean
    line     largest relative distance from the line for which it is smallest
    slope    the quantity per unit of ``against``; beyond these runs, that of another configuration
    slopes   ratio of ``a`` over that of ``b``, minus 1
    compare  ``a`` over ``b``, minus 1, by ``match``
    holds    share of a GPU's memory that is left at a local batch size, or that lacks
    effect   partial effect of ``term``, relative to the mean, whatever else is held
    none     no record can test it: ``reason``

There are two questions, and a verdict on each. ``observed``: do the numbers say so? They are uncertain by their
rounding only, and a printed number with a ``unit`` agrees with what rounds to it. Beyond these runs: would it be so if
they were made again? There runs scatter; errors of energy and GPU hours of one run count as independent.

*Supported*: all intervals lie within the range. *Contradicted*: one lies wholly outside. *Inconclusive*: an interval
reaches to both sides. *No data*: no such numbers. *By construction*: the
energies were not measured, or the values were taken from the statement itself. Only runs on GPUs count, for statements
about power and memory those with the presets paper and fast on any data, for all others those with the study's data
sets. Where no series is asked for, runs of several recipes are never pooled: the recipe that most configurations have
counts.
"""

from __future__ import annotations

import functools
import math
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from energynn.analysis import observations, profiles, published
from energynn.analysis.effects import DRAWS, FACTOR, TESTS, NoData, configuration_names, match
from energynn.files import shipped
from energynn.reading import one_fault
from energynn.records import read_record

CLAIMS = shipped("paper") / "claims.toml"
VERDICTS = ("supported", "contradicted", "inconclusive", "no data", "by construction")
SUPPORTED, CONTRADICTED, INCONCLUSIVE, NO_DATA, BY_CONSTRUCTION = VERDICTS
DATA_SETS = ("imagenet", "era5")
OF_POWER = ("mean_power_", "profile_", "memory_", FACTOR)  # quantities that own runs on any data tell
ONE_RECIPE = ["workload", "stage", "hardware", "system"]  # runs that are equal in these have one recipe


@dataclass(frozen=True)
class Configurations:
    """What a statement is judged on: tables of equal rows, one per configuration and series.

    ``rows``: what was run, and values. The others have a column per quantity: ``scatter``, the standard error of the
    mean of the runs; ``rounding``, half the width of what the number may be; ``provenance``; ``place``.
    """

    rows: pd.DataFrame
    scatter: pd.DataFrame
    rounding: pd.DataFrame
    provenance: pd.DataFrame
    place: pd.DataFrame


def evaluate(runs_dir: str | Path = "runs") -> dict:
    """All verdicts: ``claims``, one entry each with ``published`` and a list ``own`` (one per system and hardware).

    Also ``tolerances``, ``errata`` and the number of each verdict. Where own runs on some hardware
    can test a statement, those that cannot are left out of its list.
    """
    text = CLAIMS.read_text()
    ledger, of_study = tomllib.loads(text), _of_study(text)
    table = observations.means(observations.load(runs_dir))
    own = table[table["origin"] == "own"]
    used = own[own["dataset"].isin(DATA_SETS) | own["preset"].isin(["paper", "fast"])]
    used = used[used["device_kind"] == "gpu"]
    used = pd.concat([used, _profiles(used)], ignore_index=True)
    with_its_data = used[used["dataset"].isin(DATA_SETS)]
    about_power = _groups(used, ledger["scatter"])
    about_all = about_power if len(with_its_data) == len(used) else _groups(with_its_data, ledger["scatter"])
    nothing = "there are no own runs"
    if len(own):
        kinds = sorted(set(own["device_kind"] + " with " + own["dataset"]))
        nothing = f"own runs are on {', '.join(kinds)}: no evidence about GPUs and the study's data"
    claims = []
    for claim in ledger["claim"]:
        entry = {name: claim[name] for name in ("id", "place", "says", "base") if name in claim}
        entry["group"] = claim.get("group", claim["id"])
        entry["test"] = describe(claim, ledger["tolerances"])
        entry["errata"] = [erratum["id"] for erratum in published.errata() if claim["id"] in erratum.get("claims", [])]
        entry["published"] = of_study[claim["id"]]
        crosses = any({"hardware", "system"} & set(claim.get(side, {})) for side in ("a", "b"))
        chosen = (about_power if _is_about_power(claim) else about_all)["every" if crosses else "machines"]
        judged = [{"on": name, **judge(claim, ledger, group)} for name, group in chosen.items()]
        tested = [verdict for verdict in judged if "effect" in verdict]
        nobody = {"on": "", "verdict": NO_DATA, "observed": {"verdict": NO_DATA}, "reason": nothing}
        entry["own"] = tested or judged[:1] or [nobody]
        claims.append(entry)
    return {
        "tolerances": ledger["tolerances"],
        "scatter": ledger["scatter"],
        "counts": counts(claims),
        "groups": counts(claims, by_group=True),
        "claims": claims,
        "errata": published.errata(),
    }


def _groups(table: pd.DataFrame, scatter: dict) -> dict[str, dict[str, Configurations]]:
    """What own runs are judged on: ``every`` run together, and those of each of the ``machines``, by name."""
    every = {"all": configurations(table, scatter)} if len(table) else {}
    with_preset = table["preset"].map({"fast": " fast"}).fillna("")
    names = table["system"] + " " + table["hardware"] + with_preset
    machines = {name: configurations(rows, scatter) for name, rows in table.groupby(names)}
    return {"every": every, "machines": machines}


def _is_about_power(claim: dict) -> bool:
    """Whether a statement is about power or memory, which any data show, and not about time, energy or accuracy."""
    quantities = claim.get("quantity", "")
    names = [quantities] if isinstance(quantities, str) else quantities
    return all(name.startswith(OF_POWER) for name in names) and "versus" not in claim


@functools.cache
def _of_study(text: str) -> dict[str, dict]:
    """Judge the statements of a ledger on the published values, by statement, whatever own runs there are."""
    ledger = tomllib.loads(text)
    study = configurations(observations.published_runs(), ledger["scatter"])
    return {claim["id"]: judge(claim, ledger, study) for claim in ledger["claim"]}


def counts(claims: list[dict], by_group: bool = False) -> dict[str, dict[str, int]]:
    """How many statements, or groups that rest on one fact, have each verdict, by column; groups count in each."""
    found = {column: set() for column in ("observed", "published", "own")}
    for number, claim in enumerate(claims):
        of = claim["group"] if by_group else number
        found["observed"].add((of, claim["published"]["observed"]["verdict"]))
        found["published"].add((of, claim["published"]["verdict"]))
        found["own"] |= {(of, judged["on"], judged["verdict"]) for judged in claim["own"]}
    result = {}
    for column, judged in found.items():
        number_of = Counter(one[-1] for one in judged)
        result[column] = {verdict: number_of[verdict] for verdict in VERDICTS}
    return result


def judge(claim: dict, ledger: dict, group: Configurations) -> dict:
    """Verdict of one statement on one group, with effect, interval and range.

    These are beyond the runs of the group; ``observed`` has the same for the numbers themselves.
    """
    asked = series_of(claim)
    try:
        rows, quantity = _select(claim, group.rows)
        claim = {**claim, "quantity": quantity}
        effects, missing, parts = _measure(claim, _parts(claim, rows), group)
    except NoData as reason:
        nothing = {"verdict": NO_DATA, "observed": {"verdict": NO_DATA}, "reason": str(reason)}
        return nothing | {"coverage": {"of": asked, "with": []}}
    tolerance, rows = ledger["tolerances"][claim["word"]], pd.concat(parts.values())
    result = _judged(claim, _measure(claim, parts, group, beyond=True)[0], tolerance)
    result["observed"] = _judged(claim, effects, tolerance, ledger["tolerances"]["printed"])
    if result["verdict"] == INCONCLUSIVE:
        inside = "inside" if _within(result) else "outside"
        missing.insert(
            0, f"{result['effect_of']}: the interval covers both sides; the estimate lies {inside} the range"
        )
    result |= {"effects": len(effects), "quantity": quantity, "configurations": len(rows)}
    result["runs"] = sorted(set(rows["run"] if rows["origin"].iloc[0] == "own" else configuration_names(rows)))
    there = rows["series"]
    if "series" not in str(claim["select"]):
        there = group.rows[group.rows["run"].isin(rows["run"])]["series"]
    result["coverage"] = {"of": asked, "with": [name for name in asked if name in set(there)]}
    result["reason"] = "; ".join(missing)
    if why := _by_construction(claim, rows, group):
        result |= {"verdict": BY_CONSTRUCTION, "reason": why}
        result["observed"] |= {"verdict": BY_CONSTRUCTION}
    return result


def series_of(claim: dict, series: dict[str, dict] | None = None) -> list[str]:
    """The series whose runs a statement asks for; what no series fixes, as the number of GPUs, is left open."""
    series = published.series() if series is None else series
    common = claim.get("select", {})
    selections = [common | claim[side] for side in ("a", "b") if side in claim] or [common]
    if claim["test"] == "none":
        return []
    abouts = {name: {"stage": "", **known, "series": name} for name, known in series.items()}
    chosen = {name for one in selections for name, about in abouts.items() if _agrees(about, one)}
    return [name for name in series if name in chosen]


def _agrees(about: dict, wanted: dict) -> bool:
    fixed = [(about[field], value) for field, value in wanted.items() if field in about]
    return all(own in value if isinstance(value, list) else own == value for own, value in fixed)


def report(found: dict) -> str:
    """Ledger as text: a line per statement and column, and the counts."""
    lines = []
    for claim in found["claims"]:
        lines += ["", f"{claim['id']} ({claim['place']}): {claim['says']}"]
        lines += [f"  base: {claim['base']}"] if "base" in claim else []
        lines += [f"  test: {claim['test']}"]
        lines.append(_verdict_line("as published", claim["published"]["observed"]))
        lines.append(_verdict_line("beyond these runs", claim["published"]))
        lines += [_verdict_line(f"own {judged['on']}".strip(), judged) for judged in claim["own"]]
        errata = [erratum for erratum in found["errata"] if erratum["id"] in claim["errata"]]
        lines += [f"  erratum {erratum['id']}: {erratum['what']}" for erratum in errata]
    for what in ("counts", "groups"):
        lines.append("")
        for column, counted in found[what].items():
            lines.append(
                f"{what}, {column}: " + ", ".join(f"{number} {verdict}" for verdict, number in counted.items())
            )
    return "\n".join(lines[1:])


def _verdict_line(column: str, judged: dict) -> str:
    line = f"  {column}: {judged['verdict']}"
    if "effect" in judged:
        line += f"; {judged['effect_of']}: {judged['effect']:.4g} [{judged['low']:.4g}, {judged['high']:.4g}]"
    if "coverage" in judged and len(judged["coverage"]["with"]) < len(judged["coverage"]["of"]):
        line += f"; data of {len(judged['coverage']['with'])} of {len(judged['coverage']['of'])} series"
    return f"{line} ({judged['reason']})" if judged.get("reason") else line


def describe(claim: dict, tolerances: dict) -> str:
    """The test in one line: quantity, selection, threshold."""
    if claim["test"] == "none":
        return "none"
    quantity = claim["quantity"] if isinstance(claim["quantity"], str) else " or else ".join(claim["quantity"])
    words = [f"{claim['test']} of {quantity}"]
    fields = ("against", "intercept", "stated", "from", "to", "at", "versus", "term", "share", "holds", "lacks")
    for name in (*fields, "a", "b", "match"):
        words += [f"{name} {claim[name]}"] if name in claim else []
    words += [f"in {claim['select']}"] if claim.get("select") else []
    value = f" {claim['value']}" if "value" in claim else ""
    return f"{', '.join(words)}: {claim['expect']}{value}, tolerance {claim['word']} = {tolerances[claim['word']]:g}"


# ----------------------------------------------------------------------------------------- configurations and verdicts


def configurations(table: pd.DataFrame, scatter: dict) -> Configurations:
    """The long table of ``observations.means`` with the standard error of each mean.

    The error is from the mean's own spread over repeats, else from that of the repeated configurations of its workload,
    else from the committed scatter.
    """
    value, repeats = table["value"], table["repeats"]
    own = table["std"] / value.abs()
    of_workload = (own**2).groupby([table["workload"], table["quantity"]]).transform("mean") ** 0.5
    is_metric = table["quantity"].str.startswith(("top1", "z500"))
    usual = of_workload.fillna(is_metric.map({True: scatter["metric"], False: scatter["other"]}))
    table = table.assign(scatter=own.fillna(usual) * value.abs() / np.sqrt(repeats), rounding=table["half"].fillna(0.0))
    names = ("scatter", "rounding", "provenance", "place")
    # Rows are selected hundreds of times: from Python's strings faster than from pandas' own, and faster from a copy,
    # which keeps all columns of a type together.
    beside = {name: observations.of_each(table, name).reset_index(drop=True).copy() for name in names}
    rows = observations.wide(table)
    text = {name: object for name in rows.select_dtypes("str")}
    rows = rows.astype(text).assign(doublings=np.log2(rows["devices"]) + 1).copy()
    return Configurations(rows=rows, **beside)


def _profiles(table: pd.DataFrame) -> pd.DataFrame:
    """What the traces of own runs say about the power of their GPUs, as further rows: of one run per configuration."""
    found = []
    for row in table.drop_duplicates(observations.RUN).to_dict("records"):
        try:
            with one_fault(row["run_dir"]):
                record = read_record(Path(row["run_dir"]))
                if record["config"].get("step_period_s"):
                    continue  # it waits by itself
                idle_W = profiles.idle_W(record)
                trace = profiles.load(row["run_dir"])
                if trace.empty and list(Path(row["run_dir"]).rglob("samples-*.jsonl")):
                    raise ValueError("its samples tell no power of a GPU")
        except ValueError as error:  # the run's samples cannot be read; its record and the other runs can
            print(f"energynn: no power over time of {error}", file=sys.stderr)
            continue
        provenance = record.get("energy_gpu_provenance", row["provenance"])
        summary, changes = profiles.summary(trace, idle_W), {"repeats": 1, "std": np.nan, "provenance": provenance}
        found += [{**row, **changes, "quantity": f"profile_{name}", "value": value} for name, value in summary.items()]
    return pd.DataFrame(found, columns=table.columns).astype(table.dtypes).dropna(subset="value")


def _select(claim: dict, rows: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Rows that have the quantity (of several, the one that most have), each run once unless series are asked for."""
    if claim["test"] == "none":
        raise NoData(claim["reason"])
    rows = match(rows, claim["select"])
    sides = [match(rows, claim[side]) for side in ("a", "b") if side in claim]
    by_series = "series" in claim["select"] or any("series" in claim.get(side, {}) for side in ("a", "b"))
    if not by_series:
        rows, sides = _of_one_recipe(rows), [_of_one_recipe(side) for side in sides]
    if sides:
        rows = pd.concat(sides)
        rows = rows[~rows.index.duplicated()]
    if not by_series:
        of_series = rows.groupby("series")["run"].transform("size")
        rows = observations.distinct(rows.loc[of_series.sort_values(ascending=False, kind="stable").index]).sort_index()
    if rows.empty:
        raise NoData("no run is in this selection")
    wanted = [claim["quantity"]] if isinstance(claim["quantity"], str) else claim["quantity"]
    known = {name: rows.dropna(subset=[name, *_others(claim)]) for name in wanted if name in rows}
    quantity = max(known, key=lambda name: len(known[name]), default=None)
    if quantity is None or known[quantity].empty:
        raise NoData(f"{wanted[0]} is not known for any of the {len(rows)} configurations")
    rows = known[quantity]
    if by_series:
        usual = rows.groupby("series")["recipe"].transform(lambda recipes: recipes.mode().iloc[0])
        rows = rows[rows["recipe"] == usual]
    return rows, quantity


def _of_one_recipe(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each workload, stage, hardware and system, the runs of the recipe that most of them have, at any pace."""
    usual = rows.groupby(ONE_RECIPE, dropna=False)["recipe_at_any_pace"].transform(lambda names: names.mode().iloc[0])
    return rows[rows["recipe_at_any_pace"] == usual]


def _others(claim: dict) -> list[str]:
    """The quantities that a statement needs beside its own."""
    return [claim[name] for name in ("against", "versus", "term", "other") if name in claim]


def _judged(claim: dict, effects: pd.DataFrame, tolerance: float, printed: float | None = None) -> dict:
    """Verdict with effect, interval and range; ``printed``: a number with a unit is judged within so much of that."""
    by_rounding = printed is not None and "unit" in claim
    if by_rounding:
        tolerance = printed
    agrees = allowed(claim, tolerance, by_rounding)
    verdict, worst = decide(claim, effects, agrees)
    result = {"verdict": verdict, "effect": _round(worst["value"]), "low": _round(worst["low"])}
    result |= {"high": _round(worst["high"]), "allowed": [_round(bound) for bound in agrees]}
    return result | {"effect_of": worst["part"]}


def _within(judged: dict) -> bool:
    low, high = judged["allowed"]
    return (low is None or judged["effect"] >= low) and (high is None or judged["effect"] <= high)


def decide(claim: dict, effects: pd.DataFrame, allowed: tuple[float, float]) -> tuple[str, pd.Series]:
    """Verdict, and the effect nearest to or farthest beyond the range that agrees."""
    lowest, highest = allowed
    low, high = effects["low"].to_numpy(), effects["high"].to_numpy()
    if claim["expect"] == "influence":  # of either sign: what counts is the size
        across = (low < 0) & (high > 0)
        low, high = np.where(across, 0.0, np.minimum(abs(low), abs(high))), np.maximum(abs(low), abs(high))
        effects = effects.assign(value=effects["value"].abs(), low=low, high=high)
    worst = effects.iloc[np.argmin(np.minimum(low - lowest, highest - high))]
    verdict = INCONCLUSIVE
    if ((low >= lowest) & (high <= highest)).all():
        verdict = SUPPORTED
    elif ((high < lowest) | (low > highest)).any():
        verdict = CONTRADICTED
    return verdict, worst


def allowed(claim: dict, tolerance: float, by_rounding: bool = False) -> tuple[float, float]:
    """The range of effects that agrees; ``by_rounding``: the tolerance is in units of the last printed digit."""
    value = claim.get("value", 0.0)
    low, high = value if isinstance(value, list) else (value, value)
    scale = claim.get("absolute", 0)  # 1 for shares and ratios, 100 for per cent
    slack = [tolerance * (abs(end) + scale) for end in (low, high)]
    if by_rounding:
        slack = [tolerance * claim["unit"]] * 2
    ranges = {
        "within": (low - slack[0], high + slack[1]),
        "about": (low - slack[0], high + slack[1]),
        "at most": (-math.inf, tolerance),
        "at least": (low - tolerance, math.inf),
        "increase": (tolerance, math.inf),
        "influence": (tolerance, math.inf),
        "decrease": (-math.inf, -tolerance),
        "slight increase": (0.0, tolerance),
    }
    return ranges[claim["expect"]]


def _by_construction(claim: dict, rows: pd.DataFrame, group: Configurations) -> str:
    """Why these rows can be no evidence for the statement; empty if they can."""
    assumed = set(group.provenance.loc[rows.index, claim["quantity"]]) - {"measured", "published"}
    if assumed:
        return f"energies are {' and '.join(sorted(assumed))}: they follow from what was assumed"
    places = set(group.place.loc[rows.index, claim["quantity"]].dropna())
    return "the values stand in the statement itself" if places == {claim["place"]} else ""


def _round(value: float) -> float | None:
    """Six significant digits, so that two machines write the same file; None for a bound that is not there."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _parts(claim: dict, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows that a statement is tested on, each part by itself: by series where it names some, else all as "".

    A part that has no row stays in.
    """
    by, names = "series", claim["select"].get("series", [])
    if "by" in claim:
        by, names = claim["by"], sorted(set(rows[claim["by"]]))
    if names and "a" not in claim and not claim.get("pooled") and claim["test"] != "wider":
        return {name: rows[rows[by] == name].sort_values("devices") for name in names}
    return {"": rows}


def _measure(
    claim: dict, parts: dict[str, pd.DataFrame], group: Configurations, beyond: bool = False
) -> tuple[pd.DataFrame, list[str], dict[str, pd.DataFrame]]:
    """Effects with intervals (columns part, value, low, high), what was left out, in words, and the parts that are in.

    The numbers are as they were observed, uncertain by their rounding only, or as they may be ``beyond`` these runs.
    """
    claim = {**claim, "observed": not beyond}
    effects, used, reasons = [], {}, {}
    for name, part in parts.items():
        try:
            if part.empty:
                raise NoData("no run with this quantity")
            found = TESTS[claim["test"]](claim, part, *_drawn(claim, part, group, beyond))
            found["part"] = [f"{name} {label}".strip() for label in found["part"]]
            effects.append(found)
            used[name] = part
        except NoData as reason:
            reasons.setdefault(str(reason), []).append(name)
    missing = [f"{', '.join(names)}: {reason}".removeprefix(": ") for reason, names in reasons.items()]
    if not effects:
        raise NoData("; ".join(missing))
    return pd.concat(effects, ignore_index=True), missing, used


def _drawn(claim: dict, rows: pd.DataFrame, group: Configurations, beyond: bool) -> list[np.ndarray]:
    """The quantity, and the one it is tested against: arrays (1 + DRAWS, rows); the first row is the means themselves.

    In the others every mean is drawn within its rounding and, ``beyond`` these runs, within the scatter of runs.
    """
    names = [claim[name] for name in ("quantity", "against", "versus") if name in claim]
    index = {"index": rows.index, "columns": names, "fill_value": 0.0}  # numbers of samples and GPUs are exact
    means = rows[names].to_numpy(float).T
    random = np.random.default_rng(0)
    drawn = means + random.uniform(-1, 1, (DRAWS, *means.shape)) * group.rounding.reindex(**index).to_numpy(float).T
    if beyond:
        drawn += random.normal(size=drawn.shape) * group.scatter.reindex(**index).to_numpy(float).T
    drawn = np.concatenate([means[None], drawn])
    return [np.ascontiguousarray(drawn[:, i]) for i in range(len(names))]
