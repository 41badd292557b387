"""Commands that make or measure a run on this machine: run, study, measure, doctor."""

import inspect
import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from energynn.cli.options import (
    Json,
    Name,
    Note,
    Parameters,
    RunsDir,
    Study,
    folder_of_runs,
    group,
    parameters_of,
    reply,
    tell,
    unread,
)

Told = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="of the training, as you know it; to plan"),
]


def run(
    assigned: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=VALUE", help="a parameter: devices=2"),
    ] = None,
    p: Parameters = None,
    list_parameters: Annotated[
        bool, typer.Option("--list", help="list every parameter; make no run")
    ] = False,
    name: Name = "",
    note: Note = "",
    runs_dir: RunsDir = None,
) -> int:
    """Make one run, as notebooks/run_training.ipynb does; a,b are two values, of a run each."""
    from energynn import records
    from energynn.experiment import config, studies
    from energynn.host import launchers
    from energynn.launch import local, start

    if list_parameters:
        tell(config.help_text())
        return 0
    parameters = parameters_of([*(assigned or []), *(p or [])])
    labels = records.labels(name, note)
    runs, folder = studies.sweep(parameters), folder_of_runs(runs_dir)
    if len(runs) > 1:
        return _answer(local.run_study(runs, folder.absolute(), labels=labels))
    try:
        start.run(runs[0], folder, labels)
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
        float, typer.Option(min=0, help="begin no run that would end later")
    ] = math.inf,
    warm_up: Annotated[
        bool, typer.Option("--warm-up", help="make the first run once before")
    ] = False,
    runs_dir: RunsDir = None,
) -> int:
    """Make every run of a study that has no valid record."""
    from energynn.experiment import studies
    from energynn.launch import local

    runs = [run for runs in studies.find([name]).values() for run in runs]
    folder = folder_of_runs(runs_dir).absolute()
    return _answer(local.run_study(runs, folder, minutes, warm_up))


@study.command("list")
def study_list() -> int:
    """List all studies; `energynn study show NAME` has the cost of one."""
    from energynn.experiment import studies
    from energynn.host.progress import entry

    for name, runs in studies.find(list(studies.STUDIES)).items():
        about = inspect.getdoc(studies.STUDIES[name]).splitlines()[0]
        tell(entry(f"{name:15}", f"{len(runs)} run(s)", about))
    for name, members in studies.GROUPS.items():
        tell(f"{name:15} stands for {', '.join(members)}")
    return 0


@study.command("show")
def study_show(name: Study = "smoke") -> int:
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
    return 0


def measure(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND", help="with arguments")
    ],
    period: Annotated[
        float, typer.Option(min=0.01, max=60, help="seconds between two samples")
    ] = 0.04,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="the run's folder; again: a segment more"),
    ] = None,
    no_gpu: Annotated[
        bool,
        typer.Option("--no-gpu", help="the command uses none of this machine's GPUs"),
    ] = False,
    devices: Told = None,
    samples: Told = None,
    epochs: Told = None,
    local_batch_size: Told = None,
    weights: Annotated[
        float, typer.Option(min=0, max=1e13, help="that are trained, as 4.2e6")
    ] = 0,
    gradient_bytes_per_weight: Annotated[float, typer.Option(min=0.01, max=100)] = 4,
    name: Name = "",
    note: Note = "",
    as_json: Json = False,
) -> int:
    """Measure any command as our own trainers are measured."""
    from energynn import records
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
        folder = out or folder_of_runs(None) / "measured" / record.run_id
        with unread():
            reply(as_json, record, launch.report(record, folder))
    return status


def doctor(
    devices: Annotated[
        int, typer.Option(min=1, help="ranks of the MPI world to try")
    ] = 2,
    system: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="instead: prove a cluster by a job of a minute"
        ),
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
