"""Weights and checkpoints on disk: written whole or not at all, and loaded only into the same
architecture.
"""

import math
import time
from pathlib import Path

import torch

from energynn.host.files import (
    atomic_write,
    checkpoint_folder,
    hash_file,
    remove_matching,
)
from energynn.host.reading import join_faults
from energynn.train import distributed
from energynn.train.distributed import World

# also one that was cut off while it was written
CHECKPOINT_NAME_PATTERN = r"\.?(\d{12})\.(?:pt|sha256)(?:\.\d+)?"
GENERATIONS = 2  # a damaged checkpoint costs the time since the one before, not the run


def save_weights(path: Path, model: torch.nn.Module, architecture: dict) -> None:
    """Write the weights with the sizes of their network."""
    saved = {"architecture": architecture, "state_dict": model.state_dict()}
    with atomic_write(path) as file:
        torch.save(saved, file)


def load_weights(path: Path, model: torch.nn.Module, architecture: dict) -> None:
    """Put saved weights into the model.

    Raises ValueError if there are none, or if they are of another architecture.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        there = saved["architecture"]
        state_dict = saved["state_dict"]
    except Exception as error:
        # torch.load raises whatever the damaged bytes lead it to
        reason = f"{path} is missing or damaged ({type(error).__name__})"
        raise ValueError(
            f"initial_run: {reason}; move its folder elsewhere, and make that run with "
            "save_weights=True"
        ) from error
    if there != architecture:
        raise ValueError(
            f"initial_run: {path} is of {there}, here is {architecture}; choose the same sizes"
        )
    model.load_state_dict(state_dict)


# ---------------------------------------------------------------------------------- checkpoints


class Checkpoints:
    """Keep the checkpoints of one run, in ``<run_dir>/checkpoint/``: the state of all ranks
    between two steps.

    ``parts``, as model, optimizer and schedule, have ``state_dict`` and ``load_state_dict``.
    First the file of a checkpoint is written, then that of its SHA-256: without the second the
    first is unfinished. Rank 0 writes for all ranks. The parts are the same on all;
    DistributedDataParallel, too, takes batch norm's statistics from rank 0. What each rank has of
    its own, as its random generators, rank 0 gathers.
    """

    def __init__(self, run_dir: Path, world: World, period_s: float, parts: dict):
        self.folder = checkpoint_folder(run_dir)
        self.world = world
        self.period_s = period_s
        self.parts = parts
        self.last_s = time.monotonic()

    def is_due(self) -> bool:
        """Tell whether it is time by this rank's clock; ranks agree through ``RankAgreement``."""
        return self.period_s > 0 and time.monotonic() - self.last_s > self.period_s

    def save(self, optimizer_steps: int, **own) -> None:
        """Write the parts, and what each rank has of its own; return once it is on disk.

        What is no longer needed is removed.
        """
        own["random"] = distributed.read_random_state()
        ranks = distributed.all_gather(own, self.world)
        if self.world.rank == 0:
            path = self.folder / f"{optimizer_steps:012d}.pt"
            parts = {name: part.state_dict() for name, part in self.parts.items()}
            saved = {"optimizer_steps": optimizer_steps, "parts": parts, "ranks": ranks}
            with atomic_write(path) as file:
                torch.save(saved, file)
            with atomic_write(path.with_suffix(".sha256")) as file:
                file.write(hash_file(path).encode() + b"\n")
            # The run went on from an earlier checkpoint if there is a later one, so the later one
            # is damaged.
            marks = sorted(mark.stem for mark in self.folder.glob("*.sha256"))
            usable = [steps for steps in marks if steps <= path.stem]
            remove_matching(
                self.folder, CHECKPOINT_NAME_PATTERN, kept=usable[-GENERATIONS:]
            )
        self.last_s = time.monotonic()
        distributed.barrier(self.world)

    def load(self, most_steps: float = math.inf) -> tuple[int, dict] | None:
        """Put parts and random generators back as in the newest whole checkpoint; a warning
        tells of a damaged one.

        Returns the optimizer's steps and what this rank saved of its own, or None if there is no
        checkpoint. Raises ValueError on every rank if they do not all see the same one, and where
        it is of another run, as by its ranks or by more steps than the ``most_steps`` of this one.
        """
        name, saved = self._read_newest_checkpoint()
        everyone = distributed.all_gather(name, self.world)
        if len(set(everyone)) > 1:  # a shared disk can be late, or damaged for one host
            raise ValueError(
                f"{self.folder}: ranks see different checkpoints ({everyone}); start again"
            )
        if saved is None:
            return None
        with join_faults(f"{self.folder}: {name} is not of this run; remove it"):
            steps = saved["optimizer_steps"]
            ranks = saved["ranks"]
            if len(ranks) != self.world.size or not 0 <= steps <= most_steps:
                raise ValueError(f"it has {len(ranks)} ranks and {steps} steps")
            for part in self.parts:
                self.parts[part].load_state_dict(saved["parts"][part])
            own = ranks[self.world.rank]
            distributed.restore_random_state(own.pop("random"))
        self.world.tell(f"energynn: goes on after {steps} optimizer steps")
        return steps, own

    def _read_newest_checkpoint(self) -> tuple[str, dict | None]:
        """Return name and content of the newest whole checkpoint that this rank sees."""
        for mark in sorted(self.folder.glob("*.sha256"), reverse=True):
            path = mark.with_suffix(".pt")
            try:
                if hash_file(path) != mark.read_text().strip():
                    raise ValueError("its SHA-256 differs")
                return path.name, torch.load(
                    path, map_location="cpu", weights_only=True
                )
            except Exception as error:
                # torch.load raises whatever the damaged bytes lead it to
                warning = f"checkpoint {path.name} is damaged ({error}); taking the one before"
                self.world.tell(f"energynn: warning: {warning}")
        return "", None

    def remove(self) -> None:
        """Remove the checkpoints after the end of the training."""
        if self.world.rank == 0 and self.folder.is_dir():
            remove_matching(self.folder, CHECKPOINT_NAME_PATTERN)
