"""Effects that statements are judged by: one for each configuration, step, series or pair, with a 95 % interval.

A test takes an entry of the ledger, its rows, and the quantity y, some also that which it is tested against, x: arrays
(1 + DRAWS, rows), whose first row is the values themselves and the others these values within their errors. It returns
rows of effects (part, value, low, high), or raises NoData.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
from scipy import stats

from energynn.analysis import regression

DRAWS = 400  # of each configuration's mean within its errors, for intervals
FACTOR = "energy_per_gpu_hour_kW"


class NoData(Exception):
    """Why a test cannot be done with the rows there are."""


def match(rows: pd.DataFrame, conditions: dict) -> pd.DataFrame:
    """The rows that meet the conditions: equal to a value to one of a list, at least _min, at most _max, _not this."""
    keep = np.ones(len(rows), bool)
    for name, wanted in conditions.items():
        if name.endswith("_min"):
            keep &= rows[name.removesuffix("_min")].to_numpy() >= wanted
        elif name.endswith("_max"):
            keep &= rows[name.removesuffix("_max")].to_numpy() <= wanted
        elif name.endswith("_not"):
            keep &= rows[name.removesuffix("_not")].to_numpy() != wanted
        else:
            keep &= rows[name].isin(wanted if isinstance(wanted, list) else [wanted]).to_numpy()
    return rows[keep]


def configuration_names(rows: pd.DataFrame) -> pd.Series:
    """Series, number of GPUs and hardware of each row."""
    return rows["series"] + " n=" + rows["devices"].astype(str) + " " + rows["hardware"]


def _each(claim: dict, rows: pd.DataFrame, y: np.ndarray) -> pd.DataFrame:
    """Every configuration has this value, or the stated one."""
    n = rows["devices"].astype(str)
    labels = "n = " + n if "series" in claim["select"] else configuration_names(rows)
    if "stated" not in claim:
        return _effects(labels, y)
    if set(claim["stated"]) - set(n):
        raise NoData(f"not known for all of n = {', '.join(claim['stated'])}")
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
        raise NoData(f"needs runs on n = {base} and {end}; known is only n = {known}")
    return _effects([f"n = {base} to {to}" for to in n[later]], y[:, later] / _mean(y[:, first]) - 1)


def _steps(claim: dict, rows: pd.DataFrame, y: np.ndarray) -> pd.DataFrame:
    """The quantity changes by so much from each number of GPUs to the next."""
    _at_least(rows, 3, "steps need")
    n = rows["devices"].to_numpy()
    return _effects([f"n = {a} to {b}" for a, b in zip(n[:-1], n[1:], strict=True)], y[:, 1:] / y[:, :-1] - 1)


def _spread(claim: dict, rows: pd.DataFrame, y: np.ndarray) -> pd.DataFrame:
    """The quantity is constant, or broadly distributed; with a ``share``, so many of its values are."""
    _at_least(rows, 2, "a spread needs")
    others = math.ceil(claim.get("share", 1) * len(rows)) - 1
    y = np.sort(y, axis=1)
    return _effects(_all(rows), (y[:, others:] / y[:, : len(rows) - others]).min(axis=1, keepdims=True) - 1, True)


def _wider(claim: dict, rows: pd.DataFrame, y: np.ndarray, x: np.ndarray) -> pd.DataFrame:
    """The quantity varies more than another."""
    _at_least(rows, 2, "a spread needs")
    return _effects(_all(rows), _range(y) - _range(x), True)


def _lowest(claim: dict, rows: pd.DataFrame, y: np.ndarray) -> pd.DataFrame:
    """The quantity has its minimum at this number of GPUs."""
    n = rows["devices"].to_numpy()
    at = n == claim["at"]
    if not at.any() or not (n < claim["at"]).any() or not (n > claim["at"]).any():
        raise NoData(f"needs runs on {claim['at']} GPUs, on fewer and on more")
    label = f"n = {claim['at']} against {', '.join(map(str, n[~at]))}"
    return _effects([label], y[:, ~at].min(axis=1, keepdims=True) / _mean(y[:, at]) - 1, True)


def _bend(claim: dict, rows: pd.DataFrame, y: np.ndarray, x: np.ndarray | None = None) -> pd.DataFrame:
    """The quantity grows faster beyond this number of GPUs than before."""
    n = rows["devices"].to_numpy()
    before, beyond = n <= claim["at"], n >= claim["at"]
    if min(before.sum(), beyond.sum()) < 2:
        raise NoData(f"needs two numbers of GPUs on each side of {claim['at']}")
    scale = _mean(y)
    if x is None:
        x, y, scale = np.log(n)[None], np.log(y), 1.0
    change = _line_slope(y[:, beyond], x[:, beyond]) - _line_slope(y[:, before], x[:, before])
    return _effects([f"at n = {claim['at']}"], change / scale)


def _line(claim: dict, rows: pd.DataFrame, y: np.ndarray, x: np.ndarray) -> pd.DataFrame:
    """The quantity is linear in, or proportional to another."""
    _at_least(rows, 4 if claim["intercept"] else 3, "a deviation from a line needs")
    return _effects(_all(rows), deviation(y, x, claim["intercept"])[:, None], True)


def deviation(y: np.ndarray, x: np.ndarray, intercept: bool) -> np.ndarray:
    """Largest relative distance of y from a line in x, for the line that makes it smallest, in each row of y and x.

    That line lies above one value, below the next and above a third (or below, above, below) by the same share, and no
    line does better for any three values than it does for the worst three: the solution of the linear programme.
    """
    if not intercept:
        ratio = _range(y / x)[:, 0]
        return (ratio - 1) / (ratio + 1)
    order = np.argsort(x, axis=1)
    y, x = (np.take_along_axis(values, order, axis=1) for values in (y, x))
    one, two, three = np.array(list(itertools.combinations(range(y.shape[1]), 3))).T
    weighted = [(x[:, three] - x[:, two]) * y[:, one], (x[:, three] - x[:, one]) * y[:, two]]
    weighted.append((x[:, two] - x[:, one]) * y[:, three])
    bent = np.abs(weighted[0] - weighted[1] + weighted[2])
    return (bent / sum(weighted)).max(axis=1)


def _slope(claim: dict, rows: pd.DataFrame, y: np.ndarray, x: np.ndarray) -> pd.DataFrame:
    """The quantity per unit of another, by relative least squares through the origin: the mean of the ratios.

    Beyond these runs, where that of one more configuration would lie.
    """
    _at_least(rows, 3, "a slope with an interval needs")
    ratios = y[0] / x[0]
    value, reach = ratios.mean(), 0.0
    if not claim["observed"]:
        n = len(ratios)
        reach = stats.t.ppf(0.975, n - 1) * ratios.std(ddof=1) * math.sqrt(1 + 1 / n)
    return pd.DataFrame({"part": _all(rows), "value": value, "low": value - reach, "high": value + reach})


def _slopes(claim: dict, rows: pd.DataFrame, y: np.ndarray, x: np.ndarray) -> pd.DataFrame:
    """The quantity per unit of another differs between two groups."""
    a, b = _sides(claim, rows)
    slope = _line_slope if claim.get("intercept") else _mean_ratio
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
        raise NoData(f"no pair of runs is equal in {', '.join(claim['match'])}")
    labels = [_words(dict(zip(claim["match"], key, strict=True))) for key in pairs]
    above, below = np.array(list(pairs.values())).T
    return _effects(labels, y[:, above] / y[:, below] - 1)


def _holds(claim: dict, rows: pd.DataFrame, y: np.ndarray) -> pd.DataFrame:
    """A GPU's memory holds these local batch sizes, and not those: by a line in the local batch size.

    ``holds`` and ``lacks``: local batch size -> GB that there are. Beyond these runs, where another run would lie.
    """
    if rows["local_batch_size"].nunique() < 3:
        raise NoData("a line of memory in the local batch size needs three of them")
    line = regression.fit("need ~ local_batch_size", rows.assign(need=y[0]), covariance="classical")
    found = []
    for word, sign in (("holds", 1), ("lacks", -1)):
        for size, there_GB in claim[word].items():
            at = pd.DataFrame({"local_batch_size": [int(size)]})
            need = line.results.get_prediction(at).summary_frame(alpha=0.05).iloc[0]
            ends = need[["mean"] * 3 if claim["observed"] else ["mean", "obs_ci_lower", "obs_ci_upper"]]
            to_spare = sign * (there_GB - ends.to_numpy()) / there_GB
            found.append((f"{size} {word} {there_GB} GB", to_spare[0], to_spare[1:].min(), to_spare[1:].max()))
    return pd.DataFrame(found, columns=["part", "value", "low", "high"])


def _effect(claim: dict, rows: pd.DataFrame, y: np.ndarray) -> pd.DataFrame:
    """The quantity depends on ``term``: from its lowest to its highest value, the others held.

    With ``minus_other``, that minus the same of ``other``. The interval reaches over all ``_specifications``.
    """
    terms = [claim["term"], claim["other"]]
    spans = {term: np.ptp(rows[term]) or 1.0 for term in terms}
    scaled = rows.assign(y=y[0], **{term: rows[term] / span for term, span in spans.items()})
    found = []
    for formula, chosen in _specifications(claim, scaled):
        if len(chosen) < formula.count("+") + 4 or chosen["local_batch_size"].nunique() < 2:
            continue  # passes are samples over batch size
        fit = regression.fit(formula, chosen)
        if np.linalg.matrix_rank(fit.results.model.exog) < len(fit.parameters):
            continue
        contrast = pd.Series(0.0, fit.parameters.index)
        contrast[claim["term"]] = 1.0
        if claim.get("minus_other"):
            contrast[claim["other"]] = -1.0
        test = fit.results.t_test(contrast.to_numpy())
        low, high = (test.effect[0],) * 2 if claim["observed"] else test.conf_int()[0]
        found.append((test.effect[0], low, high))
    if not found:
        raise NoData(f"{len(rows)} configurations cannot tell {claim['term']} from {claim['other']}")
    values, lows, highs = np.array(found).T / y[0].mean()
    return pd.DataFrame({"part": _all(rows), "value": values[:1], "low": lows.min(), "high": highs.max()})


def _specifications(claim: dict, rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Regressions that are as good as each other: formula and rows.

    With the two terms alone, with a level for each series, and on more than one node.
    """
    regressors = [claim["term"], claim["other"]]
    if claim["quantity"] == FACTOR and rows["sockets_per_gpu"].nunique() > 1:
        regressors.append("sockets_per_gpu")  # the sum of all devices' power; a socket's is held
    if rows["hardware"].nunique() > 1:
        regressors.append("C(hardware)")
    formula = f"y ~ {' + '.join(regressors)}"
    full = rows[rows["devices"] > 4]
    beyond = formula if full["sockets_per_gpu"].nunique() > 1 else formula.replace(" + sockets_per_gpu", "")
    found = [(formula, rows), (beyond, full)]
    return found + [(f"{formula} + C(series)", rows)] if rows["series"].nunique() > 1 else found


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
    "holds": _holds,
    "effect": _effect,
}


def _effects(labels, drawn: np.ndarray, scatter_makes_it: bool = False) -> pd.DataFrame:
    """One row per effect, from an array (1 + DRAWS, effects): its value is that of the means themselves.

    Where scatter alone makes an effect, such as a spread, it is in the value already, and once more in the draws. As
    far as the draws lie above the value, the truth may lie below it: the interval is reflected. Above the value it
    reaches by half its width at least, since scatter may also have straightened what is bent.
    """
    value = drawn[0]
    low, high = np.percentile(drawn[1:], [2.5, 97.5], axis=0)
    if scatter_makes_it:
        low, high = 2 * value - high, np.maximum(2 * value - low, value + (high - low) / 2)
    ends = {"low": np.minimum(low, value), "high": np.maximum(high, value)}
    return pd.DataFrame({"part": list(labels), "value": value, **ends})


def _all(rows: pd.DataFrame) -> list[str]:
    return [f"{len(rows)} configurations"]


def _mean(y: np.ndarray) -> np.ndarray:
    return y.mean(axis=1, keepdims=True)


def _range(y: np.ndarray) -> np.ndarray:
    """Largest over smallest value."""
    return y.max(axis=1, keepdims=True) / y.min(axis=1, keepdims=True)


def _mean_ratio(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Slope of the line through the origin, by relative least squares."""
    return _mean(y / x)


def _line_slope(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Slope of the line with an intercept, by least squares."""
    y, x = y - _mean(y), x - _mean(x)
    return (x * y).sum(axis=1, keepdims=True) / (x * x).sum(axis=1, keepdims=True)


def _at_least(rows: pd.DataFrame, number: int, what: str) -> None:
    if len(rows) < number:
        raise NoData(f"{what} {number} configurations; known: {len(rows)}")


def _sides(claim: dict, rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    a, b = (rows.index.isin(match(rows, claim[side]).index) for side in ("a", "b"))
    if not a.any() or not b.any():
        missing = claim["a"] if not a.any() else claim["b"]
        raise NoData(f"no run with this quantity and {_words(missing)}")
    return a, b


def _words(conditions: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in conditions.items())
