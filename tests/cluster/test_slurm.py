"""Acceptance on a real Slurm of two nodes: studies run, and go on after whatever happens to them.

Ranks run under srun, MPI and perun; most runs have them on both nodes. The energy counters are simulated.
"""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import sys
import textwrap
import time

import psutil
import pytest

from energynn import config, files, records
from energynn.analysis import results
from energynn.cluster import status, submit, systems
from energynn.files import REPOSITORY
from energynn.measure.samples import read_events, segments
from tests.cluster.conftest import NODE_W

# Some minutes on a quiet machine; all in one process of `pytest -n`, because they share one Slurm.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SYSTEM = "tests/cluster/two-nodes.toml"
# Long enough to be stopped in the middle; paced, so that other tests get the cores meanwhile.
EPOCHS, STEP_PERIOD_S = 30, 0.1
LONG = dict(embed_dim=32, depth=1, epochs=EPOCHS, step_period_s=STEP_PERIOD_S)


def write_study(folder, body):
    path = folder / "my_study.py"
    path.write_text(
        "from energynn import config\n\n\ndef study(system):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    )
    return path


def long_run(folder):
    return write_study(folder, f"return [config.make('fourcastnet', system=system, devices=2, **{LONG!r})]")


class Study:
    """Runs that were submitted, seen as a person sees them."""

    def __init__(self, cluster, folder, file, *options):
        self.cluster, self.runs_dir = cluster, folder / "runs"
        self.submit = lambda: cluster.energynn(
            "submit", file, "--system", SYSTEM, "--runs-dir", self.runs_dir, *options
        )
        self.said = self.submit().stdout

    def rows(self):
        """What `energynn status --json` shows, without a process for each look."""
        with pytest.MonkeyPatch.context() as patched:
            for name, value in self.cluster.environment.items():
                patched.setenv(name, value)
            return status.rows(status.folders(self.runs_dir, []))[0]

    def row(self, run_id):
        return next(row for row in self.rows() if row["run_id"] == run_id)

    def folder(self):
        (path,) = (self.runs_dir / "two-nodes").glob("*/job/..")
        return path.resolve()

    def is_training(self, segment=1):
        parts = [segments(path.parent) for path in (self.runs_dir / "two-nodes").glob("*/run.json")]
        newest = [part[-1] for part in parts if len(part) == segment]
        return any(event["event"] == "epoch" for folder in newest for event in read_events(folder))

    def wait(self, state):
        def are_so():
            rows = self.rows()
            return rows if all(row["state"] == state for row in rows) else None

        return self.cluster.wait_for(are_so, state)

    def check(self, starts=None):
        """Everything finished, on both nodes, nothing left, every number follows from the raw files."""
        rows = self.wait("finished")
        assert records.check(self.runs_dir) == []
        for row in rows:
            record = records.read(self.runs_dir / "two-nodes" / row["run_id"])
            assert record["launcher"] == "srun" and record["valid"]
            parts = segments(self.runs_dir / "two-nodes" / row["run_id"])
            starts_of_ranks = [e for part in parts for e in read_events(part) if e["event"] == "rank_start"]
            assert {event["world_size"] for event in starts_of_ranks} == {record["devices"]}
            if starts:
                assert len(record["segments"]) == starts
                for total in ("energy_total_J", "training_time_s"):  # device hours follow from the time
                    assert record[total] == pytest.approx(sum(segment[total] for segment in record["segments"]))
        nothing_is_left(self.runs_dir)
        return rows


def nothing_is_left(folder):
    deadline = time.monotonic() + 60
    while left := processes_of(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def processes_of(folder):
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()) and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    return found


def guide():
    """The study and the commands of the guide to clusters."""
    text = (REPOSITORY / "docs/cluster.md").read_text().split("## A study of your own\n")[1].split("\n## ")[0]
    blocks = [
        textwrap.dedent(block)
        for block in re.findall(r"(?:^(?:    .*)?\n)+", text, flags=re.MULTILINE)
        if block.strip()
    ]
    (study,) = [block.strip() + "\n" for block in blocks if "def study" in block]
    return study, [line for block in blocks for line in block.splitlines() if line.startswith(".venv/bin/energynn")]


@pytest.fixture(scope="module")
def study(cluster, tmp_path_factory):
    """The guide's walk, command by command: four runs of both workloads on two nodes; Slurm is killed for a while."""
    folder = tmp_path_factory.mktemp("study")
    program, commands = guide()
    assert "epochs=200" in program
    program = program.replace("epochs=200", f"epochs={EPOCHS}, step_period_s={STEP_PERIOD_S}")
    (folder / "my_study.py").write_text(program)
    made, said = None, {}
    for command in commands:
        words = shlex.split(command)[1:]
        words = [
            str(folder / word) if word == "my_study.py" else SYSTEM if word == "my_cluster.toml" else word
            for word in words
        ]
        if words[0] == "check":
            words[1] = str(folder / "runs")
            made.wait("finished")
        elif words[0] in ("submit", "status"):
            words += ["--runs-dir", str(folder / "runs")]
        said[" ".join(words[:2])] = cluster.energynn(*words).stdout
        if words[0] == "submit" and "--dry-run" not in words:
            made = Study(cluster, folder, folder / "my_study.py")
            cluster.wait_for(made.is_training, "the first run")
            os.kill(int((cluster.folder / "run" / "slurmctld.pid").read_text()), signal.SIGKILL)
            made.without_controller = cluster.energynn("status", "--runs-dir", made.runs_dir).stdout
            cluster.script("controller-up")
    made.said_by_command = said
    return made


def test_the_guides_commands_say_what_they_should(study):
    said = study.said_by_command
    assert "4 runs, of unknown cost" in said["study show"]
    assert re.search("4 runs: .*running", said["status --runs-dir"])
    checked = said[f"check {study.runs_dir}"]
    assert "4 records" in checked and "4 of them valid as evidence; 0 faults" in checked


def test_a_study_on_two_nodes_is_recorded_with_both_nodes_energies(study, cluster):
    study.check(starts=1)
    assert study.rows()[0]["energy_kWh"] > 0
    for row in study.rows():
        folder = study.runs_dir / "two-nodes" / row["run_id"]
        record = records.read(folder)
        assert record["nodes"] == 2 and {path.name for path in folder.glob("samples-*")} == {
            "samples-n1.jsonl",
            "samples-n2.jsonl",
        }
        assert {sensor["host"] for sensor in record["sensors"]} == {"n1", "n2"}
        assert record["mean_power_cpu_W"] == pytest.approx(2 * NODE_W, rel=0.02)
        assert record["energy_perun_total_J"] > record["energy_total_J"] > 0  # perun counts start and end too
        assert record["energy_total_provenance"] == "simulated"
        facts = json.loads((folder / "job" / "start-1.json").read_text())
        assert record["job"]["is_exclusive"] and record["job"]["job_nodelist"] == "n[1-2]"
        assert "node=2" in record["job"]["allocated"] and {host["host"] for host in record["hosts"]} == {"n1", "n2"}
        assert {host["job_id"] for host in record["hosts"]} == {record["job"]["job_id"]}
        assert facts["nnodes"] == "2" and facts["outcome"] == "finished" and facts["job_nodelist"] == "n[1-2]"
        for name in ("notebook.ipynb", "job/job.sh", "job/log.txt", "job/parameters.json"):
            assert (folder / name).stat().st_size > 0
    kept = "".join(path.read_text(errors="replace") for path in study.runs_dir.rglob("*") if path.is_file())
    assert "hush-hush" not in kept


def test_the_analysis_notebooks_read_the_study_back(study, cluster, tmp_path):
    table = results.load(study.runs_dir)
    assert len(table.run) == 4 and set(table.nodes.values) == {2}
    for name in ("30_fourcastnet_scaling", "80_measurement"):
        cluster.run(
            sys.executable,
            "-m",
            "papermill",
            f"notebooks/{name}.ipynb",
            tmp_path / f"{name}.ipynb",
            "--no-progress-bar",
            "-p",
            "runs_dir",
            study.runs_dir,
            "-p",
            "build_dir",
            tmp_path,
        )
    told = json.loads((tmp_path / "numbers" / "80_measurement.json").read_text())
    assert told["own_runs"]["value"] == 4 and all(run in told["components"]["source"] for run in table.run_id.values)


def test_status_without_a_controller_says_so_and_is_true(study):
    assert "the queue is unknown" in study.without_controller and re.search(
        rf"running +\S+\s+\S+ \S+ epoch \d+/{EPOCHS}", study.without_controller
    )


def test_what_is_made_is_not_submitted_again(study):
    assert "4 of 4 runs are made or queued; 0 to make" in study.submit().stdout


@pytest.mark.parametrize("by", ["its warning", pytest.param("the limit", marks=pytest.mark.nightly)])
def test_a_time_limit_is_hit_and_the_weights_are_those_of_an_unbroken_run(study, cluster, tmp_path, by):
    """First the job queues itself again; then, as where a site forbids that, another job takes its place.

    The limit is moved to the middle of the training, wherever that is on a machine as busy as this one. Slurm looks at
    limits twice a minute, so that takes minutes; the warning alone is the same signal.
    """
    broken = Study(cluster, tmp_path, long_run(tmp_path), "--minutes", "30")
    for start in (1, 2):
        cluster.wait_for(lambda start=start: broken.is_training(start), f"start {start}")
        (row,) = broken.rows()
        if start == 1:
            if by == "the limit":
                minutes = int(cluster.run("squeue", "-hj", row["job"], "-o0:%M").stdout.split(":")[-2])
                cluster.run("scontrol", "update", f"JobId={row['job']}", f"TimeLimit={minutes + 2}")
            else:
                cluster.run("scancel", "--batch", "--signal=USR1", row["job"])
            came_back = lambda: (now := broken.rows()[0])["state"] == "queued" and now  # noqa: E731
            again = cluster.wait_for(came_back, "Slurm to warn the job, and the job to come back")
            assert again["reason"].endswith("continues: asked to stop") and again["job"] == row["job"]
            cluster.run("scontrol", "update", f"JobId={row['job']}", "TimeLimit=30")
        else:
            cluster.run("scontrol", "update", f"JobId={row['job']}", "Requeue=0")
            cluster.run("scancel", "--batch", "--signal=USR1", row["job"])
            cluster.wait_for(lambda: broken.rows()[0]["job"] != row["job"], "another job in its place")  # noqa: B023
    assert (broken.folder() / "job" / "log.txt").read_text().count("SIGUSR1") == 2
    broken.check(starts=3)
    unbroken = study.runs_dir / "two-nodes" / row["run_id"]
    assert len(records.read(unbroken)["segments"]) == 1
    assert files.sha256(broken.folder() / "weights.pt") == files.sha256(unbroken / "weights.pt")


def test_scancel_and_the_loss_of_a_node_cost_one_start_each(cluster, tmp_path):
    """And a fine-tuning that waited for a run that was cancelled is submitted with it, again."""
    body = f"""
        first = config.make("fourcastnet", system=system, devices=2, checkpoint_period_s=1, **{LONG!r})
        tuned = dict(embed_dim=32, depth=1, epochs=30, stage="finetune", initial_run=config.run_id(first))
        return [first, config.make("fourcastnet", system=system, devices=2, **tuned)]
    """
    run = Study(cluster, tmp_path, write_study(tmp_path, body))
    cluster.wait_for(run.is_training, "the run")
    first, tuned = sorted(run.rows(), key=lambda row: row["state"], reverse=True)
    assert (first["state"], tuned["state"]) == ("running", "queued")
    assert tuned["reason"] == f"Dependency on {first['run_id']}"
    assert "1 jobs cancelled" in cluster.energynn("cancel", first["run_id"], "--runs-dir", run.runs_dir).stdout
    folder = run.runs_dir / "two-nodes" / first["run_id"]
    cluster.wait_for(lambda: run.row(first["run_id"])["state"] == "stopped", "the cancelled run to stop")
    nothing_is_left(run.runs_dir)
    assert records.read(folder)["status"] == "interrupted" and records.check(run.runs_dir) == []
    cluster.wait_for(lambda: run.row(tuned["run_id"])["state"] == "failed", "Slurm to end what can never begin")
    assert "0 of 2 runs are made or queued; 2 to make" in run.submit().stdout

    cluster.wait_for(lambda: run.is_training(segment=2), "the second start")
    killed = [psutil.Process(int((cluster.folder / "run" / "slurmd-n2.pid").read_text())), *steps_of("n2")]
    assert len(killed) > 2, killed  # slurmd, its step and the rank
    for process in killed:
        process.kill()
    is_missed = lambda: "down" in cluster.run("sinfo", "-hNn", "n2", "-o", "%T").stdout  # noqa: E731
    cluster.wait_for(is_missed, "n2 to be missed")
    cluster.script("node-up", "n2")
    run.check()
    assert len(records.read(folder)["segments"]) == 3


def steps_of(node):
    """The processes of all job steps on a node, which are below a slurmstepd."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            children = process.children(recursive=True) if "slurmstepd" in process.name() else []
            if any(child.environ().get("SLURMD_NODENAME") == node for child in children):
                found += [process, *children]
    return found


def test_a_failing_run_in_an_array_stops_after_three_and_a_requeued_one_goes_on(cluster, tmp_path):
    study = Study(
        cluster,
        tmp_path,
        write_study(
            tmp_path,
            f"""
        long = {LONG | dict(epochs=EPOCHS // 2)!r}  # one device has twice the steps
        good = config.make("fourcastnet", system=system, device="cpu", **long)
        return [good, config.make("fourcastnet", system=system, device="gpu", **long)]
    """,
        ),
    )
    assert "2 x" in study.said
    good, bad = study.rows()
    folder = study.runs_dir / "two-nodes" / good["run_id"]
    if json.loads((folder / "job" / "parameters.json").read_text())["device"] == "gpu":
        good, bad, folder = bad, good, folder.with_name(bad["run_id"])
    cluster.wait_for(lambda: any(event["event"] == "epoch" for event in read_events(folder)), "the good run")
    cluster.run("scontrol", "requeue", good["job"])
    state = lambda run: study.row(run["run_id"])  # noqa: E731
    cluster.wait_for(lambda: state(bad)["state"] == "failed", "three failures")
    assert "3 starts in a row" in state(bad)["reason"] and "GPUs asked for" in state(bad)["reason"]
    cluster.wait_for(lambda: state(good)["state"] == "finished", "the requeued run")
    assert len(records.read(folder)["segments"]) == 2 and records.check(study.runs_dir) == []
    assert len(list(folder.glob("job/start-*.json"))) == 2  # the other run's three starts were not the whole array's
    nothing_is_left(study.runs_dir)


def test_a_system_is_proved_and_what_is_wrong_is_said(cluster, tmp_path):
    """Without --mpi=pmi2 srun makes as many worlds of one rank as there are ranks, and no error.

    Without --exclusive the run is made, and its energy may be that of other jobs, too.
    """
    path = tmp_path / "mine.toml"

    def prove(old, new):
        path.write_text((REPOSITORY / SYSTEM).read_text().replace(old, new))
        return cluster.energynn("doctor", "--system", path, check=False)

    done = prove("", "")
    assert done.returncode == 0 and "mine.toml says" in done.stdout, done.stdout
    done = prove("--mpi=pmi2", "--mpi=none")
    assert done.returncode == 1 and "WRONG" in done.stdout and "--mpi=pmi2" in done.stdout
    done = prove('"--exclusive"', '"--oversubscribe"')
    assert done.returncode == 1 and "other jobs could use its nodes" in " ".join(done.stdout.split())
    done = prove('"--exclusive"', '"--partition=no-such"')
    assert done.returncode == 2 and "invalid partition" in done.stderr and done.stderr.count("\n") == 1


def test_a_batch_script_of_ones_own_leaves_the_same_facts(cluster, tmp_path):
    """The guide's script, with names of this cluster and at a pace."""
    text = (REPOSITORY / "docs/cluster.md").read_text().split("## A batch script of your own\n")[1].split("\n## ")[0]
    script = textwrap.dedent("".join(line + "\n" for line in text.splitlines() if line.startswith("    ")))
    small = "-p workload fourcastnet -p embed_dim 32 -p depth 1 -p epochs 15 -p step_period_s 0.1"
    for old, new in (
        (".venv/bin/papermill", f"{sys.executable} -m papermill"),
        (" run.ipynb ", f" {tmp_path / 'run.ipynb'} -p runs_dir {tmp_path / 'runs'} {small} "),
        ("my_cluster", "two-nodes"),
    ):
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "mine.sh").write_text(script)
    cluster.run("sbatch", "--wait", f"--output={tmp_path}/log.txt", f"--chdir={REPOSITORY}", tmp_path / "mine.sh")
    (path,) = tmp_path.glob("runs/two-nodes/*/record.json")
    record = records.read(path.parent)
    assert record["valid"] and record["launcher"] == "srun" and record["nodes"] == 2, record["invalid_reasons"]
    assert {"job_id", "job_nodelist", "job_partition", "is_exclusive"} <= record["job"].keys()
    assert records.check(tmp_path / "runs") == []


def test_a_line_of_shell_brings_the_data_to_both_nodes(cluster, tmp_path):
    """The batch script of a run, with a program in place of the run."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "2015.npy").write_text("temperature")
    cluster.run("tar", "-C", tmp_path / "data", "-cf", tmp_path / "data.tar", "2015.npy")
    there = f"{tmp_path}/$SLURMD_NODENAME"
    unpack = f"mkdir {there} && tar -xf {tmp_path}/data.tar -C {there}"
    lines = [f"srun -n 2 --ntasks-per-node=1 sh -c '{unpack}'", f"export ENERGYNN_ERA5={there}"]
    site = dataclasses.replace(systems.site(SYSTEM), setup=lines)
    folder = tmp_path / "runs" / "run"
    (folder / "job").mkdir(parents=True)
    text = submit.script(submit.Job({folder: config.make("fourcastnet", devices=2)}, 2, 10), site, "mine")
    program = "import os; print('data in', os.listdir(os.environ['ENERGYNN_ERA5']))"
    (folder / "job" / "job.sh").write_text(text.replace("-m energynn.cluster.job", f'-c "{program}"'))
    cluster.run("sbatch", "--wait", folder / "job" / "job.sh")
    assert "data in ['2015.npy']" in (folder / "job" / "log.txt").read_text()
    assert all((tmp_path / node / "2015.npy").read_text() == "temperature" for node in ("n1", "n2"))


def test_a_job_that_is_suspended_while_it_trains_is_called_so_and_is_no_evidence(cluster, tmp_path):
    run = Study(cluster, tmp_path, long_run(tmp_path))
    cluster.wait_for(run.is_training, "the run")
    (row,) = run.rows()
    cluster.run("scontrol", "suspend", row["job"])
    assert run.rows()[0]["state"] == "suspended"
    time.sleep(10)
    cluster.run("scontrol", "resume", row["job"])
    run.wait("finished")
    record = records.read(run.folder())
    assert not record["valid"] and len(record["segments"]) == 1 and record["coverage"] < 0.99
