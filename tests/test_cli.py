"""The first minute on the command line: what a person types before knowing how, and slips."""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from energynn import cli, config, files, records
from energynn.files import REPOSITORY
from energynn.launch import start
from energynn.progress import energy_words
from tests.conftest import write_perun_hdf5, write_run_dir


def said(capsys, *words):
    """Exit status, output and errors of a command."""
    try:
        status = cli.main(list(words))
    except SystemExit as ended:
        status = ended.code
    told = capsys.readouterr()
    return status, told.out, told.err


def test_the_version_and_the_list_of_commands(capsys):
    assert said(capsys, "--version")[:2] == (0, "energynn 0.1.0\n")
    status, out, _ = said(capsys)
    assert status == 0 and "measure" in out and "forecast" in out


@pytest.mark.parametrize(
    "words, meant",
    [
        (["statsu"], "did you mean status?"),
        (["run", "device=2"], "device: must be a text, got 2; did you mean devices?"),
        (["run", "workload=resnet5"], "did you mean resnet50?"),
        (["run", "dataset=photograph"], "did you mean photographs?"),
        (["forecast", "plam"], "did you mean plan?"),
        (["completion", "bahs"], "did you mean bash?"),
        (["run", "learning_rte=2"], "did you mean learning_rate?"),
        (["run", "-p", "system", "horeka"], "did you mean horeka-"),
        (["run", "devices"], "write NAME=VALUE"),
        (["study", "show", "larg-batch"], "did you mean large-batch?"),
        (["submit", "R1", "--system", "horeka-a10"], "did you mean horeka-a100?"),
    ],
)
def test_a_slip_is_one_line_with_the_word_that_was_meant(capsys, tmp_path, words, meant):
    where = ["--runs-dir", str(tmp_path / "runs")] if words[0] in ("run", "submit") else []
    status, _, err = said(capsys, *words, *where)
    assert status == 2 and meant in err and err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def parsers(parser, words=()):
    """Every command and action, with what is typed for it."""
    yield list(words), parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from parsers(child, [*words, name])


@pytest.fixture
def whole_parser(monkeypatch):
    class Built(Exception):
        pass

    def stop(parser, *_):
        raise Built(parser)

    with monkeypatch.context() as patch, pytest.raises(Built) as stopped:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        cli.main(["status"])
    return stopped.value.args[0]


def test_every_command_says_what_it_does_with_an_example_on_80_columns(whole_parser, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = list(parsers(whole_parser))
    assert len(found) > 30
    for words, parser in found:
        assert parser.description and "example" in parser.epilog, words
        silent = [
            action.dest for action in parser._actions if not action.help and action.dest not in ("command", "action")
        ]
        assert not silent, f"{words}: no help for {silent}"
        lines = parser.format_help().removesuffix(f"{parser.epilog}\n").splitlines()  # an example may be longer
        assert max(map(len, lines)) <= 80, words


def test_the_examples_are_parsed(whole_parser):
    for words, parser in parsers(whole_parser):
        if words and words != ["completion"]:
            line = parser.epilog.splitlines()[1].split(" | ")[0]
            typed = shlex.split(line)[1:]
            assert whole_parser.parse_args(typed).command == words[0]


def completed(script, *typed):
    """What bash offers after these words, the last of which is not complete."""
    program = f"""
        {script}
        COMP_WORDS=({" ".join(map(shlex.quote, typed))}); COMP_CWORD={len(typed) - 1}
        _energynn; printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout.split()


def test_bash_completes_commands_actions_and_options(capsys):
    _, script, _ = said(capsys, "completion", "bash")
    assert completed(script, "energynn", "comp") == ["compare", "completion"]
    assert completed(script, "energynn", "forecast", "pr") == ["predict", "probe"]
    assert completed(script, "energynn", "forecast", "plan", "--dead") == ["--deadline-h"]
    assert "--why" in completed(script, "energynn", "ignore", "some-run", "--")
    assert {"list", "run", "show", "--json"} <= set(completed(script, "energynn", "study", ""))
    for shell in ("zsh", "fish"):
        assert "forecast" in said(capsys, "completion", shell)[1]


def test_a_run_of_hours_on_a_core_is_said_before_it_starts(tmp_path):
    def said_of(**more):
        made = config.make(**more)
        return start._hours_on_cores(made)

    assert 2 < said_of(workload="fourcastnet", dataset="synthetic") < 30
    assert said_of(workload="resnet50", preset="paper") > 10_000
    assert said_of(workload="resnet50") < 0.1 and said_of(workload="fourcastnet") < 0.1
    made = config.make("fourcastnet", dataset="synthetic")
    (warning,) = start.preflight(start.intend(made, tmp_path / "local" / config.run_id(made)))
    assert "hours on CPU cores" in warning


def test_power_and_energy_so_far_stand_below_the_progress_of_a_run(run_dir):
    lines = ["resnet50: epoch 1/2, step 1/9, loss 1, 9.1 samples/s, 3 s left\n", "resnet50: 2 epochs\n"]
    told = list(start._with_power(lines, run_dir, 10.0))
    assert told[0] == lines[0] and told[1] == "  120 W, 0.667 Wh so far (simulated)\n" and told[2:] == lines[1:]
    assert list(start._with_power(lines * 3, run_dir, 1000.0)).count(told[1]) == 1
    assert list(start._with_power(lines, run_dir / "nothing", 10.0)) == lines


@pytest.mark.parametrize(
    "energy_Wh, words",
    [
        (0.08462, "0.0846 Wh"),
        (12.345, "12.3 Wh"),
        (999.6, "1 kWh"),
        (2.5e6, "2,500 kWh"),
        (0, "0 Wh"),
        (123456, "123 kWh"),
    ],
)
def test_energies_in_words_have_no_exponents(energy_Wh, words):
    assert energy_words(energy_Wh) == words


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder with three runs, one of them a measured command, and the numbers of a paper."""
    folder = tmp_path_factory.mktemp("checkout")
    runs = [write_run_dir(folder / "runs", system) for system in ("local", "measured", "other")]
    made = runs[1].rename(runs[1].with_name(MEASURED))
    intent = json.loads((made / "run.json").read_text())
    settings = {"command": "python train.py --learning-rate 0.1 --data /data/imagenet --epochs 90 --workers 8"}
    files.write_json(made / "run.json", intent | {"run_id": MEASURED, "workload": "command", "config": settings})
    for run in (runs[0], made, runs[2]):
        records.build(run, "finished", "")
    source = "least squares through the origin on R4, n=1 to 256, and on R6, n=32 to 256, of the published values"
    found = {
        "text": "0.284",
        "unit": "kW",
        "provenance": "published",
        "source": source,
        "notebook": "60_x",
        "value": 0.284,
    }
    (folder / "build").mkdir()
    files.write_json(folder / "build" / "numbers.json", {"slope_ResNet50": found})
    write_perun_hdf5(folder / "train.hdf5", 20.0, 30.0)
    return folder


MEASURED = "20260101-000000-1-python"
RUNS = ["runs/local/RUN", f"runs/measured/{MEASURED}", "runs/other/RUN"]
SOURCE = "electricitymaps.com, mean of 2025, Germany, life cycle; the contract says nothing else about its origin"
FACTORS = ["--gCO2-per-kWh", "344", "--cost-per-kWh", "0.3", "--source", SOURCE, "--date", "2026-01-01"]


@pytest.mark.parametrize(
    "words",
    [
        *(["study", "list"], ["system", "list"], ["status"], ["check", "runs/other"], ["number", "slope_ResNet50"]),
        *(["study", "show", name] for name in ("smoke", "R1", "T1", "gpu", "large-batch")),
        *(["show", RUNS[1]], ["compare", *RUNS[::2]], ["compare", *RUNS], ["export", "--csv", "all.csv"]),
        *(["footprint", *FACTORS], ["recompute", RUNS[1], *FACTORS], ["watch", RUNS[0], "--once"]),
        *(["import-perun", "train.hdf5"], ["merge", "runs", "--runs-dir", "more"], ["run", "--list"]),
        *(["ignore", RUNS[0], "--why", "a backup ran beside it"], ["ignore", RUNS[0], "--undo"]),
        ["reference"],
        pytest.param(["claims"], marks=pytest.mark.slow),
        pytest.param(["doctor"], marks=pytest.mark.slow),
        pytest.param(["measure", "--", "sleep", "0.2"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_answers_fit_a_terminal_of_80_columns(capfd, monkeypatch, checkout, words):
    monkeypatch.chdir(checkout)  # so that no path is long
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    words = [str(next(Path().glob(word.replace("RUN", "*")))) if word.endswith("/RUN") else word for word in words]
    assert cli.main(words) in (0, 1)
    said = "".join(capfd.readouterr())
    assert said and not [line for line in said.splitlines() if len(line) > 80], said


def test_a_new_system_is_possible_where_its_folder_was_made(tmp_path):
    with pytest.raises(ValueError, match="did you mean horeka"):
        start._refuse_a_slip(tmp_path / "horeka")
    (tmp_path / "horeka").mkdir()
    start._refuse_a_slip(tmp_path / "horeka")
    start._refuse_a_slip(tmp_path / "our-workstation")


def test_all_parameters_are_listed_on_80_columns(capsys):
    status, out, _ = said(capsys, "run", "--list")
    assert status == 0 and max(len(line) for line in out.splitlines()) < 80
    for config_class in config.CONFIGS.values():
        assert all(f"\n  {name} (" in out for name in config.facts(config_class) if name != "workload")


def test_a_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-m", "energynn.cli", "run", "--list"]
    started = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started.stdout.close()
    assert started.stderr.read() == "" and started.wait() == cli.ENDED_BY_PIPE


def test_a_notebook_opened_in_jupyterlab_writes_where_the_others_read(monkeypatch):
    cells = json.loads((REPOSITORY / "notebooks" / "run_training.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    monkeypatch.chdir(REPOSITORY / "notebooks")
    monkeypatch.setattr(start, "show_errors_in_one_line", lambda: None)
    monkeypatch.setenv("ENERGYNN_RUNS", "/somewhere/runs")
    made = {}
    exec("\n".join(sources[:2]), made)  # parameters and configuration; nothing is run
    assert os.getcwd() == str(REPOSITORY) and str(made["runs_dir"]) == "/somewhere/runs"


FAKE_PYTHON = """#!/bin/sh
case "$*" in
  -c*) exit 0 ;;
  "-m venv "*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python" ;;
  *"pip install"*) echo "many words"; test -e fails && { echo "ERROR: no such package"; exit 1; }; exit 0 ;;
esac
"""


def test_make_says_one_line_of_an_installation_and_names_pips_log_where_it_fails(tmp_path):
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(REPOSITORY / name, tmp_path)
    (tmp_path / "python").write_text(FAKE_PYTHON)
    (tmp_path / "python").chmod(0o755)
    make = ["make", "--no-print-directory", "env", f"PYTHON={tmp_path / 'python'}"]
    (tmp_path / "fails").touch()
    failed = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True)
    assert failed.returncode and "ERROR: no such package" in failed.stdout
    assert "all that it said is in .venv/pip.log" in failed.stdout
    (tmp_path / "fails").unlink()
    made = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == 0 and len(made.stdout.splitlines()) == 1 and "many words" not in made.stdout, made
    assert "many words" in (tmp_path / ".venv" / "pip.log").read_text()


def test_every_step_of_make_reproduce_says_in_one_line_what_it_is():
    recipe = (REPOSITORY / "Makefile").read_text().partition("\nreproduce:")[2].partition("\n\n")[0].splitlines()[1:]
    assert len(recipe) % 2 == 0 and all(line.startswith('\t@echo "=== ') for line in recipe[::2]), recipe


def test_a_closed_standard_output_costs_no_commands_status(tmp_path):
    words = f"{sys.executable} -m energynn.cli measure --out {tmp_path}/run -- sh -c 'exit 3' >&-"
    done = subprocess.run(words, shell=True, capture_output=True, text=True)
    assert done.returncode == 3 and "Traceback" not in done.stderr and (tmp_path / "run" / "record.json").exists()
