"""rank_main.py on the imagined GPU, with the same arguments."""

import runpy
from pathlib import Path

import pytest

from tests.train.imagined_gpu import imagined

with imagined(pytest.MonkeyPatch()):
    runpy.run_path(str(Path(__file__).with_name("rank_main.py")), run_name="__main__")
