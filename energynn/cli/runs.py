"""Commands that make or measure a run on this machine: run, study, measure, doctor."""

import inspect
import math
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from energynn.cli.options import (
    RUNS,
    Json,
    Name,
    Note,
    Parameters,
    RunsDir,
    Study,
    group,
    parameters_of,
    reply,
    tell,
    unread,
)

Told = Annotated[
    int | None,
    Option(min=1, metavar="N", help="of the training, as you know it; to plan"),
]


def run(
    assigned: Annotated[
        list[str], Argument(metavar="NAME=VALUE", help="a parameter: devices=2")
    ] = (),
    p: Parameters = (),
    list_parameters: Annotated[
        bool, Option("--list", help="list every parameter; make no run")
    ] = False,
    name: Name = "",
    note: Note = "",
    runs_dir: RunsDir = RUNS,
) -> int:
    """Make one run, as notebooks/run_training.ipynb does; a,b are two values, of a run each."""
    from energynn import records
    from energynn.experiment import config, studies
    from energynn.host import launchers
    from energynn.launch import local, start

    if list_parameters:
        tell(config.help_text())
        return 0
    parameters = parameters_of([*assigned, *p])
    labels = records.labels(name, note)
    runs = studies.sweep(parameters)
    if len(runs) > 1:
        return _answer(local.run_study(runs, runs_dir.absolute(), labels=labels))
    try:
        start.run(runs[0], runs_dir, labels)
    except (InterruptedError, RuntimeError) as error:  # its record says more
        print(f"energynn: {error}", file=sys.stderr)
        return launchers.CAN_GO_ON if isinstance(error, InterruptedError) else 1
    return 0


def _answer(failed: list[str]) -> int:
    tell("\n".join(failed))
    return 1 if failed else 0


study = group("Run a study on this machine; list all of them; show one and its cost.")


@study.command("run")
def study_run(
    name: Study = "smoke",
    minutes: Annotated[
        float, Option(min=0, help="begin no run that would end later")
    ] = math.inf,
    warm_up: Annotated[
        bool, Option("--warm-up", help="make the first run once before")
    ] = False,
    runs_dir: RunsDir = RUNS,
) -> int:
    """Make every run of a study that has no valid record."""
    from energynn.experiment import studies
    from energynn.launch import local

    runs = [run for runs in studies.find([name]).values() for run in runs]
    return _answer(local.run_study(runs, runs_dir.absolute(), minutes, warm_up))


@study.command("list")
def study_list() -> None:
    """List all studies; `energynn study show NAME` has the cost of one."""
    from energynn.experiment import studies
    from energynn.host.progress import entry

    for name, runs in studies.find(list(studies.STUDIES)).items():
        about = inspect.getdoc(studies.STUDIES[name]).splitlines()[0]
        tell(entry(f"{name:15}", f"{len(runs)} run(s)", about))
    for name, members in studies.GROUPS.items():
        tell(f"{name:15} stands for {', '.join(members)}")


@study.command("show")
def study_show(name: Study = "smoke") -> None:
    """Show the runs of a study and what they cost."""
    from energynn.experiment import config, studies
    from energynn.forecast import costs

    for member, runs in studies.find([name]).items():
        about = studies.STUDIES.get(member)
        table = costs.in_words(costs.of_study(member, runs))
        tell(f"{inspect.getdoc(about) if about else member}\n\n{table}\n")
        firsts = [run for run in runs if not run.repeat] or runs
        tell("\n".join(map(config.run_id, firsts)))
        if len(firsts) < len(runs):
            tell("and their repeats")


def measure(
    command: Annotated[
        list[str], Argument(metavar="-- COMMAND", help="with arguments")
    ],
    period: Annotated[
        float, Option(min=0.01, max=60, help="seconds between two samples")
    ] = 0.04,
    out: Annotated[
        Path | None,
        Option(metavar="DIR", help="the run's folder; again: a segment more"),
    ] = None,
    no_gpu: Annotated[
        bool,
        Option("--no-gpu", help="the command uses none of this machine's GPUs"),
    ] = False,
    devices: Told = None,
    samples: Told = None,
    epochs: Told = None,
    local_batch_size: Told = None,
    weights: Annotated[
        float, Option(min=0, max=1e13, help="that are trained, as 4.2e6")
    ] = 0,
    gradient_bytes_per_weight: Annotated[float, Option(min=0.01, max=100)] = 4,
    name: Name = "",
    note: Note = "",
    as_json: Json = False,
) -> int:
    """Measure any command as our own trainers are measured."""
    from energynn import records
    from energynn.host.files import default_runs_dir
    from energynn.launch import command as launch

    told = {
        "sampling_period_s": period,
        "devices": devices,
        "training_samples": samples,
        "epochs": epochs,
        "local_batch_size": local_batch_size,
        "gradient_bytes": round(weights * gradient_bytes_per_weight),
    }
    told = {key: value for key, value in told.items() if value}
    if weights and not local_batch_size:
        raise ValueError("weights: travel once an update; give --local-batch-size, too")
    labels = records.labels(name, note)
    record, status = launch.measure(command, out, as_json, not no_gpu, labels, told)
    if record:
        folder = out or default_runs_dir() / "measured" / record.run_id
        with unread():
            reply(as_json, record, launch.report(record, folder))
    return status


def doctor(
    devices: Annotated[int, Option(min=1, help="ranks of the MPI world to try")] = 2,
    system: Annotated[
        str,
        Option(metavar="NAME", help="instead: prove a cluster by a job of a minute"),
    ] = "",
    as_json: Json = False,
) -> int:
    """Say what a run on this machine would measure, how well, and what to mend."""
    if system:
        from energynn.launch import submit

        return submit.check(system)
    from energynn.launch import doctor

    findings = doctor.examine(devices)
    reply(as_json, {"findings": findings}, doctor.report(findings))
    return doctor.exit_status(findings)
