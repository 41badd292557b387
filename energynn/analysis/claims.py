"""Judge the study's statements (paper/claims.toml) on published values and on own runs, each in a column of its own.

An entry of the ledger selects configurations and names one of the tests below. A test gives effects: one for each
configuration, step, series or pair, with a 95 % interval. ``expect`` and the tolerance of the entry's ``word`` give the
range that agrees with the statement:

    each     the quantity of every configuration; with ``stated`` values, its relative distance from them
    change   relative change between two numbers of GPUs
    steps    relative change between neighbours
    spread   largest over smallest value, minus 1
    wider    spread of the quantity minus that of ``versus``
    lowest   next lowest value over that at ``at``, minus 1
    bend     exponent beyond ``at`` GPUs minus that before; ``against`` a regressor, slopes relative to the mean
    line     largest distance from a fitted line, relative
    slope    slope of the line through the origin
    slopes   slope of ``a`` over that of ``b``, minus 1
    compare  ``a`` over ``b``, minus 1, by ``match``
    effect   partial effect of ``term``, relative to the mean
    none     no record can test it: ``reason``

A statement is *supported* if all intervals lie within the range. It is *contradicted* if one interval lies wholly
outside. Else it is *not testable with these data*. It holds *by construction* if the energies were not measured, or if
the values were taken from the statement itself. Only runs on GPUs with the study's data sets count.
"""

from __future__ import annotations

import math
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from energynn.analysis import observations, profiles, published, regression
from energynn.files import shipped
from energynn.reading import one_fault
from energynn.records import read_record

CLAIMS = shipped("paper") / "claims.toml"
VERDICTS = ("supported", "contradicted", "not testable with these data", "by construction")
SUPPORTED, CONTRADICTED, NOT_TESTABLE, BY_CONSTRUCTION = VERDICTS
DATA_SETS = ("imagenet", "era5")
DRAWS = 400  # of each configuration's mean within its scatter, for intervals


class NotTestable(Exception):
    """Why a test cannot be done with the rows there are."""


@dataclass(frozen=True)
class Configurations:
    """What a statement is judged on: tables of equal rows, one per configuration and series.

    ``rows``: what was run, and values. The others have a column per quantity: ``error``, the standard error of the
    mean; ``own_error``, the part of it that is known from the configuration itself; ``provenance``; ``place``.
    """

    rows: pd.DataFrame
    error: pd.DataFrame
    own_error: pd.DataFrame
    provenance: pd.DataFrame
    place: pd.DataFrame


def evaluate(runs_dir: str | Path = "runs") -> dict:
    """All verdicts: ``claims``, one entry each with ``published`` and a list ``own`` (one per system and hardware).

    Also ``tolerances``, ``errata`` and the number of each verdict. Where own runs on some hardware can test a
    statement, those that cannot are left out of its list.
    """
    ledger = tomllib.loads(CLAIMS.read_text())
    table = observations.means(observations.load(runs_dir))
    own = table[table["origin"] == "own"]
    used = own[(own["device_kind"] == "gpu") & own["dataset"].isin(DATA_SETS)]
    used = pd.concat([used, _profiles(used)], ignore_index=True)
    study = _configurations(table[table["origin"] == "published"], ledger["scatter"])
    every = {"all": _configurations(used, ledger["scatter"])} if len(used) else {}
    machines = {
        " ".join(machine): _configurations(rows, ledger["scatter"])
        for machine, rows in used.groupby(["system", "hardware"])
    }
    nothing = "there are no own runs"
    if len(own):
        kinds = sorted(set(own["device_kind"] + " with " + own["dataset"]))
        nothing = f"own runs are on {', '.join(kinds)}: no evidence about GPUs and the study's data"
    claims = []
    for claim in ledger["claim"]:
        entry = {name: claim[name] for name in ("id", "place", "says", "base") if name in claim}
        entry["test"] = describe(claim, ledger["tolerances"])
        entry["errata"] = [erratum["id"] for erratum in published.errata() if claim["id"] in erratum.get("claims", [])]
        entry["published"] = judge(claim, ledger, study)
        crosses = any({"hardware", "system"} & set(claim.get(side, {})) for side in ("a", "b"))
        groups = every if crosses else machines
        judged = [{"on": name, **judge(claim, ledger, group)} for name, group in groups.items()]
        tested = [verdict for verdict in judged if "effect" in verdict]
        entry["own"] = tested or judged[:1] or [{"on": "", "verdict": NOT_TESTABLE, "reason": nothing}]
        claims.append(entry)
    of_published = Counter(claim["published"]["verdict"] for claim in claims)
    of_own = Counter(judged["verdict"] for claim in claims for judged in claim["own"])
    counts = {
        "published": {verdict: of_published[verdict] for verdict in VERDICTS},
        "own": {verdict: of_own[verdict] for verdict in VERDICTS},
    }
    return {
        "tolerances": ledger["tolerances"],
        "scatter": ledger["scatter"],
        "counts": counts,
        "claims": claims,
        "errata": published.errata(),
    }


def judge(claim: dict, ledger: dict, group: Configurations) -> dict:
    """Verdict of one statement on one group, with effect, interval, range, and verdicts at other tolerances."""
    try:
        rows, quantity = _select(claim, group.rows)
        claim = {**claim, "quantity": quantity}
        effects, missing = _measure(claim, rows, group)
    except NotTestable as reason:
        return {"verdict": NOT_TESTABLE, "reason": str(reason)}
    tolerance = ledger["tolerances"][claim["word"]]
    verdict, worst, allowed = decide(claim, effects, tolerance)
    result = {"verdict": verdict, "effect": _round(worst["value"]), "low": _round(worst["low"])}
    result |= {"high": _round(worst["high"]), "allowed": [_round(bound) for bound in allowed]}
    result["at_half"] = decide(claim, effects, tolerance / 2)[0]
    result["at_double"] = decide(claim, effects, tolerance * 2)[0]
    result |= {"effect_of": worst["part"], "effects": len(effects), "quantity": quantity, "configurations": len(rows)}
    result["runs"] = sorted(set(rows["run"] if rows["origin"].iloc[0] == "own" else rows["series"] + _n(rows)))
    if verdict == NOT_TESTABLE:
        inside = "inside" if allowed[0] <= worst["value"] <= allowed[1] else "outside"
        missing.insert(0, f"{worst['part']}: the interval covers both sides; the estimate lies {inside} the range")
    result["reason"] = "; ".join(missing)
    if why := _by_construction(claim, rows, group):
        result |= {"verdict": BY_CONSTRUCTION, "at_half": BY_CONSTRUCTION, "at_double": BY_CONSTRUCTION, "reason": why}
    return result


def report(found: dict) -> str:
    """Ledger as text: a line per statement and column, and the counts."""
    lines = []
    for claim in found["claims"]:
        lines += ["", f"{claim['id']} ({claim['place']}): {claim['says']}"]
        lines += [f"  base: {claim['base']}"] if "base" in claim else []
        lines += [f"  test: {claim['test']}"]
        lines.append(_verdict_line("published", claim["published"]))
        lines += [_verdict_line(f"own {judged['on']}".strip(), judged) for judged in claim["own"]]
        errata = [erratum for erratum in found["errata"] if erratum["id"] in claim["errata"]]
        lines += [f"  erratum {erratum['id']}: {erratum['what']}" for erratum in errata]
    for column, counts in found["counts"].items():
        lines += ["", f"{column}: " + ", ".join(f"{number} {verdict}" for verdict, number in counts.items())]
    return "\n".join(lines[1:])


def _verdict_line(column: str, judged: dict) -> str:
    line = f"  {column}: {judged['verdict']}"
    if "effect" in judged:
        line += f"; {judged['effect_of']}: {judged['effect']:.4g} [{judged['low']:.4g}, {judged['high']:.4g}]"
        line += f"; at half the tolerance {judged['at_half']}, at double {judged['at_double']}"
    return f"{line} ({judged['reason']})" if judged["reason"] else line


def describe(claim: dict, tolerances: dict) -> str:
    """The test in one line: quantity, selection, threshold."""
    if claim["test"] == "none":
        return "none"
    quantity = claim["quantity"] if isinstance(claim["quantity"], str) else " or else ".join(claim["quantity"])
    words = [f"{claim['test']} of {quantity}"]
    for name in ("against", "intercept", "stated", "from", "to", "at", "versus", "term", "a", "b", "match"):
        words += [f"{name} {claim[name]}"] if name in claim else []
    words += [f"in {claim['select']}"] if claim.get("select") else []
    value = f" {claim['value']}" if "value" in claim else ""
    return f"{', '.join(words)}: {claim['expect']}{value}, tolerance {claim['word']} = {tolerances[claim['word']]:g}"


# ----------------------------------------------------------------------------------------- configurations and verdicts


def _configurations(table: pd.DataFrame, scatter: dict) -> Configurations:
    """The long table of ``observations.means`` with the standard error of each mean.

    The error is from the mean's own spread over repeats, else from that of the repeated configurations of its workload,
    else from the committed scatter. Rounding is added.
    """
    value, repeats = table["value"], table["repeats"]
    own = table["std"] / value.abs()
    of_workload = (own**2).groupby([table["workload"], table["quantity"]]).transform("mean") ** 0.5
    is_metric = table["quantity"].str.startswith(("top1", "z500"))
    usual = of_workload.fillna(is_metric.map({True: scatter["metric"], False: scatter["other"]}))
    rounding = table["half"].fillna(0.0) ** 2 / 3
    table = table.assign(
        error=np.sqrt((own.fillna(usual) * value) ** 2 / repeats + rounding),
        own_error=np.sqrt((own.fillna(0.0) * value) ** 2 / repeats + rounding),
    )
    names = ("error", "own_error", "provenance", "place")
    beside = {name: observations.of_each(table, name).reset_index(drop=True) for name in names}
    rows = observations.wide(table)
    return Configurations(rows=rows.assign(doublings=np.log2(rows["devices"]) + 1), **beside)


def _profiles(table: pd.DataFrame) -> pd.DataFrame:
    """What the traces of own runs say about the power of their GPUs, as further rows: of one run per configuration."""
    found = []
    for row in table.drop_duplicates(observations.RUN).to_dict("records"):
        try:
            with one_fault(row["run_dir"]):
                idle_W = profiles.idle_W(read_record(Path(row["run_dir"])))
                trace = profiles.load(row["run_dir"])
                if trace.empty and list(Path(row["run_dir"]).rglob("samples-*.jsonl")):
                    raise ValueError("its samples tell no power of a GPU")
        except ValueError as error:  # the run's samples cannot be read; its record and the other runs can
            print(f"energynn: no power over time of {error}", file=sys.stderr)
            continue
        summary, changes = profiles.summary(trace, idle_W), {"repeats": 1, "std": np.nan}
        found += [{**row, **changes, "quantity": f"profile_{name}", "value": value} for name, value in summary.items()]
    return pd.DataFrame(found, columns=table.columns).astype(table.dtypes).dropna(subset="value")


def _match(rows: pd.DataFrame, conditions: dict) -> pd.DataFrame:
    keep = pd.Series(True, rows.index)
    for name, wanted in conditions.items():
        if name.endswith("_min"):
            keep &= rows[name.removesuffix("_min")] >= wanted
        elif name.endswith("_max"):
            keep &= rows[name.removesuffix("_max")] <= wanted
        else:
            keep &= rows[name].isin(wanted if isinstance(wanted, list) else [wanted])
    return rows[keep]


def _select(claim: dict, rows: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Rows that have the quantity (of several, the one that most have), each run once unless series are asked for."""
    if claim["test"] == "none":
        raise NotTestable(claim["reason"])
    rows = _match(rows, claim["select"])
    sides = [_match(rows, claim[side]) for side in ("a", "b") if side in claim]
    by_series = "series" in claim["select"] or any("series" in claim.get(side, {}) for side in ("a", "b"))
    if sides:
        rows = pd.concat(sides)
        rows = rows[~rows.index.duplicated()]
    if not by_series:
        rows = observations.distinct(rows)
    if rows.empty:
        raise NotTestable("no run is in this selection")
    wanted = [claim["quantity"]] if isinstance(claim["quantity"], str) else claim["quantity"]
    others = [claim[name] for name in ("against", "versus", "term", "other") if name in claim]
    known = {name: rows.dropna(subset=[name, *others]) for name in wanted if name in rows}
    quantity = max(known, key=lambda name: len(known[name]), default=None)
    if quantity is None or known[quantity].empty:
        raise NotTestable(f"{wanted[0]} is not known for any of the {len(rows)} configurations")
    rows = known[quantity]
    if by_series:
        usual = rows.groupby("series")["recipe"].transform(lambda recipes: recipes.mode().iloc[0])
        rows = rows[rows["recipe"] == usual]
    return rows, quantity


def decide(claim: dict, effects: pd.DataFrame, tolerance: float) -> tuple[str, pd.Series, tuple[float, float]]:
    """Verdict at a tolerance, the effect nearest to or farthest beyond the range that agrees, and that range."""
    lowest, highest = allowed = _allowed(claim, tolerance)
    margin = np.minimum(effects["low"] - lowest, highest - effects["high"])
    inside = (effects["low"] >= lowest) & (effects["high"] <= highest)
    outside = (effects["high"] < lowest) | (effects["low"] > highest)
    verdict = NOT_TESTABLE
    if inside.all():
        verdict = SUPPORTED
    elif outside.any():
        verdict = CONTRADICTED
    return verdict, effects.loc[margin.idxmin()], allowed


def _allowed(claim: dict, tolerance: float) -> tuple[float, float]:
    """The range of effects that agrees with a statement."""
    value = claim.get("value", 0.0)
    if claim["expect"] == "within":
        absolute = tolerance * claim.get("absolute", 0)  # 1 for shares and ratios, 100 for per cent
        return value[0] - tolerance * abs(value[0]) - absolute, value[1] + tolerance * abs(value[1]) + absolute
    near = tolerance * abs(value)
    ranges = {
        "about": (value - near, value + near),
        "at most": (-math.inf, tolerance),
        "at least": (value - tolerance, math.inf),
        "increase": (tolerance, math.inf),
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


def _n(rows: pd.DataFrame) -> pd.Series:
    return " n=" + rows["devices"].astype(str) + " " + rows["hardware"]


def _measure(claim: dict, rows: pd.DataFrame, group: Configurations) -> tuple[pd.DataFrame, list[str]]:
    """Effects with intervals (columns part, value, low, high), and what was left out, in words."""
    series = claim["select"].get("series", [])
    parts = {"": rows}
    if series and "a" not in claim and not claim.get("pooled") and claim["test"] not in ("effect", "wider"):
        parts = {name: rows[rows["series"] == name].sort_values("devices") for name in series}
    effects, reasons = [], {}
    for name, part in parts.items():
        try:
            if part.empty:
                raise NotTestable("no run with this quantity")
            found = TESTS[claim["test"]](claim, part, *_drawn(claim, part, group))
            found["part"] = [f"{name} {label}".strip() for label in found["part"]]
            effects.append(found)
        except NotTestable as reason:
            reasons.setdefault(str(reason), []).append(name)
    missing = [f"{', '.join(names)}: {reason}".removeprefix(": ") for reason, names in reasons.items()]
    if not effects:
        raise NotTestable("; ".join(missing))
    return pd.concat(effects, ignore_index=True), missing


def _drawn(claim: dict, rows: pd.DataFrame, group: Configurations) -> list[np.ndarray]:
    """The quantity, and the one it is tested against: arrays (1 + DRAWS, rows); the first row is the means themselves.

    In the others every mean is drawn within its error. What every run has is a statement about these runs: there, what
    is assumed about the scatter of others does not enter.
    """
    names = [claim[name] for name in ("quantity", "against", "versus") if name in claim]
    errors = group.own_error if claim["test"] == "each" else group.error
    errors = errors.reindex(index=rows.index, columns=names, fill_value=0.0)  # numbers of samples and GPUs are exact
    means = rows[names].to_numpy(float).T
    steps = np.random.default_rng(0).normal(size=(DRAWS, *means.shape))
    drawn = np.concatenate([means[None], means + steps * errors.to_numpy(float).T])
    return [np.ascontiguousarray(drawn[:, i]) for i in range(len(names))]


# --------------------------------------------------------------------------------------------------------------- tests
# Each test takes the entry, its rows, and the quantity y, some also that which it is tested against, x: arrays of
# ``_drawn``. It returns rows of effects with intervals.


def _each(claim: dict, rows: pd.DataFrame, y: np.ndarray) -> pd.DataFrame:
    """Every configuration has this value, or the stated one."""
    n = rows["devices"].astype(str)
    labels = "n = " + n if "series" in claim["select"] else rows["series"] + _n(rows)
    if "stated" not in claim:
        return _effects(labels, y)
    if set(claim["stated"]) - set(n):
        raise NotTestable(f"not known for all of n = {', '.join(claim['stated'])}")
    return _effects(labels, y / n.map(claim["stated"]).to_numpy() - 1)


def _change(claim: dict, rows: pd.DataFrame, y: np.ndarray) -> pd.DataFrame:
    """The quantity changes by so much from one number of GPUs to another."""
    n = rows["devices"].to_numpy()
    base = claim["from"][rows["series"].iloc[0]] if isinstance(claim["from"], dict) else claim["from"]
    if base == "first":
        base = n.min()
    end = 4 * base if claim["to"] == "quadruple" else claim["to"]
    if end == "each":
        later = n > base
    else:
        later = (n == (n.max() if end == "last" else end)) & (n != base)
    first = n == base
    if not first.any() or not later.any():
        known = ", ".join(map(str, sorted(set(n))))
        raise NotTestable(f"needs runs on n = {base} and {end}; known is only n = {known}")
    return _effects([f"n = {base} to {to}" for to in n[later]], y[:, later] / _mean(y[:, first]) - 1)


def _steps(claim: dict, rows: pd.DataFrame, y: np.ndarray) -> pd.DataFrame:
    """The quantity changes by so much from each number of GPUs to the next."""
    _at_least(rows, 3, "steps need")
    n = rows["devices"].to_numpy()
    return _effects([f"n = {a} to {b}" for a, b in zip(n[:-1], n[1:], strict=True)], y[:, 1:] / y[:, :-1] - 1)


def _spread(claim: dict, rows: pd.DataFrame, y: np.ndarray) -> pd.DataFrame:
    """The quantity is constant, or broadly distributed."""
    _at_least(rows, 2, "a spread needs")
    return _effects(_all(rows), _range(y) - 1)


def _wider(claim: dict, rows: pd.DataFrame, y: np.ndarray, x: np.ndarray) -> pd.DataFrame:
    """The quantity varies more than another."""
    _at_least(rows, 2, "a spread needs")
    return _effects(_all(rows), _range(y) - _range(x))


def _lowest(claim: dict, rows: pd.DataFrame, y: np.ndarray) -> pd.DataFrame:
    """The quantity has its minimum at this number of GPUs."""
    n = rows["devices"].to_numpy()
    at = n == claim["at"]
    if not at.any() or not (n < claim["at"]).any() or not (n > claim["at"]).any():
        raise NotTestable(f"needs runs on {claim['at']} GPUs, on fewer and on more")
    return _effects([f"n = {claim['at']}"], y[:, ~at].min(axis=1, keepdims=True) / _mean(y[:, at]) - 1)


def _bend(claim: dict, rows: pd.DataFrame, y: np.ndarray, x: np.ndarray | None = None) -> pd.DataFrame:
    """The quantity grows faster beyond this number of GPUs than before."""
    n = rows["devices"].to_numpy()
    before, beyond = n <= claim["at"], n >= claim["at"]
    if min(before.sum(), beyond.sum()) < 2:
        raise NotTestable(f"needs two numbers of GPUs on each side of {claim['at']}")
    scale = _mean(y)
    if x is None:
        x, y, scale = np.log(n)[None], np.log(y), 1.0
    change = _line_slope(y[:, beyond], x[:, beyond]) - _line_slope(y[:, before], x[:, before])
    return _effects([f"at n = {claim['at']}"], change / scale)


def _line(claim: dict, rows: pd.DataFrame, y: np.ndarray, x: np.ndarray) -> pd.DataFrame:
    """The quantity is linear in, or proportional to another."""
    _at_least(rows, 4 if claim["intercept"] else 3, "a deviation from a line needs")
    if claim["intercept"]:
        fitted = _mean(y) + _line_slope(y, x) * (x - _mean(x))
    else:
        fitted = _ray_slope(y, x) * x
    return _effects(_all(rows), np.abs(y / fitted - 1).max(axis=1, keepdims=True))


def _slope(claim: dict, rows: pd.DataFrame, y: np.ndarray, x: np.ndarray) -> pd.DataFrame:
    """The quantity per unit of another is so large."""
    _at_least(rows, 3, "a slope with an interval needs")
    slope = regression.fit("y ~ 0 + x", pd.DataFrame({"y": y[0], "x": x[0]})).slope
    return pd.DataFrame({"part": _all(rows), **slope[["value", "low", "high"]].to_dict()})


def _slopes(claim: dict, rows: pd.DataFrame, y: np.ndarray, x: np.ndarray) -> pd.DataFrame:
    """The quantity per unit of another differs between two groups."""
    a, b = _sides(claim, rows)
    slope = _line_slope if claim.get("intercept") else _ray_slope
    return _effects(["slopes"], slope(y[:, a], x[:, a]) / slope(y[:, b], x[:, b]) - 1)


def _compare(claim: dict, rows: pd.DataFrame, y: np.ndarray) -> pd.DataFrame:
    """The quantity differs between two groups: of their means, or of each pair that is equal in ``match``."""
    a, b = _sides(claim, rows)
    if "match" not in claim:
        return _effects(["means"], _mean(y[:, a]) / _mean(y[:, b]) - 1)
    keys = list(rows[claim["match"]].itertuples(index=False, name=None))
    of_a = {keys[i]: i for i in np.flatnonzero(a)}
    of_b = {keys[i]: i for i in np.flatnonzero(b)}
    pairs = {key: (i, of_b[key]) for key, i in of_a.items() if key in of_b}
    if not pairs:
        raise NotTestable(f"no pair of runs is equal in {', '.join(claim['match'])}")
    labels = [_words(dict(zip(claim["match"], key, strict=True))) for key in pairs]
    above, below = np.array(list(pairs.values())).T
    return _effects(labels, y[:, above] / y[:, below] - 1)


def _effect(claim: dict, rows: pd.DataFrame, y: np.ndarray) -> pd.DataFrame:
    """The quantity depends on ``term``: from its lowest to its highest value, the others held.

    With ``minus_other``, that minus the same of ``other``.
    """
    terms = [claim["term"], claim["other"]]
    spans = {term: np.ptp(rows[term]) or 1.0 for term in terms}
    scaled = rows.assign(y=y[0], **{term: rows[term] / span for term, span in spans.items()})
    regressors = list(terms)
    if claim["quantity"] == "energy_per_gpu_hour_kW" and rows["sockets_per_gpu"].nunique() > 1:
        regressors.append("sockets_per_gpu")  # the sum of all devices' power; a socket's is held
    if rows["hardware"].nunique() > 1:
        regressors.append("C(hardware)")
    if len(rows) < len(regressors) + 3 or rows["local_batch_size"].nunique() < 2:  # passes are samples over batch size
        raise NotTestable(f"{len(rows)} configurations cannot tell {claim['term']} from {claim['other']}")
    fit = regression.fit(f"y ~ {' + '.join(regressors)}", scaled)
    contrast = pd.Series(0.0, fit.parameters.index)
    contrast[claim["term"]] = 1.0
    if claim.get("minus_other"):
        contrast[claim["other"]] = -1.0
    test, mean = fit.results.t_test(contrast.to_numpy()), y[0].mean()
    low, high = test.conf_int()[0] / mean
    return pd.DataFrame({"part": _all(rows), "value": test.effect / mean, "low": low, "high": high})


TESTS = {
    "each": _each,
    "change": _change,
    "steps": _steps,
    "spread": _spread,
    "wider": _wider,
    "lowest": _lowest,
    "bend": _bend,
    "line": _line,
    "slope": _slope,
    "slopes": _slopes,
    "compare": _compare,
    "effect": _effect,
}


def _effects(labels, drawn: np.ndarray) -> pd.DataFrame:
    """One row per effect, from an array (1 + DRAWS, effects): its value is that of the means themselves."""
    value = drawn[0]
    low, high = np.percentile(drawn[1:], [2.5, 97.5], axis=0)
    return pd.DataFrame(
        {"part": list(labels), "value": value, "low": np.minimum(low, value), "high": np.maximum(high, value)}
    )


def _all(rows: pd.DataFrame) -> list[str]:
    return [f"{len(rows)} configurations"]


def _mean(y: np.ndarray) -> np.ndarray:
    return y.mean(axis=1, keepdims=True)


def _range(y: np.ndarray) -> np.ndarray:
    """Largest over smallest value."""
    return y.max(axis=1, keepdims=True) / y.min(axis=1, keepdims=True)


def _ray_slope(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Slope of the line through the origin, by least squares."""
    return (x * y).sum(axis=1, keepdims=True) / (x * x).sum(axis=1, keepdims=True)


def _line_slope(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Slope of the line with an intercept, by least squares."""
    return _ray_slope(y - _mean(y), x - _mean(x))


def _at_least(rows: pd.DataFrame, number: int, what: str) -> None:
    if len(rows) < number:
        raise NotTestable(f"{what} {number} configurations; known: {len(rows)}")


def _sides(claim: dict, rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    a, b = (rows.index.isin(_match(rows, claim[side]).index) for side in ("a", "b"))
    if not a.any() or not b.any():
        missing = claim["a"] if not a.any() else claim["b"]
        raise NotTestable(f"no run with this quantity and {_words(missing)}")
    return a, b


def _words(conditions: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in conditions.items())
