"""What several commands share: typed options, answers as text or JSON, and runs by their name."""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

RunsDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="folder of the records [default: $ENERGYNN_RUNS, else runs]"
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="for a program: JSON on standard output")
]
Details = Annotated[
    bool, typer.Option("--details", help="every number, and its bounds")
]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="a folder, run_id, name, unique part of either, or last"
    ),
]
Name = Annotated[
    str, typer.Option(help="to find the run by; several runs may share a name")
]
Note = Annotated[str, typer.Option(help="free text, kept with the run")]
System = Annotated[
    str, typer.Option(metavar="NAME", help="of systems/, or a file of your own (.toml)")
]
Study = Annotated[
    str, typer.Argument(metavar="STUDY", help="a name, or a file of your own")
]
Factor = Annotated[float | None, typer.Option(min=0)]
Parameters = Annotated[
    list[str] | None,
    typer.Option(
        "-p", metavar="NAME VALUE", help="a parameter of the run, as for papermill"
    ),
]


def group(help: str) -> typer.Typer:
    """Make a command that holds others."""
    return typer.Typer(
        help=help, no_args_is_help=True, rich_markup_mode=None, add_completion=False
    )


def tell(text: str) -> None:
    """Print an answer for a person, on a terminal in lines of 80 columns."""
    from energynn.host import progress

    progress.tell(text)


def reply(as_json: bool, table: dict | msgspec.Struct, text: str) -> None:
    """Print the table as JSON, or the text."""
    if as_json:
        print(json.dumps(msgspec.to_builtins(table), indent=1))
    elif text:
        tell(text)


@contextlib.contextmanager
def unread():
    """Go on where the answer cannot be written: into a closed pipe, onto a full disk."""
    try:
        yield
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def folder_of_runs(runs_dir: Path | None, must_exist: bool = False) -> Path:
    """The folder that was given, else the default, which may not be there yet: it holds no run.

    Raises ValueError where one that was given must exist.
    """
    from energynn.host.files import default_runs_dir

    folder = runs_dir or default_runs_dir()
    if must_exist and folder != Path("runs") and not folder.is_dir():
        raise ValueError(f"runs_dir: {folder} is no folder")
    return folder


def parameters_of(assignments: list[str] | None) -> dict:
    """Read NAME=VALUE as texts; the configuration gives each its type."""
    parameters = {}
    for assignment in assignments or []:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(
                f"{assignment!r} is no parameter; write NAME=VALUE, for example devices=2"
            )
        parameters[name] = value
    return parameters


def find_run(run: str, runs_dir: Path | None) -> Path:
    """Find a run's folder as ``records.find`` does."""
    from energynn import records

    return records.find(run, folder_of_runs(runs_dir))
