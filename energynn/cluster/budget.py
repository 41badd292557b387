"""Hard budgets of GPU hours or kWh over studies: what is spent, what is reserved, and what no longer fits.

All hours for which jobs hold devices count, those of starts that failed, too. The kWh are these hours at the mean power
of the run's own training, else of others of its study, else of the paper's runs.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from energynn import config as configuration
from energynn import records
from energynn.cluster import costs
from energynn.config import RunConfig
from energynn.files import write_json
from energynn.measure.energy import SECOND_PER_HOUR
from energynn.reading import json_or_nothing, json_table, one_fault

FILE = "budgets.json"  # in the folder of a system
UNITS = {"gpu_hours": "GPU hours", "kWh": "kWh"}
REMEDY = "raise it with --budget-gpu-hours or --budget-kwh, or see `energynn status`"


@dataclass(frozen=True)
class Budget:
    """What the runs of some studies may cost on a system, in GPU hours, kWh, or both."""

    name: str
    limits: dict[str, float]
    runs: list[str]

    def __post_init__(self):
        are_numbers = all(records.is_of_kind(limit, "number") for limit in self.limits.values())
        if not (are_numbers and self.limits.keys() <= UNITS.keys() and records.is_of_kind(self.runs, "texts")):
            raise ValueError(f"budget of {self.name}: needs numbers of {' or '.join(UNITS)}, and names of runs")


def read(system_dir: Path) -> list[Budget]:
    """All budgets of a system's runs. Raises ValueError where their file cannot be read."""
    path = system_dir / FILE
    with one_fault(f"{path}: cannot be read; mend or delete it"):
        budgets = json_table(path) if path.exists() else {}
        return [Budget(name, facts["limits"], facts["runs"]) for name, facts in budgets.items()]


def with_another(
    budgets: list[Budget], studies: list[str], limits: dict[str, float | None], runs: list[str]
) -> list[Budget]:
    """The budgets and one of these studies, or its new limits; a limit that is None stays as it was."""
    name = ", ".join(Path(study).name for study in studies)  # of a study in a file, wherever it is named from
    limits = {unit: limit for unit, limit in limits.items() if limit is not None}
    if not limits:
        return budgets
    before = next((each for each in budgets if each.name == name), Budget(name, {}, []))
    new = Budget(name, before.limits | limits, sorted({*before.runs, *runs}))
    return [*(each for each in budgets if each.name != name), new]


def keep(system_dir: Path, budgets: list[Budget]) -> None:
    """Hold all runs of a system to these budgets from now on."""
    if budgets:
        system_dir.mkdir(parents=True, exist_ok=True)
        write_json(system_dir / FILE, {each.name: {"limits": each.limits, "runs": each.runs} for each in budgets})


class Account:
    """What the runs of one budget have spent, and will have spent when all that was promised to them is used."""

    def __init__(self, system_dir: Path, budget: Budget, queued: Collection[str] = (), gpu: str = "A100"):
        self.budget, self.gpu = budget, gpu
        folders = [system_dir / name for name in budget.runs]
        self.known_W = _known_powers(folders)  # of a device
        self.spent, self.promised = dict.fromkeys(UNITS, 0.0), dict.fromkeys(UNITS, 0.0)
        for folder in folders:
            with one_fault(f"{folder / 'job'}: its files cannot be read; mend or delete them"):
                starts = _starts(folder)
                spent_h, promised_h = _hours(folder, starts, at_most=False), _hours(folder, starts, at_most=True)
                if folder.name in queued and (not starts or "ended_at" in starts[-1]):  # a start waits
                    submission = json_or_nothing(folder / "job" / "submission.json")
                    promised_h += submission.get("minutes", 0) / 60 * submission.get("devices_held", 0)
            self._add(folder, spent_h, self.spent)
            self._add(folder, promised_h, self.promised)

    def _add(self, folder: Path, device_hours: float, amounts: dict[str, float]) -> None:
        amounts["gpu_hours"] += device_hours
        if "kWh" in self.budget.limits and device_hours:
            amounts["kWh"] += device_hours * self.device_W(_config(folder)) / 1000

    def device_W(self, run: RunConfig | None) -> float:
        """Mean power of the run for each of its devices. Raises ValueError with the remedy where nobody knows it."""
        name = configuration.run_id(run) if run else ""
        if name in self.known_W:
            return self.known_W[name]
        if self.known_W:
            return max(self.known_W.values())
        if run and (cost := costs.expect(run, self.gpu)).gpu_hours:
            return 1000 * cost.energy_kWh / cost.gpu_hours
        raise ValueError(
            f"budget of {self.budget.name}: what its runs draw is not known before one of them is made; "
            "make one without --budget-kwh, or give --budget-gpu-hours"
        )

    def takes(self, run: RunConfig, device_hours: float) -> bool:
        """Promise so much to a run, if it still fits."""
        needs = {"gpu_hours": device_hours, "kWh": 0.0}
        if "kWh" in self.budget.limits and device_hours:
            needs["kWh"] = device_hours * self.device_W(run) / 1000
        if any(self.promised[unit] + needs[unit] > limit for unit, limit in self.budget.limits.items()):
            return False
        for unit, need in needs.items():
            self.promised[unit] += need
        return True

    def words(self) -> str:
        parts = []
        for unit, limit in self.budget.limits.items():
            more = self.promised[unit] - self.spent[unit]
            reserved = f", up to {round(more, 3):g} more reserved" if more > 0.005 * limit else ""
            parts.append(f"{round(self.spent[unit], 3):g} of {limit:g} {UNITS[unit]} spent{reserved}")
        return f"budget of {self.budget.name}: {'; '.join(parts)}"


def beyond(run_dir: Path, run: RunConfig | None, device_hours: float) -> str:
    """Why a run may not take so many hours of all its devices together; nothing where each budget of it lasts.

    A start that has just begun is promised all until its time limit already, and takes no more.
    """
    for each in read(run_dir.parent):
        if run_dir.name in each.runs:
            account = Account(run_dir.parent, each)
            if not account.takes(run, device_hours):
                return f"{account.words()}; {REMEDY}"
    return ""


def _known_powers(folders: list[Path]) -> dict[str, float]:
    """Mean power of a device in W, by name of the run, of those that have a record."""
    found = [(folder.name, records.read(folder) or {}) for folder in folders]
    return {name: each["mean_power_total_W"] / each["devices"] for name, each in found if "mean_power_total_W" in each}


def _config(folder: Path) -> RunConfig | None:
    parameters = json_or_nothing(folder / "job" / "parameters.json")
    parameters = parameters or (records.read(folder) or {}).get("config")
    with one_fault(f"{folder}: its configuration cannot be read; mend or delete job/parameters.json"):
        return configuration.from_dict(parameters) if parameters else None


def _starts(folder: Path) -> list[dict]:
    """What a run's jobs wrote when they started, in order."""
    starts = [json_or_nothing(path) for path in folder.glob("job/start-*.json")]
    return sorted((start for start in starts if "started_at" in start), key=lambda start: start["started_at"])


def _hours(folder: Path, starts: list[dict], at_most: bool) -> float:
    """Device hours that a run has held: of its jobs, or without any those of its records, earlier attempts' too.

    A start that has told no end ended before the next one. The last counts up to now, ``at_most`` up to its time limit.
    """
    if not starts:
        attempts = [folder, *folder.parent.glob(f"superseded/{folder.name}.*")]
        found = [records.read(attempt) or {} for attempt in attempts]
        times = [(each.get("perun_time_s", each.get("training_time_s", 0)), each.get("devices", 0)) for each in found]
        return sum(time_s * devices for time_s, devices in times) / SECOND_PER_HOUR
    total_h = 0.0
    for start, later in zip(starts, [*starts[1:], {}], strict=True):
        begun_s = _second(start["started_at"])
        limit_s = begun_s + 60 * start.get("minutes", 0)
        told = start.get("ended_at") or later.get("started_at")
        end_s = _second(told) if told else min(time.time(), limit_s)
        if at_most and not told:
            end_s = limit_s
        total_h += max(end_s - begun_s, 0) / SECOND_PER_HOUR * start.get("devices_held", 0)
    return total_h


def _second(utc: str) -> float:
    return datetime.fromisoformat(utc).timestamp()
