"""A powercap tree whose counter moves at constant power: a CPU whose true energy is known."""

import subprocess
import sys
import textwrap
from pathlib import Path


def constant_power(
    powercap: Path, power_W: float, range_uJ: int = 262143328850
) -> subprocess.Popen:
    """Make the tree with one package; returns the process that moves its counter, every 5 ms,
    until it is killed.
    """
    zone = powercap / "intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "name").write_text("package-0\n")
    (zone / "max_energy_range_uj").write_text(f"{range_uJ}\n")
    (zone / "energy_uj").write_text("000000000000\n")
    program = textwrap.dedent(f"""
        import os, time
        file, begun = os.open({str(zone / "energy_uj")!r}, os.O_WRONLY), time.monotonic()
        while True:
            value = int({power_W} * 1e6 * (time.monotonic() - begun)) % {range_uJ}
            os.pwrite(file, b"%012d\\n" % value, 0)
            time.sleep(0.005)
    """)
    return subprocess.Popen([sys.executable, "-c", program])
