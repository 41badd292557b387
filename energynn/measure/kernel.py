"""What the kernel tells of this host: its start, its processor, and the devices on its PCI bus.

What it does not tell, or not in letters, is empty: nothing of it ends a program.
"""

import os
import platform
import re
from contextlib import suppress
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
CPU_INFO = Path("/proc/cpuinfo")
CPUS = Path("/sys/devices/system/cpu")
CGROUP = Path("/sys/fs/cgroup")
# another powercap tree and other devices, for tests and drills
POWERCAP = Path(os.environ.get("ENERGYNN_POWERCAP") or "/sys/class/powercap")
PCI_DEVICES = Path(os.environ.get("ENERGYNN_PCI_DEVICES") or "/sys/bus/pci/devices")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/gpus")

VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel", "0x1da3": "Habana"}
ACCELERATOR = "0x1200"
CLASSES = "0x0300", "0x0302", "0x0380", ACCELERATOR
AMD_CPU = "0x1022"


def text(path: Path) -> str:
    """Read a small file of the kernel; "" where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def boot_id() -> str:
    """Name this machine since it was started, in whatever container; "" where it does not say."""
    return text(BOOT_ID)


def cpu_name() -> str:
    """Return the model of the processor, as the kernel names it."""
    model = re.search(r"model name\s*:\s*(.+)", text(CPU_INFO))
    return model[1].strip() if model else platform.machine()


def sockets() -> int:
    """Count the processors of this host; 1 where the kernel does not tell."""
    return len(set(map(text, CPUS.glob("*/topology/physical_package_id")))) or 1


def quota_cpus() -> float | None:
    """Return how many CPUs' time the cgroup of this container may use; None without such a quota.

    https://docs.kernel.org/admin-guide/cgroup-v2.html, cpu.max; of version 1 cpu.cfs_quota_us.
    """
    words = []
    for name in ("cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"):
        words += text(CGROUP / name).split()
    with suppress(ValueError, ZeroDivisionError):  # "max"
        quota_us, period_us = map(int, words)
        return quota_us / period_us if quota_us > 0 else None
    return None


def way_to_cpu_counters() -> str:
    """Say what would give this host's CPU a counter of its energy that can be read."""
    if any(POWERCAP.glob("intel-rapl:*")):
        return f"sudo chmod a+r {POWERCAP}/*/energy_uj"
    if re.search(r"^flags.*\bhypervisor\b", text(CPU_INFO), re.MULTILINE):
        return "run on the host of this virtual machine"
    return "sudo modprobe intel_rapl_msr; in a container, --volume=/sys:/sys:ro"


# ------------------------------------------------------------------------------------ the PCI bus


def training_devices() -> dict[str, str]:
    """Return vendors of the devices that may train, by PCI address.

    A CPU's own graphics is none of them: its energy is in the package's. What this process may
    not open, as in containers and jobs of batch systems, is left out.
    """
    found = {}
    radeons = []
    for path in sorted(PCI_DEVICES.glob("*")):
        vendor = text(path / "vendor")
        if vendor not in VENDORS or _class(path) not in CLASSES:
            continue
        if vendor == "0x1002":
            radeons.append(path)
        is_own_graphics = vendor == "0x8086" and ":00:" in path.name
        if not is_own_graphics and _may_open(path):
            found[path.name] = VENDORS[vendor]
    # those of AMD's that are part of the processor, as an APU has one
    displays = [path for path in radeons if _class(path) != ACCELERATOR]
    beside_cpu = [path for path in displays if _is_beside_cpu(path)]
    is_apu = "Radeon" in cpu_name() and displays == radeons
    # cards stand before it
    for path in beside_cpu or (displays[-1:] if is_apu else []):
        found.pop(path.name, None)
    if not NVIDIA_DRIVER.is_dir():
        return found
    found = {name: vendor for name, vendor in found.items() if vendor != "NVIDIA"}
    # those of which this process may open the device file, as the driver tells
    for path in NVIDIA_DRIVER.glob("*/information"):
        minor = re.search(r"Device Minor:\s*(\d+)", text(path))
        if minor is None or os.access(f"/dev/nvidia{minor[1]}", os.R_OK | os.W_OK):
            found[path.parent.name] = "NVIDIA"
    return found


def _class(path: Path) -> str:
    return text(path / "class")[:6]


def _may_open(path: Path) -> bool:
    """Tell whether one of a device's files may be opened, where its driver made some."""
    nodes = [Path("/dev/dri") / node.name for node in path.glob("drm/renderD*")]
    return not nodes or any(os.access(node, os.R_OK | os.W_OK) for node in nodes)


def _is_beside_cpu(path: Path) -> bool:
    """Tell whether other functions of a device are those of an AMD CPU."""
    slot = path.name.rpartition(".")[0]
    return any(text(one / "vendor") == AMD_CPU for one in path.parent.glob(f"{slot}.*"))
