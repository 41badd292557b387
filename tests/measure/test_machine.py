"""What a run's record tells of the machine and of the batch job that it was made in."""

import json
import os

import pytest

from energynn import records
from energynn.files import write_json
from energynn.measure import machine
from energynn.measure.sampler_process import begin
from tests.conftest import minimal_record


@pytest.mark.parametrize(
    "told, is_exclusive", [("NO", True), ("OK", False), ("YES", False), ("", None)]
)
def test_the_job_says_whether_others_may_use_its_nodes(tmp_path, monkeypatch, told, is_exclusive):
    script = tmp_path / "scontrol"
    words = (
        f"OverSubscribe={told}"
        if told
        else "slurm_load_jobs error: Unable to contact slurm controller"
    )
    script.write_text(f"#!/bin/sh\necho JobId=7 {words} Contiguous=0\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert machine.batch_job() == {}
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_PARTITION", "main")
    expected = {"scheduler": "slurm", "job_id": "7", "job_partition": "main"}
    if is_exclusive is not None:
        expected["is_exclusive"] = is_exclusive
    assert machine.batch_job() == expected


def test_every_host_is_in_the_record_with_its_gpus(run_dir):
    """A second host joins the run: a copy of the first's samples, with another driver and power limit."""
    header, *readings = (run_dir / "samples-host.jsonl").read_text().splitlines()
    for host, rank, driver, limit_W in (("host", 0, "570.1", 400.0), ("other", 1, "580.2", 350.0)):
        notes = {"uuid": f"GPU-{host}", "name": "an H100", "driver": driver, "limit_W": limit_W}
        told = json.loads(header) | {
            "host": host,
            "machine": {"cpu": "a CPU", "cores": 32, "job_id": "7"},
        }
        told["sensors"] += [
            told["sensors"][0] | {"id": "gpu_0_energy", "component": "gpu", "notes": notes}
        ]
        lines = [line.replace('"v": [', '"v": [0, ') for line in readings]
        (run_dir / f"samples-{host}.jsonl").write_text("\n".join([json.dumps(told), *lines]) + "\n")
        events = run_dir / f"events-rank{rank}.jsonl"
        events.write_text(
            events.read_text().replace('"host": "host"', json.dumps({"host": host})[1:-1])
        )
    record = records.build(run_dir, "finished", "")
    about = {"segment": 1, "cpu": "a CPU", "cores": 32, "job_id": "7"}
    assert record["hosts"] == [about | {"host": "host"}, about | {"host": "other"}]
    gpus = [one["notes"] for one in record["sensors"] if one["component"] == "gpu"]
    assert [(gpu["driver"], gpu["limit_W"]) for gpu in gpus] == [("570.1", 400), ("580.2", 350)]
    assert records.check_record(run_dir) == []


def test_a_sampler_says_what_its_host_is(run_dir, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    write_json(
        run_dir / "run.json",
        json.loads((run_dir / "run.json").read_text()) | {"cpu_model": machine.CPU_MODEL},
    )
    begin(run_dir, 0).stop()
    header = json.loads(
        (run_dir / f"samples-{os.uname().nodename}.jsonl").read_text().splitlines()[0]
    )
    assert header["machine"] == machine.describe_host() | {"job_id": "7"}


def test_energy_of_shared_nodes_is_no_evidence(tmp_path):
    words = "other jobs could use its nodes; give sbatch --exclusive"
    for job, is_told in (
        ({"is_exclusive": False}, True),
        ({"is_exclusive": True}, False),
        ({}, False),
    ):
        record = minimal_record(status="finished", workload="command", job=job)
        assert (words in records.reasons_against(record)) == is_told
