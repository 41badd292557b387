"""What starts in place of train/__main__.py: a rank whose trainer ends in an unplanned way after
some steps.
"""

import os
import sys

import torch

from energynn.host import launchers

launchers.buffer_output_by_line()

from energynn.train import rank  # noqa: E402
from energynn.train.phases import TrainingProgress  # noqa: E402

original, how = TrainingProgress.step, os.environ["HOW_IT_ENDS"]


def step(
    self,
    epoch,
    index,
    loss,
    original=original,
    how=how,
    sys=sys,
    torch=torch,
    launchers=launchers,
):
    rank, _ = launchers.rank_and_size()
    print("rank", rank, "in step", index, "of epoch", epoch)
    if rank == 0 and epoch == 4:
        if how == "exit":
            sys.exit(0)
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has 39.39 GiB"
        )
    original(self, epoch, index, loss)


TrainingProgress.step = step
rank.run_rank(sys.argv[1])
