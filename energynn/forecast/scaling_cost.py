"""The cost of scaling: what ResNet50 takes more on 256 GPUs than on four, at about the
same error."""

import numpy as np

from energynn.experiment import config, published_values
from energynn.forecast import predict
from energynn.forecast.fits import Fit

SCALING_COST_TEXT = (
    "on 256 GPUs for 4 at about the same error it takes {by_text[0]:.0f} to {by_text[1]:.0f} % "
    "more energy by the study's text, {by_model[0]:.0f} % by this model, "
    "{printed_over_model[0]:.0f} % ({printed_over_model[1]:.0f}-{printed_over_model[2]:.0f}) by "
    "what is printed of 256 and the model of 4; they differ mostly on 4, of which no energy is "
    "printed: it is {stated_kWh[0]:.1f} to {stated_kWh[1]:.1f} kWh by the CPUs' "
    "{energy_cpu_kWh:g} kWh and rounded share of {share_cpu_percent:g} %, of a list of jobs with "
    "one job twice, {few_kWh[0]:.1f} kWh by the model, whose share is {model_share_percent:.1f} %"
)


def _printed_row(series: str, devices: int) -> dict:
    runs = published_values.printed_runs()
    return next(
        run for run in runs if series in run["series"] and run["devices"] == devices
    )


def stated_energy_kWh(devices: int) -> np.ndarray:
    """Bound the energy of R1 on one or four GPUs: low and high end of what section 3.2.2 implies.

    It prints the CPUs' energy and their share of the total, both rounded.
    """
    run = _printed_row("R1", devices)
    ends = np.array([-1, 1])
    cpu_kWh = run["energy_cpu_kWh"] + ends * run["energy_cpu_kWh_half"]
    return (
        cpu_kWh
        * 100
        / (run["share_cpu_percent"] - ends * run["share_cpu_percent_half"])
    )


def added_energy_percent(fit: Fit) -> dict[str, np.ndarray | str]:
    """Compare R3 on 256 GPUs with R1 on four, by routes that differ; in_words says why they do.

    by_text: the printed energy over the one that the text implies, low and high. by_model: both
    forecast. printed_over_model: value, low and high, of the interval of R1's forecast. works:
    of both. Empty where the fit is not that of the study's ResNet50.
    """
    if (fit.runs.workload, fit.runs.provenance) != ("resnet50", "published"):
        return {}
    printed_kWh = _printed_row("R3", 256)["energy_total_kWh"]
    by_text = printed_kWh / stated_energy_kWh(4)[::-1]
    few = config.make("resnet50", preset="paper", devices=4, global_batch_size=1024)
    many = config.make("resnet50", preset="paper", devices=256, global_batch_size=8192)
    works = fit.runs.work_of([few, many])
    told = predict.forecast_quantities(fit, works)
    few_kWh, many_kWh = told["energy_kWh"]
    ratios = {
        "by_text": by_text,
        "by_model": many_kWh[:1] / few_kWh[0],
        "printed_over_model": printed_kWh / few_kWh[predict.DIVISOR_ENDS],
    }
    added = {name: 100 * (ratio - 1) for name, ratio in ratios.items()}
    in_words = SCALING_COST_TEXT.format(
        **added,
        **_printed_row("R1", 4),
        stated_kWh=stated_energy_kWh(4),
        few_kWh=few_kWh,
        model_share_percent=100 * told["energy_cpu_kWh"][0, 0] / few_kWh[0],
    )
    return added | {"works": works, "in_words": in_words}
