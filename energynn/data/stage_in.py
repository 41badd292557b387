"""Unpack a data set to a node's own storage; jobs do it by a line of shell from now on, and this goes."""

import subprocess
import sys
from pathlib import Path

FAILED = "stage-in: failed: "


def main(_parameters: str, archive: str, folder: str) -> int:
    """Unpack all of an archive; returns 1 where that fails."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    if subprocess.run(["tar", "-xf", archive, "-C", folder]).returncode:
        print(f"{FAILED}{archive} cannot be unpacked", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
