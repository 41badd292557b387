"""What several commands share: how a command is added, and options that mean the same everywhere."""

from __future__ import annotations

import math
import textwrap
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path


def add_command(commands, function: Callable, text: str, example: str, **facts) -> ArgumentParser:
    """A parser for the command that has the function's name; ``function(options)`` returns its exit status.

    ``text`` and ``example``, a line to type, are shown by its --help.
    """
    facts = {"formatter_class": RawDescriptionHelpFormatter, "epilog": f"example:\n  {example}"} | facts
    name = function.__name__.replace("_", "-")
    parser = commands.add_parser(name, help=text, description=textwrap.fill(text, 79), **facts)
    parser.set_defaults(function=function)
    return parser


def add_flag(parser: ArgumentParser, name: str, text: str) -> None:
    parser.add_argument(name, action="store_true", help=text)


def add_json(parser: ArgumentParser) -> None:
    add_flag(parser, "--json", "for a program: JSON on standard output")


def tell(text: str) -> None:
    """Print an answer for a person, on a terminal in lines of 80 columns."""
    from energynn import progress

    progress.tell(text)


def reply(options, table: dict, text: str) -> None:
    """Print the table as JSON where --json asks for it, else the text."""
    import json

    if options.json:
        print(json.dumps(table, indent=1))
    elif text:
        tell(text)


def add_runs_dir(parser: ArgumentParser) -> None:
    text = "folder of the records; default: $ENERGYNN_RUNS, else runs"
    parser.add_argument("--runs-dir", type=Path, default=runs_dir(), metavar="DIR", help=text)


def runs_dir() -> Path:
    """The folder of the records where nobody names one."""
    from energynn.files import default_runs_dir

    return default_runs_dir()


def add_build_dir(parser: ArgumentParser) -> None:
    text = "folder of what is generated; default: build"
    parser.add_argument("--build-dir", type=Path, default=Path("build"), metavar="DIR", help=text)


def add_run_dir(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")


def add_run(parser: ArgumentParser, **facts) -> None:
    """For ``find_run``."""
    text = "a run's folder, its name, or the beginning of its name below --runs-dir"
    parser.add_argument(metavar="RUN", help=text, **facts)


def number(text: str) -> float:
    """A finite number that is not negative."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"must be a finite number, at least 0, got {text}")
    return value


def count(text: str) -> int:
    """A whole number from 1 to a million."""
    value = int(text)
    if not 1 <= value <= 10**6:
        raise ArgumentTypeError(f"must be a whole number from 1 to a million, got {text}")
    return value


def require_folder(runs_dir: Path) -> None:
    """Raise ValueError where there is no folder with records."""
    if not runs_dir.is_dir():
        raise ValueError(f"runs_dir: {runs_dir} is no folder")


def find_run(run: str, runs_dir: Path) -> Path:
    """The folder of a run that a person names: the folder itself, or the beginning of a name that one run has.

    Raises ValueError where no run, or more than one, has such a name.
    """
    if (Path(run) / "run.json").is_file():
        return Path(run)
    known = sorted(path.parent for path in runs_dir.glob("*/*/run.json"))
    found = [folder for folder in known if folder.name == run] or [f for f in known if f.name.startswith(run)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"run: {len(found)} runs begin with {run!r}, as {found[0].name} and {found[1].name}; say more")
    from energynn.names import suggestion

    near = suggestion(run, [folder.name for folder in known])
    raise ValueError(f"run: {run!r} is no run's folder or name below {runs_dir}{near}")
