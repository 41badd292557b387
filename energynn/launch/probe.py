"""Make short runs that tell of a long one: few batches and many, a small local batch, one device,
and one whose devices mostly wait.
"""

import math
from pathlib import Path

from energynn import records
from energynn.experiment import config
from energynn.experiment.config import RunConfig
from energynn.experiment.systems import Site
from energynn.forecast import fit as fits
from energynn.forecast import runs
from energynn.forecast.fit import Fit
from energynn.host.files import REPOSITORY
from energynn.launch import local
from energynn.measure import machine

START_S = 15.0  # of a run, before and after its training
FEW, MOST = 6, 96  # batches of a device in an epoch
BATCH_S = 0.5  # before the first probe
WAITING = 6  # times the time of a batch, from one step to the next
PART_OF_BATCH = 4  # of the local batch, for a second size
PROBES = 5
PERIOD_S = 0.02  # between power samples
LEAST_S = 1.5  # of a training, for as many samples as a valid run has


def target(workload: str, site: Site, parameters: dict) -> RunConfig:
    """Make the run to forecast: one of the preset, with parameters of one's own."""
    is_here = site.scheduler == "local"
    preset = {"preset": "smoke" if is_here else "paper", "system": site.name}
    preset["device"] = "cpu" if is_here and not machine.gpus() else "gpu"
    return config.make(workload, **preset | parameters)


def shorter(run: RunConfig, batches: int, **changed) -> RunConfig:
    """Make a run of so many batches, or of a year or two; of epochs where its data are not cut."""
    plain = config.asdict(run) | {"epochs": 1, "save_weights": False}
    plain |= {"accumulation_steps": 1, "global_batch_size": None}
    plain |= {"sampling_period_s": PERIOD_S} | changed
    if plain["dataset"] == "era5":
        first = int(plain["training_years"][:4])
        plain["training_years"] = f"{first}-{first + (batches > FEW)}"
        plain["validation_years"] = plain["validation_years"][:4]
    elif "training_samples" in plain:
        step = plain["local_batch_size"] * plain["devices"]
        most = run.epoch().training_samples or batches * step
        plain["training_samples"] = max(1, min(batches, most // step)) * step
        plain["validation_samples"] = step
    else:
        plain["epochs"] = max(1, batches // FEW)
    return config.make(**plain)


def planned(
    run: RunConfig, site: Site, minutes: float, batch_s: float = BATCH_S
) -> list[RunConfig]:
    """Choose the probes, on one node: few batches first, then as many as an equal part of the
    minutes allows.

    batch_s: time of a batch. Raises ValueError for too few minutes.
    """
    part_s = 60 * minutes / PROBES - START_S
    if part_s < FEW * BATCH_S:
        raise ValueError(f"minutes: {minutes:g} are too few for the probes; give more")
    few = max(FEW, math.ceil(LEAST_S / batch_s))
    batches = int(max(2 * few, min(MOST, part_s / batch_s)))
    full = {"devices": min(run.devices, site.devices_per_node)}
    small = {"local_batch_size": max(1, run.local_batch_size // PART_OF_BATCH)}
    slow = {"step_period_s": round(WAITING * batch_s, 2)}
    probes = [
        shorter(run, few, **full),
        shorter(run, batches, **full),
        shorter(run, batches, **full | small),
        shorter(run, batches, devices=1),
        shorter(run, max(few, batches // WAITING), **full | slow),
    ]
    return list(dict.fromkeys(probes))


def make_here(
    run: RunConfig, site: Site, runs_dir: Path, minutes: float
) -> tuple[list[RunConfig], Fit]:
    """Make the probes on this machine, of which the first tells the time of a batch; fit them.

    Raises ValueError where one fails.
    """
    first = planned(run, site, minutes)[0]
    _run([first], runs_dir)
    # on a fast device it may be too short to be valid; its time is right
    record = records.read(config.folder(first, runs_dir))
    batch_s = record.training_time_s / record.optimizer_steps
    probes = planned(run, site, minutes, batch_s)
    _run(probes, runs_dir)
    made = _valid(probes, runs_dir, site)
    return probes, fits.make(runs.own(made, run.workload, site))


def _run(probes: list[RunConfig], runs_dir: Path) -> None:
    """Make runs that are not there yet."""
    if failed := local.run_study(probes, runs_dir.absolute()):
        raise ValueError(f"probe: {failed[0]}")


def _valid(probes: list[RunConfig], runs_dir: Path, site: Site) -> list[records.Record]:
    """Return the records of all; each must be valid."""
    names = {config.run_id(run) for run in probes}
    found = [record for record in runs.valid(runs_dir, site) if record.run_id in names]
    if len(found) < len(names):
        raise ValueError(
            "probe: a run is not valid; `energynn status --failed` says why"
        )
    return found


def hand_over(probes: list[RunConfig], site: Site) -> str:
    """Write the probes as a study of one's own; returns the commands that make and fit them."""
    workload = probes[0].workload
    study = REPOSITORY / "build" / f"probe_{workload}_{site.name}.py"
    study.parent.mkdir(exist_ok=True)
    study.write_text(
        "from energynn.experiment import config\n\n\ndef study(system):\n"
        f"    runs = {[config.asdict(run) for run in probes]!r}\n"
        "    named = runs[0]['workload']\n"
        "    return [config.from_dict(run | dict(system=system), named) for run in runs]\n"
    )
    return (
        f"energynn submit {study} --system {site.file}\n"
        f"energynn forecast fit --workload {workload} --system {site.file} --runs-dir runs "
        "--out build/fit.json"
    )
