import copy
import os
import random
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from energynn import launchers
from energynn.measure import machine
from energynn.train import distributed

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


def test_several_hosts_get_an_address_that_others_can_reach(monkeypatch):
    assert distributed._own_address(alone=True) == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "10.1.2.3")
    assert distributed._own_address(alone=False) == "10.1.2.3"
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.setattr("socket.gethostbyname", lambda name: "10.9.8.7")
    assert distributed._own_address(alone=False) == "10.9.8.7"


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


def test_ranks_that_share_a_gpu_are_named():
    store = torch.distributed.HashStore()
    worlds = [distributed.World(rank, 3, rank, torch.device("cuda", 0), "a") for rank in range(3)]
    for rank, uuid in enumerate(("aa", "bb", "aa")):
        store.set(f"gpu-of-rank-{rank}", uuid)
    with pytest.raises(ValueError, match="ranks 0 and 2 use one GPU .aa.; start no more"):
        distributed.require_own_gpu(store, worlds[1], "bb")
    store.set("gpu-of-rank-2", "cc")
    distributed.require_own_gpu(store, worlds[1], "bb")


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
