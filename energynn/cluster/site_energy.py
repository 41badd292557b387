"""What Slurm says of the energy of whole nodes, beside what we measured: a check that nothing is computed from.

Where a site has an energy plugin, sacct tells the energy of each job step. Fans, power supplies and idle devices are in
it, and the ranks' start and end; so a run's own energy must be less. What sacct says is kept in job/site_energy.json.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from energynn import records
from energynn.cluster import slurm
from energynn.files import utc_now, write_json
from energynn.measure.energy import JOULE_PER_KWH
from energynn.reading import json_or_nothing

FILE = "job/site_energy.json"
NO_VALUE_J = 2**63  # Slurm's NO_VAL64 and INFINITE64 are a little below 2**64
# What we measured may be so much more than what the nodes had, as their sensors are not exact; and Slurm, which reads
# them every so many seconds only, misses what is drawn for as long at both ends of a step.
MOST_OF_THEIRS = 1.05
# What a plugin counts; all others, as ipmi, xcc and pm_counters, count whole nodes.
COMPONENTS = {"acct_gather_energy/rapl": ("cpu", "ram"), "acct_gather_energy/gpu": ("gpu",)}
OVER = (*slurm.OVER, "PREEMPTED", "REQUEUED")


def ask(folders: list[Path]) -> None:
    """Ask once for all finished runs of these that nobody has asked for; says nothing where there is no accounting."""
    jobs = {folder: _jobs(records.read(folder) or {}) for folder in folders if not (folder / FILE).exists()}
    wanted = sorted(set().union(*jobs.values()))
    if not wanted:
        return
    with contextlib.suppress(ValueError):
        fields = "JobIDRaw,State,ElapsedRaw,NNodes,ConsumedEnergyRaw"
        told = slurm.call("sacct", "-nPD", "--noconvert", "-o", fields, "-j", ",".join(wanted))
        config = slurm.call("scontrol", "show", "config")
        settings = dict(re.findall(r"^AcctGather(EnergyType|NodeFreq)\s*=\s*(\S+)", config, re.MULTILINE))
        rows = [line.split("|") for line in told.splitlines() if line.count("|") == 4]
        for folder, numbers in jobs.items():
            mine = [row for row in rows if row[0].split(".")[0] in numbers]
            if mine and numbers and all(row[1].split(" ")[0] in OVER for row in mine):
                (folder / FILE).parent.mkdir(exist_ok=True)
                with contextlib.suppress(OSError):  # a colleague's folder
                    write_json(folder / FILE, _facts(mine, settings))


def _jobs(record: dict) -> set[str]:
    """The numbers of all jobs of Slurm that a finished run was made in."""
    if record.get("status") != "finished" or record.get("job", {}).get("scheduler") != "slurm":
        return set()
    numbers = {str(each.get("job_id", "")) for each in (record["job"], *record.get("hosts", []))}
    return {number for number in numbers if re.fullmatch(r"\d+", number)}


def _facts(rows: list[list[str]], settings: dict[str, str]) -> dict:
    """What sacct told of the steps of a run's jobs; ``energy_J`` only where something was measured.

    The steps that srun starts follow each other and hold the ranks; without any, the batch step of one node does.
    """
    steps = []
    for step, _state, seconds, nodes, joules in rows:
        value_J = int(joules) if joules.isdigit() else 0
        measured = {"energy_J": value_J} if 0 < value_J < NO_VALUE_J else {}
        steps.append({"step": step, "time_s": int(seconds or 0), "nodes": int(nodes or 0)} | measured)
    of_ranks = [step for step in steps if re.search(r"\.\d+$", step["step"])]
    counted = of_ranks or [step for step in steps if step["step"].endswith(".batch") and step["nodes"] == 1]
    facts = {"source": "sacct ConsumedEnergyRaw", "plugin": settings.get("EnergyType", ""), "asked_at": utc_now()}
    facts |= {"read_every_s": int(settings.get("NodeFreq", 0)), "steps": steps}
    if not counted or any("energy_J" not in step for step in counted):
        return facts | {"provenance": "not measured"}
    energy_J, time_s = sum(step["energy_J"] for step in counted), sum(step["time_s"] for step in counted)
    return facts | {"provenance": "reported by Slurm", "energy_J": energy_J, "time_s": time_s}


def words(folder: Path) -> str:
    """What Slurm says, beside what we measured of the same; nothing where it has not measured it."""
    theirs = json_or_nothing(folder / FILE)
    record = records.read(folder) or {} if "energy_J" in theirs else {}
    components = COMPONENTS.get(theirs.get("plugin"), ("total",))
    ours_J = sum(record.get(f"energy_{component}_J", 0.0) for component in components)
    if not ours_J:
        return ""
    share = ours_J / theirs["energy_J"]
    what = "whole nodes" if components == ("total",) else f"all {' and '.join(components)}"
    text = (
        f"Slurm: {theirs['energy_J'] / JOULE_PER_KWH:.3g} kWh of {what}, starts and ends included; ours is {share:.0%}"
    )
    unread = 2 * theirs["read_every_s"] / max(theirs["time_s"], 1)
    return f"{text}, MORE than they had: one of the two is wrong" if share > MOST_OF_THEIRS + unread else text
