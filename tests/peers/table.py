"""Tables for docs/worth.md: zeus, CodeCarbon and energynn on one fake GPU pair of known truth."""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = {"Zeus": "zeus", "CodeCarbon": "codecarbon", "Energynn": "energynn"}
LENGTHS_S = (0.3, 1.0, 3.0, 10.0)
WINDOWS = 50
LIE_S = 8.0
AT_ONCE = 4  # processes; most of their time they sleep
OPEN = 0.05  # of an energy
LIES = {  # true: from half of the window on
    "counter stuck": True,
    "counter cannot be read": True,
    "counter falls to 0": True,
    "counter jumps by 10 kJ": True,
    "counter drips 1 W": True,
    "counter stops at 200 W": False,
    "counter in J": False,
    "counter in uJ": False,
    "counter 10 % low": False,
    "counter 30 % high": False,
    "counter 2 s late, of a load that begins": True,
    "power stuck, no counter": True,
    "power in whole watts stuck, no counter": True,
    "one of two GPUs": False,
}


def is_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in TOOLS.values())


def windows(length_s: float, count: int, lie: str = "none") -> list[dict]:
    """Measure windows in a process of their own; a lie may begin half-way in the first one."""
    places = [REPOSITORY / "tests/peers", REPOSITORY]
    program = [sys.executable, places[0] / "windows.py", str(length_s), str(count)]
    environment = {"PYTHONPATH": ":".join(map(str, places)), "FAKE_LIE": lie}
    with tempfile.TemporaryDirectory() as folder:
        if LIES.get(lie):
            environment["FAKE_LIE_FILE"] = f"{folder}/since"
        environment = os.environ | environment
        done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]


def of_tools(told: list[dict]) -> dict[str, list[dict]]:
    return {tool: [one for one in told if one["tool"] == tool] for tool in TOOLS}


def words(own: list[dict]) -> str:
    """What a tool makes of a lie; bold if it says nothing and is wrong."""
    if not own:
        return "not tried"
    one = own[0]
    if one["error"] is None:
        return "no number: " + one["doubt"].partition(":")[0]
    number = f"{one['error']:+.1%}".replace("%", " %")
    if one["doubt"]:
        return f"{number}, said: " + one["doubt"].partition(":")[0][:40]
    return f"**{number}**" if abs(one["error"]) > OPEN else number


def compare() -> dict[float, dict[str, list[float]]]:
    """Print both tables; returns the sizes of the errors by length and tool."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        honest = list(pool.map(windows, LENGTHS_S, [WINDOWS] * len(LENGTHS_S)))
        lying = list(pool.map(lambda lie: windows(LIE_S, 1, lie), LIES))
    errors = {
        length_s: {
            tool: [abs(one["error"]) for one in own]
            for tool, own in of_tools(told).items()
        }
        for length_s, told in zip(LENGTHS_S, honest, strict=True)
    }
    print("| window | " + " | ".join(TOOLS) + " |")
    for length_s, by_tool in errors.items():
        cells = [
            f"{statistics.median(own):.1%} ({max(own):.1%})" for own in by_tool.values()
        ]
        print(f"| {length_s:g} s | " + " | ".join(cells) + " |")
    print("| lie | " + " | ".join(TOOLS) + " |")
    for lie, told in zip(LIES, lying, strict=True):
        cells = [words(own) for own in of_tools(told).values()]
        print(f"| {lie} | " + " | ".join(cells) + " |")
    print(f"{time.strftime('%d %B %Y')}, load {os.getloadavg()[1]:.1f}")
    return errors
