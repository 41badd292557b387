"""How often a batch job tries its run, and when it gives up. Nothing is trained."""

import os
import signal

import pytest

from energynn.host import files
from energynn.host.launchers import RESUMABLE_STATUS
from energynn.launch import job, local, slurm, status
from tests.conftest import minimal_record


@pytest.fixture
def start(tmp_path, monkeypatch, signals):
    """Start the job of a run as Slurm would, with a notebook that does what it is told."""
    run_dir = tmp_path / "runs" / "local" / "run"
    (run_dir / "job").mkdir(parents=True)
    files.write_json(run_dir / "job" / "parameters.json", {})
    (run_dir / "checkpoint").mkdir()

    def begin(signalled=None, checkpoint=None, record=None, submitted_at="t"):
        def execute(*_):
            if checkpoint is not None:
                (run_dir / "checkpoint" / f"{checkpoint:09}.sha256").touch()
            if signalled:
                os.kill(os.getpid(), signalled)
            if record:
                files.write_json(run_dir / "record.json", minimal_record(**record))
            return 1, "RuntimeError: out of memory"

        status.write_job_file(run_dir, "submission", status.JobSubmission(submitted_at))
        monkeypatch.setattr(local, "execute", execute)
        return job.main(run_dir)

    begin.last = lambda: status.read_starts(run_dir)[-1].outcome
    return begin


@pytest.mark.parametrize(
    "signalled, why",
    [(None, "the last with: RuntimeError: out of memory"), (signal.SIGUSR1, "--time")],
)
def test_a_run_that_fails_or_is_longer_than_any_job_goes_on_while_it_comes_further(
    start, signalled, why
):
    """Three starts in a row end it that do not, and a new submission begins anew."""
    assert [start(signalled, checkpoint=n) for n in range(14)] == [
        RESUMABLE_STATUS
    ] * 14
    assert (start.last() == "asked to stop") == bool(signalled)
    assert [start(signalled) for _ in range(3)] == [
        RESUMABLE_STATUS,
        RESUMABLE_STATUS,
        1,
    ]
    assert "failed: 3 starts in a row came to no new checkpoint" in start.last()
    assert why in start.last()
    assert start(submitted_at="later") == RESUMABLE_STATUS
    assert start.last() == "failed: RuntimeError: out of memory"


def test_who_cancels_or_preempts_a_run_does_not_make_it_fail(start):
    assert [start(signal.SIGTERM) for _ in range(5)] == [job.CANCELLED_EXIT_STATUS] * 5
    assert start.last() == "asked to stop" and start() == RESUMABLE_STATUS


def test_a_run_that_finished_and_is_not_valid_is_not_made_again_by_itself(start):
    bad = dict(valid=False, invalid_reasons=["only 3 power samples"])
    assert start(record=bad) == RESUMABLE_STATUS  # it is of another start
    assert start(record=bad | dict(ended_at="2999-01-01T00:00:00Z")) == 1
    assert start.last() == "failed: not valid: only 3 power samples"
    assert start(record={"valid": True}) == 0 and start.last() == "finished"


def test_only_the_task_itself_is_queued_again_never_its_array(
    start, fake_slurm, monkeypatch, capsys
):
    """The last task of an array has the array's own number as SLURM_JOB_ID."""
    for name, value in (("JOB_ID", "9"), ("ARRAY_JOB_ID", "9"), ("ARRAY_TASK_ID", "3")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    fake_slurm.answers["scontrol"] = None
    monkeypatch.setattr(slurm.time, "sleep", lambda _: None)
    assert start() == RESUMABLE_STATUS  # so that nothing that waits for this run begins
    assert fake_slurm.given == {"scontrol": ["requeue", "9_3"]}
    said = capsys.readouterr().out
    assert "not queued again (scontrol requeue: no)" in said
    assert "energynn submit" in said
