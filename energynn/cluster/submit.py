"""`energynn submit`: which runs of a study are missing, what they will cost, and the jobs that make them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import getpass
import itertools
import math
import os
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from energynn import config as configuration
from energynn import files, records, studies
from energynn.cluster import costs, slurm, status, systems
from energynn.cluster.status import SUBMISSION
from energynn.cluster.systems import Site
from energynn.config import RunConfig
from energynn.data import manifests
from energynn.files import PACKAGE, REPOSITORY
from energynn.launchers import PYTHON_VARIABLE
from energynn.measure.energy import SECOND_PER_HOUR
from energynn.progress import tell
from energynn.reading import json_table, one_fault

MARGIN, SPARE_MINUTES = 1.3, 30  # of the wall time over what is expected; a run that needs more goes on in a next job
WARNING_S = 300  # before the time limit; long enough for a step, a checkpoint and the record
GIVEN = ("ENERGYNN_IMAGENET", "ENERGYNN_ERA5", "ENERGYNN_POWERCAP")  # written into the script
ARCHIVE = re.compile(r"\.tar(\.gz|\.zst|\.xz)?$")


@dataclass(frozen=True)
class Job:
    """One job array: runs that need the same nodes, time and data; ``after``: the job that has to end well first."""

    runs: tuple[RunConfig, ...]
    nodes: int
    minutes: int
    after: str = ""

    @property
    def devices(self) -> int:
        return self.runs[0].devices


def plan(runs: list[RunConfig], site: Site, runs_dir: Path, queued: set[str], minutes: int | None = None) -> list[Job]:
    """Jobs for the runs that have no valid record and are not queued; fine-tuning comes after its pre-training.

    Raises ValueError with the remedy where a pre-training is neither made, nor queued, nor among the runs, and for
    ``minutes``, the time limit of each job, below one.
    """
    if minutes is not None and minutes < 1:
        raise ValueError(f"minutes: must be at least 1, got {minutes}")
    names, system_dir = {configuration.run_id(run): run for run in runs}, runs_dir / site.name
    missing = [name for name in names if name not in queued and not records.is_made(system_dir / name)]
    groups: dict[tuple, list[RunConfig]] = {}
    learnt = _learnt_hours(names, system_dir)
    for name in missing:
        run = names[name]
        before = getattr(run, "initial_run", "")
        if before and before not in missing and before not in queued:
            if not records.is_made(system_dir / before):
                raise ValueError(f"initial_run: {before} is not made yet; submit its study as well, or first")
            before = ""
        hours = _hours(run, system_dir, learnt) or costs.expect(run, site.gpu).gpu_hours / run.devices
        hours = MARGIN * hours + SPARE_MINUTES / 60 if hours else site.default_hours
        limit = minutes or math.ceil(60 * min(hours, site.max_hours))
        nodes = math.ceil(run.devices / site.devices_per_node)
        groups.setdefault((before, nodes, run.devices, limit, run.dataset), []).append(run)
    jobs = [Job(tuple(group), nodes, limit, before) for (before, nodes, _, limit, _), group in groups.items()]
    return sorted(jobs, key=lambda job: job.after != "")


def _learnt_hours(runs: dict[str, RunConfig], system_dir: Path) -> dict[RunConfig, float]:
    """Hours of a training as its finished epochs here tell, by configuration without repeat and seed; the longest."""
    learnt: dict[RunConfig, float] = {}
    for name, run in runs.items():
        record = records.read(system_dir / name) or {}
        if epochs := len(record.get("history", [])):
            hours = record["training_time_s"] / epochs * run.epochs / SECOND_PER_HOUR
            kind = configuration.replace(run, repeat=0, seed=0)
            learnt[kind] = max(hours, learnt.get(kind, 0.0))
    return learnt


def _hours(run: RunConfig, system_dir: Path, learnt: dict[RunConfig, float]) -> float:
    """Hours that a run still needs, by its own epochs and those of its repeats; 0 where none has finished one."""
    record = records.read(system_dir / configuration.run_id(run)) or {}
    done = len(record.get("history", [])) / run.epochs
    return (1 - done) * learnt.get(configuration.replace(run, repeat=0, seed=0), 0.0)


def queued_runs(runs_dir: Path, site: Site) -> set[str]:
    """Names of the runs of a system that go on, or whose jobs are queued or run."""
    folders = [path for path in (runs_dir / site.name).glob("*") if status.is_run(path)]
    status.confirm({folder: status.submission(folder) for folder in folders})
    queue = slurm.queue(map(job_of, folders))
    return {folder.name for folder in folders if job_of(folder) in queue or records.is_running(folder)}


def runs_of_others(runs_dir: Path, site: Site) -> dict[str, str]:
    """Who has submitted the runs of a system that one has not submitted oneself."""
    users = {}
    for path in (runs_dir / site.name).glob("*/job/submission.json"):
        submitted = status.submission(path.parent.parent)
        if not status.is_ours(submitted):
            users[path.parent.parent.name] = submitted["user"]
    return users


def script(job: Job, site: Site, runs_dir: Path, names: list[str], facts: dict | None = None) -> str:
    """The batch script of a job array; every value in it is quoted for the shell or has a form that needs no quotes.

    ``facts``: what is written beside each run of it; without them the script is only shown.
    """
    facts = facts or _facts(job, site, names)
    folders = _folders(job, site, runs_dir)
    own_modules = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    given = {"PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *own_modules])}
    given |= {name: os.environ[name] for name in GIVEN if os.environ.get(name)}
    given |= site.limits() | {SUBMISSION: facts["submitted_at"]}
    if site.srun is not None:
        given["ENERGYNN_SRUN"] = shlex.join(" ".join(site.srun).split())
    if site.python:
        given[PYTHON_VARIABLE] = site.python
    setup = [f"export {name}={quote(value)}" for name, value in (given | site.environment).items()]
    first = [f"{line} || {{ echo {quote(status.SET_UP_FAILED + line)}; exit 1; }}" for line in site.setup]
    if site.modules:
        first = ["source /etc/profile", f"module load {' '.join(site.modules)} || exit", *first]
    values = {
        "options": "\n".join(_directives(job, site, folders[0], names, facts)),
        "runs": "\n".join(f"  {quote(folder)}" for folder in folders),
        "setup": "\n".join([*first, *setup]),
        "repository": quote(REPOSITORY),
        "python": quote(sys.executable),
    }
    text = (Path(__file__).parent / "job.sh").read_text()
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], text)


def _folders(job: Job, site: Site, runs_dir: Path) -> list[Path]:
    return [runs_dir / site.name / configuration.run_id(run) for run in job.runs]


def _directives(job: Job, site: Site, folder: Path, names: list[str], facts: dict) -> list[str]:
    """What the scheduler is told in the first lines of a script whose log lies in the first run's folder."""
    title = re.sub(r"[^\w.-]", "_", "+".join(names))[:40]
    needs = {
        "title": f"energynn-{title}",
        "nodes": job.nodes,
        "devices": job.devices,
        "per_node": min(job.devices, site.devices_per_node),
        "minutes": job.minutes,
        "tasks": len(job.runs),
        "warning_s": min(WARNING_S, 5 * job.minutes),
        "comment": facts["comment"],
        "log_folder": folder / "job",
        "options": facts["options"],
    }
    return slurm.directives(needs, site)


def _stage_in(job: Job, site: Site) -> dict[str, str]:
    """What a job unpacks to node-local storage before its run begins; empty where the data are no tar file."""
    name = manifests.VARIABLES.get(job.runs[0].dataset, "")
    archive = os.environ.get(name, "")
    if not ARCHIVE.search(archive):
        return {}
    if not site.stage_to:
        raise ValueError(f"{name}: names an archive, but {Path(site.file).name} has no stage_to; give it one")
    return {"variable": name, "archive": archive, "to": site.stage_to}


def quote(value: str | Path) -> str:
    """A value as one word for the shell; raises ValueError for what no script should hold."""
    if not str(value).isprintable():
        raise ValueError(f"{str(value)!r}: has characters that cannot be printed; rename it")
    return shlex.quote(str(value))


def submit(jobs: list[Job], site: Site, runs_dir: Path, names: list[str], options: list[str] = ()) -> Iterator[str]:
    """Hand the jobs to the system; yields a line for each that was taken. It is written beside each of its runs.

    ``options``: of sbatch, for these jobs alone. Raises ValueError with the remedy where the system refuses one; those
    before it stay, and of those after it nothing is written.
    """
    if not re.fullmatch(r"[\w./ +=,@:-]+", str(runs_dir)):  # Slurm itself reads % and quotes in it
        raise ValueError(f"runs_dir: {str(runs_dir)!r} has characters that batch scripts cannot hold; choose another")
    for job in jobs:
        configuration.checksum_file(job.runs[0].dataset)  # without it the run could not be made
    arrays = _arrays(jobs, slurm.most_tasks())
    ids, begun_at = {}, files.utc_now()
    for index, job in enumerate(arrays):
        facts = _facts(job, site, names, options, begun_at, index)
        after = (ids.get(job.after) or job_of(runs_dir / site.name / job.after)) if job.after else ""
        text = script(job, site, runs_dir, names, facts)
        try:
            number = _hand_in(job, site, runs_dir, facts, text, after)
        except ValueError as error:
            rest = f"{index} of {len(arrays)} job arrays are submitted; submit again for the rest"
            raise ValueError(f"{error}; {rest if index else 'nothing is submitted'}") from error
        folders = _folders(job, site, runs_dir)
        ids |= {folder.name: f"{number}_{task}" for task, folder in enumerate(folders)}
        waits = f", after job {after}" if after else ""
        yield f"job {number}: {len(job.runs)} x {folders[0].name}{waits}"
    status.wait_instead(runs_dir / site.name, ids)


def _facts(job: Job, site: Site, names: list[str], options: list[str] = (), begun_at: str = "", index: int = 0) -> dict:
    """What is written beside each run of a job array, before it has a number."""
    begun_at = begun_at or files.utc_now()
    return {
        "studies": names,
        "system_file": site.file,
        "scheduler": site.scheduler,
        "after": job.after,
        "submitted_at": begun_at,
        "minutes": job.minutes,
        "user": getpass.getuser(),
        "options": list(options),
        "comment": f"energynn:{begun_at}:{index}",
        "stage_in": _stage_in(job, site),
    }


def _arrays(jobs: list[Job], most: int) -> list[Job]:
    """The jobs as arrays of at most so many runs."""
    arrays = []
    for job in jobs:
        parts = [job.runs[begin : begin + most] for begin in range(0, len(job.runs), most)]
        arrays += [dataclasses.replace(job, runs=part) for part in parts]
    return arrays


def _hand_in(job: Job, site: Site, runs_dir: Path, facts: dict, text: str, after: str) -> str:
    """Submit one array and write its facts beside its runs; returns its number.

    A refused one leaves what was there. Where Slurm does not answer, the job is found by its comment, now or later.
    """
    folders, earlier = _folders(job, site, runs_dir), {}
    for task, folder in enumerate(folders):
        (folder / "job").mkdir(parents=True, exist_ok=True)
        earlier[folder] = status.submission(folder)
        (folder / "job" / "job.sh").write_text(text)
        files.write_json(folder / "job" / "parameters.json", configuration.to_dict(job.runs[task]))
        files.write_json(folder / "job" / "submission.json", facts | {"task": task})
    try:
        number = _number(site, folders[0] / "job" / "job.sh", len(job.runs), after, facts["comment"])
    except slurm.NoAnswer:
        raise
    except ValueError:
        for folder, submitted in earlier.items():
            (folder / "job" / "submission.json").unlink()
            if submitted:
                files.write_json(folder / "job" / "submission.json", submitted)
        raise
    for task, folder in enumerate(folders):
        (folder / "job" / "cancelled").unlink(missing_ok=True)
        files.write_json(folder / "job" / "submission.json", facts | {"task": task, "job_id": f"{number}_{task}"})
    return number


def _number(site: Site, path: Path, tasks: int, after: str, comment: str) -> str:
    """The number of the job that a script becomes."""
    try:
        return slurm.submit(path, tasks, after)
    except slurm.NoAnswer:
        if number := slurm.number_of(comment):
            return number
        raise ValueError(f"{site.scheduler}: did not answer, and has not taken the job") from None


def job_of(run_dir: Path) -> str:
    """The job of a run, or nothing if it was never submitted."""
    return status.submission(run_dir).get("job_id", "")


def cancel(folders: list[Path]) -> Counter:
    """Cancel one's own jobs of runs; returns how many jobs each user has of them, of which others' are left alone.

    What goes on leaves a checkpoint if it is given the time.
    """
    owners, me = Counter(), getpass.getuser()
    submissions = {folder: status.submission(folder) for folder in folders}
    jobs = {each.get("job_id", ""): folder for folder, each in submissions.items()}
    states = slurm.queue(jobs)
    queued = {job: submissions[folder].get("user", me) for job, folder in jobs.items() if job in states}
    owners.update(queued.values())
    ours = [job for job, user in queued.items() if user == me]
    for job in ours:
        (jobs[job] / "job" / "cancelled").touch()
    if ours:
        slurm.cancel(ours)
    return owners


def main(options) -> int:
    """`energynn submit`: show what it will cost, ask if that is much, and hand it over."""
    site = systems.site(options.system)
    _require_slurm(site)
    studies_of_runs = studies.find(options.studies, site.name)
    for name, study in studies_of_runs.items():
        sums = costs.total(costs.expect(run, site.gpu) for run in dict.fromkeys(study))
        tell(f"{name}: {sums['runs']} runs, {costs.in_words(sums)}")
    runs = list(dict.fromkeys(itertools.chain(*studies_of_runs.values())))
    return _hand_over(runs, list(studies_of_runs), site, options)


def _require_slurm(site: Site) -> None:
    if site.scheduler != "slurm":
        raise ValueError(f"system: {site.name} is no cluster; `energynn study run NAME` makes a study on this machine")


def again(options) -> int:
    """`energynn submit`."""
    rows, _ = status.rows(status.folders(options.runs_dir.absolute(), options.studies))
    failed = [row for row in rows if row["state"] in ("failed", "stopped") and "job" in row and "user" not in row]
    names = sorted({name for row in failed for name in row["studies"]})
    ways, faults = {}, []
    for row in failed:
        folder = Path(row["folder"])
        with one_fault(f"{row['run_id']}: its files cannot be read; submit its study instead", faults):
            run = configuration.from_dict(json_table(folder / "job" / "parameters.json"))
            if (submitted := json_table(folder / "job" / "submission.json")) != status.submission(folder):
                raise ValueError("a value in submission.json is of another type than it should be")
            ways.setdefault((row["system_file"], *submitted.get("options", [])), []).append(run)
    for (system, *words), runs in sorted(ways.items()):
        again = argparse.Namespace(
            **vars(options)
            | {"sbatch": words, "limit": math.inf, "yes": True, "dry_run": False}
        )
        _hand_over(runs, names, systems.site(system), again)
    print(f"{len(failed) - len(faults)} runs submitted again" if failed else "no run has failed")
    for fault in faults:
        print(f"energynn: {fault}", file=sys.stderr)
    return 1 if faults else 0


def _hand_over(runs: list[RunConfig], names: list[str], site: Site, options) -> int:
    """Submit what is missing, one call at a time: two would make every run twice."""
    runs_dir = options.runs_dir.absolute()
    if options.dry_run:
        return _plan_and_submit(runs, names, site, options)
    try:
        (runs_dir / site.name).mkdir(parents=True, exist_ok=True)
        held = files.lock(runs_dir / site.name / ".submit")
    except PermissionError as error:
        remedy = f"its owner shares it by `chmod -R g+w {runs_dir}`, or give a --runs-dir of your own"
        raise ValueError(f"runs_dir: you may not write to {error.filename}; {remedy}") from error
    if held is None:
        raise ValueError(f"{runs_dir / site.name}: another `energynn submit` goes on; wait until it has ended")
    with contextlib.closing(held):
        return _plan_and_submit(runs, names, site, options)


def _plan_and_submit(runs: list[RunConfig], names: list[str], site: Site, options) -> int:
    runs_dir = options.runs_dir.absolute()
    others = runs_of_others(runs_dir, site)
    _tell_of_a_renamed_file(runs_dir, site)
    try:
        queued = queued_runs(runs_dir, site)
    except ValueError as error:
        if not options.dry_run:
            raise
        queued = set()
        tell(f"energynn: what is queued is unknown: {error}")
    cancelled = [name for name in queued if (runs_dir / site.name / name / "job" / "cancelled").exists()]
    if cancelled:
        tell(f"{len(cancelled)} runs are still being cancelled; submit again when `energynn status` says cancelled")
    jobs = plan(runs, site, runs_dir, queued | others.keys(), options.minutes)
    names_here = {configuration.run_id(run) for run in runs}
    done = sum(name in queued or records.is_made(runs_dir / site.name / name) for name in names_here)
    done = f"{done} of {len(runs)} runs are made or queued"
    if options.dry_run:
        for job in jobs:
            print(f"\n{script(job, site, runs_dir, names, _facts(job, site, names, options.sbatch))}")
    hours = _tell_costs(done, jobs, site)
    _tell_others(runs, others)
    if options.dry_run or not jobs:
        return 0
    limit = site.ask_above_gpu_hours if options.limit is None else options.limit
    if not (hours <= limit or options.yes):  # so that a limit of nan is none
        if not sys.stdin.isatty():
            raise ValueError(f"limit: more than {limit:g} GPU hours; give --yes or --limit to spend them")
        if input(f"This is more than {limit:g} GPU hours. Submit? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1
    for line in submit(jobs, site, runs_dir, names, options.sbatch):
        print(line, flush=True)
    print("`energynn status` shows what becomes of them")
    return 0


def _tell_of_a_renamed_file(runs_dir: Path, site: Site) -> None:
    """Where a system has no runs yet, say which ones have lost their file: its name is a part of every run."""
    if list((runs_dir / site.name).glob("*/run.json")):
        return
    for folder in sorted(runs_dir.glob("*/")):
        submitted = next(map(status.submission, map(Path, folder.glob("*/"))), {})
        if submitted.get("system_file") and not os.path.exists(submitted["system_file"]):
            tell(
                f"the file of the system {folder.name} is gone; if {Path(site.file).name} has taken its place, write "
                f'name = "{folder.name}" in it, or all its runs are made again'
            )


def _tell_others(runs: list[RunConfig], others: dict[str, str]) -> None:
    """Say whose runs are left to those who have submitted them."""
    names = {configuration.run_id(run) for run in runs}
    for user, number in Counter(user for name, user in others.items() if name in names).items():
        tell(f"{number} of them {user} has submitted; to make them yourself give a --runs-dir of your own")


def _tell_costs(done: str, jobs: list[Job], site: Site) -> float:
    """Print what is done and what the jobs will cost; returns the GPU hours that they reserve at most."""
    expected, reserved, unknown = [], 0.0, 0.0
    for job in jobs:
        for run in job.runs:
            cost = costs.expect(run, site.gpu)
            expected.append(cost)
            reserved += job.nodes * site.devices_per_node * cost.gpu_hours / job.devices
            if cost.source == "unknown":
                unknown += job.minutes / 60 * job.devices
    words = [f"{done}; {len(expected)} to make"]
    if jobs:
        words[0] += f" in {len(jobs)} job arrays, {costs.in_words(costs.total(expected))}"
    if reserved:
        words.append(f"{reserved:,.0f} GPU hours of whole nodes")
    if unknown:
        words.append(f"at most {unknown:,.1f} device hours for each start of the unknown")
    tell("; ".join(words))
    return reserved + unknown


def check(site: Site) -> int:
    """Prove a system by a short measured run on two nodes, and say what is not as its file says; returns 1 then."""
    runs_dir = REPOSITORY / "build" / "system-check" / str(time.time_ns())
    _require_slurm(site)
    nodes = 2
    devices = nodes * site.devices_per_node
    small = dict(embed_dim=32, depth=1, epochs=40, step_period_s=0.015 * devices)  # twelve seconds on anything
    probe = configuration.make("fourcastnet", system=site.name, devices=devices, **small)
    list(submit([Job((probe,), nodes, 10)], site, runs_dir, ["check"]))
    folder = runs_dir / site.name / configuration.run_id(probe)
    print(f"submitted to {site.name}: {devices} devices on {nodes} nodes; {folder}", flush=True)
    told = ""
    try:
        while status.goes_on(row := status.rows([folder])[0][0]):
            words = f"{row['state']} {row.get('reason', '')}".strip()
            if words != told:
                print(f"  {words}", flush=True)
            told = words
            time.sleep(2)
    except KeyboardInterrupt:
        cancel([folder])
        raise
    record = records.read(folder) or {}
    if row["state"] != "finished":
        tell(f"WRONG: the run is {row['state']}: {row.get('reason', '')}\n  {row.get('log', '')}; see job/log.txt")
        return 1
    asked = {"nodes": nodes, "sockets": nodes * site.sockets_per_node}
    wrong = [f"{name}: {record[name]}, where the file says {n}" for name, n in asked.items() if record[name] != n]
    asks_for_gpus = any("gpu" in option for option in site.sbatch)
    if asks_for_gpus and record["device_kind"] != "gpu":
        wrong.append(f"no GPU was visible, though sbatch asks for some: the run was made on {record['device_name']}")
    is_other_gpu = record["device_kind"] == "gpu" and site.gpu not in record["device_name"]
    if is_other_gpu:
        wrong.append(f"gpu: {record['device_name']}, where the file says {site.gpu}")
    if "perun_time_s" not in record:
        wrong.append("perun measured nothing: `energynn doctor` in a job tells why")
    print(
        f"{record['launcher']}: {record['devices']} x {record['device_name']} ({record['device_kind']}) on "
        f"{record['nodes']} nodes, {record['sockets']} sockets; energy {record['energy_total_provenance']}"
    )
    print("\n".join(f"WRONG: {line}" for line in wrong) or f"as {Path(site.file).name} says")
    return 1 if wrong else 0
