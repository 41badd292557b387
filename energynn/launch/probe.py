"""Make short runs that tell of a long one, each the one that its forecast narrows most by."""

import math
import time
from pathlib import Path

from energynn import records
from energynn.experiment import config
from energynn.experiment.config import RunConfig
from energynn.experiment.systems import Site
from energynn.forecast import fits, next_run, runs
from energynn.host.files import REPOSITORY
from energynn.launch import local
from energynn.measure import machine

MAX_ATTEMPTS = 3  # times that a run is made, each longer, for its power samples


def target_run(workload: str, site: Site, parameters: dict) -> RunConfig:
    """Make the run to forecast: one of the preset, with parameters of one's own."""
    is_here = site.scheduler == "local"
    preset = {
        "preset": "smoke" if is_here else "paper",
        "system": site.name,
        "device": "cpu" if is_here and not (site.gpu or machine.list_gpus()) else "gpu",
    }
    return config.make(workload, **preset | parameters)


def matching_runs(
    run: RunConfig, site: Site, runs_dir: Path
) -> runs.ObservedRuns | None:
    """Read the valid runs of a training's recipe; None where there are none."""
    recipe = runs.recipe_of_fit(config.asdict(run))
    matching = [
        record
        for record in runs.valid_records(runs_dir, site)
        if record.workload == run.workload
        and runs.recipe_of_fit(record.config) == recipe
    ]
    return (
        runs.own_runs(matching, run.workload, site, run.workload) if matching else None
    )


def choose_next_runs(
    run: RunConfig, site: Site, runs_dir: Path, minutes: float
) -> list[RunConfig]:
    """Choose the run that tells most beside those that are there; where none is, two that
    vary, of few batches.

    Empty where none is worth it. Raises ValueError for too few minutes.
    """
    if known := matching_runs(run, site, runs_dir):
        table = next_run.worth_of_runs(fits.fit_runs(known), [run], minutes)
        best = next_run.best_candidate(table)["run"]
        return [best] if best else []
    if 60 * minutes < 2 * next_run.STARTUP_S:
        raise ValueError(f"minutes: {minutes:g} are too few for a probe; give more")
    full = min(run.devices, site.devices_per_node)
    small = max(1, run.local_batch_size // next_run.SMALL_BATCH_DIVISOR)
    pair = {"devices": full}, {"devices": 1, "local_batch_size": small}
    return [next_run.make_short_run(config.replace(run, **sizes)) for sizes in pair]


def make_probe_runs(
    run: RunConfig, site: Site, runs_dir: Path, minutes: float
) -> list[RunConfig]:
    """Make runs on this machine, until the minutes are over or none is worth it.

    Raises ValueError where one fails, and for too few minutes.
    """
    made = []
    end_s = time.monotonic() + 60 * minutes
    while probes := choose_next_runs(run, site, runs_dir, minutes):
        made += [_make_long_enough_run(probe, runs_dir) for probe in probes]
        minutes = (end_s - time.monotonic()) / 60
    return made


def _make_long_enough_run(run: RunConfig, runs_dir: Path) -> RunConfig:
    """Make a run, of more epochs where it was too short for the power samples of a valid one."""
    for _ in range(MAX_ATTEMPTS):
        if failed := local.make_missing_runs([run], runs_dir):
            raise ValueError(f"probe: {failed[0]}")
        record = records.read_record_if_any(config.folder(run, runs_dir))
        if record.valid:
            return run
        lacks = records.MIN_POWER_SAMPLES / max(record.samples_in_training, 1)
        run = config.replace(run, epochs=math.ceil(1.5 * lacks) * run.epochs)
    raise ValueError("probe: a run is not valid; `energynn status --failed` says why")


def write_probe_study(probes: list[RunConfig], site: Site, runs_dir: Path) -> str:
    """Write the probes as a study of one's own; returns the commands that make and fit them."""
    workload = probes[0].workload
    study = REPOSITORY / "build" / f"probe_{workload}_{site.name}.py"
    study.parent.mkdir(exist_ok=True)
    study.write_text(
        "from energynn.experiment import config\n\n\ndef study(system):\n"
        f"    runs = {[config.asdict(run) for run in probes]!r}\n"
        "    named = runs[0]['workload']\n"
        "    return [config.config_from_dict(run | dict(system=system), named) for run in runs]\n"
    )
    return (
        f"energynn submit {study} --system {site.file} --runs-dir {runs_dir}\n"
        f"energynn forecast fit --workload {workload} --system {site.file} --runs-dir {runs_dir} "
        "--out build/fit.json"
    )
