"""The command line: thin, lazy, and one line for a person's mistake."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys

from energynn.cli import analysis, cluster, completion, data, forecast, records, runs
from energynn.cli.runs import _literal as _literal

ENDED_BY_PIPE = 128 + signal.SIGPIPE  # as a shell says it of any other command

# In the order in which `energynn --help` lists them.
COMMANDS = (
    runs.add_run,
    runs.add_study,
    cluster.add_submit,
    cluster.add_resubmit,
    cluster.add_status,
    cluster.add_cancel,
    cluster.add_system,
    runs.add_doctor,
    analysis.add_show,
    analysis.add_compare,
    analysis.add_export,
    records.add_check,
    runs.add_measure,
    records.add_import_perun,
    runs.add_watch,
    data.add_manifest,
    data.add_imagenet,
    data.add_era5,
    forecast.add_forecast,
    analysis.add_claims,
    analysis.add_number,
    analysis.add_paper,
    analysis.add_reference,
    completion.add_completion,
)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with an argument in one line, too."""

    def error(self, message: str):
        if slip := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            from energynn.config import suggestion

            message += suggestion(slip[1], re.findall(r"[\w-]+", slip[2]))
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; `{self.prog} --help` says more\n")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit status: 0, 1 (something is not as it should be) or 2 (cannot be done so)."""
    from energynn import __version__

    words = "what does it cost, in energy, time and accuracy, to train on more GPUs?"
    example = "examples:\n  energynn doctor\n  energynn measure -- python my_trainer.py\n  energynn COMMAND --help"
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="energynn", description=words, epilog=example, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"energynn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        parser.print_help()
        return 0
    if not words[0].startswith("-") and words[0] not in commands.choices:
        from energynn.config import suggestion

        near = suggestion(words[0], commands.choices)
        parser.error(f"no command is called {words[0]!r}{near}")
    for_sbatch = []
    if words[0] == "submit" and "--" in words:
        place = words.index("--")
        words, for_sbatch = words[:place], words[place + 1 :]
    options = parser.parse_args(words, argparse.Namespace(sbatch=for_sbatch))
    try:
        status = options.function(options)
        if sys.stdout:  # which may be closed
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has seen enough, as in `energynn claims | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing fails when Python ends
        return ENDED_BY_PIPE
    except (ValueError, OSError) as error:
        print(f"energynn: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nenergynn: interrupted; nothing is lost, the same command goes on from here", file=sys.stderr)
        return 130
