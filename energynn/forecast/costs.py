"""Price runs before they are made: the forecast of the fit to what is published on their system."""

import functools

import pandas as pd

from energynn.experiment import config, systems
from energynn.experiment.config import RunConfig
from energynn.experiment.studies import STUDY_GROUPS
from energynn.experiment.systems import Site
from energynn.forecast import fits, predict, runs
from energynn.measure.energy import SECOND_PER_HOUR

FORECAST_ORIGIN_TEXT = (
    "forecast by the model that is fitted to the published runs on {} (`energynn forecast "
    "predict` has intervals); charged hours are GPU hours of whole nodes"
)
UNKNOWN_COST_TEXT = (
    "{:.0f} runs, of unknown cost: nothing is published of such runs on this system; submitted, "
    "each has a job of default_hours, and goes on in the next until it has ended"
)


@functools.cache
def expected_cost(run: RunConfig, system: str) -> dict[str, float]:
    """Forecast a run as `energynn forecast predict` does, beside what it took as published.

    system: its name or file. longest_h: high end of the 90 % interval. Empty where the cost is
    unknown: on a system of which nothing is published, with a recipe unlike the paper's, or on more
    devices than forecasts are validated for.
    """
    printed = runs.printed_runs(run.workload, system)
    recipes = list(map(_priced_recipe, printed.configs))
    is_alike = _priced_recipe(run) in recipes
    if not is_alike or run.devices > predict.max_devices_of_site(printed.site):
        return {}
    ends = predict.forecast_quantities(
        fits.published(run.workload, system), printed.work_of([run])
    )
    costs = {unit: ends[name][0, 0] for name, unit in predict.PRICED_QUANTITIES.items()}
    once = config.replace(run, seed=0, repeat=0, system=printed.site.name)
    at = [each == once for each in printed.configs]
    hours = sum(printed.time_s[at]) * run.devices / SECOND_PER_HOUR
    return costs | {
        "longest_h": ends["time_h"][0, 2],
        "published runs": sum(at),
        "published GPU hours": hours,
        "published kWh": hours * sum(printed.power_W[at]) / 1000,
    }


def _priced_recipe(run: RunConfig) -> dict:
    """Select what a run has to share with published ones; a fine-tuning has more steps, which a
    forecast knows.
    """
    stage = {"stage", "initial_run"}
    return config.recipe(config.asdict(run), runs.PARAMETERS_THAT_MAY_DIFFER | stage)


def cost_table(asked: list[RunConfig], site: Site) -> pd.DataFrame:
    """Add what runs cost: a row for each training and number of devices, and one for all.

    A forecast is not known where that of one run is not.
    """
    rows = []
    for run in asked:
        training = f"{run.workload} {getattr(run, 'stage', '')}"
        rows.append(
            {"training": training, "devices": run.devices, "runs": 1}
            | expected_cost(run, site.file)
        )
    costs = pd.DataFrame(rows).groupby(["training", "devices"])
    costs = costs.agg(
        pd.Series.sum, skipna=False
    )  # pandas 2 sums groups without skipna
    costs.loc[("total", ""), :] = costs.sum(skipna=False)
    scopes = {runs.printed_runs(run.workload, site.file).scope for run in asked}
    without = "".join(runs.SCOPES[scope] for scope in scopes)
    costs.attrs["published_as"] = f"{site.published_as}{without}"
    return costs.drop(columns="longest_h", errors="ignore")


def cost_text(costs: pd.DataFrame) -> str:
    """Show a table of costs to people, and where they are from."""
    text = costs.to_string(
        formatters=dict.fromkeys(["runs", "published runs"], "{:.0f}".format),
        float_format="{:,.1f}".format,
        na_rep="unknown",
    )
    origin = UNKNOWN_COST_TEXT.format(costs["runs"].iloc[-1])
    if "kWh" in costs:
        origin = FORECAST_ORIGIN_TEXT.format(costs.attrs["published_as"])
    return f"{text}\n{origin}"


def study_cost_table(name: str, asked: list[RunConfig]) -> pd.DataFrame:
    """Add what a study costs on the system on which the paper made it; ours are made here."""
    system = "local"
    if name in STUDY_GROUPS["paper-h100"]:
        system = "horeka-h100"
    if name in STUDY_GROUPS["paper-a100"]:  # some ran on both
        system = "horeka-a100"
    return cost_table(asked, systems.read_site(system))
