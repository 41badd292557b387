"""perun's HDF5 files, as far as they carry energies: sensors of known truth, and perun's sums."""

import h5py
import numpy as np

from energynn.host.files import REPOSITORY

RANGE_UJ = 262143328850
STARTED = "2026-01-02T03:04:05.500000"
RESULTS = {"RUNTIME": 20.5, "ENERGY": 107.0, "GPU_ENERGY": 100.0, "DRAM_ENERGY": 7.0}
SECONDS = np.arange(0, 21, dtype="float32")
APPLICATION = "app"
PACKAGE = (
    f"{APPLICATION}/nodes/run/nodes/0/nodes/a/nodes/cpu/nodes/cpu_0_package-0/raw_data"
)


def write_run(
    path,
    sensors,
    run="run",
    hosts=("a",),
    rounds=1,
    execution_dt=STARTED,
    results=RESULTS,
    seconds=SECONDS,
):
    """Add a run to a file: sensors are (component, name, unit, mag, readings, raw counter if any).

    perun made of it its results, which need not be what the readings give.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "a") as file:
        node = file.require_group(f"{APPLICATION}/nodes").create_group(run)
        if execution_dt:
            node.attrs["execution_dt"] = execution_dt
        for name, value in results.items():
            node.create_group(f"metrics/{name}").attrs["sum"] = value
        places = [
            f"nodes/{n}/nodes/{host}/nodes" for n in range(rounds) for host in hosts
        ]
        for place in places:
            for component, name, unit, mag, readings, *counter in sensors:
                raw = node.create_group(f"{place}/{component}/nodes/{name}/raw_data")
                most = RANGE_UJ if unit == "J" else 1e9
                columns = [("timesteps", seconds[: len(readings)], "s", 1.0, 1e9)]
                columns.append(("values", readings, unit, mag, most))
                columns += [
                    ("alt_values", kept, "J", 1e-6, RANGE_UJ) for kept in counter
                ]
                for kind, data, its_unit, its_mag, valid_max in columns:
                    facts = {"unit": its_unit, "mag": its_mag, "valid_max": valid_max}
                    raw.create_dataset(kind, data=data).attrs.update(facts)
    return path


def counter_uJ(watts, start=RANGE_UJ - 500_000_000):
    """Counter of a constant power, which wraps around after some seconds."""
    return ((start + np.arange(21) * int(watts * 1e6)) % RANGE_UJ).astype("uint64")


def layout_0_8():
    """perun 0.8: counters as values."""
    return [
        ("cpu", "cpu_0_package-0", "J", 1e-6, counter_uJ(100)),
        ("cpu", "CPU_USAGE", "%", 1.0, np.zeros(21, "float32")),
        ("ram", "ram_0_dram", "J", 1e-6, counter_uJ(20)),
        ("gpu", "CUDA:0_POWER", "W", 1e-3, np.full(21, 250_000, "uint32")),
        ("gpu", "CUDA:0_MEM", "B", 1.0, np.zeros(21, "uint64")),
    ]


def damaged(path):
    """Write the file of a committed run with a byte by which HDF5 goes round in it for ever."""
    (whole,) = REPOSITORY.glob("runs/large-batch/*-bb7e6900/perun/energynn.hdf5")
    content = bytearray(whole.read_bytes())
    content[4105] = 202
    path.write_bytes(content)
