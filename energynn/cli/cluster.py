"""Commands for batch jobs: submit, status, cancel."""

from itertools import takewhile
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
    SystemOption,
    parse_parameters,
    print_answer,
    print_json_or_text,
    require_runs_dir,
)

StudiesArgument = Annotated[
    list[str],
    Argument(metavar="STUDY|SYSTEM|RUN", help="only these"),
]


def submit(
    system: SystemOption,
    studies: Annotated[
        list[str],
        Argument(
            metavar="STUDY [-- OPTION]",
            help="names, or files of your own; options of sbatch",
        ),
    ] = (),
    p: ParametersOption = (),
    dry_run: Annotated[
        bool,
        Option("--dry-run", help="show cost and what is missing; submit nothing"),
    ] = False,
    scripts: Annotated[
        bool, Option("--scripts", help="the same, and print all batch scripts")
    ] = False,
    max_gpu_hours: Annotated[
        float | None,
        Option(min=0, help="refuse more [default: of the system's file, else 100]"),
    ] = None,
    account: Annotated[str, Option(help="who pays, as sbatch takes it")] = "",
    name: NameOption = "",
    note: NoteOption = "",
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Make missing runs of studies by batch jobs.

    Again: those that failed or stopped.
    """
    from energynn import records
    from energynn.experiment import studies as known
    from energynn.launch import submit

    labels = records.check_labels(name, note)
    names = [*takewhile(lambda word: not word.startswith("-"), studies)]
    options = []
    for word in studies[len(names) :]:
        if word.startswith("-"):
            options.append(word)
        else:  # its value, as in `--partition gpu`
            options[-1] += ("=" if options[-1].startswith("--") else " ") + word
    options += [f"--account={account}"] if account else []
    if bool(names) == bool(p):
        raise ValueError("submit: give studies, or parameters of runs (-p)")
    site = submit.read_cluster(system, options)
    if p:
        runs = known.make_sweep(parse_parameters(p) | {"system": site.name})
        job = runs[0].workload
    else:
        runs = known.list_runs_of_studies(names, site.name)
        job = "-".join(Path(name).stem for name in names)
    submit.submit_runs(
        runs,
        job,
        site,
        runs_dir,
        dry_run,
        scripts,
        max_gpu_hours,
        labels,
    )


def status(
    studies: StudiesArgument = (),
    watch: Annotated[
        str, Option(metavar="RUN", help="power, energy and time left of one run")
    ] = "",
    failed: Annotated[
        bool, Option("--failed", help="only failed or not valid, and why")
    ] = False,
    as_json: JsonOption = False,
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Tell what has become of every run, queued, running or ended."""
    from energynn import records
    from energynn.launch import status

    if watch:
        if as_json:
            raise ValueError(
                "status: --watch is for people; a program asks --json again"
            )
        status.follow_run(records.find_run(watch, runs_dir))
        return
    folders = status.find_run_folders(require_runs_dir(runs_dir), studies)
    runs, notes = status.describe_runs(folders)
    if failed:
        runs = [run for run in runs if run["state"] in status.BAD_RUN_STATES]
    if not folders:
        notes.append(f"no such run below {runs_dir.absolute()}")
    print_json_or_text(
        as_json, {"runs": runs, "notes": notes}, status.status_text(runs, notes, failed)
    )


def cancel(
    studies: StudiesArgument = (),
    everything: Annotated[bool, Option("--all", help="of every study")] = False,
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Cancel jobs of runs; checkpoints stay."""
    from energynn.launch import status, submit

    if not studies and not everything:
        raise ValueError("cancel: say which studies or runs, or --all")
    number = submit.cancel_jobs(
        status.find_run_folders(require_runs_dir(runs_dir), studies)
    )
    print_answer(
        f"jobs cancelled: {number}; `energynn submit` continues from checkpoints"
    )
