"""PBS by its commands' answers. No server gave them: they are made up after its manuals and its document PP-483."""

import json
from pathlib import Path

import pytest

from energynn import cli
from energynn.cluster import job, local, pbs, status
from energynn.measure import machine
from tests.cluster.test_submit import my_study

SITE = """scheduler = "pbs"
devices_per_node = 1
default_hours = 0.25
qsub = ["-l place=scatter:excl", "-q gpu"]
select = "ncpus=8:ngpus=1"
"""
STUDY = [1, 1, 2]  # two runs on one device make one array


def answer(**jobs):
    """As qstat -f -F json writes it."""
    head = {"timestamp": 1479277336, "pbs_version": "14.1", "pbs_server": "vbox"}
    return json.dumps(head | {"Jobs": jobs} if jobs else head)


class FakePbs:
    """Commands as they were called, and what qstat knows."""

    def __init__(self, monkeypatch):
        self.called, self.jobs, self.number = [], {}, 40
        monkeypatch.setattr(pbs, "call", self.call)

    def call(self, *command):
        self.called.append(command)
        if command[0] == "qsub":
            self.number += 1
            return f"{self.number}{'[]' if '-J' in command else ''}.vbox\n"
        if command[:2] == ("qstat", "-B"):
            return "Server: vbox\n    max_array_size = 10000\n"
        if command[0] == "qstat":
            asked = [word for word in command[1:] if word[0].isdigit()]
            known = {name: value for name, value in self.jobs.items() if self.whole(name) in asked or not asked}
            if missing := [name for name in asked if name not in map(self.whole, self.jobs)]:
                raise ValueError(f"qstat: qstat: Unknown Job Id {missing[0]}.vbox")
            return answer(**known)
        return ""

    def whole(self, name):
        number = name.split(".")[0]
        return f"{number.split('[')[0]}[]" if "[" in number else number


@pytest.fixture
def server(monkeypatch):
    return FakePbs(monkeypatch)


def submit(tmp_path, *more):
    (tmp_path / "site.toml").write_text(SITE)
    study = my_study(tmp_path, 1, 2)
    study.write_text(
        study.read_text().replace("return [", "return [config.make('fourcastnet', system=system, repeat=1), ")
    )
    words = ["submit", str(study), "--system", str(tmp_path / "site.toml"), "--runs-dir", str(tmp_path / "runs")]
    return cli.main([*words, *more])


def test_a_study_is_submitted_followed_and_cancelled(tmp_path, server):
    assert submit(tmp_path, "--account", "mine") == 0
    arrays, single = [command for command in server.called if command[0] == "qsub"]
    assert arrays[:3] == ("qsub", "-J", "0-1") and "-J" not in single
    text = Path(single[-1]).read_text()
    for line in ("-l select=2:mpiprocs=1:ncpus=8:ngpus=1", "-l walltime=900", "-l place=scatter:excl", "-A mine"):
        assert f"\n#PBS {line}\n" in text
    assert "\n(sleep 825; kill -USR1 $$) > /dev/null 2>&1 &\nruns=(" in text and "SBATCH" not in text
    server.jobs = {
        "41[].vbox": {"job_state": "B"},
        "41[0].vbox": {"job_state": "R"},
        "41[1].vbox": {"job_state": "Q", "comment": "Not Running: Insufficient amount of resource"},
        "42.vbox": {"job_state": "F", "Exit_status": 271},
    }
    rows, notes = status.rows(status.folders(tmp_path / "runs", []))
    by_job = {row["job"]: (row["state"], row.get("reason", "")) for row in rows}
    assert notes == [] and by_job == {
        "41[]_0": ("running", ""),
        "41[]_1": ("queued", "Not Running: Insufficient amount of resource"),
        "42_0": ("failed", "its job 42_0 is gone (exit status 271); nothing was recorded"),
    }
    del server.jobs["42.vbox"]  # its history is over, and qstat fails where it is asked for it
    rows, notes = status.rows(status.folders(tmp_path / "runs", []))
    assert notes == [] and sorted(row["state"] for row in rows) == ["failed", "queued", "running"]
    assert cli.main(["cancel", "--all", "--runs-dir", str(tmp_path / "runs")]) == 0
    assert server.called[-1][0] == "qdel" and set(server.called[-1][1:]) == {"41[0]", "41[1]"}


def test_a_job_that_goes_on_is_followed_by_one_of_its_task_alone(tmp_path, server, monkeypatch):
    assert submit(tmp_path) == 0
    run_dir = next(
        path.parent.parent for path in tmp_path.glob("runs/*/*/job/submission.json") if "41[]_1" in path.read_text()
    )
    monkeypatch.setenv("PBS_JOBID", "41[1].vbox")
    monkeypatch.setattr(local, "execute", lambda *_: (1, "out of memory"))
    assert job.main(run_dir) == 0
    script = str(run_dir / "job" / "job.sh")
    assert server.called[-1] == ("qsub", "-v", "ENERGYNN_TASK=1", "-W", "depend=afterany:41[1]", script)
    assert status.submission(run_dir)["job_id"] == "43_1"
    monkeypatch.setenv("PBS_JOBID", "43.vbox")
    monkeypatch.setenv("ENERGYNN_TASK", "1")
    assert pbs.this_task() == "43_1"
    server.jobs = {"43.vbox": {"job_state": "Q"}}
    assert pbs.queue(["43_1"]) == {"43_1": ("PENDING", "")}


def test_the_record_tells_of_the_job(tmp_path, monkeypatch):
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    for name, value in (("JOBID", "7.vbox"), ("QUEUE", "gpu"), ("NODEFILE", str(tmp_path / "nodes"))):
        monkeypatch.setenv(f"PBS_{name}", value)
    qstat = tmp_path / "qstat"
    qstat.write_text(
        '#!/bin/sh\necho "    Resource_List.place = scatter:excl"; echo "    Resource_List.select = 2:ncpus=8"\n'
    )
    qstat.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    facts = {"scheduler": "pbs", "job_id": "7.vbox", "job_partition": "gpu", "job_nodelist": "n1,n2", "nnodes": "2"}
    assert machine.batch_job() == facts | {"is_exclusive": True, "allocated": "2:ncpus=8"}
