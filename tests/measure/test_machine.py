"""What a run's record tells of the machine and of the batch job that it was made in."""

import os

import pytest

from energynn import records
from energynn.measure import machine
from tests.conftest import record_of
from tests.processes import write_program


@pytest.mark.parametrize(
    "told, is_exclusive", [("NO", True), ("OK", False), ("YES", False), ("", None)]
)
def test_the_job_says_whether_others_may_use_its_nodes(
    tmp_path, monkeypatch, told, is_exclusive
):
    words = (
        f"OverSubscribe={told}"
        if told
        else "slurm_load_jobs error: Unable to contact slurm controller"
    )
    write_program(tmp_path / "scontrol", f"echo JobId=7 {words} Contiguous=0")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert machine.describe_batch_job() == {}
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_PARTITION", "main")
    expected = {"job_id": "7", "job_partition": "main"}
    if is_exclusive is not None:
        expected["is_exclusive"] = is_exclusive
    assert machine.describe_batch_job() == expected


def test_energy_of_shared_nodes_is_no_evidence():
    words = "other jobs could use its nodes; give sbatch --exclusive"
    for job, is_told in (
        ({"is_exclusive": False}, True),
        ({"is_exclusive": True}, False),
        ({}, False),
    ):
        record = record_of(workload="command", job=job)
        assert (words in records.reasons_not_valid(record)) == is_told


def test_a_child_that_took_its_time_along_is_not_others():
    took = {"cpu_time_s": -3.0, "cpu_time_others_s": 9.0, "training_time_s": 5.0}
    assert records.work_of_others(record_of(**took)) == ""
