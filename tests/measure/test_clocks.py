import json
import shutil
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from energynn.measure import clocks

AHEAD_NS = 5000 * 10**9
MONTHS_NS = 400 * 86_400 * 10**9 + 1  # an uptime whose ns float64 cannot count


def ahead() -> int:
    """The monotonic clock of a host that was booted 5000 s before this one."""
    return time.monotonic_ns() + AHEAD_NS


@pytest.fixture
def clock(tmp_path):
    """Makes the clocks of a run, and closes them."""
    made = []

    def make(host, monotonic_ns=time.monotonic_ns):
        made.append(clocks.Clock(tmp_path, host, monotonic_ns))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_two_hosts_5000_s_apart_agree_within_a_millisecond(tmp_path, clock):
    reference, other, third = clock("a"), clock("b", ahead), clock("c")
    assert reference.measure() == {
        "host": "a",
        "reference": "a",
        "offset_ns": 0,
        "uncertainty_ns": 0,
        "method": "reference",
    }
    measured = other.measure()
    assert (measured["host"], measured["reference"], measured["method"]) == ("b", "a", "exchange")
    assert abs(measured["offset_ns"] + AHEAD_NS) <= min(measured["uncertainty_ns"], 10**6)
    assert abs(third.measure()["offset_ns"]) < 10**6, "one thread answers all"
    assert [path.name for path in tmp_path.iterdir()] == [clocks.FILE]


def test_a_measurement_is_short(clock):
    _, other = clock("a"), clock("b", ahead)
    durations_s = []
    for _ in range(5):
        begun = time.monotonic()
        other.measure()
        durations_s.append(time.monotonic() - begun)
    assert min(durations_s) < 0.05


def test_the_shortest_round_trip_counts(clock):
    """Nothing is known of where a long trip lost its time, and so of the offset."""
    reference, other = clock("a"), clock("b", ahead)
    delays = iter([0.0, 0.04] + [0.0] * 100)
    monotonic_ns = reference.monotonic_ns

    def answers_late():
        instant_ns = monotonic_ns()
        time.sleep(next(delays))
        return instant_ns

    reference.monotonic_ns = answers_late
    assert other.measure()["uncertainty_ns"] < 15e6


def test_only_who_knows_the_token_gets_an_answer(tmp_path, clock):
    clock("a")
    port = json.loads((tmp_path / clocks.FILE).read_text())["port"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(0.1)
        for request in (b"", b"what time is it?", clocks.REQUEST.pack(bytes(16), 0)):
            stranger.sendto(request, ("127.0.0.1", port))
            with pytest.raises(TimeoutError):
                stranger.recv(100)
    assert clock("b").measure()["method"] == "exchange", "the strangers did no harm"


def test_of_many_that_come_at_once_one_is_the_reference(tmp_path, clock):
    barrier = threading.Barrier(8)
    results = []

    def come(host):
        barrier.wait()
        results.append(clock(host).measure())

    threads = [threading.Thread(target=come, args=(f"host{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result["method"] for result in results) == ["exchange"] * 7 + ["reference"]
    assert len({result["reference"] for result in results}) == 1


def test_wall_clocks_stand_in_for_a_reference_that_has_gone(clock):
    reference = clock("a")
    reference.close()
    assert not reference.thread.is_alive()
    measured = clock("b", ahead).measure()
    assert (measured["method"], measured["uncertainty_ns"]) == ("wall clock", None)
    assert abs(measured["offset_ns"] + AHEAD_NS) < 5e6


def test_wall_clocks_stand_in_for_a_reference_behind_a_firewall_after_two_seconds(tmp_path, clock):
    clock("a").close()
    path = tmp_path / clocks.FILE
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        found = json.loads(path.read_text())
        path.write_text(json.dumps(found | {"address": "127.0.0.1", "port": silent.getsockname()[1]}))
        other = clock("b", ahead)
        for patience_s in (2.0, 0.05):
            begun = time.monotonic()
            assert other.measure(patience_s)["method"] == "wall clock"
            assert time.monotonic() - begun == pytest.approx(patience_s, abs=0.3)


def test_an_exchange_is_not_followed_by_anything_worse(clock):
    reference, other = clock("a"), clock("b", ahead)
    assert other.measure()["method"] == "exchange"
    reference.close()
    assert other.measure() is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"host": "a"}',
        "\0" * 100,
        '{"host": 1, "address": 2, "port": "x", "token": null, "wall_minus_monotonic_ns": []}',
    ],
)
def test_a_damaged_file_gives_no_measurement_and_no_error(tmp_path, clock, text):
    (tmp_path / clocks.FILE).write_text(text)
    assert clock("a").measure() is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 99999},
        {"port": -1},
        {"address": "no such address"},
        {"address": "\0"},
        {"token": "zz"},
        {"token": "00" * 40},
    ],
)
def test_a_file_with_nonsense_leaves_the_wall_clocks(tmp_path, clock, wrong):
    clock("a")
    path = tmp_path / clocks.FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    assert clock("b", ahead).measure(patience_s=0.2)["method"] == "wall clock"


def test_the_file_is_read_once_so_that_storage_that_stands_still_stops_no_sampler(tmp_path, clock):
    clock("a")
    other = clock("b", ahead)
    (tmp_path / clocks.FILE).unlink()
    assert other.measure()["method"] == "exchange"


def test_a_folder_that_cannot_be_written_gives_no_measurement_and_no_error(tmp_path):
    clock = clocks.Clock(tmp_path / "missing", "a")
    assert clock.measure() is None
    clock.close()


# --------------------------------------------------------------------------------------------------------- alignment


def measurement(t, offset_ns, method="exchange"):
    return {"t": t, "host": "b", "reference": "a", "offset_ns": offset_ns, "uncertainty_ns": 0, "method": method}


def test_a_drift_is_interpolated_and_constant_outside():
    drifting = [measurement(200, -5100), measurement(100, -5000)]
    times = np.array([0, 100, 150, 200, 900])
    assert clocks.align(times, drifting).tolist() == [-5000, -4900, -4900, -4900, -4200]
    assert clocks.align(150, drifting) == -4900 and isinstance(clocks.align(150, drifting), int)


def test_not_one_nanosecond_is_lost_after_months():
    hour_ns = 3600 * 10**9
    drifting = [measurement(MONTHS_NS, -MONTHS_NS + 7), measurement(MONTHS_NS + hour_ns, -MONTHS_NS + 7 + 36_000)]
    times = MONTHS_NS + np.array([0, 1, 10**8, hour_ns // 2 + 1, hour_ns, hour_ns + 3])
    aligned = clocks.align(times, drifting)
    assert aligned.dtype == np.int64
    assert aligned.tolist() == [7, 8, 10**8 + 8, hour_ns // 2 + 1 + 18_007, hour_ns + 36_007, hour_ns + 36_010]
    assert [clocks.align(int(t), drifting) for t in times] == aligned.tolist()


def test_one_measurement_shifts_and_none_is_refused():
    assert clocks.align(MONTHS_NS, [measurement(5, -AHEAD_NS)]) == MONTHS_NS - AHEAD_NS
    with pytest.raises(ValueError, match="never measured"):
        clocks.align(5, [])


def test_wall_clocks_count_only_where_there_is_no_exchange():
    wall = measurement(0, 10**6, "wall clock")
    assert clocks.align(50, [wall]) == 50 + 10**6
    assert clocks.align(50, [wall, measurement(100, 3)]) == 53


# --------------------------------------------------------------------------------- two hosts, as far as Linux lets us

HOST = """
import json, os, sys, time
from pathlib import Path
from energynn.measure import clocks
run_dir, peers = Path(sys.argv[1]), int(sys.argv[2])
def wait_for_all(what):
    (run_dir / f"{what}-{os.uname().nodename}").touch()
    while len(list(run_dir.glob(f"{what}-*"))) < peers:
        time.sleep(0.01)
clock = clocks.Clock(run_dir, os.uname().nodename)
wait_for_all("ready")
measured = [{"t": time.monotonic_ns(), **clock.measure()}]
time.sleep(1)
event = {"t": time.monotonic_ns(), "wall": time.time_ns()}  # time namespaces do not shift the wall clock: the truth
measured.append({"t": time.monotonic_ns(), **clock.measure()})
wait_for_all("done")
print(json.dumps({"measured": measured, "event": event}))
"""


@pytest.mark.slow
def test_events_of_two_time_namespaces_align_within_5_ms(tmp_path):
    unshare = ["unshare", "--uts", "--time", "--fork"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make UTS and time namespaces (unshare, as root)")
    hosts = {
        host: subprocess.Popen(
            [
                *unshare,
                "--monotonic",
                str(ahead_s),
                "sh",
                "-c",
                'hostname "$0" && exec "$@"',
                host,
                sys.executable,
                "-c",
                HOST,
                str(tmp_path),
                "2",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for host, ahead_s in (("host-a", 0), ("host-b", 5000))
    }
    told = {host: json.loads(process.communicate(timeout=60)[0]) for host, process in hosts.items()}
    a, b = told["host-a"], told["host-b"]
    assert b["event"]["t"] - a["event"]["t"] > 4900e9, "the clocks are apart"
    assert {m["method"] for host in told.values() for m in host["measured"]} == {"reference", "exchange"}
    errors_ns = [clocks.align(host["event"]["t"], host["measured"]) - host["event"]["wall"] for host in (a, b)]
    assert abs(errors_ns[0] - errors_ns[1]) < 5e6
