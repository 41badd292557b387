"""Who this process is among the ranks of a run, and how they find each other: mpirun, torchrun,
srun, or alone.
"""

import contextlib
import datetime
import enum
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from energynn.experiment.config import RunConfig
from energynn.host import launchers


@dataclass(frozen=True)
class World:
    """Describe this process among ``size`` equal ones; each has one device."""

    rank: int
    size: int
    device: torch.device

    def describe(self) -> dict:
        """Return what the event ``rank_start`` tells of this rank, beside its process."""
        facts = {"world_size": self.size, "device": "cpu"}
        if self.device.type == "cuda":
            gpu = torch.cuda.get_device_properties(self.device)
            # its sensors are known by its UUID
            facts |= {"device": gpu.name, "gpu_uuid": str(gpu.uuid)}
        return facts

    def memory(self) -> dict[str, int]:
        """Return the most memory that tensors have taken on this process's GPU; nothing without
        one.
        """
        if self.device.type == "cpu":
            return {}
        return {"memory_gpu_peak_B": torch.cuda.max_memory_allocated(self.device)}

    def tell(self, line: str) -> None:
        """Print a line once for all ranks."""
        if self.rank == 0:
            print(line, flush=True)


def join_ranks(config: RunConfig) -> World:
    """Find the other ranks, connect to them, and set device, threads and seeds as the
    configuration says.

    Connects also if this process is the only one, so that one rank and many take the same path.
    Raises ValueError if the number of ranks is not ``config.devices``, or if there is no GPU
    where one is asked for.
    """
    # `limit_waiting_time` shortens it
    timeout = datetime.timedelta(seconds=config.setup_timeout_s)
    rank, size, local_rank, store = _find_ranks(timeout)
    if size != config.devices:
        raise ValueError(
            f"devices: {config.devices} asked for, but the launcher made a world of {size}; "
            f"start {config.devices} ranks (mpirun -n of the MPI that mpi4py was built for, or "
            "torchrun --nproc-per-node), and give srun --mpi=pmi2, or --mpi=pmix for Open MPI"
        )
    device = _device_of_rank(config, local_rank)
    torch.set_num_threads(config.threads_per_device)
    seed_generators(config.seed, config.deterministic)
    launchers.use_loopback_on_one_host(size)
    world = World(rank, size, device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timeout
    )
    launchers.unlink_shared_memory()
    return world


def _device_of_rank(config: RunConfig, local_rank: int) -> torch.device:
    """Choose the device of this rank, which CUDA takes from now on."""
    gpus = torch.cuda.device_count()
    if config.device == "gpu" and not gpus:
        raise ValueError(
            "device: gpu asked for, but torch sees none; look at nvidia-smi, or ask for cpu"
        )
    if config.device == "cpu" or not gpus:
        return torch.device("cpu")
    index = 0 if gpus == 1 else local_rank  # each rank may be shown its own GPU only
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def limit_waiting_time(seconds: float) -> None:
    """Let a rank fail from now on if it waits for the others for longer; setting up may take its
    time.
    """
    # The latter is its name until torch 2.11.
    set_timeout = (
        getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    )
    set_timeout(datetime.timedelta(seconds=seconds), dist.group.WORLD)


def leave_ranks() -> None:
    """Disconnect from the other ranks."""
    dist.destroy_process_group()


def seed_generators(seed: int, deterministic: bool) -> None:
    """Seed torch's generators; choose deterministic algorithms or the fastest, as the study did for
    cuDNN.
    """
    # cuBLAS is deterministic with it only.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
    torch.use_deterministic_algorithms(deterministic, warn_only=deterministic)
    # A help for debugging that costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False


def total(values: list[float], world: World) -> list[float]:
    """Add up values over all ranks, in float64."""
    tensor = torch.tensor(values, dtype=torch.float64, device=world.device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def all_gather(value, world: World) -> list:
    """Gather what each rank gives, in the order of the ranks."""
    everyone: list = [None] * world.size
    dist.all_gather_object(everyone, value)
    return everyone


def barrier(world: World) -> None:
    """Wait until every rank is here and its device has nothing left to do."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    total([0.0], world)  # all ranks have to arrive, and reading the sum waits for it


class LostRank(ConnectionError):
    """Tell that another rank ended, or was silent for longer than ``collective_timeout_s``."""


@contextlib.contextmanager
def lost_ranks_named() -> Iterator[None]:
    """Say in one line that another rank is lost, where torch tells of sockets and kernels."""
    try:
        yield
    except RuntimeError as error:
        words = str(error)
        is_of_network = isinstance(error, dist.DistError) or "gloo" in words
        is_alone = dist.is_initialized() and dist.get_world_size() == 1
        if is_alone or not is_of_network:
            raise
        first_line = words.splitlines()[0].replace("GLHF! 🏖️", "").strip()
        raise LostRank(
            f"{launchers.LOST_RANK_TEXT} ({first_line}); {launchers.LOST_RANK_HINT}"
        ) from error


def end_all_ranks() -> None:
    """End all ranks, where MPI started them; it would wait for a lost one. Elsewhere this one:
    launchers end the rest.

    perun's own data are lost by this, the samples on disk are not.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if _is_started_by_mpi():
        with contextlib.suppress(ImportError, RuntimeError):  # no mpi4py, or no MPI
            from mpi4py import MPI

            time.sleep(0.3)  # mpirun passes on what was printed, but not after this
            MPI.COMM_WORLD.Abort(1)
    os._exit(1)


class Interrupted(Exception):
    """Tell that the training was asked to stop; it can go on from its checkpoint."""


class RankRequest(enum.IntEnum):
    """Name what a rank wants of all ranks; the greatest of all requests counts."""

    NOTHING = 0
    CHECKPOINT = 1
    STOP = 2  # after a checkpoint


class RankAgreement:
    """Agree whether all ranks write a checkpoint, or stop: about once a second, at steps that
    all share by count.

    A rank is asked by SIGTERM, SIGUSR1 or a file ``.stop``. With the answer comes the number of
    steps to the next question.
    """

    PERIOD_S = 1.0
    MAX_STEPS = 50  # losses that wait on a GPU

    def __init__(self, world: World, folder: Path):
        self.world = world
        self.file = folder / ".stop"
        self.asked = False
        self.steps = 1
        self.left = 1
        self.last_s = time.monotonic()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note_request)

    def _note_request(self, _number: int, _frame) -> None:
        self.asked = True

    def is_due(self) -> bool:
        """Tell whether to ask after this step; call it once per step on every rank."""
        self.left -= 1
        return self.left <= 0

    def __call__(self, checkpoint_is_due: bool = False) -> RankRequest:
        """Return the greatest request of all ranks, which call it after the same step."""
        request = RankRequest.CHECKPOINT if checkpoint_is_due else RankRequest.NOTHING
        if self.asked or self.file.exists():
            request = RankRequest.STOP
        done = self.steps - self.left
        elapsed_s = max(time.monotonic() - self.last_s, 1e-6)
        steps = min(done * self.PERIOD_S / elapsed_s, 2 * self.steps, self.MAX_STEPS)
        values = torch.tensor([request, max(int(steps), 1)], device=self.world.device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        request, self.steps = values.tolist()
        self.left = self.steps
        self.last_s = time.monotonic()
        return RankRequest(request)

    def stoppable_batches(self, batches: Iterable, common: int) -> Iterator:
        """Give the batches of an evaluation; every rank has the first ``common``. Raises
        Interrupted at a stop.
        """
        for number, batch in enumerate(batches):
            yield batch
            if number < common and self.is_due() and self() == RankRequest.STOP:
                raise Interrupted("during an evaluation")


def data_parallel(
    model: torch.nn.Module, config: RunConfig, world: World
) -> DistributedDataParallel:
    """Wrap the model on its device, with gradients averaged over all ranks; compiled if the
    configuration says so.
    """
    device_ids = [world.device] if world.device.type == "cuda" else None
    parallel = DistributedDataParallel(
        model, device_ids, gradient_as_bucket_view=config.gradient_buckets
    )
    if config.gradient_compression == "bfloat16":
        parallel.register_comm_hook(None, default_hooks.bf16_compress_hook)
    if config.compile:
        parallel.compile()
    return parallel


def warm_up(model: torch.nn.Module, compute_loss: Callable[[], torch.Tensor]) -> None:
    """Run forward and backward once so that nothing is set up inside of the measured region, and
    leave no trace.

    Parameters are not changed (no optimizer step), buffers and random generators are put back.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    state = read_random_state()
    compute_loss().backward()
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    restore_random_state(state)


def read_random_state() -> list:
    """Return the states of torch's generators, from which alone trainers draw: the CPU's, and
    the GPU's.
    """
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return states


def restore_random_state(states: list) -> None:
    """Put torch's generators back."""
    torch.set_rng_state(states[0])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])


# --------------------------------------------------------------------------- finding the others


def _find_ranks(timeout: datetime.timedelta) -> tuple[int, int, int, dist.Store]:
    """Find rank, size, local rank, and the store through which the ranks meet."""
    if os.environ.keys() >= {"LOCAL_RANK", "MASTER_ADDR"}:
        # of torchrun
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        return rank, size, int(os.environ["LOCAL_RANK"]), store
    if _is_started_by_mpi():
        return _meet_ranks_by_mpi(timeout)
    return 0, 1, 0, dist.HashStore()


def _meet_ranks_by_mpi(timeout: datetime.timedelta) -> tuple[int, int, int, dist.Store]:
    """Open a port that the system chooses on rank 0; MPI tells the others."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    hosts = world.allgather(socket.gethostname())
    local_rank = hosts[: world.rank].count(hosts[world.rank])
    store = None
    if world.rank == 0:
        # The server listens on every interface; the address is only how rank 0 reaches itself.
        store = dist.TCPStore(
            "127.0.0.1", 0, world.size, True, timeout, wait_for_workers=False
        )
    address = "127.0.0.1"
    if len(set(hosts)) > 1:
        address = os.environ.get("MASTER_ADDR", hosts[0])
    address, port = world.bcast((address, store.port) if store else None)
    store = store or dist.TCPStore(address, port, world.size, False, timeout)
    return world.rank, world.size, local_rank, store


def _is_started_by_mpi() -> bool:
    """Tell whether MPI's launcher started this process."""
    return any(each.are_set() for each in launchers.MPI_LAUNCHERS)
