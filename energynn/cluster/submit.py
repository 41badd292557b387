"""`energynn submit`: which runs of a study are missing, what they will cost, and the jobs that make them."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from energynn import config as configuration
from energynn import files, records, studies
from energynn.cluster import costs, slurm, status, systems
from energynn.cluster.systems import Site
from energynn.config import RunConfig
from energynn.files import PACKAGE, REPOSITORY
from energynn.progress import tell

MARGIN, SPARE_MINUTES = 1.3, 30  # of the wall time over what is expected; a run that needs more goes on in a next job
WARNING_S = 300  # before the time limit; long enough for a step, a checkpoint and the record
KEPT = ("HOME", "USER", "LOGNAME", "LANG", "PATH")  # of the environment; the rest may hold secrets
GIVEN = ("ENERGYNN_IMAGENET", "ENERGYNN_ERA5", "ENERGYNN_POWERCAP")  # written into the script
ARCHIVE = re.compile(r"\.tar(\.gz|\.zst|\.xz)?$")


@dataclass(frozen=True)
class Job:
    """One job array: runs that need the same nodes for the same time; ``after``: the job that has to end well first."""

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
    names = {configuration.run_id(run): run for run in runs}
    missing = {
        name: run for name, run in names.items() if name not in queued and not _is_made(runs_dir / site.name / name)
    }
    groups: dict[tuple, list[RunConfig]] = {}
    for run in missing.values():
        before = getattr(run, "initial_run", "")
        if before and before not in missing and before not in queued:
            if not _is_made(runs_dir / site.name / before):
                raise ValueError(f"initial_run: {before} is not made yet; submit its study as well, or first")
            before = ""
        cost = costs.expect(run, site.gpu)
        hours = MARGIN * cost.gpu_hours / run.devices + SPARE_MINUTES / 60 if cost.gpu_hours else site.default_hours
        limit = minutes or math.ceil(60 * min(hours, site.max_hours))
        nodes = math.ceil(run.devices / site.devices_per_node)
        groups.setdefault((before, nodes, run.devices, limit), []).append(run)
    jobs = [Job(tuple(group), nodes, limit, before) for (before, nodes, _, limit), group in groups.items()]
    return sorted(jobs, key=lambda job: job.after != "")


def _is_made(run_dir: Path) -> bool:
    record = records.read(run_dir)
    return bool(record and record.get("valid"))


def queued_runs(runs_dir: Path, site: Site) -> set[str]:
    """Names of the runs of a system whose jobs are queued or run."""
    queue = status.EXECUTORS[site.scheduler].queue()
    folders = [path.parent.parent for path in (runs_dir / site.name).glob("*/job/submission.json")]
    return {folder.name for folder in folders if job_of(folder) in queue}


def script(job: Job, site: Site, runs_dir: Path, names: list[str]) -> str:
    """The batch script of a job array; every value in it is quoted for the shell or has a form that needs no quotes."""
    folders = _folders(job, site, runs_dir)
    given = {"PYTHONPATH": str(PACKAGE.parent), **{name: os.environ[name] for name in GIVEN if os.environ.get(name)}}
    given |= site.limits()
    if site.srun is not None:
        given["ENERGYNN_SRUN"] = shlex.join(site.srun)
    setup = [f"export {name}={quote(value)}" for name, value in (given | site.environment).items()]
    if site.modules:
        setup.insert(0, f"source /etc/profile\nmodule load {' '.join(site.modules)}")
    options = _options(job, site, folders[0], names) if site.scheduler == "slurm" else []
    values = {
        "options": "\n".join(f"#SBATCH {option}" for option in options),
        "runs": "\n".join(f"  {quote(folder)}" for folder in folders),
        "setup": "\n".join(setup),
        "repository": quote(REPOSITORY),
        "python": quote(sys.executable),
        "stage_in": _stage_in(job, site, given),
    }
    text = (Path(__file__).parent / "job.sh").read_text()
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], text)


def _folders(job: Job, site: Site, runs_dir: Path) -> list[Path]:
    return [runs_dir / site.name / configuration.run_id(run) for run in job.runs]


def _options(job: Job, site: Site, folder: Path, names: list[str]) -> list[str]:
    """The options of sbatch for a job array whose log lies in the first run's folder."""
    title = re.sub(r"[^\w.-]", "_", "+".join(names))[:40]
    options = [
        f"--job-name=energynn-{title}",
        f"--nodes={job.nodes}",
        f"--ntasks={job.devices}",
        f"--ntasks-per-node={min(job.devices, site.devices_per_node)}",
        f"--time={job.minutes}",
        f"--array=0-{len(job.runs) - 1}",
        "--requeue",
        "--open-mode=append",
        f"--signal=B:USR1@{min(WARNING_S, 5 * job.minutes)}",
        f"--export={','.join(KEPT)}",
        f'--output="{folder / "job" / "slurm-%A_%a.txt"}"',
    ]
    if "--no-requeue" in site.sbatch:
        options.remove("--requeue")
    return [*options, *site.sbatch]


def _stage_in(job: Job, site: Site, given: dict[str, str]) -> str:
    """Unpack data that are given as a tar file to node-local storage, measured by itself, before the run begins."""
    name = f"ENERGYNN_{job.runs[0].dataset.upper()}"
    if not ARCHIVE.search(given.get(name, "")):
        return ""
    if not site.stage_to:
        raise ValueError(f"{name}: names an archive, but systems/{site.name}.toml has no stage_to; give it one")
    each = ["srun", "--export=ALL", f"--ntasks={job.nodes}", "--ntasks-per-node=1"] if site.scheduler == "slurm" else []
    return f"""there={site.stage_to}/energynn-data
{shlex.join([*each, "mkdir", "-p"])} "$there" || exit
{shlex.join([*each, sys.executable, "-m", "energynn.cli", "measure", "--out"])} \\
  "$run/job/stage-in-${{SLURM_JOB_ID:-$$}}-${{SLURM_RESTART_COUNT:-0}}" \\
  -- tar -xf {quote(given[name])} -C "$there" || exit
export {name}="$there\""""


def quote(value: str | Path) -> str:
    """A value as one word for the shell; raises ValueError for what no script should hold."""
    if not str(value).isprintable():
        raise ValueError(f"{str(value)!r}: has characters that cannot be printed; rename it")
    return shlex.quote(str(value))


def submit(jobs: list[Job], site: Site, runs_dir: Path, names: list[str]) -> list[str]:
    """Hand the jobs to the system; returns one line for each. What is submitted is written beside each run."""
    if not re.fullmatch(r"[\w./ +=,@:-]+", str(runs_dir)):  # Slurm itself reads % and quotes in it
        raise ValueError(f"runs_dir: {str(runs_dir)!r} has characters that batch scripts cannot hold; choose another")
    for job in jobs:
        configuration.checksum_file(job.runs[0].dataset)  # without it the run could not be made
    lines, ids = [], {}
    texts = [script(job, site, runs_dir, names) for job in jobs]
    for job, text in zip(jobs, texts, strict=True):
        folders = _folders(job, site, runs_dir)
        facts = {
            "studies": names,
            "system_file": site.file,
            "scheduler": site.scheduler,
            "after": job.after,
            "submitted_at": files.utc_now(),
            "minutes": job.minutes,
        }
        for run, folder in zip(job.runs, folders, strict=True):
            (folder / "job").mkdir(parents=True, exist_ok=True)
            (folder / "job" / "cancelled").unlink(missing_ok=True)
            (folder / "job" / "job.sh").write_text(text)
            files.write_json(folder / "job" / "parameters.json", configuration.to_dict(run))
            files.write_json(folder / "job" / "submission.json", facts)
        after = ""
        if job.after:
            after = ids.get(job.after) or job_of(runs_dir / site.name / job.after)
        number = status.EXECUTORS[site.scheduler].submit(folders[0] / "job" / "job.sh", len(job.runs), after)
        for index, folder in enumerate(folders):
            ids[folder.name] = f"{number}_{index}"
            files.write_json(folder / "job" / "submission.json", facts | {"job_id": ids[folder.name]})
        waits = f", after job {after}" if after else ""
        lines.append(f"job {number}: {len(job.runs)} x {folders[0].name}{waits}")
    if site.scheduler == "slurm":
        slurm.wait_instead(runs_dir / site.name, ids)
    return lines


def job_of(run_dir: Path) -> str:
    """The job of a run, or nothing if it was never submitted."""
    return status.submission(run_dir).get("job_id", "")


def cancel(folders: list[Path]) -> int:
    """Cancel the jobs of runs; returns how many. A run that goes on leaves a checkpoint if it is given the time."""
    number = 0
    for scheduler, executor in status.EXECUTORS.items():
        jobs = {job_of(folder): folder for folder in folders if status.submission(folder).get("scheduler") == scheduler}
        states = executor.queue() if jobs else {}
        queued = [job for job in jobs if job in states]
        for job in queued:
            (jobs[job] / "job" / "cancelled").touch()
        if queued:
            executor.cancel(queued)
        number += len(queued)
    return number


def main(options) -> int:
    """`energynn submit`: show what it will cost, ask if that is much, and hand it over."""
    site = systems.site(options.system)
    studies_of_runs = studies.find(options.studies, site.name)
    for name, study in studies_of_runs.items():
        sums = costs.total(costs.expect(run, site.gpu) for run in dict.fromkeys(study))
        tell(f"{name}: {sums['runs']} runs, {costs.in_words(sums)}")
    runs = list(dict.fromkeys(itertools.chain(*studies_of_runs.values())))
    return _hand_over(runs, list(studies_of_runs), site, options, options.limit, options.yes, options.dry_run)


def again(options) -> int:
    """`energynn resubmit --failed`."""
    rows, _ = status.rows(status.folders(options.runs_dir.absolute(), options.studies))
    failed = [row for row in rows if row["state"] in ("failed", "stopped", "cancelled") and "job" in row]
    names = sorted({name for row in failed for name in row["studies"]})
    for system in sorted({row["system_file"] for row in failed}):
        runs = []
        for row in failed:
            if row["system_file"] == system:
                parameters = Path(row["folder"]) / "job" / "parameters.json"
                runs.append(configuration.from_dict(json.loads(parameters.read_text())))
        _hand_over(runs, names, systems.site(system), options, limit=math.inf, yes=True, dry_run=False)
    print(f"{len(failed)} runs submitted again" if failed else "no run has failed")
    return 0


def _hand_over(runs, names: list[str], site: Site, options, limit: float | None, yes: bool, dry_run: bool) -> int:
    runs_dir = options.runs_dir.absolute()
    try:
        queued = queued_runs(runs_dir, site)
    except ValueError as error:
        if not dry_run:
            raise
        queued = set()
        print(f"energynn: what is queued is unknown: {error}")
    jobs = plan(runs, site, runs_dir, queued, options.minutes)
    if dry_run:
        for job in jobs:
            print(f"\n{script(job, site, runs_dir, names)}")
    hours = _tell_costs(len(runs), jobs, site)
    if dry_run or not jobs:
        return 0
    limit = site.ask_above_gpu_hours if limit is None else limit
    if not (hours <= limit or yes):  # so that a limit of nan is none
        if not sys.stdin.isatty():
            raise ValueError(f"limit: more than {limit:g} GPU hours; give --yes or --limit to spend them")
        if input(f"This is more than {limit:g} GPU hours. Submit? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1
    print("\n".join(submit(jobs, site, runs_dir, names)))
    print("`energynn status` shows what becomes of them")
    return 0


def _tell_costs(runs: int, jobs: list[Job], site: Site) -> float:
    """Print what the jobs of so many runs will cost; returns the GPU hours that they reserve at most."""
    expected, reserved, unknown = [], 0.0, 0.0
    for job in jobs:
        for run in job.runs:
            cost = costs.expect(run, site.gpu)
            expected.append(cost)
            reserved += job.nodes * site.devices_per_node * cost.gpu_hours / job.devices
            if cost.source == "unknown":
                unknown += job.minutes / 60 * job.devices
    words = f"; at most {unknown:,.1f} device hours for each start of the unknown" if unknown else ""
    tell(
        f"{runs - len(expected)} of {runs} runs are made or queued; {len(expected)} to make in {len(jobs)} job arrays, "
        f"{costs.in_words(costs.total(expected))}; {reserved:,.0f} GPU hours of whole nodes{words}"
    )
    return reserved + unknown


def check(site: Site) -> int:
    """Prove a system by a short measured run on two nodes, and say what is not as its file says; returns 1 then."""
    runs_dir = REPOSITORY / "build" / "system-check" / str(time.time_ns())
    nodes = 2 if site.scheduler == "slurm" else 1
    devices = nodes * site.devices_per_node if site.scheduler == "slurm" else 2
    probe = configuration.make("fourcastnet", system=site.name, devices=devices, embed_dim=64, depth=2, epochs=60)
    submit([Job((probe,), nodes, 10)], site, runs_dir, ["check"])
    folder = runs_dir / site.name / configuration.run_id(probe)
    print(f"submitted to {site.name}: {devices} devices on {nodes} nodes; {folder}", flush=True)
    try:
        while (row := status.rows([folder])[0][0])["state"] in ("queued", "running"):
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
    if "perun_time_s" not in record:
        wrong.append("perun measured nothing: `energynn doctor` in a job tells why")
    print(
        f"{record['launcher']}: {record['devices']} x {record['device_name']} ({record['device_kind']}) on "
        f"{record['nodes']} nodes, {record['sockets']} sockets; energy {record['energy_total_provenance']}"
    )
    print("\n".join(f"WRONG: {line}" for line in wrong) or "as systems/*.toml says")
    return 1 if wrong else 0
