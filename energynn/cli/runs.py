"""Commands that make or measure a run on this machine: run, study, measure, watch, doctor."""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

from energynn.cli.options import (
    add_command,
    add_flag,
    add_json,
    add_run_dir,
    add_runs_dir,
    count,
    number,
    reply,
    runs_dir,
    tell,
)


class _HelpWithParameters(argparse.Action):
    """``run --help``: the parameters are described by the fields of energynn.config, imported only when asked."""

    def __call__(self, parser, namespace, values, option_string=None):
        from energynn import config

        parser.epilog += f"\n\n{config.help_text()}"
        parser.print_help()
        parser.exit()


def add_run(commands) -> None:
    text = "make one run, as notebooks/run_training.ipynb does"
    parser = add_command(commands, run, text, "energynn run workload=resnet50 devices=2", add_help=False)
    text = "show this help message and every parameter"
    parser.add_argument("-h", "--help", nargs=0, action=_HelpWithParameters, help=text)
    parser.add_argument("assigned", nargs="*", type=_assignment, metavar="NAME=VALUE", help="a parameter: devices=2")
    facts = dict(metavar=("NAME", "VALUE"), dest="parameters", help="the same, as for papermill")
    parser.add_argument("-p", nargs=2, action="append", default=[], **facts)
    add_flag(parser, "--list", "list every parameter with type, default and meaning; make no run")
    add_runs_dir(parser)


def run(options) -> int:
    from energynn import config, launchers
    from energynn.launch import start

    if options.list:
        print(config.help_text())
        return 0
    options.parameters += options.assigned
    try:
        start.run(config.make(**parameters_of(options)), options.runs_dir)
    except (InterruptedError, RuntimeError) as error:  # the run began and did not end well; its record says more
        print(f"energynn: {error}", file=sys.stderr)
        return launchers.CAN_GO_ON if isinstance(error, InterruptedError) else 1
    return 0


def parameters_of(options) -> dict:
    """The parameters of a run that ``-p`` gives, by name."""
    return {name: _literal(value) for name, value in options.parameters}


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is no parameter; write NAME=VALUE, for example devices=2")
    return name, value


def _literal(text: str):
    """A number, True, False or None where the text is one, else the text; as papermill reads -p."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
    return value if isinstance(value, int | float | bool | None) else text


def add_study(commands) -> None:
    text = "run a study on this machine; list all of them; show one and its cost"
    parser = add_command(commands, study, text, "energynn study show smoke")
    parser.add_argument("action", choices=["run", "list", "show"], help="what to do")
    parser.add_argument("name", nargs="?", default="smoke", help="a study's name, or a file of your own")
    add_json(parser)
    add_runs_dir(parser)
    parser.add_argument(
        "--minutes", type=number, default=float("inf"), metavar="M", help="begin no run that would end later"
    )
    text = "end a run that lasts longer, as one that hangs"
    parser.add_argument("--run-minutes", type=number, default=float("inf"), metavar="M", help=text)
    parser.add_argument("--archive", type=Path, metavar="FILE", help="pack the runs into a .tar.gz, after each of them")
    add_flag(parser, "--warm-up", "make the first run once before, and forget it")
    add_flag(parser, "--dry-run", "of gpu and gpu-grid: the same points in small, on CPU cores")


def study(options) -> int:
    if options.action == "run":
        return _run_study(options)
    from energynn import studies
    from energynn.cluster import costs

    is_one = options.action == "show"
    runs_by_study = studies.find([options.name] if is_one else list(studies.STUDIES))
    if options.json:
        print(costs.as_json(runs_by_study))
    else:
        tell(costs.report(runs_by_study, each_run=is_one))
    return 0


def _run_study(options) -> int:
    from energynn import studies
    from energynn.cluster import local
    from energynn.files import require_place

    if options.archive:
        require_place(options.archive)
    runs = [run for runs in studies.find([options.name]).values() for run in runs]
    if options.dry_run and options.name not in ("gpu", "gpu-grid"):
        raise ValueError(f"dry-run: the study {options.name} is small as it is; only gpu and gpu-grid have one")
    if options.dry_run:
        runs = studies.STUDIES[options.name](dry_run=True)
    how = options.minutes, options.archive, options.warm_up, options.run_minutes
    failed = local.run_study(runs, options.runs_dir.absolute(), *how)
    valid, not_valid = local.count_valid(runs, options.runs_dir.absolute())
    tell("\n".join([f"\n{valid} of {len(runs)} runs have a valid record in {options.runs_dir}", *failed, *not_valid]))
    return 1 if failed else 0


def add_measure(commands) -> None:
    text = "measure any command as our own trainers are"
    parser = add_command(commands, measure, text, "energynn measure -- python my_trainer.py")
    parser.add_argument("--period", type=number, default=0.04, metavar="S", help="seconds between two samples")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run's folder; a second start adds a segment")
    add_flag(parser, "--json", "print the record; the command's output goes to stderr")
    add_flag(parser, "--perun", "under perun, whose number then stands beside ours; takes some seconds more")
    parser.add_argument("measured", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="and its arguments")


def measure(options) -> int:
    from energynn.launch import command

    words = options.measured[1:] if options.measured[:1] == ["--"] else options.measured
    record, status = command.measure(words, options.out, options.period, quiet=options.json, perun=options.perun)
    if record:
        folder = options.out or runs_dir() / "measured" / record["run_id"]
        reply(options, record, f"{command.report(record)}\n  record: {folder}")
    return status


def add_watch(commands) -> None:
    text = "power, energy and time left of a run that goes on, from any shell"
    parser = add_command(commands, watch, text, "energynn watch runs/local/resnet50-photographs-n2")
    add_run_dir(parser)
    parser.add_argument("--every", type=number, default=2.0, metavar="S", help="seconds between two looks")
    add_flag(parser, "--once", "look once; also where standard output is no terminal")


def watch(options) -> int:
    from energynn.launch import watch

    watch.follow(options.run, options.every, options.once)
    return 0


def add_doctor(commands) -> None:
    text = "what a run on this machine would measure, how well, and what to mend"
    parser = add_command(commands, doctor, text, "energynn doctor")
    parser.add_argument("--devices", type=count, default=2, help="ranks of the MPI world to try")
    add_json(parser)


def doctor(options) -> int:
    import os

    from energynn.launch import doctor
    from energynn.measure import perun_adapter, sensors

    powercap = Path(os.environ.get(perun_adapter.POWERCAP_VARIABLE) or sensors.POWERCAP)
    findings = doctor.examine(options.devices, powercap)
    reply(options, doctor.as_json(findings), doctor.report(findings))
    return doctor.exit_status(findings)
