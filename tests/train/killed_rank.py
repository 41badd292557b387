"""rank_main.py that ends at a named point: the environment's DIES_AT, in the rank DYING_RANK."""

import os
import runpy
import signal
from pathlib import Path

from energynn.train.distributed import RankAgreement

LAST_STEP = 5  # of this start, which writes a checkpoint after every step
agree, fsync, replace = RankAgreement.__call__, os.fsync, os.replace
point = os.environ["DIES_AT"]
is_dying = os.environ.get("RANK", "0") == os.environ["DYING_RANK"]
steps = 0


def end(number=signal.SIGKILL):
    os.kill(os.getpid(), number)


def agree_or_end(self, checkpoint_is_due=False):
    """Every rank agrees after each of its steps, and within an evaluation, where no checkpoint
    is ever due.
    """
    global steps
    steps += checkpoint_is_due
    if is_dying and checkpoint_is_due and steps == LAST_STEP:
        if point == "killed after a step":
            end()
        if point == "asked to stop after a step":
            end(signal.SIGTERM)
    return agree(self, checkpoint_is_due)


def writes_the_last_checkpoint():
    return is_dying and steps == LAST_STEP - 1


def fsync_or_end(descriptor):
    path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    if (
        point == "killed with half a file"
        and writes_the_last_checkpoint()
        and ".pt." in path.name
    ):
        os.ftruncate(descriptor, path.stat().st_size // 2)
        end()
    fsync(descriptor)


def replace_or_end(source, target):
    replace(source, target)
    if not writes_the_last_checkpoint():
        return
    if point == "killed between weights and checksum" and Path(target).suffix == ".pt":
        end()
    if point == "killed after the checksum" and Path(target).suffix == ".sha256":
        end()


RankAgreement.__call__, RankAgreement.PERIOD_S = agree_or_end, 0.0
os.fsync, os.replace = fsync_or_end, replace_or_end
runpy.run_path(str(Path(__file__).with_name("rank_main.py")), run_name="__main__")
