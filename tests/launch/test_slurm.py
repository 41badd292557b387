"""Acceptance on a real Slurm of two nodes: a study goes on after whatever happens to it.

Ranks run under srun, MPI and perun, one on each node. The energy counters are simulated.
"""

import contextlib
import re
from itertools import chain

import psutil
import pytest

from energynn import records
from energynn.analysis import results
from energynn.host import files
from energynn.launch import status
from energynn.measure.samples import read_events, segment_dirs
from tests.launch.conftest import NODE_W
from tests.launch.test_guides import steps
from tests.processes import wait_until, wait_until_gone
from tests.run_files import text_of

# All in one process of `pytest -n`, because they share one Slurm.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SYSTEM = "tests/launch/two-nodes.toml"
# Long enough to be stopped in the middle, and at a pace that leaves the cores to others.
PACE = dict(epochs=30, step_period_s=0.05)  # 15 s


class Study:
    """Runs that were submitted, seen as a person sees them."""

    def __init__(self, cluster, folder):
        self.cluster, self.runs_dir = cluster, folder / "runs"
        self.file = folder / "my_study.py"
        self.place = f"--runs-dir {self.runs_dir}"

    def submit(self):
        words = f"submit {self.file} --system {SYSTEM} {self.place}"
        return self.cluster.energynn(words).stdout

    def rows(self):
        """What `energynn status --json` shows, without a process for each look."""
        with pytest.MonkeyPatch.context() as patched:
            for name, value in self.cluster.environment.items():
                patched.setenv(name, value)
            return status.describe_runs(status.find_run_folders(self.runs_dir, []))[0]

    def started(self):
        return sorted(self.runs_dir.glob("two-nodes/*/run.json"))

    def run_dirs(self):
        return [path.parent for path in sorted(self.runs_dir.glob("two-nodes/*/job"))]

    def wait_for_epoch(self, segment=1):
        """Wait until a run trains in its first, second, ... start."""

        def is_training():
            parts = map(segment_dirs, (path.parent for path in self.started()))
            folders = [part[-1] for part in parts if len(part) == segment]
            events = chain.from_iterable(map(read_events, folders))
            return "epoch" in [event["event"] for event in events]

        wait_until(is_training, 300, f"for an epoch of start {segment}", pause_s=1)

    def wait(self, *states):
        def are_there():
            return {row["state"] for row in self.rows()} == {*states}

        wait_until(are_there, 300, f"for {states}", pause_s=1)

    def records(self):
        """Wait for the records; all are valid, follow from the raw files, and nothing is left."""
        self.wait("finished")
        assert records.check(self.runs_dir) == []
        wait_until_gone(self.runs_dir, 60)
        found = [records.read_record_if_any(path) for path in self.run_dirs()]
        assert all(record.valid and record.launcher == "srun" for record in found)
        return found


@pytest.fixture(scope="module")
def study(cluster, tmp_path_factory):
    """The guide's walk, command by command: three runs; Slurm is killed for a while."""
    made = Study(cluster, tmp_path_factory.mktemp("study"))
    guide = steps("docs/cluster.md")
    begin = next(n for n, step in enumerate(guide) if "def study(" in step)
    program, *commands = guide[begin : begin + 6]
    assert "epochs=200" in program and "(0, 1)" in program
    # a run less
    program = program.replace("epochs=200", "**PACE").replace("(0, 1)", "(0,)")
    made.file.write_text(f"PACE = {PACE}\n{program}")
    places = {
        "my_study.py": made.file,
        "my_cluster.toml": SYSTEM,
        "runs": made.runs_dir,
    }
    made.said = {}
    for command in (each.removeprefix("energynn ") for each in commands):
        words = [places.get(word, word) for word in command.split()]
        if words[0] == "check":
            made.wait("finished")
        elif words[0] in ("submit", "status"):
            words += ["--runs-dir", made.runs_dir]
        made.said[command] = cluster.energynn(*words).stdout
        if words[0] == "submit" and "--dry-run" not in words:
            made.wait_for_epoch()
            cluster.daemon("slurmctld").kill()
            made.without_controller = cluster.energynn(f"status {made.place}").stdout
            cluster.script("controller-up")
    return made


def test_the_guides_commands_say_what_they_should(study):
    assert "3 runs, of unknown cost" in study.said["study show my_study.py"]
    assert re.search("runs: 3; .*running", study.said["status"])
    assert "valid: 3, faults: 0" in study.said["check runs"]
    assert "3 of 3 runs are made or queued; 0 to make" in study.submit()
    assert "the queue is unknown" in study.without_controller
    running = r"fourcastnet.* running .*\d+ of 30 epochs done"
    assert re.search(running, study.without_controller)
    for record in study.records():
        assert record.nodes == 2 and len(record.segments) == 1
        assert {sensor.host for sensor in record.sensors} == {"n1", "n2"}
        assert record.mean_power_cpu_W == pytest.approx(2 * NODE_W, rel=0.02)
        # with start and end
        assert record.energy_perun_total_J > record.energy_total_J > 0
        expected = {"job_id", "job_nodelist", "job_partition", "is_exclusive"}
        assert expected <= record.job.keys()
    assert set(results.load_records(study.runs_dir).nodes.values) == {2}


def test_the_time_limit_scancel_and_a_lost_node_cost_one_start_each(
    study, cluster, tmp_path
):
    """And in the end the weights are those of the guide's unbroken run.

    A time limit's warning is this signal.
    """
    run = Study(cluster, tmp_path)
    sizes = dict(devices=2, embed_dim=32, depth=1, checkpoint_period_s=1) | PACE
    run.file.write_text(
        "from energynn.experiment import config\n"
        f"def study(system): return [config.make('fourcastnet', system=system, **{sizes})]\n"
    )
    run.submit()
    run.wait_for_epoch()
    (row,) = run.rows()
    cluster.run("scancel", "--batch", "--signal=USR1", row["job"])
    run.wait("queued")
    (again,) = run.rows()
    assert again["job"] == row["job"]
    assert status.read_starts(run.run_dirs()[0])[-1].outcome == "asked to stop"
    cluster.run("scontrol", "update", f"JobId={row['job']}", "TimeLimit=30")

    run.wait_for_epoch(segment=2)
    cancelled = cluster.energynn(f"cancel --all {run.place}")
    assert "jobs cancelled: 1" in cancelled.stdout
    run.wait("stopped")
    wait_until_gone(run.runs_dir, 60)
    assert records.read_record_if_any(run.run_dirs()[0]).status == "interrupted"
    assert records.check(run.runs_dir) == []
    assert "0 of 1 runs are made or queued; 1 to make" in run.submit()

    run.wait_for_epoch(segment=3)
    lose_node(cluster, "n2")
    (record,) = run.records()
    assert len(record.segments) == 4
    (unbroken,) = [path for path in study.run_dirs() if "pretrain" in path.name]
    (broken,) = run.run_dirs()
    assert files.hash_file(broken / "weights.pt") == files.hash_file(
        unbroken / "weights.pt"
    )


def lose_node(cluster, node):
    """Kill slurmd and all job steps of a node, and start it anew once Slurm has missed it."""
    killed = [cluster.daemon(f"slurmd-{node}")]
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):
            if "slurmstepd" not in process.info["name"]:
                continue
            children = process.children(recursive=True)
            if node in [each.environ().get("SLURMD_NODENAME") for each in children]:
                killed += [process, *children]
    assert len(killed) > 2, killed  # slurmd, its step and the rank
    for process in killed:
        process.kill()
    look = ("sinfo", "-hNn", node, "-o", "%T")
    wait_until(lambda: "down" in cluster.run(*look).stdout, 300, pause_s=1)
    cluster.script("node-up", node)


def test_doctor_proves_a_system_and_says_what_slurm_refuses(cluster, tmp_path):
    """Lines of shell bring data to both nodes before."""
    path, there = tmp_path / "mine.toml", f"{tmp_path}/$SLURMD_NODENAME"
    right = text_of(SYSTEM)
    bring = f"sh -c 'mkdir {there} && touch {there}/2015.npy'"
    path.write_text(f'{right}\nsetup = ["srun -n 2 --ntasks-per-node=1 {bring}"]')
    assert "mine.toml says" in cluster.energynn(f"doctor --system {path}").stdout
    assert {*tmp_path.glob("*/2015.npy")} == {
        tmp_path / node / "2015.npy" for node in ("n1", "n2")
    }
    path.write_text(right.replace("--exclusive", "--partition=no-such"))
    refused = cluster.energynn(f"doctor --system {path}", check=False)
    assert refused.returncode == 2 and "invalid partition" in refused.stderr
