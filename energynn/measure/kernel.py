"""What the kernel tells of this host: its start, its processor, and the devices on its PCI bus.

What it does not tell, or not in letters, is empty: nothing of it ends a program.
"""

import os
import platform
import re
from pathlib import Path

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
CPU_INFO_FILE = Path("/proc/cpuinfo")
CPUS = Path("/sys/devices/system/cpu")
# another powercap tree and other devices, for tests and drills
POWERCAP_FOLDER = Path(os.environ.get("ENERGYNN_POWERCAP") or "/sys/class/powercap")
PCI_DEVICES_FOLDER = Path(
    os.environ.get("ENERGYNN_PCI_DEVICES") or "/sys/bus/pci/devices"
)
NVIDIA_DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")

VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel", "0x1da3": "Habana"}
ACCELERATOR_PCI_CLASS = "0x1200"
GPU_PCI_CLASSES = "0x0300", "0x0302", "0x0380", ACCELERATOR_PCI_CLASS
AMD_CPU_PCI_VENDOR = "0x1022"


def read_text(path: Path) -> str:
    """Read a small file of the kernel; "" where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def boot_id() -> str:
    """Name this machine since it was started, in whatever container; "" where it does not say."""
    return read_text(BOOT_ID_FILE)


def cpu_name() -> str:
    """Return the model of the processor, as the kernel names it."""
    model = re.search(r"model name\s*:\s*(.+)", read_text(CPU_INFO_FILE))
    return model[1].strip() if model else platform.machine()


def count_cpu_sockets() -> int:
    """Count the processors of this host; 1 where the kernel does not tell."""
    return len(set(map(read_text, CPUS.glob("*/topology/physical_package_id")))) or 1


def cpu_counter_remedy() -> str:
    """Say what would give this host's CPU a counter of its energy that can be read."""
    zones = list(POWERCAP_FOLDER.glob("intel-rapl:*"))
    if any((zone / "energy_uj").exists() for zone in zones):
        return f"sudo chmod a+r {POWERCAP_FOLDER}/*/energy_uj"
    if zones:  # links that lead nowhere
        return "in docker, --security-opt systempaths=unconfined"
    if platform.machine() != "x86_64":
        return "ask a meter of the node, as this processor shows none"
    if re.search(r"^flags.*\bhypervisor\b", read_text(CPU_INFO_FILE), re.MULTILINE):
        return "run on the host of this virtual machine"
    return "sudo modprobe intel_rapl_msr; in a container, --volume=/sys:/sys:ro"


# ------------------------------------------------------------------------------------ the PCI bus


def list_training_devices() -> dict[str, str]:
    """Return vendors of the devices that may train, by PCI address.

    What this process may not open, as in containers and jobs of batch systems, is left out.
    """
    own_graphics = list_own_graphics()
    vendors = {
        path.name: vendor
        for path, vendor in _list_gpus().items()
        if path.name not in own_graphics and _may_open_device(path)
    }
    if not NVIDIA_DRIVER_FOLDER.is_dir():
        return vendors
    vendors = {name: vendor for name, vendor in vendors.items() if vendor != "NVIDIA"}
    # those of which this process may open the device file, as the driver tells
    for path in NVIDIA_DRIVER_FOLDER.glob("*/information"):
        minor = re.search(r"Device Minor:\s*(\d+)", read_text(path))
        if minor is None or os.access(f"/dev/nvidia{minor[1]}", os.R_OK | os.W_OK):
            vendors[path.parent.name] = "NVIDIA"
    return vendors


def list_own_graphics() -> list[str]:
    """List the PCI addresses of a CPU's own graphics, whose energy is in the package's.

    What Intel makes of the class of accelerators is an NPU, a part of its CPU as well.
    """
    gpus = _list_gpus()
    intels = [
        path
        for path, vendor in gpus.items()
        if vendor == "Intel"
        and (":00:02." in path.name or _pci_class(path) == ACCELERATOR_PCI_CLASS)
    ]
    radeons = [path for path in gpus if gpus[path] == "AMD"]
    # those of AMD's that are part of the processor, as an APU has one
    displays = [path for path in radeons if _pci_class(path) != ACCELERATOR_PCI_CLASS]
    beside_cpu = [path for path in displays if _is_part_of_cpu(path)]
    is_apu = "Radeon" in cpu_name() and displays == radeons
    # cards stand before it
    amds = beside_cpu or (displays[-1:] if is_apu else [])
    return [path.name for path in intels + amds]


def _list_gpus() -> dict[Path, str]:
    """Return the vendors of all that may be a GPU."""
    vendors = {}
    for path in sorted(PCI_DEVICES_FOLDER.glob("*")):
        vendor = read_text(path / "vendor")
        if vendor in VENDORS and _pci_class(path) in GPU_PCI_CLASSES:
            vendors[path] = VENDORS[vendor]
    return vendors


def _pci_class(path: Path) -> str:
    return read_text(path / "class")[:6]


def _may_open_device(path: Path) -> bool:
    """Tell whether one of a device's files may be opened, where its driver made some."""
    nodes = [Path("/dev/dri") / node.name for node in path.glob("drm/renderD*")]
    return not nodes or any(os.access(node, os.R_OK | os.W_OK) for node in nodes)


def _is_part_of_cpu(path: Path) -> bool:
    """Tell whether other functions of a device are those of an AMD CPU."""
    slot = path.name.rpartition(".")[0]
    return any(
        read_text(one / "vendor") == AMD_CPU_PCI_VENDOR
        for one in path.parent.glob(f"{slot}.*")
    )
