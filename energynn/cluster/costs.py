"""Price runs before they are made: the forecast of the fit to what is published on their system."""

from __future__ import annotations

import functools
from math import nan
from typing import NamedTuple

import pandas as pd

from energynn import config
from energynn.cluster import systems
from energynn.cluster.systems import Site
from energynn.config import RunConfig
from energynn.forecast import fit as fits
from energynn.forecast import predict, runs
from energynn.forecast.fit import Fit
from energynn.forecast.runs import Runs
from energynn.measure.energy import SECOND_PER_HOUR
from energynn.studies import GROUPS

SHOWN = {
    "runs": ("", "runs"),
    "gpu_hours": ("forecast", "GPU hours"),
    "charged_hours": ("forecast", "charged hours"),
    "energy_kWh": ("forecast", "kWh"),
    "published_runs": ("published", "runs"),
    "published_gpu_hours": ("published", "GPU hours"),
    "published_kWh": ("published", "kWh"),
}
ORIGIN = (
    "forecast by the model that is fitted to the published runs of this system (`energynn forecast "
    "predict` has intervals); charged hours are GPU hours of whole nodes"
)
UNKNOWN = "nothing is published of such runs on this system"


class Cost(NamedTuple):
    """What a run takes by the forecast, and as it was published; NaN: not known.

    charged_hours: GPU hours of whole nodes. longest_h: high end of the 90 % interval of its time.
    """

    gpu_hours: float = nan
    charged_hours: float = nan
    energy_kWh: float = nan
    longest_h: float = nan
    published_runs: int = 0
    published_gpu_hours: float = nan
    published_kWh: float = nan


def expect(run: RunConfig, site: Site) -> Cost:
    """Forecast a run as `energynn forecast predict` does; repeats cost the same.

    Not known: on a system of which nothing is published, of a recipe that is not the paper's, on
    more devices than forecasts are validated for.
    """
    plain = config.replace(run, seed=0, repeat=0, system=site.name)
    return _cost(plain, site.file)


@functools.cache
def _cost(run: RunConfig, system: str) -> Cost:
    seen, fit = _published(run.workload, system)
    sizes = config.PAPER.get(run.workload, {})
    fixed = sizes.keys() - {"epochs", "local_batch_size"}
    is_of_paper = all(getattr(run, name) == sizes[name] for name in fixed)
    if not fit or not is_of_paper or run.devices > predict.most_devices(seen.site):
        return Cost()
    ends = predict.quantities(fit, fit.runs.works([run]))
    values = {name: ends[name][0, 0] for name in ends.keys() & {*Cost._fields}}
    if run in seen.configs:
        taken = seen.taken[seen.configs.index(run)]
        hours = taken.time_s * run.devices / SECOND_PER_HOUR
        values |= {"published_runs": 1, "published_gpu_hours": hours}
        values["published_kWh"] = hours * taken.power_W / 1000
    return Cost(**values, longest_h=ends["time_h"][0, 2])


@functools.cache
def _published(workload: str, system: str) -> tuple[Runs, Fit | None]:
    """Read what is published of a workload on a system, and fit it; no fit where nothing is."""
    seen = runs.printed(workload, systems.site(system))
    return seen, fits.published(workload, system) if len(seen) else None


def table(asked: list[RunConfig], site: Site) -> pd.DataFrame:
    """Add what runs cost: a row for each training and number of devices, and one for all.

    The forecast of several is not known where that of one is not.
    """
    rows = []
    for run in asked:
        training = f"{run.workload} {getattr(run, 'stage', '')}"
        costs = expect(run, site)._asdict()
        rows.append({"training": training, "devices": run.devices, "runs": 1} | costs)
    rows = pd.DataFrame(rows)
    whole = rows.assign(training="total", devices="")
    groups = pd.concat([rows, whole]).groupby(["training", "devices"], sort=False)
    sums = groups.sum(skipna=False)
    of_published = [name for name in SHOWN if name.startswith("published")]
    sums[of_published] = groups[of_published].sum(min_count=1)
    return sums[[*SHOWN]]


def in_words(costs: pd.DataFrame) -> str:
    """Show a table of costs to people, and where they are from."""
    if costs["gpu_hours"].isna().all():
        number = costs["runs"].iloc[-1]
        return f"{costs[['runs']]}\n{number} runs, of unknown cost: {UNKNOWN}"
    shown = costs.set_axis(pd.MultiIndex.from_tuples(SHOWN.values()), axis="columns")
    text = shown.to_string(float_format="{:,.1f}".format, na_rep="unknown")
    return f"{text}\n{ORIGIN}"


def of_study(name: str, asked: list[RunConfig]) -> pd.DataFrame:
    """Add what a study costs on the system on which the paper made it; another one costs here."""
    where = "horeka-h100" if name in GROUPS["paper-h100"] else "local"
    where = "horeka-a100" if name in GROUPS["paper-a100"] else where
    return table(asked, systems.site(where))
