"""Slurm's answers and its variables, with programs that stand for sbatch, squeue and scancel."""

import json
import os
import re

import pytest

from energynn import cli
from energynn.cluster import slurm
from energynn.files import REPOSITORY

TWO_NODES = str(REPOSITORY / "tests" / "cluster" / "two-nodes.toml")
# Writes down how it was called, and answers what a file beside it holds.
PROGRAM = """#!/bin/sh
here=${0%/*}; name=${0##*/}
for word in "$@"; do echo "$word"; done > $here/$name.words
env > $here/$name.environment
cat $here/$name.answer
"""


class Site:
    """A Slurm whose answers a test gives; a job is in the queue once it was submitted."""

    def __init__(self, folder):
        self.folder, self.runs_dir = folder, folder / "runs"
        for name in ("sbatch", "squeue", "scancel"):
            program = folder / name
            program.write_text(PROGRAM)
            program.chmod(0o755)
            self.answer(name, "")

    def answer(self, name, text):
        (self.folder / f"{name}.answer").write_text(text)

    def words(self, name):
        return (self.folder / f"{name}.words").read_text().splitlines()

    def variables(self, name):
        lines = (self.folder / f"{name}.environment").read_text().splitlines()
        return {line.split("=")[0] for line in lines}

    def energynn(self, command, *more):
        return cli.main([command, "--runs-dir", str(self.runs_dir), *more])

    def submit(self, *more):
        words = ["--system", TWO_NODES, "-p", "workload", "fourcastnet"]
        return self.energynn("submit", *words, *more)

    def submission(self):
        (path,) = self.runs_dir.glob("*/*/job/submission.json")
        return path


@pytest.fixture
def site(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith(slurm.OPTIONS):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return Site(tmp_path)


@pytest.mark.parametrize(
    "answer",
    [
        "41\n",
        "41;second\n",
        "\n  Welcome to Lonestar6!\n----\n--> Verifying quota (/home1)...OK\n41\n",
        "41\nYou have 12 of 40 node hours left\n",
        "Submitted batch job 41\n",
        "Submitted batch job 41 on cluster second\r\n",
        "maintenance on 2026-12-01\n41;second\n*** 3 jobs ***\n",
    ],
)
def test_a_job_s_number_is_found_among_what_a_site_says(site, capsys, answer):
    site.answer("sbatch", answer)
    assert site.submit() == 0 and "job 41: 1 x" in capsys.readouterr().out
    assert json.loads(site.submission().read_text())["job_id"] == "41_0"
    site.answer(
        "squeue", "** welcome | to | all **\n7_N/A|RUNNING|None\n41_0|PENDING|a|b\n"
    )
    assert site.energynn("status") == 0
    assert re.search(r"queued +a\|b; job 41_0", capsys.readouterr().out)
    assert site.submit() == 0 and "0 to make" in capsys.readouterr().out


@pytest.mark.parametrize(
    "answer", ["", "welcome\n", "41_0\n", "041\n", "12345678901\n"]
)
def test_an_answer_without_a_number_is_sbatch_s_and_is_not_kept(site, capsys, answer):
    site.answer("sbatch", answer)
    assert site.submit() == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "sbatch: its answer has no job number" in said
    assert site.energynn("status") == 0 and "not submitted" in capsys.readouterr().out
    site.answer("sbatch", "41\n")
    assert site.submit() == 0 and "job 41" in capsys.readouterr().out


def test_a_queue_that_cannot_be_read_is_unknown_not_empty(site, capsys):
    site.answer("sbatch", "41\n")
    assert site.submit() == 0
    site.answer("squeue", "41_0|\n")
    assert site.submit() == 2 and "squeue: '41_0|' is no" in capsys.readouterr().err
    assert site.energynn("status") == 0
    assert re.search(r"unknown(?s:.*)queue is unknown", capsys.readouterr().out)


def test_a_spoilt_submission_is_told_and_its_remedy_helps(site, capsys):
    site.answer("sbatch", "41\n")
    assert site.submit() == 0
    path = site.submission()
    path.write_text('{"submitted_at": "t", "job_id": "Welcome!\\n41_0"}')
    for command in ("submit", "cancel"):
        words = ["--all"] if command == "cancel" else []
        capsys.readouterr()
        assert (site.submit() if not words else site.energynn(command, *words)) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and f"{path}: is spoilt" in said
    assert site.energynn("status") == 0 and "is spoilt" in capsys.readouterr().out
    os.system(re.search("then `(rm .*)`", said)[1])
    assert site.submit() == 0 and "1 to make" in capsys.readouterr().out


def test_no_variable_changes_what_the_script_or_we_ask_for(site, capsys, monkeypatch):
    changing = (
        "SBATCH_TIMELIMIT SBATCH_ARRAY_INX SBATCH_NO_REQUEUE SBATCH_BEGIN SBATCH_WAIT"
    )
    changing += (
        " SQUEUE_STATES SQUEUE_NAMES SQUEUE_FORMAT SCANCEL_STATE SCANCEL_INTERACTIVE"
    )
    for name in changing.split():
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SBATCH_QOS", "mine")
    monkeypatch.setenv("SBATCH_ACCOUNT", "ours")
    assert site.submit("--dry-run") == 0
    said = capsys.readouterr().out
    assert "the script has none: SBATCH_ACCOUNT=ours, SBATCH_QOS=mine\n" in said
    assert "missing: account" not in said and "TIMELIMIT" not in said
    site.answer("sbatch", "41\n")
    site.answer("squeue", "41_0|PENDING|None\n")
    assert site.submit() == 0 and site.energynn("cancel", "--all") == 0
    passed_on = {"SBATCH_QOS", "SBATCH_ACCOUNT"}
    for name in ("sbatch", "squeue", "scancel"):
        variables = site.variables(name)
        assert {
            each for each in variables if each.startswith(slurm.OPTIONS)
        } == passed_on
    assert os.environ["SQUEUE_STATES"] == "1"  # of this shell


def test_all_that_a_script_asks_for_is_given_as_options_before_one_s_own(site):
    site.answer("sbatch", "41\n")
    site.runs_dir = site.folder / '50%jobs it\'s "ä" done'
    assert site.submit("--", "--exclude=cn[1-2]", "-p long") == 0
    *options, script = site.words("sbatch")
    log = f"{site.runs_dir}".replace("%", "%%")
    (output,) = [word for word in options if word.startswith("--output=")]
    assert output.startswith(f"--output={log}/two-nodes/")
    assert output.endswith("/job/slurm-%A_%a.txt")
    for option in (
        "--requeue",
        "--array=0-0",
        "--open-mode=append",
        "--exclude=cn[1-2]",
    ):
        assert option in options
    assert options[options.index("-p") + 1] == "long"
    comments = re.findall("^#SBATCH (--[a-z-]+)", open(script).read(), re.M)
    assert {*comments} <= {word.split("=")[0] for word in options} and len(comments) > 9
