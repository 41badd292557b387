"""Show forecasts, plans, fits and probes to people, as text."""

import numpy as np
import pandas as pd

from energynn.forecast import fits, predict, scaling_cost
from energynn.forecast import plan as plans
from energynn.forecast.fits import Fit
from energynn.forecast.plan import Plan
from energynn.forecast.predict import ADDITIVE_QUANTITIES, INTERVAL_FIELDS, UNITS
from energynn.host.texts import group_by_reason


def prediction_text(rows: list[dict], left_out: str = "") -> str:
    """Show the total, the forecasts, and what the last one's time goes to: shares with ranges."""
    last = rows[-1]
    shares = pd.DataFrame(last["time_share_percent"]).T.round().astype(int)
    heading = f"share of each cause in the time in %, devices: {last['devices']}"
    parts = [left_out, configuration_table_text(rows), f"{heading}\n{shares}"]
    if (number_of_runs := sum(row["runs"] for row in rows)) > 1:
        words = [
            f"{number_text(each)} {ADDITIVE_QUANTITIES[name]}"
            for name, each in predict.total_of_rows(rows).items()
            if each
        ]
        total = f"{number_of_runs} runs: {', '.join(words)}"
        parts.insert(0, total if left_out else f"all {total}")
    return "\n\n".join(filter(None, parts))


def comparison_text(rows: list[dict]) -> str:
    """Show the forecasts beside the facts, simulated ones by that name."""
    sizes = ["workload", "devices", "local_batch_size"]
    table = pd.DataFrame(rows).sort_values(sizes, kind="stable")
    shown = table[sizes].set_axis(["", "devices", "LBS"], axis="columns")
    for name in ("time_h", "energy_kWh"):
        shown[f"estimated {UNITS[name]}"] = table[name].map(interval_text)
        shown[f"fact, {UNITS[name]}"] = table[name].str.get("fact").astype(float)
    shown["fact is"] = table["fact_is"]
    return shown.to_string(
        index=False, na_rep="not known", float_format="{:.3g}".format
    )


def plan_text(plan: Plan) -> str:
    """Show the plan: the answer, the choices, and the Pareto set in round numbers of devices."""
    names = {}
    for name, at in plan.choices.items():
        names[at] = f"{names[at]}, {name}" if at in names else name
    for at in plan.pareto:
        if plan.runs[at].devices.bit_count() == 1:
            names.setdefault(at, "")
    rows = plans.forecast_rows(plan, list(names))
    chosen = [rows[at] | {"choice": names[at]} for at in names]
    limits = plans.limits_text(plan.limits, plan.runs[0])
    lines = [
        choice_text(plan, chosen[0], rows[plan.choices["fastest"]]),
        "",
        configuration_table_text(chosen),
        "",
        "nothing beats these in what is known of time, kWh and GPU hours, of "
        f"{len(plan.runs)} configurations with {chosen[0]['samples']:,} samples; limits: {limits}",
    ]
    _, missing = predict.plan_devices(plan.fit, plan.runs[0])
    if missing:
        lines.append(
            f"on no more devices than ran: what an all-reduce takes is not known {missing}"
        )
    added = scaling_cost.added_energy_percent(plan.fit)
    if added and plan.power_share == 1:
        if np.isin(added["works"], plan.work[plan.pareto]).all():
            lines.append(added["in_words"])
    return "\n".join(lines)


def choice_text(plan: Plan, best: dict, fastest: dict) -> str:
    """Say what a choice, a row, costs less than the fastest, and by what chance it keeps limits."""
    spent = "energy_kWh" if plan.fit.has_power else "gpu_hours"
    if "cheapest" in plan.choices:
        spent = "price"
    device = "GPU" if plan.fit.runs.site.gpu else "core"
    words = f"{best['choice']}: {best['devices']} {device}{'s' if best['devices'] > 1 else ''}"
    for name, chance in best["chance_percent"].items():
        taken = f"{number_text(best[name]['value'])} of {plan.limits[name]:g}"
        words += f", {taken} {UNITS[name]} (chance {chance_text(chance)})"
    charged = best["charged_hours"]
    if charged != best["gpu_hours"]:
        words += f", charged {number_text(charged['value'])} hours of whole nodes"
    most = fastest[spent]["value"]
    if best["run_id"] != fastest["run_id"] and most:  # power may be free
        spared = 100 - 100 * best[spent]["value"] / most
        words += f"; spares {spared:.0f} % of the {ADDITIVE_QUANTITIES[spent]} of "
        words += f"{fastest['devices']} {device}s, the fastest"
    return words


def fit_text(fit: Fit, details: bool = False) -> str:
    """Show how good the fit is; with details its parameters."""
    of_time, of_power = fit.errors
    words = (
        f"fitted to {len(fit.runs)} {fit.runs.provenance} runs of {fit.runs.workload}; "
        f"errors of times about {of_time:.1%}"
    )
    known = fits.describe_parameters(fit)
    if fit.has_power:
        words += f" and of powers about {of_power:.1%}"
        if fit.runs.work["step_period_s"].any():  # runs waited
            waits = "{value:.0f} W ({low:.0f}-{high:.0f}), alone".format(
                **known["idle"]
            )
            words += f"\na GPU that waits for its loader (no kernel runs) draws {waits}"
    else:
        words += "; energies are not all measured: times alone are fitted"
    spread = max(run.spread for run in fit.runs.taken)
    if spread > 2 * fits.SCATTER:
        words += f"\nruns of one configuration differ by up to {spread:.0%}: the machine was busy"
    words += "\n" + leave_one_out_text(fits.leave_one_out_errors(fit), details)
    if details:
        table = pd.DataFrame(known).T.drop(columns="meaning")
        words += "\n" + table.to_string(float_format="{:.3g}".format)
    return words


def left_out_runs_text(reasons: dict[str, str]) -> str:
    """Count the runs that a fit leaves out, by the reason, and name the first of each."""
    lines = [f"\n{len(reasons)} run(s) left out:", *group_by_reason(reasons)]
    return "\n  ".join(lines) if reasons else ""


def leave_one_out_text(each: pd.DataFrame, with_table: bool = True) -> str:
    """Say how well the runs are forecast each from the others, and which of them is odd."""
    if each.empty:
        return "too few runs to forecast each from the others"
    inside = each["is_inside"].sum()
    words = f"each run forecast from the others: {inside} of {len(each)} values inside"
    for odd in each[each["is_odd"]].itertuples():
        words += (
            f"\nodd: {odd.quantity} of {odd.samples:,.0f} samples on {odd.devices:g} device(s), "
            f"local batch {odd.local_batch_size:g}: "
            f"the others say {odd.value_percent:+.0f} % ({odd.low_percent:+.0f} to "
            f"{odd.high_percent:+.0f}); make it again: where it comes out alike, keep both, as the "
            "others do not tell of it; else move this one out of the folder"
        )
    if with_table:
        words += "\n\n" + each.to_string(index=False, float_format="{:.1f}".format)
    return words


def configuration_table_text(rows: list[dict]) -> str:
    """Show one configuration a line, then what no fitted run tells of those with a letter.

    Charged hours are shown where they are not the GPU hours.
    """
    plain = []
    marks = {}
    has_names = any(row["runs"] > 1 or "studies" in row for row in rows)
    for row in rows:
        first = {"": row["choice"]} if "choice" in row else {"samples": row["samples"]}
        line = first | {"devices": row["devices"], "LBS": row["local_batch_size"]}
        if has_names:
            of = ", ".join(row.get("studies", [row["workload"]]))
            line = {"": of, "runs": row["runs"]} | line
        line["GBS"] = row["global_batch_size"]
        line |= {
            unit: interval_text(row[name])
            for name, unit in (UNITS | ADDITIVE_QUANTITIES).items()
            if name in row and name != "charged_hours"
        }
        for name, chance in row.get("chance_percent", {}).items():
            line[f"chance ({UNITS[name]})"] = chance_text(chance)
        charged = row["charged_hours"]
        is_part = charged != row["gpu_hours"]
        line["charged hours"] = number_text(charged["value"]) if is_part else ""
        for words in row["outside"]:
            marks.setdefault(words, chr(ord("a") + len(marks)))
        plain.append(line | {"note": " ".join(sorted(map(marks.get, row["outside"])))})
    shown = pd.DataFrame(plain)
    shown = shown.loc[:, ~shown.isin([0, ""]).all()].to_string(index=False)
    legend = [f"{letter}  {words}" for words, letter in marks.items()]
    epochs = " or ".join(sorted({str(row["epochs"]) for row in rows}))
    made = " and ".join(dict.fromkeys(row["provenance"] for row in rows))
    foot = f"epochs: {epochs}; each row of one run; intervals at 90 %; {made}"
    return "\n".join([shown, "", *legend, foot])


def interval_text(ends: dict[str, float | None]) -> str:
    """Show a value with its interval, in 19 columns at most."""
    if ends["value"] is None:
        return "not known"
    value, low, high = (number_text(ends[end]) for end in INTERVAL_FIELDS)
    return f"{value} ({low}-{high})"


def chance_text(chance: float) -> str:
    """Show a chance, which is never certain: 99 % is at least that."""
    return f"{min(chance, 99):.0f} %"


def number_text(value: float) -> str:
    """Show a number with three digits, or as a whole number."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")
