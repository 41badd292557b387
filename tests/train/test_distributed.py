import copy
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from energynn.experiment import config
from energynn.train import distributed
from energynn.train.distributed import RankRequest


@pytest.mark.parametrize("visible, device", [(1, "cuda:0"), (4, "cuda:2")])
def test_a_rank_takes_its_gpu_and_stays_beside_it(monkeypatch, visible, device):
    """A launcher may show each rank its own GPU only, which is number 0 then.

    This is rank 0 of two, the host's number 2 of GPUs; CUDA, NCCL and NVML are stood in for.
    """
    did, found = {}, (0, 2, 2, HashStore())
    gpu = SimpleNamespace(name="H100", uuid="aaaa")
    stands_in = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: visible),
        (torch.cuda, "set_device", lambda device: did.update(device=str(device))),
        (torch.cuda, "get_device_properties", lambda device: gpu),
        (
            distributed.dist,
            "init_process_group",
            lambda backend, **_: did.update(backend=backend),
        ),
        (distributed, "seed_generators", lambda *_, **__: None),
        (distributed, "_find_ranks", lambda timeout: found),
    ]
    for owner, name, function in stands_in:
        monkeypatch.setattr(owner, name, function)
    threads = torch.get_num_threads()
    about = dict(device="gpu", devices=2, threads_per_device=threads)
    distributed.join_ranks(config.make("resnet50", **about))
    assert did == dict(device=device, backend="nccl")


def test_warm_up_leaves_no_trace():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)
    )
    before = copy.deepcopy(model.state_dict())
    random_state = torch.random.get_rng_state()
    calls = []

    def loss():
        calls.append(model(torch.randn(16, 4)).square().mean())
        return calls[-1]

    distributed.warm_up(model, loss)
    assert len(calls) == 1
    assert all(
        torch.equal(value, before[name]) for name, value in model.state_dict().items()
    )
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_ranks_agree_about_once_a_second_by_the_clock_of_rank_0(
    alone, tmp_path, monkeypatch
):
    """Steps of 0.1 s; the question comes after ever more of them, but never later than after a
    second.
    """
    now = [100.0]
    monkeypatch.setattr(distributed.time, "monotonic", lambda: now[0])
    agreement, asked = distributed.RankAgreement(alone, tmp_path), []
    for step in range(1, 38):
        now[0] += 0.1001
        if agreement.is_due():
            asked.append(step)
            assert agreement() == RankRequest.NOTHING
    assert asked == [1, 3, 7, 15, 24, 33]


def test_the_greatest_request_counts_and_a_file_asks_all_ranks_to_stop(alone, tmp_path):
    agreement = distributed.RankAgreement(alone, tmp_path)
    assert (
        agreement.is_due()
        and agreement(checkpoint_is_due=True) == RankRequest.CHECKPOINT
    )
    os.kill(os.getpid(), signal.SIGUSR1)
    assert agreement(checkpoint_is_due=True) == RankRequest.STOP
    (tmp_path / ".stop").touch()
    assert distributed.RankAgreement(alone, tmp_path)() == RankRequest.STOP


@pytest.mark.parametrize("is_on, number", [(False, 2), (True, 1)])
def test_gradients_in_buckets_lie_side_by_side(alone, is_on, number):
    made = config.make("resnet50", gradient_buckets=is_on)
    model = distributed.data_parallel(nn.Linear(4, 4), made, alone)
    for _ in range(2):  # after the first the buckets have their order
        model.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    places = {gradient.untyped_storage().data_ptr() for gradient in gradients}
    assert len(places) == number


def test_one_rank_has_lost_no_other_and_says_what_nccl_said_last(monkeypatch):
    """As on a machine without a network: in NCCL's error the cause is the last line."""
    words = "NCCL error in: ProcessGroupNCCL.cpp, internal error\nLast error:\n"
    words += "Bootstrap : no socket interface found"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for size, kind in (
        (2, distributed.LostRank),
        (1, torch.distributed.DistBackendError),
    ):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda size=size: size)
        with pytest.raises(kind) as raised, distributed.lost_ranks_named():
            raise torch.distributed.DistBackendError(words)
        assert ("no socket interface" in str(raised.value)) == (size == 1)
