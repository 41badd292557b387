"""The command line: thin, lazy, and one line for a person's mistake."""

import io
import os
import signal
import sys
from typing import Annotated

import typer

from energynn.cli import cluster, data, forecast, records, runs

app = typer.Typer(
    help="What does it cost, in energy, time and accuracy, to train on more GPUs?",
    epilog="examples: energynn doctor; energynn measure -- python my_trainer.py",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)


@app.callback(invoke_without_command=True)
def energynn(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="show the version")
    ] = False,
) -> None:
    from energynn import __version__

    if version:
        print(f"energynn {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


# In the order in which `energynn --help` lists them, each with a line to type.
COMMANDS = {
    runs.run: "energynn run workload=resnet50 devices=2",
    runs.study: "energynn study show smoke",
    runs.measure: "energynn measure -- python my_trainer.py",
    runs.doctor: "energynn doctor",
    cluster.submit: "energynn submit paper-a100 --system horeka-a100 --dry-run",
    cluster.status: "energynn status --watch resnet50-photographs-n2",
    cluster.cancel: "energynn cancel R1",
    records.show: "energynn show resnet50-photographs-n2",
    records.compare: "energynn compare resnet50-photographs-n1 resnet50-photographs-n2",
    records.export: "energynn export --csv build/runs.csv",
    records.check: "energynn check runs",
    records.import_perun: "energynn import-perun perun_results/train.hdf5",
    data.data: "energynn data verify photographs",
    forecast.forecast: "energynn forecast plan --workload resnet50 --system horeka-a100",
    records.claims: "energynn claims --json",
}
for _command, _example in COMMANDS.items():
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_example.split()[1], epilog=f"example: {_example}")
    else:
        settings = {"allow_interspersed_args": _command is not runs.measure}
        app.command(epilog=f"example: {_example}", context_settings=settings)(_command)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit status: 0, 1 (something is not as it should be) or 2."""
    _open_closed_streams()
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # ignored, it stays so
        signal.signal(signal.SIGTERM, _interrupt_on_sigterm)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a locale may know fewer characters than a name has
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        words = join_parameter_words(sys.argv[1:] if arguments is None else arguments)
        status = app(words, prog_name="energynn", standalone_mode=False)
        if sys.stdout:  # which may be closed
            sys.stdout.flush()
        return status or 0
    except BrokenPipeError:
        # the reader has seen enough, as in `energynn claims | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        return _print_error(str(error))
    except (KeyboardInterrupt, typer.Abort) as stop:
        print(
            "\nenergynn: interrupted; the same command goes on from here",
            file=sys.stderr,
        )
        return 128 + (signal.SIGTERM if stop.args else signal.SIGINT)
    except Exception as error:
        if not hasattr(error, "format_message"):
            # of the library: a word that is no command
            raise
        return _print_error(
            f"{error.format_message()} `energynn COMMAND --help` says more"
        )


def _interrupt_on_sigterm(number: int, _frame) -> None:
    """Take a SIGTERM as a Ctrl-C: what runs has time for a checkpoint and its record."""
    raise KeyboardInterrupt(number)


def _open_closed_streams() -> None:
    """Give this process and its children streams, of which a shell may have closed any.

    The next file that is opened would have the number of a closed one, and get its lines.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stderr = sys.stderr or open(os.devnull, "w")


def _print_error(message: str) -> int:
    from energynn.host.texts import escape_controls

    print(f"energynn: {escape_controls(' '.join(message.split()))}", file=sys.stderr)
    return 2


def join_parameter_words(words: list[str]) -> list[str]:
    """Join `-p NAME VALUE`, as papermill takes it, to `-p NAME=VALUE`, but in a command
    measured.
    """
    joined = []
    rest = iter(words)
    for word in rest:
        joined.append(word)
        if word == "--" or words[0] == "measure":
            break
        if word == "-p":
            name = next(rest, "")
            joined.append(name if "=" in name else f"{name}={next(rest, '')}")
    return [*joined, *rest]
