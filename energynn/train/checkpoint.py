"""Weights and checkpoints on disk: written whole or not at all, and read only into what they were made for."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from energynn.files import sha256, whole
from energynn.train import distributed
from energynn.train.distributed import World

GENERATIONS = 2  # a damaged checkpoint costs the time since the one before, not the run


def save_weights(path: Path, model: torch.nn.Module, architecture: dict) -> str:
    """Write the weights with the sizes of their network; return the file's SHA-256."""
    return _write(path, {"architecture": architecture, "state_dict": model.state_dict()})


def load_weights(path: Path, model: torch.nn.Module, architecture: dict) -> None:
    """Put saved weights into the model, ours, or those of a checkpoint of the published FourCastNet.

    Raises ValueError if there are none, or those of another architecture.
    """
    if not path.is_file():
        raise ValueError(f"initial_run: no weights in {path}; make that run first, with save_weights=True")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if "model_state" in saved:  # published code: what DistributedDataParallel calls the parameters, and no sizes
            state_dict = {name.removeprefix("module."): values for name, values in saved["model_state"].items()}
            theirs = architecture
        else:
            theirs, state_dict = saved["architecture"], saved["state_dict"]
    except Exception as error:  # torch.load raises whatever the damaged bytes lead it to
        raise ValueError(f"initial_run: {path} is damaged ({type(error).__name__}); make that run again") from error
    if theirs != architecture:
        other = ", ".join(
            f"{name} {theirs.get(name)} there, {architecture.get(name)} here"
            for name in sorted(theirs.keys() | architecture.keys())
            if theirs.get(name) != architecture.get(name)
        )
        raise ValueError(f"initial_run: {path} holds another architecture ({other}); choose the same sizes")
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as error:
        raise ValueError(f"initial_run: {path} holds another architecture ({_in_short(error)}); choose its") from error


def _in_short(error: Exception) -> str:
    """The first thing that torch found wrong; the whole is a line for each parameter."""
    lines = [line.strip() for line in str(error).splitlines()]
    return lines[min(1, len(lines) - 1)]


# --------------------------------------------------------------------------------------------------------- checkpoints


class Checkpoints:
    """The checkpoints of one run, in ``<run_dir>/checkpoint/``: the state of all ranks between two steps.

    ``parts``, as model, optimizer and schedule, have ``state_dict`` and ``load_state_dict``. Each checkpoint is a file
    and its SHA-256, in this order, so that a file without one is unfinished. Rank 0 writes for all: the parts are the
    same everywhere, batch norm's statistics are those of rank 0 for DistributedDataParallel too; what each rank has of
    its own, its random generators too, is gathered.
    """

    def __init__(self, run_dir: Path, world: World, period_s: float, parts: dict):
        self.folder, self.world, self.period_s, self.parts = Path(run_dir) / "checkpoint", world, period_s, parts
        self.last = time.monotonic()

    def is_due(self) -> bool:
        """Whether rank 0's clock says that it is time; the same answer on every rank only through ``StopVote``."""
        return self.period_s > 0 and time.monotonic() - self.last > self.period_s

    def save(self, optimizer_steps: int, **own) -> None:
        """Write the parts, and what each rank has of its own; returns once it is on disk.

        Weights that are not finite are not written: the next loss will not be either, and end the training.
        """
        everyone: list = [None] * self.world.size
        dist.all_gather_object(everyone, own | {"random": distributed.random_state()})
        weights = self.parts["model"].state_dict().values() if self.world.rank == 0 else ()
        if not all(value.isfinite().all() for value in weights):
            print(f"energynn: warning: no checkpoint, weights are not finite after {optimizer_steps} optimizer steps",
                  file=sys.stderr, flush=True)  # fmt: skip
        elif self.world.rank == 0:
            self.folder.mkdir(exist_ok=True)
            path = self.folder / f"{optimizer_steps:012d}.pt"
            state = {name: part.state_dict() for name, part in self.parts.items()}
            digest = _write(path, {"optimizer_steps": optimizer_steps, "parts": state, "ranks": everyone})
            with whole(path.with_suffix(".sha256")) as file:
                file.write(digest.encode() + b"\n")
            # A later one is damaged, as it was not gone on from; of a killed write there may be parts.
            good = sorted(mark.stem for mark in self.folder.glob("*.sha256") if mark.stem <= path.stem)[-GENERATIONS:]
            for old in self.folder.iterdir():
                if old.name.split(".")[0] not in good:
                    old.unlink()
        self.last = time.monotonic()
        distributed.barrier(self.world)

    def load(self) -> tuple[int, dict] | None:
        """Put parts and random generators back as in the newest whole checkpoint; a warning tells of a damaged one.

        Returns the optimizer's steps and what this rank saved of its own, or None if there is no checkpoint. Raises
        ValueError on every rank if they do not all see the same one, or one of other sizes.
        """
        path, found = self._newest()
        everyone: list = [None] * self.world.size
        dist.all_gather_object(everyone, path and path.name)
        if len(set(everyone)) > 1:  # a shared disk can be late, or damaged for one host
            raise ValueError(f"{self.folder}: ranks see different checkpoints ({everyone}); start again")
        if found is None:
            return None
        if len(found["ranks"]) != self.world.size:
            raise ValueError(f"{path}: of {len(found['ranks'])} devices, not {self.world.size}; go on with as many")
        try:
            for name, part in self.parts.items():
                part.load_state_dict(found["parts"][name])
        except (KeyError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{path}: of another network or optimizer ({_in_short(error)}); go on with the configuration that "
                f"it was made with, or delete {self.folder}"
            ) from error
        own = found["ranks"][self.world.rank]
        distributed.restore_random_state(own.pop("random"))
        if self.world.rank == 0:
            print(f"energynn: goes on after {found['optimizer_steps']} optimizer steps", flush=True)
        return found["optimizer_steps"], own

    def _newest(self) -> tuple[Path | None, dict | None]:
        """The newest whole checkpoint that this rank sees, and what it holds."""
        for mark in sorted(self.folder.glob("*.sha256"), reverse=True):
            path = mark.with_suffix(".pt")
            try:
                if sha256(path) != mark.read_text().strip():
                    raise ValueError("its SHA-256 differs")
                return path, torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:  # torch.load raises whatever the damaged bytes lead it to
                if self.world.rank == 0:
                    print(f"energynn: warning: checkpoint {path.name} is damaged ({error}); taking the one before",
                          file=sys.stderr, flush=True)  # fmt: skip
        return None, None

    def remove(self) -> None:
        """After the end of the training nothing goes on from here."""
        if self.world.rank == 0 and self.folder.is_dir():
            for path in self.folder.iterdir():
                path.unlink()
            self.folder.rmdir()


def _write(path: Path, value) -> str:
    """Write a file whole or not at all; return its SHA-256."""
    with whole(path) as file:
        torch.save(value, file)
    return sha256(path)
