"""Judge the study's statements (paper/claims.toml) on published values and on own runs, each in a column of its own.

An entry selects rows of ``observations.means`` and applies one of a few tests. A test gives one effect for each
configuration, step, series or pair, with a 95 % interval; ``expect`` and the tolerance of its ``word`` give the range
that agrees with the statement:

    each     the quantity of every configuration; with ``stated`` values, its relative distance from them
    change   relative change between two numbers of GPUs
    steps    relative change between neighbours          spread   largest over smallest value, minus 1
    lowest   next lowest value over that at ``at``, minus 1
    bend     exponent beyond ``at`` GPUs minus that before; ``against`` a regressor, slopes relative to the mean
    line     largest distance from a fitted line, relative        slope    slope of the line through the origin
    slopes   slope of ``a`` over that of ``b``, minus 1           compare  ``a`` over ``b``, minus 1, by ``match``
    wider    spread of the quantity minus that of ``versus``      effect   partial effect of ``term``, over the mean
    none     no record can test it: ``reason``

A statement is *supported* if all intervals lie within the range, *contradicted* if one lies wholly outside, else *not
testable with these data*. *By construction*: the energies are not measured, or the values were taken from the statement
itself. Only runs on GPUs with the study's data sets count.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd

from energynn.analysis import observations, profiles, published, regression
from energynn.files import shipped
from energynn.records import read

CLAIMS = shipped("paper") / "claims.toml"
VERDICTS = ("supported", "contradicted", "not testable with these data", "by construction")
SUPPORTED, CONTRADICTED, NOT_TESTABLE, BY_CONSTRUCTION = VERDICTS
DATA_SETS = ("imagenet", "era5")
DRAWS = 400  # of each configuration's mean within its scatter, for intervals
DERIVED_FROM = {  # published columns that a derived one rests on: where those stand is where it stands
    "energy_per_gpu_hour_kW": ["energy_total_kWh", "gpu_hours"], "energy_per_dataset_sample_Wh": ["energy_total_kWh"],
    "samples_per_gpu_hour": ["gpu_hours"], "passes_per_gpu_hour": ["gpu_hours"], "training_time_h": ["gpu_hours"],
    "mean_power_gpu_W": ["energy_gpu_kWh"], "mean_power_cpu_socket_W": ["energy_cpu_kWh"],
}  # fmt: skip
ENERGIES = ("energy_", "mean_power_", "share_", "profile_")


class NotTestable(Exception):
    """Why a test cannot be done with the rows there are."""


def evaluate(runs_dir: str | Path = "runs") -> dict:
    """All verdicts: ``claims``, one entry each with ``published`` and a list ``own`` (one per system and hardware).

    Also ``tolerances``, ``errata`` and the number of each verdict. Where own runs on some hardware can test a
    statement, those that cannot are left out of its list.
    """
    ledger = tomllib.loads(CLAIMS.read_text())
    table = observations.means(observations.load(runs_dir))
    table["doublings"] = np.log2(table["devices"]) + 1
    own = table[table["origin"] == "own"]
    scatter = ledger["scatter"]
    groups = {"published": _with_errors(table[table["origin"] == "published"], scatter)}
    used = own[(own["device_kind"] == "gpu") & own["dataset"].isin(DATA_SETS)]
    groups |= {" ".join(key): _with_errors(rows, scatter) for key, rows in used.groupby(["system", "hardware"])}
    used = _with_errors(used, scatter)
    nothing = "there are no own runs"
    if len(own):
        kinds = sorted(set(own["device_kind"] + " with " + own["dataset"]))
        nothing = f"own runs are on {', '.join(kinds)}: no evidence about GPUs and the study's data"
    claims = []
    for claim in ledger["claim"]:
        entry = {name: claim[name] for name in ("id", "place", "says", "base") if name in claim}
        entry["test"] = describe(claim, ledger["tolerances"])
        entry["errata"] = [one["id"] for one in published.errata() if claim["id"] in one.get("claims", [])]
        entry["published"] = judge(claim, ledger, groups["published"])
        crosses = any({"hardware", "system"} & set(claim.get(side, {})) for side in ("a", "b"))
        parts = {"all": used} if crosses else {name: rows for name, rows in groups.items() if name != "published"}
        judged = [{"on": name, **judge(claim, ledger, rows)} for name, rows in parts.items() if len(rows)]
        tested = [one for one in judged if "effect" in one]
        entry["own"] = tested or judged[:1] or [{"on": "", "verdict": NOT_TESTABLE, "reason": nothing}]
        claims.append(entry)
    count = lambda verdicts: {verdict: verdicts.count(verdict) for verdict in VERDICTS}  # noqa: E731
    counts = {"published": count([claim["published"]["verdict"] for claim in claims])}
    counts["own"] = count([one["verdict"] for claim in claims for one in claim["own"]])
    return {"tolerances": ledger["tolerances"], "scatter": ledger["scatter"], "counts": counts, "claims": claims,
            "errata": published.errata()}  # fmt: skip


def judge(claim: dict, ledger: dict, table: pd.DataFrame) -> dict:
    """Verdict of one statement on one set of rows, with effect, interval, range, and verdicts at other tolerances."""
    try:
        rows, quantity = _select(claim, table, ledger)
        parts, missing = _measure(claim, rows, quantity)
    except NotTestable as reason:
        return {"verdict": NOT_TESTABLE, "reason": str(reason)}
    tolerance = ledger["tolerances"][claim["word"]]
    verdict, worst, allowed = decide(claim, parts, tolerance)
    result = {"verdict": verdict, "effect": _round(worst["value"]), "low": _round(worst["low"])}
    result |= {"high": _round(worst["high"]), "allowed": [_round(bound) for bound in allowed]}
    result["at_half"] = decide(claim, parts, tolerance / 2)[0]
    result["at_double"] = decide(claim, parts, tolerance * 2)[0]
    result |= {"effect_of": worst["part"], "effects": len(parts), "quantity": quantity, "configurations": len(rows)}
    result["runs"] = sorted(set(rows["run"] if rows["origin"].iloc[0] == "own" else rows["series"] + _n(rows)))
    if verdict == NOT_TESTABLE:
        inside = "inside" if allowed[0] <= worst["value"] <= allowed[1] else "outside"
        missing.insert(0, f"{worst['part']}: the interval covers both sides; the estimate lies {inside} the range")
    result["reason"] = "; ".join(missing)
    if why := _by_construction(claim, rows, quantity):
        result |= {"verdict": BY_CONSTRUCTION, "at_half": BY_CONSTRUCTION, "at_double": BY_CONSTRUCTION, "reason": why}
    return result


def report(found: dict) -> str:
    """Ledger as text: a line per statement and column, and the counts."""
    lines = []
    for claim in found["claims"]:
        lines += ["", f"{claim['id']} ({claim['place']}): {claim['says']}"]
        lines += [f"  base: {claim['base']}"] if "base" in claim else []
        lines += [f"  test: {claim['test']}"]
        for column, one in [
            ("published", claim["published"]),
            *((f"own {one['on']}".strip(), one) for one in claim["own"]),
        ]:
            line = f"  {column}: {one['verdict']}"
            if "effect" in one:
                line += f"; {one['effect_of']}: {one['effect']:.4g} [{one['low']:.4g}, {one['high']:.4g}]"
                line += f"; at half the tolerance {one['at_half']}, at double {one['at_double']}"
            lines.append(line + (f" ({one['reason']})" if one["reason"] else ""))
        lines += [f"  erratum {one['id']}: {one['what']}" for one in found["errata"] if one["id"] in claim["errata"]]
    for column, counts in found["counts"].items():
        lines += ["", f"{column}: " + ", ".join(f"{number} {verdict}" for verdict, number in counts.items())]
    return "\n".join(lines[1:])


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


# ------------------------------------------------------------------------------------------------- rows and verdicts


def _match(table: pd.DataFrame, conditions: dict) -> pd.DataFrame:
    keep = pd.Series(True, table.index)
    for name, wanted in conditions.items():
        if name.endswith("_min"):
            keep &= table[name[:-4]] >= wanted
        elif name.endswith("_max"):
            keep &= table[name[:-4]] <= wanted
        else:
            keep &= table[name].isin(wanted if isinstance(wanted, list) else [wanted])
    return table[keep]


def _select(claim: dict, table: pd.DataFrame, ledger: dict) -> tuple[pd.DataFrame, str]:
    """Rows that have the quantity (of several, the one that most have), each run once unless series are asked for."""
    if claim["test"] == "none":
        raise NotTestable(claim["reason"])
    rows = _match(table, claim["select"])
    sides = [_match(rows, claim[side]) for side in ("a", "b") if side in claim]
    by_series = "series" in claim["select"] or any("series" in claim.get(side, {}) for side in ("a", "b"))
    if sides:
        rows = pd.concat(sides).loc[lambda rows: ~rows.index.duplicated()]
    if not by_series:
        rows = observations.distinct(rows)
    if rows.empty:
        raise NotTestable("no run is in this selection")
    names = [claim["quantity"]] if isinstance(claim["quantity"], str) else claim["quantity"]
    if names[0].startswith("profile_"):
        rows = rows.join(_profiles(rows, ledger["scatter"]["other"]))
    other = [claim[name] for name in ("against", "versus", "term", "other") if name in claim]
    known = {name: rows.dropna(subset=[one for one in (name, *other) if one in rows]) for name in names if name in rows}
    name = max(known, key=lambda name: len(known[name]), default="")
    if name and len(found := known[name]):
        recipes = found.groupby("series")["recipe"].transform(lambda one: one.mode().iloc[0])
        return (found[found["recipe"] == recipes] if by_series else found), name
    raise NotTestable(f"{names[0]} is not known for any of the {len(rows)} configurations")


def _profiles(rows: pd.DataFrame, scatter: float) -> pd.DataFrame:
    """What the traces of own runs say about the power of their GPUs, one row per configuration."""
    idle_W = lambda run_dir: profiles.idle_W(read(Path(run_dir)) or {})  # noqa: E731
    summary = lambda run_dir: profiles.summary(profiles.load(run_dir), idle_W(run_dir))  # noqa: E731
    found = [summary(one.run_dir) if one.origin == "own" else {} for one in rows.itertuples()]
    found = pd.DataFrame(found, index=rows.index).add_prefix("profile_")
    return found.join((scatter * found).add_suffix("_error")).join((0 * found).add_suffix("_known"))


def decide(claim: dict, parts: pd.DataFrame, tolerance: float) -> tuple[str, pd.Series, tuple[float, float]]:
    """Verdict at a tolerance, the effect nearest to or farthest beyond the range that agrees, and that range."""
    value = claim.get("value", 0.0)
    if claim["expect"] == "within":
        absolute = tolerance * claim.get("absolute", 0)  # 1 for shares and ratios, 100 for per cent
        allowed = value[0] - tolerance * abs(value[0]) - absolute, value[1] + tolerance * abs(value[1]) + absolute
    else:
        near = tolerance * abs(value)
        allowed = {
            "about": (value - near, value + near), "at most": (-math.inf, tolerance),
            "at least": (value - tolerance, math.inf), "increase": (tolerance, math.inf),
            "decrease": (-math.inf, -tolerance), "slight increase": (0.0, tolerance),
        }[claim["expect"]]  # fmt: skip
    margin = np.minimum(parts["low"] - allowed[0], allowed[1] - parts["high"])
    inside = (parts["low"] >= allowed[0]) & (parts["high"] <= allowed[1])
    outside = (parts["high"] < allowed[0]) | (parts["low"] > allowed[1])
    verdict = SUPPORTED if inside.all() else CONTRADICTED if outside.any() else NOT_TESTABLE
    return verdict, parts.loc[margin.idxmin()], allowed


def _by_construction(claim: dict, rows: pd.DataFrame, quantity: str) -> str:
    """Why these rows can be no evidence for the statement; empty if they can."""
    provenances = set(rows["provenance"]) - {"measured", "published"}
    if "simulated" in provenances or (provenances and quantity.startswith(ENERGIES)):
        return f"energies are {' and '.join(sorted(provenances))}: they follow from what was assumed"
    if rows["origin"].iloc[0] == "published":
        columns = [f"{name}_place" for name in DERIVED_FROM.get(quantity, [quantity])]
        places = set(rows[[name for name in columns if name in rows]].stack())
        if places == {claim["place"]}:
            return "the values stand in the statement itself"
    return ""


def _round(value: float) -> float | None:
    """Six significant digits, so that two machines write the same file; None for a bound that is not there."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _n(rows: pd.DataFrame) -> pd.Series:
    return " n=" + rows["devices"].astype(str) + " " + rows["hardware"]


# ------------------------------------------------------------------------------------------------------------- tests


def _measure(claim: dict, rows: pd.DataFrame, quantity: str) -> tuple[pd.DataFrame, list[str]]:
    """Effects with intervals (columns part, value, low, high), and what was left out, in words."""
    names = claim["select"].get("series", [])
    if "a" in claim or claim.get("pooled") or claim["test"] in ("effect", "wider") or not names:
        groups = {"": rows}
    else:
        groups = {name: rows[rows["series"] == name].sort_values("devices") for name in names}
    parts, reasons = [], {}
    for name, group in groups.items():
        try:
            if group.empty:
                raise NotTestable("no run with this quantity")
            parts.append(_with_interval(claim, group, quantity).assign(series=name))
        except NotTestable as reason:
            reasons.setdefault(str(reason), []).append(name)
    missing = [f"{', '.join(names)}: {reason}".removeprefix(": ") for reason, names in reasons.items()]
    if not parts:
        raise NotTestable("; ".join(missing))
    parts = pd.concat(parts, ignore_index=True)
    parts["part"] = (parts["series"] + " " + parts["part"]).str.strip()
    return parts, missing


def _with_interval(claim: dict, rows: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """Effects of one group of rows; intervals by drawing every mean within its error, or from the fit."""
    if claim["test"] in ("slope", "effect"):
        return (_slope if claim["test"] == "slope" else _effect)(claim, rows, quantity)
    names = [quantity] + [claim[name] for name in ("against", "versus") if name in claim]
    labels, effects_of = TESTS[claim["test"]](claim, rows)
    true = [rows[name].to_numpy(float) for name in names]
    # What every run has is a statement about these runs: what is assumed about others' scatter does not enter.
    errors = [rows[f"{name}_{'known' if claim['test'] == 'each' else 'error'}"].to_numpy(float) for name in names]
    random, values = np.random.default_rng(0), effects_of(*true)
    drawn = [
        effects_of(*(one + random.normal(size=len(rows)) * error for one, error in zip(true, errors, strict=True)))
        for _ in range(DRAWS)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    ends = {"low": np.minimum(low, values), "high": np.maximum(high, values)}
    return pd.DataFrame({"part": labels, "value": values, **ends})


def _with_errors(table: pd.DataFrame, scatter: dict) -> pd.DataFrame:
    """Add the standard error of each mean as ``<quantity>_error``: from its spread over repeats, else from that of the
    repeated configurations of its workload, else from the committed scatter; rounding is added. ``<quantity>_known``:
    only from its own spread and rounding."""
    added, repeats = {}, table["repeats"].fillna(1)
    for name in [name for name in table.select_dtypes("number") if f"{name}_std" in table]:
        own = table[f"{name}_std"] / table[name].abs()
        usual = (own**2).groupby(table["workload"]).transform("mean") ** 0.5
        spread = own.fillna(usual).fillna(scatter["metric" if name.startswith(("top1", "z500")) else "other"])
        rounding = table.get(f"{name}_half", pd.Series(0.0, table.index)).fillna(0.0) ** 2 / 3
        for end, one in (("error", spread), ("known", own.fillna(0.0))):
            added[f"{name}_{end}"] = np.sqrt((one * table[name]) ** 2 / repeats + rounding)
    exact = {f"{name}_error": 0.0 for name in ("doublings", "dataset_samples")}
    return table.assign(**added, **exact)


# Each test returns the names of its effects and the function that computes them from the quantity, and from that of
# `against` or `versus`, arrays with one value per row.


def _each(claim, rows):
    n = rows["devices"].astype(str)
    labels = ("n = " + n if "series" in claim["select"] else rows["series"] + _n(rows)).to_numpy()
    if set(claim.get("stated", {})) - set(n):
        raise NotTestable(f"not known for all of n = {', '.join(claim['stated'])}")
    return labels, (lambda y: y / n.map(claim["stated"]).to_numpy() - 1) if "stated" in claim else (lambda y: y)


def _change(claim, rows):
    n = rows["devices"].to_numpy()
    base = claim["from"][rows["series"].iloc[0]] if isinstance(claim["from"], dict) else claim["from"]
    base = n.min() if base == "first" else base
    later = {"each": n > base, "last": n == n.max(), "quadruple": n == 4 * base}.get(claim["to"], n == claim["to"])
    later, first = later & (n != base), n == base
    if not first.any() or not later.any():
        wanted = f"n = {base} and {4 * base if claim['to'] == 'quadruple' else claim['to']}"
        raise NotTestable(f"needs runs on {wanted}; known is only n = {', '.join(map(str, sorted(set(n))))}")
    return [f"n = {base} to {one}" for one in n[later]], lambda y: y[later] / y[first].mean() - 1


def _steps(claim, rows):
    _at_least(rows, 3, "steps need")
    n = rows["devices"].to_numpy()
    return [f"n = {a} to {b}" for a, b in zip(n[:-1], n[1:], strict=True)], lambda y: y[1:] / y[:-1] - 1


def _spread(claim, rows):
    _at_least(rows, 2, "a spread needs")
    return [f"{len(rows)} configurations"], lambda y: np.array([y.max() / y.min() - 1])


def _wider(claim, rows):
    _at_least(rows, 2, "a spread needs")
    return [f"{len(rows)} configurations"], lambda y, x: np.array([y.max() / y.min() - x.max() / x.min()])


def _lowest(claim, rows):
    n = rows["devices"].to_numpy()
    at = n == claim["at"]
    if not at.any() or not (n < claim["at"]).any() or not (n > claim["at"]).any():
        raise NotTestable(f"needs runs on {claim['at']} GPUs, on fewer and on more")
    return [f"n = {claim['at']}"], lambda y: np.array([y[~at].min() / y[at].mean() - 1])


def _bend(claim, rows):
    n = rows["devices"].to_numpy()
    sides = [n <= claim["at"], n >= claim["at"]]
    if min(side.sum() for side in sides) < 2:
        raise NotTestable(f"needs two numbers of GPUs on each side of {claim['at']}")
    labels = [f"at n = {claim['at']}"]
    change = lambda y, x: np.diff([np.polyfit(x[side], y[side], 1)[0] for side in sides])  # noqa: E731
    if "against" in claim:
        return labels, lambda y, x: change(y, x) / y.mean()
    return labels, lambda y: change(np.log(y), np.log(n))


def _line(claim, rows):
    columns = 1 + claim["intercept"]
    _at_least(rows, 2 + columns, "a deviation from a line needs")

    def deviation(y, x):
        design = np.column_stack([x, np.ones_like(x)])[:, :columns]
        return np.array([np.abs(y / (design @ np.linalg.lstsq(design, y, rcond=None)[0]) - 1).max()])

    return [f"{len(rows)} configurations"], deviation


def _slopes(claim, rows):
    a, b = _sides(claim, rows)
    slope = lambda y, x, side: (x[side] @ y[side]) / (x[side] @ x[side])  # noqa: E731
    if claim.get("intercept"):
        slope = lambda y, x, side: np.polyfit(x[side], y[side], 1)[0]  # noqa: E731
    return ["slopes"], lambda y, x: np.array([slope(y, x, a) / slope(y, x, b) - 1])


def _compare(claim, rows):
    a, b = _sides(claim, rows)
    if "match" not in claim:
        return ["means"], lambda y: np.array([y[a].mean() / y[b].mean() - 1])
    keys = list(rows[claim["match"]].itertuples(index=False, name=None))
    places = [{keys[i]: i for i in np.flatnonzero(side)} for side in (a, b)]
    both = [key for key in places[0] if key in places[1]]
    if not both:
        raise NotTestable(f"no pair of runs is equal in {', '.join(claim['match'])}")
    of_a, of_b = ([side[key] for key in both] for side in places)
    labels = [", ".join(f"{name} {one}" for name, one in zip(claim["match"], key, strict=True)) for key in both]
    return labels, lambda y: y[of_a] / y[of_b] - 1


TESTS = {"each": _each, "change": _change, "steps": _steps, "spread": _spread, "lowest": _lowest, "bend": _bend,
         "line": _line, "slopes": _slopes, "compare": _compare, "wider": _wider}  # fmt: skip


def _at_least(rows, number, what):
    if len(rows) < number:
        raise NotTestable(f"{what} {number} configurations; known: {len(rows)}")


def _sides(claim, rows):
    a, b = (rows.index.isin(_match(rows, claim[side]).index) for side in ("a", "b"))
    if not a.any() or not b.any():
        missing = claim["a"] if not a.any() else claim["b"]
        words = ", ".join(f"{name} {one}" for name, one in missing.items())
        raise NotTestable(f"no run with this quantity and {words}")
    return a, b


def _slope(claim, rows, quantity):
    _at_least(rows, 3, "a slope with an interval needs")
    slope = regression.fit(f"{quantity} ~ 0 + {claim['against']}", rows).slope
    return pd.DataFrame({"part": [f"{len(rows)} configurations"], **slope[["value", "low", "high"]].to_dict()})


def _effect(claim, rows, quantity):
    """From the lowest to the highest value of a regressor, the others held; or that minus the same of the other one."""
    terms = [claim["term"], claim["other"]]
    scaled = rows.assign(**{name: rows[name] / np.ptp(rows[name]) for name in terms if np.ptp(rows[name])})
    if quantity == "energy_per_gpu_hour_kW" and rows["sockets_per_gpu"].nunique() > 1:
        terms.append("sockets_per_gpu")  # the sum of all devices' power; a socket's is held
    terms += ["C(hardware)"] * (rows["hardware"].nunique() > 1)
    if len(rows) < len(terms) + 3 or rows["local_batch_size"].nunique() < 2:  # passes are samples over batch size
        raise NotTestable(f"{len(rows)} configurations cannot tell {claim['term']} from {claim['other']}")
    fit = regression.fit(f"{quantity} ~ {' + '.join(terms)}", scaled)
    names = fit.parameters.index
    contrast = (names == terms[0]) - 1.0 * claim.get("minus_other", False) * (names == terms[1])
    found, mean = fit.results.t_test(contrast), rows[quantity].mean()
    low, high = found.conf_int()[0] / mean
    part = [f"{len(rows)} configurations"]
    return pd.DataFrame({"part": part, "value": found.effect / mean, "low": low, "high": high})
