"""Commands that make or measure a run on this machine: run, study, measure, doctor."""

import inspect
import math
import os
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from energynn.cli.options import (
    DEFAULT_RUNS_DIR,
    JsonOption,
    NameOption,
    NoteOption,
    ParametersOption,
    RunsDirOption,
    StudyArgument,
    make_command_group,
    parse_parameters,
    print_answer,
    print_json_or_text,
    require_finite,
)

PeriodOption = Option(
    min=0.01, max=60, callback=require_finite, help="seconds between two samples"
)
TrainingSizeOption = Annotated[
    int | None,
    Option(min=1, metavar="N", help="of the training (samples: of an epoch); to plan"),
]


def run(
    assigned: Annotated[
        list[str], Argument(metavar="NAME=VALUE", help="a parameter: devices=2")
    ] = (),
    p: ParametersOption = (),
    list_parameters: Annotated[
        bool, Option("--list", help="list every parameter; make no run")
    ] = False,
    name: NameOption = "",
    note: NoteOption = "",
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> int:
    """Make one run, as its notebook does.

    A value a,b is of two runs.
    """
    from energynn import records
    from energynn.experiment import config, studies
    from energynn.host import launchers
    from energynn.launch import local, start

    if list_parameters:
        print_answer(config.parameters_help_text())
        return 0
    parameters = parse_parameters([*assigned, *p])
    labels = records.check_labels(name, note)
    runs = studies.make_sweep(parameters)
    if len(runs) > 1:
        return _report_failed_runs(local.make_missing_runs(runs, runs_dir, **labels))
    try:
        start.make_run(runs[0], runs_dir, labels)
    except (InterruptedError, RuntimeError) as error:  # its record says more
        print(f"energynn: {error}", file=sys.stderr)
        return launchers.RESUMABLE_STATUS if isinstance(error, InterruptedError) else 1
    return 0


def _report_failed_runs(failed: list[str]) -> int:
    print_answer("\n".join(failed))
    return 1 if failed else 0


study = make_command_group(
    "Run a study on this machine; list all of them; show one and its cost."
)


@study.command("run")
def study_run(
    name: StudyArgument = "smoke",
    minutes: Annotated[
        float, Option(min=0, help="begin no run that would end later")
    ] = math.inf,
    warm_up: Annotated[
        bool, Option("--warm-up", help="make the first run once before")
    ] = False,
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> int:
    """Make every run of a study that has no valid record."""
    from energynn.experiment import studies
    from energynn.launch import local

    runs = studies.list_runs_of_studies([name], "local")
    return _report_failed_runs(
        local.make_missing_runs(runs, runs_dir, minutes, warm_up)
    )


@study.command("list")
def study_list() -> None:
    """List all studies; `energynn study show NAME` has the cost of one."""
    from energynn.experiment import studies
    from energynn.host.progress import entry_text

    for name, runs in studies.find_studies(list(studies.STUDIES)).items():
        about = inspect.getdoc(studies.STUDIES[name]).splitlines()[0]
        print_answer(entry_text(f"{name:15}", f"{len(runs)} run(s)", about))
    for name, members in studies.STUDY_GROUPS.items():
        print_answer(f"{name:15} stands for {', '.join(members)}")


@study.command("show")
def study_show(name: StudyArgument = "smoke") -> None:
    """Show what a study is for, and what its runs cost."""
    from energynn.experiment import studies
    from energynn.forecast import costs

    for member, runs in studies.find_studies([name]).items():
        about = studies.STUDIES.get(member)
        table = costs.cost_text(costs.study_cost_table(member, runs))
        print_answer(f"{inspect.getdoc(about) if about else member}\n\n{table}")


def measure(
    command: Annotated[
        list[str], Argument(metavar="-- COMMAND", help="with arguments")
    ],
    period: Annotated[float, PeriodOption] = 0.04,
    out: Annotated[
        Path | None,
        Option(metavar="DIR", help="the run's folder; again: a segment more"),
    ] = None,
    no_gpu: Annotated[
        bool,
        Option("--no-gpu", help="the command uses none of this machine's GPUs"),
    ] = False,
    devices: TrainingSizeOption = None,
    samples: TrainingSizeOption = None,
    epochs: TrainingSizeOption = None,
    local_batch_size: TrainingSizeOption = None,
    weights: Annotated[
        float,
        Option(
            min=0,
            max=1e13,
            callback=require_finite,
            help="that are trained, as 4.2e6",
        ),
    ] = 0,
    gradient_bytes_per_weight: Annotated[
        float, Option(min=0.01, max=100, callback=require_finite)
    ] = 4,
    name: NameOption = "",
    note: NoteOption = "",
    as_json: JsonOption = False,
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
    labels = records.check_labels(name, note)
    record, status = launch.measure_command(
        command, out, as_json, not no_gpu, labels, told
    )
    if record:
        folder = out or default_runs_dir() / "measured" / record.run_id
        try:
            print_json_or_text(as_json, record, launch.report_text(record, folder))
            if sys.stdout:
                sys.stdout.flush()
        except OSError:
            # a closed pipe, a full disk: the status still says how the command ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def doctor(
    system: Annotated[
        str,
        Option(metavar="NAME", help="instead: prove a cluster by a job of a minute"),
    ] = "",
    as_json: JsonOption = False,
) -> int:
    """Say what a run would measure here, and how well."""
    if system:
        from energynn.launch import submit

        return submit.check_system(system)
    from energynn.launch import doctor

    findings = doctor.examine_machine()
    print_json_or_text(as_json, {"findings": findings}, doctor.findings_text(findings))
    return doctor.exit_status(findings)
