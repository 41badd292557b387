"""A powercap tree whose counter moves at constant power: a CPU whose true energy is known."""

import contextlib
import subprocess
import sys
import textwrap
from pathlib import Path

RANGE_UJ = 262143328850


def zone(folder: Path, name: str, range_uJ: int = RANGE_UJ, energy_uJ: int = 0) -> None:
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{range_uJ}\n")
    (folder / "energy_uj").write_text(f"{energy_uJ:012}\n")


@contextlib.contextmanager
def constant_power(powercap: Path, power_W: float, range_uJ: int = RANGE_UJ):
    """Make the tree with one package; within this its counter is moved, every 5 ms."""
    zone(powercap / "intel-rapl:0", "package-0", range_uJ)
    program = textwrap.dedent(f"""
        import os, time
        file = os.open({str(powercap / "intel-rapl:0/energy_uj")!r}, os.O_WRONLY)
        begun = time.monotonic()
        while True:
            value = int({power_W} * 1e6 * (time.monotonic() - begun)) % {range_uJ}
            os.pwrite(file, b"%012d\\n" % value, 0)
            time.sleep(0.005)
    """)
    with subprocess.Popen([sys.executable, "-c", program]) as writer:
        try:
            yield
        finally:
            writer.kill()
