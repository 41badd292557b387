"""Two ranks on two hosts under one mpirun: the second host is a UTS, mount and time namespace of
this machine.
"""

import json
import shutil
import subprocess

import pytest

from energynn import config, records
from energynn.launch import start
from tests.powercap import constant_power

HOST_W = 300.0
AHEAD_S = 5000
UNSHARE = ["unshare", "--uts", "--mount", "--time", "--fork"]
NAMED = """hostname "$0" && echo "$0" > "$1" && mount --bind "$1" /proc/sys/kernel/random/boot_id &&
shift && MPI_LOCALNRANKS=1 exec "$@" """


@pytest.fixture
def powercap(tmp_path):
    """A powercap tree whose counter moves at constant power; both hosts read it, so each has
    that power.
    """
    writer = constant_power(tmp_path / "powercap", HOST_W)
    yield tmp_path / "powercap"
    writer.kill()
    writer.wait()


def start_ranks(tmp_path, monkeypatch, powercap, hosts, **more):
    """Two ranks on one host, as launched, or on two; returns the folder and the process that
    started them.
    """
    monkeypatch.setenv("ENERGYNN_POWERCAP", str(powercap))
    tiny = dict(devices=2, embed_dim=32, depth=1, epochs=30, sampling_period_s=0.02)
    tiny = config.make("fourcastnet", **tiny | more)
    run_dir = tmp_path / "runs" / "local" / config.run_id(tiny)
    run_dir.mkdir(parents=True)
    start.begin(start.prepare(tiny, run_dir), run_dir)
    intent = json.loads((run_dir / "run.json").read_text())
    command = start.ranks_command(run_dir, intent)
    if hosts == 2:
        words, rank = command[: command.index("-n")], command[command.index("-n") + 2 :]
        for host, ahead_s in (("host-a", 0), ("host-b", AHEAD_S)):
            name_it = ["sh", "-c", NAMED, host, str(tmp_path / host)]
            words += [
                "-n",
                "1",
                *UNSHARE,
                "--monotonic",
                str(ahead_s),
                *name_it,
                *rank,
                ":",
            ]
        command = words[:-1]
    environment = start.rank_environment(run_dir, intent) | {"MASTER_ADDR": "127.0.0.1"}
    return run_dir, subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train(*given, hosts):
    """Let the ranks train; returns the folder and the record of the run."""
    run_dir, started = start_ranks(*given, hosts=hosts)
    output = started.communicate(timeout=300)[0]
    assert started.returncode == 0, output
    return run_dir, records.build(run_dir, "finished", "")


def require_namespaces():
    if (
        shutil.which("unshare") is None
        or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode
    ):
        pytest.skip(
            "needs the right to make UTS and time namespaces (unshare, as root)"
        )


@pytest.fixture
def two_hosts(tmp_path, monkeypatch, powercap):
    require_namespaces()
    return train(tmp_path, monkeypatch, powercap, hosts=2)


@pytest.mark.slow
def test_two_ranks_on_one_host_count_it_once(tmp_path, monkeypatch, powercap):
    run_dir, record = train(tmp_path, monkeypatch, powercap, hosts=1)
    assert record["nodes"] == 1 and len(list(run_dir.glob("samples-*.jsonl"))) == 1
    assert record["mean_power_cpu_W"] == pytest.approx(HOST_W, rel=0.01)


@pytest.mark.slow
def test_two_hosts_count_twice_each_on_its_own_clock(two_hosts):
    run_dir, record = two_hosts
    assert record["nodes"] == 2 and record["valid"], record["invalid_reasons"]
    assert record["mean_power_cpu_W"] == pytest.approx(2 * HOST_W, rel=0.01)
    assert {path.name for path in run_dir.glob("samples-*")} == {
        "samples-host-a.jsonl",
        "samples-host-b.jsonl",
    }
