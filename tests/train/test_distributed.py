import copy
import json
import os
import random
import signal
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from energynn import config, launchers, records
from energynn.launch import start
from energynn.measure import machine
from energynn.measure.samples import Events
from energynn.train import distributed
from energynn.train.distributed import Request
from tests.ranks import start_ranks
from tests.train.conftest import HERE

VARIABLES = (
    *(variables.rank for variables in launchers.OF_MPI),
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_ID",
)
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "2", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, (0, 1, 0)),
        (TORCHRUN, (3, 8, 1)),
        (SRUN, (5, 6, 2)),
        (SRUN | TORCHRUN, (3, 8, 1)),  # torchrun inside srun
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (0, 1, 0)),  # a batch script that starts python itself
        ({"RANK": "3"}, (0, 1, 0)),  # a stray variable is no launcher
    ],
)
def test_ranks_are_found_by_the_launchers_variables(monkeypatch, environment, expected):
    monkeypatch.setattr(distributed, "_mpi_world_size", lambda: 1)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert distributed._find()[:3] == expected


@pytest.fixture
def two_ranks_of_gpus(monkeypatch):
    """A function that joins as rank 0 of two, this host's number 2 of GPUs; what it set is returned, or it raises.

    CUDA, NCCL and NVML are stood in for.
    """

    def join(visible):
        did, store = {}, HashStore()
        gpu = SimpleNamespace(name="H100", uuid="aaaa")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: did.update(device=str(device)))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        monkeypatch.setattr(distributed.dist, "init_process_group", lambda backend, **_: did.update(backend=backend))
        monkeypatch.setattr(machine, "pin_to_gpu", lambda uuid: did.update(beside=uuid))
        monkeypatch.setattr(distributed, "be_deterministic", lambda *_, **__: None)
        monkeypatch.setattr(distributed, "_find", lambda: (0, 2, 2, lambda timeout: store))
        distributed.join(config.make("resnet50", device="gpu", devices=2, threads_per_device=torch.get_num_threads()))
        return did

    return join


@pytest.mark.parametrize("visible, device", [(1, "cuda:0"), (4, "cuda:2")])
def test_a_rank_takes_its_gpu_and_stays_beside_it(two_ranks_of_gpus, visible, device):
    """A launcher may show each rank its own GPU only, which is number 0 then."""
    assert two_ranks_of_gpus(visible) == dict(device=device, backend="nccl", beside="aaaa")


def test_more_ranks_than_gpus_on_a_host_are_refused(two_ranks_of_gpus):
    with pytest.raises(
        ValueError, match="devices: rank 0 is number 2 on a host with 2 GPUs; start fewer ranks per host"
    ):
        two_ranks_of_gpus(2)


def test_warm_up_leaves_no_trace():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    before, random_state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    calls = []

    def loss():
        calls.append(model(torch.randn(16, 4)).square().mean())
        return calls[-1]

    distributed.warm_up(model, loss)
    assert len(calls) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_seeds_make_every_generator_start_again():
    settings = torch.are_deterministic_algorithms_enabled()
    try:
        distributed.be_deterministic(7)
        first = (torch.rand(3).tolist(), random.random())
        distributed.be_deterministic(7)
        assert (torch.rand(3).tolist(), random.random()) == first
        distributed.be_deterministic(8)
        assert torch.rand(3).tolist() != first[0]
    finally:
        torch.use_deterministic_algorithms(settings)


@pytest.fixture
def alone():
    """A world of one rank that is joined; signals are handled as before afterwards."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield distributed.World(0, 1, 0, torch.device("cpu"), "a")
    torch.distributed.destroy_process_group()
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_ranks_agree_about_once_a_second_by_the_clock_of_rank_0(alone, tmp_path, monkeypatch):
    """Steps of 0.1 s; the question comes after ever more of them, but never later than after a second."""
    now = [100.0]
    monkeypatch.setattr(distributed.time, "monotonic", lambda: now[0])
    agreement, asked = distributed.Agreement(alone, tmp_path), []
    for step in range(1, 38):
        now[0] += 0.1001
        if agreement.is_due():
            asked.append(step)
            assert agreement() == Request.NOTHING
    assert asked == [1, 3, 7, 15, 24, 33]


def test_the_greatest_request_counts_and_an_evaluation_hears_a_stop(alone, tmp_path):
    agreement = distributed.Agreement(alone, tmp_path)
    assert agreement.is_due() and agreement(checkpoint_is_due=True) == Request.CHECKPOINT
    assert list(agreement.during("abcdefg", 0)) == list("abcdefg")
    os.kill(os.getpid(), signal.SIGUSR1)
    heard = []
    with pytest.raises(distributed.Interrupted):
        for batch in agreement.during("abcdefg" * 20, 140):
            heard.append(batch)
    assert 0 < len(heard) <= agreement.MOST_STEPS and agreement(checkpoint_is_due=True) == Request.STOP


def test_a_file_asks_all_ranks_to_stop(alone, tmp_path):
    agreement = distributed.Agreement(alone, tmp_path)
    (tmp_path / "stop").touch()
    assert agreement.is_due() and agreement() == Request.STOP


def test_a_rank_is_pinned_by_its_place_on_its_own_host(monkeypatch):
    """The second rank of the second host is rank 3 of the world: that host has no cores for a fourth rank."""

    def gather(hosts, mine):
        hosts[:] = ["a", "a", "b", "b"]

    pinned = []
    monkeypatch.setattr(distributed.dist, "all_gather_object", gather)
    monkeypatch.setattr(distributed.os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(distributed.os, "sched_setaffinity", lambda pid, cores: pinned.append(cores))
    config = SimpleNamespace(threads_per_device=1, loader_workers=1)
    distributed._pin(SimpleNamespace(rank=3, size=4, local_rank=1, host="b"), config)
    assert pinned == [[2, 3]]


def test_the_most_memory_of_a_gpu_reaches_the_record(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 44 * 10**9)
    told = distributed.World(0, 1, 0, torch.device("cuda", 0), "a").memory()
    assert records._counts([{"event": "training_end", "samples_trained": 8, **told}], []) == {
        "samples_trained": 8,
        "memory_gpu_peak_B": 44 * 10**9,
    }
    assert distributed.World(0, 1, 0, torch.device("cpu"), "a").memory() == {}


def test_a_gpus_rank_and_its_workers_stay_on_the_cores_beside_it(monkeypatch):
    nvml, cores = types.ModuleType("pynvml"), os.sched_getaffinity(0)
    mask = 1 << min(cores)
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: {"GPU-aa": 0}[uuid]
    nvml.nvmlDeviceGetCpuAffinity = lambda handle, words: [mask % 2**64, *[mask >> 64] * (words - 1)]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    try:
        machine.pin_to_gpu("bb")
        assert os.sched_getaffinity(0) == cores, "an unknown GPU changes nothing"
        machine.pin_to_gpu("aa")
        assert os.sched_getaffinity(0) == {min(cores)}
    finally:
        os.sched_setaffinity(0, cores)


OF_NCCL = "[rank0]:[E1122 14:00:00.000000000 ProcessGroupNCCL.cpp:685] [Rank 0] "
WATCHDOG = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1)"
REMOTE = (
    "Process group watchdog thread terminated with exception: NCCL error: remote process exited or there was a network "
    "error, NCCL version 2.27.3"
)
OF_GROUP = "[rank1]:[E1122 14:00:00.000000000 ProcessGroupNCCL.cpp:1909] [PG ID 0 PG GUID 0(default_pg) Rank 1] "


@pytest.mark.parametrize(
    "line, words",
    [
        (OF_NCCL + WATCHDOG, "rank 0: another rank is lost (Watchdog caught collective operation timeout); its own"),
        (OF_NCCL + REMOTE, "rank 0: another rank is lost (NCCL error: remote process exited or there was a network"),
        (OF_GROUP + REMOTE, "rank 1: another rank is lost (NCCL error: remote process exited or there was a network"),
        (
            f"  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] {REMOTE}",
            "rank 1: another rank is lost (NCCL error: rem",
        ),
        (f"12: {OF_NCCL}{WATCHDOG}", "rank 0: another rank is lost (Watchdog"),
        (" 1: energynn: rank 1: the disk is full", "rank 1: the disk is full"),
        ("energynn: rank 1: the disk is full", "rank 1: the disk is full"),
    ],
)
def test_a_rank_that_nccl_ends_by_a_signal_is_a_lost_rank_and_labels_hide_nothing(tmp_path, line, words):
    for rank in range(2):
        Events(tmp_path, rank).mark("rank_start", rank=rank)
    said = []
    start._relay(["resnet50: epoch 1/2\n", line + "\n"], tmp_path / "log.txt", said)
    assert (tmp_path / "log.txt").read_text().endswith(line + "\n")
    status, reason = start.verdict(tmp_path, {"devices": 2, "launcher": "srun"}, 134, "", said)
    assert status == "failed" and reason.startswith(words), reason


def test_of_several_failures_the_first_is_the_reason(tmp_path):
    """The others fail because a rank is lost."""
    for rank, reason in ((1, "the disk is full"), (0, "another rank is lost"), (2, "another rank is lost")):
        Events(tmp_path, rank).mark("rank_end", rank=rank, status="failed", reason=reason)
    status, reason = start.verdict(tmp_path, {"devices": 3, "launcher": "srun"}, 1, "", [])
    assert (status, reason) == ("failed", "rank 1: the disk is full")


def test_sruns_logs_say_which_rank_speaks(tmp_path, monkeypatch):
    monkeypatch.setenv(launchers.SRUN_VARIABLE, "--mpi=pmi2")
    intent = {"launcher": "srun", "devices": 2, "device_kind": "cpu core", "config": {"perun_sampling_period_s": 1.0}}
    command = start.ranks_command(tmp_path, intent)
    assert command[0] == "srun" and "--label" in command[: command.index("--mpi=pmi2")]


SETTINGS = dict(patch_size=6, embed_dim=32, depth=1, num_blocks=4, devices=2, epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize("setup_s, is_there", [(60, True), (2, False)])
def test_a_rank_that_is_late_is_waited_for_in_the_set_up(tmp_path, train, setup_s, is_there):
    """It comes 8 s late, as one that lists its data for the first time; in the training that is too long."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    settings = config.to_dict(config.make("fourcastnet", **SETTINGS, collective_timeout_s=4.0, setup_timeout_s=setup_s))
    done = start_ranks(2, HERE / "late_rank.py", run_dir, json.dumps(settings), "float32")
    assert (done.returncode == 0) == is_there, done.stdout
    assert ("another rank is lost" in done.stdout) == (not is_there)


def test_gradients_in_buckets_are_the_same_numbers(train, tmp_path):
    alone = dict(SETTINGS, devices=1, epochs=2)
    losses = [
        train(tmp_path / str(is_on), "fourcastnet", **alone, gradient_buckets=is_on).losses for is_on in (False, True)
    ]
    assert losses[0] == losses[1] and len(losses[0]) > 3


def test_gradients_in_buckets_lie_side_by_side():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        world = distributed.World(0, 1, 0, torch.device("cpu"), "a")
        for is_on in (False, True):
            about = SimpleNamespace(gradient_buckets=is_on, compile=False)
            model = distributed.data_parallel(nn.Linear(4, 4), about, world)
            for _ in range(2):  # after the first the buckets have their order
                model.zero_grad()
                model(torch.ones(1, 4)).sum().backward()
            places = {parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}
            assert len(places) == (1 if is_on else 2)
    finally:
        torch.distributed.destroy_process_group()


def test_ranks_of_one_host_speak_over_its_loopback(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    for size, interface in ((4, None), (2, "lo")):
        launchers.stay_on_this_host(size)
        assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    launchers.stay_on_this_host(2)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_a_network_that_gloo_cannot_use_is_no_lost_rank():
    with pytest.raises(ValueError, match="cannot use the network: .*Unable to find interface.*set GLOO_SOCKET_IFNAME"):
        with distributed.lost_ranks_named():
            raise RuntimeError("[enforce fail at gloo/transport/tcp/device.cc:212] Unable to find interface for: x")


def test_one_rank_has_lost_no_other_and_says_what_nccl_said_last(monkeypatch):
    """As on a machine without a network: in NCCL's error the cause is the last line."""
    words = "NCCL error in: ProcessGroupNCCL.cpp, internal error\nLast error:\nBootstrap : no socket interface found"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for size, kind in ((2, distributed.LostRank), (1, torch.distributed.DistBackendError)):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda size=size: size)
        with pytest.raises(kind) as raised, distributed.lost_ranks_named():
            raise torch.distributed.DistBackendError(words)
        assert ("no socket interface" in str(raised.value)) == (size == 1)
