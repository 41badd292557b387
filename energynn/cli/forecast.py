"""Commands that forecast time and energy of a training: predict, plan, probe, fit, simulate."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from energynn.cli.options import (
    DEFAULT_RUNS_DIR,
    DetailsOption,
    FactorOption,
    JsonOption,
    ParametersOption,
    PueOption,
    RunsDirOption,
    StudyArgument,
    SystemOption,
    make_command_group,
    parse_parameters,
    print_json_or_text,
    require_finite,
    require_runs_dir,
)

forecast = make_command_group(
    "Forecast time and energy of a training before it is made."
)
WorkloadOption = Annotated[
    str, Option(metavar="W", help="resnet50, fourcastnet or your own")
]
OwnWorkloadOption = Annotated[
    str, Option("--workload", metavar="W", help="your own: of --fit, of runs")
]
StudiesArgument = Annotated[
    list[str], Argument(metavar="STUDY...", help="names, or files of your own")
]
LimitOption = Annotated[
    float | None, Option(min=1e-9, help="the most of it", callback=require_finite)
]
PowerLimitOption = Annotated[
    float, Option(help="of the GPUs, 0.5 to 1 of their greatest")
]
SizeOption = Annotated[int | None, Option(min=1)]
FitFileOption = Annotated[
    Path | None,
    Option(metavar="FILE", help="of `energynn forecast fit`"),
]


@forecast.command()
def predict(
    names: StudiesArgument = (),
    fit: FitFileOption = None,
    p: ParametersOption = (),
    held_out: Annotated[
        bool, Option("--held-out", help="instead: own runs beside their forecast")
    ] = False,
    power_limit: PowerLimitOption = 1.0,
    gco2_per_kwh: FactorOption = None,
    price_per_kwh: FactorOption = None,
    price_per_gpu_hour: FactorOption = None,
    pue: PueOption = 1.0,
    workload: OwnWorkloadOption = "",
    system: SystemOption = "local",
    max_devices: Annotated[int, Option(min=1, help="of the runs to fit")] = 1,
    as_json: JsonOption = False,
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Predict runs of studies, with --fit also parameters; with factors also CO2 and price.

    By --fit, or by what is published on the system.
    """
    from energynn.experiment import config, studies, systems
    from energynn.forecast import fits, next_run, predict, wording

    site = systems.read_site(system)
    if held_out:
        folder = require_runs_dir(runs_dir)
        rows, each = predict.compare_held_out_runs(folder, site, max_devices, workload)
        words = f"{wording.comparison_text(rows)}\n\n{wording.leave_one_out_text(each)}"
        answer = {"rows": rows, "from_others": each.to_dict("records")}
        print_json_or_text(as_json, answer, words)
        return
    # a fit has its own, and is held against another that is named
    named = site if system != "local" else None
    made = fits.read(fit, workload, named) if fit else None
    if made:
        site = made.runs.site
    parameters = parse_parameters(p)
    left_out = ""
    if names:
        asked, left_out = predict.runs_of_studies(site, names, parameters)
    elif made and parameters:
        asked = [predict.longest_run_changed(made, parameters)]
    else:
        raise ValueError(
            "predict: say what: a study, or parameters (-p devices=64) with --fit FILE, which "
            "`energynn forecast fit` writes; by what is published: `forecast plan --devices 64`"
        )
    factors = predict.conversion_factors(
        gco2_per_kwh, price_per_kwh, price_per_gpu_hour, pue
    )
    rows = predict.forecast_all_runs(asked, made, system, power_limit, factors)
    for name, runs in studies.find_studies(names, site.name).items():
        ids = {config.run_id(predict.change_run(run, parameters)) for run in runs}
        for row in rows:
            if row["run_id"] in ids:
                row.setdefault("studies", []).append(name)
    answer = {"rows": rows, "total": predict.total_of_rows(rows), "left_out": left_out}
    words = wording.prediction_text(rows, left_out)
    if made:
        answer["next_run"] = next_run.advise_next_run(made, asked)
        words += f"\n\n{answer['next_run']['in_words']}"
    print_json_or_text(as_json, answer, words)


@forecast.command()
def plan(
    workload: WorkloadOption,
    system: SystemOption,
    fit: FitFileOption = None,
    deadline_h: LimitOption = None,
    energy_kwh: LimitOption = None,
    gpu_hours: LimitOption = None,
    max_global_batch_size: SizeOption = None,
    local_batch_size: SizeOption = None,
    devices: SizeOption = None,
    power_limit: PowerLimitOption = 1.0,
    gco2_per_kwh: FactorOption = None,
    price_per_kwh: FactorOption = None,
    price_per_gpu_hour: FactorOption = None,
    pue: PueOption = 1.0,
    p: ParametersOption = (),
    as_json: JsonOption = False,
) -> None:
    """Plan how many devices and which batch size, within your limits.

    --devices: at most; --local-batch-size: the only one. With factors, the answer has CO2, price
    and the cheapest, too; --pue multiplies their kWh, not that of --energy-kwh. A GPU hour's price
    is of charged hours: of whole nodes.
    """
    from energynn.experiment import studies, systems
    from energynn.forecast import fits, next_run, plan, predict, wording

    site = systems.read_site(system)
    made = fits.read(fit, workload, site) if fit else fits.published(workload, system)
    run = plan.base_run(made, parse_parameters(p))
    limits = {"time_h": deadline_h, "energy_kWh": energy_kwh, "gpu_hours": gpu_hours}
    known = max(studies.large_batch_thresholds(run), default=None)
    limits |= {"global_batch_size": max_global_batch_size or known, "devices": devices}
    asked = plan.configuration_grid(made, run, size=local_batch_size)
    answer = plan.make_plan(
        made,
        asked,
        limits,
        power_limit,
        predict.conversion_factors(
            gco2_per_kwh, price_per_kwh, price_per_gpu_hour, pue
        ),
    )
    advice = next_run.advise_next_run(
        made, [answer.runs[at] for at in answer.choices.values()]
    )
    table = plan.plan_as_json(answer) | {"next_run": advice}
    words = f"{wording.plan_text(answer)}\n{advice['in_words']}"
    print_json_or_text(as_json, table, words)


@forecast.command()
def probe(
    workload: WorkloadOption,
    system: SystemOption,
    p: ParametersOption = (),
    minutes: Annotated[float, Option(min=0, help="for all probes together")] = 5.0,
    as_json: JsonOption = False,
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Make short runs that tell of a long one, the next by its worth, and fit them.

    It goes on with the runs that are there. For a cluster it prints the commands.
    """
    from energynn.experiment import config, systems
    from energynn.forecast import fits, next_run, predict, runs, wording
    from energynn.launch import probe
    from energynn.measure import machine

    site = systems.read_site(system)
    run = probe.target_run(workload, site, parse_parameters(p))
    words = []
    choose = probe.choose_next_runs
    if site.scheduler == "local":
        site = runs.site_of_this_machine(
            site, machine.describe_machine(), run.device == "gpu"
        )
        choose = probe.make_probe_runs
    predict.require_devices(site, run.devices)
    with contextlib.redirect_stdout(sys.stderr):
        # lines of runs do not get into the answer
        chosen = choose(run, site, runs_dir, minutes)
    answer = {"probes": chosen}
    if chosen and site.scheduler != "local":
        words.append(probe.write_probe_study(chosen, site, runs_dir))
    if known := probe.matching_runs(run, site, runs_dir):
        made = fits.fit_runs(known)
        rows = predict.forecasts(made, [run])
        advice = next_run.advise_next_run(made, [run])
        answer |= {"rows": rows, "next_run": advice}
        words += [
            wording.prediction_text(rows),
            wording.fit_text(made),
            advice["in_words"],
        ]
    words += map(config.run_id, chosen)
    print_json_or_text(as_json, answer, "\n\n".join(words))


@forecast.command()
def fit(
    workload: WorkloadOption,
    system: SystemOption,
    out: Annotated[Path, Option(metavar="FILE", help="the fit, as JSON")],
    runs_dir: Annotated[
        Path | None, Option(metavar="DIR", help="your own runs; else the study's")
    ] = None,
    p: ParametersOption = (),
    details: DetailsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Calibrate the model with published runs or with your own.

    -p chooses those that have the parameter.
    """
    from energynn.experiment import systems
    from energynn.forecast import fits, runs, wording
    from energynn.host.files import require_writable_path

    require_writable_path(out)
    site = systems.read_site(system)
    left_out = {}
    if runs_dir:
        seen, left_out = runs.read_checked_runs(
            require_runs_dir(runs_dir), workload, site, parse_parameters(p)
        )
    elif p:
        raise ValueError("-p: chooses runs of your own; give --runs-dir")
    else:
        seen = runs.published_runs(workload, system)
    made = fits.fit_usable_runs(seen)
    words = wording.fit_text(made, details)
    table = fits.write_fit(out, made)
    table["from_others"] = fits.leave_one_out_errors(made).to_dict("records")
    words += wording.left_out_runs_text(left_out)
    print_json_or_text(as_json, table | {"left_out": left_out}, words)


@forecast.command()
def simulate(
    study: StudyArgument,
    fit: FitFileOption,
    out: Annotated[Path, Option(metavar="DIR", help="where the run folders go")],
    workload: OwnWorkloadOption = "",
    as_json: JsonOption = False,
) -> None:
    """Write records of runs that nobody made, labelled as simulated."""
    from energynn.forecast import fits, predict, simulate

    made = fits.read(fit, workload)
    study_runs, _ = predict.runs_of_studies(made.runs.site, [study], {})
    asked = [run for run in study_runs if run.repeat == 0]
    folders = simulate.write_simulated_runs(made, asked, out)
    print_json_or_text(
        as_json,
        {"runs": list(map(str, folders))},
        f"{len(folders)} simulated runs in {out}; `energynn check {out}` checks them",
    )
