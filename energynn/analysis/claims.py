"""Judge the study's statements (paper/claims.toml) on published values and on own runs.

A statement is a log ratio ``u = ln(after / before)`` of a ``quantity`` for each unit. Units are

- ``series``: the configuration ``to`` over that ``from`` (the last over the first) of each series;
  with ``per``, the exponent of the quantity in ``per``, minus 1;
- ``a`` and ``b``: the pairs that are equal in ``match``, or the ratio of their means;
- ``range``: each configuration, by its value.

All are selected by ``where``. Three or more units have an interval from their own scatter (Student's
t), one or two, or ``every`` one, from the scatter of repeated runs with its degrees of freedom.
``expect``: "up" or "down" (by anything), "same" (within 10 %), "much up" or "much down" (by more),
"differs" (not "same"), or the lowest and highest relative change.

*Supported*: all intervals lie within what is expected. *Contradicted*: one lies outside.
*Inconclusive*: else, and where fewer than half of the series are known. *No data*: none is, or
``reason`` says why no record can test it. *Restated*: the published value is the statement itself.
Own runs count where they are measured, on GPUs, with the study's data sets.
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
    study = configurations(table[table["origin"] == "published"])
    own = table[(table["origin"] == "own") & (table["device_kind"] == "gpu")]
    own = own[own["dataset"].isin(DATA_SETS)]
    machines = own.groupby(own["system"] + " " + own["hardware"])
    groups = {name: configurations(rows) for name, rows in machines}
    every = {"all": configurations(own)} if len(own) else {}
    claims = []
    for claim in read():
        entry = {name: claim[name] for name in ("id", "place", "says", "base") if name in claim}
        entry["group"] = claim.get("group", claim["id"])
        entry["test"] = describe(claim)
        entry["errata"] = [
            one["id"] for one in published.errata() if claim["id"] in one.get("claims", [])
        ]
        entry["published"] = judge(claim, study)
        crosses = "hardware" in claim.get("a", {})
        judged = [
            {"on": name, **judge(claim, rows)}
            for name, rows in (every if crosses else groups).items()
        ]
        tested = [verdict for verdict in judged if "value" in verdict]
        nothing = {"on": "", "verdict": NO_DATA, "reason": "no measured own run tests it"}
        entry["own"] = tested or [nothing]
        claims.append(entry)
    counted = {"counts": counts(claims), "groups": counts(claims, by_group=True)}
    return {**counted, "claims": claims, "errata": published.errata()}


def read() -> list[dict]:
    """Read the entries of the ledger."""
    return tomllib.loads(CLAIMS.read_text())["claim"]


def counts(claims: list[dict], by_group: bool = False) -> dict[str, dict[str, int]]:
    """Count the statements, or the groups that rest on one fact, by column and verdict."""
    rows = []
    for number, claim in enumerate(claims):
        name = claim["group"] if by_group else number
        rows.append(("published", name, "", claim["published"]["verdict"]))
        rows += [("own", name, judged["on"], judged["verdict"]) for judged in claim["own"]]
    table = pd.DataFrame(rows, columns=["column", "name", "on", "verdict"]).drop_duplicates()
    number_of = pd.crosstab(table["verdict"], table["column"])
    return number_of.reindex(VERDICTS, fill_value=0)[["published", "own"]].to_dict()


def configurations(table: pd.DataFrame) -> pd.DataFrame:
    """Add the scatter of repeated runs to the rows of ``observations.means``.

    ``attrs["scatter"]``: relative standard deviation and its degrees of freedom by workload and
    quantity.
    """
    runs = observations.distinct(table[table["repeats"] > 1])
    freedom = (runs["repeats"] - 1).astype(float)
    scatter = {}
    for quantity in observations.QUANTITIES:
        squares = freedom * (runs.get(f"{quantity}_std", np.nan) / runs[quantity]) ** 2
        known = pd.DataFrame({"squares": squares, "freedom": freedom}).dropna()
        for workload, sums in known.groupby(runs["workload"]).sum().iterrows():
            root = math.sqrt(sums["squares"] / sums["freedom"])
            scatter[workload, quantity] = (root, sums["freedom"])
    table.attrs["scatter"] = scatter
    return table


def judge(claim: dict, rows: pd.DataFrame) -> dict:
    """Judge one statement on configurations.

    Returns ``verdict`` and ``reason``, and, where there are data, ``value``, ``low`` and ``high`` of
    the mean or of the unit nearest to the ends of what is ``allowed``, the ``units`` (name ->
    value), and of which series the statement asks and has. Values are relative changes, exponents
    less 1, or the quantity's own.
    """
    if claim.get("restated"):
        return {"verdict": RESTATED, "reason": "the value is the statement itself"}
    if "reason" in claim:
        return {"verdict": NO_DATA, "reason": claim["reason"]}
    table = units(claim, rows)
    if table.empty:
        return {"verdict": NO_DATA, "reason": f"no {claim['quantity']} of what it asks for"}
    low, high = ends(table, claim.get("every", False))
    lowest, highest = allowed(claim)
    verdict = INCONCLUSIVE
    if ((low >= lowest) & (high <= highest)).all():
        verdict = SUPPORTED
    elif ((high < lowest) | (low > highest)).any():
        verdict = CONTRADICTED
    verdict = OPPOSITE.get(verdict, verdict) if claim.get("expect") == "differs" else verdict
    asked = claim.get("series", [])
    known = [name for name in asked if name in set(table["series"])]
    reason = ""
    if len(known) < len(asked) / 2:
        verdict = INCONCLUSIVE
        reason = f"only {len(known)} of its {len(asked)} series are known"
    at = int(np.argmin(np.minimum(low - lowest, highest - high)))
    is_mean = len(low) < len(table)
    value = table["value"].mean() if is_mean else table["value"].iloc[at]
    printed = [_printed(claim, log) for log in (value, low[at], high[at], lowest, highest)]
    return {
        "verdict": verdict,
        "reason": reason,
        "quantity": claim["quantity"],
        "value": printed[0],
        "low": printed[1],
        "high": printed[2],
        "allowed": printed[3:],
        "of": "mean" if is_mean else table["unit"].iloc[at],
        "units": {
            unit: _printed(claim, log)
            for unit, log in zip(table["unit"], table["value"], strict=True)
        },
        "coverage": {"of": asked, "with": known},
    }


def units(claim: dict, rows: pd.DataFrame) -> pd.DataFrame:
    """Compute the log ratios: unit, series, value, its standard error and degrees of freedom."""
    needed = [claim["quantity"], *([claim["per"]] if "per" in claim else [])]
    scatter = rows.attrs["scatter"]
    provenance = observations.provenance(claim["quantity"], rows)
    rows = rows[provenance.isin(["published", "measured"])]
    rows = match(rows, claim.get("where", {})).dropna(subset=needed)
    scatters = [_scatter(scatter, workload, claim) for workload in rows["workload"]]
    rows = rows.assign(
        log=np.log(rows[claim["quantity"]].astype(float)),
        error=[error for error, _ in scatters] / np.sqrt(rows["repeats"].astype(float)),
        freedom=[freedom for _, freedom in scatters],
    )
    if "series" in claim:
        found = [unit for name in claim["series"] for unit in _growth(claim, name, rows)]
    elif "a" in claim:
        found = _pairs(claim, *(observations.distinct(match(rows, claim[side])) for side in "ab"))
    else:
        each = observations.distinct(rows)
        names = each["series"] + " n=" + each["devices"].astype(str)
        found = zip(names, each["series"], each["log"], each["error"], each["freedom"], strict=True)
    return pd.DataFrame(found, columns=["unit", "series", "value", "error", "freedom"])


def _scatter(scatter: dict, workload: str, claim: dict) -> tuple[float, float]:
    """Find the scatter of a quantity, else of the energy, over a workload's repeated runs."""
    quantity = "energy_per_gpu_hour_kW" if claim.get("per") == "gpu_hours" else claim["quantity"]
    energy = scatter.get((workload, "energy_total_kWh"), (math.nan, 1))
    return scatter.get((workload, quantity), energy)


def _growth(claim: dict, name: str, rows: pd.DataFrame) -> list[tuple]:
    rows = rows[rows["series"] == name].sort_values("devices")
    rows = rows[rows["recipe"].isin(rows["recipe"].mode()[:1])]
    rows = rows.drop_duplicates("devices").set_index("devices")
    if rows.empty:
        return []
    first, last = (
        end[name] if isinstance(end, dict) else end
        for end in (claim.get("from", rows.index[0]), claim.get("to", rows.index[-1]))
    )
    found = []
    for end in last if isinstance(last, list) else [last]:
        if first == end or not {first, end} <= set(rows.index):
            continue
        before, after = rows.loc[first], rows.loc[end]
        value = after["log"] - before["log"]
        error = math.hypot(before["error"], after["error"])
        if "per" in claim:
            span = math.log(after[claim["per"]] / before[claim["per"]])
            value = value / span - 1
            error /= abs(span)
        found.append((f"{name} n={first} to {end}", name, value, error, before["freedom"]))
    return found


def _pairs(claim: dict, a: pd.DataFrame, b: pd.DataFrame) -> list[tuple]:
    if "match" not in claim:
        sides = [part for part in (a, b) if len(part)]
        if len(sides) < 2:
            return []
        error = math.hypot(*(math.sqrt((part["error"] ** 2).sum()) / len(part) for part in sides))
        freedom = min(part["freedom"].min() for part in sides)
        return [("means", "", a["log"].mean() - b["log"].mean(), error, freedom)]
    both = a.merge(b, on=claim["match"], suffixes=("", "_b"))
    labels = both[claim["match"]].astype(str).agg(", ".join, axis=1) if len(both) else []
    value = both["log"] - both["log_b"]
    error = np.hypot(both["error"], both["error_b"])
    return list(zip(labels, both["series"], value, error, both["freedom"], strict=True))


def ends(table: pd.DataFrame, every: bool) -> tuple[np.ndarray, np.ndarray]:
    """Compute 95 % intervals: one of the mean of three or more units, else of each by repeats."""
    value = table["value"].to_numpy()
    error = table["error"].to_numpy()
    freedom = table["freedom"].to_numpy(float)
    if len(value) >= 3 and not every:
        freedom = np.array([len(value) - 1])
        error = np.array([stats.sem(value)])
        value = np.array([value.mean()])
    reach = stats.t.ppf(0.975, freedom) * error
    return value - reach, value + reach


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
            rows = rows[rows[name].isin(wanted if isinstance(wanted, list) else [wanted])]
    return rows


def describe(claim: dict) -> str:
    """Describe the test in one line."""
    if "quantity" not in claim:
        return "none"
    fields = ("per", "series", "from", "to", "a", "b", "match", "where", "range", "every", "expect")
    words = [f"{name} {claim[name]}" for name in fields if name in claim]
    return ", ".join([claim["quantity"], *words])


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
