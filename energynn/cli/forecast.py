"""Commands that forecast time and energy of a training: predict, plan, probe, fit, simulate."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from energynn.cli.options import (
    RUNS,
    Details,
    Factor,
    Json,
    Parameters,
    RunsDir,
    Study,
    System,
    existing,
    group,
    parameters_of,
    reply,
)

forecast = group("Forecast time and energy of a training before it is made.")
Workload = Annotated[str, Option(metavar="W", help="resnet50, fourcastnet or your own")]
Named = Annotated[
    str, Option("--workload", metavar="W", help="your own: of --fit, of runs")
]
Studies = Annotated[
    list[str], Argument(metavar="STUDY...", help="names, or files of your own")
]
Limit = Annotated[float | None, Option(min=1e-9, help="the most of it")]
Size = Annotated[int | None, Option(min=1)]
Pue = Annotated[float, Option(min=1, help="kWh of the centre for one of its computers")]
Fit = Annotated[
    Path | None,
    Option(metavar="FILE", help="of `energynn forecast fit`"),
]


@forecast.command()
def predict(
    names: Studies = (),
    fit: Fit = None,
    p: Parameters = (),
    held_out: Annotated[
        bool, Option("--held-out", help="instead: own runs beside their forecast")
    ] = False,
    gco2_per_kwh: Factor = None,
    price_per_kwh: Factor = None,
    price_per_gpu_hour: Factor = None,
    pue: Pue = 1.0,
    workload: Named = "",
    system: System = "local",
    max_devices: Annotated[int, Option(min=1, help="of the runs to fit")] = 1,
    as_json: Json = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Predict runs of studies, or parameters; with factors also CO2 and price.

    By --fit, or by what is published on the system.
    """
    from energynn.experiment import systems
    from energynn.forecast import fit as fits
    from energynn.forecast import next_run, predict, wording

    if held_out:
        folder = existing(runs_dir)
        site = systems.site(system)
        rows, each = predict.held_out(folder, site, max_devices, workload)
        words = f"{wording.beside_facts(rows)}\n\n{wording.from_others(each)}"
        answer = {"rows": rows, "from_others": each.to_dict("records")}
        reply(as_json, answer, words)
        return
    made = fits.read(fit, workload) if fit else None
    site = made.runs.site if made else systems.site(system)
    longest = made.runs.longest if made else None
    asked, left_out = predict.requested_runs(site, names, parameters_of(p), longest)
    factors = predict.factors_of(gco2_per_kwh, price_per_kwh, price_per_gpu_hour, pue)
    rows = predict.rows_of_all(asked, made, system, factors)
    advice = {"next_run": next_run.advice(made, asked)} if made else {}
    words = [wording.predicted(rows, left_out)]
    words += [each["in_words"] for each in advice.values()]
    answer = {"rows": rows, "total": predict.total(rows), "left_out": left_out}
    reply(as_json, answer | advice, "\n\n".join(words))


@forecast.command()
def plan(
    workload: Workload,
    system: System,
    fit: Fit = None,
    deadline_h: Limit = None,
    energy_kwh: Limit = None,
    gpu_hours: Limit = None,
    max_global_batch_size: Size = None,
    local_batch_size: Size = None,
    devices: Size = None,
    power_limit: float = 1.0,
    gco2_per_kwh: Factor = None,
    price_per_kwh: Factor = None,
    price_per_gpu_hour: Factor = None,
    pue: Pue = 1.0,
    p: Parameters = (),
    as_json: Json = False,
) -> None:
    """Plan how many devices and which batch size, within your limits.

    --devices: at most; --local-batch-size: the only one. --power-limit: of the GPUs, 0.5 to 1 of
    their greatest. With factors, the answer has CO2, price and the cheapest, too; --pue multiplies
    their kWh.
    """
    from energynn.experiment import studies, systems
    from energynn.forecast import fit as fits
    from energynn.forecast import next_run, plan, predict, wording

    name = systems.site(system).name
    made = fits.read(fit, workload, name) if fit else fits.published(workload, system)
    run = plan.base_run(made, parameters_of(p))
    limits = {"time_h": deadline_h, "energy_kWh": energy_kwh, "gpu_hours": gpu_hours}
    known = max(studies.large_batch_thresholds(run), default=None)
    limits |= {"global_batch_size": max_global_batch_size or known, "devices": devices}
    asked = plan.grid(made, run, size=local_batch_size)
    answer = plan.make(
        made,
        asked,
        limits,
        power_limit,
        predict.factors_of(gco2_per_kwh, price_per_kwh, price_per_gpu_hour, pue),
    )
    advice = next_run.advice(made, [answer.runs[at] for at in answer.choices.values()])
    if as_json:
        reply(True, plan.as_json(answer) | {"next_run": advice}, "")
    else:
        reply(False, {}, f"{wording.planned(answer)}\n{advice['in_words']}")


@forecast.command()
def probe(
    workload: Workload,
    system: System,
    p: Parameters = (),
    minutes: Annotated[float, Option(min=0, help="for all probes together")] = 5.0,
    as_json: Json = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Make short runs that tell of a long one, the next by its worth, and fit them.

    It goes on with the runs that are there. For a cluster it prints the commands.
    """
    from energynn.experiment import config, systems
    from energynn.forecast import fit as fits
    from energynn.forecast import next_run, predict, runs, wording
    from energynn.launch import probe
    from energynn.measure import machine

    site = systems.site(system)
    run = probe.target(workload, site, parameters_of(p))
    answer = {}
    words = []
    choose = probe.upcoming
    if site.scheduler == "local":
        site = runs.local_site(site, machine.describe_machine(), run.device == "gpu")
        choose = probe.make_here
    predict.check_devices(site, run.devices)
    with contextlib.redirect_stdout(sys.stderr):
        # lines of runs do not get into the answer
        chosen = choose(run, site, runs_dir, minutes)
    if chosen and site.scheduler != "local":
        words.append(probe.hand_over(chosen, site))
    if known := probe.matching_runs(run, site, runs_dir):
        made = fits.make(known)
        rows = predict.rows(made, [run])
        advice = next_run.advice(made, [run])
        answer = {"rows": rows, "next_run": advice}
        words += [wording.predicted(rows), wording.fitted(made), advice["in_words"]]
    words += map(config.run_id, chosen)
    reply(as_json, answer | {"probes": chosen}, "\n\n".join(words))


@forecast.command()
def fit(
    workload: Workload,
    system: System,
    out: Annotated[Path, Option(metavar="FILE", help="the fit, as JSON")],
    runs_dir: Annotated[
        Path | None, Option(metavar="DIR", help="your own runs; else the study's")
    ] = None,
    p: Parameters = (),
    details: Details = False,
    as_json: Json = False,
) -> None:
    """Calibrate the model with published runs or with your own.

    -p chooses those that have the parameter.
    """
    from energynn.experiment import systems
    from energynn.forecast import fit as fits
    from energynn.forecast import runs, wording
    from energynn.host.files import require_place

    require_place(out)
    site = systems.site(system)
    if runs_dir:
        seen = runs.checked_runs(existing(runs_dir), workload, site, parameters_of(p))
    elif p:
        raise ValueError("-p: chooses runs of your own; give --runs-dir")
    else:
        seen = runs.published(workload, system)
    fits.check(seen)
    made = fits.make(seen)
    words = wording.fitted(made, details)
    table = fits.write(out, made)
    table["from_others"] = fits.from_others(made).to_dict("records")
    if runs_dir:
        table["left_out"] = runs.left_out(runs_dir, seen, parameters_of(p))
        words += wording.left_out(table["left_out"])
    reply(as_json, table, words)


@forecast.command()
def simulate(
    study: Study,
    fit: Fit,
    out: Annotated[Path, Option(metavar="DIR", help="where the run folders go")],
    workload: Named = "",
    as_json: Json = False,
) -> None:
    """Write records of runs that nobody made, labelled as simulated."""
    from energynn.forecast import fit as fits
    from energynn.forecast import predict, simulate

    made = fits.read(fit, workload)
    found, _ = predict.requested_runs(made.runs.site, [study], {}, None)
    asked = [run for run in found if run.repeat == 0]
    folders = simulate.write(made, asked, out)
    reply(
        as_json,
        {"runs": list(map(str, folders))},
        f"{len(folders)} simulated runs in {out}; `energynn check {out}` checks them",
    )
