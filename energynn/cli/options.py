"""What several commands share: typed options, parameters, and answers as text or JSON."""

import json
import math
import os
from pathlib import Path
from typing import Annotated

import msgspec
from typer import Argument, BadParameter, Option, Typer

RunsDirOption = Annotated[
    Path,
    Option(
        metavar="DIR",
        envvar="ENERGYNN_RUNS",
        # a shell leaves the ~ of --runs-dir=~/runs
        callback=lambda path: Path(os.path.expanduser(path)),
        help="folder of the records",
    ),
]
DEFAULT_RUNS_DIR = Path("runs")  # where nobody names another
JsonOption = Annotated[
    bool, Option("--json", help="for a program: JSON on standard output")
]
DetailsOption = Annotated[
    bool, Option("--details", help="every number, and its bounds")
]
NameOption = Annotated[
    str, Option(help="to find the run by; several runs may share a name")
]
NoteOption = Annotated[str, Option(help="free text, kept with the run")]
SystemOption = Annotated[
    str, Option(metavar="NAME", help="of systems/, or a file of your own (.toml)")
]
StudyArgument = Annotated[
    str, Argument(metavar="STUDY", help="a name, or a file of your own")
]


def require_finite(value: float | None) -> float | None:
    """Refuse what a computer calls a number, and no limit or factor is: inf, nan."""
    if value is not None and not math.isfinite(value):
        raise BadParameter(f"{value} is no number.")
    return value


FactorOption = Annotated[float | None, Option(min=0, callback=require_finite)]
PueOption = Annotated[
    float, Option(min=1, help="kWh of the centre for one of its computers")
]
ParametersOption = Annotated[
    list[str],
    Option("-p", metavar="NAME VALUE", help="a parameter of the run, as for papermill"),
]


def make_command_group(help: str) -> Typer:
    """Make a command that holds others; markup and completion are those of the whole program."""
    return Typer(help=help, no_args_is_help=True)


def print_answer(text: str) -> None:
    """Print an answer for a person, on a terminal in lines of 80 columns."""
    from energynn.host import progress

    progress.print_lines(text)


def print_json_or_text(as_json: bool, table: dict | msgspec.Struct, text: str) -> None:
    """Print the table as JSON, or the text."""
    if as_json:
        print(json.dumps(msgspec.to_builtins(table), indent=1))
    elif text:
        print_answer(text)


def require_runs_dir(runs_dir: Path) -> Path:
    """Return a folder of runs; the default need not be there, as it holds no run then.

    Raises ValueError where another is no folder.
    """
    if runs_dir != DEFAULT_RUNS_DIR and not runs_dir.is_dir():
        raise ValueError(f"runs_dir: {runs_dir} is no folder")
    return runs_dir


def parse_parameters(assignments: list[str]) -> dict:
    """Read NAME=VALUE as texts; the configuration gives each its type."""
    parameters = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(
                f"{assignment!r} is no parameter; write NAME=VALUE, for example devices=2"
            )
        parameters[name] = value
    return parameters
