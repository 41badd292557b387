"""Slurm's answers and its variables, where programs stand for sbatch, squeue and scancel."""

import os
import re

import pytest

from energynn.host.reading import read_json
from energynn.launch import slurm


@pytest.mark.parametrize(
    "answer",
    [
        "41\n",
        "\n  Welcome to Lonestar6!\n----\n--> Verifying quota (/home1)...OK\n41\n",
        "41\nYou have 12 of 40 node hours left\n",
        "Submitted batch job 41 on cluster second\r\n",
        "Submitted batch job 41\nBalance (SU):\n 45000\n",
        "maintenance on 2026-12-01\n41;second\n*** 3 jobs ***\n",
    ],
)
def test_a_job_s_number_is_found_among_what_a_site_says(fake_slurm, answer):
    fake_slurm.answers["sbatch"] = answer
    assert "job 41: 1 run(s)" in fake_slurm.submit()
    assert read_json(fake_slurm.submission())["job_id"] == "41_0"
    queue = "** welcome | to | all **\n7_N/A|RUNNING|None\n41_0|PENDING|a|b\n"
    fake_slurm.answers["squeue"] = queue
    assert re.search(r"queued +a\|b; job 41_0", fake_slurm.energynn("status"))
    assert "0 to make" in fake_slurm.submit()


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "welcome\n",
        "41_0\n",
        "041\n",
        "12345678901\n",
        "9\n 45\n",
    ],
)
def test_an_answer_without_a_number_is_sbatch_s_and_is_not_kept(fake_slurm, answer):
    fake_slurm.answers["sbatch"] = answer
    last = fake_slurm.submit(status=2).splitlines()[-1]
    assert "sbatch: its answer has no job number" in last
    assert "not submitted" in fake_slurm.energynn("status")
    fake_slurm.answers.clear()
    assert "job 41" in fake_slurm.submit()


CHANGING = """SBATCH_TIMELIMIT SBATCH_ARRAY_INX SBATCH_NO_REQUEUE SBATCH_BEGIN SBATCH_WAIT
SLURM_STEP_ID SLURM_MEM_PER_CPU SLURM_CLUSTERS SQUEUE_STATES
SQUEUE_NAMES SQUEUE_FORMAT SCANCEL_STATE SCANCEL_INTERACTIVE"""


def test_no_variable_changes_what_the_script_or_we_ask_for(fake_slurm, monkeypatch):
    for name in CHANGING.split():
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SBATCH_QOS", "mine")
    monkeypatch.setenv("SBATCH_ACCOUNT", "ours")
    said = fake_slurm.submit("--dry-run")
    assert "the script has none: SBATCH_ACCOUNT=ours, SBATCH_QOS=mine\n" in said
    assert "no --account" not in said and "TIMELIMIT" not in said
    fake_slurm.submit()
    fake_slurm.energynn("cancel --all")
    assert fake_slurm.variables.keys() == {"sbatch", "squeue", "scancel"}
    for variables in fake_slurm.variables.values():
        passed_on = {
            name for name in variables if slurm.SLURM_OPTIONS_PATTERN.match(name)
        }
        assert passed_on == {"SBATCH_QOS", "SBATCH_ACCOUNT"}
        assert variables["PATH"] == os.environ["PATH"]
    assert os.environ["SQUEUE_STATES"] == "1"  # of this shell


def test_all_that_a_script_asks_for_is_given_as_options_and_one_s_own_too(
    fake_slurm, tmp_path
):
    fake_slurm.runs_dir = tmp_path / '50%jobs it\'s "ä" done'
    own = ["--account=mine", "--exclude=cn[1-2]", "-C a100&ib"]
    words = ["--exclude", "cn[1-2]", "-C", "a100&ib", "--exclusive"]
    fake_slurm.submit("--account", "mine", "--", *words)
    *options, script = fake_slurm.given["sbatch"]
    (output,) = [word for word in options if word.startswith("--output=")]
    log = str(fake_slurm.runs_dir).replace("%", "%%")
    assert re.fullmatch(
        rf"--output={re.escape(log)}/two-nodes/.*/job/slurm-%A_%a.txt", output
    )
    expected = ["--requeue", "--array=0-0", "--open-mode=append", *own[:2]]
    assert {*expected, "-C", "a100&ib"} <= {*options}
    assert options.index("a100&ib") == options.index("-C") + 1
    comments = re.findall("^#SBATCH (.*)", open(script).read(), re.M)
    assert {*own} < {*comments} and len(comments) > 9
    names = {re.split("[ =]", comment)[0] for comment in comments}
    assert names <= {word.split("=")[0] for word in options}
    assert "$.sbatch" in fake_slurm.submit("--", "--wrap=touch x", status=2)
