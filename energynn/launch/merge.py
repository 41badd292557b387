"""Records of others, copied into one's own runs folder: checked on the way in, and nothing is overwritten."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from energynn import processes, records
from energynn.files import require_place, staged
from energynn.measure.perun_adapter import READ_WITHIN_S, read_hdf5
from energynn.reading import one_fault

NOT_COPIED = shutil.ignore_patterns(".*", "checkpoint", records.IGNORED)  # locks and views; what they ignore
PLAIN = re.compile("[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Arrival:
    """What became of one run of others: ``state`` is came, here or refused; ``words`` say where it lies, or why not."""

    run: str
    state: str
    words: str


def merge(source: Path, runs_dir: Path, machine: str = "") -> list[Arrival]:
    """Copy every run below ``source`` that has no fault to runs_dir/SYSTEM/RUN, or beside that to SYSTEM@MACHINE/RUN.

    The latter is for the system "local", which is another machine for everybody, and where another record has the
    place. ``machine`` is by default the host that the record names. Raises ValueError where there are no runs.
    """
    folders = [folder for folder in records.run_dirs(source) if folder.parent.name != "superseded"]
    if not folders:
        raise ValueError(f"merge: no run lies below {source}; give the folder runs/ of the others, or one run's")
    if machine and not PLAIN.fullmatch(machine):
        raise ValueError(f"machine: must be letters, digits, '_', '-' and '.', got {machine!r}")
    require_place(runs_dir / "system")
    known = {own["record_sha256"]: folder for folder in records.run_dirs(runs_dir) if (own := records.read(folder))}
    arrivals = []
    for folder in folders:
        try:
            with one_fault(folder.name):
                arrival = _bring(folder, runs_dir, machine, known)
        except ValueError as error:
            arrival = Arrival(folder.name, "refused", str(error).removeprefix(f"{folder.name}: "))
        arrivals.append(arrival)
    return arrivals


def _bring(folder: Path, runs_dir: Path, machine: str, known: dict[str, Path]) -> Arrival:
    """Copy one run, unless its record is among the known; raises ValueError with the reason to refuse it.

    A copy is checked, under the names that its record tells: whoever sent it may have renamed folders.
    """
    if not (folder / "record.json").is_file():
        raise ValueError("no record.json; `energynn check --recover` writes one, where it was made")
    record = records.read_record(folder)
    if record.get("record_sha256") in known:
        return Arrival(folder.name, "here", f"as {known[record['record_sha256']]}")
    target = _place(record, runs_dir, machine)
    with staged(runs_dir) as unfinished:
        copy = unfinished / record["system"] / target.name
        shutil.copytree(folder, copy, ignore=_not_copied)
        for path in folder.rglob("*.hdf5"):
            processes.require_an_end(read_hdf5, path, READ_WITHIN_S)
        if faults := records.check(copy):
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise ValueError(faults[0].removeprefix(f"{copy.name}: ") + more)
        target.parent.mkdir(parents=True, exist_ok=True)
        copy.rename(target)
    known[record["record_sha256"]] = target
    doubt = "" if record["valid"] else f"; not valid as evidence: {'; '.join(record['invalid_reasons'])}"
    return Arrival(folder.name, "came", f"to {target.parent}{doubt}")


def _not_copied(folder: str, names: list[str]) -> set[str]:
    """What stays behind of a folder. Raises ValueError for a link, a pipe or a device, which are no files of a run."""
    left = NOT_COPIED(folder, names)
    for name in set(names) - left:
        path = Path(folder, name)
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{name}: is a link or no regular file, which is not copied; put the file itself there")
    return left


def _place(record: dict, runs_dir: Path, machine: str) -> Path:
    """A folder that does not exist. Raises ValueError where another record has it, or where a name is none."""
    system, run_id = str(record.get("system")), str(record.get("run_id"))
    if not (PLAIN.fullmatch(system) and PLAIN.fullmatch(run_id)):
        raise ValueError(f"{system}/{run_id} is no name of a folder")
    place = runs_dir / system / run_id
    if system == "local" or place.exists():
        host = machine or re.sub("[^A-Za-z0-9_.-]", "-", str(record.get("machine", {}).get("hostname") or "unknown"))
        place = runs_dir / f"{system}@{host}" / run_id
    if place.exists():
        raise ValueError(f"{place} is another record; --machine NAME gives their machine a name of its own")
    return place
