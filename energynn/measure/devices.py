"""Which devices count: those of the PCI bus, of ranks, and of the starts and hosts of a run.

A device is known by its UUID, a host by the boot id of its kernel; within one boot the monotonic
clock gives the order, between boots the number of the start.
"""

import os
from collections import Counter
from collections.abc import Iterable
from itertools import chain, pairwise, product

from energynn.measure import kernel, sensors
from energynn.measure.energy import COMPONENTS, left_out_remedy, refusal
from energynn.measure.samples import events_of_kind


def devices_without_sensor(read: Iterable[sensors.Sensor]) -> list[str]:
    """Say in words which devices of the PCI bus none of these sensors reads.

    NVIDIA's are held against NVML.
    """
    told = {sensor.notes.get("pci") for sensor in read}
    return [
        f"{vendor} device {address} has no sensor (AMD's need amdsmi, which ROCm brings)"
        f"; where nothing runs on it, say --no-gpu, or {left_out_remedy(address)}"
        for address, vendor in kernel.list_training_devices().items()
        if vendor != "NVIDIA" and address not in told
    ]


# ------------------------------------------------------------------------------------ of a run


def visible_gpus(intent: dict) -> dict[str, list[str]]:
    """Give ``gpus``, UUIDs of those that a command of this process may see and that are read.

    intent: of the run. Empty where that is not known: without NVML, for parts of a GPU, beside
    AMD's; and where a run uses no GPUs.
    """
    if not intent.get("uses_gpus", True):
        return {}
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    inventory = sensors.SensorInventory()
    sensors.add_nvidia_sensors(inventory, value)
    sensors.drop_left_out_sensors(inventory, intent.get("left_out", []))
    uuids: set = {one.notes.get("uuid") for one in inventory.sensors}
    is_told = uuids or value in sensors.VALUES_WITHOUT_GPU
    if (
        not is_told
        or None in uuids
        or inventory.unaccounted
        or "AMD" in kernel.list_training_devices().values()
    ):
        return {}
    return {"gpus": sorted(uuids)}


def used_devices(events: list[dict]) -> set[str] | None:
    """Give the UUIDs that the ranks of a host name or may see; None where one tells nothing."""
    uuids = set()
    for event in events_of_kind(events, "rank_start"):
        told = [event["gpu_uuid"]] if event.get("gpu_uuid") else event.get("gpus")
        if told is None:
            return None
        uuids |= set(map(sensors.plain_name, told))
    return uuids


def ranks_of_namesake(host, events: list[dict]) -> list[str]:
    """Say in words that ranks ran on another machine of a host's name, which has no samples."""
    boots = {event.get("boot_id") for event in events_of_kind(events, "rank_start")}
    if not host.boot_id or boots <= {None, "", host.boot_id}:
        return []
    return [
        f"another machine is called {host.name}, too, and has no samples; give each its own name "
        "(hostnamectl hostname NAME)"
    ]


def device_differences(parts: list[list]) -> list[str]:
    """D: hosts of a segment that are one machine, and what one start or host has and others lack.

    parts: the ``account.HostAccount`` of each segment. What any has, all have; and each start of a
    host has as many sensors of CPU and RAM, each host as many GPUs, but where ranks name theirs.
    """
    hosts = list(chain.from_iterable(parts))
    reasons = []
    for part in parts:
        machines = Counter(host.boot_id or host.name for host in part)
        reasons += [
            f"two samples files of one machine ({name}): its energy counts twice"
            for name, count in machines.items()
            if count > 1
        ]
    for host, component in product(hosts, COMPONENTS):
        own = [one for one in host.primary if one.component == component]
        # of an estimate one sensor stands for all devices
        if any(one.kind == "busy" for one in own):
            continue
        number = len(own)
        alike = hosts
        if number and component == "gpu":
            alike = [one for one in hosts if not (one.is_named or host.is_named)]
        elif number:
            alike = [one for one in hosts if one.name == host.name]
        most = max((one.sensor_counts[component] for one in alike), default=0)
        if number < most:
            text = (
                f"{host.name} in segment {host.segment} has {number} {component} sensors, "
                f"another start or host {most}"
            )
            reasons.append(text)
    return [refusal("D", text) for text in reasons]


def overlapping_starts(parts: list[list], segments: list) -> list[str]:
    """D: two starts at once. Within one boot the monotonic clock tells, without boot ids the wall
    clock.

    segments: the ``account.SegmentAccount`` of each part.
    """
    for (one, first), (later, second) in pairwise(zip(parts, segments, strict=True)):
        ends = {host.boot_id: host.end_s for host in one}
        if "" in ends or any(not host.boot_id for host in later):
            apart_ns = second.start_wall_ns - first.start_wall_ns
            is_over = apart_ns >= first.training_time_s * 1e9
        else:
            is_over = all(
                host.end_s - host.time_s >= ends.get(host.boot_id, -1) for host in later
            )
        if not is_over:
            return [refusal("D", "two segments overlap: their energy counts twice")]
    return []
