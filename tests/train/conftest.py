"""Ranks run in processes of their own, because they set threads, cores and seeds."""

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from energynn.experiment import config as configuration
from energynn.measure.samples import events_of_kind, read_events, read_phases
from energynn.train.distributed import World
from tests.ranks import Ranks

# trainings of seconds
AFNO = dict(patch_size=6, embed_dim=32, depth=1, num_blocks=4)
IMAGES = dict(
    local_batch_size=4, image_size=32, training_samples=24, validation_samples=10
)
HERE = Path(__file__).parent
ALONE = World(0, 1, torch.device("cpu"))


@dataclass
class Run:
    """What a few ranks left behind."""

    run_dir: Path
    output: str

    @property
    def losses(self) -> list[float]:
        """Those of rank 0: which rank prints its own first is chance."""
        return self.losses_of_ranks[0]

    @property
    def losses_of_ranks(self) -> dict[int, list[float]]:
        told = re.findall(r"^losses of rank (\d+) (\[.*\])$", self.output, re.MULTILINE)
        return {int(rank): json.loads(losses) for rank, losses in told}

    def events(self, rank: int = 0) -> list[dict]:
        events = read_events(self.run_dir)
        return [event for event in events if event["rank"] == rank]

    def of_kind(self, kind: str) -> list[dict]:
        return events_of_kind(self.events(), kind)


@pytest.fixture(scope="session")
def train():
    """Train in so many ranks (as many as devices, if not told otherwise) with these parameters;
    it ends well, or is refused. patch: a program that changes the trainer before.
    """

    def start(
        run_dir: Path,
        workload: str,
        ranks: int | None = None,
        dtype: str = "float32",
        patch: str = "",
        is_refused: bool = False,
        **parameters,
    ) -> Run:
        run_dir.mkdir(parents=True)
        config = configuration.make(workload, **parameters)
        settings = json.dumps(configuration.asdict(config))
        script = HERE / "rank_main.py"
        if patch:
            run = (
                f"import runpy\nrunpy.run_path({str(script)!r}, run_name='__main__')\n"
            )
            script = run_dir / "patched.py"
            script.write_text(f"{patch}\n{run}")
        words = script, run_dir, settings, dtype
        done = Ranks(ranks or config.devices, *words).wait()
        assert bool(done.returncode) == is_refused, done.stdout
        return Run(run_dir, done.stdout)

    return start


@contextlib.contextmanager
def alone_in_the_world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def alone(signals):
    """A world of one rank that is joined."""
    with alone_in_the_world():
        yield ALONE


def ranks_of(run_dir: Path) -> dict[int, int]:
    """Rank -> process, of the newest start."""
    started = events_of_kind(read_events(run_dir), "rank_start")
    return {event["rank"]: event["pid"] for event in started}


def phase_times(run_dir: Path) -> dict[int, dict[str, float]]:
    """Seconds of each rank in each phase of a folder."""
    return {
        rank: {
            name: float((end_ns - begin_ns)[kinds == kind].sum()) / 1e9
            for kind, name in enumerate(names)
        }
        for rank, (kinds, begin_ns, end_ns, names) in read_phases(
            run_dir, range(9)
        ).items()
    }
