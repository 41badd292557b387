"""Devices are compared one by one: what ranks may see, what starts and hosts had, what is read."""

import pytest

from energynn.measure import devices, sensors
from energynn.measure.account import Host, in_use
from tests.measure.test_sensors import no_gpu, pci  # noqa: F401


def gpu(number):
    notes = {"uuid": f"GPU-{number}"}
    return {
        "component": "gpu",
        "device": str(number),
        "kind": "power",
        "primary": True,
        "notes": notes,
    }


def host(name="a", gpus=2, segment=1, boot="b", begin_s=0.0, wall_s=0.0):
    made = Host(name, segment, start_wall_ns=wall_s * 1e9, time_s=10.0, boot_id=boot)
    made.end_s, made.sensors = begin_s + 10.0, [gpu(number) for number in range(gpus)]
    return made


def start(rank, *uuids):
    return {"event": "rank_start", "rank": rank, "host": "a", "gpus": [*uuids]}


def test_only_gpus_that_a_rank_may_see_count():
    marked, unread = in_use(
        list(map(gpu, range(4))), [start(0, "GPU-0"), start(1, "GPU-1")]
    )
    assert [one["primary"] for one in marked] == [True, True, False, False]
    assert unread == []
    # each task sees its own GPU only, and the first one samples
    _, unread = in_use([gpu(0)], [start(0, "GPU-0"), start(1, "GPU-1")])
    assert unread == ["no sensor of GPU 1, which a rank uses"]


@pytest.mark.parametrize(
    "events", [[], [{"event": "rank_start", "rank": 0, "host": "a"}]]
)
def test_ranks_that_tell_nothing_leave_all_gpus(events):
    marked, unread = in_use(
        [gpu(0), gpu(1)], events[:1] or [{"event": "rank_start", "rank": 0}]
    )
    assert all(one["primary"] for one in marked) and unread == []


@pytest.mark.parametrize(
    "parts, said",
    [
        ([[host()], [host(gpus=1, segment=2)]], "a in segment 2 has 1 gpu sensors"),
        ([[host(), host("c", gpus=1, boot="d")]], "c in segment 1 has 1 gpu sensors"),
        ([[host(), host()]], "two samples files of one machine (a)"),
        ([[host(), host("c")]], "two samples files of one machine (b)"),
    ],
)
def test_what_one_has_and_another_lacks_or_counts_twice(parts, said):
    assert said in devices.differences(parts)[0]


def test_equal_starts_and_hosts_are_valid():
    assert devices.differences([[host(), host("c", boot="d")], [host(segment=2)]]) == []


@pytest.mark.parametrize(
    "later, is_over",
    [
        (host(begin_s=20, wall_s=-3600), True),  # the clock was set back
        (host(begin_s=5, wall_s=3600), False),
        (host(boot="c", begin_s=1, wall_s=-3600), True),  # restarted meanwhile
        (host(boot="", wall_s=-3600), False),  # as records without boot ids
    ],
)
def test_order_is_monotonic_time_within_one_boot(later, is_over):
    assert (devices.overlaps([[host()], [later]]) == []) == is_over


def test_a_cards_of_a_machine_with_graphics_of_its_own_counts(tmp_path, monkeypatch):
    pci(tmp_path, "0000:03:00.0", "0x1002", "0x030000")
    pci(tmp_path, "0000:0b:00.0", "0x1002", "0x030000")
    pci(tmp_path, "0000:0b:00.2", "0x1022", "0x108000")  # the CPU's own processor
    assert devices.on_bus() == {"0000:03:00.0": "AMD"}
    pci(tmp_path, "0000:00:03.0", "0x1002", "0x120000")  # an MI300A
    assert len(devices.on_bus()) == 2


def test_links_that_lead_nowhere_leave_the_estimate(tmp_path):
    (tmp_path / "powercap").mkdir()
    for zone in ("intel-rapl:0", "intel-rapl:0:0"):
        (tmp_path / "powercap" / zone).symlink_to(tmp_path / "nowhere")
    (zone,) = sensors.rapl_sensors()
    with pytest.raises(ValueError, match="No such file"):
        zone.read()
    folder = tmp_path / "powercap" / "intel-rapl:1"
    folder.mkdir()
    (folder / "name").write_bytes(b"package-\xff\n")
    (folder / "max_energy_range_uj").write_text("9" * 400)
    assert [one.component for one in sensors.rapl_sensors()] == ["cpu", "cpu"]
