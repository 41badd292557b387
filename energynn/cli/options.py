"""What several commands share: how a command is added, and options that mean the same everywhere."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path


def add_command(commands, function: Callable, text: str, **facts) -> ArgumentParser:
    """A parser for the command that has the function's name; ``function(options)`` returns its exit status."""
    parser = commands.add_parser(function.__name__.replace("_", "-"), help=text, **facts)
    parser.set_defaults(function=function)
    return parser


def add_flag(parser: ArgumentParser, name: str, text: str | None = None) -> None:
    parser.add_argument(name, action="store_true", help=text)


def add_json(parser: ArgumentParser) -> None:
    add_flag(parser, "--json")


def add_runs_dir(parser: ArgumentParser) -> None:
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))


def add_build_dir(parser: ArgumentParser) -> None:
    parser.add_argument("--build-dir", type=Path, default=Path("build"))


def add_run_dir(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN")
