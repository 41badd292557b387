"""Windows: entered again, nested, in forks and beside GPUs at work; how sharp their edges are."""

import json
import os
import signal
import sys
import textwrap
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

import energynn
from energynn.measure import energy, machine, samples, window
from energynn.measure.samples import Channel
from tests import powercap
from tests.measure import worlds
from tests.processes import lives, printed, python, refused, wait_until, with_gpus
from tests.run_files import ZERO_NS, write_samples

GPUS_W, CPU_W = (300.0, 200.0), 100.0
PROGRAM = """
    import energynn, json, os, signal, sys, threading, time
    import psutil

    told, windows, block, blocks = {}, {}, energynn.window("block"), []

    def tell(name, one):
        names = "energy_gpu_J", "energy_cpu_J", "energy_cpu_bound_J"
        windows[name] = [*map(one.energies.get, names), one.time_s]

    for seconds in (0.2, 0.4, 0.8):
        with block as one:
            time.sleep(seconds)
        blocks.append(one)
        tell(f"again {seconds}", block)
    for number, one in enumerate(blocks):
        tell(f"block {number}", one)

    def refused():
        try:
            with block:
                pass
        except ValueError as error:
            told.setdefault("refused", []).append(str(error))

    def in_a_thread():
        refused()
        with energynn.window("of a thread") as one:
            time.sleep(0.4)
        tell("thread", one)

    with block:
        refused()
        thread = threading.Thread(target=in_a_thread)
        thread.start()
        thread.join()
        with energynn.window("inner") as inner:
            time.sleep(0.3)
    tell("inner", inner)
    tell("outer", block)

    phases = energynn.phases()
    for _ in range(20):
        with phases("forward"):
            time.sleep(0.01)
        with phases("backward"):
            time.sleep(0.03)
    told["phases"] = phases.rows, str(phases)
    with block as goes_on:
        time.sleep(0.4)
        told["so far"] = [goes_on.time_s, goes_on.energy_J, goes_on.time_s]

    with block as died:
        (sampler,) = psutil.Process().children()
        sampler.kill()
        time.sleep(0.1)
    with block as later:
        time.sleep(0.4)
    told["died"] = [str(died), died.energy_J != died.energy_J]
    tell("later", later)

    fork = os.fork()
    if fork == 0:
        with energynn.window("of a fork") as forked:
            time.sleep(0.3)
        tell("forked", forked)
        print(json.dumps(windows))
        sys.exit()
    os.waitpid(fork, 0)
    parent = os.getpid()
    if os.fork():
        sys.exit()
    while os.getppid() == parent:
        time.sleep(0.01)
    with energynn.window("orphan", no_gpu=True) as orphan:
        time.sleep(0.4)
    told["orphan"] = orphan.energies
    print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the program says on a CPU and two GPUs of constant power."""
    folder = tmp_path_factory.mktemp("windows")
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    gpus = [dict(high_W=watts, update_s=0.1) for watts in GPUS_W]
    places = {"ENERGYNN_POWERCAP": str(folder / "powercap"), "TMPDIR": str(folder)}
    environment = with_gpus(gpus, **places)
    with powercap.constant_power(folder / "powercap", CPU_W):
        said = printed(sys.executable, program, env=environment, timeout=200)
    assert not list(folder.glob("energynn-window-*")), "a sampler's folder was left"
    windows, told = map(json.loads, said.splitlines())
    return told | {"windows": windows}


def test_windows_have_the_energy_of_a_known_power(told):
    """Also entered again, nested, in a thread, a fork, and after the sampler has died."""
    windows = told["windows"]
    assert windows["outer"][-1] > windows["inner"][-1] and windows["forked"]
    for name, (gpus_J, cpu_J, bound_J, time_s) in windows.items():
        assert gpus_J == pytest.approx(sum(GPUS_W) * time_s, rel=0.12), name
        open_J = bound_J + 0.02 * CPU_W * time_s
        assert cpu_J == pytest.approx(CPU_W * time_s, abs=open_J), name
    for number, seconds in enumerate((0.2, 0.4, 0.8)):
        assert windows[f"block {number}"] == windows[f"again {seconds}"]


def test_phases_add_up_by_name_and_a_window_tells_what_it_has_taken_so_far(told):
    rows, text = told["phases"]
    all_W = sum(GPUS_W) + CPU_W
    for name, least_s in (("forward", 0.2), ("backward", 0.6)):
        row = rows[name]
        assert row["blocks"] == 20 and row["time_s"] > least_s
        assert row["energy_J"] == pytest.approx(all_W * row["time_s"], rel=0.12)
        assert f"{row['energy_J']:.2f} J" in text
    assert "simulated" in text and "NOT valid" not in text
    begin_s, energy_J, end_s = told["so far"]
    assert 0.88 * begin_s < energy_J / all_W < 1.12 * end_s
    refused("no block has ended", str, energynn.phases())
    failed = energynn.phases()
    with suppress(MemoryError), failed("step"):
        raise MemoryError
    assert failed.rows["step"]["blocks"] == 1
    refused("enter its block first", lambda: energynn.window().energy_J)


def test_a_window_within_itself_is_refused_and_one_of_its_own_is_not(told):
    assert len(told["refused"]) == 2
    assert all("energynn.window(...)" in text for text in told["refused"])


def test_a_window_whose_sampler_died_has_no_energy(told):
    text, is_nan = told["died"]
    assert is_nan and "NOT valid: D: the sampler died" in text


def test_a_fork_that_outlives_its_parent_has_a_sampler_and_without_gpus_as_said(told):
    assert told["orphan"]["doubts"] == [] and "energy_gpu_J" not in told["orphan"]
    assert told["orphan"]["energy_total_J"] > 0


@pytest.fixture
def sampled(tmp_path, monkeypatch):
    """A sampler whose samples of 100 W cover the next seconds, and a GPU that nobody reads."""
    t_s = (time.monotonic_ns() - ZERO_NS) / 1e9 + np.arange(-75, 250) * 0.04
    joules = 100.0 * (t_s - t_s[0])
    one = worlds.sensor("gpu_0_energy", "energy")
    unread = ["GPU 1: NVML does not start; say --no-gpu"]
    write_samples(tmp_path, t_s, [(one, joules)], unaccounted=unread)
    file = tmp_path / "samples-h.jsonl"
    path = tmp_path / "system.toml"
    header = samples.read_samples_header(file)
    sampler = window.SamplerProcess(
        file, header, psutil.Process(), path, machine.load_system(path)
    )
    monkeypatch.setattr(window, "_start_window_sampler", lambda *_: sampler)
    monkeypatch.setattr(window, "_running_samplers", {})


def refused_system(_path):
    raise ValueError("a slip")


def test_a_window_reads_the_gpus_that_are_visible_now(sampled, monkeypatch):
    for visible in ("0", "1", "1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with energynn.window("block"):
            pass
    assert len(window._running_samplers) == 2
    monkeypatch.setattr(machine, "load_system", refused_system)
    with energynn.window("block") as block:
        pass
    assert "earlier window's sampler was read: a slip" in block.energies["doubts"][0]


def test_what_speaks_against_a_window_names_the_remedy_of_a_window(sampled):
    with energynn.window("block") as block:
        time.sleep(0.1)
    assert block.energies["doubts"] == [
        "D: GPU 1: NVML does not start; say no_gpu=True"
    ]


class Cuda(SimpleNamespace):
    """Two devices at work for 0.2 s, of three; none is initialized but where it is said."""

    def is_initialized(self):
        return self.initialized

    def device_count(self):
        return 3

    def current_device(self):
        return 1

    def memory_reserved(self, device):
        if self.is_strange:
            raise RuntimeError("does not yet support getDeviceStats")
        return 10**6 * (device > 0)

    def synchronize(self, device):
        self.waited.append(device)
        time.sleep(max(0.0, self.end_s - time.monotonic()))


@pytest.mark.parametrize(
    "torch, options, waited",
    [
        ({}, {}, [1, 2]),
        ({"is_strange": True}, {}, [1]),
        ({"initialized": False}, {}, []),
        ({}, {"synchronize": False}, []),
        (None, {}, []),
    ],
)
def test_a_block_ends_when_the_gpus_in_use_have_done_their_work(
    sampled, monkeypatch, torch, options, waited
):
    usual = dict(initialized=True, is_strange=False, waited=[], end_s=0.0)
    cuda = Cuda(**usual | (torch or {}))
    loaded = SimpleNamespace() if torch is None else SimpleNamespace(cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", loaded)  # while it is imported: no cuda
    with energynn.window("block", **options) as block:
        cuda.end_s = time.monotonic() + 0.2
    assert cuda.waited == 2 * waited
    assert (block.time_s > 0.19) == bool(waited)


def errors(length_s, beat_s, jitter_s):
    """Median errors of a counter's windows at random phases under a square load: by reading it
    twice, by straight lines between readings, and ours.
    """
    random = np.random.default_rng(1)
    found = []
    for _ in range(60):
        load = worlds.Load("square", 100.0, 500.0, random.uniform(0.5, 3))
        begin_s = 30 + random.uniform(0, 10)
        edges_s = np.array([begin_s, begin_s + length_s])
        beats = beat_s * np.arange(60 / beat_s) + random.uniform(0, beat_s)
        beats = np.sort(beats + random.normal(0, jitter_s, len(beats)))

        def shown_J(t_s, load=load, beats=beats):
            return load.energy_J(beats[np.searchsorted(beats, t_s, side="right") - 1])

        t_s = worlds.instants_s(
            random, begin_s - 5, length_s + 10, window.SAMPLING_PERIOD_S
        )
        one = worlds.sensor("counter", "energy", update_s=beat_s)
        read = Channel(**one), t_s, shown_J(t_s), window.SAMPLING_PERIOD_S
        plain, ours = energy.energy_curve(*read), window._renewal_curve(edges_s, *read)
        assert (np.diff(ours.energy_J) >= 0).all()
        shown = [each(edges_s) for each in (shown_J, plain.at, ours.at)]
        found.append(np.diff(shown)[:, 0] / np.diff(load.energy_J(edges_s)) - 1)
    return np.median(np.abs(found), axis=0)


@pytest.mark.parametrize("length_s", [0.31, 0.75, 1.04])
@pytest.mark.parametrize("beat_s, jitter_s", [(0.1, 0.0), (0.1, 0.003), (0.07, 0.0)])
def test_short_windows_end_between_the_renewals_of_a_counter(
    length_s, beat_s, jitter_s
):
    by_reads, plain, ours = errors(length_s, beat_s, jitter_s)
    assert ours < 0.5 * min(plain, by_reads)


@pytest.mark.parametrize("beat_s, jitter_s", [(0.1, 0.05), (0.02, 0.0), (0.005, 0.0)])
def test_a_counter_without_a_beat_that_is_seen_is_as_good_as_before(beat_s, jitter_s):
    by_reads, plain, ours = errors(1.04, beat_s, jitter_s)
    assert ours < 1.1 * plain


KILLED = """
import energynn, os, psutil, signal, time
with energynn.window("block", no_gpu=True):
    (sampler,) = psutil.Process().children()
fork = os.fork()
if fork == 0:
    time.sleep(600)
print(sampler.pid, fork, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_sampler_ends_with_its_process_though_a_fork_of_it_lives(tmp_path):
    """And nothing of it stays; a measured run, whatever its folder's name, does."""
    places = os.environ | {"TMPDIR": str(tmp_path)}
    with python(KILLED, env=places) as started:
        sampler, fork = map(int, started.stdout.readline().split())
        try:
            wait_until(lambda: not lives(sampler))
            assert lives(fork) and not [*tmp_path.iterdir()]
        finally:
            os.kill(fork, signal.SIGKILL)


def test_a_run_is_told_what_a_network_exchanges_and_a_sharded_one_is_refused(
    tmp_path, monkeypatch
):
    """Weights that are trained, in their own bytes, wrapped or not; for no run, or an ended one,
    a window is as any.
    """
    torch = pytest.importorskip("torch")
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from tests.train.conftest import alone_in_the_world

    net = torch.nn.Linear(10, 10).to(torch.bfloat16)
    net.bias.requires_grad = False
    with alone_in_the_world():
        sharded = fully_shard(torch.nn.Linear(4, 4))
        parallel = DistributedDataParallel(net)
    energynn.window(model=net)
    for place in ("ended", ""):
        monkeypatch.setenv("ENERGYNN_MARK", str(tmp_path / place))
        for each in (net, parallel):
            energynn.window(model=each)
    assert [path.suffix for path in tmp_path.glob("gradient_bytes*")] == [".200"]
    words = "must be a torch.nn.Module that is not sharded; .*-per-weight 6"
    for each in (sharded, np.zeros(3)):
        refused(words, energynn.window, model=each)
