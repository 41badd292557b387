"""Two ranks on two hosts under one mpirun: the second host is a UTS, mount and time namespace of
this machine.
"""

import json

import pytest

from energynn import records
from energynn.experiment import config
from energynn.host import processes
from energynn.launch import start, supervise
from tests.powercap import constant_power
from tests.processes import can_be_executed, printed

HOST_W = 300.0
AHEAD_S = 5000
UNSHARE = ["unshare", "--uts", "--mount", "--time", "--fork"]
NAMED = """hostname "$0" && echo "$0" > "$1" && mount --bind "$1" /proc/sys/kernel/random/boot_id &&
shift && MPI_LOCALNRANKS=1 exec "$@" """


@pytest.mark.slow
def test_two_hosts_count_twice_each_on_its_own_clock(tmp_path, monkeypatch):
    """Both read one counter of constant power, so each has that power."""
    if not can_be_executed(*UNSHARE, "true"):
        pytest.skip(
            "needs the right to make UTS and time namespaces (unshare, as root)"
        )
    powercap = tmp_path / "powercap"
    monkeypatch.setenv("ENERGYNN_POWERCAP", str(powercap))
    tiny = dict(devices=2, embed_dim=32, depth=1, epochs=30, sampling_period_s=0.02)
    tiny = config.make("fourcastnet", **tiny)
    run_dir = tmp_path / "runs" / "local" / config.run_id(tiny)
    run_dir.mkdir(parents=True)
    start.begin_run(start.prepare_intent(tiny, run_dir), run_dir)
    intent = json.loads((run_dir / "run.json").read_text())
    words = supervise.ranks_command(run_dir, intent)
    count = words.index("-n")
    command, rank = words[:count], words[count + 2 :]
    for host, ahead_s in (("host-a", 0), ("host-b", AHEAD_S)):
        of_host = [*UNSHARE, "--monotonic", str(ahead_s), "sh", "-c", NAMED, host]
        command += ["-n", "1", *of_host, str(tmp_path / host), *rank, ":"]
    environment = supervise.rank_environment(intent) | {
        "MASTER_ADDR": "127.0.0.1",
        processes.MARK_VARIABLE: str(run_dir),
    }
    with constant_power(powercap, HOST_W):
        printed(*command[:-1], env=environment, timeout=300)
    record = records.save_record(run_dir, "finished", "")
    assert record.nodes == 2 and record.valid, record.invalid_reasons
    assert record.mean_power_cpu_W == pytest.approx(2 * HOST_W, rel=0.01)
    names = {path.name for path in run_dir.glob("samples-*")}
    assert names == {"samples-host-a.jsonl", "samples-host-b.jsonl"}
