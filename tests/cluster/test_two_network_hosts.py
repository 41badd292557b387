"""Two hosts with networks of their own: where a link is cut the job says so, ends, and can go on.

Hosts are network and UTS namespaces on a bridge; one sees nothing of the other but packets.
"""

import os
import random
import re
import shutil
import subprocess
import sys

import pytest

from energynn import config, records
from energynn.files import REPOSITORY
from energynn.launchers import AFTER_A_LOSS
from energynn.measure.samples import read_events, segments
from tests.processes import processes_of, wait_until
from tests.ranks import ENVIRONMENT

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]
TIMEOUT_S = 5  # of a collective
PATIENCE_S = 25  # for a process to be ended and reaped on a busy machine
LONG = dict(devices=2, embed_dim=32, depth=1, epochs=40, step_period_s=0.05)
LONG |= dict(checkpoint_period_s=1, collective_timeout_s=TIMEOUT_S)


class Hosts:
    """Two hosts, a and b, each with an address and a link to the other."""

    def __init__(self, folder):
        number = random.randrange(
            10000
        )  # names of the test before may still be taken: its hosts end by and by
        self.bridge, self.folder = f"en{number}", folder
        self.names, self.network = (f"en{number}a", f"en{number}b"), f"10.77.{number % 250}"
        hosts = [f"{self.network}.{i} {name}\n" for i, name in enumerate(self.names, 1)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
        # In place of ssh, for mpirun: options, the host, and words for a shell there.
        (folder / "ssh").write_text(
            '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=$1; shift\n'
            f'exec {" ".join(self.on("$host"))} sh -c "$*"\n'
        )
        (folder / "ssh").chmod(0o755)
        (folder / "on-host").write_text(
            f'#!/bin/sh\nhostname "$1" && mount --bind {folder}/hosts /etc/hosts && shift && exec "$@"\n'
        )
        (folder / "on-host").chmod(0o755)
        (folder / "host-file").write_text("".join(f"{name}:1\n" for name in self.names))

    def on(self, host):
        return [
            "ip",
            "netns",
            "exec",
            host,
            "unshare",
            "--uts",
            "--mount",
            "--",
            str(self.folder / "on-host"),
            host,
        ]

    def up(self):
        ip("link", "add", self.bridge, "type", "bridge")
        ip("link", "set", self.bridge, "up")
        for i, name in enumerate(self.names, 1):
            ip("netns", "add", name)
            ip("link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{name}v", "master", self.bridge, "up")
            ip("-n", name, "addr", "add", f"{self.network}.{i}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                ip("-n", name, "link", "set", link, "up")

    def cut_link(self):
        ip("link", "set", f"{self.names[1]}v", "down")

    def mend_link(self):
        """The link is up again, and b's packets reach a.

        For some seconds the kernel of b may still wait for an address that it asked for before.
        Who connects then is told "No route to host", and mpirun gives up at once.
        """
        ip("link", "set", f"{self.names[1]}v", "up")
        wait_until(self.b_reaches_a, 60, "for b to reach a")

    def b_reaches_a(self):
        """Whether a answers b: nothing listens at port 9, so a refuses."""
        connect = f"import socket; socket.create_connection(('{self.network}.1', 9), timeout=5)"
        ended = subprocess.run(
            [*self.on(self.names[1]), sys.executable, "-c", connect], capture_output=True, text=True
        )
        return "ConnectionRefusedError" in ended.stderr

    def down(self):
        for words in (["netns", "del", name] for name in self.names):
            subprocess.run(["ip", *words], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)

    def start(self, host, output, *command, **environment):
        """A command on a host, its lines in a file."""
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "PYTEST_CURRENT"))
        }
        with open(output, "w") as file:
            return subprocess.Popen(
                [*self.on(host), *map(str, command)],
                cwd=REPOSITORY,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=clean | ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)} | environment,
            )


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts(tmp_path):
    if os.getuid() or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("hosts with networks of their own need root, ip (iproute2) and unshare")
    made = Hosts(tmp_path)
    try:
        made.up()
        yield made
    finally:
        for process in processes_of(tmp_path):
            process.kill()
        made.down()


def test_a_run_by_mpirun_on_two_hosts_survives_a_cut_link(hosts, tmp_path):
    run = config.make("fourcastnet", **LONG)
    folder = tmp_path / "runs" / "local" / config.run_id(run)
    words = ["workload=fourcastnet", *(f"{name}={value}" for name, value in LONG.items())]
    command = [sys.executable, "-m", "energynn.cli", "run", "--runs-dir", tmp_path / "runs", *words]
    hydra = {
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(tmp_path / "ssh"),
        "HYDRA_HOST_FILE": str(tmp_path / "host-file"),
    }
    started = hosts.start(hosts.names[0], tmp_path / "first", *command, **hydra)
    wait_until(lambda: any(folder.glob("checkpoint/*.sha256")), 120, "for a checkpoint")
    hosts.cut_link()
    said = tmp_path / "first"
    wait_until(lambda: AFTER_A_LOSS in said.read_text(), TIMEOUT_S + PATIENCE_S, "for a clear line")
    assert started.wait(timeout=PATIENCE_S) == 1
    wait_until(lambda: not processes_of(folder), PATIENCE_S, "for every process to be gone")
    record = records.read(folder)
    assert record["status"] == "failed" and re.match(
        "rank [01]: another rank is lost", record["status_reason"]
    )

    hosts.mend_link()
    again = hosts.start(hosts.names[0], tmp_path / "second", *command, **hydra)
    assert again.wait(timeout=240) == 0, (tmp_path / "second").read_text()
    record = records.read(folder)
    assert record["valid"] and record["nodes"] == 2 and len(record["segments"]) == 2
    first = [
        event for event in read_events(segments(folder)[1]) if event["event"] == "training_start"
    ]
    assert {event["samples_done"] > 0 for event in first} == {True}
    assert {sensor["host"] for sensor in record["sensors"]} == set(hosts.names)
    assert records.check(tmp_path / "runs") == []
