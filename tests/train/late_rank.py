"""rank_main.py whose rank 1 comes late to the set-up: late_rank.py RUN_DIR CONFIGURATION DTYPE."""

import os
import runpy
import time
from pathlib import Path

from energynn.train import distributed

LATE_S = 8.0
same_data = distributed.require_same_data


def come_late(*arguments):
    if os.environ["RANK"] == "1":
        time.sleep(LATE_S)
    same_data(*arguments)


distributed.require_same_data = come_late
runpy.run_path(str(Path(__file__).with_name("rank_main.py")), run_name="__main__")
