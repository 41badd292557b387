"""The first minute on the command line: what a person types before knowing how, and slips."""

import json
import os
import subprocess
import sys

import pytest

from energynn import cli, config
from energynn.files import REPOSITORY
from energynn.launch import start


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
        (["run", "device=2"], "device: must be a text"),
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
    exec("\n".join(sources[:2]), {})  # parameters and configuration; nothing is run
    assert os.getcwd() == str(REPOSITORY)
