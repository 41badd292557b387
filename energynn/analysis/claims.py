"""Judge the study's statements (paper/claims.toml) on published values and on own runs.

A statement is a log ratio ``u = ln(after / before)`` of a ``quantity`` for each unit. Units are

- ``series``: the configuration ``to`` over that ``from`` (the last over the first) of each series;
  with ``per``, the exponent of the quantity in ``per``, minus 1. Series that begin or end with the
  same run are one unit, their mean;
- ``a`` over ``b``: the ratio of the means of those that are equal in ``match``; with ``per``, of
  the gradients from one number of GPUs to the next;
- "straight": the relative standard deviation of runs that are equal in ``match``, three or more,
  around a line in ``per``, with an intercept;
- neither: each configuration, by its value.

All are selected by ``where``, a query of pandas. Three or more units have an interval from their
own scatter (Student's t), one or two from the scatter of repeated runs with its degrees of
freedom, and from rounding. A statement about ``every`` unit describes a table: it is decided by
enumeration, where only rounding has an interval. ``range``: lowest and highest value or ratio.
``expect``: "up" or "down" (by anything), "same" (within 10 %), "much up" or "much down" (by more),
"differs" (not "same"), "straight" (at most 10 %).

*Supported*: all intervals lie within what is expected. *Contradicted*: all lie outside, or one of
``every``. *Inconclusive*: else, and where fewer than half of the series are known, or not all
numbers of GPUs that it ``needs``. *No data*: none is known, or ``reason`` says why no record can
test it. *Restated*: the study's values are the statements that it ``restates``, and decide nothing.
``reading`` is a second test that the same words allow, by all values: it is shown, in a column of
its own, and not counted. Derived values decide in a column of their own, but not about what they
copy. Own runs count where they are measured, on GPUs, with the study's data sets. ``elsewhere``
names units in what others measured: there it is *likewise* or *otherwise*, which says nothing of
the study's runs.
"""

import math
from pathlib import Path
from statistics import multimode

import numpy as np
import pandas as pd
from scipy import special

from energynn.analysis import observations, others, published
from energynn.host.files import shipped_path
from energynn.host.reading import read_toml

VERDICTS = ("supported", "contradicted", "inconclusive", "no data", "restated")
SUPPORTED, CONTRADICTED, INCONCLUSIVE, NO_DATA, RESTATED = VERDICTS
OTHERS_VERDICTS = {SUPPORTED: "likewise", CONTRADICTED: "otherwise"}
VERDICT_COLUMNS = ("published", "derived", "reading", "own", "elsewhere")
TEST_FIELDS = ("quantity", "per", "expect")
UNIT_COLUMNS = ["unit", "series", "value", "error", "freedom"]
OWN_GPU_RUNS_QUERY = (
    "origin == 'own' and device_kind == 'gpu' and dataset in ['imagenet', 'era5']"
    " and workload in ['resnet50', 'fourcastnet']"
)
DIFFERENCE_THRESHOLD = 1.1
EXPONENT_MEANING = "exponent less 1"
# In units of the log of the threshold.
EXPECTED_LOG_RANGES = {
    "same": (-1, 1),
    "differs": (-1, 1),
    "up": (0, math.inf),
    "down": (-math.inf, 0),
    "much up": (1, math.inf),
    "much down": (-math.inf, -1),
    "straight": (-math.inf, 1),
}


def evaluate_claims(runs_dir: str | Path) -> dict:
    """Judge all statements: ``claims``, the ledger's with ``published``, ``derived`` and ``own``.

    ``derived`` is a list of one where derived values say more. ``own`` has an entry per system and
    hardware whose runs can test a statement, ``elsewhere`` is there where others' can, ``reading``
    where the words have a second one. Also ``restated`` and ``errata``, and the number of each
    verdict (``counts``).
    """
    table = observations.means_of_configurations(observations.load(runs_dir))
    printed = table[table["origin"] == "published"]
    further = observations.published_runs("derived")
    study = pd.concat([printed, further])
    own = table.query(OWN_GPU_RUNS_QUERY)
    machines = own.groupby(own["system"] + " " + own["hardware"])
    errata = published.read_errata()
    outside = others.load()
    claims = []
    for claim in read_claims("claim"):
        entry = {"group": claim["id"]} | claim
        entry["errata"] = [
            one["id"] for one in errata if claim["id"] in one.get("claims", [])
        ]
        entry["published"] = judge(claim, printed)
        entry["derived"] = []
        if "quantity" in claim and len(selected_rows(claim, further)):
            derived = judge(claim, study)
            if derived.get("units") != entry["published"].get("units"):
                entry["derived"] = [derived]
        if "reading" in claim:
            other = judge(claim | claim["reading"], study)
            entry["reading"] = {"on": claim["reading"]["as"], **other}
        tried = [("all", own)] if "hardware" in claim.get("a", "") else machines
        judged = [{"on": name, **judge(claim, rows)} for name, rows in tried]
        entry["own"] = [verdict for verdict in judged if "value" in verdict]
        if "elsewhere" in claim:
            entry["elsewhere"] = judge_others_runs(claim, outside)
        claims.append(entry)
    counts = count_verdicts(claims)
    restated = read_claims("restated")
    counts["published"][RESTATED] += len(restated)
    return {"counts": counts, "claims": claims, "restated": restated, "errata": errata}


def read_claims(kind: str) -> list[dict]:
    """Read the entries of the ledger of one kind: "claim" or "restated"."""
    return read_toml(shipped_path("paper") / "claims.toml")[kind]


def verdicts_by_column(claim: dict) -> list[tuple[str, dict]]:
    """List the verdicts on a statement, each with its column."""
    return [
        (column, one)
        for column in VERDICT_COLUMNS
        for one in np.atleast_1d(claim.get(column, []))
    ]


def count_verdicts(claims: list[dict]) -> dict[str, dict[str, int]]:
    """Count the statements by column and verdict."""
    words = [*VERDICTS, *OTHERS_VERDICTS.values()]
    number_of = {column: dict.fromkeys(words, 0) for column in VERDICT_COLUMNS}
    for claim in claims:
        for column, one in verdicts_by_column(claim):
            number_of[column][one["verdict"]] += 1
    return number_of


def judge_others_runs(claim: dict, runs: pd.DataFrame) -> dict:
    """Judge a statement on rows of ``others.load`` that its ``elsewhere`` selects by ``where``.

    A series is what is equal in the columns ``alike``; ``data`` says in words what the rows are.
    """
    test = {name: claim[name] for name in TEST_FIELDS if name in claim}
    test |= claim["elsewhere"]
    rows = others.means(runs.query(test.pop("where"), engine="python"))
    rows["series"] = ""
    if "alike" in test:
        rows = others.make_series(rows.dropna(subset=[test["quantity"]]), test["alike"])
        test["series"] = list(rows["series"].unique())
    judged = judge(test, rows)
    verdict = OTHERS_VERDICTS.get(judged["verdict"], judged["verdict"])
    return judged | {"verdict": verdict, "data": test["data"]}


def scatter_of_repeats(rows: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """Compute by workload how much repeated runs scatter, among rows of
    ``observations.means_of_configurations``.

    ``scatter`` is the relative standard deviation, ``freedom`` its degrees of freedom.
    """
    runs = observations.distinct_runs(rows[rows["repeats"] > 1])
    relative = runs.get(f"{quantity}_std", np.nan) / runs[quantity]
    freedom = (runs["repeats"] - 1.0)[relative.notna()]
    squares = (freedom * relative**2).groupby(runs["workload"]).sum(min_count=1)
    freedom = freedom.groupby(runs["workload"]).sum()
    return pd.DataFrame({"scatter": np.sqrt(squares / freedom), "freedom": freedom})


def judge(claim: dict, rows: pd.DataFrame) -> dict:
    """Judge one statement on rows of ``observations.means_of_configurations``.

    Returns ``verdict`` and ``reason``, and, where there are data, ``value``, ``low`` and ``high``
    of the mean or of the unit nearest to the ends of what is allowed, the ``units`` (name ->
    value), of which series the statement asks and has, and the verdicts ``at`` other thresholds
    where they differ. ``enumerated`` tells whether every unit was looked at by itself. Values are
    relative changes, exponents less 1, or the quantity's own.
    """
    if "reason" in claim:
        return {"verdict": claim.get("verdict", NO_DATA), "reason": claim["reason"]}
    rows = testable_rows(claim, rows)
    table = log_ratios_of_units(claim, rows)
    if table.empty:
        return {
            "verdict": RESTATED if "restates" in claim else NO_DATA,
            "reason": f"no {claim['quantity']} that could test it",
        }
    asked = claim.get("series", [])
    there = [name for name in asked if name in set(table["series"].explode())]
    numbers = table[["value", "error", "freedom"]].to_numpy(float).T
    value, low, high = confidence_intervals(*numbers, claim.get("every", False))
    verdicts = {
        at: str(decide(low, high, claim, at))
        for at in (1.05, DIFFERENCE_THRESHOLD, 1.2)
    }
    unknown = set(claim.get("needs", [])) - set(
        rows["devices"][rows["series"].isin(there)]
    )
    reason = ""
    if unknown:
        reason = f"unknown on {sorted(unknown)} GPUs"
    if len(there) < len(asked) / 2:
        reason = f"only {len(there)} of its {len(asked)} series are known"
    verdict = INCONCLUSIVE if reason else verdicts[DIFFERENCE_THRESHOLD]
    lowest, highest = allowed_log_range(claim, DIFFERENCE_THRESHOLD)
    place = np.minimum(low - lowest, highest - high).argmin()
    values = zip(table["unit"], table["value"], strict=True)
    return {
        "verdict": verdict,
        "reason": reason,
        "quantity": claim["quantity"],
        "is": _meaning_of_values(claim),
        "value": _ratio_from_log(claim, value[place]),
        "low": _ratio_from_log(claim, low[place]),
        "high": _ratio_from_log(claim, high[place]),
        "of": table["unit"].iloc[place] if len(low) == len(table) else "mean",
        "allowed": [_ratio_from_log(claim, end) for end in (lowest, highest)],
        "units": {unit: _ratio_from_log(claim, log) for unit, log in values},
        "enumerated": claim.get("every", False),
        "coverage": {"of": asked, "with": there},
        "at": {
            f"{at - 1:.0%}": other
            for at, other in verdicts.items()
            if other != verdict and not reason
        },
    }


def decide(
    low: np.ndarray, high: np.ndarray, claim: dict, threshold: float
) -> np.ndarray:
    """Compare intervals with what is allowed; the last axis counts them, others count worlds."""
    lowest, highest = allowed_log_range(claim, threshold)
    inside = ((low >= lowest) & (high <= highest)).all(axis=-1)
    outside = (high < lowest) | (low > highest)
    outside = outside.any(axis=-1) if claim.get("every") else outside.all(axis=-1)
    if claim.get("expect") == "differs":
        inside, outside = outside, inside
    return np.select([inside, outside], [SUPPORTED, CONTRADICTED], INCONCLUSIVE)


def testable_rows(claim: dict, rows: pd.DataFrame) -> pd.DataFrame:
    """Select the rows that can test a statement; add log, error, degrees of freedom.

    All rows tell how much runs scatter, in the quantity, else in the total energy.
    """
    quantity = claim["quantity"]
    tested = "energy_per_gpu_hour_kW" if claim.get("per") == "gpu_hours" else quantity
    of_runs = scatter_of_repeats(rows, tested)
    if of_runs.isna().any(axis=None):
        of_runs = of_runs.combine_first(scatter_of_repeats(rows, "energy_total_kWh"))
    rows = selected_rows(claim, rows)
    if "restates" in claim:
        rows = rows[rows["origin"] != "published"]
    provenance = observations.provenance_of_quantity(quantity, rows)
    rows = rows[
        ~provenance.isin(["estimated", "simulated"]) & (rows["copies"] != tested)
    ]
    rows = rows.join(of_runs, on="workload")
    printed = observations.DERIVED_SOURCES.get(tested, [tested])
    rounding = (rows.get(f"{name}_half", np.nan) / rows[name] for name in printed)
    squares = sum(part.fillna(0.0) ** 2 for part in rounding)
    if not claim.get("every"):
        # all between its ends is alike
        squares = rows["scatter"] ** 2 / rows["repeats"].astype(float) + squares / 3
    return rows.assign(
        value=np.log(rows[quantity].astype(float)), error=np.sqrt(squares)
    )


def selected_rows(claim: dict, rows: pd.DataFrame) -> pd.DataFrame:
    """Select the rows that a statement asks for and that have what it tests."""
    rows = rows.dropna(subset=[claim["quantity"], claim.get("per", claim["quantity"])])
    where = claim.get("where", "devices > 0")
    # pandas looks at every column that it is given
    return rows[rows[[name for name in rows if name in where]].eval(where)]


def log_ratios_of_units(claim: dict, rows: pd.DataFrame) -> pd.DataFrame:
    """Compute the log ratios of rows of ``testable_rows``: one row of ``UNIT_COLUMNS`` each."""
    if "a" in claim:
        sides = (observations.distinct_runs(rows.query(claim[side])) for side in "ab")
        if "per" in claim:
            sides = (_gradients_between_neighbours(claim, side) for side in sides)
        return _ratios_of_pairs(claim, *sides)
    if claim.get("expect") == "straight":
        return _deviations_from_lines(claim, rows)
    if "expect" in claim:
        return _growth_of_each_series(claim, rows)
    each = observations.distinct_runs(rows)
    return each.assign(unit=each["series"] + " n=" + each["devices"].astype(str))[
        UNIT_COLUMNS
    ]


def _growth_of_each_series(claim: dict, rows: pd.DataFrame) -> pd.DataFrame:
    """Compare the ends of each series; those that share one count once, with the largest error."""
    rows = rows.sort_values("devices", kind="stable")
    table = pd.concat(
        _growth_of_one_series(claim, rows[rows["series"] == name])
        for name in claim["series"]
    )
    of = {"value": "mean", "error": "max", "freedom": "min", "base": "first"}
    of |= {"unit": ", ".join, "series": "sum"}
    for end in ["run"] if "to" in claim else ["run", "base"]:
        table = table.groupby(end, as_index=False, sort=False).agg(of)
    return table


def _growth_of_one_series(claim: dict, runs: pd.DataFrame) -> pd.DataFrame:
    """Compare the ends of one series, of the recipe that most of its runs have."""
    recipe = min(multimode(runs["recipe"]), default="")
    runs = runs[runs["recipe"] == recipe].drop_duplicates("devices")
    devices = runs["devices"]
    first = claim.get("from", devices.min())
    last = claim.get("to", [devices.max()])
    after = runs[devices.isin(last) & (devices != first)]
    both = after.merge(runs[devices == first], how="cross", suffixes=("", "_before"))
    value = both["value"] - both["value_before"]
    error = np.hypot(both["error"], both["error_before"])
    if "per" in claim:
        span = np.log(both[claim["per"]] / both[f"{claim['per']}_before"])
        value = value / span - 1
        error = error / span.abs()
    names = both["series"]
    return pd.DataFrame(
        {
            "unit": names + f" n={first} to " + both["devices"].astype(str),
            "series": names.map(lambda name: [name]),
            "run": both["run"],
            "base": both["run_before"],
            "value": value,
            "error": error,
            "freedom": both["freedom_before"],
        }
    )


def _deviations_from_lines(claim: dict, rows: pd.DataFrame) -> pd.DataFrame:
    """Compute how far the runs of each group lie from their line, in parts of the quantity."""
    deviations = []
    rows = rows.drop_duplicates([*claim["match"], "run"])
    for name, runs in rows.groupby(claim["match"]):
        size = np.exp(runs["value"])
        along = runs[claim["per"]].astype(float)
        if along.nunique() > 2:
            (squares,) = np.polyfit(along, size, 1, w=1 / size, full=True)[1]
            value = math.log1p(math.sqrt(squares / (len(runs) - 2)))
            deviations.append([" ".join(name), runs["series"].iloc[0], value, 0.0, 1])
    return pd.DataFrame(deviations, columns=UNIT_COLUMNS)


def _gradients_between_neighbours(claim: dict, rows: pd.DataFrame) -> pd.DataFrame:
    """Compute the gradients between neighbours in ``devices``; one that falls is almost none."""
    steps = rows.sort_values("devices")[[claim["quantity"], claim["per"]]].diff()
    gradient = steps[claim["quantity"]] / steps[claim["per"]]
    value = np.log(gradient.astype(float).clip(lower=1e-9))
    return rows.assign(value=value).dropna(subset="value")


def _ratios_of_pairs(claim: dict, a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Compare the means of the runs that are equal in ``match``."""
    names = claim["match"]
    both = _group_means(a, names).merge(
        _group_means(b, names), on=names, suffixes=("", "_b")
    )
    keys = both[names].itertuples(index=False)
    return both.assign(
        unit=[", ".join(map(str, key)).removesuffix(", published") for key in keys],
        value=both["value"] - both["value_b"],
        error=np.hypot(both["error"], both["error_b"]),
        freedom=both[["freedom", "freedom_b"]].min(axis=1),
    )[UNIT_COLUMNS]


def _group_means(rows: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Compute the means of the runs that are equal in ``names``, and their errors."""
    groups = rows.assign(square=rows["error"] ** 2).groupby(names)
    error = np.sqrt(groups["square"].sum(min_count=1)) / groups.size()
    means = groups.agg({"series": "first", "value": "mean", "freedom": "min"})
    return means.assign(error=error).reset_index()


def confidence_intervals(
    value, error, freedom, every: bool = False
) -> tuple[np.ndarray, ...]:
    """Compute value, low and high at 95 %: of the mean of three or more units, else of each.

    The last axis counts units, others count worlds. Of ``every`` unit the ends are what rounding
    leaves.
    """
    if every:
        return value, value - error, value + error
    number = value.shape[-1]
    if number >= 3:
        error = value.std(axis=-1, ddof=1, keepdims=True) / math.sqrt(number)
        value = value.mean(axis=-1, keepdims=True)
        freedom = number - 1
    reach = special.stdtrit(freedom, 0.975) * error  # Student's t
    return value, value - reach, value + reach


def allowed_log_range(claim: dict, threshold: float) -> tuple[float, float]:
    """Compute the logs between which a unit agrees with the statement."""
    if "range" in claim:
        return tuple(map(math.log, claim["range"]))
    return tuple(
        end * math.log(threshold) for end in EXPECTED_LOG_RANGES[claim["expect"]]
    )


def _ratio_from_log(claim: dict, log: float) -> float | None:
    """Turn a log into what is printed, with six digits; None for an end that is not there."""
    if not math.isfinite(log):
        return None
    value = math.exp(log) if "range" in claim else math.expm1(log)
    if _meaning_of_values(claim) == EXPONENT_MEANING:
        value = log
    return float(f"{value:.6g}")


def _meaning_of_values(claim: dict) -> str:
    """Say what the values of a statement are."""
    if "range" in claim:
        return claim["quantity"]
    if claim["expect"] == "straight":
        return "scatter around a line, relative"
    is_exponent = "per" in claim and "a" not in claim
    return EXPONENT_MEANING if is_exponent else "relative change"


def ledger_text(ledger: dict) -> str:
    """Write the ledger as text: the counts, and a line per statement and column."""
    lines = [pd.DataFrame(ledger["counts"]).T.to_string(), ""]
    for claim in ledger["claims"]:
        lines.append(f"{claim['id']} ({claim['place']}): {claim['says']}")
        lines += [
            f"  {one.get('on', column)}: {verdict_text(one)}"
            for column, one in verdicts_by_column(claim)
        ]
    lines += [f"restated ({one['place']}): {one['says']}" for one in ledger["restated"]]
    return "\n".join(lines)


def verdict_text(judged: dict) -> str:
    """Write a verdict with its value, its interval, its reason and what other thresholds say."""
    parts = [judged["verdict"], judged["reason"]]
    if "value" in judged:
        low, high = (
            "?" if judged[end] is None else f"{judged[end]:.3g}"
            for end in ("low", "high")
        )
        how = "by enumeration, " if judged["enumerated"] else ""
        value = f"{judged['is']} {judged['value']:.3g} [{low}, {high}]"
        parts.insert(1, f"{how}{judged['of']}: {value}")
        parts += [f"at {at}: {verdict}" for at, verdict in judged["at"].items()]
    return "; ".join(filter(None, parts))
