"""Commands for batch jobs: submit, resubmit, status, cancel, system."""

from __future__ import annotations

from argparse import ArgumentParser

from energynn.cli.options import (
    add_command,
    add_flag,
    add_json,
    add_runs_dir,
    number,
    require_folder,
    tell,
)


def _add_studies_or_runs(parser: ArgumentParser) -> None:
    parser.add_argument("studies", nargs="*", metavar="STUDY_OR_RUN", help="only these; default: all (cancel: --all)")


def _add_minutes(parser: ArgumentParser) -> None:
    parser.add_argument("--minutes", type=int, help="time limit of each job; a run that needs more goes on in a next")


def add_submit(commands) -> None:
    text = "make every missing run of studies by batch jobs, and see them through"
    parser = add_command(commands, submit, text, "energynn submit paper-a100 --system horeka-a100 --dry-run")
    text = "`energynn study list`, or a file of your own; after --, options of sbatch for these jobs"
    parser.add_argument("studies", nargs="+", metavar="STUDY", help=text)
    parser.add_argument("--system", required=True, help="`energynn system list`, or a file of your own (.toml)")
    add_flag(parser, "--dry-run", "print the scripts and the expected cost, submit nothing")
    parser.add_argument(
        "--limit", type=float, metavar="GPU_HOURS", help="ask before spending more; default: the system's"
    )
    add_flag(parser, "--yes", "do not ask")
    parser.add_argument("--account", metavar="NAME", help="who pays, as sbatch takes it")
    parser.add_argument("--reservation", metavar="NAME", help="as sbatch takes it")
    _add_minutes(parser)
    add_runs_dir(parser)


def submit(options) -> int:
    from energynn.cluster import submit, systems

    for name in ("account", "reservation"):
        if value := getattr(options, name):
            options.sbatch.append(f"--{name}={value}")
    systems.require_form("submit", systems.OPTION, options.sbatch)
    return submit.main(options)


def add_resubmit(commands) -> None:
    text = "submit runs that failed or stopped again; they go on where they can"
    parser = add_command(commands, resubmit, text, "energynn resubmit --failed R1")
    parser.add_argument("--failed", action="store_true", required=True, help="those that failed or stopped")
    _add_minutes(parser)
    _add_studies_or_runs(parser)
    add_runs_dir(parser)


def resubmit(options) -> int:
    from energynn.cluster import submit

    require_folder(options.runs_dir)
    return submit.again(options)


def add_status(commands) -> None:
    text = "what has become of every run, queued, running or ended"
    parser = add_command(commands, status, text, "energynn status --watch")
    parser.add_argument("--watch", type=number, nargs="?", const=10.0, metavar="S", help="again and again")
    add_json(parser)
    _add_studies_or_runs(parser)
    add_runs_dir(parser)


def status(options) -> int:
    from energynn.cluster import status

    require_folder(options.runs_dir)
    return status.main(options)


def add_cancel(commands) -> None:
    parser = add_command(commands, cancel, "cancel jobs of runs that are queued or go on", "energynn cancel R1")
    add_flag(parser, "--all", "of every study")
    _add_studies_or_runs(parser)
    add_runs_dir(parser)


def cancel(options) -> int:
    import getpass

    from energynn.cluster import status, submit

    if not options.studies and not options.all:
        raise ValueError("cancel: say which studies or runs, or --all")
    require_folder(options.runs_dir)
    owners = submit.cancel(status.folders(options.runs_dir.absolute(), options.studies))
    number = owners.pop(getpass.getuser(), 0)
    goes_on = "; what goes on leaves a checkpoint if it can, and `energynn submit` goes on from it" if number else ""
    tell(f"{number} jobs cancelled{goes_on}")
    for user, left in owners.items():
        tell(f"{left} jobs are {user}'s, and go on; only {user} can cancel them")
    return 0


def add_system(commands) -> None:
    text = "the clusters that are known; check: prove one by a job of a minute"
    parser = add_command(commands, system, text, "energynn system check horeka-a100")
    parser.add_argument("action", choices=["list", "check"], help="list all, or check one")
    parser.add_argument("name", nargs="?", default="local", help="of `list`, or a file of your own (.toml)")


def system(options) -> int:
    from energynn.cluster import submit, systems

    if options.action == "check":
        return submit.check(systems.site(options.name))
    print(systems.known())
    return 0
