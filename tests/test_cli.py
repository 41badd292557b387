"""The first minute on the command line: what a person types before knowing how, and slips."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from energynn import cli
from energynn.host import files
from energynn.host.files import REPOSITORY
from tests.conftest import built, write_perun_hdf5, write_runs
from tests.processes import ENERGYNN, answer, ended, printed, refusal, said
from tests.run_files import edit


def test_the_version_and_the_list_of_commands():
    assert said("--version")[:2] == (0, "energynn 0.3.0.dev0\n")
    status, out, _ = said()
    assert status == 0 and "measure" in out and "forecast" in out


@pytest.mark.parametrize(
    "words, meant",
    [
        ("statsu", "status"),
        ("run workload=resnet5", "resnet50"),
        ("run dataset=photograph", "data describe"),
        ("forecast plam", "plan"),
        ("run learning_rte=2", "learning_rate"),
        ("run devices", "NAME=VALUE"),
        ("run name=x", "give --name x"),
        ("study show larg-batch", "large-batch"),
        ("submit smoke --system local", "`energynn study run"),
        ("cancel", "or --all"),
        ("run --runs", "--runs"),
        ("measure --devices 0 -- true", "--devices"),
        ("measure --devices two -- true", "--devices"),
        ("measure", "COMMAND"),
    ],
)
def test_a_slip_is_one_line_with_the_word_that_was_meant(tmp_path, words, meant):
    takes_folder = words.startswith(("run ", "submit ")) and "--runs" not in words
    where = ["--runs-dir", tmp_path / "runs"] if takes_folder else []
    assert meant in refusal(words, *where)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "words, expected",
    [
        ("status", "runs: 0; none; 0 Wh"),
        ("check", "records below runs: 0"),
        ("export --csv all.csv", "runs; each says how good"),
        ("claims", "lbs-speed-up-near-optimal"),
    ],
)
def test_what_needs_no_run_works_in_an_empty_folder(
    monkeypatch, tmp_path, words, expected
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ENERGYNN_RUNS", raising=False)
    assert expected in answer(words)
    assert "is no folder" in answer("status --runs-dir nothing", status=2)


GROUPS = ("study", "data", "forecast")


@pytest.mark.parametrize("command", [line.split()[1] for line in cli.COMMANDS.values()])
def test_every_command_says_what_it_does_with_an_example_on_80_columns(
    monkeypatch, command
):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = said(command, "--help")
    assert status == 0 and f"example: energynn {command}" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    if command in GROUPS:
        assert "Commands:" in out


def test_bash_completes_commands_and_options():
    environment = os.environ | {
        "_ENERGYNN_COMPLETE": "complete_bash",
        "COMP_CWORD": "1",
        "COMP_WORDS": "energynn com",
    }
    program = "from energynn import cli; cli.main()"
    done = ended(sys.executable, "-c", program, env=environment)
    assert "compare" in done.stdout.split(), done


def test_help_loads_nothing_heavy():
    program = "import sys; from energynn import cli; cli.main(['--help']); "
    program += "print({'numpy', 'pandas', 'torch', 'rich'} & set(sys.modules))"
    assert printed(sys.executable, "-c", program).splitlines()[-1] == "set()"


MEASURED = "20260101-000000-1-python"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder with three runs, one of them a measured command, and no number of a paper."""
    folder = tmp_path_factory.mktemp("checkout")
    _, made, _ = write_runs(folder / "runs", "local", "measured", "other")
    made = made.rename(made.with_name(MEASURED))
    command = "python train.py --learning-rate 0.1 --data /data/imagenet --epochs 90"
    about = dict(run_id=MEASURED, workload="command", config={"command": command})
    edit(made / "run.json", **about)
    built(made)
    (folder / "build").mkdir()
    files.write_json(folder / "build" / "numbers.json", {})
    write_perun_hdf5(folder / "train.hdf5", 20.0, 30.0)
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "study list",
        "study show smoke",
        "study show R1",
        "status",
        "check runs/other",
        "check --reference",
        "show measured",
        "compare local other",
        "compare local measured other",
        "export --csv all.csv",
        "status --watch local",
        "import-perun train.hdf5",
        "run --list",
        pytest.param("claims", marks=pytest.mark.slow),
        pytest.param("measure -- sleep 0.2", marks=pytest.mark.slow),
    ],
)
def test_answers_fit_a_terminal_of_80_columns(capfd, monkeypatch, checkout, words):
    monkeypatch.chdir(checkout)  # so that no path is long
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    known = {run.parent.name: str(run) for run in Path().glob("runs/*/*")}
    assert cli.main([known.get(word, word) for word in words.split()]) in (0, 1)
    answer = "".join(capfd.readouterr())
    assert answer and max(map(len, answer.splitlines())) <= 80, answer


def test_a_reader_that_has_seen_enough_is_no_error():
    started = subprocess.Popen(
        [*ENERGYNN, "run", "--list"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    started.stdout.close()
    assert started.stderr.read() == "" and started.wait() == 1


def test_parameters_are_taken_as_papermill_takes_them_but_not_those_of_a_command_measured():
    words = "run -p devices 2 -p epochs=3".split()
    joined = "run -p devices=2 -p epochs=3".split()
    assert cli.join_parameter_words(words) == joined
    measured = "measure python train.py -p devices 2".split()
    assert cli.join_parameter_words(measured) == measured
