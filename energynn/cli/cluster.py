"""Commands for batch jobs: submit, status, cancel."""

from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from energynn.cli.options import (
    Json,
    Parameters,
    RunsDir,
    System,
    find_run,
    folder_of_runs,
    parameters_of,
    reply,
    tell,
)

Studies = Annotated[
    list[str] | None,
    typer.Argument(metavar="STUDY|SYSTEM|RUN", help="only these; default: all"),
]


def submit(
    system: System,
    studies: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STUDY [-- OPTION]",
            help="names, or files of your own; options of sbatch",
        ),
    ] = None,
    p: Parameters = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="show cost and what is missing; submit nothing"),
    ] = False,
    scripts: Annotated[
        bool, typer.Option("--scripts", help="the same, and print all batch scripts")
    ] = False,
    max_gpu_hours: Annotated[
        float | None,
        typer.Option(
            min=0, help="refuse more [default: of the system's file, else 100]"
        ),
    ] = None,
    account: Annotated[str, typer.Option(help="who pays, as sbatch takes it")] = "",
    runs_dir: RunsDir = None,
) -> int:
    """Make every missing run of studies by batch jobs; again: what failed or stopped."""
    from energynn.experiment import studies as known
    from energynn.launch import submit

    words = studies or []
    names = [word for word in words if not word.startswith("-")]
    options = [word for word in words if word.startswith("-")]
    options += [f"--account={account}"] if account else []
    if bool(names) == bool(p):
        raise ValueError("submit: give studies, or parameters of runs (-p)")
    site = submit.cluster(system, options)
    if p:
        runs = known.sweep(parameters_of(p) | {"system": site.name})
        name = runs[0].workload
    else:
        runs = list(chain.from_iterable(known.find(names, site.name).values()))
        name = "-".join(Path(name).stem for name in names)
    runs, shows = list(dict.fromkeys(runs)), dry_run or scripts
    folder = folder_of_runs(runs_dir)
    submit.submit_runs(runs, name, site, folder, shows, scripts, max_gpu_hours)
    return 0


def status(
    studies: Studies = None,
    watch: Annotated[
        str, typer.Option(metavar="RUN", help="power, energy and time left of one run")
    ] = "",
    failed: Annotated[
        bool, typer.Option("--failed", help="only failed or not valid, and why")
    ] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> int:
    """Tell what has become of every run, queued, running or ended."""
    from energynn.launch import status

    if watch:
        status.follow(find_run(watch, runs_dir))
        return 0
    folder = folder_of_runs(runs_dir, must_exist=True).resolve()
    runs, notes = status.rows(status.folders(folder, studies or []))
    reply(as_json, {"runs": runs, "notes": notes}, status.text(runs, notes, failed))
    return 0


def cancel(
    studies: Studies = None,
    everything: Annotated[bool, typer.Option("--all", help="of every study")] = False,
    runs_dir: RunsDir = None,
) -> int:
    """Cancel jobs of runs that are queued or running; checkpoints stay."""
    from energynn.launch import status, submit

    if not studies and not everything:
        raise ValueError("cancel: say which studies or runs, or --all")
    folder = folder_of_runs(runs_dir, must_exist=True).resolve()
    number = submit.cancel(status.folders(folder, studies or []))
    tell(f"jobs cancelled: {number}; `energynn submit` continues from checkpoints")
    return 0
