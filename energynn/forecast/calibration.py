"""A calibration on disk: fits of a workload on a system, what they were fitted to, and how far they reach."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from energynn import config, records
from energynn.cluster import systems
from energynn.cluster.systems import Site
from energynn.config import RunConfig
from energynn.files import write_json
from energynn.forecast import fitting, runs
from energynn.forecast.calibrate import Fit, Prior
from energynn.forecast.model import BY_NAME, NAMES, READINGS
from energynn.forecast.runs import Runs
from energynn.reading import LARGEST_B, one_fault, require_file

SCHEMA = "energynn-forecast/1"
# Fields that a forecast takes into account, or that change neither time nor power.
ACCOUNTED = {"workload", "preset", "system", "devices", "local_batch_size", "global_batch_size", "accumulation_steps"}
ACCOUNTED |= {"epochs", "seed", "repeat", "initial_run", "learning_rate", "loader_workers", "training_samples"}
ACCOUNTED |= {"validation_samples", "evaluate_training_set", "training_years", "validation_years", "test_years"}
ACCOUNTED |= {"sampling_period_s", "idle_baseline_s", "idle_ready_s", "perun_sampling_period_s"}
ACCOUNTED |= {"collective_timeout_s", "gradient_compression", "gradient_noise_steps", "persistent_workers"}
ACCOUNTED |= {"save_weights", "checkpoint_period_s", "warmup_epochs", "plateau_patience", "on_bad_image"}
ACCOUNTED |= {"setup_timeout_s"}
# Of these, those whose effect is assumed: how, where runs are asked for that differ from the calibrated ones in them.
ASSUMED = {
    "gradient_compression": "the all-reduce is taken as proportional to its bytes, the most that it can be",
    "gradient_noise_steps": "what it takes is left out",
    "checkpoint_period_s": "what checkpoints take is left out",
}


@dataclass(frozen=True)
class Calibration:
    """What ``energynn forecast fit`` has found.

    fits: by reading, the one to forecast with first. config: of the run with the most samples. samples: sizes of
    training and validation data. workers: of their loaders. ranges: least and greatest of what varied. fields: other
    fields of the configuration, and those of ASSUMED, with the values that occurred. watts: of a node's CPUs and
    memory, where runs have measured them. provenance: of the runs.
    """

    workload: str
    site: Site
    fits: dict[str, Fit]
    config: RunConfig
    samples: tuple[int, int]
    workers: int
    ranges: dict[str, tuple[float, float]]
    fields: dict[str, list]
    watts: dict[str, float]
    provenance: str
    number_of_runs: int
    notes: list[str]

    @property
    def fit(self) -> Fit:
        return next(iter(self.fits.values()))


def make(seen: Runs, other=None) -> Calibration:
    """Calibrate with runs; ``other``: runs or fits of the same workload on another system, see ``fitting.fits``."""
    work = seen.observations.work
    varied = {
        "devices": work.devices,
        "nodes": work.nodes,
        "local_batch_size": work.local_batch_size,
        "samples of a device": work.trained,
        "evaluated per trained sample": work.evaluated / work.trained,
        "accumulation_steps": np.array([run.accumulation_steps for run in seen.configs]),
    }
    plain = [config.asdict(run) for run in seen.configs]
    fields = {}
    for name in plain[0]:
        if name not in ACCOUNTED or name in ASSUMED:
            fields[name] = sorted({each[name] for each in plain}, key=str)
    return Calibration(
        workload=seen.workload,
        site=seen.site,
        fits=fitting.fits(seen, other),
        config=max(seen.configs, key=lambda run: runs.epoch_of(run, seen.samples).training_samples),
        samples=seen.samples,
        workers=seen.workers,
        ranges={name: (float(values.min()), float(values.max())) for name, values in varied.items()},
        fields=fields,
        watts=seen.watts,
        provenance=seen.provenance,
        number_of_runs=len(seen.configs),
        notes=seen.notes,
    )


def published(workload: str, site: Site, max_devices: float = np.inf) -> tuple[Runs, Runs | None]:
    """The published runs to calibrate with, and those of the other system that the study had, where it has any.

    ``max_devices`` asks what few runs tell: then they stand alone.
    """
    seen = runs.published(workload, site, max_devices)
    if np.isfinite(max_devices):
        return seen, None
    for path in sorted(Path(systems.site("local").file).parent.glob("*.toml")):
        there = systems.site(path.stem)
        if there.published_as not in ("", site.published_as):
            try:
                return seen, runs.published(workload, there)
            except ValueError:  # nothing is published of this workload there
                continue
    return seen, None


# ------------------------------------------------------------------------------------------------------------- on disk


def describe(found: Fit) -> dict[str, dict]:
    """Every parameter with value, 90 % interval, unit, prior, source, meaning and contraction."""
    intervals, contraction = found.intervals(), found.contraction()
    table = {}
    for name, prior in found.priors.items():
        known, (low, high) = BY_NAME[name], intervals[name]
        facts = {"value": found.values[name], "low": low, "high": high, "unit": known.unit, "prior": prior.centre}
        facts |= {"prior_spread": prior.spread, "prior_is_relative": known.is_log, "source": prior.source}
        table[name] = facts | {"contraction": contraction[name], "meaning": known.meaning}
    return table


def to_dict(made: Calibration) -> dict:
    """The calibration as JSON values, which ``read`` takes; ``parameters`` is for people."""
    fits = {}
    for reading, found in made.fits.items():
        facts = {"parameters": describe(found), "evidence": found.evidence, "flags": fitting.flags(found)}
        for name in ("prior_covariance", "point", "covariance", "errors", "freedom"):
            facts[name] = getattr(found, name).tolist()
        fits[reading] = facts
    plain = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    plain |= {"site": dataclasses.asdict(made.site) | {"file": ""}, "config": config.to_dict(made.config), "fits": fits}
    return {"schema": SCHEMA, **json.loads(json.dumps(plain))}


def write(path: Path, made: Calibration, examined: dict) -> None:
    """Write a fit file, with a checksum of its own; ``examined``: errors, for people."""
    content = to_dict(made) | {"errors": examined}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content | {"sha256": config.digest(content)})


def read(path: Path) -> Calibration:
    """Read a fit file; raises ValueError with one line for one that is missing, damaged or of another kind."""
    again = "`energynn forecast fit` writes one"
    try:
        require_file(path, LARGEST_B)
        content = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such fit; {again}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as a fit ({error}); {again}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"{path}: is no fit of this version ({SCHEMA}); {again}")
    digest = content.pop("sha256", "")
    if digest != config.digest(content):
        raise ValueError(f"{path}: was damaged or changed after it was written; {again}")
    with one_fault(f"{path}: is not as a fit must be; {again}"):
        return _calibration(content)


# Kinds as of a record's fields, see records.is_of_kind; what is not here is made of numbers, and checked as such.
KINDS = {"workload": "text", "site": "table", "fits": "table", "config": "table", "workers": "number"}
KINDS |= {"ranges": "table", "fields": "table", "watts": "table", "provenance": "text", "number_of_runs": "number"}
KINDS |= {"notes": "texts"}
OF_PARAMETER = {"prior": "number", "prior_spread": "number", "source": "text"}
RANGES = {"devices", "nodes", "local_batch_size", "samples of a device", "evaluated per trained sample"}
LARGEST_ERROR, LARGEST_LOGARITHM, MOST_WORKERS = 10, 100, 1024  # what is beyond them is nobody's fit
OF_POWER, OPTIONAL = {"host", "fed", "idle", "image_J"}, {"fill", "kappa_storage"}  # parameters that not every fit has


def _calibration(content: dict) -> Calibration:
    """A calibration from what ``to_dict`` made of it; raises one of ILL_TYPED where a part is missing or ill-typed."""
    _require(content, KINDS)
    _require(content["fits"], dict.fromkeys(READINGS, "table"))
    _require(content["watts"], dict.fromkeys(content["watts"], "number"))
    if missing := RANGES - content["ranges"].keys():
        raise ValueError(f"ranges: {', '.join(sorted(missing))} missing")
    if not 0 <= content["workers"] <= MOST_WORKERS:
        raise ValueError(f"workers must be 0 to {MOST_WORKERS}")
    run = config.from_dict(content["config"])
    if run.workload != content["workload"]:
        raise ValueError(f"workload: the fit is of {content['workload']}, its run of {run.workload}")
    facts = {field.name: content[field.name] for field in dataclasses.fields(Calibration)}
    facts |= {
        "fits": {reading: _fit(reading, facts) for reading, facts in content["fits"].items()},
        "site": systems.from_dict(content["site"]),
        "config": run,
        "samples": tuple(_numbers("samples", content["samples"], 2).tolist()),
        "ranges": {name: tuple(_numbers(name, ends, 2).tolist()) for name, ends in content["ranges"].items()},
        "fields": {name: list(values) for name, values in content["fields"].items()},
    }
    for name, (low, high) in facts["ranges"].items():
        if not 0 <= low <= high:
            raise ValueError(f"ranges: {name} must be from 0 on and rise")
    return Calibration(**facts)


def _fit(reading: str, facts: dict) -> Fit:
    _require(facts, {"parameters": "table", "evidence": "number"})
    given = facts["parameters"]
    if given.keys() | OPTIONAL not in (set(NAMES), set(NAMES) - OF_POWER):
        raise ValueError(f"parameters: {', '.join(given)} are not those of a fit")
    for one in given.values():
        _require(one, OF_PARAMETER)
    priors = {name: Prior(one["prior"], one["prior_spread"], one["source"]) for name, one in given.items()}
    shapes = dict.fromkeys(("prior_covariance", "covariance"), 2 * (len(given),))
    shapes |= {"point": (len(given),), "errors": (2,), "freedom": (2,)}
    arrays = {name: _numbers(name, facts.get(name), *shape) for name, shape in shapes.items()}
    for name in ("prior_covariance", "covariance"):
        np.linalg.cholesky((arrays[name] + arrays[name].T) / 2)  # a ValueError where it is no covariance
    if min(arrays["errors"].min(), arrays["freedom"].min()) <= 0 or arrays["errors"].max() > LARGEST_ERROR:
        raise ValueError(f"errors and freedom must be more than 0, and errors at most {LARGEST_ERROR}")
    logarithms = [at for name, at in zip(given, arrays["point"].tolist(), strict=True) if BY_NAME[name].is_log]
    if max(map(abs, logarithms)) > LARGEST_LOGARITHM:
        raise ValueError(f"point: logarithms of parameters must be {-LARGEST_LOGARITHM} to {LARGEST_LOGARITHM}")
    return Fit(reading, priors, **arrays, evidence=facts["evidence"])


def _require(values: dict, kinds: dict[str, str]) -> None:
    for name, kind in kinds.items():
        if not records.is_of_kind(values.get(name), kind):
            raise ValueError(f"{name} must be of the kind {kind}, is {records.shorten(values.get(name))}")


def _numbers(name: str, values, *shape: int) -> np.ndarray:
    """Finite numbers as an array; raises ValueError for anything else or another shape."""
    array = np.array(values)
    if array.dtype.kind not in "if" or array.shape != shape or not np.isfinite(array).all():
        raise ValueError(f"{name} must be {' x '.join(map(str, shape))} numbers, is {records.shorten(values)}")
    return array


def of_workload(path: Path, workload: str) -> Calibration:
    """Read a fit file that must be of this workload; raises ValueError where it is of another."""
    made = read(path)
    if made.workload != workload:
        raise ValueError(f"{path}: is a fit of {made.workload}, not of {workload}; give one of {workload}")
    return made


def for_workload(path: Path, workload: str, system: str) -> Calibration:
    """Read a fit file that must be of this workload and system; raises ValueError where it is of others."""
    made = of_workload(path, workload)
    if made.site.name != system:
        raise ValueError(f"{path}: is a fit of {workload} on {made.site.name}, not on {system}; give one of {system}")
    return made
