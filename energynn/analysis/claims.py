"""Judge the study's statements (paper/claims.toml) on published values and on own runs.

A statement is a log ratio ``u = ln(after / before)`` of a ``quantity`` for each unit. Units are

- ``series``: the configuration ``to`` over that ``from`` (the last over the first) of each series;
  with ``per``, the exponent of the quantity in ``per``, minus 1;
- ``a`` and ``b``: the pairs that are equal in ``match``, or the ratio of their means;
- ``range``: each configuration, by its value.

All are selected by ``where``. Three or more units have an interval from their own scatter
(Student's t), one or two, or ``every`` one, from the scatter of repeated runs with its degrees of
freedom. ``expect``: "up" or "down" (by anything), "same" (within 10 %), "much up" or "much down"
(by more), "differs" (not "same"), or the lowest and highest relative change.

*Supported*: all intervals lie within what is expected. *Contradicted*: one lies outside.
*Inconclusive*: else, and where fewer than half of the series are known. *No data*: none is, or
``reason`` says why no record can test it. *Restated*: the published value is the statement
itself. Own runs count where they are measured, on GPUs, with the study's data sets.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from energynn.analysis import observations, published
from energynn.files import shipped

CLAIMS = shipped("paper") / "claims.toml"
VERDICTS = ("supported", "contradicted", "inconclusive", "no data", "restated")
SUPPORTED, CONTRADICTED, INCONCLUSIVE, NO_DATA, RESTATED = VERDICTS
ABOUT = ("id", "place", "says", "base", "group")
NOT_OF_THE_TEST = (*ABOUT, "quantity")
UNIT = ["unit", "series", "value", "error", "freedom"]
DATA_SETS = ("imagenet", "era5")
THRESHOLD = math.log(1.1)
EXPECT = {
    "same": (-THRESHOLD, THRESHOLD),
    "differs": (-THRESHOLD, THRESHOLD),
    "up": (0, math.inf),
    "down": (-math.inf, 0),
    "much up": (THRESHOLD, math.inf),
    "much down": (-math.inf, -THRESHOLD),
}
OPPOSITE = {SUPPORTED: CONTRADICTED, CONTRADICTED: SUPPORTED}


def evaluate(runs_dir: str | Path = "runs") -> dict:
    """Judge all statements: ``claims``, one entry each with ``published`` and a list ``own``.

    ``own`` has an entry per system and hardware whose runs can test a statement. Also ``errata``,
    and the number of each verdict by statement (``counts``) and by fact (``groups``).
    """
    table = observations.means(observations.load(runs_dir))
    study = with_scatter(table[table["origin"] == "published"])
    own = table[(table["origin"] == "own") & (table["device_kind"] == "gpu")]
    own = own[own["dataset"].isin(DATA_SETS)]
    machines = own.groupby(own["system"] + " " + own["hardware"])
    groups = {name: with_scatter(rows) for name, rows in machines}
    all_own = {"all": with_scatter(own)}
    errata = published.errata()
    claims = []
    for claim in read():
        entry = {"group": claim["id"]} | {
            name: claim[name] for name in ABOUT if name in claim
        }
        entry["test"] = describe(claim)
        entry["errata"] = [
            one["id"] for one in errata if claim["id"] in one.get("claims", [])
        ]
        entry["published"] = judge(claim, study)
        crosses = "hardware" in claim.get("a", {})
        columns = all_own if crosses else groups
        judged = [{"on": name, **judge(claim, rows)} for name, rows in columns.items()]
        tested = [verdict for verdict in judged if "value" in verdict]
        nothing = {
            "on": "",
            "verdict": NO_DATA,
            "reason": "no measured own run tests it",
        }
        entry["own"] = tested or [nothing]
        claims.append(entry)
    counted = {"counts": counts(claims, "id"), "groups": counts(claims, "group")}
    return {**counted, "claims": claims, "errata": errata}


def read() -> list[dict]:
    """Read the entries of the ledger."""
    return tomllib.loads(CLAIMS.read_text())["claim"]


def counts(claims: list[dict], by: str) -> dict[str, dict[str, int]]:
    """Count the statements ("id"), or the facts that they rest on ("group"), by verdict."""
    rows = []
    for claim in claims:
        rows.append((claim[by], "published", "", claim["published"]["verdict"]))
        rows += [
            (claim[by], "own", judged["on"], judged["verdict"])
            for judged in claim["own"]
        ]
    table = pd.DataFrame(
        rows, columns=["name", "column", "on", "verdict"]
    ).drop_duplicates()
    number_of = pd.crosstab(table["verdict"], table["column"])
    return number_of.reindex(VERDICTS, fill_value=0)[["published", "own"]].to_dict()


def with_scatter(rows: pd.DataFrame) -> pd.DataFrame:
    """Add how much repeated runs scatter to rows of ``observations.means``, by workload.

    ``<quantity>_scatter`` is the relative standard deviation, ``<quantity>_freedom`` its degrees of
    freedom.
    """
    runs = observations.distinct(rows[rows["repeats"] > 1])
    names = observations.QUANTITIES
    stds = runs.reindex(columns=[f"{name}_std" for name in names]).set_axis(
        names, axis=1
    )
    relative = stds / runs[names]
    each_freedom = relative.notna().mul(runs["repeats"] - 1.0, axis=0)
    squares = (each_freedom * relative**2).groupby(runs["workload"]).sum()
    freedom = each_freedom.groupby(runs["workload"]).sum().replace(0, np.nan)
    scatter = np.sqrt(squares / freedom)
    both = scatter.add_suffix("_scatter").join(freedom.add_suffix("_freedom"))
    return rows.join(both, on="workload").copy()  # in one piece


def judge(claim: dict, rows: pd.DataFrame) -> dict:
    """Judge one statement on rows of ``with_scatter``.

    Returns ``verdict`` and ``reason``, and, where there are data, ``value``, ``low`` and ``high``
    of the mean or of the unit nearest to the ends of what is ``allowed``, the ``units`` (name ->
    value), and of which series the statement asks and has. Values are relative changes, exponents
    less 1, or the quantity's own.
    """
    if claim.get("restated"):
        return {"verdict": RESTATED, "reason": "the value is the statement itself"}
    if "reason" in claim:
        return {"verdict": NO_DATA, "reason": claim["reason"]}
    table = units(claim, rows)
    if table.empty:
        return {
            "verdict": NO_DATA,
            "reason": f"no {claim['quantity']} of what it asks for",
        }
    shown = intervals(table, claim.get("every", False))
    low, high = shown["low"], shown["high"]
    lowest, highest = allowed(claim)
    verdict = INCONCLUSIVE
    if ((low >= lowest) & (high <= highest)).all():
        verdict = SUPPORTED
    elif ((high < lowest) | (low > highest)).any():
        verdict = CONTRADICTED
    if claim.get("expect") == "differs":
        verdict = OPPOSITE.get(verdict, verdict)
    asked = claim.get("series", [])
    known = [name for name in asked if name in set(table["series"])]
    reason = ""
    if len(known) < len(asked) / 2:
        verdict = INCONCLUSIVE
        reason = f"only {len(known)} of its {len(asked)} series are known"
    room = np.minimum(low - lowest, highest - high).to_numpy()
    decisive = shown.iloc[room.argmin()]
    values = zip(table["unit"], table["value"], strict=True)
    return {
        "verdict": verdict,
        "reason": reason,
        "quantity": claim["quantity"],
        **{name: _printed(claim, decisive[name]) for name in ("value", "low", "high")},
        "allowed": [_printed(claim, end) for end in (lowest, highest)],
        "of": decisive["unit"],
        "units": {unit: _printed(claim, log) for unit, log in values},
        "coverage": {"of": asked, "with": known},
    }


def units(claim: dict, rows: pd.DataFrame) -> pd.DataFrame:
    """Compute the log ratios: unit, series, value, its standard error and degrees of freedom."""
    quantity = claim["quantity"]
    provenance = observations.provenance(quantity, rows)
    rows = match(
        rows[provenance.isin(["published", "measured"])], claim.get("where", {})
    )
    rows = rows.dropna(subset=[quantity, claim.get("per", quantity)])
    spread = "energy_per_gpu_hour_kW" if claim.get("per") == "gpu_hours" else quantity
    scatter, freedom = (
        rows[f"{spread}_{column}"].fillna(rows[f"energy_total_kWh_{column}"])
        for column in ("scatter", "freedom")
    )
    rows = rows.assign(
        value=np.log(rows[quantity].astype(float)),
        error=scatter / np.sqrt(rows["repeats"].astype(float)),
        freedom=freedom,
    )
    if "series" in claim:
        return pd.concat([_growth(claim, name, rows) for name in claim["series"]])
    if "a" in claim:
        return _pairs(
            claim, *(observations.distinct(match(rows, claim[side])) for side in "ab")
        )
    each = observations.distinct(rows)
    return each.assign(unit=each["series"] + " n=" + each["devices"].astype(str))[UNIT]


def _growth(claim: dict, name: str, rows: pd.DataFrame) -> pd.DataFrame:
    """Compare the ends of one series."""
    rows = rows[rows["series"] == name].sort_values("devices")
    rows = rows[rows["recipe"].isin(rows["recipe"].mode()[:1])]
    rows = rows.drop_duplicates("devices").set_index("devices")
    first, last = (
        end.get(name) if isinstance(end, dict) else end
        for end in (
            claim.get("from", rows.index.min()),
            claim.get("to", rows.index.max()),
        )
    )
    before = rows.reindex([first]).iloc[0]
    after = rows[rows.index.isin(last if isinstance(last, list) else [last])]
    after = after.drop(first, errors="ignore")
    value = after["value"] - before["value"]
    error = np.hypot(before["error"], after["error"])
    if "per" in claim:
        span = np.log(after[claim["per"]] / before[claim["per"]])
        value, error = value / span - 1, error / abs(span)
    unit = [f"{name} n={first} to {end}" for end in after.index]
    changes = after.assign(
        unit=unit, value=value, error=error, freedom=before["freedom"]
    )
    return changes[UNIT].dropna(subset="value")


def _pairs(claim: dict, a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Compare runs that are equal in ``match``, or the means of both sides."""
    names = claim.get("match", ["side"])
    both = _means(a, names).merge(_means(b, names), on=names, suffixes=("", "_b"))
    return both.assign(
        unit=[", ".join(map(str, key)) for key in both[names].itertuples(index=False)],
        value=both["value"] - both["value_b"],
        error=np.hypot(both["error"], both["error_b"]),
        freedom=both[["freedom", "freedom_b"]].min(axis=1),
    )[UNIT]


def _means(rows: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Compute the means of the runs that are equal in ``names``, and their errors."""
    groups = rows.assign(side="means", square=rows["error"] ** 2).groupby(names)
    error = np.sqrt(groups["square"].sum(min_count=1)) / groups.size()
    means = groups.agg({"series": "first", "value": "mean", "freedom": "min"})
    return means.assign(error=error).reset_index()


def intervals(table: pd.DataFrame, every: bool) -> pd.DataFrame:
    """Add 95 % intervals: of the mean of three or more units, else of each by repeats."""
    if len(table) >= 3 and not every:
        value = table["value"]
        mean = {
            "unit": "mean",
            "value": value.mean(),
            "error": value.sem(),
            "freedom": len(value) - 1,
        }
        table = pd.DataFrame([mean])
    reach = stats.t.ppf(0.975, table["freedom"].astype(float)) * table["error"]
    return table.assign(low=table["value"] - reach, high=table["value"] + reach)


def allowed(claim: dict) -> tuple[float, float]:
    """Compute the logs between which a unit agrees with the statement."""
    if "range" in claim:
        return tuple(math.log(end) if end > 0 else -math.inf for end in claim["range"])
    if isinstance(claim["expect"], list):
        return tuple(map(math.log1p, claim["expect"]))
    return EXPECT[claim["expect"]]


def _printed(claim: dict, log: float) -> float | None:
    """Turn a log into what is printed, with six digits; None for an end that is not there."""
    if not math.isfinite(log):
        return None
    if "range" in claim:
        value = math.exp(log)
    elif "per" in claim:
        value = log
    else:
        value = math.expm1(log)
    return float(f"{value:.6g}")


def match(rows: pd.DataFrame, conditions: dict) -> pd.DataFrame:
    """Select the rows that equal a value or one of a list, or lie at least _min, at most _max."""
    for name, wanted in conditions.items():
        if name.endswith("_min"):
            rows = rows[rows[name.removesuffix("_min")] >= wanted]
        elif name.endswith("_max"):
            rows = rows[rows[name.removesuffix("_max")] <= wanted]
        else:
            rows = rows[
                rows[name].isin(wanted if isinstance(wanted, list) else [wanted])
            ]
    return rows


def describe(claim: dict) -> str:
    """Describe the test in one line."""
    fields = [
        f"{name} {value}"
        for name, value in claim.items()
        if name not in NOT_OF_THE_TEST
    ]
    return ", ".join([claim["quantity"], *fields]) if "quantity" in claim else "none"


def report(found: dict) -> str:
    """Write the ledger as text: a line per statement and column, and the counts."""
    lines = []
    for claim in found["claims"]:
        lines.append(f"{claim['id']} ({claim['place']}): {claim['says']}")
        lines.append(f"  test: {claim['test']}")
        for judged in (claim["published"], *claim["own"]):
            lines.append(f"  {judged.get('on', 'published')}: {words(judged)}")
    lines += [f"{what}: {found[what]}" for what in ("counts", "groups")]
    return "\n".join(lines)


def words(judged: dict) -> str:
    """Write a verdict with its value, its interval and its reason."""
    parts = [judged["verdict"], judged["reason"]]
    if "value" in judged:
        interval = "{of}: {value:.3g} [{low}, {high}]".format_map(judged)
        parts.insert(1, interval.replace("None", "?"))
    return "; ".join(filter(None, parts))
