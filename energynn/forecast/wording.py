"""Show forecasts, plans, fits and probes to people, as text."""

from collections import defaultdict
from pathlib import Path

import pandas as pd

from energynn import records
from energynn.experiment import config
from energynn.experiment.config import RunConfig
from energynn.forecast import fit as fits
from energynn.forecast import plan as plans
from energynn.forecast import predict, scaling_cost
from energynn.forecast.fit import Fit
from energynn.forecast.plan import Plan
from energynn.forecast.predict import ENDS, UNITS

SHOWN = UNITS | {"CO2_g": "g CO2", "price": "price"}
MOST_SHOWN = 12  # configurations of a plan beside its choices


def predicted(rows: list[dict]) -> str:
    """Show the forecasts, and the causes of the time of the last: shares with ranges."""
    last = rows[-1]
    shares = pd.DataFrame(last["time_share_percent"]).T.round().astype(int)
    heading = f"share of each cause in the time on {last['devices']} GPUs in %"
    return f"{table(rows)}\n\n{heading}\n{shares}"


def beside_facts(rows: list[dict]) -> str:
    """Show the forecasts beside the facts, simulated ones by that name."""
    sizes = ["workload", "devices", "local_batch_size"]
    table = pd.DataFrame(rows).sort_values(sizes, kind="stable")
    shown = table[sizes].set_axis(["", "GPUs", "LBS"], axis="columns")
    for name in ("time_h", "energy_kWh"):
        shown[f"estimated {UNITS[name]}"] = table[name].map(span)
        shown[f"fact, {UNITS[name]}"] = table[name].str.get("fact").astype(float)
    shown["fact is"] = table["fact_is"]
    return shown.to_string(
        index=False, na_rep="not known", float_format="{:.3g}".format
    )


def planned(plan: Plan) -> str:
    """Show the plan: the choices and their reasons first, each configuration once."""
    names, reasons = defaultdict(list), []
    for name, (index, reason) in plan.choices.items():
        names[index].append(name)
        reasons.append(f"{name}: {reason}")
    others = [index for index in plan.pareto if index not in names]
    shown = [*names, *others[:: 1 + len(others) // MOST_SHOWN]]
    found = [
        plans.row(plan, index) | {"choice": ", ".join(names.get(index, ()))}
        for index in shown
    ]
    lines = [table(found), ""]
    if len(names) > 1:
        lines += reasons
    lines.append(
        f"nothing beats these in time, kWh and GPU hours, of {len(plan.runs)} configurations "
        f"with {found[0]['samples']:,} samples; limits: {plans.in_words(plan.limits)}"
    )
    whole = predict.most_devices(plan.fit.runs.site)
    if predict.most_planned(plan.fit, plan.runs[0]) < whole:
        lines.append(f"on no more devices than ran: {predict.NO_EXCHANGE}")
    if added := scaling_cost.added_energy_percent(plan.fit):
        lines.append(added["in_words"])
    return "\n".join(lines)


def fitted(fit: Fit, runs_dir: Path | None = None, details: bool = False) -> str:
    """Show how good the fit is, and what it leaves out of a folder; with details its parameters."""
    of_time, of_power = fit.errors
    words = (
        f"fitted to {len(fit.runs)} {fit.runs.provenance} runs of {fit.runs.workload}; "
        f"errors of times about {of_time:.1%}"
    )
    if fit.has_power:
        waits = "{value:.0f} W ({low:.0f}-{high:.0f})".format(**fits.gpu_power_W(fit))
        alone = fit.runs.scope == "gpu"
        words += (
            f" and of powers about {of_power:.1%}\n"
            f"a GPU that waits for its loader (no kernel runs) draws {waits}, "
            f"{'alone' if alone else 'with its part of the node'}"
        )
    else:
        words += "; energies are not all measured: times alone are fitted"
    if details:
        table = pd.DataFrame(fits.describe(fit)).T.drop(columns="meaning")
        words += "\n" + table.to_string(float_format="{:.3g}".format)
    if runs_dir:
        taken = sum(run.repeats for run in fit.runs.taken)
        others = len(records.run_dirs(runs_dir)) - taken
        if others:
            words += f"\n{others} run(s) left out: invalid, or of another workload, recipe, system"
    return words


def probes(made: list[RunConfig]) -> pd.DataFrame:
    """Show probes, a row each, in the order in which they are made."""
    shown = ["devices", "local_batch_size", "training_samples", "training_years"]
    shown += ["epochs", "step_period_s"]
    table = pd.DataFrame(map(config.asdict, made))
    table = table.reindex(columns=shown).dropna(axis="columns")
    return table.assign(run_id=list(map(config.run_id, made)))


def table(rows: list[dict]) -> str:
    """Show one configuration a line, then once what lies outside of those with a star."""
    plain, marks = [], {}
    for row in rows:
        first = {"": row["choice"]} if "choice" in row else {"samples": row["samples"]}
        line = first | {"GPUs": row["devices"], "LBS": row["local_batch_size"]}
        line["GBS"] = row["global_batch_size"]
        line |= {unit: span(row[name]) for name, unit in SHOWN.items() if name in row}
        line["charged hours"] = number(row["charged_hours"]["value"])
        plain.append(line | {" ": "*" if row["outside"] else ""})
        marks |= dict.fromkeys(f"* {words}" for words in row["outside"])
    shown = pd.DataFrame(plain)
    shown = shown.loc[:, (shown != 0).any()].to_string(index=False)
    foot = f"of {rows[0]['epochs']} epochs; intervals at 90 %; {rows[0]['provenance']}"
    return "\n".join([shown, "", *marks, foot])


def span(ends: dict[str, float | None]) -> str:
    """Show a value with its interval, in 19 columns at most."""
    if ends["value"] is None:
        return "not known"
    value, low, high = (number(ends[end]) for end in ENDS)
    return f"{value} ({low}-{high})"


def number(value: float) -> str:
    """Show a number with three digits, or as a whole number."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")
