"""Submit the missing runs of studies as job arrays."""

import contextlib
import math
import re
import shlex
import string
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from energynn import records
from energynn.data import manifests
from energynn.experiment import config as configuration
from energynn.experiment import systems
from energynn.experiment.config import RunConfig
from energynn.experiment.systems import Site
from energynn.forecast import costs
from energynn.host.files import REPOSITORY, lock, utc_time_text, write_json
from energynn.host.launchers import PYTHON_VARIABLE, SRUN_VARIABLE
from energynn.host.processes import own_environment
from energynn.host.progress import print_lines
from energynn.host.reading import join_faults
from energynn.launch import slurm, status

LIMIT_MARGIN = 1.3  # of the time limit over the high end of the forecast
SPARE_H = 0.5
WARNING_TIME_S = 300  # before the time limit: for a step, a checkpoint and the record
# of this environment, exported in the script
FORWARDED_VARIABLES = (
    "PYTHONPATH",
    "ENERGYNN_IMAGENET",
    "ENERGYNN_ERA5",
    "ENERGYNN_POWERCAP",
)


class JobArray(NamedTuple):
    """A job array: configurations by folder of runs that need the same nodes and time.

    after: folder of the run that has to end well first.
    """

    runs: dict[Path, RunConfig]
    minutes: int
    after: Path | None = None


class JobScriptTemplate(string.Template):
    """The template energynn/launch/job.sh, in which @name stands for a value: $ is the shell's."""

    delimiter = "@"


def submit_runs(
    runs: list[RunConfig],
    name: str,
    site: Site,
    runs_dir: Path,
    dry_run: bool = False,
    scripts: bool = False,
    max_gpu_hours: float | None = None,
    labels: dict | None = None,
) -> None:
    """Submit the runs that are neither finished nor queued.

    name: of the jobs. dry_run: only show their expected cost and what is missing; scripts: the
    same, and print the batch scripts. labels: name and note of every run. Raises ValueError with
    the remedy, also where the jobs are expected to cost more than ``max_gpu_hours`` (default: the
    system's).
    """
    if others := {run.system for run in runs} - {site.name}:
        raise ValueError(
            f"system: runs of {min(others)} are not made on {site.name}; in a study of your own "
            "hand `system` on to config.make"
        )
    runs, left_out = systems.select_runs_that_fit(site, runs)
    if left_out:
        print_lines(left_out)
    system_dir = runs_dir.absolute() / site.name
    jobs = plan_jobs(runs, site, system_dir, _queued_folders(system_dir))
    missing = [run for job in jobs for run in job.runs.values()]
    print_lines(
        f"{len(runs) - len(missing)} of {len(runs)} runs are made or queued; "
        f"{len(missing)} to make{', which alone are named' if labels else ''}"
    )
    faults = _missing_datasets(missing, site)
    hours = 0.0
    for run in missing:  # of whole nodes; of an unknown cost the system's default
        by_default = (
            site.nodes_of(run.devices) * site.devices_per_node * site.default_hours
        )
        hours += costs.expected_cost(run, site.file).get("charged hours", by_default)
    limit = site.max_gpu_hours if max_gpu_hours is None else max_gpu_hours
    if not hours <= limit:  # nor is nan one
        faults.append(
            f"--max-gpu-hours {math.ceil(hours)}: the jobs may be charged more than {limit:g} "
            "GPU hours (of an unknown cost one job of default_hours counts; a run may need more)"
        )
    if jobs:
        print_lines(costs.cost_text(costs.cost_table(missing, site)))
    if dry_run or scripts:
        _show_dry_run(site, faults)
        if scripts:
            for job in jobs:
                print(render_job_script(job, site, name))
        print_lines("nothing is submitted; --scripts prints the batch scripts")
        return
    if faults:
        raise ValueError("; ".join(faults))
    system_dir.mkdir(parents=True, exist_ok=True)
    with lock(system_dir / ".submit.lock") or contextlib.nullcontext() as file:
        queued = _queued_folders(system_dir)
        if file is None or any(queued & job.runs.keys() for job in jobs):
            raise ValueError("submit: another one queues these runs; submit again")
        for job in jobs:
            submit_job_array(job, site, name, labels)


def _queued_folders(system_dir: Path) -> set[Path]:
    """Find the folders of runs that go on, or whose job is queued."""
    jobs = {
        folder: status.read_submission(folder).job_id
        for folder in system_dir.glob("*/")
    }
    queue = slurm.read_queue(any(jobs.values()))
    return {
        folder
        for folder, job in jobs.items()
        if job in queue or records.is_run_locked(folder)
    }


def _show_dry_run(site: Site, faults: list[str]) -> None:
    """Say what a submission would take from elsewhere, and what it lacks."""
    if kept := slurm.list_kept_options():
        print_lines(
            f"from your environment, where the script has none: {', '.join(kept)}"
        )
    if not site.nodes:
        print_lines(
            "a job on more nodes than the cluster has stays queued for ever: write nodes = N, "
            f"in {site.file}"
        )
    if not re.search("'(-A|--account|SBATCH_ACCOUNT)", f"{site.sbatch} {kept}"):
        print_lines("no --account NAME: sbatch takes your default")
    for fault in faults:
        print_lines(f"missing: {fault}")


def read_cluster(system: str, options: list[str] = ()) -> Site:
    """Read a cluster, with further options of sbatch; raises ValueError with the remedy."""
    site = systems.read_site(system)
    if site.scheduler != "slurm":
        raise ValueError(
            f"system: {site.name} is no cluster; `energynn study run NAME` works here"
        )
    return msgspec.convert(
        msgspec.structs.asdict(site) | {"sbatch": [*site.sbatch, *options]}, Site
    )


def _missing_datasets(runs: list[RunConfig], site: Site) -> list[str]:
    """List the data sets that are missing; those that the set-up brings are not looked for."""
    faults = []
    for dataset in sorted({run.dataset for run in runs}):
        variable = manifests.FOLDER_VARIABLES.get(dataset)  # None: it ships with us
        with join_faults(dataset, faults):
            if variable and variable not in f"{site.setup} {site.environment}":
                folder = manifests.root(dataset)
                if not folder.is_dir():
                    raise ValueError(f"{variable}: {folder} is no folder")
            manifests.read_checksums(dataset)
    return faults


def plan_jobs(
    runs: list[RunConfig],
    site: Site,
    system_dir: Path,
    queued: set[Path],
) -> list[JobArray]:
    """Group the missing runs into job arrays; fine-tuning comes after its pre-training.

    Raises ValueError where a pre-training is neither made, nor queued, nor among the runs.
    """
    missing = {}
    for run in runs:
        folder = system_dir / configuration.run_id(run)
        if folder not in queued and not records.has_valid_record(folder):
            missing[folder] = run
    jobs = {}
    for folder, run in missing.items():
        initial = getattr(run, "initial_run", "")
        after = system_dir / initial if initial else None
        if after and records.has_valid_record(after):
            after = None
        if after and after not in missing and after not in queued:
            raise ValueError(
                f"initial_run: {initial} is not made yet; submit its study as well"
            )
        cost = costs.expected_cost(run, site.file)
        limit_h = site.default_hours
        if cost:
            limit_h = LIMIT_MARGIN * cost["longest_h"] + SPARE_H
        # A longer run leaves a checkpoint, and its task is queued again.
        limit = math.ceil(60 * min(limit_h, site.max_hours))
        job = jobs.setdefault((after, run.devices, limit), JobArray({}, limit, after))
        job.runs[folder] = run
    return sorted(jobs.values(), key=lambda job: job.after is not None)


def render_job_script(
    job: JobArray,
    site: Site,
    name: str,
) -> str:
    """Render the batch script of a job array; every value in it is quoted for the shell.

    Raises ValueError for a text that no script should hold.
    """
    folders = list(job.runs)
    run = job.runs[folders[0]]
    nodes = site.nodes_of(run.devices)
    at_once = f"%{site.runs_at_once}" if site.runs_at_once else ""
    values = {
        "name": re.sub("[^A-Za-z0-9_.-]", "-", f"{name}-{nodes}n"),
        "nodes": nodes,
        "devices": run.devices,
        "devices_of_node": min(run.devices, site.devices_per_node),
        "time": f"{job.minutes // 60}:{job.minutes % 60:02}:00",
        "array": f"0-{len(folders) - 1}{at_once}",
        "warning_s": min(WARNING_TIME_S, 5 * job.minutes),
        # Slurm takes % for the begin of a name
        "log": quote_for_shell(
            f"{folders[0]}/job/slurm-".replace("%", "%%") + "%A_%a.txt"
        ),
        "options": "\n".join(f"#SBATCH {option}" for option in site.sbatch),
        "runs": "\n".join(f"  {quote_for_shell(folder)}" for folder in folders),
        "setup": "\n".join(_setup_lines(site)),
        "repository": quote_for_shell(REPOSITORY),
        "python": quote_for_shell(sys.executable),
    }
    return JobScriptTemplate((Path(__file__).parent / "job.sh").read_text()).substitute(
        values
    )


def _setup_lines(site: Site) -> Iterator[str]:
    """Write the lines that prepare a job: environment, then set-up, which may end the job."""
    ours = own_environment()
    environment = {name: ours[name] for name in FORWARDED_VARIABLES if ours.get(name)}
    if site.srun is not None:
        environment[SRUN_VARIABLE] = shlex.join(" ".join(site.srun).split())
    if site.python:
        environment[PYTHON_VARIABLE] = site.python
    for name, value in (environment | site.environment).items():
        yield f"export {name}={quote_for_shell(value)}"
    for command in site.setup:  # last, so that it can say where it has brought the data
        yield command
        said = quote_for_shell(status.SETUP_FAULT_TEXT + " ".join(command.split()))
        # in a line of its own, as a comment may end the command
        yield f"[ $? = 0 ] || {{ echo {said}; exit 1; }}"


def quote_for_shell(value: str | Path) -> str:
    """Quote a value as one word for the shell; raises ValueError for what cannot be printed."""
    if not str(value).isprintable():
        raise ValueError(
            f"{str(value)!r}: has characters that cannot be printed; leave them out"
        )
    return shlex.quote(str(value))


def submit_job_array(
    job: JobArray,
    site: Site,
    name: str,
    labels: dict | None = None,
) -> None:
    """Submit a job, write beside each run how, and say so.

    Raises ValueError where Slurm refuses it.
    """
    folders = list(job.runs)
    submission = status.JobSubmission(utc_time_text())
    text = render_job_script(job, site, name)
    for folder, run in job.runs.items():  # all before the job, which may start at once
        parameters = configuration.asdict(run) | (labels or {})
        write_json(folder / "job" / "parameters.json", parameters)
        (folder / "job" / "job.sh").write_text(text)
        status.write_job_file(folder, "submission", submission)
    options = []
    if job.after:
        waits_for = status.read_submission(job.after).job_id
        if not waits_for:
            raise ValueError(
                f"initial_run: {job.after.name} is being made without a job; submit again when it "
                "has ended"
            )
        options = [f"--dependency=afterok:{waits_for}", "--kill-on-invalid-dep=yes"]
    number = slurm.submit_script(folders[0] / "job" / "job.sh", *options)
    for task, folder in enumerate(folders):
        submission.job_id = f"{number}_{task}"
        status.write_job_file(folder, "submission", submission)
    print_lines(f"job {number}: {len(folders)} run(s), the first {folders[0].name}")


def cancel_jobs(folders: list[Path]) -> int:
    """Cancel the jobs of runs; returns how many. What is running can leave a checkpoint."""
    jobs = {status.read_submission(folder).job_id for folder in folders}
    queued = sorted(jobs & slurm.read_queue(any(jobs)).keys())
    if queued:
        slurm.call_slurm("scancel", *queued)
    return len(queued)


def check_system(system: str) -> int:
    """Test a system's file by a short run on two nodes; returns 1 where it is wrong."""
    site = read_cluster(system)
    devices = 2 * site.devices_per_node
    run = configuration.make(
        "resnet50",
        system=site.name,
        devices=devices,
        local_batch_size=2,
        epochs=4,  # of one step each: eight seconds
        training_samples=2 * devices,
        validation_samples=devices,
        step_period_s=2.0,
    )
    runs_dir = REPOSITORY / "build" / "system-check" / str(time.time_ns())
    folder = configuration.folder(run, runs_dir)
    submit_job_array(JobArray({folder: run}, 10), site, "doctor")
    told = ""
    while True:
        (row,), _ = status.describe_runs([folder])
        if row["state"] not in status.UNFINISHED_RUN_STATES:
            break
        before = told
        told = f"{row['state']} {row['reason']}"
        if told != before:
            print_lines(told)
        time.sleep(status.POLL_PERIOD_S)
    print_lines(status.status_text([row], []))
    record = records.read_record_if_any(folder)
    expected = dict(valid=True, nodes=2, sockets=2 * site.sockets_per_node)
    wrong = []
    for name, right in expected.items():
        value = getattr(record, name, None)
        if value != right:
            wrong.append(f"{name} is {value}, not {right}")
            if name == "sockets" and value:
                wrong.append(f"write sockets_per_node = {value // 2} in {site.file}")
    if not wrong:
        print_lines(f"the test run passed: it is as {site.file} says")
        return 0
    wrong += [row["reason"], f"its log: {folder / 'job' / 'log.txt'}"]
    print_lines(f"WRONG: {'; '.join(filter(None, wrong))}")
    return 1
