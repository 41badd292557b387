"""Submit the missing runs of studies as job arrays."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shlex
import string
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from energynn import config as configuration
from energynn import files, records, studies
from energynn.cluster import costs, slurm, status, systems
from energynn.cluster.job import SUBMISSION_VARIABLE
from energynn.cluster.local import NOTEBOOK
from energynn.cluster.status import Submission
from energynn.cluster.systems import Site
from energynn.config import RunConfig
from energynn.files import PACKAGE, REPOSITORY
from energynn.launchers import PYTHON_VARIABLE, SRUN_VARIABLE
from energynn.progress import tell

MARGIN, SPARE_MINUTES = 1.3, 30  # of the wall time over what is expected
WARNING_S = 300  # before the time limit: for a step, a checkpoint and the record
MOST_TASKS = 1000  # of a job array, as Slurm allows by default
GIVEN = ("ENERGYNN_IMAGENET", "ENERGYNN_ERA5", "ENERGYNN_POWERCAP")  # written into the script


@dataclass(frozen=True)
class Job:
    """One job array: runs that need the same nodes and time; ``after``: the run that has to end well first."""

    runs: tuple[RunConfig, ...]
    nodes: int
    minutes: int
    after: str = ""


class JobScript(string.Template):
    """The template energynn/cluster/job.sh, in which @name stands for a value: $ is the shell's."""

    delimiter = "@"


def submit_studies(
    names: list[str],
    system: str,
    runs_dir: Path,
    dry_run: bool = False,
    max_gpu_hours: float | None = None,
    minutes: int | None = None,
    options: list[str] = (),
) -> int:
    """Submit the runs of studies that have no valid record and are not queued; returns the exit status.

    minutes: time limit of each job. options: of sbatch. Raises ValueError with the remedy, also where the jobs may
    cost more than ``max_gpu_hours`` (default: the system's).
    """
    site = _cluster(system)
    systems.require_options(options)
    runs_dir = runs_dir.absolute()
    by_study = studies.find(names, site.name)
    title = re.sub(r"[^\w.-]", "_", "+".join(by_study))[:40]
    runs = list(dict.fromkeys(itertools.chain(*by_study.values())))
    with contextlib.ExitStack() as stack:
        if not dry_run:
            stack.enter_context(_lock(runs_dir / site.name))
        queued = _queued_runs(runs, runs_dir / site.name, dry_run)
        jobs = plan(runs, site, runs_dir, queued, minutes)
        missing = sum(len(job.runs) for job in jobs)
        expected = costs.total([costs.expect(run, site.gpu) for job in jobs for run in job.runs])
        hours = sum(_gpu_hours(job, site) for job in jobs)
        tell(f"{len(runs) - missing} of {len(runs)} runs are made or queued; {missing} to make")
        if jobs:
            tell(f"expected: {expected}; {hours:,.1f} GPU hours of whole nodes")
        if dry_run:
            for job in jobs:
                print(f"\n{script(job, site, runs_dir, title, options=options)}")
            return 0
        limit = site.max_gpu_hours if max_gpu_hours is None else max_gpu_hours
        if hours > limit:
            raise ValueError(f"more than {limit:g} GPU hours; give --max-gpu-hours {math.ceil(hours)}")
        for line in submit(jobs, site, runs_dir, title, options):
            print(line, flush=True)
    return 0


def _cluster(system: str) -> Site:
    site = systems.site(system)
    if site.scheduler != "slurm":
        raise ValueError(f"system: {site.name} is no cluster; `energynn study run NAME` works here")
    return site


def _lock(system_dir: Path):
    """Hold the system's submissions: two at a time would make every run twice."""
    system_dir.mkdir(parents=True, exist_ok=True)
    held = files.lock(system_dir / ".submit")
    if held is None:
        raise ValueError(f"{system_dir}: another `energynn submit` is running; wait until it has ended")
    return contextlib.closing(held)


def _queued_runs(runs: list[RunConfig], system_dir: Path, may_fail: bool) -> set[str]:
    """Name the runs that are running, or whose jobs are queued."""
    needed = {configuration.run_id(run) for run in runs}
    needed |= {getattr(run, "initial_run", "") for run in runs} - {""}
    jobs = {name: status.read_submission(system_dir / name).job_id for name in needed}
    try:
        queue = slurm.queue(jobs.values())
    except ValueError as error:
        if not may_fail:
            raise
        tell(f"energynn: what is queued is unknown: {error}")
        queue = {}
    return {name for name in needed if jobs[name] in queue or records.is_running(system_dir / name)}


def plan(
    runs: list[RunConfig], site: Site, runs_dir: Path, queued: set[str], minutes: int | None = None
) -> list[Job]:
    """Group the missing runs into job arrays; fine-tuning comes after its pre-training.

    Raises ValueError where a pre-training is neither made, nor queued, nor among the runs.
    """
    system_dir = runs_dir / site.name
    names = {configuration.run_id(run): run for run in runs}
    missing = [name for name in names if name not in queued and not records.is_made(system_dir / name)]
    groups: dict[tuple, list[RunConfig]] = {}
    for name in missing:
        run = names[name]
        before = getattr(run, "initial_run", "")
        if before and before not in missing and before not in queued:
            if not records.is_made(system_dir / before):
                raise ValueError(f"initial_run: {before} is not made yet; submit its study as well")
            before = ""
        nodes = math.ceil(run.devices / site.devices_per_node)
        key = (before, nodes, run.devices, minutes or _minutes(run, site))
        groups.setdefault(key, []).append(run)
    jobs = []
    for (before, nodes, _, limit), group in sorted(groups.items(), key=lambda item: item[0][0] != ""):
        for begin in range(0, len(group), MOST_TASKS):
            jobs.append(Job(tuple(group[begin : begin + MOST_TASKS]), nodes, limit, before))
    return jobs


def _minutes(run: RunConfig, site: Site) -> int:
    """Choose a time limit; a run that needs more continues in a next job."""
    hours = costs.expect(run, site.gpu).gpu_hours / run.devices
    hours = MARGIN * hours + SPARE_MINUTES / 60 if hours else site.default_hours
    return math.ceil(60 * min(hours, site.max_hours))


def _gpu_hours(job: Job, site: Site) -> float:
    """Expect the hours of whole nodes; without a published run up to the time limit."""
    total = 0.0
    for run in job.runs:
        hours = costs.expect(run, site.gpu).gpu_hours / run.devices or job.minutes / 60
        total += job.nodes * site.devices_per_node * hours
    return total


def script(
    job: Job, site: Site, runs_dir: Path, name: str, submitted_at: str = "", options: list[str] = ()
) -> str:
    """Render the batch script of a job array; every value in it is quoted for the shell.

    Raises ValueError for a text that no script should hold.
    """
    folders = _folders(job, site, runs_dir)
    devices = job.runs[0].devices
    at_once = f"%{site.runs_at_once}" if site.runs_at_once else ""
    values = {
        "name": name,
        "nodes": job.nodes,
        "devices": devices,
        "devices_of_node": min(devices, site.devices_per_node),
        "minutes": job.minutes,
        "array": f"0-{len(job.runs) - 1}{at_once}",
        "warning_s": min(WARNING_S, 5 * job.minutes),
        "log_folder": folders[0] / "job",
        "options": "\n".join(f"#SBATCH {option}" for option in [*site.sbatch, *options]),
        "runs": "\n".join(f"  {quote(folder)}" for folder in folders),
        "setup": "\n".join(_setup(site, submitted_at)),
        "repository": quote(REPOSITORY),
        "python": quote(sys.executable),
        "notebook": quote(NOTEBOOK),
    }
    return JobScript((Path(__file__).parent / "job.sh").read_text()).substitute(values)


def _setup(site: Site, submitted_at: str) -> Iterator[str]:
    """Write the lines that prepare a job: modules, set-up, environment, data."""
    if site.modules:
        yield "source /etc/profile"
        yield f"module load {' '.join(map(quote, site.modules))} || exit"
    modules = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    environment = {"PYTHONPATH": ":".join([str(PACKAGE.parent), *modules])}
    environment |= {name: os.environ[name] for name in GIVEN if os.environ.get(name)}
    environment[SUBMISSION_VARIABLE] = submitted_at
    if site.srun is not None:
        environment[SRUN_VARIABLE] = shlex.join(" ".join(site.srun).split())
    if site.python:
        environment[PYTHON_VARIABLE] = site.python
    for line in site.setup:
        yield _or_fail(line)
    for name, value in (environment | site.environment).items():
        yield f"export {name}={quote(value)}"
    if site.stage_in:
        yield _or_fail(site.stage_in)


def _or_fail(line: str) -> str:
    """End the job where a line of shell fails, and say which."""
    return f"{line} || {{ echo {quote('energynn: failed: ' + line)}; exit 1; }}"


def quote(value: str | Path) -> str:
    """Quote a value as one word for the shell; raises ValueError for what cannot be printed."""
    if not str(value).isprintable():
        raise ValueError(f"{str(value)!r}: has characters that cannot be printed; rename it")
    return shlex.quote(str(value))


def _folders(job: Job, site: Site, runs_dir: Path) -> list[Path]:
    return [runs_dir / site.name / configuration.run_id(run) for run in job.runs]


def submit(
    jobs: list[Job], site: Site, runs_dir: Path, title: str, options: list[str] = ()
) -> Iterator[str]:
    """Submit the jobs, and write beside each run how; yields a line for each job.

    Raises ValueError where Slurm refuses one; those before it stay.
    """
    if not re.fullmatch(r"[\w./ +=,@:-]+", str(runs_dir)):  # Slurm itself reads % and quotes in it
        raise ValueError(f"runs_dir: {str(runs_dir)!r} has characters that Slurm cannot hold")
    submitted_at, job_ids = files.utc_now(), {}
    for index, job in enumerate(jobs):
        configuration.checksum_file(job.runs[0].dataset)  # without it the run could not be made
        folders = _folders(job, site, runs_dir)
        name = f"energynn-{title}-{re.sub(r'[^0-9]', '', submitted_at)}-{index}"
        text = script(job, site, runs_dir, name, submitted_at, options)
        waits_for = job_ids.get(job.after) or status.read_submission(runs_dir / site.name / job.after).job_id
        after = [f"--dependency=afterok:{waits_for}", "--kill-on-invalid-dep=yes"] if job.after else []
        for folder, run in zip(folders, job.runs, strict=True):
            _prepare(folder, run, text, Submission(submitted_at, after=job.after))
        number = _hand_in(folders, name, after)
        for task, folder in enumerate(folders):
            job_ids[folder.name] = f"{number}_{task}"
            status.write_submission(folder, Submission(submitted_at, job_ids[folder.name], job.after))
        yield f"job {number}: {len(job.runs)} x {folders[0].name}{f', after {waits_for}' if after else ''}"


def _prepare(folder: Path, run: RunConfig, text: str, submission: Submission) -> None:
    """Write what a job reads, before it can start."""
    (folder / "job").mkdir(parents=True, exist_ok=True)
    (folder / "job" / "job.sh").write_text(text)
    parameters = configuration.to_dict(run) | {"runs_dir": str(folder.parent.parent)}
    files.write_json(folder / "job" / "parameters.json", parameters)
    status.write_submission(folder, submission)


def _hand_in(folders: list[Path], name: str, options: list[str]) -> str:
    """Call sbatch; returns the job's number. Where it does not answer, look once for the job's name."""
    try:
        return slurm.submit(folders[0] / "job" / "job.sh", *options)
    except slurm.NoAnswer:
        if number := slurm.find(name):
            return number
        raise ValueError("sbatch: did not answer; see `squeue --me`, then submit again") from None
    except ValueError:
        for folder in folders:
            (folder / "job" / "submission.json").unlink()
        raise


def cancel(folders: list[Path]) -> int:
    """Cancel the jobs of runs; returns how many. What is running leaves a checkpoint if it is given the time."""
    jobs = slurm.queue(status.read_submission(folder).job_id for folder in folders)
    of_folders = {status.read_submission(folder).job_id for folder in folders}
    if ours := sorted(of_folders & jobs.keys()):
        slurm.cancel(ours)
    return len(ours)


def check(system: str) -> int:
    """Prove a system's file by a short measured run on two nodes; returns 1 where the file is wrong."""
    site = _cluster(system)
    runs_dir = REPOSITORY / "build" / "system-check" / str(time.time_ns())
    devices = 2 * site.devices_per_node
    small = dict(embed_dim=32, depth=1, epochs=40, step_period_s=0.015 * devices)  # takes twelve seconds
    probe = configuration.make("fourcastnet", system=site.name, devices=devices, **small)
    for line in submit([Job((probe,), 2, 10)], site, runs_dir, "check"):
        print(line, flush=True)
    folder = runs_dir / site.name / configuration.run_id(probe)
    shown = ""
    while True:
        rows, notes = status.rows([folder])
        text = status.text(rows, notes)
        if text != shown:
            print(text, flush=True)
        if not status.is_pending(rows[0]):
            break
        shown = text
        time.sleep(2)
    record = records.read(folder) or {}
    wrong = [f"the run is {rows[0]['state']}"] if rows[0]["state"] != "finished" else []
    expected = {"nodes": 2, "sockets": 2 * site.sockets_per_node, "device_kind": "gpu", "launcher": "srun"}
    if not any("gpu" in option for option in site.sbatch):
        expected["device_kind"] = "cpu core"
    wrong += [f"{name}: {record.get(name)} instead of {n}" for name, n in expected.items() if record.get(name) != n]
    if record.get("device_kind") == "gpu" and site.gpu not in record["device_name"]:
        wrong.append(f"gpu: {record['device_name']} instead of {site.gpu}")
    print("\n".join(f"WRONG: {line}" for line in wrong) or f"as {Path(site.file).name} says")
    return 1 if wrong else 0
