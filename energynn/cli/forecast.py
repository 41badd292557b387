"""Commands that forecast time and energy of a training: forecast fit, predict, plan, and what else stands below it."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from energynn.cli.options import (
    add_command,
    add_flag,
    add_json,
    add_runs_dir,
    count,
    number,
    reply,
    require_folder,
)
from energynn.cli.runs import parameters_of


def add_forecast(commands) -> None:
    text = "time and energy of a training before it is made: fit, predict, plan, probe, advise, simulate, and more"
    example = "energynn forecast plan --workload resnet50 --system horeka-a100 --deadline-h 3"
    parser = add_command(commands, forecast, text, example)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for add in (
        _add_fit,
        _add_predict,
        _add_plan,
        _add_probe,
        _add_simulate,
        _add_advise,
        _add_accuracy,
        _add_held_out,
    ):
        add(actions)


def forecast(options) -> int:
    raise AssertionError("an action of it is required")


def _add(actions, function, text: str, example: str) -> argparse.ArgumentParser:
    parser = add_command(actions, function, text, example)
    add_json(parser)
    return parser


def _add_workload_and_system(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", required=True, metavar="W", help="resnet50, fourcastnet or one of your own")
    parser.add_argument("--system", required=True, metavar="S", help="`energynn system list`, or a file (.toml)")


def _add_parameters(parser: argparse.ArgumentParser) -> None:
    facts = dict(metavar=("NAME", "VALUE"), dest="parameters", help="another value of a run's parameter")
    parser.add_argument("-p", nargs=2, action="append", default=[], **facts)


def _tell(line: str) -> None:
    """Progress, where it does not get into the answer."""
    print(line, file=sys.stderr)


def _add_fit(actions) -> None:
    example = "energynn forecast fit --published --workload resnet50 --system horeka-a100 --out build/resnet50.json"
    parser = _add(actions, fit, "calibrate the model with published runs or with your own", example)
    source = parser.add_mutually_exclusive_group(required=True)
    add_flag(source, "--published", "the study's runs of full length")
    source.add_argument("--runs-dir", type=Path, metavar="DIR", help="records of your own")
    _add_workload_and_system(parser)
    text = "only runs on so many devices, and no other system's"
    parser.add_argument("--max-devices", type=count, default=float("inf"), metavar="N", help=text)
    text = "a fit of the same workload on another system gives the priors; published: the study's other system"
    parser.add_argument("--like", type=Path, metavar="FILE", help=text)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the fit, as JSON")


def fit(options) -> int:
    import json

    from energynn.cluster import systems
    from energynn.files import require_place
    from energynn.forecast import calibration, fitting, report, runs

    require_place(options.out)
    site, other = systems.site(options.system), None
    if options.published:
        seen, other = calibration.published(options.workload, site, options.max_devices)
    else:
        seen = runs.own(options.runs_dir, options.workload, site, options.max_devices)
    if options.like:
        other = calibration.of_workload(options.like, options.workload).fits
    made = calibration.make(seen, other)
    errors = fitting.examine(seen, other, made.fit, _tell)
    calibration.write(options.out, made, errors)
    answer = json.loads(options.out.read_text())
    reply(options, answer, report.fit(made, errors, options.out))
    return 0


def _add_predict(actions) -> None:
    example = "energynn forecast predict R1 --fit build/resnet50.json"
    parser = _add(actions, predict, "time and energy of a study's runs, of one run, or of parameters", example)
    text = "a study, or a run's folder; parameters alone change the calibrated run"
    parser.add_argument("what", nargs="?", metavar="STUDY_OR_RUN", help=text)
    _add_parameters(parser)
    parser.add_argument("--fit", type=Path, required=True, metavar="FILE", help="of `energynn forecast fit`")
    text = "up to which you claim no loss of accuracy; what lies beyond is marked"
    parser.add_argument("--max-global-batch-size", type=count, metavar="N", help=text)


def predict(options) -> int:
    from energynn.forecast import calibration, predict, report

    made = calibration.read(options.fit)
    asked = predict.asked(made, options.what, parameters_of(options))
    rows = predict.rows(made, asked, options.max_global_batch_size)
    reply(options, {"rows": rows}, report.predictions(rows))
    return 0


def _add_plan(actions) -> None:
    example = "energynn forecast plan --workload resnet50 --system horeka-a100 --deadline-h 3"
    parser = _add(actions, plan, "how many devices and which batch size, within your limits", example)
    _add_workload_and_system(parser)
    parser.add_argument("--fit", type=Path, metavar="FILE", help="default: the published runs, fitted on the spot")
    parser.add_argument("--deadline-h", type=float, metavar="H", help="most hours")
    parser.add_argument("--energy-kwh", type=float, metavar="KWH", help="most kWh")
    parser.add_argument("--gpu-hours", type=float, metavar="H", help="most GPU hours")
    text = "default: up to where the study saw no loss of accuracy"
    parser.add_argument("--max-global-batch-size", type=count, metavar="N", help=text)
    parser.add_argument("--devices", default="", metavar="1-256", help="range of the number of devices")
    _add_parameters(parser)


def _calibrated(options, site):
    """The fit that is given, or one to the published runs."""
    from energynn.forecast import calibration, plan

    if options.fit:
        return calibration.for_workload(options.fit, options.workload, site.name)
    return plan.published_fit(options.workload, site)


def plan(options) -> int:
    from energynn.cluster import systems
    from energynn.forecast import accuracy, plan, report

    site = systems.site(options.system)
    made = _calibrated(options, site)
    run = plan.base_run(made, parameters_of(options))
    limits = {"time_h": options.deadline_h, "energy_kWh": options.energy_kwh, "gpu_hours": options.gpu_hours}
    limits["global_batch_size"] = options.max_global_batch_size or accuracy.threshold(run) or None
    limits = {name: most for name, most in limits.items() if most is not None}
    found = plan.make(made, run, *plan.grid(made, run, _range(options.devices)), limits)
    reply(options, plan.as_json(found), report.plan(found))
    return 0


def _range(text: str) -> tuple[int, int] | None:
    """Ends of a range as "8" or "1-256"; None of an empty text."""
    if not text:
        return None
    if not re.fullmatch(r"\d+(-\d+)?", text):
        raise ValueError(f"devices: {text!r} is no range; write it as 1-256")
    ends = [int(end) for end in text.split("-")]
    return ends[0], ends[-1]


def _add_probe(actions) -> None:
    example = "energynn forecast probe --workload resnet50 --system local --minutes 1.7 --probes 2"
    parser = _add(actions, probe, "the two to four short runs that tell most of a long one; made, fitted", example)
    _add_workload_and_system(parser)
    _add_parameters(parser)
    text = "forecast its runs; default: here those of `make reproduce`, elsewhere the paper's run"
    parser.add_argument("--study", action="append", default=[], metavar="STUDY", help=text)
    parser.add_argument("--minutes", type=number, default=5.0, metavar="M", help="for all probes together; default: 5")
    parser.add_argument("--probes", type=int, choices=(2, 3, 4), default=4, metavar="N", help="at most; default: 4")
    parser.add_argument(
        "--like", type=Path, metavar="FILE", help="a fit of the workload on another system, to begin with"
    )
    add_flag(parser, "--dry-run", "show them, make none")
    add_runs_dir(parser)


def probe(options) -> int:
    import contextlib

    from energynn.cluster import systems
    from energynn.forecast import calibration, predict, probe, report, runs
    from energynn.measure import machine

    site = systems.site(options.system)
    known = calibration.of_workload(options.like, options.workload) if options.like else None
    asked = probe.targets(options.workload, site, options.study, parameters_of(options))
    if site.scheduler == "local":
        site = runs.here(site, machine.describe_machine(), asked[0].device == "gpu")
    predict.check_devices(site, max(run.devices for run in asked))
    samples = probe.samples_of(asked[0])
    found, among = probe.before(asked[0], site, samples, known), probe.options(asked, site, samples)
    probes, forecast = probe.expect(found, among, options.minutes, options.probes), None
    with contextlib.redirect_stdout(sys.stderr):  # where what a run tells does not get into the answer
        if not options.dry_run and site.scheduler == "local":
            probes = probe.make_here(found, asked, options.runs_dir, site, options.minutes, options.probes)
            forecast = probe.outcome(probes, options.runs_dir, asked, site, known)
        elif not options.dry_run:
            probe.hand_over(probes, asked, site, options.runs_dir, options.like)
    answer = {"probes": probe.as_json(probes), "forecast": forecast}
    reply(options, answer, report.probes(answer))
    return 0


def _add_simulate(actions) -> None:
    example = "energynn forecast simulate R1 --fit build/resnet50.json --out build/simulated"
    parser = _add(actions, simulate, "records of runs that nobody made, labelled as simulated", example)
    parser.add_argument("study", metavar="STUDY", help="`energynn study list`, or a file of your own (.py)")
    parser.add_argument("--fit", type=Path, required=True, metavar="FILE", help="of `energynn forecast fit`")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the run folders go")
    add_flag(parser, "--repeats", "every repeat of the study, not only the first")


def simulate(options) -> int:
    from energynn import studies
    from energynn.forecast import calibration, simulate

    made = calibration.read(options.fit)
    asked = [run for runs in studies.find([options.study], made.site.name).values() for run in runs]
    if not options.repeats:
        asked = [run for run in asked if run.repeat == 0]
    folders = simulate.write(made, list(dict.fromkeys(asked)), options.out, _tell)
    table = {"runs": [str(folder) for folder in folders], "provenance": "simulated"}
    reply(options, table, f"{len(folders)} simulated runs in {options.out}; `energynn check {options.out}` checks them")
    return 0


def _add_advise(actions) -> None:
    example = "energynn forecast advise --workload resnet50 --system horeka-a100 -p devices 4"
    parser = _add(
        actions, advise, "what would save most time and energy, as ranges, and the probe that narrows each", example
    )
    _add_workload_and_system(parser)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="a run's folder; default: the calibrated run")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="default: the published runs, fitted on the spot")
    _add_parameters(parser)


def advise(options) -> int:
    from energynn.cluster import systems
    from energynn.forecast import advise, predict, report

    site = systems.site(options.system)
    made = _calibrated(options, site)
    if options.run and not (options.run / "run.json").is_file():
        raise ValueError(f"run: {options.run} is no run's folder; give one, or parameters (-p devices 4)")
    what, parameters = str(options.run) if options.run else None, parameters_of(options)
    (run,) = predict.asked(made, what, parameters if what or parameters else {"devices": 1})
    rows = advise.rows(made, run)
    reply(options, {"remedies": rows}, report.remedies(rows, run))
    return 0


def _add_accuracy(actions) -> None:
    example = "energynn forecast accuracy --runs-dir runs/large-batch --workload resnet50 --error 0.6"
    text = "the critical batch size by runs of several batch sizes: up to where a larger one costs no more samples"
    parser = _add(actions, accuracy, text, example)
    parser.add_argument("--runs-dir", type=Path, required=True, metavar="DIR", help="records of your own")
    parser.add_argument("--workload", required=True, metavar="W", help="resnet50, fourcastnet or one of your own")
    parser.add_argument("--error", type=number, required=True, metavar="X", help="that a training is to reach")
    parser.add_argument("--metric", default="top1_error", metavar="NAME", help="of each epoch; default: top1_error")


def accuracy(options) -> int:
    from energynn.forecast import accuracy, report

    require_folder(options.runs_dir)
    answer = accuracy.of_runs(options.runs_dir, options.workload, options.metric, options.error)
    reply(options, answer, report.accuracy(answer))
    return 0


def _add_held_out(actions) -> None:
    example = "energynn forecast held-out --runs-dir runs --system local"
    text = "fitted to own runs on few devices: the forecast of those on more, beside the fact"
    parser = _add(actions, held_out, text, example)
    add_runs_dir(parser)
    parser.add_argument("--system", required=True, metavar="S", help="`energynn system list`, or a file (.toml)")
    parser.add_argument("--workload", metavar="W", help="default: every workload that has runs there")
    parser.add_argument("--max-devices", type=count, default=1, metavar="N", help="of the runs to fit; default: 1")


def held_out(options) -> int:
    from energynn.cluster import systems
    from energynn.forecast import held_out, report

    require_folder(options.runs_dir)
    rows = held_out.rows(options.runs_dir, systems.site(options.system), options.workload, options.max_devices)
    reply(options, {"recipes": rows}, report.held_out(rows))
    return 0
